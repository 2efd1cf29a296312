"""Checkpoints of a sharded job: written and read with `torch.distributed.checkpoint`.

    DIRECTORY/step-000001200/.metadata      model, optimizer and scheduler: a plain
                             __0_0.distcp   `torch.distributed.checkpoint.load` reads them, too
                             rest.pt        random numbers, buffers and `job.state`
                             manifest.json  the files with their lengths and checksums

Each rank reads the rows of its own shard. So another number of ranks may read than has written.
"""

from __future__ import annotations

import copy
import hashlib
import io
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from fullwire.errors import TransportError, UsageError
from fullwire.resilience.checkpoints import PIECE_BYTES, File, Write, manifest_of, write_part
from fullwire.resilience.shards import Form, Shards

_REST = "rest.pt"


def writer(
    shards: Shards, parts: dict[str, Any], group: Any, index: int, is_current: Callable[[], bool]
) -> Write:
    """Copy this rank's shard now; return a function that writes it, with all ranks of a group.

    `is_current`: says whether the group's epoch goes on.
    """
    copied = _tensors(shards, copies=True)
    copied["optimizer"]["param_groups"] = [
        {**options, "params": [shards.names[place] for place in options["params"]]}
        for options in copy.deepcopy(parts["optimizer"]["groups"])
    ]
    if "scheduler" in parts:
        copied["scheduler"] = copy.deepcopy(parts["scheduler"])
    rest = io.BytesIO()
    if index == 0:
        torch.save(parts, rest)

    def write(directory: Path) -> list[File]:
        directory.mkdir(parents=True, exist_ok=True)
        try:
            dcp.save(copied, storage_writer=dcp.FileSystemWriter(directory), process_group=group)
        except CheckpointException as error:
            cause = next(iter(error.failures.values()))[0]
            if isinstance(cause, OSError):
                raise cause from None
            raise TransportError(f"no checkpoint in {directory}: {cause}") from error
        except Exception as error:  # torch has several for a group that has ended meanwhile
            if not is_current():
                raise TransportError(f"no checkpoint in {directory}: {error}") from error
            raise
        names = sorted(path.name for path in directory.glob(f"__{index}_*"))
        if index:
            return [_file(directory, name) for name in names]
        files = [_file(directory, name) for name in [".metadata", *names]]
        return [*files, write_part(directory, _REST, rest.getvalue())]

    return write


def read(place: Path, shards: Shards) -> dict[str, Any]:
    """Read this rank's shard into a model and its optimizer; return the other parts."""
    if not manifest_of(place).is_sharded:
        raise UsageError(
            f"{place}: expected a checkpoint of a sharded model, got one of a whole model: call "
            "fullwire.elastic with the model and its optimizer"
        )
    parts: dict[str, Any] = torch.load(place / _REST, weights_only=True)
    options = parts["optimizer"]
    shards.take_options(options)
    empty = [form.piece(shards.layout.size, shards.index) for form in forms_of(options)]
    shards.take_own(empty, options)
    # Each rank plans its own reads, so no group is needed.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.load(_tensors(shards, copies=False), checkpoint_id=place, no_dist=True)
    return parts


def forms_of(options: dict[str, Any]) -> list[Form]:
    """Return the forms of a state that another rank has described."""
    return [Form(*form) for form in options["forms"]]


def _tensors(shards: Shards, *, copies: bool) -> dict[str, Any]:
    """Return the tensors by their names, as torch's `get_state_dict` has them."""

    def given(value: Any) -> Any:
        value = value.detach() if isinstance(value, torch.Tensor) else value
        return value.clone() if copies and isinstance(value, torch.Tensor) else value

    kept = shards.model.state_dict().keys()  # a model may have buffers that it does not keep
    buffers = {name: value for name, value in shards.buffers.items() if name in kept}
    named = list(zip(shards.names, shards.parameters, strict=True))
    states = {name: shards.optimizer.state.get(parameter, {}) for name, parameter in named}
    return {
        "model": {name: given(value) for name, value in [*named, *buffers.items()]},
        "optimizer": {
            "state": {
                name: {key: given(value) for key, value in state.items()}
                for name, state in states.items()
                if state
            }
        },
    }


def _file(directory: Path, name: str) -> File:
    digest, size_bytes = hashlib.sha256(), 0
    with (directory / name).open("rb") as opened:
        while piece := opened.read(PIECE_BYTES):
            digest.update(piece)
            size_bytes += len(piece)
    return File(name, size_bytes, digest.hexdigest())
