"""Traces of many ranks: read side by side, written rank by rank, explained one rank at a time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fullwire
from fullwire.answers import opening
from fullwire.errors import DamagedInput, UsageError
from fullwire.importers import contents, import_run, read
from fullwire.report.as_data import explanation_object
from fullwire.report.page import contents as page_contents
from fullwire.run.store import by_ranks, read_run
from tests.conftest import Cli
from tests.unit.test_kineto import ALL_REDUCE, Job, a_ddp_step, reduced


def five_ranks(where: Path, *, steps: bool = True) -> Path:
    """Make a job of five ranks with buckets and clocks of their own."""
    where.mkdir(exist_ok=True)
    for rank in range(5):
        job = Job(rank, world=5, baseTimeNanoseconds=5_000_000 * rank)
        for number in range(2, 8):
            a_ddp_step(job, number)
            begin = 1_000 * number + 810
            job.kernel(
                ALL_REDUCE,
                begin + 10 * rank,
                begin + 100,
                launch=begin - 700,
                stream=9,
                **reduced(5_000),
            )
        if not steps:
            job.events = [each for each in job.events if "ProfilerStep" not in each["name"]]
        job.write(where / f"{rank}.json")
    return where


@pytest.mark.parametrize("processes", [1, 2])
def test_ranks_read_side_by_side_make_the_same_run(tmp_path: Path, processes: int) -> None:
    traces = five_ranks(tmp_path / "traces")
    heard: list[tuple[int, int]] = []
    place = import_run(
        tmp_path / "job.run",
        traces,
        processes=processes,
        told=lambda done, of: heard.append((done, of)),
    )
    found, expected = read_run(place), read(traces)
    assert heard == [(done, 5) for done in range(1, 6)]
    assert found.facts == expected.facts
    assert found.missing == expected.missing
    assert found.provenance == expected.provenance
    for (name, table), (_, other) in zip(found.tables(), expected.tables(), strict=True):
        for column, values in table.columns().items():
            assert values.tolist() == getattr(other, column).tolist(), f"{name}.{column}"
    assert sorted(path.name for path in place.iterdir()) == [
        "collectives",
        "gradients",
        "run.json",
        "spans",
    ]
    assert len(list((place / "spans").iterdir())) == 5


@pytest.mark.parametrize("steps", [True, False])
@pytest.mark.parametrize("bandwidth", [None, "100Gbps"])
def test_one_rank_at_a_time_gives_the_same_explanation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: bool, bandwidth: str | None
) -> None:
    place = import_run(tmp_path / "job.run", five_ranks(tmp_path / "traces", steps=steps))
    whole = explanation_object(fullwire.explain(place, bandwidth=bandwidth))
    monkeypatch.setattr(opening, "LARGE", 0)
    found = fullwire.explain(place, bandwidth=bandwidth)
    assert not found.detail.lines  # so it was one at a time
    assert explanation_object(found) == whole


def test_an_outline_holds_few_of_the_spans(tmp_path: Path) -> None:
    place = import_run(tmp_path / "job.run", five_ranks(tmp_path / "traces"))
    found = by_ranks(place, 0)
    assert found is not None
    assert [set(part.rank) for part in found.spans()] == [{0}, {1}, {2}, {3}, {4}]
    others = found.outline.spans.rows(found.outline.spans.rank > 0)
    assert set(others.name) == {"step", "backward"}
    assert by_ranks(place, 10**9) is None


def test_a_damaged_rank_is_missing_from_an_explanation_rank_by_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = import_run(tmp_path / "job.run", five_ranks(tmp_path / "traces"))
    (place / "spans/000002.parquet").write_bytes(b"PAR1 but nothing else")
    whole = explanation_object(fullwire.explain(place))
    monkeypatch.setattr(opening, "LARGE", 0)
    found = fullwire.explain(place)
    assert not found.detail.lines
    assert explanation_object(found) == whole
    assert any("spans/000002.parquet: damaged" in each for each in whole["warnings"])


def test_what_is_in_a_run_is_counted_a_file_at_a_time(tmp_path: Path, cli: Cli) -> None:
    place = import_run(tmp_path / "job.run", five_ranks(tmp_path / "traces"))
    run = read_run(place)
    told = json.loads(cli("show", place, "--json").stdout)
    assert told["tables"] == {name: len(table) for name, table in run.tables() if len(table)}
    assert told["missing"] == list(run.missing)
    rows = len(run.spans.rows(run.spans.rank == 2))
    (place / "spans/000002.parquet").write_bytes(b"PAR1 but nothing else")
    found, counts = contents(place)
    assert counts["spans"] == len(run.spans) - rows
    assert found.missing == read_run(place).missing
    assert any("spans/000002.parquet: damaged" in sentence for sentence in found.missing)


def test_ranks_that_share_a_file_are_read_together(tmp_path: Path) -> None:
    run = read(five_ranks(tmp_path / "traces"))
    with fullwire.run.store.RunWriter(tmp_path / "x.run") as writer:
        for ranks in ([0, 1], [1, 2], [3], [4]):  # each file has half of rank 1
            mine = np.isin(run.spans.rank, ranks)
            if 1 in ranks:
                half = run.spans.start_ns < np.median(run.spans.start_ns)
                mine &= (run.spans.rank != 1) | (half if 0 in ranks else ~half)
            writer.took(writer.piece().write({"spans": run.spans.rows(mine)}))
        writer.finish(run.provenance, run.facts, run.missing)
    found = by_ranks(tmp_path / "x.run", 0)
    assert found is not None
    assert [set(part.rank) for part in found.spans()] == [{0, 1, 2}, {3}, {4}]


def test_broken_ranks_leave_the_others_and_are_counted(tmp_path: Path) -> None:
    traces = five_ranks(tmp_path / "traces")
    (traces / "1.json").write_text("garbage")
    (traces / "again.json").write_bytes((traces / "2.json").read_bytes())
    (traces / "4.json").write_bytes((traces / "4.json").read_bytes()[:3_000])
    run = read_run(import_run(tmp_path / "job.run", traces, processes=2))
    assert sorted(set(run.spans.rank)) == [0, 2, 3, 4]
    for said in ("not a profiler trace", "rank 2 is in", "ends in the middle", "4 of 5 ranks"):
        assert any(said in sentence for sentence in run.missing), said


def test_what_cannot_be_imported_is_refused_in_one_line(tmp_path: Path, cli: Cli) -> None:
    (tmp_path / "traces").mkdir()
    (tmp_path / "traces/a.json").write_text("{}")
    (tmp_path / "traces/b.json").write_text('{"traceEvents": [')
    done = cli("import", tmp_path / "traces", "-o", tmp_path / "x.run")
    assert (done.returncode, len(done.stderr.splitlines())) == (3, 1)
    with pytest.raises(DamagedInput):
        import_run(tmp_path / "x.run", tmp_path / "traces", processes=2)
    with pytest.raises(UsageError, match="regular expression"):
        import_run(tmp_path / "x.run", tmp_path / "traces", communication="(")
    with pytest.raises(UsageError, match="--processes belongs to profiler traces"):
        import_run(tmp_path / "x.run", "vgg16@v100", processes=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["traces"]


@pytest.mark.parametrize("steps", [True, False])
def test_a_page_drawn_one_rank_at_a_time_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: bool
) -> None:
    place = import_run(tmp_path / "job.run", five_ranks(tmp_path / "traces", steps=steps))
    whole = page_contents([place])
    monkeypatch.setattr(opening, "LARGE", 0)
    assert page_contents([place]) == whole


def test_what_ifs_and_comparisons_need_the_outline_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = import_run(tmp_path / "job.run", five_ranks(tmp_path / "traces"))

    def predicted() -> dict[str, list[Any]]:
        found = fullwire.whatif(place, workers=(5, 64), bandwidth="10Gbps,100Gbps")
        return {name: column.tolist() for name, column in found.columns().items()}

    whole = predicted()
    monkeypatch.setattr(opening, "LARGE", 0)
    outline = opening.opened(place).run
    assert len(outline.spans) < len(read_run(place).spans)
    assert predicted() == whole
    assert fullwire.compare(outline, outline).ratio == 1
