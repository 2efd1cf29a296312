"""How many packets a second does `fullwire flows` read, and other tools beside it?

    .venv/bin/python benchmarks/packets.py [MILLIONS] [RUNS] [CAPTURE.pcap]

Each is a whole process. With a capture, its connections are repeated up to MILLIONS of packets,
each time with later times and sequence numbers. Otherwise the capture is made up: eight hosts in a
ring, data and acknowledgements taking turns packet by packet, 96 bytes of each. The tools are
tshark, tcptrace, nfpcapd and a plain program of C over libpcap, if they are installed. For a
made-up capture tshark takes too long, because it searches for the acknowledged data, which is
missing there. With half a million packets it had not finished after four minutes.
"""

from __future__ import annotations

import os
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

HOSTS = 8
RECORD = np.dtype(
    [
        ("s", "<u4"),
        ("ns", "<u4"),
        ("captured", "<u4"),
        ("length", "<u4"),
        ("macs", "V12"),
        ("type", ">u2"),
        ("version", "u1"),
        ("tos", "u1"),
        ("total", ">u2"),
        ("id", "V4"),
        ("ttl", "u1"),
        ("protocol", "u1"),
        ("sum", "V2"),
        ("source", ">u4"),
        ("target", ">u4"),
        ("ports", ">u4"),
        ("sequence", ">u4"),
        ("ack", ">u4"),
        ("offset", "u1"),
        ("flags", "u1"),
        ("rest", "V48"),
    ]
)
NANO = 0xA1B23C4D
FILE_HEADER = struct.pack("<IHHiIII", NANO, 2, 4, 0, 0, 96, 1)
SLOW = ("tshark",)  # measured once: it takes minutes
HERE = Path(__file__).parent


