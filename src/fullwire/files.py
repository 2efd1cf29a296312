"""Foreign files: only regular files are opened, since reading others may never end.

Errors become sentences that name the file.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from fullwire.errors import DamagedInput, UsageError
from fullwire.packed import unpacked, unpacked_beginning, unpacked_elsewhere
from fullwire.units import shown

SNIFFED_BYTES = 128 * 1024
_COLOUR = re.compile(r"\x1b\[[\d;]{0,16}m")  # launchers colour lines for terminals
MOST_SNIFFED_BYTES = 1024 * 1024  # Of text whose format its beginning does not show.
_MOST_BELOW = 200_000  # Files and folders: a job has fewer, and `/` would take minutes.


def path_of(given: object, what: str) -> Path:
    """Return a path that a user gave, checked."""
    text = os.fspath(given) if isinstance(given, os.PathLike) else given
    if not isinstance(text, str) or not text or "\0" in text:
        raise UsageError(f"{what}: expected a path, got {shown(given)}")
    return Path(text)


def name_of(path: str | Path) -> str:
    """Return a path as text that any file and any terminal can hold."""
    return os.fsencode(path).decode(errors="backslashreplace")


def named_by_folder(own: Sequence[tuple[Path, str]]) -> list[str]:
    """Return a name for each; the folder comes before a name that several folders have.

    The folder is told as seen from the folder around them all.
    """
    holders = Counter(name for _, name in set(own))
    top = os.path.commonpath([folder for folder, _ in own]) if own else ""
    return [
        f"{name_of(folder.relative_to(top).as_posix())}/{name}" if holders[name] > 1 else name
        for folder, name in own
    ]


def files_in(directory: Path) -> Iterator[Path]:
    """Yield the files of a directory and below, in order; links to files are followed."""
    found: list[Path] = []
    below = 0
    try:
        for folder, folders, files in os.walk(directory, onerror=_refused):
            found += (Path(folder, name) for name in files)
            below += len(files) + len(folders)
            if below > _MOST_BELOW:
                raise UsageError(
                    f"{directory}: over {_MOST_BELOW:,} files and folders are below it: name the "
                    "folder of one job, or its files"
                )
        yield from (path for path in sorted(found) if path.is_file())
    except OSError as error:
        place = error.filename or directory
        raise UsageError(f"{place}: cannot be read: {error.strerror or error}") from None


def planted(path: Path, folder: Path) -> str:
    """Return why a file in a folder of ours must stay closed, or "" if it may be opened.

    Another user of a shared folder could plant a file, and so choose the file that we read or wait
    for. The owner of the folder may be another user: then the files have to belong to that user.
    """
    about = path.lstat()
    if stat.S_ISLNK(about.st_mode):
        return "it is a symbolic link"
    if not stat.S_ISREG(about.st_mode):
        return "it is no file"
    if about.st_uid not in (os.geteuid(), 0, folder.stat().st_uid):
        return f"it is user {about.st_uid}'s, and the folder is not"
    return ""


def _refused(error: OSError) -> None:
    """Refuse a folder that cannot be read, since leaving it out would hide missing data."""
    raise error


def files_like(places: Sequence[Path], is_wanted: Callable[[Path], bool]) -> list[Path]:
    """Return the given files, and the wanted files of the given directories."""
    return [
        path
        for place in places
        for path in (files_in(place) if is_directory(place) else [place])
        if path == place or is_wanted(path)
    ]


def is_directory(place: Path) -> bool:
    """Say whether a path is a directory; one that cannot be examined is refused when it is read."""
    try:
        return place.is_dir()
    except OSError:
        return False


def beginning_of(path: Path, most: int = SNIFFED_BYTES) -> bytes:
    """Return the beginning of a file, unpacked if it is packed, to detect its format."""
    with opened(path) as file:
        return unpacked_beginning(file.read(most), most)


def refuse_packed(files: Sequence[Path]) -> None:
    """Refuse the first file that another program has to unpack, and name that program."""
    for file in files:
        if packed := unpacked_elsewhere(beginning_of(file)):
            raise DamagedInput(file, packed)


def lines_of(path: Path, *, most: int, longest: int) -> Iterator[bytes]:
    """Yield the lines of a file in bounded memory: a line without an end is refused."""
    with opened_plain(path) as file:
        yield from lines_in(file, path, most=most, longest=longest)


def lines_in(file: BinaryIO, path: Path, *, most: int, longest: int) -> Iterator[bytes]:
    """Yield the lines of an open file in bounded memory."""
    for number in range(1, most + 1):
        line = file.readline(longest + 1)
        if not line:
            return
        if len(line) > longest:
            raise DamagedInput(path, f"longer than {longest} bytes", line=number)
        yield line
    raise DamagedInput(path, f"more than {most} lines")


def plain_line(line: str) -> str:
    """Return a line of output without colours and without the JSON that Docker puts around it."""
    if line.startswith('{"log":"'):
        with suppress(ValueError, KeyError, RecursionError):  # cut: it is read as it stands
            line = str(json.loads(line)["log"])
    return _COLOUR.sub("", line) if "\x1b" in line else line


@contextmanager
def opened_plain(path: Path) -> Iterator[BinaryIO]:
    """Open a file, and unpack it if it is packed."""
    with opened(path) as file, unpacked(path, file) as plain:
        yield plain


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
