"""How fast is a search of 100,000 settings? Each is a whole command, repeated; medians are printed.

    .venv/bin/python benchmarks/search.py [RUNS]

Settings are algorithms, buckets, workers, rates and compression. There are four cases:

- few buckets and many points of each;
- many buckets, where grouping gradients takes its share;
- jitter and fewer synchronisations;
- all rows as CSV and as JSON.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from core import measured, spread

CLI = [sys.executable, "-m", "fullwire", "whatif", "resnet50@v100", "--latency", "20us"]
WORKERS = ",".join(str(8 * each) for each in range(1, 26))
RATES = ",".join(f"{5 * each}Gbps" for each in range(1, 41))
FEW_RATES = "1Gbps,10Gbps,25Gbps,100Gbps,200Gbps"
FEW_BUCKETS = "none,ddp,ddp:50MiB,paper,ddp:100MiB"
MANY_BUCKETS = ",".join(f"ddp:{each}MiB" for each in range(1, 201))
ALGORITHMS = "ring,tree,halving-doubling,auto"


def asked(**conditions: str) -> list[str]:
    return [word for name, value in conditions.items() for word in (f"--{name}", value)]


FEW = asked(
    algorithm=ALGORITHMS,
    buckets=FEW_BUCKETS,
    workers=WORKERS,
    bandwidth=RATES,
    compression="1,2,4,8,16",
)
CASES = {
    "5 kinds of buckets": [*CLI, *FEW, "--best", "5"],
    "200 kinds of buckets": [
        *CLI,
        *asked(algorithm=ALGORITHMS, buckets=MANY_BUCKETS, workers=WORKERS, bandwidth=FEW_RATES),
        "--best",
        "5",
    ],
    "jitter, fewer synchronisations": [
        *CLI,
        *asked(
            algorithm=ALGORITHMS,
            buckets=FEW_BUCKETS,
            workers=WORKERS,
            bandwidth=FEW_RATES,
            accumulate="1,2,4,8",
            jitter="none,lognormal:5%",
            compression="1,2,4,8,16",
        ),
        "--best",
        "5",
    ],
    "all rows as CSV": [*CLI, *FEW, "--format", "csv"],
    "all rows as JSON": [*CLI, *FEW, "--json"],
}


def main() -> None:
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    for name, command in CASES.items():
        found = [measured(command) for _ in range(runs)]
        wall, cpu = [each.wall_s for each in found], [each.cpu_s for each in found]
        print(f"{name:<31} wall {spread(wall)}  cpu {spread(cpu)}  {found[0].peak_mb:.0f} MB")
    rows = subprocess.run(CASES["all rows as CSV"], capture_output=True, text=True, check=True)
    print(f"{rows.stdout.count(chr(10)) - 1:,} rows")


if __name__ == "__main__":
    main()
