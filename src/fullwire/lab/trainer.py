"""The job of emulated accelerators: real DistributedDataParallel over layers that only wait.

    python -m fullwire.lab.trainer EMULATION.json

runs on every host of a lab. A step has a forward pass, a backward pass and the optimizer, as in any
script. But each layer sleeps until the profile says that an accelerator would have finished it.
Sleep leaves the processor to the transport. The layer's gradient has the true size and is ready at
that moment.

The emulation avoids processor time that a job with an accelerator would not need:

- A gradient is handed over in the place where DDP wants it, a view of its bucket. So no memory is
  filled or copied. The last all-reduce left its values there, and they serve like any others.
- DDP would divide each bucket by the number of workers, on the accelerator, before it sends it. Our
  hook sends the bucket undivided. So sums grow from step to step. Now and then a forward pass
  brings them back, long before they exceed float32.
- Layers ignore their parameters, which take no memory. The optimizer leaves them unchanged.
"""

# Annotations stay values here, not text: DDP reads those of a communication hook.

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from fullwire.run.emulation import BYTES_A_VALUE, Emulation
from fullwire.units import show_time

_WARM_UP_PASSES = 2  # after the first, DDP makes new buckets in the order it saw
_MOST_GROWTH = 2.0**100  # float32 ends at 2^128
_LATE_SHARE = 0.02  # of a step: an emulation that is later than this is unreliable.


def main() -> None:
    """Train as this host's rank, and print the result on rank 0."""
    emulation = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Emulation)
    torch.set_num_threads(1)  # the layers compute nothing
    try:
        dist.init_process_group(emulation.backend)
        _train(emulation)
        dist.destroy_process_group()
    except RuntimeError as error:  # a peer is gone or silent
        sys.exit(f"fullwire: communication failed: {' '.join(str(error).split())}")


def _train(emulation: Emulation) -> None:
    trainer = Trainer(emulation)
    trainer.warm_up()
    lengths_ns = [trainer.step() for _ in range(emulation.steps)]
    late_ns = torch.tensor(statistics.median(trainer.accelerator.late_ns))
    dist.all_reduce(late_ns, dist.ReduceOp.MAX)
    dist.barrier()
    if dist.get_rank() == 0:
        print(_outcome(emulation, statistics.median(lengths_ns), float(late_ns)))


def _outcome(emulation: Emulation, step_ns: float, late_ns: float) -> str:
    step_s, alone_s = step_ns / emulation.dilation * 1e-9, emulation.step_ns * 1e-9
    late_s = late_ns / emulation.dilation * 1e-9
    steps = "1 step" if emulation.steps == 1 else f"{emulation.steps} steps"
    slower = f", undilated from {emulation.dilation:g} times that" if emulation.dilation > 1 else ""
    outcome = (
        f"{emulation.name}: {steps} of {show_time(step_s)} (median{slower}). The profile alone "
        f"takes {show_time(alone_s)}, scaling factor {alone_s / step_s:.3f}"
    )
    if late_s > _LATE_SHARE * alone_s:
        outcome += (
            f"\nwarning: the processors were too busy to keep the profile's time: backward passes "
            f"ended {show_time(late_s)} late. A larger --dilate leaves them more"
        )
    return outcome


class Trainer:
    """One rank: a model under DDP, an optimizer, and the accelerator that they run on."""

    def __init__(self, emulation: Emulation) -> None:
        self.accelerator = _Accelerator(emulation)
        layers = _Layers(self.accelerator, emulation)
        cap = emulation.bucket_cap_bytes
        self._model = DistributedDataParallel(
            layers,
            bucket_cap_mb=None if cap is None else cap / 2**20,
            gradient_as_bucket_view=True,
            init_sync=False,  # parameters are never read, so they may differ
        )
        self._model.register_comm_hook(self.accelerator, sum_undivided)
        self.parameters = layers.in_order_of_readiness()
        self._optimizer = _Optimizer(self.parameters, self.accelerator)

    def warm_up(self) -> None:
        """Let DDP settle on its buckets, and bring every page and connection to life."""
        for _ in range(_WARM_UP_PASSES):
            self._forward_and_backward()
        dist.barrier()
        # A recorder leaves passes before an evaluation out of the first step.
        self._model.eval()
        self._model.train()
        self.accelerator.begin([parameter.grad for parameter in self.parameters])

    def step(self) -> int:
        """Take a step, and return its length in nanoseconds."""
        began_ns = time.monotonic_ns()
        self._forward_and_backward()
        self._optimizer.step()
        return time.monotonic_ns() - began_ns

    def _forward_and_backward(self) -> None:
        self._optimizer.zero_grad()
        start = torch.zeros((), requires_grad=True)
        start.register_hook(self.accelerator.end_backward)
        self._model(start).backward()


