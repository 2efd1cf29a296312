"""The threat model of docs/design/security.md: a hundred attacks, of which all must fail.

A stranger reaches every address of the job. In most cases he also reads and writes the store, but
he never has the key. Each case is one attempt against a rank that waits, or against a connection.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import re
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fullwire import _native
from fullwire.errors import TransportError
from fullwire.transport import keys, programs, rendezvous
from fullwire.transport.keys import Protection
from fullwire.transport.rendezvous import Meeting

KEY = b"k" * 64
HELLO = struct.Struct("!4sII32s32s")
NONCE = bytes(range(32))
RECORD_HEAD = 4

needs_encryption = pytest.mark.skipif(
    bool(_native.encryption_problem()), reason="needs libcrypto.so.3 of OpenSSL 3"
)


class Store:
    """Stands for torch's store, in this process."""

    host = "127.0.0.1"

    def __init__(self) -> None:
        self.said: dict[str, bytes] = {}

    def set(self, key: str, value: str) -> None:
        self.said[key] = value.encode()

    def get(self, key: str) -> bytes:
        return self.said[key]

    def check(self, names: list[str]) -> bool:
        return all(name in self.said for name in names)


def a_meeting(store: Store, rank: int, **others: Any) -> Meeting:
    usual: dict[str, Any] = {
        "size": 2,
        "name": "0 of [0, 1]",
        "protection": Protection(KEY, encrypts=False),
    }
    return Meeting(store, rank, **{**usual, **others})


class Waiting:
    """Rank 0, which waits for rank 1 while strangers come."""

    def __init__(self, protection: Protection) -> None:
        self.store = Store()
        self.meeting = a_meeting(self.store, 0, protection=protection)
        self.met: rendezvous.Met | None = None
        self._thread = threading.Thread(target=self._wait)
        self._thread.start()
        while "rank 0" not in self.store.said:
            time.sleep(0.001)
        host, port, *_ = self.store.get("rank 0").decode().split(" ")
        self.address = (host, int(port))

    def _wait(self) -> None:
        self.met = rendezvous.meet(self.meeting, 30)

    def connected(self) -> socket.socket:
        return socket.create_connection(self.address, timeout=10)

    def secret_of(self, **others: Any) -> bytes:
        """Make the secret of a group like ours, except for one property."""
        return a_meeting(
            self.store, 1, **{"protection": self.meeting.protection, **others}
        ).secret()

    def end(self) -> int:
        """Let the true rank 1 come; return how many strangers were turned away before."""
        mine = replace(self.meeting, rank=1)
        true = rendezvous.meet(mine, 30)
        self._thread.join(30)
        assert self.met is not None
        for each in (*true.sockets, *self.met.sockets):
            if each >= 0:
                os.close(each)
        return self.met.strangers


@pytest.fixture(params=[False, pytest.param(True, marks=needs_encryption)])
def waiting(request: pytest.FixtureRequest) -> Waiting:
    return Waiting(Protection(KEY, encrypts=request.param))


class SlowWords(Store):
    """A store whose words come later than connections, as those of an elastic job may."""

    def __init__(self, said: dict[str, bytes]) -> None:
        super().__init__()
        self.said = said

    def set(self, key: str, value: str) -> None:
        threading.Timer(0.3, self.said.__setitem__, (key, value.encode())).start()


def test_a_rank_whose_connection_comes_before_its_word_is_waited_for(waiting: Waiting) -> None:
    """An elastic job's ranks met so at times, and rank 0 said that rank 1 had left no word."""
    waiting.meeting = replace(waiting.meeting, store=SlowWords(waiting.store.said))
    assert waiting.end() == 0


def hello(magic: bytes = b"FWT4", rank: int = 1, other: int = 0, public: bytes = NONCE) -> bytes:
    return HELLO.pack(magic, rank, other, NONCE, public)


