"""The process group that torch sees: collectives in, tasks for the engine out.

Tensors of processors only, for now: `_memory` is where a device would hand over what it has, and
`Work._finish` where it would take the result back.
"""

from __future__ import annotations

import atexit
import os
import re
import threading
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from fullwire import _native
from fullwire.errors import TransportError
from fullwire.transport import NAME, programs
from fullwire.transport.calibrate import Trials
from fullwire.transport.congestion import congestion_control, in_use
from fullwire.transport.keys import protection, say_once_that_the_network_is_trusted
from fullwire.transport.rendezvous import Meeting, Met, lack, leave_word, left_words, meet
from fullwire.transport.streams import agreed
from fullwire.transport.untraced import untraced
from fullwire.transport.work import Completer, Work

LONGEST_SILENCE_S = 30.0  # of a rank that others wait for; never longer than the group's time-out
CHECKSUM_VARIABLE = "FULLWIRE_CHECKSUM"  # 1: what this rank sends bears checksums
SHORTEST_RENDEZVOUS_S = 30.0  # processes start when they start, whatever collectives may take
_NUMBERS = {
    torch.float32: 0,
    torch.float64: 1,
    torch.float16: 2,
    torch.bfloat16: 3,
    torch.int8: 4,
    torch.int16: 5,
    torch.int32: 6,
    torch.int64: 7,
    torch.uint8: 8,
    torch.bool: 9,
}
_BYTES = 8  # the number of uint8, as which anything moves that is not added up
_REDUCTIONS = {"SUM": 0, "AVG": 0, "PRODUCT": 1, "MIN": 2, "MAX": 3, "BAND": 4, "BOR": 5, "BXOR": 6}
_EMPTY = (0, 0)
_SPIN_US = 50  # while a small message is on its way, where processors are not shared
_REMEMBERED = 100  # sums of one number: far more than DDP's join() has under way
_open: list[FullwireGroup] = []  # the groups of this process
_told: list[str] = []  # what ended some of them, since there was none


