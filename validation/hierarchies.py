"""Do collectives on nodes of several devices and NICs take as long as predicted? Played in the lab.

    .venv/bin/python -m validation.hierarchies [TIMES]

The cluster has four nodes of two devices and two NICs of 100 Mbps. It has two nodes below each
leaf, rails, and a spine of 2:1. It is a described cluster: the lab makes it, and the predictor uses
the same description. The predictor takes the headers off the line rates, and uses a measurement of
memory for the links inside nodes. There are TIMES all-reduces of 8 MB after a first one, for each
of three algorithms:

- a ring over all ranks in order;
- a ring over nodes that alternate between leaves;
- the hierarchy in which every device sends its half over its own NIC.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import median

from fullwire.clusters.cluster import Cluster, Inside, LeafSpine, Nics
from fullwire.collectives.playing import collective_time
from fullwire.lab.description import describe
from fullwire.lab.lab import Lab
from fullwire.lab.session import run_job
from fullwire.units import show_time
from validation import arguments, results

SIZE_BYTES = 8_000_000
DESCRIBED = Cluster(
    name="two leaves of rails",
    nodes=4,
    devices_per_node=2,
    inside=Inside(kind="switch", rate_bps=400e9),
    nics=Nics(rate_bps=100e6, per_node=2),
    network=LeafSpine(nodes_per_leaf=2, oversubscription=2, by_rail=True),
)
ALTERNATING = (
    0,
    1,
    4,
    5,
    2,
    3,
    6,
    7,
)  # devices; nodes 0 and 1 are on one leaf, 2 and 3 on the other

JOB = """
import os, sys, time, torch, warnings
import torch.distributed as dist
warnings.simplefilter("ignore")
size, times, backend, alternating, told = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]
dist.init_process_group(backend)
torch.set_num_threads(1)
rank, world, devices = dist.get_rank(), dist.get_world_size(), int(os.environ["LOCAL_WORLD_SIZE"])
nodes = [dist.new_group(range(n, n + devices)) for n in range(0, world, devices)]
rails = [dist.new_group(range(d, world, devices)) for d in range(devices)]
crossing = dist.new_group([int(each) for each in alternating.split(",")], sort_ranks=False)
node, rail = nodes[rank // devices], rails[rank % devices]
whole = torch.ones(size // 4)
share = torch.empty(size // 4 // devices)

def hierarchy():
    dist.reduce_scatter_tensor(share, whole, group=node)
    dist.all_reduce(share, group=rail)
    dist.all_gather_into_tensor(whole, share, group=node)

for name, reduce in (
    ("ring", lambda: dist.all_reduce(whole)),
    ("alternating ring", lambda: dist.all_reduce(whole, group=crossing)),
    ("hierarchy", hierarchy),
):
    for number in range(times + 1):
        whole.fill_(1)
        dist.barrier()
        began = time.perf_counter()
        reduce()
        took = torch.tensor(time.perf_counter() - began)
        assert float(whole[0]) == float(whole[-1]) == world
        dist.all_reduce(took, dist.ReduceOp.MAX)
        if rank == 0 and number:
            print(name, float(took), sep=",", file=open(told, "a"))
dist.destroy_process_group()
"""


def predicted_s(lab: Lab) -> dict[str, float]:
    """Predict the times on the cluster as the lab has it."""
    described = lab.description.cluster
    assert described.inside is not None
    assert lab.in_host_bps is not None
    fabric = replace(
        described,
        nics=replace(described.nics, payload_share=lab.description.payload_share),
        inside=replace(described.inside, rate_bps=lab.in_host_bps),
    )
    asked = (
        ("ring", "ring", None),
        ("alternating ring", "ring", ALTERNATING),
        ("hierarchy", "hierarchical", None),
    )
    return {
        name: collective_time("allreduce", algorithm, fabric, SIZE_BYTES, order=order).time_s
        for name, algorithm, order in asked
    }


def measured_s(lab: Lab, backend: str, times: int) -> dict[str, list[float]]:
    """Let the ranks of a lab reduce, and measure until the last rank has its sums."""
    order = ",".join(map(str, ALTERNATING))
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as place:
        told = Path(place, "times")
        words = [str(SIZE_BYTES), str(times), backend, order, str(told)]
        status = run_job(lab, [sys.executable, "-c", JOB, *words])
        if status:
            raise SystemExit(f"{backend}: a rank ended with exit status {status}")
        for line in told.read_text().splitlines():
            name, _, time_s = line.rpartition(",")
            found.setdefault(name, []).append(float(time_s))
    return found


def main() -> None:
    """Print the table."""
    taken = arguments.parser(__doc__)
    taken.add_argument("times", type=int, nargs="?", default=3)
    times = taken.parse_args().times
    with Lab(describe(cluster=DESCRIBED)) as lab:
        expected_s = predicted_s(lab)
        found = {each: measured_s(lab, each, times) for each in ("gloo", "fullwire")}
    print(f"{SIZE_BYTES:,} bytes, {times} times; predicted, and measured: median (least to most)")
    rows: list[list[results.Cell]] = []
    for name, time_s in expected_s.items():
        cells = [show_time(time_s)]
        for times_s in found.values():
            shown = [show_time(f(times_s[name])) for f in (median, min, max)]
            cells.append(f"{shown[0]} ({shown[1]} to {shown[2]})")
        print(f"{name:<17} {cells[0]:>9}   gloo {cells[1]}   fullwire {cells[2]}")
        rows.append([name, *cells])
    errors = [expected_s[name] / median(found["fullwire"][name]) - 1 for name in expected_s]
    table = results.Table(columns=["order", "predicted", "Gloo", "Fullwire"], rows=rows)
    results.renew("hierarchies", tables=[table], **results.said_of(errors))


if __name__ == "__main__":
    main()
