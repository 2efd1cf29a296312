"""Trainings on a wire: the packets of hosts, one by one, and captures of them at some place.

A collective is a series of rounds, in which hosts send each other amounts. A host begins its next
round when it has sent and received the amounts of the round before. So the model pipelines rings, a
slow link delays the other hosts, and they wait for a late host, as on real networks.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from ipaddress import ip_address

import numpy as np
from numpy.typing import NDArray

Amount = tuple[int, int, int]  # source, target, bytes
Round = list[Amount]
Collective = Callable[[int], list[Round]]
MS = 10**6
BEGIN_NS = 1_700_000_000 * 10**9


# ---------------------------------------------------------------------------------------------
# Collectives as rounds.


def ring(order: Sequence[int], ranks: int | None = None) -> Collective:
    """All-reduce around a ring of hosts; each host has the same number of ranks."""
    n = ranks or len(order)
    steps = 2 * (n - 1)

    def rounds(size: int) -> list[Round]:
        shares = np.diff(np.linspace(0, 2 * (n - 1) / n * size, steps + 1).astype(np.int64))
        around = list(zip(order, [*order[1:], order[0]], strict=True))
        return [[(a, b, int(share)) for a, b in around] for share in shares]

    return rounds


def gathered(order: Sequence[int]) -> Collective:
    """All-gather, or reduce-scatter, around a ring."""
    n = len(order)

    def rounds(size: int) -> list[Round]:
        around = list(zip(order, [*order[1:], order[0]], strict=True))
        return [[(a, b, size // n) for a, b in around] for _ in range(n - 1)]

    return rounds


def at_once(*parts: Collective) -> Collective:
    """Several collectives side by side, each with its share."""

    def rounds(size: int) -> list[Round]:
        each = [part(size // len(parts)) for part in parts]
        most = max(map(len, each))
        return [[amount for one in each if n < len(one) for amount in one[n]] for n in range(most)]

    return rounds


def halving_doubling(hosts: int) -> Collective:
    def rounds(size: int) -> list[Round]:
        down, apart, share = [], 1, size
        while apart < hosts:
            share //= 2
            down.append([(host, host ^ apart, share) for host in range(hosts)])
            apart *= 2
        return [*down, *reversed(down)]

    return rounds


def tree(above: Sequence[int | None], share: float = 1.0) -> Collective:
    """Reduce to the root and broadcast from there: `above[host]` is its parent."""

    def depth(host: int) -> int:
        parent = above[host]
        return 0 if parent is None else 1 + depth(parent)

    def rounds(size: int) -> list[Round]:
        most = max(map(depth, range(len(above))))
        part = round(size * share)
        up = [
            [(h, p, part) for h, p in enumerate(above) if p is not None and depth(h) == level]
            for level in range(most, 0, -1)
        ]
        return [*up, *([(p, h, part) for h, p, part in each] for each in reversed(up))]

    return rounds


def double_tree(hosts: int) -> Collective:
    """NCCL's: a tree whose leaves are the odd hosts, and its mirror, each with half."""
    above: list[int | None] = [None] * hosts
    for host in range(1, hosts):
        bit = host & -host
        parent = (host ^ bit) | bit << 1
        above[host] = host ^ bit if parent >= hosts else parent
    mirror = [None if p is None else hosts - 1 - p for p in reversed(above)]
    one, other = tree(above, 0.5), tree(mirror, 0.5)

    def rounds(size: int) -> list[Round]:
        a, b = one(size), other(size)
        return [
            (a[n] if n < len(a) else []) + (b[n] if n < len(b) else [])
            for n in range(max(len(a), len(b)))
        ]

    return rounds


def all_to_all(hosts: Sequence[int]) -> Collective:
    """Every host sends each other host its share; with the gradient of an all-reduce twice."""

    def rounds(size: int) -> list[Round]:
        share = size // len(hosts)
        return [[(a, b, share) for a in hosts for b in hosts if a != b]]

    return rounds


