"""The process groups of a job, as its facts tell them: their descriptions and their ranks."""

from __future__ import annotations

import re
from collections.abc import Callable

from fullwire.run.facts import Facts

_MOST_DIGITS = 18  # of a group's size
_TRANSFER = re.compile(r"\d>\d+$")
_MEMBERS = re.compile(r"\[(\d+(?:, ?\d+)*)\]$")


def descriptions_of(names: str) -> dict[str, str]:
    """Return the description of each group by its name, from `mesh_tp: 1 2, mesh_pp: 3`."""
    told: dict[str, str] = {}
    for part in names.split(", "):
        description, _, of_it = part.rpartition(": ")
        told.update(dict.fromkeys(of_it.split(), description))
    return told


def listed_name(name: str) -> str:
    """Return the name of a group as a fact lists it: without commas, which divide the names."""
    return re.sub(", ?", " ", name)


def told_ranks(facts: Facts) -> Callable[[str], int]:
    """Return a function that tells how many ranks a group of this name has, or 0.

    The members tell it, which follow the name of groups that share one (`0 [0, 1]`), and a transfer
    has two. Else the group's description tells it (`mesh_tp 2`), or its name without one (`7 4`).
    """
    sizes = dict(part.rsplit(" ", 1) for part in (facts.groups or "").split(", ") if " " in part)
    described = descriptions_of(facts.group_names or "")

    def ranks_of(name: str) -> int:
        if members := _MEMBERS.search(name):
            return members[1].count(",") + 1
        if _TRANSFER.search(name):
            return 2
        of_name = described.get(name.partition(" ")[0], ""), listed_name(name)
        told = (sizes.get(of_it, "") for of_it in of_name)
        size = next(filter(None, told), "")
        is_size = size.isdecimal() and len(size) <= _MOST_DIGITS
        return int(size) if is_size else 0

    return ranks_of
