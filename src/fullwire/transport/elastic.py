"""Training that goes on when workers are lost or come: `fullwire.elastic`.

A step is applied only after all ranks hold its sums and have said so (`membership`). Nothing is
ever taken back: where a step is interrupted, its sums are dropped before the optimizer saw them.

    forward, backward     the sums of gradients travel while the backward pass goes on
    end of backward       wait for the sums, then for all others: the step is committed
    optimizer.step()      the script applies it

All else follows from the number of committed steps: the samples of a step, and where a loop over
batches stands. So a rank that joins needs the parameters and that number.
"""

from __future__ import annotations

import atexit
import io
import math
import os
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from types import SimpleNamespace, TracebackType
from typing import Any

import torch
import torch.distributed as dist

from fullwire.errors import TransportError, UsageError
from fullwire.transport.buckets import tell_small
from fullwire.transport.group import FullwireGroup
from fullwire.transport.membership import Membership
from fullwire.transport.mesh import Mesh
from fullwire.transport.place import TOO_FEW_STATUS, Folder, Place

_BUCKET_BYTES = 25 * 2**20
_FIRST_BUCKET_BYTES = 2**20  # the sums begin early
_SUMS_S = 86400.0  # the membership, not a clock, ends a wait for others
_MOST_FAILURES = 20


def elastic(model: Any, optimizer: Any, scheduler: Any = None) -> Job:
    """Make a training job that outlives its workers.

    Start it with `fullwire run --workers 8 --min 4 -- python train.py`. Without `fullwire run`
    the job has this process alone.

    - `model`, `optimizer`: as in a plain loop; all workers begin with the first one's parameters.
    - `scheduler`: the script steps it; a worker that joins receives its state.

        job = fw.elastic(model, optimizer)
        for inputs, labels in job.batches(dataset, batch_size=48):
            with job.step():
                loss = criterion(job.model(inputs), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    """
    place = Place.told()
    if place is None and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UsageError(
            "fullwire.elastic: expected workers started by fullwire run --workers, "
            f"got WORLD_SIZE={os.environ['WORLD_SIZE']}"
        )
    return Job(model, optimizer, scheduler, None if place is None else Mesh(place))


