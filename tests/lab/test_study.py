"""The study: claims judged from trials with a known truth, and a tiny real study."""

from __future__ import annotations

import csv
import dataclasses
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

import fullwire as fw
from fullwire import workloads
from fullwire.run.facts import Facts, FactValue, named
from fullwire.run.run import Collectives, Gradients, Links, Provenance, Run, Sockets
from fullwire.run.store import write
from fullwire.studies.papers import Study
from fullwire.studies.papers import study as play_study
from fullwire.studies.papers.claims import Claim, Findings, Holds, claims
from fullwire.studies.papers.explained import modelled_rows, shares, shares_of_modelled
from fullwire.studies.papers.measures import Measured, measured
from fullwire.studies.papers.predicted import Predicted, predictions
from fullwire.studies.papers.trials import QUICK, Trial, place_of, planned
from fullwire.studies.papers.view import print_study, study_object, write_study
from tests.builders import MS, spans
from tests.conftest import Cli
from tests.lab.test_lab import eventually, needs_namespaces, processes_with
from tests.torch.test_record import needs_torch

HEADERS = 1514 / 1448


def a_trial(**changed: object) -> Trial:
    usual = Trial(kind="emulated", model="resnet50@v100", workers=2, rate="10Gbps")
    return dataclasses.replace(usual, **changed)  # type: ignore[arg-type]  # names of its fields


def seen(trial: Trial, step_s: float = 0.2, **changed: object) -> Measured:
    """A trial that sends 100 MB around a ring, and communicates half of its step."""
    usual = Measured(
        trial=trial,
        step_s=step_s,
        deviation=0.0,
        compute_s=0.1,
        communication_s=step_s / 2,
        gradient_bytes=100e6,
        sent_bytes=2 * (trial.workers - 1) / trial.workers * 100e6,
        sent_from="NIC counters",
        processor_utilization=0.2,
        processors_from="processor time of the ranks",
        processors=2,
        sends_to=None,
    )
    return dataclasses.replace(usual, **changed)  # type: ignore[arg-type]  # names of its fields


def judged(key: str, *found: Measured, predicted: Sequence[Predicted] = ()) -> Claim:
    findings = Findings(measured=found, predicted=predicted, explained=())
    return next(each for each in claims(findings) if each.key == key)


# Claims from trials made by hand


def test_what_was_not_played_is_not_measured() -> None:
    rows = {each.key: each for each in claims(Findings(measured=(), predicted=(), explained=()))}
    modelled = {"no_compression", "little_compression"}
    assert {each.holds for key, each in rows.items() if key not in modelled} == {"not measured"}
    assert all(rows[key].holds == "yes" and rows[key].basis == "modelled" for key in modelled)
    assert len(rows) == len(claims(Findings(measured=(), predicted=(), explained=())))


@pytest.mark.parametrize(("step_s", "holds"), [(0.2, "yes"), (0.105, "no")])
def test_training_is_far_from_linear_or_not(step_s: float, holds: Holds) -> None:
    one = seen(a_trial(workers=1), 0.1)
    row = judged("below_linear", one, seen(a_trial(workers=4), step_s))
    assert row.holds == holds
    assert f"scaling factor {0.1 / step_s:.2f}" in row.measured


def test_far_from_linear_only_at_this_machines_speed_holds_in_part() -> None:
    one, four = seen(a_trial(workers=1), 0.1), seen(a_trial(workers=4), 0.2)
    dilated = seen(a_trial(workers=4, rate="100Gbps", dilation=10), 0.105)
    row = judged("below_linear", one, four, dilated)
    assert row.holds == "in part"
    assert "0.95 (resnet50@v100, 4 x 100 Gbps, dilated 10x)" in row.measured
    assert row.why.startswith("not in 1 of 1 with faster processors")


