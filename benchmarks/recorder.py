"""What `fullwire bench recorder` prints, with more pairs than it takes by itself.

nice -n -10 .venv/bin/python benchmarks/recorder.py [PAIRS]      needs torch; nice -n -10 needs root
"""

from __future__ import annotations

import sys

from fullwire.report.overhead import overhead_lines
from fullwire.sources.live.overhead import measure_overhead


def main() -> None:
    for line in overhead_lines(measure_overhead(int(sys.argv[1]) if len(sys.argv) > 1 else 24)):
        print(line)


if __name__ == "__main__":
    main()
