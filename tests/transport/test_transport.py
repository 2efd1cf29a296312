"""The transport: its results, the members of a group, and errors when one of them fails."""

from __future__ import annotations

import contextlib
import errno
import importlib.metadata
import itertools
import multiprocessing
import os
import resource
import select
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch", reason="needs PyTorch: pip install torch")

import fullwire as fw
from fullwire import _native
from fullwire.findings.evidence.samples import rounding_evidence
from fullwire.run.facts import Facts
from fullwire.run.run import Carried, Collectives, Provenance, Run
from fullwire.transport import calibrate, congestion, programs, rendezvous
from fullwire.transport.programs import Links
from fullwire.words import sentence
from tests import transport_ranks as ranks
from tests.ports import held_port
from tests.strategies import cases

NUMBERS: dict[str, int] = {
    "float32": 0,
    "float64": 1,
    "float16": 2,
    "int8": 4,
    "int16": 5,
    "int32": 6,
    "int64": 7,
    "uint8": 8,
}
UNCOMPILED = str(Path(__file__).parents[1] / "jobs" / "uncompiled.py")
PING = 6  # the kind of frame
SPARE_DESCRIPTORS = 512  # of this process, beside those of a mesh
SUM, PRODUCT, MINIMUM, MAXIMUM, AND, OR, XOR = range(7)
OPERATIONS: dict[int, Any] = {
    SUM: np.add,
    PRODUCT: np.multiply,
    MINIMUM: np.minimum,
    MAXIMUM: np.maximum,
    AND: np.bitwise_and,
    OR: np.bitwise_or,
    XOR: np.bitwise_xor,
}


Pair = Callable[[int, int], tuple[socket.socket, socket.socket]]


class Mesh:
    """Engines of one group, all in this process, each driven by a thread of its own."""

    def __init__(
        self,
        size: int,
        *,
        silence_s: float = 30,
        checks: bool = False,
        pair: Pair | None = None,
        more: Sequence[Pair | None] = (),
    ) -> None:
        self.size = size
        names = [str(each) for each in range(size)]
        self.engines = [
            _native.TransportStreams(rank, mine, names, "mesh", silence_s, 0, checks)
            for rank, mine in enumerate(self._connected(pair))
        ]
        for each in more:
            for engine, mine in zip(self.engines, self._connected(each), strict=True):
                engine.add(mine)

    def _connected(self, pair: Pair | None) -> list[list[int]]:
        """Return each rank's sockets by rank."""
        # Every two ranks have both ends of a connection in this one process.
        descriptors = self.size * self.size + SPARE_DESCRIPTORS
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if hard != resource.RLIM_INFINITY and hard < descriptors:
            pytest.skip(f"{self.size} ranks in one process need {descriptors} open files: {hard}")
        if soft != resource.RLIM_INFINITY and soft < descriptors:
            resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, hard))
        sockets = [[-1] * self.size for _ in range(self.size)]
        try:
            for a in range(self.size):
                for b in range(a):
                    of_a, of_b = pair(a, b) if pair else socket.socketpair()
                    sockets[a][b], sockets[b][a] = of_a.detach(), of_b.detach()
        except OSError:  # tests after this one need their descriptors
            for number in itertools.chain.from_iterable(sockets):
                if number >= 0:
                    os.close(number)
            raise
        return sockets

    def allreduce(
        self,
        algorithm: str,
        arrays: list[Any],
        operation: int,
        divide_by: int = 1,
        segments: int = 1,
    ) -> list[str | None]:
        def one(rank: int) -> str | None:
            array, engine = arrays[rank], self.engines[rank]
            place = [(array.ctypes.data, array.nbytes)]
            program = programs.allreduce(algorithm, self.size, rank, segments)
            number = NUMBERS[array.dtype.name]
            task = engine.collective(
                f"{array.nbytes} bytes",
                program,
                place,
                place,
                operation,
                number,
                divide_by,
                30.0,
                rank % 2 == 0,
            )
            engine.wait(task, 30.0)
            assert task.is_done
            return task.problem

        return in_threads([partial(one, rank) for rank in range(self.size)])

    def close(self) -> None:
        for engine in self.engines:
            engine.close()


class DamagedLine:
    """Connects two ranks through this process, and changes one byte of the second one's data."""

    HEAD_BYTES = 48

    def __init__(self, position: int) -> None:
        self._position = position
        self._threads: list[threading.Thread] = []
        self._here: list[socket.socket] = []

    def pair(self, a: int, b: int) -> tuple[socket.socket, socket.socket]:
        """Damage the data of rank 0 for rank 1."""
        if (a, b) != (1, 0):
            return socket.socketpair()
        (end_a, here_a), (end_b, here_b) = socket.socketpair(), socket.socketpair()
        self._here = [here_a, here_b]
        for source, target, position in ((here_a, here_b, None), (here_b, here_a, self._position)):
            self._threads.append(
                threading.Thread(target=self._pass_on, args=(source, target, position))
            )
            self._threads[-1].start()
        return end_a, end_b

    def join(self) -> None:
        for thread in self._threads:
            thread.join(10)
            assert not thread.is_alive()
        for each in self._here:
            each.close()

    @staticmethod
    def _pass_on(source: socket.socket, target: socket.socket, position: int | None) -> None:
        passed = 0
        with contextlib.suppress(ConnectionResetError):  # by a rank that closes with data unread
            while piece := bytearray(source.recv(1 << 16)):
                if position is not None and passed <= position < passed + len(piece):
                    piece[position - passed] ^= 0x10
                passed += len(piece)
                with contextlib.suppress(OSError):
                    target.sendall(piece)
        target.shutdown(socket.SHUT_WR)


