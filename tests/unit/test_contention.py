"""Contention: computation that the job's own communication and ranks slow down."""

from __future__ import annotations

from fullwire.findings.case import Case
from fullwire.findings.verdicts import Blame, verdict_kinds
from fullwire.timeline.account import account
from fullwire.words import sentence
from tests.jobs_by_hand import a_trained_job


def test_contention_is_the_verdict_where_the_account_blames_it() -> None:
    run = a_trained_job()
    case = Case(run=run, account=account(run, {}), inflation_s=None, evidence=(), rate_bps={})
    kind = verdict_kinds()["contention"]
    assert kind.rule(case, Blame("contention", ())) == ()
    assert kind.rule(case, Blame("compute", ())) is None
    assert "The job slows down its own computation" in sentence(kind.says(case))
