"""How the ranks of a group find and trust each other, before any of them says anything else.

Each rank listens, writes its address into the group's store, and connects to all ranks below its
own. Rank 0 writes a secret there. A connection counts after both ends have shown that they know it:

    client   "FWT1", its rank, the rank it looks for, 32 random bytes
    server   32 random bytes, HMAC(secret, "server" and all of the above)
    client   HMAC(secret, "client" and all of the above)

Whatever else comes closes its connection and is counted; it gets no answer. A store may still hold
addresses and secrets of a job that was restarted: what does not work is read again and tried again
until the time is over. Once the last rank has come nobody listens any more.
"""

from __future__ import annotations

import contextlib
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

from fullwire.errors import TransportError
from fullwire.transport.congestion import choose

INTERFACE_VARIABLE = "FULLWIRE_INTERFACE"  # the address, or the interface, to listen at
_MAGIC = b"FWT1"
_HELLO = struct.Struct("!4sII32s")
_NONCE_BYTES = 32
_PROOF_BYTES = 32
_PATIENCE_S = 5.0  # with one stranger
_MOST_PENDING = 64
_RETRY_S = 0.02
_SIOCGIFADDR = 0x8915


@dataclass(frozen=True)
class Met:
    """Connections by rank (-1 at the own place), and who else was at the door."""

    sockets: list[int]
    machines: list[str]
    strangers: int


def meet(store: Any, rank: int, size: int, timeout_s: float) -> Met:
    """Connect this rank with all others of its group."""
    until = time.monotonic() + timeout_s
    with contextlib.ExitStack() as opened:
        listener = opened.enter_context(_listener(store))
        host, port = listener.getsockname()[:2]
        if rank == 0:
            store.set("secret", secrets.token_hex(_NONCE_BYTES))
        store.set(f"rank {rank}", f"{host} {port} {_machine()}")
        door = _Door(listener, store, rank, size)
        opened.callback(door.close)
        found: dict[int, socket.socket] = {}
        for other in range(rank):
            found[other] = _connected(store, rank, other, door, until)
            opened.callback(found[other].close)
        while len(door.trusted) < size - 1 - rank:
            if time.monotonic() > until:
                missing = sorted(set(range(rank + 1, size)) - set(door.trusted))
                raise TransportError(_not_met(missing, timeout_s, door.strangers))
            door.answer(0.05)
        found |= door.trusted
        machines = [_record(store, other)[2] for other in range(size)]
        for each in found.values():
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sockets = [found[other].detach() if other in found else -1 for other in range(size)]
        door.trusted.clear()
    return Met(sockets, machines, door.strangers)


def _not_met(missing: list[int], timeout_s: float, strangers: int) -> str:
    who = ", ".join(map(str, missing))
    text = f"rendezvous: rank {who} did not connect within {timeout_s:g} s"
    return text + (f" ({strangers} connections of strangers were closed)" if strangers else "")


def _connected(store: Any, rank: int, other: int, door: _Door, until: float) -> socket.socket:
    """Connect to a rank, answering at the own door meanwhile."""
    reason = "it has not said where it is"
    while time.monotonic() < until:
        door.answer(0)
        try:
            host, port, _ = _record(store, other)
            return _introduced(host, port, rank, other, _secret(store))
        except _NotYet as error:
            reason = str(error)
        except OSError as error:
            reason = f"{host}:{port}: {error.strerror or error}"
        door.answer(_RETRY_S)
    raise TransportError(f"rendezvous: rank {other} could not be reached: {reason}")


