"""What `fullwire bench recorder` prints, and each part of it: what costs, and is it seen?

nice -n -10 .venv/bin/python benchmarks/recorder.py [PAIRS]      needs torch; nice -n -10 needs root

Beside the recorder as a whole and the control, its hooks alone, its sampler alone, and steps that
are longer by as much as is known: if the method is right, it finds just that.
"""

from __future__ import annotations

import sys

from fullwire.studies.recording.overhead import Difference, measure_overhead
from fullwire.studies.recording.view import overhead_lines

DIFFERENCES: tuple[Difference, ...] = ("record", "hooks", "sampler", "longer", "control")


def main() -> None:
    pairs = int(sys.argv[1]) if len(sys.argv) > 1 else 48
    for line in overhead_lines(measure_overhead(pairs, DIFFERENCES)):
        print(line)


if __name__ == "__main__":
    main()
