"""A fix: one change of a job, its risk, its setting, and the step that it predicts."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from math import nan
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, TypeAlias, TypeVar

from fullwire.errors import UsageError
from fullwire.registry import entries_outside, entry_of, refuse_own_key
from fullwire.units import shown

if TYPE_CHECKING:  # In a job, fixes are applied and not predicted: it starts without predictions.
    from fullwire.run.run import Run
    from fullwire.simulation.forecast import Forecast, Forecaster
    from fullwire.timeline.account import Account

MUCH = 0.05  # Of the step: a smaller loss is no fix by the account alone.
MANY, MUCH_BYTES = 20, 2**20  # Joining pays for so many collectives of a step, up to that size.
FILLS_THE_LINE = "fullwire"  # The backend for which predictions take a full line.
# How many times as fast as float32 on a full line, as measured: 25 MiB, four workers, 1 Gbps.
TIMES_ON_THE_WIRE = {"bf16": 1.94, "fp16": 1.98, "int8": 3.9}
WORTH_A_TRIAL = 0.02  # Of the step: the largest gain that the account allows.
_REPEATS = 0.02  # A job that is started again repeats within this.
# Of the step: what a fix cost that gained nothing, in nine of ten such trials of validation.tune.
_MAY_COST = 0.12
LESS_SAVING = (  # Where a step waits for its checkpoint.
    "write checkpoints in the background (torch.distributed.checkpoint.async_save, or fullwire "
    "apply checkpoint:background), or less often"
)
_ALL_TAKEN = 0.9  # Of all processors' time.

# An exact fix gives the same results, up to the order of sums. A numeric one rounds gradients. A
# semantic one changes the batch, or sums less often. Only exact fixes are applied by default.
Risk: TypeAlias = Literal["exact", "numeric", "semantic"]
PLAIN = "torch"  # The framework of a script with a loop of its own.


@dataclass(frozen=True, kw_only=True)
class Fix:
    """One change to a job, predicted. Each kind is a dataclass with a template for the change."""

    template: ClassVar[str]  # The change in words, with the names of fields in braces.
    place: ClassVar[str] = "script"  # The place of the change.
    applied: ClassVar[str] = ""  # The setting with which its kind is applied, a template too.
    # The lines of the change with their imports, by the framework that a run names. They are
    # templates too.
    lines: ClassVar[Mapping[str, str]] = {}

    kind: str
    risk: Risk = "exact"
    how: str  # The setting that makes the change, a template too.
    forecast: Forecast

    @property
    def step_s(self) -> float:
        """Return the step with the fix."""
        return self.forecast.step_s

    @property
    def scaling_factor(self) -> float:
        """Return the scaling factor with the fix."""
        return self.forecast.scaling_factor

    @property
    def low_s(self) -> float:
        """Return the lower end of the step's interval; NaN where it is unknown."""
        return self.forecast.low_s

    @property
    def high_s(self) -> float:
        """Return the upper end of the step's interval; NaN where it is unknown."""
        return self.forecast.high_s


@dataclass(frozen=True, kw_only=True)
class Worthwhile(Fix):
    """A setting worth a trial: the account bounds its gain, and no replay predicts it."""

    template = "{words}"
    applied = "{setting}"

    how: str = "{setting}"
    words: str
    setting: str


@dataclass(frozen=True, kw_only=True)
class HostWork:
    """Work of the host that a trial saw, by its line in the script."""

    call: str
    place: str  # file:line
    step_s: float  # time in each step


@dataclass(frozen=True, kw_only=True)
class Seen:
    """The calls of a job that fixes change, as a process of it noted them in a trial."""

    backend: str = ""
    ddp: dict[str, Any] | None = None  # its options, from the last model that was wrapped
    fsdp: dict[str, Any] | None = None
    loading_processes: int | None = None  # of the data loader; None without one
    sums_per_step: float = 0.0  # passes with DDP's sums, in a step of the optimizer
    clears_between_passes: bool = False  # of one step: each pass has gradients of its own
    threads: int = 0
    processors: int = 0  # that this process may use
    local_ranks: int = 1
    interfaces: dict[str, float] = field(default_factory=dict)  # in Mbps, 0 where unknown
    interface: str = ""  # that the job names for its transport
    interface_bps: dict[str, float] = field(default_factory=dict)  # of payload, measured
    host: tuple[HostWork, ...] = ()
    wrote: tuple[str, ...] = ()  # files outside of the working directory
    losses: tuple[float, ...] = ()


# It takes the arguments of a call by name, and returns those that shall have another value.
Change: TypeAlias = Callable[[Mapping[str, Any]], Mapping[str, Any]]


