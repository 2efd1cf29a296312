"""Results in Python and in notebooks: their text, data frames, paths as runs."""

from __future__ import annotations

import dataclasses
import inspect
import re
import shutil
import sys
import textwrap
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import fullwire as fw
from fullwire.display import LONGEST, Result
from fullwire.errors import UsageError
from fullwire.run.run import Provenance, Run
from tests.old_answers import DATA
from tests.traced_plans import traced
from tests.unit.test_flow_records import ipfix

ANY: Any = fw  # It takes arguments of types that the functions do not state.
RUNS = DATA / "format-1"
GLOO, HALF, PACKETS = (RUNS / f"lab-{name}.run" for name in ("gloo", "half", "packets"))
EVIL = "</b><script>alert(1)</script> \x1b[31m\u202e & '\" " + "A" * 1000
RESULTS: dict[str, Callable[[], Result]] = {
    "run": lambda: fw.read(GLOO),
    "table": lambda: fw.read(GLOO).spans,
    "explain": lambda: fw.explain(GLOO),
    "explain without times": lambda: fw.explain(RUNS / "nccl-log.run"),
    "whatif": lambda: fw.whatif("vgg16@v100", bandwidth="1Gbps,10Gbps", workers=8),
    "compare": lambda: fw.compare(GLOO, HALF),
    "flows": lambda: fw.flows(PACKETS),
    "collective": lambda: fw.collective("allreduce", bytes=1, workers=2, bandwidth=1),
    "tuned": lambda: fw.collective("allreduce", bytes="64MiB", cluster="p3dn", algorithm="auto"),
    "cluster": lambda: fw.cluster("dgx-h100", nodes=16),
    "workload": lambda: fw.workloads.workload("vgg16@v100"),
}
TABLE, PICTURE = {"table", "thead", "tbody", "tr", "th", "td"}, {"svg", "title", "text", "rect"}
ALLOWED = {"div", "p", "b", "br", *TABLE, *PICTURE}
STARTS_JOBS = {  # their examples are only read
    *("apply_fixes", "compress", "doctor", "join", "log"),
    *("record", "run_recipe", "run_workers", "study", "tune", "watch", "watching", "wire"),
}
# Loading these loads torch; tests/torch/test_codecs_here.py runs their examples.
NEEDS_TORCH = ("Job", "codecs", "compress", "elastic", "wire")
FUNCTIONS = sorted(
    name for name in fw.__all__ if name not in NEEDS_TORCH and inspect.isfunction(getattr(fw, name))
)


