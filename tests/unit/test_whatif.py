"""Answers of whatif: the paper's numbers, and the laws that any replay keeps."""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fullwire as fw
from fullwire.answers.whatif import WhatIf
from fullwire.clusters import cluster as described_cluster
from fullwire.clusters.measured import Measured, Shown
from fullwire.collectives.usual import USUAL_PROTOCOLS
from fullwire.errors import DamagedInput, UsageError
from fullwire.importers import read
from fullwire.run.facts import Facts, FactValue
from fullwire.run.gaps import gaps_of
from fullwire.run.run import Collectives, Run
from fullwire.simulation.of_kinds import NO_COMMUNICATION
from fullwire.words import sentence, sentences
from tests.builders import a_run
from tests.jobs_by_hand import a_job_of_experts, a_trained_job
from tests.strategies import cases

LINE = "10Gbps"


def factor(run: Run | str, **conditions: Any) -> float:
    return float(fw.whatif(run, **conditions)["scaling_factor"][0])


def step_s(run: Run | str, **conditions: Any) -> float:
    return float(fw.whatif(run, **conditions)["step_s"][0])


def test_a_step_ends_when_the_last_message_has_been_sent() -> None:
    run = a_run(gradients=[(10, 25_000_000), (20, 25_000_000)], forward_ms=10)
    # Two workers move each byte once: 20 ms a message at 10 Gbps, the second after the first.
    table = fw.whatif(run, workers=2, bandwidth=LINE, buckets="none")
    assert table["step_s"][0] == pytest.approx(0.060)
    assert table["baseline_step_s"][0] == pytest.approx(0.030)
    assert table["overhead_s"][0] == pytest.approx(0.030)
    assert table["communication_s"][0] == pytest.approx(0.040)
    assert table["network_utilization"][0] == pytest.approx(40 / 60)


@pytest.mark.parametrize(("steps", "why"), [(1, "1 whole step does"), (2, "2 whole steps do")])
def test_predictions_of_few_steps_say_why_they_have_no_interval(steps: int, why: str) -> None:
    """Formerly the interval was silently absent. A measured transport has another source of it."""
    run = a_trained_job(steps=steps)
    table = fw.whatif(run, transport="full", bandwidth=LINE)
    assert not table.has_intervals
    said = [note for note in table.warnings if "no interval" in note]
    assert said == [
        f"a test: predictions have no interval. {why} not show how much steps scatter. At least 3 "
        "are needed."
    ]
    enough = fw.whatif(a_trained_job(steps=3), transport="full", bandwidth=LINE)
    assert enough.has_intervals
    assert not [note for note in enough.warnings if "no interval" in note]
    both = fw.whatif(a_trained_job(steps=2), transport="measured,full", bandwidth=LINE)
    assert both.has_intervals
    assert "predictions with a transport that was not measured have no interval" in " ".join(
        both.warnings
    )


def test_add_times_are_paid_once_per_hop_and_compression_spares_only_the_wire() -> None:
    facts: dict[str, FactValue] = {"workers": 1, "reduce_cost": ((1.0, 0.001), (1e9, 0.001))}
    run = a_run(gradients=[(10, 20_000_000)], facts=facts)
    table = fw.whatif(run, workers=4, bandwidth=LINE, compression="1,10", buckets="none")
    wire_s = 2 * 8 * 20e6 * 3 / 4 / 10e9
    assert table["communication_s"] == pytest.approx([wire_s + 0.003, wire_s / 10 + 0.003])


def test_latency_is_paid_once_per_message_in_a_row() -> None:
    run = a_run(gradients=[(10, 1)])
    table = fw.whatif(
        run, workers=8, bandwidth="1Tbps", latency="1ms", algorithm="ring,tree,halving-doubling"
    )
    assert table["communication_s"] == pytest.approx([0.014, 0.006, 0.006], rel=1e-6)


def test_a_share_of_the_line_rate_stretches_the_wire() -> None:
    run = a_run()
    table = fw.whatif(run, workers=8, bandwidth=LINE, transport="full,full:0.5")
    assert table["communication_s"][1] == pytest.approx(2 * table["communication_s"][0])


