"""Promises about structure: who may import whom, what is exported, what a start loads."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import fullwire

PACKAGE = Path(fullwire.__file__).parent
# A room may import from rooms of lower levels, and from itself; rooms of one level do not meet.
LEVELS = {
    "errors": 0,
    "_native": 0,
    "registry": 1,
    "units": 1,
    "packed": 2,
    "files": 3,
    "outputs": 3,
    "crew": 4,
    "run": 4,
    "clusters": 5,
    "compression": 5,
    "workloads": 5,
    "collectives": 6,
    "packets": 7,
    "importers": 8,
    "recorder": 8,
    "timeline": 8,
    "simulation": 8,
    "transport": 8,
    "lab": 8,
    "fixes": 9,
    "findings": 10,
    "words": 11,
    "answers": 12,
    "report": 13,
    "studies": 14,
    "cli": 15,
}
FILES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_rooms(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module == "fullwire":
            names = [f"fullwire.{alias.name}" for alias in node.names]
        else:
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        yield from (name.split(".")[1] for name in names if name.startswith("fullwire."))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_one_way(path: Path) -> None:
    here = room(path)
    for other in imported_rooms(path):
        if other == "__version__":
            continue
        assert other == here or LEVELS[other] < LEVELS[here], f"{here} imports {other}"


def test_these_names_are_exported_and_no_others() -> None:
    assert fullwire.__all__ == [
        "Comparison",
        "DamagedInput",
        "Explanation",
        "FullwireError",
        "Run",
        "Study",
        "UsageError",
        "WhatIf",
        "__version__",
        "cluster",
        "collective",
        "compare",
        "explain",
        "export",
        "flows",
        "join",
        "read",
        "record",
        "replay",
        "study",
        "whatif",
        "workloads",
        "write",
        "write_page",
    ]
    for name in fullwire.__all__:
        assert getattr(fullwire, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = fullwire.nonsense


def test_importing_the_package_loads_neither_numpy_nor_torch_nor_native_code() -> None:
    heavy = ("numpy", "pyarrow", "torch", "typer", "altair", "fullwire._native")
    code = f"import fullwire, sys; print([m for m in {heavy!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_help_loads_no_numpy() -> None:
    code = (
        "import sys; sys.argv = ['fullwire', '--help']\n"
        "from fullwire.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "sys.exit('numpy' in sys.modules or 'rich' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
