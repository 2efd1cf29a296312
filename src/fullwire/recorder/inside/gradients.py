"""Find out about gradients from their parameters, without reading one.

Bytes are those of the gradient that a rank makes. The rank may keep a part of it.

Passes that accumulate leave their parameters and gradients alone in between. All others change one
of the two, or have no parameter in common: GANs and critics use a model's gradients, and go on with
those of another model. Closures, as of LBFGS, and sharpness-aware optimizers clear gradients and
move parameters within one step. Torch counts the changes of a tensor in place. These counts and the
identity of a gradient, of two parameters for each model or optimizer, tell the two apart.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

UNKNOWN, BEGINS, ADDS = 0, 1, 2  # a pass makes a new set of gradients or adds to the latest

_REMAKES = "_fsdp_flattened"  # set by FSDP1, which makes gradients anew in each pass that adds

_State: TypeAlias = tuple[int, int, int]  # changes of a parameter, its gradient, changes of that


def gradient_bytes(parameters: Sequence[Any]) -> list[int]:
    """Return the bytes of the gradient that a rank makes itself of each parameter.

    A DTensor states the size of the whole, and a rank holds a part. Tensor parallelism makes a
    gradient of the rank's own part. FSDP gathers a parameter first, as large as it was given.
    """
    are_split = [hasattr(parameter, "to_local") for parameter in parameters]
    gathered = _gathered_elements() if any(are_split) else {}
    sizes = []
    for parameter, is_split in zip(parameters, are_split, strict=True):
        elements = parameter.numel()
        if id(parameter) in gathered:
            elements = gathered[id(parameter)]
        elif is_split:
            elements = parameter.detach().to_local().numel()
        sizes.append(elements * parameter.element_size())
    return sizes


def _gathered_elements() -> dict[int, int]:
    """Return the elements of each parameter as FSDP2 gathers it, by the parameter's identity."""
    states = sys.modules.get("torch.distributed._composable_state")
    found = {}
    for kept in getattr(states, "_module_state_mapping", {}).values():
        state = kept() if isinstance(kept, weakref.ref) else kept  # some versions keep the state
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:  # a torch whose modules have one group each
            group = getattr(state, "_fsdp_param_group", None)
            groups = [] if group is None else [group]
        for group in groups:
            for held in group.fsdp_params:
                if (size := getattr(held, "_orig_size", None)) is not None:  # else another torch
                    found[id(held.sharded_param)] = size.numel()
    return found


class Adding:
    """Looks at a few parameters before and after each pass."""

    def __init__(self) -> None:
        self._looked_at: list[weakref.ref[Any]] = []
        self._before: list[_State | None] = []
        self._left: dict[int, _State] = {}  # by place: as the passes of the latest set left it

    def watch(self, parameters: Iterable[Any]) -> None:
        """Look at the first and the last parameter of a model, or of an optimizer."""
        trained = [
            each
            for each in parameters
            if each.requires_grad and each.is_leaf and not getattr(each, _REMAKES, False)
        ]
        known = {id(held()) for held in self._looked_at}
        self._looked_at += [
            weakref.ref(each) for each in {*trained[:1], *trained[-1:]} if id(each) not in known
        ]

    def pass_begins(self) -> None:
        """Remember how parameters and gradients are before a pass."""
        self._before = self._states()

    def pass_ended(self) -> int:
        """Say what the pass did that has ended."""
        before, after = self._before, self._states()
        # A parameter that is looked at only since the pass began comes last.
        made = {
            place: state
            for place, (earlier, state) in enumerate(zip(before, after, strict=False))
            if state is not None and state != earlier
        }
        if not made:
            return UNKNOWN
        again = made.keys() & self._left.keys()
        adds = bool(again) and all(before[place] == self._left[place] for place in again)
        self._left = {**self._left, **made} if adds else made
        return ADDS if adds else BEGINS

    def _states(self) -> list[_State | None]:
        try:
            return [_state(held()) for held in self._looked_at]
        except Exception:  # some tensors count no changes; the job goes on
            self._looked_at.clear()
            return []


def _state(parameter: Any) -> _State | None:
    if parameter is None:  # it went with its model
        return None
    gradient = parameter.grad
    if gradient is None:
        return parameter._version, 0, 0
    return parameter._version, id(gradient), gradient._version