def test_a_codec_that_must_gather_costs_more_with_every_worker() -> None:
    run = a_run()
    table = fw.whatif(run, workers="4,64", bandwidth=LINE, codec="100,5GB/s,50GB/s,gather")
    wire = [8 * 50e6 * 3 / 100 / 10e9, 8 * 50e6 * 63 / 100 / 10e9]
    packing = [50e6 * (1 / 5e9 + 4 / 50e9), 50e6 * (1 / 5e9 + 64 / 50e9)]
    assert table["communication_s"] == pytest.approx(
        [w + p for w, p in zip(wire, packing, strict=True)]
    )


def test_a_codec_that_can_be_summed_packs_and_unpacks_once() -> None:
    run = a_run()
    free, costly = fw.whatif(
        run, workers=8, bandwidth=LINE, compression=4, codec="4,10GB/s,10GB/s,sum"
    )["communication_s"]
    assert costly - free == pytest.approx(50e6 * 2 / 10e9)


def test_priority_hides_messages_behind_the_next_forward() -> None:
    run = a_run(gradients=[(10, 25_000_000), (10, 25_000_000), (20, 2_500_000)], forward_ms=30)
    conditions: dict[str, Any] = {"workers": 2, "bandwidth": LINE, "buckets": "none"}
    # In order, the last message ends at 10 + 20 + 20 + 2 = 52 ms and the next forward begins.
    assert step_s(run, **conditions, lane="fifo") == pytest.approx(0.082)
    # With priority it overtakes one message, the forward's first half runs from 32 to 47 ms, and
    # its second half waits until 52 ms for the message that was overtaken.
    assert step_s(run, **conditions, lane="priority") == pytest.approx(0.067)


def test_without_conditions_the_usual_clusters_are_predicted() -> None:
    table = fw.whatif("resnet50@v100")
    assert sorted(set(table["workers"].tolist())) == [2, 4, 8, 16, 32, 64]
    assert len(table) == 30


def test_conditions_default_to_what_was_recorded() -> None:
    facts: dict[str, FactValue] = {
        "workers": 16,
        "line_rate_bps": 25e9,
        "buckets": "ddp:50MiB",
        "algorithm": "tree",
    }
    table = fw.whatif(a_run(facts=facts))
    row = {name: column[0] for name, column in table.columns().items()}
    assert (row["workers"], row["bandwidth_bps"]) == (16, 25e9)
    assert (row["buckets"], row["algorithm"]) == ("ddp:50MiB", "tree")


def test_every_result_that_rests_on_a_built_in_model_says_modelled() -> None:
    result = fw.whatif("vgg16@v100", workers=8, bandwidth=LINE)
    assert result.basis == {"vgg16@v100": "modelled"}
    assert any("modelled, not measured" in sentence for sentence in result.warnings)
    replayed = fw.replay("vgg16@v100", workers=8, bandwidth=LINE)
    again = fw.whatif(replayed, workers=64, bandwidth=LINE)
    assert any("modelled, not measured" in sentence for sentence in again.warnings)
    [said] = fw.whatif(a_run(), workers=8, bandwidth=LINE).warnings
    assert "no interval" in said


def test_a_partial_run_is_said_in_the_result() -> None:
    result = fw.whatif(a_run(missing=("rank 3 is missing",)), workers=8, bandwidth=LINE)
    assert "a test is partial: rank 3 is missing." in result.warnings


def test_scalars_text_sequences_and_arrays_ask_the_same() -> None:
    run = a_run()
    asked = [
        fw.whatif(run, workers="8,64", bandwidth="10Gbps,25Gbps"),
        fw.whatif(run, workers=[8, 64], bandwidth=[10e9, "25Gbps"]),
        fw.whatif(run, workers=np.array([8, 64]), bandwidth=np.array([10e9, 25e9])),
        fw.whatif(run, workers=(n for n in (8, 64)), bandwidth=(10e9, 25e9)),
    ]
    for table in asked:
        assert table["step_s"].tolist() == asked[0]["step_s"].tolist()
        assert table["workers"].tolist() == [8, 8, 64, 64]


