"""All-reduce by our transport and by others, in turns: `fullwire bench transport`.

description   who takes part and what they are asked for, and what came of it
rank          one rank of it, in a lab and under torchrun alike, with all that torch runs
mpi_turns     OpenMPI beside the rank: mpi_program is what mpirun runs
iperf         what iperf3 moves both ways, for comparison

outcome = contest_in_lab(Contest(rate_bps=10e9, against=("gloo",)), workers=2)
"""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec

from fullwire.errors import FullwireError, UsageError
from fullwire.lab.description import describe
from fullwire.lab.emulated import available_bytes
from fullwire.lab.lab import Lab
from fullwire.lab.session import run_job
from fullwire.studies.contest.description import Contest, Outcome, check_workers
from fullwire.units import show_bytes

_RANK_BYTES = 400_000_000  # Python with torch
_BUFFERS = 3  # the rank's own, and what those who take part keep beside it


def contest_in_lab(
    contest: Contest, workers: int, introduce: Callable[[Lab], None] = lambda lab: None
) -> Outcome:
    """Hold a contest between hosts of a lab that is made for it."""
    check_workers(workers)
    check_torch()
    needed = workers * (_RANK_BYTES + _BUFFERS * max(contest.sizes_bytes))
    available = available_bytes()
    if needed > available:
        raise UsageError(
            f"bench transport: {workers} workers with {show_bytes(max(contest.sizes_bytes))} need "
            f"some {show_bytes(needed)} of memory, and {show_bytes(available)} are available here: "
            "name smaller --sizes"
        )
    description = describe(workers=workers, rate=[f"{contest.rate_bps}bps"])
    with tempfile.TemporaryDirectory(prefix="fullwire-") as place, Lab(description) as lab:
        introduce(lab)
        asked, outcome = Path(place, "contest.json"), Path(place, "outcome.json")
        asked.write_bytes(msgspec.json.encode(contest))
        module = "fullwire.studies.contest.rank"
        status = run_job(lab, [sys.executable, "-m", module, str(asked), str(outcome)])
        if status != 0 or not outcome.exists():
            raise FullwireError(
                f"bench transport: a rank ended with exit status {status} and no result; "
                "what it said stands above"
            )
        return msgspec.json.decode(outcome.read_bytes(), type=Outcome)


def check_torch() -> None:
    """Refuse a Python in which nothing can take part."""
    if importlib.util.find_spec("torch") is None:
        raise UsageError(
            "bench transport: expected PyTorch in the environment of fullwire, there is none: "
            "pip install torch"
        )
