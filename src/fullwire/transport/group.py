"""The process group that torch sees: collectives in, tasks for the engine out.

Only tensors in the memory of the processors, for now. For a device, `_memory` would copy a tensor
out, and `Work._finish` would copy the result back.
"""

from __future__ import annotations

import atexit
import os
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from fullwire import _native
from fullwire.errors import TransportError
from fullwire.transport import programs
from fullwire.transport.calibrate import Trials, processors_of_a_rank, streams
from fullwire.transport.congestion import congestion_control, in_use
from fullwire.transport.keys import is_switched_on, protection, say_once_that_the_network_is_trusted
from fullwire.transport.rendezvous import Meeting, Met, meet, why_no_group
from fullwire.transport.small_gradients import watch_buckets
from fullwire.transport.untraced import untraced
from fullwire.transport.wire import FORMATS, Packing, Wire, agreed, say_fall_back
from fullwire.transport.work import (
    Completer,
    InFlight,
    Places,
    Work,
    arithmetic,
    called,
    cut,
    described,
    landing_for,
    listed,
    memory_of,
    only,
    root_of,
    split,
    typed,
)

LONGEST_SILENCE_S = 30.0  # of a rank that others wait for; at most the group's time-out.
CHECKSUM_VARIABLE = "FULLWIRE_CHECKSUM"  # 1: this rank adds checksums to its frames.
SHORTEST_RENDEZVOUS_S = 30.0  # processes may start late even where collectives are quick.
# For tensors that only move, as uint8: without a reduction, divided by 1.
_MOVED = (None, programs.NUMBERS["uint8"], 1)
_EMPTY = (0, 0)
_SPIN_US = 50  # while a small message is on its way and processors are free.
_MOST_SUMS = 4096  # kept; sizes may change with every call
_REMEMBERED = 100  # sums of one number; DDP's join() has far fewer under way.
_open: list[FullwireGroup] = []  # the groups of this process.
_told: list[str] = []  # problems of groups, until one opens while no other is open


def _leave_to_parent() -> None:
    """Close connections in a forked process, which would keep them open after its parent."""
    for group in _open:
        group._engine.leave_to_parent()


os.register_at_fork(after_in_child=_leave_to_parent)


