"""Roles of ranks in the tests of the transport: each function runs in a process of its own."""

from __future__ import annotations

import contextlib
import copy
import os
import signal
import socket
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import checkpoint
from torch.distributed.fsdp import fully_shard

import fullwire
import fullwire.transport.group  # loaded once, before processes are forked
from fullwire.errors import TransportError

VICTIM = 1
HALVES = dist.BuiltinCommHookType.FP16_COMPRESS
HOOKS = (None, dist.BuiltinCommHookType.ALLREDUCE, HALVES)
SILENT: list[socket.socket] = []  # strangers who hold the line and send nothing


def take_part(
    rank: int, size: int, port: int, timeout_s: float, role: Callable[..., Any], answer: Any
) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore(
        "127.0.0.1", port, None, rank == 0, timeout=timedelta(seconds=60), wait_for_workers=False
    )
    try:
        answer.send(role(rank, size, store, timedelta(seconds=timeout_s)))
    except BaseException as error:
        answer.send(error if isinstance(error, RuntimeError) else RuntimeError(repr(error)))
    answer.recv()  # until all have answered: rank 0's process is the store's


def joined(rank: int, size: int, store: Any, timeout: timedelta, name: str = "fullwire") -> None:
    dist.init_process_group(name, store=store, rank=rank, world_size=size, timeout=timeout)


def on_streams(
    streams: int, role: Callable[..., Any], rank: int, size: int, store: Any, timeout: timedelta
) -> Any:
    """Play a role with a given number of connections between two ranks."""
    os.environ["FULLWIRE_STREAMS"] = str(streams)
    return role(rank, size, store, timeout)


def of_two_minds(rank: int, size: int, store: Any, timeout: timedelta) -> None:
    """Request another number of connections than the other ranks."""
    on_streams(1 + rank, joined, rank, size, store, timeout)


def failing(role: Callable[..., Any], rank: int, size: int, store: Any, timeout: timedelta) -> str:
    """Play a role and return the error that ends it."""
    try:
        role(rank, size, store, timeout)
    except TransportError as error:
        return str(error)
    return "it ended well"


def uneven_exchanges(rank: int, size: int, store: Any, timeout: timedelta) -> bool:
    """Exchange parts, some of them large and some empty, many at once with sums."""
    joined(rank, size, store, timeout)
    rows = [[(7 * a + 3 * b) % 5 * 90_001 for b in range(size)] for a in range(size)]
    given = torch.cat([torch.full((rows[rank][b],), 10.0 * rank + b) for b in range(size)])
    received = [torch.empty(sum(row[rank] for row in rows)) for _ in range(3)]
    sums = [torch.full((250_000 * turn + 1,), float(rank)) for turn in range(3)]
    works = []
    for one, other in zip(received, sums, strict=True):
        splits = [row[rank] for row in rows]
        works += [
            dist.all_to_all_single(one, given, splits, rows[rank], async_op=True),
            dist.all_reduce(other, async_op=True),
        ]
    for work in reversed(works):
        work.wait()
    expected = torch.cat([torch.full((rows[a][rank],), 10.0 * a + rank) for a in range(size)])
    total = size * (size - 1) / 2
    dist.destroy_process_group()
    return all(torch.equal(each, expected) for each in received) and all(
        bool((each == total).all()) for each in sums
    )


def one_large_one_small(rank: int, size: int, store: Any, timeout: timedelta) -> str:
    """Call a sum that uses all connections where the others call one that uses one connection."""
    joined(rank, size, store, timeout)
    try:
        dist.all_reduce(torch.ones(2_000_000 if rank == VICTIM else 10))
    except RuntimeError as error:
        return str(error)
    return "ended"


def both_backends(rank: int, size: int, store: Any, timeout: timedelta) -> list[Any]:
    """Carry a program of collectives out on both backends and return the differences."""
    joined(rank, size, store, timeout)
    groups = {"ours": dist.group.WORLD, "theirs": dist.new_group(backend="gloo")}
    found = {name: _all_collectives(rank, size, group) for name, group in groups.items()}
    dist.destroy_process_group()
    return [
        (index, str(ours), str(theirs))
        for index, (ours, theirs) in enumerate(zip(found["ours"], found["theirs"], strict=True))
        if not torch.equal(ours, theirs)
    ]