class StalledLine:
    """Connects two ranks through this process, and stops after a number of bytes."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._here: list[socket.socket] = []
        self._thread = threading.Thread(target=self._pass_on)

    def pair(self, a: int, b: int) -> tuple[socket.socket, socket.socket]:
        (end_a, here_a), (end_b, here_b) = socket.socketpair(), socket.socketpair()
        self._here = [here_a, here_b]
        self._thread.start()
        return end_a, end_b

    def close(self) -> None:
        self._thread.join(30)
        for each in self._here:
            each.close()

    def _pass_on(self) -> None:
        one, other = self._here
        passed = 0
        while passed < self._most_bytes:
            for source in select.select(self._here, [], [])[0]:
                piece = source.recv(1 << 16)
                (other if source is one else one).sendall(piece)
                passed += len(piece)


def in_threads(works: list[Callable[[], Any]]) -> list[Any]:
    results: list[Any] = [RuntimeError("did not end")] * len(works)

    def keep(index: int) -> None:
        results[index] = works[index]()

    threads = [threading.Thread(target=keep, args=(index,)) for index in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


def in_processes(
    role: Callable[..., Any], size: int, *, timeout_s: float = 30, dead: tuple[int, ...] = ()
) -> list[Any]:
    """Run ranks as processes that share only a store; a dead rank returns None."""
    with held_port() as port:
        return _in_processes_at(port, role, size, timeout_s, dead)


def _in_processes_at(
    port: int, role: Callable[..., Any], size: int, timeout_s: float, dead: tuple[int, ...]
) -> list[Any]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.transport_ranks"])
    ends = [context.Pipe() for _ in range(size)]
    processes = [
        context.Process(
            target=ranks.take_part, args=(rank, size, port, timeout_s, role, ends[rank][1])
        )
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    try:
        alive = [rank for rank in range(size) if rank not in dead]
        answers = {rank: ends[rank][0].recv() for rank in alive if ends[rank][0].poll(60)}
        for rank in reversed(alive):
            ends[rank][0].send("all have answered")
        for process in processes:
            process.join(30)
    finally:
        for process in processes:
            process.kill()
            process.join()
            process.close()
        for ours, theirs in ends:
            ours.close()
            theirs.close()
    assert sorted(answers) == alive
    for answer in answers.values():
        if isinstance(answer, BaseException):
            raise answer
    return [answers[rank] for rank in alive]


@pytest.fixture
def mesh() -> Iterator[Callable[[int], Mesh]]:
    made: list[Mesh] = []

    def make(size: int) -> Mesh:
        made.append(Mesh(size))
        return made[-1]

    yield make
    for each in made:
        each.close()


def numbers(kind: str, count: int, seed: int) -> Any:
    generator = np.random.default_rng(seed)
    if kind.startswith("float"):  # whole numbers, because their sums do not depend on the order
        return generator.integers(-8, 9, count).astype(kind)
    low, high = np.iinfo(kind).min, np.iinfo(kind).max
    return generator.integers(low, high, count, dtype=kind, endpoint=True)


@pytest.mark.parametrize("size", range(1, 9))
@pytest.mark.parametrize("algorithm", ["ring", "recursive-doubling", "halving-doubling"])
def test_every_rank_gets_the_sum(mesh: Any, algorithm: str, size: int) -> None:
    made = mesh(size)
    for count in (1, 3, size, 1000, 40_009):
        arrays = [numbers("float32", count, rank) for rank in range(size)]
        expected = np.sum(arrays, axis=0, dtype=np.float32)
        assert made.allreduce(algorithm, arrays, SUM) == [None] * size
        for array in arrays:
            np.testing.assert_array_equal(array, expected)


def test_a_rank_that_comes_late_may_be_behind_by_a_broadcast_for_each_root(mesh: Any) -> None:
    """Only roots wait for it; with five ranks one can be sent three of a mebibyte meanwhile."""
    made = mesh(5)

    def copy(rank: int) -> list[Any]:
        time.sleep(0.3 if rank == 4 else 0)
        arrays = [np.full(1 << 18, rank, np.float32) for _ in range(3)]
        places = [[(array.ctypes.data, array.nbytes), (0, 0)] for array in arrays]
        tasks = [
            made.engines[rank].collective(
                f"from {root}",
                programs.broadcast(5, rank, root, False),
                place,
                place,
                None,
                8,
                1,
                30.0,
                False,
            )
            for root, place in enumerate(places)
        ]
        assert all(made.engines[rank].wait(task, 30.0) for task in tasks)
        return [
            (task.problem, set(each.tolist())) for task, each in zip(tasks, arrays, strict=True)
        ]

    copied = in_threads([partial(copy, rank) for rank in range(5)])
    assert copied == [[(None, {0.0}), (None, {1.0}), (None, {2.0})]] * 5


@pytest.mark.parametrize("size", range(1, 6))
def test_a_ring_in_segments_gives_the_sum_of_a_ring(mesh: Any, size: int) -> None:
    made = mesh(size)
    for segments, count in ((2, 1), (4, 1000), (8, 700_001)):
        arrays = [numbers("int32", count, rank) for rank in range(size)]
        expected = np.sum(arrays, axis=0, dtype=np.int32)
        assert made.allreduce("ring", arrays, SUM, segments=segments) == [None] * size
        for array in arrays:
            np.testing.assert_array_equal(array, expected)


@given(workers=st.integers(1, 64), size=st.integers(0, 2**40))
def test_segments_are_neither_small_nor_many(workers: int, size: int) -> None:
    segments = programs.ring_segments(workers, size)
    assert segments == 1 or 2**21 <= size / segments / workers < 2**22


@pytest.mark.parametrize("kind", NUMBERS)
def test_every_type_of_number_is_reduced_by_every_operation(mesh: Any, kind: str) -> None:
    made = mesh(3)
    known = range(4) if kind.startswith("float") else range(7)
    for operation in known:
        for algorithm, count in (("ring", 150_001), ("recursive-doubling", 77)):
            arrays = [numbers(kind, count, rank) for rank in range(3)]
            expected = OPERATIONS[operation].reduce(arrays, dtype=kind)
            made.allreduce(algorithm, arrays, operation)
            for array in arrays:
                np.testing.assert_array_equal(array, expected)


def test_averages_are_sums_divided_once(mesh: Any) -> None:
    made = mesh(4)
    for algorithm in ("ring", "recursive-doubling", "halving-doubling"):
        for kind in ("float32", "int64"):
            arrays = [np.full(1001, 10 * rank + 1, kind) for rank in range(4)]
            made.allreduce(algorithm, arrays, SUM, divide_by=4)
            for array in arrays:
                np.testing.assert_array_equal(array, np.full(1001, 16, kind))


@given(st.lists(st.integers(0, 2**16 - 1), min_size=1, max_size=64))
def test_half_precision_is_rounded_as_the_processor_would(bits: list[int]) -> None:
    made = Mesh(2)
    try:
        own = np.array(bits, np.uint16).view(np.float16)
        arrays = [own.copy(), np.roll(own, 1)]
        with np.errstate(all="ignore"):
            expected = (arrays[0].astype(np.float32) + arrays[1].astype(np.float32)).astype(
                np.float16
            )
        made.allreduce("recursive-doubling", arrays, SUM)
        np.testing.assert_array_equal(arrays[0], expected)
        np.testing.assert_array_equal(arrays[0].view(np.uint16), arrays[1].view(np.uint16))
    finally:
        made.close()


@pytest.mark.parametrize("kind", ["float16", "float32", "float64"])
@pytest.mark.parametrize("operation", [SUM, PRODUCT, MINIMUM, MAXIMUM])
def test_ranks_agree_on_the_bits_of_what_is_no_number(mesh: Any, kind: str, operation: int) -> None:
    odd = np.array([np.nan, -np.nan, 0.0, -0.0, np.inf, -np.inf], kind)
    arrays = [np.repeat(odd, len(odd)), np.tile(odd, len(odd))]
    mesh(2).allreduce("recursive-doubling", arrays, operation)
    assert arrays[0].tobytes() == arrays[1].tobytes()


def test_algorithms_follow_the_cost_of_the_links() -> None:
    near = Links(rate_bps=10e9, latency_s=50e-6)
    assert programs.allreduce_algorithm(2, 4, near) == "recursive-doubling"
    assert programs.allreduce_algorithm(8, 4, near) == "recursive-doubling"
    assert programs.allreduce_algorithm(8, 2**19, near) == "halving-doubling"
    assert programs.allreduce_algorithm(8, 25 * 2**20, near) == "ring"


@given(said=st.binary(min_size=DamagedLine.HEAD_BYTES, max_size=400))
@cases(25)
def test_what_is_no_frame_closes_the_connection_and_is_counted(said: bytes) -> None:
    ours, theirs = socket.socketpair()
    engine = _native.TransportStreams(0, [-1, ours.detach()], ["0", "1"], "mesh", 30.0, 0)
    array = np.ones(10, np.float32)
    place = [(array.ctypes.data, array.nbytes)]
    program = programs.allreduce("recursive-doubling", 2, 0)
    task = engine.collective("a sum", program, place, place, SUM, 0, 1, 30.0, True)
    with theirs:
        theirs.sendall(said)
        assert engine.wait(task, 30.0)
    assert task.problem
    assert "rank 1 sent rank 0 what is no frame of this transport" in task.problem
    assert engine.malformed == 1
    assert (array == 1).all()
    engine.close()


def crc32c(data: bytes) -> int:
    check = 0xFFFFFFFF
    for byte in data:
        check ^= byte
        for _ in range(8):
            check = check >> 1 ^ (0x82F63B78 if check & 1 else 0)
    return check ^ 0xFFFFFFFF


@pytest.mark.parametrize(("count", "is_late"), [(10, False), (10_000, True)])
def test_of_a_late_collective_only_its_data_is_said_to_be_on_the_way(
    count: int, is_late: bool
) -> None:
    """The other rank asks for thousands of answers, and reads neither those nor the data."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        ours = socket.create_connection(listener.getsockname())
        theirs = listener.accept()[0]
    engine = _native.TransportStreams(0, [-1, ours.detach()], ["0", "1"], "mesh", 30.0, 0)
    array = np.ones(count, np.float32)
    place = [(array.ctypes.data, array.nbytes)]
    program = programs.allreduce("recursive-doubling", 2, 0)
    ping = struct.pack("<IB39x", 0x32545746, 6)
    with theirs:
        task = engine.collective("a sum", program, place, place, SUM, 0, 1, 1.0, True)
        theirs.sendall((ping + struct.pack("<I", crc32c(ping))) * 5000)
        assert engine.wait(task, 30.0)
    assert task.problem
    assert "rank 1 does not answer" in task.problem
    assert ("still on the way" in task.problem) == is_late
    engine.close()


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("place", ["payload", "head"])
def test_damage_on_the_way_is_found_and_every_rank_is_told_whose(size: int, place: str) -> None:
    line = DamagedLine(DamagedLine.HEAD_BYTES + 401 if place == "payload" else 20)
    made = Mesh(size, checks=True, pair=line.pair)
    said = made.allreduce("ring", [np.ones(5000, np.float32) for _ in range(size)], SUM)
    made.close()
    line.join()
    what = "bytes that were damaged on the way" if place == "payload" else "what is no frame"
    assert len(set(said)) == 1
    assert f"rank 0 sent rank 1 {what}" in str(said[0])
    assert made.engines[1].malformed == 1


