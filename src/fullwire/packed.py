"""Files that were packed (gz, xz, zst) are read as what was packed, unless that has no end.

Captures and profiler traces are unpacked piece by piece by their own readers. All others are small
beside what people pack, and some have to be gone through twice: they are unpacked into a file that
has no name and goes with the process.
"""

from __future__ import annotations

import gzip
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias, cast

from fullwire.errors import DamagedInput

GZIP, XZ, ZSTD = b"\x1f\x8b", b"\xfd7zXZ\x00", b"\x28\xb5\x2f\xfd"
BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # which some editors put before text: there it says nothing
Unpack: TypeAlias = Callable[[BinaryIO], Any]

# What a packed file that breaks off, or is none, makes its unpacker raise.
BROKEN = (EOFError, lzma.LZMAError, zlib.error, OSError)
# How what is not unpacked here begins, and what does it.
_OTHERS = {
    b"PK\x03\x04": ("a zip archive", "unzip"),
    b"PK\x05\x06": ("an empty zip archive", "unzip"),
    b"BZh": ("packed by bzip2", "bunzip2"),
    b"\x04\x22\x4d\x18": ("packed by lz4", "unlz4"),
    b"7z\xbc\xaf\x27\x1c": ("a 7-Zip archive", "7z x"),
    b"Rar!\x1a\x07": ("a RAR archive", "unrar x"),
}
_TAR_AT = 257  # where a tar archive says what it is
_PIECE_BYTES = 1 << 16
MOST_EXPANSION = 300  # times that real logs and traces, which shrink to a 50th, do not come near
_EXPANSION_FROM_BYTES = 1 << 26


def unpacker(beginning: bytes) -> Unpack | None:
    """Return what unpacks a file with this beginning, None for a plain one."""
    if beginning.startswith(GZIP):
        return gzip.open
    if beginning.startswith(XZ):
        return lzma.open
    if beginning.startswith(ZSTD):
        import pyarrow as pa  # here, because plain files need not wait until it is loaded

        return lambda file: pa.CompressedInputStream(pa.PythonFile(file, "r"), "zstd")
    if beginning.startswith(BYTE_ORDER_MARK):
        return _after_mark
    return None


def _after_mark(file: BinaryIO) -> AbstractContextManager[BinaryIO]:
    file.seek(len(BYTE_ORDER_MARK))
    return nullcontext(file)


def unpacked_elsewhere(beginning: bytes) -> str:
    """Return what has to be done first with a file that begins so, "" where nothing has to."""
    if beginning[_TAR_AT:].startswith(b"ustar"):
        return "a tar archive: unpack it first (tar xf), and name the folder"
    for start, (what, by) in _OTHERS.items():
        if beginning.startswith(start):
            return f"{what}: unpack it first ({by}), and name what comes out"
    return ""


def has_no_end(packed_bytes: int, unpacked_bytes: int) -> bool:
    """Say whether so few bytes have become so many that it is no file which somebody wrote."""
    return unpacked_bytes > max(_EXPANSION_FROM_BYTES, MOST_EXPANSION * packed_bytes)


def unpacked_beginning(beginning: bytes) -> bytes:
    """Return what a beginning unpacks to, as far as it does; a plain one is what it is."""
    unpack, found = unpacker(beginning), bytearray()
    if unpack is None:
        return beginning
    with suppress(*BROKEN), unpack(io.BytesIO(beginning)) as stream:
        while len(found) < len(beginning) and (piece := stream.read1(_PIECE_BYTES)):
            found += piece
    return bytes(found) or beginning


@contextmanager
def unpacked(path: Path, file: BinaryIO) -> Iterator[BinaryIO]:
    """Give an open file to read, or what it holds if it is packed."""
    unpack = unpacker(file.read(len(XZ)))
    file.seek(0)
    if unpack is None:
        yield file
        return
    import tempfile  # here, because most files are plain

    with tempfile.TemporaryFile() as whole:
        try:
            with unpack(file) as stream:
                while piece := stream.read(_PIECE_BYTES):
                    whole.write(piece)
                    if has_no_end(file.tell(), whole.tell()):
                        raise DamagedInput(
                            path, f"it unpacks to over {MOST_EXPANSION} times its size"
                        )
        except BROKEN as error:
            raise DamagedInput(path, f"it cannot be unpacked to its end: {error}") from None
        whole.seek(0)
        yield cast(BinaryIO, whole)
