"""Random programs of collectives give with our backend what they give with Gloo."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings

from tests.programs import GROUPS, KINDS, RANKS, Operation, programs, request
from tests.rank_processes import OnLoopback, RankProcesses, Silent
from tests.torch.test_record import needs_torch

PROGRAMS = 120  # validation/programs.py takes more
GLOO_PATIENCE_S = 15.0  # less than its groups' time-out, so that none of them fails and goes on
GLOO_ATTEMPTS = 3


class Pool:
    """Ranks that carry out programs; after a failure they are started anew."""

    def __init__(self, backend: str) -> None:
        self.gloo_stalls = 0
        self._backend = backend
        self._ranks: RankProcesses | None = None
        self._processes = ExitStack()

    def check(self, program: list[Operation]) -> None:
        """Fail if a backend differs from Gloo, if ranks differ among each other, or one hangs."""
        try:
            ranks = self._after_gloo(program)
            found = list(differences(program, ranks.ask(request(program, "ours"))))
            assert not found, "\n".join(found)
        except BaseException:
            self.close()
            raise

    def _after_gloo(self, program: list[Operation]) -> RankProcesses:
        """Return ranks that know what Gloo gives.

        Where processors are scarce, Gloo waits once in a thousand programs for a message until its
        time is over, and its groups are of no use afterwards. Then other ranks try.
        """
        for _ in range(GLOO_ATTEMPTS):
            ranks = self._started()
            with suppress(Silent):
                ranks.ask(request(program, "gloo"), within_s=GLOO_PATIENCE_S)
                return ranks
            self.gloo_stalls += 1
            self.close()
        raise Silent(f"Gloo came to no end in {GLOO_ATTEMPTS} attempts")

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
