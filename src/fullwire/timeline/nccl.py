"""What NCCL's own log speaks for: a network or paths that fall short of what the hosts have.

Each sentence names what it rests on. How many channels are usual is not a table of devices: NCCL
says how wide the widest path of a device is, and what its rings were laid out for. Rings that fill
the path would be so many times more, and channels with them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from fullwire.run.run import Run
from fullwire.timeline.transfers import world
from fullwire.timeline.utilization import Evidence

_HALF = 0.5  # of the widest path: rings that take less leave more unused than they use
_SETTING_THAT_LIMITS = ("NCCL_MAX_NCHANNELS", "NCCL_MAX_CTAS", "NCCL_MAX_NRINGS", "NCCL_MAX_RINGS")
_SETTING_WITHOUT_P2P = ("NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL")


def nccl_evidence(run: Run) -> tuple[Evidence, ...]:
    """Return what is remarkable in how NCCL was set up, the network first."""
    return (*_of_network(run), *_of_channels(run), *_of_paths(run), *_of_versions(run))


def _of_network(run: Run) -> Iterator[Evidence]:
    networks = [each for each in (run.facts.nccl_network or "").split(", ") if each]
    if not networks or _is_on_one_host(run):
        return
    by_sockets = [each for each in networks if each.split(" (")[0] == "Socket"]
    signs, reasons = list(_signs_of_rdma(run)), list(_reasons(run))
    if not by_sockets:
        sentence = f"NCCL sends over {' and '.join(networks)}."
        yield Evidence(name="nccl_network", value=0.0, sentence=sentence)
    elif len(by_sockets) < len(networks):
        yield _fallback(f"some ranks use NET/Socket and others do not ({', '.join(networks)})")
    elif signs:
        yield _fallback(f"NET/Socket on a host with RDMA: {'; '.join([*signs, *reasons])}")
    else:
        over = run.facts.nccl_interfaces or ""
        why = f"; {'; '.join(reasons)}" if reasons else ""
        yield Evidence(
            name="nccl_sockets",
            value=1.0,
            sentence=f"NCCL sends by TCP sockets{f' over {over}' if over else ''}: if the hosts "
            f"have RDMA adapters, they are not used{why}.",
        )


def _fallback(what: str) -> Evidence:
    return Evidence(name="nccl_socket_fallback", value=1.0, sentence=f"NCCL fell back: {what}.")


def _signs_of_rdma(run: Run) -> Iterator[str]:
    """Say how the log shows that a host has RDMA."""
    adapters = run.facts.nccl_adapters or ""
    if adapters:
        yield f"it found {adapters}"
    for name in (run.facts.nccl_interfaces or "").split(", "):
        if re.fullmatch(r"ib\w*\d\w*|hsn\d+", name):
            kind = "Slingshot" if name.startswith("hsn") else "InfiniBand"
            yield f"the sockets' interface {name} is {kind}"
            return
    if "libfabric" in (run.facts.nccl_network or ""):
        yield "libfabric was loaded, and chose TCP"


def _reasons(run: Run) -> Iterator[str]:
    """Say why RDMA is not used, as far as the log tells."""
    settings, said, plugins = _settings(run), _said(run), (run.facts.nccl_plugins or "")
    if settings.get("NCCL_IB_DISABLE", "0") not in ("", "0"):
        yield "NCCL_IB_DISABLE turns RDMA off"
    if settings.get("NCCL_NET", "").lower() == "socket":
        yield "NCCL_NET asks for sockets"
    if plugins:
        yield f"the plugin {plugins} was loaded, and not used"
    if "libibverbs" in said:
        yield "libibverbs could not be opened"
    elif "No device found" in said:
        yield "NCCL found no adapter, as in a container without /dev/infiniband"


def _of_channels(run: Run) -> Iterator[Evidence]:
    channels = run.facts.nccl_channels or 0
    if channels < 1 or world(run) < 2:
        return
    reach, layout = run.facts.nccl_reach_bps or 0, run.facts.nccl_layout_bps or 0
    limits = [
        f"{name}={value}"
        for name, value in _settings(run).items()
        if name in _SETTING_THAT_LIMITS and value.isdecimal() and int(value[:9]) <= channels
    ]
    because = _because(run, limits)
    stays_on_nvlink = (run.facts.nccl_ring_type or "") in ("NVL", "")
    if 0 < layout < _HALF * reach and not stays_on_nvlink:
        yield Evidence(
            name="nccl_rings_leave_nvlink",
            value=layout / reach,
            sentence=f"Rings go by {run.facts.nccl_ring_type} and take {layout / 8e9:g} GB/s, "
            f"where the widest path that NCCL saw has {reach / 8e9:g} GB/s.",
        )
    elif 0 < layout < _HALF * reach:
        usual = round(channels * reach / layout)
        yield _few(
            channels,
            f"{channels:g} channels where {usual} are usual: the widest path that NCCL saw has "
            f"{reach / 8e9:g} GB/s, its rings take {layout / 8e9:g} GB/s of it, and {usual} "
            f"channels would fill it{because}",
        )
    elif limits:
        yield _few(channels, f"{channels:g} channels, limited by {', '.join(limits)}")
    else:
        unknown = "" if layout else "; how many are usual, NCCL_DEBUG_SUBSYS=INIT,GRAPH would tell"
        yield Evidence(
            name="nccl_channels",
            value=channels,
            sentence=f"NCCL uses {channels:g} channels{unknown}.",
        )


def _few(channels: float, what: str) -> Evidence:
    return Evidence(name="nccl_few_channels", value=channels, sentence=f"NCCL uses {what}.")


def _because(run: Run, limits: list[str]) -> str:
    uneven = (run.facts.nccl_uneven_links or "").partition(";")[0]
    if uneven:
        return f"; a link is slower in one direction: {uneven}"
    topology = _settings(run).get("NCCL_TOPO_FILE")
    if limits:
        return f"; limited by {', '.join(limits)}"
    return f"; its topology was read from {topology}" if topology else ""


def _is_on_one_host(run: Run) -> bool:
    """Say whether no network takes part: as told, or as the paths that were opened show."""
    nodes, paths = run.facts.nccl_nodes or 0, (run.facts.nccl_paths or "")
    return nodes == 1 or (not nodes and bool(paths) and "NET/" not in paths)


def _of_paths(run: Run) -> Iterator[Evidence]:
    paths, settings = (run.facts.nccl_paths or ""), _settings(run)
    by_rdma = [
        each for each in paths.split(", ") if re.search(r"NET/(?:IB|AWS|Libfabric|OFI)", each)
    ]
    if by_rdma and not any("GDRDMA" in each for each in by_rdma):
        why = "; NCCL says that it is disabled" if "Direct RDMA Disabled" in _said(run) else ""
        yield Evidence(
            name="nccl_without_gdr",
            value=1.0,
            sentence="NCCL copies through the host's memory on its way to the network: no path "
            f"uses GPU Direct RDMA{why}.",
        )
    if "SHM" in paths or "direct shared memory" in paths:
        told = [f"{name}={settings[name]}" for name in _SETTING_WITHOUT_P2P if name in settings]
        why = f", as {' and '.join(told)} asks" if told else ""
        yield Evidence(
            name="nccl_shared_memory",
            value=1.0,
            sentence=f"Some devices of a host reach each other through its memory only{why}: "
            f"{paths}.",
        )


def _of_versions(run: Run) -> Iterator[Evidence]:
    versions = run.facts.nccl_version or ""
    if ", " in versions:
        yield Evidence(
            name="nccl_versions",
            value=float(versions.count(", ") + 1),
            sentence=f"Ranks have different versions of NCCL: {versions}.",
        )


def _said(run: Run) -> str:
    return run.facts.nccl_said or ""


def _settings(run: Run) -> dict[str, str]:
    pairs = (each.partition("=") for each in (run.facts.nccl_settings or "").split(", "))
    return {name: value.strip() for name, _, value in pairs if name}
