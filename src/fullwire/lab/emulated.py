"""Emulated accelerators on a lab: does this machine have what they need, and the command to run."""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from fullwire.errors import UsageError
from fullwire.model.emulation import Emulation
from fullwire.units import show_bytes

_CONTROL_GROUP = Path("/sys/fs/cgroup")


def check_possible(emulation: Emulation, workers: int) -> None:
    """Refuse what does not fit into memory, and a Python without torch."""
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
    """Give the command that each host is to run, for as long as it may be needed."""
    with tempfile.NamedTemporaryFile(prefix="fullwire-", suffix=".json") as file:
        file.write(msgspec.json.encode(emulation))
        file.flush()
        yield [sys.executable, "-m", "fullwire.lab.trainer", file.name]


def available_bytes() -> int:
    """Return the memory that new processes may take: the machine's, or less in a container."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    kibibytes = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    try:
        limit = int((_CONTROL_GROUP / "memory.max").read_text())
        taken = int((_CONTROL_GROUP / "memory.current").read_text())
    except (OSError, ValueError):  # no such group here, or its limit is "max"
        return 1024 * kibibytes
    return min(1024 * kibibytes, limit - taken)
