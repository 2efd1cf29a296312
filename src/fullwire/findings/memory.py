"""Does a built-in workload fit into its device's memory, and if not, what would?"""

from __future__ import annotations

from fullwire.findings.finding import Finding
from fullwire.workloads import Workload, workload
from fullwire.workloads.devices import DEVICES


class Needs(Finding):
    """What a workload takes of a device's memory."""

    template = (
        "needs at least {needed_bytes:bytes} (weights {weights_bytes:bytes}, gradients "
        "{gradients_bytes:bytes}, state of {optimizer} {optimizer_bytes:bytes}, activations "
        "{activations_bytes:bytes} for {batch})"
    )

    needed_bytes: int
    weights_bytes: int
    gradients_bytes: int
    optimizer: str
    optimizer_bytes: int
    activations_bytes: int
    batch: str


class WorkloadFits(Finding):
    """It fits, and so would larger batches."""

    template = (
        "{workload} {needs}; {device} has {device_bytes:bytes}: it fits, as would a batch of "
        "{largest_batch:,}."
    )

    workload: str
    needs: Needs
    device: str
    device_bytes: int
    largest_batch: int


class WorkloadDoesNotFit(Finding):
    """It does not fit, and what would."""

    template = (
        "{workload} does not fit: it {needs}, and {device} has {device_bytes:bytes}.{instead}"
    )

    workload: str
    needs: Needs
    device: str
    device_bytes: int
    instead: tuple[Finding, ...]


class SmallerBatch(Finding):
    """A smaller batch would fit."""

    template = " A batch of up to {largest:,} would fit."

    largest: int


class NoBatchFits(Finding):
    """Even without activations it is too large."""

    template = " No batch fits: without activations it is {state_bytes:bytes}."

    state_bytes: int


class FitsWhenSharded(Finding):
    """The state on many devices would fit."""

    template = (
        " With its state sharded over {shards:,} of these devices a batch of 1 would fit (FSDP, "
        "which is not modelled here)."
    )

    shards: int


class ShardingIsNotEnough(Finding):
    """One sample's activations are too large already."""

    template = (
        " Nor would sharding help: activations of one sample alone take {sample_bytes:bytes}."
    )

    sample_bytes: int


class FitsOn(Finding):
    """Larger devices."""

    template = " With this batch it fits on: {devices:list}."

    devices: tuple[str, ...]


def memory_finding(load: Workload) -> Finding:
    """Return what a workload needs, whether it fits, and if not what would."""
    memory = load.memory
    needs = Needs(
        needed_bytes=memory.needed,
        weights_bytes=memory.weights,
        gradients_bytes=memory.gradients,
        optimizer=load.model.optimizer.title,
        optimizer_bytes=memory.optimizer,
        activations_bytes=memory.activations,
        batch=str(load.batch),
    )
    if memory.fits:
        return WorkloadFits(
            workload=load.name,
            needs=needs,
            device=load.device.title,
            device_bytes=memory.device,
            largest_batch=memory.largest_batch,
        )
    # What would fit is a smaller batch, the state on many devices, or another device.
    instead: list[Finding] = []
    if memory.largest_batch:
        instead.append(SmallerBatch(largest=memory.largest_batch))
    elif memory.least_shards is None:
        sample_bytes = memory.activations_of_sample
        instead.append(NoBatchFits(state_bytes=memory.state))
        instead.append(ShardingIsNotEnough(sample_bytes=sample_bytes))
    else:
        instead.append(NoBatchFits(state_bytes=memory.state))
        instead.append(FitsWhenSharded(shards=memory.least_shards))
    larger = tuple(
        name for name in DEVICES if workload(f"{load.model.name}@{name}:{load.samples}").memory.fits
    )
    if larger:
        instead.append(FitsOn(devices=larger))
    return WorkloadDoesNotFit(
        workload=load.name,
        needs=needs,
        device=load.device.title,
        device_bytes=memory.device,
        instead=tuple(instead),
    )
