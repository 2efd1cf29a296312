"""Random programs of collectives with our backend and with Gloo, result by result.

    .venv/bin/python -m validation.programs [PROGRAMS]

Four ranks on this machine carry out 10,000 programs of up to twelve operations; `make test` uses
fewer. The programs have all kinds of operations, dtypes and reductions, odd sizes, sub-groups, many
operations in flight, and strided tensors. The first program whose results differ is reduced as far
as possible, and printed.
"""

from __future__ import annotations

import time
from collections import Counter

from hypothesis import HealthCheck, given, settings

from tests.programs import Operation, programs
from tests.transport.test_programs import Pool
from validation import arguments, results

USUAL = 10_000


def main() -> None:
    """Carry the programs out and print their number."""
    taken = arguments.parser(__doc__)
    taken.add_argument("programs", type=int, nargs="?", default=USUAL)
    asked = taken.parse_args().programs
    kinds: Counter[str] = Counter()
    pool = Pool("fullwire", asked)

    @settings(
        max_examples=asked,
        deadline=None,
        database=None,
        derandomize=False,  # as `make test` does it
        suppress_health_check=list(HealthCheck),
    )
    @given(programs())
    def check(program: list[Operation]) -> None:
        if pool.check(program):
            kinds.update(operation.kind for operation in program)

    began_s = time.monotonic()
    try:
        check()
    finally:
        pool.close()
    took_s = time.monotonic() - began_s
    results.renew(
        "programs",
        summary=f"{asked:,} programs with {kinds.total():,} operations: no difference",
        cases=kinds.total(),
    )
    print(f"{asked:,} programs, {kinds.total():,} operations, {took_s:.0f} s; ", end="")
    print(pool.summary() or "Gloo never stood still")
    print(", ".join(f"{kind} {count:,}" for kind, count in kinds.most_common()))


if __name__ == "__main__":
    main()
