"""A finding: one result of an analysis, as numbers, names and a template.

A kind of finding is one class. Its fields are the data. Its `template` is the sentence, in which
fields stand by name (`words/` fills them in). The class's docstring says its meaning.
"""

from __future__ import annotations

import re
from dataclasses import MISSING, FrozenInstanceError, asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform
else:  # Only checkers read it, and Python 3.10 has none.

    def dataclass_transform(**_):
        """Leave the class as it is."""
        return lambda cls: cls


_CAPITAL = re.compile(r"(?<!^)(?=[A-Z])")
_KINDS: dict[str, type[Finding]] = {}


@dataclass_transform(frozen_default=True, kw_only_default=True)
class Finding:
    """One result of an analysis. Each kind of it is a frozen dataclass with a template.

    A subclass needs no decorator. For several hundred kinds, `dataclass` would write and compile
    the same methods at every start. This class holds them once for all kinds.
    """

    key: ClassVar[str]  # The class's name in small letters, unless the class gives another.
    template: ClassVar[str]
    is_assumption: ClassVar[bool] = False  # It changes the meaning of an answer; always shown.
    option: ClassVar[str] = ""  # Of missing data: the option that gives it to the same command.

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        dataclass(init=False, repr=False, eq=False, kw_only=True)(cls)
        if "template" not in cls.__dict__:
            return  # A base of several kinds, without a sentence of its own.
        if "key" not in cls.__dict__:
            cls.key = _CAPITAL.sub("_", cls.__name__).lower()
        if cls.key in _KINDS:
            raise ValueError(f"{cls.key}: {_KINDS[cls.key]} and {cls} have the same key")
        _KINDS[cls.key] = cls

    def __init__(self, **given: Any) -> None:
        """Take the fields by name; those with a default may be left out."""
        own = self.__dict__
        for field in fields(self):  # type: ignore[arg-type]  # every kind is one
            own[field.name] = given.pop(field.name, field.default)
            if own[field.name] is MISSING:
                raise TypeError(f"{type(self).__name__}: {field.name} is missing")
        if given:
            raise TypeError(f"{type(self).__name__} has no {', '.join(given)}")

    def __setattr__(self, name: str, value: object) -> None:
        """Refuse, because a finding never changes."""
        raise FrozenInstanceError(f"cannot assign to {name}")

    def __delattr__(self, name: str) -> None:
        """Refuse, as above."""
        raise FrozenInstanceError(f"cannot delete {name}")

    def __eq__(self, other: object) -> bool:
        """Say whether two findings are of one kind and have the same fields."""
        return self.__dict__ == other.__dict__ if type(other) is type(self) else NotImplemented

    def __hash__(self) -> int:
        """Return a number that is the same for equal findings."""
        return hash(tuple(self.__dict__.values()))

    def __repr__(self) -> str:
        """Return the kind with its fields."""
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in self.__dict__.items())})"

    def as_data(self) -> dict[str, Any]:
        """Return the key and the fields, as JSON takes them."""
        return {"key": self.key, **asdict(self)}  # type: ignore[call-overload]  # every kind is one


class Evidence(Finding):
    """One figure that speaks for or against a verdict."""

    value: float


def kinds() -> dict[str, type[Finding]]:
    """Return every kind of finding that has been loaded, by its key."""
    return dict(_KINDS)


class Length(Finding):
    """The length of an account: of every step, or of the trace where no step is marked."""

    template = (
        "{is_whole_trace:the|{is_of_all:a mean|every}} {step_s:time} "
        "{is_whole_trace:of the trace|step}"
    )

    step_s: float
    is_whole_trace: bool
    is_of_all: bool = False  # The mean of all steps, where few of them hold the largest loss.

    @property
    def named(self) -> str:
        """Return what a share is of."""
        return (
            "the trace"
            if self.is_whole_trace
            else "the time of all steps"
            if self.is_of_all
            else "each step"
        )


class Amount(Finding):
    """A time of every step, printed as a share of the step's length."""

    template = "{time_s:time} of {whole}"

    time_s: float
    whole: Length

    @property
    def share(self) -> float:
        """Return the time as a share of the step."""
        return self.time_s / self.whole.step_s if self.whole.step_s else 0.0
