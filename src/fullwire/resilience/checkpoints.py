"""Checkpoints of an elastic job: whole or not there, checked, the last few kept.

    DIRECTORY/step-000001200/part-0-of-3     bytes of the state (`state`), one file a rank
                             description     the rest of the state
                             manifest.json   the files with their lengths and checksums

Of a sharded model, the files are those of `torch.distributed.checkpoint` (`sharded_checkpoints`).

A checkpoint is written under another name, and renamed when all of its files are on the disk. So a
process that ends meanwhile leaves the earlier checkpoints as they were.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import secrets
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from fullwire.errors import DamagedInput, TransportError, UsageError
from fullwire.resilience.pace import shares
from fullwire.resilience.place import tell

_MANIFEST, _DESCRIPTION = "manifest.json", "description"
_WRITING = ".writing-"
PIECE_BYTES = 4 << 20
# Between interruptions of a device, as `plan` takes it from published trainings.
_DEVICE_S = 35_000 * 3600.0


class File(msgspec.Struct):
    """A file of a checkpoint."""

    name: str
    size_bytes: int
    sha256: str


class Manifest(msgspec.Struct):
    """The files of a checkpoint, the parts of the state in their order."""

    step: int
    files: list[File]
    format: int = 1
    is_sharded: bool = False


# Writes this rank's files of a checkpoint into a folder.
Write: TypeAlias = Callable[[Path], list[File]]


def write_part(directory: Path, name: str, content: memoryview | bytes) -> File:
    """Write a file of a checkpoint that is not complete yet."""
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / name).open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return File(name, len(content), hashlib.sha256(content).hexdigest())


def unfinished(folder: Path, step: int, token: str) -> Path:
    """Return where the files of a checkpoint lie until all of them are written."""
    return folder / f"{_WRITING}{step:09d}-{token}"


def complete(folder: Path, directory: Path, manifest: Manifest, keep: int) -> Path:
    """Give a checkpoint its name, now that it has all files; delete all but the last ones."""
    step = manifest.step
    write_part(directory, _MANIFEST, msgspec.json.encode(manifest))
    place = folder / f"step-{step:09d}"
    if place.exists():  # the same step before a restart
        shutil.rmtree(place)
    directory.rename(place)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    for old in _all(folder)[:-keep]:
        shutil.rmtree(old, ignore_errors=True)
    for old in folder.glob(f"{_WRITING}*"):
        # Nobody writes one of an earlier step any more.
        if old.name < f"{_WRITING}{step:09d}":
            shutil.rmtree(old, ignore_errors=True)
    return place


def newest(folder: Path) -> tuple[Path, int, list[str]] | None:
    """Return the last checkpoint that is whole, its step, and the faults of later ones."""
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder}: expected a folder for checkpoints, got a file")
    problems: list[str] = []
    for place in reversed(_all(folder)):
        try:
            return place, check(place).step, problems
        except DamagedInput as error:
            problems.append(str(error))
    if problems:
        raise DamagedInput(folder, f"no checkpoint is whole: {problems[0]}")
    return None


def check(place: Path) -> Manifest:
    """Hold the files of a checkpoint against their checksums."""
    manifest = manifest_of(place)
    for file in manifest.files:
        for _ in _pieces(place, file):
            pass
    return manifest


def read(place: Path) -> tuple[bytes, bytearray, int]:
    """Return the description of a state, its row of bytes, and its step; all of it is checked."""
    manifest = manifest_of(place)
    if manifest.is_sharded:
        raise UsageError(
            f"{place}: expected a checkpoint of a whole model, got one of a sharded model: call "
            "fullwire.elastic with the function that builds it"
        )
    description, *parts = manifest.files
    row = bytearray()
    for part in parts:
        for piece in _pieces(place, part):
            row += piece
    return b"".join(_pieces(place, description)), row, manifest.step


def manifest_of(place: Path) -> Manifest:
    """Return the list of a checkpoint's files."""
    try:
        return msgspec.json.decode((place / _MANIFEST).read_bytes(), type=Manifest)
    except (OSError, msgspec.MsgspecError) as error:
        raise DamagedInput(place / _MANIFEST, f"expected the list of its files: {error}") from None


def _pieces(place: Path, file: File) -> Iterator[bytes]:
    """Read a file; at its end, hold what was read against its checksum."""
    path, digest = place / file.name, hashlib.sha256()
    try:
        with path.open("rb") as opened:
            while piece := opened.read(PIECE_BYTES):
                digest.update(piece)
                yield piece
    except OSError as error:
        raise DamagedInput(path, error.strerror or str(error)) from None
    if digest.hexdigest() != file.sha256:
        raise DamagedInput(path, f"expected {file.size_bytes:,} bytes with another checksum")


class Clock:
    """The time of the next checkpoint: by an interval, or by the cost of failures."""

    def __init__(self, every_s: float | None, workers: int) -> None:
        self._every_s, self._workers = every_s, workers
        self._began_s = self._last_s = time.monotonic()
        self.failures = 0
        self.stopped_s = self.written_s = 0.1  # of a checkpoint; measured once there is one

    def is_due(self, now_s: float) -> bool:
        """Say whether it is time."""
        return now_s - self._last_s >= self.interval_s(now_s)

    def begun(self, now_s: float) -> None:
        """A checkpoint begins."""
        self._last_s = now_s

    def interval_s(self, now_s: float) -> float:
        """Return the time between two checkpoints for which the job takes the least.

        It is Young's: the root of twice the stop and the time between failures. That is the device
        hours between two of published trainings, until this job has failures of its own.
        """
        if self._every_s is not None:
            return self._every_s
        between_s = _DEVICE_S / self._workers
        if self.failures:
            between_s = (now_s - self._began_s) / self.failures
        return max(math.sqrt(2 * self.stopped_s * between_s), self.written_s, 1.0)