def test_a_hook_gains_what_is_predicted_or_not() -> None:
    full = a_trial(kind="real", model="mlp-1536", steps=20)
    half = dataclasses.replace(full, half=True, steps=8)

    def foretold(transport_s: float) -> Predicted:
        return Predicted(
            trial=half,
            measured_s=0.1,
            full_s=0.05,
            transport_s=transport_s,
            low_s=0.0,
            high_s=1.0,
            was_shown=False,
        )

    pair = (seen(full, 0.15), seen(half, 0.1))
    assert judged("half", *pair).holds == "not measured"
    assert judged("half", *pair, predicted=[foretold(0.105)]).holds == "yes"
    row = judged("half", *pair, predicted=[foretold(0.08)])
    assert row.holds == "no"
    assert "150 ms to 100 ms, predicted 80 ms (-20%)" in row.measured


def test_several_models_on_a_fast_and_a_slow_link_are_told_apart() -> None:
    runs = a_study_of_two()
    assert [each.was_shown for each in runs] == [True, False]
    assert runs[0].error is None
    assert runs[1].full_s < runs[0].full_s


def a_study_of_two() -> list[Predicted]:
    slow, fast = a_trial(rate="1Gbps"), a_trial(rate="10Gbps")
    job = a_job(exit_status=0)
    found = [measured(trial, job) for trial in (slow, fast)]
    return predictions(found, {slow.name: job, fast.name: job})


def test_computation_that_grows_only_where_processors_are_shared_holds_in_part() -> None:
    def real(workers: int, compute_s: float) -> Measured:
        trial = a_trial(kind="real", model="mlp-1536", workers=workers)
        return seen(trial, compute_s=compute_s)

    alone = real(1, 0.100)
    assert judged("computation", alone, real(2, 0.105), real(4, 0.104)).holds == "yes"
    shared = judged("computation", alone, real(2, 0.105), real(4, 0.200))
    assert shared.holds == "in part"
    assert "more workers than the 2 processors" in shared.why
    assert "2 x 10 Gbps +5%; 4 x 10 Gbps +100%" in shared.measured
    assert judged("computation", alone, real(2, 0.150)).holds == "no"


def test_links_are_idle_when_the_slow_one_is_full_and_the_fast_one_is_not() -> None:
    def at(rate: str, share: float) -> Measured:
        trial = a_trial(rate=rate)
        return seen(trial, communication_s=8 * 100e6 / (trial.rate_bps * share), step_s=2.0)

    row = judged("links_idle", at("1Gbps", 0.94), at("10Gbps", 0.5))
    assert row.holds == "yes"
    assert "94% of 1Gbps and 50% of 10Gbps" in row.measured
    assert judged("links_idle", at("1Gbps", 0.94), at("10Gbps", 0.9)).holds == "no"
    assert judged("links_idle", at("1Gbps", 0.5), at("10Gbps", 0.4)).holds == "no"
    assert judged("links_idle", at("1Gbps", 0.94)).holds == "not measured"


def test_processors_are_the_bottleneck_when_most_of_them_is_used() -> None:
    idle, busy = seen(a_trial()), seen(a_trial(workers=4), processor_utilization=0.9)
    assert judged("processors", idle).holds == "yes"
    row = judged("processors", idle, busy)
    assert row.holds == "no"
    assert row.measured.startswith("90% of 2 processors")


@pytest.mark.parametrize(
    ("factor", "sent_from", "holds"),
    [
        (HEADERS, "NIC counters", "yes"),
        (1.002, "NIC counters", "yes"),
        (0.95, "NIC counters", "no"),
        (1.1 * HEADERS, "NIC counters", "no"),
        (1.0, "sizes of collectives", "not measured"),
    ],
)
def test_the_slope_of_bytes_is_the_rings(factor: float, sent_from: str, holds: Holds) -> None:
    found = [
        seen(
            a_trial(workers=4),
            gradient_bytes=size,
            sent_bytes=1.5 * size * factor + 7e3,
            sent_from=sent_from,
        )
        for size in (10e6, 100e6, 500e6)
    ]
    row = judged("bytes", *found)
    assert row.holds == holds
    assert f"N=4 slope {1.5 * factor:.4f} (ring 1.5000)" in row.measured


