"""The reference pages, made from the code: each function returns one page as Markdown."""

from __future__ import annotations

import dataclasses
import inspect
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import typer

import fullwire
from docs.making.answers import answers, printed
from docs.making.diagrams import run_tables
from docs.making.keys import MEANINGS
from docs.making.validation import table
from fullwire.clusters import description
from fullwire.display import Result
from fullwire.fixes._recipe import Applied, Recipe
from fullwire.fixes.fix import Fix, fix_kinds
from fullwire.run.facts import REGISTRY
from fullwire.run.run import TABLES

PACKAGE = Path(fullwire.__file__).parent
NATIVE = Path(__file__).resolve().parents[2] / "native"
REFERENCE = Path(__file__).resolve().parents[1] / "reference"

# The effect of each variable of the environment. The page is refused if the code reads others.
VARIABLES: Mapping[str, str] = {
    "FULLWIRE_ALERT": "The sentence of the alert, for the command of `fullwire watch --exec`.",
    "FULLWIRE_ELASTIC_STUCK_S": "The shortest wait, in seconds, after which an elastic "
    "job leaves out a worker that the others wait for: 30 ([guide](../guides/elastic.md)).",
    "FULLWIRE_ELASTIC_BALANCE": "With 1, workers of an elastic job get samples by their speed, "
    "as with `fullwire run --balance`.",
    "FULLWIRE_LAB_DISK": "Set in a lab whose `--chaos` fills the disk: the folder of that disk.",
    "FULLWIRE_INTERFACE": "Transport: the interface or address at which a rank listens. Without "
    "it, the one that reaches the job's store.",
    "FULLWIRE_STREAMS": "Transport: how many connections two ranks have (1 to 8), the same on "
    "every rank. Without it, chosen by rate, round trip, window and processors.",
    "FULLWIRE_KEY_FILE": "Transport: a file with the key of the group, for its owner alone. "
    "Every rank has the same.",
    "FULLWIRE_KEY": "Transport: the key itself, where a file is not at hand.",
    "FULLWIRE_ENCRYPT": "Transport: with 1, every record between ranks is encrypted. Needs a key.",
    "FULLWIRE_WIRE": "Transport: how float32 tensors travel: float32, bf16, fp16, int8 or auto.",
    "FULLWIRE_MAX_ERROR": "Transport and `fullwire.compress`: the relative squared error at which "
    "float32 is sent instead.",
    "FULLWIRE_CHECKSUM": "Transport: with 1, the bytes that a rank sends carry CRC32C checksums.",
}
OF_ITS_OWN = {
    *("FULLWIRE_ELASTIC_FOLDER", "FULLWIRE_ELASTIC_WORKER", "FULLWIRE_ELASTIC_STARTERS"),
    *(
        "FULLWIRE_ELASTIC_MIN",
        "FULLWIRE_ELASTIC_HOST",
        "FULLWIRE_ELASTIC_EVICT_SLOW",
        "FULLWIRE_ELASTIC_DETECT_S",
        "FULLWIRE_ELASTIC_RESPAWN",
        "FULLWIRE_ELASTIC_CHECKPOINTS",
    ),  # set by one part of Fullwire for another one
    "FULLWIRE_RECORD_INTO",
    "FULLWIRE_AFTER_TORCH",
    "FULLWIRE_FIXES",
    "FULLWIRE_FIXES_INTO",
    "FULLWIRE_STEPS",
    "FULLWIRE_LOOK",
    "FULLWIRE_FIXES_WORKERS",
    "FULLWIRE_FIXES_STRICT",
    *("FULLWIRE_FOLLOW", "FULLWIRE_TRIAL", "FULLWIRE_TRIAL_LIMIT"),
    "FULLWIRE_PACKET_SOCKET",
    "FULLWIRE_PROBE",
    "FULLWIRE_NOISE",
    "FULLWIRE_HOOKS",
    "FULLWIRE_LINES",
    "FULLWIRE_MPI_SOCKET",
    "FULLWIRE_MPI_STORE_PORT",
}
MOST = 90  # characters of a signature on one line
UNITS = {
    "_s": "seconds",
    "_ns": "nanoseconds",
    "_bps": "bits per second",
    "_bytes": "bytes",
    "bytes": "bytes",
    "_factor": "share, 1 is ideal",
    "_utilization": "share of the line rate",
}


