"""Metrics of a job: those that its ranks report, and those that it prints; and its gradient noise.

Ranks mostly report the same metrics, so each name comes from the lowest rank that reports it. Its
times are on the run's clock. A metric without a step of its own has the number of steps that had
ended.

The squared gradients of ranks are averaged; the mean's is that of the lowest rank. No mean is
longer than its parts, so a communication hook that sums and does not divide shows itself: its
"mean" is then divided by the number of ranks.

What a job prints passes through unchanged, and a pattern reads it. A pattern is a regular
expression whose groups are numbers. A named group is a metric, and a group `step` is the step. A
group without a name takes the word before it: 'loss: ([0-9.]+)' is `loss`.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from fullwire.errors import UsageError
from fullwire.recorder.inside.journal import Note
from fullwire.recorder.inside.metrics import value_of
from fullwire.recorder.journals import Journal
from fullwire.recorder.steps import Steps
from fullwire.run.run import Metrics, Noise, Whole
from fullwire.units import NUMBER

SUFFIX = ".printed"
TOLD_BY = 15  # steps: a pattern without a match is told before the twentieth
_LOOK_S = 0.05
_LONGEST_LINE = 8 * 1024  # of its end: on longer ones a pattern such as '.*loss' takes seconds
_MOST_ROWS = 1_000_000
_MOST_STEPS = 2**62
_WORD = re.compile(r"([A-Za-z_][\w./-]*)[^\w(]*(?:\\s[*+]?|\\W[*+]?|[^\w(])*\((?!\?)")
_NUMBER = re.compile(NUMBER)


class Reported:
    """Takes ranks one by one, in order."""

    def __init__(self) -> None:
        self.pass_samples: int | None = None
        self._names: set[str] = set()
        self._metrics: list[Metrics] = []
        self._own: dict[int, list[float]] = defaultdict(list)
        self._mean: dict[int, tuple[int, float]] = {}  # passes and squared norm, by step
        self._first: tuple[Steps, int] | None = None
        self._ranks = 0

    def add(
        self, journal: Journal, steps: Steps, noise: tuple[Whole, Whole], shift_ns: int
    ) -> None:
        """Take what one rank reported."""
        self._ranks += 1
        self._first = self._first or (steps, shift_ns)
        if self.pass_samples is None:
            told = next(journal.defined("samples"), None)
            self.pass_samples = None if told is None else int(told["samples"])
        names = {each["number"]: str(each["name"]) for each in journal.defined("metric")}
        fresh = {number: name for number, name in names.items() if name not in self._names}
        if fresh:
            self._names |= set(fresh.values())
            self._metrics.append(_metrics(journal, fresh, steps, shift_ns))
        own, mean = noise
        for at, (_, _, bits) in zip(_ended(steps, own), own.tolist(), strict=True):
            self._own[at].append(value_of(bits))
        for at, (passes, _, bits) in zip(_ended(steps, mean), mean.tolist(), strict=True):
            self._mean.setdefault(at, (passes, value_of(bits)))

    def metrics(self, directories: Sequence[Path]) -> Metrics:
        """Return the metrics of all ranks, and those that the job printed."""
        tables = list(self._metrics)
        if self._first is not None:
            steps, shift_ns = self._first
            printed = read_printed(
                directories,
                shift_ns,
                lambda times_ns: np.searchsorted(steps.end_ns, times_ns, side="right"),
            )
            tables.append(printed.rows(~np.isin(printed.name, list(self._names))))
        return Metrics.joined(tables)

    def noise(self) -> Noise:
        """Return the gradient noise of the steps that all ranks noted."""
        steps = [at for at in sorted(self._mean) if len(self._own[at]) == self._ranks]
        own = np.array([float(np.mean(self._own[at])) for at in steps])
        mean = np.array([self._mean[at][1] for at in steps])
        if len(steps) and np.median(mean) > np.median(own):  # a sum, and no mean
            mean = mean / self._ranks**2
        samples = self.pass_samples or 0
        return Noise(
            step=np.array(steps, np.int64),
            ranks_squared_norm=own,
            mean_squared_norm=mean,
            samples=np.array([self._mean[at][0] * samples for at in steps], np.int64),
            ranks=np.full(len(steps), self._ranks),
        )


def _ended(steps: Steps, notes: Whole) -> list[int]:
    """Return the step at whose end each note was taken."""
    found = np.searchsorted(steps.end_ns, notes[:, 1])
    return [int(each) for each in found]


def _metrics(journal: Journal, names: dict[int, str], steps: Steps, shift_ns: int) -> Metrics:
    rows: list[tuple[int, str, float, int]] = []
    told: int | None = None
    for block in journal.blocks():
        chosen = block.rows[np.isin(block.rows[:, 0], (Note.METRIC, Note.METRIC_STEP))]
        for kind, number, time_ns, rest in chosen.tolist():
            if kind == Note.METRIC_STEP:
                told = number
                continue
            if number in names:
                counted = int(np.searchsorted(steps.end_ns, time_ns, side="right"))
                step = counted if told is None else told
                rows.append((step, names[number], value_of(rest), time_ns + shift_ns))
            told = None
    numbers, texts, values, times_ns = zip(*rows, strict=True) if rows else ((), (), (), ())
    return Metrics(
        step=np.array(numbers, np.int64),
        name=np.array(texts, object),
        value=np.array(values, float),
        time_ns=np.array(times_ns, np.int64),
    )


class Pattern:
    """A pattern for lines of output, with the name of each of its groups."""

    def __init__(self, text: str) -> None:
        try:
            self._pattern = re.compile(text)
        except re.error as error:
            raise UsageError(
                f"metric: expected a regular expression, got {text!r}: {error}"
            ) from None
        if not self._pattern.groups:
            raise UsageError(
                f"metric: expected a group around the number, like 'loss: ([0-9.]+)', got {text!r}"
            )
        named = {number: name for name, number in self._pattern.groupindex.items()}
        words = iter(_WORD.findall(text))
        self._names = [
            named.get(number) or next(words, "metric")
            for number in range(1, self._pattern.groups + 1)
        ]
        self.text = text

    def read(self, line: str) -> dict[str, float]:
        """Return the numbers of a line by name; none if it is another line."""
        found = self._pattern.search(line)
        if found is None:
            return {}
        pairs = zip(self._names, found.groups(), strict=True)
        numbers = {
            name: float(value)
            for name, value in pairs
            if value is not None and (_NUMBER.fullmatch(value) or value.lower() in ("nan", "inf"))
        }
        if not abs(numbers.get("step", 0)) < _MOST_STEPS:  # NaN is no step either
            del numbers["step"]
        return numbers


class Printed:
    """Keeps the metrics in a job's output, which it passes on unchanged.

    The job goes on if its metrics cannot be kept, and its pipe is closed if nobody reads its output
    any more: it ends or goes on as without a recorder.
    """

    def __init__(self, patterns: Sequence[Pattern], directory: Path) -> None:
        place = directory / f"{os.getpid()}{SUFFIX}"
        self._kept: IO[bytes] | None = place.open("wb", buffering=0)
        self._matched, self._lines = dict.fromkeys(patterns, 0), 0
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []

    def begin(self, process: subprocess.Popen[bytes]) -> None:
        """Read both outputs of a process that has started."""
        for source, target in ((process.stdout, 1), (process.stderr, 2)):  # as the job has them
            assert source is not None
            self._threads.append(threading.Thread(target=self._pass_on, args=(source, target)))
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        """Wait for the end of the outputs."""
        for thread in self._threads:
            thread.join()

    def tell_unmatched(self, ended: threading.Event, steps: Callable[[], int]) -> None:
        """Name the patterns without a match after the job's first steps, or at its end."""
        while not ended.wait(_LOOK_S):
            try:
                if steps() >= TOLD_BY:
                    break
            except (OSError, ValueError):  # a file that is being written
                continue
        for pattern, count in self._matched.items():
            if not count:
                sys.stderr.write(
                    f"fullwire: --metric {pattern.text!r} has matched none of {self._lines} lines "
                    "in the first steps: expected a pattern for a line that the job prints\n"
                )

    def close(self) -> None:
        """Close the file of the metrics."""
        if self._kept is not None:
            self._kept.close()
            self._kept = None

    def _pass_on(self, source: IO[bytes], target: int) -> None:
        line = b""
        with source:
            while piece := os.read(source.fileno(), 1 << 16):
                rest = memoryview(piece)
                try:
                    while rest:
                        rest = rest[os.write(target, rest) :]
                except OSError:  # nobody reads it: the closed pipe tells the job
                    return
                *whole, line = (line + piece).replace(b"\r", b"\n").split(b"\n")
                for each in whole:
                    self._take(each)
                line = line[-_LONGEST_LINE:]
        if line:
            self._take(line)

    def _take(self, line: bytes) -> None:
        text = line[-_LONGEST_LINE:].decode(errors="replace")
        with self._lock:
            self._lines += 1
            for pattern in self._matched:
                if values := pattern.read(text):
                    self._matched[pattern] += 1
                    if self._kept is not None and sum(self._matched.values()) <= _MOST_ROWS:
                        row = {"monotonic_ns": time.monotonic_ns(), **values}
                        try:
                            self._kept.write(json.dumps(row).encode() + b"\n")
                        except OSError as error:
                            why = error.strerror
                            sys.stderr.write(f"fullwire: metrics are kept no further: {why}\n")
                            self.close()


