"""A torch.distributed backend that keeps links full: `init_process_group("fullwire")`.

Torch calls `register` by itself (entry point group `torch.backends`); importing this module does it
too. Nothing else is loaded until a process group is made.
"""

from __future__ import annotations

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


register()
