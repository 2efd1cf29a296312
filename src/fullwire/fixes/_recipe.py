"""A recipe: the fixes of a job with their settings, as a TOML file that a person reads."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import msgspec

from fullwire.errors import DamagedInput, UsageError
from fullwire.files import opened
from fullwire.fixes.fix import FixKind, Risk, fix_kind, fix_kinds
from fullwire.units import nearest_name, shown

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # the same, before Python had it

FORMAT = 1
MOST_BYTES = 1024 * 1024


@dataclass(frozen=True, kw_only=True)
class Applied:
    """A fix with its setting, and what is known of its gain."""

    fix: str  # the name of the fix, as `fullwire fixes` lists it
    setting: str  # its setting, as `fullwire apply` takes it
    risk: Risk = "exact"  # exact, numeric or semantic
    why: str = ""  # the change in words
    predicted_s: float | None = None  # the step that was predicted with it
    low_s: float | None = None  # the lower end of the prediction's 90 % interval
    high_s: float | None = None  # the upper end
    measured_s: float | None = None  # the step that was measured with it

    def __str__(self) -> str:
        """Return the fix as `fullwire apply` takes it."""
        return f"{self.fix}:{self.setting}"


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Fixes that belong together, and the job that they were found for."""

    format: int = FORMAT  # the number of the format: 1
    command: str = ""  # the command of the tuned job, with secrets masked; a job's own is compared
    command_sha256: str = ""  # of its words, with a zero byte after each
    machine: str = ""  # where it was tuned
    workers: int | None = None  # the number of ranks; the job's own is compared
    versions: dict[str, str] = field(default_factory=dict)  # of Python, Fullwire, torch
    before_s: float | None = None  # the step without the fixes
    after_s: float | None = None  # the step with them
    fixes: tuple[Applied, ...] = ()  # the fixes, each with the keys below


def appliable(key: str) -> FixKind:
    """Return the kind of fix with this key, or refuse one that cannot be applied."""
    try:
        kind = fix_kind(key)
    except KeyError:
        can = [name for name, each in fix_kinds().items() if each.example]
        raise UsageError(
            f"fix: expected one of {', '.join(can)}, got {shown(key)}{nearest_name(key, can)}"
        ) from None
    if not kind.example:
        raise UsageError(f"fix {key}: it cannot be applied: {kind.needs}")
    return kind


def parse_fix(given: str) -> Applied:
    """Take a fix as it is written on a command line: `buckets:50`."""
    key, _, setting = given.partition(":")
    kind = appliable(key)
    if not setting:
        raise UsageError(
            f"fix {key}: expected a setting, {kind.setting}, as in {key}:{kind.example}"
        )
    setting = kind.checked(setting)
    return Applied(fix=key, setting=setting, risk=kind.risk_of(setting))


def _not_a_recipe(table: dict[str, Any]) -> str:
    """Say what a file in TOML without the format of a recipe is instead."""
    if "format" in table:
        return f"format: expected {FORMAT}, got {shown(str(table['format']))}"
    if {"nodes", "nics"} <= table.keys():
        return (
            "expected a recipe of fixes, got the description of a cluster, which "
            "fullwire lab run takes with --cluster"
        )
    return f"format: expected {FORMAT}, as in each recipe, got none"


def read_recipe(path: Path, say: Callable[[str], None] | None = None) -> Recipe:
    """Read a recipe, and check its keys, each fix and its setting.

    With `say`, a key or a fix that this version does not know, or cannot read, is no error: the
    function hears why, and the recipe is without it.
    """
    with opened(path) as file:
        content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise DamagedInput(path, f"expected a recipe of at most {MOST_BYTES:,} bytes")
    try:
        table = tomllib.loads(content.decode())
        if table.get("format") != FORMAT:
            raise UsageError(f"{path}: {_not_a_recipe(table)}")
        entries = msgspec.convert(table.pop("fixes", []), list[Any])
        recipe = msgspec.convert(table, Recipe)
    except (ValueError, RecursionError, msgspec.ValidationError) as error:
        raise DamagedInput(path, f"expected a recipe in TOML: {error}") from None
    _check_keys(path, "", table, Recipe, say)
    fixes = []
    for number, entry in enumerate(entries, 1):
        try:
            fixes.append(_checked(entry))
        except (UsageError, msgspec.ValidationError) as error:
            is_unreadable = isinstance(error, msgspec.ValidationError)
            why = f"[[fixes]] {number}: {error}" if is_unreadable else str(error)
            # A variable may be a stranger's way to run code: then all of the recipe is suspect.
            is_variable = isinstance(entry, dict) and entry.get("fix") == "environment"
            if say is None or is_variable:
                raise UsageError(f"{path}: {why}") from None
            say(f"{path}: {why}. This fix is left out, the others are applied")
        else:
            _check_keys(path, f"[[fixes]] {number}: ", entry, Applied, say)
    recipe = replace(recipe, fixes=tuple(fixes))
    if recipe.workers is not None and recipe.workers < 1:
        raise UsageError(f"{path}: workers: expected 1 or more, got {recipe.workers}")
    for of in (recipe, *recipe.fixes):
        for name, value in vars(of).items():
            if name.endswith("_s") and value is not None and not 0 <= value < math.inf:
                raise UsageError(f"{path}: {name}: expected a time of 0 s or more, got {value:g}")
    return recipe


def _check_keys(
    path: Path,
    place: str,
    table: Mapping[str, Any],
    of: type[Recipe | Applied],
    say: Callable[[str], None] | None,
) -> None:
    """Say, or refuse, the keys that a table of a recipe does not have."""
    known = [each.name for each in fields(of)]
    for key in table:
        if key in known:
            continue
        near = get_close_matches(key, known, n=1)
        expected = f"the nearest key is {near[0]}" if near else f"the keys are {', '.join(known)}"
        why = f"{path}: {place}{shown(key)} is no key of a recipe; {expected}"
        if say is None:
            raise UsageError(why)
        say(f"{why}. Its value is not used")


def _checked(entry: Any) -> Applied:
    """Return a fix of a recipe, or refuse one that is unknown or has no such setting."""
    fix = msgspec.convert(entry, Applied)
    setting = appliable(fix.fix).checked_in_recipe(fix.setting)
    if setting != fix.setting:
        raise UsageError(f"fix {fix.fix}: expected {setting}, got {fix.setting}")
    return fix


def as_toml(recipe: Recipe) -> str:
    """Print a recipe; it reads back equal."""
    lines = ["# Apply it with: fullwire run --recipe THIS_FILE -- COMMAND", ""]
    lines += _pairs(
        format=recipe.format,
        command=recipe.command,
        command_sha256=recipe.command_sha256,
        machine=recipe.machine,
        workers=recipe.workers,
        before_s=recipe.before_s,
        after_s=recipe.after_s,
    )
    if recipe.versions:
        lines += ["", "[versions]", *_pairs(**recipe.versions)]
    for fix in recipe.fixes:
        lines += ["", "[[fixes]]", *_pairs(**vars(fix))]
    return "\n".join(lines) + "\n"


def _pairs(**values: str | float | None) -> Sequence[str]:
    """Print the keys that have a value; JSON's strings and numbers are those of TOML."""
    return [
        f"{key} = {json.dumps(value, ensure_ascii=False)}".replace("\x7f", "\\u007f")
        for key, value in values.items()
        if value is not None and value != ""
    ]
