"""Processes of this host that are at work on a recording: who makes it, and who records into it."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import time
from pathlib import Path

from fullwire.errors import UsageError
from fullwire.files import planted
from fullwire.recorder.inside import DIRECTORY_VARIABLE
from fullwire.recorder.inside.journal import RUNNING, SUFFIX
from fullwire.recorder.journals import read_header

_NOTE = "recorder.json"  # among the journals: which process makes the run of them
_LOOK_S = 0.1
_SAY_AFTER_S = 0.5


def note_maker(directory: Path) -> None:
    """Leave in a recording which process makes the run of it."""
    made_by = {"host": socket.gethostname(), "process": os.getpid(), "began": _began(os.getpid())}
    (directory / _NOTE).write_text(json.dumps(made_by))


def refuse_live(directory: Path) -> None:
    """Refuse a recording that a process is making just now; removing it would lose everything."""
    try:
        made_by = json.loads((directory / _NOTE).read_text())
        host, process, began = made_by["host"], int(made_by["process"]), made_by["began"]
    except (OSError, ValueError, KeyError, TypeError):  # none of ours, or only just begun
        return
    if host == socket.gethostname() and began == _began(process):
        raise UsageError(
            f"{directory} is being recorded into by process {process}: leave it alone, and give "
            "this recording another name"
        )


def follow(directory: Path) -> float:
    """Wait for the processes that still record, and return for how many seconds.

    The command that was launched may have ended before what it started. Ctrl-C ends the waiting.
    """
    began_s, is_said = time.monotonic(), False
    try:
        while recording := _recording(directory):
            if not is_said and time.monotonic() - began_s > _SAY_AFTER_S:
                numbers = ", ".join(map(str, sorted(recording)))
                sys.stderr.write(
                    f"fullwire: the command has ended; {len(recording)} of its processes still "
                    f"record ({numbers}), and are followed to their end\n"
                )
                is_said = True
            time.sleep(_LOOK_S)
    except KeyboardInterrupt:
        sys.stderr.write("fullwire: followed no further\n")
    return time.monotonic() - began_s if is_said else 0.0


def _recording(directory: Path) -> set[int]:
    """Return the processes of this host whose journals are open and which are there."""
    found = set()
    for path in directory.glob(f"*{SUFFIX}"):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            header = read_header(path, ("pid",)) if not planted(path, directory) else None
            if header is None or header["status"] != RUNNING:
                continue
            is_here = header["host"] == socket.gethostname()[:64]
            if is_here and _records_into(int(header["pid"]), directory):
                found.add(int(header["pid"]))
    return found


def _records_into(process: int, directory: Path) -> bool:
    """Say whether a process lives and is of this recording: numbers are given out again."""
    mark = f"{DIRECTORY_VARIABLE}={directory.resolve()}".encode()
    environment = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")  # empty for a zombie
    return mark in environment


def _began(process: int) -> str:
    """Return when a process of this host began, "" where there is none."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        about = Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2].split()
    except OSError:
        return ""
    return "" if about[0] in ("Z", "X") else f"{boot} {about[19]}"
