"""A registry: the entries of a folder, one file each, and those that other packages add.

A file of the folder holds an entry under a stated name (`FORMAT = Format(key="netx", ...)`), or a
tuple of related ones. The entry `nccl-log` lives in `nccl_log.py`; a relative may live beside it.
A file whose name begins with an underscore is a piece that entries share. `keys_in` lists the files
and loads none of them; asking for one entry loads its file only.

An installed package adds an entry with an entry point: its group is the registry's, its name is the
key, and its value names the entry (`acme = "acme_traces:FORMAT"`). A class stands for its instance.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Collection, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from fullwire.errors import UsageError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


class Keyed(Protocol):
    """An entry has a key: the name by which people ask for it."""

    @property
    def key(self) -> str:
        """Return the key."""


EntryT = TypeVar("EntryT", bound=Keyed)


class Registry(Mapping[str, EntryT]):
    """Entries of one type by key: those of a folder in the order of its files, then others."""

    def __init__(
        self, of: type[EntryT], folder: str, *, name: str, group: str | None = None
    ) -> None:
        """Say what entries are, which package holds them, and under which name in a file."""
        self._type = of
        self._folder = folder
        self._name = name
        self._group = group
        self._loaded: dict[str, tuple[EntryT, ...]] = {}  # by file

    def __getitem__(self, key: str) -> EntryT:
        """Return an entry, and load its own file only."""
        if (file := key.replace("-", "_")) in self._files:
            for entry in self._of_file(file):
                if entry.key == key:
                    return entry
        if key in self._outside:
            return entry_of(self._outside[key], self._type)
        return self._by_key[key]

    def __iter__(self) -> Iterator[str]:
        """Go through all keys; each file is loaded when it is its turn, other packages last."""
        seen = set[str]()
        for file in self._files:
            for entry in self._of_file(file):
                if entry.key in seen:
                    raise ValueError(f"{self._folder}: two entries have the key {entry.key!r}")
                seen.add(entry.key)
                yield entry.key
        for key, point in self._outside.items():
            refuse_own_key(point, seen)
            yield key

    def __len__(self) -> int:
        """Count the entries."""
        return len(self._by_key)

    def origin(self, key: str) -> str | None:
        """Return the entry point and the package of an entry; None for one of our own."""
        return _origin(self._outside[key]) if key in self._outside else None

    @cached_property
    def _files(self) -> tuple[str, ...]:
        return tuple(key.replace("-", "_") for key in keys_in(self._folder))

    @cached_property
    def _outside(self) -> dict[str, EntryPoint]:
        return {} if self._group is None else entries_outside(self._group)

    @cached_property
    def _by_key(self) -> dict[str, EntryT]:
        own = {entry.key: entry for file in self._files for entry in self._of_file(file)}
        return {
            key: own[key] if key in own else entry_of(self._outside[key], self._type)
            for key in self
        }

    def _of_file(self, file: str) -> tuple[EntryT, ...]:
        if file not in self._loaded:
            held = getattr(importlib.import_module(f"{self._folder}.{file}"), self._name)
            self._loaded[file] = held if isinstance(held, tuple) else (held,)
        return self._loaded[file]


def entries_outside(group: str) -> dict[str, EntryPoint]:
    """Return the entries that other packages add to a group, by key; this loads none of them."""
    from importlib.metadata import entry_points  # here: it takes longer than all else

    return {point.name: point for point in entry_points(group=group)}


def refuse_own_key(point: EntryPoint, own: Collection[str]) -> None:
    """Refuse the entry of another package that has the key of one of ours."""
    if point.name in own:
        raise UsageError(
            f"{_origin(point)}: fullwire has its own {point.name!r}: choose another name"
        )


def entry_of(point: EntryPoint, of: type[EntryT]) -> EntryT:
    """Load what another package adds; its mistakes are told with its name."""
    try:
        entry = point.load()
    except (ImportError, AttributeError) as error:
        raise UsageError(f"{_origin(point)}: cannot be loaded: {error}") from error
    if isinstance(entry, type) and issubclass(entry, of):
        entry = entry()
    if not isinstance(entry, of):
        raise UsageError(f"{_origin(point)}: expected a {of.__name__}, got {type(entry).__name__}")
    if entry.key != point.name:
        raise UsageError(f"{_origin(point)}: its entry has another key, {entry.key!r}")
    return entry


def keys_in(folder: str) -> tuple[str, ...]:
    """Return the key that each file of a folder stands for; this loads nothing, so help may."""
    found = importlib.util.find_spec(folder)
    places = [Path(place) for place in (found and found.submodule_search_locations) or ()]
    files = [file.stem for place in places for file in place.glob("*.py")]
    folders = [file.parent.name for place in places for file in place.glob("*/__init__.py")]
    names = sorted(name for name in (*files, *folders) if not name.startswith("_"))
    return tuple(name.replace("_", "-") for name in names)


def _origin(point: EntryPoint) -> str:
    package = "" if point.dist is None else f" of {point.dist.name}"
    return f"entry point {point.group}: {point.name} = {point.value}{package}"
