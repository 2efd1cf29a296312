"""Traffic between hosts: the addresses and ranks of each host, and the bytes between two hosts.

Several addresses belong to one host if the run says so. It may know them from a hosts file, from a
capture that shows its own host, or from the sockets of a recorded job. Ranks are counted if the run
knows their hosts. The facts of each edge describe its traffic: connections, round trips, bursts and
retransmissions.

A hosts file gives the addresses of each host, and the ranks that run there:

    # name  addresses                 ranks (optional)
    node0   10.0.0.1 10.0.1.1         ranks=0-7
    node1   10.0.0.2 10.0.1.2         ranks=8-15
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fullwire.errors import UsageError
from fullwire.files import opened
from fullwire.run.endpoint import host_of
from fullwire.run.facts import Facts
from fullwire.run.run import Real, Run, Text, Whole
from fullwire.units import shown

_LEAST_HOST = 1e-3  # Share of all payload: a host with less takes no part in the training.
_LEAST_EDGE = 0.01  # Share of the largest edge's payload: an edge with less breaks no silence.
_LEAST_DESCRIBED = 0.01  # Share of the largest edge's payload.
_MOST_DESCRIBED = 64  # Number of edges.
_SILENCE_S = 1e-3  # A silence between bursts: longer than TCP's own waits, shorter than a step.
_MOST_HOSTS_BYTES = 2**26
_MOST_RANKS = 1_000_000


def median(values: ArrayLike, axis: int | None = None) -> Any:
    """Return numpy's median; numpy's own loads its masked arrays, which takes a start 6 ms."""
    ordered = np.sort(values, axis=axis)
    along, count = axis or 0, ordered.shape[axis or 0]
    if not count:
        return np.nan
    return (ordered.take((count - 1) // 2, along) + ordered.take(count // 2, along)) / 2


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Edges:
    """The flows between the hosts that matter, hosts as numbers, in time slots of one width."""

    hosts: tuple[str, ...]
    source: Whole
    target: Whole
    connection: Whole  # a number for each pair of endpoints
    slot: Whole
    payload_bytes: Whole
    wire_bytes: Whole
    packets: Whole
    retransmits: Whole
    width_ns: int
    strangers_bytes: int  # payload from or to other hosts

    def matrix(self, values: Whole | Real) -> Whole:
        """Add values up by source and target host."""
        count = len(self.hosts)
        cells = np.bincount(self.source * count + self.target, values, count * count)
        return cells.reshape(count, count).astype(np.int64)

    @property
    def edge(self) -> Whole:
        """Return each row's edge as a number."""
        return self.source * len(self.hosts) + self.target

    def main(self) -> NDArray[np.bool_]:
        """Choose the rows with payload on the edges that carry most."""
        payload = self.matrix(self.payload_bytes)
        main = np.flatnonzero(payload >= _LEAST_EDGE * payload.max(initial=1))
        return np.isin(self.edge, main) & (self.payload_bytes > 0)


def edges_of(run: Run) -> Edges:
    """Number the hosts in order of address, and leave out hosts with too little payload."""
    flows, names = run.flows, host_names(run)
    sources, source = numbered_hosts(flows.source, names)
    targets, target = numbered_hosts(flows.destination, names)

    def place(host: str) -> tuple[int, int, str]:  # names first, then addresses by their number
        address = _address(host)
        return (0, 0, host) if address is None else (address.version, int(address), host)

    everyone = sorted({*sources, *targets}, key=place)
    number = {host: at for at, host in enumerate(everyone)}
    source = np.array([number[host] for host in sources], np.int64)[source]
    target = np.array([number[host] for host in targets], np.int64)[target]
    touched = np.bincount(source, flows.payload_bytes, len(everyone))
    touched += np.bincount(target, flows.payload_bytes, len(everyone))
    chosen = touched >= _LEAST_HOST * max(int(flows.payload_bytes.sum()), 1)
    chosen &= [not _is_loopback(host) for host in everyone]
    kept = chosen[source] & chosen[target] & (source != target)
    renumbered = np.cumsum(chosen) - 1
    width_ns = int((flows.end_ns - flows.start_ns).max())
    return Edges(
        hosts=tuple(host for host, is_chosen in zip(everyone, chosen, strict=True) if is_chosen),
        source=renumbered[source[kept]],
        target=renumbered[target[kept]],
        connection=numbered_pairs(flows.source[kept], flows.destination[kept]),
        slot=flows.start_ns[kept] // max(width_ns, 1),
        width_ns=max(width_ns, 1),
        payload_bytes=flows.payload_bytes[kept],
        wire_bytes=flows.wire_bytes[kept],
        packets=flows.packets[kept],
        retransmits=flows.retransmits[kept],
        strangers_bytes=int(flows.payload_bytes[~kept].sum()),
    )


