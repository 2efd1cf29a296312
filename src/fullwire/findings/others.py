"""The finding about other programs on the processors of a job, which affect every answer."""

from __future__ import annotations

from collections.abc import Iterator

from fullwire.findings.finding import Finding
from fullwire.run.run import Run
from fullwire.simulation.calibrate import MUCH_BESIDE, share_of_others


class OtherWork(Finding):
    """Other programs used the processors on which a run was recorded."""

    template = (
        "Other work took {share:.0%} of the processors meanwhile: without it steps may be shorter, "
        "and intervals are as much wider."
    )

    share: float


def about_others(run: Run) -> Iterator[Finding]:
    """Yield the share of other programs, where they used much of the processors of a run."""
    share = share_of_others(run)
    if share >= MUCH_BESIDE:
        yield OtherWork(share=share)
