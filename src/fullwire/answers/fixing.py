"""Start a job with fixes: those of a recipe, or some by hand. The script stays as it is."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import platform
import re
import shlex
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeAlias

from fullwire.compression.method import ERROR_VARIABLE, error_limit
from fullwire.errors import UsageError
from fullwire.files import path_of
from fullwire.findings.finding import Finding
from fullwire.findings.tuning import (
    AppliedInSome,
    FixToldWhy,
    Followed,
    MaskedWordsDiffer,
    NobodyCalled,
    NobodyLoadedTorch,
    NoOutcome,
    NothingCame,
    OtherVersion,
    Outcome,
    RecipeOfAnotherCommand,
)
from fullwire.fixes._in_job import APPLIED, NOTES, STRICT_VARIABLE, UNDONE, WORKERS_VARIABLE
from fullwire.fixes._recipe import Applied, Recipe, parse_fix, read_recipe
from fullwire.fixes._shared import (
    FIXES_VARIABLE,
    FOLLOW_VARIABLE,
    NOTES_VARIABLE,
    OVER,
    STEPS_VARIABLE,
)
from fullwire.fixes.fix import fix_kind, fix_kinds
from fullwire.recorder.command_line import without_secrets
from fullwire.recorder.inside import THEN_VARIABLE, TRIAL_VARIABLE
from fullwire.recorder.launch import ENDING, PYTHON_PATH, run_to_its_end
from fullwire.units import count, seconds, shown, visible
from fullwire.words import sentence

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
NONE = "none"  # in place of fixes: a trial of the job as it is
_MOST_IN_VAIN = 5  # runs in a row to which no trial came
# By the user, or by a scheduler for its limit.
ENDED_BY_USER = tuple(128 + number for number in ENDING)
Say = Callable[[str], None]
Notes: TypeAlias = Sequence[Sequence[Mapping[str, Any]]]  # by process


def split_fixes(text: str) -> list[str]:
    """Take fixes that commas join; a setting may have commas of its own."""
    if text == NONE:
        return []
    if not text:
        raise UsageError(f"fixes: expected some such as buckets:50, or {NONE}, got ''")
    keys = "|".join(map(re.escape, fix_kinds()))
    return [part for part in re.split(rf",(?=(?:{keys})(?::|,|$))", text) if part]


def apply_fixes(
    fixes: Sequence[str | Applied],
    command: Sequence[str],
    *,
    steps: int | None = None,
    within: str | float | None = None,
    workers: str = "",
    max_error: float | None = None,
    strict: bool = False,
    say: Say = lambda sentence: None,
) -> int:
    """Run a command with fixes, and return its exit status.

    - `fixes`: such as `"buckets:50"`. `fullwire fixes` lists them.
    - `command`: a launcher or one rank's program. Each process that loads torch has the fixes.
    - `steps`: end the job after so many steps, as for a trial. Code after its loop is not run.
    - `within`: end the job after such a time, `"300s"`. The exit status is then 124.
    - `workers`: the ranks that the fixes are for, `"2"`. Ranks of another job say so, or with
      `"2!"` end.
    - `max_error`: the relative squared error beyond which a codec or a wire format gives way to
      float32.
    - `strict`: refuse a job that cannot have one of the fixes. It ends before its first step.
    - `say`: hears at the end what became of each fix.

        fw.apply_fixes(["buckets:50", "transport:fullwire"], ["torchrun", "train.py"])
    """
    chosen = [parse_fix(fix) if isinstance(fix, str) else fix for fix in fixes]
    if not command:
        raise UsageError("expected a command to run, got none")
    keys = [fix.fix for fix in chosen if fix.fix != "environment"]
    if twice := [key for key, times in Counter(keys).items() if times > 1]:
        raise UsageError(f"fix {twice[0]}: expected one setting, got two")
    environment = dict(os.environ)
    try:
        outer = list(json.loads(environment.get(FIXES_VARIABLE, "[]")))  # a launcher's, around this
    except (ValueError, TypeError, RecursionError):
        raise UsageError(
            f"{FIXES_VARIABLE}: expected what `fullwire apply` puts there, got "
            f"{shown(environment[FIXES_VARIABLE])}"
        ) from None
    environment[FIXES_VARIABLE] = json.dumps([*outer, *([fix.fix, fix.setting] for fix in chosen)])
    _let_enter(environment)
    if workers:
        environment[WORKERS_VARIABLE] = workers
    if strict:
        environment[STRICT_VARIABLE] = "1"
    if max_error is not None:
        environment[ERROR_VARIABLE] = str(error_limit(max_error, "max_error"))
    for fix in chosen:
        environment |= fix_kind(fix.fix).environment(fix.setting)
    if steps is not None:
        environment[STEPS_VARIABLE] = str(count(steps, "steps"))
    limit_s = None if within is None else seconds(within, "within")
    if NOTES_VARIABLE in environment:
        return run_to_its_end(command, environment, limit_s=limit_s)
    with tempfile.TemporaryDirectory(prefix="fullwire-fixes-") as folder:
        environment[NOTES_VARIABLE] = folder
        status = run_to_its_end(command, environment, limit_s=limit_s)
        told = notes_in(Path(folder))
    if strict and (refusal := _refusal(chosen, told)):
        raise UsageError(refusal)
    for outcome in outcomes(chosen, told):
        say(sentence(outcome))
    return status


def _refusal(chosen: Sequence[Applied], told: Notes) -> str:
    """Return why a job was refused: it cannot have one of the fixes. "" if it was not."""
    refused = {
        note["fix"]: note["refused"] for of_one in told for note in of_one if "refused" in note
    }
    for fix in chosen:
        notes = [did for of_one in _notes_of(fix, told) for did in of_one]
        has_it = any(did.startswith(APPLIED) for did in notes)
        why = refused.get(fix.fix) or next((did for did in notes if not has_it), "")
        if why:
            return f"fix {fix}: {why}"
    return ""


def _let_enter(environment: dict[str, str]) -> None:
    """Let the processes of a job load the fixes after torch."""
    environment[THEN_VARIABLE] = "fullwire.fixes._in_job"
    before = environment.get("PYTHONPATH")
    if str(PYTHON_PATH) not in (before or "").split(os.pathsep):
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(PYTHON_PATH), before]))


def run_recipe(
    recipe: str | Path | None,
    command: Sequence[str],
    *,
    strict: bool = False,
    say: Say = lambda sentence: None,
) -> int:
    """Run a command with the fixes of a recipe, and return its exit status.

    - `recipe`: a file that `fullwire tune` wrote, or a person. None on a host whose ranks take the
      fixes of rank 0's host, through the job's own store. If `tune` works there, the command is run
      again for each trial.
    - `command`: a launcher or one rank's program. Each process that loads torch has the fixes.
    - `strict`: refuse a job or versions other than the recipe's, a fix that is unknown here, and a
      job that cannot have one, instead of saying so.
    - `say`: hears what does not fit, and at the end what became of each fix.

        fw.run_recipe("tuned/recipe.toml", ["torchrun", "train.py"])
    """
    if recipe is None:
        return _follow(command, say)
    path = path_of(recipe, "recipe")
    parsed = read_recipe(path, None if strict else say)
    for difference in _differences(parsed, command):
        if strict:
            raise UsageError(f"{path}: {sentence(difference)}")
        say(f"{path}: {sentence(difference)}. Its fixes are applied all the same")
    workers = "" if parsed.workers is None else f"{parsed.workers}{'!' if strict else ''}"
    return apply_fixes(parsed.fixes, command, workers=workers, strict=strict, say=say)


def _follow(command: Sequence[str], say: Say) -> int:
    """Run a command with the fixes of rank 0's host: once, or for each trial of `tune` there."""
    in_vain = -1  # in a row, once there was a trial
    while True:
        environment = {**os.environ, FOLLOW_VARIABLE: "1"}
        _let_enter(environment)
        with tempfile.TemporaryDirectory(prefix="fullwire-fixes-") as folder:
            environment[NOTES_VARIABLE] = folder
            status = run_to_its_end(command, environment)
            told = notes_in(Path(folder))
        took = [note["took"] for notes in told for note in notes if "took" in note]
        pairs = json.loads(took[0].get(FIXES_VARIABLE, "[]")) if took else []
        fixes = [Applied(fix=key, setting=setting) for key, setting in pairs]
        trial = took[0].get(TRIAL_VARIABLE) if took else None
        if trial == OVER:
            return 0
        # A launcher that started this process starts it again for the next trial.
        if trial is not None and "TORCHELASTIC_RUN_ID" not in environment:
            in_vain = 0
            say(
                sentence(
                    Followed(trial=trial, fixes=tuple(map(str, fixes)) or (NONE,), status=status)
                )
            )
        elif not took and 0 <= in_vain < _MOST_IN_VAIN:
            in_vain += 1  # a trial may have ended elsewhere before the launchers met
        else:
            for outcome in outcomes(fixes, told) if took else [NothingCame()]:
                say(sentence(outcome))
            return status
        if status in ENDED_BY_USER:
            return status


