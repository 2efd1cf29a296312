"""Keep torch.compile away from functions that torch calls here from C++, as in other backends.

Where a compiled model sends its buckets, torch.compile would trace these functions. It would end
the job at the first attribute of a group. A mark on a function leaves the compiler unloaded.
`torch.compiler.disable` would load all of it, even in jobs that do not compile.
"""

from __future__ import annotations

import contextlib
from types import FunctionType
from typing import TypeVar

import torch

Kind = TypeVar("Kind", bound=type)


def untraced(kind: Kind) -> Kind:
    """Keep the methods of a class, and all functions that they call, out of graphs."""
    codes = [member.__code__ for member in vars(kind).values() if isinstance(member, FunctionType)]
    with contextlib.suppress(AttributeError):  # a torch without this compiler
        kernel = torch._C._dynamo.eval_frame
        for code in codes:
            if hasattr(kernel, "skip_code"):  # its older name
                kernel.skip_code(code)
            else:
                skip = kernel._FrameAction.SKIP
                kernel.set_code_exec_strategy(code, kernel._FrameExecStrategy(skip, skip))
    return kind