def run_and_read(
    command: Sequence[str],
    environment: Mapping[str, str],
    patterns: Sequence[Pattern],
    directory: Path,
    play: Callable[..., int],
    steps: Callable[[], int],
) -> int:
    """Run a command with `play`, pass its output on, and keep the metrics in it.

    `steps` counts the job's steps so far.
    """
    printed, ended = Printed(patterns, directory), threading.Event()
    watcher = threading.Thread(target=printed.tell_unmatched, args=(ended, steps), daemon=True)
    watcher.start()
    try:
        return play(command, environment, printed.begin)
    finally:
        printed.end()
        ended.set()
        watcher.join()
        printed.close()


def read_printed(
    directories: Sequence[Path], shift_ns: int, count_steps: Callable[[Any], Any]
) -> Metrics:
    """Return the metrics that jobs printed, with times on the run's clock."""
    rows: list[tuple[int, str, float, int]] = []
    for directory in directories:
        for path in sorted(directory.glob(f"*{SUFFIX}")):
            *whole, _ = path.read_text().split("\n")  # a full disk may cut the last line
            for line in whole:
                values: dict[str, Any] = json.loads(line)
                time_ns = int(values.pop("monotonic_ns"))
                told = values.pop("step", None)
                step = int(count_steps(np.array([time_ns]))[0]) if told is None else int(told)
                rows += [(step, name, float(value), time_ns) for name, value in values.items()]
    steps, names, numbers, times_ns = zip(*rows, strict=True) if rows else ((), (), (), ())
    return Metrics(
        step=np.array(steps, np.int64),
        name=np.array(names, object),
        value=np.array(numbers, float),
        time_ns=np.array(times_ns, np.int64) + shift_ns,
    )
