"""Hostile commands: does each answer, or refuse in one clear line?

    .venv/bin/python -m validation.commands [--count 2000] [--seed 1] [--most-s 900]

A case is a command that works, with one or two of its values spoiled. The value becomes a number
that cannot be, a unit, a name, a path, or text with control characters. Or an option of the command
is added with such a value. Commands run in a folder of their own with small runs, traces, tables
and descriptions. A case fails if

- it ends in a traceback, by a signal, or with an exit status that no command has,
- it takes longer than 40 seconds,
- it refuses without a line that begins with "fullwire:", or with a line of control characters,
- it prints JSON that holds a number that cannot be: NaN, a negative time, a share above 1,
- it changes a file that was there before.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import typer.main

from fullwire import cli
from fullwire.cli.app import app_of
from validation import arguments, results

DATA = Path(__file__).parents[1] / "tests" / "data"
LONGEST_S = 40.0
MEMORY_BYTES = 6 << 30
STATUSES = {0, 1, 2, 3, 130}
ENDS_WITH_1 = ("compare", "run", "apply", "record", "tune")  # on purpose, or as their job did
RUNS = (
    "lab-gloo",
    "lab-half",
    "lab-fullwire",
    "kineto-made",
    "lab-packets",
    "simulated",
    "netx",
    "one",
)
INPUTS = (
    "all_reduce.log",
    "horovod.json",
    "ours.toml",
    "nccl.log",
    "chrome.json.gz",
    "kineto-made",
)
# Options that start something long or leave the machine: they belong to tests of their own.
LEFT_OUT = {"--install-completion", "--show-completion", "--on", "--exec", "--prometheus"}
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")

RECIPE = """\
format = 1
command = "python train.py"
workers = 2
before_s = 0.2
after_s = 0.1

[[fixes]]
fix = "buckets"
setting = "50"
risk = "exact"
why = "fewer messages"
"""

# Commands that work, by the folder that `prepared` makes.
BASES = tuple(
    line.split()
    for line in """
