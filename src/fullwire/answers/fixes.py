"""What would make a job faster, by how much, and with which setting.

A fix is the job's own step, predicted again with one thing changed. They come sorted by what they
gain; what gains less than `LEAST_GAIN` of the step is not worth a meeting. Where gains are as good
as equal, what is set in the job comes before what is bought.

The step is the median one, but where a part that the median does not have is the largest loss: of a
rank that is late in every fifth step, say, or of metrics that are summed in every tenth. Then fixes
are of the mean step, the long ones included.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import nan

import numpy as np

from fullwire.compression.compressor import Compressor
from fullwire.run.placement import host_of_rank
from fullwire.run.run import Run
from fullwire.simulation.buckets import DdpBuckets
from fullwire.simulation.forecast import Forecast, Forecaster
from fullwire.simulation.stragglers import NoJitter
from fullwire.simulation.transport import FullTransport
from fullwire.timeline.account import Account, Late, Part, late_ranks
from fullwire.timeline.ahead import has_loader, usual_ahead_s
from fullwire.timeline.steadiness import FewSteps, few_steps
from fullwire.timeline.transfers import codes_of
from fullwire.units import show_ranks, show_rate

LEAST_GAIN = 0.01  # of the step
MANY, MUCH_BYTES = 20, 2**20  # collectives of a step, and of up to which size: worth joining
_AS_GOOD = 0.02  # of the step: gains that differ by less are as good as equal
FILLS_THE_LINE = "fullwire"  # the backend that a full wire is predicted for
_REPEATS = 0.02  # within this a job repeats that is begun anew, where nothing holds it up
_ON_SALE_BPS = (1e9, 2.5e9, 5e9, 10e9, 25e9, 40e9, 50e9, 100e9, 200e9, 400e9, 800e9)
_FASTER_LINKS = 2  # the next so many on sale
_MIB = 2**20
_CAPS_MIB = (1, 5, 10, 25, 50, 100, 200, 500)
_SYNCHRONISED_EVERY = (2, 4)
_SMALL_NUMBERS = re.compile(r"16|half|8", re.IGNORECASE)  # in the names of types
_LOADER = "DataLoader(num_workers=8, prefetch_factor=4, persistent_workers=True)"
_DATA_READY = "data that is there when a step begins"
_HOST_READY = "nothing of the host's before a step computes"
_MUCH = 0.05  # of the step: what an account alone calls worth removing
_OWN = (Part.STRAGGLER, Part.INPUT, Part.HOST)  # losses of a worker's own time
_IN_FEW_STEPS = (*_OWN, Part.LATENCY)  # what some steps may do that others do not
_HOST_ELSEWHERE = "logs, checkpoints, metrics: less often, or in another process"
_WHERE_A_RANK_IS_SLOW = (  # beyond the usual in computation, input, or neither
    "look at its device: clock, temperature (of a GPU: nvidia-smi -q -d PERFORMANCE), other work",
    "look at its input: DataLoader(num_workers=...), its disk, its share of the data",
    "look at its host: other processes, and what only it does between steps (reading, logs)",
)
_JOINED = {
    "allreduce": (
        "all-reduces",
        "dist.all_reduce(torch.cat([...])), where none needs another's sum",
    ),
    "broadcast": (
        "broadcasts",
        "dist.broadcast(torch.cat([...])), of those that come from one rank",
    ),
    "allgather": (
        "all-gathers",
        "dist.all_gather(..., torch.cat([...])), where none needs another's",
    ),
}
# Casting float32 to float16 and back ran at 13 and 19 GB/s on one 2.5 GHz core; a hook does a
# little more than that. A GPU casts at the speed of its memory: assumed.
_CASTING_HOOKS = ("fp16_compress_hook", "bf16_compress_hook")
_CAST_BYTES_PER_S = {True: 10e9, False: 400e9}  # on a processor, on a GPU
# Gloo's threads took as long for float16 as for float32, of which they handle twice the bytes.
_WORK_WITH_HALVES = {True: 2.0, False: 1.0}


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


@dataclass(frozen=True, slots=True)
class Fixes:
    """What would help, the most helpful first, the step that it is held against, and its T1."""

    found: tuple[Fix, ...]
    from_s: float
    alone_s: float


def fixes(run: Run, job: Forecaster, account: Account) -> Fixes:
    """Predict everything that could help this job, the most helpful first."""
    part = _largest_loss(account)
    rare = few_steps(account, part) if part in _IN_FEW_STEPS else None
    beyond_s = 0.0 if rare is None else max(account.step_s - job.measured_s, 0.0)
    from_s = job.measured_s + beyond_s
    considered = [_longer(fix, beyond_s, part) for fix in _considered(run, job, account)]
    if rare is not None:
        considered.append(_no_long_steps(job, account, part, rare))
    useful = [fix for fix in considered if fix.step_s < (1 - LEAST_GAIN) * from_s]
    found = sorted(useful, key=lambda fix: _order(fix, from_s))
    return Fixes(tuple(found), from_s, job.alone_s)


def fixes_by_account(account: Account) -> Fixes:
    """Take off the step what is lost beside the network, where no line rate allows a prediction.

    It is what the account says that a step would be without, so there is no interval.
    """
    late, step_s = late_ranks(account), account.step_s
    lost = (
        (
            "straggler",
            _without_late(late),
            _setting_of_straggler(account, late),
            account.parts_s[Part.STRAGGLER.key],
        ),
        ("input", _DATA_READY, _LOADER, account.parts_s[Part.INPUT.key]),
        (
            "host",
            _HOST_READY,
            _setting_of_host(account),
            min(usual_ahead_s(account), account.parts_s[Part.HOST.key]),
        ),
    )
    alone_s = sum(account.parts_s[part.key] for part in (Part.COMPUTE, Part.INPUT, Part.HOST))
    found = [
        Fix(
            kind=kind,
            change=change,
            setting=setting,
            step_s=step_s - lost_s,
            low_s=nan,
            high_s=nan,
            scaling_factor=(alone_s - lost_s * (kind != "straggler")) / (step_s - lost_s),
        )
        for kind, change, setting, lost_s in lost
        if _MUCH * step_s <= lost_s < step_s
    ]
    return Fixes(tuple(sorted(found, key=lambda fix: fix.step_s)), step_s, alone_s)


def _order(fix: Fix, from_s: float) -> tuple[float, bool, float]:
    return round(fix.step_s / (_AS_GOOD * from_s)), fix.kind == "link", fix.step_s


def _largest_loss(account: Account) -> Part:
    lost = {part: account.parts_s[part.key] for part in Part if part != Part.COMPUTE}
    return max(lost, key=lost.__getitem__)


def _longer(fix: Fix, beyond_s: float, part: Part) -> Fix:
    """Return a fix of the median step as one of a mean step that a part makes so much longer."""
    step_s = fix.step_s + beyond_s
    may_help = part == Part.LATENCY and fix.kind == "transport"
    surely_s = 0.0 if may_help else beyond_s
    return dataclasses.replace(
        fix,
        step_s=step_s,
        low_s=fix.low_s + surely_s,
        high_s=fix.high_s + beyond_s,
        scaling_factor=fix.scaling_factor * fix.step_s / step_s,
    )


def _no_long_steps(job: Forecaster, account: Account, part: Part, rare: FewSteps) -> Fix:
    """Try steps that all take as long as the usual ones."""
    settings = {
        Part.INPUT: _LOADER,
        Part.HOST: _HOST_ELSEWHERE,
        Part.LATENCY: "what only they send: less often, or joined into one (torch.cat)",
    }
    late = late_ranks(account)
    usual = rare.usual_s
    return Fix(
        kind=part.key,
        change=f"the {rare.few} long of {rare.of} steps as short as the others",
        setting=settings.get(part) or _setting_of_straggler(account, late),
        step_s=usual.value,
        scaling_factor=min(job.alone_s / usual.value, 1.0),
        low_s=usual.low * (1 - _REPEATS),
        high_s=usual.high * (1 + _REPEATS),
    )


def _considered(run: Run, job: Forecaster, account: Account) -> Iterator[Fix]:
    yield from _faster_links(run, job)
    yield from _fuller_transport(run, job)
    yield from _other_buckets(run, job)
    yield from _half_precision(run, job)
    yield from _no_hook(run, job)
    yield from _fewer_synchronisations(run, job)
    yield from _joined(run, job)
    yield from _no_straggler(job, account)
    yield from _input_ahead(job, account)
    yield from _host_ahead(job, account)
    yield from _other_algorithms(run, job)
    yield from _overlap(run, job)


def _fix(kind: str, change: str, setting: str, found: Forecast) -> Fix:
    return Fix(kind=kind, change=change, setting=setting, **dataclasses.asdict(found))


def _faster_links(run: Run, job: Forecaster) -> Iterator[Fix]:
    """Try links on sale that are faster; first, where few are slower, these as the others are."""
    slow, next_bps = _slow_links(run, job)
    if slow:
        yield _fix(
            "link",
            f"the link of {show_ranks(slow)} as fast as others: {show_rate(next_bps)}",
            "look at its cable, its port, the speed that they agreed on (ethtool), who shares it",
            job.ask(bandwidth_bps=(next_bps,)),
        )
    faster = [rate_bps for rate_bps in _ON_SALE_BPS if rate_bps > next_bps]
    for rate_bps in faster[:_FASTER_LINKS]:
        yield _fix(
            "link",
            f"links of {show_rate(rate_bps)}",
            "hardware; nothing to set in the job",
            job.ask(bandwidth_bps=(rate_bps,)),
        )


def _slow_links(run: Run, job: Forecaster) -> tuple[list[int], float]:
    """Return the few ranks that have the slowest links, if not all do, and the next rate to it."""
    usual_bps, others = run.facts.line_rate_bps, run.facts.other_line_rates_bps or ()
    slow = [int(rank) for rank, rate_bps in others if rate_bps == job.rate_bps]
    known_bps = [each for each in (usual_bps, *dict(others).values()) if each is not None]
    faster_bps = [rate_bps for rate_bps in known_bps if rate_bps > job.rate_bps]
    if not faster_bps or not 0 < 2 * len(slow) <= job.workers:
        return [], job.rate_bps
    return slow, min(faster_bps)


def _fuller_transport(run: Run, job: Forecaster) -> Iterator[Fix]:
    if isinstance(job.grid.transports[0], FullTransport):
        return
    is_gloo = run.facts.backend == "gloo"
    yield _fix(
        "transport",
        f"a transport that fills the {show_rate(job.rate_bps)} there are",
        _setting_of_transport(run),
        (job.filling() if is_gloo else job.unhindered()).ask(),
    )


def _setting_of_transport(run: Run) -> str:
    backend, network = run.facts.backend, run.facts.nccl_network or ""
    if backend == "gloo":
        return f'init_process_group("{FILLS_THE_LINE}"): no setting of Gloo\'s does it'
    if backend == FILLS_THE_LINE:
        return (
            "larger buckets and more processors fill more of it; no setting of the backend's does"
        )
    if backend != "nccl":
        return "another backend, or more connections and threads where it has a setting for them"
    if network and not network.startswith("Socket"):
        return (
            "NCCL_IB_QPS_PER_CONNECTION=4 NCCL_MIN_NCHANNELS=8; NCCL_DEBUG=INFO says what it uses"
        )
    return "NCCL_SOCKET_NTHREADS=4 NCCL_NSOCKS_PERTHREAD=4 on sockets; NCCL_DEBUG=INFO says which"


def _other_buckets(run: Run, job: Forecaster) -> Iterator[Fix]:
    """Try bucket sizes, and name the best."""
    if run.facts.buckets is None:
        return
    tried = [(cap, job.ask(buckets=(DdpBuckets(cap * _MIB, cap * _MIB),))) for cap in _CAPS_MIB]
    cap, found = min(tried, key=lambda each: each[1].step_s)
    yield _fix(
        "buckets",
        f"buckets of {cap} MiB",
        f"DistributedDataParallel(model, bucket_cap_mb={cap})",
        found,
    )


def _half_precision(run: Run, job: Forecaster) -> Iterator[Fix]:
    """Try gradients sent as float16, with what casting them costs."""
    if run.facts.buckets is None or run.facts.hook is not None or _sends_halves(run):
        return
    yield _fix(
        "compression",
        "gradients sent as float16 (overflows beyond 65,504)",
        "model.register_comm_hook(None, default_hooks.fp16_compress_hook)",
        job.ask(compressors=(_cast(run),)),
    )


def _no_hook(run: Run, job: Forecaster) -> Iterator[Fix]:
    """Try gradients that are sent as they are, without what a hook of the script's packs."""
    step = job.subject.step
    if run.facts.hook is not None and step.packing_ns:
        yield _fix(
            "codec",
            "gradients sent whole, with nothing to pack",
            f"no register_comm_hook(...): {run.facts.hook} packs longer than it saves",
            job.ask(step=dataclasses.replace(step, packing_ns=0, sent_share=1.0)),
        )


