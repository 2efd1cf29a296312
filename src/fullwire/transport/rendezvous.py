"""The rendezvous: the ranks of a group find each other and prove that they belong to the job.

Each rank listens, writes its address into the group's store, and connects to all ranks below its
own. Rank 0 writes a random number there, a new one for each attempt. A secret is derived from the
job's key and that number. The names of the group, its ranks and this protocol enter the secret too.
Where the job has no key, every process that reads the store can derive the secret. A connection
counts after both ends have shown that they know the secret:

    client   "FWT4", its rank, the rank it looks for, 32 random bytes, an X25519 key
    server   32 random bytes, an X25519 key, HMAC(secret, "server" and all of the above)
    client   HMAC(secret, "client" and all of the above)

The X25519 keys are new for each connection, and zero without encryption. Both ends derive the same
shared secret from them, and the keys of both directions from that. So an attacker who learns the
job's key later cannot read earlier traffic. docs/design/security.md lists the attackers that this
keeps out.

A connection that sends anything else is closed without an answer, and counted. A store may still
hold addresses and numbers of a job that was restarted. So an attempt that fails is repeated, with
the store read again, until the time is over. A rank stops listening once the last rank has come. A
rank that cannot start says so in the store, in place of its address.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import ipaddress
import os
import secrets
import selectors
import socket
import struct
import time
from dataclasses import dataclass, field
from typing import Any

from fullwire import _native
from fullwire.errors import TransportError
from fullwire.transport.congestion import choose
from fullwire.transport.keys import SECRET_BYTES, Protection, expanded, extracted

INTERFACE_VARIABLE = "FULLWIRE_INTERFACE"  # the address, or the interface, to listen at
_MAGIC = b"FWT4"  # changes whenever ranks of two versions would not understand each other
_HELLO = struct.Struct("!4sII32s32s")
_NONCE_BYTES = 32
_PROOF_BYTES = 32
_NO_KEY = bytes(SECRET_BYTES)  # without encryption
_PATIENCE_S = 5.0  # with one stranger
_MOST_PENDING = 64
_RETRY_S = 0.02
_LOOK_UP_S = 0.5  # the interval at which a waiting rank looks whether the others failed
_FAILED = "failed"
_LONGEST_WAIT_FOR_NUMBER_S = 20.0  # for the number of rank 0, which may begin later
_LACKS = {
    errno.EMFILE: "too many open files",
    errno.ENFILE: "too many open files",
    errno.ENOMEM: "out of memory",
    errno.ENOBUFS: "out of memory",
    errno.EAGAIN: "no new thread",
}
_SIOCGIFADDR = 0x8915


@dataclass(frozen=True)
class Met:
    """The connections by rank (-1 at the own place), and the number of refused connections.

    `keys` holds, by rank, the key for sending and the key for receiving; empty without encryption.
    """

    sockets: list[int]
    machines: list[str]
    strangers: int
    keys: list[tuple[bytes, bytes]]


@dataclass(frozen=True)
class Meeting:
    """The ranks of a rendezvous, and the data that they share before it."""

    store: Any
    rank: int
    size: int
    name: str  # of the group, its ranks and the stream; other connections are refused
    protection: Protection

    def secret(self) -> bytes:
        """Derive the secret of this group, from the number that the store holds at present."""
        number = bytes.fromhex(_read(self.store, "number"))
        purpose = f"{_MAGIC.decode()} {self.protection} {self.size} {self.name}"
        return expanded(extracted(number, self.protection.key), purpose.encode())

    def announce(self, listener: socket.socket) -> None:
        """Tell the others where this rank listens, on which machine, and how it is protected."""
        host, port = listener.getsockname()[:2]
        protection = f"{self.protection}/{_MAGIC.decode()}"
        self.store.set(f"rank {self.rank}", f"{host} {port} {_machine()} {protection}")

    def record(self, other: int) -> tuple[str, int, str]:
        """Return a rank's address and machine."""
        record = _read(self.store, f"rank {other}")
        if record.startswith(_FAILED):
            raise NotYet(record.removeprefix(_FAILED).split(" ", 2)[2])
        host, port, machine, rest = record.split(" ")
        protection, _, version = rest.partition("/")
        if version != _MAGIC.decode():
            raise NotYet(
                f"its version of Fullwire speaks {version or 'an older form'} and this rank's "
                f"{_MAGIC.decode()}: install the same version on every host"
            )
        if protection != str(self.protection):
            raise NotYet(
                f"it is {protection} and this rank {self.protection}: every rank needs the same "
                "FULLWIRE_KEY_FILE and FULLWIRE_ENCRYPT"
            )
        return host, int(port), machine

    def raise_if_failed(self, others: list[int]) -> None:
        """Raise the problem that one of these ranks left in this attempt instead of its address."""
        for other in others:
            with contextlib.suppress(NotYet):
                record = _read(self.store, f"rank {other}")
                if record.startswith(f"{_FAILED} {_attempt(self.store)} "):
                    raise TransportError(record.split(" ", 2)[2])

    def say_it_waits_for(self, other: int) -> None:
        """Leave the rank to blame in the store, for those who wait for this one."""
        with contextlib.suppress(NotYet):
            self.store.set(f"waits {self.rank}", f"{_attempt(self.store)} {other}")

    def why_not(self, other: int) -> str:
        """Return the reason why a rank has not come, if the store has one."""
        try:
            self.record(other)
        except NotYet as error:
            return f" (rank {other}: {error})"
        awaited = _awaited(self.store, other)
        return f" (rank {other} waits for rank {awaited})" if awaited else ""


