"""A sharded training's state on two ranks each, so that the loss of one rank needs no disk.

Of n ranks, rank i has shard i of each parameter (FSDP2), and of the optimizer's state. It also has
a copy of the shard of the rank before it:

    a step         each rank sends its gradients to the rank after it
    committed      each applies its optimizer to its own shard, and a twin of it to the copy
    another n      each takes its new shard and its new copy from those who have a part of them

So a copy is equal to its shard bit by bit, without the state ever travelling in a step.
"""

from __future__ import annotations

import copy
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from fullwire.errors import UsageError

Piece: TypeAlias = list[list[Any]]  # by parameter: its shard, and that of each optimizer tensor
_MOVED_BYTES = 32 * 2**20  # at once, when shards move to another number of ranks


class Form(NamedTuple):
    """A parameter and its optimizer tensors: all are sharded along the same dimension."""

    shape: list[int]
    dim: int
    dtypes: list[str]

    def piece(self, size: int, index: int) -> list[Any]:
        """Return empty tensors for one shard of this, of so many."""
        low, high = rows(self.shape[self.dim], size, index)
        shape = [*self.shape[: self.dim], high - low, *self.shape[self.dim + 1 :]]
        return [torch.empty(shape, dtype=getattr(torch, dtype)) for dtype in self.dtypes]


class Layout(NamedTuple):
    """The shards of one epoch's ranks. A later epoch has a higher number."""

    epoch: int
    size: int


