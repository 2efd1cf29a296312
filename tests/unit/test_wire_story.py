"""Training in packets beyond iterations: collectives, ranks, causes, hot spots, more shapes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fullwire as fw
from fullwire.answers.audited import AuditedTraffic, audited
from fullwire.answers.compare import compare
from fullwire.answers.traffic import flows_and_run
from fullwire.errors import UsageError
from fullwire.packets.edges import read_hosts
from fullwire.packets.flows import analyse_flows
from fullwire.packets.pattern import Pattern, find_pattern
from fullwire.packets.usual_iteration import usual_iteration
from fullwire.packets.wire_steps import with_steps
from fullwire.run.run import Flows, Messages, Run, Spans
from fullwire.words import sentence, sentences
from tests.conftest import Cli
from tests.strategies import cases, tables
from tests.traffic_by_hand import MS, Sent, ring, told, traffic

Collective = tuple[str, int, int, float, float]
MB = 10**6


def analysed(run: Run, *, model_bytes: float | None = None) -> AuditedTraffic:
    return audited(analyse_flows(run, model_bytes=model_bytes))


def said_of(collectives: list[Collective], hosts: int = 4, **how: int) -> AuditedTraffic:
    sent, messages = told(hosts, collectives, **how)
    return analysed(traffic(sent, messages=messages))


def trained(
    iterations: int,
    buckets: list[tuple[int, float]],
    *,
    gap_ms: float,
    between_ms: float = 2,
    startup: int = 0,
    first: list[tuple[int, float]] | None = None,
) -> list[Collective]:
    """Return all-reduces of (bytes, ms) in each iteration, perhaps others in the first."""
    done: list[Collective] = [("broadcast", 1, startup, 10, 40)] if startup else []
    now, number = 100.0, 2
    for iteration in range(iterations):
        for size, lasts in first if first and not iteration else buckets:
            done.append(("allreduce", number, size, now, now + lasts))
            now, number = now + lasts + between_ms, number + 1
        now += gap_ms
    return done


def count(result: AuditedTraffic) -> int:
    return 0 if result.iterations is None else result.iterations.count


def test_collectives_are_iterations_also_where_nothing_falls_silent() -> None:
    buckets = [(1 * MB, 8.0), (6 * MB, 40.0), (5 * MB, 30.0)]
    result = said_of(trained(9, buckets, gap_ms=0, between_ms=0))
    assert count(result) == 9
    assert result.gradient_bytes == pytest.approx(12 * MB, rel=1e-3)
    assert result.iterations is not None
    assert result.iterations.basis == "messages"
    assert result.iterations.period_s == pytest.approx(0.078, rel=0.01)


def test_traffic_before_the_zero_of_a_recording_is_told_as_any_other() -> None:
    """A recording counts its times from the end of the job's start, and packets come before it."""
    buckets = [(1 * MB, 8.0), (6 * MB, 40.0), (5 * MB, 30.0)]
    sent, messages = told(3, trained(30, buckets, gap_ms=20, startup=12 * MB))
    usual = traffic(sent, messages=messages)
    flows, rows, early_ns = usual.flows, usual.messages, 2000 * MS
    moved = replace(
        usual,
        flows=replace(flows, start_ns=flows.start_ns - early_ns, end_ns=flows.end_ns - early_ns),
        messages=replace(
            rows,
            begin_ns=rows.begin_ns - early_ns,
            first_ns=np.where(rows.has_data, rows.first_ns - early_ns, 0),
            last_ns=np.where(rows.has_data, rows.last_ns - early_ns, 0),
        ),
    )
    result = analysed(moved)
    assert result.audit == analysed(usual).audit
    assert count(result) == 30
    assert result.gradient_bytes == pytest.approx(12 * MB, rel=1e-3)
    there, here = (with_steps(each, analyse_flows(each)).collectives for each in (moved, usual))
    assert (there.end_ns + early_ns).tolist() == here.end_ns.tolist()
    assert (there.start_ns + early_ns).tolist() == here.start_ns.tolist()


def test_buckets_that_are_cut_anew_after_the_first_iteration_leave_the_count() -> None:
    first = [(4 * MB, 20.0), (8 * MB, 50.0)]
    buckets = [(1 * MB, 8.0), (6 * MB, 40.0), (5 * MB, 30.0)]
    assert count(said_of(trained(8, buckets, gap_ms=30, first=first))) == 8


