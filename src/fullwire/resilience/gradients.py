"""The gradients of a step: added up over all ranks, weighted by samples, in the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from fullwire.errors import TransportError, UsageError

_BUCKET_BYTES = 25 * 2**20
_FIRST_BUCKET_BYTES = 2**20  # the sums begin early


class Interrupted(BaseException):
    """The step does not count. No `except Exception` of a script takes it for an error."""


class Summed(NamedTuple):
    """The sums of a step that others computed."""

    step: int
    sums: list[Any]
    rank: int  # this one's place after those that computed it
    size: int  # those that computed it


class _Bucket:
    """Gradients that travel together."""

    def __init__(self, parameters: Sequence[Any]) -> None:
        self.parameters = parameters
        sizes = [parameter.numel() for parameter in parameters]
        self.flat = torch.zeros(sum(sizes), dtype=parameters[0].dtype)
        parts = self.flat.split(sizes)
        self.views = [part.view_as(each) for part, each in zip(parts, parameters, strict=True)]
        self.missing = set(range(len(parameters)))
        self.work: Any = None


class Sums:
    """Adds up the gradients of all ranks, weighted by samples, during the backward pass."""

    def __init__(
        self,
        parameters: Sequence[Any],
        wait: Callable[[], None],
        then: Callable[[Exception | None, Summed | None], None],
    ) -> None:
        self.group: Any = None  # None: this rank is alone
        self.follower: Any = None  # whose sums are applied in place of this rank's
        self.weight = 1.0
        self.tries = 0
        self.is_at_each_step = True  # else the end of a round adds up
        self._wait, self._then = wait, then
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        if not trained or any(parameter.device.type != "cpu" for parameter in trained):
            raise UsageError(
                "fullwire.elastic: expected a model with parameters to train, on the CPU, got "
                + (f"parameters on {trained[0].device}" if trained else "none")
            )
        self.buckets = [_Bucket(part) for part in _divided(trained)]
        self._begun = self._launched = 0
        self._problem: Exception | None = None
        for bucket in self.buckets:
            for place, parameter in enumerate(bucket.parameters):
                hook = _hook(self, bucket, place)
                parameter.register_post_accumulate_grad_hook(hook)

    @property
    def forms(self) -> list[tuple[int, Any]]:
        """Return the numbers and the type of each sum."""
        return [(bucket.flat.numel(), bucket.flat.dtype) for bucket in self.buckets]

    def begin(self) -> None:
        """Be ready for one backward pass."""
        self.tries += 1
        self._begun = self._launched = 0
        self._problem = None
        for bucket in self.buckets:
            bucket.missing = set(range(len(bucket.parameters)))
            bucket.work = None

    def ready(self, bucket: _Bucket, place: int) -> None:
        """A gradient of this rank is complete."""
        if not self._begun:
            torch.autograd.Variable._execution_engine.queue_callback(self._end)
        self._begun += 1
        if place not in bucket.missing:
            raise UsageError("job.step: expected one backward() in the block, got a second one")
        bucket.missing.discard(place)
        if self.group is None or self.follower is not None or not self.is_at_each_step:
            return
        gradient = bucket.parameters[place].grad
        if gradient.layout is not torch.strided:
            raise UsageError("fullwire.elastic: expected dense gradients, got sparse ones")
        if self.weight:
            torch.mul(gradient, self.weight, out=bucket.views[place])
        else:
            bucket.views[place].zero_()
        while self._launched < len(self.buckets) and not self.buckets[self._launched].missing:
            self._launch(self.buckets[self._launched])

    def _launch(self, bucket: _Bucket) -> None:
        self._launched += 1
        try:
            bucket.work = self.group.allreduce([bucket.flat])
        except TransportError as error:  # told at the end of the backward pass
            self._problem = error

    def _end(self) -> None:
        """The backward pass is complete."""
        if not self.is_at_each_step:
            self._then(None, None)
            return
        for bucket in self.buckets[self._launched :]:
            for place in bucket.missing:  # this rank did not use these parameters
                bucket.views[place].zero_()
        problem, summed = self.complete()
        if summed is not None or self.group is not None:
            for bucket in self.buckets:
                for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                    parameter.grad = view
        self._then(problem, summed)

    def complete(self) -> tuple[Exception | None, Summed | None]:
        """Add up what is in the buckets; return what failed, and the step if others computed it."""
        if self.follower is not None:
            if (summed := self.follower.next()) is None:
                raise Interrupted
            for bucket, flat in zip(self.buckets, summed.sums, strict=True):
                bucket.flat.copy_(flat)
            return None, summed
        if self.group is not None:
            for bucket in self.buckets[self._launched :]:
                self._launch(bucket)
            self._wait()
            for bucket in self.buckets:
                try:
                    if bucket.work is not None and self._problem is None:
                        bucket.work.wait()
                except TransportError as error:
                    self._problem = error
                bucket.work = None
        return self._problem, None


def _divided(parameters: Sequence[Any]) -> Iterator[list[Any]]:
    """Group parameters in the order in which their gradients come, the last layer's first."""
    bucket: list[Any] = []
    size_bytes, limit_bytes = 0, _FIRST_BUCKET_BYTES
    for parameter in reversed(parameters):
        if bucket and (parameter.dtype != bucket[0].dtype or size_bytes >= limit_bytes):
            yield bucket
            bucket, size_bytes, limit_bytes = [], 0, _BUCKET_BYTES
        bucket.append(parameter)
        size_bytes += parameter.numel() * parameter.element_size()
    yield bucket


def _hook(sums: Sums, bucket: _Bucket, place: int) -> Callable[[Any], None]:
    def note(_: Any) -> None:
        sums.ready(bucket, place)

    return note