def meet(meeting: Meeting, timeout_s: float) -> Met:
    """Connect this rank with all others of its group."""
    store, rank, size = meeting.store, meeting.rank, meeting.size
    until = time.monotonic() + timeout_s
    with contextlib.ExitStack() as opened:
        if rank == 0:
            store.set("number", secrets.token_hex(_NONCE_BYTES))
        try:
            listener = opened.enter_context(listening(store))
        except TransportError as error:  # the others need not wait for this rank
            leave_word(store, rank, f"rank {rank}: {error}")
            raise
        meeting.announce(listener)
        door = Door(listener, meeting)
        opened.callback(door.close)
        trusted: dict[int, Trusted] = {}
        for other in range(rank):
            trusted[other] = _connected(meeting, other, door, until, is_current=other > 0)
            opened.callback(trusted[other].connection.close)
        looked, tells_at = 0.0, (time.monotonic() + until) / 2
        while len(door.trusted) < size - 1 - rank:
            missing = sorted(set(range(rank + 1, size)) - set(door.trusted))
            if time.monotonic() > until:
                who = ", ".join(map(str, missing))
                text = f"rendezvous: rank {who} did not connect within {timeout_s:g} s"
                text += "".join(map(meeting.why_not, missing[:4]))
                if door.strangers:
                    text += f" ({door.strangers} connections of strangers were closed)"
                raise TransportError(text)
            if time.monotonic() > tells_at:
                tells_at = until
                meeting.say_it_waits_for(missing[0])
            if time.monotonic() - looked > _LOOK_UP_S:
                looked = time.monotonic()
                meeting.raise_if_failed(missing)
            door.answer(0.05)
        trusted |= door.trusted
        everyone = [f"rank {other}" for other in range(size)]
        # A rank may connect before its word has come, as an elastic job's ranks send theirs apart.
        while not store.check(everyone) and time.monotonic() < until:
            time.sleep(_RETRY_S)
        try:
            machines = [meeting.record(other)[2] for other in range(size)]
        except NotYet as error:  # a rank failed after it was met
            raise TransportError(str(error)) from None
        for peer in trusted.values():
            peer.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        keys = [
            trusted[other].keys if other in trusted else (_NO_KEY, _NO_KEY) for other in range(size)
        ]
        sockets = [
            trusted[other].connection.detach() if other in trusted else -1 for other in range(size)
        ]
        door.trusted.clear()
    return Met(sockets, machines, door.strangers, keys if meeting.protection.encrypts else [])


def lack(error: BaseException) -> str:
    """Name the resource that a process has run out of; "" for any other error."""
    if isinstance(error, MemoryError):
        return "out of memory"
    if isinstance(error, OSError) and not isinstance(error, BlockingIOError):
        return _LACKS.get(error.errno or 0, "")
    return "no new thread" if "start new thread" in str(error) else ""


