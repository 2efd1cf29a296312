"""Promises about structure: imports between rooms, sizes, exports, modules loaded at the start."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import fullwire

PACKAGE = Path(fullwire.__file__).parent
OLD_RUN = Path(__file__).parents[1] / "data/format-1/capture.run"
# A room may import from rooms of lower levels, and from itself; rooms of one level do not meet.
LEVELS = {
    "errors": 0,
    "_native": 0,
    "registry": 1,
    "units": 1,
    "display": 2,
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
    "importers": 7,
    "recorder": 7,
    "timeline": 7,
    "convergence": 7,
    "simulation": 7,
    "transport": 7,
    "lab": 7,
    "fixes": 8,
    "findings": 9,
    "words": 10,
    "answers": 11,
    "report": 12,
    "studies": 13,
    "cli": 14,
    "pytest": 14,
    "__main__": 15,
}
# A capture is a format like any other, and a recording may hold captures.
MAY_MEET = {("importers", "packets"), ("recorder", "packets")}
FILES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def module(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
def imports(path: Path) -> frozenset[str]:
    """Return the modules that a file imports, at its top or within functions."""
    here = module(path).split(".")
    here = here if path.name == "__init__.py" else here[:-1]
    found: set[str] = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join([*here[: len(here) + 1 - node.level], node.module or ""]).strip(".")
            base = base if node.level else node.module or ""
            names = [f"{base}.{alias.name}" for alias in node.names]
            found.update(name if name in MODULES else base for name in names)
    return frozenset(found)


MODULES = {module(path): path for path in FILES}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_one_way(path: Path) -> None:
    here = room(path)
    for name in imports(path):
        if not name.startswith("fullwire.") or name == "fullwire.__version__":
            continue
        other = name.split(".")[1]
        is_allowed = other == here or LEVELS[other] < LEVELS[here] or (here, other) in MAY_MEET
        assert is_allowed, f"{here} imports {other}"


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Imports within functions count too, and so do a package's own of its modules."""
    arrows = {
        name: {target for target in imports(path) if target in MODULES and target != name}
        for name, path in MODULES.items()
    }
    while leaves := [name for name, targets in arrows.items() if not targets & arrows.keys()]:
        for name in leaves:
            del arrows[name]
    assert not arrows, f"in a circle, or above one: {sorted(arrows)}"


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def test_no_function_has_more_than_80_lines_and_no_file_more_than_600() -> None:
    for path in FILES:
        assert len(path.read_text().splitlines()) <= 600, f"{path} is too long: divide it"
        for function in functions(path):
            lines = (function.end_lineno or 0) - function.lineno + 1
            assert lines <= 80, f"{module(path)}.{function.name} has {lines} lines"


def test_fewer_than_40_modules_have_only_one_importer() -> None:
    importers: Counter[str] = Counter()
    for path in (*FILES, PACKAGE / "__init__.py"):
        importers.update(imports(path) & MODULES.keys() - {module(path)})
    one = [name for name in MODULES if importers[name] == 1 and room(MODULES[name]) != "cli"]
    assert len(one) < 40, f"merge one of them with its only importer: {', '.join(sorted(one))}"


def test_fewer_than_half_of_the_private_functions_have_only_one_caller() -> None:
    private, one = 0, []
    for path in FILES:
        uses = Counter(
            node.id if isinstance(node, ast.Name) else node.attr
            for node in ast.walk(parsed(path))
            if isinstance(node, ast.Name | ast.Attribute)
        )
        names = [each.name for each in functions(path) if re.match("_[^_]", each.name)]
        private += len(names)
        one += [f"{module(path)}.{name}" for name in names if uses[name] == 1]
    assert len(one) < private / 2, f"{len(one)} of {private} have one caller"


def test_these_names_are_exported_and_no_others() -> None:
    assert fullwire.__all__ == [
        "Checkup",
        "Comparison",
        "DamagedInput",
        "Explanation",
        "FullwireError",
        "Run",
        "Study",
        "Tuning",
        "UsageError",
        "WhatIf",
        "__version__",
        "apply_fixes",
        "cluster",
        "codecs",
        "collective",
        "compare",
        "compress",
        "doctor",
        "explain",
        "export",
        "fit_cluster",
        "flows",
        "join",
        "log",
        "plan",
        "read",
        "record",
        "replay",
        "run_recipe",
        "study",
        "tune",
        "whatif",
        "wire",
        "workloads",
        "write",
        "write_page",
    ]
    for name in fullwire.__all__:
        assert getattr(fullwire, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = fullwire.nonsense


def test_the_package_ships_its_types() -> None:
    assert (PACKAGE / "py.typed").exists()


def test_importing_the_package_loads_neither_numpy_nor_torch_nor_native_code() -> None:
    heavy = ("numpy", "pyarrow", "torch", "typer", "altair", "fullwire._native")
    code = f"import fullwire, sys; print([m for m in {heavy!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_no_command_loads_pandas_which_pyarrow_would() -> None:
    code = (
        f"import sys; sys.argv = ['fullwire', 'show', {str(OLD_RUN)!r}, '--json']\n"
        "from fullwire.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "sys.exit('pyarrow' not in sys.modules or 'pandas' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


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
