"""Who does work that comes in tasks: this process, several of this machine, or a Ray cluster.

    with crew("ray") as those:
        for result in those.each(function, tasks):

A crew does one function for each task and gives the results in the order of the tasks, so an answer
does not depend on who worked for it. Tasks do not need each other, and may be done twice: what one
leaves on disk appears whole, in the same place, with the same content. The function is a module's
own, or `functools.partial` of one; it, tasks and results are pickled on the way.

A Ray cluster (ray.io) is there already, or is of this machine alone. A cluster that is joined has
to have this version of Fullwire on every node that computes, and each node has to see what is
shared: they are asked before any work begins. Ray does again elsewhere what was on a node that is
lost. What Fullwire itself refuses, or the disk, comes back as the value that it is and is raised
here: it is no failure of a node, so nothing is done again for it.

What Ray would print, show or report on its own account is turned off. A cluster that is started
here listens on the loopback only, keeps its files in a folder of its own, and goes with them.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, TypeVar

from fullwire import __version__
from fullwire.errors import FullwireError, UsageError
from fullwire.units import shown

HERE = "here"
_LOTS_EACH = 8  # of tasks, for each processor: the last to come ends soon after the others
_AHEAD = 3  # lots for each processor that are asked for before the first result is taken
_RETRIES = 3  # of a lot whose process or node was lost
_LISTENS_S = 10.0
_ANSWER_S = 180.0  # for a node's first answer, which takes the start of a process
_LOST_S = 5.0  # for Ray to tell everybody that a node is lost
_STORE_BYTES = 256 * 2**20  # for what a cluster of this machine has in memory of results
_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",  # tells ray.io who uses it
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # else a warning; our tasks use no accelerator
}
_STARTED_HERE = {
    # Else a cluster of one node listens on all of the machine's addresses, as one of many must.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_worker_niceness": "0",  # else they go after all others of the machine
}

Task = TypeVar("Task")
Result = TypeVar("Result")


class Crew(Protocol):
    """Whoever does the work."""

    def each(self, function: Callable[[Task], Result], tasks: Sequence[Task]) -> Iterator[Result]:
        """Do all tasks, and give what they return, in their order."""
        ...


class Alone:
    """This process, one task after the other."""

    def each(self, function: Callable[[Task], Result], tasks: Sequence[Task]) -> Iterator[Result]:
        """Do all tasks, and give what they return, in their order."""
        return map(function, tasks)


ALONE = Alone()


def crew(
    on: str = HERE, *, processes: int = 1, shared: Sequence[Path] = ()
) -> AbstractContextManager[Crew]:
    """Gather those who work `on` this machine, in so many processes, or on Ray.

    `on` is "here", "ray" (the cluster that RAY_ADDRESS names, or else one that is started on this
    machine) or a cluster's address. Files and folders that are `shared` are there on every node.
    """
    if on != HERE:
        return on_ray(on, shared)
    if processes == 1:
        return nullcontext(ALONE)
    return Pool(processes)


class Pool:
    """So many processes; they end with the block, or with the process that started them."""

    def __init__(self, processes: int) -> None:
        self._count = processes

    def __enter__(self) -> Pool:
        # Loaded here: most crews are of this process alone.
        import multiprocessing
        from concurrent.futures import ProcessPoolExecutor

        # Started anew: a fork would copy locks that other threads of this process hold.
        self._pool = ProcessPoolExecutor(
            self._count, multiprocessing.get_context("spawn"), _end_with_the_parent
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._pool.shutdown(cancel_futures=True)

    def each(self, function: Callable[[Task], Result], tasks: Sequence[Task]) -> Iterator[Result]:
        """Do all tasks, and give what they return, in their order."""
        from concurrent.futures.process import BrokenProcessPool

        try:
            yield from self._pool.map(function, tasks)
        except BrokenProcessPool:
            raise UsageError(
                f"one of {self._count} processes was killed, as happens where memory is short; "
                "--processes 1 takes the least"
            ) from None


def _end_with_the_parent() -> None:
    """Let a process of the pool end when the one that started it does, whichever way that is."""
    import multiprocessing

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is told to end by the parent
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


@contextmanager
def on_ray(on: str, shared: Sequence[Path]) -> Iterator[OnRay]:
    """Join the cluster, or start one on this machine, and leave it again."""
    if not isinstance(on, str) or (on != "ray" and ":" not in on):
        raise UsageError(
            "on: expected here, ray, or the address of a Ray cluster such as head:6379, "
            f"got {shown(on)}"
        )
    address = os.environ.get("RAY_ADDRESS", "") if on == "ray" else on
    is_started_here = address in ("", "local")
    for name, value in (_QUIET | (_STARTED_HERE if is_started_here else {})).items():
        os.environ.setdefault(name, value)  # read when Ray is loaded, and by what it starts
    try:
        import ray
    except ImportError as error:
        raise UsageError(f"on: Ray is not here ({error}): pip install 'fullwire[ray]'") from None
    if ray.is_initialized():  # by whoever called us, in this process: theirs to leave
        yield _crew(ray, shared)
        return
    if not is_started_here and address != "auto":  # for which Ray looks for one of this machine
        # Where nobody listens Ray would try for minutes, and say so in between.
        host, _, port = address.removeprefix("ray://").rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), _LISTENS_S).close()
        except (OSError, ValueError, OverflowError) as error:
            raise UsageError(f"on: no Ray cluster at {address}: {_one_line(error)}") from None
    with _started(ray) if is_started_here else _connected(ray, address=address):
        yield _crew(ray, shared)


@contextmanager
def _started(ray: Any) -> Iterator[None]:
    """Start a cluster of one node, this machine, whose files go with it."""
    # Not in TMPDIR, which may be deep: Ray makes sockets below, whose names have to be short.
    parent = os.environ.get("RAY_TMPDIR", "/tmp")
    try:
        place = tempfile.mkdtemp(prefix="fullwire-ray-", dir=parent)
    except OSError as error:
        raise UsageError(
            f"RAY_TMPDIR: expected a folder to write in, got {shown(parent)}: {error.strerror}"
        ) from None
    processors = len(os.sched_getaffinity(0))
    try:
        with _connected(
            ray,
            address="local",
            num_cpus=processors,
            include_dashboard=False,
            object_store_memory=_STORE_BYTES,
            _temp_dir=place,
        ):
            yield
    finally:
        shutil.rmtree(place, ignore_errors=True)


@contextmanager
def _connected(ray: Any, **how: Any) -> Iterator[None]:
    # Keep others of this machine from reading the token with which Ray knows its own. Ray writes it
    # into the home as the umask allows, which is for everybody as a rule.
    token = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    with contextlib.suppress(OSError):  # none yet, or another user's
        if token.stat().st_uid == os.geteuid():
            token.chmod(0o600)
    umask = os.umask(0o077)
    is_main_thread = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGTERM)  # ours, which Ray would replace
    try:
        ray.init(log_to_driver=False, logging_level="error", **how)
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        raise UsageError(f"on: Ray, {how['address']}: {_one_line(error)}") from None
    finally:
        os.umask(umask)
        if is_main_thread:
            signal.signal(signal.SIGTERM, handler)
    # What it says of nodes that are lost goes to standard output, which is ours; it has no setting.
    ray._private.worker._worker_logs_enabled = False
    try:
        yield
    finally:
        ray.shutdown()
        ray._private.worker._worker_logs_enabled = True


def _crew(ray: Any, shared: Sequence[Path]) -> OnRay:
    """Gather a cluster's processors, once every node has been asked whether it can do our work."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    def told(where: str, paths: Sequence[str]) -> tuple[str, list[str]]:
        # Sent as code, as a function within another is: there may be no Fullwire to find it in.
        try:
            from fullwire import __version__
        except ImportError:
            return "", []
        with contextlib.suppress(OSError):
            os.chdir(where)
        return __version__, [path for path in paths if not os.path.exists(path)]

    nodes = _nodes(ray)
    question = ray.remote(num_cpus=0)(told)
    asked = [
        question.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        ).remote(os.getcwd(), [str(path) for path in shared])
        for node in nodes
    ]
    for node, answer in zip(nodes, asked, strict=True):
        name = f"the Ray node {node['NodeManagerHostname']}"
        try:
            version, unseen = ray.get(answer, timeout=_ANSWER_S)
        except ray.exceptions.RayError as error:
            # It may have been lost just before, and Ray is about to find out.
            deadline_s = time.monotonic() + _LOST_S
            while any(seen["Alive"] and seen["NodeID"] == node["NodeID"] for seen in ray.nodes()):
                if time.monotonic() > deadline_s:
                    raise UsageError(f"on: {name} does not answer: {_one_line(error)}") from None
                time.sleep(0.1)
            continue
        if version != __version__:
            has = f"Fullwire {version}" if version else "no Fullwire"
            raise UsageError(f"on: {name} has {has}: expected {__version__} on every node")
        if unseen:
            raise UsageError(
                f"on: {name} does not see {unseen[0]}: what is imported, and the run, have to be "
                "in folders that all nodes share"
            )
    nodes = _nodes(ray)  # that are there still
    return OnRay(ray, int(sum(node["Resources"]["CPU"] for node in nodes)) or 1)


