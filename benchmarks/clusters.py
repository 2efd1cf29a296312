"""How long do collectives on large described clusters take? Each is a whole process, repeated.

    .venv/bin/python benchmarks/clusters.py [RUNS]

The cluster is a fat tree of 2,048 nodes with 8 devices and 8 NICs each. It has 32 nodes below a
leaf, and its spine is oversubscribed 2:1. A second series has one slow host, which leaves few equal
transfers that the simulation could play once.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from core import measured, spread  # beside this file

FAT_TREE = """
name = "fat-tree"
nodes = 2048
devices_per_node = 8
[inside]
kind = "switch"
rate = "450GB/s"
latency = "1us"
[nics]
per_node = 8
rate = "400Gbps"
latency = "4us"
[network]
kind = "fat-tree"
nodes_per_leaf = 32
oversubscription = "2:1"
latency = "1us"
"""
SLOW_HOST = """
[[hosts]]
node = 77
nic_rate = "100Gbps"
"""
ALGORITHMS = (
    ("hierarchical", False),
    ("hierarchical-halving-doubling", False),
    ("in-network", False),
    ("ring", False),
    ("hierarchical", True),
)
CLI = [sys.executable, "-m", "fullwire", "collective", "allreduce", "--bytes", "1GiB", "--json"]


def main() -> None:
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    print(f"1 GiB among 16,384 devices; {runs} runs, median (least to most)")
    with tempfile.TemporaryDirectory() as folder:
        even, uneven = Path(folder, "even.toml"), Path(folder, "uneven.toml")
        even.write_text(FAT_TREE)
        uneven.write_text(FAT_TREE + SLOW_HOST)
        for algorithm, is_slow in ALGORITHMS:
            cluster = str(uneven if is_slow else even)
            found = [
                measured([*CLI, "--algorithm", algorithm, "--cluster", cluster])
                for _ in range(runs)
            ]
            wall = spread([each.wall_s for each in found])
            cpu = spread([each.cpu_s for each in found])
            peak = max(each.peak_mb for each in found)
            name = f"{algorithm}{', a slow host' if is_slow else ''}"
            print(f"{name:<31} wall {wall}  cpu {cpu}  {peak:.0f} MB")


if __name__ == "__main__":
    main()
