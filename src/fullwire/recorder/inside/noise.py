"""Note gradient noise: a rank's own squared gradient before the sum, and the mean's after it.

A rank's own gradients are read by hooks of their parameters, which run before DDP takes them. With
accumulation they then hold the sum of all passes. The mean is read when the backward pass has
returned, before anything clips it. Nothing is sent: each rank notes its own, and the ranks are
joined later. So all ranks take the same steps, one in `EVERY`. Hooks are there in these steps only.
A script may accumulate without `no_sync`. Then each pass adds its own gradients to the mean of the
passes before, and no rank has its own sum: such a step is left out.

FSDP2 hands the gradients of a group of parameters to one function, which reduces and scatters them.
A rank's own gradients are read there. Afterwards each rank has a shard of the mean, and the squared
norms of the shards add up to that of the mean.

`fullwire.elastic` tells its parameters, and has hooks of its own. They may weight a gradient in
place for the sum. So the hooks here come before them, and stay. Afterwards each gradient is the
mean. Where workers add up only once in several steps, no step has a mean.

A gradient scaler multiplies both by its scale, which is divided out. A disabled one has no scale.
Norms of a device are read `EVERY` steps later, when they are there without a wait.
"""

from __future__ import annotations

import functools
import inspect
import sys
import time
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.optim import optimizer as optimizers

from .journal import Journal, Note
from .metrics import bits_of

SHARDING = "torch.distributed.fsdp._fully_shard._fsdp_param_group"
_TABLE = "noise"  # that lacks rows where norms are missing, and no other table does
EVERY = 10  # steps; two readings of all gradients in each step would cost several percent