class Process(Protocol):
    """A process of a job, as a fix changes it."""

    def around(self, owner: Any, name: str, change: Change, *, may_repeat: bool = True) -> None:
        """Give a function of torch other arguments.

        If `change` raises, or the function with its new arguments, the function has its own ones,
        and a note says why. Without `may_repeat` an error of the function ends there.
        """

    def did(self, sentence: str) -> None:
        """Note, once, that the fix was applied, or why it was not."""


class FixKind:
    """A kind of fix: the prediction of its gain, and how it is applied. Each kind is a class.

    A kind that can be applied has an `example` of its setting. It changes the environment of the
    job, or the calls that the job makes in each of its processes. Others say what they need.
    """

    key: ClassVar[str]
    risk: ClassVar[Risk] = "exact"
    label: ClassVar[str]
    addresses: ClassVar[tuple[str, ...]]  # The kinds of verdict that it answers.
    of_each_rank: ClassVar[bool] = True  # One rank with the fix alone does not have it.
    adds_up: ClassVar[bool] = False  # Two settings are one setting, with a comma between them.
    tries_each: ClassVar[bool] = False  # A setting that fails says nothing about others.
    variables_suffice: ClassVar[bool] = False  # Its `environment` makes it, also without torch.
    begins_sooner: ClassVar[bool] = False  # It makes transfers begin beside computation.
    example: ClassVar[str] = ""  # A setting; "" if the fix cannot be applied.
    setting: ClassVar[str] = ""  # The setting in words.
    needs: ClassVar[str] = ""  # Why it cannot be applied.

    def checked(self, setting: str) -> str:
        """Return a setting as recipes hold it, or refuse it."""
        return setting

    def checked_in_recipe(self, setting: str) -> str:
        """Return a setting of a recipe, which may be a stranger's, or refuse it."""
        return self.checked(setting)

    def risk_of(self, setting: str) -> Risk:
        """Return the risk of a setting, where settings differ in it."""
        return self.risk

    def by_hand(self, setting: str) -> str:
        """Return the lines that make the change in a script; "" if variables make it."""
        return ""

    def environment(self, setting: str) -> Mapping[str, str]:
        """Return the variables that apply the fix."""
        return {}

    def apply(self, setting: str, process: Process) -> None:
        """Change the calls of this process, which has just loaded torch."""
        raise NotImplementedError(f"fix {self.key}: {self.needs}")

    def look(self, backend: str) -> Mapping[str, Any]:
        """Return the fields of `Seen` that this kind finds in a process of the job, at its end."""
        return {}

    def predict(self, run: Run, job: Forecaster, account: Account) -> Iterator[Fix]:
        """Yield the changes of this kind, each with the step that it predicts.

        Some kinds save a time that runs hide. They predict nothing, and `to_try` bounds the gain.
        """
        return iter(())

    def to_try(
        self, run: Run, account: Account, seen: Seen, job: Forecaster | None
    ) -> Iterator[Worthwhile]:
        """Yield the settings that a trial should measure, where no replay predicts them."""
        return iter(())

    def by_account(self, run: Run, account: Account) -> Iterator[Fix]:
        """Yield the changes that an account alone supports, where prediction is impossible."""
        return iter(())

    def in_few_steps(self, run: Run, account: Account) -> str:
        """Return its setting for a loss in few long steps, or "" if it has none."""
        return ""


KindT = TypeVar("KindT", bound=FixKind)
_KINDS: dict[str, FixKind] = {}


def register(kind: type[KindT]) -> type[KindT]:
    """Add a kind of fix."""
    if kind.key in _KINDS:
        raise ValueError(f"fix {kind.key}: registered twice")
    _KINDS[kind.key] = kind()
    return kind


def fix_kind(key: str) -> FixKind:
    """Return the kind of fix with this key, without the others' files."""
    is_file = key.isidentifier() and (Path(__file__).parent / f"{key}.py").exists()
    if key not in _KINDS and is_file and not key.startswith("_"):
        importlib.import_module(f"{__package__}.{key}")
    return _KINDS[key] if key in _KINDS else fix_kinds()[key]


@cache
def fix_kinds() -> Mapping[str, FixKind]:
    """Return all kinds of fix by key: those of this folder's files, and of other packages."""
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        if module.name.startswith("_"):
            continue
        importlib.import_module(f"{__package__}.{module.name}")
    own = dict(_KINDS)
    outside = entries_outside("fullwire.fixes")
    for point in outside.values():
        refuse_own_key(point, own)
    return dict(sorted({**own, **{k: entry_of(p, FixKind) for k, p in outside.items()}}.items()))


