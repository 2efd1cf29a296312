"""Run a script without torch's compiler, which takes longer to load than torch itself.

python uncompiled.py SCRIPT | -c CODE | -m MODULE  ARGUMENTS...

The folder `path` on PYTHONPATH does the same to each Python process, whoever starts it.

The script must not compile or export anything. Optimizers, DistributedDataParallel and FSDP load
the whole compiler, only to exclude their functions from it and to read its settings. A stand-in
answers these calls. A third of torch's own time to load goes into two more parts: one computes
shapes without values, the other exports models. Empty modules stand in for both. Any other call
fails by name. A part of a replaced package that is asked for by its own name is the real one.

While torch is loaded, Python looks for no garbage. It never looks at torch's own objects, not even
when it ends: they live until then, and looking takes a quarter of the time that loading takes.
"""

import gc
import runpy
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType, SimpleNamespace
from typing import Any


def as_it_is(
    function: Any, recursive: bool = True, wrapping: bool = True, reason: str | None = None
) -> Any:
    return function


def stand_in(name: str) -> Any:
    """Return an empty package, which is loaded in place of the one of this name from now on."""
    package: Any = ModuleType(name)
    # Without the finders of a recorder: only some jobs look for torch before they load it.
    torch = PathFinder.find_spec("torch")
    inside = name.replace("torch.", "")
    places = (torch and torch.submodule_search_locations) or ()
    package.__path__ = [f"{place}/{inside}" for place in places]
    sys.modules[name] = package
    return package


class ShapesFinder(MetaPathFinder, Loader):
    """Finds an empty module that does the one thing which others need: it completes Generator.

    torch asks for it when nearly all else of torch is loaded.
    """

    def find_spec(self, name: str, path: object = None, target: object = None) -> Any:
        if name == "torch":
            gc.disable()
        return ModuleSpec(name, self) if name == "torch._meta_registrations" else None

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        import torch

        if hasattr(torch._C, "_set_generator_metaclass"):  # of torch 2.13
            from torch._opaque_base import OpaqueBaseMeta

            torch._C._set_generator_metaclass(OpaqueBaseMeta)
        gc.freeze()
        gc.enable()


def leave_out() -> None:
    """Put stand-ins in the place of what is left out; torch is not loaded yet."""
    sys.meta_path.insert(0, ShapesFinder())
    stand_in("torch.export")
    compiler = stand_in("torch._dynamo")
    compiler.disable = as_it_is
    compiler.graph_break = lambda: None
    compiler.utils = SimpleNamespace(get_optimize_ddp_mode=lambda: "ddp_optimizer")
    compiler.trace_rules = SimpleNamespace(clear_lru_cache=lambda: None)


def main() -> None:
    leave_out()
    del sys.argv[0]
    if sys.argv[0] not in ("-c", "-m"):
        runpy.run_path(sys.argv[0], run_name="__main__")
        return
    what = sys.argv.pop(1)
    if sys.argv[0] == "-c":
        exec(compile(what, "<string>", "exec"), {"__name__": "__main__"})
    else:
        runpy.run_module(what, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
