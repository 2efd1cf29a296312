"""The usual protocols of collective libraries, for a machine without tables of its own."""

from __future__ import annotations

from dataclasses import replace

from fullwire.clusters.cluster import Cluster, Inside
from fullwire.clusters.measured import Measured, Protocol

# The usual protocols, for a cluster without tables of its own. Their figures are medians over
# public tables. Within a node the tables are of A100, H100, H200, B200, B300, GB200 and GB300
# (ai-dynamo/aiconfigurator@095f58a51c4c). There are also A100 on up to 16 nodes
# (NetX-lab/Echo@15f0d12c4174), and the A100 of microsoft/superbenchmark.
# The usual share of a NIC's rate, 78 %, is no median. It lies between 64 %, measured on Echo's
# machine, and 92 %, which no table shows: an assumption for tuned machines.
USUAL_PROTOCOLS = (
    Protocol(
        name="small",
        startup_s=9e-6,
        inside_hop_s=1.05e-6,
        between_hop_s=6.5e-6,
        inside_share=0.26,
        between_share=0.12,
    ),
    Protocol(
        name="middle",
        startup_s=22e-6,
        inside_hop_s=0.68e-6,
        between_hop_s=16e-6,
        inside_share=0.48,
        between_share=0.50,
    ),
    Protocol(
        name="large",
        startup_s=45e-6,
        inside_hop_s=1.6e-6,
        between_hop_s=26e-6,
        inside_share=0.76,
        between_share=0.78,
    ),
)

# The same within a node by the rate of a device, where tables of its kind differ. The first row is
# B200, B300, GB200 and GB300 (900 GB/s each way), the second H100 and H200 (450). Each protocol has
# its start-up, hop and share. The last number of a row is the share that adding switches fill.
_USUAL_INSIDE = (
    (8 * 700e9, ((8.4e-6, 1.2e-6, 0.26), (11e-6, 1.0e-6, 0.38), (21e-6, 2.8e-6, 0.72)), 0.64),
    (8 * 400e9, ((5.7e-6, 0.76e-6, 0.37), (15e-6, 0.84e-6, 0.71), (56e-6, 1.6e-6, 0.84)), 0.78),
)
# Rings fill more of NICs of 400 Gbps and more, if their rate is stated: MI325X on 2 to 8 nodes,
# H100 on 4 and on 128 nodes (88, 92 and 92 %). Up to 200 Gbps they fill the usual share, and it
# rises between both rates, so that no time jumps.
_SLOW_NIC_BPS, _FAST_NIC_BPS, _FAST_NIC_SHARE = 200e9, 400e9, 0.88
# The usual hops are of adapters with at most so long a way. A hop is several messages in a row.
# Each pays the latency of a cloud's transport (`lengthens_hops`), so the hop grows by a factor.
# Any other latency counts once. The longest one that tables confirm is EFA's on p4d: a longer one
# is a matter of distance, which a hop's messages cover together. The least filled NICs of a machine
# that works are those of GPUDirect-TCPX.
_ADAPTERS_S, _SLOWEST_S, _LEAST_FILLED = 5e-6, 75e-6, 0.5
USUAL_TREE_SHARE, USUAL_PAIR_SHARE, USUAL_SWITCH_SHARE = 0.9, 0.7, 0.82
_OF_USUAL = 0.17  # how sure a time is without tables: the deviation of its logarithm
# Than a tree of two nodes needs. Switches that add make links look up to 1.3 times as fast, and
# tables repeat within a few percent. At 0.8 times that need, two nodes are as usual. Between both,
# NICs of a higher rate gain as much as such a tree loses: no time grows.
_CLEARLY_MORE, _ABOUT_AS_MUCH = 1.4, 0.8


