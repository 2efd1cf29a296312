"""The fields of a document that describes a transformer, each asked for by its name.

Readers ask for the fields that decide shapes and counts. `check_rest` refuses the others by name,
unless they are switched off or known to be harmless.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Any

from fullwire.errors import UsageError
from fullwire.units import nearest_name, shown
from fullwire.workloads.layout import nearest_divisor

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_MOST = 10**9  # of any size in a model: its products are still whole numbers of 64 bits


def check_fields(
    of: type[DataclassInstance], held: Mapping[str, Any], place: str, *, is_whole: bool = True
) -> None:
    """Refuse names that a record does not have, and a table that lacks one that it needs."""
    needed = {each.name: each.default is MISSING for each in fields(of)}
    for name in held:
        if name not in needed:
            raise UsageError(
                f"{place}: expected fields among {', '.join(needed)}, got {shown(name)}"
                f"{nearest_name(name, needed)}"
            )
    lacking = [name for name, is_needed in needed.items() if is_needed and name not in held]
    if is_whole and lacking:
        raise UsageError(f"{place}: expected {', '.join(lacking)}, which it lacks")


class Fields:
    """The fields of a document; those that were asked for are known."""

    def __init__(self, held: Mapping[str, Any], place: str) -> None:
        self.held = held
        self.place = place
        self.known = set[str]()

    def whole(self, *names: str, default: int | None = None, least: int = 0) -> int:
        """Return a whole number by the first of its names that is there."""
        self.known.update(names)
        for name in names:
            value = self.held.get(name)
            if value is None:
                continue
            is_whole = isinstance(value, int) and not isinstance(value, bool)
            if not is_whole or not least <= value <= _MOST:
                range_ = " above 0" if least else ""
                range_ = f" up to {_MOST:,}" if is_whole and value > _MOST else range_
                raise UsageError(
                    f"{self.place}: {name}: expected a whole number{range_}, got {shown(value)}"
                )
            return int(value)
        if default is None:
            raise UsageError(f"{self.place}: expected {' or '.join(names)}, which is missing")
        return default

    def flag(self, name: str, default: bool) -> bool:
        """Return a truth value; null is as good as none."""
        self.known.add(name)
        value = self.held.get(name)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise UsageError(f"{self.place}: {name}: expected true or false, got {value!r}")
        return value

    def heads_and_hidden(self, *names_of_hidden: str) -> tuple[int, int]:
        """Return the heads and the width; heads that do not state their own width divide it."""
        heads = self.whole("num_attention_heads", "n_head", least=1)
        hidden = self.whole(*(names_of_hidden or ("hidden_size",)))
        if not self.held.get("head_dim") and hidden % heads:
            raise UsageError(
                f"{self.place}: num_attention_heads: expected a divisor of hidden_size {hidden}, "
                f"got {heads}. The nearest is {nearest_divisor(hidden, heads)}"
            )
        return heads, hidden

    def heads_of_keys(self, heads: int, *names: str, default: int) -> int:
        """Return the heads of keys and values, of which each serves as many of the others."""
        shared = self.whole(*names, default=default, least=1)
        if heads % shared:
            name = next(name for name in names if name in self.held)
            raise UsageError(
                f"{self.place}: {name}: expected a divisor of {heads} heads, got {shared}. "
                f"The nearest is {nearest_divisor(heads, shared)}"
            )
        return shared

    def check_rest(self, harmless: re.Pattern[str]) -> None:
        """Refuse fields that are switched on, that no reader asked for and that may do harm."""
        rest = sorted(
            name
            for name, value in self.held.items()
            if name not in self.known and value and not harmless.match(name)
        )
        if rest:
            raise UsageError(
                f"{self.place}: expected fields that are known, got {', '.join(rest)}: they may "
                "change shapes or counts"
            )
