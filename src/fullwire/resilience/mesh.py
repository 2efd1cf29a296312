"""A rank's connections to all other ranks of an elastic job, and the thread that serves them.

`Mesh` carries the messages of `membership.Member`, which decides. It also tells it who is lost:

- A connection that the other kernel closed: that process has ended.
- Nothing heard for `detect_s`: the host is gone, or the network between.
- A rank for which others wait longer than the job's own steps explain: it is stuck.

The ranks find each other through a folder, `place.Folder`. No process serves it. A rank listens as
long as it lives, and a later rank connects to all earlier ones, so new ranks may come at any time.
Both ends prove that they know the job's key, as in `rendezvous`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import socket
import statistics
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from fullwire.errors import TransportError
from fullwire.resilience.membership import Committed, Ended, Entered, Member, Membership, Message
from fullwire.resilience.place import Place
from fullwire.transport.keys import protection
from fullwire.transport.rendezvous import (
    Door,
    Meeting,
    NotYet,
    introduced,
    listening,
)

START_S = 120.0  # the longest wait for a worker that has not come yet, or to be let in
_MOST_RANKS = 2**31 - 1
_HEADER = struct.Struct("!Ic")
_LONGEST_FRAME_BYTES = 2**24
_MESSAGE, _BEAT, _POST, _JOIN, _WHERE = b"M", b"B", b"P", b"J", b"W"
_RETRY_S = 0.1
_NEVER_NS = 10**18
_FIRST_STEPS_S = 300.0  # no rank is stuck before the job has shown how long its steps take
_ENDED_BY_KERNEL = {errno.ECONNRESET, errno.EPIPE}
_meshes: weakref.WeakSet[Mesh] = weakref.WeakSet()


class Beat(NamedTuple):
    """The state of a rank, which it sends at intervals."""

    step: int = 0
    moves: int = 0  # grows whenever its script reaches or leaves a wait
    waits: bool = True  # for others


class Hearing:
    """When this rank heard of the others, and whom it believes lost. Time comes as an argument."""

    def __init__(self, detect_ns: int, stuck_ns: int) -> None:
        self.own = Beat()
        self._detect_ns, self._stuck_ns = detect_ns, stuck_ns
        self._heard_ns: dict[int, int] = {}
        self._beats: dict[int, tuple[int, Beat]] = {}  # since when it is the same
        self._waits_since_ns = 0
        self._looked_ns = 0
        self._steps_ns: deque[int] = deque(maxlen=20)
        self._committed_ns: int | None = None

    def heard(self, peer: int, now_ns: int, beat: Beat | None = None) -> None:
        """Bytes came from a peer."""
        self._heard_ns[peer] = now_ns
        if beat is not None and (peer not in self._beats or self._beats[peer][1] != beat):
            self._beats[peer] = (now_ns, beat)

    def forget(self, peer: int) -> None:
        """The connection to a peer is gone."""
        self._heard_ns.pop(peer, None)
        self._beats.pop(peer, None)

    def waits(self, step: int, now_ns: int, *, is_waiting: bool) -> None:
        """This rank's script begins to wait for others, or goes on."""
        self.own = Beat(step, self.own.moves + 1, is_waiting)
        self._waits_since_ns = now_ns

    def committed(self, now_ns: int) -> None:
        """A step counts: its time bounds how long another may take."""
        if self._committed_ns is not None:
            self._steps_ns.append(now_ns - self._committed_ns)
        self._committed_ns = now_ns

    def lost(self, peers: Sequence[int], now_ns: int) -> list[int]:
        """Return the peers that are silent or stuck."""
        if now_ns - self._looked_ns > self._detect_ns // 2:
            # This process itself did not run: messages of that time are still unread.
            self._heard_ns = dict.fromkeys(self._heard_ns, now_ns)
            self._beats = {peer: (now_ns, beat) for peer, (_, beat) in self._beats.items()}
            self._waits_since_ns = now_ns
        self._looked_ns = now_ns
        return [
            peer
            for peer in peers
            if now_ns - self._heard_ns.get(peer, now_ns) > self._detect_ns
            or self._is_stuck(peer, now_ns)
        ]

    def _is_stuck(self, peer: int, now_ns: int) -> bool:
        if not self.own.waits or peer not in self._beats:
            return False
        since_ns, beat = self._beats[peer]
        waited_ns = now_ns - max(since_ns, self._waits_since_ns)
        return not beat.waits and beat.step <= self.own.step and waited_ns > self._bound_ns()

    def _bound_ns(self) -> int:
        if len(self._steps_ns) < 3:
            return max(self._stuck_ns, int(_FIRST_STEPS_S * 1e9))
        longest_ns, usual_ns = max(self._steps_ns), statistics.median(self._steps_ns)
        return max(self._stuck_ns, 3 * longest_ns, int(20 * usual_ns))


