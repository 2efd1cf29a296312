"""A rank that carries out programs of collectives with two backends and reports differences.

python programs.py SOCKET BACKEND: a request holds a list of operations (`tests/programs.py`) and
the backend. Gloo comes first, and the other backend's results are compared with Gloo's. Each
operation has its own tensors. Their values follow from its seed and the rank, so both backends
begin alike. Gloo's tensors are dense: with gaps, it reduces the memory in the gaps. Our backend may
refuse a tensor with gaps. Otherwise it must give Gloo's result, and leave the memory between and
around its elements unchanged.
"""

from __future__ import annotations

import sys
import warnings
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from tests.jobs.asked import serve
from tests.programs import DTYPES, GROUPS, SAME_EVERYWHERE, Operation

_TIMEOUT = timedelta(seconds=20)
_DTYPES = {name: getattr(torch, name) for name in DTYPES}
_GUARD = 77
_ROUNDINGS = 16  # units in the last place of the largest value by which two sums may differ

Tensors: TypeAlias = list[torch.Tensor]


@dataclass
class Memory:
    """The tensors of one operation on one backend, and the memory that they lie in."""

    operation: Operation
    layout: str
    rank: int
    views: Tensors = field(default_factory=list)
    guards: Tensors = field(default_factory=list)  # values in the same memory, outside our tensors

    def __post_init__(self) -> None:
        self._generator = torch.Generator().manual_seed(self.operation.seed * 64 + self.rank)

    def tensor(self, count: int) -> torch.Tensor:
        """Return a filled tensor of `count` elements in this layout."""
        step = 2 if self.layout == "every second" else 1
        base = torch.full((step * count + 2,), _GUARD, dtype=_DTYPES[self.operation.dtype])
        view = base[1 : 1 + step * count : step]
        if self.layout == "transposed" and count % 2 == 0:
            view = view.view(2, count // 2).t()
        view.copy_(self._values(count).view(view.shape))
        self.views.append(view)
        self.guards.append(base[:: step * count + 1] if step == 1 else base[::2])
        return view

    def tensors(self, number: int, count: int) -> Tensors:
        return [self.tensor(count) for _ in range(number)]

    def forget(self) -> None:
        """Forget the tensors so far, because their final content is undefined."""
        self.views.clear()

    def digest(self) -> int:
        """Return a number that changes with any bit."""
        digest = 0
        for view in self.views:
            dense = view.flatten().clone(memory_format=torch.contiguous_format)
            digest = zlib.crc32(dense.view(torch.uint8).numpy().tobytes(), digest)
        return digest

    def _values(self, count: int) -> torch.Tensor:
        dtype = _DTYPES[self.operation.dtype]
        if dtype.is_floating_point:
            return torch.randn(count, generator=self._generator).to(dtype)
        least = 0 if dtype == torch.uint8 else -100
        return torch.randint(least, 100, (count,), generator=self._generator, dtype=dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """The arguments of an operation on this rank."""

    count: int
    ranks: tuple[int, ...]
    place: int  # the rank's position in the group
    root: int
    memory: Memory
    reduction: dict[str, Any]
    how: dict[str, Any]  # the group, and whether to wait

    @property
    def is_root(self) -> bool:
        return self.ranks[self.place] == self.root


def _all_reduce(call: Call) -> Any:
    return dist.all_reduce(call.memory.tensor(call.count), **call.reduction, **call.how)


def _all_reduce_coalesced(call: Call) -> Any:
    several = [call.memory.tensor(call.count + more) for more in range(3)]
    return dist.all_reduce_coalesced(several, **call.reduction, **call.how)


def _broadcast(call: Call) -> Any:
    return dist.broadcast(call.memory.tensor(call.count), call.root, **call.how)


def _reduce(call: Call) -> Any:
    values = call.memory.tensor(call.count)
    if not call.is_root:
        call.memory.forget()
    return dist.reduce(values, call.root, **call.reduction, **call.how)


def _all_gather(call: Call) -> Any:
    mine = call.memory.tensor(call.count)
    return dist.all_gather(call.memory.tensors(len(call.ranks), call.count), mine, **call.how)


def _all_gather_into(call: Call) -> Any:
    mine = call.memory.tensor(call.count)
    all_of_them = call.memory.tensor(len(call.ranks) * call.count)
    return dist.all_gather_into_tensor(all_of_them, mine, **call.how)


def _reduce_scatter(call: Call) -> Any:
    given = call.memory.tensors(len(call.ranks), call.count)
    call.memory.forget()
    mine = call.memory.tensor(call.count)
    return dist.reduce_scatter(mine, given, **call.reduction, **call.how)


def _reduce_scatter_tensor(call: Call) -> Any:
    given = call.memory.tensor(len(call.ranks) * call.count)
    call.memory.forget()
    mine = call.memory.tensor(call.count)
    return dist.reduce_scatter_tensor(mine, given, **call.reduction, **call.how)


def _all_to_all(call: Call) -> Any:
    given = call.memory.tensors(len(call.ranks), call.count)
    return dist.all_to_all(call.memory.tensors(len(call.ranks), call.count), given, **call.how)


def _all_to_all_single(call: Call) -> Any:
    """Send a different number of elements to each rank, to some none."""
    numbers = [(call.count + place) % 7 for place in range(len(call.ranks))]
    mine = numbers[call.place]
    given = call.memory.tensor(sum(numbers))
    taken = call.memory.tensor(mine * len(call.ranks))
    return dist.all_to_all_single(taken, given, [mine] * len(call.ranks), numbers, **call.how)


def _gather(call: Call) -> Any:
    mine = call.memory.tensor(call.count)
    places = call.memory.tensors(len(call.ranks), call.count) if call.is_root else None
    return dist.gather(mine, places, call.root, **call.how)


def _scatter(call: Call) -> Any:
    mine = call.memory.tensor(call.count)
    pieces = call.memory.tensors(len(call.ranks), call.count) if call.is_root else None
    return dist.scatter(mine, pieces, call.root, **call.how)


def _send(call: Call) -> Any:
    """Send from the root to the rank after it; other ranks do nothing."""
    values = call.memory.tensor(call.count)
    after = call.ranks[(call.ranks.index(call.root) + 1) % len(call.ranks)]
    group, is_async = call.how["group"], call.how["async_op"]
    if len(call.ranks) > 1 and call.is_root:
        return (dist.isend if is_async else dist.send)(values, after, group=group)
    if len(call.ranks) > 1 and call.ranks[call.place] == after:
        work = (dist.irecv if is_async else dist.recv)(values, call.root, group=group)
        return work if is_async else None
    return None


def _barrier(call: Call) -> Any:
    return dist.barrier(**call.how)


_KINDS: dict[str, Callable[[Call], Any]] = {
    "all_reduce": _all_reduce,
    "all_reduce_coalesced": _all_reduce_coalesced,
    "broadcast": _broadcast,
    "reduce": _reduce,
    "all_gather": _all_gather,
    "all_gather_into": _all_gather_into,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_tensor": _reduce_scatter_tensor,
    "all_to_all": _all_to_all,
    "all_to_all_single": _all_to_all_single,
    "gather": _gather,
    "scatter": _scatter,
    "send": _send,
    "barrier": _barrier,
}

Outcome: TypeAlias = Memory | str | None  # str: a refusal, None: this rank is outside the group


class Backend:
    """One backend's groups."""

    def __init__(self, name: str, *, is_reference: bool) -> None:
        self._is_reference = is_reference
        self._groups = [
            dist.new_group(list(ranks), backend=name, timeout=_TIMEOUT) for ranks in GROUPS
        ]

    def run(self, program: Sequence[Operation]) -> list[Outcome]:
        """Carry out a program and return the outcome of each operation."""
        outcomes: list[Outcome] = []
        in_flight: list[tuple[int, Any]] = []
        for number, operation in enumerate(program):
            outcomes.append(None)
            if dist.get_rank() not in GROUPS[operation.group]:
                continue
            call = self._call(operation)
            try:
                work = _KINDS[operation.kind](call)
            except (RuntimeError, ValueError, TypeError) as error:
                outcomes[number] = f"{type(error).__name__}: {error}"
                continue
            outcomes[number] = call.memory
            if operation.is_async and work is not None:
                in_flight.append((number, work))
            if operation.then_wait:
                _wait(in_flight, outcomes)
        _wait(in_flight, outcomes)
        return outcomes

    def _call(self, operation: Operation) -> Call:
        ranks = GROUPS[operation.group]
        layout = "dense" if self._is_reference else operation.layout
        # The numbers of elements differ between ranks. A tensor may then have gaps on one rank
        # only, and only that rank would refuse it.
        if operation.kind == "all_to_all_single":
            layout = "dense"  # has gaps on one may have none on another, and only one would refuse
        return Call(
            count=operation.count,
            ranks=ranks,
            place=ranks.index(dist.get_rank()),
            root=ranks[operation.root % len(ranks)],
            memory=Memory(operation, layout, dist.get_rank()),
            reduction={"op": getattr(dist.ReduceOp, operation.reduce)},
            how={"group": self._groups[operation.group], "async_op": operation.is_async},
        )


def _wait(in_flight: list[tuple[int, Any]], outcomes: list[Outcome]) -> None:
    """Wait for everything, the last operation first, to reveal a backend that keeps no order."""
    while in_flight:
        number, work = in_flight.pop()
        try:
            work.wait()
        except RuntimeError as error:
            outcomes[number] = f"{type(error).__name__}: {error}"


def difference(expected: Outcome, got: Outcome) -> str | None:
    """Describe the difference of two outcomes; our backend may do operations that Gloo refuses."""
    if not isinstance(expected, Memory):
        return None
    if not isinstance(got, Memory):
        refused = f"Gloo does it, and it is refused: {got}"
        return refused if expected.operation.layout == "dense" else None
    if any(bool((guard != _GUARD).any()) for guard in got.guards):
        return "memory between or around its tensors was written to"
    pairs = zip(expected.views, got.views, strict=True)
    return next(filter(None, (_difference(one, other) for one, other in pairs)), None)


def _difference(one: torch.Tensor, other: torch.Tensor) -> str | None:
    one, other = one.reshape(-1), other.reshape(-1)
    if one.dtype.is_floating_point:
        one, other, eps = one.double(), other.double(), torch.finfo(one.dtype).eps
        largest = float(one.nan_to_num(posinf=0, neginf=0).abs().max()) if len(one) else 0.0
        off = _ROUNDINGS * eps * max(1.0, largest)
        wrong = ~torch.isclose(other, one, rtol=0, atol=off, equal_nan=True)
    else:
        wrong = one != other
    places = wrong.nonzero().flatten().tolist()
    if not places:
        return None
    first = places[0]
    return (
        f"{len(places)} of {len(one)} values differ, first at {first}: "
        f"expected {one[first].item()}, got {other[first].item()}"
    )


def main() -> None:
    """Carry out programs until the connection closes."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=_TIMEOUT)
    gloo, ours = Backend("gloo", is_reference=True), Backend(sys.argv[2], is_reference=False)

    expected: list[Outcome] = []

    def carry_out(request: dict[str, Any]) -> dict[str, list[Any]] | None:
        program = [Operation(**each) for each in request["program"]]
        if request["backend"] == "gloo":
            expected[:] = gloo.run(program)
            return None
        return _compared(expected, ours.run(program))

    serve(carry_out)


def _compared(expected: list[Outcome], got: list[Outcome]) -> dict[str, list[Any]]:
    return {
        "differences": [difference(one, other) for one, other in zip(expected, got, strict=True)],
        "digests": [
            each.digest()
            if isinstance(each, Memory) and each.operation.kind in SAME_EVERYWHERE
            else None
            for each in got
        ],
    }


if __name__ == "__main__":
    main()
