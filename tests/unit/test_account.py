"""The account: every nanosecond of a step belongs to one part, and to the right one."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fullwire as fw
from fullwire.errors import DamagedInput, FullwireError
from fullwire.findings.between import between_steps, outside_of_steps
from fullwire.run.facts import Facts
from fullwire.run.run import Collectives, Run, Spans
from fullwire.run.usual import kept_steps, pauses, usual_steps
from fullwire.timeline.account import Part, account
from fullwire.timeline.summary import summarised
from fullwire.words import sentence
from tests.builders import steps_run
from tests.jobs_by_hand import MS, Rank, a_job
from tests.strategies import cases, runs

BACKWARD = ("compute", "backward", 0.0, 50.0)
RATES = {0: 1e9, 1: 1e9, 2: 1e9}
PER_MS = 125_000  # bytes at 1 Gbps


def parts_ms(run: Run, rates: dict[int, float] = RATES) -> dict[str, float]:
    found = account(run, rates).parts_s
    return {key: round(time_s * 1000, 6) for key, time_s in found.items() if time_s}


def test_overlapped_communication_costs_nothing() -> None:
    rank = Rank(60, [BACKWARD], [(PER_MS, 10, 50)])
    assert parts_ms(a_job(rank, rank)) == {"compute": 50, "host": 10}


def test_exposed_transfer_is_shared_in_proportion_to_the_whole_of_it() -> None:
    """A transfer of 40 ms, half of it exposed, of which 10 ms are the floor: 5 are exposed."""
    rank = Rank(70, [BACKWARD], [(10 * PER_MS, 30, 70)])
    assert parts_ms(a_job(rank, rank)) == {"compute": 50, "line_rate": 5, "transport": 15}


def test_a_computation_that_is_blocked_on_a_collective_does_not_compute() -> None:
    blocked = [("compute", "forward", 0.0, 50.0), ("communication", "wait", 40.0, 50.0)]
    rank = Rank(50, blocked, [(10 * PER_MS, 40, 50)])
    assert parts_ms(a_job(rank, rank)) == {"compute": 40, "line_rate": 10}


def test_what_a_rank_does_beside_a_fragments_sum_is_its_own() -> None:
    """T1 of a job that slept 30 ms in each step was 22 ms: its sums were exposed beside that."""
    loads, waits = ("input", "wait", 10.0, 20.0), ("communication", "wait", 56.0, 60.0)
    rank = Rank(60, [("compute", "backward", 20.0, 50.0), loads, waits], [(40 * PER_MS, 0, 60)])
    beside = a_job(rank, rank)
    streamed = dataclasses.replace(beside, facts=beside.facts | Facts(local_steps=2, fragments=2))
    assert parts_ms(streamed) == pytest.approx(
        {"compute": 30, "input": 10, "host": 16, "line_rate": 40 / 60 * 4, "transport": 4 / 3}
    )
    assert account(streamed, RATES).alone_s == pytest.approx(56e-3)
    assert parts_ms(beside) == pytest.approx({"compute": 30, "line_rate": 20, "transport": 10})


def test_waiting_lasts_until_the_latest_rank_has_issued_the_collective() -> None:
    early = Rank(100, [BACKWARD], [(10 * PER_MS, 50, 100)])
    late = Rank(100, [("compute", "backward", 0.0, 90.0)], [(10 * PER_MS, 90, 100)])
    found = account(a_job(early, late), RATES)
    assert found.parts_ns[0, 0, Part.STRAGGLER] == 40 * MS  # the early one waits
    assert found.parts_ns[1, 0, Part.STRAGGLER] == 40 * MS  # the late one computes longer
    assert parts_ms(a_job(early, late)) == {"compute": 50, "line_rate": 10, "straggler": 40}


@pytest.mark.parametrize("lane", ["compute", "input", "host"])
def test_what_a_rank_spends_beyond_the_lower_median_is_the_stragglers(lane: str) -> None:
    usual = Rank(60, [("compute", "backward", 0.0, 20.0)], [(PER_MS, 20, 60)])
    extra = [] if lane == "host" else [(lane, "wait", 20.0, 59.0)]
    late = Rank(60, [("compute", "backward", 0.0, 20.0), *extra], [(PER_MS, 59, 60)])
    found = parts_ms(a_job(usual, usual, late))
    assert found == {"compute": 20, "line_rate": 1, "straggler": 39}


def test_a_slow_link_paces_the_whole_group() -> None:
    rank = Rank(90, [BACKWARD], [(10 * PER_MS, 50, 90)])
    fast, slow = {0: 1e9, 1: 1e9}, {0: 1e9, 1: 250e6}
    assert parts_ms(a_job(rank, rank), fast)["line_rate"] == 10
    assert parts_ms(a_job(rank, rank), slow)["line_rate"] == 40


@pytest.mark.parametrize(
    ("op", "floor_ms"),
    [
        ("allreduce", 20),
        ("allgather", 10),
        ("reducescatter", 10),
        ("broadcast", 20),
        ("alltoall", 10),
        ("reduce", 20),
        ("barrier", 0),
    ],
)
def test_the_floor_is_what_an_operation_must_send(op: str, floor_ms: float) -> None:
    rank = Rank(90, [BACKWARD], [(20 * PER_MS, 50, 90)])
    found = parts_ms(a_job(rank, rank, op=op))
    assert found.get("line_rate", 0) == floor_ms


def test_transfers_under_way_together_share_one_link() -> None:
    both = [(10 * PER_MS, 50, 90), (10 * PER_MS, 50, 90)]
    rank = Rank(90, [BACKWARD], both)
    assert parts_ms(a_job(rank, rank)) == {"compute": 50, "line_rate": 20, "transport": 20}


def test_small_collectives_show_what_a_message_costs() -> None:
    """Take 1 ms for 8 bytes: 1 ms of the large one's 12 is latency too."""
    rank = Rank(70, [BACKWARD], [(8, 50, 51), (10 * PER_MS, 58, 70)])
    assert parts_ms(a_job(rank, rank)) == pytest.approx(
        {"compute": 50, "line_rate": 10, "latency": 2, "transport": 1, "host": 7}, abs=1e-3
    )


