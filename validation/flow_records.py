"""Find eight jobs of 16 to 1,024 ranks in the flow records of one network.

    .venv/bin/python -m validation.flow_records

The jobs are made up: each step has microbatches that pass through a pipeline and back, and then a
ring of the replicas of each stage. A switch writes one IPFIX record for each burst between two
ranks, of all packets or of 1 in 1,000. The jobs run at the same time.
"""

from __future__ import annotations

import struct
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import fullwire as fw
from validation import arguments, results

PACKET = 1500
STEPS, MICROBATCHES = 40, 4
SAMPLING = (1, 1000)
RECORD = np.dtype(
    [("source", ">u4"), ("target", ">u4"), ("begin_ms", ">u8"), ("end_ms", ">u8"),
     ("bytes", ">u8"), ("packets", ">u8")]
)  # fmt: skip
TEMPLATE = struct.pack(">HH12H", 256, 6, 8, 4, 12, 4, 152, 8, 153, 8, 1, 8, 2, 8)
OPTIONS = struct.pack(">HHH4H", 257, 2, 1, 149, 4, 305, 4)
PER_MESSAGE = 1000


@dataclass(frozen=True, slots=True)
class Made:
    """A job of stages and replicas."""

    stages: int
    replicas: int
    step_s: float
    gradient_bytes: float  # of a stage
    activation_bytes: float  # of a microbatch

    @property
    def ranks(self) -> int:
        """Return how many ranks it has."""
        return self.stages * self.replicas


JOBS = (
    Made(4, 4, 1.0, 400e6, 30e6),
    Made(2, 16, 0.7, 300e6, 25e6),
    Made(1, 32, 0.5, 200e6, 0),
    Made(4, 16, 2.0, 800e6, 60e6),
    Made(8, 16, 1.3, 500e6, 40e6),
    Made(8, 32, 2.9, 900e6, 80e6),
    Made(8, 64, 1.7, 600e6, 50e6),
    Made(16, 64, 4.0, 1200e6, 90e6),
)


def bursts(job: Made, first_host: int, random: np.random.Generator) -> np.ndarray:
    """Return the bursts of a job: source, target, begin and end in seconds, bytes."""
    rows = []
    rank = np.arange(job.ranks).reshape(job.stages, job.replicas) + first_host
    slot_s = 0.7 * job.step_s / (2 * (job.stages + MICROBATCHES))
    at_s = float(random.uniform(0, job.step_s))
    for _ in range(STEPS):
        for batch in range(MICROBATCHES):
            for stage in range(job.stages - 1):
                there_s = at_s + (batch + stage) * slot_s
                back_s = at_s + 0.7 * job.step_s - (batch + stage + 1) * slot_s
                for begin_s, one, other in (
                    (there_s, stage, stage + 1),
                    (back_s, stage + 1, stage),
                ):
                    begins = begin_s + random.normal(0, 0.02 * slot_s, job.replicas)
                    size = np.full(job.replicas, job.activation_bytes)
                    ends = begins + 0.3 * slot_s
                    rows.append(np.stack([rank[one], rank[other], begins, ends, size], axis=1))
        if job.replicas > 1:
            size = np.full(job.replicas, 2 * (job.replicas - 1) / job.replicas * job.gradient_bytes)
            for stage in range(job.stages):
                begins = at_s + 0.75 * job.step_s + random.normal(0, 0.005, job.replicas)
                ends = begins + 0.2 * job.step_s
                nexts = np.roll(rank[stage], -1)
                rows.append(np.stack([rank[stage], nexts, begins, ends, size], axis=1))
        at_s += job.step_s * random.normal(1, 0.02)
    return np.concatenate(rows)


def sampled(rows: np.ndarray, rate: int, random: np.random.Generator) -> np.ndarray:
    """Return the records of bursts of which a switch sees 1 packet in so many."""
    packets = np.maximum(rows[:, 4] / PACKET, 1).astype(int)
    seen = packets if rate == 1 else random.binomial(packets, 1 / rate)
    kept, seen = rows[seen > 0], seen[seen > 0]
    found = np.zeros(len(kept), RECORD)
    edge = (kept[:, 3] - kept[:, 2]) / (seen + 1) * (rate > 1)
    found["source"] = 0x0A000000 + kept[:, 0].astype(int)
    found["target"] = 0x0A000000 + kept[:, 1].astype(int)
    found["begin_ms"] = 1.7e12 + (kept[:, 2] + edge) * 1e3
    found["end_ms"] = 1.7e12 + (kept[:, 3] - edge) * 1e3
    found["packets"], found["bytes"] = seen, seen * PACKET
    return found


