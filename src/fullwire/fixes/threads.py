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
# OpenMP's threads wait busily while each could have a processor. So they take it from other ranks'
# threads that work. Ten jobs had two threads a rank on two processors. With one, their steps took
# 0.23 to 0.63 of the time: it saved 0.68 to 1.31 of the times of contention and late ranks. Six of
# them chose these figures. The other four were predicted 10 to 81 % off, and 15 to 209 % before.
# Threads beyond the processors sleep. Fewer of them saved 0.06 to 0.78 of these times.
_SAVED_IF_BUSY, _MOST_IF_BUSY, _OF_STEP_IF_BUSY = 1.25, 1.4, 0.61


@register
class Threads(FixKind):
    """Compute with another number of threads. A trial measures it: no run predicts it."""

    key = "threads"
    label = "other threads"
    addresses = ("contention", "compute")
    variables_suffice = True
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
        usual_s = None
        if seen.threads > fair:
            most_s = parts_s[Part.CONTENTION.key] + parts_s[Part.STRAGGLER.key]
        else:
            most_s = parts_s[Part.COMPUTE.key] * (1 - seen.threads / fair)
        if fair < seen.threads <= seen.processors:
            usual_s = min(_SAVED_IF_BUSY * most_s, _OF_STEP_IF_BUSY * account.step_s)
            most_s *= _MOST_IF_BUSY
        words = f"{fair} in place of {seen.threads} computing threads a rank"
        yield from worthwhile(self, str(fair), words, account, 0.0, most_s, usual_s)

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
