"""Files that commands write: each is written completely, and replaces another only on request."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fullwire.errors import UsageError

_IN_EVERY_RUN = "run.json"


def refuse_existing(path: Path, replace: bool, what: str = "") -> None:
    """Refuse a path that cannot be written, or that holds a file which has to stay."""
    said = f"{what}: " if what else ""
    if not path.parent.is_dir():
        raise UsageError(f"{said}there is no directory {path.parent}")
    if (path.parent / _IN_EVERY_RUN).exists():
        raise UsageError(f"{said}{path.parent} is a run: expected a place outside of it for {path}")
    if not os.path.lexists(path):
        return
    if path.is_dir():
        raise UsageError(f"{said}expected a file, and {path} is a directory")
    if not stat.S_ISREG(path.lstat().st_mode):
        raise UsageError(f"{said}{path} exists: expected a plain file to replace")
    if not replace:
        raise UsageError(f"{said}{path} exists: name another, or ask for --force to replace it")


@contextmanager
def written(path: Path) -> Iterator[Path]:
    """Yield a path beside the target to write to, and move the finished file to the target.

    The target stays unchanged until then, also when writing fails. The path beside it has the same
    ending.
    """
    beside = path.with_name(f".{os.getpid()}-{os.urandom(4).hex()}.writing{path.suffix}")
    try:
        yield beside
        beside.replace(path)
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror or error}") from None
    finally:
        beside.unlink(missing_ok=True)
