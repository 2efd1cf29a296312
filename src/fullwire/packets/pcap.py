"""Open, unpack and read packet captures side by side (pcap and pcapng, plain or packed).

The native core reads packets as bytes come. It reads large plain captures with several threads.
The module flow_table.py joins the captures. It is imported while they are read: importing numpy
takes as long as reading three million packets.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING

from fullwire._native import PacketScan
from fullwire.errors import DamagedInput, UsageError
from fullwire.files import opened
from fullwire.packed import BROKEN, XZ, unpacker

if TYPE_CHECKING:
    from fullwire.packets.flow_table import Scanned
    from fullwire.run.run import Run

_PIECE_BYTES = 1 << 18  # Unpacked at once.
_ENOUGH_BYTES = 1 << 28  # Read at once, in a tenth of a second.
_MOST_EXPANSION = 2_000  # Real captures shrink by a factor of 10 to 50, a bomb by a million.
_BOMB_BYTES = 1 << 30  # Fewer bytes do no harm.
_MOST_CAPTURES = 10_000


def read_captures(paths: Sequence[Path], hosts: Sequence[str] = ()) -> Run:
    """Read captures of one job, made at one place or several, as the flows of a run.

    `hosts` are the names of the hosts that captured, if they are known.
    """
    if not 0 < len(paths) <= _MOST_CAPTURES:
        raise UsageError(f"flows: expected 1 to {_MOST_CAPTURES} captures, got {len(paths)}")
    if len({os.path.realpath(path) for path in paths}) < len(paths):
        raise UsageError("flows: the same capture is given twice")
    processors = len(os.sched_getaffinity(0))
    threads = -(-processors // len(paths))  # for each capture: a large one is read by several
    is_over = Event()
    with ThreadPoolExecutor(min(len(paths), processors)) as side_by_side:
        reading = [side_by_side.submit(_scanned, path, threads, is_over) for path in paths]
        from fullwire.packets.flow_table import run_of  # imported while the captures are read

        try:
            return run_of([capture.result() for capture in reading], hosts)
        finally:  # after Ctrl-C or a bad capture, the other readers stop early
            is_over.set()


def _scanned(path: Path, threads: int, is_over: Event) -> Scanned:
    """Scan a capture to its end, or as far as it can be read."""
    scan, problem, unpacked = PacketScan(), "", 0
    with opened(path) as file:
        unpack = unpacker(os.pread(file.fileno(), len(XZ), 0))
        if unpack is None:
            while scan.read(file.fileno(), threads, _ENOUGH_BYTES) and not is_over.is_set():
                pass
        else:
            try:
                with unpack(file) as stream:
                    # read1 returns the bytes at hand, so a cut file gives all bytes before the cut.
                    while piece := stream.read1(_PIECE_BYTES):
                        if scan.damage() or is_over.is_set():
                            break
                        unpacked += len(piece)
                        if unpacked > max(_BOMB_BYTES, _MOST_EXPANSION * file.tell()):
                            raise DamagedInput(
                                path, f"it unpacks to more than {_MOST_EXPANSION} times its size"
                            )
                        scan.feed(piece)
            except BROKEN as error:
                problem = f"it cannot be unpacked to its end: {error}"
    scan.finish()
    problem = problem or scan.damage()
    if problem and not scan.counts()["packets"]:
        raise DamagedInput(path, problem)
    return path, scan, problem
