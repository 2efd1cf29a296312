"""Metrics in a job's output: the output passes through unchanged, and patterns read its lines.

A pattern is a regular expression whose groups are numbers. A named group is a metric, and a group
`step` is the step. A group without a name takes the word before it: 'loss: ([0-9.]+)' is `loss`.
A number may end a sentence or have commas between thousands. If an exponent follows the group, it
belongs to the number: [0-9.]+ takes 5.5 of 5.5e-18.

A pattern may take years on a line, and Python stands still meanwhile. So lines are matched in a
process of its own, which gives up a pattern after `LONGEST_MATCH_S` on one line. Only the end of a
long line is read. Lines that come faster than they are matched are counted, and not read.

The output is followed until the job's processes have ended. A process that stays in the background
keeps its output: `cat` passes the rest on after this process has ended.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import queue
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from fullwire.errors import UsageError
from fullwire.recorder.inside.metrics import MOST_STEPS
from fullwire.units import printed

SUFFIX = ".printed"
TOLD_BY = 15  # steps: a pattern without a match is told before the twentieth
LONGEST_MATCH_S = 0.5  # of processor time
_LOOK_S = 0.05
_LONGEST_LINE = 8 * 1024  # of its end
_SHOWN = 60  # characters of a match, in a message
_MOST_WAITING = 8192  # lines, thus at most 64 MiB
_MOST_ROWS = 1_000_000
_PART = re.compile(  # of a pattern
    r"\\(?P<escaped>.)|(?P<set>\[\^?\]?(?:\\.|[^\]\\])*\])|(?P<kept>\((?:\?P<\w+>|(?!\?)))"
    r"|(?P<begin>\((?:\?P=\w+|\?[^\w\s]*))|(?P<end>\))|(?P<other>.)",
    re.DOTALL,
)
_WORD = re.compile(r"[A-Za-z_][\w-]*(?:[./][\w-]+)*")
_EXPONENT = re.compile(r"[eE][+-]?[0-9]{1,3}(?!\w)")
_MORE_THOUSANDS = re.compile(r"(?:,[0-9]{3}){1,10}(?:\.[0-9]{0,40})?(?![\w,])")
_TELL = b"tell\n"
_MATCHER = (
    "import sys; _, path, kept, *patterns = sys.argv; sys.path[:] = path.split('\\n'); "
    "from fullwire.recorder.printed import match; match(kept, patterns, sys.stdin.buffer)"
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
        groups = self._pattern.groups
        words = [*_words_before_groups(text), *["metric"] * groups][:groups]  # (?x) may hide some
        self._names = [named.get(number) or word for number, word in enumerate(words, 1)]
        self.text = text

    def search(self, line: str) -> re.Match[str] | None:
        """Return where the pattern matches a line."""
        return self._pattern.search(line)

    def numbers(self, found: re.Match[str]) -> dict[str, float]:
        """Return the numbers in the groups of a match, by name."""
        numbers = {
            name: value
            for group, name in enumerate(self._names, 1)
            if name and (value := _number(found, group)) is not None
        }
        if not abs(numbers.get("step", 0)) < MOST_STEPS:  # NaN is no step either
            del numbers["step"]
        return numbers

    def read(self, line: str) -> dict[str, float]:
        """Return the numbers of a line by name; none if it is another line."""
        found = self.search(line)
        return {} if found is None else self.numbers(found)


def _number(found: re.Match[str], group: int) -> float | None:
    """Return the number in a group of a match, with what belongs to it behind the group."""
    text = (found[group] or "").strip()
    if text and found[group][-1] == text[-1]:
        behind = found.string[found.end(group) :]
        exponent = None if "e" in text.lower() else _EXPONENT.match(behind)
        if exponent is not None:
            text += exponent[0]
        elif found.end(group) == found.end() and text.lstrip("+-").isdigit():
            thousands = _MORE_THOUSANDS.match(behind)
            text += "" if thousands is None else thousands[0]
    return printed(text)


def _words_before_groups(pattern: str) -> list[str]:
    """Return the word before each group of a pattern; a group within another has none.

    Escapes, sets and operators are no words. A word within a group that keeps nothing, as in
    `loss: (?:tensor)?(...)`, counts if there is no other.
    """
    words: list[str] = []
    outside = everywhere = ""  # since the last group that is kept
    are_kept: list[bool] = []  # of the groups that are open here
    for part in _PART.finditer(pattern):
        kind, text = part.lastgroup, part[0]
        if kind == "kept":
            near = _WORD.findall(outside) or _WORD.findall(everywhere) or ["metric"]
            words.append("" if any(are_kept) else near[-1])
            outside = everywhere = ""
        elif kind == "escaped":
            text = " " if text[1].isalnum() else text[1]
        elif kind == "set":
            is_one_letter = len(text) == 4 and text[1].lower() == text[2].lower()
            text = text[2] if is_one_letter else " "
        if kind in ("kept", "begin"):
            are_kept.append(kind == "kept")
        elif kind == "end":
            are_kept[-1:] = []
        elif not any(are_kept):
            everywhere += text
            outside += " " if are_kept else text
    return words


class Output:
    """The output of a job, passed on and read."""

    def __init__(
        self, patterns: Sequence[Pattern], directory: Path, steps: Callable[[], int]
    ) -> None:
        """Begin to match. `steps` counts the job's steps so far."""
        path = directory / f"{socket.gethostname()}-{os.getpid()}{SUFFIX}"
        texts = [pattern.text for pattern in patterns]
        # A session of its own: Ctrl-C is for the job.
        self._matcher = subprocess.Popen(
            [sys.executable, "-I", "-c", _MATCHER, "\n".join(sys.path), str(path), *texts],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        self._steps = steps
        self._lines: queue.Queue[bytes | None] = queue.Queue(_MOST_WAITING)
        self._unread = 0
        self._has_ended = threading.Event()
        self._pumps: list[threading.Thread] = []
        self._feeder = threading.Thread(target=self._feed, daemon=True)
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._feeder.start()
        self._watcher.start()

    def began(self, process: subprocess.Popen[bytes]) -> None:
        """Pass on the output of a process that has both its streams in pipes."""
        assert process.stdout is not None
        assert process.stderr is not None
        self.pass_on(process.stdout, process.stderr)

    def pass_on(self, output: IO[bytes], errors: IO[bytes]) -> None:
        """Pass on what comes through two pipes, and close them."""
        for source, target in ((output, 1), (errors, 2)):  # as the job has them
            pump = threading.Thread(target=self._pass_on, args=(source, target))
            self._pumps.append(pump)
            pump.start()

    def close(self) -> None:
        """Read what is there, and end; a process that still holds the output keeps it."""
        self._has_ended.set()
        for thread in (*self._pumps, self._watcher):
            thread.join()
        self._lines.put(None)
        self._feeder.join()
        self._matcher.wait()
        if self._unread:
            sys.stderr.write(
                f"fullwire: {self._unread} lines of output came faster than --metric could read "
                "them: their metrics are missing\n"
            )

    def _pass_on(self, source: IO[bytes], target: int) -> None:
        line = b""
        with source:
            for piece in self._pieces(source.fileno()):
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
            held = select.poll()
            held.register(source)
            if held.poll(0) != [(source.fileno(), select.POLLHUP)]:
                with contextlib.suppress(OSError):  # without `cat` the pipe closes
                    subprocess.Popen(
                        ["cat"],
                        stdin=source,
                        stdout=target,
                        stderr=subprocess.DEVNULL,
                        start_new_session=True,
                    )
        if line:
            self._take(line)

    def _pieces(self, pipe: int) -> Iterator[bytes]:
        """Yield what comes through a pipe, until it is closed or the job has ended."""
        ready = select.poll()
        ready.register(pipe, select.POLLIN)
        while not self._has_ended.is_set():
            if ready.poll(_LOOK_S * 1000):
                piece = os.read(pipe, 1 << 16)
                if not piece:
                    return
                yield piece
        [left] = struct.unpack("i", fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)))
        while left > 0:
            piece = os.read(pipe, min(left, 1 << 16))
            left -= len(piece)
            yield piece

    def _take(self, line: bytes) -> None:
        try:
            self._lines.put_nowait(b"%d %s\n" % (time.monotonic_ns(), line[-_LONGEST_LINE:]))
        except queue.Full:
            self._unread += 1

    def _feed(self) -> None:
        assert self._matcher.stdin is not None
        try:
            with self._matcher.stdin as pipe:
                while (line := self._lines.get()) is not None:
                    pipe.write(line)
                    if self._lines.empty():
                        pipe.flush()
                pipe.write(_TELL)
        except BrokenPipeError:
            sys.stderr.write(
                "fullwire: the reader of --metric ended: metrics are kept no further\n"
            )
            while self._lines.get() is not None:
                pass

    def _watch(self) -> None:
        while not self._has_ended.wait(_LOOK_S):
            with contextlib.suppress(OSError, ValueError, queue.Full):  # half-written; or later
                if self._steps() >= TOLD_BY:
                    self._lines.put_nowait(_TELL)
                    return