@pytest.mark.parametrize(
    ("sends_to", "holds"),
    [
        ((3, 0, 1, 2), "yes"),
        ((1, 2, 3, 0), "yes"),
        ((2, 3, 1, 0), "no"),
        ((1, -1, 3, 0), "no"),
        (None, "not measured"),
    ],
)
def test_a_ring_is_in_the_launchs_order_in_either_direction(
    sends_to: tuple[int, ...] | None, holds: Holds
) -> None:
    row = judged("ring", seen(a_trial(workers=4), sends_to=sends_to))
    assert row.holds == holds
    if sends_to == (3, 0, 1, 2):
        assert "0 -> 3 -> 2 -> 1 -> 0" in row.measured


def test_slow_links_are_as_predicted_and_fast_ones_are_not() -> None:
    def foretold(rate: str, full_s: float) -> Predicted:
        return Predicted(
            trial=a_trial(rate=rate),
            measured_s=1.0,
            full_s=full_s,
            transport_s=1.015,
            low_s=0.9,
            high_s=1.1,
            was_shown=rate == "1Gbps",
        )

    rows = [foretold("1Gbps", 0.98), foretold("10Gbps", 0.5)]
    assert judged("as_full_when_slow", predicted=rows).holds == "yes"
    row = judged("foretold", predicted=rows)
    assert row.measured.startswith("1 trials: median error 1.5%")  # the shown one does not count
    assert "holds 1 of 1" in row.measured
    assert row.holds == "yes"
    missed = dataclasses.replace(rows[1], measured_s=1.15)
    row = judged("foretold", predicted=[*rows, *[rows[1]] * 7, missed])
    assert row.holds == "in part"
    assert row.why.startswith("the worst is above 5%; the interval holds less than 90%")
    assert judged("foretold", predicted=[missed]).holds == "no"
    rows = [foretold("1Gbps", 0.98), foretold("10Gbps", 0.97)]
    assert judged("as_full_when_slow", predicted=rows).holds == "no"


def test_a_regression_finds_which_condition_decides() -> None:
    size, rate = np.meshgrid([1.0, 2.0, 3.0], [1.0, 5.0, 9.0])
    columns = {"model size": size.reshape(-1, 1), "bandwidth": rate.reshape(-1, 1)}
    found = shares("a test", columns, 0.5 * size.ravel() - 2 * rate.ravel())
    assert found is not None
    assert found.together == pytest.approx(1)
    assert found.alone["bandwidth"] + found.alone["model size"] == pytest.approx(1)  # balanced
    assert found.alone["bandwidth"] > 0.98
    assert found.only_it == pytest.approx(found.alone)
    few = {name: column[:4] for name, column in columns.items()}
    assert shares("a test", few, np.arange(4.0)) is None


def test_modelled_iterations_do_not_follow_from_size_alone() -> None:
    rows = modelled_rows()
    found = shares_of_modelled(rows)
    assert found is not None
    assert found.count == len(rows) == len(workloads.names()) * 4
    assert found.alone["model size"] < 0.8 < found.together


# Figures of a run