def host_names(run: Run) -> dict[str, str]:
    """Return the host of each address whose host has other known addresses, or a known name.

    Sockets give the host's name for an address. The fact `addresses` wins if it differs.
    """
    names: dict[str, str] = {}
    if len(run.sockets):
        ends = dict.fromkeys(zip(run.sockets.host.tolist(), run.sockets.flow.tolist(), strict=True))
        for host, flow in ends:
            local = host_of(flow.partition(">")[0])
            if not _is_loopback(local):
                names.setdefault(local, host)
    for of_host in filter(None, (run.facts.addresses or "").split(",")):
        host, _, addresses = of_host.partition("=")
        names |= dict.fromkeys(addresses.split("+"), host)
    return names


def ranks_by_host(run: Run, hosts: tuple[str, ...]) -> Mapping[str, list[int]] | None:
    """Return the ranks on each of these hosts, if the run has them for every host."""
    names = host_names(run)
    ranks: dict[str, list[int]] = {}
    for rank, host in enumerate(filter(None, (run.facts.hosts or "").split(","))):
        ranks.setdefault(names.get(host, host), []).append(rank)
    return {host: ranks[host] for host in hosts} if hosts and set(hosts) <= set(ranks) else None


def hosts_of(ends: Text, hosts: tuple[str, ...], names: Mapping[str, str]) -> Whole:
    """Return the number of each endpoint's host, or -1 for another."""
    number = {host: place for place, host in enumerate(hosts)}
    named, place = numbered_hosts(ends, names)
    return np.array([number.get(host, -1) for host in named], np.int64)[place]


def numbered_hosts(ends: Text, names: Mapping[str, str]) -> tuple[list[str], Whole]:
    """Return the hosts of a column, and for each row the number of its host."""
    hosts: dict[str, int] = {}
    known: dict[str, int] = {}
    for end in dict.fromkeys(ends.tolist()):
        address = host_of(end)
        known[end] = hosts.setdefault(names.get(address, address), len(hosts))
    return list(hosts), np.fromiter(map(known.__getitem__, ends.tolist()), np.int64, len(ends))


def numbered_pairs(sources: Text, targets: Text) -> Whole:
    """Number the pairs of endpoints by first appearance; each direction has its own number."""
    known: dict[tuple[str, str], int] = {}
    pairs = zip(sources.tolist(), targets.tolist(), strict=True)
    return np.array([known.setdefault(pair, len(known)) for pair in pairs], np.int64)


def _is_loopback(host: str) -> bool:
    address = _address(host)
    return address is not None and address.is_loopback


def _address(host: str) -> IPv4Address | IPv6Address | None:
    """Return a host as an address, or None for a host with a name."""
    try:
        return ip_address(host)
    except ValueError:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeFacts:
    """One edge; round trips begin at the point of capture, and are `None` if none was timed."""

    source: str
    target: str
    payload_bytes: int
    connections: int
    rtt_least_s: float | None
    rtt_median_s: float | None
    rtt_long_s: float | None
    sent_again: float  # share of the packets
    bursts: int
    burst_bytes: float  # bytes of the median burst
    burst_s: float


