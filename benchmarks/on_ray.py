"""What does `--on ray` cost, and when does it pay? Each is a whole command; medians are printed.

    .venv/bin/python benchmarks/on_ray.py [RUNS]

The same sweep and the same search for a target are computed here in three ways:

- by one process;
- on a Ray cluster that the command starts and ends;
- on an existing cluster of two nodes, both on this machine, with one processor each.

So the figures show Ray's own cost, and not the gain of more machines. By default Ray's processes
run at a lower priority than all others; here they have the priority of the single process.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from core import measured, spread
from search import ALGORITHMS, CLI, MANY_BUCKETS, RATES, WORKERS, asked

CASES = {
    "one question": [*CLI, "--workers", "64", "--bandwidth", "10Gbps"],
    "a search of 100,000 settings": [
        *CLI,
        *asked(
            algorithm=ALGORITHMS,
            buckets=MANY_BUCKETS,
            workers=WORKERS,
            bandwidth="1Gbps,10Gbps,25Gbps,100Gbps,200Gbps",
        ),
        "--best",
        "5",
    ],
    "targets of 800 scenes": [
        *CLI,
        *asked(
            algorithm=ALGORITHMS,
            buckets=MANY_BUCKETS,
            workers=WORKERS,
            bandwidth="10Gbps",
            target="0.95",
        ),
        "--format",
        "csv",
    ],
    "4 million settings": [
        *CLI,
        *asked(
            algorithm=ALGORITHMS,
            buckets=MANY_BUCKETS,
            workers=WORKERS,
            bandwidth=RATES,
            compression=",".join(map(str, range(1, 6))),
        ),
        "--best",
        "5",
    ],
}


def main() -> None:
    from ray.cluster_utils import Cluster

    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112  # Ray spells it so
    show("here", runs, [])
    show("started by the command", runs, ["--on", "ray"])
    with tempfile.TemporaryDirectory(prefix="fw", dir="/tmp", ignore_cleanup_errors=True) as place:
        head = {"num_cpus": 1, "include_dashboard": False, "temp_dir": place}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        try:
            cluster.add_node(num_cpus=1)
            show("two nodes that are there", runs, ["--on", cluster.address])
        finally:
            cluster.shutdown()


def show(where: str, runs: int, how: list[str]) -> None:
    for name, command in CASES.items():
        found = [measured([*command, *how]).wall_s for _ in range(runs)]
        print(f"{name:<30} {where:<26} {spread(found)}", flush=True)


if __name__ == "__main__":
    main()
