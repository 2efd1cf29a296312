"""What a fix is: one change, its risk, how it is made, and what the step would be with it."""

from __future__ import annotations

import importlib
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from math import nan
from pathlib import Path
from typing import ClassVar, Literal, TypeAlias, TypeVar

from fullwire.run.run import Run
from fullwire.simulation.calibrate import share_of_others
from fullwire.simulation.forecast import Forecast, Forecaster
from fullwire.simulation.processors import used_share
from fullwire.timeline.account import Account

MUCH = 0.05  # of the step: what an account alone calls worth removing
MANY, MUCH_BYTES = 20, 2**20  # collectives of a step, and of up to which size: worth joining
FILLS_THE_LINE = "fullwire"  # the backend that a full wire is predicted for
MUCH_BESIDE = 0.15  # of the processors, in other work: samples and clocks agree to a tenth
_ALL_TAKEN = 0.9  # of all processors' time

# exact: the same results up to the order of sums; numeric: gradients are rounded; semantic: another
# batch, or fewer synchronizations. Only exact fixes are applied without being asked for.
Risk: TypeAlias = Literal["exact", "numeric", "semantic"]
PLAIN = "torch"  # the framework of a script with a loop of its own


@dataclass(frozen=True, kw_only=True)
class Fix:
    """One change to a job, predicted. Each kind is a dataclass with a template for the change."""

    template: ClassVar[str]  # the change in words, with the names of fields in braces
    place: ClassVar[str] = "script"  # where it is made
    # Its lines with their imports, by the framework that a run names; templates as well.
    lines: ClassVar[Mapping[str, str]] = {}

    kind: str
    risk: Risk = "exact"
    how: str  # how it is made: a template too
    forecast: Forecast

    @property
    def step_s(self) -> float:
        """Return the step with it."""
        return self.forecast.step_s

    @property
    def scaling_factor(self) -> float:
        """Return the scaling factor with it."""
        return self.forecast.scaling_factor

    @property
    def low_s(self) -> float:
        """Return the lower end of the step's interval; not a number where nothing tells it."""
        return self.forecast.low_s

    @property
    def high_s(self) -> float:
        """Return the upper end of the step's interval; not a number where nothing tells it."""
        return self.forecast.high_s


class FixKind(ABC):
    """A kind of fix: what it is, and how its gain is predicted. Each kind is a class.

    How it is applied to a job is to stand here, beside the prediction, in the same file.
    """

    key: ClassVar[str]
    risk: ClassVar[Risk] = "exact"
    label: ClassVar[str]
    addresses: ClassVar[tuple[str, ...]]  # the kinds of verdict for which it is an answer
    begins_sooner: ClassVar[bool] = False  # it has transfers begin beside computation

    @abstractmethod
    def predict(self, run: Run, job: Forecaster, account: Account) -> Iterator[Fix]:
        """Go through what can be changed of this kind, each with the step that it would give."""

    def by_account(self, run: Run, account: Account) -> Iterator[Fix]:
        """Go through what an account alone tells, where nothing can be predicted."""
        return iter(())

    def in_few_steps(self, run: Run, account: Account) -> str:
        """Return its setting where few steps are long, if that is its matter."""
        return ""


KindT = TypeVar("KindT", bound=FixKind)
_KINDS: dict[str, FixKind] = {}


def register(kind: type[KindT]) -> type[KindT]:
    """Add a kind of fix."""
    if kind.key in _KINDS:
        raise ValueError(f"fix {kind.key}: registered twice")
    _KINDS[kind.key] = kind()
    return kind


@cache
def fix_kinds() -> Mapping[str, FixKind]:
    """Return all kinds of fix by key: those that the files of this folder register."""
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        importlib.import_module(f"{__package__}.{module.name}")
    return dict(_KINDS)


def without_loss(account: Account, lost_s: float, *, of_one: bool) -> Forecast | None:
    """Return the step without a loss, as an account alone tells it; None where it is too little.

    What one worker would lose as well makes its step shorter too. There is no interval.
    """
    step_s = account.step_s
    if not MUCH * step_s <= lost_s < step_s:
        return None
    return Forecast(
        step_s=step_s - lost_s,
        scaling_factor=(account.alone_s - lost_s * of_one) / (step_s - lost_s),
        low_s=nan,
        high_s=nan,
    )


def who_takes_processors(run: Run) -> Literal["job", "others"] | None:
    """Say whose work leaves no processor free; None where some are, or nothing was sampled."""
    used = used_share(run)
    if used is None or used < _ALL_TAKEN:
        return None
    return "others" if share_of_others(run) >= MUCH_BESIDE else "job"