def test_without_checksums_damage_is_only_in_the_sum() -> None:
    line = DamagedLine(DamagedLine.HEAD_BYTES + 401)
    made = Mesh(2, pair=line.pair)
    arrays = [np.ones(5000, np.float32) for _ in range(2)]
    assert made.allreduce("ring", arrays, SUM) == [None, None]
    made.close()
    line.join()
    assert any((array != 2).any() for array in arrays)


@pytest.mark.parametrize("algorithm", ["ring", "recursive-doubling"])
def test_checksums_change_no_sum(algorithm: str) -> None:
    made = Mesh(3, checks=True)
    for count in (0, 1, 40_009, 1_000_003):
        arrays = [numbers("float32", count, rank) for rank in range(3)]
        expected = np.sum(arrays, axis=0, dtype=np.float32)
        assert made.allreduce(algorithm, arrays, SUM) == [None] * 3
        for array in arrays:
            np.testing.assert_array_equal(array, expected)
    made.close()


@pytest.mark.parametrize("algorithm", ["ring", "recursive-doubling", "halving-doubling"])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_over_several_streams_every_rank_gets_the_sum(algorithm: str, size: int) -> None:
    """Sizes at which one, two or three streams have a part; the last part may be odd."""
    made = Mesh(size, more=[None, None])
    for count in (1, 2**17 - 1, 2**17, 2**17 + 1, 3 * 2**16 + 5, 500_003):
        arrays = [numbers("float32", count, rank) for rank in range(size)]
        expected = np.sum(arrays, axis=0, dtype=np.float32)
        assert made.allreduce(algorithm, arrays, SUM) == [None] * size
        for array in arrays:
            np.testing.assert_array_equal(array, expected)
    made.close()


