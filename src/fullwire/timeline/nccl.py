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
    networks = [each for each in _text(run, "nccl_network").split(", ") if each]
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
        over = _text(run, "nccl_interfaces")
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
    adapters = _text(run, "nccl_adapters")
    if adapters:
        yield f"it found {adapters}"
    for name in _text(run, "nccl_interfaces").split(", "):
        if re.fullmatch(r"ib\w*\d\w*|hsn\d+", name):
            kind = "Slingshot" if name.startswith("hsn") else "InfiniBand"
            yield f"the sockets' interface {name} is {kind}"
            return
    if "libfabric" in _text(run, "nccl_network"):
        yield "libfabric was loaded, and chose TCP"


def _reasons(run: Run) -> Iterator[str]:
    """Say why RDMA is not used, as far as the log tells."""
    settings, said, plugins = _settings(run), _said(run), _text(run, "nccl_plugins")
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
    channels = _number(run, "nccl_channels")
    if channels < 1 or world(run) < 2:
        return
    reach, layout = _number(run, "nccl_reach_bps"), _number(run, "nccl_layout_bps")
    limits = [
        f"{name}={value}"
        for name, value in _settings(run).items()
        if name in _SETTING_THAT_LIMITS and value.isdecimal() and int(value[:9]) <= channels
    ]
    because = _because(run, limits)
    stays_on_nvlink = _text(run, "nccl_ring_type") in ("NVL", "")
    if 0 < layout < _HALF * reach and not stays_on_nvlink:
        yield Evidence(
            name="nccl_rings_leave_nvlink",
            value=layout / reach,
            sentence=f"Rings go by {_text(run, 'nccl_ring_type')} and take {layout / 8e9:g} GB/s, "
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
    uneven = _text(run, "nccl_uneven_links").partition(";")[0]
    if uneven:
        return f"; a link is slower in one direction: {uneven}"
    topology = _settings(run).get("NCCL_TOPO_FILE")
    if limits:
        return f"; limited by {', '.join(limits)}"
    return f"; its topology was read from {topology}" if topology else ""


def _is_on_one_host(run: Run) -> bool:
    """Say whether no network takes part: as told, or as the paths that were opened show."""
    nodes, paths = _number(run, "nccl_nodes"), _text(run, "nccl_paths")
    return nodes == 1 or (not nodes and bool(paths) and "NET/" not in paths)


def _of_paths(run: Run) -> Iterator[Evidence]:
    paths, settings = _text(run, "nccl_paths"), _settings(run)
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
    versions = _text(run, "nccl_version")
    if ", " in versions:
        yield Evidence(
            name="nccl_versions",
            value=float(versions.count(", ") + 1),
            sentence=f"Ranks have different versions of NCCL: {versions}.",
        )


def _text(run: Run, fact: str) -> str:
    value = run.facts.get(fact, "")
    return value if isinstance(value, str) else ""


def _number(run: Run, fact: str) -> float:
    value = run.facts.get(fact, 0)
    return float(value) if isinstance(value, int | float) else 0.0


def _said(run: Run) -> str:
    return _text(run, "nccl_said")


def _settings(run: Run) -> dict[str, str]:
    pairs = (each.partition("=") for each in _text(run, "nccl_settings").split(", "))
    return {name: value.strip() for name, _, value in pairs if name}