def servers(count: int, hosts: int) -> Collective:
    """Workers push gradients to the servers, which come first, and pull parameters."""

    def rounds(size: int) -> list[Round]:
        push = [(w, s, size // count) for w in range(count, hosts) for s in range(count)]
        return [push, [(s, w, part) for w, s, part in push]]

    return rounds


def hierarchy(groups: int, each: int) -> Collective:
    """Groups reduce to their leader, leaders reduce around a ring, and leaders broadcast."""

    def rounds(size: int) -> list[Round]:
        up = [(g * each + n, g * each, size) for g in range(groups) for n in range(1, each)]
        between = ring([g * each for g in range(groups)])(size)
        return [up, *between, [(b, a, part) for a, b, part in up]]

    return rounds


# ---------------------------------------------------------------------------------------------
# Collectives take time.


@dataclass(frozen=True, kw_only=True)
class Sent:
    """Bytes that go from one host to another, evenly over some time."""

    source: int
    target: int
    bytes: int
    start_ns: float
    end_ns: float
    connection: int = 0


@dataclass(kw_only=True)
class Network:
    """Hosts with links; the traffic played on them is kept."""

    hosts: int
    rate_bps: float = 1e9
    slow_bps: dict[int, float] = field(default_factory=dict)  # of the host's outgoing data
    seed: int = 0
    latency_ns: float = 30_000
    jitter: float = 0.02  # of a transfer's time
    connections: int = 1  # between two hosts, which share the data
    sent: list[Sent] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.now_ns = np.full(self.hosts, 200.0 * MS)
        self._random = np.random.default_rng(self.seed)

    def play(self, rounds: Iterable[Round]) -> None:
        """Make hosts send, each as soon as it has the data of the round before."""
        for each in rounds:
            out = np.bincount([a for a, _, _ in each], [s for _, _, s in each], self.hosts)
            came = np.bincount([b for _, b, _ in each], [s for _, _, s in each], self.hosts)
            after = self.now_ns.copy()
            for source, target, size in each:
                rate = self.slow_bps.get(source, self.rate_bps)
                lasts = 8e9 * max(out[source] / rate, came[target] / self.rate_bps)
                lasts *= 1 + self.jitter * self._random.random()
                start = self.now_ns[source]
                self.send(source, target, size, start, lasts_ns=lasts)
                after[source] = max(after[source], start + lasts)
                after[target] = max(after[target], start + lasts + self.latency_ns)
            self.now_ns = after

    def send(
        self,
        source: int,
        target: int,
        size: int,
        start_ns: float,
        *,
        lasts_ns: float,
        connection: int = 0,
    ) -> None:
        """Send a share on each of the connections."""
        for number in range(self.connections):
            share = size // self.connections + (number < size % self.connections)
            if share:
                self.sent.append(
                    Sent(
                        source=source,
                        target=target,
                        bytes=share,
                        start_ns=start_ns,
                        end_ns=start_ns + lasts_ns,
                        connection=connection + number,
                    )
                )

    def ends_ns(self) -> float:
        return max(each.end_ns for each in self.sent)

    def compute(self, ms: float, late: dict[int, float] | None = None) -> None:
        """Make all hosts compute, some of them longer."""
        self.now_ns = self.now_ns + ms * MS * (1 + 0.02 * self._random.random(self.hosts))
        for host, more_ms in (late or {}).items():
            self.now_ns[host] += more_ms * MS

    def upload(self, source: int, target: int, size: int) -> None:
        """Make one host send other data, without any other host waiting for it."""
        lasts_ns = 8e9 * size / self.rate_bps
        self.send(source, target, size, float(self.now_ns[source]), lasts_ns=lasts_ns)


@dataclass(frozen=True, kw_only=True)
class Training:
    """The settings of a training."""

    collective: Collective
    gradient: int = 2_000_000
    iterations: int = 12
    compute_ms: Callable[[int], float] | float = 40.0
    buckets: Sequence[float] = (1.0,)
    between_ms: float = 0.0  # time between buckets, in which the backward pass goes on
    broadcast: Collective | None = None
    every: int = 0  # iterations between two calls of `pause`
    pause: Callable[[Network], None] | None = None
    late: dict[int, float] | None = None

    def on(self, network: Network) -> Network:
        """Play it on a network."""
        if self.broadcast is not None:
            network.play(self.broadcast(self.gradient))
            network.compute(120)
        for iteration in range(self.iterations):
            if self.pause is not None and self.every and iteration and iteration % self.every == 0:
                self.pause(network)
            ms = self.compute_ms(iteration) if callable(self.compute_ms) else self.compute_ms
            network.compute(ms, self.late)
            for part in self.buckets:
                network.play(self.collective(round(part * self.gradient)))
                if self.between_ms:
                    network.compute(self.between_ms)
        return network


def spread(hosts: int) -> Collective:
    """A broadcast from host 0 along a binary tree."""

    def rounds(size: int) -> list[Round]:
        return [
            [(host, host + half, size) for host in range(half) if host + half < hosts]
            for half in (1, 2, 4, 8)
            if half < hosts
        ]

    return rounds


# ---------------------------------------------------------------------------------------------
# Data becomes packets, and packets become captures.


@dataclass(frozen=True, eq=False, kw_only=True)
class Packets:
    """Packets in order of time, as columns."""

    time_ns: NDArray[np.int64]
    source: NDArray[np.int64]
    target: NDArray[np.int64]
    connection: NDArray[np.int64]
    sequence: NDArray[np.int64]
    payload: NDArray[np.int64]
    acknowledged: NDArray[np.int64]

    def rows(self, chosen: NDArray[np.bool_] | NDArray[np.int64]) -> Packets:
        names = (each.name for each in fields(self))
        return Packets(**{name: getattr(self, name)[chosen] for name in names})


def packets(
    sent: Iterable[Sent],
    *,
    segment: int = 1448,
    burst: int = 1,
    first_sequence: int = 1,
    acknowledge: int = 4,
    round_trip_ns: int = 60_000,
) -> Packets:
    """Cut the data into packets of some segments each, with acknowledgements back."""
    ordered = sorted(sent, key=lambda each: each.start_ns)
    size = np.array([each.bytes for each in ordered], np.int64)
    most = segment * burst
    count = -(-size // most)
    of = np.repeat(np.arange(len(ordered)), count)
    place = np.arange(len(of)) - np.repeat(np.cumsum(count) - count, count)
    payload = np.minimum(size[of] - place * most, most)
    start = np.array([each.start_ns for each in ordered])[of]
    lasts = np.array([each.end_ns - each.start_ns for each in ordered])[of]
    time = (start + lasts * (place + 0.5) / count[of]).astype(np.int64) + BEGIN_NS
    ends = [
        np.array([getattr(each, name) for each in ordered], np.int64)[of]
        for name in ("source", "target", "connection")
    ]
    way = (ends[2] * 64 + ends[0]) * 64 + ends[1]
    # Bytes of one connection follow each other in the order of the sends, at any packet times.
    sequence = np.zeros(len(of), np.int64)
    for each in np.unique(way):
        rows = np.flatnonzero(way == each)
        sequence[rows] = first_sequence + np.cumsum(payload[rows]) - payload[rows]
        time[rows] = np.maximum.accumulate(time[rows])
    answered = np.flatnonzero((place + 1) % acknowledge == 0)
    zero = np.zeros(len(answered), np.int64)
    columns = {
        "time_ns": (time, time[answered] + round_trip_ns),
        "source": (ends[0], ends[1][answered]),
        "target": (ends[1], ends[0][answered]),
        "connection": (ends[2], ends[2][answered]),
        "sequence": (sequence, zero + first_sequence),
        "payload": (payload, zero),
        "acknowledged": (np.zeros(len(of), np.int64), (sequence + payload)[answered]),
    }
    joined = Packets(**{name: np.concatenate(both) for name, both in columns.items()})
    return joined.rows(np.argsort(joined.time_ns, kind="stable"))


def address(host: int, version: int = 4) -> str:
    return f"10.0.0.{host + 1}" if version == 4 else f"fd00::{host + 1:x}"


@dataclass(frozen=True, kw_only=True)
class Capturing:
    """The settings of a capture."""

    link: str = "ethernet"  # or vlan, vxlan, cooked, cooked2, raw
    version: int = 4
    transport: str = "tcp"  # or udp, roce
    snap: int = 96
    ahead_ns: int = 0  # of its clock
    format: str = "pcap"  # or pcapng
    resolution: int = 9  # pcapng: decimal digits of a second


_LINKS = {"ethernet": 1, "vlan": 1, "vxlan": 1, "cooked": 113, "cooked2": 276, "raw": 101}


def capture(seen: Packets, how: Capturing | None = None) -> bytes:
    """Write packets as a capture."""
    how = how or Capturing()
    heads, length = _frames(seen, how)
    captured = np.minimum(length, min(how.snap, heads.shape[1]))
    time = seen.time_ns + how.ahead_ns
    if how.format == "pcap":
        begin = struct.pack("<IHHiIII", 0xA1B23C4D, 2, 4, 0, 0, how.snap, _LINKS[how.link])
        record = np.zeros((len(time), 16 + heads.shape[1]), np.uint8)
        words = np.stack([time // 10**9, time % 10**9, captured, length], axis=1).astype("<u4")
        record[:, :16] = words.view(np.uint8).reshape(len(time), 16)
        record[:, 16:] = heads
        keep = np.arange(record.shape[1])[None, :] < 16 + captured[:, None]
        return begin + record[keep].tobytes()
    return _pcapng(heads, length, captured, time, how)


def _pcapng(
    heads: NDArray[np.uint8],
    length: NDArray[np.int64],
    captured: NDArray[np.int64],
    time: NDArray[np.int64],
    how: Capturing,
) -> bytes:
    from tests import packets as p

    parts = [p.section(), p.interface(_LINKS[how.link], resolution=how.resolution)]
    ticks = time // 10 ** (9 - how.resolution)
    for head, size, kept, tick in zip(heads, length, captured, ticks, strict=True):
        data = head[:kept].tobytes()
        body = struct.pack("<IIIII", 0, int(tick) >> 32, int(tick) % 2**32, len(data), int(size))
        parts.append(p.block(6, body + data))
    return b"".join(parts)


def _frames(seen: Packets, how: Capturing) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return the headers of all packets, a row each, and the lengths of frames."""
    body, around = _transports(seen, how)
    total = seen.payload + around
    frame = _internet(seen, body, total, how.version, {"tcp": 6}.get(how.transport, 17))
    total = total + (20 if how.version == 4 else 40)
    kind = 0x0800 if how.version == 4 else 0x86DD
    before = {
        "ethernet": bytes(12) + struct.pack(">H", kind),
        "vlan": bytes(12) + struct.pack(">HHH", 0x8100, 7, kind),
        "cooked": b"\x00\x03" + bytes(12) + struct.pack(">H", kind),  # to somebody else
        "cooked2": struct.pack(">HHIHB", kind, 0, 3, 1, 3) + bytes(9),
        "raw": b"",
        "vxlan": bytes(12) + struct.pack(">H", kind),
    }[how.link]
    frame = _before(before, frame)
    total = total + len(before)
    if how.link == "vxlan":
        outer = np.zeros((len(total), 16), np.uint8)
        _put(outer, 0, np.full(len(total), 50_000), ">u2")
        _put(outer, 2, np.full(len(total), 4789), ">u2")
        _put(outer, 4, total + 16, ">u2")
        outer[:, 8] = 8
        total = total + 16
        frame = _internet(seen, np.hstack([outer, frame]), total, 4, 17)
        frame = _before(bytes(12) + b"\x08\x00", frame)
        total = total + 34
    return frame, total


def _transports(seen: Packets, how: Capturing) -> tuple[NDArray[np.uint8], int]:
    count = len(seen.time_ns)
    is_first = seen.source < seen.target
    port = 40_000 + seen.connection
    ports = (np.where(is_first, port, 29_500), np.where(is_first, 29_500, port))
    if how.transport == "tcp":
        head = np.zeros((count, 32 + 24), np.uint8)
        _put(head, 0, ports[0], ">u2")
        _put(head, 2, ports[1], ">u2")
        _put(head, 4, seen.sequence % 2**32, ">u4")
        _put(head, 8, seen.acknowledged % 2**32, ">u4")
        head[:, 12], head[:, 13] = 8 << 4, np.where(seen.acknowledged > 0, 16, 0)
        head[:, 20:22] = 1, 1  # no operation, twice, and time stamps
        head[:, 22:24] = 8, 10
        return head, 32
    head = np.zeros((count, 8 + 16), np.uint8)
    _put(head, 0, ports[0], ">u2")
    _put(head, 2, ports[1], ">u2")
    around = 8
    if how.transport == "roce":
        around = 8 + 12 + 4
        _put(head, 2, np.full(count, 4791), ">u2")
        head[:, 8] = np.where(seen.payload > 0, 7, 17)  # write middle, acknowledgement
        _put(head, 12, 17 + seen.connection, ">u4")
        _put(head, 16, _numbers(seen) % 2**24, ">u4")
    _put(head, 4, np.minimum(seen.payload + around, 65_535), ">u2")
    return head, around


def _numbers(seen: Packets) -> NDArray[np.int64]:
    """Number the packets of each way, as RoCEv2 does."""
    way = (seen.connection * 64 + seen.source) * 64 + seen.target
    number = np.zeros(len(way), np.int64)
    for each in np.unique(way):
        rows = np.flatnonzero(way == each)
        number[rows] = np.cumsum(seen.payload[rows] > 0)
    return number


def _internet(
    seen: Packets, body: NDArray[np.uint8], total: NDArray[np.int64], version: int, protocol: int
) -> NDArray[np.uint8]:
    size = 20 if version == 4 else 40
    head = np.zeros((len(total), size), np.uint8)
    hosts = int(max(seen.source.max(initial=0), seen.target.max(initial=0))) + 1
    names = [ip_address(address(host, version)).packed for host in range(hosts)]
    known = np.frombuffer(b"".join(names), np.uint8).reshape(hosts, -1)
    if version == 4:
        head[:, 0], head[:, 8], head[:, 9] = 0x45, 64, protocol
        _put(head, 2, np.where(total + 20 > 65_535, 0, total + 20), ">u2")
        head[:, 12:16], head[:, 16:20] = known[seen.source], known[seen.target]
    else:
        head[:, 0], head[:, 6], head[:, 7] = 0x60, protocol, 64
        _put(head, 4, np.where(total > 65_535, 0, total), ">u2")
        head[:, 8:24], head[:, 24:40] = known[seen.source], known[seen.target]
    return np.hstack([head, body])


def _before(constant: bytes, frame: NDArray[np.uint8]) -> NDArray[np.uint8]:
    head = np.tile(np.frombuffer(constant, np.uint8), (len(frame), 1))
    return np.hstack([head, frame])


def _put(table: NDArray[np.uint8], at: int, values: NDArray[np.int64], kind: str) -> None:
    octets = values.astype(kind).view(np.uint8).reshape(len(table), -1)
    table[:, at : at + octets.shape[1]] = octets


def seen_at(all_: Packets, host: int) -> Packets:
    return all_.rows((all_.source == host) | (all_.target == host))


def lossy(all_: Packets, share: float, seed: int = 0) -> Packets:
    """Leave packets out, as a capture does that cannot keep up."""
    return all_.rows(np.random.default_rng(seed).random(len(all_.time_ns)) >= share)


def twice(all_: Packets, later_ns: int = 2_000) -> Packets:
    """Show each packet twice, as a switch does that mirrors both of the ports."""
    both = np.repeat(np.arange(len(all_.time_ns)), 2)
    again = all_.rows(both)
    moved = replace(again, time_ns=again.time_ns + np.tile([0, later_ns], len(all_.time_ns)))
    return moved.rows(np.argsort(moved.time_ns, kind="stable"))
