"""The part of the recorder that runs in a process of the job: standard library and torch only.

`arm` costs a fraction of a millisecond and puts one finder on the import path. The rest is loaded
once the process has imported torch. A process that never imports torch is left alone.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

DIRECTORY_VARIABLE = "FULLWIRE_RECORD_INTO"
THEN_VARIABLE = "FULLWIRE_AFTER_TORCH"  # modules to import once torch is loaded, with commas
TRIAL_VARIABLE = "FULLWIRE_TRIAL"  # the number of a trial of `tune`
LINES_VARIABLE = "FULLWIRE_LINES"  # set if the job's output is read line by line
ENTERED = "entered"  # this file exists once a Python of the job has started


class _Finder:
    """Waits until a module is imported; it finds nothing itself."""

    def __init__(self, module: str, then: Callable[[], None]) -> None:
        self._module = module
        self._then = then
        self._is_asking = False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Let other finders find the module, and call the function as soon as it is loaded.

        Many libraries only ask whether torch exists, and do not load it. So this finder stays until
        a module loads torch.
        """
        if name != self._module or self._is_asking:
            return None
        # Old finders may lack this method: Python passes them by, or asks them after this one.
        others = [
            finder
            for finder in sys.meta_path
            if finder is not self and hasattr(finder, "find_spec")
        ]
        self._is_asking = True  # another one that waits for this module asks all others too
        try:
            specs = (finder.find_spec(name, path, target) for finder in others)
            spec = next((spec for spec in specs if spec is not None), None)
        finally:
            self._is_asking = False
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            execute = loader.exec_module

            def execute_and_continue(module: Any) -> None:
                execute(module)
                if self in sys.meta_path:  # else the module is loaded once more
                    sys.meta_path.remove(self)
                    self._then()

            loader.exec_module = execute_and_continue
        return spec


def after_import(module: str, then: Callable[[], None]) -> None:
    """Call a function once a module has been imported, or now if it has been already."""
    if module in sys.modules:
        then()
    else:
        sys.meta_path.insert(0, _Finder(module, then))


def arm() -> None:
    """Change and record this process, as its environment says, if it imports torch."""
    directory, modules = os.environ.get(DIRECTORY_VARIABLE), os.environ.get(THEN_VARIABLE)
    if directory:
        with contextlib.suppress(OSError):  # a full disk must not end the job
            os.close(os.open(os.path.join(directory, ENTERED), os.O_WRONLY | os.O_CREAT, 0o644))
    if os.environ.get(LINES_VARIABLE):
        # Python keeps 8 KiB of output back from a pipe. Their lines would get the time of the last.
        with contextlib.suppress(AttributeError):  # another object, or none, may be in its place
            sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]

    def begin() -> None:
        if modules:
            _load(modules)
        if directory:
            record_into(directory)

    if directory or modules:
        after_import("torch", begin)


def _load(modules: str) -> None:
    for module in modules.split(","):
        try:
            importlib.import_module(module)
        except Exception as error:  # the job goes on as it is
            sys.stderr.write(f"fullwire: this process stays as it is: {error!r}\n")


def record_into(directory: str) -> None:
    """Record this process into a directory."""
    try:
        from .watch import watch

        watch(directory, after_import)
    except Exception as error:  # the job goes on if the recorder fails
        sys.stderr.write(f"fullwire: this process is not recorded: {error!r}\n")
