"""Our backend in failures: all ranks end in time, learn the cause, and free their resources.

Three hosts of a lab, each with a rank that joins a new group for every test. However a test ends,
the group is destroyed, and the processes must then hold the same resources as before it.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from fullwire.lab.description import describe
from fullwire.lab.faults import Fault, FaultKind
from fullwire.lab.lab import Lab
from fullwire.lab.session import rank_environment
from tests.lab.test_lab import needs_namespaces
from tests.rank_processes import RankProcesses
from tests.torch.test_record import needs_torch

pytestmark = [needs_torch, needs_namespaces]

RANKS = 3
TIMEOUT_S = 2.0
MUCH_ROOM_S = 18.0  # a shared machine may stand still for a while
COUNT = 1 << 18  # a mebibyte
# The resources that may grow. Memory is measured after the allocator has released the pages that it
# keeps, as it keeps them under Gloo too. Lost memory shows in `allocated_bytes`.
BREATH = {
    "descriptors": 0,
    "threads": 0,
    "memory_bytes": 16 << 20,
    "allocated_bytes": 256 << 10,
    "python_blocks": 1000,
}


class Cluster:
    """Three hosts with a rank on each; groups of the ranks come and go."""

    def __init__(self, lab: Lab, backend: str) -> None:
        self.lab = lab
        self.ranks = RankProcesses(self.launch, "enduring", RANKS, backend)
        self.port = 30_000

    def join(self, of: range = range(RANKS), *, timeout_s: float = TIMEOUT_S) -> None:
        """Tell ranks to make the next group; `joined` returns the result."""
        self.ranks.tell(
            {"do": "join", "port": self.port, "timeout_s": timeout_s, "ranks": RANKS}, of
        )

    def joined(self) -> None:
        for rank in range(RANKS):
            assert self.ranks.hear(rank)["error"] is None

    def reduce(self, lasting_s: float = 60.0, count: int = COUNT) -> None:
        """Let all ranks reduce for this time, or until an error."""
        self.ranks.tell({"do": "reduce", "count": count, "lasting_s": lasting_s}, range(RANKS))

    def reduced(self) -> int:
        """Return the number of reductions, if all went well."""
        answers = [self.ranks.hear(rank) for rank in range(RANKS)]
        assert [answer["error"] for answer in answers] == [None] * RANKS
        assert [answer["wrong"] for answer in answers] == [0] * RANKS
        return int(answers[0]["times"])

    def failed(self, rank: int) -> str:
        """Return a rank's error, which came in time."""
        answer = self.ranks.hear(rank, TIMEOUT_S + MUCH_ROOM_S)
        assert answer["error"] is not None, "no error, though something had happened"
        assert answer["waited_s"] < TIMEOUT_S + MUCH_ROOM_S
        assert answer["wrong"] == 0
        return str(answer["error"])

    def blamed(self, rank: int) -> set[int]:
        """Return the lost ranks that a rank's error names; the error came in time."""
        error = self.failed(rank)
        gone = re.findall(r"rank ([\d, rank]+?) (?:is gone|do not answer|does not answer)", error)
        assert gone, error
        return {int(number) for each in gone for number in re.findall(r"\d+", each)}

    def disturb(self, kind: FaultKind, host: int, rate_bps: float | None = None) -> None:
        self.lab.disturb(Fault(at_s=0, kind=kind, host=host, rate_bps=rate_bps))

    def leave(self, of: Iterable[int] = range(RANKS)) -> None:
        for answer in self.ranks.ask({"do": "leave"}, list(of)):
            assert answer["took_s"] < TIMEOUT_S + MUCH_ROOM_S
        self.port += 1

    def held(self) -> list[dict[str, int]]:
        """Return the resources that each process holds and a group may have left behind."""
        return self.ranks.ask({"do": "held"})

    def launch(self, rank: int, command: Any, environment: Any) -> None:
        """Start a command on the host of a rank."""
        self.lab.start(rank, command, {**environment, **rank_environment(self.lab, rank)})


@pytest.fixture(scope="module")
def standing() -> Iterator[Cluster]:
    """Ranks on hosts whose links lose nothing, after a first group that has come and gone."""
    with Lab(describe(workers=RANKS, rate=["1Gbps"])) as lab:
        cluster = Cluster(lab, "fullwire")
        cluster.join(timeout_s=30)
        cluster.joined()
        cluster.leave()
        yield cluster
        cluster.ranks.close()


@pytest.fixture
def cluster(standing: Cluster) -> Iterator[Cluster]:
    """The ranks before a group; after the test, all resources of the group must be gone."""
    before = standing.held()
    yield standing
    for host in range(RANKS):
        standing.disturb("restore", host)
    standing.leave()
    assert not list(grown(before, standing.held(), ("descriptors", "threads")))


def run_until_it_happens(cluster: Cluster, happens: Callable[[], None]) -> None:
    """Make a group that reduces, and then cause an event."""
    cluster.join()
    cluster.joined()
    cluster.reduce()
    time.sleep(0.3)  # by then some reductions are over, and one is in progress
    happens()