def leave_word(store: Any, rank: int, problem: str) -> None:
    """Write into the store why this rank does not come."""
    with contextlib.suppress(NotYet, RuntimeError, OSError):  # the store itself may be gone
        until = time.monotonic() + _LONGEST_WAIT_FOR_NUMBER_S
        while not store.check(["number"]) and time.monotonic() < until:
            time.sleep(_RETRY_S)
        store.set(f"rank {rank}", f"{_FAILED} {_attempt(store)} {problem}")


def why_no_group(
    error: BaseException, own: str, group: str, store: Any, rank: int, size: int
) -> str:
    """Say why this rank has no group; leave a resource that it lacked in the store as well."""
    lacks = lack(error)
    problem = f"{own}: {lacks}, at the start of group {group}" if lacks else ""
    if isinstance(error, TransportError | RuntimeError) and str(error).startswith(f"{own}: "):
        problem = str(error)
    if problem:
        leave_word(store, rank, problem)
    elif isinstance(error, TransportError):
        words = [str(error)]  # and the words of ranks that did not come, or that waited for one
        with contextlib.suppress(RuntimeError, OSError):  # the store is gone too
            for other in range(size):
                with contextlib.suppress(NotYet):
                    record = _read(store, f"rank {other}")
                    words += [record.split(" ", 2)[2]] if record.startswith(_FAILED) else []
                awaited = _awaited(store, other)
                if awaited and f"rank {other} waits for" not in str(error):
                    words.append(f"rank {other} waited for rank {awaited}")
        problem = "; ".join(words)
    return problem


@dataclass(frozen=True)
class Trusted:
    """A connection whose other end has proved the secret."""

    connection: socket.socket
    keys: tuple[bytes, bytes]  # for sending, and for receiving


def _connected(
    meeting: Meeting, other: int, door: Door, until: float, *, is_current: bool
) -> Trusted:
    """Connect to a rank, and answer ranks that connect here meanwhile.

    Once rank 0 has been met, the store's number is certainly of this attempt.
    """
    reason, looked = "it has not said where it is", 0.0
    tells_at = (time.monotonic() + until) / 2
    while time.monotonic() < until:
        door.answer(0)
        if time.monotonic() > tells_at:
            tells_at = until
            meeting.say_it_waits_for(other)
        if is_current and time.monotonic() - looked > _LOOK_UP_S:
            looked = time.monotonic()
            meeting.raise_if_failed([other])
        try:
            host, port, _ = meeting.record(other)
            patience_s = min(_PATIENCE_S, max((until - time.monotonic()) / 4, 0.2))
            return introduced(host, port, meeting, other, patience_s)
        except NotYet as error:
            reason = str(error)
        except OSError as error:
            if lack(error):
                raise
            reason = f"{host}:{port}: {error.strerror or error}"
        door.answer(_RETRY_S)
    raise TransportError(f"rendezvous: rank {other} could not be reached: {reason}")


def introduced(host: str, port: int, meeting: Meeting, other: int, patience_s: float) -> Trusted:
    """Connect, and prove the knowledge of the secret once the other end has proved it."""
    secret = meeting.secret()
    own = secrets.token_bytes(SECRET_BYTES)
    nonce, public = secrets.token_bytes(_NONCE_BYTES), _public(meeting, own)
    hello = _HELLO.pack(_MAGIC, meeting.rank, other, nonce, public)
    with contextlib.ExitStack() as unless_trusted:
        connection = socket.socket(_family(host))
        unless_trusted.callback(connection.close)
        choose(connection)
        connection.settimeout(patience_s)
        connection.connect((host, port))
        connection.sendall(hello)
        answer = _exactly(connection, _NONCE_BYTES + SECRET_BYTES + _PROOF_BYTES)
        said, proof = answer[:-_PROOF_BYTES], answer[-_PROOF_BYTES:]
        if not hmac.compare_digest(proof, _proof(secret, b"server", hello + said)):
            raise NotYet(f"{host}:{port} does not know the secret of this job")
        connection.sendall(_proof(secret, b"client", hello + said))
        connection.setblocking(False)
        of_client, of_server = _session(meeting, secret, own, said[_NONCE_BYTES:], hello + said)
        unless_trusted.pop_all()
    return Trusted(connection, (of_client, of_server))