def introduced(waiting: Waiting, said: bytes, secret: bytes, who: bytes = b"client") -> bytes:
    """Send a hello and a proof made with this secret; return the answer."""
    with waiting.connected() as stranger, contextlib.suppress(OSError):
        stranger.sendall(said)
        answer = exactly(stranger, 96)
        stranger.sendall(hmac.digest(secret, who + said + answer[:64], "sha256"))
        return stranger.recv(1)
    return b""


def exactly(connection: socket.socket, count: int) -> bytes:
    received = b""
    while len(received) < count and (piece := connection.recv(count - len(received))):
        received += piece
    return received


def says(*pieces: bytes) -> Callable[[Waiting], None]:
    def attempt(waiting: Waiting) -> None:
        with waiting.connected() as stranger, contextlib.suppress(OSError):
            for piece in pieces:
                stranger.sendall(piece)
            stranger.shutdown(socket.SHUT_WR)
            while stranger.recv(4096):
                pass

    return attempt


def proves(make: Callable[[Waiting], bytes], who: bytes = b"client") -> Callable[[Waiting], None]:
    def attempt(waiting: Waiting) -> None:
        assert not introduced(waiting, hello(), make(waiting), who)

    return attempt


def number_of(waiting: Waiting) -> bytes:
    return bytes.fromhex(waiting.store.get("number").decode())


def replayed(waiting: Waiting) -> None:
    """Record all messages of a true rank to another group of this key, and send them here."""
    other = Waiting(waiting.meeting.protection)
    said = hello()
    with other.connected() as honest:
        honest.sendall(said)
        answer = exactly(honest, 96)
        proof = hmac.digest(other.secret_of(), b"client" + said + answer[:64], "sha256")
    says(said + proof)(waiting)
    other.end()


def reflected(waiting: Waiting) -> None:
    """Send the server's own proof back to it."""
    with waiting.connected() as stranger, contextlib.suppress(OSError):
        stranger.sendall(hello())
        stranger.sendall(exactly(stranger, 96)[64:])
        assert not stranger.recv(1)


def passed_between(waiting: Waiting) -> None:
    """Use one guest's proof for another guest."""
    with (
        waiting.connected() as one,
        waiting.connected() as other,
        contextlib.suppress(OSError),
    ):
        one.sendall(hello())
        other.sendall(hello())
        of_one = exactly(one, 96)
        exactly(other, 96)
        proof = hmac.digest(waiting.secret_of(), b"client" + hello() + of_one[:64], "sha256")
        other.sendall(proof)
        assert not other.recv(1)


def half_open(waiting: Waiting) -> None:
    """Take every place at the door, and send nothing."""
    with contextlib.ExitStack() as opened:
        for _ in range(70):
            opened.enter_context(waiting.connected())


def between(at: int, from_server: bool) -> Callable[[Waiting], None]:
    """Stand between the true ranks, and flip a bit of their first messages."""

    def attempt(waiting: Waiting) -> None:
        mine = a_meeting(Store(), 1, protection=waiting.meeting.protection)
        mine.store.said |= waiting.store.said
        with socket.create_server(("127.0.0.1", 0)) as door:
            port = door.getsockname()[1]
            record = waiting.store.get("rank 0").decode().split(" ")
            mine.store.set("rank 0", " ".join([record[0], str(port), *record[2:]]))
            relay = threading.Thread(target=relayed, args=(door, waiting, at, from_server))
            relay.start()
            try:
                met = rendezvous.meet(mine, 0.4)
            except TransportError:
                pass
            else:  # the host answers a proof with nothing, so its guest has met the true host
                assert not from_server, "a changed message was believed"
                assert at >= 76, "a changed message was believed"
                os.close(met.sockets[0])
            door.shutdown(socket.SHUT_RDWR)
            relay.join(10)

    return attempt


