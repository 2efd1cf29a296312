"""Apply fixes inside a process of a job, which has just loaded torch.

The recorder's folder on PYTHONPATH loads this module (`recorder/inside`). The job goes on whatever
happens here. Each process writes what became of each fix as a line into a folder, if one is named.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import inspect
import json
import logging
import os
import re
import socket
import sys
import sysconfig
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fullwire.fixes._shared import (
    FIXES_VARIABLE,
    NOTES_VARIABLE,
    STEPS_VARIABLE,
    is_torchrun,
    share,
)
from fullwire.fixes.fix import Change, fix_kind
from fullwire.recorder.inside import DIRECTORY_VARIABLE, THEN_VARIABLE, after_import
from fullwire.recorder.inside.ending import at_end

LOOK_VARIABLE = "FULLWIRE_LOOK"  # 1: note the calls that fixes change, as for a trial
WORKERS_VARIABLE = "FULLWIRE_FIXES_WORKERS"  # the ranks of a recipe; with ! others are refused
STRICT_VARIABLE = "FULLWIRE_FIXES_STRICT"  # 1: a process that cannot have a fix ends
NOTES = ".fixes"  # the end of such a file's name
APPLIED, NOT_APPLIED, UNDONE = "applied", "not applied", "undone"
FIRST_LOSSES = 20
_WARM_STEPS = 3
# Files of Python and of packages: a call in them belongs to the script's line that led there.
_OF_LIBRARIES = tuple(
    path + os.sep
    for path in (
        *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")),
        os.path.dirname(os.path.dirname(os.path.abspath(__file__))),
    )
)
_MOST_PATHS = 5
_WRITING = os.O_WRONLY | os.O_RDWR
# Audit events with the places of the paths that they change.
_CHANGES = {"os.rename": (0, 1), "os.remove": (0,), "os.mkdir": (0,), "shutil.rmtree": (0,)}
_PASSING = ("tmp", "torch", "pymp-")  # beginnings of names in the folder for temporary files
_OF_OTHERS = re.compile(r"cache(__)?$|^(site|dist)-packages$|^\.(triton|nv)$")


class Applying:
    """The process as one fix changes it."""

    def __init__(self, key: str) -> None:
        self.key = key
        self._said: dict[str, None] = {}  # in order
        self._of_parent: dict[str, None] = {}
        os.register_at_fork(after_in_child=self._begin_anew)

    def _begin_anew(self) -> None:
        self._of_parent, self._said = self._of_parent | self._said, {}

    def note_of_parent(self) -> None:
        """Note for a fork that trains what its parent noted: the fork has the fix, too."""
        for sentence in self._of_parent:
            self.did(sentence)

    def around(self, owner: Any, name: str, change: Change, *, may_repeat: bool = True) -> None:
        """Give a function other arguments; if that fails, it has its own ones."""
        function = getattr(owner, name)
        signature = inspect.signature(function)

        @functools.wraps(function)
        def changed(*args: Any, **kwargs: Any) -> Any:
            try:
                bound = signature.bind(*args, **kwargs)
                bound.arguments |= change(bound.arguments)
            except Exception as error:
                self.did(f"not applied: {error}")
                return function(*args, **kwargs)
            try:
                return function(*bound.args, **bound.kwargs)
            except Exception as error:
                if not may_repeat:
                    raise
                self.did(f"{UNDONE}: {type(error).__name__}: {error}")
            return function(*args, **kwargs)

        setattr(owner, name, changed)

    @property
    def why_not(self) -> str:
        """Return why this process does not have the fix, or "" if nothing speaks against it."""
        said = self._of_parent | self._said
        undone = [sentence for sentence in said if sentence.startswith(UNDONE)]
        if undone or any(sentence.startswith(APPLIED) for sentence in said):
            return undone[0] if undone else ""
        return next(iter(said), "")

    def did(self, sentence: str) -> None:
        """Note a sentence once: into the folder for notes, or to the standard error output."""
        if sentence in self._said:
            return
        self._said[sentence] = None
        is_told = note({"fix": self.key, "did": sentence})
        if not is_told and sentence.startswith((NOT_APPLIED, UNDONE)):
            sys.stderr.write(f"fullwire: fix {self.key}: {sentence}\n")


def note(line: Mapping[str, Any]) -> bool:
    """Add a line to this process's notes; say whether there is a folder for them."""
    folder = os.environ.get(NOTES_VARIABLE)
    if not folder:
        return False
    try:
        name = f"{socket.gethostname()}-{os.getpid()}{NOTES}"  # hosts may share the folder
        with open(os.path.join(folder, name), "a") as file:
            file.write(json.dumps(line) + "\n")
    except OSError:  # the folder lies on another host, or its disk is full
        return False
    return True