def test_small_collectives_that_were_held_up_do_not_make_messages_dear() -> None:
    """Two of four small ones take ten times as long: 1 ms of the large one's 12 is latency."""
    small = [(8, 50, 51), (8, 52, 53), (8, 54, 64), (8, 66, 76)]
    rank = Rank(100, [BACKWARD], [*small, (10 * PER_MS, 80, 92)])
    found = parts_ms(a_job(rank, rank))
    assert found["latency"] == pytest.approx(22 + 1, abs=1e-3)
    assert found["transport"] == pytest.approx(1, abs=1e-3)


def test_the_stated_latency_counts_where_no_small_collective_shows_it() -> None:
    rank = Rank(70, [BACKWARD], [(10 * PER_MS, 50, 70)])
    job = a_job(rank, rank, rank, facts={"latency_s": 0.2e-3})
    # Three ranks: a ring of four messages in a row, and 4/3 of the bytes.
    assert parts_ms(job)["latency"] == pytest.approx(0.8)
    job = a_job(rank, rank)
    assert account(job, RATES).latency == "none"
    assert "latency" not in parts_ms(job)


def test_without_a_line_rate_transfers_are_unexplained_and_waiting_is_not() -> None:
    early = Rank(100, [BACKWARD], [(PER_MS, 50, 100)])
    late = Rank(100, [BACKWARD], [(PER_MS, 80, 100)])
    found = parts_ms(a_job(early, late, facts={}), {})
    assert found["unexplained"] == 20
    assert found["straggler"] == pytest.approx(30)


def test_with_ranks_missing_only_the_waiting_that_is_seen_is_told() -> None:
    early = Rank(100, [BACKWARD], [(PER_MS, 50, 100)])
    late = Rank(100, [BACKWARD], [(PER_MS, 80, 100)])
    found = parts_ms(a_job(early, late, workers=3))
    assert found["unexplained"] == 20
    assert "transport" not in found
    assert account(a_job(early, late, workers=3), RATES).breakdowns[0].waiting_s is None


