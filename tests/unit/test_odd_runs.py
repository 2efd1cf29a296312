"""Runs that are legal and absurd: every question ends in an answer or in one sentence."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given

import fullwire as fw
from fullwire.errors import FullwireError
from fullwire.report.as_data import run_object
from fullwire.report.chrome import write_chrome
from fullwire.report.contents import print_run
from fullwire.report.explanation import print_explanation
from fullwire.report.page import contents as page_contents
from fullwire.run.facts import named
from fullwire.run.run import Collectives, Connections, Flows, Provenance, Run
from tests.jobs_by_hand import a_trained_job
from tests.strategies import cases, odd_jobs, runs

any_runs = odd_jobs() | runs()


SOUND = a_trained_job()


def _explained(run: Run) -> None:
    found = fw.explain(run)
    with contextlib.redirect_stdout(io.StringIO()):
        print_explanation(found)
    assert "<script" not in found._repr_html_()


def _shown(run: Run) -> None:
    rows = {name: len(table) for name, table in run.tables()}
    print_run(run, rows, "odd.run")
    run_object(run, rows)


@pytest.mark.parametrize(
    "ask",
    [
        _explained,
        fw.whatif,
        lambda run: fw.whatif(run, workers=[1, 7], bandwidth=["1bps", "400Gbps"]),
        lambda run: fw.whatif(run, target="loss<=0.3", recorded_batch=64),
        lambda run: fw.compare(SOUND, run),
        lambda run: fw.compare(run, SOUND),
        lambda run: fw.flows(run),
        lambda run: fw.plan(recorded=run, to="tp=2", cluster="dgx-h100", nodes=1),
        lambda run: page_contents([SOUND, run]),
        lambda run: write_chrome(run, io.BytesIO()),
        _shown,
    ],
    ids=[
        "explain",
        "whatif",
        "whatif of other workers",
        "target",
        "compare after",
        "compare before",
        "flows",
        "plan",
        "page",
        "export",
        "show",
    ],
)
@cases(60)
@given(any_runs)
def test_an_absurd_run_gives_an_answer_or_a_sentence(
    ask: Callable[[Run], object], run: Run
) -> None:
    with contextlib.suppress(FullwireError):
        ask(run)


def test_a_name_that_ends_in_nul_is_the_name_of_a_collective_like_any_other() -> None:
    none = np.zeros(2, np.int64)
    only_communication = Collectives(
        rank=np.arange(2),
        step=none,
        sequence=none,
        group=np.array(["world\0"] * 2, object),
        op=np.array(["all\0"] * 2, object),
        dtype=np.array(["float32"] * 2, object),
        bytes=np.array([8, 8]),
        issue_ns=np.array([0, 0]),
        start_ns=np.array([0, 0]),
        end_ns=np.array([5_000_000, 5_000_000]),
    )
    job = Run(
        provenance=Provenance(origin="imported", source="a test"),
        facts=named({"workers": 2}),
        collectives=only_communication,
    )
    assert "took 5" in fw.explain(job).verdict.sentence


def test_connections_that_carried_nothing_are_no_training_of_their_own() -> None:
    one = {name: np.zeros(1, np.int64) for name in Flows.empty().columns()} | {
        "source": np.array(["a"], object),
        "destination": np.array(["b"], object),
        "start_ns": np.array([10**9]),
        "end_ns": np.array([10**9]),
    }
    two = {name: np.zeros(2, np.int64) for name in Connections.empty().columns()} | {
        "source": np.array(["a", "b"], object),
        "destination": np.array(["b", "c"], object),
        "payload_bytes": np.ones(2, np.int64),
        "start_ns": np.array([0, 10**9]),
        "end_ns": np.array([0, 10**9]),
    }
    job = Run(
        provenance=Provenance(origin="imported", source="a test"),
        flows=Flows(**one),
        connections=Connections(**two),
    )
    with contextlib.suppress(FullwireError):
        fw.flows(job)