def _all_collectives(rank: int, size: int, group: Any) -> list[Any]:
    results = []
    for count in (0, 1, 5, 1000, 270_001):
        own = torch.arange(count * size, dtype=torch.float32).remainder(13) + rank
        each = list(own.reshape(size, count).unbind()) if count else [own.clone()] * size
        for reduction in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN):
            whole = own.clone()
            dist.all_reduce(whole, reduction, group=group)
            results.append(whole)
        for root in range(size):
            copied = own.clone()
            dist.broadcast(copied, root, group=group)
            reduced = own.clone()
            dist.reduce(reduced, root, group=group)
            part = torch.empty(count)
            dist.scatter(part, each if rank == root else None, root, group=group)
            parts = [torch.empty(count) for _ in range(size)] if rank == root else None
            dist.gather(each[0].clone(), parts, root, group=group)
            results += [copied, part, *(parts or [])]
            if rank == root:
                results.append(reduced)
        lists = [torch.empty(count) for _ in range(size)]
        dist.all_gather(lists, each[1 % size].clone(), group=group)
        gathered = torch.empty(count * size)
        dist.all_gather_into_tensor(gathered, each[0].clone(), group=group)
        scattered, single, exchanged = torch.empty(count), torch.empty(count), torch.empty_like(own)
        dist.reduce_scatter(scattered, [one.clone() for one in each], group=group)
        dist.reduce_scatter_tensor(single, own.clone(), group=group)
        dist.all_to_all_single(exchanged, own.clone(), group=group)
        swapped = [torch.empty(count) for _ in range(size)]
        dist.all_to_all(swapped, [one.clone() for one in each], group=group)
        results += [*lists, gathered, scattered, single, exchanged, *swapped]
        results += _transfers(rank, size, own, group)
    many = [torch.full((1000,), float(rank + index)) for index in range(30)]
    works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in many]
    futures = [work.get_future() for work in works[::2]]
    for work in works:
        work.wait()
    unusual = _unusual(rank, size, group)
    return results + many + unusual + [future.wait()[0] for future in futures]


def _unusual(rank: int, size: int, group: Any) -> list[Any]:
    """Sum sparse tensors with different numbers of entries, some empty, and complex numbers."""
    sums = []
    for entries in (rank, 0):
        few = torch.sparse_coo_tensor(
            torch.arange(entries)[None], torch.ones(entries, 2), (size, 2)
        )
        dist.all_reduce(few, group=group)
        sums.append(few.to_dense())
    part = torch.empty(2, dtype=torch.complex64)
    pairs = torch.arange(2 * size) * (1 + 1j) + rank
    dist.reduce_scatter_tensor(part, pairs, group=group)
    gapped = torch.arange(2.0 * size).view(size, 2).t()[0] + rank
    lists = [torch.zeros(2 * size)[::2] for _ in range(size)]
    work = dist.all_gather(lists, gapped, group=group, async_op=True)
    work.wait()
    dist.reduce_scatter_tensor(summed := torch.zeros(1), gapped, group=group)
    told = work.get_future().wait()
    told += dist.barrier(group=group, async_op=True).get_future().wait()
    return [*sums, torch.view_as_real(part), *lists, *told, summed]


def _transfers(rank: int, size: int, own: Any, group: Any) -> list[Any]:
    if size == 1:
        return []
    after, before = (rank + 1) % size, (rank - 1) % size
    received = [torch.empty_like(own) for _ in range(2)]
    works = [dist.isend(own * (tag + 1), after, group=group, tag=tag) for tag in (0, 1)]
    works += [dist.irecv(received[tag], before, group=group, tag=tag) for tag in (1, 0)]
    for work in works:
        work.wait()
    return received


def trained(rank: int, size: int, store: Any, timeout: timedelta) -> list[Any]:
    """Train the same model with DDP on both backends and return both sets of weights."""
    joined(rank, size, store, timeout)
    groups = (None, dist.new_group(backend="gloo"))
    weights = [_weights(rank, group, hook) for hook in HOOKS for group in groups]
    weights += [_uneven_weights(rank, group) for group in groups]
    dist.destroy_process_group()
    return weights


def _uneven_weights(rank: int, group: Any) -> list[list[float]]:
    """Train where ranks have inputs for more and fewer steps."""
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 4)
    parallel = torch.nn.parallel.DistributedDataParallel(model, process_group=group)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    with parallel.join(divide_by_initial_world_size=False):
        for step in range(2 + 3 * rank):
            optimizer.zero_grad()
            parallel(torch.full((4, 8), step + 1.0)).square().mean().backward()
            optimizer.step()
    return [each.tolist() for each in model.parameters()]


