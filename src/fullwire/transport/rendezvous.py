"""How the ranks of a group find and trust each other, before any of them says anything else.

Each rank listens, writes its address into the group's store, and connects to all ranks below its
own. Rank 0 writes a random number there, another one for each attempt. Of the job's key and that
number comes a secret, into which the names of the group, its ranks and this protocol go too; where
the job has no key, whoever reads the store can make it. A connection counts after both ends have
shown that they know it:

    client   "FWT3", its rank, the rank it looks for, 32 random bytes, an X25519 key
    server   32 random bytes, an X25519 key, HMAC(secret, "server" and all of the above)
    client   HMAC(secret, "client" and all of the above)

The X25519 keys are new for each connection, and zero where nothing is encrypted. Of what they give
to both ends come the keys of both directions: who learns the job's key later cannot read what was
said before. docs/design/security.md says what that keeps from whom.

Whatever else comes closes its connection and is counted; it gets no answer. A store may still hold
addresses and numbers of a job that was restarted: what does not work is read again and tried again
until the time is over. Once the last rank has come nobody listens any more. A rank that cannot
start says so in the store, in place of its address.
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
_MAGIC = b"FWT3"
_HELLO = struct.Struct("!4sII32s32s")
_NONCE_BYTES = 32
_PROOF_BYTES = 32
_NO_KEY = bytes(SECRET_BYTES)  # where nothing is encrypted
_PATIENCE_S = 5.0  # with one stranger
_MOST_PENDING = 64
_RETRY_S = 0.02
_LOOK_UP_S = 0.5  # so often a rank that waits looks whether those it waits for have failed
_FAILED = "failed"
_LONGEST_WAIT_FOR_NUMBER_S = 20.0  # of rank 0, which may begin later
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
    """Connections by rank (-1 at the own place), and who else was at the door.

    `keys` are those of both directions, what is sent first, by rank; none without encryption.
    """

    sockets: list[int]
    machines: list[str]
    strangers: int
    keys: list[tuple[bytes, bytes]]


@dataclass(frozen=True)
class Meeting:
    """Who is to meet, and what they have in common before."""

    store: Any
    rank: int
    size: int
    name: str  # of the group, its ranks and the stream: no connection of another one counts
    protection: Protection

    def secret(self) -> bytes:
        """Make what a rank of this group has to know; of this attempt, as far as one can see."""
        number = bytes.fromhex(_read(self.store, "number"))
        purpose = f"{_MAGIC.decode()} {self.protection} {self.size} {self.name}"
        return expanded(extracted(number, self.protection.key), purpose.encode())

    def record(self, other: int) -> tuple[str, int, str]:
        """Return a rank's address and machine."""
        said = _read(self.store, f"rank {other}")
        if said.startswith(_FAILED):
            raise _NotYet(said.removeprefix(_FAILED).split(" ", 2)[2])
        host, port, machine, protection = said.split(" ")
        if protection != str(self.protection):
            raise _NotYet(
                f"it is {protection} and this rank {self.protection}: every rank needs the same "
                "FULLWIRE_KEY_FILE and FULLWIRE_ENCRYPT"
            )
        return host, int(port), machine

    def raise_if_failed(self, others: list[int]) -> None:
        """Raise what one of these ranks has said in this attempt instead of its address."""
        for other in others:
            with contextlib.suppress(_NotYet):
                said = _read(self.store, f"rank {other}")
                if said.startswith(f"{_FAILED} {_attempt(self.store)} "):
                    raise TransportError(said.split(" ", 2)[2])

    def why_not(self, other: int) -> str:
        """Say why a rank has not come, if the store tells."""
        try:
            self.record(other)
        except _NotYet as error:
            return f" (rank {other}: {error})"
        return ""