class GradientNoise:
    """Reads norms of gradients in some steps."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._models: list[list[weakref.ref[Any]]] = []
        self._hooks: list[Any] = []
        self._hooked: set[int] = set()  # parameters with a hook in all steps
        self._is_reading = False  # in this step
        self._own: dict[int, Any] = {}
        self._shards: list[tuple[Any, float]] = []  # of FSDP2: parameters, and their copies' share
        self._mean: Any = None
        self._passes = 0
        self._reducing: set[int] = set()  # reducers that average this pass
        self._has_reduced: set[int] = set()  # reducers that averaged an earlier pass of the step
        self._is_own_lost = False  # in this step
        self._loses_own = False  # in some step
        self._steps = 0
        self._leading: int | None = None  # the optimizer whose steps are counted
        self._scale: Any = None
        self._waiting: list[tuple[int, int, Any, Any, int, Any]] = []
        self._has_told = False
        self._is_over = False  # Norms could not be read.
        optimizers.register_optimizer_step_post_hook(self._step_ended)
        self._watch_scalers()
        inside = sys.modules.get("fullwire_inside")
        if inside is not None:  # else a test, whose job has no recorder
            inside.take_gradients = self.watch_elastic  # type: ignore[attr-defined]

    def _watch_scalers(self) -> None:
        """Wrap `scale` of each class of gradient scalers when the job makes one.

        Some classes have a `scale` of their own. The job may load or define them later.
        """
        base: Any = getattr(torch.amp, "GradScaler", None)
        if base is None:  # another version of torch
            return
        make, wrapped = base.__init__, set()

        @functools.wraps(make)
        def made(this: Any, *args: Any, **kwargs: Any) -> None:
            make(this, *args, **kwargs)
            try:
                for each in type(this).__mro__:
                    if "scale" in vars(each) and each not in wrapped:
                        wrapped.add(each)
                        self._watch_scale(each)
            except Exception as error:  # the job goes on
                self._give_up(error)

        base.__init__ = made

    def _watch_scale(self, scaler: Any) -> None:
        """Note the scale by which this class of scalers multiplied the last loss."""
        scale = scaler.scale

        @functools.wraps(scale)
        def scaled(this: Any, *args: Any, **kwargs: Any) -> Any:
            result = scale(this, *args, **kwargs)
            self._scale = getattr(this, "_scale", None)  # A scaler that is disabled has none.
            return result

        scaler.scale = scaled

    def watch(self, parameters: Iterable[Any]) -> None:
        """Take the parameters whose gradients are averaged over ranks."""
        self._models.append([weakref.ref(parameter) for parameter in parameters])

    def watch_elastic(self, parameters: Iterable[Any]) -> None:
        """Take the parameters of an elastic job, before it has hooks of them."""
        parameters = list(parameters)
        self.watch(parameters)
        try:
            for parameter in parameters:
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(self._read_own)
                    self._hooked.add(id(parameter))
        except Exception as error:  # the job goes on
            self._give_up(error)

    def reduces(self, reducer: Any) -> None:
        """Take a reducer that averages the gradients of the pass which begins."""
        self._reducing.add(id(reducer))

    def watch_shards(self) -> None:
        """Read the gradients that FSDP2 reduces and scatters."""
        module: Any = sys.modules[SHARDING]
        reduce = getattr(module, "foreach_reduce", None)
        if reduce is None:  # another version of torch
            return
        try:
            signature = inspect.signature(reduce)
        except (TypeError, ValueError) as error:  # a compiled function; the job goes on
            self._give_up(error)
            return

        @functools.wraps(reduce)
        def foreach_reduce(*args: Any, **kwargs: Any) -> Any:
            if self._is_reading:
                try:
                    self._read_group(signature.bind(*args, **kwargs).arguments)
                except Exception as error:  # the job goes on
                    self._give_up(error)
            return reduce(*args, **kwargs)

        module.foreach_reduce = foreach_reduce

    def _read_group(self, given: dict[str, Any]) -> None:
        """Read the own gradients of a group of FSDP2's parameters, before they are reduced."""
        parameters, scatter = given["fsdp_params"], given["reduce_scatter_group"]
        copies = given.get("all_reduce_group")
        shared = 1 if copies is None else copies.size()
        divided_by = given.get("gradient_divide_factor")
        ranks = scatter.size() * shared
        share = 1 / shared if divided_by is None else (divided_by / ranks) ** 2 / shared
        for parameter, grad in zip(parameters, given["unsharded_grads"], strict=True):
            if id(parameter) in self._own:  # reduced in each pass: the last one is not the step's
                self._own, self._shards, self._is_reading = {}, [], False
                return
            self._own[id(parameter)] = _norm(grad.detach())
            self._shards.append((parameter, share))

    def _parameters(self) -> list[Any]:
        alive = (ref() for model in self._models for ref in model)
        return [
            parameter for parameter in alive if parameter is not None and parameter.requires_grad
        ]

    def _step_ended(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._leading is None:
            self._leading = id(optimizer)
        if id(optimizer) != self._leading or self._is_over or not self._journal.is_open:
            return
        started = self._journal.starts_work()
        try:
            if self._is_reading:
                self._end()
            self._steps += 1
            self._is_reading = self._steps % EVERY == 0
            if self._is_reading:
                self.flush()
                hook = self._read_own
                self._hooks = [
                    parameter.register_post_accumulate_grad_hook(hook)
                    for parameter in self._parameters()
                    if id(parameter) not in self._hooked
                ]
        except Exception as error:  # the job goes on
            self._give_up(error)
        self._journal.ends_work(started)

    def _read_own(self, parameter: Any) -> None:
        if not self._is_reading:
            return
        try:
            if parameter.grad is not None:
                self._own[id(parameter)] = _norm(parameter.grad.detach())
        except Exception as error:  # of a sparse gradient, for example; the job goes on
            self._give_up(error)

    def pass_ended(self) -> None:
        """Read the mean, if this is a step of those that are read."""
        reducing, self._reducing = self._reducing, set()
        if not self._is_reading:
            return
        self._passes += 1
        self._is_own_lost |= bool(reducing & self._has_reduced)
        self._has_reduced |= reducing
        try:
            grads = [
                parameter.grad.detach()
                for parameter in self._parameters()
                if parameter.grad is not None
            ]
            if self._shards:
                # A rank's shard of the mean gradient: the ranks' squares add up.
                norms = [
                    _norm(parameter.sharded_param.grad.detach().to_local()) * share**0.5
                    for parameter, share in self._shards
                ]
                self._mean = torch.stack(norms)
            elif grads:
                self._mean = torch.stack(torch._foreach_norm(grads))
        except Exception as error:  # the job goes on
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        """End the noise, and leave the rest of the recording as it is."""
        self._remove_hooks()
        self._waiting.clear()
        self._has_told = self._is_over = True
        reason = f"{type(error).__name__}: {error}"[:200]
        sentence = f"its gradient noise ended, as a norm could not be read ({reason})"
        self._journal.define(kind="missing", sentence=sentence, table=_TABLE)

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._is_reading = False

    def _end(self) -> None:
        self._remove_hooks()
        self._loses_own |= self._is_own_lost
        if self._own and self._mean is not None and not self._is_own_lost:
            own = torch.stack(list(self._own.values()))
            scale = None if self._scale is None else self._scale.detach().clone()
            kind = Note.SHARD_NOISE if self._shards else Note.MEAN_NOISE
            row = (self._passes, time.monotonic_ns(), own, self._mean, kind, scale)
            self._waiting.append(row)
            if not own.is_cuda:
                self.flush()
        self._own, self._shards, self._mean, self._passes = {}, [], None, 0
        self._has_reduced, self._is_own_lost = set(), False

    def close(self) -> None:
        """Note the last norms, or say that there were none."""
        try:
            self.flush()
        except Exception as error:  # the job goes on
            self._give_up(error)
        if self._steps >= EVERY and not self._has_told:
            why = (
                "each pass of a step is averaged, and a rank's own sum is nowhere. "
                "`no_sync` in all passes but the last keeps it"
                if self._loses_own
                else "only DistributedDataParallel, FSDP2 and fullwire.elastic without local steps "
                "show a rank's own gradients"
            )
            sentence = f"its gradient noise was not seen: {why}"
            self._journal.define(kind="missing", sentence=sentence, table=_TABLE)

    def flush(self) -> None:
        """Note the norms that were read before."""
        waiting, self._waiting = self._waiting, []
        for passes, time_ns, own, mean, mean_kind, scale in waiting:
            self._has_told = True
            factor = 1.0 if scale is None else float(scale) ** 2
            for kind, norms in ((Note.OWN_NOISE, own), (mean_kind, mean)):
                squared = float(norms.double().square().sum()) / factor
                self._journal.note(kind, passes, time_ns, bits_of(squared))


def _norm(grad: Any) -> Any:
    """Return the norm of a gradient, at least in single precision."""
    return torch.linalg.vector_norm(grad, dtype=torch.promote_types(grad.dtype, torch.float32))
