"""Find the training jobs that run on this host: processes with torch, and their ranks.

Everything works as the job's own user. Another user's processes hide their environment.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from fullwire.errors import UsageError
from fullwire.recorder.command_line import without_secrets

MOST_RANKS = 256
_TORCH = re.compile(rb"libtorch(?:_cpu|_python)?\.so")
_MOST_MAPS_BYTES = 4 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class RankHere:
    """A process that is a rank of a job."""

    pid: int
    rank: int
    user: str
    command: str
    network: int  # the inode of its network namespace
    uses_gpu: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class JobHere:
    """A job, and those of its ranks that run on this host."""

    ranks: tuple[RankHere, ...]
    workers: int
    is_guessed: bool  # no environment told the ranks: they are numbered by process


def jobs_here() -> tuple[JobHere, ...]:
    """Find the training jobs on this host: processes with torch that have a rank."""
    return tuple(job for members in _members() if (job := _job(*members)) is not None)


def job_of(pid: int) -> JobHere:
    """Find the job of a process: of a rank, or of the launcher above its ranks."""
    try:
        owner, has_ended = os.stat(f"/proc/{pid}").st_uid, _has_ended(pid)
    except OSError:
        raise UsageError(f"watch: expected the id of a running process, got {pid}") from None
    if os.geteuid() not in (0, owner):
        raise UsageError(
            f"watch {pid}: expected a process of {_user(os.geteuid())}, got one of {_user(owner)}: "
            "the kernel shows its environment and its files to that user and to root alone"
        )
    if has_ended:
        raise UsageError(f"watch {pid}: the process has ended; its parent has not yet seen that")
    if not os.access(f"/proc/{pid}/environ", os.R_OK) or not os.access(f"/proc/{pid}/fd", os.X_OK):
        raise UsageError(
            f"watch {pid}: the kernel hides this process; run as root, or with CAP_SYS_PTRACE in "
            "the process's container"
        )
    members = _members()
    for near in ({pid, *_descendants(pid)}, _ancestors(pid)):  # a loader stands for its rank
        named = [member for member in members if near & set(member[0].values())]
        if len(named) > 1:
            firsts = ", ".join(str(min(ranks.values())) for ranks, _, _ in named)
            raise UsageError(f"watch {pid}: {len(named)} jobs run below it; name one of {firsts}")
        if named and (job := _job(*named[0])) is not None:
            return job
    raise UsageError(
        f"watch {pid}: expected a training process or its launcher, got {_command(pid)[:60]!r}: "
        "neither it nor a process that it started has loaded torch"
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
    jobs = []
    while ranks:
        pid, told = next(iter(ranks.items()))
        together = _together(pid, ranks)
        size = told.get("WORLD_SIZE", "")
        jobs.append((together, max(int(size) if size.isdigit() else 0, max(together) + 1), False))
        for group in together.values():
            del ranks[group]
    for pid, children in alone.items():
        if "RANK" not in processes[pid]:
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
            here.append(
                RankHere(
                    pid=pid,
                    rank=rank,
                    user=_user(os.stat(f"/proc/{pid}").st_uid),
                    command=_command(pid),
                    network=inode_of(os.readlink(f"/proc/{pid}/ns/net")),
                    uses_gpu=any(
                        opened.startswith(("/dev/nvidia", "/dev/kfd"))
                        for _, opened in opened_by(pid)
                    ),
                )
            )
    return JobHere(ranks=tuple(here), workers=workers, is_guessed=is_guessed) if here else None


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


def _environment(pid: int) -> dict[str, str]:
    with open(f"/proc/{pid}/environ", "rb") as file:
        pairs = (pair.partition(b"=") for pair in file.read().split(b"\0"))
        return {key.decode("ascii", "replace"): os.fsdecode(value) for key, _, value in pairs}


def _command(pid: int) -> str:
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
