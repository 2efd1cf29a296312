"""What a finding is: one thing that an analysis found out, as numbers, names and a template.

A kind of finding is one class. Its fields are the data; its `template` is the sentence, in which
fields stand by name (`words/` fills them in). The class's docstring says what it means.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

_CAPITAL = re.compile(r"(?<!^)(?=[A-Z])")
_KINDS: dict[str, type[Finding]] = {}


class Finding:
    """One thing that was found out. Each kind of it is a frozen dataclass with a template."""

    key: ClassVar[str]  # the class's name, in small letters, unless it says another
    template: ClassVar[str]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "template" not in cls.__dict__:
            return  # what several kinds have in common
        if "key" not in cls.__dict__:
            cls.key = _CAPITAL.sub("_", cls.__name__).lower()
        if cls.key in _KINDS:
            raise ValueError(f"{cls.key}: {_KINDS[cls.key]} and {cls} have the same key")
        _KINDS[cls.key] = cls

    def as_data(self) -> dict[str, Any]:
        """Return the key and the fields, as JSON takes them."""
        return {"key": self.key, **asdict(self)}  # type: ignore[call-overload]  # every kind is one


@dataclass(frozen=True, kw_only=True)
class Evidence(Finding):
    """One figure that speaks for or against a verdict."""

    value: float


def kinds() -> dict[str, type[Finding]]:
    """Return every kind of finding that has been loaded, by its key."""
    return dict(_KINDS)


@dataclass(frozen=True, kw_only=True)
class Length(Finding):
    """The step that an account is of, or all of the trace where no step is marked."""

    template = "{is_whole_trace:the|every} {step_s:time} {is_whole_trace:of the trace|step}"

    step_s: float
    is_whole_trace: bool


@dataclass(frozen=True, kw_only=True)
class Amount(Finding):
    """A time of every step."""

    template = "{time_s:time} of {whole}"

    time_s: float
    whole: Length

    @property
    def share(self) -> float:
        """Return what share of the step it is."""
        return self.time_s / self.whole.step_s if self.whole.step_s else 0.0