def _sends_halves(run: Run) -> bool:
    """Say whether most of what is sent has 16 bits a number already, or fewer."""
    kinds, sizes = codes_of(run.collectives.dtype), run.collectives.bytes
    is_small = np.array([_SMALL_NUMBERS.search(name) is not None for name in kinds.names], bool)
    return bool(len(sizes)) and 2 * int(sizes[is_small[kinds.codes]].sum()) > int(sizes.sum())


def casting(run: Run) -> Compressor | None:
    """Return the compressor that a run's communication hook is, if it is one that casts."""
    return _cast(run) if run.facts.hook in _CASTING_HOOKS else None


def _cast(run: Run) -> Compressor:
    on_processor = run.facts.backend != "nccl"
    rate = _CAST_BYTES_PER_S[on_processor]
    return Compressor(
        ratio=2,
        encode_bps=8 * rate,
        decode_bps=8 * rate,
        work_per_byte=_WORK_WITH_HALVES[on_processor],
    )


def _fewer_synchronisations(run: Run, job: Forecaster) -> Iterator[Fix]:
    """Try gradients added up locally: only every so manieth step pays for sending them."""
    if run.facts.buckets is not None:
        setting = "with model.no_sync() in {} of {} steps"
    elif job.subject.step.others.are_gradients:
        setting = "no all_reduce in {} of {} steps, gradients left to add up"
    else:
        return
    for every in _SYNCHRONISED_EVERY:
        yield _fix(
            "synchronisation",
            f"gradients summed over {every} steps before they are sent",
            f"{setting.format(every - 1, every)}; the batch is {every}x larger",
            job.ask(accumulate=(every,)),
        )


