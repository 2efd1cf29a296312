"""Transformers by name, or as other tools describe them.

`architecture("llama3-70b")` takes a built-in name, spelt as anyone spells it. It also takes a
config.json of Hugging Face or its folder, Megatron's arguments in a file or in one line, and a TOML
file of torchtitan. Nothing is downloaded.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import replace
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

from fullwire.errors import UsageError
from fullwire.files import opened
from fullwire.units import shown
from fullwire.workloads.architecture import Architecture, Mla, Moe
from fullwire.workloads.hugging_face_config import from_hugging_face
from fullwire.workloads.megatron_arguments import from_megatron

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # the same, before Python had it

ArchitectureLike: TypeAlias = str | Path | Architecture
MOST_BYTES = 4 * 1024 * 1024
_FOLDER = Path(__file__).parent / "architectures"
_OF_OTHER_KIND = re.compile(r"(instruct|base|chat|hf|preview|v0\.[1-3]|bf16|fp8|nvfp4|mcore|it)$")


def architecture(given: ArchitectureLike) -> Architecture:
    """Take a transformer by its name, or from a description of another tool.

    - `given`: a built-in name such as `llama3-70b`, a file or folder with a config.json,
      Megatron's arguments as a file or as text, or a TOML file of torchtitan. `fullwire workloads`
      lists the names.
    """
    if isinstance(given, Architecture):
        return given
    text = str(given)
    path = Path(text)
    try:
        is_folder = path.is_dir()
        path = path / "config.json" if is_folder else path
        is_file = path.is_file()
    except (OSError, ValueError):
        is_folder = is_file = False
    # A file or a folder that exists comes before a name: its config.json may have other sizes.
    if isinstance(given, str) and not is_file:
        if re.search(r"(^|\s)--\w", text):
            return from_megatron(text, "arguments")
        name = None if is_folder and "/" in text else _known_name(text)
        if name is not None:
            return _built_in()[name]
    if not is_file:
        if is_folder:
            raise UsageError(f"model: expected a config.json in the folder {shown(text)}")
        near = get_close_matches(_folded(text), _spellings(), n=1)
        hint = f". The nearest is {_spellings()[near[0]]}" if near else ""
        raise UsageError(
            f"model: expected a built-in name, a config.json, Megatron's arguments or a TOML file "
            f"of torchtitan, got {shown(text)}{hint}"
        )
    with opened(path) as file:
        content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise UsageError(f"{path}: expected a model in at most {MOST_BYTES:,} bytes")
    document = content.decode("utf-8-sig", errors="replace")
    if path.suffix == ".toml":
        return _from_torchtitan(document, str(path))
    if document.lstrip().startswith("{"):
        return from_hugging_face(document, str(path))
    return from_megatron(document, str(path))


def names() -> tuple[str, ...]:
    """List the built-in transformers."""
    return tuple(_built_in())


# Built-in names.


@cache
def _built_in() -> Mapping[str, Architecture]:
    known: dict[str, Architecture] = {}
    for name, table in _tables().items():
        held = {key: value for key, value in table.items() if key not in ("aliases", "like")}
        if "like" in table:
            known[name] = replace(known[table["like"]], name=name, **held)
            continue
        heads, hidden = held["heads"], held["hidden"]
        learned = held["sequence"] if held.get("positions") == "learned" else 0
        held = {
            "kv_heads": heads,
            "head_dim": hidden // heads,
            "learned_positions": learned,
            **held,
        }
        if "mla" in held:
            held["mla"] = Mla(**held["mla"])
        if "moe" in held:
            held["moe"] = Moe(**held["moe"])
        known[name] = Architecture(name=name, **held)
    return known


@cache
def _tables() -> Mapping[str, dict[str, Any]]:
    tables: dict[str, dict[str, Any]] = {}
    for path in sorted(_FOLDER.glob("*.toml")):
        document = tomllib.loads(path.read_text(encoding="utf-8"))
        defaults = document.pop("defaults", {})
        for name, table in document.items():
            tables[name] = table if "like" in table else {**defaults, **table}
    return tables


@cache
def _spellings() -> Mapping[str, str]:
    pairs = (
        (name, spelling)
        for name, table in _tables().items()
        for spelling in (name, *table.get("aliases", ()))
    )
    return {_folded(spelling): name for name, spelling in pairs}


def _folded(name: str) -> str:
    """Reduce a name to the letters, figures and points that all spellings share."""
    last = name.strip().lower().rsplit("/", 1)[-1]
    while (shorter := _OF_OTHER_KIND.sub("", last).rstrip("-_ ")) != last and shorter:
        last = shorter
    return re.sub(r"[^a-z0-9.]", "", last.replace("meta-llama", "llama"))


def _known_name(text: str) -> str | None:
    return _spellings().get(_folded(text))


# torchtitan.

_FLAVORS = {
    ("llama3", "8b"): "llama3-8b",
    ("llama3", "70b"): "llama3-70b",
    ("llama3", "405b"): "llama3.1-405b",
    ("deepseekv3", "671b"): "deepseek-v3",
    ("deepseekv3", "236b"): "deepseek-v2",
    ("deepseekv3", "16b"): "deepseek-v2-lite",
    ("gptoss", "120b"): "gpt-oss-120b",
    ("gptoss", "20b"): "gpt-oss-20b",
}


def _from_torchtitan(text: str, place: str) -> Architecture:
    try:
        document = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{place}: expected TOML: {error}") from None
    model = document.get("model")
    if not isinstance(model, dict) or not model.get("name") or not model.get("flavor"):
        raise UsageError(f"{place}: expected a table [model] with a name and a flavor")
    family, flavor = _folded(str(model["name"])), str(model["flavor"]).lower()
    name = _FLAVORS.get((family, flavor)) or _known_name(f"{family}-{flavor}")
    if name is None:
        known = ", ".join(" ".join(pair) for pair in _FLAVORS)
        raise UsageError(
            f"{place}: model: expected a name and a flavor such as {known}, got "
            f"{shown(model['name'])} {shown(model['flavor'])}"
        )
    training = document.get("training", {})
    length = training.get("seq_len") if isinstance(training, dict) else None
    found = _built_in()[name]
    if length is None:
        return found
    if isinstance(length, bool) or not isinstance(length, int):
        raise UsageError(f"{place}: training.seq_len: expected a whole number, got {length!r}")
    return replace(found, sequence=length)
