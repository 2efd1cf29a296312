"""Every entry of every registry has words, a test, and a line for users."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from fullwire.answers.conditions import Asked
from fullwire.answers.subjects import Conditions
from fullwire.cli.whatif import whatif
from fullwire.compression.codec import CODECS
from fullwire.importers import FORMATS
from fullwire.registry import keys_in
from fullwire.simulation.conditions import CHANGES, CONDITIONS, AllConditions, StepConditions
from fullwire.simulation.grid import AXES
from fullwire.workloads import RECIPES

ROOT = Path(__file__).parents[2]
REGISTRIES: dict[str, Mapping[str, Any]] = {
    "formats": FORMATS,
    "codecs": CODECS,
    "workloads": RECIPES,
}
ENTRIES = [(name, key) for name, registry in REGISTRIES.items() for key in registry]
TESTS = {path: path.read_text() for path in (ROOT / "tests").rglob("test_*.py")}
DOCUMENTS = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "docs/fullwire.1"]
WORDS = "\n".join(path.read_text().lower().replace("\\-", "-") for path in DOCUMENTS)


@pytest.mark.parametrize(("registry", "key"), ENTRIES)
def test_an_entry_has_a_label(registry: str, key: str) -> None:
    entry = REGISTRIES[registry][key]
    label = getattr(entry, "label", "") or getattr(entry, "title", "")
    assert label
    assert label == label.strip()


@pytest.mark.parametrize("key", [*CODECS, *RECIPES, *CHANGES])
def test_an_entry_has_a_test(key: str) -> None:
    plain = {path: text for path, text in TESTS.items() if path != Path(__file__)}
    everyone = "CODECS" if key in CODECS else "MODELS" if key in RECIPES else key
    assert any(everyone in text for text in plain.values()), "add a test that names it"


@pytest.mark.parametrize("key", FORMATS)
def test_a_format_has_a_test_of_its_own(key: str) -> None:
    shared = {"capture": "packets", "chrome": "export"}
    shared |= dict.fromkeys(("mlflow", "wandb"), "metric_folders")
    own = shared.get(key, key.replace("-", "_"))
    assert any(path.stem == f"test_{own}" for path in TESTS)


@pytest.mark.parametrize("key", [*FORMATS, *CODECS, *CHANGES])
def test_users_find_an_entry_in_the_documents(key: str) -> None:
    label = FORMATS[key].label.lower() if key in FORMATS else ""
    names = {key.replace("_", "-"), *filter(None, (label, label.removesuffix("s")))}
    to_do = "write the man page anew (python -m docs.making.manual), or add a line to a guide"
    assert any(name in WORDS for name in names), to_do


def test_a_file_of_a_format_or_a_codec_is_named_for_its_key() -> None:
    assert tuple(FORMATS) == keys_in("fullwire.importers")
    assert tuple(CODECS) == keys_in("fullwire.compression.codecs")


def test_every_axis_of_a_grid_has_a_record_and_every_change_an_option() -> None:
    assert set(AXES) <= set(CONDITIONS)
    options = inspect.signature(whatif).parameters
    assert all(name in options for name in CHANGES)


def test_editors_complete_every_condition() -> None:
    of_a_step = {*(field.name for field in fields(Conditions)), *CHANGES}
    assert set(StepConditions.__annotations__) == of_a_step, "StepConditions lists them"
    of_a_target = {field.name for field in fields(Asked)}
    assert set(AllConditions.__annotations__) == of_a_step | of_a_target