def _weights(rank: int, group: Any, hook: Any) -> list[list[float]]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2))
    parallel = torch.nn.parallel.DistributedDataParallel(
        model, process_group=group, bucket_cap_mb=0.001
    )
    if hook:
        parallel._register_builtin_comm_hook(hook)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    torch.manual_seed(rank)
    for _ in range(5):
        optimizer.zero_grad()
        parallel(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
    return [parameter.flatten().tolist() for parameter in model.parameters()]


def compiled(rank: int, size: int, store: Any, timeout: timedelta) -> float:
    """Take the gradients of two passes of a model that torch.compile traces."""
    joined(rank, size, store, timeout)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1, bias=False))
    traced = torch.compile(model, backend="eager")
    for _ in range(2):  # in the second pass DDP makes its buckets anew
        traced(torch.ones(2, 4)).sum().backward()
    dist.destroy_process_group()
    return float(model.module.weight.grad.sum())


def sharded(rank: int, size: int, store: Any, timeout: timedelta) -> list[float]:
    """Train a model with FSDP2 on the default backend, and return its weights."""
    joined(rank, size, store, timeout, "fullwire" if timeout.seconds > 20 else "gloo")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2))
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(rank)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
    weights = [value for p in model.parameters() for value in p.full_tensor().flatten().tolist()]
    dist.barrier()
    dist.destroy_process_group()
    return weights


