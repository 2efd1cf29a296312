"""Sentences: the template of a finding or a fix, with its fields filled in.

A field stands in braces. After a colon stands its format:

    {step_s:time}  {link:rate}  {size:bytes}     with the unit that people use
    {held:memory}                                bytes of a device, in binary units
    {high:ratio}  {high:times}                   1.062; 1.06x; just above 1x
    {ranks:ranks}  {ranks:Ranks}                 ranks 1 and 6; at the start of a sentence
    {share:.1%}  {count:,}                       as Python formats a number
    {names:list}  {names:and}  {reasons:;}       a, b, c; a and b; a; b; c (also :or)
    {count:step|steps}                           the first for one, or for a true condition
    {size:? of {size:bytes}}                     only if there is some
    {names:or none}                              a text or a list, or these words if it is empty

A field that holds a finding or a fix is filled in itself. None becomes empty text.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from fullwire.units import (
    show_bytes,
    show_duration,
    show_mean_count,
    show_memory,
    show_number,
    show_ranks,
    show_rate,
    show_ratio,
    show_short,
    show_time,
    show_times,
)


class Told(Protocol):
    """A finding with its sentence, or a fix with its change."""

    @property
    def template(self) -> str:
        """Return the sentence, with the names of fields in braces."""


class Settable(Protocol):
    """A fix, with its setting."""

    @property
    def how(self) -> str:
        """Return the setting that makes the fix, with the names of fields in braces."""


class Pasteable(Protocol):
    """A fix, with lines of code that make it."""

    @property
    def lines(self) -> Mapping[str, str]:
        """Return its lines of code by framework; they are templates too."""


def sentence(told: Told) -> str:
    """Fill in the sentence of a finding."""
    return filled(told.template, told)


def sentences(many: Sequence[Told]) -> tuple[str, ...]:
    """Fill in the sentences of findings, one each."""
    return tuple(sentence(told) for told in many)


def setting(fix: Settable) -> str:
    """Fill in the setting that makes a fix."""
    return filled(fix.how, fix)


def lines_to_paste(fix: Pasteable, framework: str | None) -> str:
    """Fill in the lines of a fix for a framework, else for plain PyTorch; "" if it has none."""
    lines = fix.lines.get(framework or "", fix.lines.get("torch", ""))
    return filled(lines, fix)


def filled(template: str, told: object) -> str:
    """Fill the fields of a value into a template."""
    return _WORDS.vformat(template, (told,), {})


class _Words(string.Formatter):
    def get_value(self, key: int | str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return getattr(args[0], str(key))

    def format_field(self, value: Any, format_spec: str) -> str:
        if format_spec.startswith("?"):
            return format_spec[1:] if value else ""
        if format_spec.startswith("or ") and value in (None, "", ()):
            return format_spec[3:]
        if format_spec.startswith("or "):
            return self.format_field(value, "list" if isinstance(value, tuple) else "")
        if value is None:
            return ""
        if "|" in format_spec:
            one, several = format_spec.split("|")
            return one if _is_one(value) else several
        if format_spec in _UNITS:
            return _UNITS[format_spec](value)
        if format_spec in _LISTS:
            return _LISTS[format_spec].join(_text(part) for part in value)
        return format(value, format_spec) if format_spec else _text(value)


def _is_one(value: Any) -> bool:
    """Say whether a number prints as 1, a list has one member, or a condition is true."""
    if isinstance(value, bool):
        return value
    return (len(value) if isinstance(value, Sequence) else round(value, 2)) == 1


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return "".join(_text(part) for part in value)
    return sentence(value) if hasattr(value, "template") else str(value)


_UNITS: Mapping[str, Callable[[Any], str]] = {
    "time": show_time,
    "duration": show_duration,
    "number": show_number,
    "mean count": show_mean_count,
    "ratio": show_ratio,
    "times": show_times,
    "rate": show_rate,
    "bytes": show_bytes,
    "memory": show_memory,
    "short": show_short,
    "ranks": show_ranks,
    "Ranks": lambda ranks: show_ranks(ranks).capitalize(),
}
_LISTS = {"list": ", ", "and": " and ", "or": " or ", ";": "; "}
_WORDS = _Words()
