"""The published figures hold; the scripts in validation/ print the tables."""

from __future__ import annotations

import importlib
import shutil
from pathlib import Path

import pytest

import validation
from validation import collectives, damaged_captures, damaged_traces, netx

SCRIPTS = sorted(
    path.stem
    for path in Path(validation.__path__[0]).glob("*.py")
    if "def main(" in path.read_text()
)
FOREIGN = ("torch", "torchvision", "transformers")  # which some of them need


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_that_is_asked_for_help_says_what_it_is_for(
    script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        module = importlib.import_module(f"validation.{script}")
    except ModuleNotFoundError as error:
        if error.name not in FOREIGN:
            raise
        pytest.skip(f"{error.name} is not installed")
    monkeypatch.setattr("sys.argv", [script, "--help"])
    with pytest.raises(SystemExit) as end:
        module.main()
    assert end.value.code == 0
    assert (module.__doc__ or "").splitlines()[0] in capsys.readouterr().out


def test_the_papers_240_rows_are_reproduced_within_1e_5(shared_data: Path) -> None:
    found = netx.worst_errors(shared_data / "netx")
    assert sum(count for count, _ in found.values()) == 2 * 240
    assert max(error for _, error in found.values()) < netx.TOLERANCE


def test_the_serial_ring_is_within_5_percent_of_astra_sim_and_we_know_why(
    shared_data: Path,
) -> None:
    for _, _, plain, alike in collectives.astra_errors(shared_data / "astra"):
        assert abs(plain) < collectives.ASTRA_TOLERANCE
        assert abs(alike) < 0.005


@pytest.mark.skipif(not shutil.which("g++"), reason="building the native reader needs g++")
def test_damaged_captures_harm_nothing_under_sanitizers(tmp_path: Path) -> None:
    program = damaged_captures.build(tmp_path, [*damaged_captures.SANITIZED, "-O0"])
    outcome = damaged_captures.read_damaged(program, 2_000, first=2**40)
    assert outcome.captures == 2_000
    assert outcome.whole > 200
    assert outcome.partial > 500


@pytest.mark.skipif(not shutil.which("g++"), reason="building the native scanner needs g++")
def test_damaged_traces_harm_nothing_under_sanitizers(tmp_path: Path) -> None:
    program = damaged_traces.build(tmp_path, [*damaged_captures.SANITIZED, "-O0"])
    read, whole = damaged_traces.scan_damaged(program, 2_000)
    assert read == 2_000
    assert whole > 200
