"""Verdict, account, break-even and advice of a run agree, for every run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fullwire as fw
from fullwire.answers.explain import OF_ONE, Explanation
from fullwire.errors import FullwireError
from fullwire.findings.case import THRESHOLD
from fullwire.findings.finding import Amount
from fullwire.findings.scaling import WaitingAloneCosts
from fullwire.fixes import Fix, fix_kinds
from fullwire.fixes.fix import who_takes_processors
from fullwire.run.run import Run
from fullwire.timeline.account import Part
from fullwire.words import sentence, setting
from tests.jobs_by_hand import Rank as RankByHand
from tests.jobs_by_hand import a_job, a_trained_job
from tests.trained_jobs import a_trained_job as a_predicted_job
from tests.trained_jobs import a_transport
from tests.unit.test_explain import JOBS

DATA = Path(__file__).parents[1] / "data"
# Verdicts whose loss, if they name one, is outside the account.
_WITHOUT_PART = {"scales", "unknown", "compute"}


PLACES = {path.parent.name: path.parent for path in sorted(DATA.glob("format-*/*.run/run.json"))}
MADE: dict[str, Callable[[], Run]] = {
    **{f"by hand: {name}": partial(JOBS.__getitem__, name) for name in JOBS},
    "trained": a_trained_job,
    **{
        f"predicted at {rate_bps:g}": partial(a_predicted_job, a_transport(), rate_bps=rate_bps)
        for rate_bps in (0.3e9, 1e9, 10e9)
    },
    "simulated": partial(fw.replay, "vgg16@v100", workers=8, bandwidth="10Gbps"),
    "on a cluster": partial(
        fw.replay, "gpt2@a100", cluster="dgx-a100", nodes=2, algorithm="hierarchical"
    ),
}
NAMES = sorted({*PLACES, *MADE})


@cache
def explained(name: str) -> tuple[Run, Explanation]:
    run = MADE[name]() if name in MADE else fw.read(PLACES[name])
    return run, fw.explain(run)


def amounts(found: object) -> Iterator[Amount]:
    """Yield the times that a finding names as lost."""
    for value in vars(found).values():
        if isinstance(value, Amount):
            yield value


def is_answer(fix: Fix, found: Explanation) -> bool:
    """Say whether a fix shortens the part that the verdict names."""
    kinds = fix_kinds()
    own = kinds[fix.kind].addresses if fix.kind in kinds else ()
    return found.verdict.kind in (fix.kind, *own)


@pytest.mark.parametrize("name", NAMES)
def test_the_verdict_speaks_of_the_part_that_its_account_has(name: str) -> None:
    _, found = explained(name)
    account, step_s, kind = found.account, found.step_s, found.verdict.kind
    if not step_s:
        assert kind == "unknown"
        return
    assert sum(account.values()) == pytest.approx(step_s, rel=1e-6)
    if kind in _WITHOUT_PART:
        return
    transfers_s = sum(account[part] for part in ("line_rate", "latency", "transport"))
    lost_s = {"transport": transfers_s, "overlap": account["line_rate"]}.get(kind)
    part_s = account[kind] if lost_s is None else lost_s
    assert part_s >= THRESHOLD * step_s * (1 - 1e-9)
    told = next(amounts(found.verdict.findings[0]))
    assert told.time_s == pytest.approx(part_s) or (kind == "transport" and told.time_s <= part_s)
    assert kind not in found.verdict.near


@pytest.mark.parametrize("name", NAMES)
def test_the_first_advice_is_an_answer_to_the_verdict(name: str) -> None:
    _, found = explained(name)
    answers = [fix for fix in found.fixes if is_answer(fix, found)]
    assert found.fixes[: len(answers)] == tuple(answers)
    if found.verdict.kind == "overlap" and found.fixes:
        assert fix_kinds()[found.fixes[0].kind].begins_sooner


@pytest.mark.parametrize("name", NAMES)
def test_no_advice_needs_what_is_exhausted(name: str) -> None:
    run, found = explained(name)
    settings = [setting(fix) for fix in found.fixes if fix.kind in ("input", "straggler")]
    if who_takes_processors(run) is not None:
        assert not any("num_workers=8" in each for each in settings)
        assert not any("clock, temperature" in each for each in settings)
    for fix in found.fixes:
        assert fix.step_s < (found.fixes_from_s or 0.0)


@pytest.mark.parametrize("name", NAMES)
def test_the_break_even_is_on_the_side_of_the_threshold_that_the_account_is_on(name: str) -> None:
    _, found = explained(name)
    if found.break_even is None:
        return
    lost = 1 - sum(found.account[part.key] for part in OF_ONE) / found.step_s
    assert found.break_even.is_limited == (lost >= THRESHOLD)
    if isinstance(found.break_even.finding, WaitingAloneCosts):
        assert found.account[Part.STRAGGLER.key] >= THRESHOLD * found.step_s


def test_real_traces_are_told_as_consistently(shared_data: Path) -> None:
    seen = 0
    for place in sorted((shared_data / "kineto").glob("*.json.gz")):
        try:
            found = fw.explain(fw.read(place))
        except FullwireError:
            continue
        seen += 1
        assert sum(found.account.values()) == pytest.approx(found.step_s, rel=1e-6)
        answers = [is_answer(fix, found) for fix in found.fixes]
        assert answers == sorted(answers, reverse=True)
    assert seen


# ---- near a threshold ----------------------------------------------------------------------------


def waiting(late_ms: float) -> Run:
    """Make a job in which one rank is late by `late_ms` in some 100 ms."""
    early = RankByHand(
        100 + late_ms, [("compute", "backward", 0.0, 85.0)], [(8, 85, 100 + late_ms)]
    )
    late = RankByHand(
        100 + late_ms,
        [("compute", "backward", 0.0, 85.0 + late_ms)],
        [(8, 85 + late_ms, 100 + late_ms)],
    )
    return a_job(early, late, late)


@pytest.mark.parametrize("late_ms", [20.0, 28.0, 30.0, 32.0, 33.0, 34.0, 36.0, 38.0, 40.0, 60.0])
@pytest.mark.parametrize("share", [-0.01, 0.01])
def test_a_repeat_gives_the_same_verdict_or_one_that_was_said_to_be_near(
    late_ms: float, share: float
) -> None:
    before = fw.explain(waiting(late_ms)).verdict
    again = fw.explain(waiting(late_ms + share * (100 + late_ms))).verdict
    assert again.kind in (before.kind, *before.near)
    assert before.kind in (again.kind, *again.near)


def test_far_from_the_threshold_no_other_verdict_is_near() -> None:
    for name in ("straggler", "input", "host", "line_rate"):
        found = fw.explain(JOBS[name]).verdict
        assert found.near == ()
        assert "This is close" not in found.sentence


# ---- the names of late ranks ---------------------------------------------------------------------


def late_on(first: int, then: int) -> Run:
    """Make a job of ten steps in which one rank is late in seven of them, and then another."""
    early = RankByHand(150, [("compute", "backward", 0.0, 85.0)], [(8, 85, 150)])
    late = RankByHand(150, [("compute", "backward", 0.0, 140.0)], [(8, 140, 150)])
    run = a_job(late, early, early, early, steps=10)
    names = np.arange(4)

    def renamed(table: Any) -> Any:
        is_late = table.rank == 0
        name = np.where(table.step < 7, first, then)
        others = np.where(table.rank == name, 0, table.rank)
        return dataclasses.replace(table, rank=names[np.where(is_late, name, others)])

    return dataclasses.replace(run, spans=renamed(run.spans), collectives=renamed(run.collectives))


def test_a_verdict_says_where_a_repeat_may_name_other_ranks() -> None:
    alike, unlike = (fw.explain(late_on(1, then)).verdict for then in (1, 3))
    assert alike.kind == unlike.kind == "straggler"
    for verdict, is_doubted in ((alike, False), (unlike, True)):
        assert verdict.sureness is not None
        said = sentence(verdict.sureness)
        assert ("a repeat may name other ranks as late" in said) == is_doubted