class Shards:
    """The model and the optimizer of one membership: this rank's shard, and a copy of another."""

    def __init__(self, built: Any, layout: Layout, index: int, mesh: Any) -> None:
        """Take what the script has built on a mesh of so many ranks."""
        if not isinstance(built, tuple) or len(built) not in (2, 3):
            raise UsageError(
                "fullwire.elastic: expected a function that returns a model and an optimizer, or "
                f"also a scheduler, got {_listed(built)}"
            )
        self.model, self.optimizer, self.scheduler = (*built, None)[:3]
        self.layout, self.index, self.mesh = layout, index, mesh
        named = list(self.model.named_parameters())
        self.names = [name for name, _ in named]
        # A pass replaces those of the model for a while, and an interrupted one leaves them so.
        self.parameters = [parameter for _, parameter in named]
        for name, parameter in named:
            if not isinstance(parameter, DTensor) or parameter.device_mesh != mesh:
                raise UsageError(
                    "fullwire.elastic: expected fully_shard(model, mesh=mesh) over all parameters, "
                    f"got one that is not sharded on this mesh: {name}"
                )
        places = {id(parameter): place for place, parameter in enumerate(self.parameters)}
        groups = self.optimizer.param_groups
        if any(id(each) not in places for group in groups for each in group["params"]):
            raise UsageError(
                "fullwire.elastic: expected an optimizer of the model's sharded parameters, got "
                "other ones: build it after fully_shard"
            )
        self._groups = [[places[id(each)] for each in group["params"]] for group in groups]
        self._optimized = [place for group in self._groups for place in group]
        self.copies: list[Any] = []
        self.twin: Any = None  # the optimizer of the copies
        self._sent = self._received = torch.empty(0, dtype=torch.uint8)

    @property
    def buffers(self) -> dict[str, Any]:
        """Return the model's buffers, which each rank has whole."""
        return dict(self.model.named_buffers())

    @property
    def copied(self) -> int | None:
        """Return the index of the shard of which this rank has a copy."""
        return (self.index - 1) % self.layout.size if self.layout.size > 1 else None

    def attach(self, sums: Any, waits: Callable[[bool], None]) -> None:
        """Let the model weight its sums by samples, and tell when it waits for other ranks."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_all_gather(Gather(waits))
                module.set_custom_reduce_scatter(WeightedSum(waits, sums))
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)

    # The state in pieces.

    def _keys(self, place: int) -> list[str]:
        """Return the names of a parameter's sharded optimizer tensors."""
        state = self.optimizer.state.get(self.parameters[place], {})
        return sorted(key for key, value in state.items() if isinstance(value, DTensor))

    def forms(self) -> list[Form]:
        """Return the form of each parameter, with its optimizer tensors."""
        return [
            Form(
                list(parameter.shape),
                _dim_of(parameter),
                [_name_of(each.dtype) for each in tensors],
            )
            for parameter, tensors in zip(self.parameters, self.own(), strict=True)
        ]

    def own(self) -> Piece:
        """Return this rank's shard."""
        piece = []
        for place, parameter in enumerate(self.parameters):
            state = self.optimizer.state.get(parameter, {})
            of_optimizer = [state[key].to_local() for key in self._keys(place)]
            piece.append([parameter.detach().to_local(), *of_optimizer])
        return piece

    def pieces(self) -> dict[int, Piece]:
        """Return this rank's shard and its copy of another, by index."""
        pieces = {self.index: self.own()}
        if self.copied is not None and self.copies:
            pieces[self.copied] = [
                [each.detach(), *(self.twin.state[each][key] for key in self._keys(place))]
                for place, each in enumerate(self.copies)
            ]
        return pieces

    def take_own(self, piece: Piece, options: Mapping[str, Any]) -> None:
        """Take values for this rank's shard, and for all of its optimizer's state."""
        states = zip(options["states"], options["keys"], strict=True)
        for parameter, (state, keys), (value, *rest) in zip(
            self.parameters, states, piece, strict=True
        ):
            parameter.detach().to_local().copy_(value)
            sharded = [
                DTensor.from_local(
                    local,
                    self.mesh,
                    parameter.placements,
                    run_check=False,
                    shape=parameter.shape,
                    stride=parameter.stride(),
                )
                for local in rest
            ]
            if state or keys:
                given = dict(zip(keys, sharded, strict=True))
                self.optimizer.state[parameter] = _with(state, given)

    def take_copy(self, piece: Piece) -> None:
        """Keep a copy of another rank's shard, with an optimizer like this rank's own."""
        self.copies = [torch.nn.Parameter(value, requires_grad=False) for value, *_ in piece]
        self.twin = copy.copy(self.optimizer)
        for name, value in vars(self.optimizer).items():
            # An optimizer may have values that torch does not copy; methods are of the first one.
            if name not in vars(self.twin) and not callable(value):
                setattr(self.twin, name, value)
        self.twin.state = defaultdict(dict)
        self.twin.param_groups = [
            {**group, "params": [self.copies[place] for place in places]}
            for group, places in zip(self.optimizer.param_groups, self._groups, strict=True)
        ]
        for place, (parameter, (_, *rest)) in enumerate(zip(self.parameters, piece, strict=True)):
            state = self.optimizer.state.get(parameter, {})
            if state:
                sharded = dict(zip(self._keys(place), rest, strict=True))
                self.twin.state[self.copies[place]] = _with(state, sharded)

    def drop(self) -> None:
        """Free memory at once: references in circles keep an FSDP2 model for a while."""
        self.optimizer.zero_grad()
        self.optimizer.state.clear()
        self.copies, self.twin = [], None
        self._sent = self._received = torch.empty(0, dtype=torch.uint8)

    # The parts that each rank has whole.

    def options(self) -> dict[str, Any]:
        """Return the optimizer's options, and its state without the sharded tensors."""
        return {
            "groups": [
                {**group, "params": places}
                for group, places in zip(self.optimizer.param_groups, self._groups, strict=True)
            ],
            "states": [
                {
                    key: value
                    for key, value in self.optimizer.state.get(parameter, {}).items()
                    if not isinstance(value, DTensor)
                }
                for parameter in self.parameters
            ],
            "keys": [self._keys(place) for place in range(len(self.parameters))],
            "forms": [tuple(form) for form in self.forms()],
        }

    def take_options(self, options: Mapping[str, Any]) -> None:
        """Take the options of another rank's optimizer, or of the one before."""
        if [group["params"] for group in options["groups"]] != self._groups or [
            form[0] for form in options["forms"]
        ] != [list(parameter.shape) for parameter in self.parameters]:
            raise UsageError(
                "fullwire.elastic: expected a function that builds the same model and optimizer "
                "each time, got other parameters"
            )
        for group, given in zip(self.optimizer.param_groups, options["groups"], strict=True):
            group.update({key: value for key, value in given.items() if key != "params"})

    # A step.

    def exchange(self, group: Any) -> None:
        """Send the gradients of this rank's shard to the next rank; get those of the copy."""
        if self.copied is None:
            return
        # The widest numbers come first, so that each part of the row is aligned.
        places = sorted(
            (place for place in self._optimized if self.parameters[place].grad is not None),
            key=lambda place: -self.parameters[place].grad.dtype.itemsize,
        )
        gradients = [self.parameters[place].grad.to_local() for place in places]
        own = [as_bytes(each) for each in gradients]
        sizes = [
            self.copies[place].numel() * each.dtype.itemsize
            for place, each in zip(places, gradients, strict=True)
        ]
        if len(self._sent) != sum(map(len, own)) or len(self._received) != sum(sizes):
            self._sent = torch.empty(sum(map(len, own)), dtype=torch.uint8)
            self._received = torch.empty(sum(sizes), dtype=torch.uint8)
        if own:
            torch.cat(own, out=self._sent)
        works = []
        if len(self._received):
            works.append(group.recv([self._received], self.copied))
        if len(self._sent):
            works.append(group.send([self._sent], (self.index + 1) % self.layout.size))
        for work in works:
            work.wait()
        for each in self.copies:
            each.grad = None
        for place, gradient, part in zip(
            places, gradients, self._received.split(sizes), strict=True
        ):
            each = self.copies[place]
            each.grad = part.view(gradient.dtype).view(each.shape)

    def step_copy(self) -> None:
        """Apply the optimizer's step to the copy; the script has applied it to this rank's own."""
        if self.twin is not None:
            for group, own in zip(self.twin.param_groups, self.optimizer.param_groups, strict=True):
                group.update({key: value for key, value in own.items() if key != "params"})
            self.twin.step()