def a_job(**facts: FactValue) -> Run:
    """Two hosts, three steps of 100 ms, each with one collective of 1 MB from 40 to 90 ms."""
    marks = [
        spans(
            ("host", "step", at * MS, (at + 100) * MS),
            ("compute", "backward", (at + 20) * MS, (at + 40) * MS),
            rank=rank,
            step=at // 100,
        )
        for rank in (0, 1)
        for at in (0, 100, 200)
    ]
    rank, at = np.repeat([0, 1], 3), np.tile([0, 100, 200], 2) * MS
    moments = np.arange(0, 301, 10) * MS
    both = len(moments) * 2
    names = np.repeat(np.array(["host0", "host1"], object), len(moments))
    flows = np.repeat(
        np.array(["10.77.0.2:9>10.77.0.3:5", "10.77.0.3:5>10.77.0.2:9"], object), len(moments)
    )
    sent = np.tile(moments // MS * 10_500, 2)  # 1.05 MB in a step
    none = np.zeros(both, np.int64)
    return Run(
        provenance=Provenance(origin="measured", source="a test"),
        facts=Facts(
            workers=2,
            line_rate_bps=1e9,
            hosts="host0,host1",
            processors=2,
            processor_s=((0.0, 0.05), (1.0, 0.05)),
        )
        | named(facts),
        spans=type(marks[0])(
            **{
                name: np.concatenate([getattr(mark, name) for mark in marks])
                for name in marks[0].columns()
            }
        ),
        gradients=Gradients(
            rank=rank,
            step=np.tile([0, 1, 2], 2),
            order=0 * rank,
            bytes=np.full(6, 1_000_000),
            ready_ns=at + 40 * MS,
        ),
        collectives=Collectives(
            rank=rank,
            step=np.tile([0, 1, 2], 2),
            sequence=np.tile([0, 1, 2], 2),
            group=np.full(6, "g", object),
            op=np.full(6, "allreduce", object),
            dtype=np.full(6, "float32", object),
            bytes=np.full(6, 1_000_000),
            issue_ns=at + 40 * MS,
            start_ns=at + 40 * MS,
            end_ns=at + 90 * MS,
        ),
        links=Links(
            host=names,
            interface=np.full(both, "eth0", object),
            time_ns=np.tile(moments, 2),
            tx_bytes=sent,
            rx_bytes=sent,
            tx_packets=none,
            rx_packets=none,
            drops=none,
        ),
        sockets=Sockets(
            **{
                **{name: np.zeros(both, kind) for name, kind in Sockets.column_types().items()},
                "host": names,
                "flow": flows,
                "time_ns": np.tile(moments, 2),
                "bytes_acked": sent,
            }
        ),
    )


def test_figures_come_from_counters_where_there_are_samples() -> None:
    found = measured(a_trial(rate="1Gbps"), a_job())
    assert found.step_s == pytest.approx(0.1)
    assert found.communication_s == pytest.approx(0.05)
    assert found.gradient_bytes == 1_000_000
    assert found.sent_bytes == pytest.approx(1_050_000)
    assert found.sent_from == "NIC counters"
    assert found.network_utilization == pytest.approx(0.084)
    assert found.busy_utilization == pytest.approx(0.168)
    assert found.processor_utilization == pytest.approx(0.5)
    assert found.sends_to == (1, 0)


def test_without_samples_bytes_are_the_collectives_and_nothing_is_said_of_the_ring() -> None:
    bare = dataclasses.replace(a_job(), links=Links.empty(), sockets=Sockets.empty())
    found = measured(a_trial(rate="1Gbps"), bare)
    assert (found.sent_bytes, found.sent_from) == (1_000_000, "sizes of collectives")
    assert found.sends_to is None


# The study itself


def test_trials_have_names_of_their_own_and_the_quick_ones_belong_to_all() -> None:
    every = planned(quick=False)
    assert len({trial.name for trial in every}) == len(every)
    assert set(QUICK) == set(planned(quick=True)) <= set(every)


def test_finished_trials_are_not_played_again_and_one_that_fails_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    there, failing, playable = (a_trial(rate=rate) for rate in ("1Gbps", "2Gbps", "5Gbps"))
    write(a_job(exit_status=0), made(tmp_path, there))
    write(a_job(exit_status=1), made(tmp_path, playable))  # begun, and ended early
    played = []

    def play(trial: Trial, directory: Path, expected_s: float) -> str | None:
        played.append(trial)
        if trial == failing:
            return "the lab is not to be had"
        write(a_job(exit_status=0), place_of(trial, directory), replace=True)
        return None

    monkeypatch.setattr("fullwire.studies.papers.play", play)
    monkeypatch.setattr("fullwire.studies.papers.check_machine", lambda: None)
    said: list[str] = []
    first = play_study(tmp_path, trials=(there, failing, playable), say=said.append)
    assert played == [failing, playable]
    assert [each.trial for each in first.measured] == [there, playable]
    assert first.failed == ((failing, "the lab is not to be had"),)
    assert any("the rest goes on" in sentence for sentence in said)
    assert any("1 of 3 trials are in" in sentence for sentence in said)
    play_study(tmp_path, trials=(there, failing, playable))
    assert played == [failing, playable, failing]
    check_written(first)
    print_study(first, [])
    printed = " ".join(capsys.readouterr().out.split())  # Lines end where the terminal does.
    assert "not measured" in printed
    assert f"note: {failing.name} failed: the lab is not to be had" in printed
    assert all(each.claim in printed for each in first.claims)


def made(directory: Path, trial: Trial) -> Path:
    place = place_of(trial, directory)
    place.parent.mkdir(exist_ok=True)
    return place


def check_written(result: Study) -> None:
    written = write_study(result)
    with (result.directory / "claims.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["claim"] for row in rows] == [each.claim for each in result.claims]
    assert {row["holds"] for row in rows} <= {"yes", "no", "in part", "not measured"}
    for path in written:
        beginning = path.read_bytes()[:4]
        assert beginning == b"\x89PNG" if path.suffix == ".png" else path.suffix == ".csv"
    assert {"utilization.png", "compression.png"} <= {path.name for path in written}
    assert json.loads(json.dumps(study_object(result, written)))["claims"]


@needs_namespaces
@needs_torch
@pytest.mark.usefixtures("uncompiled")
def test_a_tiny_study_is_played_for_real(tmp_path: Path) -> None:
    trials = (
        # A job of 40 steps is long enough for the samples of its connections.
        Trial(kind="real", model="mlp-64", workers=2, rate="100Mbps", steps=40),
        a_trial(workers=2, rate="1Gbps", compression=50, buckets="ddp:25MiB", steps=3),
    )
    result = fw.study(tmp_path, trials=trials)
    assert not result.failed
    real, emulated = result.measured
    weights = 784 * 64 + 2 * 64 * 64 + 10 * 64 + 3 * 64 + 10
    assert real.gradient_bytes == pytest.approx(4 * weights, rel=0.001)  # DDP adds a few of its own
    assert real.sends_to == (1, 0)
    assert real.sent_from == "NIC counters"
    assert emulated.gradient_bytes == pytest.approx(102_228_128 / 50, rel=0.001)
    assert emulated.step_s > 0.095
    again = fw.study(tmp_path, trials=trials, say=lambda sentence: None)
    assert [each.step_s for each in again.measured] == [each.step_s for each in result.measured]


@needs_namespaces
@needs_torch
@pytest.mark.usefixtures("uncompiled")
def test_a_study_that_is_killed_leaves_nobody_who_plays_on(tmp_path: Path) -> None:
    trial = Trial(kind="real", model="mlp-64", workers=1, rate="100Mbps", steps=100_000)
    code = (
        "from pathlib import Path; from fullwire.studies.papers.trials import Trial, play; "
        f"play({trial!r}, Path({str(tmp_path)!r}), 60.0)"
    )
    place = place_of(trial, tmp_path)
    with subprocess.Popen([sys.executable, "-c", code]) as study:
        begun = eventually(place.with_name(f"{place.name}.recording").exists, within_s=60)
        study.kill()
    assert begun
    assert eventually(lambda: not seen_in_a_second(str(tmp_path)), within_s=60)


def seen_in_a_second(word: str) -> set[int]:
    """Return the processes seen in many looks: one that just begins has no command line yet."""
    found = set()
    for _ in range(20):
        found.update(processes_with(word))
        time.sleep(0.05)
    return found


def test_a_place_that_cannot_be_is_refused(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = cli("study", "--quick", "-o", tmp_path / "file")
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
