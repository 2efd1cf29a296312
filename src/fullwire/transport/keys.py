"""The key of a job: its source, and the secrets that two ranks derive from it.

`FULLWIRE_KEY_FILE` names a file that its owner alone may read. `FULLWIRE_KEY` is the key itself,
for a launcher that passes variables on. A key has 32 characters or more that a stranger cannot
guess, for example from `openssl rand -hex 32`. docs/design/security.md lists the attackers that a
key keeps out.
"""

from __future__ import annotations

import hmac
import os
import stat
import sys
from dataclasses import dataclass
from pathlib import Path

from fullwire import _native
from fullwire.errors import TransportError

KEY_FILE_VARIABLE = "FULLWIRE_KEY_FILE"
KEY_VARIABLE = "FULLWIRE_KEY"
ENCRYPT_VARIABLE = "FULLWIRE_ENCRYPT"  # 1: encrypt all bytes between two ranks
SECRET_BYTES = 32
_SHORTEST_KEY_BYTES = 32
_LONGEST_KEY_BYTES = 4096
_said_once: list[str] = []


@dataclass(frozen=True, slots=True)
class Protection:
    """The key and the choice of encryption; all ranks of a job need the same before they meet."""

    key: bytes  # b"": every process that reads the store may join
    encrypts: bool

    def __str__(self) -> str:
        return f"{'keyed' if self.key else 'open'}-{'encrypted' if self.encrypts else 'plain'}"


def protection() -> Protection:
    """Read the key and the choice of encryption from this process's environment."""
    path, said = os.environ.get(KEY_FILE_VARIABLE), os.environ.get(KEY_VARIABLE)
    key = b""
    if path:
        key = _long_enough(_read(Path(path)), f"{KEY_FILE_VARIABLE}: {path}")
    elif said:
        key = _long_enough(said.encode(), KEY_VARIABLE)
    encrypts = is_switched_on(ENCRYPT_VARIABLE)
    if encrypts and not key:
        raise TransportError(
            f"{ENCRYPT_VARIABLE}=1: expected a key ({KEY_FILE_VARIABLE} or {KEY_VARIABLE}), "
            "found none"
        )
    if encrypts and (problem := _native.encryption_problem()):
        raise TransportError(f"{ENCRYPT_VARIABLE}=1: {problem}")
    return Protection(key, encrypts)


def say_once_that_the_network_is_trusted() -> None:
    """Warn once, at the first group of a process without a key."""
    if not _said_once:
        _said_once.append("said")
        sys.stderr.write(
            f"fullwire: this group trusts its network: there is no key ({KEY_FILE_VARIABLE})\n"
        )


def extracted(salt: bytes, secret: bytes) -> bytes:
    """Do the first half of HKDF (RFC 5869)."""
    return hmac.digest(salt, secret, "sha256")


def expanded(key: bytes, purpose: bytes) -> bytes:
    """Do the second half of HKDF: return 32 bytes for one purpose."""
    return hmac.digest(key, purpose + b"\x01", "sha256")


def _read(path: Path) -> bytes:
    """Read a key file; check the open file, so that it cannot be exchanged after the check."""
    try:
        # Without waiting: a FIFO would block the job until another process writes to it.
        opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise TransportError(f"{KEY_FILE_VARIABLE}: {path}: {error.strerror}") from None
    try:
        about = os.fstat(opened)
        if not stat.S_ISREG(about.st_mode):
            raise TransportError(f"{KEY_FILE_VARIABLE}: {path}: expected a regular file")
        if about.st_mode & 0o077:
            raise TransportError(
                f"{KEY_FILE_VARIABLE}: {path}: expected a file that its owner alone may read "
                f"(chmod 600), got mode {stat.S_IMODE(about.st_mode):o}"
            )
        if about.st_uid not in (os.geteuid(), 0):
            raise TransportError(
                f"{KEY_FILE_VARIABLE}: {path}: expected a file of user {os.geteuid()}, it belongs "
                f"to {about.st_uid}"
            )
        return os.read(opened, _LONGEST_KEY_BYTES + 1)
    finally:
        os.close(opened)


def _long_enough(key: bytes, where: str) -> bytes:
    key = key.strip()
    if not _SHORTEST_KEY_BYTES <= len(key) <= _LONGEST_KEY_BYTES:
        raise TransportError(
            f"{where}: expected a key of {_SHORTEST_KEY_BYTES} to {_LONGEST_KEY_BYTES} characters "
            f"(openssl rand -hex 32), got {len(key)}"
        )
    return key


def is_switched_on(variable: str) -> bool:
    """Read a variable of this process's environment that is 1 or 0."""
    said = os.environ.get(variable, "0")
    if said not in ("0", "1"):
        raise TransportError(f"{variable}: expected 0 or 1, got {said!r}")
    return said == "1"
