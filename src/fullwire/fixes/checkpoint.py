"""The fix "checkpoints in the background": a step does not wait until its checkpoint is written."""

from __future__ import annotations

import atexit
import functools
import inspect
import io
import os
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from fullwire.errors import UsageError
from fullwire.fixes.fix import FixKind, Process, Seen, Worthwhile, register, worthwhile
from fullwire.recorder.inside import after_import
from fullwire.units import shown

if TYPE_CHECKING:
    from fullwire.run.run import Run
    from fullwire.simulation.forecast import Forecaster
    from fullwire.timeline.account import Account

_WAY = "background"
_OF_SHARDS = "torch.distributed.checkpoint"
_SAVES = ("torch.save", f"{_OF_SHARDS}.save")
# What Python tells before files change their names, are copied, or are read by other processes.
_GIVES_AWAY = {"os.rename", "os.link", "os.fork", "os.forkpty", "os.exec", "os.spawn"}
_GIVES_AWAY |= {"os.posix_spawn", "os.system", "subprocess.Popen"}


@register
class Checkpoint(FixKind):
    """Write checkpoints in a thread. Their bytes are those of the moment of the call."""

    key = "checkpoint"
    of_each_rank = False  # rank 0 may save alone
    label = "checkpoints in the background"
    addresses = ("host",)
    example = _WAY
    setting = f"{_WAY}: saving returns once the bytes are in memory"

    def to_try(
        self, run: Run, account: Account, seen: Seen, job: Forecaster | None
    ) -> Iterator[Worthwhile]:
        """Yield the background, where saving takes time in the loop."""
        saving_s = sum(call.step_s for call in seen.host if call.call in _SAVES)
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
        """Write the bytes of `torch.save` and of `torch.distributed.checkpoint` behind the steps.

        A file of `torch.save` has its length at once. To open a file that is being written waits
        until it is whole, in the thread that began it. To rename files and to start other processes
        wait for all checkpoints of the thread. So do the next checkpoint and the end of the
        process. A barrier waits too: behind it, other ranks may load the file. An error in writing
        is raised there; at the end it is the exit status.
        """
        import torch
        import torch.distributed as dist

        writing = _Writing()
        save = torch.save

        @functools.wraps(save)
        def save_behind(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
            if not isinstance(f, str | os.PathLike):
                save(obj, f, *args, **kwargs)
                return
            writing.wait()
            memory = io.BytesIO()
            save(obj, memory, *args, **kwargs)
            content, file = memory.getbuffer(), io.FileIO(f, "w")
            if os.path.isfile(f):
                file.truncate(len(content))  # for a script that looks at its size
            thread = ThreadPoolExecutor(1)
            writing.began(thread.submit(_write, content, file), f)
            thread.shutdown(wait=False)
            process.did("applied: torch.save writes in a thread")

        torch.save = save_behind
        if dist.is_available():
            writing.precedes(dist, "barrier")
            writing.precedes(dist, "monitored_barrier")
        sys.addaudithook(writing.heard)
        end_at_once = os._exit

        def end_whole(status: int) -> None:
            writing.end()
            end_at_once(status)

        os._exit = end_whole  # type: ignore[assignment]

        def distributed() -> None:
            import torch.distributed.checkpoint as checkpoints

            _save_shards_behind(checkpoints, writing, process)
            writing.precedes(checkpoints, "load")

        after_import(_OF_SHARDS, distributed)
        atexit.register(writing.end)


class _Writing:
    """The checkpoints that are being written, by the thread that began them."""

    def __init__(self) -> None:
        self._begun: dict[int, list[tuple[Future[Any], str]]] = {}
        os.register_at_fork(after_in_child=self._begun.clear)  # its parent writes them

    def began(self, written: Future[Any], place: Any) -> None:
        """Take a checkpoint that is written from now on, to a file or into a folder."""
        path = os.path.realpath(os.fsdecode(place)) if place is not None else ""
        self._begun.setdefault(threading.get_ident(), []).append((written, path))

    def wait(self) -> None:
        """Wait for the checkpoints of this thread, and raise their first error.

        A thread that writes also renames its files, and waits for none.
        """
        begun = self._begun.pop(threading.get_ident(), [])
        for save, _ in begun:
            save.exception()
        for save, _ in begun:
            save.result()

    def heard(self, event: str, values: tuple[Any, ...]) -> None:
        """Wait before this thread opens a checkpoint of its own, or gives files away."""
        begun = self._begun.get(threading.get_ident())
        if not begun or (event != "open" and event not in _GIVES_AWAY):
            return
        if event == "open":
            if not isinstance(values[0], str | bytes | os.PathLike):
                return
            path = os.path.realpath(os.fsdecode(values[0])) + os.sep
            if not any(place and path.startswith(place + os.sep) for _, place in begun):
                return
        self.wait()

    def precedes(self, owner: Any, name: str) -> None:
        """Let a function wait before it begins."""
        function = getattr(owner, name)

        @functools.wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            self.wait()
            return function(*args, **kwargs)

        setattr(owner, name, called)

    def end(self) -> None:
        """Wait for the checkpoints of all threads; a failure is the exit status."""
        while self._begun:
            _, begun = self._begun.popitem()
            for save, _ in begun:
                if (error := save.exception()) is not None:  # Python would end with status 0
                    sys.stderr.write(f"fullwire: the last checkpoint is not whole: {error}\n")
                    sys.stderr.flush()
                    os._exit(1)


def _write(content: memoryview, file: io.FileIO) -> None:
    with file:
        while content:
            content = content[file.write(content) :]


def _save_shards_behind(checkpoints: Any, writing: _Writing, process: Process) -> None:
    """Let `torch.distributed.checkpoint.save` copy the state and return.

    Its threads agree in a group of their own: in the job's group they would meet its sums.
    """
    import torch.distributed as dist

    save, save_async = checkpoints.save, checkpoints.async_save
    signature = inspect.signature(save)
    groups: dict[tuple[int, ...], Any] = {}

    @functools.wraps(save)
    def save_behind(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        writing.wait()
        if not given.get("no_dist") and dist.is_available() and dist.is_initialized():
            ranks = tuple(dist.get_process_group_ranks(given.get("process_group")))
            if ranks not in groups:
                groups[ranks] = dist.new_group(
                    ranks, backend="gloo", use_local_synchronization=True
                )
            given["process_group"] = groups[ranks]
        writing.began(save_async(**given), given.get("checkpoint_id"))
        process.did(f"applied: {_OF_SHARDS}.save writes in a thread")
        return None

    checkpoints.save = save_behind
