"""The facts about hosts in a run: the place of each rank, the line rates, and their sources."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from fullwire.recorder.inside.journal import BLOCK, DEFINITIONS, HEADER_BYTES, TAG
from fullwire.recorder.record import join
from fullwire.recorder.sampler import SUFFIX
from fullwire.recorder.samples import Kind
from fullwire.run.placement import host_line_rates_bps, host_of_rank
from fullwire.run.run import Run
from fullwire.run.store import read_run, write
from tests.builders import a_process
from tests.lab.test_sampler import as_written, block
from tests.unit.test_clocks import set_header


def joined(directory: Path, hosts: dict[int, str], rates_bps: dict[str, float]) -> Run:
    """Join a recording of some ranks, each step 10 ms after the last, and of their hosts' links."""
    for rank, host in hosts.items():
        before = set(directory.glob("*.journal"))
        a_process(directory, steps=3, rank=rank).close()
        [file] = set(directory.glob("*.journal")) - before
        set_header(file, rank=rank, host=host, machine="m", unix_ns=10**15, monotonic_ns=0)
    for host, rate_bps in rates_bps.items():
        write_samples(directory / f"{host}{SUFFIX}", host, rate_bps)
    return join([directory], directory / "x.run", replace=True).run


def write_samples(path: Path, host: str, rate_bps: float) -> None:
    """Write the samples of a sampler that saw one link twice, 1,000 ns apart."""
    header = {
        "status": "ended",
        "host": host,
        "machine": "m",
        "reason": "",
        "watched": 1,
        "monotonic_ns": 0,
        "unix_ns": 10**15,
    }
    names = json.dumps([{"kind": "links", "links": [{"name": "eth9", "speed_bps": rate_bps}]}])
    rows = [Kind.LINK, 0, 1_000, 1_000, *([0, 500] * 5)]
    content = json.dumps(header).encode().ljust(HEADER_BYTES)
    content += BLOCK.pack(TAG, DEFINITIONS, len(names), zlib.crc32(names.encode()))
    path.write_bytes(content + names.encode() + block(b"".join(map(as_written, rows))))


def test_a_rank_that_left_nothing_keeps_its_place(tmp_path: Path) -> None:
    run = joined(tmp_path, {1: "b"}, {})
    assert "rank 0: nothing was recorded" in run.missing
    assert host_of_rank(run) == {1: "b"}


def test_the_line_rates_of_several_hosts_are_their_adapters(tmp_path: Path) -> None:
    run = joined(tmp_path, {0: "a", 1: "b"}, {"a": 10e9, "b": 25e9})
    assert host_line_rates_bps(run) == {"a": 10e9, "b": 25e9}
    assert set(run.links.host) == {"a", "b"}


def test_ranks_of_one_host_have_no_line_rate(tmp_path: Path) -> None:
    run = joined(tmp_path, {0: "a", 1: "a"}, {"a": 10e9})
    assert run.facts.line_rate_bps is None
    assert len(run.links) == 2


def test_each_link_keeps_its_own_speed_and_runs_from_before_have_none(tmp_path: Path) -> None:
    run = joined(tmp_path, {0: "a", 1: "a"}, {"a": 10e9, "b": 25e9})
    assert run.links.speed_bps.tolist() == [10e9, 10e9, 25e9, 25e9]
    file = write(run, tmp_path / "old.run") / "links.parquet"
    pq.write_table(pq.read_table(file).drop_columns(["speed_bps"]), file)
    described = json.loads((file.parent / "run.json").read_text())
    (file.parent / "run.json").write_text(json.dumps(described | {"crc32": {}}))
    old = read_run(file.parent)
    assert old.complete
    assert old.links.speed_bps.tolist() == [0.0] * 4
    assert old.links.tx_bytes.tolist() == run.links.tx_bytes.tolist()


@pytest.mark.parametrize("dilation", [1.0, 10.0])
def test_what_a_lab_knows_is_believed_before_adapters_and_samples_are_undilated(
    tmp_path: Path, dilation: float
) -> None:
    facts = {"line_rate_bps": 1e9, "dilation": dilation}
    known = {"source": "a lab", "basis": "measured", "facts": facts}
    (tmp_path / "job.json").write_text(json.dumps(known))
    run = joined(tmp_path, {0: "a", 1: "b"}, {"a": 10e9, "b": 25e9})
    assert host_line_rates_bps(run) == {"a": 1e9, "b": 1e9}
    first, second = run.links.time_ns[run.links.host == "a"].tolist()
    assert second - first == 1_000 / dilation
    assert run.links.tx_bytes.tolist() == [0, 500] * 2
