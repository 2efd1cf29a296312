"""Run a script without torch's compiler, which takes longer to load than torch itself.

python uncompiled.py SCRIPT ARGUMENTS...

The script must not compile anything. Optimizers and DistributedDataParallel load the whole
compiler, only to exclude their functions from it and to read its settings. A stand-in answers these
calls. Any other call fails by name.
"""

import runpy
import sys
from types import ModuleType, SimpleNamespace
from typing import Any


def as_it_is(function: Any, recursive: bool = True, wrapping: bool = True) -> Any:
    return function


def main() -> None:
    compiler: Any = ModuleType("torch._dynamo")
    compiler.disable = as_it_is
    compiler.graph_break = lambda: None
    compiler.utils = SimpleNamespace(get_optimize_ddp_mode=lambda: "ddp_optimizer")
    compiler.trace_rules = SimpleNamespace(clear_lru_cache=lambda: None)
    sys.modules[compiler.__name__] = compiler
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