def _public(meeting: Meeting, own: bytes) -> bytes:
    return _native.x25519_public(own) if meeting.protection.encrypts else _NO_KEY


def _session(
    meeting: Meeting, secret: bytes, own: bytes, other: bytes, said: bytes
) -> tuple[bytes, bytes]:
    """Derive the keys of both directions, the client's first."""
    if not meeting.protection.encrypts:
        return _NO_KEY, _NO_KEY
    try:
        shared = _native.x25519_shared(own, other)
    except RuntimeError as error:
        raise NotYet(str(error)) from None
    common = extracted(secret, shared + said)
    return expanded(common, b"client to server"), expanded(common, b"server to client")


def _exactly(connection: socket.socket, count: int) -> bytes:
    received = b""
    while len(received) < count:
        piece = connection.recv(count - len(received))
        if not piece:
            raise NotYet("it closed the connection")
        received += piece
    return received


def _proof(secret: bytes, who: bytes, said: bytes) -> bytes:
    return hmac.digest(secret, who + said, "sha256")


@dataclass
class _Guest:
    """A connection that has not proved the knowledge of the secret yet."""

    connection: socket.socket
    until: float
    received: bytes = b""
    hello: bytes = b""
    expected: bytes = b""  # the proof that a rank would send
    rank: int = -1
    own: bytes = b""  # our X25519 key for this guest
    said: bytes = b""  # by both ends, without the proofs
    secret: bytes = b""


@dataclass
class Door:
    """The listening socket and its connections."""

    listener: socket.socket
    meeting: Meeting
    trusted: dict[int, Trusted] = field(default_factory=dict)
    strangers: int = 0

    def __post_init__(self) -> None:
        self._guests = selectors.DefaultSelector()
        self._guests.register(self.listener, selectors.EVENT_READ, None)

    def fileno(self) -> int:
        """Return what a selector of others waits on, until `answer` has something to do."""
        return self._guests.fileno()

    def answer(self, wait_s: float) -> None:
        """Accept new connections, and read from those that have sent bytes."""
        for key, _ in self._guests.select(wait_s):
            if key.data is None:
                self._let_in()
            else:
                self._hear(key.data)
        now = time.monotonic()
        for guest in self._waiting():
            if guest.until < now:
                self._turn_away(guest)

    def close(self) -> None:
        """Close all connections of the door."""
        for guest in self._waiting():
            guest.connection.close()
        for peer in self.trusted.values():
            peer.connection.close()
        self._guests.close()

    def _waiting(self) -> list[_Guest]:
        return [key.data for key in list(self._guests.get_map().values()) if key.data]

    def _let_in(self) -> None:
        try:
            connection, _ = self.listener.accept()
        except OSError as error:
            if lack(error):  # or accept would fail again and again
                raise
            return
        waiting = self._waiting()
        if len(waiting) >= _MOST_PENDING:
            # A plausible hello may come from a rank: refuse the oldest connection without one.
            self._turn_away(min(waiting, key=lambda guest: (bool(guest.hello), guest.until)))
        connection.setblocking(False)
        guest = _Guest(connection, time.monotonic() + _PATIENCE_S)
        self._guests.register(connection, selectors.EVENT_READ, guest)

    def _hear(self, guest: _Guest) -> None:
        if guest.connection.fileno() < 0:  # refused while its bytes were waiting
            return
        wanted = (_PROOF_BYTES if guest.hello else _HELLO.size) - len(guest.received)
        try:
            piece = guest.connection.recv(wanted)
        except BlockingIOError:
            return
        except OSError:
            piece = b""
        guest.received += piece
        if not piece:
            self._turn_away(guest)
        elif len(piece) == wanted:
            received, guest.received = guest.received, b""
            self._believe(guest, received) if guest.hello else self._greet(guest, received)

    def _greet(self, guest: _Guest, hello: bytes) -> None:
        meeting = self.meeting
        magic, guest.rank, looked_for, _, _ = _HELLO.unpack(hello)
        is_plausible = magic == _MAGIC and looked_for == meeting.rank < guest.rank < meeting.size
        if not is_plausible:
            return self._turn_away(guest)
        try:  # derived each time: an earlier number may be of an earlier attempt
            guest.secret = meeting.secret()
            guest.own = secrets.token_bytes(SECRET_BYTES)
            answer = secrets.token_bytes(_NONCE_BYTES) + _public(meeting, guest.own)
            guest.hello, guest.said = hello, hello + answer
            guest.until = time.monotonic() + _PATIENCE_S
            guest.expected = _proof(guest.secret, b"client", guest.said)
            guest.connection.send(answer + _proof(guest.secret, b"server", guest.said))
        except (OSError, NotYet):
            self._turn_away(guest)
        return None

    def _believe(self, guest: _Guest, proof: bytes) -> None:
        if not hmac.compare_digest(proof, guest.expected):
            return self._turn_away(guest)
        other = guest.hello[-SECRET_BYTES:]
        try:
            of_client, of_server = _session(
                self.meeting, guest.secret, guest.own, other, guest.said
            )
        except NotYet:
            return self._turn_away(guest)
        self._guests.unregister(guest.connection)
        known = self.trusted.pop(guest.rank, None)
        if known is not None:  # the rank began anew, and has given this connection up
            known.connection.close()
        self.trusted[guest.rank] = Trusted(guest.connection, (of_server, of_client))
        return None

    def _turn_away(self, guest: _Guest) -> None:
        self.strangers += 1
        self._guests.unregister(guest.connection)
        guest.connection.close()