def pages() -> dict[str, str]:
    """Return all reference pages by their path on the site."""
    return {
        "reference/commands.md": commands(),
        "reference/python.md": python(),
        "reference/run-format.md": run_format(),
        "reference/json.md": json_keys(),
        "reference/verdicts.md": verdicts(),
        "reference/fixes.md": fixes(),
        "reference/glossary.md": glossary(),
        "reference/settings.md": settings(),
        "reference/codecs.md": codecs(),
        "reference/built-in.md": built_in(),
    }


def commands() -> str:
    """Show the help of every command."""
    from fullwire.cli.app import app_of

    parts = [
        "# Commands",
        "Each command prints for people. With `--json` it prints one object "
        "([keys](json.md)). Exit status: 0 done, 1 a check with a negative answer, 2 a mistake "
        "in the command, 3 damaged or incomplete input, 4 an elastic job with too few workers. "
        "`fullwire --install-completion` lets the shell complete "
        "commands and options.",
    ]
    for path, command in walk(typer.main.get_command(app_of()), ("fullwire",)):
        context = typer.Context(
            command,
            info_name=" ".join(path),
            terminal_width=92,
            help_option_names=["-h", "--help"],
        )
        parts.append(f"## {' '.join(path)}\n\n```text\n{command.get_help(context)}\n```")
    return "\n\n".join(parts)