def without_loss(account: Account, lost_s: float, *, of_one: bool) -> Forecast | None:
    """Return the step after a loss is removed, by the account alone; None if the loss is small.

    `of_one` says that one worker has the loss too: then T1 becomes shorter as well. There is no
    interval.
    """
    from fullwire.simulation.forecast import Forecast

    step_s = account.step_s
    if not MUCH * step_s <= lost_s < step_s:
        return None
    return Forecast(
        step_s=step_s - lost_s,
        scaling_factor=alone_without_s(account, lost_s * of_one) / (step_s - lost_s),
        low_s=nan,
        high_s=nan,
    )


def moved_s(run: Run, account: Account, lost_s: float) -> float:
    """Return how much of a loss a step is spared if other processes of the job do that work.

    The processors still do it, and then a step takes as long as they need for all. A replay knows
    that by itself.
    """
    from fullwire.run.processors import least_step_s

    return min(lost_s, max(account.step_s - least_step_s(run), 0.0))


def alone_without_s(account: Account, lost_s: float) -> float:
    """Return T1 without a loss of one worker; a baseline's becomes shorter in proportion.

    The baseline may lack the loss, as with files that are in a cache by then.
    """
    own_s = replace(account, baseline_s=0.0).alone_s
    return account.alone_s * max(1 - lost_s / own_s, 0.0) if own_s else account.alone_s


def worthwhile(
    kind: FixKind,
    setting: str,
    words: str,
    account: Account,
    least_s: float,
    most_s: float,
    usual_s: float | None = None,
) -> Iterator[Worthwhile]:
    """Yield a setting that saves between two times of a step, if the trial is worth it.

    One that may save nothing may also cost something, as its own work or its own processes.
    `usual_s` is the time that it usually saves, by default half of both.
    """
    from fullwire.simulation.forecast import Forecast

    step_s = account.step_s
    most_s = min(most_s, 0.95 * step_s)
    if most_s < WORTH_A_TRIAL * step_s:
        return
    saved_s = (least_s + most_s) / 2 if usual_s is None else min(usual_s, most_s)
    yield Worthwhile(
        kind=kind.key,
        risk=kind.risk_of(setting),
        setting=setting,
        words=words,
        forecast=Forecast(
            step_s=step_s - saved_s,
            scaling_factor=min(account.alone_s / (step_s - saved_s), 1.0),
            low_s=(step_s - most_s) * (1 - _REPEATS),
            high_s=(step_s - least_s) * (1 + (_REPEATS if least_s else _MAY_COST)),
        ),
    )


def options_among(known: Sequence[str], setting: str, fix: str) -> str:
    """Return options of a constructor, each once and in the order of those known, or refuse one."""
    asked = setting.split(",")
    if unknown := [name for name in asked if name not in known]:
        raise UsageError(
            f"fix {fix}: expected options among {', '.join(known)}, got {shown(unknown[0])}"
        )
    return ",".join(name for name in known if name in asked)


def as_arguments(setting: str) -> str:
    """Return options as arguments of a call: `static_graph=True, find_unused_parameters=False`."""
    return ", ".join(option if "=" in option else f"{option}=True" for option in setting.split(","))


def sending_s(account: Account) -> float:
    """Return the time in which a step only communicates, explained or not.

    Processors carry out the sums of ranks on one host, so this time is contention there.
    """
    from fullwire.timeline.account import Part

    parts = (Part.LINE_RATE, Part.LATENCY, Part.TRANSPORT, Part.UNEXPLAINED)
    return sum(account.parts_s[part.key] for part in parts) + sums_on_processors_s(account)


def has_buckets(run: Run) -> bool:
    """Say whether the job is known to group its gradients in buckets, which may become larger."""
    return run.facts.buckets is not None


def sums_on_processors_s(account: Account) -> float:
    """Return the contention of sums, without that by which computing takes longer."""
    from fullwire.timeline.account import Part

    return max(account.parts_s[Part.CONTENTION.key] - account.crowded_s, 0.0)


def waiting_s(account: Account) -> float:
    """Return the time of a step in which ranks wait for others that only communicate.

    Ranks of a host share its line. So those wait that have sent while a neighbour's transfer ends.
    A rank that is always slow makes the others wait as long as it takes beyond the median.
    """
    from fullwire.timeline.account import Part

    slow_ns = account.excess_ns[:, account.is_typical].sum(axis=2).mean(axis=1).max()
    return max(account.parts_s[Part.STRAGGLER.key] - float(slow_ns) * 1e-9, 0.0)


def who_takes_processors(
    run: Run, least_used: float = _ALL_TAKEN
) -> Literal["job", "others"] | None:
    """Return who takes the processors: the job or others. None if some are free or unsampled."""
    from fullwire.run.processors import share_of_others, used_share
    from fullwire.simulation.calibrate import MUCH_BESIDE

    used = used_share(run)
    if used is None or used < least_used:
        return None
    return "others" if share_of_others(run) >= MUCH_BESIDE else "job"
