"""The fix "fewer threads that compute": a processor stays free for communication."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from fullwire.errors import UsageError
from fullwire.fixes.fix import FixKind, Process, Seen, Worthwhile, register, worthwhile
from fullwire.units import shown

if TYPE_CHECKING:
    from fullwire.run.run import Run
    from fullwire.simulation.forecast import Forecaster
    from fullwire.timeline.account import Account

_MOST = 1024


@register
class Threads(FixKind):
    """Compute with another number of threads. A trial measures it: no run predicts it."""

    key = "threads"
    label = "other threads"
    addresses = ("contention", "compute")
    example = "1"
    setting = "the computing threads of each rank; sums may have another order"

    def to_try(
        self, run: Run, account: Account, seen: Seen, job: Forecaster | None
    ) -> Iterator[Worthwhile]:
        """Yield the processors of each rank, where its threads are more or fewer."""
        from fullwire.timeline.account import Part

        # The hosts of a lab share the processors of one machine.
        on_machine = (run.facts.workers or 1) // (run.facts.machines or 1)
        fair = max(1, seen.processors // max(1, seen.local_ranks, on_machine))
        if not seen.threads or seen.threads == fair:
            return
        parts_s = account.parts_s
        if seen.threads > fair:
            # Threads beyond the processors wait for a processor. Their work stays the same.
            most_s = parts_s[Part.CONTENTION.key] + parts_s[Part.STRAGGLER.key]
        else:
            most_s = parts_s[Part.COMPUTE.key] * (1 - seen.threads / fair)
        words = f"{fair} in place of {seen.threads} computing threads a rank"
        yield from worthwhile(self, str(fair), words, account, 0.0, most_s)

    def by_hand(self, setting: str) -> str:
        """Return the call."""
        return f"torch.set_num_threads({setting})"

    def checked(self, setting: str) -> str:
        """Take a number of threads."""
        if not (setting.isascii() and setting.isdigit() and 0 < int(setting) <= _MOST):
            raise UsageError(f"fix threads: expected 1 to {_MOST} threads, got {shown(setting)}")
        return str(int(setting))

    def environment(self, setting: str) -> Mapping[str, str]:
        """Return the variables that libraries read at their start."""
        return {"OMP_NUM_THREADS": setting, "MKL_NUM_THREADS": setting}

    def apply(self, setting: str, process: Process) -> None:
        """Set the threads, also where the job sets others later."""
        import torch

        torch.set_num_threads(int(setting))
        if multiprocessing.parent_process() is None:  # A loading process sets one thread itself.
            torch.set_num_threads = lambda number: None
        process.did(f"applied: torch.set_num_threads({setting})")