def meet(meeting: Meeting, timeout_s: float) -> Met:
    """Connect this rank with all others of its group."""
    store, rank, size = meeting.store, meeting.rank, meeting.size
    until = time.monotonic() + timeout_s
    with contextlib.ExitStack() as opened:
        listener = opened.enter_context(_listener(store))
        host, port = listener.getsockname()[:2]
        if rank == 0:
            store.set("number", secrets.token_hex(_NONCE_BYTES))
        store.set(f"rank {rank}", f"{host} {port} {_machine()} {meeting.protection}")
        door = _Door(listener, meeting)
        opened.callback(door.close)
        found: dict[int, _Trusted] = {}
        for other in range(rank):
            found[other] = _connected(meeting, other, door, until, is_current=other > 0)
            opened.callback(found[other].connection.close)
        looked = 0.0
        while len(door.trusted) < size - 1 - rank:
            missing = sorted(set(range(rank + 1, size)) - set(door.trusted))
            if time.monotonic() > until:
                who = ", ".join(map(str, missing))
                text = f"rendezvous: rank {who} did not connect within {timeout_s:g} s"
                text += "".join(map(meeting.why_not, missing[:4]))
                if door.strangers:
                    text += f" ({door.strangers} connections of strangers were closed)"
                raise TransportError(text)
            if time.monotonic() - looked > _LOOK_UP_S:
                looked = time.monotonic()
                meeting.raise_if_failed(missing)
            door.answer(0.05)
        found |= door.trusted
        try:
            machines = [meeting.record(other)[2] for other in range(size)]
        except _NotYet as error:  # a rank that was met, and has failed since
            raise TransportError(str(error)) from None
        for each in found.values():
            each.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        keys = [
            found[other].keys if other in found else (_NO_KEY, _NO_KEY) for other in range(size)
        ]
        sockets = [
            found[other].connection.detach() if other in found else -1 for other in range(size)
        ]
        door.trusted.clear()
    return Met(sockets, machines, door.strangers, keys if meeting.protection.encrypts else [])


def lack(error: BaseException) -> str:
    """Name what a process has run out of, "" if it is anything else."""
    if isinstance(error, MemoryError):
        return "out of memory"
    if isinstance(error, OSError) and not isinstance(error, BlockingIOError):
        return _LACKS.get(error.errno or 0, "")
    return "no new thread" if "start new thread" in str(error) else ""


def leave_word(store: Any, rank: int, problem: str) -> None:
    """Tell in the store why this rank does not come."""
    with contextlib.suppress(_NotYet, RuntimeError, OSError):  # the store may be what is gone
        until = time.monotonic() + _LONGEST_WAIT_FOR_NUMBER_S
        while not store.check(["number"]) and time.monotonic() < until:
            time.sleep(_RETRY_S)
        store.set(f"rank {rank}", f"{_FAILED} {_attempt(store)} {problem}")


def why_no_group(
    error: BaseException, own: str, group: str, store: Any, rank: int, size: int
) -> str:
    """Say why this rank has no group; what it lacked itself is left in the store as well."""
    lacks = lack(error)
    problem = f"{own}: {lacks}, at the start of group {group}" if lacks else ""
    if isinstance(error, TransportError | RuntimeError) and str(error).startswith(f"{own}: "):
        problem = str(error)
    if problem:
        leave_word(store, rank, problem)
    elif isinstance(error, TransportError):
        words = [str(error)]  # and those of ranks that did not come, as they say
        with contextlib.suppress(_NotYet, RuntimeError, OSError):
            said = [_read(store, f"rank {other}") for other in range(size)]
            words += [each.split(" ", 2)[2] for each in said if each.startswith(_FAILED)]
        problem = "; ".join(words)
    return problem


@dataclass(frozen=True)
class _Trusted:
    connection: socket.socket
    keys: tuple[bytes, bytes]  # of what is sent, and of what is received


def _connected(
    meeting: Meeting, other: int, door: _Door, until: float, *, is_current: bool
) -> _Trusted:
    """Connect to a rank, answering at the own door meanwhile.

    Once rank 0 has been met, the store's number is known to be of this attempt.
    """
    reason, looked = "it has not said where it is", 0.0
    while time.monotonic() < until:
        door.answer(0)
        if is_current and time.monotonic() - looked > _LOOK_UP_S:
            looked = time.monotonic()
            meeting.raise_if_failed([other])
        try:
            host, port, _ = meeting.record(other)
            return _introduced(host, port, meeting, other)
        except _NotYet as error:
            reason = str(error)
        except OSError as error:
            if lack(error):
                raise
            reason = f"{host}:{port}: {error.strerror or error}"
        door.answer(_RETRY_S)
    raise TransportError(f"rendezvous: rank {other} could not be reached: {reason}")


