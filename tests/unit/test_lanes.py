"""The drawing of a step, and of the use of links over time."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from fullwire.run.facts import Facts
from fullwire.run.run import Hosts, Links, Run
from fullwire.timeline.account import account
from fullwire.timeline.lanes import MOST_BARS, MOST_RANKS, drawing, lanes_of
from fullwire.timeline.utilization import MOST_PIECES, usage_over_time
from tests.jobs_by_hand import MS, Rank, a_job, a_trained_job


def drawn(run: Run):  # type: ignore[no-untyped-def]  # a Drawing
    return drawing(run, account(run, {}))


def test_collectives_are_drawn_with_the_moment_when_the_latest_rank_was_ready() -> None:
    found = drawn(a_trained_job(late_ms=60))
    early, late = found.steps[0].ranks[0], found.steps[0].ranks[-1]
    waited_ms = (early.lanes["communication"].ready_ns - early.lanes["communication"].issue_ns) / MS
    assert waited_ms == pytest.approx([60, 60, 60, 60])
    assert (late.lanes["communication"].ready_ns == late.lanes["communication"].issue_ns).all()
    assert list(lanes_of(found)) == ["compute", "communication"]


def test_the_first_typical_slowest_and_fastest_steps_are_among_those_drawn() -> None:
    found = drawn(a_trained_job(steps=200))
    words = " and ".join(step.word for step in found.steps)
    assert all(word in words for word in ("first", "typical", "slowest", "fastest"))
    assert len(found.steps) == 20
    assert found.steps_left_out == 180
    numbers = [step.number for step in found.steps]
    assert numbers == sorted(numbers)


def test_too_many_bars_are_joined_and_none_is_lost() -> None:
    many = [("compute", "kernel", 0.01 * k, 0.01 * k + 0.005) for k in range(3000)]
    found = drawn(a_job(Rank(40, many), Rank(40, many)))
    bars = found.steps[0].ranks[0].lanes["compute"]
    assert len(bars) <= MOST_BARS
    assert bars.count.sum() == 3000
    assert bars.end_ns.max() == round(29.995 * MS)
    assert found.joined > 0


def test_a_simulated_steps_messages_are_drawn_once() -> None:
    job = a_job(Rank(10, [("communication", "bucket", 2, 6)], [(1000, 2, 6)]), Rank(10))
    assert len(drawn(job).steps[0].ranks[0].lanes["communication"]) == 1


def test_of_many_ranks_those_whose_waiting_is_unusual_are_drawn() -> None:
    ranks = [Rank(10, [("compute", "work", 0, 8)], [(1000, 8, 9)]) for _ in range(80)]
    ranks[77] = Rank(10, [("compute", "work", 0, 2)], [(1000, 2, 9)])
    found = drawn(a_job(*ranks))
    shown = [rank.rank for rank in found.steps[0].ranks]
    assert len(shown) == MOST_RANKS
    assert 77 in shown
    assert found.ranks_left_out == 80 - MOST_RANKS


def sampled(run: Run, count: int) -> Run:
    """Sample a link that sends 100 Mbps in the first half of the run and is silent later."""
    time_ns = np.linspace(0, run.spans.end_ns.max(), count).astype(np.int64)
    sent = np.minimum(time_ns, time_ns[-1] // 2) * 100e6 / 8e9
    none = np.zeros(count, np.int64)
    return dataclasses.replace(
        run,
        links=Links(
            host=np.full(count, "h0", object),
            interface=np.full(count, "eth0", object),
            time_ns=time_ns,
            tx_bytes=sent.astype(np.int64),
            rx_bytes=none,
            tx_packets=none,
            rx_packets=none,
            drops=none,
        ),
    )


@pytest.mark.parametrize("count", [11, 5000])
def test_use_over_time_keeps_every_byte(count: int) -> None:
    run = sampled(a_trained_job(), count)
    found = usage_over_time(run, dict.fromkeys(range(3), 1e9))
    assert found is not None
    sent = found.pictures[0]
    assert (sent.title, sent.unit, sent.lines[0].name) == ("links, sent", "share", "h0 eth0")
    assert len(sent.lines[0].values) == min(count - 1, MOST_PIECES)
    assert sent.lines[0].values.mean() == pytest.approx(0.05, rel=1e-3)
    assert sent.lines[0].values[0] == pytest.approx(0.1, rel=1e-3)


def test_use_before_the_first_step_is_not_shown() -> None:
    run = sampled(a_trained_job(), 200)
    early = dataclasses.replace(run.links, time_ns=run.links.time_ns - 10_000 * MS)
    both = {
        name: np.concatenate([column, run.links.columns()[name]])
        for name, column in early.columns().items()
    }
    found = usage_over_time(dataclasses.replace(run, links=Links(**both)), {})
    assert found is not None
    length_s = run.spans.end_ns.max() / 1e9
    assert found.edges_s[0] == pytest.approx(-0.02 * length_s)
    assert found.edges_s[-1] == pytest.approx(length_s)


def test_the_processors_of_a_lab_are_shown_once() -> None:
    job = a_trained_job()
    count = 8  # two samples of two processors, as two hosts see them
    run = dataclasses.replace(
        job,
        facts=job.facts | Facts(machines=1),
        hosts=Hosts(
            host=np.array(["h0", "h1"] * 4, object),
            device=np.array(["cpu0"] * 4 + ["cpu1"] * 4),
            time_ns=np.array([0, 0, 100 * MS, 100 * MS] * 2),
            utilization=np.full(count, 0.5),
            memory_bytes=np.zeros(count, np.int64),
        ),
    )
    found = usage_over_time(run, {})
    assert found is not None
    assert [line.name for line in found.pictures[0].lines] == ["cpu0", "cpu1"]
    assert found.pictures[0].lines[0].values == pytest.approx([0.5])


def test_without_a_line_rate_use_is_a_rate_and_without_samples_there_is_none() -> None:
    run = sampled(a_trained_job(), 11)
    found = usage_over_time(run, {})
    assert found is not None
    assert found.pictures[0].unit == "bps"
    assert found.pictures[0].lines[0].values.max() == pytest.approx(100e6, rel=1e-3)
    assert usage_over_time(a_trained_job(), {}) is None
