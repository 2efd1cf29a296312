"""Random programs of collectives give the same results with our backend as with Gloo."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, example, given, settings

from tests.programs import GROUPS, KINDS, RANKS, Operation, programs, request
from tests.rank_processes import OnLoopback, RankProcesses, Silent
from tests.torch.test_record import needs_torch

PROGRAMS = 120  # validation/programs.py has more
MOST_LEFT_OUT = 0.05  # Of the programs, because Gloo hung in them.
# Less than the groups' time-out: a group that fails by itself would go on with the next program.
GLOO_PATIENCE_S = 15.0
GLOO_ATTEMPTS = 3


class Pool:
    """Ranks that carry out programs; after a failure they are started anew."""

    def __init__(self, backend: str, programs: int) -> None:
        self.gloo_stalls = 0
        self.left_out = 0
        self._programs = programs
        self._backend = backend
        self._ranks: RankProcesses | None = None
        self._processes = ExitStack()

    def check(self, program: list[Operation]) -> bool:
        """Fail if a backend differs from Gloo, if ranks differ among each other, or if ours hangs.

        Return False for a program that was left out, because Gloo gave no result to compare with.
        Too many such programs are a failure too.
        """
        self._fail_if_too_many_are_left_out()  # before more time is spent, on smaller ones too
        try:
            ranks = self._after_gloo(program)
            if ranks is None:
                self.left_out += 1
                self._fail_if_too_many_are_left_out()
                return False
            found = list(differences(program, ranks.ask(request(program, "ours"))))
            assert not found, "\n".join(found)
        except BaseException:
            self.close()
            raise
        return True

    def summary(self) -> str:
        """Return the cost of Gloo's hangs, or "" if it had none."""
        if not self.gloo_stalls:
            return ""
        return (
            f"Gloo stood still {self.gloo_stalls} times; {self.left_out} of {self._programs} "
            "programs were left out"
        )

    def _fail_if_too_many_are_left_out(self) -> None:
        assert self.left_out <= MOST_LEFT_OUT * self._programs, self.summary()

    def _after_gloo(self, program: list[Operation]) -> RankProcesses | None:
        """Return ranks that have Gloo's results, or None if Gloo hangs.

        On a busy machine, Gloo waits once in a thousand programs for a message until its time is
        over, and its groups are unusable afterwards. Then other ranks try.
        """
        for _ in range(GLOO_ATTEMPTS):
            ranks = self._started()
            with suppress(Silent):
                ranks.ask(request(program, "gloo"), within_s=GLOO_PATIENCE_S)
                return ranks
            self.gloo_stalls += 1
            self.close()
        return None

    def _started(self) -> RankProcesses:
        if self._ranks is None:
            launch = self._processes.enter_context(OnLoopback())
            self._ranks = RankProcesses(launch, "programs", RANKS, self._backend)
            self._processes.callback(self._ranks.close)
        return self._ranks

    def close(self) -> None:
        """End the ranks."""
        self._processes.close()
        self._ranks = None


def differences(program: list[Operation], answers: list[Any]) -> Iterator[str]:
    for number, operation in enumerate(program):
        for rank, answer in enumerate(answers):
            if said := answer["differences"][number]:
                yield f"operation {number} ({operation.kind}), rank {rank}: {said}"
        digests = {answers[rank]["digests"][number] for rank in GROUPS[operation.group]}
        if len(digests) > 1:
            yield f"operation {number} ({operation.kind}): ranks hold one result in other bits"


@pytest.fixture(scope="module")
def pool(pytestconfig: pytest.Config) -> Iterator[Pool]:
    pool = Pool("fullwire", PROGRAMS)
    yield pool
    pool.close()
    terminal = pytestconfig.pluginmanager.get_plugin("terminalreporter")
    if terminal is not None and pool.summary():
        terminal.write_line(f"\n{Path(__file__).name}: {pool.summary()}")


@needs_torch
@settings(max_examples=PROGRAMS, suppress_health_check=list(HealthCheck))
@example([Operation(kind=kind, count=70_001) for kind in KINDS])
@example([Operation(kind="all_reduce", count=999, is_async=True, seed=n) for n in range(64)])
@example(
    # The third tensor has gaps and is refused; the others must not have begun by then.
    [
        Operation(kind="all_reduce_coalesced", count=0, layout="every second", seed=seed)
        for seed in range(8)
    ]
)
@given(programs())
def test_a_program_of_collectives_gives_what_it_gives_with_gloo(
    pool: Pool, program: list[Operation]
) -> None:
    pool.check(program)


class Ranks:
    """Ranks of which one backend may never answer; the other gives correct results."""

    def __init__(self, still: str) -> None:
        self._still = still

    def ask(self, asked: dict[str, Any], within_s: float = 0.0) -> list[Any]:
        if asked["backend"] == self._still:
            raise Silent("no answer")
        nothing = [None] * len(asked["program"])
        return [{"differences": nothing, "digests": nothing}] * RANKS


class PoolOf(Pool):
    """A pool of ranks that exist already."""

    def __init__(self, still: str, programs: int) -> None:
        super().__init__("fullwire", programs)
        self.still = still

    def _started(self) -> RankProcesses:
        return cast(RankProcesses, Ranks(self.still))


def test_a_program_with_which_gloo_stands_still_is_left_out_and_counted() -> None:
    program = [Operation(kind="barrier", count=0)]
    pool = PoolOf("gloo", 40)
    assert [pool.check(program) for _ in range(2)] == [False, False]
    pool.still = ""
    assert pool.check(program)
    assert pool.summary() == "Gloo stood still 6 times; 2 of 40 programs were left out"
    pool.still = "gloo"
    for _ in range(2):  # the third is one too many, and remains so
        with pytest.raises(AssertionError, match="3 of 40 programs were left out"):
            pool.check(program)
    assert pool.gloo_stalls == 9


def test_a_program_with_which_our_backend_stands_still_fails() -> None:
    pool = PoolOf("ours", 40)
    with pytest.raises(Silent):
        pool.check([Operation(kind="barrier", count=0)])
    assert pool.left_out == 0