class _Collective:
    """A collective of FSDP2 that tells when this rank waits, so that a stuck one is found."""

    def __init__(self, waits: Callable[[bool], None]) -> None:
        self._waits = waits

    def allocate(self, size: Any, *, dtype: Any, device: Any) -> Any:
        """Return memory for a result."""
        return torch.empty(*size, dtype=dtype, device=device)


class Gather(_Collective):
    """FSDP2's way from shards to whole parameters."""

    def __call__(
        self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False
    ) -> Any:
        """Collect the shards of all ranks."""
        self._waits(True)
        work = dist.all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)
        self._waits(False)
        return work


class WeightedSum(_Collective):
    """FSDP2's sum of gradients, each rank's times its part of the samples."""

    def __init__(self, waits: Callable[[bool], None], sums: Any) -> None:
        super().__init__(waits)
        self._sums = sums

    def __call__(
        self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False
    ) -> Any:
        """Add up, and leave this rank's shard of the sum."""
        weight = self._sums.weight
        if weight:
            input_tensor.mul_(weight)
        else:  # others count these samples
            input_tensor.zero_()
        self._waits(True)
        work = dist.reduce_scatter_single(
            output_tensor, input_tensor, op=op, group=group, async_op=async_op
        )
        self._waits(False)
        return work


# Another number of ranks.


class _Move(NamedTuple):
    """Rows of a parameter that one rank needs and one has."""

    source: int
    target: int
    to_index: int
    from_index: int
    low: int
    high: int


