"""Other work on the processors of a job: what it may do to every answer."""

from __future__ import annotations

from collections.abc import Iterator

from fullwire.findings.finding import Finding
from fullwire.run.run import Run
from fullwire.simulation.calibrate import share_of_others

_MUCH_BESIDE = 0.15  # of the processors, in other work: samples and clocks agree to a tenth


class OtherWork(Finding):
    """Other programs used the processors on which a run was recorded."""

    template = (
        "Other work took {share:.0%} of the processors meanwhile: without it steps may be shorter, "
        "and intervals are as much wider."
    )

    share: float


def about_others(run: Run) -> Iterator[Finding]:
    """Say it where other work used the processors on which a run was recorded."""
    share = share_of_others(run)
    if share >= _MUCH_BESIDE:
        yield OtherWork(share=share)