class Job:
    """An elastic training job, as one of its workers sees it."""

    def __init__(self, model: Any, optimizer: Any, scheduler: Any, mesh: Mesh | None) -> None:
        self.model = model
        self.rank = 0
        self.world_size = 1
        self.step_number = 0  # committed steps
        self.samples: list[int] = []  # this rank's, of the last committed step
        self._optimizer, self._scheduler = optimizer, scheduler
        self._extra: dict[str, Any] = {}
        self._mesh = mesh
        self._has_state = mesh is None
        self._callbacks: list[Callable[[int, int], None]] = []
        self._membership = Membership(0, (0,), 0) if mesh is None else None
        self._group: Any = None
        self._planned_steps = 0  # by all loops over batches so far
        self._share: list[int] = []
        self._failures = 0  # to connect to the members of an epoch, in a row
        self._sums = _Sums(list(model.parameters()), self._commit)
        if mesh is not None:
            self._sums.wait = mesh.wait  # type: ignore[method-assign]
            atexit.register(self._leave)
        self._is_in_step = False

    def on_change(self, callback: Callable[[int, int], None]) -> None:
        """Call a function with the rank and the world size of each new membership."""
        self._callbacks.append(callback)

    def state(self, extra: dict[str, Any]) -> None:
        """Give more objects with `state_dict` and `load_state_dict` to workers that join."""
        for name, each in extra.items():
            if not (hasattr(each, "state_dict") and hasattr(each, "load_state_dict")):
                raise UsageError(
                    f"job.state: {name}: expected an object with state_dict and load_state_dict, "
                    f"got {type(each).__name__}"
                )
        self._extra.update(extra)

    def batches(
        self,
        dataset: Any,
        *,
        batch_size: int,
        epochs: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        collate: Callable[[list[Any]], Any] | None = None,
    ) -> Iterator[Any]:
        """Yield this rank's part of each global batch; each sample counts once an epoch.

        `batch_size` is that of all ranks together. An interrupted batch comes again, divided
        among the ranks that are left.
        """
        size = len(dataset)
        if size < 1 or batch_size < 1 or epochs < 0:
            raise UsageError(
                "job.batches: expected samples, a batch size from 1 on and epochs from 0 on, got "
                f"{size} samples, batch_size={batch_size} and epochs={epochs}"
            )
        steps_in_epoch = math.ceil(size / batch_size)
        first, self._planned_steps = (
            self._planned_steps,
            self._planned_steps + steps_in_epoch * epochs,
        )
        last, order, ordered = self._planned_steps, range(size), -1
        while self._settle() < last:
            epoch, step = divmod(self.step_number - first, steps_in_epoch)
            if shuffle and epoch != ordered:
                generator = torch.Generator().manual_seed(seed * 1_000_003 + first + epoch)
                order, ordered = torch.randperm(size, generator=generator).tolist(), epoch
            whole = order[step * batch_size : (step + 1) * batch_size]
            self._share = list(whole[share_of(len(whole), self.rank_now, self.size_now)])
            # A rank without samples computes one that others count, with weight 0.
            given = self._share or [whole[0]]
            self._sums.weight = len(self._share) / len(whole)
            tried = self._sums.tries
            yield _collated(dataset, given, collate)
            if self._sums.tries == tried:
                raise UsageError("job.batches: expected `with job.step()` around each batch")

    def step(self) -> _Step:
        """Return the block of one step: forward and backward pass, and the optimizer."""
        return _Step(self)

    # Membership.

    @property
    def rank_now(self) -> int:
        """The rank in the next step; `rank` is that of the last committed one."""
        assert self._membership is not None
        return 0 if self._mesh is None else self._membership.members.index(self._mesh.rank)

    @property
    def size_now(self) -> int:
        """The world size of the next step."""
        assert self._membership is not None
        return len(self._membership.members)

    def _settle(self) -> int:
        """Be a member of the present epoch, with its state; return the committed steps."""
        if self._mesh is None:
            return self.step_number
        while self._membership is None or not self._mesh.is_current(self._membership.epoch):
            self._leave_group()
            membership = self._mesh.epoch()
            if self._has_state and self.step_number < membership.base_step:
                self._has_state = False  # it was left out, and steps were committed meanwhile
            self._raise_if_too_few(membership)
            try:
                self._enter(membership)
            except TransportError:
                # The next epoch leaves out who was lost meanwhile. An error of another kind stays.
                self._failures += 1
                if self._failures > _MOST_FAILURES:
                    raise
                self._mesh.await_change(membership.epoch)
                continue
            self._membership = membership
            self._failures = 0
            for callback in self._callbacks:
                callback(self.rank_now, self.size_now)
            if self.step_number == 0:
                self.rank, self.world_size = self.rank_now, self.size_now
        return self.step_number

    def _raise_if_too_few(self, membership: Membership) -> None:
        assert self._mesh is not None
        place, left = self._mesh.place, len(membership.members)
        if left < place.least and not place.is_replaced:
            place.folder.set(f"ended {place.worker}", f"{left} {membership.base_step}")
            self._mesh.close()
            raise SystemExit(TOO_FEW_STATUS)

    def _enter(self, membership: Membership) -> None:
        """Connect to the members of an epoch, and give its state to those who lack it."""
        mesh = self._mesh
        assert mesh is not None
        epoch, members = membership.epoch, membership.members
        if len(members) > 1:
            options = SimpleNamespace(
                group_rank=members.index(mesh.rank),
                group_size=len(members),
                timeout=timedelta(seconds=2 * mesh.place.detect_s),
                group_id=f"elastic epoch {epoch}",
                global_ranks_in_group=list(members),
                store=_Board(mesh, epoch),
            )
            self._group = FullwireGroup(options)
            self._group.set_timeout(timedelta(seconds=_SUMS_S))
            tell_small(self._group, [bucket.parameters for bucket in self._sums._buckets])
            mesh.watch(epoch, self._group.abort)
        self._sums.group = self._group
        mesh.post(epoch, f"state {mesh.rank}", str(int(self._has_state)))
        said = mesh.await_posts(epoch, [f"state {member}" for member in members])
        if said is None:
            raise TransportError(f"epoch {epoch} ended at its start")
        sources = [place for place, has in enumerate(said) if has == "1"]
        if not sources and membership.base_step > 0:
            raise SystemExit("fullwire: no worker is left that has the parameters")
        source = sources[0] if sources else 0
        if len(sources) < len(members) and self._group is not None:
            self._share_state(membership, source)
        self._has_state = True
        self.step_number = membership.base_step

    def _share_state(self, membership: Membership, source: int) -> None:
        mesh = self._mesh
        assert mesh is not None
        is_source = membership.members.index(mesh.rank) == source
        packed = b""
        if is_source:
            packed = self._packed()
            mesh.post(membership.epoch, "bytes", str(len(packed)))
        sizes = mesh.await_posts(membership.epoch, ["bytes"])
        if sizes is None:
            raise TransportError(f"epoch {membership.epoch} ended at its start")
        whole = torch.empty(int(sizes[0]), dtype=torch.uint8)
        if is_source:
            whole.copy_(torch.frombuffer(bytearray(packed), dtype=torch.uint8))
        self._group.broadcast([whole], root=source).wait()
        if not is_source and not self._has_state:
            self._unpack(whole)

    def _packed(self) -> bytes:
        kept = io.BytesIO()
        torch.save({name: each.state_dict() for name, each in self._parts().items()}, kept)
        return kept.getvalue()

    def _unpack(self, whole: Any) -> None:
        states = torch.load(io.BytesIO(bytes(whole.numpy())), weights_only=True)
        for name, each in self._parts().items():
            each.load_state_dict(states[name])

    def _parts(self) -> dict[str, Any]:
        parts = {"model": self.model, "optimizer": self._optimizer, "scheduler": self._scheduler}
        return {name: each for name, each in parts.items() if each is not None} | self._extra

    def _leave(self) -> None:
        """This process ends: the others go on without it."""
        assert self._mesh is not None
        self._leave_group()
        self._mesh.close()

    def _leave_group(self) -> None:
        if self._group is not None:
            assert self._mesh is not None
            self._mesh.watch(-1, None)
            self._group.abort()
            self._group = self._sums.group = None

    # Steps.

    def _commit(self, problem: Exception | None) -> None:
        """The sums are complete, or failed: return if the step counts, or raise `Interrupted`."""
        if not self._is_in_step:
            raise UsageError("fullwire.elastic: expected backward() inside `with job.step()`")
        if self._mesh is not None:
            assert self._membership is not None
            epoch = self._membership.epoch
            if problem is not None:
                self._mesh.await_change(epoch)
                raise Interrupted
            if not self._mesh.commit(epoch, self.step_number + 1):
                raise Interrupted
            self._mesh.wait(False)
        elif problem is not None:
            raise problem
        self.step_number += 1
        self.samples = self._share
        self.rank, self.world_size = self.rank_now, self.size_now


