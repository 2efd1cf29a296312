"""The output of `fullwire bench recorder`, and each part of the recorder by itself.

nice -n -10 .venv/bin/python benchmarks/recorder.py [PAIRS [JOB]]     needs torch; nice needs root

It measures the recorder as a whole, the control, the recorder's hooks alone, and its sampler alone.
It also measures steps that are longer by a known time. If the method is right, it finds exactly
that time.
"""

from __future__ import annotations

import sys

from fullwire.studies.recording.overhead import (
    Difference,
    jobs_named,
    measure_overhead,
    overhead_lines,
)

DIFFERENCES: tuple[Difference, ...] = ("record", "hooks", "sampler", "longer", "control")


def main() -> None:
    pairs = int(sys.argv[1]) if len(sys.argv) > 1 else 48
    for job in jobs_named(sys.argv[2:] or ["usual"]):
        for line in overhead_lines(measure_overhead(pairs, DIFFERENCES, job)):
            print(line)


if __name__ == "__main__":
    main()