def test_when_one_of_several_streams_stands_still_all_end_with_its_reason() -> None:
    line = StalledLine(1 << 20)
    made = Mesh(2, silence_s=2, more=[line.pair])
    arrays = [np.ones(1 << 21, np.float32) for _ in range(2)]
    said = made.allreduce("ring", arrays, SUM)
    assert all("does not answer" in str(each) for each in said), said
    later = made.allreduce("ring", [np.ones(10, np.float32) for _ in range(2)], SUM)
    assert later == [engine.problem for engine in made.engines]
    made.close()
    line.close()


def test_who_stops_in_the_middle_of_a_transfer_is_named_to_the_sender() -> None:
    """It had asked for the tensor, so its silence is the only event that the sender sees."""
    line = StalledLine(1 << 20)
    made = Mesh(2, silence_s=2, pair=line.pair)
    space = [np.zeros(1 << 23, np.float32) for _ in range(2)]
    tasks = [
        engine.transfer("a tensor", rank == 0, 1 - rank, 0, (memory.ctypes.data, memory.nbytes), 60)
        for rank, (engine, memory) in enumerate(zip(made.engines, space, strict=True))
    ]
    for rank, (engine, task) in enumerate(zip(made.engines, tasks, strict=True)):
        assert engine.wait(task, 30.0)
        assert f"rank {1 - rank} does not answer" in str(task.problem)
    made.close()
    line.close()


def test_a_transfer_that_moves_has_no_more_than_its_time() -> None:
    line = StalledLine(1 << 20)
    made = Mesh(2, pair=line.pair)
    memory = np.zeros(1 << 23, np.float32)
    place = (memory.ctypes.data, memory.nbytes)
    expected = made.engines[1].transfer("a tensor", False, 0, 0, place, 60)
    task = made.engines[0].transfer("a tensor", True, 1, 0, place, 1.0)
    assert made.engines[0].wait(task, 20.0)
    assert task.problem == "rank 0: a tensor did not finish before the timeout of 1.0 s was over"
    made.close()
    line.close()
    assert expected.is_done


