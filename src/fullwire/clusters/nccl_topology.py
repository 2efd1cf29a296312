"""A cluster of hosts like one that NCCL or NVIDIA's tools described.

NCCL writes a topology with NCCL_TOPO_DUMP_FILE, or takes one from NCCL_TOPO_FILE.

    <system version="1"><cpu numaid="0" ...>
      <pci busid="0000:17:00.0" class="0x030200" link_speed="16 GT/s" link_width="16">
        <gpu dev="0" sm="80" rank="0" gdr="1"><nvlink target="..." count="2" .../></gpu>
      </pci>
      <pci busid="0000:1c:00.0" ...><nic><net name="mlx5_0" dev="0" speed="100000" .../></nic></pci>
    </cpu></system>

`speed` is in Mbit/s. Where it is missing, the value is the default of NCCL's src/graph/topo.h. The
file tells nothing about the network between hosts: two of them on one switch are assumed.

    (nvidia-smi topo -m; ibstat) > host.txt

        GPU0  GPU1  NIC0  CPU Affinity ...        CA 'mlx5_0'
    GPU0  X   NV18  PXB   0-55,112-167 ...            Port 1:
    NIC0 PXB  SYS    X                                    State: Active
      NIC0: mlx5_0                                        Rate: 400

The first command tells the number of NVLinks and the nearest adapter of each GPU. The second one
tells the adapters' rates in Gbit/s. Neither tells an NVLink's speed: that of V100 to H200 is taken.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from xml.etree import ElementTree

from fullwire.clusters.cluster import Cluster, Inside, Nics
from fullwire.errors import UsageError
from fullwire.files import name_of

_NVLINK_BYTES = {60: 20e9, 70: 25e9, 80: 25e9, 86: 14.0625e9, 90: 25e9, 100: 50e9}  # by sm, a link
_NVLINK_SHARE = 0.8  # the share that NCCL takes: 20 of 25 GB/s
_PCIE_SHARE = 0.76  # 12 of 15.75 GB/s
_UNTOLD_MBPS = 10_000
_SPEED = re.compile(r"\s*(\d{1,3}(?:\.\d{1,2})?) GT/s")
_MOST_DEVICES = 1_000
_COLUMN = re.compile(r"GPU\d{1,3}|NIC\d{1,3}|mlx\w{1,20}")
_NEAR = ("PIX", "PXB", "PHB", "NODE", "SOC", "SYS")  # in this order; SOC is the old SYS
_CELL = re.compile(rf"X|NV(\d{{1,2}})|{'|'.join(_NEAR)}")
_COLOUR = re.compile(r"\x1b\[\d*m")
_USUAL_LINK_BYTES = 25e9
_MOST_LINKS = 18  # of a device: if its pairs seem to have more, a switch joins them
# What a cluster rests on, for its description.
_NO_OTHER_HOSTS = (
    "It tells nothing of other hosts: two on one switch and all latencies are assumed."
)
_OF_TOPOLOGY = "a topology of NCCL ({file}): {adapters}{inside}. " + _NO_OTHER_HOSTS
_DIFFERENT_ADAPTERS = "its adapters differ, and the slowest counts; "
_BY_NVLINK = "{links} NVLinks of {gb:g} GB/s a device, as of sm {model}, of which NCCL takes 0.8"
_BY_PCIE = "PCIe as it says, of which NCCL takes 0.76"
_OF_MATRIX = (
    "nvidia-smi topo -m and ibstat ({file}): {links} NVLinks a device, taken as 25 GB/s each (V100 "
    "to H200), of which NCCL takes 0.8. Those of Blackwell have 50. {near} adapters of {adapters} "
    "are next to a device, and the slowest counts. " + _NO_OTHER_HOSTS
)
Way = tuple[int, ...]  # through the tree, by places


def cluster_of_topology(text: str, place: str) -> Cluster:
    """Read NCCL's topology of a host as a cluster of two such hosts."""
    if "<!" in text.replace("<!--", ""):
        raise UsageError(f"{place}: expected a topology of NCCL, which declares nothing")
    try:
        system = ElementTree.fromstring(text)
    except (ElementTree.ParseError, ValueError, RecursionError) as error:
        raise UsageError(f"{place}: expected a topology of NCCL (XML): {error}") from None
    found = list(_elements(system, ()))
    gpus = [(way, element) for way, element in found if element.tag == "gpu"]
    nets = {
        (element.get("name"), element.get("guid"), element.get("port")): (way, element)
        for way, element in found
        if element.tag == "net" and element.get("dev") is not None
    }
    if system.tag == "graphs":
        raise UsageError(
            f"{place}: expected a topology of NCCL, got a dump of its rings and trees: "
            "NCCL_TOPO_DUMP_FILE=FILE dumps the topology"
        )
    if system.tag != "system" or not gpus:
        raise UsageError(f"{place}: expected a topology of NCCL with the GPUs of a host")
    if not nets:
        raise UsageError(
            f"{place}: it names no adapter for other hosts: let NCCL dump it in a job of two hosts"
        )
    if len(gpus) > _MOST_DEVICES:
        raise UsageError(f"{place}: more than {_MOST_DEVICES:,} GPUs in a host")
    speeds = [_number(element, "speed", place) or _UNTOLD_MBPS for _, element in nets.values()]
    of_device: list[int] = []
    used: Counter[int] = Counter()
    for way, _ in gpus:  # each uses the nearest; of equally near ones that with the fewest devices
        shared = [_shared(way, other) for other, _ in nets.values()]
        nearest = min(range(len(nets)), key=lambda nic: (-shared[nic], used[nic], nic))
        of_device.append(nearest)
        used[nearest] += 1
    model = min(_number(gpu, "sm", place) for _, gpu in gpus)
    links = min(
        sum(_number(link, "count", place) for link in gpu.iter("nvlink")) for _, gpu in gpus
    )
    if links:
        link_bytes = _NVLINK_BYTES[max((sm for sm in _NVLINK_BYTES if sm <= model), default=60)]
        inside = Inside(
            kind="switch",
            rate_bps=8 * links * link_bytes,
            latency_s=1e-6,
            payload_share=_NVLINK_SHARE,
        )
        told = _BY_NVLINK.format(links=links, gb=link_bytes / 1e9, model=model)
    else:
        inside = Inside(
            kind="pcie",
            rate_bps=min(_pcie_bps(system, way, place) for way, _ in gpus),
            latency_s=1e-6,
            payload_share=_PCIE_SHARE,
        )
        told = _BY_PCIE
    return Cluster(
        name=Path(place).stem or "host",
        nodes=2,
        nics=Nics(
            rate_bps=min(speeds) * 1e6,
            per_node=len(nets),
            latency_s=4e-6,
            of_device=tuple(of_device),
        ),
        devices_per_node=len(gpus),
        inside=inside if len(gpus) > 1 else None,
        rests_on=_OF_TOPOLOGY.format(
            file=name_of(Path(place).name),
            adapters=_DIFFERENT_ADAPTERS if len(set(speeds)) > 1 else "",
            inside=told,
        ),
    )


