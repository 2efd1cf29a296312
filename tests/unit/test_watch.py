"""Steps from counters that this file makes up, and who is waited for in a stuck job."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import fullwire as fw
from fullwire._native import RankCounters
from fullwire.answers.alerts import alert
from fullwire.answers.idle import Asking, Idle, idle_at
from fullwire.answers.watch import judged
from fullwire.answers.watched import Watched, waited_for
from fullwire.cli.live import Collector, Live, open_metrics, served
from fullwire.recorder.jobs_here import JobHere, RankHere, job_named, job_of
from fullwire.recorder.outside import (
    COLUMNS,
    ELSEWHERE,
    LIMITED_BY_BUFFER,
    LIMITED_BY_RECEIVER,
    RECEIVED,
    ROUND_TRIPS,
    SENDING,
    SENT,
    TIME,
    UNCLEAR,
    Gpus,
    Looks,
    ProcessUse,
    Waits,
    Watcher,
    _main_thread,
    waits_of,
)
from fullwire.report.as_data import watched_object
from fullwire.report.explanation import print_watched
from fullwire.words import sentence

LOOK_S = 0.01
TICK_NS = 10_000_000  # the kernel counts such times in ticks, of 10 ms at most
DOCS = Path(__file__).parents[2] / "docs"


def seen(looks: dict[int, list[tuple[float, ...]]], workers: int = 2) -> Looks:
    ranks = tuple(
        RankHere(pid=os.getpid(), rank=rank, user="me", command="train", network=1, uses_gpu=False)
        for rank in looks
    )
    by_rank = {rank: np.full((len(rows), COLUMNS), np.nan) for rank, rows in looks.items()}
    for rank, rows in looks.items():
        by_rank[rank][:, : len(rows[0])] = rows
    first = next(iter(by_rank.values()))
    return Looks(
        job=JobHere(ranks=ranks, workers=workers, is_guessed=False),
        by_rank=by_rank,
        took_s=0.0,
        seconds=float(first[-1, 0] - first[0, 0]) / 1e9,
    )


def a_job(
    compute_s: float, send_s: float, idle_s: float = 0.0, *, steps: int = 40, ends_s: float = 0.0
) -> dict[int, list[tuple[float, ...]]]:
    """Return the looks at two ranks that compute, send at 1 Gbps and rest, step for step."""
    step_s = compute_s + send_s + idle_s
    at_s = np.arange(0, steps * step_s + ends_s, LOOK_S)
    whole, within = np.divmod(np.minimum(at_s, steps * step_s - 1e-9), step_s)
    computed = whole * compute_s + np.minimum(within, compute_s)
    sent = whole * send_s + np.clip(within - compute_s, 0, send_s)
    looks = {}
    for rank in (0, 1):
        rows = np.zeros((len(at_s), 8))
        rows[:, 0], rows[:, 1] = 1e18 + at_s * 1e9, computed * 1e9
        rows[:, 4] = rows[:, 5] = sent * 1e9 / 8
        looks[rank] = [tuple(row) for row in rows]
    return looks


def test_the_step_its_bytes_and_the_verdict_are_found_in_counters() -> None:
    found = judged(seen(a_job(0.1, 0.2)), 1e9)
    assert found.explanation is not None
    assert found.run is not None
    assert found.explanation.step_s == pytest.approx(0.3, rel=0.01)
    own = found.run.collectives.rows(found.run.collectives.rank == 0)
    assert own.bytes.sum() / len(np.unique(own.step)) == pytest.approx(25e6, rel=0.03)
    assert found.kind == "line_rate"
    for part, (low_s, high_s) in found.ranges.items():
        assert 0 <= low_s <= found.explanation.account[part] <= high_s


def test_computing_that_goes_on_after_the_bytes_belongs_to_each_step_in_part() -> None:
    """Computing begins before the last bytes have ended; rank 1 takes 0.15 s more of it."""
    looks = {rank: np.array(rows) for rank, rows in a_job(0.25, 0.2).items()}
    for rank, rows in looks.items():
        whole, within = np.divmod((rows[:, 0] - 1e18) / 1e9, 0.45)
        early, late = np.clip(within - 0.43, 0, 0.02), np.minimum(within, 0.08 + 0.15 * rank)
        rows[:, 1] = 1e9 * (whole * (0.1 + 0.15 * rank) + early + late)
    found = judged(seen({rank: [*map(tuple, rows)] for rank, rows in looks.items()}), 1e9)
    assert found.explanation is not None
    assert found.explanation.account["straggler"] == pytest.approx(0.15, abs=0.03)
    assert found.run is not None
    work = found.run.spans.rows(found.run.spans.lane == "compute")
    edges = found.run.spans.rows(found.run.spans.name == "step").start_ns
    assert not ((work.start_ns[:, None] < edges) & (edges < work.end_ns[:, None])).any()


def test_transfer_that_would_fit_under_computing_is_used_too_late() -> None:
    found = judged(seen(a_job(0.4, 0.2)), 1e9)
    assert (found.kind, found.possible) == ("overlap", ("overlap",))
    # Where ranks often have no processor, contention may cost more than the transfer.
    starved = {
        rank: [(row[0], 0.5 * row[1], 0.5 * row[1], *row[3:]) for row in rows]
        for rank, rows in a_job(0.4, 0.2).items()
    }
    assert "contention" in judged(seen(starved), 1e9).possible
    # Where the looks are too coarse to say what fits, both verdicts stay open.
    assert "line_rate" in judged(seen(a_job(0.2, 0.19)), 1e9).possible


def test_ranks_that_fight_for_processors_have_contention_where_their_delay_says_so() -> None:
    """Two ranks on one processor compute at half the speed; few bytes follow."""
    fighting = {
        rank: [(*row[:1], 0.5 * row[1], 0.5 * row[1], *row[3:]) for row in rows]
        for rank, rows in a_job(0.4, 0.05).items()
    }
    looks = seen(fighting)
    job = replace(looks.job, backend="gloo")
    first_ns, seconds = looks.by_rank[0][0, 0], np.arange(0, looks.seconds, 1.0)
    busy = np.stack([first_ns + seconds * 1e9, seconds * 0.9], axis=1)
    found = judged(replace(looks, job=job, processors=busy), 1e9)
    assert found.kind == "contention"
    low_s, high_s = found.ranges["contention"]
    assert low_s < 0.2 < high_s
    # A backend that is unknown may leave sums to a device.
    assert judged(replace(looks, processors=busy), 1e9).kind == "unknown"


def test_contention_and_transfer_are_told_apart_though_each_may_be_off() -> None:
    """Run delay tells the one and bytes the other: both are hardly off at the same time."""

    def of(send_s: float) -> Watched:
        fighting = {
            rank: [(*row[:1], 0.5 * row[1], 0.5 * row[1], *row[3:]) for row in rows]
            for rank, rows in a_job(0.42, send_s).items()
        }
        looks = seen(fighting)
        apart = tuple(replace(rank, network=rank.rank) for rank in looks.job.ranks)
        first_ns, seconds = looks.by_rank[0][0, 0], np.arange(0, looks.seconds, 1.0)
        busy = np.stack([first_ns + seconds * 1e9, seconds * 0.9], axis=1)
        job = replace(looks.job, backend="gloo", ranks=apart)
        return judged(replace(looks, job=job, processors=busy), 1e9)

    found = of(0.14)
    assert found.ranges["contention"][0] < found.transfer_s[1]
    assert found.kind == "contention"
    assert of(0.16).kind == "unknown"


def test_a_line_that_may_not_be_full_leaves_the_transport_possible() -> None:
    slower = judged(seen(a_job(0.1, 0.2)), 1.3e9)
    assert slower.kind == "unknown"
    assert {"line_rate", "transport"} == set(slower.possible)
    assert slower.sentence.startswith("The network limits this job:")


def test_rest_of_all_ranks_is_not_called_input_or_host() -> None:
    found = judged(seen(a_job(0.1, 0.05, 0.2)), 1e9)
    assert found.kind == "unknown"
    assert "Cannot tell" in found.sentence
    assert {"input", "host"} <= set(found.possible)
    data = watched_object(found)
    assert data["source"] == "outside"
    assert data["verdict"]["kind"] == "unknown"
    assert data["ranges"]["input"][0] == 0
    assert data["stuck"] is None


def resting(*ranks: int) -> Looks:
    """Return looks at a job that rests between computing and sending; some ranks wait for none."""
    looks = seen(rests())
    for rank, rows in looks.by_rank.items():
        rows[:, ELSEWHERE] = 1e9 * resting_s(rows) if rank in ranks else 0.0
        rows[:, UNCLEAR] = 0.0
    return looks


def resting_s(rows: Any) -> Any:
    """Return for how long the ranks of such a job have rested at each look."""
    whole, within = np.divmod((rows[:, 0] - 1e18) / 1e9, 0.4)
    return 0.2 * whole + np.clip(within - 0.1, 0, 0.2)


def rests() -> dict[int, list[tuple[float, ...]]]:
    """Return looks at two ranks that compute 0.1 s, rest 0.2 s and send 0.1 s, step for step."""
    looks = a_job(0.3, 0.1)
    for rows in looks.values():
        for place, row in enumerate(rows):
            whole, within = divmod((row[0] - 1e18) / 1e9, 0.4)
            rows[place] = (row[0], 1e9 * (whole * 0.1 + min(within, 0.1)), *row[2:])
    return looks


def test_ranks_that_all_wait_for_no_rank_wait_for_their_data_or_their_script() -> None:
    open_ = {"transport", "straggler", "input", "host"}
    assert open_ <= {*judged(seen(rests()), 1e9).possible}
    assert judged(resting(), 1e9).possible == ("transport",)  # they wait for each other
    looks = resting(0, 1)
    found = judged(looks, 1e9)
    assert found.possible == ("host", "input")
    assert judged(looks, 1e9, idle=Idle(rank=0)).possible == found.possible
    sleeps = judged(looks, 1e9, idle=Idle(rank=0, line="train.py:9 (main)", is_loading=False))
    assert sleeps.kind == "host"
    assert sleeps.sentence.endswith("Rank 0 sleeps at train.py:9 (main).")
    loads = judged(looks, 1e9, idle=Idle(rank=0, line="train.py:9 (main)", is_loading=True))
    assert loads.kind == "input"
    assert loads.explanation is not None
    assert loads.explanation.account["input"] == pytest.approx(0.2, abs=0.02)
    assert loads.sentence.endswith("Rank 0 waits for its data at train.py:9 (main).")
    for told in (found, sleeps, loads):
        assert told.explanation is not None
        for part, (low_s, high_s) in told.ranges.items():
            assert 0 <= low_s <= told.explanation.account[part] <= high_s


def test_one_rank_that_waits_for_no_other_rank_is_late() -> None:
    found = judged(resting(1), 1e9)
    assert found.kind == "straggler"
    assert found.explanation is not None
    assert found.explanation.account["straggler"] == pytest.approx(0.2, abs=0.02)
    assert found.sentence.startswith("Rank 1 is late")
    idle = Idle(rank=1, line="dataset.py:88 (load)", is_loading=True)
    assert judged(resting(1), 1e9, idle=idle).sentence.endswith(
        "Rank 1 waits for its data at dataset.py:88 (load)."
    )


def test_what_may_be_a_wait_for_other_ranks_leaves_the_verdict_open() -> None:
    looks, open_ = resting(), judged(seen(rests()), 1e9).possible
    for rows in looks.by_rank.values():
        rows[:, UNCLEAR] = 1e9 * resting_s(rows)
    assert judged(looks, 1e9).possible == open_
    low_s, high_s = judged(looks, 1e9).transfer_s
    assert low_s < 0.12
    assert high_s > 0.3
    # Unless its stack shows that it is never a wait for other ranks.
    idle = Idle(rank=0, line="train.py:9 (main)", is_loading=True, is_always=True)
    assert judged(looks, 1e9, idle=idle).kind == "input"


def test_a_wait_for_a_thread_of_its_own_leaves_the_verdict_open() -> None:
    idle = Idle(rank=0, line="train.py:9 (main)", is_loading=True, is_in_lock=True)
    assert judged(resting(), 1e9, idle=idle).possible == judged(seen(rests()), 1e9).possible


def test_a_main_thread_that_leaves_the_training_to_another_one_tells_nothing() -> None:
    looks, open_ = resting(0, 1), judged(seen(rests()), 1e9)
    for rows in looks.by_rank.values():
        rows[:, ELSEWHERE] = rows[:, 0] - 1e18
    assert judged(looks, 1e9).possible == open_.possible


def test_a_rank_is_asked_what_it_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fullwire.answers.idle._BETWEEN_QUESTIONS_S", 0.0)
    loads = Waits("S", "do_poll", "train.py:9 (main)", is_loading=True)
    for_ranks = Waits("S", "futex_do_wait", "train.py:12 (main)", is_in_collective=True)
    runs = Waits("R", "", "train.py:11 (main)")

    def asked(*answers: Waits) -> Idle:
        told = iter([*answers, *[for_ranks] * 30])
        return idle_at(1, replace(resting(1), ask=lambda ranks: {1: next(told)}))

    told = Idle(rank=1, line="train.py:9 (main)", is_loading=True, is_always=True)
    assert asked(loads, for_ranks, loads, runs, loads, loads, loads) == told
    polls_for_ranks = replace(for_ranks, place="do_poll")
    assert asked(polls_for_ranks, *[loads] * 5) == replace(told, is_always=False)
    assert asked(*[replace(loads, place="futex_do_wait")] * 5).is_in_lock
    sleeps = replace(loads, is_loading=False)
    assert asked(*[sleeps] * 5) == replace(told, is_loading=False)
    assert asked(loads, sleeps, *[loads] * 4) == Idle(rank=1)  # sometimes this, sometimes that
    assert asked(*[loads] * 4) == Idle(rank=1)  # too seldom to say
    assert idle_at(1, replace(resting(1), ask=lambda ranks: {})) == Idle(rank=1)  # a lost host


def test_an_answer_serves_for_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fullwire.answers.idle._BETWEEN_QUESTIONS_S", 0.0)
    told = Waits("S", "do_poll", "train.py:9 (main)", is_loading=True)
    looks = replace(resting(1), ask=lambda ranks: dict.fromkeys(ranks or (), told))
    asking = Asking()
    assert asking.wait() is None
    asked = [told_about(asking, rank, looks) for rank in (1, 0)]
    monkeypatch.setattr("fullwire.answers.idle._AGAIN_S", 0.0)
    assert asking.idle is None
    monkeypatch.undo()
    asking.close()
    assert asked == [1, 1]


def told_about(asking: Asking, rank: int, looks: Looks) -> int | None:
    """Return the rank that an answer is about, after this one was to be asked."""
    asking.begin(rank, looks)
    assert asking.wait() == asking.idle
    return None if asking.idle is None else asking.idle.rank


def test_the_kernel_tells_whether_a_main_thread_waits_for_other_threads() -> None:
    scripts = (
        "import time; print(flush=True); time.sleep(60)",
        "import threading; print(flush=True); threading.Event().wait(60)",
    )
    ranks = [
        subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
        for script in scripts
    ]
    try:
        for each in ranks:
            assert each.stdout is not None
            assert each.stdout.readline()
        here = [
            RankHere(pid=each.pid, rank=rank, user="", command="", network=1, uses_gpu=False)
            for rank, each in enumerate(ranks)
        ]
        watcher = Watcher(JobHere(ranks=tuple(here), workers=2, is_guessed=False))
        assert watcher.watch(1.0)
    finally:
        for each in ranks:
            each.kill()
            each.communicate()
    spent_ns = [rows[-1, ELSEWHERE] for rows in watcher.looks.by_rank.values()]
    assert 0.7e9 < spent_ns[0] <= 1.0e9
    assert spent_ns[1] < 0.2e9


def test_either_end_of_a_connection_tells_the_bytes_of_both() -> None:
    counters = RankCounters(2)
    task = f"/proc/self/task/{threading.get_native_id()}/schedstat"
    with socket.create_server(("127.0.0.1", 0)) as door:
        ends = [socket.create_connection(door.getsockname()), door.accept()[0]]
    counters.add_network(socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 4).detach())
    inodes = [os.fstat(end.fileno()).st_ino for end in ends]
    counters.set_owners(0, [(inode, rank) for rank, inode in enumerate(inodes)])
    for rank in (0, 1):
        counters.add_thread(rank, os.open(task, os.O_RDONLY), False)
    look = (0.01, 1.0, 0.001, 0.002)  # for 10 ms, at the whole of a processor, each 1 to 2 ms
    assert counters.watch(*look) == -1
    for _ in range(20):
        for sender, size in ((0, 50_000), (1, 10_000)):
            ends[sender].sendall(bytes(size))
            ends[1 - sender].recv(size, socket.MSG_WAITALL)
        assert counters.watch(*look) == -1
    rows = counters.take().reshape(-1, 2, COLUMNS)
    sent, received = rows[:, :, SENT], rows[:, :, RECEIVED]
    # The begin of a connection counts as a byte.
    assert sent[-1].tolist() == pytest.approx([1_000_000, 200_000], abs=2)
    assert received[-1].tolist() == pytest.approx([200_000, 1_000_000], abs=2)
    assert np.abs(sent - received[:, ::-1]).max() <= 2
    round_trip_s = rows[-1, :, ROUND_TRIPS] / sent[-1] / 1e9
    assert ((round_trip_s > 1e-6) & (round_trip_s < 0.05)).all()  # over the loopback
    for end in ends:
        end.close()
    assert counters.watch(0.01, 1.0, 0.001, 0.002) == -1  # they are gone, and are asked for in vain


def test_a_connection_tells_how_long_it_sends_and_what_holds_it_back() -> None:
    counters = RankCounters(1)
    task = f"/proc/self/task/{threading.get_native_id()}/schedstat"
    with socket.create_server(("127.0.0.1", 0)) as door:
        sender, receiver = socket.create_connection(door.getsockname()), door.accept()[0]
    counters.add_network(socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 4).detach())
    counters.set_owners(0, [(os.fstat(sender.fileno()).st_ino, 0)])
    counters.add_thread(0, os.open(task, os.O_RDONLY), False)
    sender.setblocking(False)
    look = (0.3, 1.0, 0.001, 0.002)
    counters.watch(*look)
    nothing = counters.take().reshape(-1, COLUMNS)[-1]
    sender.send(bytes(8_000_000))  # more than the receiver, which reads nothing, has room for
    counters.watch(*look)
    held = counters.take().reshape(-1, COLUMNS)[-1]
    for end in (sender, receiver):
        end.close()
    lasted_ns = held[TIME] - nothing[TIME] + 2 * TICK_NS
    assert nothing[SENDING] == 0
    assert 0.2e9 < held[LIMITED_BY_RECEIVER] <= held[SENDING] < lasted_ns
    assert held[LIMITED_BY_BUFFER] == 0


def test_the_connections_of_a_rank_are_told_where_they_may_be_asked() -> None:
    looks = seen(a_job(0.1, 0.2))
    for rows in looks.by_rank.values():
        rows[:, SENDING] = 0.5 * (rows[:, 0] - rows[0, 0])
        rows[:, LIMITED_BY_RECEIVER], rows[:, LIMITED_BY_BUFFER] = 0.2 * rows[:, SENDING], 0.0
        rows[:, ROUND_TRIPS] = 3e6 * rows[:, SENT]
    told = judged(replace(looks, without_connections=(1,)), 1e9)
    first, second = told.ranks
    assert first.connections_sending == pytest.approx(0.5)
    assert first.limited_by_receiver == pytest.approx(0.2)
    assert first.limited_by_buffer == 0.0
    assert first.round_trip_s == pytest.approx(0.003)
    assert second.connections_sending is second.limited_by_receiver is second.round_trip_s is None
    assert 'fullwire_round_trip_seconds{rank="0"} 0.003' in open_metrics(told)
    assert 'fullwire_limited_by_receiver_ratio{rank="0"} 0.2' in open_metrics(told)
    assert 'limited_by_receiver_ratio{rank="1"}' not in open_metrics(told)


def test_bytes_that_come_in_lumps_are_one_transfer() -> None:
    """At 100 Mbps a queue lets 64 KB go at a time, and acknowledgements come together."""
    looks, lump = seen(a_job(0.2, 0.2)), 0.015 * 1e9 / 8
    for rows in looks.by_rank.values():
        rows[:, SENT] = rows[:, RECEIVED] = np.ceil(rows[:, SENT] / lump) * lump
        rows[:, ELSEWHERE] = 0.0
    found = judged(looks, 1e9)
    assert found.explanation is not None
    assert found.kind == "line_rate"
    assert sum(found.transfer_s) / 2 == pytest.approx(0.2, rel=0.05)


def test_a_job_that_mostly_computes_is_told_its_transfer_alone() -> None:
    # Most of its bytes flow while it computes, so it may be slower beside them.
    beside = {rank: np.array(rows) for rank, rows in a_job(0.12, 0.3).items()}
    for rows in beside.values():
        whole, within = np.divmod((rows[:, 0] - 1e18) / 1e9, 0.42)
        rows[:, 1] = 1e9 * (whole * 0.4 + np.minimum(within, 0.4))
    found = judged(seen({rank: [*map(tuple, rows)] for rank, rows in beside.items()}), 1e9)
    assert found.kind == "unknown"
    assert "contention" in found.possible
    assert found.sentence.startswith("Transfer that nothing hides is ")
    # Where nothing is sent meanwhile, and no thread waits for a processor, it is not slower.
    assert judged(seen(a_job(0.4, 0.02)), 1e9).kind == "scales"


def test_counters_that_do_not_repeat_give_no_step(capsys: pytest.CaptureFixture[str]) -> None:
    random = np.random.default_rng(0)
    looks: dict[int, list[tuple[float, ...]]] = {
        rank: [
            (1e18 + at * 1e7, 0.0, 0.0, 0.0, float(sent), float(sent), 0.0, 0.0)
            for at, sent in enumerate(total)
        ]
        for rank, total in enumerate(np.cumsum(random.exponential(1e5, (2, 2000)), axis=1))
    }
    found = judged(seen(looks), 1e9)
    assert found.explanation is None
    assert watched_object(found)["step_s"] is None
    print_watched(found)
    assert capsys.readouterr().out.startswith("No step repeated 6 times within 19.98 s")


def test_a_job_that_sends_nothing_any_more_is_stuck() -> None:
    looks = a_job(0.1, 0.2, ends_s=15.0)
    found = judged(seen(looks), 1e9)
    assert found.stuck is not None
    assert found.stuck.since_s == pytest.approx(15, abs=0.1)
    assert found.sentence.startswith("Stuck for 14.99 s. Nothing tells")
    assert watched_object(found)["stuck"]["waiting"] == sorted(looks)


def test_heartbeats_do_not_hide_a_hang_that_is_older_than_the_watch() -> None:
    at_s = np.arange(0, 15, LOOK_S)
    rows = np.zeros((len(at_s), 8))
    rows[:, 0] = 1e18 + at_s * 1e9
    rows[:, 4] = rows[:, 5] = 60 * at_s  # bytes
    rows[:, 7] = at_s % 1  # since the kernel last saw some
    looks = {rank: [tuple(row) for row in rows] for rank in (0, 1)}
    found = judged(seen(looks), 1e9)
    assert found.stuck is not None
    assert found.stuck.since_s == pytest.approx(15, abs=0.1)
    short = {rank: rows[:500] for rank, rows in looks.items()}
    assert judged(seen(short), 1e9).stuck is None


def fake_nvml() -> SimpleNamespace:
    """Return NVML as its pages describe it, with one GPU that this process uses."""

    def tell(place: Any, value: int, name: str = "value") -> int:
        setattr(place, name, value)
        return 0

    return SimpleNamespace(
        nvmlInit_v2=lambda: 0,
        nvmlShutdown=lambda: 0,
        nvmlDeviceGetCount_v2=lambda count: tell(count._obj, 1),
        nvmlDeviceGetHandleByIndex_v2=lambda number, device: 0,
        nvmlDeviceGetComputeRunningProcesses_v3=lambda device, count, found: (
            tell(count._obj, 1) + tell(found[0], os.getpid(), "pid")
        ),
        nvmlDeviceGetUtilizationRates=lambda device, use: tell(use._obj, 80, "gpu"),
        nvmlDeviceGetPcieThroughput=lambda device, direction, value: tell(
            value._obj, 1_000_000 * (direction + 1)
        ),
    )


def with_samples(nvml: SimpleNamespace, *percents: float) -> SimpleNamespace:
    """Return NVML with these shares of its processors at work, one for each question."""
    taken, told = [0], iter(percents)

    def sample(device: Any, into: Any) -> int:
        taken[0] += 1
        into.value = taken[0]
        return 0

    def metrics(asked: Any) -> int:
        request, metric = asked._obj, asked._obj.metrics[0]
        assert (request.version, request.count, metric.number) == (1, 1, 2)
        assert request.now - request.before == 1
        metric.value = next(told)
        return 0

    def supports(device: Any, support: Any) -> int:
        support._obj.is_supported = support._obj.version
        return 0

    return SimpleNamespace(
        **vars(nvml),
        nvmlGpmQueryDeviceSupport=supports,
        nvmlGpmSampleAlloc=lambda sample: 0,
        nvmlGpmSampleGet=sample,
        nvmlGpmSampleFree=lambda sample: 0,
        nvmlGpmMetricsGet=metrics,
    )


def test_the_processors_of_a_gpu_are_told_where_its_driver_counts_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nvml = with_samples(fake_nvml(), 60.0, 20.0, float("nan"))
    monkeypatch.setattr("fullwire.recorder.outside.ctypes.CDLL", lambda name: nvml)
    gpus = Gpus([os.getpid()])
    gpus.close()
    for active in (None, 0.6, 0.4, 0.4):
        gpus.look()
        assert gpus.uses()[os.getpid()].sm_active == (active and pytest.approx(active))
    looks = replace(seen(a_job(0.1, 0.2)), gpus={0: gpus.uses()[os.getpid()]})
    assert 'fullwire_gpu_sm_active_ratio{rank="0"} 0.4' in open_metrics(judged(looks, 1e9))


def test_ranks_on_gpus_have_a_step_and_no_account(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fullwire.recorder.outside.ctypes.CDLL", lambda name: fake_nvml())
    gpus = Gpus([os.getpid(), 1])
    gpus.close()
    gpus.look()
    [use] = gpus.uses().values()
    assert (use.busy, use.pcie_bps) == (0.8, 24e9)
    looks = seen(a_job(0.1, 0.2))
    on_gpus = [replace(rank, uses_gpu=True) for rank in looks.job.ranks]
    looks = replace(looks, job=replace(looks.job, ranks=tuple(on_gpus)), gpus={0: use})
    found = judged(looks, 1e9)
    assert found.explanation is None
    assert found.step_s == pytest.approx(0.3, rel=0.01)
    assert found.sentence.startswith("A step takes ")
    assert "The GPUs are busy for 80% of the time. Cannot tell" in found.sentence
    assert "busy" not in judged(replace(looks, gpus={}), 1e9).sentence
    data = watched_object(found)
    assert (data["account"], data["verdict"]["kind"]) == (None, "unknown")
    assert data["processes"][0]["gpu_busy"] == 0.8
    assert data["processes"][1]["gpu_busy"] is None
    assert 'fullwire_gpu_pcie_bits_per_second{rank="0"} 24000000000.0' in open_metrics(found)
    assert alert("step > 200ms").check(found) is not None


def test_ranks_that_get_no_processor_are_not_stuck() -> None:
    looks = a_job(0.1, 0.2, ends_s=15.0)
    starved = {}
    for rank, rows in looks.items():
        table = np.array(rows)
        late_ns = np.maximum(table[:, 0] - table[-1500, 0], 0)
        table[:, 1] += 0.15 * late_ns
        table[:, 2] += 0.8 * late_ns  # it evaluates beside many others
        starved[rank] = [tuple(row) for row in table]
    assert judged(seen(starved), 1e9).stuck is None


def test_a_machine_that_stood_still_is_no_sign_of_a_stuck_job() -> None:
    looks = a_job(0.1, 0.2, ends_s=3.0)
    frozen = {
        rank: [*rows[:-100], *((row[0] + 60e9, *row[1:]) for row in rows[-100:])]
        for rank, rows in looks.items()
    }
    assert judged(seen(frozen), 1e9).stuck is None


def a_dump(counts: dict[str, int]) -> bytes:
    entries = [
        {
            "process_group": ("0", group),
            "collective_seq_id": count,
            "profiling_name": "nccl:all_reduce",
            "time_created_ns": 10**18,
        }
        for group, count in counts.items()
    ]
    return pickle.dumps({"version": "2.10", "entries": entries})


def test_dumps_of_the_flight_recorder_name_the_rank_that_asked_for_fewer(tmp_path: Path) -> None:
    beginning = f"{tmp_path}/rank_"
    command = [sys.executable, "-c", "input()"]
    environment = {"TORCH_FR_DUMP_TEMP_FILE": beginning, "HOME": str(tmp_path)}
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE) as other:
        looks = seen(a_job(0.1, 0.2, ends_s=15.0))
        ranks = tuple(replace(rank, pid=other.pid) for rank in looks.job.ranks)
        looks = replace(looks, job=replace(looks.job, ranks=ranks, workers=3))
        alike = Waits("S", "futex_wait_queue")
        looks = replace(looks, ask=lambda ranks: dict.fromkeys(range(2), alike))

        def write(*dumps: bytes) -> str:
            for rank, dump in enumerate(dumps):
                Path(f"{beginning}{rank}").write_bytes(dump)
            found = judged(looks, 1e9)
            assert found.stuck is not None
            assert found.stuck.rank == (1 if "for rank 1 on" in found.sentence else None)
            return found.sentence

        assert "Flight Recorder" not in write()
        late = a_dump({"default_pg": 12, "tp": 40})
        told = write(a_dump({"default_pg": 13}), late, a_dump({"default_pg": 13, "tp": 40}))
        assert "1 rank waits for rank 1 on" in told
        assert "asked for 12 collectives of default_pg, 2 other ranks for 13 (allreduce)" in told
        # Two are late: the sentence says so, and names no single one.
        told = write(late, late, a_dump({"default_pg": 13}))
        assert "ranks 0 and 1 asked for 12 collectives of default_pg, 1 other rank for 13" in told
        assert "Nothing tells which rank the others wait for" in told
        # Dumps that are damaged, alike or older than the trouble tell nothing.
        for dumps in ((late, late, late), (b"\x80", b"", b"{")):
            assert "Flight Recorder" not in write(*dumps)
        write(a_dump({"default_pg": 13}), late)
        for rank in range(2):
            os.utime(f"{beginning}{rank}", (1e9, 1e9))
        assert "Flight Recorder" not in judged(looks, 1e9).sentence
        other.kill()


LOCK, READ = Waits("S", "futex_wait_queue"), Waits("S", "pipe_read")


@pytest.mark.parametrize(
    ("waits", "busy", "late"),
    [
        ([LOCK, Waits("T", "do_signal_stop"), LOCK], [0, 0, 0], 1),
        ([LOCK, LOCK, LOCK], [0, 0, 1.0], 2),
        ([Waits("D", "io_schedule"), LOCK, LOCK], [0, 0, 0], 0),
        ([LOCK, READ, LOCK], [0, 0, 0], 1),
        ([LOCK, LOCK, replace(LOCK, link_down="eth0")], [0, 0, 0], 2),
        ([LOCK, LOCK, LOCK], [0, 0, 0], None),
        ([READ, READ, LOCK], [0, 0, 0], None),
    ],
)
def test_the_rank_that_differs_iswaited_for(
    waits: list[Waits], busy: list[float], late: int | None
) -> None:
    assert waited_for(dict(enumerate(waits)), dict(enumerate(busy))) == late


def test_the_stack_names_the_rank_that_is_in_no_collective() -> None:
    alike = Waits("S", "futex_wait_queue", "train.py:40 (step)", is_in_collective=True)
    late = Waits("S", "futex_wait_queue", "dataset.py:88 (load)")
    assert waited_for({0: alike, 1: late, 2: alike}, dict.fromkeys(range(3), 0.0)) == 1
    assert str(late).endswith("at dataset.py:88 (load)")
    assert waited_for({0: alike, 1: alike}, dict.fromkeys(range(2), 0.0)) is None
    other = Waits("S", "futex_wait_queue", "train.py:52 (save)", is_in_collective=True)
    assert waited_for({0: alike, 1: other, 2: alike}, dict.fromkeys(range(3), 0.0)) == 1
    assert waited_for({0: alike, 1: other}, dict.fromkeys(range(2), 0.0)) is None


def test_a_process_that_waits_is_shown_with_its_line(tmp_path: Path) -> None:
    if not shutil.which("py-spy", path=str(Path(sys.executable).parent)):
        pytest.skip("py-spy is not here: pip install 'fullwire[watch]'")
    script = tmp_path / "dataset.py"
    script.write_text("def load():\n    print(flush=True)\n    input()\nload()\n")
    with subprocess.Popen(
        [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        other.stdout.readline()
        waits = [waits_of(other.pid)]
        until_s = time.monotonic() + 10
        while waits[-1].line != "dataset.py:3 (load)" and time.monotonic() < until_s:
            waits.append(waits_of(other.pid))
        assert waits[-1].line == "dataset.py:3 (load)"
        assert not waits[-1].is_in_collective
        other.kill()


def test_a_process_that_is_no_training_is_refused_with_its_command() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        with pytest.raises(fw.UsageError, match="expected a training process or its launcher"):
            fw.watch(other.pid)
        other.kill()
    with pytest.raises(fw.UsageError, match="expected the id of a running process"):
        fw.watch(other.pid)
    with pytest.raises(fw.UsageError, match="expected words of a training job's command"):
        job_named("no such job anywhere")


LAUNCHES = """
import mmap, os, subprocess, sys
with open(sys.argv[1], "rb") as file:
    held = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