def rows(length: int, size: int, index: int) -> tuple[int, int]:
    """Return the rows of one shard, as FSDP2 divides them: the last shards may be smaller."""
    each = -(-length // size)
    return min(index * each, length), min((index + 1) * each, length)


def holders(size: int, held: Sequence[Sequence[int]]) -> dict[int, int] | None:
    """Return a rank for each shard, of ranks that hold some of them; None if one is lost.

    A rank names its own shard first. A copy serves where the shard's own rank is lost.
    """
    found: dict[int, int] = {}
    for place in range(2):
        for rank, indices in enumerate(held):
            if place < len(indices):
                found.setdefault(indices[place], rank)
    return found if len(found) == size else None


def move(
    forms: Sequence[Form],
    pieces: Mapping[int, Piece],
    held: Sequence[Sequence[int]],
    size: int,
    wanted: Sequence[Sequence[int]],
    group: Any,
    rank: int,
) -> dict[int, Piece]:
    """Return the shards that this rank wants, of all ranks' parts of `size` earlier shards.

    `pieces`: this rank's earlier shards. `held`: those of each rank of the group, and `wanted` the
    new ones. Few parameters move at a time, so little memory is needed beside the shards.
    """
    of_index = holders(size, held)
    assert of_index is not None
    count = len(held)
    new = {index: [form.piece(count, index) for form in forms] for index in wanted[rank]}

    def moves(form: Form) -> Iterator[_Move]:
        length = form.shape[form.dim]
        for target, indices in enumerate(wanted):
            for to_index in indices:
                low, high = rows(length, count, to_index)
                for from_index in range(size):
                    first, last = rows(length, size, from_index)
                    if max(low, first) < min(high, last):
                        source = target if from_index in held[target] else of_index[from_index]
                        cut = max(low, first), min(high, last)
                        yield _Move(source, target, to_index, from_index, *cut)

    def sent(each: _Move, place: int) -> list[Any]:
        return _cut(forms[place], pieces[each.from_index][place], (size, each.from_index), each)

    def landed(each: _Move, place: int) -> list[Any]:
        return _cut(forms[place], new[each.to_index][place], (count, each.to_index), each)

    for places in _few(forms):
        todo = [(each, place) for place in places for each in moves(forms[place])]
        out: list[list[Any]] = [[] for _ in range(count)]
        back: list[list[Any]] = [[] for _ in range(count)]
        for each, place in todo:
            if each.source == each.target == rank:
                for one, other in zip(landed(each, place), sent(each, place), strict=True):
                    one.copy_(other)
            elif each.source == rank:
                out[each.target] += [as_bytes(one) for one in sent(each, place)]
            elif each.target == rank:
                back[each.source] += landed(each, place)
        if count > 1:
            _exchange(out, back, group)
    return new


def _cut(form: Form, tensors: Sequence[Any], shard: tuple[int, int], each: _Move) -> list[Any]:
    """Return the rows that move of one shard's tensors."""
    first = rows(form.shape[form.dim], *shard)[0]
    return [one.narrow(form.dim, each.low - first, each.high - each.low) for one in tensors]


def _exchange(out: Sequence[Sequence[Any]], back: Sequence[Sequence[Any]], group: Any) -> None:
    """Send bytes to each rank, and fill tensors with those of each."""
    none = torch.empty(0, dtype=torch.uint8)
    given = [torch.cat(list(each)) if each else none for each in out]
    got = [
        torch.empty(sum(one.numel() * one.dtype.itemsize for one in each), dtype=torch.uint8)
        for each in back
    ]
    group.alltoall(got, given).wait()
    for tensors, row in zip(back, got, strict=True):
        begin = 0
        for tensor in tensors:
            size_bytes = tensor.numel() * tensor.dtype.itemsize
            part = row[begin : begin + size_bytes].clone()  # aligned
            tensor.copy_(part.view(tensor.dtype).view(tensor.shape))
            begin += size_bytes


def _few(forms: Sequence[Form]) -> Iterator[list[int]]:
    """Divide parameters into groups of some memory, each with one at least."""
    group: list[int] = []
    size_bytes = 0
    for place, form in enumerate(forms):
        group.append(place)
        each = torch.Size(form.shape).numel()
        size_bytes += sum(each * getattr(torch, dtype).itemsize for dtype in form.dtypes)
        if size_bytes >= _MOVED_BYTES:
            yield group
            group, size_bytes = [], 0
    if group:
        yield group


def as_bytes(tensor: Any) -> Any:
    """Return a tensor's bytes as a row."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def checksum(piece: Piece) -> str:
    """Return a checksum of a shard, for a look whether its copy is equal."""
    value = 0
    for tensors in piece:
        for tensor in tensors:
            value = zlib.crc32(as_bytes(tensor).numpy().data, value)
    return f"{value:08x}"


def _dim_of(parameter: Any) -> int:
    (placement,) = parameter.placements
    assert isinstance(placement, Shard)
    return int(placement.dim)


def _with(state: Mapping[str, Any], sharded: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state of one parameter, with other tensors in place of sharded ones."""
    kept = {
        key: value.clone() if isinstance(value, torch.Tensor) else value
        for key, value in state.items()
        if key not in sharded
    }
    return {**kept, **sharded}


def _name_of(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _listed(built: Any) -> str:
    parts = built if isinstance(built, tuple | list) else [built]
    return ", ".join(type(part).__name__ for part in parts) or "nothing"