def test_groups_are_matched_each_for_itself() -> None:
    """Ranks 0 and 1 meet in one group, 2 and 3 in another, with the same numbers."""
    early, late = ([(PER_MS, issue, 100.0)] for issue in (50.0, 90.0))
    ranks = [Rank(100, [BACKWARD], sent) for sent in (early, early, early, late)]
    job = a_job(*ranks)
    group = np.where(job.collectives.rank < 2, "a", "b").astype(object)
    job = with_columns(job, group=group)
    found = account(job, dict.fromkeys(range(4), 1e9))
    waiting = [each.waiting_s for each in found.breakdowns]
    assert waiting == pytest.approx([0, 0, 5 * 0.040, 0])


def test_what_one_rank_sends_another_receives() -> None:
    """The receiver is there first, and waits until the sender has come."""
    ranks = (
        Rank(100, [BACKWARD], [(10 * PER_MS, 80, 100)]),
        Rank(100, [BACKWARD], [(10 * PER_MS, 50, 100)]),
    )
    job = a_job(*ranks)
    op = np.where(job.collectives.rank == 0, "send", "recv").astype(object)
    passed = with_columns(job, op=op, group=np.full(len(op), "0>1", object))
    found = account(passed, RATES)
    assert found.parts_ns[1, 0, Part.STRAGGLER] == 30 * MS
    assert parts_ms(passed)["line_rate"] == 10
    assert "unexplained" not in parts_ms(passed)


def test_a_rank_that_has_lost_its_collectives_is_missing_from_all_of_them() -> None:
    rank = Rank(100, [BACKWARD], [(PER_MS, 50, 100)])
    job = a_job(rank, rank, rank)
    two = dataclasses.replace(job, collectives=job.collectives.rows(job.collectives.rank < 2))
    assert parts_ms(two)["unexplained"] == pytest.approx(100 / 3, abs=1e-3)
    assert "transport" not in parts_ms(two)


def test_what_a_hook_packs_is_a_codec_also_amidst_computing() -> None:
    spans = [
        ("compute", "backward", 0.0, 50.0),
        ("host", "codec", 20.0, 30.0),
        ("host", "codec", 55.0, 69.0),
        ("communication", "codec", 40.0, 45.0),
    ]
    rank = Rank(100, spans, [(10 * PER_MS, 25, 35)])
    assert parts_ms(a_job(rank, rank)) == pytest.approx({"compute": 40, "codec": 24, "host": 36})


def test_codec_and_input_come_after_communication() -> None:
    spans = [
        BACKWARD,
        ("communication", "codec", 50.0, 64.0),
        ("input", "wait", 62.0, 70.0),
    ]
    rank = Rank(75, spans, [(10 * PER_MS, 50, 60)])
    assert parts_ms(a_job(rank, rank)) == {
        "compute": 50,
        "line_rate": 10,
        "codec": 4,
        "input": 6,
        "host": 5,
    }


def test_the_ranks_figures_are_over_the_whole_trace() -> None:
    rank = Rank(
        100, [("input", "wait", 0.0, 10.0), ("compute", "b", 10.0, 60.0)], [(PER_MS, 40, 90)]
    )
    [first, _] = account(a_job(rank, rank, steps=2), RATES).breakdowns
    assert dataclasses.asdict(first) == pytest.approx(
        {
            "rank": 0,
            "span_s": 0.190,
            "compute_s": 0.100,
            "communication_s": 0.100,
            "exposed_s": 0.060,
            "overlap_s": 0.040,
            "waiting_s": 0.0,
            "idle_s": 0.030,
        }
    )


def test_warm_up_and_rare_exceptions_are_left_out_and_what_happens_often_is_not() -> None:
    def kept(*lengths: int) -> list[int]:
        return np.flatnonzero(kept_steps(np.array(lengths))).tolist()

    assert kept(90, 30, 10, 10, 10, 10, 10) == [2, 3, 4, 5, 6]
    assert kept(*[10] * 20, 50, *[10] * 20) == [*range(20), *range(21, 41)]
    assert kept(*[10, 10, 10, 40] * 5) == list(range(20))


def test_the_usual_steps_are_the_middle_half_by_duration() -> None:
    def usual(*lengths: int) -> list[int]:
        return np.flatnonzero(usual_steps(np.array(lengths))).tolist()

    assert usual(99, 10, 14, 11, 13, 12, 10, 16, 15) == [2, 3, 4, 5]
    assert usual(10, 12, 11) == [0, 1, 2]  # of so few, none can be left out