class Interrupted(BaseException):
    """The step does not count. No `except Exception` of a script takes it for an error."""


class _Step:
    """The block of one step. An interrupted one ends without a word, and nothing of it stays."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def __enter__(self) -> None:
        job = self._job
        self._before = job.step_number
        self._random = torch.get_rng_state()
        self._buffers = [(buffer, buffer.clone()) for buffer in job.model.buffers()]
        job._is_in_step = True
        job._sums.begin()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        job = self._job
        job._is_in_step = False
        if kind is not None and issubclass(kind, Interrupted):
            torch.set_rng_state(self._random)
            for buffer, before in self._buffers:
                buffer.copy_(before)
            for parameter in job.model.parameters():
                parameter.grad = None
            return True
        if kind is None and job.step_number == self._before:
            raise UsageError("job.step: expected one backward() in the block, got none")
        return False


class _Bucket:
    """Gradients that travel together."""

    def __init__(self, parameters: Sequence[Any]) -> None:
        self.parameters = parameters
        self.flat = torch.zeros(
            sum(parameter.numel() for parameter in parameters), dtype=parameters[0].dtype
        )
        parts = self.flat.split([parameter.numel() for parameter in parameters])
        self.views = [part.view_as(each) for part, each in zip(parts, parameters, strict=True)]
        self.missing = set(range(len(parameters)))
        self.work: Any = None


class _Sums:
    """Adds up the gradients of all ranks, weighted by samples, during the backward pass."""

    def __init__(self, parameters: Sequence[Any], then: Callable[[Exception | None], None]) -> None:
        self.group: Any = None  # None: this rank is alone
        self.weight = 1.0
        self.tries = 0
        self._then = then
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        if not trained or any(parameter.device.type != "cpu" for parameter in trained):
            raise UsageError(
                "fullwire.elastic: expected a model with parameters to train, on the CPU, got "
                + (f"parameters on {trained[0].device}" if trained else "none")
            )
        self._buckets = [_Bucket(part) for part in _divided(trained)]
        self._begun = self._launched = 0
        self._problem: Exception | None = None
        for bucket in self._buckets:
            for place, parameter in enumerate(bucket.parameters):
                hook = _hook(self, bucket, place)
                parameter.register_post_accumulate_grad_hook(hook)

    def begin(self) -> None:
        """Be ready for one backward pass."""
        self.tries += 1
        self._begun = self._launched = 0
        self._problem = None
        for bucket in self._buckets:
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
        if self.group is None:
            return
        gradient = bucket.parameters[place].grad
        if gradient.layout is not torch.strided:
            raise UsageError("fullwire.elastic: expected dense gradients, got sparse ones")
        if self.weight:
            torch.mul(gradient, self.weight, out=bucket.views[place])
        else:
            bucket.views[place].zero_()
        while self._launched < len(self._buckets) and not self._buckets[self._launched].missing:
            self._launch(self._buckets[self._launched])

    def _launch(self, bucket: _Bucket) -> None:
        self._launched += 1
        try:
            bucket.work = self.group.allreduce([bucket.flat])
        except TransportError as error:  # told at the end of the backward pass
            self._problem = error

    def _end(self) -> None:
        if self.group is not None:
            for bucket in self._buckets[self._launched :]:
                for place in bucket.missing:  # this rank did not use these parameters
                    bucket.views[place].zero_()
                self._launch(bucket)
            self.wait(True)
            for bucket in self._buckets:
                try:
                    if bucket.work is not None and self._problem is None:
                        bucket.work.wait()
                except TransportError as error:
                    self._problem = error
                bucket.work = None
                for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                    parameter.grad = view
        self._then(self._problem)

    def wait(self, is_waiting: bool) -> None:
        """Replaced by the mesh's; a job alone waits for nobody."""