def has_matrix(text: str) -> bool:
    """Say whether a text begins with the matrix of nvidia-smi topo -m."""
    return re.match(r"\s*(?:\x1b\[4m)?\s*GPU0\s", text) is not None


def cluster_of_matrix(text: str, place: str) -> Cluster:
    """Read the output of `nvidia-smi topo -m` and `ibstat` as a cluster of two such hosts."""
    lines = _COLOUR.sub("", text).splitlines()
    first = next(at for at, line in enumerate(lines) if line.strip())
    names = [word for word in lines[first].split() if _COLUMN.fullmatch(word)]
    rows: dict[str, list[str]] = {}
    for line in lines[first + 1 :]:
        name, *cells = line.split() or [""]
        if name in names and name not in rows:
            rows[name] = [cell for cell in cells[: len(names)] if _CELL.fullmatch(cell)]
    gpus = [name for name in names if name.startswith("GPU")]
    for gpu in gpus:
        if len(rows.get(gpu, ())) < len(names):
            raise UsageError(f"{place}: expected a row of {len(names)} connections for {gpu}")
    rates = _active_rates(lines)
    titles = dict(re.findall(r"^\s*(NIC\d{1,3}): (\S{1,60})\s*$", "\n".join(lines), re.MULTILINE))
    speeds = {
        name: rates[titles.get(name, name)]
        for name in names
        if name not in gpus and titles.get(name, name) in rates
    }
    if not speeds:
        raise UsageError(
            f"{place}: expected the rates of its adapters too. Record them so: "
            "(nvidia-smi topo -m; ibstat) > host.txt"
        )
    links = []
    for gpu in gpus:
        pairs = [int(found[1] or 0) for cell in rows[gpu] if (found := _CELL.fullmatch(cell))]
        links.append(sum(pairs) if sum(pairs) <= _MOST_LINKS else max(pairs))
    if len(gpus) > 1 and not min(links):
        raise UsageError(
            f"{place}: expected the speed of PCIe, since a GPU has no NVLink. "
            "NCCL_TOPO_DUMP_FILE=FILE dumps a topology with that speed"
        )
    used: Counter[str] = Counter()
    chosen: list[str] = []
    for gpu in gpus:  # of equally near adapters the one with the fewest devices
        ways = {name: rows[gpu][names.index(name)] for name in speeds}
        near = {name: _NEAR.index(way) if way in _NEAR else 0 for name, way in ways.items()}
        chosen.append(min(speeds, key=lambda name: (near[name], used[name], names.index(name))))
        used[chosen[-1]] += 1
    adapters = [name for name in speeds if used[name]]
    inside = None
    if len(gpus) > 1:
        inside = Inside(
            kind="switch",
            rate_bps=8 * min(links) * _USUAL_LINK_BYTES,
            latency_s=1e-6,
            payload_share=_NVLINK_SHARE,
        )
    return Cluster(
        name=Path(place).stem or "host",
        nodes=2,
        nics=Nics(
            rate_bps=min(speeds[name] for name in adapters),
            per_node=len(adapters),
            latency_s=4e-6,
            of_device=tuple(adapters.index(name) for name in chosen),
        ),
        devices_per_node=len(gpus),
        inside=inside,
        rests_on=_OF_MATRIX.format(
            file=name_of(Path(place).name),
            links=min(links),
            near=len(adapters),
            adapters=len(names) - len(gpus),
        ),
    )