@pytest.mark.parametrize(
    ("sends", "missing"), [(True, "rank 1 has not asked for it"), (False, "rank 1 has not sent it")]
)
def test_a_transfer_that_the_other_rank_knows_nothing_of_says_so(sends: bool, missing: str) -> None:
    made = Mesh(2, silence_s=0.5)
    memory = np.zeros(10, np.float32)
    place = (memory.ctypes.data, memory.nbytes)
    task = made.engines[0].transfer("a tensor", sends, 1, 0, place, 0.1)
    assert made.engines[0].wait(task, 20.0)
    assert str(task.problem).endswith(f"before the timeout of 0.1 s was over, for {missing}")
    made.close()


def test_a_time_beyond_all_clocks_is_never_over() -> None:
    made = Mesh(2, silence_s=0.5)
    memory = np.zeros(10, np.float32)
    place = (memory.ctypes.data, memory.nbytes)
    task = made.engines[0].transfer("a tensor", False, 1, 0, place, timedelta.max.total_seconds())
    assert not made.engines[0].wait(task, 0.2)
    made.engines[1].transfer("a tensor", True, 0, 0, place, 30)
    assert made.engines[0].wait(task, timedelta.max.total_seconds())
    assert task.problem is None
    made.close()


def test_without_rank_0_the_next_one_finds_out_who_is_late() -> None:
    made = Mesh(3, silence_s=0.5)
    made.engines[0].close()
    program = _native.TransportProgram(1, [], [(2, 0, 1, False, False, False, -1, 0)], True)
    task = made.engines[1].collective("news", program, [(0, 0)], [(0, 0)], None, 8, 1, 0.1, False)
    assert made.engines[1].wait(task, 20.0)
    assert str(task.problem).endswith(
        "rank 0 has left the group; rank 1 called news; rank 2 has not called it"
    )
    made.close()


def test_a_rank_that_asks_whether_we_live_hides_nobody_who_does_not() -> None:
    chatty, silent = socket.socketpair(), socket.socketpair()
    sockets = [-1, chatty[0].detach(), silent[0].detach()]
    engine = _native.TransportStreams(0, sockets, ["0", "1", "2"], "mesh", 1.0, 0)
    place = [(0, 0)]
    program = programs.barrier(3, 0)
    task = engine.collective("a barrier", program, place, place, None, 8, 1, 60.0, False)

    def ask_and_ask() -> None:
        with chatty[1], contextlib.suppress(OSError):
            while (head := chatty[1].recv(DamagedLine.HEAD_BYTES, socket.MSG_WAITALL))[4] != PING:
                pass
            while not task.is_done:
                chatty[1].sendall(head)
                time.sleep(0.02)

    asking = threading.Thread(target=ask_and_ask)
    asking.start()
    with silent[1]:
        assert engine.wait(task, 20.0)
    assert "rank 2 does not answer" in str(task.problem)
    engine.close()
    asking.join()


@pytest.mark.parametrize("size", [2, 3])
def test_all_collectives_end_as_with_gloo(size: int) -> None:
    assert in_processes(ranks.both_backends, size) == [[]] * size


def test_over_several_streams_collectives_end_as_with_gloo() -> None:
    assert in_processes(partial(ranks.on_streams, 3, ranks.both_backends), 2) == [[]] * 2


def test_exchanges_of_uneven_parts_go_over_several_streams() -> None:
    assert in_processes(partial(ranks.on_streams, 3, ranks.uneven_exchanges), 4) == [True] * 4


def test_on_several_streams_ranks_that_disagree_are_told_the_same() -> None:
    said = in_processes(partial(ranks.on_streams, 3, ranks.one_large_one_small), 3)
    assert len(set(said)) == 1
    assert said[0].startswith("ranks disagree on collective 1 of group 0: ")


@pytest.mark.parametrize(
    ("role", "said"),
    [
        (partial(ranks.on_streams, 0, ranks.joined), "expected a number from 1 to 16, got '0'"),
        (ranks.of_two_minds, "expected the same on every rank, got 1 and 2"),
    ],
)
def test_how_many_streams_there_are_is_a_number_on_which_all_agree(role: Any, said: str) -> None:
    for answer in in_processes(partial(ranks.failing, role), 2):
        assert answer == f"FULLWIRE_STREAMS: {said}"


@pytest.mark.parametrize(
    ("window_bytes", "megabits", "processors", "streams"),
    [
        (2**40, 10_000, 64, 1),  # one thread fills the line
        (2**40, 100_000, 64, 8),
        (2**40, 100_000, 10, 5),  # the same number remains for training
        (2**40, 100_000, 1, 1),
        (2**40, -1, 64, 1),  # the interface reports no rate
        (1, 10_000, 1, 8),  # a tiny window, however near the other end
        (2**40, 10, 1, 1),
    ],
)
def test_streams_are_chosen_by_rate_way_window_and_processors(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    window_bytes: int,
    megabits: int,
    processors: int,
    streams: int,
) -> None:
    (tmp_path / "lo").mkdir()
    (tmp_path / "lo" / "speed").write_text(f"{megabits}\n")
    (tmp_path / "tcp_wmem").write_text(f"4096 16384 {window_bytes}\n")
    (tmp_path / "tcp_rmem").write_text(f"4096\t131072\t{2 * window_bytes}\n")
    monkeypatch.setattr(calibrate, "_SETTINGS", tmp_path)
    monkeypatch.setattr(calibrate, "_DEVICES", tmp_path)
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as one,
        server.accept()[0] as other,
    ):
        one.sendall(b"there")
        other.sendall(other.recv(5) + b" and back")
        one.recv(14)
        links = Links(rate_bps=1e9, latency_s=1e-4)
        best = calibrate.best_streams(links, [-1, one.fileno()], processors)
    assert best == streams