if "RANK" not in os.environ:
    for rank in "01":
        told = {"RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "here", "MASTER_PORT": "1"}
        command = [sys.executable, *sys.argv]
        child = subprocess.Popen(command, env=os.environ | told, stdout=subprocess.PIPE)
        child.stdout.readline()
print(flush=True)
sys.stdin.read()
"""


def test_a_launcher_that_loads_torch_stands_for_its_ranks_and_is_no_job(tmp_path: Path) -> None:
    script, library = tmp_path / "launch.py", tmp_path / "libtorch.so"
    script.write_text(LAUNCHES)
    library.write_bytes(bytes(4096))
    environment = {name: value for name, value in os.environ.items() if name != "RANK"}
    command = [sys.executable, str(script), str(library)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment) as launcher:
        assert launcher.stdout is not None
        launcher.stdout.readline()
        for found in (job_of(launcher.pid), job_named(str(script))):
            assert [rank.rank for rank in found.ranks] == [0, 1]
            assert launcher.pid not in {rank.pid for rank in found.ranks}
            assert not found.is_guessed
        assert launcher.stdin is not None
        launcher.stdin.close()


def test_a_process_that_has_ended_is_told_as_that() -> None:
    other = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)  # it stays in the table
    with pytest.raises(fw.UsageError, match=f"watch {other.pid}: the process has ended"):
        fw.watch(other.pid)
    other.wait()


def test_a_process_of_another_user_is_refused_with_both_users(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 4_000_000)
    with pytest.raises(
        fw.UsageError, match=r"watch \d+: expected a process of 4000000, got one of \S+: "
    ):
        fw.watch(os.getpid())


def test_bytes_over_rdma_are_those_of_the_hosts_adapters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fullwire.recorder.sampler._ADAPTERS", str(tmp_path))
    folders = [tmp_path / f"mlx5_{number}/ports/1/counters" for number in (0, 1)]

    def write(sent_words: int, received_words: int) -> None:
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "port_xmit_data").write_text(f"{sent_words}\n")
            (folder / "port_rcv_data").write_text(f"{received_words}\n")

    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        network = os.stat(f"/proc/{other.pid}/ns/net").st_ino
        rank = RankHere(
            pid=other.pid, rank=0, user="me", command="train", network=network, uses_gpu=True
        )
        ranks = tuple(replace(rank, rank=number, uses_rdma=number < 2) for number in range(3))
        write(10**15, 5 * 10**14)
        watcher = Watcher(JobHere(ranks=ranks, workers=3, is_guessed=False))
        assert watcher.watch(0.1)
        write(10**15 + 1_000_000, 5 * 10**14 + 2_000_000)
        assert watcher.watch(0.1)
        watcher.close()
        looks = watcher.looks
        other.kill()
    assert looks.uses[0].memory_bytes > 1e6
    assert looks.uses[0].read_bytes_s >= 0
    # Two ports, of words of four bytes, and two ranks.
    last = [looks.by_rank[number][-1] for number in range(3)]
    assert [(each[SENT], each[RECEIVED]) for each in last] == [(4e6, 8e6), (4e6, 8e6), (0, 0)]
    notes = [sentence(note) for note in judged(looks, None).notes]
    assert any(note.startswith("Ranks 0 and 1 use RDMA.") for note in notes)


def test_a_job_that_ends_before_the_first_look_has_an_answer() -> None:
    rank = RankHere(pid=2**22 + 1, rank=0, user="me", command="train", network=1, uses_gpu=False)
    watcher = Watcher(JobHere(ranks=(rank,), workers=1, is_guessed=True))
    assert not watcher.watch(1)
    found = judged(watcher.looks, None, has_ended=True)
    assert found.sentence == "The ranks computed and sent nothing."


def test_one_rank_and_one_job_are_told_in_the_singular(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = {0: a_job(0.1, 0.2)[0]}
    alone = seen(looks, workers=1)
    print_watched(judged(alone, 1e9))
    assert "Watched 1 rank of train for 12 s." in capsys.readouterr().out
    print_watched(judged(seen(looks), 1e9))
    assert "Watched 1 of 2 ranks of train" in capsys.readouterr().out
    monkeypatch.setattr("fullwire.recorder.jobs_here.jobs_here", lambda: (alone.job,))
    with pytest.raises(fw.UsageError, match="1 job runs here with other ones"):
        job_named("other")
    monkeypatch.setattr("fullwire.recorder.jobs_here.jobs_here", tuple)
    with pytest.raises(fw.UsageError, match="no training job that you may watch runs here"):
        job_named("other")


def test_what_each_rank_uses_is_shown_where_the_kernel_tells_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    looks = replace(seen(a_job(0.1, 0.2)), uses={1: ProcessUse(2e9, 5e6, 3.0)})
    found = judged(looks, 1e9)
    print_watched(found, is_full=True)
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    [first], [second] = ([row for row in rows if row[:1] == [rank]] for rank in "01")
    assert second[-4:] == ["2", "GB", "5", "MB/s"]
    assert second[:-4] == ["1", *first[1:]]
    told = open_metrics(found)
    assert 'fullwire_memory_bytes{rank="1"} 2000000000.0' in told
    assert 'fullwire_read_bytes_per_second{rank="1"} 5000000.0' in told
    assert 'fullwire_faults_per_second{rank="1"} 3.0' in told
    assert 'fullwire_memory_bytes{rank="0"}' not in told


def test_200_ranks_of_one_host_are_watched_within_seconds() -> None:
    one = a_job(0.1, 0.2)[0]
    begun_s = time.process_time()
    found = judged(seen(dict.fromkeys(range(200), one), 200), 1e9)
    assert found.explanation is not None
    assert found.explanation.step_s == pytest.approx(0.3, rel=0.01)
    assert time.process_time() - begun_s < 30


def test_steps_whose_length_changes_are_found_by_their_bytes() -> None:
    random = np.random.default_rng(3)
    rows, at_s, computed_s, sent = [], 0.0, 0.0, 0.0
    lengths_s = []
    for step in range(60):
        begun_s = at_s
        for pause_s, bytes_ in ((0.1, 1e6), (0.04, 3e6), (0.04, 3e6)):
            # A machine that others use too: each part takes up to twice its time.
            quiet_s, send_s = pause_s * random.uniform(1, 2), bytes_ / 60e6 * random.uniform(1, 2)
            for busy_s, speed in ((quiet_s, 0.0), (send_s, bytes_ / send_s)):
                for _ in range(round(busy_s / LOOK_S)):
                    rows.append((at_s, computed_s, sent))
                    at_s += LOOK_S
                    computed_s += LOOK_S if not speed else 0.0
                    sent += speed * LOOK_S * send_s / (round(send_s / LOOK_S) * LOOK_S)
        if step % 20 == 19:  # an evaluation
            at_s += 2.0
        lengths_s.append(at_s - begun_s)
    looks: dict[int, list[tuple[float, ...]]] = {
        rank: [(1e18 + at * 1e9, ran * 1e9, 0, 0, told, told, 0, 0) for at, ran, told in rows]
        for rank in (0, 1)
    }
    found = judged(seen(looks), 1e9)
    assert found.run is not None
    own = found.run.spans.rows((found.run.spans.name == "step") & (found.run.spans.rank == 0))
    assert len(own.step) >= 56
    assert np.median(own.end_ns - own.start_ns) / 1e9 == pytest.approx(
        np.median(lengths_s), rel=0.03
    )
    assert found.confidence > 0.95


def test_layers_that_are_nearly_alike_are_not_taken_for_steps() -> None:
    random = np.random.default_rng(5)
    at_s, sent = [0.0], [0.0]
    for _ in range(40):
        for layer in range(8):  # bytes never stop
            for usual_s, size in ((0.03, 3e6), (0.03 if layer < 7 else 0.04, 6e5)):
                at_s.append(at_s[-1] + usual_s * random.uniform(0.9, 1.1))
                sent.append(sent[-1] + size)
    grid_s = np.arange(0, at_s[-1], LOOK_S)
    counted = zip(grid_s, np.interp(grid_s, at_s, sent), strict=True)
    rows: list[tuple[float, ...]] = [
        (1e18 + at * 1e9, 0, 0, 0, told, told, 0, 0) for at, told in counted
    ]
    looks: dict[int, list[tuple[float, ...]]] = dict.fromkeys((0, 1), rows)
    found = judged(seen(looks), 1e9)
    assert found.explanation is not None
    assert found.explanation.step_s == pytest.approx(0.49, rel=0.01)


def test_short_steps_whose_pauses_are_often_missed_keep_their_length() -> None:
    random = np.random.default_rng(7)
    rows, at_s, sent = [], 0.0, 0.0
    for _ in range(200):
        pause_s = random.choice([0.005, 0.03, 0.04])
        rows.append((at_s + 0.015, sent))
        rows.append((at_s + 0.015 + pause_s, sent))
        at_s, sent = at_s + 0.03 + pause_s, sent + 1e6
        rows.append((at_s, sent))
    at = np.arange(0, at_s, 0.018)
    told = np.interp(at, *np.array(rows).T)
    looks: dict[int, list[tuple[float, ...]]] = {
        rank: [(1e18 + s * 1e9, 0, 0, 0, b, b, 0, 0) for s, b in zip(at, told, strict=True)]
        for rank in (0, 1)
    }
    found = judged(seen(looks), 1e9)
    assert found.explanation is not None
    assert len(found.explanation.detail.steps) == pytest.approx(200, abs=4)


def test_a_process_in_a_container_is_shown_with_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spy = tmp_path / "py-spy"
    frame = (
        '{"filename": "/job/dataset.py", "short_filename": "dataset.py", "line": 3, "name": "x"}'
    )
    spy.write_text(f'#!/bin/sh\necho \'[{{"os_thread_id": 4, "frames": [{frame}]}}]\'\n')
    spy.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr("fullwire.recorder.outside._main_thread", lambda pid: 4)
    assert waits_of(os.getpid()).line == "dataset.py:3 (x)"


def test_a_process_without_a_container_has_its_own_number() -> None:
    assert _main_thread(os.getpid()) == os.getpid()


def test_what_each_rank_did_adds_up_to_the_time() -> None:
    for rank in judged(seen(a_job(0.1, 0.2)), 1e9).ranks:
        assert rank.computing == pytest.approx(1 / 3, abs=0.02)
        assert rank.sending == pytest.approx(2 / 3, abs=0.06)
        assert rank.computing + rank.sending + rank.waiting + rank.delayed == pytest.approx(1)
        assert rank.sent_bps == pytest.approx(1e9, rel=0.05)


def test_an_alert_is_told_once_when_it_begins_and_again_when_it_comes_back() -> None:
    fast, slow = judged(seen(a_job(0.1, 0.2)), 1e9), judged(seen(a_job(0.1, 0.3)), 1e9)
    condition = alert("step > 1.2x")
    windows = [fast, fast, fast, fast, slow, slow, fast, slow]
    told = [condition.check(window) for window in windows]
    assert [found is not None for found in told] == [*[False] * 4, True, False, False, True]
    assert told[4] is not None
    assert sentence(told[4]) == "Alert: step is 400 ms, the limit is 360 ms."


def test_an_alert_about_a_stuck_job_names_its_rank() -> None:
    assert alert("stuck").check(judged(seen(a_job(0.1, 0.2)), 1e9)) is None
    found = alert("stuck").check(judged(seen(a_job(0.1, 0.2, ends_s=15.0)), 1e9))
    assert found is not None
    assert "Stuck for 14.99 s." in sentence(found)


def test_an_alert_about_a_link_holds_below_its_rate() -> None:
    window = judged(seen(a_job(0.1, 0.2)), 1e9)
    assert alert("link < 900Mbps").check(window) is None
    assert alert("link < 2Gbps").check(window) is not None
    assert alert("retransmits").check(window) is None


@pytest.mark.parametrize("words", ["", "step", "speed > 3", "step > fast", "step >", "link < -1"])
def test_a_condition_that_is_none_is_refused(words: str) -> None:
    with pytest.raises(fw.UsageError, match="--alert"):
        alert(words)


def test_prometheus_reads_the_latest_window() -> None:
    window = judged(seen(a_job(0.1, 0.2)), 1e9)
    with served("127.0.0.1:0") as page:
        page.text = open_metrics(window)
        with urllib.request.urlopen(page.url, timeout=5) as answer:
            assert answer.headers["Content-Type"].startswith("application/openmetrics-text")
            lines = answer.read().decode().splitlines()
    assert lines[-1] == "# EOF"
    values = dict(line.split(" ") for line in lines if not line.startswith("#"))
    assert float(values["fullwire_step_seconds"]) == pytest.approx(0.3, rel=0.01)
    assert float(values['fullwire_link_utilization{rank="1"}']) == pytest.approx(1, abs=0.06)
    panels = json.loads((DOCS / "guides/watch-grafana.json").read_text())["panels"]
    shown = {target["expr"] for panel in panels for target in panel["targets"]}
    assert shown <= {name.partition("{")[0] for name in values}
    parts = [float(value) for name, value in values.items() if "part_seconds" in name]
    assert sum(parts) == pytest.approx(float(values["fullwire_step_seconds"]))
    for place in ("9400", "127.0.0.1:x", ":70000"):
        with pytest.raises(fw.UsageError, match="--prometheus"), served(place):
            pass


def test_a_collector_of_opentelemetry_gets_each_window_and_may_stall_or_fail(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    got: list[tuple[str, str | None, dict[str, Any]]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            got.append((self.path, self.headers["X-Key"], body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-key=a%20b")
    window = judged(seen(a_job(0.1, 0.2)), 1e9)
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        live = Live(is_json=True, out=None, command=None, page=None, collector=Collector(url))
        live.show(window, 5.0)
        live.finish()
        server.shutdown()
    [(path, key, body)] = got
    assert (path, key) == ("/v1/metrics", "a b")
    [of_resource] = body["resourceMetrics"]
    names = {each["key"]: each["value"]["stringValue"]
             for each in of_resource["resource"]["attributes"]}  # fmt: skip
    assert names["service.name"] == "fullwire"
    metrics = {each["name"]: each for each in of_resource["scopeMetrics"][0]["metrics"]}
    [step] = metrics["fullwire.step_seconds"]["gauge"]["dataPoints"]
    assert step["asDouble"] == pytest.approx(0.3, rel=0.01)
    assert int(step["timeUnixNano"]) == pytest.approx(time.time_ns(), abs=60e9)
    ranks = [point["attributes"][0]["value"]["stringValue"]
             for point in metrics["fullwire.computing_ratio"]["gauge"]["dataPoints"]]  # fmt: skip
    assert ranks == ["0", "1"]
    live = Live(is_json=True, out=None, command=None, page=None, collector=Collector(url))
    live.show(window, 5.0)  # nobody listens any more
    live.finish()
    assert f"--otlp {url}/v1/metrics: <urlopen error" in capsys.readouterr().err
    for url in ("collector:4318", "ftp://x", "http:// x"):
        with pytest.raises(fw.UsageError, match="--otlp: expected http://HOST:4318"):
            Collector(url)


def test_a_watch_that_goes_on_prints_one_object_a_window_and_writes_a_run_on_demand(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    window = judged(seen(a_job(0.1, 0.2)), 1e9)
    live = Live(is_json=True, out=str(tmp_path / "x.run"), command=None, page=None)
    live.show(window, 5.0)
    live.ask_for_run(0, None)
    live.show(window, 3700.0)
    printed = capsys.readouterr()
    objects = [json.loads(line) for line in printed.out.splitlines()]
    assert [found["source"] for found in objects] == ["outside", "outside"]
    assert objects[0]["processes"][1]["sending"] == pytest.approx(2 / 3, abs=0.06)
    assert (tmp_path / "x-1.run").is_dir()
    assert "hour 1: step 300 ms (300 ms to 300 ms)" in printed.err
    with pytest.raises(fw.UsageError, match="--exec"):
        Live(is_json=True, out=None, command="no-such-command-here", page=None)


def test_a_watch_that_goes_on_prints_a_line_when_the_verdict_changes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    live = Live(is_json=False, out=None, command=None, page=None)
    sends = [judged(seen(a_job(0.1, send_s)), 1e9) for send_s in (0.2, 0.21)]
    for window in (*sends, judged(seen(a_job(0.1, 0.2, ends_s=15.0)), 1e9)):
        live.show(window, 5.0)
    first, second = capsys.readouterr().out.splitlines()
    assert "The network limits this job" in first
    assert "Stuck for 14.99 s" in second