def saved(folder: str, rank: int, size: int, store: Any, timeout: timedelta) -> list[float]:
    """Save a sharded model while training goes on, lose it and load it again."""
    joined(rank, size, store, timeout)
    model = torch.nn.Linear(4, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    fully_shard(model)
    kept = model.state_dict()
    checkpoint.async_save(kept, checkpoint_id=folder).result()
    torch.nn.init.zeros_(model.weight)
    checkpoint.load(kept, checkpoint_id=folder)
    weights: list[float] = model.weight.full_tensor().flatten().tolist()
    dist.destroy_process_group()
    return weights


def mistaken(rank: int, size: int, store: Any, timeout: timedelta) -> list[str]:
    """Make mistakes that torch lets pass, and return the errors."""
    joined(rank, size, store, timeout)
    whole, part = torch.ones(size, dtype=torch.int32), torch.ones(1)
    mistakes: list[Callable[[], Any]] = [
        lambda: dist.all_gather_into_tensor(whole, part),
        lambda: dist.reduce_scatter_tensor(part, whole),
        lambda: dist.all_reduce(part, dist._make_nccl_premul_sum(2.0)),
    ]
    said = []
    for make in mistakes:
        try:
            make()
        except ValueError as error:
            said.append(str(error))
    dist.destroy_process_group()
    return said


def made_again(rank: int, size: int, store: Any, timeout: timedelta) -> list[tuple[int, int]]:
    """Make and destroy a group many times, and count the open files after each."""
    counts = []
    for attempt in range(12):
        joined(rank, size, dist.PrefixStore(str(attempt // 2), store), timeout)
        half = dist.new_group([0])
        dist.all_reduce(torch.ones(300_000))
        dist.all_reduce(torch.ones(10), async_op=True).get_future().wait()
        if rank == 0:
            dist.all_reduce(torch.ones(3), group=half)
        dist.destroy_process_group()
        counts.append((len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))))
    return counts


def forked(rank: int, size: int, store: Any, timeout: timedelta) -> tuple[int, float]:
    """Let a child that inherits the group end as any program does."""
    joined(rank, size, store, timeout)
    works = [dist.all_reduce(torch.ones(500_000), async_op=True) for _ in range(5)]
    child = os.fork()
    if child == 0:
        with contextlib.suppress(RuntimeError):  # it has no part in the group
            dist.all_reduce(torch.ones(10))
            os._exit(1)
        with contextlib.suppress(RuntimeError):
            works[0].wait()
            os._exit(1)
        dist.distributed_c10d.GroupMember.WORLD.shutdown()
        del works
        dist.distributed_c10d.GroupMember.WORLD._engine.close()
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    for work in works:
        work.wait()
    tensor = torch.ones(10)
    dist.all_reduce(tensor)
    dist.destroy_process_group()
    return status, float(tensor.sum())


def nested(rank: int, size: int, store: Any, timeout: timedelta) -> list[float]:
    """Begin the next sum in the callback of the one before, and wait there, as PowerSGD does."""
    joined(rank, size, store, timeout)

    def sum_again(before: Any) -> Any:
        doubled = before.value()[0].clone()
        return dist.all_reduce(doubled, async_op=True).get_future().wait()

    time.sleep(0.2 * rank)  # so the first sum is open when the next call is made
    chain = [dist.all_reduce(torch.ones(1000), async_op=True).get_future()]
    for _ in range(3):
        chain.append(chain[-1].then(sum_again))
    inside = chain[-1].then(lambda _: [float(each.value()[0][0]) for each in chain])
    sums = list(inside.wait())
    dist.destroy_process_group()
    return sums


def profiled(directory: str, rank: int, size: int, store: Any, timeout: timedelta) -> None:
    """Leave a trace of three collectives; rank 1 comes late to the first."""
    joined(rank, size, store, timeout)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        if rank == 1:
            store.wait(["rank 0 is there"])
            time.sleep(0.2)
        work = dist.all_reduce(torch.ones(10), async_op=True)
        if rank == 0:
            store.set("rank 0 is there", "")
        dist.barrier()
        work.get_future().wait()
        dist.broadcast(torch.ones(10), 0)
        dist.destroy_process_group()  # which leaves no Future open
    profile.export_chrome_trace(f"{directory}/rank{rank}.json")


def profiled_in_turns(rank: int, size: int, store: Any, timeout: timedelta) -> int:
    """End a profiler as soon as a collective has ended, again and again."""
    joined(rank, size, store, timeout)
    told = 0
    for turn in range(40):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            work = dist.all_reduce(torch.ones(10), async_op=True)
            work.get_future().wait() if turn % 2 else work.wait()
        told += sum(event.name == "fullwire:all_reduce" for event in profile.events())
    dist.destroy_process_group()
    return told


def killed(rank: int, size: int, store: Any, timeout: timedelta) -> str:
    joined(rank, size, store, timeout)
    if rank == VICTIM:
        os.kill(os.getpid(), signal.SIGKILL)
    return _problem(lambda: [dist.all_reduce(torch.ones(100_000)) for _ in range(100)])


def killed_in_training(rank: int, size: int, store: Any, timeout: timedelta) -> str:
    """Lose a rank between a forward and a backward pass; DDP's C++ waits for the pass's sums."""
    return _lost_in_training(rank, size, store, timeout, None)


def killed_in_half_training(rank: int, size: int, store: Any, timeout: timedelta) -> str:
    """Lose a rank as above, while DDP's C++ packs its data."""
    return _lost_in_training(rank, size, store, timeout, HALVES)


def _lost_in_training(rank: int, size: int, store: Any, timeout: timedelta, hook: Any) -> str:
    joined(rank, size, store, timeout)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(100, 100))
    if hook:
        model._register_builtin_comm_hook(hook)

    def train() -> None:
        for step in range(1000):
            loss = model(torch.ones(2, 100)).sum()
            if rank == VICTIM and step == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            loss.backward()

    return _problem(train)


def killed_with_a_child(rank: int, size: int, store: Any, timeout: timedelta) -> str:
    joined(rank, size, store, timeout)
    if rank == VICTIM:
        parent = os.getpid()
        if os.fork() == 0:
            os.kill(parent, signal.SIGKILL)
            time.sleep(3)
            os._exit(0)
    return _problem(lambda: [dist.all_reduce(torch.ones(100_000)) for _ in range(1_000_000)])


def in_two_groups(rank: int, size: int, store: Any, timeout: timedelta) -> str:
    """Rank 0 loses rank 2, and rank 1 waits for rank 0 elsewhere."""
    joined(rank, size, store, timeout)
    pair = dist.new_group([0, 1])
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1:
        store.set("rank 1 is about to wait", "")
        return _problem(lambda: dist.all_reduce(torch.ones(10), group=pair))
    store.wait(["rank 1 is about to wait"])
    time.sleep(0.3)  # rank 1 waits by then
    return _problem(lambda: dist.all_reduce(torch.ones(10)))


def stopped(rank: int, size: int, store: Any, timeout: timedelta) -> str:
    joined(rank, size, store, timeout)
    if rank == VICTIM:
        if os.fork() == 0:
            time.sleep(1.5 * timeout.total_seconds())
            os.kill(os.getppid(), signal.SIGCONT)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGSTOP)
    return _problem(lambda: [dist.all_reduce(torch.ones(1_000_000)) for _ in range(100)])


