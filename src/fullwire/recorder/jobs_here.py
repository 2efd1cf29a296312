"""Find the training jobs that run on this host: processes with torch, and their ranks.

Everything works as the job's own user. Another user's processes hide their environment.

A job has names that its scheduler gave: Slurm tells each process its job in the environment and in
its cgroup, Kubernetes in the container's host name and the pod's cgroup.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import re
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from fullwire.errors import UsageError
from fullwire.recorder.command_line import without_secrets

MOST_RANKS = 256
_TORCH = re.compile(rb"libtorch(?:_cpu|_python)?\.so")
_BACKENDS = ("fullwire", "nccl", "mpi", "gloo")  # torch starts Gloo beside others
_MOST_MAPS_BYTES = 4 << 20
_FIRST_PIDS = 0xEFFFFFFC  # the inode of the machine's own numbers of processes


@dataclass(frozen=True, slots=True, kw_only=True)
class RankHere:
    """A process that is a rank of a job."""

    pid: int
    rank: int
    user: str
    command: str
    network: int  # the inode of its network namespace
    uses_gpu: bool
    uses_rdma: bool = False
    host: str = field(default_factory=socket.gethostname)
    tracer: str = ""  # the process that traces it, as a debugger does: "gdb (process 7)"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobHere:
    """A job, and those of its ranks that run on this host."""

    ranks: tuple[RankHere, ...]
    workers: int
    is_guessed: bool  # no environment told the ranks: they are numbered by process
    meets: str = ""  # where its ranks meet, "10.0.0.1:29500"; empty if no environment told it
    backend: str = ""  # one of _BACKENDS, as the names of a rank's threads tell it


def jobs_here() -> tuple[JobHere, ...]:
    """Find the training jobs on this host: processes with torch that have a rank."""
    return tuple(job for members in _members() if (job := _job(*members)) is not None)


def job_named(name: str) -> JobHere:
    """Find the one job of a name: words of its command, `slurm:1234`, `k8s:bert`, `master:a:29500`.

    The last is the place where the job's ranks meet: MASTER_ADDR and MASTER_PORT.
    """
    kind, colon, own = name.partition(":")
    is_kind = bool(colon) and kind in _NAMES
    if not (own if is_kind else name).strip():
        raise UsageError("watch --job: expected a name, got none")
    jobs = jobs_here()
    named = [
        job
        for job in jobs
        if any(
            _NAMES[kind](own, rank.pid, job) if is_kind else name in rank.command
            for rank in job.ranks
        )
    ]
    if len(named) == 1:
        return named[0]
    if named:
        pids = ", ".join(str(job.ranks[0].pid) for job in named)
        raise UsageError(f"watch --job {name}: {len(named)} jobs are named so; give one of {pids}")
    expected = {
        "slurm": "the number of a Slurm job with ranks on this host",
        "k8s": "the name or the uid of a pod with ranks on this host",
        "master": "the address and port at which ranks on this host meet",
    }.get(kind if is_kind else "", "words of a training job's command")
    closed = [] if is_kind else _closed_to_us(name)
    if closed:
        found = (
            f"{len(closed)} process{'' if len(closed) == 1 else 'es'} of "
            f"{', '.join(sorted(set(closed)))} {'has' if len(closed) == 1 else 'have'} them: "
            "that user and root alone may watch"
        )
    elif jobs:
        found = (
            f"{len(jobs)} job{' runs' if len(jobs) == 1 else 's run'} here with other ones; "
            "fullwire watch lists them"
        )
    else:
        found = "no training job that you may watch runs here"
    raise UsageError(f"watch --job {name}: expected {expected}, and {found}")


def _is_of_slurm(number: str, pid: int, _: JobHere) -> bool:
    told, (first, _separator, task) = environment_of(pid), number.partition("_")
    ids = {told.get("SLURM_JOB_ID"), told.get("SLURM_JOBID")}
    array = told.get("SLURM_ARRAY_JOB_ID"), told.get("SLURM_ARRAY_TASK_ID")
    return number in ids or array == (first, task) or f"job_{number}" in _cgroup(pid)


def _is_of_kubernetes(name: str, pid: int, _: JobHere) -> bool:
    told = environment_of(pid)
    pod = told.get("HOSTNAME", "") if "KUBERNETES_SERVICE_HOST" in told else ""
    # The kubelet writes a pod's uid with dashes, systemd's driver with underscores.
    uid = re.compile(rf"(?:^|-)pod{'[-_]'.join(map(re.escape, name.split('-')))}(?:[.]slice)?$")
    # A replica's pod is called as its job, a dash, and what it is: bert-worker-0.
    return (
        pod == name or pod.startswith(f"{name}-") or any(uid.search(part) for part in _cgroup(pid))
    )


_NAMES: Mapping[str, Callable[[str, int, JobHere], bool]] = {
    "slurm": _is_of_slurm,
    "k8s": _is_of_kubernetes,
    "master": lambda place, pid, job: job.meets == place,
}


def _cgroup(pid: int) -> list[str]:
    """Return the parts of the paths of a process's control groups."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/cgroup") as file:
        return file.read().replace("\n", "/").split("/")
    return []


