"""Anything becomes a Run: `read` looks at a path and picks the reader."""

from __future__ import annotations

from pathlib import Path

from fullwire.errors import DamagedInput, UsageError
from fullwire.model import workloads
from fullwire.model.run import Run
from fullwire.sources import netx
from fullwire.sources.modelled import modelled_run
from fullwire.units import seconds

FORMATS = ("run", "workload", "netx")


def read(
    path: str | Path,
    *,
    format: str | None = None,
    step_time: str | float | None = None,
    reduce_cost: str | Path | None = None,
) -> Run:
    """Open a run, a foreign trace, or a built-in workload such as `vgg16@v100`.

    `step_time` and `reduce_cost` (a file) belong to netx logs, which do not hold them.
    """
    kind = format or _recognised(path)
    if kind not in FORMATS:
        raise UsageError(f"format: expected one of {', '.join(FORMATS)}, got {kind!r}")
    if kind == "netx":
        step_time_s = None if step_time is None else seconds(step_time, "step time")
        table = None if reduce_cost is None else Path(reduce_cost)
        return netx.read_netx(Path(path), step_time_s=step_time_s, reduce_cost=table)
    if step_time is not None or reduce_cost is not None:
        raise UsageError(
            f"{path}: --step-time and --reduce-cost belong to netx logs, not to a {kind}"
        )
    if kind == "workload":
        return modelled_run(workloads.workload(str(path)))
    from fullwire.store import read_run  # here, because Parquet takes a moment to load

    return read_run(path)


def _recognised(path: str | Path) -> str:
    place = Path(path)
    if place.is_dir():
        return "run"
    if not place.exists():
        if "@" in str(path):
            return "workload"
        raise UsageError(f"{path}: there is no such file, and no built-in workload of this name")
    return _by_beginning(place)


def _by_beginning(path: Path) -> str:
    try:
        with path.open("rb") as file:
            beginning = file.read(4096)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None
    if netx.looks_like(beginning):
        return "netx"
    if not beginning:
        raise DamagedInput(path, "the file is empty")
    raise DamagedInput(path, "none of the formats that are read: a run, or a netx backward log")