def _introduced(host: str, port: int, meeting: Meeting, other: int) -> _Trusted:
    """Connect and show that one knows the secret, once the other end has shown it."""
    secret = meeting.secret()
    own = secrets.token_bytes(SECRET_BYTES)
    nonce, public = secrets.token_bytes(_NONCE_BYTES), _public(meeting, own)
    hello = _HELLO.pack(_MAGIC, meeting.rank, other, nonce, public)
    with contextlib.ExitStack() as unless_trusted:
        connection = socket.socket(_family(host))
        unless_trusted.callback(connection.close)
        choose(connection)
        connection.settimeout(_PATIENCE_S)
        connection.connect((host, port))
        connection.sendall(hello)
        answer = _exactly(connection, _NONCE_BYTES + SECRET_BYTES + _PROOF_BYTES)
        said, proof = answer[:-_PROOF_BYTES], answer[-_PROOF_BYTES:]
        if not hmac.compare_digest(proof, _proof(secret, b"server", hello + said)):
            raise _NotYet(f"{host}:{port} does not know the secret of this job")
        connection.sendall(_proof(secret, b"client", hello + said))
        connection.setblocking(False)
        of_client, of_server = _session(meeting, secret, own, said[_NONCE_BYTES:], hello + said)
        unless_trusted.pop_all()
    return _Trusted(connection, (of_client, of_server))


def _public(meeting: Meeting, own: bytes) -> bytes:
    return _native.x25519_public(own) if meeting.protection.encrypts else _NO_KEY


def _session(
    meeting: Meeting, secret: bytes, own: bytes, other: bytes, said: bytes
) -> tuple[bytes, bytes]:
    """Make the keys of both directions, the client's first."""
    if not meeting.protection.encrypts:
        return _NO_KEY, _NO_KEY
    try:
        shared = _native.x25519_shared(own, other)
    except RuntimeError as error:
        raise _NotYet(str(error)) from None
    common = extracted(secret, shared + said)
    return expanded(common, b"client to server"), expanded(common, b"server to client")


def _exactly(connection: socket.socket, count: int) -> bytes:
    received = b""
    while len(received) < count:
        piece = connection.recv(count - len(received))
        if not piece:
            raise _NotYet("it closed the connection")
        received += piece
    return received


def _proof(secret: bytes, who: bytes, said: bytes) -> bytes:
    return hmac.digest(secret, who + said, "sha256")


@dataclass
class _Guest:
    """Somebody who has connected and has not shown the secret yet."""

    connection: socket.socket
    until: float
    received: bytes = b""
    hello: bytes = b""
    expected: bytes = b""  # the proof that would make a rank of it
    rank: int = -1
    own: bytes = b""  # our X25519 key for this guest
    said: bytes = b""  # by both, but for the proofs
    secret: bytes = b""