explain lab-gloo.run
explain lab-gloo.run --json
explain kineto-made --json
explain lab-gloo.run --baseline one.run
explain lab-gloo.run --line-rate 500Mbps -v
explain nccl.log
whatif lab-gloo.run --bandwidth 10Gbps,25Gbps --workers 8,64
whatif lab-gloo.run --transport measured --bandwidth 10Gbps --json
whatif lab-fullwire.run --compression bf16,int8 --workers 4 --json
whatif vgg16@v100 --workers 8,64 --bandwidth 10Gbps --target 0.95 --json
whatif vgg16@v100 --cluster dgx-h100 --nodes 2,16 --json
whatif lab-gloo.run --buckets 25MiB/5ms --accumulate 1,4 --jitter lognormal:5% --json
whatif lab-gloo.run --codec 4,20GB/s,20GB/s,sum --latency 5us --format csv
whatif lab-gloo.run --cluster dgx-h100 --nodes 2 --placement packed --algorithm auto
whatif lab-gloo.run -o out.run
whatif lab-gloo.run --bandwidth 1Gbps,10Gbps --plot out.svg
compare lab-gloo.run lab-half.run --json
compare lab-gloo.run lab-half.run --fail-if-slower 5%
compare lab-gloo.run -- lab-half.run
compare lab-gloo.run lab-half.run --markdown
show lab-gloo.run
show lab-gloo.run --json
show kineto-made.run --json
show vgg16@v100
report lab-gloo.run lab-half.run -o out.html
export lab-gloo.run -o out.json
export kineto-made.run -o out.json.gz
import kineto-made -o out.run
import horovod.json -o out.run --format horovod
import all_reduce.log -o out.run
import chrome.json.gz -o out.run
flows lab-packets.run
flows lab-packets.run --json
collective allreduce --cluster dgx-h100 --bytes 100MB --json
collective allreduce --workers 64 --bandwidth 100Gbps --bytes 1MB --algorithm ring --json
collective allgather --cluster ours.toml --bytes 1GB
collective broadcast --workers 16 --bandwidth 10Gbps --latency 5us --bytes 64KiB
plan llama3-8b --cluster dgx-h100 --nodes 2 --global-batch 64 --seq 4096
plan llama3-8b --cluster dgx-h100 --nodes 2 --global-batch 64 --seq 4096 --json --top 3
plan llama3-8b --cluster dgx-h100 --nodes 2 --global-batch 64 --fix tp=8 --why
plan llama3-8b --cluster dgx-h100,dgx-a100 --nodes 2 --global-batch 64 --bandwidth 100Gbps,400Gbps
plan llama3-8b --cluster dgx-h100 --nodes 2 --global-batch 64 --hours 1000 --failures 50000 --json
cluster list
cluster show dgx-h100
cluster show ours.toml
cluster fit all_reduce.log -o out.toml
workloads
workloads --json
fixes
fixes --json
run --recipe recipe.toml -- true
run --recipe recipe.toml --export env -- true
apply buckets:50 -- true
record -o out.run -- true
codecs bf16 --quick --json
watch 1 --once --seconds 1
tune -o out -- false
""".strip().splitlines()
)


def _listed(text: str) -> tuple[str, ...]:
    return tuple(text.split("|"))


NUMBERS = (
    *_listed("0|-1|-0|1|0.5|1.5|nan|inf|-inf|1e308|1e400|-1e400|1e-320"),
    "9" * 19,
    "9" * 400,
    *_listed(
        "0x10|1_000|+5| 7|٣|½|1,2,,3|,|1,|NaN|1e15|18446744073709551616|2147483648|"
        "-2147483649|1000001|007|1/0|5%|-5%|500%"
    ),
)
UNITS = (
    *_listed(
        "0Gbps|-1Gbps|nanGbps|infGbps|1e300Gbps|1e-300bps|10XB|Gbps|10|10 Gbps|10gbps|600h|"
        "1e99h|-5us|0s|1us,|1MiB|0MiB|-1MB|1e30MiB|5ms/5ms|1:0"
    ),
)
NAMES = (
    *_listed(
        "| |-|--|---x|none|None|null|true|auto|measured|full|full:0|full:-1|full:2|full:nan|"
        "ring|nonsense|nccl|{}|[]|'|\"|%s%n|$HOME|~|*|loss<=|loss<=nan|loss<=-1|<=|0|1.5|"
        "-0.5|tp=0|tp=-1,pp=1e9|tp=|tp|tp=8,tp=4|lognormal:nan%|lognormal:-5%|"
        "exponential:1e9%|llama3-8b|vgg16@|@|vgg16@nothing|vgg16@v100:0|vgg16@v100:-1|"
        "vgg16@v100:1e9|bf16:rank=2|powersgd:rank=0|powersgd:rank=1e9|topk:density=2|"
        "topk:density=nan|4,0GB/s,1GB/s,sum|0,1GB/s,1GB/s,sum|\x1b[31mred\x1b[0m|\u202eevil|"
        "\x07bell|a\nb|a\tb|\u2066x|é|日本|\udce4|🙂"
    ),
    "a" * 300,
    "a" * 5000,
    "/" * 300,
    "x=" * 2000,
    "[" * 3000,
    "{" * 3000,
)
PATHS = (
    *_listed(
        "missing.run|missing/x.run|dir|empty|fifo|loop|dangling|noise.bin|x.txt|/|/dev/null|"
        "/dev/zero|/dev/full|/proc/self/mem|/proc/self/fd/0|..|.|./"
    ),
    "a" * 300,
    *_listed(
        "\x1b[31m.run|\u202egnp.run|a\nb.run|\udce4.run|broken.run|newer.run|deep.toml|"
        "nan.toml|broken.toml|broken.json|lab-gloo.run/run.json|lab-gloo.run/spans.parquet|"
        "kept.html|kept.json|kept.toml|lab-gloo.run|netx.run|recipe.toml|huge.json"
    ),
)
VALUES = (*NUMBERS, *UNITS, *NAMES, *PATHS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a command ended."""

    command: Sequence[str]
    status: int  # negative: by this signal
    took_s: float
    out: str
    err: str
    changed: str = ""  # a file that was there before, and is another now


def prepared(place: Path) -> None:
    """Make the folder in which commands run."""
    for name in RUNS:
        shutil.copytree(DATA / "format-1" / f"{name}.run", place / f"{name}.run")
    for name in INPUTS:
        source = DATA / "inputs" / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, place / name)
    shutil.copytree(place / "lab-gloo.run", place / "broken.run")
    (place / "broken.run" / "run.json").write_text('{"format": 1, "facts": {"workers": -3')
    shutil.copytree(place / "lab-gloo.run", place / "newer.run")
    facts = json.loads((place / "newer.run" / "run.json").read_text())
    (place / "newer.run" / "run.json").write_text(json.dumps(facts | {"format": 999}))
    (place / "dir").mkdir()
    (place / "empty").touch()
    os.mkfifo(place / "fifo")
    (place / "loop").symlink_to("loop")
    (place / "dangling").symlink_to("nowhere")
    (place / "noise.bin").write_bytes(random.Random(0).randbytes(20_000))
    (place / "x.txt").write_text("hello\n" * 100)
    (place / "deep.toml").write_text("a = " + "[" * 5000 + "]" * 5000 + "\n")
    (place / "nan.toml").write_text((place / "ours.toml").read_text().replace("2", "nan"))
    (place / "broken.toml").write_text("[[fixes\nworkers = -3")
    (place / "broken.json").write_text('[{"name": "x", "ts": NaN, "dur": -1')
    (place / "huge.json").write_text('{"traceEvents": [' + '{"ts": 1e400},' * 20_000 + "{}]}")
    for kind in ("html", "json", "toml"):
        (place / f"kept.{kind}").write_text("kept\n")
    (place / "recipe.toml").write_text(RECIPE)