def usual(cluster: Cluster) -> Measured:
    """Return the usual protocols on links of these kinds, for a machine without tables.

    The description's start-up, payload shares and long latencies between nodes stay. The stated
    start-up is that of large messages: the quicker protocols' ones are to it as they usually are. A
    tree of two nodes sends half where NICs hold it up (`half_weight`).
    """
    own = 1.0 if cluster.inside is None else cluster.inside.payload_share
    nics, large = cluster.nics, USUAL_PROTOCOLS[-1]
    beyond_s, factor = max(nics.latency_s - _ADAPTERS_S, 0.0), 1.0
    if nics.lengthens_hops:
        factor = min(max(nics.latency_s, _ADAPTERS_S), _SLOWEST_S) / _ADAPTERS_S
        beyond_s = max(nics.latency_s - _SLOWEST_S, 0.0)
    protocols: tuple[Protocol, ...] = USUAL_PROTOCOLS
    switch_share = USUAL_SWITCH_SHARE
    for rate_bps, of_kind, share in _USUAL_INSIDE:
        if cluster.inside is not None and cluster.inside.rate_bps >= rate_bps:
            protocols = tuple(
                replace(each, startup_s=startup_s, inside_hop_s=hop_s, inside_share=filled)
                for each, (startup_s, hop_s, filled) in zip(protocols, of_kind, strict=True)
            )
            switch_share = share
            break
    starts_s = cluster.startup_s or protocols[-1].startup_s
    half = half_weight(nics.rate_bps * nics.per_node, cluster.inside)
    inside = own / protocols[-1].inside_share if own != 1 else 1.0
    faster = (nics.rate_bps - _SLOW_NIC_BPS) / (_FAST_NIC_BPS - _SLOW_NIC_BPS)
    faster = 0.0 if nics.of_tables else min(max(faster, 0.0), 1.0)
    filled = large.between_share + faster * (_FAST_NIC_SHARE - large.between_share)
    between = (filled if nics.payload_share == 1 else nics.payload_share) / large.between_share
    return Measured(
        protocols=tuple(
            replace(
                protocol,
                startup_s=protocol.startup_s * starts_s / protocols[-1].startup_s,
                between_hop_s=protocol.between_hop_s * factor + beyond_s,
                inside_share=protocol.inside_share * inside,
                between_share=protocol.between_share * between,
            )
            for protocol in protocols
        ),
        tree_share=USUAL_TREE_SHARE,
        tree_nics_share=large.between_share / filled,  # others fill no more of fast NICs
        pair_share=0.0 if half == 1 else USUAL_PAIR_SHARE,
        half_weight=0.0 if half == 1 else half,
        switch_share=switch_share,
        spread=_OF_USUAL,
        source="",
    )


def ends_of_transport(cluster: Cluster) -> tuple[Measured, Measured]:
    """Return the quickest and the slowest usual protocols of a cloud's transport.

    Tables of one cloud differ by a factor of two and more between versions of its software. The
    quickest hop has the latency once.
    """
    nics = cluster.nics
    latency_s, share = max(nics.latency_s, _SLOWEST_S), min(nics.payload_share, _LEAST_FILLED)
    quickest = replace(nics, lengthens_hops=False)
    slowest = replace(nics, latency_s=latency_s, payload_share=share)
    return usual(replace(cluster, nics=quickest)), usual(replace(cluster, nics=slowest))


def with_usual_startup(cluster: Cluster) -> Cluster:
    """Return a cluster of several devices a node with a library's start-up, if it states none."""
    if cluster.startup_s or cluster.is_torus or cluster.inside is None:
        return cluster
    return replace(cluster, startup_s=usual(cluster).protocols[-1].startup_s)


def half_weight(nics_bps: float, inside: Inside | None) -> float:
    """Say whether the NICs of a node, and not its inner links, hold up a tree of two nodes.

    1 is surely, and 0 is not. The tree sends each byte twice over the links of a device, and once
    over NICs.
    """
    if inside is None:
        return 0.0
    least_bps, most_bps = (inside.rate_bps / 2 / more for more in (_CLEARLY_MORE, _ABOUT_AS_MUCH))
    return min(max((most_bps - nics_bps) / (most_bps - least_bps), 0.0), 1.0)