class Parts(HTMLParser):
    """Notes the elements of HTML, and whether each is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        if tag != "br":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag != "rect":
            assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)


@pytest.mark.parametrize("name", RESULTS)
def test_a_result_says_what_it_is_in_one_to_three_lines(name: str) -> None:
    result = RESULTS[name]()
    lines = repr(result).splitlines()
    assert lines[0].startswith(f"{type(result).__name__}: ")
    assert 1 <= len(lines) <= 3
    assert max(map(len, lines)) <= LONGEST + len(type(result).__name__) + 2
    parts = Parts(result._repr_html_())
    assert parts.open == []
    assert set(parts.seen) <= ALLOWED


def test_an_explanation_says_the_verdict_and_draws_the_account() -> None:
    found = fw.explain(GLOO)
    assert found.verdict.sentence[:100] in repr(found)
    shown = found._repr_html_()
    drawn = [time_s for time_s in found.account.values() if time_s > 0]
    widths = [float(wide) for wide in re.findall(r'<rect [^>]*width="([\d.]+)"', shown)]
    assert len(widths) == len(drawn)
    for wide, time_s in zip(widths, drawn, strict=True):
        assert wide == pytest.approx(360 * time_s / found.step_s, abs=0.6)
    assert 'font-weight="bold"' in shown


def test_hostile_text_becomes_neither_markup_nor_a_terminals_command() -> None:
    run = fw.read(GLOO)
    evil = dataclasses.replace(run, provenance=Provenance(origin="measured", source=EVIL))
    evil = dataclasses.replace(evil, facts=evil.facts | type(evil.facts)(model=EVIL, warnings=EVIL))
    predicted = fw.whatif(evil, bandwidth="10Gbps", workers=2)
    for result in (evil, fw.explain(evil), predicted):
        shown = result._repr_html_()
        assert "<script" not in shown
        assert "script" not in Parts(shown).seen
        for text in (shown, repr(result)):
            assert "\x1b" not in text
            assert "\u202e" not in text
            assert "A" * LONGEST not in text


@pytest.mark.parametrize("package", ["pandas", "polars"])
@pytest.mark.parametrize("name", RESULTS)
def test_every_table_becomes_a_data_frame(name: str, package: str) -> None:
    pytest.importorskip(package, reason=f"{package} is not here: pip install {package}")
    result = RESULTS[name]()
    take = getattr(result, f"to_{package}")
    for table, columns in result._tables().items():
        frame = take(table)
        assert list(frame.columns) == list(columns)
        assert all(len(frame) == len(column) for column in columns.values())
    if result._tables():
        assert list(take().columns) == list(next(iter(result._tables().values())))
        with pytest.raises(UsageError, match=f"to_{package}: expected a table among .*'nothing'"):
            take("nothing")
    else:
        with pytest.raises(UsageError, match=f"to_{package}: expected a result with a table"):
            take()


def test_a_data_frame_holds_what_the_table_holds() -> None:
    polars = pytest.importorskip("polars", reason="polars is not here: pip install polars")
    run = fw.read(GLOO)
    frame = run.to_polars()
    assert frame["start_ns"].dtype == polars.Int64
    assert frame["name"].dtype == polars.String
    assert frame["end_ns"].to_list() == run.spans.end_ns.tolist()
    account = fw.explain(run).to_polars("account")
    assert account["share"].sum() == pytest.approx(1)


def test_a_missing_package_is_named_with_the_line_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(UsageError, match=r"to_pandas: expected pandas .*: pip install pandas$"):
        fw.explain(GLOO).to_pandas()


def test_names_are_there_for_completion() -> None:
    assert set(fw.__all__) <= set(dir(fw))
    found, table = fw.explain(GLOO), fw.whatif("vgg16@v100", bandwidth="10Gbps", workers=8)
    assert {"verdict", "account", "fixes", "warnings", "to_pandas", "to_polars"} <= set(dir(found))
    assert {"step_s", "scaling_factor"} <= set(table._ipython_key_completions_())
    for result in (found, table, fw.read(GLOO)):
        for name in dir(result):
            getattr(result, name)
    predicted = fw.whatif(GLOO, transport="measured", bandwidth="1Gbps,10Gbps")
    assert predicted.has_intervals
    for completed in predicted._ipython_key_completions_():
        assert len(predicted[completed]) == 2
    assert "step_low_s" in predicted._repr_html_()


def test_a_comparison_takes_paths_and_runs_alike(tmp_path: Path) -> None:
    by_value = fw.compare(fw.read(GLOO), fw.read(HALF))
    assert fw.compare(GLOO, str(HALF)) == by_value
    assert fw.compare([str(GLOO)], [HALF]) == by_value
    with pytest.raises(UsageError, match=r"compare: expected at least one recording of each side"):
        fw.compare([], HALF)
    with pytest.raises(UsageError, match=r"nccl-log\.run: it has no steps to compare"):
        fw.compare(GLOO, str(RUNS / "nccl-log.run"))
    with pytest.raises(UsageError):
        fw.compare(GLOO, 5)  # type: ignore[arg-type]


def test_other_functions_take_a_path_where_they_take_a_run(tmp_path: Path) -> None:
    one_by_one = fw.explain(str(GLOO), calibrate=str(HALF))
    assert repr(one_by_one) == repr(fw.explain(fw.read(GLOO), calibrate=[fw.read(HALF)]))
    place = fw.write(str(RUNS / "chrome.run"), tmp_path / "again.run")
    assert isinstance(fw.read(place), Run)
    for given in (GLOO, fw.read(GLOO)):
        fw.export(given, tmp_path / "job.json", replace=True)
        fw.write_page(given, tmp_path / "job.html", replace=True)
        assert len(fw.whatif(given, bandwidth="10Gbps", workers=2)) == 1
        assert fw.replay(given, bandwidth="10Gbps", workers=2).complete


@pytest.mark.parametrize(
    ("ask", "refusal"),
    [
        (lambda: ANY.join([], "x.run"), "join: expected one directory or more, got none"),
        (lambda: ANY.join(Path("a"), "x.run"), "join: expected a list of directories, got Posix"),
        (lambda: ANY.cluster("dgx-h100", nodes=2.5), "nodes: expected a whole number from 1"),
        (lambda: ANY.cluster("dgx-h100", nodes=True), "nodes: expected a whole number from 1"),
        (lambda: ANY.cluster("dgx-h100", nodes="x"), "nodes: expected a whole number from 1"),
        (lambda: ANY.collective(None, bytes=1), "collective: expected one of allreduce, .*None"),
        (lambda: ANY.collective(3, bytes=1), "collective: expected one of allreduce, .*got 3"),
        (lambda: ANY.whatif("vgg16@v100", bandwidth={1: 2}), "bandwidth: expected a rate .*{1: 2}"),
        (lambda: ANY.watch(1, seconds="soon"), "watch: seconds: expected a time with its unit"),
        (lambda: ANY.watch(1, seconds=float("nan")), "watch: seconds: expected a time"),
        (lambda: ANY.watch(1, seconds=0), "watch: expected seconds above 0, 600 at most, got 0"),
        (lambda: ANY.watch(1, seconds="1h"), "watch: expected seconds above 0, 600 at most"),
        (lambda: next(ANY.watching(1, window_s=[])), "watch: window_s: expected a time"),
        (lambda: ANY.run_workers(["true"], workers=1.5), "run: --workers: expected a whole number"),
        (lambda: ANY.run_workers(["true"], workers=0), "run: --workers: expected a whole number"),
        (lambda: ANY.run_workers(["true"], workers=1, least=2), "run: expected --min from 1 to"),
        (lambda: ANY.run_workers(["true"], workers=1, keep=1.5), "run: --keep: expected a whole"),
        (lambda: ANY.run_workers(["true"], workers=1, detect_s="x"), "run: --detect: expected a"),
        (lambda: ANY.run_workers(["true"], workers=1, detect_s=0), "run: expected --detect above"),
        (
            lambda: ANY.run_workers(["true"], workers=1, detect_s=float("inf")),
            "run: --detect: expected a time with its unit",
        ),
        (
            lambda: ANY.run_workers(["true"], workers=1, checkpoint="c", every_s=float("nan")),
            "run: --every: expected a time with its unit",
        ),
    ],
)
def test_an_argument_that_cannot_be_is_refused_by_its_name(
    ask: Callable[[], Any], refusal: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=refusal):
        ask()
    assert not list(tmp_path.iterdir())


def test_a_page_takes_the_result_of_a_tuning_only(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="report: expected the result of tune as tuning, got 'x'"):
        ANY.write_page(GLOO, tmp_path / "x.html", tuning="x")


def test_a_number_above_1_is_no_limit_of_a_slowdown() -> None:
    result = fw.compare(GLOO, HALF)
    assert result.gate("500%").limit == result.gate(0.05).limit * 100 == 5
    with pytest.raises(UsageError, match=r"limit: expected a percentage, like 5%, or 0.05, got 5"):
        result.gate(5)


def test_one_of_something_is_told_in_the_singular() -> None:
    assert "; 1 node of 8 devices, " in repr(fw.cluster("dgx-h100", nodes=1))
    assert "; 2 nodes of 8 devices, " in repr(fw.cluster("dgx-h100", nodes=2))
    alone = fw.collective("allreduce", bytes=1024, workers=1, bandwidth="1Gbps")
    assert " among 1 worker: " in repr(alone)
    one = fw.whatif("resnet50@v100", workers=2, bandwidth="1Gbps")
    assert "1 prediction of resnet50@v100" in repr(one)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_docstring_names_every_parameter_and_its_example_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_docstring(name, tmp_path, monkeypatch)


def check_docstring(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **given: Any
) -> None:
    """Look for every parameter in a docstring, and run its example; `given` are its names."""
    function = getattr(fw, name)
    doc = inspect.getdoc(function) or ""
    for parameter in inspect.signature(function).parameters:
        assert f"`{parameter}`" in doc, f"{name}: {parameter} is not described"
    code = textwrap.dedent("\n".join(re.findall(r"^    .*", doc, re.MULTILINE)))
    assert f"fw.{name}(" in code, f"{name}: it has no example"
    compiled = compile(code, name, "exec")
    if name in STARTS_JOBS:
        return
    if "to_pandas" in code:
        pytest.importorskip("pandas", reason="pandas is not here: pip install pandas")
    for example, run in {
        "job": GLOO,
        "before": GLOO,
        "after": HALF,
        "a1": GLOO,
        "a2": RUNS / "recorded.run",
        "b1": HALF,
        "b2": RUNS / "lab-fullwire.run",
    }.items():
        shutil.copytree(run, tmp_path / f"{example}.run")
    for rank, capture in enumerate(sorted((PACKETS / "packets").iterdir())):
        shutil.copy(capture, tmp_path / f"rank{rank}.pcap")
    (tmp_path / "switch.ipfix").write_bytes(ipfix())
    if name == "plan":
        traced(tmp_path / "traces", tp=2)
    monkeypatch.chdir(tmp_path)
    exec(compiled, {"fw": fw, **given})
