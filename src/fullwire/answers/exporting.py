"""Print a recipe as what a person writes to have its fixes without Fullwire's `run`."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from fullwire.errors import UsageError
from fullwire.files import path_of
from fullwire.fixes._recipe import Applied, read_recipe
from fullwire.fixes.fix import fix_kinds
from fullwire.units import visible

EXPORTS = ("env", "python", "torchrun")
# The imports of the names that such lines use.
_IMPORTS = {
    "os": "import os",
    "torch": "import torch",
    "torch.distributed.checkpoint": "import torch.distributed.checkpoint",
    "dist": "import torch.distributed as dist",
    "DataLoader": "from torch.utils.data import DataLoader",
    "DistributedDataParallel": "from torch.nn.parallel import DistributedDataParallel",
    "fully_shard": "from torch.distributed.fsdp import fully_shard",
    "init_device_mesh": "from torch.distributed.device_mesh import init_device_mesh",
    "fullwire": "import fullwire",
}
_MADE = re.compile(r"(?P<object>\w+ = \w+\(\w+), (?P<options>.*)\)")  # an object with its options


def exported(recipe: str | Path, way: str) -> str:
    """Return what a person writes to have a recipe's fixes without Fullwire's `run`.

    - `way`: "env" for lines of a shell, "python" for lines of the script, "torchrun" for a command.
    """
    if way not in EXPORTS:
        raise UsageError(f"export: expected {', '.join(EXPORTS)}, got {way}")
    found = read_recipe(path_of(recipe, "recipe"))
    variables: dict[str, str] = {}
    for fix in found.fixes:
        variables |= fix_kinds()[fix.fix].environment(fix.setting)
    written = _by_hand(found.fixes)
    if way == "python":
        return "\n".join(_script(variables, written))
    pairs = [f"{name}={shlex.quote(value)}" for name, value in variables.items()]
    lines = (line.removeprefix("# ") for line in _script({}, written))
    comments = [f"# in the script: {line}" for line in lines if line]
    if way == "env":
        return "\n".join([*(f"export {pair}" for pair in pairs), *comments])
    return "\n".join([*comments, " ".join([*pairs, visible(found.command)])])


def _by_hand(fixes: Sequence[Applied]) -> dict[str, str]:
    """Return lines of a script with the fixes that they make.

    Fixes that give options to the same object, as `buckets` and `ddp` do, share a line.
    """
    options: dict[str, list[str]] = {}
    makers: dict[str, list[str]] = {}
    for fix in fixes:
        text = "" if fix.fix == "environment" else fix_kinds()[fix.fix].by_hand(fix.setting)
        made = _MADE.fullmatch(text)
        key = made["object"] if made else text
        options.setdefault(key, []).extend([made["options"]] if made else [])
        makers.setdefault(key, []).append(str(fix))
    return {
        ", ".join([key, *options[key]]) + ")" * bool(options[key]): ", ".join(fixes_of)
        for key, fixes_of in makers.items()
        if key
    }


def _script(variables: dict[str, str], written: dict[str, str]) -> Iterator[str]:
    """Yield lines of Python: variables before torch is loaded, imports, and the lines by hand."""
    imports = {line: "" for text in written for line in _imports_of(text)}
    imports |= {
        line: f"  # for {fixes}"
        for text, fixes in written.items()
        for line in _imports_of(text)
        if "fullwire" in line
    }
    if variables:
        imports.pop("import os", None)
        yield from ("import os", "", "# Before torch is loaded:")
        yield from (f"os.environ[{name!r}] = {value!r}" for name, value in variables.items())
        yield ""
    order = [*_IMPORTS.values(), *imports]
    yield from (line + imports[line] for line in sorted(imports, key=order.index))
    if imports:
        yield ""
    for lines in _commented(written):
        yield from lines


def _imports_of(text: str) -> Iterator[str]:
    """Yield the imports that lines need: those of the names that they use, and their own."""
    for statement in _statements(text):
        if isinstance(statement, ast.Import | ast.ImportFrom):
            yield ast.unparse(statement)
        for node in ast.walk(statement):
            if isinstance(node, ast.Name | ast.Attribute):
                yield from filter(None, [_IMPORTS.get(ast.unparse(node))])


def _commented(written: dict[str, str]) -> Iterator[list[str]]:
    """Yield the lines of each text with the fixes that they make; words become a comment."""
    for text, fixes in written.items():
        statements = _statements(text)
        lines = [line for line in text.split("\n") if not line.startswith(("import ", "from "))]
        if not statements:
            yield [f"# {fixes}: {line}" for line in lines]
        elif len(lines) == 1:
            yield [f"{lines[0]}  # {fixes}"]
        else:
            yield [f"# {fixes}", *lines]


def _statements(text: str) -> list[ast.stmt]:
    """Return the statements of a text; none if it is no Python."""
    try:
        return ast.parse(text).body
    except SyntaxError:
        return []
