"""Foreign files: opened only where reading must come to an end, and refused in words elsewhere."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from fullwire.errors import UsageError
from fullwire.units import shown


def path_of(given: object, what: str) -> Path:
    """Take a path as people give it."""
    text = os.fspath(given) if isinstance(given, os.PathLike) else given
    if not isinstance(text, str) or not text or "\0" in text:
        raise UsageError(f"{what}: expected a path, got {shown(given)}")
    return Path(text)


def name_of(path: str | Path) -> str:
    """Return a path as text that any file and any terminal can hold."""
    return os.fsencode(path).decode(errors="backslashreplace")


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """Open a file; a pipe or a device is refused, since reading one may never end."""
    try:
        kind = path.stat().st_mode
        if not stat.S_ISREG(kind):
            what = "a directory" if stat.S_ISDIR(kind) else "a pipe, a socket or a device"
            raise UsageError(f"{path}: expected a file, got {what}")
        with path.open("rb") as file:
            yield file
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror or error}") from None
