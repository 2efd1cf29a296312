"""Ranks that are killed or paused: the short form of validation/faults.py."""

from __future__ import annotations

from tests.lab.test_lab import needs_namespaces
from tests.torch.test_record import needs_torch
from validation import faults


@needs_torch
@needs_namespaces
def test_other_ranks_end_in_time_and_name_the_rank_that_was_hit() -> None:
    """A rank is killed at each moment, and one is paused beyond the time-out."""
    plans = [faults.plan_of(number, seed=0) for number in range(400)]
    killed = [plan for plan in plans if plan.fault == "kill"][:4]
    paused = [plan for plan in plans if (plan.fault, plan.moment) == ("pause", "start")]
    long = next(plan for plan in paused if plan.lasts_s > 2 and not plan.after_s)
    outcomes = list(faults.played([*killed, long]))
    assert [each.plan.moment for each in outcomes] == [*faults.MOMENTS, "start"]
    for outcome in outcomes:
        assert (outcome.hangs, outcome.wrong, outcome.unnamed) == (0, 0, 0), outcome.said
    assert outcomes[0].named == 2
    assert outcomes[-1].named >= 2


def test_a_round_is_decided_by_its_number_and_the_seed() -> None:
    assert faults.plan_of(7, seed=1) == faults.plan_of(7, seed=1) != faults.plan_of(7, seed=2)


def test_an_error_that_names_another_rank_is_counted() -> None:
    plan = faults.plan_of(1, seed=0)
    one, other = [rank for rank in range(faults.RANKS) if rank != plan.victim]
    answer = {"times": 0, "wrong": 0, "during": "collective"}
    right, wrong = f"rank {plan.victim} is gone", f"rank {plan.victim}0 is gone"
    outcome = faults.judged(plan, {one: {**answer, "error": right}, other: None})
    assert (outcome.named, outcome.hangs) == (1, 1)
    outcome = faults.judged(plan, {one: {**answer, "error": wrong}})
    assert (outcome.unnamed, outcome.named) == (1, 0)