def _leave_to_parent() -> None:
    """Let go of connections in a forked process: who outlives its parent would keep them open."""
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

    def __init__(self, options: Any) -> None:
        rank, size = options.group_rank, options.group_size
        super().__init__(rank, size)
        checks = _wants_checksums()
        self._rank, self._size = rank, size
        self._timeout_s = options.timeout.total_seconds()
        self._label = str(options.group_id)
        self._purpose = ""
        self._members = list(options.global_ranks_in_group) or list(range(size))
        self._in_flight: set[Work] = set()
        self._most_in_flight = 1
        self._of_one_number: deque[Work] = deque(maxlen=_REMEMBERED)
        self._holding = threading.Lock()
        self._process = os.getpid()
        try:
            self._start(options.store, checks)
        except BaseException as error:  # nobody will have the group, so nobody could leave it
            problem = self._problem_of_start(error, options.store)
            if self._engine is not None:
                if problem:
                    self._engine.give_up(problem)
                self.shutdown()
            if problem and (type(error) is not TransportError or str(error) != problem):
                raise TransportError(problem) from error
            raise
        self._algorithms: dict[int, str] = {}

    def _start(self, store: Any, checks: bool) -> None:
        self._protection = protection()
        if not self._protection.key and self._rank == 0 and self._size > 1:
            say_once_that_the_network_is_trusted()
        met = self._meet(store, "")
        self.strangers = met.strangers
        connections = [each for each in met.sockets if each >= 0]
        self.congestion = str(in_use(congestion_control(), connections))
        self._engine = _native.TransportStreams(
            self._rank,
            met.sockets,
            [str(member) for member in self._members],
            self._label,
            min(LONGEST_SILENCE_S, self._timeout_s),
            _spin_us(met.machines, self._rank),
            checks,
            met.keys,
        )
        self._completer = Completer(self._engine, f"rank {self._members[self._rank]}")
        atexit.register(self.shutdown)
        if not _open:
            _told.clear()
        _open.append(self)
        self._try_out(store, met)
        self._engine.count_from_here()

    def _meet(self, store: Any, stream: str) -> Met:
        name = f"{self._label} of {self._members}{stream}"
        meeting = Meeting(store, self._rank, self._size, name, self._protection)
        return meet(meeting, max(self._timeout_s, SHORTEST_RENDEZVOUS_S))

    def _try_out(self, store: Any, met: Met) -> None:
        """Measure the links, and open as many more connections as they need."""
        trials = Trials(self._engine, self._rank, self._size, self._timeout_s)
        self.links = trials.links()
        self.streams = agreed(
            trials, self.links, met.sockets, _processors(met.machines, self._rank)
        )
        for stream in range(1, self.streams):
            more = self._meet(dist.PrefixStore(f"stream {stream}", store), f", stream {stream}")
            self._engine.add(more.sockets, more.keys)
            self.strangers += more.strangers

    def _problem_of_start(self, error: BaseException, store: Any) -> str:
        """Say why this rank has no group; what it lacked itself is left in the store as well."""
        own = f"rank {self._members[self._rank]}"
        lacks = lack(error)
        problem = f"{own}: {lacks}, at the start of group {self._label}" if lacks else ""
        if isinstance(error, TransportError | RuntimeError) and str(error).startswith(f"{own}: "):
            problem = str(error)
        if problem:
            leave_word(store, self._rank, problem)
        elif isinstance(error, TransportError):
            problem = "; ".join([str(error), *left_words(store, self._size)])
        return problem

    # ---- What torch asks a group ----

    def getBackendName(self) -> str:  # noqa: N802  # torch's name for it
        """Return the name that the group was asked for by."""
        return NAME

    _get_backend_name = name = getBackendName

    # Torch keeps a group's names in its backends, and this one has none below it.
    def getGroupName(self) -> str:  # noqa: N802
        """Return the name that torch knows the group by."""
        return self._label

    def setGroupName(self, name: str) -> None:  # noqa: N802
        """Take the name that torch knows the group by."""
        self._label = name

    def getGroupDesc(self) -> str:  # noqa: N802
        """Return what the group is for, in a person's words."""
        return self._purpose

    def setGroupDesc(self, purpose: str) -> None:  # noqa: N802
        """Take what the group is for, in a person's words."""
        self._purpose = purpose

    def _get_backend(self, device: Any) -> FullwireGroup:
        """Stand in for the backend that other groups have for each device."""
        del device
        return self

    @property
    def _device_types(self) -> list[Any]:
        """Tell FSDP and checkpoints where tensors for this group are to be."""
        return [torch.device("cpu")]

    def supports_tensor_alloc(self, device: Any) -> bool:
        """Say that tensors need no memory of ours."""
        del device
        return False

    def set_timeout(self, timeout: timedelta) -> None:
        """Let collectives that are issued from now on take so long."""
        self._timeout_s = timeout.total_seconds()

    _set_default_timeout = set_timeout

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: the engine counts."""

    def shutdown(self) -> None:
        """Leave the group: connections and threads are gone when this returns."""
        if self._process != os.getpid():
            return  # a fork has the descriptors, and no say
        atexit.unregister(self.shutdown)
        if self in _open:
            # Who waits for us elsewhere is to hear what has ended this process's part.
            _told.extend(problem for group in _open if (problem := group._engine.problem))
            _open.remove(self)
        self._engine.close(_told[0] if _told else "")
        if self._completer is not None:
            self._completer.close()
        self._in_flight.clear()
        self._of_one_number.clear()

    def abort(self) -> None:
        """Leave the group in the middle of whatever happens, and tell the others."""
        self._engine.abort(f"rank {self._members[self._rank]} has aborted the group")
        self.shutdown()

    # ---- Collectives ----

    def allreduce(self, tensors: Any, opts: Any = None, **_: Any) -> Work:
        """Leave the reduction of every rank's tensor in each of them."""
        tensor = _only(tensors)
        if tensor.layout is torch.sparse_coo:
            return self._summing_few(tensor, opts)
        work = self._reducing("all_reduce", [tensor], opts)
        if tensor.numel() == 1:
            # DDP's join() leaves such a sum to its C++ alone and drops the object, without which
            # torch finds no Future, and waits for ever.
            self._of_one_number.append(work)
        return work

    def allreduce_coalesced(self, tensors: Sequence[Any], opts: Any = None) -> Work:
        """Reduce several tensors, one after the other."""
        return self._reducing("all_reduce", tensors, opts)

    def _reducing(self, name: str, tensors: Sequence[Any], opts: Any) -> Work:
        tasks = []
        for tensor in tensors:
            number, reduction, divide_by = self._how(tensor, opts)
            memory = _memory(tensor, dense=True)
            algorithm = self._algorithm(memory[1])
            segments = 1
            if algorithm == "ring":
                part_bytes = self._engine.largest_part(memory[1])
                segments = programs.ring_segments(self._size, part_bytes)
            program = programs.allreduce(algorithm, self._size, self._rank, segments)
            what = f"{name}({_called(opts)}) of {_described(tensor)}"
            how = (reduction, number, divide_by)
            tasks.append(partial(self._issue, what, program, [memory], [memory], opts, *how))
        # Issued when all are known to be good: what is refused half-way nobody would hold.
        return self._work([issue() for issue in tasks], list(tensors), tensors)

    def _summing_few(self, tensor: Any, opts: Any) -> Work:
        """Add up sparse tensors: every rank gathers all entries, once it has heard how many."""
        if _called(opts) != "SUM":
            raise ValueError(f"{NAME}: sparse tensors can only be summed, not {_called(opts)}")
        own = tensor.coalesce()
        counts = torch.empty(self._size, dtype=torch.int64)
        self.all_gather_single(counts, torch.tensor([own._nnz()]), opts).wait()
        most = int(counts.max())
        parts = [_padded(part, most) for part in (own.indices().t(), own.values())]
        wholes = [part.new_empty((self._size * most, *part.shape[1:])) for part in parts]
        pairs = list(zip(wholes, parts, strict=True))
        tasks = [self._gathering(part, _cut(w, self._size, part), opts) for w, part in pairs]

        def add_up() -> None:
            is_entry = torch.arange(self._size * most) % max(most, 1) < counts.repeat_interleave(
                most
            )
            places, values = (whole[is_entry] for whole in wholes)
            tensor.copy_(torch.sparse_coo_tensor(places.t(), values, tensor.shape).coalesce())

        return self._work([issue() for issue in tasks], [tensor], pairs, add_up)

    def broadcast(self, tensors: Any, opts: Any = None, **more: Any) -> Work:
        """Copy the root's tensor to all."""
        tensor = _only(tensors)
        root = _root(opts, more)
        memory = _memory(tensor, dense=True)
        program = programs.broadcast(
            self._size, self._rank, root, programs.is_small(memory[1], self.links)
        )
        what = f"broadcast from rank {self._members[root]} of {_described(tensor)}"
        task = self._issue(what, program, [memory, _EMPTY], [memory, _EMPTY], opts)
        return self._work([task], [tensor], tensors)

    def reduce(self, tensors: Any, opts: Any = None, **more: Any) -> Work:
        """Leave the reduction of all tensors at the root."""
        tensor = _only(tensors)
        root = _root(opts, more)
        number, reduction, divide_by = self._how(tensor, opts)
        memory = _memory(tensor, dense=True)
        program = programs.reduce(
            self._size, self._rank, root, programs.is_small(memory[1], self.links)
        )
        work = memory if self._rank == root else (0, memory[1])
        what = f"reduce({_called(opts)}) to rank {self._members[root]} of {_described(tensor)}"
        task = self._issue(
            what, program, [memory, _EMPTY], [work, _EMPTY], opts, reduction, number, divide_by
        )
        return self._work([task], [tensor], tensors)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, **_: Any) -> Work:
        """Collect every rank's tensor in a list, on each rank."""
        given = _only(inputs).contiguous()
        lists = outputs[0] if isinstance(outputs[0], list | tuple) else outputs
        landing, spread = _landing(lists)
        task = self._gathering(given, [_memory(each) for each in landing], opts)
        return self._work([task()], list(lists), (landing, given), spread)

    def all_gather_single(self, output: Any, given: Any, opts: Any = None) -> Work:
        """Collect every rank's tensor in one, on each rank."""
        given = given.contiguous()
        task = self._gathering(given, _cut(output, self._size, given), opts)
        return self._work([task()], [output], (output, given))

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(
        self, outputs: Sequence[Any], inputs: Sequence[Any], opts: Any = None
    ) -> Work:
        """Collect several tensors, one after the other."""
        tasks = [
            self._gathering(given, _cut(output, self._size, given), opts)
            for output, given in zip(outputs, inputs, strict=True)
        ]
        return self._work([issue() for issue in tasks], list(outputs), (outputs, inputs))

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def allgather_coalesced(
        self, outputs: Sequence[Sequence[Any]], inputs: Sequence[Any], opts: Any = None
    ) -> Work:
        """Collect several tensors in lists, one list for each rank."""
        tasks = [
            self._gathering(given, [_memory(each[index]) for each in outputs], opts)
            for index, given in enumerate(inputs)
        ]
        return self._work([issue() for issue in tasks], list(outputs), (outputs, inputs))

    def _gathering(self, given: Any, places: list[tuple[int, int]], opts: Any) -> Any:
        memory = _memory(given)
        self._require_places(places, memory[1], "all_gather")
        source = [_EMPTY] * self._size
        source[self._rank] = memory
        small = programs.is_small(memory[1] * self._size, self.links)
        program = programs.allgather(self._size, self._rank, small)
        what = f"all_gather of {_described(given)}"
        return partial(self._issue, what, program, source, places, opts)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None, **_: Any) -> Work:
        """Reduce a list of tensors and leave one of the results on each rank."""
        output = _only(outputs)
        parts = inputs[0] if isinstance(inputs[0], list | tuple) else inputs
        parts = [each.contiguous() for each in parts]
        [landing], spread = _landing([output])
        task = self._scattering(landing, [_memory(each) for each in parts], opts)
        return self._work([task()], [output], (landing, parts), spread)

    def reduce_scatter_single(self, output: Any, given: Any, opts: Any = None) -> Work:
        """Reduce a tensor and leave one part of the result on each rank."""
        given = given.contiguous()
        task = self._scattering(output, _cut(given, self._size, output), opts)
        return self._work([task()], [output], (output, given))

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Any], inputs: Sequence[Any], opts: Any = None
    ) -> Work:
        """Reduce and leave parts of several tensors, one after the other."""
        tasks = [
            self._scattering(output, _cut(given, self._size, output), opts)
            for output, given in zip(outputs, inputs, strict=True)
        ]
        return self._work([issue() for issue in tasks], list(outputs), (outputs, inputs))

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _scattering(self, output: Any, parts: list[tuple[int, int]], opts: Any) -> Any:
        number, reduction, divide_by = self._how(output, opts)
        memory = _memory(output)
        self._require_places(parts, memory[1], "reduce_scatter")
        work = [(0, memory[1])] * self._size
        work[self._rank] = memory
        small = programs.is_small(memory[1] * self._size, self.links)
        program = programs.reducescatter(self._size, self._rank, small)
        what = f"reduce_scatter({_called(opts)}) of {_described(output)} a rank"
        return partial(self._issue, what, program, parts, work, opts, reduction, number, divide_by)

    def alltoall(self, outputs: Sequence[Any], inputs: Sequence[Any], opts: Any = None) -> Work:
        """Send a tensor to each rank and get one from each."""
        source = [_memory(each) for each in inputs]
        places = [_memory(each) for each in outputs]
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
        source = _split(_memory(given), given, input_splits, self._size)
        places = _split(_memory(output), output, output_splits, self._size)
        task = self._exchanging(source, places, given, opts)
        return self._work([task], [output], (output, given))

    alltoall_base = all_to_all_single

    def _exchanging(
        self, source: list[tuple[int, int]], places: list[tuple[int, int]], given: Any, opts: Any
    ) -> Any:
        if not len(source) == len(places) == self._size:
            raise ValueError(f"all_to_all: expected {self._size} tensors to send and to receive")
        if source[self._rank][1] != places[self._rank][1]:
            raise ValueError("all_to_all: a rank's part for itself differs in size on both sides")
        program = programs.alltoall(self._size, self._rank)
        return self._issue(f"all_to_all of {_typed(given)}", program, source, places, opts)

    def gather(self, outputs: Any, inputs: Any, opts: Any = None, **more: Any) -> Work:
        """Collect every rank's tensor at the root."""
        given, root = _only(inputs).contiguous(), _root(opts, more)
        memory = _memory(given)
        places = [_EMPTY] * (self._size + 1)
        lists: Sequence[Any] = []
        if self._rank == root:
            lists = outputs[0] if isinstance(outputs[0], list | tuple) else outputs
        landing, spread = _landing(lists)
        if self._rank == root:
            places[: self._size] = [_memory(each) for each in landing]
            self._require_places(places[: self._size], memory[1], "gather")
        source = [_EMPTY] * (self._size + 1)
        source[self._rank] = memory
        program = programs.gather(self._size, self._rank, root)
        what = f"gather to rank {self._members[root]} of {_described(given)}"
        task = self._issue(what, program, source, places, opts)
        return self._work([task], list(lists), (landing, given), spread)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None, **more: Any) -> Work:
        """Give each rank a tensor of the root's."""
        output, root = _only(outputs), _root(opts, more)
        [landing], spread = _landing([output])
        memory = _memory(landing)
        source = [_EMPTY] * (self._size + 1)
        parts: Sequence[Any] = []
        if self._rank == root:
            parts = inputs[0] if isinstance(inputs[0], list | tuple) else inputs
            parts = [each.contiguous() for each in parts]
            source[: self._size] = [_memory(each) for each in parts]
            self._require_places(source[: self._size], memory[1], "scatter")
        places = [_EMPTY] * (self._size + 1)
        places[self._rank] = memory
        program = programs.scatter(self._size, self._rank, root)
        what = f"scatter from rank {self._members[root]} of {_described(output)}"
        task = self._issue(what, program, source, places, opts)
        return self._work([task], [output], (landing, parts), spread)

    def barrier(self, opts: Any = None, **_: Any) -> Work:
        """Let nobody go on before everybody has come."""
        program = programs.barrier(self._size, self._rank)
        return self._work([self._issue("barrier", program, [_EMPTY], [_EMPTY], opts)], [], None)

    # ---- Transfers between two ranks ----

    def send(self, tensors: Any, to: int, tag: int = 0) -> Work:
        """Send a tensor to a rank that receives it."""
        tensor = _only(tensors)
        what = f"send of {_described(tensor)} to rank {self._members[to]} (tag {tag})"
        return self._transfer(what, True, to, tag, tensor)

    def recv(self, tensors: Any, source: int, tag: int = 0) -> Work:
        """Receive a tensor from a rank."""
        tensor = _only(tensors)
        what = f"receive of {_described(tensor)} from rank {self._members[source]} (tag {tag})"
        return self._transfer(what, False, source, tag, tensor)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Work:
        """Receive a tensor from whichever rank sends one."""
        tensor = _only(tensors)
        what = f"receive of {_described(tensor)} from any rank (tag {tag})"
        return self._transfer(what, False, -1, tag, tensor)

    def _transfer(self, what: str, sends: bool, rank: int, tag: int, tensor: Any) -> Work:
        if rank == self._rank:
            raise ValueError(f"{what}: that is this rank itself")
        task = self._engine.transfer(what, sends, rank, tag, _memory(tensor), self._timeout_s)
        return self._work([task], [tensor], tensor)

    # ---- How ----

    def _issue(
        self,
        what: str,
        program: Any,
        source: list[tuple[int, int]],
        places: list[tuple[int, int]],
        opts: Any,
        reduction: int | None = None,
        number: int = _BYTES,
        divide_by: int = 1,
    ) -> Any:
        timeout_s = self._timeout_s
        given = getattr(opts, "timeout", None)
        if given is not None and given.total_seconds() > 0:
            timeout_s = given.total_seconds()
        waits_at_once = not getattr(opts, "asyncOp", True)
        return self._engine.collective(
            what, program, source, places, reduction, number, divide_by, timeout_s, waits_at_once
        )

    def _work(
        self,
        tasks: Sequence[Any],
        result: Any,
        kept: Any,
        afterwards: Callable[[], None] | None = None,
    ) -> Work:
        work = Work(self._engine, self._completer, tasks, result, kept, afterwards, self._let_go)
        self._hold(work)
        if torch.autograd._profiler_enabled():
            work.show_to_profiler(_operation(tasks[0]))
        return work

    def _hold(self, work: Work) -> None:
        """Keep a work: who drops it and the tensor still has the engine read and write it."""
        with self._holding:
            if len(self._in_flight) >= self._most_in_flight:  # some ended that nobody waited for
                self._in_flight = {each for each in self._in_flight if not each.is_completed()}
                self._most_in_flight = 2 * len(self._in_flight) + 1
            self._in_flight.add(work)

    def _let_go(self, work: Work) -> None:
        """Forget a work that has ended, at once: its tensor may be large."""
        with self._holding:
            self._in_flight.discard(work)

    def _how(self, tensor: Any, opts: Any) -> tuple[int, int, int]:
        """Return what to reduce with: the number's kind, the operation and what to divide by."""
        name, dtype = _called(opts), tensor.dtype
        if dtype.is_complex and name in ("SUM", "AVG"):
            dtype = dtype.to_real()  # whose pairs are added as any others
        if dtype not in _NUMBERS:
            raise TypeError(f"{NAME} cannot reduce {_typed(tensor)} by {name}")
        if name not in _REDUCTIONS:
            raise ValueError(f"{NAME} knows no reduction {name}")
        if name.startswith("B") and (tensor.dtype.is_floating_point):
            raise ValueError(f"{name}: expected whole numbers, got {_typed(tensor)}")
        if name == "AVG" and tensor.dtype == torch.bool:
            raise ValueError("AVG: expected numbers, got bool")
        return _NUMBERS[dtype], _REDUCTIONS[name], self._size if name == "AVG" else 1

    def _algorithm(self, size_bytes: int) -> str:
        """Choose by size, rounded to half a power of two: computed once for each."""
        power = size_bytes.bit_length()
        if power not in self._algorithms:
            typical = 3 << power >> 2
            self._algorithms[power] = programs.allreduce_algorithm(self._size, typical, self.links)
        found = self._algorithms[power]
        return "ring" if size_bytes > programs.LARGEST_UNPIPELINED_BYTES else found

    def _require_places(self, places: Sequence[tuple[int, int]], each: int, name: str) -> None:
        if len(places) != self._size:
            raise ValueError(f"{name}: expected {self._size} tensors, got {len(places)}")
        if any(size != each for _, size in places):
            raise ValueError(
                f"{name}: expected {each} bytes for each rank, got {[size for _, size in places]}"
            )