def edge_facts(run: Run, edges: Edges) -> tuple[EdgeFacts, ...]:
    """Describe the edges that carry payload, the largest first."""
    table = run.connections
    payload = edges.matrix(edges.payload_bytes)
    packets, again = edges.matrix(edges.packets), edges.matrix(edges.retransmits)
    names = host_names(run)
    ends = [hosts_of(column, edges.hosts, names) for column in (table.source, table.destination)]
    carries = edges.payload_bytes > 0
    silence = max(round(_SILENCE_S * 1e9 / edges.width_ns), 1)
    described = []
    for edge in np.argsort(-payload, axis=None, kind="stable")[:_MOST_DESCRIBED].tolist():
        source, target = divmod(edge, len(edges.hosts))
        least = _LEAST_DESCRIBED * payload.max()
        if not payload[source, target] or payload[source, target] < least:
            break
        rows = np.flatnonzero((ends[0] == source) & (ends[1] == target))
        timed = rows[table.rtt_samples[rows] > 0]
        # The connection with most samples shows a usual round trip.
        usual = timed[int(np.argmax(table.rtt_samples[timed]))] if len(timed) else None
        slots, place = np.unique(edges.slot[carries & (edges.edge == edge)], return_inverse=True)
        in_slot = np.bincount(place, edges.payload_bytes[carries & (edges.edge == edge)])
        first = np.flatnonzero(np.append(True, np.diff(slots) - 1 >= silence))
        last = np.append(first[1:], len(slots)) - 1
        lasts_s = (slots[last] - slots[first] + 1) * edges.width_ns * 1e-9
        described.append(
            EdgeFacts(
                source=edges.hosts[source],
                target=edges.hosts[target],
                payload_bytes=int(payload[source, target]),
                connections=int((table.payload_bytes[rows] > 0).sum()),
                rtt_least_s=float(table.rtt_least_ns[timed].min()) * 1e-9 if len(timed) else None,
                rtt_median_s=None if usual is None else float(table.rtt_median_ns[usual]) * 1e-9,
                rtt_long_s=None if usual is None else float(table.rtt_long_ns[usual]) * 1e-9,
                sent_again=float(again[source, target] / max(packets[source, target], 1)),
                bursts=len(first),
                burst_bytes=float(median(np.add.reduceat(in_slot, first))),
                burst_s=float(median(lasts_s)),
            )
        )
    return tuple(described)


def read_hosts(path: Path) -> Facts:
    """Read a hosts file as the facts `addresses` and, where it has ranks, `hosts`."""
    with opened(path) as file:
        content = file.read(_MOST_HOSTS_BYTES)
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: cannot be read: {error}") from None
    owner: dict[str, str] = {}  # the host of each address
    addresses: dict[str, list[str]] = {}
    host_of_rank: dict[int, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        place, name = f"{path}, line {number}", words[0]
        if name in addresses or "," in name or "=" in name:
            raise UsageError(f"{place}: expected a new host's name, got {shown(name)}")
        addresses[name], ranks = _of_host(words[1:], place)
        for rank in ranks:
            if host_of_rank.setdefault(rank, name) != name:
                raise UsageError(f"{place}: rank {rank} is on {host_of_rank[rank]} already")
    for name, own in addresses.items():
        if not own:
            raise UsageError(f"{path}: {name} has no address")
        for address in own:
            if owner.setdefault(address, name) != name:
                raise UsageError(f"{path}: {address} belongs to {owner[address]} and to {name}")
    if not owner:
        raise UsageError(f"{path}: expected lines like: node0 10.0.0.1 10.0.1.1 ranks=0-7")
    facts = Facts(addresses=",".join(f"{name}={'+'.join(own)}" for name, own in addresses.items()))
    if host_of_rank:
        if sorted(host_of_rank) != list(range(len(host_of_rank))):
            raise UsageError(
                f"{path}: expected ranks from 0 without holes, got {len(host_of_rank)}"
            )
        facts |= Facts(hosts=",".join(host_of_rank[rank] for rank in range(len(host_of_rank))))
    return facts


def _of_host(words: list[str], place: str) -> tuple[list[str], list[int]]:
    """Read the addresses and the ranks of the host on one line."""
    addresses: list[str] = []
    ranks: list[int] = []
    for word in words:
        if word.startswith("ranks="):
            continue
        try:
            addresses.append(str(ip_address(word)))
        except ValueError:
            raise UsageError(f"{place}: expected an address, got {shown(word)}") from None
    for word in words:
        if not word.startswith("ranks="):
            continue
        first, _, last = word[6:].partition("-")
        of_word = range(0)
        if first.isdecimal() and (last or first).isdecimal():
            of_word = range(int(first), int(last or first) + 1)
        if not 0 < len(of_word) <= _MOST_RANKS:
            raise UsageError(f"{place}: expected ranks=0 or ranks=0-7, got {shown(word[6:])}")
        ranks += of_word
    return addresses, ranks
