"""Training that goes on when workers are lost or come: the job of `fullwire.elastic`.

A step is applied only after all ranks hold its sums and have said so (`membership`). Nothing is
ever taken back: where a step is interrupted, its sums are dropped before the optimizer saw them.

    forward, backward     the sums of gradients travel while the backward pass goes on
    end of backward       wait for the sums, then for all others: the step is committed
    optimizer.step()      the script applies it

All else follows from the number of committed steps: the samples of a step, and where a loop over
batches stands. So a rank that joins needs the parameters and that number.

With `sync_every` a round of local steps takes the place of a step (`rounds`). The ranks add up at
its end, and commit it as they commit a step.
"""

from __future__ import annotations

import atexit
import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from fullwire.errors import TransportError, UsageError
from fullwire.resilience import checkpoints
from fullwire.resilience.batches import Loop, collated, order_of, tell_of_batch_statistics
from fullwire.resilience.gradients import Interrupted, Summed, Sums
from fullwire.resilience.joining import (
    AT_ONCE_BYTES,
    BEHIND,
    FULL,
    MOST_SOURCES,
    NONE,
    Follower,
    Joining,
    Room,
    connected,
    place_of,
    send,
)
from fullwire.resilience.membership import Membership
from fullwire.resilience.mesh import Mesh
from fullwire.resilience.pace import Pace, shares
from fullwire.resilience.place import TOO_FEW_STATUS, Changes, tell, tell_fact, tell_samples
from fullwire.resilience.rounds import Outer, Round
from fullwire.resilience.state import State, parts_of
from fullwire.transport.small_gradients import tell_small

_MOST_FAILURES = 20


