"""Note the metrics and events that a job reports: to `fullwire.log`, or to a library that it uses.

    transformers         the callbacks of Trainer.log
    Lightning            its connector to loggers, where the trainer has one
    TensorBoard          SummaryWriter.add_scalar of torch
    wandb, MLflow        Run.log, log_metric and log_metrics

A value is noted after the library has taken it, so reading it adds no wait for a device.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import math
import os
import socket
import struct
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from .journal import Journal, Note

_BITS, _REAL = struct.Struct("<q"), struct.Struct("<d")
MOST_NAMES = 256
MOST_STEPS = 2**62
EVENTS_SUFFIX = ".events"
_LIGHTNING = "trainer.connectors.logger_connector.logger_connector"


class Metrics:
    """Numbers the names of metrics, and notes their values."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._numbers: dict[tuple[str, str], int] = {}
        self._count = itertools.count()
        self._is_damaged = False

    def take(self, values: Mapping[str, Any], step: Any = None, folder: str = "") -> None:
        """Note values that are numbers; `step` is the job's own count, if it has one.

        A library may keep several curves of one name, each in a folder of its own.
        """
        try:
            for name, value in values.items():
                number = _number(value)
                if number is not None:
                    self._note(str(name), folder, number, step)
        except Exception as error:  # the job goes on, and so does its recording
            self.failed(error)

    def failed(self, error: Exception) -> None:
        """Say in the run that a metric could not be noted; once, because it may be so each step."""
        if not self._is_damaged:
            self._is_damaged = True
            reason = f"{type(error).__name__}: {error}"[:200]
            sentence = f"a metric that it reported could not be noted ({reason})"
            self._journal.define(kind="missing", sentence=sentence)

    def _note(self, name: str, folder: str, value: float, step: Any) -> None:
        number = self._numbers.get((name, folder))
        if number is None:
            if len(self._numbers) >= MOST_NAMES:
                return
            # In one call each, because threads may report at once.
            number = self._numbers.setdefault((name, folder), next(self._count))
            self._journal.define(kind="metric", number=number, name=name, folder=folder)
        now_ns = time.monotonic_ns()
        noted = (Note.METRIC, number, now_ns, bits_of(value))
        try:
            told = None if step is None else int(step)
        except Exception as error:  # it counts optimizer steps instead
            told = None
            self.failed(error)
        if told is not None and abs(told) >= MOST_STEPS:
            told = None
            self.failed(OverflowError("its step is 2^62 or more"))
        if told is None:
            self._journal.note(*noted)
        else:
            self._journal.note_all([(Note.METRIC_STEP, told, now_ns, 0), noted])


def bits_of(value: float) -> int:
    """Return a whole number with the bits of a real one."""
    return int(_BITS.unpack(_REAL.pack(value))[0])


def value_of(bits: int) -> float:
    """Return the real number with these bits."""
    return float(_REAL.unpack(_BITS.pack(bits))[0])


def _number(value: Any) -> float | None:
    if isinstance(value, str | bytes) or value is None:
        return None
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):  # a histogram, a table, a tensor of several
        return None
    except OverflowError:  # a whole number that no real one reaches
        return math.inf if value > 0 else -math.inf


def watch_metrics(
    journal: Journal, after_import: Callable[[str, Callable[[], None]], None]
) -> None:
    """Begin to note the metrics that the job gives to `fullwire.log` and to libraries."""
    metrics = Metrics(journal)
    inside = sys.modules.get("fullwire_inside")
    if inside is not None:
        inside.take_metrics = metrics.take  # type: ignore[attr-defined]  # `fullwire.log` asks

        def take_event(kind: str, ranks: list[int], time_ns: int, duration_ns: int) -> None:
            """Keep an event of an elastic job, at once: this process may be the next to be lost."""
            with contextlib.suppress(OSError):
                name = f"{socket.gethostname()}-{os.getpid()}{EVENTS_SUFFIX}"
                with open(os.path.join(journal.directory, name), "a") as file:
                    file.write(json.dumps([time_ns, kind, ranks, duration_ns]) + "\n")

        def take_fact(name: str, value: int) -> None:
            journal.define(kind="fact", name=name, value=value)

        def take_samples(samples: int) -> None:
            journal.note(Note.SAMPLES, samples, time.monotonic_ns(), 0)

        inside.take_event = take_event  # type: ignore[attr-defined]
        inside.take_fact = take_fact  # type: ignore[attr-defined]
        inside.take_samples = take_samples  # type: ignore[attr-defined]

    def wrap(module: str, owner: str, name: str, told: Callable[..., None]) -> None:
        """Call `told` with the arguments of a method or function of a library, after it."""

        def change() -> None:
            loaded = sys.modules[module]
            place = getattr(loaded, owner, None) if owner else loaded
            original = getattr(place, name, None)
            if original is None:  # another version of the library
                return

            @functools.wraps(original)
            def reporting(*args: Any, **kwargs: Any) -> Any:
                result = original(*args, **kwargs)
                try:
                    told(*args, **kwargs)
                except Exception as error:  # another version of the library
                    metrics.failed(error)
                return result

            setattr(place, name, reporting)

        after_import(module, change)

    def trainer(_: Any, args: Any, state: Any, control: Any, logs: Any, **more: Any) -> None:
        metrics.take(logs, state.global_step)

    def lightning(connector: Any, values: Any, step: Any = None) -> None:
        if connector.trainer.loggers:  # which read the values anyway
            count = getattr(connector.trainer, "global_step", None) if step is None else step
            metrics.take(values, count)

    def scalar(
        writer: Any, tag: str, value: Any, global_step: Any = None, *rest: Any, **__: Any
    ) -> None:
        metrics.take({tag: value}, global_step, os.path.abspath(writer.log_dir))

    def logged(_: Any, data: Any, step: Any = None, *rest: Any, **more: Any) -> None:
        metrics.take(data, step)

    def one(key: str, value: Any, step: Any = None, *rest: Any, **more: Any) -> None:
        metrics.take({key: value}, step)

    def several(values: Any, step: Any = None, *rest: Any, **more: Any) -> None:
        metrics.take(values, step)

    wrap("transformers.trainer_callback", "CallbackHandler", "on_log", trainer)
    for library in ("lightning.pytorch", "pytorch_lightning"):
        wrap(f"{library}.{_LIGHTNING}", "_LoggerConnector", "log_metrics", lightning)
    wrap("torch.utils.tensorboard.writer", "SummaryWriter", "add_scalar", scalar)
    wrap("wandb.sdk.wandb_run", "Run", "log", logged)
    wrap("mlflow.tracking.fluent", "", "log_metric", one)
    wrap("mlflow.tracking.fluent", "", "log_metrics", several)