def walk(command: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield all commands, with the words that name each."""
    inner = getattr(command, "commands", None)
    if inner is None:
        yield path, command
        return
    for name, each in inner.items():
        yield from walk(each, (*path, name))


def python() -> str:
    """Show the signature and the docstring of everything that the package exports."""
    parts = [
        "# Python",
        "A command is one function, but for `lab`, `bench`, `fixes` and `show`. It takes a run, or "
        "the path of a run or a trace. Quantities "
        "are text with a unit (`'10Gbps'`) or plain numbers in bits per second, bytes and seconds. "
        "[A notebook](../notebook.md) shows them at work.",
        "## Results",
        *_class("Result", Result),
    ]
    for name in fullwire.__all__:
        value = getattr(fullwire, name)
        if name.startswith("__"):
            continue
        parts.append(f"## {name}")
        if inspect.ismodule(value):
            parts.append(_prose(value.__doc__))
        elif inspect.isclass(value):
            parts += _class(name, value)
        else:
            parts += [_signature(f"fullwire.{name}", value), _prose(value.__doc__)]
    return "\n\n".join(parts)


def _class(name: str, value: type) -> Iterator[str]:
    yield _prose(value.__doc__)
    if dataclasses.is_dataclass(value):
        rows = [[f"`{field.name}`", f"`{field.type}`"] for field in dataclasses.fields(value)]
        yield table(["attribute", "type"], rows)
    for member, function in vars(value).items():
        if member.startswith("_"):
            continue
        if isinstance(function, property):
            yield f"**`.{member}`** {_prose(function.__doc__)}"
        elif inspect.isfunction(function):
            yield _signature(f"{name}.{member}", function)
            yield _prose(function.__doc__)


def _signature(name: str, function: Any) -> str:
    text = re.sub(r"(: |-> )'([^']*)'", r"\1\2", str(inspect.signature(function)))
    # A function as a default would show its place in memory, which differs each time.
    text = re.sub(r"<function [^ ]+ at 0x[0-9a-f]+>", "...", text)
    text = re.sub(r"\b(?:fullwire|typing|collections\.abc)\.[\w.]*?(\w+)\b", r"\1", text)
    shown = f"{name}{text}"
    if len(shown) > MOST:  # one parameter a line
        shown = re.sub(r"(,) (?=\*?\w+\s*[:=,])|(\()(?=\w+:)", r"\1\2\n    ", shown)
    return f"```python\n{shown}\n```"


def _prose(doc: str | None) -> str:
    lines, out = inspect.cleandoc(doc or "").splitlines(), []
    for number, line in enumerate(lines):
        is_code, was_code = line.startswith("    "), number and lines[number - 1].startswith("    ")
        out += [""] if is_code and not was_code else []
        out.append(line)
    return "\n".join(out)


def run_format() -> str:
    """Describe the directory, its tables and its facts."""

    parts = [
        "# The format of a run",
        "A run is a directory `NAME.run/`. It holds `run.json` (format number, facts, provenance, "
        "gaps) and one Parquet table for each kind of row: `TABLE.parquet`, or a folder "
        "`TABLE/*.parquet` where ranks were written one by one. DuckDB, Polars, pandas and Spark "
        "read the tables. Times are whole nanoseconds on one clock. Sizes are bytes. Rates are "
        "bits per second.",
        run_tables(),
        "## Tables",
    ]
    for name, kind in TABLES.items():
        rows = [
            [
                f"`{column}`",
                {"int64": "whole", "float64": "real"}.get(of.__name__, "text"),
                _unit(column),
            ]
            for column, of in kind.column_types().items()
        ]
        parts += [f"### {name}", _prose(kind.__doc__), table(["column", "type", "unit"], rows)]
    parts += [
        "## Facts",
        "A fact says what is known about the run besides its tables. Two runs are compared only "
        "if they agree on the facts that must match.",
        table(
            ["fact", "type", "unit", "must match", "meaning"],
            [
                [f"`{f.name}`", f.kind.__name__, f.unit, "yes" if f.must_match else "", f.meaning]
                for f in REGISTRY.values()
            ],
        ),
    ]
    return "\n\n".join(parts)


def _unit(name: str) -> str:
    return next((unit for end, unit in UNITS.items() if name.endswith(end)), "")


def json_keys() -> str:
    """List the keys of the objects that commands print, from real answers."""
    parts = [
        "# JSON keys",
        "With `--json` a command prints one object on standard output. The end of a key is its "
        "unit: `_s` seconds, `_bps` bits per second, `_bytes` bytes. Each table below lists the "
        "keys of the answer to the command above it; `[]` marks a list.",
    ]
    used, named = set(), ""
    for command, answer in answers():
        before, name = named, (named := command.split()[0])
        rows = []
        for key, kind in _flat(answer):
            known_as = _known_as(f"{name}.{key.replace('[]', '')}")
            used.add(known_as)
            rows.append([f"`{key}`", kind, _unit(key), MEANINGS[known_as]])
        parts += [f"## {name}"] if name != before else []
        own, dashes, job = shlex.join(command.split()).partition(" -- ")
        parts.append(f"```sh\nfullwire {own} --json{dashes}{job}\n```")
        parts.append(table(["key", "type", "unit", "meaning"], rows))
    if unused := set(MEANINGS) - used:
        raise RuntimeError(f"docs/making/keys.py: no answer has {', '.join(sorted(unused))}")
    return "\n\n".join(parts)


def _known_as(path: str) -> str:
    """Return the longest name of a key that has a meaning; a star stands for its last word."""
    words = path.split(".")
    for begin in range(len(words)):
        for end in (words[-1], "*"):
            name = ".".join([*words[begin:-1], end])
            if name in MEANINGS:
                return name
    raise RuntimeError(f"docs/making/keys.py does not say what {path} means")


def _flat(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield keys with their types; all elements of a list count as one."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _flat(inner, f"{path}.{key}" if path else key)
    elif isinstance(value, list) and value and isinstance(value[0], (dict, list)):
        seen: dict[str, str] = {}
        for each in value:
            for key, kind in _flat(each, f"{path}[]"):
                if seen.get(key, "null") == "null":
                    seen[key] = kind
        yield from seen.items()
    elif isinstance(value, list):
        yield f"{path}[]", _type(value[0]) if value else "list"
    else:
        yield path, _type(value)


def _type(value: Any) -> str:
    names = {bool: "true or false", int: "number", float: "number", str: "text", dict: "object"}
    return names.get(type(value), "null")


def verdicts() -> str:
    """Describe the kinds of verdict, the parts of the account and the thresholds."""
    from fullwire.findings import case
    from fullwire.findings.verdicts import blamed, drawn_parts, verdict_kinds
    from fullwire.words.glossary import meanings

    rules = (inspect.getdoc(blamed) or "").partition("\n\n")[2]
    return "\n\n".join(
        [
            (REFERENCE / "verdicts.md").read_text().rstrip(),
            table(
                ["kind", "meaning"],
                [[f"`{key}`", meanings()[key.replace("_", " ")]] for key in verdict_kinds()],
            ),
            "## Parts of the account",
            "[The account](../explanation/account.md) tells how its parts are measured.",
            table(
                ["part", "shown as"],
                [[f"`{part}`", kind.label] for part, kind in drawn_parts().items()],
            ),
            "## Rules",
            f"```text\n{rules.strip()}\n```",
            "## Thresholds",
            table(
                ["threshold", "value", "meaning"],
                [[f"`{name}`", value, meaning] for name, value, meaning in _constants(case)],
            ),
        ]
    )


def fixes() -> str:
    """List the kinds of fix, with their risk and their setting."""
    rows = []
    for key, kind in fix_kinds().items():
        change = (inspect.getdoc(type(kind)) or "").replace("\n", " ")
        applied = f"`{key}:{kind.example}`: {kind.setting}" if kind.example else "-"
        rows.append([f"`{key}`", kind.risk, change, applied, kind.needs or "-"])
    heads = ["kind", "risk", "change", "applied as", "else it needs"]
    return f"{(REFERENCE / 'fixes.md').read_text().rstrip()}\n\n{table(heads, rows)}"


def _constants(module: Any) -> Iterator[tuple[str, str, str]]:
    for line in inspect.getsource(module).splitlines():
        if match := re.match(r"([A-Z][A-Z_]+) = ([\d.]+)\s*(?:#\s*(.*))?$", line):
            yield match[1], match[2], match[3] or ""


def glossary() -> str:
    """List the words of an answer with their meanings."""
    from fullwire.words.glossary import glossary as words_by_subject

    parts = [
        "# Glossary",
        "The terminal, the page and the JSON keys use these words. `fullwire explain --glossary` "
        "prints them.",
    ]
    for subject, words in words_by_subject().items():
        rows = [[f"**{word}**", meaning] for word, meaning in words.items()]
        parts += [f"## {subject}", table(["word", "meaning"], rows)]
    return "\n\n".join(parts)


def settings() -> str:
    """List the variables of the environment that the code reads, and settings of frameworks."""
    found = _variables()
    if unknown := found - set(VARIABLES) - OF_ITS_OWN:
        raise RuntimeError(f"docs/making/reference.py does not describe {', '.join(unknown)}")
    rows = [[f"`{name}`", VARIABLES[name]] for name in sorted(found & set(VARIABLES))]
    others = [
        ["`RAY_ADDRESS`", "The Ray cluster that `--on ray` uses. Without it, one is started here."],
        ["`COLUMNS`", "The width of the terminal, where it is not known."],
        ["`XDG_CACHE_HOME`", "Where the lab keeps what it measured of this machine."],
    ]
    return "\n\n".join(
        [
            "# Settings",
            "Commands take their settings as options ([commands](commands.md)). Fixes and codecs "
            "have settings of their own ([fixes](fixes.md), [codecs](codecs.md)). These variables "
            "of the environment reach parts that have no command line:",
            table(["variable", "effect"], [*rows, *others]),
            "## A cluster's file",
            "`--cluster FILE.toml` reads it ([guide](../guides/describe-your-cluster.md)). A rate, "
            "a time and a ratio are text with a unit. `name`, `nodes` and `[nics]` with its `rate` "
            "are needed.",
            table(["key", "for example", "meaning"], list(cluster_keys())),
            "## A recipe",
            "`fullwire tune` writes it, and `fullwire run --recipe FILE.toml` applies it "
            "([guide](../guides/apply.md)). A recipe by hand needs `format` and its fixes.",
            table(
                ["key", "type", "meaning"],
                [*_commented(Recipe, ""), *_commented(Applied, "fixes.")],
            ),
            "## In the words of a framework",
            "`fullwire explain` prints these lines for the framework that the job uses, with its "
            "own values in place of the words in capitals. `torch` stands for a script with a "
            "loop of its own.",
            *_framework_settings(),
        ]
    )


def cluster_keys() -> Iterator[list[str]]:
    """Yield the keys of a cluster's file, from the docstring of the module that reads it."""
    place = ""
    for line in inspect.cleandoc(description.__doc__ or "").splitlines():
        if match := re.match(r" {4}(?:# )?(\[?\[?[\w.]+\]?\]?)(?: = (.+?))? +# (.+)$", line):
            key, example, meaning = match.groups()
            if example is None:
                place = key.strip("[]") + "."
                yield [f"`{key}`", "", meaning]
            else:
                yield [f"`{place}{key}`", f"`{example}`", meaning]


def _commented(kind: type, place: str) -> Iterator[list[str]]:
    """Yield the fields of a class, each with the comment beside it."""
    comments = dict(re.findall(r"^    (\w+): .*?  # (.+)$", inspect.getsource(kind), re.MULTILINE))
    for field in dataclasses.fields(kind):
        of = str(field.type).partition(" |")[0].partition("[")[0]
        words = {"str": "text", "int": "number", "float": "number", "Risk": "text"}
        yield [f"`{place}{field.name}`", words.get(of, "table"), comments[field.name]]


def _framework_settings() -> Iterator[str]:
    """Show the lines that make each fix, by framework."""
    for kind in _kinds_below(Fix):
        if not kind.lines or any(each.lines for each in kind.__subclasses__()):
            continue  # a kind below has these lines and more
        yield f"### {_with_names(kind.template)}"
        yield _prose(kind.__doc__)
        for framework, lines in kind.lines.items():
            yield f"**{framework}**\n\n```text\n{_with_names(lines).rstrip()}\n```"


def _kinds_below(kind: type[Fix]) -> Iterator[type[Fix]]:
    fix_kinds()  # loads the files that declare them
    for each in kind.__subclasses__():
        yield each
        yield from _kinds_below(each)


def _with_names(template: str) -> str:
    """Put the names of fields in capitals in place of the fields."""
    named = re.sub(r"(?<!{){(\w+)[^{}]*}(?!})", lambda field: field[1].upper(), template)
    return named.replace("{{", "{").replace("}}", "}")


def _variables() -> set[str]:
    files = [*PACKAGE.rglob("*.py"), *NATIVE.rglob("*.cpp")]
    text = "\n".join(path.read_text() for path in files)
    return set(re.findall(r"[\"'](FULLWIRE_[A-Z_]+)[\"']", text))


def codecs() -> str:
    """Describe each codec, as its file registers it."""
    from fullwire.compression.codec import CODECS

    parts = [
        "# Codecs",
        "A codec is a name with settings, such as `powersgd:rank=2`. `fullwire.compress` sends "
        "gradients with it ([guide](../guides/compression.md)), and `whatif --compression` "
        "predicts it. The ratio is that of large gradients with the usual settings.",
        table(
            ("codec", "ratio", "sends", "limit of the guard"),
            [
                (
                    f"`{codec.key}`",
                    f"{codec.ratio:.4g}",
                    codec.words,
                    "none" if codec.most_error is None else f"{codec.most_error:g}",
                )
                for codec in CODECS.values()
            ],
        ),
    ]
    for codec in CODECS.values():
        for option in codec.options:
            parts.append(
                f"`{codec.key}:{option.name}=`: {option.meaning}, {option.expected}. "
                f"Usual: {option.usual:g}."
            )
    return "\n\n".join(parts)


def built_in() -> str:
    """List the built-in workloads and clusters, as the commands print them."""
    parts = ["# Built-in workloads and clusters"]
    for command, words in (
        ("fullwire workloads", ["workloads"]),
        ("fullwire cluster list", ["cluster", "list"]),
    ):
        parts.append(f"## {command}\n\n```text\n{printed(words).rstrip()}\n```")
    return "\n\n".join(parts)
