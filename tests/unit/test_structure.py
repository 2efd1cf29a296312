"""Promises about structure: imports between rooms, sizes, exports, modules loaded at the start."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import fullwire
from tests.unit.test_display import NEEDS_TORCH

ROOT = Path(__file__).parents[2]
PACKAGE = Path(fullwire.__file__).parent
OLD_RUN = Path(__file__).parents[1] / "data/format-1/capture.run"
# A room may import from rooms of lower levels, and from itself; rooms of one level do not meet.
LEVELS = {
    "errors": 0,
    "version": 0,
    "_native": 0,
    "_hooks": 0,
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
    "resilience": 7,
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
# A capture is a format like any other, and a recording may hold captures. Elastic jobs send by the
# transport's own groups.
MAY_MEET = {("importers", "packets"), ("recorder", "packets"), ("resilience", "transport")}
FILES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def module(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


class Source:
    """The functions of a file, the names that it uses, and the modules that it imports.

    Imports within functions count too.
    """

    def __init__(self, path: Path) -> None:
        here = module(path).split(".")
        self._here = here if path.name == "__init__.py" else here[:-1]
        self.functions: list[tuple[str, int]] = []  # with their lines
        self.uses: Counter[str] = Counter()
        self.imports: set[str] = set()
        self.text = path.read_text()
        for node in ast.walk(ast.parse(self.text)):
            if isinstance(node, ast.Name):
                self.uses[node.id] += 1
            elif isinstance(node, ast.Attribute):
                self.uses[node.attr] += 1
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                self.functions.append((node.name, (node.end_lineno or 0) - node.lineno + 1))
            elif isinstance(node, ast.Import):
                self.imports.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                self.imports.update(self._imported(node))

    def _imported(self, node: ast.ImportFrom) -> Iterator[str]:
        base = node.module or ""
        if node.level:
            base = ".".join([*self._here[: len(self._here) + 1 - node.level], base]).strip(".")
        for alias in node.names:
            name = f"{base}.{alias.name}"
            yield name if name in MODULES else base


MODULES = {module(path): path for path in FILES}


@pytest.fixture(scope="module")
def sources() -> dict[str, Source]:
    return {name: Source(path) for name, path in MODULES.items()}


def test_imports_go_one_way(sources: dict[str, Source]) -> None:
    for name, source in sources.items():
        here = room(MODULES[name])
        for imported in source.imports:
            if not imported.startswith("fullwire."):
                continue
            other = imported.split(".")[1]
            is_allowed = other == here or LEVELS[other] < LEVELS[here] or (here, other) in MAY_MEET
            assert is_allowed, f"{name} imports {imported}: {here} may not import {other}"


def test_no_modules_import_each_other_in_a_circle(sources: dict[str, Source]) -> None:
    """A package's own imports of its modules count too."""
    arrows = {name: source.imports & sources.keys() - {name} for name, source in sources.items()}
    while leaves := [name for name, targets in arrows.items() if not targets & arrows.keys()]:
        for name in leaves:
            del arrows[name]
    assert not arrows, f"in a circle, or above one: {sorted(arrows)}"


def test_no_function_has_more_than_80_lines_and_no_file_more_than_600(
    sources: dict[str, Source],
) -> None:
    for name, source in sources.items():
        assert len(source.text.splitlines()) <= 600, f"{name} is too long: divide it"
        for function, lines in source.functions:
            assert lines <= 80, f"{name}.{function} has {lines} lines"


def test_fewer_than_40_modules_have_only_one_importer(sources: dict[str, Source]) -> None:
    importers = Counter(Source(PACKAGE / "__init__.py").imports)
    for name, source in sources.items():
        importers.update(source.imports - {name})
    one = [name for name in MODULES if importers[name] == 1 and room(MODULES[name]) != "cli"]
    assert len(one) < 40, f"merge one of them with its only importer: {', '.join(sorted(one))}"


def test_fewer_than_half_of_the_private_functions_have_only_one_caller(
    sources: dict[str, Source],
) -> None:
    callers = [
        source.uses[function]
        for source in sources.values()
        for function, _ in source.functions
        if re.match("_[^_]", function)
    ]
    one = callers.count(1)
    assert one < len(callers) / 2, f"{one} of {len(callers)} private functions have one caller"


def test_these_names_are_exported_and_no_others() -> None:
    assert fullwire.__all__ == [
        "Checkup",
        "Comparison",
        "DamagedInput",
        "Explanation",
        "FullwireError",
        "Job",
        "Run",
        "Study",
        "Tuning",
        "UsageError",
        "Watched",
        "WhatIf",
        "__version__",
        "apply_fixes",
        "cluster",
        "codecs",
        "collective",
        "compare",
        "compress",
        "doctor",
        "elastic",
        "explain",
        "export",
        "fit_cluster",
        "flows",
        "jobs_in",
        "join",
        "log",
        "plan",
        "read",
        "record",
        "replay",
        "run_recipe",
        "run_workers",
        "study",
        "tune",
        "watch",
        "watching",
        "whatif",
        "wire",
        "workloads",
        "write",
        "write_page",
    ]
    for name in set(fullwire.__all__) - set(NEEDS_TORCH):
        assert getattr(fullwire, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = fullwire.nonsense


def test_only_the_names_that_need_torch_load_it() -> None:
    code = (
        "import fullwire, sys\n"
        f"for name in set(fullwire.__all__) - {set(NEEDS_TORCH)!r}:\n"
        "    getattr(fullwire, name)\n"
        "    assert 'torch' not in sys.modules, name"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


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


def test_a_prediction_loads_no_masked_arrays_which_cost_a_tenth_of_its_start() -> None:
    code = (
        "import sys; sys.argv = ['fullwire', 'whatif', 'vgg16@v100', '--json']\n"
        "from fullwire.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "sys.exit('numpy.ma' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_map_of_the_code_names_every_room_and_only_what_exists() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    rooms = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    rows = re.findall(r"^\| `(\w+)/` \|", text, re.MULTILINE)
    assert sorted(rows) == sorted({*rooms, "native"}), "the table of rooms"
    walks = text.partition("## Walk 1")[2].partition("## Where additions go")[0]
    for path, name in re.findall(r"`([\w/]+(?:/|\.py))`(?:\s+\(`(\w+)`\))?", walks):
        place = next((base / path for base in (PACKAGE, ROOT) if (base / path).exists()), None)
        assert place is not None, f"{path} does not exist"
        file = place / "__init__.py" if place.is_dir() else place
        if name:
            assert re.search(rf"^(?:def|class) {name}\b", file.read_text(), re.MULTILINE), path