def absent(rank: int, size: int, store: Any, timeout: timedelta) -> str:
    joined(rank, size, store, timeout)
    if rank == VICTIM:
        time.sleep(2 * timeout.total_seconds())
    return _problem(lambda: dist.all_reduce(torch.ones(10)))


def of_another_size(rank: int, size: int, store: Any, timeout: timedelta) -> str:
    joined(rank, size, store, timeout)
    return _problem(lambda: dist.all_reduce(torch.ones(10 + (rank == VICTIM))))


def another_operation(rank: int, size: int, store: Any, timeout: timedelta) -> str:
    joined(rank, size, store, timeout)
    tensor = torch.ones(2_000_000)
    if rank == VICTIM:
        return _problem(lambda: dist.broadcast(tensor, VICTIM))
    return _problem(lambda: dist.all_reduce(tensor))


def in_another_order(rank: int, size: int, store: Any, timeout: timedelta) -> str:
    joined(rank, size, store, timeout)
    works: list[Callable[[], Any]] = [
        lambda: dist.all_reduce(torch.ones(10), async_op=True),
        lambda: dist.broadcast(torch.ones(10), 0, async_op=True),
    ]
    issued = [work() for work in (works if rank == VICTIM else works[::-1])]
    return _problem(lambda: [work.wait() for work in issued])


def uneven(rank: int, size: int, store: Any, timeout: timedelta) -> str:
    joined(rank, size, store, timeout)
    splits = [2] * size
    if rank == VICTIM:
        splits[0], splits[-1] = 3, 1
    rows = torch.ones(2 * size)

    def exchange() -> None:
        dist.all_to_all_single(torch.empty(2 * size), rows, [2] * size, splits)
        dist.barrier()  # the victim's data is as expected: here it gets the others' messages

    return _problem(exchange)


def gone_home(rank: int, size: int, store: Any, timeout: timedelta) -> str:
    joined(rank, size, store, timeout)
    if rank == VICTIM:
        dist.destroy_process_group()
        return "home"
    return _problem(lambda: dist.all_reduce(torch.ones(10)))


def gone_without_a_word(rank: int, size: int, store: Any, timeout: timedelta) -> tuple[float, str]:
    """Call operations that can succeed without the victim, which has ended, and then the others."""
    joined(rank, size, store, timeout)
    dist.barrier()
    if rank == VICTIM:
        os._exit(0)
    time.sleep(0.3)  # long enough to see that it is gone
    received = torch.zeros(1)
    if rank == 0:
        dist.recv(received, size - 1)
    elif rank == size - 1:
        dist.send(torch.ones(1), 0)
    return float(received), _problem(lambda: dist.all_reduce(torch.ones(10)))


def let_go(rank: int, size: int, store: Any, timeout: timedelta) -> list[bool]:
    """Return which tensors are freed once they are dropped, while an earlier receive is open."""
    joined(rank, size, store, timeout)
    if rank == 1:
        waiting = torch.ones(1)
        received = dist.irecv(waiting, 0)
    tensors = [torch.ones(10) for _ in range(3)]
    dist.all_reduce(tensors[0])
    dist.all_reduce(tensors[1], async_op=True).wait()
    dist.all_reduce(tensors[2], async_op=True).get_future().wait()
    watched = [weakref.ref(tensor) for tensor in tensors]
    del tensors
    until_s = time.monotonic() + 5  # the thread that completes Futures may still hold one
    while any(each() is not None for each in watched) and time.monotonic() < until_s:
        time.sleep(0.001)
    gone = [each() is None for each in watched]
    if rank == 0:
        dist.send(torch.ones(1), 1)
    else:
        received.wait()
    dist.destroy_process_group()
    return gone


def unattended(rank: int, size: int, store: Any, timeout: timedelta) -> float:
    """Exchange a number 50 times, and poll for it only now and then; the shortest of four times.

    Each exchange would take too long if nobody looked. A busy machine slows only some of them.
    """
    joined(rank, size, store, timeout)
    took_s = []
    for _ in range(4):
        began_s = time.monotonic()
        for _ in range(50):
            works = [dist.isend(torch.ones(1), 1 - rank), dist.irecv(torch.zeros(1), 1 - rank)]
            while not all(work.is_completed() for work in works):
                time.sleep(0.0005)
        took_s.append(time.monotonic() - began_s)
    dist.destroy_process_group()
    return min(took_s)