class Saver:
    """Writes the checkpoints of a job, together with the other ranks."""

    def __init__(self, mesh: Any, *, is_alike: bool, is_sharded: bool = False) -> None:
        """`is_alike`: all ranks have the same state, so that each writes a part."""
        self._mesh, self._keeping = mesh, mesh.place.keeping
        self._is_sharded = is_sharded
        self._is_whole = (self._keeping.is_whole or not is_alike) and not is_sharded
        self.clock = Clock(self._keeping.every_s, mesh.place.starters)
        self._is_writing = False
        self._thread: threading.Thread | None = None

    def look(
        self, epoch: int, step: int, ranks: Sequence[int], copied: Callable[[int, int], Write]
    ) -> None:
        """Copy the state if this step is one that is kept, and write it in a thread.

        The lowest rank names the step, two steps before: all others hear it with a commit.
        `copied`: copies this rank's part, of so many, and returns what writes it.
        """
        mesh, now_s = self._mesh, time.monotonic()
        post = mesh.posted(epoch, "checkpoint")
        is_first = ranks[0] == mesh.rank
        if (
            is_first
            and not self._is_writing
            and self.clock.is_due(now_s)
            and (post is None or int(post.split()[0]) < step)
        ):
            mesh.post(epoch, "checkpoint", f"{step + 2} {secrets.token_hex(4)}")
        if post is None or int(post.split()[0]) != step:
            return
        self.clock.begun(now_s)
        if self._is_whole and not is_first:
            return
        index, count = (0, 1) if self._is_whole else (ranks.index(mesh.rank), len(ranks))
        write = copied(index, count)
        self.clock.stopped_s = time.monotonic() - now_s
        if is_first:
            tell("checkpoint", ranks, int(now_s * 1e9), time.monotonic_ns())
        self._is_writing = True
        self._thread = threading.Thread(
            target=self._write,
            args=(epoch, step, post.split()[1], index, count, write),
            name="fullwire-checkpoint",
            daemon=True,
        )
        self._thread.start()

    def await_writing(self, timeout_s: float) -> None:
        """Wait for the thread that writes, if there is one."""
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _write(
        self, epoch: int, step: int, token: str, index: int, count: int, write: Write
    ) -> None:
        began_s, folder = time.monotonic(), Path(self._keeping.folder)
        try:
            if self._together(epoch, step, token, index, count, write) is not None:
                self.clock.written_s = time.monotonic() - began_s
        except OSError as error:
            sys.stderr.write(
                f"fullwire: no checkpoint of step {step}, training goes on: "
                f"{error.filename or folder}: {error.strerror}\n"
            )
        except TransportError:
            pass  # a rank was lost: the next checkpoint comes
        finally:
            self._is_writing = False

    def write_last(self, epoch: int, step: int, ranks: Sequence[int], write: Write) -> str:
        """Write a checkpoint before the job ends; return where it is, or why there is none."""
        mesh, index = self._mesh, ranks.index(self._mesh.rank)
        folder = Path(self._keeping.folder)
        try:
            place = self._together(epoch, step, f"last{epoch}", index, len(ranks), write)
            told = "" if place is None else str(place)
        except OSError as error:
            told = f"{error.filename or folder}: {error.strerror}"
        if index == 0 and not told:
            raise TransportError(f"epoch {epoch} ended before its checkpoint was written")
        if index == 0:
            mesh.post(epoch, "last", told)
        elif (posts := mesh.await_posts(epoch, ["last"])) is not None:
            told = posts[0]
        return told

    def _together(
        self, epoch: int, step: int, token: str, index: int, count: int, write: Write
    ) -> Path | None:
        """Write this rank's files. The first rank completes the checkpoint; return its place.

        None: another rank completes it, or one was lost.
        """
        mesh, folder = self._mesh, Path(self._keeping.folder).absolute()
        directory = unfinished(folder, step, token)
        names = [f"part {step} {index}" for index in range(count)]
        try:
            written = write(directory)
            mesh.post(epoch, names[index], msgspec.json.encode(written).decode())
            if index:
                return None
            posts = mesh.await_posts(epoch, names)
            if posts is None or "" in posts:  # a rank was lost, or has no room
                shutil.rmtree(directory, ignore_errors=True)
                return None
            files = [file for post in posts for file in msgspec.json.decode(post, type=list[File])]
            manifest = Manifest(step, files, is_sharded=self._is_sharded)
            return complete(folder, directory, manifest, self._keeping.keep)
        except (OSError, TransportError):
            mesh.post(epoch, names[index], "")
            shutil.rmtree(directory, ignore_errors=True)
            raise


def row_writer(state: Any, index: int, count: int) -> Write:
    """Copy a part of a state's row now; return a function that writes it."""
    share = shares(state.size_bytes, [1] * count)[index]
    part = state.piece(share.start, share.stop).numpy().data
    description = state.description

    def write(directory: Path) -> list[File]:
        described = [] if index else [write_part(directory, _DESCRIPTION, description)]
        return [*described, write_part(directory, f"part-{index}-of-{count}", part)]

    return write


def write_whole(folder: Path, step: int, state: Any, keep: int) -> Path:
    """Write a checkpoint in this process alone; one of the same step may be there already."""
    directory = unfinished(folder, step, secrets.token_hex(4))
    files = row_writer(state, 0, 1)(directory)
    return complete(folder, directory, Manifest(step, files), keep)


def _all(folder: Path) -> list[Path]:
    with contextlib.suppress(FileNotFoundError):
        return sorted(path for path in folder.iterdir() if path.name.startswith("step-"))
    return []
