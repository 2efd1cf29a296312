"""Registries: a file in a folder is an entry, and so is an entry point of another package."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import pytest

from fullwire.errors import UsageError
from fullwire.registry import Registry, keys_in

FOLDERS = count()


@dataclass(frozen=True)
class Dish:
    key: str


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An importable empty folder; each test has a name of its own."""
    folder = tmp_path / f"kitchen{next(FOLDERS)}"
    folder.mkdir()
    (folder / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    return folder


def dishes(folder: Path) -> Registry[Dish]:
    return Registry(Dish, folder.name, name="DISH", group=f"{folder.name}.dishes")


def put(folder: Path, file: str, value: str) -> None:
    (folder / file).write_text(f"from {__name__} import Dish\nDISH = {value}\n")


def install(folder: Path, line: str, code: str) -> None:
    """Make a package that adds an entry point, as pip leaves it behind."""
    (folder.parent / f"guest_{folder.name}.py").write_text(code)
    info = folder.parent / "guest-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: guest\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        f"[{folder.name}.dishes]\n{line.replace('GUEST', f'guest_{folder.name}')}\n"
    )


def test_a_new_file_is_a_new_entry(folder: Path) -> None:
    put(folder, "rice_pudding.py", "Dish('rice-pudding')")
    put(folder, "tarts.py", "(Dish('plum-tart'), Dish('lemon-tart'))")
    put(folder, "_pieces.py", "None")
    assert list(dishes(folder)) == ["rice-pudding", "plum-tart", "lemon-tart"]
    assert dishes(folder)["lemon-tart"] == Dish("lemon-tart")
    with pytest.raises(KeyError):
        _ = dishes(folder)["soup"]


def test_listing_loads_no_entry_and_asking_loads_one(folder: Path) -> None:
    put(folder, "broth.py", "Dish('broth')")
    put(folder, "soup.py", "Dish('soup')")
    assert keys_in(folder.name) == ("broth", "soup")
    assert f"{folder.name}.soup" not in sys.modules
    assert dishes(folder)["soup"].key == "soup"
    assert f"{folder.name}.soup" in sys.modules
    assert f"{folder.name}.broth" not in sys.modules


def test_a_search_that_ends_early_loads_no_more(folder: Path) -> None:
    put(folder, "broth.py", "Dish('broth')")
    put(folder, "soup.py", "Dish('soup')")
    assert next(iter(dishes(folder).values())).key == "broth"
    assert f"{folder.name}.soup" not in sys.modules


def test_two_entries_of_one_key_are_a_mistake_of_ours(folder: Path) -> None:
    put(folder, "broth.py", "Dish('broth')")
    put(folder, "soup.py", "Dish('broth')")
    with pytest.raises(ValueError, match="two entries have the key 'broth'"):
        list(dishes(folder))


def test_another_package_adds_an_entry(folder: Path) -> None:
    put(folder, "broth.py", "Dish('broth')")
    install(folder, "stew = GUEST:DISH", f"from {__name__} import Dish\nDISH = Dish('stew')\n")
    assert list(dishes(folder)) == ["broth", "stew"]
    assert dishes(folder)["stew"].key == "stew"


@pytest.mark.parametrize(
    ("line", "code", "reason"),
    [
        ("stew = GUEST:DISH", "import a_package_that_is_missing", "cannot be loaded: No module"),
        ("stew = GUEST:DISH", "", "cannot be loaded: module .* has no attribute 'DISH'"),
        ("stew = GUEST:DISH", "DISH = 'stew'", "expected a Dish, got str"),
        ("stew = GUEST:DISH", "DISH = Dish('stow')", "another key, 'stow'"),
        ("broth = GUEST:DISH", "DISH = Dish('broth')", "fullwire has its own 'broth'"),
    ],
)
def test_the_mistake_of_another_package_names_that_package(
    folder: Path, line: str, code: str, reason: str
) -> None:
    put(folder, "broth.py", "Dish('broth')")
    install(folder, line, f"from {__name__} import Dish\n{code}\n")
    with pytest.raises(UsageError, match=reason) as caught:
        list(dishes(folder).values())
    assert "of guest: " in str(caught.value)