def _problem(work: Callable[[], Any]) -> str:
    """Return the error, and check that the group can be destroyed afterwards."""
    try:
        work()
    except RuntimeError as error:
        dist.destroy_process_group()
        others = [thread.name for thread in threading.enumerate() if "fullwire" in thread.name]
        return str(error) + "".join(others)
    return "nothing"


def beleaguered(rank: int, size: int, store: Any, timeout: timedelta) -> tuple[int, float]:
    """Meet while strangers knock at rank 0's door."""
    if rank == VICTIM:
        while not _seen(store):
            time.sleep(0.01)
        host, port, *_ = bytes(store.get(_seen(store))).decode().split(" ")
        knock_at(host, int(port))
    joined(rank, size, store, timeout)
    group = dist.group.WORLD
    tensor = torch.ones(1000)
    dist.all_reduce(tensor)
    strangers = group.strangers
    dist.destroy_process_group()
    return strangers, float(tensor.sum())


def _seen(store: Any) -> str:
    """Find the key under which rank 0 gives its address; torch decides its prefix."""
    for before in ("default_pg//cpu//", "default_pg//cpu/", "0//cpu//", "0//cpu/"):
        if store.check([f"{before}rank 0"]):
            return f"{before}rank 0"
    return ""


def knock_at(host: str, port: int) -> None:
    silent = socket.create_connection((host, port))
    socket.create_connection((host, port)).close()
    for said in (b"GET / HTTP/1.0\r\n\r\n" * 20, b"FWT4" + bytes(72), b"\x16\x03\x01" * 100):
        with socket.create_connection((host, port)) as knocking:
            knocking.sendall(said)
            knocking.settimeout(5)
            with contextlib.suppress(ConnectionResetError):
                assert knocking.recv(100) == b""
    impostor = socket.create_connection((host, port))
    impostor.sendall(b"FWT4" + (1).to_bytes(4, "big") + bytes(4) + bytes(64))
    assert len(impostor.recv(96)) == 96  # it is greeted, and cannot answer
    impostor.sendall(bytes(32))
    assert impostor.recv(1) == b""
    SILENT.append(silent)


def in_a_wire_format(rank: int, size: int, store: Any, timeout: timedelta) -> dict[str, Any]:
    """Train with DDP in bf16, exchange other tensors, and fall back to float32."""
    os.environ["FULLWIRE_WIRE"] = "bf16"
    joined(rank, size, store, timeout)
    torch.manual_seed(rank)
    whole, exact = torch.randn(50_000), torch.full((50_000,), 1 / 3, dtype=torch.float64)
    small, own = torch.full((100,), 1 / 3), torch.randn(20_000)
    pairs = torch.full((50_000,), complex(1 / 3, 1 / 7))
    whole_numbers = torch.full((50_000,), 2**20 + 1, dtype=torch.int32)
    mean = whole.double()
    for _ in range(2):
        dist.all_reduce(whole_numbers)
    dist.all_reduce(pairs)
    dist.all_reduce(mean)
    dist.all_reduce(whole)
    dist.all_reduce(exact)
    dist.all_reduce(small)
    gathered = torch.empty(size * 20_000)
    dist.all_gather_into_tensor(gathered, own)
    part = torch.empty(20_000)
    dist.reduce_scatter_tensor(part, gathered.clone(), op=dist.ReduceOp.AVG)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(200, 200))
    model(torch.randn(8, 200)).square().sum().backward()
    gradients = [parameter.grad.flatten() for parameter in model.parameters()]
    with fullwire.wire("int8", max_error=1e-9):
        before = torch.randn(50_000)
        expected = before.clone()
        dist.all_reduce(before)  # too large an error: the next sum goes as float32
        after = expected.clone()
        dist.all_reduce(after)
    with fullwire.wire("float32"):
        dist.all_reduce(expected)
    dist.destroy_process_group()
    rest = [gathered, *gradients, after]
    return {
        "error": float((whole - mean).norm() / mean.norm()),
        "is rounded": bool((whole == whole.bfloat16()).all()),
        "exact": float((exact - size / 3).abs().max()),
        "complex": float((pairs - size * complex(1 / 3, 1 / 7)).abs().max()),
        "integers": bool((whole_numbers == size**2 * (2**20 + 1)).all()),
        "small": float((small - size / 3).abs().max()),
        "part": float((part - gathered.view(size, -1)[rank]).abs().max()),
        "fallen back": bool(torch.allclose(after, expected, atol=1e-5)),
        "was rounded before": not torch.allclose(before, expected, atol=1e-5),
        "bits": [each.view(torch.int32).sum().item() for each in (whole, *rest)],
    }


