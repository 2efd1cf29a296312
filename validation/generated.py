"""The generated tests of `make test` with other cases in every round.

    .venv/bin/python -m validation.generated [ROUNDS] [--times N] [--pytest ARGUMENTS ...]

`make test` makes the same cases in every run, so that a failure comes from the change and not from
chance. Here the cases are random. --times N makes the tests of readers and files use N times as
many cases. A round that fails prints the case, and the script stops.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys

from validation import arguments


def main() -> None:
    """Run the tests round by round."""
    taken = arguments.parser(__doc__)
    taken.add_argument("rounds", type=int, nargs="?", default=3)
    taken.add_argument("--times", type=int, default=1)
    taken.add_argument(
        "--pytest", nargs=argparse.REMAINDER, default=[], help="all that follows is for pytest"
    )
    given = taken.parse_args()
    command = [sys.executable, "-m", "pytest", "-m", "hypothesis", "--hypothesis-profile=random"]
    for number in range(1, given.rounds + 1):
        print(f"round {number} of {given.rounds}", flush=True)
        done = subprocess.run(
            [*command, *given.pytest],
            env={**os.environ, "FULLWIRE_FUZZ": str(given.times)},
            check=False,
        )
        if done.returncode:
            sys.exit(done.returncode)


if __name__ == "__main__":
    main()
