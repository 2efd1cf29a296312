"""Emulated accelerators on a lab: does this machine have what they need, and the command to run."""

from __future__ import annotations

import fcntl
import importlib.util
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from fullwire.errors import UsageError
from fullwire.run.emulation import Emulation
from fullwire.units import show_bytes

_PREFIX, _SUFFIX = "fullwire-emulation-", ".json"
_TIME_TO_LOCK_S = 60.0  # a file younger than this may not be locked yet


def check_possible(emulation: Emulation, workers: int) -> None:
    """Refuse an emulation larger than the memory, and a Python that lacks torch."""
    needed, available = workers * emulation.memory_bytes, available_bytes()
    if needed > available:
        raise UsageError(
            f"{emulation.name}: {workers} workers with {show_bytes(sum(emulation.gradient_bytes))} "
            f"of gradients need some {show_bytes(needed)} of memory (three times the gradients and "
            f"PyTorch itself for each), and {show_bytes(available)} are available here"
        )
    if importlib.util.find_spec("torch") is None:
        raise UsageError(
            "--workload trains with PyTorch, which Fullwire's own Python has not: "
            "pip install torch, beside Fullwire"
        )


@contextmanager
def trainer_command(emulation: Emulation) -> Iterator[list[str]]:
    """Yield the command for each host; its file exists until the block ends."""
    _remove_orphans()
    with tempfile.NamedTemporaryFile(prefix=_PREFIX, suffix=_SUFFIX) as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # held until the file is removed or we are killed
        file.write(msgspec.json.encode(emulation))
        file.flush()
        yield [sys.executable, "-m", "fullwire.lab.trainer", file.name]


def _remove_orphans() -> None:
    """Remove the files of killed processes; a living process holds a lock on its file."""
    for orphan in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*{_SUFFIX}"):
        with suppress(OSError), orphan.open("rb") as file:  # locked, of another user, or gone
            if time.time() - os.fstat(file.fileno()).st_mtime < _TIME_TO_LOCK_S:
                continue
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            orphan.unlink()


def available_bytes(root: Path = Path("/")) -> int:
    """Return the memory for new processes: the machine's, or less where a control group has less.

    A limit of a group holds for the groups within it too. `root` is where /proc and /sys are.
    """
    lines = (root / "proc/meminfo").read_text().splitlines()
    kibibytes = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    available = 1024 * kibibytes
    groups = root / "sys/fs/cgroup"
    with suppress(OSError):  # a kernel without control groups
        groups /= (root / "proc/self/cgroup").read_text().rpartition("::")[2].strip().strip("/")
    while root / "sys/fs" in groups.parents:
        with suppress(OSError, ValueError):  # no such group here, or its limit is "max"
            limit = int((groups / "memory.max").read_text())
            available = min(available, limit - int((groups / "memory.current").read_text()))
        groups = groups.parent
    return max(available, 0)