class _TooLong(Exception):
    """A match took longer than its limit."""


def match(path: str, texts: Sequence[str], lines: Iterable[bytes]) -> None:
    """Match lines, each after its time, and append their numbers to a file."""
    patterns = [Pattern(text) for text in texts]
    matched = dict.fromkeys(texts, 0)
    without_number: dict[str, str] = {}  # a match of each pattern whose groups held none
    count, is_matching, has_told = 0, False, False

    def too_long(number: int, frame: Any) -> None:
        if is_matching:
            raise _TooLong

    signal.signal(signal.SIGVTALRM, too_long)
    with open(path, "wb", buffering=0) as kept:
        for line in lines:
            if line == _TELL:
                if not has_told:
                    _tell_unmatched(matched, without_number, count)
                has_told = count > 0  # a job that has printed nothing yet is told of again
                continue
            time_ns, _, rest = line.partition(b" ")
            text = rest[:-1].decode(errors="replace")
            count += 1
            for pattern in tuple(patterns):
                try:
                    is_matching = True
                    signal.setitimer(signal.ITIMER_VIRTUAL, LONGEST_MATCH_S)
                    found = pattern.search(text)
                    values = {} if found is None else pattern.numbers(found)
                    if found is not None and not values:
                        without_number.setdefault(pattern.text, found[0])
                except _TooLong:
                    values = {}
                    patterns.remove(pattern)
                    matched.pop(pattern.text, None)
                    sys.stderr.write(
                        f"fullwire: --metric {pattern.text!r} took more than {LONGEST_MATCH_S} s "
                        f"on a line of {len(text)} characters: it is read no further\n"
                    )
                finally:
                    is_matching = False
                    signal.setitimer(signal.ITIMER_VIRTUAL, 0)
                if not values:
                    continue
                matched[pattern.text] += 1
                if sum(matched.values()) > _MOST_ROWS:
                    sys.stderr.write(
                        f"fullwire: --metric has read {_MOST_ROWS:,} lines, and reads no further\n"
                    )
                    return
                try:
                    kept.write(
                        json.dumps({"monotonic_ns": int(time_ns), **values}).encode() + b"\n"
                    )
                except OSError as error:
                    sys.stderr.write(f"fullwire: metrics are kept no further: {error.strerror}\n")
                    return


def _tell_unmatched(
    matched: Mapping[str, int], without_number: Mapping[str, str], lines: int
) -> None:
    for text, count in matched.items():
        if not lines:
            sys.stderr.write(
                f"fullwire: --metric {text!r} has matched nothing: the job has printed no line\n"
            )
        elif not count and text in without_number:
            sys.stderr.write(
                f"fullwire: --metric {text!r} has matched lines without a number in its group, as "
                f"in {without_number[text][:_SHOWN]!r}: expected a group around the number alone\n"
            )
        elif not count:
            sys.stderr.write(
                f"fullwire: --metric {text!r} has matched none of {lines} lines so far: "
                "expected a pattern for a line that the job prints\n"
            )
