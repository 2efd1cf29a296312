"""An elastic job whose model is sharded with FSDP2: `fullwire.elastic(build)`.

Each membership has its own process group, and the script's function builds the model on it anew.
The ranks then put the state together from the shards and copies that they hold (`shards`). They
keep these until all have their new ones, because another rank may be lost meanwhile.

    forward, backward     collectives of FSDP2; when one fails, the step ends and does not count
    optimizer.step()      before it, gradients go to the next rank; then the step is committed
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fullwire.errors import TransportError, UsageError
from fullwire.resilience import checkpoints, sharded_checkpoints
from fullwire.resilience.gradients import Interrupted
from fullwire.resilience.job import Job
from fullwire.resilience.joining import SUMS_S, Board
from fullwire.resilience.membership import Membership
from fullwire.resilience.mesh import Mesh
from fullwire.resilience.place import TOO_FEW_STATUS, Place
from fullwire.resilience.shards import Layout, Piece, Shards, checksum, holders, move
from fullwire.resilience.state import State, parts_of

_CLOSES_S = 5.0  # the longest wait for a thread whose group has ended


def check(build: Any, place: Place | None, sync_every: int) -> None:
    """Refuse what a sharded job does not have, before workers meet."""
    if isinstance(build, torch.nn.Module) or not callable(build):
        raise UsageError(
            "fullwire.elastic: expected a model and its optimizer, or one function that builds "
            f"both on a mesh, got {type(build).__name__} alone"
        )
    if sync_every > 1:
        raise UsageError(
            "fullwire.elastic: expected sync_every=1 with a sharded model, because a worker has "
            f"only its shard for steps of its own, got {sync_every}"
        )
    if not hasattr(dist, "reduce_scatter_single"):
        raise UsageError(
            "fullwire.elastic: expected torch 2.13 or later for a sharded model, got "
            f"{torch.__version__}"
        )
    if dist.is_initialized():
        raise UsageError(
            "fullwire.elastic: expected no process group yet, because each change of the workers "
            "makes one, got init_process_group before"
        )
    if place is not None and (place.balances or place.evicts or place.keeping.is_whole):
        raise UsageError(
            "run: expected a whole model with --balance, --evict-slow and --whole, got a sharded "
            "one"
        )


class ShardedJob(Job):
    """An elastic training job of a sharded model, as one of its workers sees it."""

    _completes_step = "job.optimizer.step()"

    def __init__(self, build: Callable[[Any], Any], mesh: Mesh | None) -> None:
        super().__init__(None, None, None, mesh, None)
        self._build = build
        self._held: list[Shards] = []  # two, until all ranks have their new shards
        self._is_verified = False  # that copies are equal after a step
        self._writers: Any = None  # the group of those who write a checkpoint
        self._has_state = False
        if mesh is not None:
            self._saver = checkpoints.Saver(mesh, is_alike=True, is_sharded=True)

    def _made_sums(self) -> Any:
        """Count the blocks of steps; FSDP2 adds up."""
        sums = SimpleNamespace(weight=1.0, tries=0, follower=None, group=None)

        def begin() -> None:
            sums.tries += 1

        sums.begin = begin
        return sums

    # A membership.

    def _settle(self, last: int, batch_size: int) -> int:
        if self._mesh is None and not self._has_state:
            self._connect(Membership(0, (0,), 0))
            self._take(self._built(Layout(0, 1), 0))
            self._has_state = True
        return super()._settle(last, batch_size)

    def _raise_if_too_few(self, membership: Membership) -> None:
        """Put the shards together first: `_begin` ends the job."""

    def _has_room(self) -> bool:
        return True  # nothing is copied first: all ranks move shards, and wait for that

    def _begin(self, membership: Membership) -> None:
        """Connect to the members of an epoch; build on their mesh, and take this rank's shards."""
        mesh = self._mesh
        assert mesh is not None
        epoch, members = membership.epoch, membership.members
        if not self._has_state:
            self._held = []
        self._connect(membership)
        held = self._await_held(epoch, members)
        layouts = {layout for each in held for layout in each}
        of_layout = {layout: [each.get(layout, []) for each in held] for layout in layouts}
        # Shards of two epochs are there if a rank was lost while they moved.
        source = max(
            (each for each in layouts if holders(each.size, of_layout[each]) is not None),
            default=None,
        )
        if source is None and membership.base_step > mesh.place.keeping.first_step:
            self._end_without_shards(membership, is_of_shards=bool(layouts))
        self._held = [each for each in self._held if each.layout == source]
        try:
            new = self._renewed(membership, source, [] if source is None else of_layout[source])
        except Exception as error:
            if self._is_broken():
                raise TransportError(f"epoch {epoch} ended at its start: {error}") from error
            raise
        self._held.append(new)
        mesh.post(epoch, f"sharded {mesh.rank}", "")
        if mesh.await_posts(epoch, [f"sharded {member}" for member in members]) is None:
            raise TransportError(f"epoch {epoch} ended at its start")
        self._take(new)
        mesh.place.folder.set(f"holds {mesh.rank}", "")
        self._membership, self._active, self._has_state = membership, list(members), True
        self._count(membership.base_step)
        if len(members) < mesh.place.least and not mesh.place.is_replaced:
            self._end_with_checkpoint(membership)

    def _connect(self, membership: Membership) -> None:
        """Make the process group of an epoch, which torch knows as the one of all ranks."""
        mesh, members = self._mesh, membership.members
        hook = sys.excepthook  # torch adds another one for each group
        # Kept, because torch refers to a store's C++ part only.
        self._store = dist.HashStore() if mesh is None else Board(mesh, membership.epoch, "")
        rank = 0 if mesh is None else members.index(mesh.rank)
        wait_s = 2.0 if mesh is None else 2 * mesh.place.detect_s
        dist.init_process_group(
            "fullwire",
            store=self._store,
            rank=rank,
            world_size=len(members),
            timeout=timedelta(seconds=wait_s),
        )
        sys.excepthook = hook
        groups = [dist.group.WORLD]
        self._group = groups[0]
        if mesh is not None:
            if mesh.place.keeping.is_on and len(members) > 1:
                # Those who write meet apart, so that they and the training do not wait for another.
                groups.append(dist.new_group(timeout=timedelta(seconds=wait_s)))

            def abort() -> None:
                for group in groups:
                    group.abort()

            mesh.watch(membership.epoch, abort)
        self._writers = groups[-1]
        for group in groups:
            group.set_timeout(timedelta(seconds=SUMS_S))

    def _leave_group(self) -> None:
        if self._group is not None:
            if self._mesh is not None:
                self._mesh.watch(-1, None)
            self._group = None
        if dist.is_initialized():  # also one of which a part is missing
            for group in {self._writers, dist.group.WORLD} - {None}:
                group.abort()
            dist.destroy_process_group()
        self._writers = None

    def _leave(self) -> None:
        super()._leave()
        if self._saver is not None:
            self._saver.await_writing(_CLOSES_S)  # torch would not outlive Python in a thread

    def _await_held(self, epoch: int, members: Sequence[int]) -> list[dict[Layout, list[int]]]:
        """Hear which shards each rank holds, in which layouts."""
        mesh = self._mesh
        assert mesh is not None
        own = [(each.layout, list(each.pieces())) for each in self._held]
        said = msgspec.json.encode((self._is_verified, own)).decode()
        mesh.post(epoch, f"shards {mesh.rank}", said)
        posts = mesh.await_posts(epoch, [f"shards {member}" for member in members])
        if posts is None:
            raise TransportError(f"epoch {epoch} ended at its start")
        kind = tuple[bool, list[tuple[Layout, list[int]]]]
        are_verified, held = zip(
            *(msgspec.json.decode(post, type=kind) for post in posts), strict=True
        )
        self._is_verified = any(are_verified)  # so all look after the next step, or none
        return [dict(each) for each in held]

    def _renewed(
        self, membership: Membership, source: Layout | None, held: Sequence[Sequence[int]]
    ) -> Shards:
        """Build the model, and take its state: from shards, a checkpoint, or as it was built."""
        mesh, members = self._mesh, membership.members
        assert mesh is not None
        size, rank = len(members), members.index(mesh.rank)
        before = self._held[0] if self._held else None
        parts = None if before is None else self._parts_of(before)
        if source is not None and any(not indices for indices in held):
            parts = self._shared(parts, root=next(r for r in range(size) if held[r]))
        layout = Layout(membership.epoch, size)
        new = self._built(layout, rank)
        mine = [[index, (index - 1) % size] if size > 1 else [index] for index in range(size)]
        keeping = mesh.place.keeping
        if source is not None and parts is not None:
            forms = sharded_checkpoints.forms_of(parts["optimizer"])
            pieces = {} if before is None else before.pieces()
            moved = move(forms, pieces, held, source.size, mine, self._group, rank)
            self._take_parts(new, parts, is_new=before is None)
            new.take_own(moved[rank], parts["optimizer"])
        else:
            if keeping.source:
                parts = sharded_checkpoints.read(Path(keeping.source), new)
                self._take_parts(new, parts, is_new=True)
            own = [[index] for index in range(size)]
            copies = [each[1:] for each in mine]
            moved = move(new.forms(), new.pieces(), own, size, copies, self._group, rank)
        if new.copied is not None:
            new.take_copy(moved[new.copied])
        return new

    def _built(self, layout: Layout, index: int) -> Shards:
        """Call the script's function. All ranks draw the same random numbers in it."""
        own = torch.get_rng_state()
        numbers = own.clone()
        if layout.size > 1:
            self._group.broadcast([numbers], root=0).wait()
        # The name keeps torch from taking this mesh for an earlier one with as many ranks.
        mesh = DeviceMesh("cpu", range(layout.size), mesh_dim_names=(f"epoch {layout.epoch}",))
        torch.set_rng_state(numbers)
        try:
            shards = Shards(self._build(mesh), layout, index, mesh)
        finally:
            torch.set_rng_state(own)
        shards.attach(self._sums, (lambda _: None) if self._mesh is None else self._mesh.wait)
        shards.optimizer.register_step_pre_hook(partial(self._before_step, shards))
        shards.optimizer.register_step_post_hook(lambda *_: self._after_step(shards))
        return shards

    def _take(self, shards: Shards) -> None:
        for each in self._held:
            if each is not shards:
                each.drop()
        self._held = [shards]
        self.model, self.optimizer, self.scheduler = (
            shards.model,
            shards.optimizer,
            shards.scheduler,
        )

    def _shared(self, parts: dict[str, Any] | None, root: int) -> dict[str, Any]:
        """Give the parts that each rank has whole to ranks that hold nothing."""
        row, description = torch.empty(0, dtype=torch.uint8), torch.empty(0, dtype=torch.uint8)
        if dist.get_rank() == root and parts is not None:
            state = State(parts)
            row = state.piece(0, state.size_bytes)
            description = torch.frombuffer(bytearray(state.description), dtype=torch.uint8)
        sizes = torch.tensor([len(description), len(row)])
        self._group.broadcast([sizes], root=root).wait()
        rows = [
            row if len(row) == size else torch.empty(size, dtype=torch.uint8)
            for row, size in zip((description, row), sizes.tolist(), strict=True)
        ]
        for each in rows:
            if len(each):
                self._group.broadcast([each], root=root).wait()
        return parts if parts is not None else parts_of(bytes(rows[0].numpy()), rows[1])

    def _end_without_shards(self, membership: Membership, *, is_of_shards: bool) -> None:
        """The workers that are left cannot go on; one tells it, once all have found the same."""
        mesh, members = self._mesh, membership.members
        assert mesh is not None
        mesh.post(membership.epoch, f"ends {mesh.rank}", "")
        mesh.await_posts(membership.epoch, [f"ends {member}" for member in members])
        if mesh.rank == members[0]:
            lost = "all workers with the parameters were lost"
            if is_of_shards:
                lost = "a worker and the one with the copy of its shard were lost at once"
            keeping, then = mesh.place.keeping, ""
            if keeping.is_on and not mesh.place.is_replaced:
                then = f": --checkpoint {keeping.folder} goes on from the last checkpoint"
            sys.stderr.write(f"fullwire: {lost}{then}\n")
        raise SystemExit(1)

    def _end_with_checkpoint(self, membership: Membership) -> None:
        """Too few workers are left: write what they have, and end."""
        mesh, step = self._mesh, membership.base_step
        assert mesh is not None
        assert self._saver is not None
        write = self._copied(self.rank_now, self.size_now)
        written = self._saver.write_last(membership.epoch, step, self._active, write)
        place = mesh.place
        place.folder.set(f"ended {place.worker}", f"{self.size_now} {step} {written}")
        mesh.close()
        raise SystemExit(TOO_FEW_STATUS)

    # The parts of the state that each rank has whole.

    def _copied(self, index: int, count: int) -> checkpoints.Write:
        assert self._mesh is not None
        shards = self._held[-1]
        parts, is_current = (
            self._parts_of(shards),
            partial(self._mesh.is_current, shards.layout.epoch),
        )
        return sharded_checkpoints.writer(shards, parts, self._writers, index, is_current)

    def _parts_of(self, shards: Shards) -> dict[str, Any]:
        parts = {
            "optimizer": shards.options(),
            "buffers": shards.buffers,
            "random": torch.get_rng_state(),
            "extra": {name: value.state_dict() for name, value in self._extra.items()},
        }
        if shards.scheduler is not None:
            parts["scheduler"] = shards.scheduler.state_dict()
        return parts

    def _take_parts(self, shards: Shards, parts: dict[str, Any], *, is_new: bool) -> None:
        """Take the parts that each rank has whole. A new worker has no `job.state` yet."""
        shards.take_options(parts["optimizer"])
        for name, buffer in shards.buffers.items():
            buffer.copy_(parts["buffers"][name])
        if shards.scheduler is not None:
            shards.scheduler.load_state_dict(parts["scheduler"])
        if is_new:
            if missing := sorted(self._extra.keys() - parts["extra"].keys()):
                raise UsageError(
                    f"fullwire.elastic: expected a state with {', '.join(missing)}, as this script "
                    f"has, got one with {', '.join(parts['extra']) or 'nothing more'}"
                )
            for name, value in self._extra.items():
                value.load_state_dict(parts["extra"][name])
            torch.set_rng_state(parts["random"].clone())  # torch reads the beginning of a row

    # Steps.

    def _before_step(self, shards: Shards, _: Any, args: Any, options: Any) -> None:
        """The gradients are final: give the copy's rank its part, and commit the step."""
        if shards.optimizer is not self.optimizer:
            raise UsageError(
                "fullwire.elastic: expected job.optimizer and job.model, got those of before the "
                "workers changed: read them in each step"
            )
        if not self._is_in_step or self._is_computed:
            raise UsageError(
                "fullwire.elastic: expected one job.optimizer.step() inside `with job.step()`, got "
                + ("a second one" if self._is_in_step else "one outside")
            )
        if any(each is not None for each in (*args[1:], *options.values())):
            raise UsageError("fullwire.elastic: expected optimizer.step() without a closure")
        problem: Exception | None = None
        if self._mesh is not None:
            self._mesh.wait(True)
        try:
            shards.exchange(self._group)
        except TransportError as error:
            problem = error
        self._commit(problem, None)
        self._is_computed = True

    def _after_step(self, shards: Shards) -> None:
        """The script's optimizer has applied the step to this rank's shard."""
        shards.step_copy()
        if self._mesh is not None and shards.copied is not None and not self._is_verified:
            self._verify(shards.layout, shards.index, shards.own(), shards.pieces()[shards.copied])

    def _verify(self, layout: Layout, index: int, own: Piece, copied: Piece) -> None:
        """Compare shards with their copies, once: an optimizer may need whole tensors."""
        assert self._mesh is not None
        said = f"{checksum(own)} {checksum(copied)}"
        self._mesh.post(layout.epoch, f"checksums {index}", said)
        names = [f"checksums {each}" for each in range(layout.size)]
        posts = self._mesh.await_posts(layout.epoch, names)
        if posts is None:  # a rank was lost: compare after another step
            return
        self._is_verified = True
        shards, copies = zip(*(post.split() for post in posts), strict=True)
        if shards != (*copies[1:], copies[0]):
            # Once all know it: else one ends, and another takes this for a loss and goes on.
            self._mesh.post(layout.epoch, f"unlike {index}", "")
            self._mesh.await_posts(layout.epoch, [f"unlike {r}" for r in range(layout.size)])
            raise UsageError(
                "fullwire.elastic: expected an optimizer that works on each number by itself, as "
                f"Adam does, so that a copy stays equal to its shard; with "
                f"{type(self.optimizer).__name__} they differ"
            )

    def _is_interruption(self, error: BaseException) -> bool:
        if isinstance(error, Interrupted):
            return True
        if isinstance(error, UsageError):  # it is the script's, though another worker ended by it
            return False
        if self._membership is None or not isinstance(error, Exception) or not self._is_broken():
            return False
        assert self._mesh is not None
        self._mesh.await_change(self._membership.epoch)
        return True

    def _is_broken(self) -> bool:
        """Say whether the group of this membership has failed, which fails all that needs it."""
        return self._mesh is not None and (self._group is None or bool(self._group.problem))
