"""Captures of made-up trainings, packet by packet: every statement is right, or left open."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

import fullwire as fw
from fullwire.report.as_data import traffic_object
from fullwire.words import sentences
from tests import wires as w
from validation.wires import GROUPS, Case, judged, plain, played, said_of

CASES = {case.name: case for group in GROUPS for case in group()}
TELLING = [
    "ring of 2 back",
    "ring of 16 on, no broadcast",
    "ring of 8 in another order",
    "two-way ring of 5",
    "two rings in two orders",
    "halving-doubling of 8",
    "tree of 7",
    "double tree of 6",
    "2 servers, 4 workers",
    "3 groups of 3",
    "ring of 4 hosts with 16 ranks, broadcast",
    "4 connections between hosts",
    "evaluation every 5",
    "checkpoints to a store",
    "five equal buckets",
    "overlap without gaps",
    "overlap without gaps, no broadcast",
    "iterations that take longer and longer",
    "two iterations, too few to repeat",
    "a late host, hardly any computation",
    "a broadcast of as many bytes as an iteration",
    "slow link, 1/3, 4 hosts",
    "slow link and overlap without gaps",
    "a parameter server whose link is everyone's",
    "snap 54",
    "cooked",
    "vxlan",
    "RoCEv2",
    "IPv6",
    "pcapng, 10^-3 s",
    "at each host, clocks hours apart",
    "begun in mid-job",
    "5 % of packets missed",
    "each packet twice",
    "super-segments of 43",
    "sequence numbers that wrap",
    "FSDP that gathers one way and reduces the other",
    "two jobs of their own",
    "input from a store all the while",
    "requests and answers at random",
]


@pytest.mark.parametrize("case", [CASES[name] for name in TELLING], ids=lambda case: case.name)
def test_what_is_said_of_a_known_training_is_right(tmp_path: Path, case: Case) -> None:
    assert judged(said_of(case.captures(), tmp_path), case.truth) == ([], [])


def test_sharded_parameters_are_left_open_where_nothing_tells(tmp_path: Path) -> None:
    sharded = CASES["FSDP of equal layers"]
    result = said_of(sharded.captures(), tmp_path)
    assert result.gradient_bytes == pytest.approx(3e6, rel=1e-3)
    assert result.if_sharded_bytes == pytest.approx(2e6, rel=1e-3)
    assert "3 MB at N=4 if it is one all-reduce, or 2 MB if parameters are sharded" in " ".join(
        sentences(result.story)
    )


def test_the_models_size_tells_that_parameters_are_sharded(tmp_path: Path) -> None:
    (tmp_path / "x.pcap").write_bytes(CASES["FSDP of equal layers"].captures()[0])
    result = fw.flows(tmp_path / "x.pcap", gradient="2MB")
    assert result.gradient_bytes == pytest.approx(2e6, rel=1e-3)
    assert result.gathered_bytes == pytest.approx(4e6, rel=1e-3)
    assert any("parameters are sharded" in each for each in result.audit)


def test_two_trainings_in_one_capture_are_told_each_for_itself(tmp_path: Path) -> None:
    result = said_of(CASES["two jobs of their own"].captures(), tmp_path)
    first, second = result.groups
    assert (first.hosts[0], second.hosts[0]) == ("10.0.0.1", "10.0.0.5")
    assert [each.iterations and each.iterations.count for each in result.groups] == [12, 7]
    assert second.gradient_bytes == pytest.approx(5e6, rel=1e-3)
    assert len(traffic_object(result)["groups"]) == 2


@pytest.mark.parametrize("transport", ["tcp", "udp", "roce"])
def test_trainings_that_follow_each_other_are_told_each_for_itself(
    tmp_path: Path, transport: str
) -> None:
    how = w.Capturing(transport=transport)
    first = played(replace(plain(), iterations=9), 4)
    other = played(replace(plain(), iterations=12, gradient=5_000_000), 4)
    last_ns = int(first.time_ns.max())
    later = replace(
        other,
        time_ns=other.time_ns + (last_ns - int(other.time_ns.min())) + 2 * 10**9,
        connection=other.connection + 7,
    )
    result = said_of([w.capture(first, how), w.capture(later, how)], tmp_path)
    assert [each.iterations and each.iterations.count for each in result.groups] == [9, 12]
    assert result.groups[1].gradient_bytes == pytest.approx(5e6, rel=1e-3)
    assert result.groups[1].during_s is not None
    assert result.groups[1].during_s[0] > 2
    assert "2 trainings between 4 hosts, one after the other" in " ".join(sentences(result.story))
    assert len(traffic_object(result)["groups"]) == 2
    # A capture that was rotated, or made in two places, is one training as before.
    halves = [first.rows(np.flatnonzero(part)) for part in _halves(first.time_ns)]
    whole = said_of([w.capture(each, how) for each in halves], tmp_path)
    assert whole.groups == ()
    assert whole.iterations is not None
    assert whole.iterations.count == 9
    # Hosts whose clocks are hours apart are one job, too.
    apart = [
        w.capture(w.seen_at(first, host), replace(how, ahead_ns=host * 3600 * 10**9))
        for host in range(4)
    ]
    assert said_of(apart, tmp_path).groups == ()


def _halves(time_ns: NDArray[np.int64]) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    middle = np.median(time_ns)
    return time_ns < middle, time_ns >= middle


def test_mirrored_packets_count_once_on_the_wire(tmp_path: Path) -> None:
    seen = played(replace(plain(), iterations=4), 4)
    once = said_of([w.capture(seen)], tmp_path)
    again = said_of([w.capture(w.twice(seen))], tmp_path)
    assert (again.matrix_wire_bytes == once.matrix_wire_bytes).all()
    assert any("mirrored" in each for each in again.audit)
    assert not any("retransmission)" in each for each in again.audit)
