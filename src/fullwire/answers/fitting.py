"""Does a built-in workload fit into its device's memory, and if not, what would?"""

from __future__ import annotations

from collections.abc import Iterator

from fullwire.units import show_bytes
from fullwire.workloads import Workload, workload
from fullwire.workloads.devices import DEVICES


def memory_sentence(load: Workload) -> str:
    """Say what a workload needs, whether it fits, and if not what would."""
    memory = load.memory
    parts = (
        f"weights {show_bytes(memory.weights)}, gradients {show_bytes(memory.gradients)}, "
        f"state of {load.model.optimizer.title} {show_bytes(memory.optimizer)}, "
        f"activations {show_bytes(memory.activations)} for {load.batch}"
    )
    needs = f"needs at least {show_bytes(memory.needed)} ({parts})"
    has = f"{load.device.title} has {show_bytes(memory.device)}"
    if memory.fits:
        return f"{load.name} {needs}; {has}: it fits, as would a batch of {memory.largest_batch:,}."
    return f"{load.name} does not fit: it {needs}, and {has}. {' '.join(_instead(load))}"


def _instead(load: Workload) -> Iterator[str]:
    """Say what would fit: a smaller batch, the state on many devices, another device."""
    memory = load.memory
    if memory.largest_batch:
        yield f"A batch of up to {memory.largest_batch:,} would fit."
    else:
        yield f"No batch fits: without activations it is {show_bytes(memory.state)}."
        yield _sharded(load)
    larger = [
        name for name in DEVICES if workload(f"{load.model.name}@{name}:{load.samples}").memory.fits
    ]
    if larger:
        yield f"With this batch it fits on: {', '.join(larger)}."


def _sharded(load: Workload) -> str:
    shards = load.memory.least_shards
    if shards is None:
        one = show_bytes(load.memory.activations_of_sample)
        return f"Nor would sharding help: activations of one sample alone take {one}."
    return (
        f"With its state sharded over {shards:,} of these devices a batch of 1 would fit "
        "(FSDP, which is not modelled here)."
    )