def options_of(words: Sequence[str]) -> list[tuple[str, bool]]:
    """Return the options of a command, each with whether it takes a value."""
    command: Any = typer.main.get_command(app_of())
    for word in words:
        inner = getattr(command, "commands", {}).get(word)
        if inner is None:
            break
        command = inner
    found = []
    for parameter in command.params:
        for name in getattr(parameter, "opts", ()):
            if (
                name.startswith("-")
                and name not in LEFT_OUT
                and parameter.param_type_name == "option"
            ):
                found.append((name, not parameter.is_flag))
    return found


def cases(count: int, seed: int) -> Iterator[list[str]]:
    """Yield commands, some values of which are spoiled."""
    chance = random.Random(seed)
    options = {tuple(base): options_of(base) for base in BASES}
    for number in range(count):
        base = BASES[number % len(BASES)]
        words = list(base)
        until = (
            words.index("--")
            if "--" in words and words[0] in {"run", "apply", "record", "tune"}
            else len(words)
        )
        for _ in range(chance.choice((1, 1, 1, 2))):
            kind = chance.random()
            places = [at for at in range(1, until) if not words[at].startswith("-")]
            if kind < 0.55 and places:
                at = chance.choice(places)
                words[at] = spoiled(words[at], chance)
            elif kind < 0.9 and options[tuple(base)]:
                name, takes = chance.choice(options[tuple(base)])
                words[until:until] = [name, chance.choice(VALUES)] if takes else [name]
                until += 2 if takes else 1
            elif places:
                at = chance.choice(places)
                if chance.random() < 0.5:
                    words.insert(at, words[at])
                    until += 1
                else:
                    del words[at]
                    until -= 1
        yield words


def spoiled(word: str, chance: random.Random) -> str:
    """Return a hostile value for this one."""
    near = UNITS + NUMBERS if word[:1].isdigit() else PATHS if "." in word else VALUES
    if chance.random() < 0.2 and word:  # damage it
        at = chance.randrange(len(word))
        return (
            word[:at]
            + chance.choice(("", ",", "%", "\u202e", "-", "0", "1e9", "="))
            + word[at + 1 :]
        )
    if chance.random() < 0.2:
        return f"{word},{chance.choice(NUMBERS)}"
    return chance.choice(near if chance.random() < 0.7 else VALUES)


def played(command: Sequence[str], place: Path) -> Ended:
    """Run one command in a child of this process, in a folder."""
    began_s = time.monotonic()
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        child = os.fork()
        if child == 0:
            _become(command, place, out.fileno(), err.fileno())
        status = _ended(child, began_s + LONGEST_S)
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode("utf-8", "surrogateescape"))
    took_s = time.monotonic() - began_s
    return Ended(command=command, status=status, took_s=took_s, out=texts[0], err=texts[1])


def _become(command: Sequence[str], place: Path, out: int, err: int) -> None:
    """Run the command line in this child, and leave."""
    status = 99
    try:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
        os.chdir(place)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(out, 1)
        os.dup2(err, 2)
        os.environ["HOME"] = str(place)
        if "--plot" in command:  # the renderer's threads do not survive a fork, if it has drawn
            os.execv(sys.executable, [sys.executable, "-m", "fullwire", *command])
        sys.stdout = os.fdopen(1, "w", errors="strict", encoding="utf-8")
        sys.stderr = os.fdopen(2, "w", errors="backslashreplace", encoding="utf-8")
        sys.argv = ["fullwire", *command]
        cli.main()
        status = 0
    except SystemExit as left:
        status = left.code if isinstance(left.code, int) else 1 if left.code else 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (OSError, ValueError):
                status = status or 98
        os._exit(status)


def _ended(child: int, until_s: float) -> int:
    """Wait for a child and return its exit status, or the negative signal that ended it."""
    while True:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > until_s:
            os.killpg(child, signal.SIGKILL)
        time.sleep(0.004)


