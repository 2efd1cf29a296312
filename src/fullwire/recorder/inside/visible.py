"""Give torch's C++ process groups that send it through the methods of ProcessGroup in Python.

DDP's C++ gets a visible group in place of the true one. Functional collectives ask torch's registry
for a group by name, and find a visible group there. The methods of the true group are watched
(`collectives.py`), so each collective of C++ is seen like one of Python.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist

from .journal import Journal


def watch_reducer(journal: Journal, methods: Iterable[str]) -> None:
    """Give DDP's C++ (its reducer and its broadcasts of buffers) a visible group."""
    build, broadcast = dist.Reducer, dist._broadcast_coalesced
    # The reducer holds only the C++ half of a group. Its Python half must live as long.
    groups: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
    _forward(VisibleGroup, methods)

    @functools.wraps(build)
    def reducer(*args: Any, **kwargs: Any) -> Any:
        arguments = list(args)
        for place, argument in enumerate(args):
            if type(argument) is dist.ProcessGroup:
                try:
                    arguments[place] = VisibleGroup(argument)
                except Exception as error:  # DDP trains as usual, but its buckets stay unseen
                    sentence = f"DDP's buckets could not be watched: {error!r}"
                    journal.define(kind="missing", sentence=sentence)
        built = build(*arguments, **kwargs)
        groups[built] = [argument for argument in arguments if isinstance(argument, VisibleGroup)]
        return built

    @functools.wraps(broadcast)
    def broadcast_coalesced(group: Any, *args: Any, **kwargs: Any) -> Any:
        visible = (stand_in for stand_ins in groups.values() for stand_in in stand_ins)
        seen = next((stand_in for stand_in in visible if stand_in.true is group), group)
        return broadcast(seen, *args, **kwargs)

    dist.Reducer, dist._broadcast_coalesced = reducer, broadcast_coalesced


def watch_names(methods: Iterable[str]) -> None:
    """Give C++ a visible group if it asks for a group by name.

    If that fails, C++ finds the true group, and the group's own count shows its collectives.
    """
    _forward(_NamedGroup, methods, _VisibleWork)
    names = _Names(torch._C._distributed_c10d)
    for name in ("_register", "_unregister", "_resolve"):
        _replace(f"{name}_process_group", getattr(names, name.removeprefix("_")))
    _replace("_unregister_all_process_groups", names.unregister_all)
    # Symmetric memory of devices takes the store of the group that it finds, and visible groups
    # have no store.
    memory = getattr(torch._C._distributed_c10d, "_SymmetricMemory", None)
    for name in ("empty_strided_p2p", "get_mempool_allocator", "rendezvous"):
        if hasattr(memory, name):
            setattr(memory, name, staticmethod(_after(names.give_back, getattr(memory, name))))


class VisibleGroup(dist.ProcessGroup):  # type: ignore[misc]  # torch may be absent when we check
    """A process group that sends C++ callers through the Python methods of the true group."""

    def __init__(self, true: Any) -> None:
        super().__init__(true.rank(), true.size())
        self.true = true
        self.bound_device_id = true.bound_device_id  # a backend is bound to it when it is set
        for device in true._device_types:
            backend = true._get_backend(device)
            kind = self.BackendType.__members__.get(backend.name().upper(), self.BackendType.CUSTOM)
            self._set_default_backend(kind)
            self._register_backend(device, kind, backend)

    @functools.cached_property
    def name(self) -> str:
        """Return the true group's name; to ask C++ for it takes 15 us with cold caches."""
        return str(self.true.group_name)


class _NamedGroup(VisibleGroup):
    """A visible group whose works C++ waits for."""


class _VisibleWork(dist.Work):  # type: ignore[misc]  # torch may be absent when we check
    """Lets C++ wait through the Python method of the true work."""

    def __init__(self, true: Any) -> None:
        super().__init__()
        self._true = true

    def wait(self, *timeout: Any) -> bool:
        """Return when the result is there."""
        return bool(self._true.wait(*timeout))

    def get_future(self) -> Any:
        """Return the true work's future."""
        return self._true.get_future()


class _Names:
    """The visible groups by name, for torch's own registry, which keeps no group alive."""

    def __init__(self, registry: Any) -> None:
        self._register, self._resolve, self._unregister, self._unregister_all = (
            registry._register_process_group,
            registry._resolve_process_group,
            registry._unregister_process_group,
            registry._unregister_all_process_groups,
        )
        self._held: dict[str, _NamedGroup] = {}
        self._may_stand_in = True

    def register(self, group_name: str, group: Any) -> None:
        """Let C++ find the visible group in place of the true one."""
        try:
            is_plain = type(group) is dist.ProcessGroup and self._may_stand_in
            seen = _NamedGroup(group) if is_plain else None
        except Exception:  # the job goes on with its own group
            seen = None
        self._register(group_name, seen or group)
        if seen is not None:
            self._held[group_name] = seen

    def resolve(self, group_name: str) -> Any:
        """Find the true group."""
        group = self._resolve(group_name)
        return group.true if isinstance(group, _NamedGroup) else group

    def unregister(self, group_name: str) -> None:
        """Forget a group."""
        self._unregister(group_name)
        self._held.pop(group_name, None)

    def unregister_all(self) -> None:
        """Forget all groups."""
        self._unregister_all()
        self._held.clear()

    def give_back(self) -> None:
        """Restore the registry: later callers need parts of a group that visible groups lack."""
        self._may_stand_in = False
        while self._held:
            name, seen = self._held.popitem()
            self._unregister(name)
            self._register(name, seen.true)


def _after(first: Callable[[], None], then: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(then)
    def both(*args: Any, **kwargs: Any) -> Any:
        first()
        return then(*args, **kwargs)

    return both


def _replace(name: str, ours: Callable[..., Any]) -> None:
    """Put a function in the place of one of torch's, in all modules that have imported it."""
    true = getattr(torch._C._distributed_c10d, name)
    of_torch = [module for key, module in sys.modules.items() if key.partition(".")[0] == "torch"]
    for module in of_torch:
        if vars(module).get(name) is true:
            setattr(module, name, ours)


def _forward(
    kind: type, methods: Iterable[str], of_work: Callable[[Any], Any] = lambda work: work
) -> None:
    for name in methods:
        if hasattr(dist.ProcessGroup, name):  # some versions of torch lack some methods
            setattr(kind, name, _through(name, of_work))


def _through(name: str, of_work: Callable[[Any], Any]) -> Callable[..., Any]:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return of_work(getattr(self.true, name)(*args, **kwargs))

    return forward
