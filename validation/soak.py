"""Does a group that works for long give its resources back? Memory, descriptors and threads.

    .venv/bin/python -m validation.soak [MINUTES]

Three hosts of a lab at 1 Gbps reduce small and large tensors for 30 minutes, in turns with our
backend and with Gloo. Each minute the script prints the memory, descriptors and threads of every
rank's process. The allocator keeps pages of freed memory. It is made to release them before the
memory is measured, so that these pages are told apart. Only our backend must hold no more at the
end.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from fullwire.lab.description import describe
from fullwire.lab.lab import Lab
from tests.lab.test_failure import RANKS, Cluster, grown, soaked
from validation import arguments, results

USUAL_MINUTES = 30


def main() -> None:
    """Print two lines for each minute; exit with status 1 if our backend holds more at the end."""
    taken = arguments.parser(__doc__)
    taken.add_argument("minutes", type=int, nargs="?", default=USUAL_MINUTES)
    minutes = taken.parse_args().minutes
    held: list[list[dict[str, int]]] = []
    with Lab(describe(workers=RANKS, rate=["1Gbps"])) as lab:
        ours, gloo = Cluster(lab, "fullwire"), Cluster(lab, "gloo")
        gloo.port += 1  # each has a store of its own
        for cluster in (ours, gloo):
            cluster.join(timeout_s=30)
            cluster.joined()
        print("minute, rank: memory MB + kept by the allocator, allocated MB, descriptors, threads")
        in_turns = zip(
            soaked(ours, minutes + 1, 30.0), soaked(gloo, minutes + 1, 30.0), strict=True
        )
        for minute, both in enumerate(in_turns):
            held.append(both[0])
            for name, now in zip(("fullwire", "gloo"), both, strict=True):
                print(f"{minute:>6} {name:<9} {shown(now)}", flush=True)
        both_mb = [[f"{each['memory_bytes'] / 1e6:.1f}" for each in held[n]] for n in (0, -1)]
        results.renew(
            "soak",
            summary=f"{minutes} minutes, " + ("grown" if grown(held[0], held[-1]) else "no growth"),
            cases=RANKS,
            tables=[
                results.Table(
                    title="Resident MB of our ranks, first and last",
                    columns=["", *(f"rank {rank}" for rank in range(RANKS))],
                    rows=[["first", *both_mb[0]], ["last", *both_mb[1]]],
                )
            ],
        )
        ours.ranks.close()
        gloo.ranks.close()
    sys.exit("\n".join(grown(held[0], held[-1])) or 0)


def shown(now: Sequence[dict[str, int]]) -> str:
    """Return the memory, descriptors and threads of each rank, as text."""
    return "  ".join(
        f"{rank}: {each['memory_bytes'] / 1e6:.1f} + {each['kept_bytes'] / 1e6:.1f}, "
        f"{each['allocated_bytes'] / 1e6:.3f}, {each['descriptors']}, {each['threads']}"
        for rank, each in enumerate(now)
    )


if __name__ == "__main__":
    main()
