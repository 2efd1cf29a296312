"""Read the log of a training script: the length of each step, and its loss.

    iter 4: loss 2.8193, time 21749.35ms, mfu -100.00%                            nanoGPT
     iteration  200/ 1000 | ... | elapsed time per iteration (ms): 430.0 | ...    Megatron-LM
    Epoch: [0][  10/1307] Time  0.779 ( 5.211) Data  0.000 ( 0.060) ...           PyTorch's ImageNet

Other scripts' lines are read by a pattern that the user gives: a regular expression whose groups
have names. One of s, ms, us and per_s (steps in a second) is the length of a step. step is its
number, and input_s is its wait for data. Any other group is a metric, such as loss.

A line stands for all steps since the line before. The time of all these steps passes, and the last
of them has the mark and the metrics of the line. A job that was started again tells some steps
twice: its metrics keep the steps that the lines tell. A log does not show the work within a step.
"""

from __future__ import annotations

import re
from itertools import chain
from pathlib import Path

import numpy as np

from fullwire.errors import DamagedInput, UsageError
from fullwire.files import lines_of, name_of
from fullwire.importers._format import (
    NEAR_BYTES,
    POSSIBLE,
    Format,
    Likeness,
    compiled,
    near_miss,
)
from fullwire.importers.nccl_log import Log
from fullwire.run.facts import Facts
from fullwire.run.gaps import gaps_of
from fullwire.run.run import Metrics, Provenance, Run, Spans, Whole
from fullwire.units import NO_NUMBER, printed, shown

_LONGEST_LINE = 64 * 1024
_MOST_LINES = 50_000_000
_MOST_STEPS = 10_000_000
_LONGEST_S = 86_400 * 30
_NUMBER = r"[-+]?(?:\d{1,18}\.?\d{0,18}|\.\d{1,18})(?:[eE][-+]?\d{1,3})?"
_VALUE = rf"(?:{_NUMBER}|{NO_NUMBER})"  # a diverged training prints on
_KNOWN = (
    re.compile(
        rf"\biteration +(?P<step>\d+)/ *\d+ \|.{{0,400}}?"
        rf"\belapsed time per iteration \(ms\): (?P<ms>{_NUMBER})"
        rf"(?:.{{0,400}}?\blm loss: (?P<loss>{_VALUE}))?"
    ),
    re.compile(rf"\biter (?P<step>\d+): loss (?P<loss>{_VALUE}), time (?P<ms>{_NUMBER})ms\b"),
    re.compile(
        rf"\bEpoch: \[(?P<_epoch>\d{{1,9}})\]\[ *(?P<_batch>\d{{1,9}})/(?P<_batches>\d{{1,9}})\]"
        rf"\s+Time +(?P<s>{_NUMBER}) \([^)]{{1,20}}\)"
        rf"\s+Data +(?P<input_s>{_NUMBER}) \([^)]{{1,20}}\)(?:\s+Loss +(?P<loss>{_VALUE}))?"
    ),
)
_OF_EPOCH = ("epoch", "batch", "batches")  # instead of a step's number
_LENGTHS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "per_s": 1.0}  # in seconds; per_s is a rate
_BEGINS = re.compile(
    rb"elapsed time per iteration \(ms\): \d|iter \d{1,9}: loss [-\w.]{1,18}, time [\d.]{1,18}ms"
    rb"|Epoch: \[\d{1,6}\]\[ {0,8}\d{1,9}/\d{1,9}\]\s{1,4}Time {1,4}\d"
)


_TRAINS = re.compile(
    rb"(?:[Ss]tep|[Ii]ter|[Ii]teration|[Ee]poch)[ :=\[]{1,3}\d[^\n]{0,200}\b[Ll]oss\b"
    rb"|\d(?:it/s|s/it)\b"
)


def looks_like(beginning: bytes) -> Likeness:
    """Say whether a file with this beginning holds lines of a known script."""
    if _BEGINS.search(beginning):
        return POSSIBLE
    is_near = _TRAINS.search(beginning, 0, NEAR_BYTES)
    return near_miss(is_near, "the length of a step as a known script prints it")