def test_pauses_between_steps_are_counted_and_the_usual_gaps_are_not() -> None:
    assert pauses(np.array([0.001] * 20), 0.1) is None
    found = pauses(np.array([0.001] * 20 + [0.400, 0.404, 0.408, 0.404]), 0.1)
    assert found is not None
    assert found.count == 4
    assert found.are_alike
    assert sentence(between_steps(found)) == (
        "4 pauses of 404 ms between steps, 1.616 s in all, are not part of a step."
    )
    mixed = pauses(np.array([0.001, 0.001, 0.2, 1.0]), 0.1)
    assert mixed is not None
    assert "2 pauses of 200 ms to 1 s between steps" in sentence(between_steps(mixed))


def test_times_that_cannot_be_are_refused_with_their_place() -> None:
    rank = Rank(100, [BACKWARD], [(PER_MS, 60, 50)])
    with pytest.raises(DamagedInput, match="collectives, row 0: times that cannot be"):
        account(a_job(rank, rank), RATES)
    twice = Rank(100, [("host", "step", 10.0, 20.0)])
    with pytest.raises(DamagedInput, match="rank 0 has two steps at once"):
        account(a_job(twice), RATES)


def test_the_earliest_time_that_a_number_can_hold_is_refused() -> None:
    """Its magnitude is one more than the largest number, so the absolute value overflows."""
    run = a_job(Rank(100, [("compute", "work", 0.0, 50.0)]))
    start_ns = run.spans.start_ns.copy()
    start_ns[0] = np.iinfo(np.int64).min
    damaged = dataclasses.replace(run, spans=dataclasses.replace(run.spans, start_ns=start_ns))
    with pytest.raises(DamagedInput, match="spans, row 0: times that cannot be"):
        fw.explain(damaged)


def with_columns(run: Run, **columns: Any) -> Run:
    return dataclasses.replace(run, collectives=dataclasses.replace(run.collectives, **columns))


times = st.integers(0, 40).map(float)


@st.composite
def jobs(draw: st.DrawFn) -> Run:
    """Generate a job of any sane intervals: steps of 50 ms, everything else anywhere in them."""
    ranks = []
    count = draw(st.integers(0, 3))
    for _ in range(draw(st.integers(1, 4))):
        spans = [
            (lane, name, start, start + draw(times))
            for lane, name in draw(st.lists(st.sampled_from(KINDS), max_size=4))
            for start in [draw(times)]
        ]
        sent = [
            (draw(st.integers(0, 5_000_000)), start, start + draw(times))
            for start in sorted(draw(st.lists(times, min_size=count, max_size=count)))
        ]
        ranks.append(Rank(50, spans, sent))
    facts = draw(st.sampled_from([{}, {"latency_s": 1e-4}]))
    return a_job(*ranks, steps=draw(st.integers(1, 3)), facts=facts)


KINDS = [
    ("compute", "forward"),
    ("communication", "wait"),
    ("communication", "codec"),
    ("communication", "send"),
    ("input", "wait"),
    ("host", "copy"),
]
rates = st.sampled_from([{}, dict.fromkeys(range(4), 1e9), dict.fromkeys(range(4), 1e12)])


@cases(150)
@given(jobs(), rates)
def test_the_account_adds_up_to_the_step_to_the_nanosecond(
    run: Run, rate_bps: dict[int, float]
) -> None:
    found = account(run, rate_bps)
    assert (found.parts_ns >= 0).all()
    assert (found.parts_ns.sum(axis=2) == 50 * MS).all()
    assert sum(found.parts_s.values()) == pytest.approx(0.050, rel=1e-12)
    for each in found.breakdowns:
        assert each.exposed_s + each.overlap_s == pytest.approx(each.communication_s)
        assert min(each.compute_s, each.exposed_s, each.overlap_s, each.idle_s) >= 0


@cases(60)
@given(jobs(), rates, st.integers(-(2**50), 2**50))
def test_shifting_all_times_changes_nothing(
    run: Run, rate_bps: dict[int, float], shift_ns: int
) -> None:
    moved = dataclasses.replace(
        run,
        spans=shifted(run.spans, ("start_ns", "end_ns"), shift_ns),
        collectives=shifted(run.collectives, ("issue_ns", "start_ns", "end_ns"), shift_ns),
    )
    before, after = account(run, rate_bps), account(moved, rate_bps)
    assert (before.parts_ns == after.parts_ns).all()
    assert before.breakdowns == after.breakdowns