class Outside:
    """Listens to what this process opens, moves and removes, as Python tells its audit hooks."""

    def __init__(self) -> None:
        self.paths: set[str] = set()
        libraries = (sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
        ours = (os.environ.get(name) for name in (NOTES_VARIABLE, DIRECTORY_VARIABLE))
        known = (os.getcwd(), *libraries, *filter(None, ours), "/dev", "/proc", "/sys")
        self._inside = tuple(os.path.realpath(path) + os.sep for path in known)
        folders = {os.path.realpath(folder) for folder in (tempfile.gettempdir(), "/tmp")}
        self._passing = tuple(f"{folder}/{name}" for folder in folders for name in _PASSING)

    def begin(self) -> None:
        """Listen until the process ends."""

        def heard(event: str, values: tuple[Any, ...]) -> None:
            with contextlib.suppress(Exception):  # it would end the job's own call
                self._heard(event, values)

        sys.addaudithook(heard)

    def _heard(self, event: str, values: tuple[Any, ...]) -> None:
        if event == "open":
            mode, flags = values[1], values[2]
            writes = set(mode or "") & set("wax+") or flags & _WRITING
            # A temporary file without a name is opened by its folder.
            if writes and not os.path.isdir(values[0]):
                self.wrote(values[0])
        elif event in _CHANGES:
            for place in _CHANGES[event]:
                # A folder that exists is not made, and a file that does not is not removed.
                exists = os.path.lexists(values[place])
                if place == 1 or exists == (event != "os.mkdir"):
                    self.wrote(values[place])

    def wrote(self, file: Any) -> None:
        """Take a file that is about to be written, if it is a path outside."""
        if not isinstance(file, str | bytes | os.PathLike) or len(self.paths) >= _MOST_PATHS:
            return
        path = os.path.realpath(os.fsdecode(file))
        if path.startswith((*self._inside, *self._passing)) or f"{path}/" in self._inside:
            return
        if not any(_OF_OTHERS.search(name) for name in Path(path).parts):
            self.paths.add(path)


class Looking:
    """The calls of this process that fixes change, its first losses, and its host work.

    One line of notes holds them at the process's end.
    """

    def __init__(self) -> None:
        self.steps = 0
        self._sums = 0
        self._gradients_of = -1  # the step for which gradients were made and not cleared
        self._cleared_in = -1  # the step whose gradients were cleared before its end
        self._seen: dict[str, Any] = {"losses": [], "wrote": []}
        self._host_s: defaultdict[tuple[str, str], float] = defaultdict(float)
        self._is_timing = False
        self._outside = Outside()
        self._process = os.getpid()
        self._rank = ""

    def begin(self) -> None:
        """Look at the calls, and write the notes when the process ends."""
        import torch
        from torch.nn.parallel import DistributedDataParallel
        from torch.utils.data import DataLoader

        def options(wrapper: Any, given: dict[str, Any]) -> None:
            names = ("find_unused_parameters", "static_graph", "gradient_as_bucket_view")
            self._seen["ddp"] = {name: bool(given.get(name)) for name in names}
            self._seen["ddp"]["bucket_cap_mb"] = given.get("bucket_cap_mb")

        def sharded(module: Any, given: dict[str, Any]) -> None:
            self._seen["fsdp"] = {name: bool(given.get(name)) for name in ("forward_prefetch",)}
            kept = given.get("reshard_after_forward")
            if kept is None and "sharding_strategy" in given:
                kept = getattr(given["sharding_strategy"], "name", "FULL_SHARD") == "FULL_SHARD"
            mesh, group = given.get("mesh"), given.get("process_group")
            is_whole = group is None and (mesh is None or mesh.ndim == 1)
            self._seen["fsdp"] |= {"reshard_after_forward": kept, "is_whole": is_whole}

        def of_fsdp() -> None:
            found = sys.modules["torch.distributed.fsdp"]
            self._before(found, "fully_shard", sharded)
            self._before(found.FullyShardedDataParallel, "__init__", sharded)

        def loader(wrapper: Any, given: dict[str, Any]) -> None:
            self._seen.setdefault("loading_processes", given.get("num_workers", 0))

        def one_pass(model: Any, given: dict[str, Any]) -> None:
            self._sums += bool(torch.is_grad_enabled() and model.require_backward_grad_sync)
            if self._cleared_in == self.steps:
                self._seen["clears_between_passes"] = True

        def cleared(owner: Any, given: dict[str, Any]) -> None:
            if self._gradients_of == self.steps:
                self._cleared_in = self.steps

        def loss(tensor: Any, given: dict[str, Any]) -> None:
            self._gradients_of = self.steps
            if len(self._seen["losses"]) < FIRST_LOSSES and tensor.numel() == 1:
                self._seen["losses"].append(float(tensor.detach()))

        self._before(DistributedDataParallel, "__init__", options)
        after_import("torch.distributed.fsdp", of_fsdp)
        self._before(DataLoader, "__init__", loader)
        self._before(DistributedDataParallel, "forward", one_pass)
        self._before(torch.Tensor, "backward", loss)
        for owner in (torch.optim.Optimizer, torch.nn.Module):
            self._before(owner, "zero_grad", cleared)
        # It writes by C++, of which no audit hook hears.
        self._before(torch, "save", lambda state, given: self._outside.wrote(given.get("f")))
        self._timed(torch, "save", "torch.save")
        for name in ("item", "tolist", "cpu"):
            self._timed(torch.Tensor, name, f".{name}()")
        self._timed(builtins, "print", "print")
        self._timed(logging.Logger, "handle", "logging")
        checkpoints = "torch.distributed.checkpoint"
        for module, owner, name, words in (
            (checkpoints, "", "save", f"{checkpoints}.save"),
            ("torch.utils.tensorboard.writer", "SummaryWriter", "add_scalar", "add_scalar"),
        ):
            after_import(module, functools.partial(self._timed_in, module, owner, name, words))
        self._outside.begin()
        os.register_at_fork(after_in_child=self._begin_anew)
        at_end(self.end)

    def _begin_anew(self) -> None:
        """Look at this fork by itself: what its parent has done is not its own."""
        self._process = os.getpid()
        self.steps = self._sums = 0
        self._seen["losses"] = []
        self._host_s.clear()

    def stepped(self, steps: int) -> None:
        """Take the steps that an optimizer has made."""
        import torch.distributed as dist

        if not self.steps and dist.is_available() and dist.is_initialized():
            # A script may end its group before the notes are written.
            self._rank, self._seen["backend"] = str(dist.get_rank()), dist.get_backend()
        self.steps = max(self.steps, steps)

    def _before(self, owner: Any, name: str, look: Callable[[Any, dict[str, Any]], None]) -> None:
        function = getattr(owner, name)
        signature = inspect.signature(function)

        @functools.wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            try:
                bound = signature.bind(*args, **kwargs).arguments
            except TypeError:  # the function itself refuses these arguments
                return function(*args, **kwargs)
            look(next(iter(bound.values())), bound)
            return function(*args, **kwargs)

        setattr(owner, name, called)

    def _timed_in(self, module: str, owner: str, name: str, words: str) -> None:
        found = sys.modules[module]
        self._timed(getattr(found, owner) if owner else found, name, words)

    def _timed(self, owner: Any, name: str, words: str) -> None:
        function = getattr(owner, name)

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self.steps < _WARM_STEPS or self._is_timing:  # a call within one that counts
                return function(*args, **kwargs)
            began_s, self._is_timing = time.perf_counter(), True
            try:
                return function(*args, **kwargs)
            finally:
                self._is_timing = False
                frame = sys._getframe(1)
                while frame.f_back and frame.f_code.co_filename.startswith(_OF_LIBRARIES):
                    frame = frame.f_back
                place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                self._host_s[words, place] += time.perf_counter() - began_s

        setattr(owner, name, timed)

    def end(self) -> None:
        """Write the notes of a process that has trained."""
        if not self.steps or os.getpid() != self._process:
            return
        import torch
        import torch.distributed as dist

        counted = max(self.steps - _WARM_STEPS, 1)
        rank = self._rank or os.environ.get("RANK", "0")
        if dist.is_available() and dist.is_initialized():
            self._seen["backend"] = backend = dist.get_backend()
            try:
                self._seen |= fix_kind("environment").look(backend)
            except Exception as error:  # the trial goes on without what it tells
                sys.stderr.write(f"fullwire: the interfaces were not measured: {error!r}\n")
            rank = str(dist.get_rank())
        self._seen |= {
            "sums_per_step": self._sums / self.steps,
            "threads": torch.get_num_threads(),
            "processors": len(os.sched_getaffinity(0)),
            "local_ranks": int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
            "wrote": sorted(self._outside.paths),
            "host": [
                {"call": call, "place": place, "step_s": seconds / counted}
                for (call, place), seconds in self._host_s.items()
            ],
        }
        note({"rank": int(rank), "saw": self._seen})
        self.steps = 0


def count_steps(end_after: int | None, looking: Looking | None, fixes: Sequence[Applying]) -> None:
    """Count the steps of the optimizer that makes most of them.

    After so many steps this process ends, on each rank alike. The script's own end does not come:
    it writes no last checkpoint.
    """
    from torch.optim import optimizer as optimizers

    made: Counter[int] = Counter()
    os.register_at_fork(after_in_child=made.clear)

    def count(optimizer: Any, args: Any, kwargs: Any) -> None:
        if not made:
            for fix in fixes:
                fix.note_of_parent()
        made[id(optimizer)] += 1
        if looking is not None:
            looking.stepped(made[id(optimizer)])
        if end_after is not None and made[id(optimizer)] >= end_after:
            if looking is not None:
                looking.end()
            raise SystemExit

    optimizers.register_optimizer_step_post_hook(count)


def end_without(fixes: Sequence[Applying]) -> None:
    """End this process before its first step, with status 2, if it does not have one of the fixes.

    By then a script has made its groups, its models and its loaders of data.
    """
    from torch.optim import optimizer as optimizers

    is_checked = False

    def check(*of_a_hook: Any) -> None:
        nonlocal is_checked
        if is_checked:
            return
        is_checked = True
        if refused := [fix for fix in fixes if fix.why_not]:
            note({"fix": refused[0].key, "refused": refused[0].why_not})
            raise SystemExit(2)

    optimizers.register_optimizer_step_pre_hook(check)


def check_workers() -> None:
    """Say that the job has other ranks than its recipe, or refuse it.

    Launchers tell the number at the start. A script that knows it by itself tells its group.
    """
    expected = os.environ.get(WORKERS_VARIABLE, "")

    def check(workers: str) -> None:
        if workers == expected.rstrip("!"):
            return
        if os.environ.get("RANK", "0") == "0":
            sentence = f"workers: the recipe is for {expected.rstrip('!')}, the job has {workers}"
            sys.stderr.write(f"fullwire: {sentence}\n")
        if expected.endswith("!"):
            raise SystemExit(2)

    if not expected:
        return
    if (told := os.environ.get("WORLD_SIZE")) is not None:
        check(told)
        return
    import torch.distributed as dist

    if not dist.is_available():
        return
    make_group = dist.init_process_group

    @functools.wraps(make_group)
    def made_and_checked(*args: Any, **kwargs: Any) -> None:
        make_group(*args, **kwargs)
        check(str(dist.get_world_size()))

    dist.init_process_group = made_and_checked


def start_groups_alike() -> None:
    """Let modules of torch start groups as the script does: they took the function by its name."""
    import torch.distributed as dist

    for name in ("distributed_c10d", "device_mesh"):
        module = sys.modules.get(f"torch.distributed.{name}")
        if hasattr(module, "init_process_group"):
            module.init_process_group = dist.init_process_group  # type: ignore[union-attr]


def apply_all() -> None:
    """Apply the fixes that the environment names, here or on rank 0's host."""
    if is_torchrun():
        return  # its ranks do: it may have the variables of a rank from around it
    try:
        share(note, (LOOK_VARIABLE, WORKERS_VARIABLE, STRICT_VARIABLE))
    except Exception as error:  # the job goes on without what did not come
        sys.stderr.write(f"fullwire: fixes of several hosts: not shared: {error}\n")
    check_workers()
    looking = Looking() if os.environ.get(LOOK_VARIABLE) else None
    if looking is not None:
        looking.begin()
    steps, fixes = os.environ.get(STEPS_VARIABLE), list[Applying]()
    if steps or looking is not None:
        count_steps(int(steps) if steps else None, looking, fixes)
    for key, setting in json.loads(os.environ.get(FIXES_VARIABLE, "[]")):
        fix = Applying(key)
        fixes.append(fix)
        try:
            fix_kind(key).apply(setting, fix)
        except Exception as error:  # the job goes on without this fix
            fix.did(f"not applied: {error!r}")
    start_groups_alike()
    if os.environ.get(STRICT_VARIABLE):
        end_without(fixes)


# Others import this module for its names: a process that starts a job, and has not loaded torch.
if "torch" in sys.modules and __name__ in os.environ.get(THEN_VARIABLE, "").split(","):
    apply_all()