@pytest.mark.parametrize(
    ("conditions", "message"),
    [
        ({"workers": "0"}, "workers: expected a whole number from 1"),
        ({"workers": "8.5"}, "workers"),
        ({"workers": "8,,64"}, "workers"),
        ({"workers": []}, "workers: expected at least one value"),
        ({"bandwidth": "10"}, "bandwidth: expected a rate with its unit"),
        ({"bandwidth": "-1Gbps"}, "bandwidth: expected more than 0"),
        ({"bandwidth": float("nan")}, "bandwidth"),
        ({"compression": "0.5"}, "compression: expected a ratio of 1 or more"),
        ({"transport": "nearly"}, "transport: expected full"),
        ({"transport": "full:1.5"}, "transport share"),
        ({"algorithm": "rings"}, "algorithm: expected ring or tree or halving-doubling"),
        ({"buckets": "25"}, "buckets: expected"),
        ({"lane": "lifo"}, "lane: expected fifo or priority"),
        ({"codec": "4,1GB/s"}, "codec: expected RATIO"),
        ({"target": "1.5"}, "target: expected a scaling factor between 0 and 1"),
        ({"latency": "-5us"}, "latency"),
        ({"workers": range(1, 20_000), "bandwidth": np.linspace(1e9, 2e9, 20_000)}, "a grid of"),
    ],
)
def test_what_cannot_be_is_refused_with_what_was_expected(
    conditions: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        fw.whatif(a_run(), **conditions)


def test_a_run_without_gradients_is_refused_with_what_is_missing() -> None:
    run = a_run()
    bare = Run(provenance=run.provenance, spans=run.spans)
    with pytest.raises(UsageError, match="needs one backward pass with gradients"):
        fw.whatif(bare)
    with pytest.raises(UsageError, match="needs marks of steps"):
        fw.whatif(Run(provenance=run.provenance, gradients=run.gradients))


def test_a_log_and_a_table_are_refused_by_what_they_are_and_with_what_would_do(
    tmp_path: Path, shared_data: Path
) -> None:
    log = tmp_path / "train.log"
    log.write_text("".join(f"iter {n}: loss 2.8, time {100 + n}.0ms, mfu 1%\n" for n in range(9)))
    with pytest.raises(UsageError, match=r"it tells how long its steps took.*fullwire record"):
        fw.whatif(read(log), workers=4)
    table = read(shared_data / "nccl" / "nccl_allreduce.log")
    with pytest.raises(UsageError, match=r"it tells times of collectives.*--transport FILE"):
        fw.whatif(table, workers=4)


def test_a_small_scaling_factor_has_as_many_digits_as_its_table() -> None:
    few = fw.whatif("vgg16@v100", workers=64, bandwidth="100Mbps")
    said, factor = sentence(few.answer), float(few["scaling_factor"][0])
    assert factor < 0.1
    assert f"Scaling factor {factor:.3f}." in said


def test_a_run_that_lost_its_spans_is_refused_as_damaged() -> None:
    lost = gaps_of(["spans.parquet: damaged, not read"], table="spans")
    run = dataclasses.replace(a_run(), gaps=lost)
    bare = Run(provenance=run.provenance, gradients=run.gradients, gaps=run.gaps)
    with pytest.raises(DamagedInput, match=r"a test: nothing is predicted .*: spans.parquet: dama"):
        fw.whatif(bare)


@pytest.mark.parametrize("gradients", [[(10, 0)], [(10, 2**62)]])
def test_sizes_that_cannot_be_are_refused(gradients: list[tuple[float, int]]) -> None:
    with pytest.raises(DamagedInput, match="step 0 of rank 0: times or gradient sizes"):
        fw.whatif(a_run(gradients=gradients))


@pytest.mark.parametrize(
    ("gradient", "problem"),
    [
        ((10, -5), "Gradients.bytes: expected 0 or more B, got -5"),
        ((-3, 100), "Spans.end_ns: expected start_ns 10000000 or later, got 7000000 in row 2"),
    ],
)
def test_no_run_is_made_of_bytes_and_times_below_nothing(
    gradient: tuple[float, int], problem: str
) -> None:
    with pytest.raises(UsageError, match=problem):
        a_run(gradients=[gradient])


# Laws. Gradients, cluster sizes and rates are generated; each law holds to the last bit.

runs = st.lists(
    st.tuples(st.floats(0, 20), st.integers(1, 200_000_000)), min_size=1, max_size=12
).map(
    lambda step: a_run(
        gradients=[
            (at, size)
            for at, (_, size) in zip(np.cumsum([w + 0.001 for w, _ in step]), step, strict=True)
        ],
        facts={"workers": 1, "reduce_cost": ((1e3, 1e-5), (1e6, 2e-5), (1e9, 3e-3))},
    )
)
sizes = st.integers(1, 2_000)
rates = st.floats(1e7, 1e13)
late = st.floats(0, 1e-2)
fixed_policies = st.sampled_from(["none", "ddp", "ddp:50MiB", "paper", "horovod:64MiB/5ms"])
kinds = st.sampled_from(["ring", "tree", "halving-doubling"])


@given(runs, sizes, rates, rates, late, fixed_policies, kinds)
def test_more_bandwidth_never_slows_a_step(
    run: Run, workers: int, one: float, other: float, latency: float, buckets: str, kind: str
) -> None:
    table = fw.whatif(
        run,
        workers=workers,
        bandwidth=sorted([one, other]),
        latency=latency,
        buckets=buckets,
        algorithm=kind,
    )
    assert table["step_s"][1] <= table["step_s"][0]


@given(runs, sizes, rates, late, late, fixed_policies, kinds)
def test_less_latency_never_slows_a_step(
    run: Run, workers: int, rate: float, one: float, other: float, buckets: str, kind: str
) -> None:
    table = fw.whatif(
        run,
        workers=workers,
        bandwidth=rate,
        latency=sorted([one, other]),
        buckets=buckets,
        algorithm=kind,
    )
    assert table["step_s"][0] <= table["step_s"][1]


@given(runs, sizes, rates, st.floats(1, 1000), st.floats(1, 1000), fixed_policies, kinds)
def test_fewer_bytes_never_slow_a_step(
    run: Run, workers: int, rate: float, one: float, other: float, buckets: str, kind: str
) -> None:
    table = fw.whatif(
        run,
        workers=workers,
        bandwidth=rate,
        compression=sorted([one, other]),
        buckets=buckets,
        algorithm=kind,
    )
    assert table["step_s"][1] <= table["step_s"][0]


@given(runs, rates, late, fixed_policies, kinds, st.sampled_from(["fifo", "priority"]))
def test_one_worker_loses_nothing(
    run: Run, rate: float, latency: float, buckets: str, kind: str, lane: str
) -> None:
    table = fw.whatif(
        run,
        workers=1,
        bandwidth=rate,
        latency=latency,
        buckets=buckets,
        algorithm=kind,
        lane=lane,
        codec="4,1GB/s,1GB/s,gather",
    )
    assert table["overhead_s"].tolist() == [0.0]
    assert table["scaling_factor"].tolist() == [1.0]
    assert table["communication_s"].tolist() == [0.0]


@given(runs, sizes, rates, fixed_policies)
def test_every_gradient_byte_crosses_the_wire_as_often_as_a_ring_says(
    run: Run, workers: int, rate: float, buckets: str
) -> None:
    table = fw.whatif(run, workers=workers, bandwidth=rate, buckets=buckets)
    sent_bytes = table["network_utilization"] * table["step_s"] * rate / 8
    total = int(run.gradients.bytes.sum())
    assert sent_bytes[0] == pytest.approx(2 * (workers - 1) / workers * total)


@given(runs, sizes, rates, late, kinds, st.sampled_from([0.25, 0.5, 2.0, 8.0]))
def test_scaling_every_time_and_rate_scales_the_step_exactly(
    run: Run, workers: int, rate: float, latency: float, kind: str, scale: float
) -> None:
    run = whole_in(run, 4)
    other = stretched(run, scale)
    step = step_s(
        run, workers=workers, bandwidth=rate, latency=latency, algorithm=kind, buckets="none"
    )
    assert step * scale == step_s(
        other,
        workers=workers,
        bandwidth=rate / scale,
        latency=latency * scale,
        algorithm=kind,
        buckets="none",
    )


def stretched(run: Run, scale: float) -> Run:
    """Make the same run with every time longer by the scale."""
    begin_ns = run.spans.end_ns[1]
    ready_ms = (run.gradients.ready_ns - begin_ns) * scale / 1e6
    cost = run.facts.reduce_cost
    assert isinstance(cost, tuple)
    return a_run(
        gradients=list(zip(ready_ms.tolist(), run.gradients.bytes.tolist(), strict=True)),
        forward_ms=int(begin_ns) * scale / 1e6,
        facts={"workers": 1, "reduce_cost": tuple((size, time * scale) for size, time in cost)},
    )


def whole_in(run: Run, divisor: int) -> Run:
    """Round a run's times so that they stay whole nanoseconds when divided."""
    begin_ns = run.spans.end_ns[1]
    ready_ns = (run.gradients.ready_ns - begin_ns) // divisor * divisor + divisor
    return a_run(
        gradients=[
            (at / 1e6, size)
            for at, size in zip(ready_ns.tolist(), run.gradients.bytes.tolist(), strict=True)
        ],
        facts=run.facts.known(),
    )


@cases(25)
@given(
    runs,
    st.lists(sizes, min_size=1, max_size=4),
    st.lists(rates, min_size=1, max_size=4),
    st.lists(st.floats(1, 100), min_size=1, max_size=3),
    st.sampled_from(["fifo", "priority"]),
)
def test_a_grid_equals_its_points_to_the_last_bit(
    run: Run, workers: list[int], bandwidth: list[float], ratios: list[float], lane: str
) -> None:
    codecs = ["8,3GB/s,9GB/s,gather", "2,3GB/s,9GB/s,sum"]
    grid = fw.whatif(
        run,
        workers=workers,
        bandwidth=bandwidth,
        compression=ratios,
        codec=codecs,
        latency=[0.0, 1e-5],
        buckets=["ddp", "none"],
        lane=lane,
    )
    picked = np.linspace(0, len(grid) - 1, 12).astype(int)
    for row in picked.tolist():
        one = point(run, grid, row, lane)
        for name in (
            "step_s",
            "communication_s",
            "overhead_s",
            "scaling_factor",
            "network_utilization",
        ):
            assert one[name][0] == grid[name][row], name


def point(run: Run, grid: WhatIf, row: int, lane: str) -> WhatIf:
    codec = grid["codec"][row]
    return fw.whatif(
        run,
        workers=grid["workers"][row],
        bandwidth=grid["bandwidth_bps"][row],
        compression=None if codec else grid["compression"][row],
        codec=codec,
        latency=grid["latency_s"][row],
        buckets=grid["buckets"][row],
        lane=lane,
    )


# Where a law stops holding, one example shows it.


def test_with_an_add_table_that_falls_fewer_bytes_can_slow_a_step() -> None:
    facts: dict[str, FactValue] = {"workers": 1, "reduce_cost": ((1e6, 0.5), (1e8, 0.001))}
    small = a_run(gradients=[(10, 2_000_000)], facts=facts)
    large = a_run(gradients=[(10, 200_000_000)], facts=facts)
    assert step_s(small, workers=2, bandwidth="1Tbps") > step_s(large, workers=2, bandwidth="1Tbps")


def test_with_a_flush_by_time_a_faster_backward_can_slow_a_step() -> None:
    # At its usual pace both gradients wait 6 ms, so each leaves by itself and the first overlaps
    # the backward pass. Twice as fast, they wait 3 ms, share a message and leave at the end.
    conditions: dict[str, Any] = {"workers": 2, "bandwidth": LINE, "buckets": "64MiB/5ms"}
    usual = a_run(gradients=[(6, 30_000_000), (12, 1_000)], forward_ms=0)
    faster = a_run(gradients=[(4.9, 30_000_000), (9.7, 1_000)], forward_ms=0)
    assert step_s(faster, **conditions) > step_s(usual, **conditions)


def test_with_priority_a_faster_network_can_slow_a_step() -> None:
    # At 10 Gbps the lane is busy until the urgent last message is ready, and takes it next. At
    # 20 Gbps a large message has just begun, cannot be stopped, and the next forward waits for it.
    run = a_run(gradients=[(1, 47_500_000), (19, 100_000_000), (38.9, 1_000_000)], forward_ms=400)
    conditions: dict[str, Any] = {"workers": 2, "buckets": "none", "lane": "priority"}
    slow = step_s(run, bandwidth="10Gbps", **conditions)
    fast = step_s(run, bandwidth="20Gbps", **conditions)
    assert fast > slow


def test_help_lists_every_condition_and_a_wrong_name_lists_them_too() -> None:
    listed = inspect.signature(fw.whatif).parameters
    for name in ("bandwidth", "local_steps", "critical_batch"):
        assert listed[name].kind is inspect.Parameter.KEYWORD_ONLY
    assert listed["transport"].default == "full"
    with pytest.raises(UsageError, match=r"bandwidth, .*price, compute_speed.*got 'bandwith'"):
        fw.whatif("vgg16@v100", bandwith="10Gbps")  # type: ignore[call-arg]


def test_settings_that_change_nothing_are_answered_as_one() -> None:
    table = fw.whatif("resnet50@v100", workers=1, bandwidth="1Gbps,10Gbps")
    assert sentence(table.answer) == (
        "resnet50@v100: a step takes 96.23 ms in each of 2 settings. Scaling factor 1.000."
    )
    table = fw.whatif("resnet50@v100", workers="1,8", bandwidth="1Gbps")
    assert "1.000 (1 worker)" in sentence(table.answer)


def test_gradients_that_were_never_sent_are_not_predicted_as_sums() -> None:
    run = a_job_of_experts()
    table = fw.whatif(run, bandwidth="1Gbps,500Mbps", transport="full,measured")
    # Each of four exchanges has 1 MB, and two in three of its bytes leave a rank.
    exchanged_s = 4 * 8e6 * 2 / 3 / table["bandwidth_bps"]
    is_full = table["transport"] == "full"
    assert table["communication_s"][is_full] == pytest.approx(exchanged_s[is_full])
    assert table["network_utilization"] == pytest.approx(exchanged_s / table["step_s"])
    recorded_s = run.spans.end_ns[0] * 1e-9
    is_recorded = (table["transport"] == "measured") & (table["bandwidth_bps"] == 1e9)
    assert table["step_s"][is_recorded] == pytest.approx(recorded_s)
    assert any("sum fewer bytes than its gradients" in sentence for sentence in table.warnings)
    assert not any("fewer bytes" in told for told in fw.whatif(a_trained_job()).warnings)


@pytest.mark.parametrize(
    "asked",
    [{"buckets": "none"}, {"compression": 2}, {"accumulate": 4}, {"local_steps": 8}],
    ids=lambda asked: next(iter(asked)),
)
def test_conditions_of_sums_are_refused_where_no_gradients_are_summed(asked: Any) -> None:
    assert len(fw.whatif(a_trained_job(), **asked)) == 1
    [name] = asked
    with pytest.raises(UsageError, match=f"^{name.replace('_', ' ')}: expected a run whose coll"):
        fw.whatif(a_job_of_experts(), **asked)


def test_several_workers_whose_steps_lack_communication_are_not_predicted() -> None:
    job = a_trained_job()
    silent = dataclasses.replace(
        job, collectives=Collectives.empty(), facts=a_job_of_experts().facts
    )
    with pytest.raises(UsageError, match=f"{NO_COMMUNICATION}, so nothing .* Record one worker"):
        fw.whatif(silent, bandwidth="1Gbps")
    assert f"Fixes are not predicted: {NO_COMMUNICATION}." in sentences(fw.explain(silent).notes)
    alone = dataclasses.replace(silent, facts=silent.facts | Facts(workers=1))
    assert factor(alone, workers=3, bandwidth="1Gbps") < 1  # sums of its gradients are supposed


def test_conditions_of_a_target_may_be_arrays_and_empty_lists() -> None:
    with pytest.raises(UsageError, match="global batch: expected a metric as the target with it"):
        fw.whatif("vgg16@v100", global_batch=np.array([256, 512]))
    assert len(fw.whatif("vgg16@v100", curve=[])) > 0


def test_a_run_played_on_a_fitted_cluster_may_be_asked_about_another() -> None:
    measured = Measured(
        protocols=USUAL_PROTOCOLS, tree_share=0.9, pair_share=1.0, spread=0.1, source="a test"
    )
    described = dataclasses.replace(described_cluster("dgx-h100", 4), measured=measured)
    played = fw.replay("vgg16@v100", cluster=described)
    assert set(fw.whatif(played, cluster=described)["algorithm"]) == {"library"}
    assert "library" not in set(fw.whatif(played, cluster="dgx-a100")["algorithm"])


def test_buckets_are_refused_for_a_run_that_keeps_its_gradients() -> None:
    with pytest.raises(UsageError, match="buckets: expected a run whose collectives sum"):
        fw.whatif(a_job_of_experts(), bandwidth="10Gbps", workers=3, buckets="ddp")


def test_a_run_without_marks_of_steps_is_not_called_silent() -> None:
    job = a_trained_job()
    unmarked = dataclasses.replace(job, spans=job.spans.rows(job.spans.name != "step"))
    with pytest.raises(UsageError, match="a what-if needs marks of steps"):
        fw.whatif(unmarked, bandwidth="10Gbps")


def test_ranks_whose_steps_have_nothing_in_common_are_refused_in_a_sentence() -> None:
    """Nine steps of 17 to 600 ms: rank 0 waits for longer than a usual step of rank 1 takes."""
    place = Path(__file__).parents[1] / "data/format-1/lab-sharded.run"
    said = "its ranks' steps are too unlike to predict from: one rank waits 45.58 ms for"
    with pytest.raises(UsageError, match=said):
        fw.whatif(place, transport="measured")
    assert any(said in warning for warning in fw.explain(place).warnings)


def test_links_in_nodes_of_a_least_rate_may_be_as_fast_as_any_known() -> None:
    """A fit without a table of one node knows only which rate these links reach."""
    machine = described_cluster("dgx-a100")
    assert machine.inside is not None
    asked: dict[str, Any] = {"workers": 8}
    slow, least, fastest = (
        fw.whatif(
            a_trained_job(),
            cluster=dataclasses.replace(
                machine,
                inside=dataclasses.replace(
                    machine.inside, rate_bps=rate_bps, rate_is_least=is_least
                ),
            ),
            **asked,
        )
        for rate_bps, is_least in ((20e9, False), (20e9, True), (7.2e12, False))
    )
    assert least["step_s"].tolist() == slow["step_s"].tolist()
    assert least.interval_s[0][0] == fastest.interval_s[0][0] < slow.interval_s[0][0]
    assert least.interval_s[1][0] == slow.interval_s[1][0]
    told = "links within a node of dgx-a100 is only known to be reached"
    assert [told in " ".join(each.warnings) for each in (slow, least, fastest)] == [
        False,
        True,
        False,
    ]


def test_nics_that_no_table_tells_may_be_slow_or_fast() -> None:
    """Tables of one node tell nothing of NICs, and those of full nodes not how many there are."""
    machine = described_cluster("dgx-a100", 2)
    shown = [
        Shown(op="allreduce", workers=workers, bytes=(2**20,), times=(1.0,)) for workers in (8, 16)
    ]
    measured = Measured(
        protocols=USUAL_PROTOCOLS, tree_share=0.9, pair_share=1.0, spread=0.1, source="a test"
    )
    nics = dataclasses.replace(machine.nics, of_tables=True)
    for tables, workers, is_open in ((1, 16, True), (2, 16, False), (2, 12, True), (1, 8, False)):
        fit = dataclasses.replace(measured, shown=tuple(shown[:tables]))
        asked: dict[str, Any] = {"workers": workers}
        known, made = (
            fw.whatif(
                a_trained_job(),
                cluster=dataclasses.replace(machine, measured=fit, nics=which),
                **asked,
            )
            for which in (machine.nics, nics)
        )
        assert made["step_s"].tolist() == known["step_s"].tolist()
        assert (made.interval_s[0][0] < known.interval_s[0][0]) == is_open
        assert (made.interval_s[1][0] > known.interval_s[1][0]) == (is_open and tables == 1)
        assert ("tell too little of its NICs" in " ".join(made.warnings)) == is_open
        assert ("Intervals, where there are any" in " ".join(made.warnings)) == is_open
        assert "tell too little" not in " ".join(known.warnings)
        where = dataclasses.replace(machine, measured=fit, nics=nics)
        stated = fw.whatif(a_trained_job(), cluster=where, bandwidth="150Gbps", **asked)
        is_open &= tables == 2  # their number stays open
        assert ("tell too little of its NICs" in " ".join(stated.warnings)) == is_open