class Job:
    """An elastic training job, as one of its workers sees it."""

    _completes_step = "backward()"

    def __init__(
        self, model: Any, optimizer: Any, scheduler: Any, mesh: Mesh | None, outer: Outer | None
    ) -> None:
        self.model = model
        self.rank = 0
        self.world_size = 1
        self.step_number = 0  # committed steps
        self.samples: list[int] = []  # this rank's, of the last committed step
        self.optimizer, self.scheduler = optimizer, scheduler
        self._extra: dict[str, Any] = {}
        self._mesh = mesh
        self._outer = outer  # of rounds of local steps
        self._has_state = mesh is None
        self._callbacks: list[Callable[[int, int], None]] = []
        self._membership = Membership(0, (0,), 0) if mesh is None else None
        self._active: list[int] = [0]  # the ranks of this epoch that have samples
        self._changes = Changes()
        self._told: tuple[int, int] | None = None  # the last rank and size that callbacks heard
        self._follower: Follower | None = None  # while this rank applies steps of others
        self._room: Room | None = None  # for a copy of the state
        self._group: Any = None
        self._committed = 0  # rounds; a step is one, unless there are local steps
        self._loop = Loop(steps_of_a_round=1 if outer is None else outer.steps)
        self._round = Round()
        self._kept: tuple[bytes, Any] | None = None  # the state at its beginning
        self._failures = 0  # to connect to the members of an epoch, in a row
        self._saver = None if mesh is None else checkpoints.Saver(mesh, is_alike=outer is None)
        self._pace = None if mesh is None else Pace(mesh)
        self._sums = self._made_sums()
        if outer is not None:
            tell_fact("local_steps", outer.every)
            tell_fact("fragments", outer.fragments)
        if mesh is not None:
            if mesh.place.balances:
                tell_of_batch_statistics(model, mesh.rank)
            atexit.register(self._leave)
            mesh.may_let_in = self._has_room
        self._is_in_step = self._is_computed = self._has_share = False

    def _made_sums(self) -> Any:
        outer, parameters = self._outer, list(self.model.parameters())
        fragments = 0 if outer is None else outer.fragments
        sums = Sums(parameters, self._wait, self._end_backward, fragments=fragments)
        if outer is not None:
            outer.serve(sums.fragments)
        return sums

    def on_change(self, callback: Callable[[int, int], None]) -> None:
        """Call a function with the rank and the world size of each new membership."""
        self._callbacks.append(callback)

    def state(self, extra: dict[str, Any]) -> None:
        """Give more objects with `state_dict` and `load_state_dict` to workers that join."""
        for name, value in extra.items():
            if not (hasattr(value, "state_dict") and hasattr(value, "load_state_dict")):
                raise UsageError(
                    f"job.state: {name}: expected an object with state_dict and load_state_dict, "
                    f"got {type(value).__name__}"
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
        loop = self._loop = self._loop.next(steps_in_epoch * epochs)
        self._count(self._committed)
        order, ordered = list(range(size)), -1
        while self._settle(loop.last_round, batch_size) < loop.last_round:
            self._begin_round()
            for number in loop.steps_of(self._committed):
                epoch, step = divmod(number, steps_in_epoch)
                if shuffle and epoch != ordered:
                    order, ordered = order_of(size, seed, loop.first_step + epoch), epoch
                whole = order[step * batch_size : (step + 1) * batch_size]
                # A rank without samples computes some that others count, with weight 0.
                given = self._share_of(whole, batch_size) or whole[:2]
                tried = self._sums.tries
                tell_samples(len(given) if self._has_share else 0)
                yield collated(dataset, given, collate)
                if self._sums.tries == tried:
                    raise UsageError("job.batches: expected `with job.step()` around each batch")
                if self._round.is_interrupted:
                    break

    def _share_of(self, whole: list[int], batch_size: int) -> list[int]:
        """Return this rank's part of a batch."""
        share = []
        if self._follower is None:
            weights = [1] if self._pace is None else self._pace.weights_of(self._active)
            share = whole[shares(len(whole), weights)[self.rank_now]]
        self._has_share = bool(share)
        self._round.samples += share
        self._round.size += len(whole)
        self._round.is_whole &= len(whole) == batch_size
        self._sums.weight = self._round.weight
        return share

    def _count(self, committed: int) -> None:
        """So many rounds are committed. Scripts count steps."""
        self._committed = committed
        self.step_number = self._loop.steps_before(committed)

    def step(self) -> _Step:
        """Return the block of one step: forward and backward pass, and the optimizer."""
        return _Step(self)

    # Membership.

    @property
    def rank_now(self) -> int:
        """The rank in the next step; `rank` is that of the last committed one."""
        return 0 if self._mesh is None else self._active.index(self._mesh.rank)

    @property
    def size_now(self) -> int:
        """The world size of the next step."""
        return len(self._active)

    def _settle(self, last: int, batch_size: int) -> int:
        """Be a member of the present epoch, with its state; return the committed rounds."""
        mesh = self._mesh
        if self._has_state and self._follower is None and self._committed >= last:
            return self._committed  # it needs no others; one of them may have left already
        if mesh is None or (self._follower is not None and self._follows()):
            return self._committed
        while self._membership is None or not mesh.is_current(self._membership.epoch):
            self._changes.begun()
            self._leave_group()
            membership = mesh.epoch()
            if self._has_state and self._committed < membership.base_step:
                self._has_state = False  # it was left out, and steps were committed meanwhile
            self._raise_if_too_few(membership)
            if self._membership is not None and self._saver is not None:
                gone = set(self._membership.members).difference(membership.members)
                self._saver.clock.failures += len(gone)
            try:
                self._begin(membership)
            except TransportError:
                # The next epoch leaves out who was lost meanwhile. An error of another kind stays.
                self._failures += 1
                if self._failures > _MOST_FAILURES:
                    raise
                mesh.await_change(membership.epoch)
                continue
            self._failures = 0
            if self._follower is not None and self._follows():
                return self._committed
        is_start = self._committed == mesh.place.keeping.first_step
        is_lowest = self._active[0] == mesh.rank
        self._changes.ended(self._active, is_told_here=is_lowest, is_start=is_start)
        if self._told != (self.rank_now, self.size_now):
            self._told = self.rank_now, self.size_now
            for callback in self._callbacks:
                callback(*self._told)
        if is_start:
            self.rank, self.world_size = self.rank_now, self.size_now
        if self._pace is not None:
            self._pace.look(self._membership.epoch, self._committed, self._active, batch_size)
        if mesh.place.keeping.is_on and self._saver is not None:
            epoch = self._membership.epoch
            self._saver.look(epoch, self._committed, self._active, self._copied)
        if not mesh.has_guests():
            self._room = None
        elif self._room is None and not self._has_room():
            self._room = Room(self._room_bytes())
        return self._committed

    def _follows(self) -> bool:
        """Have the state of others; return whether this rank still applies their steps."""
        assert self._follower is not None
        if not self._has_state:
            received = self._follower.await_state()
            if received is not None:
                description, row, committed = received
                self._count(committed)
                self._load(parts_of(description, row))
                self._has_state = True
        if self._has_state and self._follower.has_next():
            return True
        self._follower = self._sums.follower = self._membership = None
        return False

    def _has_room(self) -> bool:
        """Say whether this rank could copy its state at once, so that a new rank may be let in."""
        room = self._room  # the mesh's thread asks
        if room is None:
            return not self._has_state or self._mesh is None or not self._mesh.has_guests()
        return room.is_ready

    def _room_bytes(self) -> int:
        """Return how much of its state this rank would copy for a new rank."""
        assert self._mesh is not None
        sources = self._sources_among(self._active)
        size_bytes = State(self._parts()).size_bytes
        is_source = self._mesh.rank in sources
        return -(-size_bytes // len(sources)) if is_source and self._is_copied(size_bytes) else 0

    def _is_copied(self, size_bytes: int) -> bool:
        """Say whether a state is sent as a copy, while the others train."""
        is_streamed = self._outer is not None and self._outer.fragments > 1
        return size_bytes > AT_ONCE_BYTES and not is_streamed

    def _sources_among(self, ranks: Sequence[int]) -> Sequence[int]:
        """Return the ranks that send a part of the state each. All given ones have it alike."""
        # After local steps, the optimizers of two ranks are not alike.
        return ranks[: MOST_SOURCES if self._outer is None else 1]

    def _raise_if_too_few(self, membership: Membership) -> None:
        assert self._mesh is not None
        place, left = self._mesh.place, len(membership.members)
        if left < place.least and not place.is_replaced:
            written = ""
            if self._has_state and membership.members[0] == self._mesh.rank:
                folder, state = Path(place.keeping.folder).absolute(), State(self._parts())
                try:
                    written = str(
                        checkpoints.write_whole(folder, self._committed, state, place.keeping.keep)
                    )
                except OSError as error:
                    written = f"{error.filename or folder}: {error.strerror}"
            place.folder.set(f"ended {place.worker}", f"{left} {membership.base_step} {written}")
            self._mesh.close()
            raise SystemExit(TOO_FEW_STATUS)

    def _begin(self, membership: Membership) -> None:
        """Connect to the members of an epoch, and give its state to those who lack it."""
        mesh = self._mesh
        assert mesh is not None
        epoch, members = membership.epoch, membership.members
        first = mesh.place.keeping
        if first.source and not self._has_state and membership.base_step == first.first_step:
            description, row, _ = checkpoints.read(Path(first.source))
            self._load(parts_of(description, torch.frombuffer(row, dtype=torch.uint8)))
            self._has_state = True
        self._group, said = self._enter(membership, FULL if self._has_state else NONE)
        self._sums.group = self._group
        full = [member for member, has in zip(members, said, strict=True) if has == FULL]
        joiners = [member for member, has in zip(members, said, strict=True) if has == NONE]
        if not full and membership.base_step > 0:
            if BEHIND in said:  # they go on once they have applied all steps that they hold
                raise TransportError(f"epoch {epoch}: no rank has the parameters yet")
            raise SystemExit("fullwire: no worker is left that has the parameters")
        self._active = full
        if joiners:
            place = place_of(members.index(mesh.rank), said)
            if self._share_state(membership, full, joiners, place):
                self._active = sorted([*full, *joiners])
        self._membership = membership
        if mesh.rank in self._active:
            if not self._has_state or membership.epoch == 0:
                mesh.place.folder.set(f"holds {mesh.rank}", "")
            self._has_state = True
            self._count(membership.base_step)

    def _enter(self, membership: Membership, has: str) -> tuple[Any, list[str]]:
        """Connect to the members of an epoch. Return the group, and the state that each has."""
        mesh = self._mesh
        assert mesh is not None
        epoch, members, group = membership.epoch, membership.members, None
        if len(members) > 1:
            group = connected(mesh, epoch, members)
            tell_small(group, [bucket.parameters for bucket in self._sums.buckets])
            mesh.watch(epoch, group.abort)
        pace = self._pace
        assert pace is not None
        mesh.post(epoch, f"state {mesh.rank}", f"{has} {pace.said}")
        said = mesh.await_posts(epoch, [f"state {member}" for member in members])
        if said is None:
            if group is not None:
                group.abort()
            raise TransportError(f"epoch {epoch} ended at its start")
        states, weights = zip(*(each.split(" ", 1) for each in said), strict=True)
        full = [each for state, each in zip(states, weights, strict=True) if state == FULL]
        pace.enters(members, full[:1], membership.base_step)
        return group, list(states)

    def _share_state(
        self, membership: Membership, full: list[int], joiners: list[int], place: tuple[int, int]
    ) -> bool:
        """Give the state to ranks that lack it; return whether they have it when this returns."""
        mesh, epoch, source = self._mesh, membership.epoch, (full or joiners)[0]
        assert mesh is not None
        state = State(self._parts()) if mesh.rank in full or mesh.rank == source else None
        if state is not None:
            sizes = f"{state.size_bytes} {len(state.description)} {state.form}"
            mesh.post(epoch, f"form {mesh.rank}", sizes)
        posts = mesh.await_posts(epoch, [f"form {rank}" for rank in full or [source]])
        if posts is None:
            raise TransportError(f"epoch {epoch} ended at its start")
        size_bytes, description_bytes, _ = posts[0].split()
        if full and self._is_copied(int(size_bytes)):
            alike = [rank for rank, form in zip(full, posts, strict=True) if form == posts[0]]
            sources = tuple(self._sources_among(alike))
            joining = Joining(epoch, membership.base_step, sources, tuple(joiners))
            if mesh.rank in sources and state is not None:
                send(mesh, joining, state, self._room)
                self._room = None  # used; another new rank waits for another one
            elif mesh.rank in joiners:
                self._follower = Follower(mesh, joining, self._sums.forms, self._enter)
                self._follower.start(self._group, place)
                self._sums.follower, self._sums.group, self._group = self._follower, None, None
            return False
        if self._group is None:
            return True
        row = torch.zeros(int(size_bytes), dtype=torch.uint8)
        description = torch.zeros(int(description_bytes), dtype=torch.uint8)
        if mesh.rank == source and state is not None:
            row = state.piece(0, state.size_bytes)
            description = torch.frombuffer(bytearray(state.description), dtype=torch.uint8)
        root = membership.members.index(source)
        for each in (description, row):
            if len(each):
                self._group.broadcast([each], root=root).wait()
        if mesh.rank != source and mesh.rank in joiners:
            self._load(parts_of(bytes(description.numpy()), row), has_random=bool(full))
        return True

    def _load(self, parts: dict[str, Any], *, has_random: bool = True) -> None:
        if has_random:
            torch.set_rng_state(parts["random"].clone())  # torch reads the beginning of a row
        for name, value in self._objects().items():
            if name not in parts:
                raise UsageError(
                    f"fullwire.elastic: expected a state with {name}, as this script has, got one "
                    f"with {', '.join(parts)}"
                )
            value.load_state_dict(parts[name])

    def _objects(self) -> dict[str, Any]:
        parts = {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}
        parts["outer optimizer"] = self._outer
        return {name: value for name, value in parts.items() if value is not None} | self._extra

    def _copied(self, index: int, count: int) -> checkpoints.Write:
        """Copy this rank's part of a checkpoint; return what writes it."""
        return checkpoints.row_writer(State(self._parts()), index, count)

    def _parts(self) -> dict[str, Any]:
        """Return the state of the training: of its objects, and of torch's random numbers."""
        parts = {name: value.state_dict() for name, value in self._objects().items()}
        return parts | {"random": torch.get_rng_state()}

    def _leave(self) -> None:
        """This process ends: the others go on without it."""
        assert self._mesh is not None
        if self._active[0] == self._mesh.rank and self._has_state:
            tell("end", self._active, time.monotonic_ns(), time.monotonic_ns())
        self._leave_group()
        self._mesh.close()

    def _leave_group(self) -> None:
        if self._group is not None:
            assert self._mesh is not None
            self._mesh.watch(-1, None)
            self._group.abort()
            self._group = self._sums.group = None

    # Steps.

    def _begin_round(self) -> None:
        self._round = Round(len(self._loop.steps_of(self._committed)))
        if self._outer is not None:
            self._outer.begin()
            self._sums.begin_sums()
            if self._mesh is not None:
                state, row = State(self._parts()), None
                if self._kept is not None and len(self._kept[1]) == state.size_bytes:
                    row = self._kept[1]  # new memory takes as long again as the copy
                self._kept = state.description, state.piece(0, state.size_bytes, row)
            self._begin_sums_if_streamed()

    def _due(self, number: int) -> Sequence[Any]:
        """Return the buckets of the sums of a round."""
        return self._sums.buckets if self._outer is None else self._outer.due(number, self._loop)

    def _begin_sums_if_streamed(self) -> None:
        """Before the last step of a round: the sums of its fragment travel while it is computed."""
        outer, round_, number = self._outer, self._round, self._committed
        assert outer is not None
        is_last_step = round_.steps_left == 1 and number + 1 < self._loop.last_round
        if outer.fragments > 1 and is_last_step:
            weights = [1] if self._pace is None else self._pace.weights_of(self._active)
            outer.take_changes(self._due(number), weights[self.rank_now] / sum(weights))
            self._sums.launch(self._due(number))
            round_.has_begun_sums = True

    def _wait(self) -> None:
        assert self._mesh is not None
        if self._pace is not None and self._round.samples and self._round.is_whole:
            self._pace.waits(len(self._round.samples))
        self._mesh.wait(True)

    def _end_backward(self, problem: Exception | None, summed: Summed | None) -> None:
        """A backward pass is over: with local steps, the script takes this rank's own."""
        if not self._is_in_step:
            raise UsageError("fullwire.elastic: expected backward() inside `with job.step()`")
        self._is_computed = True
        if self._outer is None:
            self._commit(problem, summed)
        elif not self._has_share:  # others count these samples
            self._drop_gradients()

    def _end_local_step(self) -> None:
        """The script has taken a step of this rank's own: add up if the round is over."""
        assert self._outer is not None
        self._round.steps_left -= 1
        if self._is_lost():
            self._go_back()
        elif self._round.steps_left:
            self._begin_sums_if_streamed()
        else:
            due, keeps_later = self._due(self._committed), self._round.has_begun_sums
            if not keeps_later:
                self._outer.take_changes(due, self._round.weight)
            try:
                self._commit(*self._sums.complete(due, began_before=keeps_later))
            except Interrupted:
                self._go_back()
            else:
                self._outer.apply(due, keeps_later=keeps_later)

    def _is_lost(self) -> bool:
        """Say whether a worker was lost since the round began, so that it cannot be completed."""
        if self._mesh is None or self._membership is None or self._follower is not None:
            return False
        return not self._mesh.is_current(self._membership.epoch)

    def _go_back(self) -> None:
        """Take the state of the round's beginning: the round does not count."""
        assert self._kept is not None
        self._round.is_interrupted = True
        self._load(parts_of(*self._kept))
        self._kept = None  # the optimizer may now work on its tensors
        self._drop_gradients()

    def _is_interruption(self, error: BaseException) -> bool:
        """Say whether an error ends a step that does not count, in place of the script."""
        return isinstance(error, Interrupted)

    def _drop_gradients(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = None

    def _commit(self, problem: Exception | None, summed: Summed | None) -> None:
        """The sums are complete, or failed: return if the round counts, or raise `Interrupted`."""
        if summed is not None:  # others have committed it before
            self._count(summed.step)
            self.samples = []
            self.rank, self.world_size = summed.rank, summed.size
            return
        if self._mesh is not None:
            assert self._membership is not None
            epoch = self._membership.epoch
            if problem is not None:
                self._mesh.await_change(epoch)
                raise Interrupted
            if not self._mesh.commit(epoch, self._committed + 1):
                raise Interrupted
            self._mesh.wait(False)
        elif problem is not None:
            raise problem
        self._changes.committed()
        self._count(self._committed + 1)
        self.samples = self._round.samples
        self.rank, self.world_size = self.rank_now, self.size_now
        if self._pace is not None:
            self._pace.goes_on()


class _Step:
    """The block of one step. An interrupted one ends silently and leaves the model as it was."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def __enter__(self) -> None:
        job = self._job
        self._is_following = job._follower is not None
        self._random = torch.get_rng_state()
        self._buffers = [(buffer, buffer.clone()) for buffer in job.model.buffers()]
        job._is_in_step, job._is_computed = True, False
        job._sums.begin()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        job = self._job
        job._is_in_step = False
        if error is not None and job._is_interruption(error):
            torch.set_rng_state(self._random)
            for buffer, before in self._buffers:
                buffer.copy_(before)
            job._drop_gradients()
            return True
        if self._is_following:  # its batch was not one of this rank's
            for buffer, before in self._buffers:
                buffer.copy_(before)
        if kind is None and not job._is_computed:
            raise UsageError(f"job.step: expected one {job._completes_step} in the block, got none")
        if kind is None and job._outer is not None:
            job._end_local_step()
        return False
