"""Elastic jobs whose workers are lost in every phase of a step, at once, or for a while.

    python -m validation.chaos --rounds 200

A round is one job of two to five workers with its own seed. The seed draws the phase, the step and
the victims. Each worker notes its committed steps: parameters, rank, samples. After the job all
notes are held against each other. A job that has not ended after `--longest` counts as hung.

This process loads torch once. Launchers and workers are forks of it, so that a round takes seconds.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import math
import os
import random
import shutil
import signal
import socket
import struct
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

import fullwire
from fullwire.resilience import checkpoints, elastic, place, workers  # noqa: F401  # forks have them
from validation import arguments, results

BATCH, SAMPLES = 48, 480
IN_STEP = ("forward", "backward", "collective", "before the optimizer", "between steps")
BESIDE = ("joining", "re-forming", "checkpoint", "before the first step")
OUTSIDE = ("any moment", "two at once", "three at once", "pause", "pause and kill")
PHASES = (*IN_STEP, *BESIDE, *OUTSIDE)
_SEGMENTS_OUT = struct.Struct("136xI")  # of the kernel's tcp_info


class Round(NamedTuple):
    """What a seed drew."""

    seed: int
    phase: str
    size: int
    respawns: bool
    width: int
    epochs: int
    step: int
    victims: tuple[int, ...]
    pause_s: float

    @property
    def steps(self) -> int:
        """The steps of the job."""
        return self.epochs * math.ceil(SAMPLES / BATCH)


def drawn(seed: int) -> Round:
    """Draw a round; phases take turns."""
    chosen = random.Random(seed)
    phase = PHASES[seed % len(PHASES)]
    lost = {"two at once": 2, "three at once": 3, "re-forming": 2, "pause and kill": 2}.get(
        phase, 1
    )
    count = chosen.randint(max(2, lost + 1), 5)
    return Round(
        seed,
        phase,
        count,
        phase in ("joining", "before the first step") or chosen.random() < 0.5,
        chosen.choice([64, 512, 1100]),  # the last one's state is sent in the background
        chosen.choice([4, 8, 16]),
        chosen.randint(3, 30),
        tuple(chosen.sample(range(count), lost)),
        chosen.choice([0.3, 1.0, 3.0]),
    )


# A worker.


def kill_itself() -> None:
    """End as a lost host does."""
    os.kill(os.getpid(), signal.SIGKILL)


def segments_sent() -> int:
    """Return the TCP segments that this process has sent."""
    sent = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError, struct.error):
            with socket.socket(fileno=os.dup(int(name))) as each:
                info = each.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 140)
            sent += _SEGMENTS_OUT.unpack(info[:140])[0]
    return sent


def kill_after_segments(count: int) -> None:
    """Kill this process once it has sent so many more segments."""
    until = segments_sent() + count

    def watch() -> None:
        while segments_sent() < until:
            pass
        kill_itself()

    threading.Thread(target=watch, daemon=True).start()


def train(round_: Round, folder: Path) -> None:
    """Train as one worker of a round, and note each committed step."""
    number = int(os.environ[place.WORKER_VARIABLE])
    is_victim, chosen = number in round_.victims, random.Random(round_.seed + number)
    torch.manual_seed(number)
    width = round_.width
    model = torch.nn.Sequential(
        torch.nn.Linear(16, width), torch.nn.ReLU(), torch.nn.Dropout(0.1),
        torch.nn.Linear(width, width), torch.nn.ReLU(), torch.nn.Linear(width, 1),
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    inputs = torch.randn(SAMPLES, 16, generator=torch.Generator().manual_seed(5))
    dataset = torch.utils.data.TensorDataset(inputs, inputs.square().sum(1, keepdim=True))
    if round_.phase == "joining" and number == round_.size:
        threading.Timer(chosen.uniform(0, 0.5), kill_itself).start()
    if round_.phase == "before the first step" and is_victim:
        threading.Timer(chosen.uniform(0, 0.3), kill_itself).start()
    if round_.phase == "checkpoint" and is_victim:
        before = checkpoints.write_part

        def write(directory: Path, name: str, content: Any) -> checkpoints.File:
            if f"{directory}" > f"{directory.parent}/.writing-{round_.step:09d}":
                kill_itself()
            return before(directory, name, content)

        checkpoints.write_part = write
    job = fullwire.elastic(model, optimizer)

    def now(phase: str) -> bool:
        return is_victim and round_.phase == phase and job.step_number >= round_.step

    def changed(_: int, size: int) -> None:
        if now("re-forming") and size < round_.size:
            kill_itself()

    def middle(_: Any) -> None:
        if now("backward"):
            kill_itself()

    job.on_change(changed)
    model[3].weight.register_hook(middle)
    lines = (folder / f"steps of {os.getpid()}").open("w", buffering=1)
    for given, wanted in job.batches(dataset, batch_size=BATCH, epochs=round_.epochs):
        before_step = job.step_number
        with job.step():
            if now("forward") or (number == round_.victims[0] and now("re-forming")):
                kill_itself()
            loss = torch.nn.functional.mse_loss(job.model(given), wanted)
            optimizer.zero_grad()
            if now("collective"):
                kill_after_segments(chosen.randint(1, 60))
            loss.backward()
            if now("before the optimizer"):
                kill_itself()
            optimizer.step()
        if job.step_number == before_step:
            continue
        whole = b"".join(each.detach().numpy().tobytes() for each in model.parameters())
        digest = hashlib.sha256(whole).hexdigest()[:16]
        print(
            time.monotonic(), job.step_number, job.rank, job.world_size, digest, *job.samples,
            file=lines,
        )  # fmt: skip
        if now("between steps"):
            kill_itself()


class Fork:
    """A worker that is a fork of this process, in place of a subprocess."""

    def __init__(self, work: Callable[[], None], env: dict[str, str]) -> None:
        pipes = os.pipe(), os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.setsid()
            for descriptor, (_, end) in enumerate(pipes, 1):
                os.dup2(end, descriptor)
            os.closerange(3, 256)
            os.environ.clear()
            os.environ.update(env)
            sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
            for each in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
                signal.signal(each, signal.SIG_DFL)
            os._exit(status_of(work))
        for _, end in pipes:
            os.close(end)
        self.stdout, self.stderr = (os.fdopen(end, "rb", 0) for end, _ in pipes)
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit status, once there is one."""
        if self.returncode is None:
            process, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if process else None
        return self.returncode

    def wait(self) -> None:
        """Wait for the end."""
        while self.poll() is None:
            time.sleep(0.005)

    def kill(self) -> None:
        """End it."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


def status_of(work: Callable[[], Any]) -> int:
    """Run the whole life of a process; return its exit status."""
    status = 0
    try:
        work()
        atexit._run_exitfuncs()
    except SystemExit as error:
        atexit._run_exitfuncs()
        status = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stderr.flush()
    return status


# A round.


def launch(round_: Round, folder: Path) -> int:
    """Start the launcher of a round; return its process."""
    process = os.fork()
    if process:
        return process
    os.setsid()
    errors = os.open(folder / "errors", os.O_CREAT | os.O_WRONLY)
    os.dup2(errors, 2)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)

    def fork(_: Sequence[str], *, env: dict[str, str], **__: Any) -> Fork:
        return Fork(lambda: train(round_, folder), env)

    workers.subprocess.Popen = fork  # type: ignore[attr-defined]
    is_kept = round_.phase == "checkpoint"

    def work() -> None:
        status = fullwire.run_workers(
            ["a fork"],
            workers=round_.size,
            respawn=round_.respawns,
            detect_s=1.0,
            checkpoint=folder / "kept" if is_kept else None,
            every_s=0.1 if is_kept else None,
        )
        raise SystemExit(status)

    os._exit(status_of(work))


def children(process: int) -> list[int]:
    """Return the running children of a process, the oldest first."""
    found = []
    with contextlib.suppress(OSError):
        for child in Path(f"/proc/{process}/task/{process}/children").read_text().split():
            with contextlib.suppress(OSError):
                state = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0]
                found += [int(child)] if state != "Z" else []
    return sorted(found)


def disturb(round_: Round, launcher: int, folder: Path) -> None:
    """Kill or stop workers from outside, at a moment taken by chance."""
    if round_.phase not in OUTSIDE:
        return
    chosen, until = random.Random(round_.seed), time.monotonic() + 30
    while not list(folder.glob("steps of *")) and time.monotonic() < until:
        time.sleep(0.002)
    time.sleep(chosen.uniform(0, 1.0))
    found = children(launcher)
    victims = [found[each] for each in round_.victims if each < len(found)]
    for index, victim in enumerate(victims):
        is_paused = round_.phase == "pause" or (round_.phase == "pause and kill" and index == 0)
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, signal.SIGSTOP if is_paused else signal.SIGKILL)
    if round_.phase.startswith("pause") and victims:
        time.sleep(round_.pause_s)
        with contextlib.suppress(ProcessLookupError):
            os.kill(victims[0], signal.SIGCONT)


def check(round_: Round, folder: Path, status: int | None) -> tuple[list[str], float]:
    """Return what is wrong with a round, and the longest time between two steps of a worker."""
    if status is None:
        return ["hung"], math.inf
    wrong = [f"exit status {status}"] if status else []
    digests: dict[int, set[str]] = defaultdict(set)
    sizes: dict[int, set[int]] = defaultdict(set)
    parts: dict[int, dict[int, list[int]]] = defaultdict(dict)
    longest_s = 0.0
    for path in folder.glob("steps of *"):
        before_s = math.inf
        for line in path.read_text().splitlines():
            if len(words := line.split()) < 5:
                continue  # torn, as its worker was killed
            now_s, step, rank, size = float(words[0]), *map(int, words[1:4])
            longest_s, before_s = max(longest_s, now_s - before_s), now_s
            if rank in parts[step]:
                wrong.append(f"two workers are rank {rank} in step {step}")
            parts[step][rank] = [*map(int, words[5:])]
            digests[step].add(words[4])
            sizes[step].add(size)
    if (folder / "errors").read_text().count("begins again"):
        return wrong, longest_s  # all who had the parameters were lost; nothing to compare
    wrong += [f"torn step {step}" for step, each in digests.items() if len(each) > 1]
    wrong += [f"two sizes of step {step}" for step, each in sizes.items() if len(each) > 1]
    missing = sorted(set(range(1, round_.steps + 1)).difference(parts))
    wrong += [f"steps {missing[:3]} are missing"] if missing else []
    short = sum(len(ranks) < max(sizes[step]) for step, ranks in parts.items())
    # A worker may be lost between its commit and its note.
    wrong += [f"{short} steps lack a part"] if short > len(round_.victims) + 1 else []
    in_epoch = math.ceil(SAMPLES / BATCH)
    for epoch in range(round_.epochs):
        steps = range(epoch * in_epoch + 1, (epoch + 1) * in_epoch + 1)
        seen = Counter(s for step in steps for part in parts[step].values() for s in part)
        if max(seen.values(), default=0) > 1:
            wrong.append(f"a sample twice in epoch {epoch}")
    return wrong, longest_s


def play(seed: int, longest_s: float) -> tuple[Round, list[str], float]:
    """Play a round."""
    round_ = drawn(seed)
    folder = Path(tempfile.mkdtemp())  # no object that a fork would clean up at its end
    try:
        until = time.monotonic() + longest_s
        launcher, status = launch(round_, folder), None
        disturb(round_, launcher, folder)
        while status is None and time.monotonic() < until:
            process, ended = os.waitpid(launcher, os.WNOHANG)
            status = os.waitstatus_to_exitcode(ended) if process else None
            time.sleep(0.01)
        wrong, gap_s = check(round_, folder, status)
        if wrong:
            print((folder / "errors").read_text()[-3000:], file=sys.stderr)
        if status is None:
            for child in [*children(launcher), launcher]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
            os.waitpid(launcher, 0)
    finally:
        shutil.rmtree(folder)
    return round_, wrong, gap_s


def main() -> None:
    """Play the rounds and write the findings."""
    parser = arguments.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--longest", type=float, default=100.0, help="seconds of a round")
    parser.add_argument("--minutes", type=float, default=60.0, help="begin no round after this")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warm_up = torch.nn.Parameter(torch.zeros(1))
    warm_up.grad = torch.zeros(1)
    torch.optim.AdamW([warm_up]).step()  # loads what forks share
    rows: dict[str, list[tuple[list[str], float]]] = {phase: [] for phase in PHASES}
    began_s = time.monotonic()
    for seed in range(options.first, options.first + options.rounds):
        if time.monotonic() - began_s > options.minutes * 60:
            break
        round_, wrong, gap_s = play(seed, options.longest)
        rows[round_.phase].append((wrong, gap_s))
        print(seed, round_.phase, round_.size, f"{gap_s:.2f}", wrong or "", flush=True)
    played = [each for ones in rows.values() for each in ones]
    bad = sum(bool(wrong) for wrong, _ in played)
    results.write(
        "chaos",
        claim="In whatever phase workers are lost, a step counts for all or none, a sample once.",
        anchor="goals: no hang, no torn step, no sample twice or never, exit status 0",
        summary=f"{len(played) - bad} of {len(played)} jobs keep all of it",
        measure="seconds between two committed steps of a worker, the longest of a round",
        cases=len(played),
        **results.spread([gap_s for wrong, gap_s in played if not wrong]),
        tables=[
            results.Table(
                title="Jobs by the phase in which workers are lost",
                columns=["phase", "jobs", "hung", "otherwise wrong", "longest gap (s)"],
                rows=[
                    [
                        phase,
                        len(ones),
                        sum("hung" in wrong for wrong, _ in ones),
                        sum(bool(wrong) and "hung" not in wrong for wrong, _ in ones),
                        round(max((gap for wrong, gap in ones if not wrong), default=0.0), 2),
                    ]
                    for phase, ones in rows.items()
                ],
            )
        ],
    )
    if bad:
        sys.exit(f"{bad} of {len(played)} jobs went wrong")


if __name__ == "__main__":
    main()
