"""Read the logs of NCCL and RCCL (NCCL_DEBUG=INFO): the network, its channels, and the reasons.

    host:pid:thread [device] NCCL INFO NET/IB : Using [0]mlx5_0:1/RoCE [RO]; OOB eth0:10.0.0.1<0>
    host:pid:thread [device] NCCL INFO Using network IB                     not before 2.5
    host:pid:thread [device] NCCL INFO Channel 00/24 :    0   1             its ring, from rank 0
    host:pid:thread [device] NCCL INFO Trees [0] 1/-1/-1->0->-1 [1] ...
    host:pid:thread [device] NCCL INFO 24 coll channels, ...                not before 2.8
    host:pid:thread [device] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/direct pointer
    host:pid:thread [device] NCCL INFO comm 0x55 rank 0 nranks 2 ... - Init COMPLETE

Launchers put their own words before a line, and ranks write into each other's lines. So a message
may begin anywhere in a line: it is the text after such a beginning. Lines may be cut, so a number
counts only if the text after it is there too. The largest communicator is the job's.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from fullwire.errors import DamagedInput
from fullwire.files import name_of, opened_plain, plain_line
from fullwire.importers._format import (
    NEAR_BYTES,
    POSSIBLE,
    Format,
    Likeness,
    near_miss,
)
from fullwire.run.facts import NO_FACTS, Facts, named
from fullwire.run.gaps import gaps_of
from fullwire.run.run import Provenance, Run

_LONGEST_LINE = 64 * 1024
_MOST_KEPT = 10_000  # Names, rings or paths of a kind: real logs have far fewer.
_MOST_UNDER_WAY = 100_000  # Communicators at a time, one for each rank.
_MOST_RANKS = 10_000_000
_SHOWN = 8  # names of a kind in a fact
_LONGEST_WORDS = 200

# A hostile line must not take long, so each pattern ends close to its beginning.
_MESSAGE = re.compile(
    r":(\d{1,10}):(\d{1,10}) \[-?\d{1,5}\] (?:\S{1,80} ){0,2}?NCCL (INFO|WARN) ", re.ASCII
)
_LONGEST_HOST = 255
_PLAIN = "NCCL INFO "
_A_LINE = re.compile(rb"NCCL INFO (?<!\SNCCL INFO )[\x20-\x7e]")  # searched from the words on
_FEW = re.compile(rb"\bNCCL WARN |\b[NR]CCL version \d")
_VERSION = re.compile(r"\b([NR]CCL) version\s*:?\s*(\d{1,3}\.\d{1,3}[\w.+-]*)", re.ASCII)
# IBext is NVIDIA's plugin and FastSocket is Google's. Since 2.27 each communicator has its own.
_NETWORK = re.compile(r"(?:Using network|Assigned NET plugin) (\S.{0,60}?)(?: to comm)?\s*$")
_USING = re.compile(r"NET/(IB(?:ext\w{0,8})?|(?:Fast)?Socket|OFI) ?: Using (.*)")
_ADAPTER = re.compile(r"\[\d{1,4}\]\s?([^\s:]{1,64}:\d{1,4}/\w{1,16})")
_INTERFACE = re.compile(r"\[\d{1,4}\]\s?([\w.-]{1,64}):")
_PROVIDER = re.compile(r"NET/OFI Selected [Pp]rovider is ([\w;-]+).*?(?:found (\d+) nics)")
_PLUGIN = re.compile(r"(?:NET/Plugin ?: )?(?:P2P plugin|Loaded net plugin) (\S.{0,60})")
_SETTING = re.compile(r"\b((?:NCCL|RCCL)_[A-Z0-9_]+) set by environment to (\S.*)")
_COLL_CHANNELS = re.compile(r"\b(\d{1,4}) coll channels, ")
_RING = re.compile(r"Channel (\d{1,4})(?:/(\d{1,4}))? :((?: +\d{1,8})+)\s*$")
_TREES = re.compile(r"Trees (?=\[0\] )(.*)")
_TREE = re.compile(r"\[(\d{1,4})\] (\S*->\S*)")
_PATH = re.compile(
    r"(?:Channel|Ring) \d{1,4}(?:/\d{1,4})? : \d+(?:\[\w+\])? -> \d+(?:\[\w+\])? "
    r"(?:\[(?:send|receive)\] )?via (\S.*)"
)
_RANK = re.compile(r"\brank (\d{1,8}) n[rR]anks (\d{1,8}) ")
_NODES = re.compile(r"\bnNodes (\d{1,8}) ")
_CALLS = (
    "AllReduce: ",
    "AllGather: ",
    "ReduceScatter: ",
    "Broadcast: ",
    "Reduce: ",
    "Send: ",
    "Recv: ",
)
_OF_A_COMMUNICATOR = re.compile(
    r"Channel |Trees |comm |ncclComm|=== System|Pattern 4|\d+ coll channels, "
)
_SYSTEM = re.compile(r"=== System : max(?:Bw|Width|Speed) (\d{1,6}(?:\.\d{1,6})?) total")
_RINGS_SEARCHED = re.compile(
    r"Pattern 4, crossNic \d+, nChannels (\d{1,4}), (?:bw|speed) (\d{1,6}\.\d{1,6})/.*, type (\w+)/"
)
_SEEN_FROM = re.compile(r"((?:GPU|NIC|NET)/\S+) :")
_SEEN = re.compile(r"(GPU/[\w-]{1,32}) \(\d+/(\d{1,6}\.\d{1,6})/(?:NVL|NVB)\)")


def looks_like(beginning: bytes) -> Likeness:
    """Say whether a file with this beginning holds such lines."""
    if _A_LINE.search(beginning):
        return POSSIBLE
    is_near = _FEW.search(beginning, 0, NEAR_BYTES)
    return near_miss(is_near, "lines of NCCL INFO: the job ran without NCCL_DEBUG=INFO")


def read_nccl_logs(paths: Sequence[Path]) -> Run:
    """Read the logs of a job's ranks, in one file or many, as the facts of a run."""
    facts, missing = log_facts(paths)
    if facts == NO_FACTS:
        raise DamagedInput(paths[0], "expected lines of NCCL_DEBUG=INFO, and none is whole")
    return Run(
        provenance=Provenance(origin="imported", source=", ".join(map(name_of, paths[:_SHOWN]))),
        facts=facts | Facts(remarks="NCCL's log says how a job was set up, not how it ran"),
        gaps=gaps_of(missing),
    )