class _Board(dist.Store):  # type: ignore[misc]  # torch may be absent when we check
    """The members of an epoch show each other values over the mesh; for a group's rendezvous."""

    host = Folder.host

    def __init__(self, mesh: Mesh, epoch: int) -> None:
        super().__init__()
        self._mesh, self._epoch = mesh, epoch

    def set(self, key: str, value: Any) -> None:
        """Show a value to all members."""
        self._mesh.post(self._epoch, key, value if isinstance(value, str) else value.decode())

    def check(self, keys: Sequence[str]) -> bool:
        """Say whether values have come; raise once the epoch has ended."""
        if not self._mesh.is_current(self._epoch):
            raise TransportError(f"epoch {self._epoch} ended while its ranks met")
        return all(self._mesh.posted(self._epoch, key) is not None for key in keys)

    def get(self, key: str) -> bytes:
        """Return a value that has come."""
        value = self._mesh.posted(self._epoch, key)
        if value is None:
            raise TransportError(f"epoch {self._epoch}: {key!r} has not come")
        return value.encode()


def share_of(count: int, rank: int, size: int) -> slice:
    """Return a rank's part of so many samples; parts differ by one at most."""
    return slice(count * rank // size, count * (rank + 1) // size)


def _collated(dataset: Any, indices: list[int], collate: Callable[[list[Any]], Any] | None) -> Any:
    if isinstance(dataset, torch.Tensor):
        return dataset[indices]
    if collate is None and isinstance(dataset, torch.utils.data.TensorDataset):
        return [tensor[indices] for tensor in dataset.tensors]
    given = [dataset[index] for index in indices]
    return (collate or torch.utils.data.default_collate)(given)


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


def _hook(sums: _Sums, bucket: _Bucket, place: int) -> Callable[[Any], None]:
    def note(_: Any) -> None:
        sums.ready(bucket, place)

    return note
