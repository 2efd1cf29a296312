"""Run tasks in this process, in several processes of this machine, or on a Ray cluster.

    with crew("ray") as those:
        for result in those.each(function, tasks):

A crew calls one function for each task. It returns the results in the order of the tasks, so an
answer does not depend on which process did the work. Tasks are independent, and a task may be done
twice. A task therefore writes its files whole, to the same place, with the same content each time.
The function is a module's own, or `functools.partial` of one. The function, the tasks and the
results are pickled on the way.

A Ray cluster (ray.io) exists already, or Fullwire starts one on this machine. Every node of an
existing cluster that computes must have this version of Fullwire, and must see the shared files.
`crew` asks the nodes before any work begins. When a node is lost, Ray repeats its tasks on another
node. An error of Fullwire or of the disk is different: it comes back as a value and is raised here.
The node is sound, so Ray repeats nothing for it.

Ray's own output, dashboards and usage reports are turned off. A cluster that Fullwire starts
listens on the loopback only. It keeps its files in a folder of its own, and the folder is deleted
with it.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, TypeVar

from fullwire.errors import FullwireError, UsageError
from fullwire.units import shown
from fullwire.version import __version__

HERE = "here"
_LOTS_EACH = 8  # Lots of tasks for each processor: so the last lot ends soon after the others.
_AHEAD = 3  # Lots for each processor, requested before the first result is taken.
_RETRIES = 3  # Of a lot that lost its process or its node.
_LISTENS_S = 10.0
_ANSWER_S = 180.0  # For a node's first answer: a process has to start there.
_LOST_S = 5.0  # For Ray to report a lost node to all others.
_STORE_BYTES = 256 * 2**20  # Memory for results in a cluster that Fullwire starts.
_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",  # otherwise Ray tells ray.io about its users
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # otherwise a warning; our tasks use no accelerator
}
_STARTED_HERE = {
    # Otherwise a cluster of one node listens on all addresses of the machine, which a cluster of
    # many nodes needs.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    # Otherwise the tasks run at a lower priority than all other processes.
    "RAY_worker_niceness": "0",
}

Task = TypeVar("Task")
Result = TypeVar("Result")


class Crew(Protocol):
    """Processes that do the tasks."""

    def each(self, function: Callable[[Task], Result], tasks: Sequence[Task]) -> Iterator[Result]:
        """Do all tasks, and yield their results in the order of the tasks."""
        ...


class Alone:
    """This process, one task after the other."""

    def each(self, function: Callable[[Task], Result], tasks: Sequence[Task]) -> Iterator[Result]:
        """Do all tasks, and yield their results in the order of the tasks."""
        return map(function, tasks)


ALONE = Alone()


def crew(
    on: str = HERE, *, processes: int = 1, shared: Sequence[Path] = ()
) -> AbstractContextManager[Crew]:
    """Make a crew of `processes` processes of this machine, or a crew on Ray.

    `on` is "here", "ray" or the address of a Ray cluster. "ray" is the cluster that RAY_ADDRESS
    names; without RAY_ADDRESS, Fullwire starts a cluster on this machine. Every node sees the files
    and folders in `shared`.
    """
    if on != HERE:
        return on_ray(on, shared)
    if processes == 1:
        return nullcontext(ALONE)
    return Pool(processes)


class Pool:
    """A pool of processes; they end with the block, or with the process that started them."""

    def __init__(self, processes: int) -> None:
        self._count = processes

    def __enter__(self) -> Pool:
        # Loaded here, because most crews are this process alone.
        import multiprocessing
        from concurrent.futures import ProcessPoolExecutor

        # Spawned: a fork would copy locks that other threads of this process hold.
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
        """Do all tasks, and yield their results in the order of the tasks."""
        from concurrent.futures.process import BrokenProcessPool

        try:
            yield from self._pool.map(function, tasks)
        except BrokenProcessPool:
            raise UsageError(
                f"one of {self._count} processes was killed, as happens where memory is short; "
                "--processes 1 takes the least"
            ) from None


def _end_with_the_parent() -> None:
    """Make a process of the pool end with its parent, however the parent ends."""
    import multiprocessing

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent tells it to end
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


@contextmanager
def on_ray(on: str, shared: Sequence[Path]) -> Iterator[OnRay]:
    """Join the Ray cluster, or start one on this machine, and leave it at the end of the block."""
    if not isinstance(on, str) or (on != "ray" and ":" not in on):
        raise UsageError(
            "on: expected here, ray, or the address of a Ray cluster such as head:6379, "
            f"got {shown(on)}"
        )
    address = os.environ.get("RAY_ADDRESS", "") if on == "ray" else on
    is_started_here = address in ("", "local")
    for name, value in (_QUIET | (_STARTED_HERE if is_started_here else {})).items():
        os.environ.setdefault(name, value)  # Ray and its processes read them at the start
    try:
        import ray
    except ImportError as error:
        raise UsageError(f"on: Ray is not here ({error}): pip install 'fullwire[ray]'") from None
    if ray.is_initialized():  # the calling program did, so the calling program leaves it
        yield _crew(ray, shared)
        return
    if not is_started_here and address != "auto":  # "auto": Ray looks for one on this machine
        # Ray would try an address without a listener for minutes, and print messages.
        host, _, port = address.removeprefix("ray://").rpartition(":")
        try:
            import socket  # here: only a cluster needs it

            socket.create_connection((host.strip("[]"), int(port)), _LISTENS_S).close()
        except (OSError, ValueError, OverflowError) as error:
            raise UsageError(f"on: no Ray cluster at {address}: {_one_line(error)}") from None
    with _started(ray) if is_started_here else _connected(ray, address=address):
        yield _crew(ray, shared)


@contextmanager
def _started(ray: Any) -> Iterator[None]:
    """Start a cluster of this machine alone, and delete its files at the end."""
    # TMPDIR may be deep, and Ray makes sockets below this folder. Names of sockets must be short.
    import tempfile  # here: only a cluster needs it

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
    # Keep other users from reading the token by which Ray knows its own processes. Ray writes it
    # into the home as the umask allows, which usually means that everybody can read it.
    token = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    with contextlib.suppress(OSError):  # there is no token yet, or it is another user's
        if token.stat().st_uid == os.geteuid():
            token.chmod(0o600)
    umask = os.umask(0o077)
    is_main_thread = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGTERM)  # our handler, which Ray would replace
    try:
        ray.init(log_to_driver=False, logging_level="error", **how)
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        raise UsageError(f"on: Ray, {how['address']}: {_one_line(error)}") from None
    finally:
        os.umask(umask)
        if is_main_thread:
            signal.signal(signal.SIGTERM, handler)
    # Ray prints lost nodes to standard output, where our answer goes. It has no setting for this.
    ray._private.worker._worker_logs_enabled = False
    try:
        yield
    finally:
        ray.shutdown()
        ray._private.worker._worker_logs_enabled = True


def _crew(ray: Any, shared: Sequence[Path]) -> OnRay:
    """Return the processors of a cluster, after every node has shown that it can do our work."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    def told(where: str, paths: Sequence[str]) -> tuple[str, list[str]]:
        # Ray sends a nested function as code. This node may have no Fullwire to import it from.
        try:
            from fullwire.version import __version__
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
            # The node may have been lost just before, and Ray has not noticed yet.
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
                f"on: {name} does not see {unseen[0]}: expected imported modules and the run in "
                "folders that all nodes share"
            )
    nodes = _nodes(ray)  # the nodes that are still alive
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
        """Do all tasks, and yield their results in the order of the tasks."""
        ray = self._ray
        work = ray.remote(num_cpus=1, max_retries=_RETRIES)(_done)
        whole = ray.put((os.getcwd(), function))  # so each node receives it once
        # Several tasks in a row make one lot, because each lot costs a request.
        count = max(1, len(tasks) // (_LOTS_EACH * self._processors))
        lots = (tasks[first : first + count] for first in range(0, len(tasks), count))
        asked = deque(
            work.remote(whole, lot) for lot in itertools.islice(lots, _AHEAD * self._processors)
        )
        while asked:
            try:
                results = ray.get(asked.popleft())
            except ray.exceptions.RayTaskError:
                raise  # a bug of ours, with its traceback
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
    """The error that a task raised instead of returning a result."""

    error: Exception


def _done(
    whole: tuple[str, Callable[[Task], Result]], lot: Sequence[Task]
) -> list[Result | _Raised]:
    """Do a lot's tasks in order, up to the first that fails."""
    where, function = whole
    with contextlib.suppress(OSError):
        # paths are relative to the folder of the command, if the node has that folder
        os.chdir(where)
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
