"""The effect on a job and its run when calls of the recorder, sampler or store fail.

    python -m validation.recorder_exhaustion [--rounds 1000]

Three kinds of rounds:

- recorder: a training on one rank, in a fork of a process that has loaded torch. In the n-th round
  the n-th call of the recorder fails, once or for good. The errors are a full disk, an error of the
  disk, a file system that became read-only, and too few descriptors or too little memory.
- store: the recording of a good round becomes a run, while the size of files is limited.
- sampler: a command with a sampler beside it, under the same limit, or with few descriptors.

The job has to end as it would have, with the same weights. The files that remain have to open as a
run that names its gaps, or be refused in one line.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import errno
import hashlib
import itertools
import json
import os
import resource
import select
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from fullwire import _hooks
from fullwire.errors import FullwireError
from fullwire.recorder import sampler as sampler_program
from fullwire.recorder.inside.notes import HOOKS_VARIABLE
from fullwire.recorder.record import join
from fullwire.run.store import read_run
from validation import results
from validation.arguments import parser

_INSIDE = f"{os.sep}recorder{os.sep}inside{os.sep}"
_LONGEST_S = 60.0
_JOB_STATUS = 7
_STEPS = 60  # the journal is written after each of them
_CALLS = ("open", "write", "pwrite", "fstat", "lseek", "close", "listdir")
# Of json and zlib: where the recorder requests most memory at once.
_MEMORY = ("dumps", "compressobj")
# The calls that fail, and their errors. The last block of a disk gives a short write.
KINDS: dict[str, tuple[Sequence[str], int | None]] = {
    "full disk": (("write", "pwrite"), errno.ENOSPC),
    "short write": (("write",), 0),
    "disk error": (_CALLS, errno.EIO),
    "read-only": (("open", "write", "pwrite"), errno.EROFS),
    "descriptor": (("open", "listdir"), errno.EMFILE),
    "memory": (_MEMORY, None),
}


def rounds_of(kind: str, wanted: int, place: Path, *, for_good: bool) -> Counter[str]:
    """Make the first call of a kind fail, then the second, and so on, and count the outcomes."""
    counted: Counter[str] = Counter()
    expected = _played(place / "unharmed", kind, 0, for_good)[0]
    if not expected.startswith(f"status {_JOB_STATUS},"):
        raise FullwireError(f"expected a job that ends by itself without a fault, got {expected}")
    for number in itertools.count(1):
        if counted["rounds"] >= wanted:
            break
        directory = place / f"{number}"
        ended, has_failed = _played(directory, kind, number, for_good)
        if not has_failed:  # there are no more calls
            break
        counted["rounds"] += 1
        if ended != expected:
            counted["harmed"] += 1
            print(f"{kind} {number} for_good={for_good}: {ended}, expected {expected}")
        counted[_what_is_left(directory, place / "job.run")] += 1
        shutil.rmtree(directory)
    return counted


def _played(directory: Path, kind: str, number: int, for_good: bool) -> tuple[str, bool]:
    """Train in a recorded fork; return how that ended, and whether a call failed."""
    directory.mkdir()
    hear, tell = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(hear)
            atexit._clear()  # the parent's functions for its own end
            sys.stderr = open(os.devnull, "w")  # noqa: SIM115  # as long as this process lives
            os.environ[HOOKS_VARIABLE] = str(_hooks.__file__)
            failed = _made_to_fail(kind, number, for_good)
            from fullwire.recorder.inside import after_import, journal, notes
            from fullwire.recorder.inside.watch import watch

            notes.native_hooks.cache_clear()  # this process may have looked before its name was set
            assert notes.native_hooks(), "expected the hooks that jobs have"

            # Written at each step, so that there are calls to fail.
            journal.FIRST_WAIT_NS = journal.LONGEST_WAIT_NS = 0
            with contextlib.suppress(Exception):  # as recorder.inside does it
                watch(str(directory), after_import)
            told: dict[str, Any] = {"weights": _trained()}
            atexit._run_exitfuncs()
            told["failed"] = bool(failed)
            _TRUE["write"](tell, json.dumps(told).encode())
            status = _JOB_STATUS
        except BaseException:
            _TRUE["write"](2, traceback.format_exc().encode())
        finally:
            _LEAVE(status)
    os.close(tell)
    said = b""
    until = time.monotonic() + _LONGEST_S
    while select.select([hear], [], [], max(0.0, until - time.monotonic()))[0]:
        piece = os.read(hear, 65536)
        if not piece:
            break
        said += piece
    else:
        os.kill(child, signal.SIGKILL)
    os.close(hear)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    heard = json.loads(said) if said else {"weights": "none", "failed": True}
    return f"status {status}, weights {heard['weights']}", bool(heard["failed"])


_LEAVE = os._exit
_TRUE: dict[str, Callable[..., Any]] = {name: getattr(os, name) for name in _CALLS}


def _made_to_fail(kind: str, number: int, for_good: bool) -> list[int]:
    """Make the recorder's n-th call of a kind fail; return the list of failed calls."""
    import zlib

    names, problem = KINDS[kind]
    failed: list[int] = []
    count = itertools.count(1)

    def is_hit() -> bool:
        if _INSIDE not in sys._getframe(2).f_code.co_filename:
            return False
        call = next(count)
        hit = call == number or (for_good and 0 < number < call)
        if hit:
            failed.append(call)
        return hit

    def failing(true: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            if not is_hit():
                return true(*given, **named)
            if problem is None:
                raise MemoryError
            if problem == 0:
                return true(given[0], given[1][: len(given[1]) // 2])
            raise OSError(problem, os.strerror(problem))

        return call

    for name in names:
        owner = {"dumps": json, "compressobj": zlib}.get(name, os)
        setattr(owner, name, failing(getattr(owner, name)))
    if "open" in names:
        setattr(builtins, "open", failing(open))  # noqa: B010  # mypy allows no other way
    return failed


def _trained() -> str:
    """Train a small model with a process group of one rank, and return a digest of its weights."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = nn.Sequential(*[layer for _ in range(3) for layer in (nn.Linear(16, 16), nn.Tanh())])
    data = DistributedDataParallel(model, bucket_cap_mb=0.001)
    optimizer = torch.optim.SGD(data.parameters(), 0.1)
    for _ in range(_STEPS):
        optimizer.zero_grad()
        data(torch.randn(4, 16)).square().mean().backward()
        optimizer.step()
    del data
    dist.destroy_process_group()
    weights = b"".join(each.detach().numpy().tobytes() for each in model.parameters())
    return hashlib.sha256(weights).hexdigest()[:16]


def _what_is_left(directory: Path, path: Path) -> str:
    """Make a run of a recording, and return the outcome."""
    shutil.rmtree(path, ignore_errors=True)
    try:
        join([directory], path)
        run = read_run(path)
    except FullwireError as error:
        return "refused" if "\n" not in str(error) else "refused in several lines"
    except Exception as error:
        print(f"{directory}: {error!r}")
        return "traceback"
    return "whole" if run.complete else "partial"


def store_rounds(recording: Path, place: Path, wanted: int) -> Counter[str]:
    """Make a run under each limit of file sizes, from 0 to more than enough."""
    counted: Counter[str] = Counter()
    path = place / "stored.run"
    join([recording], path)
    largest = max(file.stat().st_size for file in path.rglob("*") if file.is_file())
    for step in range(wanted):
        shutil.rmtree(path)
        limit = largest * step * 5 // (4 * wanted)
        child = os.fork()
        if child == 0:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
            answer = {"refused": 1, "partial": 2, "whole": 2}.get(_what_is_left(recording, path), 3)
            _LEAVE(answer)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        counted["rounds"] += 1
        counted[{1: "refused", 2: "whole"}.get(status, f"status {status}")] += 1
        if status == 1 and (path.exists() or list(place.glob(".stored.run.*"))):
            counted["left half a run"] += 1
        if not path.exists():
            join([recording], path)  # the recording is still there
    return counted


def sampler_rounds(place: Path, wanted: int) -> Counter[str]:
    """Run a command with a sampler beside it, and with too little of a resource."""
    counted: Counter[str] = Counter()
    job = ["sh", "-c", f"sleep 0.05; echo done; exit {_JOB_STATUS}"]
    for number in range(wanted):
        directory = place / f"sampled-{number}"
        directory.mkdir()
        limits = [(resource.RLIMIT_FSIZE, 40 * number), (resource.RLIMIT_NOFILE, 3 + number % 9)]
        which, limit = limits[number % 2]
        command = [sys.executable, sampler_program.__file__, str(directory), *job]
        done = subprocess.run(
            command,
            preexec_fn=lambda: resource.setrlimit(which, (limit, limit)),  # noqa: B023  # at once
            capture_output=True,
            text=True,
            check=False,
            timeout=_LONGEST_S,
        )
        counted["rounds"] += 1
        # Python and the shell need more descriptors than this, so the round did not begin.
        is_started = which == resource.RLIMIT_FSIZE or "done" in done.stdout
        if is_started and (done.returncode, done.stdout) != (_JOB_STATUS, "done\n"):
            counted["harmed"] += 1
            print(f"sampler {number}: {done}")
        shutil.rmtree(directory, ignore_errors=True)
    return counted


def all_rounds(wanted: int) -> dict[str, Counter[str]]:
    """Play all kinds of rounds, in turns."""
    load_once()
    found: dict[str, Counter[str]] = {}
    share = max(2, wanted * 7 // 10 // (2 * len(KINDS)))
    with TemporaryDirectory() as text:
        place = Path(text)
        for name, each in _recorder_rounds(place, share):
            found[name] = found.get(name, Counter()) + each
            print(f"{name:<14} {dict(each)}", flush=True)
        _played(place / "whole", "memory", 0, False)
        found["store"] = store_rounds(place / "whole", place, max(2, wanted * 2 // 10))
        print(f"store          {dict(found['store'])}", flush=True)
        found["sampler"] = sampler_rounds(place, max(2, wanted // 10))
        print(f"sampler        {dict(found['sampler'])}", flush=True)
    return found


def load_once() -> None:
    """Load modules once that each fork would load anew; this starts no thread in this process."""
    import torch
    import torch.distributed
    from torch.nn.parallel import DistributedDataParallel  # noqa: F401

    torch.set_num_threads(1)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()


def _recorder_rounds(place: Path, share: int) -> Iterator[tuple[str, Counter[str]]]:
    for kind, for_good in itertools.product(KINDS, (False, True)):
        own = place / f"{kind}-{for_good}".replace(" ", "-")
        own.mkdir()
        yield kind, rounds_of(kind, share, own, for_good=for_good)


def is_bad(counted: Counter[str]) -> bool:
    """Say whether a round harmed the job, or left files that fail in another way than a refusal."""
    good = {"rounds", "refused", "partial", "whole"}
    return any(count for name, count in counted.items() if name not in good)


def main() -> None:
    """Play the rounds; exit with an error if a job was harmed."""
    taken = parser(__doc__)
    taken.add_argument("--rounds", type=int, default=1000)
    found = all_rounds(taken.parse_args().rounds)
    total = sum(found.values(), Counter[str]())
    columns = ["what fails", "rounds", "job harmed", "run says what is missing", "refused", "whole"]
    names = ("rounds", "harmed", "partial", "refused", "whole")
    rows: list[list[results.Cell]] = [
        [kind, *(each[name] for name in names)] for kind, each in found.items()
    ]
    results.write(
        "recorder-exhaustion",
        claim="A recorder that runs out of something harms no job.",
        anchor="the same job without a fault: exit status and weights",
        summary=f"{total['rounds']} rounds, {total['harmed']} jobs harmed",
        cases=total["rounds"],
        tables=[results.Table(columns=columns, rows=rows)],
    )
    sys.exit(any(map(is_bad, found.values())))


if __name__ == "__main__":
    main()