def _active_rates(lines: Sequence[str]) -> dict[str, float]:
    """Return the rates of the adapters in the output of ibstat that have an active port."""
    rates: dict[str, float] = {}
    adapter, is_active = "", False
    for line in lines:
        if told := re.fullmatch(r"CA '([^']{1,60})'\s*", line):
            adapter = told[1]
        elif told := re.fullmatch(r"\s+State: (\w+)\s*", line):
            is_active = told[1] == "Active"
        elif (told := re.fullmatch(r"\s+Rate: (\d{1,5})\s*", line)) and is_active and adapter:
            rates.setdefault(adapter, int(told[1]) * 1e9)
    return {name: rate_bps for name, rate_bps in rates.items() if rate_bps}


def _elements(element: ElementTree.Element, way: Way) -> Iterator[tuple[Way, ElementTree.Element]]:
    """Go through an element and those below it, each with its way through the tree."""
    waiting = [(way, element)]
    while waiting:
        here, each = waiting.pop()
        yield here, each
        waiting += [((*here, place), below) for place, below in reversed([*enumerate(each)])]


def _shared(one: Way, other: Way) -> int:
    """Return how many places two ways through the tree share at their beginning."""
    return next(
        (n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
        min(len(one), len(other)),
    )


def _pcie_bps(system: ElementTree.Element, way: Way, place: str) -> float:
    """Return the rate of the narrowest link on the way to a device."""
    element, rates = system, list[float]()
    for step in way:
        element = element[step]
        speed = _SPEED.match(element.get("link_speed", ""))
        width = _number(element, "link_width", place)
        if element.tag == "pci" and speed is not None and width:
            coding = 0.8 if float(speed[1]) < 8 else 128 / 130
            rates.append(float(speed[1]) * 1e9 * width * coding)
    if not rates or min(rates) <= 0:
        raise UsageError(f"{place}: expected link_speed and link_width on the way to each GPU")
    return min(rates)


def _number(element: ElementTree.Element, name: str, place: str) -> int:
    """Return a whole number of an element; 0 where it is missing or negative."""
    text = element.get(name, "0").strip()
    if re.fullmatch(r"-?\d{1,9}", text) is None:
        raise UsageError(f"{place}: expected a whole number as {name} of {element.tag}")
    return max(int(text), 0)
