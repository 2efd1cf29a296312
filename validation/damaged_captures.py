"""Read damaged captures under AddressSanitizer and UndefinedBehaviorSanitizer.

python -m validation.damaged_captures [COUNT] [plain]

A small program of C++ (damaged_captures.cpp) links the reader itself. It damages captures of every
format and reads each in pieces of random size. Two threads read some of them also as a file. The
program checks the results. With `plain` it is built without sanitizers. It needs g++.
"""

from __future__ import annotations

import os
import struct
import subprocess
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests import native_programs
from tests import packets as p
from tests.native_programs import NATIVE
from validation import arguments, results

_HERE = Path(__file__).parent
_READER = [
    NATIVE / "packets" / f"{name}.cpp"
    for name in ("packets", "packet_headers", "capture_file", "gloo_messages", "stream")
]
SANITIZED = ["-O2", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The number of damaged captures, and how many were read whole and how many in part."""

    captures: int
    whole: int
    partial: int
    most_memory_kib: int


def seeds() -> list[bytes]:
    """Return sound captures of every format, with all kinds of content."""
    stamps = b"\x01\x01\x08\x0a" + bytes(8)
    mss = b"\x02\x04\x05\xb4"
    segment = p.ip(p.tcp(1, 100))
    segment6 = p.ip(p.tcp(2**32 - 50, 100), "fe80::1", "fe80::2")
    frames = [
        p.segment(0, 0, flags=p.SYN, options=mss),
        p.segment(1, 100),
        p.segment(201, 50),
        p.segment(101, 100),
        p.segment(301, 40_000, options=stamps),
        p.answer(40_301),
        p.ethernet(segment6, vlans=2),
        p.vxlan(p.ethernet(segment)),
        p.segment(5, 0, flags=p.RST),
        p.geneve(p.ethernet(segment), options=bytes(8)),
        p.geneve(segment6, 0x86DD),
        p.tunnel(segment, 4),
        p.tunnel(segment6, 41),
        p.gre(segment, 0x0800, flags=0xB000, more=bytes(12)),
        p.gre(p.ethernet(segment), 0x88BE, flags=0x1000, more=bytes(12)),
        p.gre(p.ethernet(segment), 0x22EB, flags=0x1000, more=bytes(15) + b"\1" + bytes(8)),
        p.ethernet(p.ip(p.udp(bytes(300)), protocol=17)),
        *(p.ethernet(p.ip(p.roce(psn, 64), protocol=17)) for psn in (2**24 - 1, 1, 0)),
        p.ethernet(p.ip(p.tcp(1, 100), claimed=0)),
        *map(p.ethernet, p.fragments(p.ip(p.tcp(401, 90)), 48)),
        *map(p.ethernet, p.fragments(p.ip(p.udp(bytes(90)), "::1", "::2", protocol=17), 48)),
    ]
    packets = [(10**18 + number * 10**6, frame) for number, frame in enumerate(frames)]
    other = p.section(">") + p.interface(113, resolution=6, order=">")
    other += p.enhanced(10**15, p.cooked(segment), order=">")
    statistics = p.block(5, struct.pack("<III", 0, 0, 0) + p.option(5, struct.pack("<Q", 17)))
    return [
        p.pcap(packets, snap=600),
        p.pcap(packets, order=">", nano=False, snap=96),
        p.pcap(packets, snap=60),
        p.pcap([(1, p.cooked(segment)), (2, p.cooked(segment6))], link=113),
        p.pcap([(1, p.cooked2(segment)), (2, p.cooked2(segment6))], link=276),
        p.pcap([(1, segment), (2, segment6)], link=101),
        p.pcap([(1, b"\x02\0\0\0" + segment)], link=0),
        p.pcapng(packets[5:]),
        p.pcapng(packets[5:], order=">"),
        p.pcapng(packets[:4]) + statistics + p.block(0xABC, bytes(500)) + other,
        p.section()
        + p.interface(resolution=0x80 | 30)
        + p.interface(101, resolution=3)
        + p.enhanced(10**12, segment, number=1)
        + p.enhanced(1 << 60, frames[1]),
        b"",
        bytes(64),
    ]


def build(folder: Path, flags: Sequence[str] = SANITIZED) -> Path:
    """Build the program, with sanitizers unless told otherwise."""
    program = folder / "damaged_captures"
    native_programs.build(program, [_HERE / "damaged_captures.cpp", *_READER], *flags)
    return program


def read_damaged(program: Path, count: int, first: int = 0) -> Outcome:
    """Read `count` damaged captures, from the first number on; raise an error if one fails."""
    environment = os.environ | {"ASAN_OPTIONS": "quarantine_size_mb=16"}  # otherwise it keeps 256
    with tempfile.NamedTemporaryFile() as file:
        for seed in seeds():
            file.write(struct.pack("<I", len(seed)) + seed)
        file.flush()
        command = [str(program), file.name, str(count), str(first)]
        done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(f"status {done.returncode}: {done.stderr}")
    return Outcome(*map(int, done.stdout.split()))


def main() -> None:
    """Read damaged captures on all processors, and print the results."""
    taken = arguments.parser(__doc__)
    taken.add_argument("count", type=int, nargs="?", default=1_000_000)
    taken.add_argument("how", nargs="?", choices=["plain"])
    given = taken.parse_args()
    count, flags = given.count, ["-O2"] if given.how else SANITIZED
    processors = len(os.sched_getaffinity(0))
    share = -(-count // processors)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(processors) as beside:
        program = build(Path(folder), flags)
        began_s = time.monotonic()
        firsts = range(0, count, share)
        outcomes = list(beside.map(lambda first: read_damaged(program, share, first), firsts))
    total = sum(each.captures for each in outcomes)
    whole, partial = (
        sum(getattr(each, name) for each in outcomes) for name in ("whole", "partial")
    )
    if not given.how:
        results.renew(
            "damaged-captures",
            summary=f"no failure; {whole:,} read whole, {partial:,} in part, "
            f"{total - whole - partial:,} refused",
            cases=total,
        )
    memory_mib = max(each.most_memory_kib for each in outcomes) / 1024
    print(f"{total:,} damaged captures, no failure: {whole:,} read whole, {partial:,} in part,")
    print(
        f"{total - whole - partial:,} refused; most memory {memory_mib:.0f} MiB, "
        f"{time.monotonic() - began_s:.0f} s"
    )


if __name__ == "__main__":
    main()