def _nodes(ray: Any) -> list[dict[str, Any]]:
    nodes = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]
    if not nodes:
        raise UsageError("on: the Ray cluster has no processors")
    return nodes


class OnRay:
    """The processors of a cluster."""

    def __init__(self, ray: Any, processors: int) -> None:
        self._ray = ray
        self._processors = processors

    def each(self, function: Callable[[Task], Result], tasks: Sequence[Task]) -> Iterator[Result]:
        """Do all tasks, and give what they return, in their order."""
        ray = self._ray
        work = ray.remote(num_cpus=1, max_retries=_RETRIES)(_done)
        whole = ray.put((os.getcwd(), function))  # each node gets it once
        # Tasks in a row go together, since each lot has to be asked for.
        count = max(1, len(tasks) // (_LOTS_EACH * self._processors))
        lots = (tasks[first : first + count] for first in range(0, len(tasks), count))
        asked = deque(
            work.remote(whole, lot) for lot in itertools.islice(lots, _AHEAD * self._processors)
        )
        while asked:
            try:
                results = ray.get(asked.popleft())
            except ray.exceptions.RayTaskError:
                raise  # a bug of ours, with the place where it happened
            except ray.exceptions.RayError as error:
                raise UsageError(
                    f"on: work was given up after {1 + _RETRIES} attempts, each of which lost its "
                    f"process or its node, as happens where memory is short: {_one_line(error)}"
                ) from None
            asked.extend(work.remote(whole, lot) for lot in itertools.islice(lots, 1))
            for result in results:
                if isinstance(result, _Raised):
                    raise result.error
                yield result


@dataclass(frozen=True, slots=True)
class _Raised:
    """What a task raised in place of a result."""

    error: Exception


def _done(
    whole: tuple[str, Callable[[Task], Result]], lot: Sequence[Task]
) -> list[Result | _Raised]:
    """Do tasks in a row up to one that cannot be done."""
    where, function = whole
    with contextlib.suppress(OSError):
        os.chdir(where)  # people type paths from where the command stands, if that is here too
    results: list[Result | _Raised] = []
    for task in lot:
        try:
            results.append(function(task))
        except (FullwireError, OSError, MemoryError) as error:
            results.append(_Raised(error))
            break
    return results


def _one_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