def with_logs(run: Run, paths: Sequence[Path]) -> Run:
    """Add the facts of a job's logs to its run; facts that the run has already stay."""
    return _logged(paths).added_to(run)


def log_facts(paths: Iterable[Path]) -> tuple[Facts, tuple[str, ...]]:
    """Return the facts in logs, and the problems of the logs."""
    log = _logged(paths)
    return log.facts(), tuple(log.problems())


def _logged(paths: Iterable[Path]) -> Log:
    log = Log()
    for path in paths:
        with opened_plain(path) as file:
            while line := file.readline(_LONGEST_LINE):
                log.take(line.decode(errors="replace"))
    return log


@dataclass(slots=True)
class _Communicator:
    """One communicator, as one rank describes it during its set-up."""

    ranks: int = 0
    nodes: int = 0
    channels: int = 0
    trees: int = 0
    rings: dict[int, str] = field(default_factory=dict)
    reach_gb_s: float = 0.0  # the widest path of a device
    layout_gb_s: float = 0.0  # the planned bandwidth of all rings together
    ring_type: str = ""  # NVL where rings stay on NVLink


class Log:
    """Gathers the facts in messages."""

    def __init__(self) -> None:
        self._versions: Counter[str] = Counter()
        self._networks: Counter[str] = Counter()
        self._adapters: Counter[str] = Counter()
        self._plugins: Counter[str] = Counter()
        self._interfaces: Counter[str] = Counter()
        self._settings: Counter[str] = Counter()
        self._paths: Counter[str] = Counter()
        self._said: Counter[str] = Counter()
        self._hosts: Counter[str] = Counter()
        self._links: dict[tuple[str, str], float] = {}
        self._under_way: dict[tuple[str, str, str], _Communicator] = {}
        self._largest = _Communicator()
        self._sockets_of_libfabric = ""  # libfabric's chosen provider, if it sends by TCP

    def take(self, line: str) -> None:
        """Read the messages of a line, which may hold any number of them."""
        if "CCL" not in line:
            return
        line = plain_line(line)
        version = _VERSION.search(line)
        if version is not None:
            _count(self._versions, f"{version[1]} {version[2]}")
        messages = [(self._host(match), match) for match in _MESSAGE.finditer(line)]
        place = line.find(_PLAIN) if not messages else -1
        if place >= 0:  # some collectors of logs cut off a message's beginning
            self._take(line[place + len(_PLAIN) :].rstrip("\r\n"), ("", "", ""))
        begins = [match.start() - len(host) for host, match in messages] + [len(line)]
        for (host, match), end in zip(messages, begins[1:], strict=True):
            text = line[match.end() : end].rstrip("\r\n")
            if match[3] == "WARN":
                _count(self._said, _words(text))
                continue
            _count(self._hosts, host)
            self._take(text, (host, match[1], match[2]))

    def _host(self, message: re.Match[str]) -> str:
        """Return the host of a message, without the words that stand right before it."""
        before = message.string[max(message.start() - _LONGEST_HOST, 0) : message.start()]
        name = before[max(before.rfind(gap) for gap in " \t:") + 1 :]
        if len(name) == message.start() or name in self._hosts:
            return name
        return max((host for host in self._hosts if name.endswith(host)), key=len, default=name)

    def _take(self, text: str, thread: tuple[str, str, str]) -> None:
        if text.startswith(_CALLS):  # most messages are calls, which say nothing of the set-up
            return
        self._network(text)
        path = _PATH.match(text)
        if path is not None:
            _count(self._paths, _words(path[1].partition(" comm ")[0].rstrip()))
        elif (seen_from := _SEEN_FROM.match(text)) is not None:
            for device, gb_s in _SEEN.findall(text):
                if len(self._links) < _MOST_KEPT:
                    self._links[seen_from[1], device] = float(gb_s)
        elif _OF_A_COMMUNICATOR.match(text) and "Destroy" not in text and "Abort" not in text:
            self._communicator(text, thread)

    def _network(self, text: str) -> None:
        if (network := _NETWORK.match(text)) is not None:
            _count(self._networks, _words(network[1].rstrip()))
        elif (setting := _SETTING.match(text)) is not None:
            _count(self._settings, _words(f"{setting[1]}={setting[2].rstrip(' .')}"))
        elif (provider := _PROVIDER.match(text)) is not None:
            if provider[1] in ("tcp", "sockets"):
                self._sockets_of_libfabric = provider[1]
            else:
                _count(self._adapters, f"{provider[1]} x{provider[2]}")
        elif (plugin := _PLUGIN.match(text)) is not None:
            _count(self._plugins, _words(plugin[1]))
        elif (using := _USING.match(text)) is not None:
            is_socket = using[1].endswith("Socket")
            devices = (_INTERFACE if is_socket else _ADAPTER).findall(using[2].partition(";")[0])
            for name in devices[:_SHOWN]:
                _count(self._interfaces if is_socket else self._adapters, _words(name))
        elif "No device found" in text or "libibverbs" in text or "Direct RDMA Disabled" in text:
            _count(self._said, _words(text))

    def _communicator(self, text: str, thread: tuple[str, str, str]) -> None:
        if thread not in self._under_way and len(self._under_way) >= _MOST_UNDER_WAY:
            return
        communicator = self._under_way.setdefault(thread, _Communicator())
        if (rank := _RANK.search(text)) is not None and int(rank[2]) <= _MOST_RANKS:
            communicator.ranks = int(rank[2])
            nodes = _NODES.search(text)
            communicator.nodes = int(nodes[1]) if nodes is not None else communicator.nodes
        if (told := _COLL_CHANNELS.match(text)) is not None:
            communicator.channels = int(told[1])
        elif (ring := _RING.match(text)) is not None:
            if len(communicator.rings) < _MOST_KEPT:
                communicator.rings[int(ring[1])] = " ".join(ring[3].split())
            communicator.channels = max(communicator.channels, int(ring[2] or 0))
        elif (trees := _TREES.match(text)) is not None:
            communicator.trees = len(_TREE.findall(trees[1]))
        elif (system := _SYSTEM.match(text)) is not None:
            communicator.reach_gb_s = float(system[1])
        elif (rings := _RINGS_SEARCHED.match(text)) is not None:
            communicator.layout_gb_s = int(rings[1]) * float(rings[2])
            communicator.ring_type = rings[3]
        if "Init COMPLETE" in text:
            self._finish(self._under_way.pop(thread))

    def _finish(self, communicator: _Communicator) -> None:
        """Keep the facts of the largest communicator, with the fewest channels of any rank."""
        best = self._largest
        communicator.channels = (
            communicator.channels or len(communicator.rings) or communicator.trees
        )
        if communicator.ranks > best.ranks:
            self._largest = communicator
        elif communicator.ranks == best.ranks:
            known = [count for count in (communicator.channels, best.channels) if count]
            best.channels = min(known, default=0)
            best.nodes = max(best.nodes, communicator.nodes)
            best.trees = best.trees or communicator.trees
            best.rings = best.rings or communicator.rings
            best.reach_gb_s = max(best.reach_gb_s, communicator.reach_gb_s)
            if communicator.layout_gb_s and communicator.layout_gb_s <= (
                best.layout_gb_s or communicator.layout_gb_s
            ):
                best.layout_gb_s, best.ring_type = communicator.layout_gb_s, communicator.ring_type

    def added_to(self, run: Run) -> Run:
        """Return a run with the facts and problems of the log; its own facts stay."""
        facts = self.facts()
        return replace(run, facts=facts | run.facts, gaps=gaps_of([*run.gaps, *self.problems()]))

    def problems(self) -> Iterator[str]:
        """Yield a problem if the logs end early."""
        cut = sum(1 for setup in self._under_way.values() if setup.ranks or setup.channels)
        if cut:
            yield f"NCCL's log ends while {cut} of its communicators were being set up"

    def facts(self) -> Facts:
        """Return all known facts, which are empty if every message was damaged."""
        for setup in self._under_way.values():  # a log that was cut still shows these
            if setup.ranks or setup.channels:
                self._finish(replace(setup, rings=dict(setup.rings)))
        largest = self._largest
        # Name pairs of devices whose link is slower in one direction than in the other.
        uneven = [
            f"{one} to {other} {gb_s:g} GB/s, back {back:g} GB/s"
            for (one, other), gb_s in self._links.items()
            if (back := self._links.get((other, one), gb_s)) > gb_s
        ]
        # The network's name comes from messages, else from paths, else from the devices found.
        network = _listed(self._networks)
        if self._sockets_of_libfabric and all("Libfabric" in network for network in self._networks):
            network = f"Socket (libfabric's {self._sockets_of_libfabric})"
        if not network:
            used = Counter[str]()
            for path, count in self._paths.items():
                if path.startswith("NET/"):
                    used[path.split("/")[1]] += count
            by_device = "IB" if self._adapters else "Socket" if self._interfaces else ""
            network = _listed(used) or by_device
        facts = {
            "nccl_version": _listed(self._versions),
            "nccl_network": network,
            "nccl_adapters": _listed(self._adapters),
            "nccl_interfaces": _listed(self._interfaces),
            "nccl_settings": _listed(self._settings),
            "nccl_paths": _counted(self._paths),
            "nccl_said": _counted(self._said),
            "nccl_uneven_links": "; ".join(uneven[:_SHOWN]),
            "nccl_rings": _counted(
                Counter(order[:_LONGEST_WORDS] for order in largest.rings.values())
            ),
            "nccl_trees": largest.trees,
            "nccl_channels": largest.channels,
            "workers": largest.ranks,
            "nccl_nodes": largest.nodes or (len(self._hosts) if len(self._hosts) > 1 else 0),
            "nccl_reach_bps": largest.reach_gb_s * 8e9,
            "nccl_layout_bps": largest.layout_gb_s * 8e9,
            "nccl_ring_type": largest.ring_type,
            "nccl_plugins": _listed(self._plugins),
        }
        return named({name: value for name, value in facts.items() if value})


def _count(counter: Counter[str], name: str) -> None:
    if name and (name in counter or len(counter) < _MOST_KEPT):
        counter[name] += 1


def _words(text: str) -> str:
    """Return text as facts hold it: short, storable, and without commas and semicolons."""
    plain = " ".join(text.replace(",", " ").replace(";", " ").split())
    return plain[:_LONGEST_WORDS].encode(errors="backslashreplace").decode()


def _listed(counter: Mapping[str, int]) -> str:
    """List the most frequent names, in the order of their first appearance."""
    most = sorted(counter, key=lambda name: -counter[name])[:_SHOWN]
    return ", ".join(name for name in counter if name in most)


def _counted(counter: Counter[str]) -> str:
    return ", ".join(f"{count:,} x {name}" for name, count in counter.most_common(_SHOWN))


FORMAT = Format(
    key="nccl-log",
    label="NCCL's logs",
    looks_like=looks_like,
    read=lambda files, options: read_nccl_logs(files),
    is_of_many=True,
    tells=10,
    beside=with_logs,
)