def relayed(door: socket.socket, waiting: Waiting, at: int, from_server: bool) -> None:
    """Pass on the first messages of each connection, with the bit at `at` flipped."""
    with contextlib.suppress(OSError):
        while True:
            client, _ = door.accept()
            with client, waiting.connected() as server, contextlib.suppress(OSError):
                client.settimeout(0.3)
                server.settimeout(0.3)
                for source, target, count in ((client, server, 76), (server, client, 96)):
                    piece = bytearray(exactly(source, count))
                    if from_server == (source is server) and at < len(piece):
                        piece[at] ^= 1
                    target.sendall(piece)
                proof = bytearray(exactly(client, 32))
                if not from_server and 76 <= at < 76 + len(proof):
                    proof[at - 76] ^= 1
                server.sendall(proof)
                exactly(server, 1)


def misled(change: Callable[[Store], None]) -> Callable[[Waiting], None]:
    """Show one rank another store than the other one."""

    def attempt(waiting: Waiting) -> None:
        mine = a_meeting(Store(), 1, protection=waiting.meeting.protection)
        mine.store.said |= waiting.store.said
        change(mine.store)
        with pytest.raises((TransportError, ValueError)):
            rendezvous.meet(mine, 0.4)
        says(hello())(waiting)  # so that there is a stranger to count

    return attempt


