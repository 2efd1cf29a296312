"""A cluster as TOML: read with one line for each mistake, printed so that it reads back equal.

    name = "two racks"            # the name in answers
    nodes = 8                     # so many nodes
    devices_per_node = 8          # one rank uses one device; 1 if it is missing
    device = "NVIDIA A100"        # its devices, for `fullwire plan`; the name may tell them, too
    startup = "30us"              # time of a collective before its bytes move
    rests_on = "data sheets"      # the source of the figures, for readers

    [inside]                      # links between the devices of a node, if it has several
    kind = "switch"               # or "pcie": then transfers that leave the node use it as well
    rate = "450GB/s"              # of each device, each way
    latency = "1us"               # of one message, one way
    payload_share = 0.8           # share of the rate that is left for payload
    adds = true                   # the switch adds (NVLink SHARP); usual from 400 GB/s on
    rate_is_least = false         # true: a fit without tables of one node knows only a least rate

    [nics]                        # the adapters of a node
    per_node = 8                  # 1 if it is missing, 4 in a torus
    rate = "400Gbps"              # of each NIC, each way
    latency = "4us"               # one way, from node to node
    payload_share = 0.956         # share of the rate that is left for payload
    of_device = [0, 1, 2, 3, 4, 5, 6, 7]  # the NIC of each device; all are shared if it is missing
    of_tables = false             # true: the rate is that of full nodes in the tables of a fit
    lengthens_hops = false        # true: the latency is a cloud's transport's, in each message

    [network]                     # one switch if it is missing
    kind = "fat-tree"             # or "switch", "rails", "torus"
    nodes_per_leaf = 4            # nodes below one leaf switch
    oversubscription = "2:1"      # rate below a leaf, over the rate of its uplinks
    latency = "1us"               # added by the way through the spine
    leaves_per_pod = 4            # each pod has a spine, and pods reach each other through a core
    core_oversubscription = "4:1"  # the same between pods and core
    adds = true                   # its switches add (SHARP): then `auto` tries in-network as well
    # rows = 4                    # of a torus, in place of all keys above but kind
    # columns = 2                 # of a torus

    [[hosts]]                     # a node that differs
    node = 3                      # its number, from 0
    nic_rate = "100Gbps"          # of its NICs

    [measured]                    # by `fullwire cluster fit` from tables (measured.py)
    source = "nccl_8.log, nccl_16.log"  # the tables
    tree_share = 0.9              # rate that a tree fills, over the ring's; 0 if there is no tree
    pair_share = 0.5              # a tree of two nodes sends as much as a ring (1), or half (0).
                                  # 0 differs from 1e-6: a tree of four nodes then sends twice that
    half_weight = 0.0             # where tables leave that open: so far from pair_share to half
    tree_nics_share = 0.9         # of a ring's share of the NICs, a tree or all-to-all fills
    switch_share = 0.9            # rate that adding switches fill, over the rate of a ring
    spread = 0.06                 # standard deviation of a time's logarithm
    # other = {}                  # [measured.other]: a fit that the tables allow too, same keys

    [[measured.protocols]]        # a way of the library to send messages
    name = "small"                # its name in answers
    startup = "7us"               # time before bytes move
    inside_hop = "1.7us"          # of each message in a row, within a node
    between_hop = "5us"           # and between nodes
    inside_share = 0.2            # share of the line rates that it fills, within a node
    between_share = 0.2           # and between nodes

    [[measured.shown]]            # each table's times, as multiples of the protocols' times
    op = "allreduce"              # the operation of the table
    workers = 16                  # its device count
    bytes = [65536, 131072]       # its sizes
    times = [1.04, 0.97]          # measured over predicted, for each size

Each mistake is named with its table and key, as in "nics.rate".
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from difflib import get_close_matches
from fractions import Fraction
from typing import Any, Literal, TypeVar, get_args

from fullwire.clusters.cluster import (
    Cluster,
    Inside,
    InsideKind,
    LeafSpine,
    Network,
    Nics,
    OneSwitch,
    OtherHost,
    Torus,
)
from fullwire.clusters.measured import Measured, Protocol, Shown
from fullwire.errors import UsageError
from fullwire.units import bits_per_second, ratio, seconds, shown

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # the same, before Python had it

NetworkKind = Literal["switch", "fat-tree", "rails", "torus"]
Choice = TypeVar("Choice")
_MOST = 10**9  # of anything that is counted
_TOP_KEYS = (
    "name",
    "nodes",
    "devices_per_node",
    "device",
    "startup",
    "rests_on",
    "inside",
    "nics",
    "network",
    "hosts",
    "measured",
)
_LINK_KEYS = ("rate", "latency", "payload_share")
_LEAF_KEYS = (
    "kind",
    "nodes_per_leaf",
    "oversubscription",
    "latency",
    "leaves_per_pod",
    "core_oversubscription",
    "adds",
)
_NETWORK_KEYS: Mapping[str, Sequence[str]] = {
    "switch": ("kind",),
    "fat-tree": _LEAF_KEYS,
    "rails": _LEAF_KEYS,
    "torus": ("kind", "rows", "columns"),
}


def described(text: str, place: str) -> Cluster:
    """Read a cluster from TOML; `place` names the source of the text in error messages."""
    try:
        document = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{place}: expected TOML: {error}") from None
    try:
        return _cluster(_Table(document, "", _TOP_KEYS))
    except UsageError as error:
        raise UsageError(f"{place}: {error}") from None


def _cluster(top: _Table) -> Cluster:
    inside, nics, network = top.table("inside"), top.table("nics"), top.table("network")
    measured = top.table("measured")
    if nics is None:
        raise UsageError("nics: expected a table [nics] with a rate")
    kept = _network(network)
    return Cluster(
        name=top.text("name"),
        nodes=top.count("nodes"),
        devices_per_node=top.count("devices_per_node", 1),
        device=_device(top),
        startup_s=top.time("startup"),
        rests_on=top.text("rests_on", ""),
        inside=None if inside is None else _inside(inside),
        nics=_nics(nics, default=4 if isinstance(kept, Torus) else 1),
        network=kept,
        measured=None if measured is None else _measured(measured),
        other_hosts=tuple(
            OtherHost(node=host.whole("node"), nic_rate_bps=host.rate("nic_rate"))
            for host in top.tables("hosts", ("node", "nic_rate"))
        ),
    )


def _device(top: _Table) -> str:
    """Return the stated device. A description may come from elsewhere, so it opens no file."""
    name = top.text("device", "")
    if name.endswith(".toml"):
        raise UsageError(f"device: expected a name, got {shown(name)}; --device takes a file")
    return name


def _inside(table: _Table) -> Inside:
    table.check_keys(("kind", *_LINK_KEYS, "adds", "rate_is_least"))
    return Inside(
        kind=table.choice("kind", get_args(InsideKind)),
        rate_bps=table.rate("rate"),
        latency_s=table.time("latency"),
        payload_share=table.number("payload_share", 1.0),
        adds=table.flag("adds") if "adds" in table.held else None,
        rate_is_least=table.flag("rate_is_least"),
    )


def _nics(table: _Table, default: int) -> Nics:
    table.check_keys(("per_node", *_LINK_KEYS, "of_device", "of_tables", "lengthens_hops"))
    return Nics(
        per_node=table.count("per_node", default),
        rate_bps=table.rate("rate"),
        latency_s=table.time("latency"),
        payload_share=table.number("payload_share", 1.0),
        of_device=table.whole_numbers("of_device"),
        of_tables=table.flag("of_tables"),
        lengthens_hops=table.flag("lengthens_hops"),
    )


def _network(table: _Table | None) -> Network:
    if table is None:
        return OneSwitch()
    kind = table.choice("kind", get_args(NetworkKind))
    table.check_keys(_NETWORK_KEYS[kind])
    if kind == "switch":
        return OneSwitch()
    if kind == "torus":
        return Torus(rows=table.count("rows"), columns=table.count("columns"))
    return LeafSpine(
        nodes_per_leaf=table.count("nodes_per_leaf"),
        by_rail=kind == "rails",
        oversubscription=table.oversubscription("oversubscription"),
        latency_s=table.time("latency"),
        leaves_per_pod=table.count("leaves_per_pod") if "leaves_per_pod" in table.held else None,
        core_oversubscription=table.oversubscription("core_oversubscription"),
        adds=table.flag("adds"),
    )


def _measured(table: _Table) -> Measured:
    shares_of = ("tree_share", "tree_nics_share", "pair_share", "half_weight", "switch_share")
    table.check_keys(("source", *shares_of, "spread", "protocols", "shown", "other"))
    other = table.table("other")
    hops = ("startup", "inside_hop", "between_hop")
    shares = ("inside_share", "between_share")
    return Measured(
        source=table.text("source"),
        tree_share=table.share("tree_share", 1.0),
        pair_share=table.share("pair_share", 1.0),
        half_weight=table.share("half_weight", 0.0),
        tree_nics_share=table.share("tree_nics_share", 1.0),
        switch_share=table.share("switch_share", 0.0),
        spread=table.number("spread", 0.1),
        protocols=tuple(
            Protocol(
                name=protocol.text("name"),
                **{f"{key}_s": protocol.time(key) for key in hops},
                **{key: protocol.number(key, 1.0) for key in shares},
            )
            for protocol in table.tables("protocols", ("name", *hops, *shares))
        ),
        shown=tuple(
            Shown(
                op=curve.text("op"),
                workers=curve.count("workers"),
                bytes=curve.whole_numbers("bytes", most=2**50),
                times=curve.numbers("times"),
            )
            for curve in table.tables("shown", ("op", "workers", "bytes", "times"))
        ),
        other=None if other is None else _measured(other),
    )


@dataclass(frozen=True, slots=True)
class _Table:
    """A table of the file; its error messages name the table and the key."""

    held: Mapping[str, Any]
    name: str
    known: Sequence[str] = ()

    def __post_init__(self) -> None:
        if self.known:
            self.check_keys(self.known)

    def check_keys(self, known: Sequence[str]) -> None:
        """Refuse an unknown key."""
        for key in self.held:
            if key not in known:
                near = get_close_matches(key, known, n=1)
                meant = f"is {near[0]} meant?" if near else f"expected {', '.join(known)}"
                raise UsageError(f"{self._what(shown(key)[1:-1])}: no such key, {meant}")

    def text(self, key: str, default: str | None = None) -> str:
        """Return a text."""
        value = self._value(key, default, 'a text, like "ours"')
        if not isinstance(value, str):
            raise UsageError(f"{self._what(key)}: expected a text, got {shown(value)}")
        return value

    def choice(self, key: str, among: Sequence[Choice]) -> Choice:
        """Return one of several words."""
        words = " or ".join(f'"{word}"' for word in among)
        value = self._value(key, None, words)
        for word in among:
            if value == word:
                return word
        raise UsageError(f"{self._what(key)}: expected {words}, got {shown(value)}")

    def count(self, key: str, default: int | None = None) -> int:
        """Return a count of at least one."""
        return self._within(key, self._value(key, default, "a whole number"), least=1)

    def whole(self, key: str) -> int:
        """Return a number that counts from 0."""
        return self._within(key, self._value(key, None, "a whole number"), least=0)

    def whole_numbers(self, key: str, most: int = _MOST) -> tuple[int, ...]:
        """Return a list of numbers that count from 0; empty if it is missing."""
        value = self.held.get(key, [])
        if not isinstance(value, list):
            raise UsageError(f"{self._what(key)}: expected a list, like [0, 1], got {shown(value)}")
        return tuple(self._within(key, number, least=0, most=most) for number in value)

    def numbers(self, key: str) -> tuple[float, ...]:
        """Return a list of plain numbers; empty if it is missing."""
        value = self.held.get(key, [])
        if not isinstance(value, list) or not all(
            isinstance(number, int | float) and not isinstance(number, bool) for number in value
        ):
            raise UsageError(f"{self._what(key)}: expected numbers, like [1.0], got {shown(value)}")
        return tuple(map(float, value))

    def _within(self, key: str, value: object, least: int, most: int = _MOST) -> int:
        if isinstance(value, int) and not isinstance(value, bool) and least <= value <= most:
            return value
        raise UsageError(
            f"{self._what(key)}: expected a whole number from {least} to {most:,}, "
            f"got {shown(value)}"
        )

    def number(self, key: str, default: float) -> float:
        """Return a plain number."""
        value = self.held.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise UsageError(f"{self._what(key)}: expected a number, got {shown(value)}")
        return ratio(value, self._what(key))

    def share(self, key: str, default: float) -> float:
        """Return a plain number, or 0 where the library lacks this way."""
        value = self.held.get(key, default)
        if isinstance(value, int | float) and not isinstance(value, bool) and value <= 0:
            if value < 0:
                raise UsageError(f"{self._what(key)}: expected 0 or more, got {shown(value)}")
            return 0.0
        return self.number(key, default)

    def flag(self, key: str) -> bool:
        """Return true or false; false if it is missing."""
        value = self.held.get(key, False)
        if not isinstance(value, bool):
            raise UsageError(f"{self._what(key)}: expected true or false, got {shown(value)}")
        return value

    def rate(self, key: str) -> float:
        """Return a rate that carries its unit."""
        return bits_per_second(self._quantity(key, None, '"100Gbps"'), self._what(key))

    def time(self, key: str) -> float:
        """Return a time that carries its unit, 0 if it is missing."""
        return seconds(self._quantity(key, "0s", '"2us"'), self._what(key))

    def _quantity(self, key: str, default: str | None, example: str) -> str:
        expected = f"a text with a unit, like {example}"
        value = self._value(key, default, expected)
        if not isinstance(value, str):
            raise UsageError(f"{self._what(key)}: expected {expected}, got {shown(value)}")
        return value

    def oversubscription(self, key: str) -> float:
        """Return a ratio such as "2:1", also given as the number 2."""
        value = self.held.get(key, 1)
        if not isinstance(value, str):
            return self.number(key, 1.0)
        what = self._what(key)
        down, colon, up = value.partition(":")
        if not colon:
            raise UsageError(f'{what}: expected a ratio, like "2:1", got {shown(value)}')
        return float(Fraction(ratio(down, what)) / Fraction(ratio(up, what)))

    def table(self, key: str) -> _Table | None:
        """Return a table within this one."""
        value = self.held.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise UsageError(f"{self._what(key)}: expected a table [{key}], got {shown(value)}")
        return _Table(value, self._what(key))

    def tables(self, key: str, known: Sequence[str]) -> Iterator[_Table]:
        """Go through the tables of a list, which is written as [[key]]."""
        values = self.held.get(key, [])
        if not isinstance(values, list) or not all(isinstance(table, dict) for table in values):
            raise UsageError(f"{self._what(key)}: expected tables [[{key}]], got {shown(values)}")
        for number, table in enumerate(values, 1):
            yield _Table(table, f"{self._what(key)}[{number}]", known)

    def _value(self, key: str, default: object, expected: str) -> object:
        value = self.held.get(key, default)
        if value is None:
            raise UsageError(f"{self._what(key)}: expected {expected}, it is missing")
        return value

    def _what(self, key: str) -> str:
        return f"{self.name}.{key}" if self.name else key


def as_toml(cluster: Cluster) -> str:
    """Print a cluster as a description that reads back equal."""
    lines = [f"name = {_quoted(cluster.name)}", f"nodes = {cluster.nodes}"]
    if cluster.devices_per_node > 1:
        lines.append(f"devices_per_node = {cluster.devices_per_node}")
    if cluster.device:
        lines.append(f"device = {_quoted(cluster.device)}")
    if cluster.startup_s:
        lines.append(f'startup = "{_printed(cluster.startup_s, _TIMES)}"')
    if cluster.rests_on:
        lines.append(f"rests_on = {_quoted(cluster.rests_on)}")
    if cluster.inside is not None:
        lines += ["", "[inside]", f'kind = "{cluster.inside.kind}"', *_link_lines(cluster.inside)]
        if cluster.inside.adds is not None:
            lines.append(f"adds = {str(cluster.inside.adds).lower()}")
        if cluster.inside.rate_is_least:
            lines.append("rate_is_least = true")
    lines += ["", "[nics]", f"per_node = {cluster.nics_per_node}", *_link_lines(cluster.nics)]
    if cluster.nics.of_device:
        lines.append(f"of_device = {list(cluster.nics.of_device)}")
    if cluster.nics.of_tables:
        lines.append("of_tables = true")
    if cluster.nics.lengthens_hops:
        lines.append("lengthens_hops = true")
    network = cluster.network
    lines += ["", "[network]", f'kind = "{network.kind}"']
    if isinstance(network, Torus):
        lines += [f"rows = {network.rows}", f"columns = {network.columns}"]
    if isinstance(network, LeafSpine):
        lines.append(f"nodes_per_leaf = {network.nodes_per_leaf}")
        lines.append(f'oversubscription = "{_ratio(network.oversubscription)}"')
        if network.latency_s:
            lines.append(f'latency = "{_printed(network.latency_s, _TIMES)}"')
        if network.leaves_per_pod is not None:
            lines.append(f"leaves_per_pod = {network.leaves_per_pod}")
            lines.append(f'core_oversubscription = "{_ratio(network.core_oversubscription)}"')
        if network.adds:
            lines.append("adds = true")
    for host in cluster.other_hosts:
        rate = _printed(host.nic_rate_bps, _RATES)
        lines += ["", "[[hosts]]", f"node = {host.node}", f'nic_rate = "{rate}"']
    if cluster.measured is not None:
        lines += _measured_lines(cluster.measured)
    return "\n".join(lines) + "\n"


def _measured_lines(measured: Measured, at: str = "measured") -> Iterator[str]:
    yield from ("", f"[{at}]", f"source = {_quoted(measured.source)}")
    usual = {"half_weight": 0.0, "tree_nics_share": 1.0}  # of fits that leave them out
    shares = ("tree_share", "tree_nics_share", "pair_share", "half_weight", "switch_share")
    for key in (*shares, "spread"):
        if (value := float(getattr(measured, key))) != usual.get(key):
            yield f"{key} = {value!r}"
    for protocol in measured.protocols:
        yield from ("", f"[[{at}.protocols]]", f"name = {_quoted(protocol.name)}")
        for key in ("startup", "inside_hop", "between_hop"):
            yield f'{key} = "{_printed(getattr(protocol, f"{key}_s"), _TIMES)}"'
        for key in ("inside_share", "between_share"):
            yield f"{key} = {float(getattr(protocol, key))!r}"
    for table in measured.shown:
        yield from ("", f"[[{at}.shown]]", f"op = {_quoted(table.op)}")
        yield f"workers = {table.workers}"
        yield f"bytes = {list(table.bytes)}"
        yield f"times = {list(table.times)}"
    if measured.other is not None:
        yield from _measured_lines(measured.other, f"{at}.other")


def _link_lines(link: Inside | Nics) -> Iterator[str]:
    yield f'rate = "{_printed(link.rate_bps, _RATES)}"'
    if link.latency_s:
        yield f'latency = "{_printed(link.latency_s, _TIMES)}"'
    if link.payload_share != 1:
        yield f"payload_share = {float(link.payload_share)!r}"


def _ratio(value: float) -> str:
    return f"{_plain(Decimal(repr(value)))}:1"


_RATES = ((12, "Tbps"), (9, "Gbps"), (6, "Mbps"), (3, "kbps"), (0, "bps"))
_TIMES = ((0, "s"), (-3, "ms"), (-6, "us"), (-9, "ns"))


def _printed(number: float, units: Sequence[tuple[int, str]]) -> str:
    """Print a quantity with all its digits, in the largest unit of which there is at least one."""
    exact = Decimal(repr(float(number)))
    power, unit = next((unit for unit in units if exact >= Decimal(10) ** unit[0]), units[-1])
    return f"{_plain(exact.scaleb(-power))}{unit}"


def _plain(exact: Decimal) -> str:
    digits = f"{exact.normalize():f}"
    return digits if len(digits) <= 30 else str(exact.normalize())


def _quoted(text: str) -> str:
    """Print a TOML string, with control characters escaped: JSON's escapes are TOML's."""
    escaped = json.dumps(text, ensure_ascii=False)
    return "".join(
        letter if letter.isprintable() else f"\\U{ord(letter):08x}" for letter in escaped
    )