def write_capture(path: Path, packets: int) -> None:
    """Write a made-up capture with this number of packets."""
    number = np.arange(packets)
    host = number % HOSTS
    payload = np.where(number // HOSTS % 3 < 2, 1448, 0)
    time_ns = number * 2_000 + number // 5_000 * 5_000_000  # silence between iterations
    table = np.zeros(packets, RECORD)
    table["s"], table["ns"] = 1_700_000_000 + time_ns // 10**9, time_ns % 10**9
    table["captured"], table["length"] = 96, 66 + payload
    table["type"], table["version"], table["total"] = 0x800, 0x45, 52 + payload
    table["protocol"], table["offset"], table["flags"] = 6, 0x80, 16
    table["source"], table["target"] = 0x0A000001 + host, 0x0A000001 + (host + 1) % HOSTS
    for each in range(HOSTS):
        chosen = host == each
        table["sequence"][chosen] = np.cumsum(payload[chosen]) - payload[chosen]
    path.write_bytes(FILE_HEADER + table.tobytes())


def write_repeated(path: Path, packets: int, original: Path) -> None:
    """Repeat the packets of a capture's connections after they were open."""
    records = list(connected_records(original.read_bytes()))
    begins = np.cumsum([0, *(len(record) for record in records)])[:-1]
    template = np.frombuffer(b"".join(records), np.uint8)
    seconds, ns, sequence, acknowledged = (
        word_at(template, begins + place, order)
        for place, order in ((0, "<"), (4, "<"), (54, ">"), (58, ">"))
    )
    time_ns = seconds * 10**9 + ns
    period_ns = int(time_ns.max() - time_ns.min()) + 1_000_000
    sent, back = advances(template, begins, sequence)
    with path.open("wb") as file:
        file.write(FILE_HEADER)
        for turn in range(-(-packets // len(records))):
            content, later_ns = template.copy(), time_ns + turn * period_ns
            put_word(content, begins, later_ns // 10**9, "<")
            put_word(content, begins + 4, later_ns % 10**9, "<")
            put_word(content, begins + 54, sequence + turn * sent, ">")
            put_word(content, begins + 58, acknowledged + turn * back, ">")
            left = packets - turn * len(records)
            file.write(content[: begins[left] if left < len(records) else None].tobytes())


def connected_records(content: bytes) -> Iterator[bytes]:
    """Yield the records of TCP over IPv4, except those that open or close a connection."""
    if struct.unpack_from("<I", content)[0] != NANO:
        raise SystemExit("expected a pcap of this byte order with nanoseconds")
    at = 24
    while at < len(content):
        end = at + 16 + struct.unpack_from("<I", content, at + 8)[0]
        frame = content[at + 16 : end]
        is_tcp = frame[12:14] == b"\x08\x00" and frame[14] == 0x45 and frame[23] == 6
        if is_tcp and not frame[47] & 7:  # FIN, SYN, RST
            yield content[at:end]
        at = end


def advances(
    template: np.ndarray, begins: np.ndarray, sequence: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return, for each record, how far its direction and the other one advance in one turn."""
    ends = template[begins[:, None] + np.arange(42, 54)].tobytes()  # addresses and ports
    keys = [ends[at : at + 12] for at in range(0, len(ends), 12)]
    other = {key: key[4:8] + key[:4] + key[10:] + key[8:10] for key in set(keys)}
    payload = word_at(template, begins + 12, "<") - 14 - 20 - (template[begins + 62] >> 4) * 4
    came: dict[bytes, int] = dict.fromkeys(keys, 0)
    for key in came:
        own = np.array([each == key for each in keys])
        came[key] = int((sequence[own] + payload[own]).max() - sequence[own].min())
    return (
        np.array([came[key] for key in keys]),
        np.array([came.get(other[key], 0) for key in keys]),
    )


def word_at(content: np.ndarray, places: np.ndarray, order: str) -> np.ndarray:
    words = content[places[:, None] + np.arange(4)]
    return words.copy().view(f"{order}u4").ravel().astype(np.int64)


def put_word(content: np.ndarray, places: np.ndarray, words: np.ndarray, order: str) -> None:
    octets = (words % 2**32).astype(f"{order}u4").view(np.uint8).reshape(-1, 4)
    content[places[:, None] + np.arange(4)] = octets


def contestants(capture: Path, folder: Path) -> dict[str, list[str]]:
    """Return the commands that read the capture: Fullwire's, and those of installed tools."""
    commands = {"fullwire flows": [sys.executable, "-m", "fullwire", "flows", str(capture)]}
    if shutil.which("gcc"):
        program = folder / "packet_peer"
        build = ["gcc", "-O3", "-o", str(program), str(HERE / "packet_peer.c"), "-lpcap"]
        if subprocess.run(build, check=False, capture_output=True).returncode == 0:
            commands["C with libpcap"] = [str(program), str(capture)]
    for name, command in {
        "nfpcapd": ["nfpcapd", "-r", str(capture), "-w", str(folder / "flows")],
        "tcptrace": ["tcptrace", str(capture)],
        "tshark": ["tshark", "-q", "-n", "-r", str(capture), "-z", "conv,tcp"],
    }.items():
        if shutil.which(name):
            commands[name] = command
    (folder / "flows").mkdir()
    return commands


def measured(command: list[str], folder: Path) -> tuple[float, float, int]:
    """Run a command; return its wall time and processor time in seconds, and its memory."""
    began_s = os.times().elapsed
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=folder
    )
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = 0
    if status:
        raise SystemExit(f"{command[0]} failed")
    return os.times().elapsed - began_s, usage.ru_utime + usage.ru_stime, usage.ru_maxrss


def main() -> None:
    """Measure all in turns, and print medians."""
    packets = round(float(sys.argv[1]) * 1e6) if len(sys.argv) > 1 else 5_600_000
    runs = int(sys.argv[2]) if len(sys.argv) > 2 else 3
    original = f", Path({str(Path(sys.argv[3]).resolve())!r})" if len(sys.argv) > 3 else ""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = folder / "x.pcap"
        # In a process of its own, because a child begins with the memory of its parent.
        writer = f"write_{'repeated' if original else 'capture'}(Path({str(path)!r}), {packets}"
        program = f"from benchmarks.packets import *; {writer}{original})"
        subprocess.run([sys.executable, "-c", program], check=True)
        commands = contestants(path, folder)
        taken: dict[str, list[tuple[float, float, int]]] = {tool: [] for tool in commands}
        for turn in range(runs):
            for tool, command in commands.items():
                if turn == 0 or tool not in SLOW:
                    taken[tool].append(measured(command, folder))
        size_mb = path.stat().st_size / 1e6
    print(
        f"{packets:,} packets, {size_mb:.0f} MB, {len(os.sched_getaffinity(0))} processors, "
        f"load {os.getloadavg()[0]:.1f}; medians of {runs} whole processes"
    )
    print("tool              wall      Mpkt/s   processors  Mpkt/s  most memory")
    for tool in commands:
        wall_s, cpu_s, _ = map(statistics.median, zip(*taken[tool], strict=True))
        print(
            f"{tool:16}  {wall_s:6.2f} s  {packets / wall_s / 1e6:6.2f}   {cpu_s:6.2f} s   "
            f"{packets / cpu_s / 1e6:6.2f}  {max(each[2] for each in taken[tool]) / 1024:6.0f} MB"
        )


if __name__ == "__main__":
    main()
