"""Stages of a pipeline that wait for each other: a bubble, and no late rank."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import fullwire as fw
from fullwire.answers.planned import PlanAnswer
from fullwire.run.run import Run


@pytest.fixture(scope="module")
def planned() -> PlanAnswer:
    """Return a plan of 4 stages that has few microbatches to fill them."""
    return fw.plan(
        "llama3-8b",
        cluster="dgx-h100",
        nodes=1,
        global_batch=16,
        seq=8192,
        fix="pp=4,vpp=1,tp=1,dp=2,microbatch=1",
        top=1,
    )


@pytest.fixture(scope="module")
def few_microbatches(planned: PlanAnswer) -> Run:
    """Return the step of that plan."""
    return planned.run()


def test_a_pipeline_with_few_microbatches_has_a_bubble_and_no_late_rank(
    planned: PlanAnswer, few_microbatches: Run
) -> None:
    found = fw.explain(few_microbatches)
    assert found.verdict.kind == "bubble"
    assert found.account["bubble"] > found.account["straggler"]  # the last stage has more work
    assert sum(found.account.values()) == pytest.approx(found.step_s)
    # 8 microbatches on 4 stages: each stage idles for the time of 3 of them. The last stage is the
    # longest, and makes the others wait more.
    assert found.account["bubble"] > found.account["compute"] * 3 / 8
    assert found.account["bubble"] == pytest.approx(planned.plans[0].bubble_s, rel=1e-3)
    assert found.verdict.sentence.startswith("The pipeline's bubble limits this job: stages wait ")


def test_transfers_of_a_group_that_is_no_pipeline_are_no_bubble(few_microbatches: Run) -> None:
    table = few_microbatches.collectives
    others = np.array([f"ring {str(name)[-1]}" for name in table.group], object)
    found = fw.explain(replace(few_microbatches, collectives=replace(table, group=others)))
    assert found.account["bubble"] == 0
    assert found.account["straggler"] > 0