def test_a_killed_rank_is_named_to_all_others_and_can_come_back(cluster: Cluster) -> None:
    """The killed rank is the one that holds the store."""
    host = 0
    run_until_it_happens(cluster, lambda: cluster.disturb("kill", host))
    for rank in set(range(RANKS)) - {host}:
        assert cluster.blamed(rank) == {host}
    cluster.leave(set(range(RANKS)) - {host})
    cluster.ranks.start([host])
    cluster.join()
    cluster.joined()
    cluster.reduce(lasting_s=0)
    assert cluster.reduced() == 1


def test_a_paused_rank_is_named_to_all_others_and_finds_out_when_it_goes_on(
    cluster: Cluster,
) -> None:
    run_until_it_happens(cluster, lambda: cluster.disturb("pause", 1))
    assert [cluster.blamed(rank) for rank in (0, 2)] == [{1}, {1}]
    cluster.disturb("restore", 1)
    assert cluster.blamed(1)


def test_a_rank_whose_cable_is_cut_is_named_to_all_others(cluster: Cluster) -> None:
    run_until_it_happens(cluster, lambda: cluster.disturb("cut", 2))
    assert [cluster.blamed(rank) for rank in (0, 1)] == [{2}, {2}]
    assert cluster.blamed(2) <= {0, 1}


def test_a_cable_that_is_back_within_the_time_out_costs_time_and_nothing_else(
    cluster: Cluster,
) -> None:
    cluster.join(timeout_s=20)
    cluster.joined()
    cluster.reduce(lasting_s=1.2)
    time.sleep(0.3)
    cluster.disturb("cut", 1)
    time.sleep(0.5)
    cluster.disturb("restore", 1)
    assert cluster.reduced() > 0


def test_a_slow_peer_is_waited_for_until_the_time_is_over(cluster: Cluster) -> None:
    cluster.join()
    cluster.joined()
    cluster.disturb("slow", 1, 50e6)
    cluster.reduce(lasting_s=0)  # 0.2 s
    assert cluster.reduced() == 1
    cluster.reduce(lasting_s=0, count=32 * COUNT)  # 7 s
    errors = {cluster.failed(rank) for rank in range(RANKS)}
    assert len(errors) == 1
    error = errors.pop()
    assert "did not finish before the timeout was over" in error
    assert re.search(r"rank 1 does not answer|on the way: .*(from|to) rank 1", error), error


def test_strangers_at_the_port_neither_join_nor_keep_others_from_joining(cluster: Cluster) -> None:
    cluster.join(range(1), timeout_s=30)
    with a_stranger(cluster) as disturb:
        assert disturb(10) == 1
        cluster.join(range(1, RANKS), timeout_s=30)
        cluster.joined()
        cluster.reduce(lasting_s=0.5)
        assert cluster.reduced() > 0


def test_once_all_have_come_nobody_listens_any_more(cluster: Cluster) -> None:
    cluster.join()
    cluster.joined()
    with a_stranger(cluster) as disturb:
        assert disturb(0) == 0


@contextmanager
def a_stranger(cluster: Cluster) -> Iterator[Callable[[float], int]]:
    """Bring a stranger to host 0; it disturbs the ports found in a given time, and counts them."""
    stranger = RankProcesses(cluster.launch, "stranger", 1)
    asked = {"address": cluster.lab.addresses[0], "not_this": cluster.port}
    try:
        yield lambda within_s: int(stranger.ask({**asked, "within_s": within_s})[0])
    finally:
        stranger.close()


def test_groups_come_and_go_in_one_process(cluster: Cluster) -> None:
    """After every test, the resources left behind are checked."""
    for _ in range(3):
        cluster.join()
        cluster.joined()
        cluster.reduce(lasting_s=0)
        assert cluster.reduced() == 1
        cluster.leave()


def test_memory_and_descriptors_stay_flat_while_a_group_works(cluster: Cluster) -> None:
    """The short form; validation/soak.py takes 30 minutes."""
    cluster.join()
    cluster.joined()
    held = list(soaked(cluster, periods=3, period_s=1))
    assert not list(grown(held[0], held[-1]))


def soaked(cluster: Cluster, periods: int, period_s: float) -> Iterator[list[dict[str, int]]]:
    """Reduce small and large tensors, and yield the ranks' resources after each period."""
    for _ in range(periods):
        for count in (1, COUNT):
            cluster.reduce(lasting_s=period_s / 2, count=count)
            cluster.reduced()
        yield cluster.held()


def grown(
    before: list[dict[str, int]],
    now: list[dict[str, int]],
    kinds: Iterable[str] = tuple(BREATH),
) -> Iterator[str]:
    """Return the resources that have grown, with their ranks."""
    for rank, (first, last) in enumerate(zip(before, now, strict=True)):
        for kind in kinds:
            if last[kind] > first[kind] + BREATH[kind]:
                yield f"rank {rank}: {kind} from {first[kind]:,} to {last[kind]:,}"
