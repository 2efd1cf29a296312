"""C++ that issues collectives is given groups that can be seen.

DDP's reducer and what broadcasts its buffers take a group, and functional collectives (DTensor's,
and those of compiled graphs) find one by its name. Each gets a group in Python over the same
backends; C++ calls its methods, which call the true group's, and those are watched. Python itself
only ever meets the true group.
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
    """Give DDP's C++, its reducer and its broadcasts of buffers, a group that can be seen."""
    build, broadcast = dist.Reducer, dist._broadcast_coalesced
    # The reducer holds the C++ half of a group only: its Python half must live as long.
    groups: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
    _forward(VisibleGroup, methods, _plain)

    @functools.wraps(build)
    def reducer(*args: Any, **kwargs: Any) -> Any:
        arguments = [_visible(argument, journal) for argument in args]
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
    """Give C++ that asks for a group by its name one that can be seen.

    Where it cannot be had, the true group is found as ever, and what it does is counted.
    """
    _forward(_NamedGroup, methods, _through_its_work)
    names = _Names(torch._C._distributed_c10d)
    for name in ("_register", "_unregister", "_resolve"):
        _replace(f"{name}_process_group", getattr(names, name.removeprefix("_")))
    _replace("_unregister_all_process_groups", names.unregister_all)
    _stand_aside_for_shared_memory(names)


class VisibleGroup(dist.ProcessGroup):  # type: ignore[misc]  # torch may be absent when we check
    """A process group that sends C++ callers through the Python methods of the true one."""

    def __init__(self, true: Any) -> None:
        super().__init__(true.rank(), true.size())
        self.true = true
        self.bound_device_id = true.bound_device_id  # to which a backend is set when it is given
        for device in true._device_types:
            backend = true._get_backend(device)
            kind = self.BackendType.__members__.get(backend.name().upper(), self.BackendType.CUSTOM)
            self._set_default_backend(kind)
            self._register_backend(device, kind, backend)


class _NamedGroup(VisibleGroup):
    """A visible group whose works are waited for in C++."""


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
    """Groups by their names, in torch's own registry, which holds no group itself."""

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
        """Let C++ find what can be seen of a group."""
        try:
            is_plain = type(group) is dist.ProcessGroup and self._may_stand_in
            seen = _NamedGroup(group) if is_plain else None
        except Exception:  # the job goes on, with what it made
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
        """Leave the registry as it would be: what comes now asks groups for what ours have not."""
        self._may_stand_in = False
        while self._held:
            name, seen = self._held.popitem()
            self._unregister(name)
            self._register(name, seen.true)


def _stand_aside_for_shared_memory(names: _Names) -> None:
    """Symmetric memory of devices takes the store of the group that it finds; ours have none."""
    memory = getattr(torch._C._distributed_c10d, "_SymmetricMemory", None)
    for name in ("empty_strided_p2p", "get_mempool_allocator", "rendezvous"):
        if hasattr(memory, name):
            setattr(memory, name, staticmethod(_after(names.give_back, getattr(memory, name))))


def _after(first: Callable[[], None], then: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(then)
    def both(*args: Any, **kwargs: Any) -> Any:
        first()
        return then(*args, **kwargs)

    return both


def _replace(name: str, ours: Callable[..., Any]) -> None:
    """Put a function in the place of one of torch's, wherever that has been imported to."""
    true = getattr(torch._C._distributed_c10d, name)
    of_torch = [module for key, module in sys.modules.items() if key.partition(".")[0] == "torch"]
    for module in of_torch:
        if vars(module).get(name) is true:
            setattr(module, name, ours)


def _visible(argument: Any, journal: Journal) -> Any:
    if type(argument) is not dist.ProcessGroup:
        return argument
    try:
        return VisibleGroup(argument)
    except Exception as error:  # DDP trains as it would; its buckets are not seen
        journal.define(kind="missing", sentence=f"DDP's buckets could not be watched: {error!r}")
        return argument


def _forward(kind: type, methods: Iterable[str], forwarding: Callable[[str], Any]) -> None:
    for name in methods:
        if hasattr(dist.ProcessGroup, name):  # which of them exist depends on torch's version
            setattr(kind, name, forwarding(name))


def _plain(name: str) -> Callable[..., Any]:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.true, name)(*args, **kwargs)

    return forward


def _through_its_work(name: str) -> Callable[..., Any]:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _VisibleWork(getattr(self.true, name)(*args, **kwargs))

    return forward