def _memory(tensor: Any, *, dense: bool = False) -> tuple[int, int]:
    """Return where a tensor's bytes are, and how many."""
    if tensor.device.type != "cpu":
        raise ValueError(f"{NAME}: expected a tensor of the processor, got one on {tensor.device}")
    if tensor.layout is not torch.strided:
        raise ValueError(f"{NAME}: expected a dense tensor, got {tensor.layout}")
    if not tensor.is_contiguous() and not (dense and _is_without_gaps(tensor)):
        raise ValueError("Tensors must be contiguous")  # as Gloo says it
    return tensor.data_ptr(), tensor.numel() * tensor.element_size()


def _landing(outputs: Sequence[Any]) -> tuple[list[Any], Callable[[], None] | None]:
    """Give tensors without gaps to receive in, and what spreads them where some have gaps."""
    dense = [each if each.is_contiguous() else each.new_empty(each.shape) for each in outputs]
    apart = [(out, one) for out, one in zip(outputs, dense, strict=True) if out is not one]

    def spread() -> None:
        for out, one in apart:
            out.copy_(one)

    return dense, spread if apart else None


def _padded(part: Any, rows: int) -> Any:
    padded = part.new_zeros((rows, *part.shape[1:]))
    padded[: len(part)] = part
    return padded


