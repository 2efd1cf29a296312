"""torch.compile passes by what torch calls here from C++, as it passes by what other backends do.

It would trace these functions where a compiled model's buckets are sent, and ends the job at the
first attribute of a group. Marking them loads nothing of the compiler; torch.compiler.disable
would load all of it, for jobs that compile nothing too.
"""

from __future__ import annotations

import contextlib
from types import FunctionType
from typing import TypeVar

import torch

Kind = TypeVar("Kind", bound=type)


def untraced(kind: Kind) -> Kind:
    """Keep the methods of a class out of graphs, and whatever they call."""
    codes = [each.__code__ for each in vars(kind).values() if isinstance(each, FunctionType)]
    with contextlib.suppress(AttributeError):  # a torch without this compiler
        kernel = torch._C._dynamo.eval_frame
        for code in codes:
            if hasattr(kernel, "skip_code"):  # its older name
                kernel.skip_code(code)
            else:
                skip = kernel._FrameAction.SKIP
                kernel.set_code_exec_strategy(code, kernel._FrameExecStrategy(skip, skip))
    return kind
