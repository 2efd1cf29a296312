"""The fix "checkpoints in the background": a step does not wait until its checkpoint is written."""

from __future__ import annotations

import atexit
import functools
import io
import os
import shutil
import sys
import threading
from collections.abc import Iterator
from typing import Any

from fullwire.errors import UsageError
from fullwire.fixes.fix import FixKind, Process, Seen, Worthwhile, register, worthwhile
from fullwire.run.run import Run
from fullwire.simulation.forecast import Forecaster
from fullwire.timeline.account import Account
from fullwire.units import shown

_WAY = "background"
_SAVES = "torch.save"


@register
class Checkpoint(FixKind):
    """Write checkpoints in a thread. Their bytes are those of the moment of the call."""

    key = "checkpoint"
    of_each_rank = False  # rank 0 may save alone
    label = "checkpoints in the background"
    addresses = ("host",)
    example = _WAY
    setting = f"{_WAY}: torch.save returns once the bytes are in memory"

    def to_try(
        self, run: Run, account: Account, seen: Seen, job: Forecaster | None
    ) -> Iterator[Worthwhile]:
        """Yield the background, where torch.save takes time in the loop."""
        saving_s = sum(each.step_s for each in seen.host if each.call == _SAVES)
        words = "checkpoints written in the background"
        yield from worthwhile(self, _WAY, words, account, 0.2 * saving_s, saving_s)

    def checked(self, setting: str) -> str:
        """Take the one way that there is."""
        if setting != _WAY:
            raise UsageError(f"fix checkpoint: expected {_WAY}, got {shown(setting)}")
        return setting

    def by_hand(self, setting: str) -> str:
        """Return the call."""
        return "torch.distributed.checkpoint.async_save(state, ...)"

    def apply(self, setting: str, process: Process) -> None:
        """Write the bytes of `torch.save` to its file in a thread.

        The file is opened at once. Loading, renaming and copying files wait for the thread. So do
        the next checkpoint and the end of the process. A barrier waits too: behind it, other ranks
        may load the file. An error in writing is raised there; at the end it is the exit status.
        """
        import torch
        import torch.distributed as dist

        save = torch.save
        writing: list[threading.Thread] = []
        failed: list[OSError] = []

        def wait() -> None:
            while writing:
                writing.pop().join()
            if failed:
                raise failed.pop()

        def write(content: memoryview, file: io.FileIO) -> None:
            try:
                with file:
                    while content:
                        content = content[file.write(content) :]
            except OSError as error:
                failed.append(error)

        @functools.wraps(save)
        def save_behind(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
            wait()
            if not isinstance(f, str | os.PathLike):
                save(obj, f, *args, **kwargs)
                return
            memory = io.BytesIO()
            save(obj, memory, *args, **kwargs)
            file = io.FileIO(f, "w")
            thread = threading.Thread(target=write, args=(memory.getbuffer(), file))
            thread.start()
            writing.append(thread)
            process.did("applied: torch.save writes in a thread")

        def after_writing(owner: Any, name: str) -> None:
            function = getattr(owner, name)

            @functools.wraps(function)
            def called(*args: Any, **kwargs: Any) -> Any:
                wait()
                return function(*args, **kwargs)

            setattr(owner, name, called)

        torch.save = save_behind
        reads = [(torch, "load"), (os, "rename"), (os, "replace"), (shutil, "copyfile")]
        if dist.is_available():
            reads += [(dist, "barrier"), (dist, "monitored_barrier")]
        for owner, name in reads:
            after_writing(owner, name)

        def end() -> None:
            try:
                wait()
            except OSError as error:  # Python would end with status 0
                sys.stderr.write(f"fullwire: the last checkpoint is not whole: {error}\n")
                sys.stderr.flush()
                os._exit(1)

        atexit.register(end)