def wrong(ended: Ended) -> str:
    """Say what is wrong with how a command ended, or "" if nothing is."""
    if "Traceback (most recent call last)" in ended.err:
        return "a traceback"
    if ended.took_s > LONGEST_S:
        return f"no end within {LONGEST_S:g} s"
    if ended.status not in STATUSES:
        return f"status {ended.status}"
    if ended.changed:
        return f"changed {ended.changed}"
    if found := _CONTROL.search(ended.out + ended.err):
        return f"a raw control character, {found[0]!r}"
    lines = [line for line in ended.err.splitlines() if line.startswith("fullwire:")]
    if ended.status in (2, 3) and not lines and not ended.err.startswith("Usage:"):
        return "a refusal without a line that says why"
    if ended.status == 1 and ended.command[0] not in ENDS_WITH_1:
        return "status 1"
    prints_text = {"--glossary", "--help", "-h"} & set(ended.command)
    if ended.status == 0 and "--json" in ended.command and not prints_text:
        return wrong_number(ended.out)
    return ""


def wrong_number(text: str) -> str:
    """Say which number of a JSON answer cannot be."""

    def refuse(name: str) -> Any:
        raise ValueError(f"JSON with {name}")

    try:
        answer = json.loads(text, parse_constant=refuse)
    except ValueError as error:
        return str(error)[:200]
    for name, value in _numbers("", answer):
        key = name.rpartition(".")[2].partition("[")[0]
        if value < 0 and key.endswith(("_s", "_bps", "_bytes")):
            return f"{name} is {value:g}"
        if key in ("scaling_factor", "network_utilization") and value > 1 + 1e-6:
            return f"{name} is {value:g}"
    return ""


def _numbers(name: str, value: Any) -> Iterator[tuple[str, float]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _numbers(f"{name}.{key}", inner)
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from _numbers(f"{name}[{number}]", inner)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield name, float(value)


class Folder:
    """A folder of files, which is made anew after a command that wrote to it."""

    def __init__(self, place: Path, whole: Path) -> None:
        self._place, self._whole = place, whole
        self._was = state_of(whole)
        self._fill()

    def _fill(self) -> None:
        shutil.rmtree(self._place, ignore_errors=True)
        shutil.copytree(
            self._whole, self._place, symlinks=True, ignore=lambda _, n: {"fifo"} & set(n)
        )
        os.mkfifo(self._place / "fifo")

    def play(self, command: Sequence[str]) -> Ended:
        """Run one command here."""
        ended = played(command, self._place)
        now = state_of(self._place)
        changed = next((name for name, kept in self._was.items() if now.get(name) != kept), "")
        if now != self._was:
            self._fill()
        return replace(ended, changed="" if "--force" in command else changed)


def state_of(place: Path) -> dict[str, str]:
    """Return the content of each file, as a hash."""
    found = {}
    for path in sorted(place.rglob("*")):
        name = str(path.relative_to(place))
        if path.is_symlink() or path.is_dir() or not path.is_file():
            found[name] = "kept"
        else:
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def main() -> None:
    """Play the commands, print those that end badly, and write the result."""
    taken = arguments.parser(__doc__)
    taken.add_argument("--count", type=int, default=2000)
    taken.add_argument("--seed", type=int, default=1)
    taken.add_argument(
        "--most-s", type=float, default=3600.0, help="begin no command after so long"
    )
    asked = taken.parse_args()
    until_s = time.monotonic() + asked.most_s
    bad: list[tuple[list[str], str]] = []
    statuses: Counter[int] = Counter()
    with tempfile.TemporaryDirectory() as made:
        whole = Path(made, "whole")
        whole.mkdir()
        prepared(whole)
        folders = [Folder(Path(made, f"folder-{number}"), whole) for number in range(2)]

        def play(number: int) -> None:
            for command in commands[number::2]:
                if time.monotonic() > until_s:
                    return
                ended = folders[number].play(command)
                statuses[ended.status] += 1
                if why := wrong(ended):
                    bad.append((command, why))
                    print(f"{why}: fullwire {' '.join(map(repr, command))[:400]}", flush=True)
                    print("   " + ended.err.strip().replace("\n", "\n   ")[-600:], flush=True)

        commands = list(cases(asked.count, asked.seed))
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(play, range(2)))
    played_ = sum(statuses.values())
    print(f"{played_} commands, {len(bad)} ended badly; by status {dict(statuses)}")
    results.write(
        "commands",
        claim="A hostile command ends in an answer or in one clear line.",
        anchor="working commands with one or two values spoiled, seeded",
        summary=f"{len(bad)} of {played_:,} ended badly",
        cases=played_,
        tables=[
            results.Table(
                columns=["exit status", "commands"],
                rows=[[status, statuses[status]] for status in sorted(statuses)],
            )
        ],
    )


if __name__ == "__main__":
    main()