@untraced
class FullwireGroup(dist.ProcessGroup):  # type: ignore[misc]  # torch may be absent when we check
    """A group whose ranks talk over connections of their own."""

    tells_times = True  # a recorder need not ask for Futures
    supports_splitting = False
    supports_coalescing = False
    _engine: Any = None  # until the ranks have met
    _completer: Any = None
    _has_told_fall_back = False

    def __init__(self, options: Any) -> None:
        rank, size = options.group_rank, options.group_size
        super().__init__(rank, size)
        checks = is_switched_on(CHECKSUM_VARIABLE)
        self._rank, self._size = rank, size
        self._timeout_s = options.timeout.total_seconds()
        self._label = str(options.group_id)
        self._purpose = ""
        self._members = list(options.global_ranks_in_group) or list(range(size))
        self._in_flight = InFlight()
        self._of_one_number: deque[Work] = deque(maxlen=_REMEMBERED)
        self._process = os.getpid()
        # In DDP's buckets of so many numbers: the places of those that a wire format spares.
        self.small_places: dict[int, Any] = {}
        watch_buckets()
        try:
            self._start(options.store, checks)
        except BaseException as error:  # no caller will have the group, to leave it later
            own = f"rank {self._members[rank]}"
            problem = why_no_group(error, own, self._label, options.store, rank, size)
            if self._engine is not None:
                if problem:
                    self._engine.give_up(problem)
                self.shutdown()
            if problem and (type(error) is not TransportError or str(error) != problem):
                raise TransportError(problem) from error
            raise
        self._algorithms: dict[int, str] = {}
        # What sums of one size, type, reduction and format share: a job sums alike in each step.
        self._sums: dict[tuple[Any, ...], tuple[str, Any, tuple[int, int, int]]] = {}

    def _start(self, store: Any, checks: bool) -> None:
        self._protection = protection()
        if not self._protection.key and self._rank == 0 and self._size > 1:
            say_once_that_the_network_is_trusted()
        met = self._meet(store, "")
        self.strangers = met.strangers
        self.congestion = str(in_use(congestion_control(), [s for s in met.sockets if s >= 0]))
        processors = processors_of_a_rank(met.machines, self._rank)
        self._engine = _native.TransportStreams(
            self._rank,
            met.sockets,
            [str(member) for member in self._members],
            self._label,
            min(LONGEST_SILENCE_S, self._timeout_s),
            _SPIN_US if processors >= 1 else 0,
            checks,
            met.keys,
        )
        self._completer = Completer(self._engine, f"rank {self._members[self._rank]}")
        atexit.register(self.shutdown)
        if not _open:
            _told.clear()
        _open.append(self)
        # Measure the links, and open as many more connections as they need.
        trials = Trials(self._engine, self._rank, self._size, self._timeout_s)
        self.links = trials.links()
        self.streams = streams(trials, self.links, met.sockets, processors)
        for stream in range(1, self.streams):
            more = self._meet(dist.PrefixStore(f"stream {stream}", store), f", stream {stream}")
            self._engine.add(more.sockets, more.keys)
            self.strangers += more.strangers
        self.trials = trials
        self.wire: Wire = agreed(trials, self._size, self.links)
        self.wire.tells = self._rank == 0
        self._engine.count_from_here()

    def _meet(self, store: Any, stream: str) -> Met:
        name = f"{self._label} of {self._members}{stream}"
        meeting = Meeting(store, self._rank, self._size, name, self._protection)
        return meet(meeting, max(self._timeout_s, SHORTEST_RENDEZVOUS_S))

    # ---- What torch asks a group ----

    def getBackendName(self) -> str:  # noqa: N802  # torch's name for it
        """Return the name of this backend."""
        return "fullwire"

    _get_backend_name = name = getBackendName

    # Torch keeps a group's names in its backends, and this one has none below it.
    def getGroupName(self) -> str:  # noqa: N802
        """Return torch's name for the group."""
        return self._label

    def setGroupName(self, name: str) -> None:  # noqa: N802
        """Keep torch's name for the group."""
        self._label = name

    def getGroupDesc(self) -> str:  # noqa: N802
        """Return the purpose of the group, as its user described it."""
        return self._purpose

    def setGroupDesc(self, purpose: str) -> None:  # noqa: N802
        """Keep the purpose of the group, as its user described it."""
        self._purpose = purpose

    def _get_backend(self, device: Any) -> FullwireGroup:
        """Return this group itself, in place of a backend for a device."""
        return self

    @property
    def _device_types(self) -> list[Any]:
        """Return the devices on which FSDP and checkpoints put tensors for this group."""
        return [torch.device("cpu")]

    @property
    def problem(self) -> str:
        """Return why the group cannot continue, or ""."""
        return str(self._engine.problem or "")

    @property
    def fallen_back_after(self) -> str:
        """Return the collective whose rounding made the group send float32, or ""."""
        return str(self._engine.fallen_back_after)

    def supports_tensor_alloc(self, device: Any) -> bool:
        """Return False: tensors need no memory of ours."""
        return False

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the time-out of collectives that are issued from now on."""
        self._timeout_s = timeout.total_seconds()

    _set_default_timeout = set_timeout

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: the engine counts."""

    def shutdown(self) -> None:
        """Leave the group: connections and threads are gone when this returns."""
        if self._process != os.getpid():
            return  # a fork has the descriptors, but does not own the group
        atexit.unregister(self.shutdown)
        if self in _open:
            # Ranks that wait for this process in other groups are told the problem.
            _told.extend(problem for group in _open if (problem := group._engine.problem))
            _open.remove(self)
        self._engine.close(_told[0] if _told else "")
        if self._completer is not None:
            self._completer.close()
        self._in_flight.clear()
        self._of_one_number.clear()

    def abort(self) -> None:
        """Leave the group at once, even during a collective, and tell the other ranks."""
        self._engine.abort(f"rank {self._members[self._rank]} has aborted the group")
        self.shutdown()

    # ---- Collectives ----

    def allreduce(self, tensors: Any, opts: Any = None, **_: Any) -> Work:
        """Leave the reduction of all ranks' tensors in every tensor."""
        tensor = only(tensors)
        if tensor.layout is torch.sparse_coo:
            return self._summing_few(tensor, opts)
        work = self._reducing([tensor], opts)
        if tensor.numel() == 1:
            # DDP's join() hands such a sum to its C++ and drops the Python object. Then torch
            # finds no Future and waits for ever.
            self._of_one_number.append(work)
        return work

    def allreduce_coalesced(self, tensors: Sequence[Any], opts: Any = None) -> Work:
        """Reduce several tensors, one after the other."""
        return self._reducing(tensors, opts)

    def _reducing(self, tensors: Sequence[Any], opts: Any) -> Work:
        tasks, kept, spared, reduction = [], [*tensors], [], called(opts)
        for tensor in tensors:
            memory = memory_of(tensor, dense=True)
            packing = self._packing(tensor, memory[1], reduction)
            places = self._spared(tensor) if packing is not None else None
            if places is not None and len(places) == tensor.numel():
                packing = places = None
            tasks.append(self._summing(tensor, memory, reduction, opts, packing))
            if places is not None:
                # They travel twice: packed among the others, and as they are.
                flat = tensor.detach()
                exact = flat[places]
                tasks.append(self._summing(exact, memory_of(exact), reduction, opts, None))
                kept.append(exact)
                spared.append(partial(flat.index_copy_, 0, places, exact))

        def put_back() -> None:
            for each in spared:
                each()

        return self._work(tasks, list(tensors), kept, put_back if spared else None)

    def _spared(self, tensor: Any) -> Any:
        """Return the places of small gradients, if the tensor is as long as a bucket with some."""
        is_row = tensor.dim() == 1 and not self.wire.packs_small
        return self.small_places.get(tensor.numel()) if is_row else None

    def _summing(
        self,
        tensor: Any,
        memory: tuple[int, int],
        reduction: str,
        opts: Any,
        packing: Packing | None,
    ) -> Callable[[], Any]:
        like_it = memory[1], tensor.dtype, reduction, packing
        found = self._sums.get(like_it)
        if found is None:
            if len(self._sums) >= _MOST_SUMS:
                self._sums.clear()
            what = f"all_reduce({reduction}) of {described(tensor)}"
            program = self._program_of_sum(memory[1], packing)
            found = self._sums[like_it] = what, program, self._how(tensor, reduction)
        what, program, how = found
        return self._task(what, program, [memory], [memory], opts, how, packing)

    def _program_of_sum(self, size_bytes: int, packing: Packing | None) -> Any:
        if packing is not None:
            return programs.packed_allreduce(self._size, self._rank)
        algorithm, segments = self._algorithm(size_bytes), 1
        if algorithm == "ring":
            part_bytes = self._engine.largest_part(size_bytes)
            segments = programs.ring_segments(self._size, part_bytes)
        return programs.allreduce(algorithm, self._size, self._rank, segments)

    def _summing_few(self, tensor: Any, opts: Any) -> Work:
        """Add up sparse tensors: every rank gathers the counts of entries, then all entries."""
        if called(opts) != "SUM":
            raise ValueError(f"fullwire: sparse tensors can only be summed, not {called(opts)}")
        own, counts = tensor.coalesce(), torch.empty(self._size, dtype=torch.int64)
        self.all_gather_single(counts, torch.tensor([own._nnz()]), opts).wait()
        most = int(counts.max())
        parts = [
            torch.cat([part, part.new_zeros((most - len(part), *part.shape[1:]))])
            for part in (own.indices().t(), own.values())
        ]
        wholes = [part.new_empty((self._size * most, *part.shape[1:])) for part in parts]
        pairs = list(zip(wholes, parts, strict=True))
        tasks = [self._gathering(part, cut(w, self._size, part), opts) for w, part in pairs]

        def add_up() -> None:
            place = torch.arange(self._size * most) % max(most, 1)
            is_entry = place < counts.repeat_interleave(most)
            places, values = (whole[is_entry] for whole in wholes)
            tensor.copy_(torch.sparse_coo_tensor(places.t(), values, tensor.shape).coalesce())

        return self._work(tasks, [tensor], pairs, add_up)

    def broadcast(self, tensors: Any, opts: Any = None, **more: Any) -> Work:
        """Copy the root's tensor to all ranks."""
        tensor, root = only(tensors), root_of(opts, more)
        memory = memory_of(tensor, dense=True)
        small = programs.is_small(memory[1], self.links)
        program = programs.broadcast(self._size, self._rank, root, small)
        what = f"broadcast from rank {self._members[root]} of {described(tensor)}"
        task = self._task(what, program, [memory, _EMPTY], [memory, _EMPTY], opts)
        return self._work([task], [tensor], tensors)

    def reduce(self, tensors: Any, opts: Any = None, **more: Any) -> Work:
        """Leave the reduction of all tensors at the root."""
        tensor, root = only(tensors), root_of(opts, more)
        reduction = called(opts)
        how = self._how(tensor, reduction)
        memory = memory_of(tensor, dense=True)
        small = programs.is_small(memory[1], self.links)
        program = programs.reduce(self._size, self._rank, root, small)
        work = memory if self._rank == root else (0, memory[1])
        what = f"reduce({reduction}) to rank {self._members[root]} of {described(tensor)}"
        task = self._task(what, program, [memory, _EMPTY], [work, _EMPTY], opts, how)
        return self._work([task], [tensor], tensors)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, **_: Any) -> Work:
        """Collect every rank's tensor in a list, on each rank."""
        given = only(inputs).contiguous()
        lists = listed(outputs)
        landing, spread = landing_for(lists)
        task = self._gathering(given, [memory_of(tensor) for tensor in landing], opts)
        return self._work([task], list(lists), (landing, given), spread)

    def all_gather_single(self, output: Any, given: Any, opts: Any = None) -> Work:
        """Collect every rank's tensor in one tensor, on each rank."""
        given = given.contiguous()
        task = self._gathering(given, cut(output, self._size, given), opts)
        return self._work([task], [output], (output, given))

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(
        self, outputs: Sequence[Any], inputs: Sequence[Any], opts: Any = None
    ) -> Work:
        """Collect several tensors, one after the other."""
        tasks = [
            self._gathering(given, cut(output, self._size, given), opts)
            for output, given in zip(outputs, inputs, strict=True)
        ]
        return self._work(tasks, list(outputs), (outputs, inputs))

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def allgather_coalesced(
        self, outputs: Sequence[Sequence[Any]], inputs: Sequence[Any], opts: Any = None
    ) -> Work:
        """Collect several tensors in lists, one list for each rank."""
        tasks = [
            self._gathering(given, [memory_of(output[index]) for output in outputs], opts)
            for index, given in enumerate(inputs)
        ]
        return self._work(tasks, list(outputs), (outputs, inputs))

    def _gathering(self, given: Any, places: Places, opts: Any) -> Any:
        memory = memory_of(given)
        self._require_places(places, memory[1], "all_gather")
        source = [memory if rank == self._rank else _EMPTY for rank in range(self._size)]
        packing = self._packing(given, memory[1] * self._size, "")
        direct = packing is not None or programs.is_small(memory[1] * self._size, self.links)
        program = programs.allgather(self._size, self._rank, direct)
        what = f"all_gather of {described(given)}"
        return self._task(what, program, source, places, opts, packing=packing)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None, **_: Any) -> Work:
        """Reduce a list of tensors and leave one of the results on each rank."""
        output = only(outputs)
        parts = [tensor.contiguous() for tensor in listed(inputs)]
        [landing], spread = landing_for([output])
        task = self._scattering(landing, [memory_of(part) for part in parts], opts)
        return self._work([task], [output], (landing, parts), spread)

    def reduce_scatter_single(self, output: Any, given: Any, opts: Any = None) -> Work:
        """Reduce a tensor and leave one part of the result on each rank."""
        given = given.contiguous()
        task = self._scattering(output, cut(given, self._size, output), opts)
        return self._work([task], [output], (output, given))

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Any], inputs: Sequence[Any], opts: Any = None
    ) -> Work:
        """Reduce and leave parts of several tensors, one after the other."""
        tasks = [
            self._scattering(output, cut(given, self._size, output), opts)
            for output, given in zip(outputs, inputs, strict=True)
        ]
        return self._work(tasks, list(outputs), (outputs, inputs))

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _scattering(self, output: Any, parts: Places, opts: Any) -> Any:
        reduction = called(opts)
        how = self._how(output, reduction)
        memory = memory_of(output)
        self._require_places(parts, memory[1], "reduce_scatter")
        packing = self._packing(output, memory[1] * self._size, reduction)
        others = (0, memory[1]) if packing is None else _EMPTY  # a ring passes their sums on
        work = [memory if rank == self._rank else others for rank in range(self._size)]
        direct = packing is not None or programs.is_small(memory[1] * self._size, self.links)
        program = programs.reducescatter(self._size, self._rank, direct)
        what = f"reduce_scatter({reduction}) of {described(output)} a rank"
        return self._task(what, program, parts, work, opts, how, packing)

    def alltoall(self, outputs: Sequence[Any], inputs: Sequence[Any], opts: Any = None) -> Work:
        """Send a tensor to each rank and get one from each."""
        source, places = [*map(memory_of, inputs)], [*map(memory_of, outputs)]
        task = self._exchanging(source, places, inputs[0], opts)
        return self._work([task], list(outputs), (outputs, inputs))

    def all_to_all_single(
        self,
        output: Any,
        given: Any,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: Any = None,
    ) -> Work:
        """Send a part of a tensor to each rank and get one from each."""
        source = split(memory_of(given), given, input_splits, self._size)
        places = split(memory_of(output), output, output_splits, self._size)
        task = self._exchanging(source, places, given, opts)
        return self._work([task], [output], (output, given))

    alltoall_base = all_to_all_single

    def _exchanging(self, source: Places, places: Places, given: Any, opts: Any) -> Any:
        if not len(source) == len(places) == self._size:
            raise ValueError(f"all_to_all: expected {self._size} tensors to send and to receive")
        if source[self._rank][1] != places[self._rank][1]:
            raise ValueError("all_to_all: a rank's part for itself differs in size on both sides")
        program = programs.alltoall(self._size, self._rank)
        return self._task(f"all_to_all of {typed(given)}", program, source, places, opts)

    def gather(self, outputs: Any, inputs: Any, opts: Any = None, **more: Any) -> Work:
        """Collect every rank's tensor at the root."""
        given, root = only(inputs).contiguous(), root_of(opts, more)
        memory = memory_of(given)
        lists = listed(outputs) if self._rank == root else []
        landing, spread = landing_for(lists)
        places = [_EMPTY] * self._size
        if self._rank == root:
            places = [memory_of(tensor) for tensor in landing]
            self._require_places(places, memory[1], "gather")
        source = [memory if rank == self._rank else _EMPTY for rank in range(self._size + 1)]
        program = programs.gather(self._size, self._rank, root)
        what = f"gather to rank {self._members[root]} of {described(given)}"
        task = self._task(what, program, source, [*places, _EMPTY], opts)
        return self._work([task], list(lists), (landing, given), spread)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None, **more: Any) -> Work:
        """Give each rank a tensor of the root's."""
        output, root = only(outputs), root_of(opts, more)
        [landing], spread = landing_for([output])
        memory = memory_of(landing)
        lists = listed(inputs) if self._rank == root else []
        parts = [part.contiguous() for part in lists]
        source = [_EMPTY] * self._size
        if self._rank == root:
            source = [memory_of(part) for part in parts]
            self._require_places(source, memory[1], "scatter")
        places = [memory if rank == self._rank else _EMPTY for rank in range(self._size + 1)]
        program = programs.scatter(self._size, self._rank, root)
        what = f"scatter from rank {self._members[root]} of {described(output)}"
        task = self._task(what, program, [*source, _EMPTY], places, opts)
        return self._work([task], [output], (landing, parts), spread)

    def barrier(self, opts: Any = None, **_: Any) -> Work:
        """Let each rank go on once all ranks have come."""
        program = programs.barrier(self._size, self._rank)
        return self._work([self._task("barrier", program, [_EMPTY], [_EMPTY], opts)], [], None)

    # ---- Transfers between two ranks ----

    def send(self, tensors: Any, to: int, tag: int = 0) -> Work:
        """Send a tensor to a rank that receives it."""
        return self._transfer("send", only(tensors), f"to rank {self._members[to]}", to, tag)

    def recv(self, tensors: Any, source: int, tag: int = 0) -> Work:
        """Receive a tensor from a rank."""
        where = f"from rank {self._members[source]}"
        return self._transfer("receive", only(tensors), where, source, tag)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Work:
        """Receive a tensor from whichever rank sends one."""
        return self._transfer("receive", only(tensors), "from any rank", -1, tag)

    def _transfer(self, does: str, tensor: Any, where: str, rank: int, tag: int) -> Work:
        what = f"{does} of {described(tensor)} {where} (tag {tag})"
        if rank == self._rank:
            raise ValueError(f"{what}: that is this rank itself")
        how = (does == "send", rank, tag, memory_of(tensor), self._timeout_s)
        return self._work([partial(self._engine.transfer, what, *how)], [tensor], tensor)

    # ---- How ----

    def _task(
        self,
        what: str,
        program: Any,
        source: Places,
        places: Places,
        opts: Any,
        how: tuple[int | None, int, int] = _MOVED,
        packing: Packing | None = None,
    ) -> Callable[[], Any]:
        """Return a function that issues a collective to the engine."""
        given = getattr(opts, "timeout", None)
        asked_s = given.total_seconds() if given is not None else 0.0
        timeout_s = asked_s if asked_s > 0 else self._timeout_s
        rest = (*how, timeout_s, not getattr(opts, "asyncOp", True))  # the caller waits at once
        if packing is None:
            return partial(self._engine.collective, what, program, source, places, *rest)
        wire = (FORMATS[packing.name], packing.most_error)
        what += packing.words
        return partial(self._engine.collective, what, program, source, places, *rest, *wire)

    def _packing(self, tensor: Any, size_bytes: int, reduction: str) -> Packing | None:
        """Return the wire format of a tensor, and say once that the group has fallen back."""
        if not self.wire.is_on:
            return None
        whole = tensor._base  # torch hands complex numbers over as a view of pairs of real ones
        kind = typed(tensor if whole is None or not whole.is_complex() else whole)
        found = self.wire.packing(kind, tensor.numel(), size_bytes, reduction)
        if found and not self._has_told_fall_back and (after := self.fallen_back_after):
            self._has_told_fall_back = True
            if self._rank == 0:
                say_fall_back(self._label, after, found)
        return found

    def _work(
        self,
        tasks: Sequence[Callable[[], Any]],
        result: Any,
        kept: Any,
        afterwards: Callable[[], None] | None = None,
    ) -> Work:
        """Issue checked tasks; after a refusal half-way, the earlier ones would have no owner."""
        issued = [issue() for issue in tasks]
        of_group = (self._engine, self._completer, self._in_flight)
        return Work(*of_group, issued, result, kept, afterwards)

    def _how(self, tensor: Any, reduction: str) -> tuple[int, int, int]:
        """Return the operation of a reduction, its type of number, and its divisor."""
        return *arithmetic(reduction, tensor.dtype), self._size if reduction == "AVG" else 1

    def _algorithm(self, size_bytes: int) -> str:
        """Choose an algorithm by the size, rounded to half a power of two; keep each choice."""
        if size_bytes > programs.LARGEST_UNPIPELINED_BYTES:
            return "ring"
        power = size_bytes.bit_length()
        if power not in self._algorithms:
            typical = 3 << power >> 2
            self._algorithms[power] = programs.allreduce_algorithm(self._size, typical, self.links)
        return self._algorithms[power]

    def _require_places(self, places: Places, each: int, name: str) -> None:
        if len(places) != self._size:
            raise ValueError(f"{name}: expected {self._size} tensors, got {len(places)}")
        if any(size != each for _, size in places):
            sizes = [size for _, size in places]
            raise ValueError(f"{name}: expected {each} bytes for each rank, got {sizes}")
