"""Files that lie beside traces and are not read: each is refused under its own name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple


class _Unread(NamedTuple):
    """A kind of file: how it begins, or how its name ends, and a command that helps."""

    what: str
    begins: bytes = b"\0" * 64  # a regular expression for its first bytes
    ends: tuple[str, ...] = ()  # names, where the content does not tell
    instead: str = ""


_KINDS = (
    _Unread("a Git LFS pointer", rb"version https://git-lfs", instead="`git lfs pull` gets it"),
    _Unread("a git-annex pointer", rb"/annex/objects/", instead="`git annex get` gets it"),
    _Unread(
        "text in UTF-16, as PowerShell writes it",
        rb"\xff\xfe|\xfe\xff",
        instead="`iconv -f utf-16 -t utf-8` makes a file that is",
    ),
    _Unread("a profile of JAX or TensorFlow (xplane.pb)", ends=(".xplane.pb",)),
    _Unread(
        "a timeline of JAX or TensorFlow (Chrome trace)",
        rb'\s*\{.{0,4000}?"traceEvents".{0,4000}?"/(?:job|host|device):',
    ),
    _Unread("a log of TensorBoard", rb".{12}\x09?.{0,40}brain\.Event:"),
    _Unread("a report of Nsight", ends=(".nsys-rep", ".qdrep", ".ncu-rep")),
    _Unread("an SQLite database, such as Nsight Systems exports", rb"SQLite format 3\0"),
    _Unread("a snapshot of PyTorch's memory", rb"\x80.{0,4000}?(?:segments|device_traces)"),
    _Unread(
        "a topology of NCCL (XML)",
        rb"\s*(?:<\?xml[^>]*>)?\s*<(?:system|graphs) version=",
        instead="describe the cluster in a file for --cluster",
    ),
    _Unread("a table of the OSU benchmarks", rb"(?:.{0,200}\n)?\s*# OSU (?:MPI|NCCL)"),
    _Unread("a report of mpiP", rb"@ mpiP"),
    _Unread("a file of HDF5", rb"\x89HDF\r\n\x1a\n"),
    _Unread("an array of NumPy", rb"\x93NUMPY"),
    _Unread("a program or a library", rb"\x7fELF"),
    _Unread("a picture", rb"\x89PNG\r\n|\xff\xd8\xff|GIF8|\s*(?:<\?xml[^>]*>)?\s*<svg"),
    _Unread("a PDF", rb"%PDF-"),
    _Unread("a page (HTML)", rb"\s*<(?:!DOCTYPE html|html)"),
    _Unread("a script", rb"#!"),
)
_LOOKED_AT = 8192


def unread(path: Path, beginning: bytes) -> str:
    """Return the kind of a file, with advice; the text is empty for an unknown kind."""
    for kind in _KINDS:
        begins = re.compile(kind.begins, re.DOTALL | re.IGNORECASE)
        if path.name.endswith(kind.ends or ("\0",)) or begins.match(beginning[:_LOOKED_AT]):
            return f"{kind.what}: not read" + (f"; {kind.instead}" if kind.instead else "")
    return ""


def near_miss(lacks: dict[str, str]) -> str:
    """Name the formats that a file resembles, each with the mark that it lacks."""
    return "; ".join(f"it resembles {label}, but lacks {mark}" for label, mark in lacks.items())