@dataclass
class _Door:
    """The listening socket, and everybody at it."""

    listener: socket.socket
    meeting: Meeting
    trusted: dict[int, _Trusted] = field(default_factory=dict)
    strangers: int = 0

    def __post_init__(self) -> None:
        self._guests = selectors.DefaultSelector()
        self._guests.register(self.listener, selectors.EVENT_READ, None)

    def answer(self, wait_s: float) -> None:
        """Let in who is there and hear who has said something."""
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
        """Turn everybody away who has shown nothing."""
        for guest in self._waiting():
            guest.connection.close()
        for each in self.trusted.values():
            each.connection.close()
        self._guests.close()

    def _waiting(self) -> list[_Guest]:
        return [key.data for key in list(self._guests.get_map().values()) if key.data]

    def _let_in(self) -> None:
        try:
            connection, _ = self.listener.accept()
        except OSError as error:
            if lack(error):  # or it would be asked again and again, and nobody would be let in
                raise
            return
        waiting = self._waiting()
        if len(waiting) >= _MOST_PENDING:
            # Who has said something plausible may be a rank; and of all others the first to come.
            self._turn_away(min(waiting, key=lambda guest: (bool(guest.hello), guest.until)))
        connection.setblocking(False)
        guest = _Guest(connection, time.monotonic() + _PATIENCE_S)
        self._guests.register(connection, selectors.EVENT_READ, guest)

    def _hear(self, guest: _Guest) -> None:
        if guest.connection.fileno() < 0:  # turned away while what it said was waiting
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
            said, guest.received = guest.received, b""
            self._believe(guest, said) if guest.hello else self._greet(guest, said)

    def _greet(self, guest: _Guest, hello: bytes) -> None:
        meeting = self.meeting
        magic, guest.rank, looked_for, _, _ = _HELLO.unpack(hello)
        is_plausible = magic == _MAGIC and looked_for == meeting.rank < guest.rank < meeting.size
        if not is_plausible:
            return self._turn_away(guest)
        try:  # made each time: the number of an earlier attempt may have been there first
            guest.secret = meeting.secret()
            guest.own = secrets.token_bytes(SECRET_BYTES)
            answer = secrets.token_bytes(_NONCE_BYTES) + _public(meeting, guest.own)
            guest.hello, guest.said = hello, hello + answer
            guest.until = time.monotonic() + _PATIENCE_S
            guest.expected = _proof(guest.secret, b"client", guest.said)
            guest.connection.send(answer + _proof(guest.secret, b"server", guest.said))
        except (OSError, _NotYet):
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
        except _NotYet:
            return self._turn_away(guest)
        self._guests.unregister(guest.connection)
        known = self.trusted.pop(guest.rank, None)
        if known is not None:  # it began anew, and has given this one up
            known.connection.close()
        self.trusted[guest.rank] = _Trusted(guest.connection, (of_server, of_client))
        return None

    def _turn_away(self, guest: _Guest) -> None:
        self.strangers += 1
        self._guests.unregister(guest.connection)
        guest.connection.close()


class _NotYet(Exception):
    """What another rank has to do has not happened yet, or not in this attempt."""


def _attempt(store: Any) -> str:
    """Name the attempt that the store's number stands for, without the number."""
    return hashlib.sha256(_read(store, "number").encode()).hexdigest()[:16]


def _read(store: Any, key: str) -> str:
    if not store.check([key]):  # which does not wait, so the own door stays attended
        raise _NotYet(f"{key!r} is not in the store yet")
    return bytes(store.get(key)).decode()


def _listener(store: Any) -> socket.socket:
    host = _own_address(store)
    listener = socket.create_server((host, 0), family=_family(host), backlog=_MOST_PENDING)
    listener.setblocking(False)
    choose(listener)
    return listener


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _own_address(store: Any) -> str:
    """Choose the address that the store is reached from: there the other ranks can reach us."""
    wanted = os.environ.get(INTERFACE_VARIABLE) or os.environ.get("GLOO_SOCKET_IFNAME")
    if wanted:
        wanted = wanted.split(",")[0]
        with contextlib.suppress(ValueError):
            return str(ipaddress.ip_address(wanted))
        if not (found := interface_address(wanted)):
            raise TransportError(
                f"{INTERFACE_VARIABLE}: expected an address or an interface of this host that has "
                f"one, got {wanted!r}"
            )
        return found
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    host = str(getattr(store, "host", "")) or socket.gethostname()
    with contextlib.suppress(OSError):
        for family, kind, protocol, _, address in socket.getaddrinfo(
            host, 9, type=socket.SOCK_DGRAM
        ):
            with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.connect(address)  # of a datagram socket: nothing is sent
                return str(probe.getsockname()[0])
    return "127.0.0.1"


def interface_address(name: str) -> str:
    """Return an interface's address, "" where there is none, or no such interface."""
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        try:
            answer = fcntl.ioctl(asked, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        except OSError:
            return ""
    return socket.inet_ntoa(answer[20:24])


def _machine() -> str:
    """Name the running kernel, whose processors ranks may have to share."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as boot:
            return boot.read().strip()
    except OSError:
        return socket.gethostname()
