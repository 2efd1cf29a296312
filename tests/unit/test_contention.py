"""Contention: computation that the job's own communication and ranks slow down."""

from __future__ import annotations

import dataclasses

import fullwire as fw
from fullwire.answers.verdict import Verdict, judged
from fullwire.findings.case import Case
from fullwire.timeline.account import Part, account
from tests.jobs_by_hand import Rank, a_job, a_trained_job

RATES = {0: 1e9, 1: 1e9, 2: 1e9}


def judged_with(crowded_share: float) -> Verdict:
    """Judge a job of whose computation such a share is contention."""
    run = a_trained_job()
    found = account(run, RATES)
    parts_ns = found.parts_ns.copy()
    crowded_ns = (parts_ns[:, :, Part.COMPUTE] * crowded_share).astype(parts_ns.dtype)
    parts_ns[:, :, Part.COMPUTE] -= crowded_ns
    parts_ns[:, :, Part.CONTENTION] = crowded_ns
    crowded = dataclasses.replace(found, parts_ns=parts_ns)
    assert crowded.step_s == found.step_s
    return judged(Case(run=run, account=crowded, inflation_s=None, evidence=(), rate_bps=RATES))


def test_contention_is_the_verdict_where_it_is_the_largest_loss() -> None:
    found = judged_with(0.4)
    assert found.kind == "contention"
    assert "it 40 ms of every 146 ms step (27.4%)" in found.sentence
    assert "Another 34 ms (23.3%) is lost to the host" in found.sentence


def test_contention_is_named_beside_a_larger_loss() -> None:
    found = judged_with(0.2)
    assert found.kind == "host"
    assert "is lost to computation that the job itself slows down" in found.sentence


def test_no_contention_is_told_of_a_job_that_shows_none() -> None:
    run = a_trained_job()
    assert account(run, {}).parts_s["contention"] == 0.0


def test_a_step_of_computation_alone_names_no_part_that_it_does_not_have() -> None:
    both = Rank(length=100, spans=[("compute", "forward", 0, 100)], collectives=[(8, 10, 20)])
    found = fw.explain(a_job(both, both))
    assert found.verdict.kind == "scales"
    assert found.verdict.reasons == ("all of the step is computation",)
