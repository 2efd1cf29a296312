"""Impossible numbers are refused before they are printed: the last check over every answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fullwire.answers.believable import (
    check_scaling,
    check_shares,
    check_steps,
    check_times,
    check_use,
)
from fullwire.answers.compare import compare
from fullwire.answers.explain import explain
from fullwire.answers.search import explorer
from fullwire.answers.whatif import whatif
from fullwire.errors import DamagedInput, UsageError
from fullwire.run.facts import Facts
from fullwire.run.run import Run
from fullwire.run.store import read_run
from fullwire.words import sentences

OLD = Path(__file__).parents[1] / "data" / "format-1"


def without_length(run: Run, name: str | None = None) -> Run:
    """Return a run in which all spans, or those of one name, end where they begin."""
    spans = run.spans
    chosen = np.ones(len(spans), bool) if name is None else spans.name == name
    return replace(run, spans=replace(spans, end_ns=np.where(chosen, spans.start_ns, spans.end_ns)))


@pytest.mark.parametrize("name", ["emulated-gloo", "emulated-fullwire", "kineto-made"])
def test_a_run_whose_spans_take_no_time_predicts_nothing(name: str) -> None:
    absurd = without_length(read_run(OLD / f"{name}.run"))
    for transport in ("full", "measured"):
        if transport == "measured" and name == "kineto-made":
            continue  # it has no collectives to measure a transport from
        with pytest.raises(DamagedInput, match="cannot all be true") as refused:
            whatif(absurd, transport=transport)
        assert refused.value.exit_status == 3


@pytest.mark.parametrize("name", ["emulated-gloo", "emulated-fullwire", "simulated"])
def test_what_cannot_be_predicted_is_still_explained(name: str) -> None:
    absurd = without_length(read_run(OLD / f"{name}.run"), "step")
    told = explain(absurd)
    assert not told.fixes
    assert told.full is None
    assert "cannot all be true" in " ".join(sentences(told.notes))


def test_a_comparison_of_steps_that_take_no_time_is_refused() -> None:
    run = read_run(OLD / "emulated-gloo.run")
    some = (run.spans.name == "step") & (run.spans.step == run.spans.step.max())
    ends = np.where(some, run.spans.start_ns, run.spans.end_ns)
    with pytest.raises(DamagedInput, match="the step of the answer would be 0"):
        compare(run, replace(run, spans=replace(run.spans, end_ns=ends)))


def test_each_check_lets_through_what_can_be_and_refuses_what_cannot() -> None:
    check_times("a run", time=[0.0, 1.0, np.nan])
    check_steps("a run", step=1e-9)
    check_shares("a run", use=[0.0, 1.0], unknown=None)
    check_scaling("a run", [1, 8], [1.0, 8.0])
    refusals: list[Callable[[], object]] = [
        lambda: check_times("a run", time=-1e-9),
        lambda: check_times("a run", time=np.inf),
        lambda: check_steps("a run", step=0.0),
        lambda: check_steps("a run", step=np.nan),
        lambda: check_shares("a run", network_use=-0.5),
        lambda: check_shares("a run", network_use=1.2),
        lambda: check_scaling("a run", 4, 6.1),
        lambda: check_scaling("a run", 4, -0.01),
    ]
    for refused in refusals:
        with pytest.raises(DamagedInput, match=r"^a run: its times cannot all be true: the "):
            refused()


def test_a_contradiction_in_a_prediction_is_not_blamed_on_the_recording() -> None:
    check_use("a run", [0.0, 1.04])
    names = np.array(["one run", "another"], object)[:, None]
    with pytest.raises(UsageError, match=r"^another: the prediction contradicts itself: .* 2.02 "):
        check_use(names, [[0.2, 0.9], [0.5, 2.02]])


def test_an_explorer_around_a_step_that_cannot_be_is_refused() -> None:
    run = read_run(OLD / "emulated-gloo.run")
    with pytest.raises(DamagedInput, match="step of one worker"):
        explorer(run, explain(run).predictor, -3.4)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_collectives_that_fit_no_transport_are_refused_in_a_sentence() -> None:
    run = read_run(OLD / "lab-gloo.run")
    empty = replace(run, facts=run.facts | Facts(communication_processor_s=()))
    with pytest.raises(UsageError, match="got collectives that none fits"):
        whatif(empty, transport="measured", bandwidth="10Gbps")
    assert explain(empty).verdict.kind == explain(run).verdict.kind