class _Accelerator:
    """Waits as long as the profile says, and hands out gradients at their times.

    It keeps a clock of its own, like an accelerator with a queue of work. The work of torch on the
    processor is hidden behind this clock as long as it takes less time.
    """

    def __init__(self, emulation: Emulation) -> None:
        self._emulation = emulation
        self._gradients: list[Any] = []  # empty while it warms up, without waiting
        self._growth = 1.0
        self._step_ns = self._backward_ns = 0  # when it began with this step and this backward pass
        self._summed_ns = 0  # when the last bucket came back
        self.late_ns: list[int] = []

    @property
    def is_warm(self) -> bool:
        """Say whether the warm-up is over, so that steps count."""
        return bool(self._gradients)

    def begin(self, gradients: list[Any]) -> None:
        """Begin to wait as the profile says, and to hand out these gradients."""
        self._gradients = gradients
        self._step_ns = time.monotonic_ns()

    def end_forward(self) -> None:
        """Wait until the forward pass would be over."""
        if self.is_warm:
            # Divide the values, which grew by sums without a division, before they are too large.
            self._growth *= dist.get_world_size()
            if self._growth > _MOST_GROWTH:
                for gradient in self._gradients:
                    gradient.mul_(1 / self._growth)
                self._growth = 1.0
            end_ns = self._step_ns + self._dilated(self._emulation.forward_ns)
            self._backward_ns = max(end_ns, time.monotonic_ns())
            _wait_until(end_ns)

    def gradient(self, number: int) -> Any:
        """Return a gradient when it is ready."""
        if not self.is_warm:
            values = self._emulation.gradient_bytes[number] // BYTES_A_VALUE
            return torch.empty(values).uniform_(0.5, 1)
        _wait_until(self._backward_ns + self._dilated(self._emulation.ready_ns[number]))
        return self._gradients[number].detach()  # so that DDP, its one owner, avoids a copy

    def end_backward(self, _gradient: Any) -> None:
        """Wait for the rest of the backward pass, after its last gradient."""
        if self.is_warm:
            end_ns = self._backward_ns + self._dilated(self._emulation.backward_ns)
            _wait_until(end_ns)
            self.late_ns.append(time.monotonic_ns() - end_ns)

    def note_sum(self) -> None:
        """Keep the time at which a bucket came back."""
        self._summed_ns = time.monotonic_ns()

    def end_step(self) -> None:
        """Wait for the optimizer's time, after the backward pass and the last bucket."""
        backward_end_ns = self._backward_ns + self._dilated(self._emulation.backward_ns)
        ready_ns = max(backward_end_ns, self._summed_ns)
        self._step_ns = ready_ns + self._dilated(self._emulation.rest_ns)  # of the next step
        _wait_until(self._step_ns)

    def _dilated(self, time_ns: int) -> int:
        return round(time_ns * self._emulation.dilation)


def _wait_until(time_ns: int) -> None:
    left_ns = time_ns - time.monotonic_ns()
    if left_ns > 0:
        time.sleep(left_ns * 1e-9)


class _Layers(torch.nn.Module):  # type: ignore[misc]  # torch may be absent when we check
    """One layer for each gradient: the last to be ready is the first in the forward pass."""

    def __init__(self, accelerator: _Accelerator, emulation: Emulation) -> None:
        super().__init__()
        self._accelerator = accelerator
        self.parameters_forward = torch.nn.ParameterList(
            torch.nn.Parameter(torch.empty(size // BYTES_A_VALUE))
            for size in reversed(emulation.gradient_bytes)
        )

    def in_order_of_readiness(self) -> list[Any]:
        """Return the parameters in the order of the backward pass."""
        return list(self.parameters_forward)[::-1]

    def forward(self, passed: Any) -> Any:
        """Build the backward graph, which takes almost no time, and wait for the forward pass."""
        last = len(self.parameters_forward) - 1
        for place, parameter in enumerate(self.parameters_forward):
            passed = _Layer.apply(passed, parameter, self._accelerator, last - place)
        self._accelerator.end_forward()
        return passed


class _Layer(torch.autograd.Function):  # type: ignore[misc]
    """Passes a value through; on the way back, the gradient of its parameter appears."""

    @staticmethod
    def forward(
        ctx: Any, passed: Any, parameter: Any, accelerator: _Accelerator, number: int
    ) -> Any:
        """Keep the number of this gradient."""
        ctx.gradient = lambda: accelerator.gradient(number)
        return passed.clone()

    @staticmethod
    def backward(ctx: Any, passed: Any) -> Any:
        """Wait until this layer's gradient is ready, and return the value for the next layer."""
        return passed, ctx.gradient(), None, None


class _Optimizer(torch.optim.Optimizer):  # type: ignore[misc]
    """Takes an optimizer's time and leaves the parameters unchanged."""

    def __init__(self, parameters: list[Any], accelerator: _Accelerator) -> None:
        super().__init__(parameters, {})
        self._accelerator = accelerator

    def step(self, closure: Callable[[], float] | None = None) -> None:
        """Wait."""
        self._accelerator.end_step()


def sum_undivided(
    accelerator: _Accelerator, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Add a bucket up over the ranks."""

    def came_back(sums: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        accelerator.note_sum()
        return sums.value()[0]

    return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(came_back)


if __name__ == "__main__":
    main()