def _is_without_gaps(tensor: Any) -> bool:
    """Say whether it is contiguous but for the order of its dimensions."""
    expected = 1
    for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length != 1 and stride != expected:
            return False
        expected *= length
    return True


def _only(tensors: Any) -> Any:
    if isinstance(tensors, torch.Tensor):
        return tensors
    if len(tensors) != 1:
        raise ValueError(f"expected one tensor, got {len(tensors)}")
    return tensors[0]


def _cut(whole: Any, parts: int, part: Any) -> list[tuple[int, int]]:
    """Cut a tensor into places of tensors like the part, of whose type torch has not made sure."""
    if whole.dtype is not part.dtype:
        raise ValueError(f"expected tensors of one type, got {_typed(part)} and {_typed(whole)}")
    address, size = _memory(whole)
    each = part.numel() * part.element_size()
    if size != each * parts:
        raise ValueError(f"expected {parts} times {each} bytes in one tensor, got {size}")
    return [(address + index * each, each) for index in range(parts)]


def _split(
    memory: tuple[int, int], tensor: Any, splits: Sequence[int], parts: int
) -> list[tuple[int, int]]:
    """Cut a tensor along its first dimension, into equal parts unless told."""
    rows = int(tensor.shape[0]) if tensor.dim() else 1
    counts = list(splits) or [rows // parts] * parts
    if len(counts) != parts or sum(counts) != rows:
        raise ValueError(f"all_to_all: expected {parts} splits of {rows} rows, got {counts}")
    row_bytes = memory[1] // rows if rows else 0
    places = []
    address = memory[0]
    for count in counts:
        places.append((address, count * row_bytes))
        address += count * row_bytes
    return places


def _called(opts: Any) -> str:
    reduction = getattr(opts, "reduceOp", opts)
    if reduction is None:
        return "SUM"
    return _names(reduction)


def _names(reduction: Any) -> str:
    for name in _REDUCTIONS:
        if reduction == getattr(dist.ReduceOp, name):
            return name
    return str(getattr(reduction, "op", reduction)).removeprefix("RedOpType.")


def _root(opts: Any, more: dict[str, Any]) -> int:
    if isinstance(opts, int):
        return opts
    return int(more.get("root", getattr(opts, "rootRank", 0)))


def _typed(tensor: Any) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _described(tensor: Any) -> str:
    return f"{tensor.numel()} {_typed(tensor)}"


def _operation(task: Any) -> str:
    """Name what a task does, as torch's own backends do for profilers."""
    word = re.split(r"\W", task.description)[0]
    return f"{NAME}:{'recv' if word == 'receive' else word}"


def _wants_checksums() -> bool:
    said = os.environ.get(CHECKSUM_VARIABLE, "0")
    if said not in ("0", "1"):
        raise TransportError(f"{CHECKSUM_VARIABLE}: expected 0 or 1, got {said!r}")
    return said == "1"


def _spin_us(machines: list[str], rank: int) -> int:
    """Wait actively only where every rank of this machine has a processor to itself."""
    return _SPIN_US if _processors(machines, rank) >= 1 else 0


def _processors(machines: list[str], rank: int) -> float:
    """Return how many there are for each rank of this machine, of this group or of others."""
    of_the_job = os.environ.get("LOCAL_WORLD_SIZE", "")  # as torchrun says
    neighbours = max(
        machines.count(machines[rank]), int(of_the_job) if of_the_job.isdecimal() else 0
    )
    return len(os.sched_getaffinity(0)) / neighbours


__all__ = ["FullwireGroup", "TransportError"]
