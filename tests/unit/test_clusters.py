"""Described clusters as files: read, refused in one line, printed and read back equal."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from docs.making import reference
from fullwire.clusters import MOST_BYTES, cluster, description, names
from fullwire.clusters.cluster import Cluster, LeafSpine, Nics, OtherHost, Torus
from fullwire.clusters.description import as_toml, described
from fullwire.errors import UsageError
from tests.strategies import ODD_TOKENS, cases, fabrics

TORUS = 'kind = "torus"\nrows = 2\ncolumns = 2'
OURS = """
name = "ours"
nodes = 8
devices_per_node = 8

[inside]
kind = "switch"
rate = "450GB/s"
latency = "1us"
payload_share = 0.8

[nics]
per_node = 2
rate = "400Gbps"
latency = "4us"

[network]
kind = "fat-tree"
nodes_per_leaf = 4
oversubscription = "2:1"
latency = "1us"

[[hosts]]
node = 3
nic_rate = "100Gbps"
"""


def test_a_cluster_is_read_from_toml() -> None:
    fabric = described(OURS, "ours.toml")
    assert (fabric.name, fabric.nodes, fabric.devices, fabric.nics_per_node) == ("ours", 8, 64, 2)
    assert fabric.inside is not None
    assert (fabric.inside.rate_bps, fabric.inside.payload_share) == (3.6e12, 0.8)
    assert fabric.nic_of_device.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert fabric.network == LeafSpine(nodes_per_leaf=4, oversubscription=2, latency_s=1e-6)
    assert fabric.other_hosts == (OtherHost(node=3, nic_rate_bps=1e11),)


def test_a_mark_and_line_ends_of_editors_do_not_matter(tmp_path: Path) -> None:
    marked = b"\xef\xbb\xbf" + OURS.replace("\n", "\r\n").encode()
    (tmp_path / "ours.toml").write_bytes(marked)
    assert cluster(tmp_path / "ours.toml") == described(OURS, "ours.toml")


def test_the_example_of_the_format_is_one() -> None:
    assert description.__doc__ is not None
    example = re.findall(r"^    (.*)$", description.__doc__, re.MULTILINE)
    assert described("\n".join(example), "docs").devices == 64


def test_the_reference_has_every_key_that_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page of settings makes its table from the docstring of the module that reads."""
    asked: set[str] = set()
    check_keys = description._Table.check_keys

    def noted(table: description._Table, known: Sequence[str]) -> None:
        place = re.sub(r"\[\d+\]", "", table.name)
        asked.update(f"{place}.{key}".lstrip(".") for key in known)
        check_keys(table, known)

    monkeypatch.setattr(description._Table, "check_keys", noted)
    example = re.findall(r"^    (.*)$", description.__doc__ or "", re.MULTILINE)
    described("\n".join(example), "docs")
    described('name = "torus"\nnodes = 4\n[nics]\nrate = "1Gbps"\n[network]\n' + TORUS, "torus")
    assert {"inside.adds", "network.rows", "hosts.node", "measured.protocols.startup"} < asked
    assert asked <= {key.strip("`[]") for key, _, _ in reference.cluster_keys()}


@cases(150)
@given(fabrics())
def test_a_cluster_printed_reads_back_equal(fabric: Cluster) -> None:
    assert described(as_toml(fabric), "printed") == fabric


@pytest.mark.parametrize("name", names())
def test_built_in_clusters_say_what_their_figures_rest_on(name: str) -> None:
    fabric = cluster(name)
    assert fabric.name == name
    assert fabric.devices >= 2 * fabric.devices_per_node
    assert "assumed" in fabric.rests_on
    assert described(as_toml(fabric), name) == fabric


def test_built_in_clusters_have_the_figures_that_are_published() -> None:
    machines = {"dgx-a100", "dgx-h100", "gb200-nvl72"}
    clouds = {"p3dn", "p4d", "p5", "a3-high", "a3-mega", "a3-ultra", "nd-a100-v4"}
    assert set(names()) == machines | clouds | {"cloud-100g-tcp"}
    dgx, rack = cluster("dgx-h100"), cluster("gb200-nvl72")
    assert dgx.inside is not None
    assert rack.inside is not None
    assert (dgx.inside.rate_bps, dgx.nics_per_node, dgx.nics.rate_bps) == (8 * 450e9, 8, 400e9)
    assert (rack.devices_per_node, rack.inside.rate_bps) == (72, 8 * 900e9)
    rates_gbps = {"p4d": 400, "p5": 3200, "a3-high": 800, "a3-mega": 1600, "a3-ultra": 3200}
    for name, gbps in {**rates_gbps, "nd-a100-v4": 1600}.items():
        cloud = cluster(name)
        assert cloud.nics_per_node * cloud.nics.rate_bps == gbps * 1e9


def test_the_number_of_nodes_is_chosen() -> None:
    assert cluster("p3dn", 2).devices == 16
    assert cluster("dgx-h100", 2048).devices == 16_384
    torus = described(
        as_toml(
            Cluster(
                name="t",
                nodes=6,
                nics=Nics(rate_bps=1e9, per_node=4),
                network=Torus(rows=2, columns=3),
            )
        ),
        "t",
    )
    assert cluster(torus, 6) == torus
    with pytest.raises(UsageError, match=r"nodes: t is a torus of 2 x 3, expected 6, got 7"):
        cluster(torus, 7)


COUNT = "expected a whole number from 1 to 1,000,000,000"
UNIT = 'expected a text with a unit, like "100Gbps"'


