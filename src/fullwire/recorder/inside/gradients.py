"""Find out about gradients from their parameters, without reading one.

Bytes are those of the gradient that a rank makes. The rank may keep a part of it.

Passes that accumulate mostly leave their parameters and gradients alone in between. Most others
change one of the two, or have no parameter in common: GANs and critics use a model's gradients, and
go on with those of another model. Closures, as of LBFGS, and sharpness-aware optimizers clear
gradients and move parameters within one step. Torch counts the changes of a tensor in place. These
counts and the identity of a gradient tell the two apart, of a few parameters for each model or
optimizer. Some scripts accumulate in memory of their own, or clip the gradients after each pass.
Their passes look like those of a closure.
"""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

from .journal import Journal

UNKNOWN, BEGINS, ADDS = 0, 1, 2  # a pass makes a new set of gradients or adds to the latest

_REMAKES = "_fsdp_flattened"  # set by FSDP1, which makes gradients anew in each pass that adds
# Looked at: of a model or an optimizer, and of all of them. A program may make many, as for each
# parameter, each image or each task.
_OF_EACH, _MOST = 5, 32
_PLAIN = 3  # steps of one pass in a row: then looking would tell nothing, and costs 50 us a step

# The changes of a parameter; its gradient, with the changes of that.
_State: TypeAlias = tuple[int, tuple[int, int]]


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
    """Looks at a few parameters before and after each pass, unless each pass has a step."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._count = itertools.count()
        self._looked_at: dict[int, weakref.ref[Any]] = {}  # by number, the newest last
        self._before: dict[int, _State] = {}
        self._left: dict[int, _State] = {}  # as the passes of the latest set left them
        self._passes = self._plain = 0  # since the last step; plain steps in a row
        self._stepped: set[int] = set()  # the numbers of the optimizers that stepped

    def watch(self, parameters: Iterable[Any]) -> None:
        """Look at a few parameters of a model, or of an optimizer, from the first to the last."""
        trained = [
            each
            for each in parameters
            if each.requires_grad and each.is_leaf and not getattr(each, _REMAKES, False)
        ]
        last = len(trained) - 1
        spread = {round(last * place / (_OF_EACH - 1)) for place in range(_OF_EACH)}
        known = {id(kept()) for kept in self._looked_at.values()}
        for place in sorted(spread) if trained else ():
            if id(trained[place]) not in known:
                self._looked_at[next(self._count)] = weakref.ref(trained[place])
        for number in [*self._looked_at][:-_MOST]:
            del self._looked_at[number]

    def step_ended(self, optimizer: int) -> None:
        """Count the steps in a row that have one pass each, in a job of one optimizer.

        Another one may take a step after several of this one, as in a GAN.
        """
        self._stepped.add(optimizer)
        is_plain = self._passes == 1 and len(self._stepped) == 1
        self._plain = self._plain + 1 if is_plain else 0
        self._passes = 0

    def pass_begins(self) -> None:
        """Remember how parameters and gradients are before a pass."""
        if self._passes:
            self._plain = 0
        self._passes += 1
        if self._plain < _PLAIN:
            self._before = self._states()
        else:
            self._before, self._left = {}, {}

    @property
    def looks(self) -> bool:
        """Return whether this pass is looked at."""
        return bool(self._before)

    def pass_ended(self) -> int:
        """Say what the pass did that has ended, if it was looked at."""
        before, after = self._before, self._states()
        made = {
            number: state
            for number, state in after.items()
            if number in before and state != before[number]
        }
        if not made:
            return UNKNOWN
        again = made.keys() & self._left.keys()
        # A forward pass may change some parameters itself, as that of an embedding with a largest
        # norm does. An optimizer changes all.
        stays = any(before[number][0] == self._left[number][0] for number in again)
        adds = stays and all(before[number][1] == self._left[number][1] for number in again)
        self._left = {**self._left, **made} if adds else made
        return ADDS if adds else BEGINS

    def _states(self) -> dict[int, _State]:
        """Look at all parameters that are still there; the journal counts the time."""
        started = self._journal.starts_work()
        states = {}
        for number, kept in [*self._looked_at.items()]:
            parameter: Any = kept()
            try:
                gradient = parameter.grad
                of_gradient = (0, 0) if gradient is None else (id(gradient), gradient._version)
                states[number] = parameter._version, of_gradient
            except Exception:  # it went with its model, or counts no changes; the job goes on
                self._looked_at.pop(number, None)
        self._journal.ends_work(started)
        return states