@dataclass(eq=False)
class _Link:
    """A connection to another rank."""

    peer: int
    connection: socket.socket
    received: bytearray = field(default_factory=bytearray)
    unsent: bytearray = field(default_factory=bytearray)


class Mesh:
    """One rank of an elastic job. Its thread answers others while the script computes."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.rank = place.worker
        self.strangers = 0
        self.committed: Committed | None = None  # the last step that counts
        self.may_let_in: Callable[[], bool] = lambda: True
        self._detect_ns = int(place.detect_s * 1e9)
        self._changed = threading.Condition()
        self._member: Member | None = None
        self._left_epoch = -1
        self._asks = False  # to be let in
        self._failure: BaseException | None = None
        self._is_closed = False
        self._links: dict[int, _Link] = {}
        self._kept: dict[int, bytearray] = {}  # for members that have not connected yet
        self._ignored: set[int] = set()
        self._asking: dict[int, int] = {}  # to be let in: ranks, and the epochs that they left
        self._boards: dict[int, dict[str, str]] = {}  # the posts of ranks, by epoch
        # An epoch, and a call for its end.
        self._watched: tuple[int, Callable[[], None]] | None = None
        self._hearing = Hearing(self._detect_ns, int(place.stuck_s * 1e9))
        self._awaited_since_ns: dict[int, int] = {}
        self._next_beat_ns = 0
        self._meeting = Meeting(place.folder, self.rank, _MOST_RANKS, "mesh", protection())
        self._selector = selectors.DefaultSelector()
        self._listener = listening(place.folder)
        self._door = Door(self._listener, self._meeting)
        self._selector.register(self._door, selectors.EVENT_READ, None)
        self._woken, self._wakes = socket.socketpair()
        self._woken.setblocking(False)
        self._wakes.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ, None)
        self._meeting.announce(self._listener)
        if self.rank < place.starters:
            with self._changed:
                first = place.keeping.first_step
                self._begin(Membership(0, tuple(range(place.starters)), first))
        self._thread = threading.Thread(target=self._serve, name="fullwire-mesh", daemon=True)
        self._thread.start()
        self._finder = threading.Thread(target=self._find, name="fullwire-find", daemon=True)
        self._finder.start()
        _meshes.add(self)

    # For the script's thread.

    def epoch(self) -> Membership:
        """Return the membership of this rank, once it has one and no other is being formed."""
        until_ns = time.monotonic_ns() + int(START_S * 1e9)
        with self._changed:
            self._wait(True)
            while self._member is None or self._member.forming_since_ns is not None:
                self._raise_failure()
                if self._member is None:
                    if self.place.folder.check(["finished"]):
                        raise SystemExit(0)
                    if not self._asks:
                        self._asks = True
                        self._ask(self._links)
                if self._links and self._member is None:  # they let it in at the end of a step
                    until_ns = time.monotonic_ns() + int(START_S * 1e9)
                if time.monotonic_ns() > until_ns:
                    raise TransportError(
                        f"worker {self.rank}: the others did not let it in within {START_S:g} s"
                    )
                self._changed.wait(_RETRY_S)
            self._wait(False)
            return self._member.membership

    def is_current(self, epoch: int) -> bool:
        """Say whether steps of this epoch may still be committed."""
        with self._changed:
            return self._is_current(epoch)

    def has_guests(self) -> bool:
        """Say whether a rank has come that is no member."""
        with self._changed:
            member = self._member
            return member is not None and bool(self._links.keys() - member.membership.members)

    def watch(self, epoch: int, on_change: Callable[[], None] | None) -> None:
        """Call a function once, in the mesh's thread, when the epoch ends; at once if it has."""
        with self._changed:
            self._raise_failure()
            is_current = self._is_current(epoch)
            self._watched = (epoch, on_change) if on_change and is_current else None
        if on_change is not None and not is_current:
            on_change()

    def wait(self, is_waiting: bool) -> None:
        """The script waits for others, or computes again."""
        with self._changed:
            self._wait(is_waiting)

    def commit(self, epoch: int, step: int) -> bool:
        """Tell all that this rank's sums are complete; return whether the step counts."""
        with self._changed:
            if self._is_current(epoch) and self._member is not None:
                self._send(self._member.ready(time.monotonic_ns()))
                self._take_events()
            while self.committed is None or self.committed.step < step:
                self._raise_failure()
                if self._member is None or self._member.membership.epoch != epoch:
                    return False
                self._changed.wait(1.0)
            return True

    def await_change(self, epoch: int) -> None:
        """Return when this epoch has ended; if nobody is lost, ask for another soon."""
        asks_ns = time.monotonic_ns() + int(_RETRY_S * 1e9)
        with self._changed:
            while self._member is not None and self._member.membership.epoch == epoch:
                self._raise_failure()
                if time.monotonic_ns() > asks_ns and self._member.forming_since_ns is None:
                    self._renew()
                self._changed.wait(_RETRY_S)

    def renew(self, epoch: int) -> None:
        """Ask for another epoch after this one, though nobody is lost."""
        with self._changed:
            if self._is_current(epoch):
                self._renew()

    def _renew(self) -> None:
        if self._member is not None:
            self._send(self._member.renew(time.monotonic_ns()))
            self._take_events()
            self._wake()

    def post(self, epoch: int, key: str, value: str, to: Sequence[int] | None = None) -> None:
        """Show a value to all members of this epoch, or to some."""
        with self._changed:
            if self._is_current(epoch) and self._member is not None:
                self._boards.setdefault(epoch, {})[key] = value
                frame = msgspec.msgpack.encode((epoch, key, value))
                for peer in self._member.membership.members if to is None else to:
                    if peer != self.rank:
                        self._put(peer, _POST, frame)

    def posted(self, epoch: int, key: str) -> str | None:
        """Return a value of this epoch, if it has come."""
        with self._changed:
            return self._boards.get(epoch, {}).get(key)

    def await_posts(self, epoch: int, keys: Sequence[str]) -> list[str] | None:
        """Return values of this epoch once all have come; None if it ends before."""
        with self._changed:
            while not all(key in self._boards.get(epoch, {}) for key in keys):
                self._raise_failure()
                if not self._is_current(epoch):
                    return None
                self._changed.wait(1.0)
            return [self._boards[epoch][key] for key in keys]

    def close(self) -> None:
        """Leave the job; the others go on."""
        with self._changed:
            if self._is_closed:
                return
            if self._member is not None and self._failure is None:
                self._send(self._member.leave())
            self._is_closed = True
            self._wake()
        self._thread.join(5)
        self._finder.join(5)
        for end in (self._woken, self._wakes):
            end.close()

    def leave_to_parent(self) -> None:
        """Close the connections in a forked process, which would keep them open for its parent."""
        self._is_closed = True
        for link in self._links.values():
            link.connection.close()
        self._listener.close()

    # The thread. It holds the lock except while it waits.

    def _serve(self) -> None:
        try:
            while not self._has_ended():
                ready = self._selector.select(self._pause_s())
                with self._changed:
                    for key, events in ready:
                        if isinstance(key.data, _Link):
                            self._hear(key.data, events)
                    self._look_around(time.monotonic_ns())
                    is_over = self._watched and not self._is_current(self._watched[0])
                    on_change = self._watched[1] if self._watched and is_over else None
                    self._watched = None if is_over else self._watched
                if on_change is not None:
                    on_change()
        except BaseException as error:  # the script's thread raises it
            with self._changed:
                self._failure = error
                self._changed.notify_all()
        finally:
            self._door.close()
            self._listener.close()
            for link in self._links.values():
                link.connection.close()

    def _has_ended(self) -> bool:
        with self._changed:
            return self._is_closed and not any(link.unsent for link in self._links.values())

    def _pause_s(self) -> float:
        with self._changed:
            now_ns = time.monotonic_ns()
            until_ns = self._next_beat_ns
            if self._member is not None and self._member.wakes_ns is not None:
                until_ns = min(until_ns, self._member.wakes_ns)
            return max(until_ns - now_ns, 0) / 1e9

    def _look_around(self, now_ns: int) -> None:
        """Take in ranks that came, and do what the time asks for."""
        with contextlib.suppress(BlockingIOError):
            self._woken.recv(4096)
        self._door.answer(0)
        self.strangers = self._door.strangers
        for peer in list(self._door.trusted):
            self._connect(peer, self._door.trusted.pop(peer).connection)
        if self._member is not None:
            self._send(self._member.tick(now_ns))
        while self._member is not None and self._asking and self.may_let_in():
            self._send(self._member.admit(*self._asking.popitem(), now_ns))
        if now_ns >= self._next_beat_ns:
            self._next_beat_ns = now_ns + self._detect_ns // 8
            for peer in self._links:
                self._put(peer, _BEAT, msgspec.msgpack.encode(self._hearing.own))
            self._ask(self._links)
            self._judge(now_ns)
        self._take_events()

    def _judge(self, now_ns: int) -> None:
        """Tell the member whom it lost without a word."""
        silent = self._hearing.lost(list(self._links), now_ns)
        if self._member is None:
            return
        others = [peer for peer in self._member.membership.members if peer != self.rank]
        gone = self.place.folder.numbers("gone") if set(others) - self._links.keys() else set()
        for peer in others:
            if peer in self._links:
                self._awaited_since_ns.pop(peer, None)
                if peer in silent and peer not in self._ignored:
                    self._ignored.add(peer)
                    self._lose(peer, is_certain=False)
                continue
            since_ns = self._awaited_since_ns.setdefault(peer, now_ns)
            is_first = self._member.membership.epoch == 0
            limit_ns = int(START_S * 1e9) if is_first else self._detect_ns
            if peer in gone or (now_ns - since_ns > limit_ns and peer not in self._ignored):
                self._ignored.add(peer)
                self._lose(peer, is_certain=peer in gone)

    def _ask(self, peers: Iterable[int]) -> None:
        """Ask to be let in, if this rank's script waits for that."""
        if self._asks and self._member is None:
            for peer in peers:
                self._put(peer, _JOIN, msgspec.msgpack.encode(self._left_epoch))

    def _lose(self, peer: int, *, is_certain: bool) -> None:
        if self._member is not None:
            self._send(self._member.lost(peer, time.monotonic_ns(), is_certain=is_certain))
            self._take_events()

    def _find(self) -> None:
        """Connect to each earlier rank, as it comes."""
        missing = set(range(min(self.rank, self.place.starters)))
        given_up: set[int] = set()
        folder = self.place.folder
        while not self._is_closed:
            said = folder.numbers("rank")
            missing |= {peer for peer in said if peer < self.rank} - given_up
            for peer in sorted(missing & said):
                try:
                    found = introduced(*self._meeting.record(peer)[:2], self._meeting, peer, 5.0)
                except NotYet:
                    continue
                except OSError as error:
                    if error.errno != errno.ECONNREFUSED:
                        continue
                else:
                    with self._changed:
                        self._connect(peer, found.connection)
                        self._wake()
                given_up.add(peer)  # it is connected, or it has ended
                missing.discard(peer)
            time.sleep(0.01 if missing - folder.numbers("gone") else _RETRY_S)

    def _connect(self, peer: int, connection: socket.socket) -> None:
        """Take a proved connection. This rank's waiting messages to the peer go first."""
        if self._is_closed:
            connection.close()
            return
        if (earlier := self._links.pop(peer, None)) is not None:  # the peer gave that one up
            self._selector.unregister(earlier.connection)
            earlier.connection.close()
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link = self._links[peer] = _Link(peer, connection, unsent=self._kept.pop(peer, bytearray()))
        self._selector.register(connection, selectors.EVENT_READ, link)
        self._hearing.heard(peer, time.monotonic_ns())
        self._flush(link)
        if self.place.folder.is_of_one_host:  # the peer, on another one, may not know new ranks
            for rank in self.place.folder.numbers("rank"):
                if rank >= self.place.starters or rank == self.rank:
                    self._tell_where([peer], rank)
        self._ask([peer])

    def _tell_where(self, peers: Sequence[int], rank: int) -> None:
        with contextlib.suppress(FileNotFoundError):
            address = self.place.folder.get(f"rank {rank}").decode()
            for peer in peers:
                self._put(peer, _WHERE, msgspec.msgpack.encode((rank, address)))

    def _hear(self, link: _Link, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            self._flush(link)
        if not events & selectors.EVENT_READ:
            return
        is_certain = True
        try:
            while piece := link.connection.recv(2**16):
                link.received += piece
        except BlockingIOError:
            piece = b"more may come"
        except OSError as error:
            is_certain = error.errno in _ENDED_BY_KERNEL
            piece = b""
        self._hearing.heard(link.peer, time.monotonic_ns())
        while len(link.received) >= _HEADER.size:
            length, kind = _HEADER.unpack_from(link.received)
            if length > _LONGEST_FRAME_BYTES:
                raise TransportError(f"worker {link.peer} sent a message of {length} bytes")
            if len(link.received) < _HEADER.size + length:
                break
            data = bytes(link.received[_HEADER.size : _HEADER.size + length])
            del link.received[: _HEADER.size + length]
            self._take(link.peer, kind, data)
        if not piece:
            self._selector.unregister(link.connection)
            link.connection.close()
            self._links.pop(link.peer, None)
            self._hearing.forget(link.peer)
            self._asking.pop(link.peer, None)
            self._lose(link.peer, is_certain=is_certain)

    def _take(self, peer: int, kind: bytes, data: bytes) -> None:
        now_ns = time.monotonic_ns()
        if kind == _BEAT:
            self._hearing.heard(peer, now_ns, msgspec.msgpack.decode(data, type=Beat))
        elif kind == _POST:
            epoch, key, value = msgspec.msgpack.decode(data, type=tuple[int, str, str])
            if self._member is None or epoch >= self._member.membership.epoch:
                self._boards.setdefault(epoch, {})[key] = value
                self._changed.notify_all()
        elif kind == _WHERE:
            rank, address = msgspec.msgpack.decode(data, type=tuple[int, str])
            known = {
                word for word in ("rank", "gone") if self.place.folder.check([f"{word} {rank}"])
            }
            if not known:
                self.place.folder.set(f"rank {rank}", address)
                self._tell_where([each for each in self._links if each != peer], rank)
        elif kind == _JOIN and self._member is not None and peer not in self._ignored:
            self._asking[peer] = msgspec.msgpack.decode(data, type=int)
        elif kind == _MESSAGE:
            if self._member is None and self._asks:
                at = msgspec.msgpack.decode(data, type=Message).sender_at
                if self.rank in at.members and at.epoch > self._left_epoch:
                    self._begin(at)
            if self._member is not None:
                self._send(self._member.receive(peer, data, now_ns))
        self._take_events()

    def _begin(self, membership: Membership) -> None:
        # A rank without a quorum waits: those that it misses may come back and vote.
        pause_ns = self._detect_ns // 100
        self._member = Member(self.rank, membership, limit_ns=_NEVER_NS, pause_ns=pause_ns)
        self._asks = False
        self._enter(membership)

    def _enter(self, membership: Membership) -> None:
        self._ignored.clear()
        self._awaited_since_ns.clear()
        for epoch in [epoch for epoch in self._boards if epoch < membership.epoch]:
            del self._boards[epoch]
        for peer in self._kept.keys() - set(membership.members):
            del self._kept[peer]
        self._changed.notify_all()

    def _take_events(self) -> None:
        while self._member is not None and self._member.events:
            event = self._member.events.pop(0)
            if isinstance(event, Committed):
                self.committed = event
                self._hearing.committed(time.monotonic_ns())
            elif isinstance(event, Entered):
                self._enter(event.membership)
            elif isinstance(event, Ended):
                # The script's thread asks to be let in again, if it is not the one that is stuck.
                self._left_epoch = self._member.membership.epoch
                self._member = None
            self._changed.notify_all()

    # Both threads use these, with the lock held.

    def _is_current(self, epoch: int) -> bool:
        member = self._member
        return (
            member is not None
            and member.membership.epoch == epoch
            and member.forming_since_ns is None
        )

    def _wait(self, is_waiting: bool) -> None:
        step = 0 if self._member is None else self._member.committed
        self._hearing.waits(step, time.monotonic_ns(), is_waiting=is_waiting)

    def _send(self, messages: Sequence[tuple[int, bytes]]) -> None:
        for peer, data in messages:
            self._put(peer, _MESSAGE, data)

    def _put(self, peer: int, kind: bytes, data: bytes) -> None:
        frame = _HEADER.pack(len(data), kind) + data
        link = self._links.get(peer)
        if link is None:
            self._kept.setdefault(peer, bytearray()).extend(frame)
            return
        link.unsent += frame
        self._flush(link)

    def _flush(self, link: _Link) -> None:
        try:
            while link.unsent:
                del link.unsent[: link.connection.send(link.unsent)]
        except BlockingIOError:
            pass
        except OSError:
            link.unsent.clear()  # the reading side learns why
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if link.unsent else 0)
        if self._selector.get_key(link.connection).events != wanted:
            self._selector.modify(link.connection, wanted, link)

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # full, or closed
            self._wakes.send(b"!")

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise TransportError(f"worker {self.rank}: {self._failure}") from self._failure


def _leave_to_parent() -> None:
    for mesh in list(_meshes):
        mesh.leave_to_parent()


os.register_at_fork(after_in_child=_leave_to_parent)
