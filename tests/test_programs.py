"""Random programs of collectives give with our backend what they give with Gloo."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings

from tests.programs import GROUPS, KINDS, RANKS, Operation, programs, request
from tests.rank_processes import OnLoopback, RankProcesses
from tests.test_record import needs_torch

PROGRAMS = 120  # validation/programs.py takes more


class Pool:
    """Ranks that carry out programs; after a failure they are started anew."""

    def __init__(self, backend: str) -> None:
        self._backend = backend
        self._ranks: RankProcesses | None = None
        self._processes = ExitStack()

    def check(self, program: list[Operation]) -> None:
        """Fail if a backend differs from Gloo, if ranks differ among each other, or one hangs."""
        if self._ranks is None:
            launch = self._processes.enter_context(OnLoopback())
            self._ranks = RankProcesses(launch, "programs", RANKS, self._backend)
            self._processes.callback(self._ranks.close)
        try:
            found = list(differences(program, self._ranks.ask(request(program))))
            assert not found, "\n".join(found)
        except BaseException:
            self.close()
            raise

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
def pool() -> Iterator[Pool]:
    pool = Pool("fullwire")
    yield pool
    pool.close()


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
