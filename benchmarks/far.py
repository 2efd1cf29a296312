"""Measure the transport over a long way: the rate of one connection, and of several.

Two namespaces are joined by a line with a delay, made of two TUN devices and a relay that holds
packets back. Three kinds take turns at an all-reduce of 64 MiB: given numbers of connections, the
number that the transport chooses itself, and Gloo. The output is the median time of each and its
share of the line. The script needs root, and removes its namespaces and devices at the end.

    python benchmarks/far.py [--rate 1Gbps] [--way 20ms] [--turns 3]
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import os
import selectors
import statistics
import struct
import subprocess
import sys
import time
from collections import deque
from pathlib import Path

from fullwire.errors import UsageError
from fullwire.units import bits_per_second, seconds

NAMES = ("fw-far-a", "fw-far-b")
ADDRESSES = ("10.99.0.1", "10.99.0.2")
SIZE_BYTES = 64 * 2**20
TUNSETIFF, TUNSETOFFLOAD = 0x400454CA, 0x400454D0
IFF_TUN, IFF_NO_PI, IFF_VNET_HDR = 0x1, 0x1000, 0x4000
OFFLOADS = 0x01 | 0x02  # checksums, and segments of TCP over IPv4
CLONE_NEWNET = 0x40000000
LARGEST_PACKET = 2**17


def in_namespace(name: str) -> None:
    with open(f"/run/netns/{name}") as space:
        if ctypes.CDLL(None, use_errno=True).setns(space.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter the namespace {name}")


def device(name: str, address: str) -> int:
    """Make a device in a namespace; this process reads the packets sent there."""
    in_namespace(name)
    opened = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(
        opened, TUNSETIFF, struct.pack("16sH22x", b"far", IFF_TUN | IFF_NO_PI | IFF_VNET_HDR)
    )
    fcntl.ioctl(opened, TUNSETOFFLOAD, OFFLOADS)
    for words in (
        "link set lo up",
        f"addr add {address}/24 dev far",
        "link set far txqueuelen 20000 up",
    ):
        subprocess.run(["ip", *words.split()], check=True)
    return opened


def relay(rate_bps: float, way_s: float) -> None:
    """Pass the packets of each device to the other one, at the line's rate and after its delay."""
    ends = [device(*each) for each in zip(NAMES, ADDRESSES, strict=True)]
    on_the_way: list[deque[tuple[float, bytes]]] = [deque(), deque()]
    free_at = [0.0, 0.0]
    ready = selectors.DefaultSelector()
    for index, end in enumerate(ends):
        ready.register(end, selectors.EVENT_READ, index)
    print("ready", flush=True)
    while True:
        first = min((queue[0][0] for queue in on_the_way if queue), default=None)
        wait_s = None if first is None else max(first - time.monotonic(), 0)
        for key, _ in ready.select(wait_s):
            index = key.data
            for _ in range(64):
                try:
                    packet = os.read(ends[index], LARGEST_PACKET)
                except BlockingIOError:
                    break
                begins = max(free_at[index], time.monotonic())
                free_at[index] = begins + 8 * len(packet) / rate_bps
                on_the_way[index].append((free_at[index] + way_s, packet))
        now = time.monotonic()
        for index, queue in enumerate(on_the_way):
            while queue and queue[0][0] <= now:
                os.write(ends[1 - index], queue.popleft()[1])


def rank_main(rank: int, backend: str, port: int) -> None:
    import torch
    import torch.distributed as dist

    os.environ["GLOO_SOCKET_IFNAME"] = "far"
    dist.init_process_group(
        backend, init_method=f"tcp://{ADDRESSES[0]}:{port}", rank=rank, world_size=2
    )
    values = torch.ones(SIZE_BYTES // 4)
    for _ in range(2):  # windows open
        dist.all_reduce(values)
    dist.barrier()
    began = time.perf_counter()
    for _ in range(3):
        dist.all_reduce(values)
    took_s = (time.perf_counter() - began) / 3
    streams = getattr(dist.group.WORLD, "streams", 1)
    print(f"{took_s} {streams}", flush=True)
    dist.destroy_process_group()


def turn(backend: str, streams: str, port: int) -> tuple[float, int]:
    environment = {k: v for k, v in os.environ.items() if k != "FULLWIRE_STREAMS"}
    if streams:
        environment["FULLWIRE_STREAMS"] = streams
    ranks = [
        subprocess.Popen(
            [
                "ip",
                "netns",
                "exec",
                name,
                sys.executable,
                __file__,
                "--rank",
                str(rank),
                "--backend",
                backend,
                "--port",
                str(port),
            ],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank, name in enumerate(NAMES)
    ]
    said = [each.communicate(timeout=300)[0] for each in ranks]
    took_s, opened = said[0].split()
    return float(took_s), int(opened)


def measure(rate_bps: float, way_s: float, turns: int) -> None:
    kinds = [
        ("fullwire", "1"),
        ("fullwire", "2"),
        ("fullwire", "4"),
        ("fullwire", "8"),
        ("fullwire", ""),
        ("gloo", ""),
    ]
    found: dict[tuple[str, str], list[float]] = {kind: [] for kind in kinds}
    opened: dict[tuple[str, str], int] = {}
    for number in range(turns):
        for index, kind in enumerate(kinds):
            took_s, opened[kind] = turn(*kind, 29500 + number * len(kinds) + index)
            found[kind].append(took_s)
    limit_s = 8 * SIZE_BYTES / rate_bps * 1500 / 1448
    print(f"64 MiB between 2 ranks, {rate_bps / 1e9:g} Gbps, {2e3 * way_s:g} ms there and back")
    for kind in kinds:
        took_s = statistics.median(found[kind])
        who = (
            "gloo"
            if kind[0] == "gloo"
            else f"{opened[kind]} streams{'' if kind[1] else ', chosen'}"
        )
        print(f"{who:>20} {took_s:8.3f} s {100 * limit_s / took_s:6.1f} % of the line")


def main() -> None:
    asked = argparse.ArgumentParser()
    asked.add_argument("--rate", default="1Gbps")
    asked.add_argument("--way", default="20ms")
    asked.add_argument("--turns", type=int, default=3)
    asked.add_argument("--relay", action="store_true", help=argparse.SUPPRESS)
    asked.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    asked.add_argument("--backend", default="fullwire", help=argparse.SUPPRESS)
    asked.add_argument("--port", type=int, help=argparse.SUPPRESS)
    given = asked.parse_args()
    try:
        rate_bps, way_s = bits_per_second(given.rate), seconds(given.way)
    except UsageError as error:
        asked.error(str(error))
    if given.rank is not None:
        return rank_main(given.rank, given.backend, given.port)
    if given.relay:
        return relay(rate_bps, way_s)
    for name in NAMES:
        subprocess.run(["ip", "netns", "add", name], check=True)
    line = subprocess.Popen(
        [sys.executable, str(Path(__file__)), "--relay", "--rate", given.rate, "--way", given.way],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        if not line.stdout or line.stdout.readline() != "ready\n":
            sys.exit("the line could not be made")
        measure(rate_bps, way_s, given.turns)
    finally:
        line.terminate()
        line.wait()
        for name in NAMES:
            subprocess.run(["ip", "netns", "del", name], check=True)
    return None


if __name__ == "__main__":
    main()