@pytest.mark.parametrize(
    ("before", "after", "sentence"),
    [
        ("nodes = 8", "node = 8", "node: no such key, is nodes meant?"),
        ("nodes = 8", 'nodes = "8"', f"nodes: {COUNT}, got '8'"),
        ("nodes = 8\n", "", "nodes: expected a whole number, it is missing"),
        ("nodes = 8", "nodes = 0", f"nodes: {COUNT}, got 0"),
        ("nodes = 8", "nodes = true", f"nodes: {COUNT}, got True"),
        ('"400Gbps"', "400", f"nics.rate: {UNIT}, got 400"),
        (
            '"400Gbps"',
            '"400"',
            "nics.rate: expected a rate with its unit, like 10Gbps or 50GiB/s, got '400'",
        ),
        (
            '"400Gbps"',
            '"-4Gbps"',
            "nics.rate: expected more than 0, from 1 bps to a million Tbps, got '-4Gbps'",
        ),
        ('rate = "400Gbps"', "", f"nics.rate: {UNIT}, it is missing"),
        ('latency = "4us"', 'latancy = "4us"', "nics.latancy: no such key, is latency meant?"),
        (
            'latency = "4us"',
            "zzz = 1",
            "nics.zzz: no such key, expected per_node, rate, latency, payload_share, of_device, "
            "of_tables, lengthens_hops",
        ),
        ("share = 0.8", "share = 1.8", "inside.payload_share: expected above 0, up to 1, got 1.8"),
        ("share = 0.8", 'share = "80%"', "inside.payload_share: expected a number, got '80%'"),
        (
            "share = 0.8",
            "share = nan",
            "inside.payload_share: expected a plain number, like 4, got nan",
        ),
        ('"switch"', '"nvlink"', 'inside.kind: expected "switch" or "pcie", got \'nvlink\''),
        (
            "per_node = 2",
            "per_node = 3",
            "nics.per_node: 8 devices cannot be shared out evenly among 3 NICs: "
            "name each device's in nics.of_device",
        ),
        (
            "per_node = 2",
            "per_node = 2\nof_device = [0, 1]",
            "nics.of_device: expected a NIC from 0 to 1 for each of 8 devices, got 0, 1",
        ),
        (
            '"fat-tree"',
            '"tree"',
            'network.kind: expected "switch" or "fat-tree" or "rails" or "torus", got \'tree\'',
        ),
        ('"fat-tree"', '"switch"', "network.nodes_per_leaf: no such key, expected kind"),
        ('"2:1"', '"two"', "network.oversubscription: expected a ratio, like \"2:1\", got 'two'"),
        ("node = 3", "node = 8", "hosts.node: expected a node from 0 to 7, each once, got 8"),
        ('nic_rate = "100Gbps"', "", f"hosts[1].nic_rate: {UNIT}, it is missing"),
        (
            "[[hosts]]",
            "[hosts]",
            "hosts: expected tables [[hosts]], got {'node': 3, 'nic_rate': '100Gbps'}",
        ),
        ("[nics]", "[nic]", "nic: no such key, is nics meant?"),
        ("nodes = 8", "nodes = ", "expected TOML: Invalid value (at line 3, column 9)"),
    ],
)
def test_each_mistake_is_one_line_that_names_file_table_and_key(
    before: str, after: str, sentence: str
) -> None:
    assert before in OURS
    with pytest.raises(UsageError) as refused:
        described(OURS.replace(before, after, 1), "ours.toml")
    assert str(refused.value) == f"ours.toml: {sentence}"


def test_files_that_are_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cluster: expected a file or the built-in dgx-h100, got"):
        cluster("dgx-h10")
    with pytest.raises(UsageError, match="expected a file, got a directory"):
        cluster(tmp_path)
    odd = tmp_path / "odd.toml"
    odd.write_bytes(b'name = "\xff"')
    with pytest.raises(UsageError, match="expected text in UTF-8, byte 8 is none"):
        cluster(odd)
    odd.write_bytes(b"#" * (MOST_BYTES + 1))
    with pytest.raises(UsageError, match="expected a cluster in at most 262,144 bytes"):
        cluster(odd)
    odd.write_text("a = " + "[" * 100_000)
    with pytest.raises(UsageError, match="expected TOML"):
        cluster(odd)
    odd.write_text(OURS)
    assert cluster(str(odd)) == cluster(odd)


@cases(200)
@given(st.data())
def test_whatever_a_file_holds_it_is_a_cluster_or_refused_in_one_line(data: st.DataObject) -> None:
    """Cut, repeat and replace pieces of a description, and put odd ones in."""
    pieces = re.split(r"(\s+|=|\"|\[|\])", OURS)
    odd = [token.decode("latin-1") for token in ODD_TOKENS]
    values = [
        "-1",
        "1e9",
        "inf",
        "nan",
        "true",
        "[]",
        "{}",
        '""',
        "1979-05-27",
        '"1Gbps"',
        "0",
        "9" * 30,
    ]
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(pieces) - 1))
        pieces[place] = data.draw(st.sampled_from([*odd, *values, *pieces]))
    with one_line_if_refused():
        fabric = described("".join(pieces), "odd")
        assert described(as_toml(fabric), "printed") == fabric
        assert fabric.link_count == len(fabric.link_rate_bps)


@contextmanager
def one_line_if_refused() -> Iterator[None]:
    try:
        yield
    except UsageError as refused:
        sentence = str(refused)
    else:
        return
    assert re.fullmatch("odd: .{1,400}", sentence)