def _introduced(host: str, port: int, rank: int, other: int, secret: bytes) -> socket.socket:
    """Connect and show that one knows the secret, once the other end has shown it."""
    hello = _HELLO.pack(_MAGIC, rank, other, secrets.token_bytes(_NONCE_BYTES))
    with contextlib.ExitStack() as unless_trusted:
        connection = socket.socket(_family(host))
        unless_trusted.callback(connection.close)
        choose(connection)
        connection.settimeout(_PATIENCE_S)
        connection.connect((host, port))
        connection.sendall(hello)
        answer = _exactly(connection, _NONCE_BYTES + _PROOF_BYTES)
        nonce, proof = answer[:_NONCE_BYTES], answer[_NONCE_BYTES:]
        if not hmac.compare_digest(proof, _proof(secret, b"server", hello + nonce)):
            raise _NotYet(f"{host}:{port} does not know the secret of this job")
        connection.sendall(_proof(secret, b"client", hello + nonce))
        connection.setblocking(False)
        unless_trusted.pop_all()
    return connection


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


@dataclass
class _Door:
    """The listening socket, and everybody at it."""

    listener: socket.socket
    store: Any
    rank: int
    size: int
    trusted: dict[int, socket.socket] = field(default_factory=dict)
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
        for connection in self.trusted.values():
            connection.close()
        self._guests.close()

    def _waiting(self) -> list[_Guest]:
        return [key.data for key in list(self._guests.get_map().values()) if key.data]

    def _let_in(self) -> None:
        try:
            connection, _ = self.listener.accept()
        except OSError:
            return
        waiting = self._waiting()
        if len(waiting) >= _MOST_PENDING:
            # Who has said something plausible may be a rank; and of all others the first to come.
            self._turn_away(min(waiting, key=lambda guest: (bool(guest.hello), guest.until)))
        connection.setblocking(False)
        guest = _Guest(connection, time.monotonic() + _PATIENCE_S)
        self._guests.register(connection, selectors.EVENT_READ, guest)

    def _hear(self, guest: _Guest) -> None:
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
        magic, guest.rank, looked_for, _ = _HELLO.unpack(hello)
        is_plausible = magic == _MAGIC and looked_for == self.rank < guest.rank < self.size
        if not is_plausible:
            return self._turn_away(guest)
        try:  # read each time: the one of an earlier attempt may have been there first
            secret = _secret(self.store)
            nonce = secrets.token_bytes(_NONCE_BYTES)
            guest.hello = hello
            guest.until = time.monotonic() + _PATIENCE_S
            guest.expected = _proof(secret, b"client", hello + nonce)
            guest.connection.send(nonce + _proof(secret, b"server", hello + nonce))
        except (OSError, _NotYet):
            self._turn_away(guest)
        return None

    def _believe(self, guest: _Guest, proof: bytes) -> None:
        if not hmac.compare_digest(proof, guest.expected):
            return self._turn_away(guest)
        self._guests.unregister(guest.connection)
        known = self.trusted.pop(guest.rank, None)
        if known is not None:  # it began anew, and has given this one up
            known.close()
        self.trusted[guest.rank] = guest.connection
        return None

    def _turn_away(self, guest: _Guest) -> None:
        self.strangers += 1
        self._guests.unregister(guest.connection)
        guest.connection.close()


class _NotYet(Exception):
    """What another rank has to do has not happened yet, or not in this attempt."""


def _record(store: Any, rank: int) -> tuple[str, int, str]:
    host, port, machine = _read(store, f"rank {rank}").split(" ")
    return host, int(port), machine


def _secret(store: Any) -> bytes:
    return bytes.fromhex(_read(store, "secret"))


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
        return _address_of(wanted.split(",")[0])
    return _route_to(_store_host(store)) or "127.0.0.1"


def _store_host(store: Any) -> str:
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return str(getattr(store, "host", "")) or socket.gethostname()


def _route_to(host: str) -> str:
    try:
        found = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
    except OSError:
        return ""
    for family, kind, protocol, _, address in found:
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
            probe.connect(address)  # of a datagram socket: nothing is sent
            return str(probe.getsockname()[0])
    return ""


def _address_of(wanted: str) -> str:
    """Take an address as it is, or find that of an interface."""
    with contextlib.suppress(ValueError):
        return str(ipaddress.ip_address(wanted))
    found = interface_address(wanted)
    if not found:
        raise TransportError(
            f"{INTERFACE_VARIABLE}: expected an address or an interface of this host that has "
            f"one, got {wanted!r}"
        )
    return found


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