def _closed_to_us(words: str) -> list[str]:
    """Return the users of the processes with these words that we may not look into."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and words in command_of(int(name)):
            with contextlib.suppress(OSError):
                owner = os.stat(f"/proc/{name}").st_uid
                if os.geteuid() not in (0, owner):
                    found.append(_user(owner))
    return found


def job_of(pid: int) -> JobHere:
    """Find the job of a process: of a rank, or of the launcher above its ranks."""
    try:
        owner, has_ended = os.stat(f"/proc/{pid}").st_uid, _has_ended(pid)
    except OSError:
        why = ""
        if inode_of(os.readlink("/proc/self/ns/pid")) != _FIRST_PIDS:
            why = "; this is a container, which shows and numbers its own processes alone"
        raise UsageError(f"watch: expected the id of a running process, got {pid}{why}") from None
    if os.geteuid() not in (0, owner):
        raise UsageError(
            f"watch {pid}: expected a process of {_user(os.geteuid())}, got one of {_user(owner)}: "
            "the kernel shows its environment and its files to that user and to root alone"
        )
    if has_ended:
        raise UsageError(f"watch {pid}: the process has ended, and its parent has yet to see that")
    if not os.access(f"/proc/{pid}/environ", os.R_OK) or not os.access(f"/proc/{pid}/fd", os.X_OK):
        raise UsageError(
            f"watch {pid}: the kernel hides this process. Run as root, or with CAP_SYS_PTRACE in "
            "the process's container"
        )
    members = _members()
    for near in ({pid, *_descendants(pid)}, _ancestors(pid)):  # a loader stands for its rank
        named = [member for member in members if near & set(member[0].values())]
        if len(named) > 1:
            firsts = ", ".join(str(min(ranks.values())) for ranks, _, _ in named)
            raise UsageError(f"watch {pid}: {len(named)} jobs run below it. Name one of {firsts}")
        if named and (found := _job(*named[0])) is not None:
            return found
    raise UsageError(
        f"watch {pid}: expected a training process or its launcher, got {command_of(pid)[:60]!r}, "
        "where it and its children lack torch"
    )


def _members() -> list[tuple[dict[int, int], int, bool]]:
    """Find the processes of each job by rank, the job's size, and whether both are guessed.

    Ranks that meet at one place are a job. Children of a rank are its loaders and helpers. Where no
    environment tells ranks, the children that one process started are taken for them.
    """
    processes = _processes()
    ranks: dict[int, dict[str, str]] = {}
    alone: dict[int, list[int]] = {}
    for pid, told in processes.items():
        parent = _parent(pid)
        if told.get("RANK", "").isdigit():
            if processes.get(parent, {}).get("RANK") != told["RANK"]:
                ranks[pid] = told
        elif parent in processes:
            alone.setdefault(parent, []).append(pid)
        else:
            alone.setdefault(pid, [])
    launchers = {above for pid in ranks for above in _line_up(pid)}  # torchrun loads torch, too
    jobs = []
    while ranks:
        pid, told = next(iter(ranks.items()))
        together = _together(pid, ranks)
        size = told.get("WORLD_SIZE", "")
        jobs.append((together, max(int(size) if size.isdigit() else 0, max(together) + 1), False))
        for group in together.values():
            del ranks[group]
    for pid, children in alone.items():
        if "RANK" not in processes[pid] and pid not in launchers:
            guessed = dict(enumerate(sorted(children) if len(children) > 1 else [pid]))
            jobs.append((guessed, len(guessed), True))
    return jobs


def _together(pid: int, ranks: Mapping[int, Mapping[str, str]]) -> dict[int, int]:
    """Return the processes of a rank's job, by rank.

    Two jobs in containers may meet at one name. So ranks are looked for below the nearest process
    that started them, and no further up than where a rank appears twice.
    """
    meet = [ranks[pid].get(name) for name in ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE")]
    alike = {
        pid: int(told["RANK"])
        for pid, told in ranks.items()
        if [told.get(name) for name in ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE")] == meet
    }
    above = {pid: [pid, *_line_up(pid)] for pid in alike}
    found = {alike[pid]: pid}
    for ancestor in above[pid]:
        below = [pid for pid, line in above.items() if ancestor in line]
        if len({alike[pid] for pid in below}) < len(below):
            break
        found = {alike[pid]: pid for pid in below}
    return found


def _job(ranks: dict[int, int], workers: int, is_guessed: bool) -> JobHere | None:
    """Return a job with its ranks that still run, or None without any."""
    here = []
    for rank, pid in sorted(ranks.items())[:MOST_RANKS]:
        with contextlib.suppress(OSError):
            opened = [target for _, target in opened_by(pid)]
            here.append(
                RankHere(
                    pid=pid,
                    rank=rank,
                    user=_user(os.stat(f"/proc/{pid}").st_uid),
                    command=command_of(pid),
                    network=inode_of(os.readlink(f"/proc/{pid}/ns/net")),
                    tracer=_tracer(pid),
                    uses_gpu=any(each.startswith(("/dev/nvidia", "/dev/kfd")) for each in opened),
                    uses_rdma=any(each.startswith("/dev/infiniband/") for each in opened),
                )
            )
    if not here:
        return None
    meets = backend = ""
    with contextlib.suppress(OSError):
        backend = _backend_of(here[0].pid)
    with contextlib.suppress(OSError, KeyError):
        told = _environment(here[0].pid)
        meets = "" if is_guessed else f"{told['MASTER_ADDR']}:{told['MASTER_PORT']}"
    return JobHere(
        ranks=tuple(here), workers=workers, is_guessed=is_guessed, meets=meets, backend=backend
    )


def _backend_of(pid: int) -> str:
    """Return the library that sums gradients, by the threads that it started; empty if none did."""
    names = []
    for task in os.listdir(f"/proc/{pid}/task"):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{task}/comm") as file:
            names.append(file.read().lower())
    return next((each for each in _BACKENDS if any(each in name for name in names)), "")


def _processes() -> dict[int, dict[str, str]]:
    """Return the environment of each process of ours that has loaded torch, without our own."""
    environments = {}
    ours = {os.getpid(), *_ancestors(os.getpid())}
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) not in ours and _has_torch(int(name)):
            with contextlib.suppress(OSError):
                environments[int(name)] = _environment(int(name))
    return environments


def _has_ended(pid: int) -> bool:
    with open(f"/proc/{pid}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].split()[0] in (b"Z", b"X")


def _has_torch(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/maps", "rb") as file:
            return _TORCH.search(file.read(_MOST_MAPS_BYTES)) is not None
    except OSError:
        return False


def environment_of(pid: int) -> dict[str, str]:
    """Return the environment in which a process was started; empty if it ended."""
    with contextlib.suppress(OSError):
        return _environment(pid)
    return {}


def _environment(pid: int) -> dict[str, str]:
    with open(f"/proc/{pid}/environ", "rb") as file:
        pairs = (pair.partition(b"=") for pair in file.read().split(b"\0"))
        return {key.decode("ascii", "replace"): os.fsdecode(value) for key, _, value in pairs}


def _tracer(pid: int) -> str:
    with open(f"/proc/{pid}/status") as file:
        told = next((line.split()[1] for line in file if line.startswith("TracerPid:")), "0")
    if told == "0":
        return ""
    program = "a program"  # of another container or user
    with contextlib.suppress(OSError), open(f"/proc/{told}/comm") as file:
        program = file.read().strip()
    return f"{program} (process {told})"


def command_of(pid: int) -> str:
    """Return the command of a process as its user wrote it, without secrets; empty if it ended."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
        return without_secrets([os.fsdecode(word) for word in file.read().split(b"\0") if word])
    return ""


def _user(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)


def _parent(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[1])
    except OSError:
        return 0


def _line_up(pid: int) -> Iterator[int]:
    """Go through a process's parent, its parent, and so on."""
    while (pid := _parent(pid)) > 0:
        yield pid


def _ancestors(pid: int) -> set[int]:
    return {parent for parent in _line_up(pid) if parent > 1}


def _descendants(pid: int) -> set[int]:
    below: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            below.setdefault(_parent(int(name)), []).append(int(name))
    descendants: set[int] = set()
    left = [pid]
    while left:
        children = below.get(left.pop(), ())
        descendants.update(children)
        left.extend(children)
    return descendants


def opened_by(pid: int) -> Iterator[tuple[int, str]]:
    """Yield the files that a process holds open: number and target."""
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                yield int(name), os.readlink(f"/proc/{pid}/fd/{name}")


def inode_of(link: str) -> int:
    """Return the number in a link as `socket:[4026]`, or 0."""
    return int(link.partition("[")[2].rstrip("]") or 0)
