"""A run's typical step as a job for emulated accelerators: `fullwire lab run --workload`."""

from __future__ import annotations

from dataclasses import dataclass

from fullwire.errors import UsageError
from fullwire.findings.notes import EmulationSendsGradientsOnly
from fullwire.importers import read
from fullwire.recorder.assemble import Known
from fullwire.run.emulation import BACKENDS, BYTES_A_VALUE, Emulation
from fullwire.run.facts import Facts
from fullwire.simulation.buckets import DdpBuckets, bucket_policy
from fullwire.simulation.typical import typical_step
from fullwire.units import ratio, shown
from fullwire.words import sentence

USUAL_STEPS = 10
_KEPT_FACTS = ("model", "device", "batch", "precision", "efficiency")


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedJob:
    """The work of the accelerators, and the facts that a recording of them is to state."""

    emulation: Emulation
    known: Known
    warnings: tuple[str, ...]


def emulated_job(
    workload: str,
    *,
    steps: int | None = None,
    dilate: str | None = None,
    buckets: str | None = None,
    backend: str | None = None,
) -> EmulatedJob:
    """Return the typical step of a run, or of a built-in workload, as a job to emulate."""
    if backend is not None and backend not in BACKENDS:
        raise UsageError(f"backend: expected {' or '.join(BACKENDS)}, got {shown(backend)}")
    run = read(workload)
    step = typical_step(run)
    odd = [size for size in step.bytes.tolist() if size % BYTES_A_VALUE]
    if odd:
        raise UsageError(
            f"{workload}: expected gradients of float32, in multiples of {BYTES_A_VALUE} bytes, "
            f"got one of {odd[0]:,} bytes"
        )
    dilation = 1.0 if dilate is None else ratio(dilate, "dilate")
    if dilation < 1:
        raise UsageError(f"dilate: expected 1 or more, since time is stretched, got {dilate}")
    # Take the buckets of the request, or as recorded, in DDP's form; None is DDP's own default.
    text = (run.facts.buckets or "ddp") if buckets is None else buckets
    policy = bucket_policy(text)
    if not isinstance(policy, DdpBuckets):
        asked = "was recorded with" if buckets is None else "got"
        raise UsageError(
            f"buckets: the job trains under PyTorch DDP: expected ddp or ddp:SIZE, {asked} {text}"
        )
    backward_ns = max(step.backward_ns, int(step.ready_ns[-1]))
    # In a run of several workers, the forward pass holds the rank's wait, and the step does not.
    forward_ns = max(0, min(step.forward_ns, step.step_ns - backward_ns))
    emulation = Emulation(
        name=workload,
        forward_ns=forward_ns,
        backward_ns=backward_ns,
        rest_ns=max(0, step.step_ns - backward_ns - forward_ns),
        ready_ns=tuple(step.ready_ns.tolist()),
        gradient_bytes=tuple(step.bytes.tolist()),
        bucket_cap_bytes=None if policy == DdpBuckets() else policy.cap_bytes,
        steps=USUAL_STEPS if steps is None else steps,
        dilation=dilation,
        backend=BACKENDS[0] if backend is None else backend,
    )
    facts = run.facts.only(_KEPT_FACTS) | Facts(dilation=dilation if dilation > 1 else None)
    known = Known(source=f"{workload}, emulated", basis=run.provenance.basis, facts=facts)
    others = step.others.op
    left_out = EmulationSendsGradientsOnly(count=len(others), kinds=tuple(sorted(set(others))))
    warnings = (sentence(left_out),) if len(others) else ()
    return EmulatedJob(emulation=emulation, known=known, warnings=warnings)
