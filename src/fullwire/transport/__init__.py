"""A torch.distributed backend that keeps links full: `init_process_group("fullwire")`.

Torch calls `register` by itself when it is imported (entry point group `torch.backends`). Where
that is switched off, importing this module does it. Nothing else is loaded until a process group is
made; a launcher, which only needs the names of variables in this room, loads no torch.
"""

from __future__ import annotations

import os
import sys
from typing import Any

NAME = "fullwire"


def register() -> None:
    """Make the backend known to torch.distributed, once."""
    import torch.distributed as dist

    if dist.is_available() and NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _group, extended_api=True, devices=["cpu"])


def _group(options: Any, backend_options: Any) -> Any:
    from fullwire.transport.group import FullwireGroup

    return FullwireGroup(options)


if "torch" in sys.modules or os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == "0":
    register()
