"""The recorder as it lives in a process of the job: standard library and torch only.

`arm` costs a fraction of a millisecond and leaves one finder on the import path; the rest is loaded
when the process has imported torch. A process that never does is left alone.
"""

from __future__ import annotations

import os
import sys
from typing import Any

DIRECTORY_VARIABLE = "FULLWIRE_RECORD_INTO"


class _TorchFinder:
    """Waits for `import torch`, once; it finds nothing itself."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Let the others find torch, and watch it as soon as it is loaded."""
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        import importlib.util

        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            _watch_after(spec.loader)
        return spec


def arm() -> None:
    """Record this process if it is one of a recorded job and imports torch."""
    if os.environ.get(DIRECTORY_VARIABLE):
        sys.meta_path.insert(0, _TorchFinder())


def _watch_after(loader: Any) -> None:
    execute = loader.exec_module

    def execute_and_watch(module: Any) -> None:
        execute(module)
        try:
            from .watch import watch

            watch(os.environ[DIRECTORY_VARIABLE])
        except Exception as error:  # the job goes on, whatever is wrong with the recorder
            sys.stderr.write(f"fullwire: this process is not recorded: {error!r}\n")

    loader.exec_module = execute_and_watch
