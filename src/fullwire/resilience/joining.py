"""A rank joins while the others train: it gets their state, then applies the steps since.

1. An epoch begins with the new rank in it. The others copy their parts of the state, and train on.
2. They send those copies in threads, over a group of their own.
3. Meanwhile the new rank takes part in all sums, with zeros. It keeps each sum.
4. With the state, its script runs its loop on these sums, until no step is left. Then all ranks
   begin another epoch, in which the new rank has samples.

So the others stop for two changes of the membership and one copy, for a state of any size.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from fullwire.errors import TransportError
from fullwire.resilience.gradients import Summed
from fullwire.resilience.membership import Membership
from fullwire.resilience.mesh import Mesh
from fullwire.resilience.pace import shares
from fullwire.resilience.state import State
from fullwire.transport.group import FullwireGroup

AT_ONCE_BYTES = 4 * 2**20  # a smaller state is sent while all wait: 34 ms at 1 Gbps
FULL, BEHIND, NONE = "full", "behind", "none"  # what a rank holds of an epoch's first step
SUMS_S = 86400.0  # the membership, not a clock, ends a wait for others
_FEW_STEPS = 2  # others wait while so many are applied
MOST_SOURCES = 4


class Board(dist.Store):  # type: ignore[misc]  # torch may be absent when we check
    """The members of an epoch show each other values over the mesh; for a group's rendezvous."""

    def __init__(self, mesh: Mesh, epoch: int, purpose: str) -> None:
        super().__init__()
        self.host = mesh.place.folder.host
        self._mesh, self._epoch, self._purpose = mesh, epoch, purpose

    def set(self, key: str, value: Any) -> None:
        """Show a value to all members."""
        text = value if isinstance(value, str) else value.decode()
        self._mesh.post(self._epoch, self._purpose + key, text)

    def check(self, keys: Sequence[str]) -> bool:
        """Say whether values have come; raise once the epoch has ended."""
        if not self._mesh.is_current(self._epoch):
            raise TransportError(f"epoch {self._epoch} ended while its ranks met")
        return all(self._mesh.posted(self._epoch, self._purpose + key) is not None for key in keys)

    def get(self, key: str) -> bytes:
        """Return a value that has come."""
        value = self._mesh.posted(self._epoch, self._purpose + key)
        if value is None:
            raise TransportError(f"epoch {self._epoch}: {key!r} has not come")
        return value.encode()


def connected(mesh: Mesh, epoch: int, ranks: Sequence[int], purpose: str = "") -> FullwireGroup:
    """Connect to these ranks, which do the same."""
    options = SimpleNamespace(
        group_rank=ranks.index(mesh.rank),
        group_size=len(ranks),
        timeout=timedelta(seconds=2 * mesh.place.detect_s),
        group_id=f"elastic epoch {epoch}{purpose}",
        global_ranks_in_group=list(ranks),
        store=Board(mesh, epoch, purpose),
    )
    group = FullwireGroup(options)
    group.set_timeout(timedelta(seconds=SUMS_S))
    return group


class Room:
    """Memory for a copy, which a thread gets from the kernel before others wait for the copy.

    The kernel takes some 0.15 s to hand out 250 MB. To fill them takes 0.05 s.
    """

    def __init__(self, size_bytes: int) -> None:
        self._row = torch.empty(size_bytes, dtype=torch.uint8)
        self._getter = threading.Thread(target=self._row.zero_, name="fullwire-room", daemon=True)
        self._getter.start()

    @property
    def is_ready(self) -> bool:
        """Say whether `zeros` would return at once."""
        return not self._getter.is_alive()

    def zeros(self, size_bytes: int) -> Any:
        """Return so many zero bytes, once; None if the room is too small."""
        self._getter.join()
        row, self._row = self._row, self._row[:0]
        return row[:size_bytes] if size_bytes <= len(row) else None


class Joining(NamedTuple):
    """The senders and receivers of a state, in one epoch."""

    epoch: int
    base_step: int
    sources: tuple[int, ...]
    joiners: tuple[int, ...]

    def group(self, mesh: Mesh) -> FullwireGroup:
        """Connect the ranks that send with those that receive."""
        return connected(mesh, self.epoch, [*self.sources, *self.joiners], " state")


def send(mesh: Mesh, joining: Joining, state: State, room: Room | None) -> None:
    """Copy this rank's part of the state now, and send it in a thread."""
    index, count = joining.sources.index(mesh.rank), len(joining.sources)
    share = shares(state.size_bytes, [1] * count)[index]
    zeros = None if room is None else room.zeros(share.stop - share.start)
    part = state.piece(share.start, share.stop, zeros)
    first = torch.frombuffer(bytearray(state.description), dtype=torch.uint8)
    sizes = torch.tensor([len(first), state.size_bytes])

    def work() -> None:
        group = None
        try:
            group = joining.group(mesh)
            places = range(count, count + len(joining.joiners))
            sent = [sizes, first, part] if index == 0 else [part]
            for work in [group.send([part], place) for part in sent for place in places]:
                work.wait()
            group.barrier().wait()
        except TransportError:
            pass  # a rank was lost: the one that joins asks again
        finally:
            if group is not None:
                group.abort()

    threading.Thread(target=work, name="fullwire-state", daemon=True).start()


