"""The files that a process of a job writes outside of its working directory."""

from __future__ import annotations

import os
import re
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from fullwire.fixes._shared import NOTES_VARIABLE
from fullwire.recorder.inside import DIRECTORY_VARIABLE

_MOST_PATHS = 5
_WRITING = os.O_WRONLY | os.O_RDWR
# Audit events with the places of the paths that they change.
_CHANGES = {"os.rename": (0, 1), "os.remove": (0,), "os.mkdir": (0,), "shutil.rmtree": (0,)}
_PASSING = ("tmp", "torch", "pymp-")  # beginnings of names in the folder for temporary files
_OF_OTHERS = re.compile(r"cache(__)?$|^(site|dist)-packages$|^\.(triton|nv)$")


class Outside:
    """Listens to what this process opens, moves and removes, as Python tells its audit hooks."""

    def __init__(self) -> None:
        self.paths: set[str] = set()
        libraries = (sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
        ours = (os.environ.get(name) for name in (NOTES_VARIABLE, DIRECTORY_VARIABLE))
        known = (os.getcwd(), *libraries, *filter(None, ours), "/dev", "/proc", "/sys")
        self._inside = tuple(os.path.realpath(path) + os.sep for path in known)
        folders = {os.path.realpath(folder) for folder in (tempfile.gettempdir(), "/tmp")}
        self._passing = tuple(f"{folder}/{name}" for folder in folders for name in _PASSING)

    def begin(self) -> None:
        """Listen until the process ends."""
        sys.addaudithook(self._heard)

    def _heard(self, event: str, values: tuple[Any, ...]) -> None:
        if event == "open":
            mode, flags = values[1], values[2]
            writes = set(mode or "") & set("wax+") or flags & _WRITING
            # A temporary file without a name is opened by its folder.
            if writes and not os.path.isdir(values[0]):
                self.wrote(values[0])
        elif event in _CHANGES:
            for place in _CHANGES[event]:
                # A folder that exists is not made, and a file that does not is not removed.
                exists = os.path.lexists(values[place])
                if place == 1 or exists == (event != "os.mkdir"):
                    self.wrote(values[place])

    def wrote(self, file: Any) -> None:
        """Take a file that is about to be written, if it is a path outside."""
        if not isinstance(file, str | bytes | os.PathLike) or len(self.paths) >= _MOST_PATHS:
            return
        path = os.path.realpath(os.fsdecode(file))
        if path.startswith((*self._inside, *self._passing)) or f"{path}/" in self._inside:
            return
        if not any(_OF_OTHERS.search(name) for name in Path(path).parts):
            self.paths.add(path)