def test_ranks_of_other_groups_use_this_machines_processors_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert calibrate.processors_of_a_rank(["here", "there", "here"], 2) == 4
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "16")
    assert calibrate.processors_of_a_rank(["here", "there", "here"], 2) == 0.5


def test_ddp_trains_to_the_same_weights_as_with_gloo() -> None:
    for weights in in_processes(ranks.trained, 2):
        assert len(weights) == 2 * (len(ranks.HOOKS) + 1)
        for ours, theirs in zip(weights[::2], weights[1::2], strict=True):
            assert ours == theirs


def test_a_compiled_model_trains() -> None:
    assert in_processes(ranks.compiled, 1) == [16.0]


def test_fsdp_trains_to_the_same_weights_as_with_gloo() -> None:
    ours = in_processes(ranks.sharded, 2, timeout_s=30)
    theirs = in_processes(ranks.sharded, 2, timeout_s=20)
    assert ours == theirs


def test_mistakes_that_torch_lets_pass_are_refused() -> None:
    """Bytes of one type are never taken for another's."""
    types = "expected tensors of one type, got float32 and int32"
    assert in_processes(ranks.mistaken, 1) == [
        [types, types, "fullwire knows no reduction PREMUL_SUM"]
    ]


def test_a_sharded_model_is_saved_in_the_background_and_loaded(tmp_path: Path) -> None:
    role = partial(ranks.saved, str(tmp_path / "checkpoint"))
    assert in_processes(role, 2) == [[1.0] * 4] * 2


def test_a_group_made_again_leaves_nothing_open() -> None:
    for counts in in_processes(ranks.made_again, 2):
        assert min(counts[-4:]) <= max(counts[:3])  # a thread may still be ending


def test_a_forked_child_may_end_without_ending_the_group() -> None:
    assert in_processes(ranks.forked, 2) == [(0, 20.0)] * 2


def test_a_child_that_lives_on_does_not_hide_that_its_parent_was_killed() -> None:
    """The child is, for example, a DataLoader's worker, which inherits the parent's connections."""
    assert (
        in_processes(ranks.killed_with_a_child, 3, dead=(ranks.VICTIM,))
        == ["rank 1 is gone: its connection was closed"] * 2
    )


def test_who_fails_in_one_group_tells_why_to_those_who_wait_in_another() -> None:
    first, second = in_processes(ranks.in_two_groups, 3, dead=(2,))
    assert first.startswith("rank 2 is gone: its connection was closed")
    assert second.startswith("rank 0 has left the group, ")
    assert second.endswith(f" all_reduce(SUM) of 10 float32; in another group it was told: {first}")


def test_what_a_future_sets_off_may_wait_for_other_futures() -> None:
    assert in_processes(ranks.nested, 2) == [[2.0, 4.0, 8.0, 16.0]] * 2


def test_a_killed_rank_is_named() -> None:
    assert (
        in_processes(ranks.killed, 3, dead=(ranks.VICTIM,))
        == ["rank 1 is gone: its connection was closed"] * 2
    )


@pytest.mark.parametrize("job", [ranks.killed_in_training, ranks.killed_in_half_training])
def test_a_rank_that_is_killed_in_training_is_named_by_ddp(job: Callable[..., str]) -> None:
    """DDP's C++ took the error of a Python Future for a tensor, and ended the process."""
    for said in in_processes(job, 3, dead=(ranks.VICTIM,)):
        assert "TransportError: rank 1 is gone: its connection was closed" in said


def test_a_stopped_rank_is_named_within_the_time_out() -> None:
    said = in_processes(ranks.stopped, 3, timeout_s=4)  # the others have to get a processor, too
    assert "rank 1 does not answer" in said[0]  # on a busy machine, the time was over
    assert "rank 1 does not answer" in said[2]


def test_a_rank_that_does_not_come_is_named_on_every_rank() -> None:
    assert set(in_processes(ranks.absent, 3, timeout_s=2)) == {
        "collective 1 of group 0 did not finish before the timeout was over: rank 0, 2 called "
        "all_reduce(SUM) of 10 float32; rank 1 has not called it"
    }


@pytest.mark.parametrize(
    ("role", "differs"),
    [
        (ranks.of_another_size, "rank 1 called all_reduce(SUM) of 11 float32"),
        (ranks.another_operation, "rank 1 called broadcast from rank 1 of 2000000 float32"),
        (ranks.in_another_order, "rank 1 called all_reduce(SUM) of 10 float32"),
        (ranks.uneven, "with parts of different sizes"),
    ],
)
def test_ranks_that_disagree_are_all_told_the_same(role: Any, differs: str) -> None:
    said = in_processes(role, 3, timeout_s=5)
    assert len(set(said)) == 1
    assert said[0].startswith("ranks disagree on collective 1 of group 0: ")
    assert differs in said[0]


