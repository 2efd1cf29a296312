"""Does a built-in workload fit into its device's memory, and if not, what would?"""

from __future__ import annotations

from fullwire.findings.finding import Finding
from fullwire.workloads import Workload, workload
from fullwire.workloads.devices import DEVICES


class Needs(Finding):
    """The memory that a workload needs on a device."""

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
    """The workload fits, and so would larger batches."""

    template = (
        "{workload} {needs}. {device} has {device_bytes:bytes}. It fits, as would a batch of "
        "{largest_batch:,}."
    )

    workload: str
    needs: Needs
    device: str
    device_bytes: int
    largest_batch: int


class WorkloadDoesNotFit(Finding):
    """The workload does not fit; the finding lists the changes that would make it fit."""

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
    """The workload is too large even without activations."""

    template = " No batch fits: parameters, gradients and optimizer alone take {state_bytes:bytes}."

    state_bytes: int


class FitsWhenSharded(Finding):
    """The workload would fit if its state were sharded over many devices."""

    template = (
        " With its state sharded over {shards:,} of these devices a batch of 1 would fit (FSDP, "
        "which is not modelled here)."
    )

    shards: int


class ShardingIsNotEnough(Finding):
    """The activations of one sample are already too large."""

    template = (
        " Nor would sharding help: activations of one sample alone take {sample_bytes:bytes}."
    )

    sample_bytes: int


class FitsOn(Finding):
    """The workload fits on larger devices."""

    template = " With this batch it fits on: {devices:list}."

    devices: tuple[str, ...]


def memory_finding(load: Workload) -> Finding:
    """Return the memory that a workload needs, and the changes that make it fit if it does not."""
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
    # Try a smaller batch, the state on many devices, and another device.
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