def test_equal_buckets_are_one_iteration_where_the_model_or_silence_says_so() -> None:
    buckets = [(3 * MB, 20.0)] * 4
    assert count(said_of(trained(7, buckets, gap_ms=40, between_ms=1))) == 7
    assert count(said_of(trained(7, buckets, gap_ms=0, between_ms=0, startup=12 * MB))) == 7


def test_half_the_model_after_every_silence_is_16_bits_and_no_half_iteration() -> None:
    result = said_of(trained(10, [(6 * MB, 40.0)], gap_ms=60, startup=12 * MB))
    assert count(result) == 10
    assert any("gradients go as 16 bits each" in each for each in result.audit)


def test_an_evaluation_after_every_fifth_iteration_is_none() -> None:
    done = trained(20, [(6 * MB, 40.0)], gap_ms=60, startup=6 * MB)
    paused = [
        (op, n, size, start + 500 * ((n - 2) // 5), end + 500 * ((n - 2) // 5))
        for op, n, size, start, end in done
    ]
    extra = [
        ("broadcast", 100 + n, 2 * MB, end + 200, end + 250)
        for _, n, _, _, end in paused
        if n > 1 and (n - 1) % 5 == 0
    ]
    assert count(said_of(sorted([*paused, *extra], key=lambda each: each[3]))) == 20


def test_gathers_and_reductions_are_told_apart_as_sharding() -> None:
    done: list[Collective] = []
    for iteration in range(8):
        now = 100 + iteration * 200.0
        for place, op in enumerate(["allgather"] * 4 + ["allreduce"] * 2):
            number = iteration * 6 + place
            done.append((op, number, 2 * MB, now + place * 25, now + place * 25 + 20))
    result = said_of(done)
    assert count(result) == 8
    assert result.gathered_bytes == pytest.approx(8 * MB, rel=1e-3)
    assert result.gradient_bytes == pytest.approx(4 * MB, rel=1e-3)
    assert any("parameters are sharded" in each for each in result.audit)


def test_one_iteration_is_shown_as_its_collectives_and_who_came_last() -> None:
    usual = usual_iteration(said_of(trained(6, [(2 * MB, 20.0)], gap_ms=30), late=2))
    assert usual is not None
    (only,) = usual.collectives
    assert only.op == "allreduce"
    assert only.bytes == pytest.approx(2 * MB, rel=1e-3)
    assert only.last_to_come == 2
    assert list(only.came_s) == pytest.approx([0, 0, 0.005, 0])
    assert only.end_s == pytest.approx(0.025)


def test_the_host_that_keeps_the_others_waiting_is_named() -> None:
    audit = said_of(trained(8, [(2 * MB, 20.0)], gap_ms=10), late=2).audit
    assert (
        "10.0.0.3 comes last to 100% of the collectives, 5 ms an iteration after the others: they "
        "wait for it, not for the network"
    ) in audit
    patient = said_of(trained(8, [(2 * MB, 20.0)], gap_ms=90), late=2).audit
    assert not any("comes last" in each for each in patient)


def test_collectives_of_unknown_share_are_not_told_a_size() -> None:
    sent, messages = told(4, trained(6, [(2 * MB, 30.0), (2 * MB, 30.0)], gap_ms=50))
    overlapping = replace(
        messages,
        last_ns=messages.last_ns + 10 * MS,
        payload_bytes=messages.payload_bytes // 2,
        unread_bytes=messages.payload_bytes - messages.payload_bytes // 2,
    )
    result = analysed(traffic(sent, messages=overlapping))
    usual = usual_iteration(result)
    assert usual is not None
    assert [each.bytes for each in usual.collectives] == [None, None]
    assert count(result) == 6


def test_a_slow_link_that_still_sends_when_others_have_begun_anew_tangles_nothing() -> None:
    sent, messages = told(4, trained(15, [(2 * MB, 40.0)], gap_ms=2))
    late_ns = np.where(messages.source == "10.0.0.3:29500", 15 * MS, 0)
    read = messages.payload_bytes // 2
    slow = replace(
        messages,
        first_ns=messages.first_ns + late_ns,
        last_ns=messages.last_ns + late_ns,
        payload_bytes=read,
        unread_bytes=messages.payload_bytes - read,
    )
    result = analysed(traffic(sent, messages=slow))
    assert count(result) == 15
    assert result.iterations is not None
    assert result.iterations.basis == "messages"
    assert result.iterations.communicating_s <= result.iterations.period_s
    assert result.gradient_bytes == pytest.approx(2 * MB, rel=1e-3)
    usual = usual_iteration(result)
    assert usual is not None
    assert len(usual.collectives) == 1


def test_what_is_counted_with_the_collective_before_is_told_by_the_sum_of_both() -> None:
    sent, messages = told(4, trained(9, [(3 * MB, 20.0), (3 * MB, 20.0)], gap_ms=40))
    late_ns = np.where(messages.source == "10.0.0.3:29500", 8 * MS, 0)
    moved = np.random.default_rng(1).integers(0, MB, 9)[messages.sequence // 2 - 1]
    payload = messages.payload_bytes + np.where(messages.sequence % 2, -moved, moved)
    unsure = replace(
        messages,
        first_ns=messages.first_ns + late_ns,
        last_ns=messages.last_ns + late_ns,
        payload_bytes=payload // 2,
        unread_bytes=payload - payload // 2,
    )
    result = analysed(traffic(sent, messages=unsure))
    assert count(result) == 9
    assert result.iterations is not None
    assert result.iterations.basis == "messages"


def test_edges_that_only_start_up_used_tell_the_size_and_so_the_count() -> None:
    """A slow link leaves no silence, so the longest one is elsewhere than after start-up."""
    sent: list[Sent] = [(0, 1, 8 * MB, 0, 80), (0, 2, 8 * MB, 0, 80)]
    now = 81.0
    for iteration in range(14):
        for host in range(3):
            begin = now + (20 if host == 2 else 0)
            sent.append((host, (host - 1) % 3, 8 * MB * 4 // 3, begin, begin + 100))
        now += 900 if iteration == 0 else 100
    result = analysed(traffic(sent))
    assert result.pattern.kind == "ring"
    assert count(result) == 14
    assert result.gradient_bytes == pytest.approx(8 * MB, rel=1e-3)


def test_complete_overlap_is_counted_by_what_start_up_broadcast_and_doubted() -> None:
    sent = ring(4, 12, compute_ms=0)
    found = analysed(traffic(sent)).iterations
    assert found is not None
    assert (found.count, found.basis, found.confidence) == (12, "bytes", 0.5)
    assert found.period_s == pytest.approx(0.1, rel=0.01)
    unknown = [each for each in sent if each[3] >= 300]
    assert analysed(traffic(unknown)).iterations is None


def test_packets_make_steps_that_other_questions_take(tmp_path: Path) -> None:
    sent, messages = told(4, trained(9, [(2 * MB, 20.0)], gap_ms=30), late=1)
    run = traffic(sent, messages=messages)
    fw.write(with_steps(run, analysed(run)), tmp_path / "x.run")
    again = fw.read(tmp_path / "x.run")
    found = fw.explain(again)
    assert found.verdict.kind == "unknown"
    assert found.step_s == pytest.approx(0.052, rel=0.02)
    assert 0.003 < found.account["straggler"] < 0.006
    assert any("This run holds no computation" in each for each in found.warnings)
    assert compare(again, again).ratio == 1
    assert count(analysed(again)) == 9
    fw.write_page([again], tmp_path / "x.html")
    assert "This run holds no computation" in (tmp_path / "x.html").read_text()


def test_steps_without_headers_have_traffic_and_no_collectives() -> None:
    run = traffic(ring(3, 8))
    known = with_steps(run, analysed(run))
    assert not len(known.collectives)
    assert set(known.spans.name.tolist()) == {"step", "traffic"}
    assert fw.explain(known).verdict.kind == "unknown"
    assert with_steps(known, analysed(known)) is known


def test_recorded_steps_are_held_against_iterations() -> None:
    run = traffic(ring(3, 8))
    steps = np.arange(8)
    recorded = Spans(
        rank=steps * 0,
        step=steps,
        lane=np.full(8, "host", object),
        name=np.full(8, "step", object),
        start_ns=steps * 160 * MS,
        end_ns=(steps + 1) * 160 * MS,
    )
    audit = analysed(replace(run, spans=recorded)).audit
    assert "the recorder counted 8 steps of 160 ms, as many as packets show" in audit
    audit = analysed(replace(run, spans=recorded.rows(steps < 7))).audit
    assert any("7 steps of 160 ms, packets show 8 iterations" in each for each in audit)


def test_a_lossy_way_where_several_send_at_once_is_a_hot_spot() -> None:
    everyone: list[Sent] = [
        (a, b, MB, n * 100, n * 100 + 40)
        for n in range(6)
        for a in range(4)
        for b in range(4)
        if a != b
    ]
    lossy = analysed(traffic(everyone, again=0.1)).audit
    (said,) = [each for each in lossy if "hot spot" in each]
    assert "of its packets were sent again, against 0.00% elsewhere. 3 hosts send to it" in said
    assert "3 hosts send to it at once (incast)" in said
    assert not any("hot spot" in each for each in analysed(traffic(everyone)).audit)


def test_a_slow_step_in_which_nothing_is_sent_is_not_the_networks() -> None:
    (said,) = [
        each
        for each in analysed(traffic(ring(4, 12, pause_every=5))).audit
        if "longer than usual" in each
    ]
    assert said.startswith("2 of 11 iterations took 1.4 s longer than usual together")
    assert "something else was slow, or paused" in said


def test_two_ranks_send_all_of_the_gradient_each() -> None:
    result = analysed(traffic(ring(2, 10)), model_bytes=8 * MB)
    assert any("8 MB per edge is all of the gradient given, 8 MB" in each for each in result.audit)
    assert any(" went over one edge: a start-up" in each for each in result.audit), result.audit


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (8 * MB, "12 MB per edge is 2(4-1)/4 of the gradient given, 8 MB, within 0.0"),
        (16 * MB, "1/2 of the model: gradients go as 16 bits each"),
        (32 * MB, "1/4 of the model: gradients go as 8 bits each"),
        (80 * MB, "compressed 10.0 times"),
        (4 * MB, "2 times the model: it is reduced 2 times in an iteration"),
    ],
)
def test_bytes_that_differ_from_theory_have_a_cause(model: int, expected: str) -> None:
    result = analysed(traffic(ring(4, 10, startup=False)), model_bytes=model)
    assert any(expected in each for each in result.audit), result.audit


def test_without_the_models_size_ranks_on_a_host_stay_open_and_that_is_said() -> None:
    result = analysed(traffic(ring(4, 10, startup=False, ranks=16)))
    assert result.ranks is None
    assert result.gradient_bytes == pytest.approx(10 * MB, rel=1e-3)
    assert any("with 16 ranks in all the gradient would be 8 MB" in each for each in result.audit)


def test_a_hosts_file_says_addresses_and_ranks(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text(
        "# two rings over two cards each\n"
        "a 10.0.0.1 10.0.0.5 ranks=0-3\nb 10.0.0.2 10.0.0.6 ranks=4-7\n"
    )
    one = ring(2, 8, startup=False)
    sent = [*one, *((a + 4, b + 4, size, start, end) for a, b, size, start, end in one)]
    result, run = flows_and_run(traffic(sent), hosts=file)
    assert result.hosts == ("a", "b")
    assert result.ranks == 8
    assert result.gradient_bytes == pytest.approx(2 * 8 * MB * 8 / 14, rel=1e-3)
    assert run.facts.workers == 8
    assert analysed(traffic(sent)).pattern.kind == "2 separate rings"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected lines like"),
        ("a 10.0.0.1\na 10.0.0.2", "line 2: expected a new host's"),
        ("a 10.0.0", "expected an address, got '10.0.0'"),
        ("a", "a has no address"),
        ("a 10.0.0.1\nb 10.0.0.1", "10.0.0.1 belongs to a and to b"),
        ("a 10.0.0.1 ranks=1-2", "expected ranks from 0"),
        ("a 10.0.0.1 ranks=x", "ranks=0-7"),
        ("a 10.0.0.1 ranks=0-1\nb 10.0.0.2 ranks=1", "rank 1 is on a already"),
    ],
)
def test_a_hosts_file_that_cannot_be_meant_is_refused(
    tmp_path: Path, text: str, message: str
) -> None:
    (tmp_path / "hosts").write_text(text)
    with pytest.raises(UsageError, match=message.replace("(", r"\(")):
        read_hosts(tmp_path / "hosts")


def matrix(hosts: int, edges: Iterator[tuple[int, int, float]]) -> Pattern:
    sent = np.zeros((hosts, hosts))
    for source, target, size in edges:
        sent[source, target] += size
    return find_pattern(sent)


def double_tree(ranks: int) -> Iterator[tuple[int, int, float]]:
    """Yield NCCL's: a tree whose leaves are odd ranks, and its mirror, each half both ways."""
    for rank in range(1, ranks):
        bit = rank & -rank
        above = (rank ^ bit) | bit << 1
        above = rank ^ bit if above >= ranks else above
        for a, b in ((rank, above), (ranks - 1 - rank, ranks - 1 - above)):
            yield a, b, 0.5
            yield b, a, 0.5


@pytest.mark.parametrize("ranks", [4, 6, 8, 12, 16])
def test_a_double_tree_is_taken_apart(ranks: int) -> None:
    found = matrix(ranks, double_tree(ranks))
    assert found.kind == "double tree"
    assert found.gradient_bytes == pytest.approx(1)
    assert all(sorted(tree) == list(range(ranks)) for tree in found.parts)


def test_rings_in_several_orders_are_taken_apart() -> None:
    orders = ((0, 1, 2, 3, 4, 5, 6, 7), (0, 2, 4, 6, 1, 3, 5, 7), (0, 3, 6, 1, 4, 7, 2, 5))
    each = 2 * 7 / 8 / 3
    found = matrix(8, ((o[n], o[(n + 1) % 8], each) for o in orders for n in range(8)))
    assert found.kind == "3 rings"
    assert found.gradient_bytes == pytest.approx(1)
    around = {(o[n], o[(n + 1) % 8]) for o in orders for n in range(8)}
    assert {(o[n], o[(n + 1) % 8]) for o in found.parts for n in range(8)} == around


def rings_of_rings() -> Iterator[tuple[int, int, float]]:
    """Yield rings of four that reduce-scatter and gather; across rings, pairs reduce parts."""
    for group in range(2):
        for n in range(4):
            yield group * 4 + n, group * 4 + (n + 1) % 4, 2 * 3 / 4
    for n in range(4):
        yield n, n + 4, 2 * (1 / 2) / 4
        yield n + 4, n, 2 * (1 / 2) / 4


def leaders() -> Iterator[tuple[int, int, float]]:
    """Three groups of a leader and two more; leaders form a ring."""
    for group in range(3):
        for n in (1, 2):
            yield 3 * group + n, 3 * group, 1
            yield 3 * group, 3 * group + n, 1
        yield 3 * group, 3 * ((group + 1) % 3), 4 / 3


def test_hierarchies_are_groups_within_and_between() -> None:
    found = matrix(8, rings_of_rings())
    assert (found.kind, found.parts) == ("hierarchical", ((0, 1, 2, 3), (4, 5, 6, 7)))
    assert found.gradient_bytes == pytest.approx(1)
    found = matrix(9, leaders())
    assert (found.kind, found.parts) == ("hierarchical", ((0, 1, 2), (3, 4, 5), (6, 7, 8)))
    assert found.gradient_bytes == pytest.approx(1)


def test_random_traffic_is_in_no_pattern() -> None:
    for seed in range(20):
        sent = np.random.default_rng(seed).uniform(0.2, 1, (7, 7))
        assert find_pattern(sent * (1 - np.eye(7))).kind == "none"


def test_the_mit_study_comes_out_as_sentences_with_numbers(shared_data: Path) -> None:
    models = json.loads((shared_data / "farhat" / "anchors.json").read_text())["models"]
    runs: dict[str, Run] = {}
    for name, model in models.items():
        period_ms = 1e3 * model["iter_s_median"]
        edge = round(model["flow_bytes_per_iter_median"])
        sent: list[Sent] = [
            (host, (host - 1) % 4, edge, n * period_ms, n * period_ms + 0.6 * period_ms)
            for n in range(9)
            for host in range(4)
        ]
        size = 4 * model["trainable_params"]
        result = analysed(traffic(sent), model_bytes=size)
        assert result.ranks == 16
        assert "by its bytes the ring has 16 ranks on 4 hosts" in result.audit
        (said,) = [each for each in result.audit if "2(16-1)/16 of the gradient given" in each]
        assert float(said.rpartition("within ")[2].rstrip("%")) <= 0.13
        runs[name] = with_steps(traffic(sent), result)
    said = sentence(compare(runs["inceptionv3"], runs["densenet121"]).findings[-1])
    assert said.startswith(
        "An iteration moves 0.34 times the bytes (59.87 MB per edge against 178.6 MB) and takes 1.4"
    )
    assert said.endswith("times as long. Bytes alone do not set its time.")


def test_a_real_job_is_told_by_its_collectives(shared_data: Path, cli: Cli) -> None:
    captures = sorted((shared_data / "pcap" / "r4_mlp4_tso").glob("*.pcap"))
    done = cli("flows", *captures, "--json", "--gradient", "4239400B")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["iterations"]["basis"] == "messages"
    (only,) = found["iteration"]["collectives"]
    assert only["op"] == "allreduce"
    assert only["bytes"] == pytest.approx(4_239_400, rel=1e-3)
    assert len(only["came_s"]) == 4
    first = found["edges"][0]
    assert 0 < first["rtt_least_s"] <= first["rtt_median_s"] <= first["rtt_long_s"]
    assert any("clocks" in each for each in found["audit"])


def test_no_messages_are_no_collectives() -> None:
    assert analysed(traffic(ring(3, 5), messages=Messages.empty())).collectives is None


@given(tables(Messages))
@cases(60)
def test_any_messages_at_all_are_analysed_or_ignored(messages: Messages) -> None:
    run = traffic(ring(3, 5), messages=messages)
    result = analysed(run)
    usual_iteration(result)
    with_steps(run, result)
    assert count(result) == 5


_NUMBERS = st.integers(0, 2**62)


@given(
    st.lists(
        st.tuples(
            st.integers(0, 3),
            st.integers(0, 3),
            st.sampled_from(["allreduce", "allgather"]),
            st.integers(0, 3),
            _NUMBERS,
            _NUMBERS,
            _NUMBERS,
            st.integers(0, 10**9),
            st.integers(0, 10**9),
            st.integers(0, 5),
        ),
        min_size=1,
        max_size=30,
    )
)
@cases(100)
def test_messages_between_the_hosts_of_any_size_and_time_break_nothing(rows: list[Any]) -> None:
    names = [f"10.0.0.{host + 1}:29500" for host in range(4)]
    columns = list(zip(*rows, strict=True))
    kinds = Messages.column_types()
    table = Messages(
        **{
            name: np.array([names[each] for each in values] if place < 2 else values, kinds[name])
            for place, (name, values) in enumerate(zip(kinds, columns, strict=True))
        }
    )
    run = traffic([(0, 1, 1000, 0, 3), (2, 3, 10, 5, 6)], messages=table)
    result = analysed(run)
    usual_iteration(result)
    with_steps(run, result)


@pytest.mark.parametrize(
    ("edges", "said"),
    [
        ([(a, b) for a in range(4) for b in range(4) if a != b], "everyone with everyone alike"),
        ([(a, b) for a, b in ((0, 1), (1, 0), (2, 3), (3, 2))], "2 separate rings: 10.0.0.1 -> "),
        ([e for n in (1, 2, 3, 4) for e in ((0, n), (n, 0))], "a parameter server at 10.0.0.1"),
        ([e for n in (0, 2) for e in ((1, n), (n, 1))], "a tree around 10.0.0.2"),
        ([(a, a ^ b) for a in range(8) for b in (1, 2, 4)], "in recursive doubling"),
    ],
)
def test_every_shape_is_said_in_words(edges: list[tuple[int, int]], said: str) -> None:
    sent: list[Sent] = [(a, b, MB, n * 100, n * 100 + 50) for n in range(6) for a, b in edges]
    assert said in sentences(analysed(traffic(sent)).story)[0]


def test_evaluations_between_groups_of_iterations_are_known_by_the_models_size() -> None:
    sent: list[Sent] = [(0, 1, 8 * MB, 0, 80), (0, 2, 8 * MB, 0, 80)]
    now = 300.0
    for iteration in range(20):
        sent += [(host, (host - 1) % 3, 8 * MB * 4 // 3, now, now + 90) for host in range(3)]
        now += 120
        if iteration % 5 == 4:
            sent += [(0, 1, 2 * MB, now + 400, now + 420), (0, 2, 2 * MB, now + 400, now + 440)]
            now += 450
    result = analysed(traffic(sent))
    assert count(result) == 20
    assert result.gradient_bytes == pytest.approx(8 * MB, rel=1e-3)


def test_the_same_bytes_over_other_edges_in_turn_are_no_iterations() -> None:
    sent: list[Sent] = [
        (2 * (n % 3), 2 * (n % 3) + 1, 8 * MB, n * 100, n * 100 + 60) for n in range(12)
    ]
    assert analysed(traffic(sent)).iterations is None


def test_a_broadcast_to_each_of_several_ranks_on_a_host_counts_once() -> None:
    sent = ring(2, 8, startup=False, ranks=4)
    run = traffic([(0, 1, 16 * MB, 0, 160), *sent])
    early = run.flows.start_ns < 160 * MS
    halves = replace(run.flows, payload_bytes=run.flows.payload_bytes // np.where(early, 2, 1))
    second = halves.rows(early)
    other = replace(second, source=np.array(["10.0.0.1:29501"] * len(second), object))
    both = replace(run, flows=Flows.joined([halves, other]))
    result = analysed(both)
    assert result.ranks == 4
    assert result.gradient_bytes == pytest.approx(8 * MB, rel=1e-3)