def _joined(run: Run, job: Forecaster) -> Iterator[Fix]:
    """Try one collective in place of many small ones of its kind."""
    step = job.subject.step
    if step.others.sum_gradients or bool((run.collectives.op == "reducescatter").any()):
        return  # which is no script's doing
    for op, (named, setting) in _JOINED.items():
        places = step.others.small(op, MUCH_BYTES)
        if len(places) >= MANY:
            yield _fix(
                "joining",
                f"{len(places)} small {named} of a step joined into one",
                setting,
                # Without residue: that there are many small ones is what it is of.
                job.as_modelled().ask(step=step.with_joined(places)),
            )


def _no_straggler(job: Forecaster, account: Account) -> Iterator[Fix]:
    if job.subject.step.waiting_ns:
        late = late_ranks(account)
        yield _fix(
            "straggler",
            _without_late(late),
            _setting_of_straggler(account, late),
            job.ask(jitters=(NoJitter(),)),
        )


def _without_late(late: Late | None) -> str:
    if late is None:
        return "no rank slower than the usual one"
    return f"{show_ranks(late.ranks)} as fast as the others"


def _setting_of_straggler(account: Account, late: Late | None) -> str:
    if late is None:
        return "batches of equal work, and nothing else on the ranks' hosts"
    rows = [account.ranks.index(rank) for rank in late.ranks]
    excess_ns = account.excess_ns[rows][:, account.is_typical].mean(axis=(0, 1))
    return _WHERE_A_RANK_IS_SLOW[int(np.argmax(excess_ns))]