def sparing_small_gradients(
    rank: int, size: int, store: Any, timeout: timedelta
) -> dict[str, list[bool]]:
    """Train with DDP on the wire as bf16; say step by step which gradients were rounded."""
    os.environ["FULLWIRE_WIRE"] = "bf16"
    joined(rank, size, store, timeout)
    torch.manual_seed(0)
    layers = [torch.nn.Sequential(torch.nn.Linear(200, 200), torch.nn.LayerNorm(200))] * 4
    plain = torch.nn.Sequential(*map(copy.deepcopy, layers), torch.nn.Linear(200, 4))
    of_sums = dist.new_group(backend="gloo")
    model = torch.nn.parallel.DistributedDataParallel(plain, bucket_cap_mb=0.3)
    torch.manual_seed(rank)
    found: dict[str, list[bool]] = {}

    def note(name: str) -> None:
        inputs = torch.randn(16, 200)
        expected = torch.autograd.grad(plain(inputs).square().sum(), [*plain.parameters()])
        model.zero_grad()
        model(inputs).square().sum().backward()
        for parameter, own in zip(plain.parameters(), expected, strict=True):
            dist.all_reduce(own, group=of_sums)
            error = float((parameter.grad - own / size).norm() / own.norm())
            kind = "small" if parameter.dim() < 2 or parameter.numel() < 1024 else "large"
            found.setdefault(f"{kind}, {name}", []).append(error > 1e-5)

    for _ in range(3):  # in the second step DDP makes its buckets anew
        note("by the variable")
    with fullwire.wire("bf16", packs_small=True):
        note("with packs_small")
    with fullwire.wire("float32"):
        note("float32")
    # Buckets that moved while the group did not pack.
    os.environ["FULLWIRE_WIRE"] = "float32"
    later = dist.new_group(backend="fullwire")
    model = torch.nn.parallel.DistributedDataParallel(plain, bucket_cap_mb=0.3, process_group=later)
    for _ in range(2):
        note("float32")
    with fullwire.wire("bf16", group=later):
        note("by a later call")
    dist.destroy_process_group()
    return found


def joining_with_no_inputs(
    rank: int, size: int, store: Any, timeout: timedelta
) -> list[list[float]]:
    """Train on the wire as bf16, where rank 0 has no inputs at all."""
    os.environ["FULLWIRE_WIRE"] = "bf16"
    joined(rank, size, store, timeout)
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(200, 200), torch.nn.Linear(200, 200)),
        bucket_cap_mb=0.1,
    )
    with model.join():
        for step in range(4 * rank):
            model(torch.full((4, 200), step + 1.0)).square().mean().backward()
    weights = [each.flatten()[:5].tolist() for each in model.parameters()]
    dist.destroy_process_group()
    return weights


def in_two_wire_formats(rank: int, size: int, store: Any, timeout: timedelta) -> None:
    """Ask for another wire format than the other ranks."""
    os.environ["FULLWIRE_WIRE"] = ("bf16", "int8")[rank % 2]
    joined(rank, size, store, timeout)


def calling_for_two_wire_formats(rank: int, size: int, store: Any, timeout: timedelta) -> None:
    """Choose another wire format than the other rank, once the group is there."""
    joined(rank, size, store, timeout)
    fullwire.wire(("bf16", "int8")[rank % 2])
    dist.all_reduce(torch.ones(50_000))


def automatically(rank: int, size: int, store: Any, timeout: timedelta) -> float:
    """Let the group choose; return from how many bytes on it packs."""
    os.environ["FULLWIRE_WIRE"] = "auto"
    joined(rank, size, store, timeout)
    values = torch.ones(300_000)
    dist.all_reduce(values)
    assert bool((values == size).all())
    packs_from = float(dist.group.WORLD.wire.automatic_from)
    dist.destroy_process_group()
    return packs_from