def shifted(table: Any, columns: tuple[str, ...], shift_ns: int) -> Any:
    return dataclasses.replace(table, **{name: getattr(table, name) + shift_ns for name in columns})


@cases(60)
@given(jobs(), rates, st.randoms(use_true_random=False))
def test_the_order_of_ranks_and_rows_changes_nothing(
    run: Run, rate_bps: dict[int, float], random: Any
) -> None:
    spans, collectives = list(range(len(run.spans))), list(range(len(run.collectives)))
    random.shuffle(spans)
    random.shuffle(collectives)
    turned = dataclasses.replace(
        run,
        spans=run.spans.rows(np.array(spans)),
        collectives=run.collectives.rows(np.array(collectives, np.int64)),
    )
    renamed = dataclasses.replace(
        run,
        spans=dataclasses.replace(run.spans, rank=9 - run.spans.rank),
        collectives=dataclasses.replace(run.collectives, rank=9 - run.collectives.rank),
    )
    before = account(run, rate_bps)
    assert (before.parts_ns == account(turned, rate_bps).parts_ns).all()
    others = {9 - rank: rate for rank, rate in rate_bps.items()}
    backwards = account(renamed, others)
    assert (before.parts_ns == backwards.parts_ns[::-1]).all()
    assert before.parts_s == pytest.approx(backwards.parts_s)


@cases(300)
@given(runs())
def test_no_run_at_all_ends_in_a_traceback(run: Run) -> None:
    try:
        found = fw.explain(run)
    except FullwireError:
        return
    assert sum(found.account.values()) == pytest.approx(found.step_s)


def test_a_pause_is_counted_where_a_recording_is_read_in_parts() -> None:
    rank = Rank(60, [BACKWARD], [(PER_MS, 10, 50)])
    job = a_job(rank, rank, steps=12)
    later = np.where(job.spans.step >= 6, 400 * MS, 0)
    moved = dataclasses.replace(
        job.spans, start_ns=job.spans.start_ns + later, end_ns=job.spans.end_ns + later
    )
    job = dataclasses.replace(job, spans=moved, collectives=Collectives.empty())
    parts = [
        dataclasses.replace(job, spans=moved.rows((moved.step < 6) == is_early))
        for is_early in (True, False)
    ]
    found = summarised(parts)
    assert found == summarised([job])
    assert found.pauses is not None
    assert (found.pauses.count, round(found.pauses.total_s, 6)) == (1, 0.4)


def test_the_summary_tells_the_passes_of_a_step_and_the_steps_that_it_leaves_out() -> None:
    usual = [60.0, 61.0, 62.0, 60.5, 61.5, 60.0]
    found = summarised([steps_run([200.0, *usual])])
    assert (found.steps, found.left_out, found.passes) == (7, 1, None)
    passes = [("compute", "earlier backward", 0.0, 20.0), ("compute", "backward", 20.0, 50.0)]
    job = a_job(Rank(60, passes), Rank(60, passes))
    assert summarised([job]).passes == 2


def test_batches_between_the_same_two_steps_are_one_evaluation() -> None:
    """Lightning's passes of validation are computing without a mode around them."""
    job = a_job(Rank(60, [BACKWARD]), steps=4)
    late = np.where(job.spans.step >= 2, 40 * MS, 0)
    later = np.where(job.spans.step >= 3, 40 * MS, 0) + late
    spans = dataclasses.replace(
        job.spans, start_ns=job.spans.start_ns + later, end_ns=job.spans.end_ns + later
    )
    batches = np.array([122, 130, 145, 222, 235]) * MS
    count = len(batches)
    evaluated = Spans(
        rank=np.zeros(count, np.int64),
        step=np.full(count, -1),
        lane=np.full(count, "compute", object),
        name=np.full(count, "evaluation", object),
        start_ns=batches,
        end_ns=batches + 5 * MS,
    )
    told = [sentence(note) for note in outside_of_steps(Spans.joined([spans, evaluated]), 0.06)]
    assert told[0] == (
        "2 evaluations took 46 ms of the 320 ms from the first step to the last, in no step's "
        "account."
    )
