"""The evidence from NCCL's own log: a network or paths that fall short of the hosts' abilities.

Each sentence names the data that it rests on. The usual number of channels comes from NCCL, not
from a table of devices. NCCL says how wide the widest path of a device is, and for how much its
rings were laid out. The quotient says how many times more rings, and channels, would fill the path.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from fullwire.findings.evidence import Source
from fullwire.findings.finding import Evidence, Finding
from fullwire.run.run import Run
from fullwire.timeline.transfers import world

_HALF = 0.5  # Of the widest path: rings that take less leave more unused than they use.
_SETTING_THAT_LIMITS = ("NCCL_MAX_NCHANNELS", "NCCL_MAX_CTAS", "NCCL_MAX_NRINGS", "NCCL_MAX_RINGS")
_SETTING_WITHOUT_P2P = ("NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL")


def nccl_evidence(run: Run) -> tuple[Evidence, ...]:
    """Return the remarkable facts of NCCL's setup, the network first."""
    return (*_of_network(run), *_of_channels(run), *_of_paths(run))


# ---- the network ---------------------------------------------------------------------------------


class NcclNetwork(Evidence):
    """NCCL chose a network other than sockets."""

    template = "NCCL sends over {networks:and}."

    networks: tuple[str, ...]


class SomeBySockets(Finding):
    """Some ranks use sockets, and others use a faster network."""

    template = "some ranks use NET/Socket and others do not ({networks:list})"

    networks: tuple[str, ...]


class SocketsBesideRdma(Finding):
    """NCCL uses sockets on a host that shows signs of RDMA; the finding gives the reasons."""

    template = "NET/Socket on a host with RDMA: {signs:;}"

    signs: tuple[Finding, ...]


class NcclSocketFallback(Evidence):
    """NCCL uses sockets, although a faster network is there."""

    template = "NCCL fell back: {what}."

    what: Finding


class NcclSockets(Evidence):
    """NCCL uses sockets, and the log shows no faster network."""

    template = (
        "NCCL sends by TCP sockets{interfaces:? over {interfaces}}. RDMA adapters of the hosts, if "
        "there are any, stay unused{reasons:?: {reasons:list}}."
    )

    interfaces: str
    reasons: tuple[Finding, ...]


class FoundAdapters(Finding):
    """NCCL found RDMA adapters."""

    template = "it found {adapters}"

    adapters: str


class InterfaceOfRdma(Finding):
    """The sockets go over an adapter that has RDMA."""

    template = "the sockets' interface {name} is {is_slingshot:Slingshot|InfiniBand}"

    name: str
    is_slingshot: bool


class LibfabricChoseTcp(Finding):
    """libfabric, which is made for RDMA, chose TCP."""

    template = "libfabric was loaded, and chose TCP"


class RdmaTurnedOff(Finding):
    """A setting turns RDMA off."""

    template = "NCCL_IB_DISABLE turns RDMA off"


class SocketsAskedFor(Finding):
    """A setting asks for sockets."""

    template = "NCCL_NET asks for sockets"


class PluginUnused(Finding):
    """A network plugin was loaded, but sockets are used."""

    template = "the plugin {name} was loaded, and not used"

    name: str


class NoVerbs(Finding):
    """The library that opens RDMA adapters is missing."""

    template = "libibverbs could not be opened"


class NoAdapter(Finding):
    """NCCL says that there is no RDMA adapter."""

    template = "NCCL found no adapter, as in a container that lacks /dev/infiniband"


