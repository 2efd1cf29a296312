"""Processes of a Ray cluster (ray.io): one that is there, or one of this machine alone.

A cluster that is joined has to have this version of Fullwire on every node that computes, and each
node has to see what is shared: they are asked before any work begins. Ray does again elsewhere what
was on a node that is lost. What Fullwire itself refuses, or the disk, comes back as the value that
it is and is raised here: it is no failure of a node, so nothing is done again for it.

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
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fullwire import __version__
from fullwire.crew import Result, Task
from fullwire.errors import FullwireError, UsageError
from fullwire.units import shown

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


@contextmanager
def on_ray(on: str, shared: Sequence[Path]) -> Iterator[OnRay]:
    """Join the cluster, or start one on this machine, and leave it again."""
    address = _address(on)
    for name, value in (_QUIET | (_STARTED_HERE if address is None else {})).items():
        os.environ.setdefault(name, value)  # read when Ray is loaded, and by what it starts
    try:
        import ray
    except ImportError as error:
        raise UsageError(f"on: Ray is not here ({error}): pip install 'fullwire[ray]'") from None
    if ray.is_initialized():  # by whoever called us, in this process: theirs to leave
        yield _crew(ray, shared)
        return
    if (
        address is not None and address != "auto"
    ):  # for "auto" Ray looks for one that this machine is in
        # Where nobody listens Ray would try for minutes, and say so in between.
        host, _, port = address.removeprefix("ray://").rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), _LISTENS_S).close()
        except (OSError, ValueError, OverflowError) as error:
            raise UsageError(f"on: no Ray cluster at {address}: {_one_line(error)}") from None
    with _started(ray) if address is None else _connected(ray, address=address):
        yield _crew(ray, shared)


def _address(on: str) -> str | None:
    """Return the address of the cluster to join; None for one of this machine."""
    if not isinstance(on, str) or (on != "ray" and ":" not in on):
        raise UsageError(
            "on: expected here, ray, or the address of a Ray cluster such as head:6379, "
            f"got {shown(on)}"
        )
    address = os.environ.get("RAY_ADDRESS", "") if on == "ray" else on
    return None if address in ("", "local") else address


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
    try:
        with _own_signals(), _private_files():
            ray.init(log_to_driver=False, logging_level="error", **how)
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        raise UsageError(f"on: Ray, {how['address']}: {_one_line(error)}") from None
    # What it says of nodes that are lost goes to standard output, which is ours; it has no setting.
    ray._private.worker._worker_logs_enabled = False
    try:
        yield
    finally:
        ray.shutdown()
        ray._private.worker._worker_logs_enabled = True


@contextmanager
def _private_files() -> Iterator[None]:
    """Keep others of this machine from reading the token with which Ray knows its own.

    Ray writes it into the home as the umask allows, which is for everybody as a rule.
    """
    token = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    with contextlib.suppress(OSError):  # none yet, or another user's
        if token.stat().st_uid == os.geteuid():
            token.chmod(0o600)
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


@contextmanager
def _own_signals() -> Iterator[None]:
    """Keep our handler of SIGTERM, which Ray would replace."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _crew(ray: Any, shared: Sequence[Path]) -> OnRay:
    _refuse_unfit(ray, _nodes(ray), shared)
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


def _refuse_unfit(ray: Any, nodes: Sequence[dict[str, Any]], shared: Sequence[Path]) -> None:
    """Ask every node whether it can do our work."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    question = ray.remote(num_cpus=0)(_question())
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
            if _is_lost(ray, node):  # just before, when Ray did not know it yet
                continue
            raise UsageError(f"on: {name} does not answer: {_one_line(error)}") from None
        if version != __version__:
            has = f"Fullwire {version}" if version else "no Fullwire"
            raise UsageError(f"on: {name} has {has}: expected {__version__} on every node")
        if unseen:
            raise UsageError(
                f"on: {name} does not see {unseen[0]}: what is imported, and the run, have to be "
                "in folders that all nodes share"
            )


def _is_lost(ray: Any, node: dict[str, Any]) -> bool:
    """Wait for Ray to find out whether a node is lost that could not be asked."""
    deadline_s = time.monotonic() + _LOST_S
    while any(seen["Alive"] and seen["NodeID"] == node["NodeID"] for seen in ray.nodes()):
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.1)
    return True


def _question() -> Callable[[str, Sequence[str]], tuple[str, list[str]]]:
    """Make a function that is sent as code: on a node there may be no Fullwire to find it in."""

    def told(where: str, paths: Sequence[str]) -> tuple[str, list[str]]:
        try:
            from fullwire import __version__
        except ImportError:
            return "", []
        with contextlib.suppress(OSError):
            os.chdir(where)
        return __version__, [path for path in paths if not os.path.exists(path)]

    return told


def _one_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
