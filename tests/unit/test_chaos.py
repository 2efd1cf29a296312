"""Chaos: faults by chance, the same ones for the same seed."""

from __future__ import annotations

import itertools

import pytest

from fullwire.errors import UsageError
from fullwire.lab.description import describe
from fullwire.lab.faults import Fault, parse_chaos

LAB = describe(workers=3, rate=["1Gbps"])
ALL = "kill every 20s; pause 5s; partition 0,1|2 3s; slow 2 to 10Mbps 4s; fill disk"


def drawn(text: str, seed: int = 0, count: int = 40) -> list[Fault]:
    return list(itertools.islice(parse_chaos(text, seed, LAB).faults(LAB), count))


def test_a_seed_gives_the_same_faults_and_another_seed_others() -> None:
    assert drawn(ALL, 5) == drawn(ALL, 5) != drawn(ALL, 6)


def test_faults_come_in_order_of_time_and_end_after_their_length() -> None:
    faults = drawn(ALL, 1)
    times_s = [fault.at_s for fault in faults]
    assert times_s == sorted(times_s)
    kills = [fault for fault in faults if fault.kind == "kill"]
    assert [int(fault.at_s // 20) for fault in kills] == list(range(len(kills)))
    assert {fault.host for fault in kills} == {0, 1, 2}
    by_kind = {fault.kind: fault for fault in faults if fault.kind != "slow"}
    assert by_kind["resume"].at_s - by_kind["pause"].at_s == pytest.approx(5)
    assert by_kind["resume"].host == by_kind["pause"].host
    assert by_kind["heal"].at_s - by_kind["partition"].at_s == pytest.approx(3)
    assert by_kind["partition"].hosts == (0, 1, 2)
    slow, again = (fault for fault in faults if fault.kind == "slow")
    assert (str(slow), str(again)) == ("slow 2 10 Mbps", "slow 2 1 Gbps")
    assert again.at_s - slow.at_s == pytest.approx(4)
    assert str(by_kind["fill"]) == "fill disk"
    assert "empty" not in by_kind


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("explode", "expected kill, pause, partition, slow, fill at the beginning, got 'explode'"),
        ("kill now", r"expected kill \[HOST\] \[every TIME \| at TIME\], got 'kill now'"),
        ("pause", "expected pause .HOST. TIME"),
        ("partition 0|0 3s", "expected each host once"),
        ("partition 0,1 3s", "expected hosts like 0,1|2"),
        ("partition 0|7 3s", "expected a host from 0 to 2, got 7"),
        ("slow 2 10Mbps", "expected slow .HOST. to RATE .TIME."),
        ("slow 2 to 10", "expected a rate with its unit"),
        ("fill", "expected fill disk"),
        ("kill every 0s", "above 0 s"),
        ("kill every 20", "expected a time with its unit"),
        (" ; ", "expected faults like 'kill every 20s'"),
    ],
)
def test_other_words_are_refused_in_one_line(text: str, problem: str) -> None:
    with pytest.raises(UsageError, match=problem) as refused:
        parse_chaos(text, 0, LAB)
    assert "\n" not in str(refused.value)