def _input_ahead(job: Forecaster, account: Account) -> Iterator[Fix]:
    """Try a step that finds its data loaded."""
    input_ns = float(np.median(account.parts_ns[:, account.is_typical, Part.INPUT].mean(axis=0)))
    found = _beginning_sooner(job, round(input_ns))
    if found is not None:
        yield _fix("input", _DATA_READY, _LOADER, found)


def _host_ahead(job: Forecaster, account: Account) -> Iterator[Fix]:
    """Try a step that begins with computing; what the host does before may be its own reading."""
    found = _beginning_sooner(job, round(usual_ahead_s(account) * 1e9))
    if found is not None:
        yield _fix("host", _HOST_READY, _setting_of_host(account), found)


def _setting_of_host(account: Account) -> str:
    reads = f"batches that the script reads by itself: {_LOADER}"
    return _HOST_ELSEWHERE if has_loader(account) else reads


def _beginning_sooner(job: Forecaster, sooner_ns: int) -> Forecast | None:
    """Predict the step without so much of what comes before its forward pass."""
    step = job.subject.step
    shorter_ns = min(sooner_ns, step.forward_ns, step.step_ns)
    if shorter_ns <= 0:
        return None
    return job.ask(
        step=dataclasses.replace(
            step, step_ns=step.step_ns - shorter_ns, forward_ns=step.forward_ns - shorter_ns
        )
    )


def _other_algorithms(run: Run, job: Forecaster) -> Iterator[Fix]:
    hosts = len(set(host_of_rank(run).values()))
    if 1 < hosts < job.workers:
        yield _fix(
            "algorithm",
            f"sums within each of {hosts} hosts first, then between them",
            "NCCL_ALGO=Tree"
            if run.facts.backend == "nccl"
            else "a communication hook over init_device_mesh(...) of hosts by ranks",
            job.ask(workers=(hosts,)),
        )
    elif run.facts.backend == "nccl":  # Gloo's ring is not to be chosen
        yield _fix(
            "algorithm", "all-reduce by tree", "NCCL_ALGO=Tree", job.ask(algorithms=("tree",))
        )


def _overlap(run: Run, job: Forecaster) -> Iterator[Fix]:
    """Try to send beside the backward pass what comes after it, or in another order."""
    step = job.subject.step
    if run.facts.buckets is None and step.others.are_gradients:
        alone = dataclasses.replace(step, others=type(step.others)())
        yield _fix(
            "overlap",
            "gradients sent while the backward pass goes on",
            "DistributedDataParallel(model) in place of collectives called after it",
            job.ask(step=alone),
        )
    if run.facts.buckets is not None:
        yield _fix(
            "priority",
            "what the next forward pass needs first is sent first",
            "not in PyTorch itself; ByteScheduler and its like",
            job.ask(lane="priority"),
        )
