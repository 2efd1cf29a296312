"""Does a group that works for long keep what it was given? Memory, descriptors and threads.

    .venv/bin/python -m validation.soak [MINUTES]

Three hosts of a lab at 1 Gbps reduce small and large for 30 minutes; each minute says what the
process of every rank holds.
"""

from __future__ import annotations

import sys

from fullwire.lab.description import describe
from fullwire.lab.lab import Lab
from tests.test_failure import RANKS, Cluster, grown, soaked
from validation import arguments

USUAL_MINUTES = 30


def main() -> None:
    """Print a line for each minute, and end with status 1 if anything grew."""
    taken = arguments.parser(__doc__)
    taken.add_argument("minutes", type=int, nargs="?", default=USUAL_MINUTES)
    minutes = taken.parse_args().minutes
    held = []
    with Lab(describe(workers=RANKS, rate=["1Gbps"])) as lab:
        cluster = Cluster(lab, "fullwire")
        cluster.join(timeout_s=30)
        cluster.joined()
        print("minute  rank: resident MB, allocated MB, descriptors, threads")
        for minute, now in enumerate(soaked(cluster, minutes + 1, 60.0)):
            held.append(now)
            shown = "  ".join(
                f"{rank}: {each['memory_bytes'] / 1e6:.1f}, {each['allocated_bytes'] / 1e6:.3f}, "
                f"{each['descriptors']}, {each['threads']}"
                for rank, each in enumerate(now)
            )
            print(f"{minute:>6}  {shown}", flush=True)
        cluster.ranks.close()
    sys.exit("\n".join(grown(held[0], held[-1])) or 0)


if __name__ == "__main__":
    main()
