"""The gradients of a step: added up over all ranks, weighted by samples, in the backward pass."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from fullwire.errors import TransportError, UsageError
from fullwire.resilience.fragments import parameters_problem
from fullwire.resilience.place import tell_gradients

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
        count = sum(parameter.numel() for parameter in parameters)
        self.flat = torch.zeros(count, dtype=parameters[0].dtype)
        self.views = self.parts(self.flat)
        self.missing = set(range(len(parameters)))
        self.work: Any = None

    def parts(self, row: Any) -> list[Any]:
        """Return the part of a row of numbers that belongs to each parameter."""
        parts = row.split([parameter.numel() for parameter in self.parameters])
        return [part.view_as(each) for part, each in zip(parts, self.parameters, strict=True)]


class Sums:
    """Adds up the gradients of all ranks, weighted by samples, during the backward pass."""

    def __init__(
        self,
        parameters: Sequence[Any],
        wait: Callable[[], None],
        then: Callable[[Exception | None, Summed | None], None],
        *,
        fragments: int = 0,
    ) -> None:
        """With `fragments`, the caller adds up: so many parts of the parameters, one at a time."""
        self.group: Any = None  # None: this rank is alone
        self.follower: Any = None  # whose sums are applied in place of this rank's
        self.weight = 1.0
        self.tries = 0
        self._is_at_each_step = fragments == 0
        self._wait, self._then = wait, then
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        if not trained or any(parameter.device.type != "cpu" for parameter in trained):
            raise UsageError(
                "fullwire.elastic: expected a model with parameters to train, on the CPU, got "
                + (f"parameters on {trained[0].device}" if trained else "none")
            )
        self.fragments = [
            [_Bucket(each) for each in _divided(part)] for part in _parts(trained, fragments or 1)
        ]
        self.buckets = list(itertools.chain(*self.fragments))
        self._number = _Bucket([torch.zeros(1)])
        self._begun = self._launched = 0
        self._problem: Exception | None = None
        if self._is_at_each_step:
            tell_gradients(trained)  # before the hooks below: they may weight a gradient in place
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
        self._begun = 0
        for bucket in self.buckets:
            bucket.missing = set(range(len(bucket.parameters)))
        if self._is_at_each_step:
            self.begin_sums()

    def begin_sums(self) -> None:
        """Forget sums that were begun before."""
        self._launched, self._problem = 0, None
        for bucket in self.buckets:
            bucket.work = None

    def ready(self, bucket: _Bucket, place: int) -> None:
        """A gradient of this rank is complete."""
        if not self._begun:
            torch.autograd.Variable._execution_engine.queue_callback(self._end)
        self._begun += 1
        if place not in bucket.missing:
            raise UsageError("job.step: expected one backward() in the block, got a second one")
        bucket.missing.discard(place)
        if self.group is None or self.follower is not None or not self._is_at_each_step:
            return
        gradient = bucket.parameters[place].grad
        if gradient.layout is not torch.strided:
            raise UsageError("fullwire.elastic: expected dense gradients, got sparse ones")
        if self.weight:
            torch.mul(gradient, self.weight, out=bucket.views[place])
        else:
            bucket.views[place].zero_()
        while self._launched < len(self.buckets) and not self.buckets[self._launched].missing:
            self.launch(self.buckets[self._launched : self._launched + 1])

    def launch(self, buckets: Sequence[_Bucket]) -> None:
        """Begin to add up what is in these buckets."""
        for bucket in buckets if self.group is not None else ():
            self._launched += 1
            try:
                bucket.work = self.group.allreduce([bucket.flat])
            except TransportError as error:  # told when the sums are complete
                self._problem = error

    def _end(self) -> None:
        """The backward pass is complete."""
        if not self._is_at_each_step:
            self._then(None, None)
            return
        for bucket in self.buckets[self._launched :]:
            for place in bucket.missing:  # this rank did not use these parameters
                bucket.views[place].zero_()
        problem, summed = self.complete(self.buckets)
        if summed is not None or self.group is not None:
            for bucket in self.buckets:
                for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                    parameter.grad = view
        self._then(problem, summed)

    def complete(
        self, buckets: Sequence[_Bucket], *, began_before: bool = False
    ) -> tuple[Exception | None, Summed | None]:
        """Add up what is in buckets; return what failed, and the step if others computed it.

        Complete sums show that all ranks have computed. Those that `began_before` do not, so that
        ranks also add up a number now.
        """
        if self.follower is not None:
            if (summed := self.follower.next()) is None:
                raise Interrupted
            for bucket, flat in zip(buckets, summed.sums, strict=True):
                bucket.flat.copy_(flat)
            return None, summed
        if self.group is not None:
            self.launch(buckets[self._launched :])
            at_the_end = [self._number] if began_before else []
            self.launch(at_the_end)
            self._wait()
            for bucket in [*buckets, *at_the_end]:
                try:
                    if bucket.work is not None and self._problem is None:
                        bucket.work.wait()
                except TransportError as error:
                    self._problem = error
                bucket.work = None
        return self._problem, None


def _parts(parameters: Sequence[Any], count: int) -> Iterator[list[Any]]:
    """Divide parameters into parts of like sizes, each with one parameter at least."""
    if problem := parameters_problem(count, len(parameters)):
        raise UsageError(f"fullwire.elastic: fragments: {problem}")
    whole, passed, part, left = sum(each.numel() for each in parameters), 0, [], count
    for place, parameter in enumerate(parameters):
        part.append(parameter)
        passed += parameter.numel()
        is_full = passed * count >= whole * (count - left + 1)
        if left > 1 and (is_full or len(parameters) - place - 1 == left - 1):
            yield part
            part, left = [], left - 1
    yield part


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