OTHER_NUMBER = "ff" * 32
FLIPS = {
    "the version in a hello": (0, False),
    "the rank in a hello": (7, False),
    "the other rank in a hello": (11, False),
    "a guest's number, at its begin": (12, False),
    "a guest's number, at its end": (43, False),
    "a guest's public key, at its begin": (44, False),
    "a guest's public key, at its end": (74, False),
    "a guest's proof, at its begin": (76, False),
    "a guest's proof, at its end": (107, False),
    "a host's number, at its begin": (0, True),
    "a host's number, at its end": (31, True),
    "a host's public key, at its begin": (32, True),
    "a host's public key, at its end": (62, True),
    "a host's proof, at its begin": (64, True),
    "a host's proof, at its end": (95, True),
}
WAYS: dict[str, Callable[[Waiting], None]] = {
    "nothing": says(),
    "a byte": says(b"F"),
    "half a hello": says(hello()[:40]),
    "zeros": says(bytes(4096)),
    "a page of noise": says(secrets.token_bytes(4096)),
    "http": says(b"GET / HTTP/1.1\r\nHost: rank0\r\n\r\n"),
    "tls": says(bytes.fromhex("16030100dc010000d80303") + bytes(220)),
    "ssh": says(b"SSH-2.0-OpenSSH_9.2\r\n"),
    "the version before": says(hello(b"FWT1")),
    "the version of frames": says(hello(b"FWT2")),
    "a later version": says(hello(b"FWT4")),
    "a frame of the transport": says(b"FWT2" + bytes(44)),
    "a record of the transport": says(struct.pack("<I", 64) + bytes(64)),
    "as the rank that waits": says(hello(rank=0)),
    "as a rank beyond the last": says(hello(rank=2)),
    "as the largest rank": says(hello(rank=2**32 - 1)),
    "to another rank": says(hello(other=1)),
    "a hello and no proof": says(hello()),
    "a hello twice": says(hello(), hello()),
    "a hello and zeros": says(hello(), bytes(32)),
    "a hello and noise": says(hello(), secrets.token_bytes(32)),
    "a hello, a proof cut by a byte": says(hello(), bytes(31)),
    "a proof without a key": proves(lambda waiting: b""),
    "a proof with the number as the secret": proves(number_of),
    "a proof with the number in words": proves(lambda waiting: waiting.store.get("number")),
    "a proof with the hash of the number": proves(
        lambda waiting: hashlib.sha256(number_of(waiting)).digest()
    ),
    "as a group without a key": proves(
        lambda waiting: waiting.secret_of(protection=Protection(b"", encrypts=False))
    ),
    "with another key": proves(
        lambda waiting: waiting.secret_of(protection=Protection(b"x" * 64, encrypts=False))
    ),
    "with the key cut by a byte": proves(
        lambda waiting: waiting.secret_of(
            protection=replace(waiting.meeting.protection, key=KEY[:-1])
        )
    ),
    "as a rank of another group": proves(lambda waiting: waiting.secret_of(name="1 of [0, 1]")),
    "as a group of other ranks": proves(lambda waiting: waiting.secret_of(name="0 of [2, 3]")),
    "as another stream": proves(lambda waiting: waiting.secret_of(name="0 of [0, 1], stream 1")),
    "as a larger group": proves(lambda waiting: waiting.secret_of(size=3)),
    "as the other mode": proves(
        lambda waiting: waiting.secret_of(
            protection=Protection(KEY, encrypts=not waiting.meeting.protection.encrypts)
        )
    ),
    "of an earlier attempt": proves(
        lambda waiting: keys.expanded(
            keys.extracted(bytes.fromhex(OTHER_NUMBER), KEY), b"FWT4 keyed-plain 2 0 of [0, 1]"
        )
    ),
    "with the server's word": proves(lambda waiting: waiting.secret_of(), b"server"),
    "with no word": proves(lambda waiting: waiting.secret_of(), b""),
    "a proof with what is no secret": proves(lambda waiting: b"not the secret"),
    "a replay from another group": replayed,
    "the server's own proof": reflected,
    "another guest's proof": passed_between,
    "seventy silent guests": half_open,
    **{f"a bit changed in {what}": between(*where) for what, where in FLIPS.items()},
    "another number in one rank's store": misled(lambda store: store.set("number", OTHER_NUMBER)),
    "no number in one rank's store": misled(lambda store: store.set("number", "")),
    "a number that is none in one rank's store": misled(
        lambda store: store.set("number", "x" * 64)
    ),
    "a group without a key in one rank's store": misled(
        lambda store: store.set(
            "rank 0", re.sub("keyed-(plain|encrypted)", "open-plain", store.said["rank 0"].decode())
        )
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_nobody_gets_in_without_the_key_of_this_group(waiting: Waiting, way: str) -> None:
    WAYS[way](waiting)
    time.sleep(0.05)
    assert waiting.met is None, "a stranger was taken for rank 1"
    assert waiting.end() >= 1


def test_a_rank_of_another_version_is_named_at_the_rendezvous() -> None:
    store = Store()
    meeting = a_meeting(store, 1, protection=Protection(KEY, encrypts=False))
    store.set("number", OTHER_NUMBER)
    store.set("rank 0", f"127.0.0.1 1 there {meeting.protection}")  # as before wire formats
    with pytest.raises(TransportError, match="install the same version on every host"):
        rendezvous.meet(meeting, 0.2)


@pytest.mark.parametrize("encrypts", [False, pytest.param(True, marks=needs_encryption)])
def test_a_rank_says_nothing_to_whom_the_store_sends_it_but_a_hello(encrypts: bool) -> None:
    """A store that lies can keep ranks apart; it does not join them to a stranger."""
    store = Store()
    heard: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        host, port = server.getsockname()

        def lure() -> None:
            with contextlib.suppress(OSError):
                while True:
                    guest, _ = server.accept()
                    with guest:
                        heard.append(exactly(guest, HELLO.size))
                        guest.sendall(bytes(96))
                        heard.append(guest.recv(4096))

        luring = threading.Thread(target=lure, daemon=True)
        luring.start()
        meeting = a_meeting(store, 1, protection=Protection(KEY, encrypts=encrypts))
        store.set("number", OTHER_NUMBER)
        store.set("rank 0", f"{host} {port} there {meeting.protection}/FWT4")
        with pytest.raises(TransportError, match="does not know the secret of this job"):
            rendezvous.meet(meeting, 0.5)
    assert len(heard[0]) == HELLO.size
    assert KEY not in heard[0]
    assert heard[1] == b""


def test_the_store_has_nothing_that_helps_to_join() -> None:
    waiting = Waiting(Protection(KEY, encrypts=False))
    said = b" ".join(waiting.store.said.values())
    assert KEY not in said
    assert KEY.hex().encode() not in said
    assert waiting.secret_of().hex().encode() not in said
    waiting.end()


@needs_encryption
@pytest.mark.parametrize("public", [bytes(32), b"\x01" + bytes(31)])
def test_a_key_that_gives_everybody_the_same_secret_is_refused(public: bytes) -> None:
    with pytest.raises(RuntimeError, match="X25519"):
        _native.x25519_shared(secrets.token_bytes(32), public)


@needs_encryption
def test_x25519_gives_what_rfc_7748_expects() -> None:
    own, other = secrets.token_bytes(32), secrets.token_bytes(32)
    assert _native.x25519_shared(own, _native.x25519_public(other)) == _native.x25519_shared(
        other, _native.x25519_public(own)
    )
    nine = bytes([9]) + bytes(31)  # the base point, as a private key
    assert _native.x25519_public(nine).hex() == (
        "422c8e7a6227d7bca1350b3e2bb7279f7897b87bb6854b783c60e80311ae3079"
    )


def test_the_key_s_derivation_is_hkdf_of_rfc_5869() -> None:
    secret, salt = b"\x0b" * 22, bytes(range(13))
    common = keys.extracted(salt, secret)
    assert common.hex() == "077709362c2e32df0ddc3f0dc47bba6390b6c73bb50f9c3122ec844ad7c2b3e5"
    expected = "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf"
    assert keys.expanded(common, bytes(range(0xF0, 0xFA))).hex() == expected


# ---- Sources of the key -------------------------------------------------------------------------


@pytest.fixture
def no_key(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in (keys.KEY_FILE_VARIABLE, keys.KEY_VARIABLE, keys.ENCRYPT_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_a_key_comes_from_a_file_or_from_a_variable(
    tmp_path: Path, no_key: pytest.MonkeyPatch
) -> None:
    assert keys.protection().key == b""
    no_key.setenv(keys.KEY_VARIABLE, KEY.decode())
    assert keys.protection().key == KEY
    path = tmp_path / "key"
    path.write_bytes(b"f" * 64 + b"\n")
    path.chmod(0o600)
    no_key.setenv(keys.KEY_FILE_VARIABLE, str(path))
    assert keys.protection().key == b"f" * 64


MODES = (0o640, 0o604, 0o620, 0o602, 0o610, 0o601, 0o644, 0o666, 0o777)
NO_KEY_FILES = ("absent", "directory", "fifo", "device", "short", "empty", "long")


def no_key_file(path: Path, kind: str) -> Path:
    """Make something that stands in the place of a key file, and is none."""
    if kind == "device":
        return Path("/dev/zero")
    if kind == "directory":
        path.mkdir(mode=0o700)
    elif kind == "fifo":
        os.mkfifo(path, 0o600)
    elif kind in ("short", "empty", "long"):
        path.write_bytes({"short": b"k" * 31, "empty": b"", "long": b"k" * 5000}[kind])
        path.chmod(0o600)
    return path


@pytest.mark.parametrize("mode", MODES)
def test_a_key_file_that_others_may_open_is_refused(
    tmp_path: Path, no_key: pytest.MonkeyPatch, mode: int
) -> None:
    path = tmp_path / "key"
    path.write_bytes(KEY)
    path.chmod(mode)
    no_key.setenv(keys.KEY_FILE_VARIABLE, str(path))
    with pytest.raises(TransportError, match=f"got mode {mode:o}"):
        keys.protection()


@pytest.mark.parametrize("kind", NO_KEY_FILES)
def test_what_is_no_key_file_is_refused_at_once(
    tmp_path: Path, no_key: pytest.MonkeyPatch, kind: str
) -> None:
    path = no_key_file(tmp_path / "key", kind)
    no_key.setenv(keys.KEY_FILE_VARIABLE, str(path))
    with pytest.raises(TransportError, match=keys.KEY_FILE_VARIABLE):
        keys.protection()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give a file to another user")
def test_a_key_file_of_another_user_is_refused(tmp_path: Path, no_key: pytest.MonkeyPatch) -> None:
    path = tmp_path / "key"
    path.write_bytes(KEY)
    path.chmod(0o600)
    os.chown(path, 12345, -1)
    no_key.setenv(keys.KEY_FILE_VARIABLE, str(path))
    with pytest.raises(TransportError, match="it belongs to 12345"):
        keys.protection()


def test_nobody_encrypts_to_whom_he_does_not_know(no_key: pytest.MonkeyPatch) -> None:
    no_key.setenv(keys.ENCRYPT_VARIABLE, "1")
    with pytest.raises(TransportError, match="expected a key"):
        keys.protection()
    no_key.setenv(keys.ENCRYPT_VARIABLE, "yes")
    with pytest.raises(TransportError, match="expected 0 or 1, got 'yes'"):
        keys.protection()


def test_without_a_key_a_process_says_once_that_it_trusts_its_network(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keys, "_said_once", [])
    for _ in range(3):
        keys.say_once_that_the_network_is_trusted()
    assert capsys.readouterr().err.count("trusts its network") == 1


# ---- Messages over a connection ----------------------------------------------------------------


class Line:
    """Two ranks with a stranger on the line between them: `change` sees each record of rank 0."""

    def __init__(self, change: Callable[[list[bytes]], list[bytes]], records: int = 6) -> None:
        self.seen: list[bytes] = []
        (end_0, here_0), (end_1, here_1) = socket.socketpair(), socket.socketpair()
        self._here = (here_0, here_1)
        self._change, self._records = change, records
        one, other = secrets.token_bytes(32), secrets.token_bytes(32)
        nobody = (bytes(32), bytes(32))
        names = ["0", "1"]
        self.engines = [
            _native.TransportStreams(
                0, [-1, end_0.detach()], names, "g", 5.0, 0, keys=[nobody, (one, other)]
            ),
            _native.TransportStreams(
                1, [end_1.detach(), -1], names, "g", 5.0, 0, keys=[(other, one), nobody]
            ),
        ]
        self._threads = [
            threading.Thread(target=self._pass_on_changed),
            threading.Thread(target=self._pass_back),
        ]
        for each in self._threads:
            each.start()

    def _pass_on_changed(self) -> None:
        source, target = self._here
        held: list[bytes] = []
        with contextlib.suppress(OSError):
            while len(head := exactly(source, RECORD_HEAD)) == RECORD_HEAD:
                held.append(head + exactly(source, struct.unpack("<I", head)[0]))
                self.seen.append(held[-1])
                if len(self.seen) == self._records:
                    held = self._change(held)
                if len(self.seen) >= self._records:
                    target.sendall(b"".join(held))
                    held = []
            target.sendall(b"".join(held))
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    def _pass_back(self) -> None:
        target, source = self._here
        with contextlib.suppress(OSError):
            while piece := source.recv(1 << 16):
                self.seen.append(piece) if self._records < 0 else None
                target.sendall(piece)
            target.shutdown(socket.SHUT_WR)

    def send(self, array: Any) -> tuple[str, Any]:
        """Broadcast from rank 0; return rank 1's error and its data."""
        given = [array, np.zeros_like(array)]

        def one(rank: int) -> Any:
            place = [(given[rank].ctypes.data, array.nbytes), (0, 0)]
            program = programs.broadcast(2, rank, 0, False)
            return self.engines[rank].collective(
                "a broadcast", program, place, place, None, 8, 1, 10.0, False
            )

        tasks = [one(0), one(1)]
        assert self.engines[1].wait(tasks[1], 15.0)
        return tasks[1].problem or "", given[1]

    def close(self) -> None:
        for engine in self.engines:
            engine.close()
        for thread in self._threads:
            thread.join(10)
        for end in self._here:
            end.close()


def flipped(at: int) -> Callable[[list[bytes]], list[bytes]]:
    def change(records: list[bytes]) -> list[bytes]:
        damaged = bytearray(records[1])
        damaged[at] ^= 1
        return [records[0], bytes(damaged), *records[2:]]

    return change


CHANGES: dict[str, Callable[[list[bytes]], list[bytes]]] = {
    "a bit of the length": flipped(0),
    "a bit of the frame's head": flipped(4),
    "the second byte of the length": flipped(1),
    "the third byte of the length": flipped(2),
    "the last byte of the length": flipped(3),
    "a bit of the frame's kind": flipped(8),
    "a bit of the frame's number": flipped(16),
    "a bit of the frame's place": flipped(24),
    "a bit of the frame's size": flipped(32),
    "a bit of the first element": flipped(60),
    "a bit in the middle": flipped(5000),
    "the last bit before the tag": flipped(-17),
    "a bit in the middle of the tag": flipped(-8),
    "all records backwards": lambda records: records[::-1],
    "two records merged": lambda records: [
        struct.pack("<I", len(records[0]) + len(records[1]) - 8) + records[0][4:] + records[1][4:],
        *records[2:],
    ],
    "a record split in two": lambda records: [
        struct.pack("<I", 20) + records[0][4:24],
        struct.pack("<I", len(records[0]) - 24) + records[0][24:],
        *records[1:],
    ],
    "the tags of two records exchanged": lambda records: [
        records[0][:-16] + records[1][-16:],
        records[1][:-16] + records[0][-16:],
        *records[2:],
    ],
    "the last bit of the tag": flipped(-1),
    "the first bit of the tag": flipped(-16),
    "a record twice": lambda records: [records[0], records[1], records[1], *records[2:]],
    "the first one again at the end": lambda records: [*records, records[0]],
    "two records exchanged": lambda records: [records[1], records[0], *records[2:]],
    "a record left out": lambda records: [records[0], *records[2:]],
    "the first one left out": lambda records: records[1:],
    "a record of zeros between": lambda records: [records[0], bytes(64), *records[1:]],
    "a record that is too long": lambda records: [struct.pack("<I", 2**31), *records],
    "a record that is too short": lambda records: [struct.pack("<I", 3) + b"abc", *records],
    "a record cut by a byte": lambda records: [records[0], records[1][:-1], *records[2:]],
    "a byte more": lambda records: [records[0] + b"\0", *records[1:]],
    "noise": lambda records: [secrets.token_bytes(len(each)) for each in records],
}


@needs_encryption
@pytest.mark.parametrize("what", CHANGES)
def test_a_record_that_is_not_the_next_of_its_sender_ends_the_group(what: str) -> None:
    line = Line(CHANGES[what])
    array = np.arange(700_000, dtype=np.float32)
    said, _ = line.send(array)
    line.close()
    assert "rank 0 sent rank 1 " in said
    assert "record" in said


@needs_encryption
def test_a_record_that_is_cut_ends_the_group() -> None:
    def cut(records: list[bytes]) -> list[bytes]:
        line._here[1].sendall(b"".join(records)[:-100])
        raise OSError("the line is cut")

    line = Line(cut)
    said, _ = line.send(np.arange(700_000, dtype=np.float32))
    line.close()
    assert said.startswith("rank 0 is gone: its connection was cut in the middle of a record")


@needs_encryption
def test_nothing_of_a_tensor_is_on_the_wire() -> None:
    line = Line(lambda records: records)
    array = np.full(700_000, 1234.5, np.float32)
    said, received = line.send(array)
    line.close()
    assert not said
    np.testing.assert_array_equal(received, array)
    wire = b"".join(line.seen)
    assert len(wire) > array.nbytes
    assert array[:4].tobytes() not in wire
    assert b"FWT2" not in wire
    assert b"a broadcast" not in wire


@needs_encryption
def test_the_same_tensor_twice_looks_different() -> None:
    line = Line(lambda records: records, records=1)
    array = np.zeros(60_000, np.float32)
    line.send(array)
    line.send(array)
    line.close()
    large = [each for each in line.seen if len(each) > 10_000]
    assert len(large) == len(set(large)) >= 2


def test_the_ways_in_that_are_tried_are_a_hundred() -> None:
    """No two are alike; those at a door are tried in clear and at one that encrypts."""
    distinct = len(WAYS) + len(CHANGES) + len(MODES) + len(NO_KEY_FILES)
    assert distinct >= 100


@needs_encryption
def test_the_key_and_all_that_was_said_do_not_give_the_keys_of_a_connection() -> None:
    """They need a private key of X25519 too, which its rank forgets with the connection."""
    meeting = a_meeting(Store(), 0, protection=Protection(KEY, encrypts=True))
    first, second, other = (secrets.token_bytes(32) for _ in range(3))
    public = _native.x25519_public(other)
    heard = b"the same hello, and the same answer"
    keys_of = [
        rendezvous._session(meeting, b"s" * 32, own, public, heard) for own in (first, second)
    ]
    assert not set(keys_of[0]) & set(keys_of[1])
    at_other = rendezvous._session(meeting, b"s" * 32, other, _native.x25519_public(first), heard)
    assert at_other == keys_of[0]


def test_each_test_that_the_threat_model_names_exists() -> None:
    root = Path(__file__).parents[2]
    model = (root / "docs" / "design" / "security.md").read_text()
    tests = "".join(path.read_text() for path in (root / "tests").rglob("test_*.py"))
    named = set(re.findall(r"`(test_\w+)`", model))
    assert len(named) > 20
    assert not [name for name in named if f"def {name}(" not in tests]


def test_each_line_of_the_threat_model_names_its_test() -> None:
    """A line below "test" names a test, a file of tests, or the line above it."""
    model = (Path(__file__).parents[2] / "docs" / "design" / "security.md").read_text()
    lines = [line for line in model.splitlines() if line.startswith("|")]
    heads = [place for place, line in enumerate(lines) if line.startswith("|---")]
    rows = [
        line for place, line in enumerate(lines) if place not in heads and place + 1 not in heads
    ]
    assert len(rows) > 30
    unnamed = [
        line for line in rows if not re.search(r"`test|`tests/|the same|nothing to hold", line)
    ]
    assert not unnamed


def test_a_rank_that_waits_says_for_whom_so_that_others_blame_the_right_one() -> None:
    """Rank 2 has an address of rank 0, where nobody answers; rank 1 waits for rank 2."""
    store = Store()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        store.set("number", secrets.token_hex(32))
        second, third = (a_meeting(store, rank, size=3) for rank in (1, 2))
        store.set("rank 0", f"127.0.0.1 {port} machine {third.protection}")
        silent.close()
        with pytest.raises(TransportError, match="rank 0 could not be reached"):
            rendezvous.meet(third, 0.4)
    assert second.why_not(2) == " (rank 2 waits for rank 0)"
    left = TransportError("rank 2 is gone: its connection was closed")
    told = rendezvous.why_no_group(left, "rank 1", "of all", store, 1, 3)
    assert told == f"{left}; rank 2 waited for rank 0"
    with pytest.raises(TransportError, match="rank 1 did not connect within"):
        rendezvous.meet(a_meeting(store, 0, size=2), 0.4)
    assert a_meeting(store, 1, size=2).why_not(0) == " (rank 0 waits for rank 1)"
    store.set("number", secrets.token_hex(32))  # of a later attempt
    assert second.why_not(2) == ""
