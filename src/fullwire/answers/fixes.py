"""What would make a job faster, by how much, and with which setting.

A fix is the job's own step, predicted again with one thing changed. They come sorted by what they
gain; what gains less than `LEAST_GAIN` of the step is not worth a meeting.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from fullwire.answers.forecast import Forecast, Forecaster
from fullwire.model.compressor import Compressor
from fullwire.model.run import Run
from fullwire.simulation.buckets import DdpBuckets
from fullwire.simulation.transport import FullTransport
from fullwire.units import show_rate

LEAST_GAIN = 0.01  # of the step
_ON_SALE_BPS = (1e9, 2.5e9, 5e9, 10e9, 25e9, 40e9, 50e9, 100e9, 200e9, 400e9, 800e9)
_FASTER_LINKS = 2  # the next so many on sale
_MIB = 2**20
_CAPS_MIB = (1, 5, 10, 25, 50, 100, 200, 500)
_SYNCHRONISED_EVERY = (2, 4)
# Casting float32 to float16 and back ran at 13 and 19 GB/s on one 2.5 GHz core; a hook does a
# little more than that. A GPU casts at the speed of its memory: assumed.
_CASTING_HOOKS = ("fp16_compress_hook", "bf16_compress_hook")
_CAST_BYTES_PER_S = {True: 10e9, False: 400e9}  # on a processor, on a GPU


@dataclass(frozen=True, slots=True, kw_only=True)
class Fix:
    """One change, how to make it, and what the step would be."""

    change: str
    setting: str
    kind: str
    step_s: float
    scaling_factor: float
    low_s: float
    high_s: float


def fixes(run: Run, job: Forecaster) -> tuple[Fix, ...]:
    """Predict everything that could help this job, the most helpful first."""
    useful = [
        fix for fix in _considered(run, job) if fix.step_s < (1 - LEAST_GAIN) * job.measured_s
    ]
    return tuple(sorted(useful, key=lambda fix: fix.step_s))


def _considered(run: Run, job: Forecaster) -> Iterator[Fix]:
    yield from _faster_links(job)
    yield from _fuller_transport(run, job)
    yield from _other_buckets(run, job)
    yield from _half_precision(run, job)
    yield from _fewer_synchronisations(job)
    yield from _no_straggler(job)
    yield from _other_algorithms(run, job)
    yield from _overlap(run, job)


def _fix(kind: str, change: str, setting: str, found: Forecast) -> Fix:
    return Fix(kind=kind, change=change, setting=setting, **dataclasses.asdict(found))


def _faster_links(job: Forecaster) -> Iterator[Fix]:
    faster = [rate_bps for rate_bps in _ON_SALE_BPS if rate_bps > job.rate_bps]
    for rate_bps in faster[:_FASTER_LINKS]:
        yield _fix(
            "link", f"links of {show_rate(rate_bps)}", "hardware; nothing to set in the job",
            job.ask(bandwidth_bps=(rate_bps,)),
        )  # fmt: skip


def _fuller_transport(run: Run, job: Forecaster) -> Iterator[Fix]:
    if isinstance(job.grid.transports[0], FullTransport):
        return
    is_nccl = run.facts.get("backend") == "nccl"
    setting = (
        "NCCL_SOCKET_NTHREADS=4 NCCL_NSOCKS_PERTHREAD=4 on sockets; NCCL_DEBUG=INFO says which"
        if is_nccl
        else 'init_process_group("fullwire"), or another backend: no setting of Gloo\'s does it'
    )
    yield _fix(
        "transport", f"a transport that fills the {show_rate(job.rate_bps)} there are", setting,
        job.ask(transports=(job.full(),)),
    )  # fmt: skip


def _other_buckets(run: Run, job: Forecaster) -> Iterator[Fix]:
    """Try bucket sizes, and name the best."""
    if "buckets" not in run.facts:
        return
    tried = [(cap, job.ask(buckets=(DdpBuckets(cap * _MIB, cap * _MIB),))) for cap in _CAPS_MIB]
    cap, found = min(tried, key=lambda each: each[1].step_s)
    yield _fix(
        "buckets", f"buckets of {cap} MiB",
        f"DistributedDataParallel(model, bucket_cap_mb={cap})", found,
    )  # fmt: skip


def _half_precision(run: Run, job: Forecaster) -> Iterator[Fix]:
    """Try gradients sent as float16, with what casting them costs."""
    if "hook" in run.facts:
        return
    yield _fix(
        "compression", "gradients sent as float16 (overflows beyond 65,504)",
        "model.register_comm_hook(None, default_hooks.fp16_compress_hook)",
        job.ask(compressors=(_cast(run),)),
    )  # fmt: skip


def casting(run: Run) -> Compressor | None:
    """Return the compressor that a run's communication hook is, if it is one that casts."""
    return _cast(run) if run.facts.get("hook") in _CASTING_HOOKS else None


def _cast(run: Run) -> Compressor:
    rate = _CAST_BYTES_PER_S[run.facts.get("backend") != "nccl"]
    return Compressor(ratio=2, encode_bps=8 * rate, decode_bps=8 * rate)


def _fewer_synchronisations(job: Forecaster) -> Iterator[Fix]:
    """Try gradients added up locally: only every so manieth step pays for communication."""
    alone_s = (job.subject.step.step_ns + job.subject.step.waiting_ns) * 1e-9
    found = job.ask()
    for every in _SYNCHRONISED_EVERY:

        def shared(time_s: float, every: int = every) -> float:
            return alone_s + (time_s - alone_s) / every

        step_s = shared(found.step_s)
        yield _fix(
            "synchronisation", f"gradients summed over {every} steps before they are sent",
            f"with model.no_sync() in {every - 1} of {every} steps; the batch is {every}x larger",
            Forecast(
                step_s=step_s, scaling_factor=job.subject.step.step_ns * 1e-9 / step_s,
                low_s=shared(found.low_s), high_s=shared(found.high_s),
            ),
        )  # fmt: skip


def _no_straggler(job: Forecaster) -> Iterator[Fix]:
    step = job.subject.step
    if step.waiting_ns:
        together = dataclasses.replace(step, waiting_ns=0)
        yield _fix(
            "straggler", "no rank slower than the usual one",
            "look at the rank that the account names: its host, its clock, its input",
            job.ask(step=together),
        )  # fmt: skip


def _other_algorithms(run: Run, job: Forecaster) -> Iterator[Fix]:
    if run.facts.get("backend") != "nccl":
        return  # Gloo's ring is not to be chosen
    for algorithm, setting in (("tree", "NCCL_ALGO=Tree"),):
        yield _fix(
            "algorithm", f"all-reduce by {algorithm}", setting, job.ask(algorithms=(algorithm,))
        )


def _overlap(run: Run, job: Forecaster) -> Iterator[Fix]:
    """Try to send beside the backward pass what comes after it, or in another order."""
    step = job.subject.step
    if "buckets" not in run.facts and step.others.exposed_ns and len(step.bytes):
        alone = dataclasses.replace(step, others=type(step.others)())
        yield _fix(
            "overlap", "gradients sent while the backward pass goes on",
            "DistributedDataParallel(model) in place of collectives called after it",
            job.ask(step=alone),
        )  # fmt: skip
    if "buckets" in run.facts:
        yield _fix(
            "priority", "what the next forward pass needs first is sent first",
            "not in PyTorch itself; ByteScheduler and its like",
            job.ask(lane="priority"),
        )  # fmt: skip