class NotYet(Exception):
    """Another rank has yet to do its part in this attempt."""


def _attempt(store: Any) -> str:
    """Name the attempt that the store's number stands for, without the number."""
    return hashlib.sha256(_read(store, "number").encode()).hexdigest()[:16]


def _awaited(store: Any, rank: int) -> str:
    """Return the rank that a rank of this attempt waits for, as far as it has said so."""
    with contextlib.suppress(NotYet):
        attempt, awaited = _read(store, f"waits {rank}").split()
        if attempt == _attempt(store):
            return awaited
    return ""


def _read(store: Any, key: str) -> str:
    if not store.check([key]):  # `check` returns at once, so this rank still answers others
        raise NotYet(f"{key!r} is not in the store yet")
    return bytes(store.get(key)).decode()


def listening(store: Any) -> socket.socket:
    """Listen at this rank's address, at a free port."""
    host = _own_address(store)
    listener = socket.create_server((host, 0), family=_family(host), backlog=_MOST_PENDING)
    listener.setblocking(False)
    choose(listener)
    return listener


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _own_address(store: Any) -> str:
    """Return this rank's address towards the store, where the other ranks can reach it too."""
    wanted = os.environ.get(INTERFACE_VARIABLE) or os.environ.get("GLOO_SOCKET_IFNAME")
    if wanted:
        wanted = wanted.split(",")[0]
        with contextlib.suppress(ValueError):
            return str(ipaddress.ip_address(wanted))
        if not (named := interface_address(wanted)):
            raise TransportError(
                f"{INTERFACE_VARIABLE}: expected an address or an interface of this host that has "
                f"one, got {wanted!r}"
            )
        return named
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    host = str(getattr(store, "host", "")) or socket.gethostname()
    with contextlib.suppress(OSError):
        for family, kind, protocol, _, address in socket.getaddrinfo(
            host, 9, type=socket.SOCK_DGRAM
        ):
            with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.connect(address)  # a datagram socket sends nothing here
                return str(probe.getsockname()[0])
    return "127.0.0.1"


def interface_address(name: str) -> str:
    """Return an interface's address; "" for an interface without one or an unknown name."""
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        try:
            answer = fcntl.ioctl(asked, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        except OSError:
            return ""
    return socket.inet_ntoa(answer[20:24])


def _machine() -> str:
    """Return a name of the running kernel; ranks with the same one share its processors."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as boot:
            return boot.read().strip()
    except OSError:
        return socket.gethostname()
