"""What all jobs of this folder do that train on one thread a rank."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist


def as_a_rank(train: Callable[..., None]) -> None:
    """Train as one of the ranks, with the arguments of the command line."""
    torch.set_num_threads(1)
    dist.init_process_group(os.environ.get("BACKEND", "gloo"))
    train(*sys.argv[1:])  # a model that outlives its group can keep torch 2.13 from ever ending
    dist.barrier()
    dist.destroy_process_group()