def hash_of(command: Sequence[str]) -> str:
    """Return the hash of a command's words."""
    return hashlib.sha256("".join(f"{word}\0" for word in command).encode()).hexdigest()


def versions_here() -> dict[str, str]:
    """Return the versions that a recipe depends on."""
    versions = {"python": platform.python_version()}
    for package in ("fullwire", "torch"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:  # the job may run in another environment
            continue
    return versions


def _differences(recipe: Recipe, command: Sequence[str]) -> list[Finding]:
    here = versions_here()
    differences: list[Finding] = []
    if recipe.command and recipe.command != without_secrets(command):
        differences.append(RecipeOfAnotherCommand(command=recipe.command))
    if recipe.command_sha256 and not differences and recipe.command_sha256 != hash_of(command):
        differences.append(MaskedWordsDiffer())
    for name, made_with in recipe.versions.items():
        if name in here and here[name] != made_with:
            differences.append(OtherVersion(program=name, expected=made_with, got=here[name]))
    return differences


def notes_in(folder: Path) -> Notes:
    """Read the notes of the processes of a job, a list for each process."""
    notes: list[list[dict[str, Any]]] = []
    for path in sorted(folder.glob(f"*{NOTES}")):
        notes.append([])
        for line in path.read_text(errors="replace").splitlines():
            try:
                note = json.loads(line)
            except (ValueError, RecursionError):  # a process was killed as it wrote
                continue
            if isinstance(note, dict):
                notes[-1].append(note)
    return notes


def outcomes(chosen: Sequence[Applied], told: Notes) -> list[Finding]:
    """Sum up the notes of the processes: a finding for each fix and outcome."""
    results: list[Finding] = []
    for fix in chosen:
        notes = _notes_of(fix, told)
        for did, processes in Counter(did for of_one in notes for did in of_one).items():
            results.append(Outcome(fix=str(fix), did=did, processes=processes))
        if not notes:
            results.append(NoOutcome(fix=str(fix), why=_why_no_note(fix, told)))
    return results


def problem_of(fix: Applied, ranks: int, told: Notes) -> Finding | None:
    """Say why a job does not have a fix, by the notes of its ranks."""
    notes = _notes_of(fix, told)
    all_told = [did for of_one in notes for did in of_one]
    for did in all_told:
        if did.startswith(UNDONE):
            return FixToldWhy(did=did)
    having = sum(any(did.startswith(APPLIED) for did in of_one) for of_one in notes)
    if not having:
        return FixToldWhy(did=all_told[-1]) if all_told else _why_no_note(fix, told)
    if having < ranks and fix_kinds()[fix.fix].of_each_rank:
        return AppliedInSome(having=having, ranks=ranks)
    return None


def _why_no_note(fix: Applied, told: Notes) -> Finding:
    """Say why no process of a job noted anything about a fix."""
    # A process that loads torch notes at once a fix that variables make.
    is_set = fix_kinds()[fix.fix].variables_suffice and not any(told)
    return NobodyLoadedTorch() if is_set else NobodyCalled()


def _notes_of(fix: Applied, told: Notes) -> list[list[str]]:
    """Return what each process that noted something noted of a fix."""
    found = []
    for notes in told:
        of_fix = [str(note.get("did", "")) for note in notes if note.get("fix") == fix.fix]
        if fix.fix == "environment":
            of_fix = [did for did in of_fix if did.endswith(fix.setting)]
        if of_fix:
            found.append(of_fix)
    return found


def exported(recipe: str | Path, way: str, say: Say = lambda sentence: None) -> str:
    """Return what a person writes to have a recipe's fixes without Fullwire's `run`.

    - `way`: "env" for lines of a shell, "python" for lines of the script, "torchrun" for a command.
    - `say`: hears which keys and fixes of the recipe are left out, as this version lacks them.
    """
    if way not in EXPORTS:
        raise UsageError(f"export: expected {', '.join(EXPORTS)}, got {way}")
    found = read_recipe(path_of(recipe, "recipe"), say)
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
