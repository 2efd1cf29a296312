"""Collectives played transfer by transfer: right against a plain reference and closed forms."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from fractions import Fraction
from pathlib import Path
from signal import SIGINT
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fullwire as fw
from fullwire import _native
from fullwire.clusters.cluster import one_switch
from fullwire.collectives.cost import AddTimes
from fullwire.collectives.plan import plan
from fullwire.collectives.playing import collective_time
from fullwire.collectives.registry import OPS, statement, with_formula
from fullwire.errors import UsageError
from tests.around_a_switch import Wish, play_wishes
from tests.conftest import Cli
from tests.reference_network import Move, ReferenceNetwork
from tests.strategies import cases

ADDS = AddTimes(((1e3, 1e-6), (1e6, 2e-6), (1e9, 1e-3)))
# Every move of a random plan has a size of its own. With equal sizes two transfers may become ready
# for one connection at the same instant. Their order is then a choice, not a fact to check.
SIZES = [(Fraction(1000 + 2**i), Fraction(0 if i % 3 else 300 + i)) for i in range(14)]


def by_round(move: tuple[int, int, int]) -> int:
    return move[0]


moves = st.tuples(st.integers(0, 3), st.integers(0, 4), st.integers(1, 4))
in_rounds = st.lists(moves, min_size=1, max_size=7).map(lambda part: sorted(part, key=by_round))
parts_of_moves = st.lists(in_rounds, min_size=1, max_size=2)


def native_s(parts: list[list[tuple[int, int, int]]], latency: float, chunks: int) -> float:
    sizes = iter(SIZES)
    wishes = [
        [Wish(n, source, (source + hop) % 5, *map(float, next(sizes))) for n, source, hop in part]
        for part in parts
    ]
    return play_wishes(wishes, bytes_per_s=2.0, latency_s=latency, chunks=chunks)


latencies = st.sampled_from([Fraction(0), Fraction(70), Fraction(501, 2)])


@cases(300)
@given(parts_of_moves, latencies, st.integers(1, 2))
def test_the_engine_agrees_with_a_plain_reference_on_any_plan(
    parts: list[list[tuple[int, int, int]]], latency: Fraction, chunks: int
) -> None:
    sizes = iter(SIZES)
    stated = [
        [Move(n, source, (source + hop) % 5, *next(sizes)) for n, source, hop in part]
        for part in parts
    ]
    expected = ReferenceNetwork(stated, Fraction(2), latency, chunks).play()
    assert native_s(parts, float(latency), chunks) == pytest.approx(float(expected), rel=1e-9)


OFFERED = [
    ("allreduce", "ring", (1, 2, 5), "pipelined"),
    ("allreduce", "ring", (4,), "serial"),
    ("allreduce", "halving-doubling", (1,), "pipelined"),
    ("allreduce", "halving-doubling", (3,), "serial"),
    ("reducescatter", "ring", (1, 6), "pipelined"),
    ("reducescatter", "halving-doubling", (1,), "pipelined"),
    ("allgather", "ring", (1, 6), "pipelined"),
    ("allgather", "halving-doubling", (1,), "pipelined"),
    ("broadcast", "ring", (1, 6), "pipelined"),
    ("broadcast", "ring", (3,), "serial"),
    ("broadcast", "tree", (1,), "pipelined"),
]


@pytest.mark.parametrize(("op", "algorithm", "chunk_counts", "order"), OFFERED)
def test_events_and_closed_form_agree_wherever_one_is_offered(
    op: str, algorithm: str, chunk_counts: tuple[int, ...], order: str
) -> None:
    for workers in (2, 3, 5, 8, 33) if algorithm == "ring" else (2, 4, 8, 64):
        for size in (1_000, 2**20, 2**27):
            for latency_s in (0.0, 1e-6, 1e-3):
                cluster = one_switch(workers=workers, rate_bps=1e10, latency_s=latency_s)
                for chunks in chunk_counts:
                    event, closed = (
                        collective_time(
                            op,
                            algorithm,
                            cluster,
                            size,
                            chunks=chunks,
                            chunk_order=order,
                            level=level,
                            adds=ADDS,
                        ).time_s
                        for level in ("event", "closed")
                    )
                    assert event == pytest.approx(closed, rel=1e-9)


@pytest.mark.parametrize(
    ("algorithm", "workers", "chunks"),
    [("tree", 8, 1), ("tree", 8, 8), ("halving-doubling", 8, 4), ("halving-doubling", 6, 1)],
)
def test_where_no_closed_form_is_exact_none_is_given(
    algorithm: str, workers: int, chunks: int
) -> None:
    cluster = one_switch(workers=workers, rate_bps=1e10)
    with pytest.raises(UsageError, match="ask with --level event"):
        collective_time("allreduce", algorithm, cluster, 1_000, chunks=chunks, level="closed")


def test_a_double_tree_is_never_faster_than_its_busiest_link() -> None:
    for workers in (2, 3, 4, 7, 16, 33):
        for chunks in (1, 7, 40):
            cluster = one_switch(workers=workers, rate_bps=8e9)
            found = collective_time("allreduce", "tree", cluster, 10**9, chunks=chunks)
            assert found.time_s >= min(workers, 4) / 2 * (1 - 1e-12)
            assert found.transfers == chunks * plan("allreduce", "tree", workers).transfer_count()


def test_one_worker_needs_no_time() -> None:
    for op in OPS:
        for algorithm in with_formula(op):
            is_exact = statement(op, algorithm).exactly_s is not None
            for level in ("event", "closed") if is_exact else ("event",):
                found = collective_time(
                    op, algorithm, one_switch(workers=1, rate_bps=1e9), 10**6, level=level
                )
                assert found.time_s == 0


@given(
    st.integers(2, 20), st.integers(1, 10**9), st.integers(1, 6), st.sampled_from(["ring", "tree"])
)
def test_scaling_every_time_and_rate_scales_a_collective_exactly(
    workers: int, size: int, chunks: int, algorithm: str
) -> None:
    slow, fast = (
        collective_time(
            "allreduce",
            algorithm,
            one_switch(workers=workers, rate_bps=1e9 * scale, latency_s=1e-5 / scale),
            size,
            chunks=chunks,
            adds=AddTimes(((1e3, 1e-6 / scale), (1e9, 1e-3 / scale))),
        ).time_s
        for scale in (1, 4)
    )
    assert slow == 4 * fast


@given(st.integers(2, 30), st.floats(1e8, 1e12), st.floats(1, 10), st.integers(1, 5))
def test_a_faster_link_never_slows_a_ring(
    workers: int, rate: float, faster: float, chunks: int
) -> None:
    times = [
        collective_time(
            "allreduce",
            "ring",
            one_switch(workers=workers, rate_bps=each, latency_s=1e-5),
            10**6,
            chunks=chunks,
        ).time_s
        for each in (rate, rate * faster)
    ]
    assert times[1] <= times[0] * (1 + 1e-12)


def test_the_library_answers_as_the_command_does() -> None:
    found = fw.collective("all-reduce", bytes="1MiB", workers=4, bandwidth="10Gbps", latency="1us")
    assert found.time_s == pytest.approx(2 * 3 / 4 * 2**20 * 8 / 10e9 + 6e-6)
    assert found.bus_bandwidth_bps == pytest.approx(2 * 3 / 4 * 2**20 * 8 / found.time_s)


def test_columns_that_cannot_be_are_refused_before_they_are_followed() -> None:
    def play(
        *, rounds: int = 1, connection: int = 0, sizes: tuple[float, ...] = (1.0,), link: int = 1
    ) -> None:
        part = (
            np.array([rounds], np.int64),
            np.array([0, 1], np.int64),
            np.array([connection], np.int32),
            np.array(sizes),
            np.zeros(1),
        )
        ends = np.array([0], np.int32), np.array([1], np.int32)
        crossed = np.array([0, link], np.int32), np.ones(2, np.int32)
        one = np.ones(1, np.int64)
        begin = np.array([0, 2], np.int64)
        _native.play(
            2, np.ones(2), *ends, np.zeros(1), one, begin, *crossed, [part], 1, False, None
        )

    play()
    for bad in (
        {"rounds": 0},
        {"connection": 1},
        {"connection": -1},
        {"sizes": (1.0, 1.0)},
        {"link": 2},
        {"link": -1},
    ):
        with pytest.raises(ValueError, match=r"cannot be|differ in length"):
            play(**bad)


def processor_s(process: int) -> float:
    times = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[11:13]
    return sum(map(int, times)) / os.sysconf("SC_CLK_TCK")


def test_ctrl_c_ends_a_long_play() -> None:
    # A tree has no equal transfers, so all of it is played.
    command = (
        "collective allreduce --bytes 1GB --workers 3000 --bandwidth 1Gbps --chunks 500 "
        "--algorithm tree"
    )
    play = subprocess.Popen(
        [sys.executable, "-m", "fullwire", *command.split()], stderr=subprocess.PIPE, text=True
    )
    while processor_s(play.pid) < 1.0:  # so it is loaded, and would play for minutes
        assert play.poll() is None
        time.sleep(0.05)
    play.send_signal(SIGINT)
    _, complaint = play.communicate(timeout=20)
    assert play.returncode not in (0, 2)
    assert "Traceback" not in complaint


@pytest.mark.parametrize(
    ("asked", "line"),
    [
        ({"nodes": 2}, "nodes: expected a described cluster with them"),
        ({"latency": ""}, "latency: "),
    ],
)
def test_what_one_switch_cannot_have_is_refused(asked: dict[str, Any], line: str) -> None:
    with pytest.raises(UsageError, match=line):
        fw.collective("allreduce", bytes="1MiB", workers=8, bandwidth="10Gbps", **asked)


def test_one_worker_is_one_worker_in_words(cli: Cli) -> None:
    asked = ("collective", "allreduce", "--bytes", "1MiB", "--bandwidth", "10Gbps", "--workers")
    alone = cli(*asked, "1").stdout
    assert "over 1 worker at 10 Gbps" in alone
    assert "expected between" not in alone
    assert "over 2 workers at 10 Gbps" in cli(*asked, "2").stdout


def test_workers_that_the_nodes_asked_for_cannot_hold_are_refused(cli: Cli) -> None:
    asked = ("collective", "allreduce", "--bytes", "1MiB", "--cluster", "dgx-h100", "--json")
    done = cli(*asked, "--workers", "12", "--nodes", "1")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "fullwire: workers: expected at most 8 on nodes = 1 of dgx-h100, got 12, which need "
        "nodes = 2\n"
    )
    two, alone = (cli(*asked, "--workers", "12", *more) for more in (("--nodes", "2"), ()))
    assert (two.returncode, alone.returncode) == (0, 0)
    assert json.loads(two.stdout)["time_s"] == json.loads(alone.stdout)["time_s"]