def read_training_log(path: Path, pattern: str | None) -> Run:
    """Read the steps of a log as rank 0 of an unknown number, with the facts of NCCL in it."""
    known = _KNOWN if pattern is None else (_asked_for(pattern),)
    steps: list[tuple[int, float, float]] = []  # number or -1, seconds, seconds of input wait
    metrics: list[tuple[int, str, float]] = []  # place among the steps, name, value
    odd, log = 0, Log()
    lines = lines_of(path, most=_MOST_LINES, longest=_LONGEST_LINE)
    # A progress bar writes its line anew: a terminal showed each part in turn.
    shown = (line.decode(errors="replace").rstrip("\r\n").split("\r") for line in lines)
    for text in chain.from_iterable(shown):
        log.take(text)
        told = next((found for pattern in known if (found := pattern.search(text))), None)
        if told is None:
            continue
        values = {name: printed(value or "") for name, value in told.groupdict().items()}
        unit = next(name for name in _LENGTHS if name in values)
        told_length = values[unit] or 0.0
        length_s = 0.0  # also where it is no number
        if told_length > 0:
            length_s = 1 / told_length if unit == "per_s" else told_length * _LENGTHS[unit]
        if not 1e-9 <= length_s <= _LONGEST_S or len(steps) >= _MOST_STEPS:
            odd += 1
            continue
        epoch, batch, batches = (values.pop(f"_{name}", 0.0) or 0.0 for name in _OF_EPOCH)
        number = values.get("step", epoch * batches + batch if batches else None)
        is_whole = number is not None and number.is_integer() and 0 <= number < 2**53
        waited_s = values.get("input_s") or 0.0
        input_s = min(waited_s, length_s) if waited_s > 0 else 0.0
        metrics += [
            (len(steps), name, value)
            for name, value in values.items()
            if name not in ("step", "input_s", *_LENGTHS) and value is not None
        ]
        steps.append((int(number or 0) if is_whole else -1, length_s, input_s))
    if not steps:
        lacks = (
            "that the pattern finds"
            if pattern
            else "of a known script; --pattern REGEX finds others"
        )
        raise DamagedInput(path, f"no line tells the length of a step: expected lines {lacks}")
    told_numbers, numbers, stands_for = counted(np.array([number for number, _, _ in steps]))
    told_ns = np.array([length_s for _, length_s, _ in steps]) * 1e9
    reached_ns = np.cumsum(told_ns * stands_for)
    end_ns = np.rint(reached_ns).astype(np.int64)
    start_ns = np.rint(reached_ns - told_ns).astype(np.int64)
    input_ns = np.rint(np.array([input_s for _, _, input_s in steps]) * 1e9).astype(np.int64)
    waits = np.flatnonzero(input_ns)
    count = len(steps) + len(waits)
    place = np.array([place for place, _, _ in metrics], np.int64)
    run = Run(
        provenance=Provenance(origin="imported", source=name_of(path)),
        facts=Facts(
            remarks="a log tells how long steps took, and nothing else. It does not tell the "
            "number of ranks",
        ),
        gaps=gaps_of(
            [f"{name_of(path)}: {odd:,} lines tell no time that can be, and are left out"]
            if odd
            else []
        ),
        spans=Spans(
            rank=np.zeros(count, np.int64),
            step=np.concatenate([numbers, numbers[waits]]),
            lane=np.array(["host"] * len(steps) + ["input"] * len(waits), object),
            name=np.array(["step"] * len(steps) + ["data"] * len(waits), object),
            start_ns=np.concatenate([start_ns, start_ns[waits]]),
            end_ns=np.concatenate([end_ns, start_ns[waits] + input_ns[waits]]),
        ),
        metrics=Metrics(
            step=told_numbers[place],
            name=np.array([name for _, name, _ in metrics], object),
            value=np.array([value for _, _, value in metrics], np.float64),
            time_ns=end_ns[place],
        ),
    )
    return log.added_to(run)


def counted(told: Whole) -> tuple[Whole, Whole, Whole]:
    """Return the steps that the lines tell, rising ones, and for how many steps each line stands.

    The steps of a job that was started again fall back, and so do those that begin anew in each
    epoch. The metrics keep what the lines tell: their values show which of the two it is. The
    steps of the job itself are counted on, for it took all of them. If a line tells no step, the
    lines are counted.
    """
    told = np.arange(len(told)) if (told < 0).any() else told
    apart = np.diff(told)
    usual = int(np.median(apart[apart > 0])) if (apart > 0).any() else 1
    # A count that begins, or begins anew, tells no line before it.
    stands_for = np.append(0, apart)
    stands_for = np.where(stands_for > 0, stands_for, np.clip(told + 1, 1, usual))
    rising = np.cumsum(stands_for) - 1 if (apart <= 0).any() else told
    return told, rising, stands_for


def _asked_for(pattern: str) -> re.Pattern[str]:
    """Compile the user's pattern; refuse one without a group for the length of a step."""
    found = compiled("pattern", pattern)
    if len(_LENGTHS.keys() & found.groupindex.keys()) != 1:
        raise UsageError(
            "pattern: expected one group named s, ms, us or per_s, as in "
            r"'step time: (?P<ms>[\d.]+)', got " + shown(pattern)
        )
    return found


FORMAT = Format(
    key="training-log",
    label="logs of training scripts",
    looks_like=looks_like,
    read=lambda files, options: read_training_log(files[0], options.pattern),
    tells=12,  # more than the lines of NCCL in such a log
    options=("pattern",),
)