def test_who_needs_a_rank_that_has_left_is_told() -> None:
    said = in_processes(ranks.gone_home, 2)
    assert said[0].startswith("rank 1 has left the group, ")
    assert said[1] == "home"


def test_a_process_that_ends_without_a_word_is_missed_by_who_needs_it_only() -> None:
    (received, error), (_, other) = in_processes(ranks.gone_without_a_word, 3, dead=(ranks.VICTIM,))
    assert received == 1
    for said in (error, other):
        assert said.startswith("rank 1 is gone: its connection was closed")


def test_a_tensor_is_let_go_when_its_collective_has_been_waited_for() -> None:
    assert in_processes(ranks.let_go, 2) == [[True] * 3] * 2


def test_transfers_that_nobody_waits_for_begin_at_once() -> None:
    assert max(in_processes(ranks.unattended, 2)) < 1.25  # 2.5 s at a look every 50 ms


def test_strangers_are_turned_away_and_counted() -> None:
    (strangers, total), _ = in_processes(ranks.beleaguered, 2)
    assert strangers >= 5
    assert total == 2000


def test_connections_are_never_begun_by_bbr() -> None:
    if not kernels_default().startswith("bbr"):
        pytest.skip("this kernel's default is not BBR: there is nothing to replace")
    chosen = congestion.congestion_control()
    assert chosen.name in ("cubic", "reno")
    with rendezvous.listening(None) as listener:
        address = listener.getsockname()
        with socket.socket(listener.family) as connection:
            assert congestion.choose(connection) == chosen
            connection.connect(address)
            select.select([listener], [], [], 5)
            accepted, _ = listener.accept()
            with accepted:
                for each in (connection, accepted):
                    assert congestion.name_of(each) == chosen.name


class Kernel:
    """A socket of a kernel with the features and limits of a test."""

    def __init__(self, default: str, refuses: dict[str, int]) -> None:
        self.has, self._refuses = default, refuses

    def getsockopt(self, level: int, option: int, most: int) -> bytes:
        assert (level, option) == (socket.IPPROTO_TCP, socket.TCP_CONGESTION)
        return self.has.encode().ljust(most, b"\0")

    def setsockopt(self, level: int, option: int, name: bytes) -> None:
        assert (level, option) == (socket.IPPROTO_TCP, socket.TCP_CONGESTION)
        number = self._refuses.get(name.decode(), 0)
        if number:
            raise OSError(number, os.strerror(number))
        self.has = name.decode()


@pytest.mark.parametrize(
    ("default", "refuses", "said"),
    [
        ("cubic", {}, "cubic: the kernel's default"),
        ("dctcp", {"cubic": errno.EPERM}, "dctcp: the kernel's default"),
        ("bbr", {}, "cubic: in place of the kernel's default, bbr"),
        (
            "bbr2",
            {"cubic": errno.EPERM},
            "reno: in place of the kernel's default, bbr2; cubic is not allowed here",
        ),
        (
            "bbr",
            {"cubic": errno.ENOENT},
            "reno: in place of the kernel's default, bbr; cubic is not available here",
        ),
        (
            "bbr",
            {"cubic": errno.EPERM, "reno": errno.EPERM},
            "bbr: the kernel's default; cubic is not allowed here; reno is not allowed here",
        ),
    ],
)
def test_the_best_congestion_control_that_is_allowed_is_taken(
    default: str, refuses: dict[str, int], said: str
) -> None:
    kernel = Kernel(default, refuses)
    chosen = congestion.choose(cast(socket.socket, kernel))
    assert str(chosen) == said
    assert kernel.has == chosen.name


def test_an_ordinary_user_gets_what_the_kernel_allows() -> None:
    """The test sets the limits even if it runs as root, which has none."""
    program = "from fullwire.transport.congestion import congestion_control as c; print(c().name)"
    command = [sys.executable, "-c", program]
    if os.geteuid() == 0:
        dropping = ["setpriv", "--bounding-set=-net_admin", "--inh-caps=-net_admin"]
        command = [*dropping, *command]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    allowed = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control").read_text().split()
    default = kernels_default()
    in_place_of_bbr = next((name for name in ("cubic", "reno") if name in allowed), default)
    expected = in_place_of_bbr if default.startswith("bbr") else default
    assert done.stdout == f"{expected}\n"


def kernels_default() -> str:
    return Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()


def test_a_route_that_names_a_congestion_control_has_its_way() -> None:
    chosen = congestion.CongestionControl("cubic", "the kernel's default")
    with socket.socket() as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")
        said = congestion.in_use(chosen, [connection.fileno()])
    assert str(said) == "reno: a route between the ranks names it"
    assert congestion.in_use(chosen, []) == chosen