def write_ipfix(records: np.ndarray, rate: int, path: Path) -> None:
    """Write records as IPFIX messages."""

    def message(number: int, body: bytes) -> bytes:
        length = 20 + len(body)
        return struct.pack(">HHIII", 10, length, 1_700_000_000, 0, 1) + struct.pack(
            ">HH", number, length - 16
        ) + body  # fmt: skip

    with path.open("wb") as file:
        file.write(message(2, TEMPLATE) + message(3, OPTIONS))
        file.write(message(257, struct.pack(">II", 1, rate)))
        for first in range(0, len(records), PER_MESSAGE):
            file.write(message(256, records[first : first + PER_MESSAGE].tobytes()))


def main() -> None:
    """Make the records, find the jobs, compare."""
    arguments.parser(__doc__).parse_args()
    rows: list[list[str | int | float | bool | None]] = []
    errors, hosts_right, neighbours_right = [], [], []
    for rate in SAMPLING:
        random = np.random.default_rng(7)
        made, first = [], 1
        for job in JOBS:
            made.append(bursts(job, first, random))
            first += job.ranks
        together = np.concatenate(made)
        together = together[np.argsort(together[:, 3])]
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "switch.ipfix"
            write_ipfix(sampled(together, rate, random), rate, path)
            found = fw.jobs_in(path)
        by_host = {host: seen for seen in found for host in seen.hosts}
        first = 1
        for job in JOBS:
            names = [f"10.0.{each >> 8}.{each & 255}" for each in range(first, first + job.ranks)]
            seen = by_host.get(names[0])
            right = len(set(names) & set(seen.hosts)) if seen else 0
            hosts_right.append(right / max(job.ranks, len(seen.hosts) if seen else 0))
            rank = np.array(names).reshape(job.stages, job.replicas)
            true = {frozenset(pair): "pipeline" for stage in range(job.stages - 1)
                    for pair in zip(rank[stage], rank[stage + 1], strict=True)}  # fmt: skip
            true |= {frozenset(pair): "data" for stage in rank
                     for pair in zip(stage, np.roll(stage, -1), strict=True)}  # fmt: skip
            told = {} if seen is None else (
                {frozenset(pair): "data" for pair in seen.data_parallel}
                | {frozenset(pair): "pipeline" for pair in seen.pipeline}
            )  # fmt: skip
            alike = sum(told.get(pair) == kind for pair, kind in true.items())
            neighbours_right.append(alike / max(len(true), len(told)))
            # The mean of the steps that were made, from their rows.
            own = made[JOBS.index(job)]
            begins = own[own[:, 0] == first, 2].reshape(STEPS, -1)[:, 0]
            true_s = float(np.diff(begins).mean())
            step_s = None if seen is None else seen.step_s
            errors.append(np.nan if step_s is None else step_s / true_s - 1)
            rows.append([f"{job.stages} x {job.replicas}", f"1:{rate}", f"{true_s:.3f} s",
                         "none" if step_s is None else f"{errors[-1]:+.2%}",
                         f"{hosts_right[-1]:.1%}", f"{neighbours_right[-1]:.1%}"])  # fmt: skip
            print(rows[-1], flush=True)
            first += job.ranks
    usable = [error for error in errors if not np.isnan(error)]
    results.write(
        "flow-records",
        claim="Jobs, their steps and their neighbours are found in the flow records of a switch.",
        anchor="jobs that are made up",
        measure="the error of the step",
        summary=(
            f"{len(usable)} of {len(errors)} have a step, worst {max(map(abs, usable)):.2%} off; "
            f"hosts right in {np.mean(hosts_right):.1%}, worst job {min(hosts_right):.1%}; "
            f"neighbours in {np.mean(neighbours_right):.1%}, worst job {min(neighbours_right):.1%}"
        ),
        cases=len(errors),
        **results.spread(usable),
        tables=[
            results.Table(
                columns=["stages x replicas", "sampled", "step", "found", "hosts", "neighbours"],
                rows=rows,
            )
        ],
    )


if __name__ == "__main__":
    main()
