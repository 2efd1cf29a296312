"""Apply fixes inside a process of a job, which has just loaded torch.

The recorder's folder on PYTHONPATH loads this module (`recorder/inside`). The job goes on whatever
happens here. Each process writes what became of each fix as a line into a folder, if one is named.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import sys
from collections import Counter
from typing import Any

from fullwire.fixes.fix import Change, fix_kinds

FIXES_VARIABLE = "FULLWIRE_FIXES"  # JSON: pairs of a key and a setting
NOTES_VARIABLE = "FULLWIRE_FIXES_INTO"  # a folder for notes
STEPS_VARIABLE = "FULLWIRE_STEPS"  # after so many of them the process ends
NOTES = ".fixes"  # the end of such a file's name
NOT_APPLIED = "not applied"


class Applying:
    """The process as one fix changes it."""

    def __init__(self, key: str) -> None:
        self._key = key
        self._said: set[str] = set()

    def around(self, owner: Any, name: str, change: Change, *, may_repeat: bool = True) -> None:
        """Give a function other arguments; if that fails, it has its own ones."""
        function = getattr(owner, name)
        signature = inspect.signature(function)

        @functools.wraps(function)
        def changed(*args: Any, **kwargs: Any) -> Any:
            try:
                bound = signature.bind(*args, **kwargs)
                bound.arguments |= change(bound.arguments)
            except Exception as error:
                self.did(f"not applied: {error}")
                return function(*args, **kwargs)
            try:
                return function(*bound.args, **bound.kwargs)
            except Exception as error:
                if not may_repeat:
                    raise
                self.did(f"not applied: {type(error).__name__}: {error}")
            return function(*args, **kwargs)

        setattr(owner, name, changed)

    def did(self, sentence: str) -> None:
        """Note a sentence once: into the folder for notes, or to the standard error output."""
        if sentence in self._said:
            return
        self._said.add(sentence)
        folder = os.environ.get(NOTES_VARIABLE)
        line = json.dumps({"fix": self._key, "did": sentence}) + "\n"
        try:
            if folder:
                with open(os.path.join(folder, f"{os.getpid()}{NOTES}"), "a") as file:
                    file.write(line)
                return
        except OSError:  # the folder lies on another host, or its disk is full
            pass
        if sentence.startswith(NOT_APPLIED):
            sys.stderr.write(f"fullwire: fix {self._key}: {sentence}\n")


def end_after(steps: int) -> None:
    """End this process when one of its optimizers has made so many steps, on each rank alike.

    The script's own end does not come: it writes no last checkpoint.
    """
    from torch.optim import optimizer as optimizers

    made: Counter[int] = Counter()

    def count(optimizer: Any, args: Any, kwargs: Any) -> None:
        made[id(optimizer)] += 1
        if made[id(optimizer)] >= steps:
            raise SystemExit

    optimizers.register_optimizer_step_post_hook(count)


def apply_all() -> None:
    """Apply the fixes that the environment names."""
    if steps := os.environ.get(STEPS_VARIABLE):
        end_after(int(steps))
    for key, setting in json.loads(os.environ.get(FIXES_VARIABLE, "[]")):
        fix = Applying(key)
        try:
            fix_kinds()[key].apply(setting, fix)
        except Exception as error:  # the job goes on without this fix
            fix.did(f"not applied: {error!r}")


apply_all()
