"""How many packets a second does `fullwire flows` read? A whole process, repeated.

    .venv/bin/python benchmarks/packets.py [MILLIONS] [RUNS]

The capture is made up: eight hosts in a ring, data and acknowledgements taking turns packet by
packet, which is the worst for a cache of flows; 96 bytes of each.
"""

from __future__ import annotations

import os
import statistics
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

HOSTS = 8
RECORD = np.dtype(
    [
        ("s", "<u4"), ("ns", "<u4"), ("captured", "<u4"), ("length", "<u4"), ("macs", "V12"),
        ("type", ">u2"), ("version", "u1"), ("tos", "u1"), ("total", ">u2"), ("id", "V4"),
        ("ttl", "u1"), ("protocol", "u1"), ("sum", "V2"), ("source", ">u4"), ("target", ">u4"),
        ("ports", ">u4"), ("sequence", ">u4"), ("ack", ">u4"), ("offset", "u1"), ("flags", "u1"),
        ("rest", "V48"),
    ]
)  # fmt: skip


def write_capture(path: Path, packets: int) -> None:
    """Write a capture of so many packets."""
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
    path.write_bytes(struct.pack("<IHHiIII", 0xA1B23C4D, 2, 4, 0, 0, 96, 1) + table.tobytes())


def main() -> None:
    """Measure whole processes, and print medians."""
    packets = round(float(sys.argv[1]) * 1e6) if len(sys.argv) > 1 else 5_600_000
    runs = int(sys.argv[2]) if len(sys.argv) > 2 else 5
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.pcap"
        # In a process of its own: a child begins with the memory of the one that starts it.
        writer = f"from benchmarks.packets import *; write_capture(Path({str(path)!r}), {packets})"
        subprocess.run([sys.executable, "-c", writer], check=True)
        command = [sys.executable, "-m", "fullwire.cli", "flows", str(path), "--json"]
        wall, cpu, memory = [], [], 0
        for _ in range(runs):
            began_s = os.times().elapsed
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
            _, status, usage = os.wait4(process.pid, 0)
            if status:
                raise SystemExit("fullwire flows failed")
            wall.append(os.times().elapsed - began_s)
            cpu.append(usage.ru_utime + usage.ru_stime)
            memory = max(memory, usage.ru_maxrss)
        process.returncode = 0
    print(f"{packets:,} packets, {runs} runs of the whole process")
    print(
        f"  wall {statistics.median(wall):.2f} s, {packets / statistics.median(wall) / 1e6:.1f} M/s"
    )
    print(
        f"  CPU  {statistics.median(cpu):.2f} s, {packets / statistics.median(cpu) / 1e6:.1f} M/s"
    )
    print(f"  most memory {memory / 1024:.0f} MB")


if __name__ == "__main__":
    main()
