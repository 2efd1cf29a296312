"""What `fullwire bench recorder` prints, and how far the method itself is to be believed.

.venv/bin/python benchmarks/recorder.py [PAIRS]      needs torch

The second measurement records neither job: its ratios would all be 1 if the method were perfect.
"""

from __future__ import annotations

import sys

from fullwire.report.overhead import overhead_lines
from fullwire.sources.live.overhead import measure_overhead


def main() -> None:
    pairs = int(sys.argv[1]) if len(sys.argv) > 1 else 24
    for title, record in (("recorded against not", True), ("not recorded against not", False)):
        print(f"{title}:")
        for line in overhead_lines(measure_overhead(pairs, record=record)):
            print(f"  {line}")


if __name__ == "__main__":
    main()