def _of_network(run: Run) -> Iterator[Evidence]:
    facts, settings, opened = run.facts, _settings(run), (run.facts.nccl_said or "")
    networks = tuple(network for network in (facts.nccl_network or "").split(", ") if network)
    # On one host no network takes part. Either the log says that there is one node, or the paths
    # that were opened show it.
    nodes, paths = (facts.nccl_nodes or 0), (facts.nccl_paths or "")
    is_on_one_host = nodes == 1 or (not nodes and bool(paths) and "NET/" not in paths)
    if not networks or is_on_one_host:
        return
    signs: list[Finding] = []  # Signs that a host has RDMA.
    if facts.nccl_adapters:
        signs.append(FoundAdapters(adapters=facts.nccl_adapters))
    interfaces = (facts.nccl_interfaces or "").split(", ")
    of_rdma = next(
        (interface for interface in interfaces if re.fullmatch(r"ib\w*\d\w*|hsn\d+", interface)),
        None,
    )
    if of_rdma is not None:
        signs.append(InterfaceOfRdma(name=of_rdma, is_slingshot=of_rdma.startswith("hsn")))
    elif "libfabric" in (facts.nccl_network or ""):
        signs.append(LibfabricChoseTcp())
    reasons: list[Finding] = []  # The reasons why it is not used, as far as the log says.
    if settings.get("NCCL_IB_DISABLE", "0") not in ("", "0"):
        reasons.append(RdmaTurnedOff())
    if settings.get("NCCL_NET", "").lower() == "socket":
        reasons.append(SocketsAskedFor())
    if facts.nccl_plugins:
        reasons.append(PluginUnused(name=facts.nccl_plugins))
    if "libibverbs" in opened:
        reasons.append(NoVerbs())
    elif "No device found" in opened:
        reasons.append(NoAdapter())
    by_sockets = [network for network in networks if network.split(" (")[0] == "Socket"]
    if not by_sockets:
        yield NcclNetwork(value=0.0, networks=networks)
    elif len(by_sockets) < len(networks):
        yield NcclSocketFallback(value=1.0, what=SomeBySockets(networks=networks))
    elif signs:
        beside = SocketsBesideRdma(signs=(*signs, *reasons))
        yield NcclSocketFallback(value=1.0, what=beside)
    else:
        over = facts.nccl_interfaces or ""
        yield NcclSockets(value=1.0, interfaces=over, reasons=tuple(reasons))


# ---- channels ------------------------------------------------------------------------------------


class NcclRingsLeaveNvlink(Evidence):
    """The rings use another path than the widest one."""

    template = (
        "Rings go by {ring} and take {ring_gb_s:g} GB/s, where the widest path that NCCL saw has "
        "{widest_gb_s:g} GB/s."
    )

    ring: str
    ring_gb_s: float
    widest_gb_s: float


class FewerThanUsual(Finding):
    """The rings leave more of the widest path unused than they use."""

    template = (
        "{channels:g} channels where {usual} are usual. Its rings take {ring_gb_s:g} of the "
        "{widest_gb_s:g} GB/s of the widest path, which {usual} channels would fill"
        "{because:?: {because}}"
    )

    channels: float
    usual: int
    widest_gb_s: float
    ring_gb_s: float
    because: Finding | None


class LimitedBySetting(Finding):
    """A setting allows no more channels."""

    template = "{channels:g} channels, limited by {settings:list}"

    channels: float
    settings: tuple[str, ...]


class NcclFewChannels(Evidence):
    """NCCL uses fewer channels than it could."""

    template = "NCCL uses {what}."

    what: Finding


class NcclChannels(Evidence):
    """The number of channels that NCCL uses."""

    template = (
        "NCCL uses {value:g} channels.{is_usual_known:| "
        "NCCL_DEBUG_SUBSYS=INIT,GRAPH would tell how many are usual.}"
    )

    is_usual_known: bool


class SlowerOneWay(Finding):
    """A link that is slower in one direction than in the other."""

    template = "a link is slower in one direction: {link}"

    link: str


class SettingLimits(Finding):
    """Settings that allow no more channels."""

    template = "limited by {settings:list}"

    settings: tuple[str, ...]


class TopologyFromFile(Finding):
    """NCCL read its topology from a file."""

    template = "its topology was read from {file}"

    file: str