def place_of(index: int, posts: Sequence[str]) -> tuple[int, int]:
    """Return a member's rank, and how many compute; those that compute have the low ranks."""
    full = posts.count(FULL)
    before = sum(has == FULL for has in posts[:index])
    return (before if posts[index] == FULL else full + index - before), full


class Follower:
    """Takes part in the sums of others, and keeps them until its script has applied them."""

    def __init__(
        self,
        mesh: Mesh,
        joining: Joining,
        forms: Sequence[tuple[int, Any]],
        enter: Callable[[Membership, str], tuple[Any, list[str]]],
    ) -> None:
        """`forms`: the numbers and types of the sums. `enter`: begins an epoch."""
        self.received: tuple[bytes, Any, int] | None = None  # description, row, its step
        self._mesh, self._forms, self._enter = mesh, forms, enter
        self._log: deque[Summed] = deque()
        self._applied = self._taken = joining.base_step
        self._changed = threading.Condition()
        self._is_over = self._has_failed = False
        self._failure: BaseException | None = None
        self._joining = joining

    def start(self, group: Any, place: tuple[int, int]) -> None:
        """Begin to receive and to follow, among others that compute."""
        threading.Thread(target=self._receive, name="fullwire-state", daemon=True).start()
        follow = threading.Thread(
            target=self._run, args=(group, place), name="fullwire-follow", daemon=True
        )
        follow.start()

    # For the script's thread.

    def await_state(self) -> tuple[bytes, Any, int] | None:
        """Return the state, once it has come. None: the sender is lost."""
        with self._changed:
            while self.received is None and not self._is_over:
                self._changed.wait(1.0)
            self._raise_failure()
            return self.received

    def has_next(self) -> bool:
        """Wait for the sums of the next step; return False if this rank follows no more.

        It has then applied all steps before its epoch, or has to begin anew.
        """
        with self._changed:
            while not self._log and not self._is_over:
                self._changed.wait(1.0)
            self._raise_failure()
            return bool(self._log)

    def next(self) -> Summed | None:
        """Return the sums of the next step, once they have come, or None."""
        if not self.has_next():
            return None
        with self._changed:
            summed = self._log.popleft()
            self._applied = summed.step
            return summed

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    # The threads.

    def _receive(self) -> None:
        group, received = None, None
        joining = self._joining
        try:
            group = joining.group(self._mesh)
            sizes = torch.zeros(2, dtype=torch.int64)
            group.recv([sizes], 0).wait()
            description = torch.zeros(int(sizes[0]), dtype=torch.uint8)
            row = torch.zeros(int(sizes[1]), dtype=torch.uint8)
            parts = [row[share] for share in shares(len(row), [1] * len(joining.sources))]
            works = [group.recv([description], 0)]
            works += [group.recv([part], place) for place, part in enumerate(parts)]
            for work in works:
                work.wait()
            received = bytes(description.numpy()), row, joining.base_step
            group.barrier().wait()
        except TransportError:
            pass  # complete or not, as `received` says
        finally:
            if group is not None:
                group.abort()
            with self._changed:
                self.received = received
                self._has_failed = received is None
                self._changed.notify_all()

    def _run(self, group: Any, place: tuple[int, int]) -> None:
        mesh, epoch = self._mesh, self._joining.epoch
        is_alone = False  # no rank is left that has the parameters
        try:
            while True:
                self._follow(epoch, group, place, is_alone)
                if group is not None:  # None: this rank was the only member
                    group.abort()
                while True:
                    membership = mesh.epoch()
                    if membership.base_step > self._taken or self._may_end(
                        membership.base_step, is_alone
                    ):
                        return
                    try:
                        group, posts = self._enter(membership, BEHIND)
                    except TransportError:
                        mesh.await_change(membership.epoch)
                        continue
                    break
                epoch, place = (
                    membership.epoch,
                    place_of(membership.members.index(mesh.rank), posts),
                )
                is_alone = place[1] == 0
        except BaseException as error:  # the script's thread raises it
            self._failure = error
        finally:
            with self._changed:
                self._is_over = True
                self._changed.notify_all()

    def _may_end(self, step: int, is_alone: bool) -> bool:
        with self._changed:
            if self._has_failed:
                self._log.clear()
                return True
            return self.received is not None and (is_alone or step - self._applied <= _FEW_STEPS)

    def _follow(self, epoch: int, group: Any, place: tuple[int, int], is_alone: bool) -> None:
        """Take part in sums until the epoch ends, or until this rank can end it."""
        mesh = self._mesh
        while mesh.is_current(epoch):
            if self._may_end(self._taken, is_alone):
                mesh.renew(epoch)
                return
            if is_alone:
                mesh.await_change(epoch)
                return
            sums = [torch.zeros(count, dtype=dtype) for count, dtype in self._forms]
            try:
                works = [group.allreduce([part]) for part in sums]
                for work in works:
                    work.wait()
            except TransportError:
                mesh.await_change(epoch)
                return
            if not mesh.commit(epoch, self._taken + 1):
                return
            with self._changed:
                self._taken += 1
                self._log.append(Summed(self._taken, sums, *place))
                self._changed.notify_all()