def test_torch_finds_the_backend_by_itself_and_loads_nothing_for_it() -> None:
    found = importlib.metadata.entry_points(group="torch.backends")
    assert [each.value for each in found if each.name == "fullwire"] == [
        "fullwire.transport:register"
    ]
    code = (
        "import torch, sys, torch.distributed as dist\n"
        "assert 'fullwire' in dist.Backend.backend_list\n"
        "print([m for m in sys.modules if m.startswith('fullwire')])"
    )
    command = [sys.executable, UNCOMPILED, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['fullwire.version', 'fullwire', 'fullwire.transport']"


def test_a_recorded_job_tells_when_each_bucket_was_on_the_wire(tmp_path: Path) -> None:
    job = [UNCOMPILED, str(Path(__file__).parents[1] / "jobs" / "on_fullwire.py")]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = ["-m", "fullwire", "record", "-o", str(tmp_path / "job.run"), "--"]
    subprocess.run(
        [sys.executable, *command, sys.executable, job[0], *torchrun, *job],
        env={**os.environ, "FULLWIRE_WIRE": "bf16"},
        check=True,
        capture_output=True,
    )
    run = fw.read(tmp_path / "job.run")
    assert run.complete, run.missing
    assert run.facts.backend == "fullwire"
    assert run.facts.wire == "bf16"
    assert 1e-7 < (run.facts.wire_error or 0) < 1e-4
    assert (run.facts.wire_messages or 0) >= 5 * 2  # steps, buckets
    assert (run.facts.wire_widened, run.facts.wire_stopped) == (0, None)
    [rounding] = [each for each in fw.explain(run).evidence if each.key == "rounded_on_wire"]
    assert sentence(rounding).startswith("Gradients traveled as bf16: 0.")
    assert sentence(rounding).endswith("% of their size was lost.")
    assert run.facts.transport_congestion == str(congestion.congestion_control())
    buckets = run.collectives.rows(run.collectives.op == "allreduce")
    assert len(buckets) >= 2 * 5 * 2  # ranks, steps, buckets
    assert (buckets.issue_ns <= buckets.start_ns).all()
    assert (buckets.start_ns < buckets.end_ns).all()
    for rank in (0, 1):  # one after the other, each begun after the last had ended
        own = buckets.rows(buckets.rank == rank)
        assert (own.start_ns[1:] >= own.end_ns[:-1]).all()
    check_carried(run, buckets)


def test_what_packing_has_cost_is_told_in_one_sentence() -> None:
    recorded = Provenance(origin="measured", source="a test")
    told = Facts(
        wire="fp16",
        wire_error=4e-6,
        wire_messages=2000,
        wire_widened=3,
        wire_stopped="collective 7",
    )
    [found] = rounding_evidence(Run(provenance=recorded, facts=told))
    assert sentence(found) == (
        "Gradients traveled as fp16: 0.20% of their size was lost, and 3 of 2,000 messages "
        "exceeded its range and had a wider one. After collective 7 the error was above the limit, "
        "and all traveled as float32."
    )
    guarded = Facts(hook="fullwire.compress(int8)", compression_error=1e-4, compression_stopped=26)
    [found] = rounding_evidence(Run(provenance=recorded, facts=guarded))
    assert "After 26 steps the error was above the limit" in sentence(found)
    assert not [*rounding_evidence(Run(provenance=recorded))]


def test_a_profiler_sees_collectives_until_they_end(tmp_path: Path) -> None:
    in_processes(partial(ranks.profiled, str(tmp_path)), 2)
    table = fw.read(tmp_path).collectives
    for rank in (0, 1):
        own = table.rows(table.rank == rank)
        assert own.op.tolist() == ["allreduce", "barrier", "broadcast"]
        assert (own.end_ns > own.issue_ns).all()
    waited_ns = table.end_ns - table.issue_ns
    assert waited_ns[(table.rank == 0) & (table.op == "allreduce")] > 150_000_000


def test_a_profiler_may_be_put_away_as_soon_as_a_collective_has_ended() -> None:
    assert in_processes(ranks.profiled_in_turns, 2) == [40] * 2


def check_carried(run: fw.Run, buckets: Collectives) -> None:
    """Check that the transport itself reports every bucket, without a request."""
    carried = run.carried
    assert len(carried) == len(run.collectives)
    by_key = {key: row for row, key in enumerate(keys(carried))}
    told = carried.rows(np.array([by_key[key] for key in keys(buckets)]))
    assert (told.begun_ns <= told.heard_ns).all()
    assert (told.heard_ns < told.end_ns).all()
    assert (told.end_ns == buckets.end_ns).all()
    assert (told.begun_ns <= buckets.start_ns).all()
    # 2 (N-1)/N of the bytes, with two ranks, in half the bytes and with a head for each chunk.
    # Biases, one number in 65, travel once more as float32.
    assert (told.sent_bytes * 2 > buckets.bytes * 1.01).all()
    assert (told.sent_bytes * 2 <= buckets.bytes * 1.02).all()
    assert (told.reducing_ns > 0).all()
    found = fw.explain(run, bandwidth="10Gbps")
    told_by = {"transport_utilization", "transport_time"}  # loopback may pass any rate
    [said] = [each for each in found.evidence if each.key in told_by]
    assert 0 < said.value <= 1
    assert found.account["unexplained"] < 0.05 * found.step_s


def keys(table: Collectives | Carried) -> list[tuple[int, str, int]]:
    columns = (table.rank, table.group, table.sequence)
    return list(zip(*(each.tolist() for each in columns), strict=True))