def _of_channels(run: Run) -> Iterator[Evidence]:
    channels = run.facts.nccl_channels or 0
    if channels < 1 or world(run) < 2:
        return
    reach, layout = (run.facts.nccl_reach_bps or 0), (run.facts.nccl_layout_bps or 0)
    settings = _settings(run)
    limits = tuple(
        f"{name}={value}"
        for name, value in settings.items()
        if name in _SETTING_THAT_LIMITS and value.isdecimal() and int(value[:9]) <= channels
    )
    ring = run.facts.nccl_ring_type or ""
    takes = {"ring_gb_s": layout / 8e9, "widest_gb_s": reach / 8e9}
    if 0 < layout < _HALF * reach and ring not in ("NVL", ""):
        yield NcclRingsLeaveNvlink(value=layout / reach, ring=ring, **takes)
    elif 0 < layout < _HALF * reach:
        because: Finding | None = None
        if uneven := (run.facts.nccl_uneven_links or "").partition(";")[0]:
            because = SlowerOneWay(link=uneven)
        elif limits:
            because = SettingLimits(settings=limits)
        elif topology := settings.get("NCCL_TOPO_FILE"):
            because = TopologyFromFile(file=topology)
        usual = round(channels * reach / layout)
        few = FewerThanUsual(channels=channels, usual=usual, because=because, **takes)
        yield NcclFewChannels(value=channels, what=few)
    elif limits:
        limited = LimitedBySetting(channels=channels, settings=limits)
        yield NcclFewChannels(value=channels, what=limited)
    else:
        yield NcclChannels(value=channels, is_usual_known=bool(layout))


# ---- paths and versions --------------------------------------------------------------------------


class NcclWithoutGdr(Evidence):
    """The bytes go through the host's memory on their way to the network."""

    template = (
        "NCCL copies through the host's memory on its way to the network. No path uses GPU Direct "
        "RDMA{is_disabled:?, which NCCL says is disabled}."
    )

    is_disabled: bool


class NcclSharedMemory(Evidence):
    """Devices of a host do not reach each other directly."""

    template = (
        "Some devices of a host reach each other through its memory only"
        "{settings:?, as {settings:and} asks}: {paths}."
    )

    settings: tuple[str, ...]
    paths: str


class NcclVersions(Evidence):
    """Ranks have different versions of NCCL."""

    template = "Ranks have different versions of NCCL: {versions}."

    versions: str


def _of_paths(run: Run) -> Iterator[Evidence]:
    paths, settings = (run.facts.nccl_paths or ""), _settings(run)
    by_rdma = [
        path for path in paths.split(", ") if re.search(r"NET/(?:IB|AWS|Libfabric|OFI)", path)
    ]
    if by_rdma and not any("GDRDMA" in path for path in by_rdma):
        yield NcclWithoutGdr(
            value=1.0, is_disabled="Direct RDMA Disabled" in (run.facts.nccl_said or "")
        )
    if "SHM" in paths or "direct shared memory" in paths:
        told = tuple(
            f"{name}={settings[name]}" for name in _SETTING_WITHOUT_P2P if name in settings
        )
        yield NcclSharedMemory(value=1.0, settings=told, paths=paths)
    versions = run.facts.nccl_version or ""
    if ", " in versions:
        yield NcclVersions(value=float(versions.count(", ") + 1), versions=versions)


# The shortcomings in the setup of communication, independent of their cost in time.
FALLS_SHORT = (NcclSocketFallback, NcclFewChannels, NcclWithoutGdr, NcclSharedMemory, NcclSockets)


def _settings(run: Run) -> dict[str, str]:
    pairs = (pair.partition("=") for pair in (run.facts.nccl_settings or "").split(", "))
    return {name: value.strip() for name, _, value in pairs if name}


SOURCE = Source(key="nccl", place=1, of=lambda run, account, rate_bps: nccl_evidence(run))
