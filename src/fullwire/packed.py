"""Packed files (gz, xz, zst): their readers get the unpacked bytes, up to a limit of expansion.

Captures and profiler traces are unpacked piece by piece by their own readers. Other packed files
are small, and some have to be read twice. They are unpacked into a file that has no name and ends
with the process.
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
BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # Some editors put it before text, where it has no meaning.
Unpack: TypeAlias = Callable[[BinaryIO], Any]

# The errors of an unpacker for a file that is truncated, or is not packed.
BROKEN = (EOFError, lzma.LZMAError, zlib.error, OSError)
# The beginnings of formats that are not unpacked here, and the programs that unpack them.
_OTHERS = {
    b"PK\x03\x04": ("a zip archive", "unzip"),
    b"PK\x05\x06": ("an empty zip archive", "unzip"),
    b"BZh": ("packed by bzip2", "bunzip2"),
    b"\x04\x22\x4d\x18": ("packed by lz4", "unlz4"),
    b"7z\xbc\xaf\x27\x1c": ("a 7-Zip archive", "7z x"),
    b"Rar!\x1a\x07": ("a RAR archive", "unrar x"),
}
_TAR_AT = 257  # The position of a tar archive's format name.
_PIECE_BYTES = 1 << 16
MOST_EXPANSION = 300  # Times the packed size: real logs and traces shrink to a 50th at most.
_EXPANSION_FROM_BYTES = 1 << 26


def unpacker(beginning: bytes) -> Unpack | None:
    """Return the function that unpacks a file with this beginning, None for a plain file."""
    if beginning.startswith(GZIP):
        return gzip.open
    if beginning.startswith(XZ):
        return lzma.open
    if beginning.startswith(ZSTD):
        import pyarrow as pa  # Imported here, because plain files need not wait for it.

        return lambda file: pa.CompressedInputStream(pa.PythonFile(file, "r"), "zstd")
    if beginning.startswith(BYTE_ORDER_MARK):
        return _after_mark
    return None


def _after_mark(file: BinaryIO) -> AbstractContextManager[BinaryIO]:
    file.seek(len(BYTE_ORDER_MARK))
    return nullcontext(file)


def unpacked_elsewhere(beginning: bytes) -> str:
    """Return the instruction to unpack a file that begins so, or "" if there is none."""
    if beginning[_TAR_AT:].startswith(b"ustar"):
        return "a tar archive: unpack it first (tar xf), and name the folder"
    for start, (what, by) in _OTHERS.items():
        if beginning.startswith(start):
            return f"{what}: unpack it first ({by}), and name what comes out"
    return ""


def has_no_end(packed_bytes: int, unpacked_bytes: int) -> bool:
    """Say whether the expansion is larger than that of any file which somebody wrote."""
    return unpacked_bytes > max(_EXPANSION_FROM_BYTES, MOST_EXPANSION * packed_bytes)


def unpacked_beginning(beginning: bytes, most: int) -> bytes:
    """Return the unpacked bytes of a file's beginning, as far as they go, and not much over `most`.

    The beginning of a plain file is returned unchanged.
    """
    unpack, found = unpacker(beginning), bytearray()
    if unpack is None:
        return beginning
    with suppress(*BROKEN), unpack(io.BytesIO(beginning)) as stream:
        while len(found) < most and (piece := stream.read1(_PIECE_BYTES)):
            found += piece
    return bytes(found) or beginning


@contextmanager
def unpacked(path: Path, file: BinaryIO) -> Iterator[BinaryIO]:
    """Yield an open file to read: the given one, or its unpacked content if it is packed."""
    unpack = unpacker(file.read(len(XZ)))
    file.seek(0)
    if unpack is None:
        yield file
        return
    import tempfile  # Imported here, because most files are plain.

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
