"""Train in each of several ways to use backward passes; print what the recorder said of each pass.

It prints the passes of the third step of each way, as JSON. B begins a set of gradients. A adds to
that of the pass before. For ? nothing shows.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

DDP = DistributedDataParallel
SAMPLES = 4
Step = Callable[[], None]
told: list[int] = []


def listen() -> None:
    adding = sys.modules["fullwire_inside.gradients"].Adding
    pass_ended = adding.pass_ended

    def heard(self: Any) -> int:
        told.append(pass_ended(self))
        return told[-1]

    adding.pass_ended = heard


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    listen()
    passes = {}
    for way, make in WAYS.items():
        step = make()
        for _ in range(3):
            told.clear()
            step()
        passes[way] = "".join("?BA"[each] for each in told)
    sys.stdout.write(json.dumps(passes) + "\n")
    sys.stdout.flush()
    dist.destroy_process_group()


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))


def noise() -> torch.Tensor:
    return torch.randn(SAMPLES, 8)


def loss(model: nn.Module) -> Any:
    return model(noise()).square().mean()


def accumulated(
    passes: int, *, is_sent_once: bool = False, keeps: bool = False, fused: bool = False
) -> Step:
    model = DDP(net(), gradient_as_bucket_view=keeps)
    optimizer = torch.optim.Adam(model.parameters(), fused=fused)

    def step() -> None:
        optimizer.zero_grad(set_to_none=not keeps)
        for number in range(passes):
            with model.no_sync() if is_sent_once and number < passes - 1 else nullcontext():
                loss(model).backward()
        optimizer.step()

    return step


def scaled() -> Step:
    model = DDP(net())
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler("cpu")

    def step() -> None:
        for _ in range(2):
            scaler.scale(loss(model)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return step


def two_optimizers() -> Step:
    model = DDP(net())
    weights = [each for each in model.parameters() if each.dim() == 2]
    biases = [each for each in model.parameters() if each.dim() == 1]
    optimizers = torch.optim.SGD(weights, 0.1), torch.optim.AdamW(biases)

    def step() -> None:
        for _ in range(2):
            loss(model).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    return step


class Tasks(nn.Module):  # type: ignore[misc]  # torch may be absent when we check
    """Two tasks with layers of their own around those that both share."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.shared = net()
        self.after = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])

    def forward(self, data: torch.Tensor, task: int) -> Any:
        return self.after[task](self.shared(self.before[task](data)))


def two_tasks() -> Step:
    model = DDP(Tasks(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step() -> None:
        for task in range(2):
            model(noise(), task).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def embedded() -> Step:
    model = DDP(nn.Sequential(nn.Embedding(16, 8, max_norm=1.0), nn.Linear(8, 8)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step() -> None:
        for _ in range(3):
            model(torch.randint(0, 16, (SAMPLES,))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def beside_one_without_counts() -> Step:
    """Give one parameter a gradient that counts no changes."""
    model, other = net(), nn.Parameter(torch.zeros(3))
    optimizers = torch.optim.SGD(model.parameters(), 0.1), torch.optim.SGD([other], 0.1)

    def step() -> None:
        loss(model).backward()
        with torch.inference_mode():
            other.grad = torch.zeros(3)
        loss(model).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    return step


def adversarial() -> Step:
    critic, maker = DDP(net()), DDP(net())
    of_critic, of_maker = (torch.optim.Adam(each.parameters()) for each in (critic, maker))

    def step() -> None:
        critic.zero_grad()
        loss(critic).backward()
        critic(maker(noise()).detach()).mean().backward()
        of_critic.step()
        maker.zero_grad()
        critic(maker(noise())).mean().backward()
        of_maker.step()

    return step


class Both(nn.Module):  # type: ignore[misc]  # torch may be absent when we check
    """A maker and its critic as one model."""

    def __init__(self) -> None:
        super().__init__()
        self.critic, self.maker = net(), net()

    def forward(self, data: torch.Tensor, makes: bool) -> Any:
        return self.critic(self.maker(data) if makes else data)


def adversarial_in_one() -> Step:
    both = DDP(Both(), find_unused_parameters=True)
    of_critic = torch.optim.Adam(both.module.critic.parameters())
    of_maker = torch.optim.Adam(both.module.maker.parameters())

    def step() -> None:
        for makes, optimizer in ((False, of_critic), (True, of_maker)):
            optimizer.zero_grad()
            both(noise(), makes).mean().backward()
            optimizer.step()

    return step


def two_models() -> Step:
    models = [DDP(net()), DDP(net())]
    optimizers = [torch.optim.Adam(model.parameters()) for model in models]

    def step() -> None:
        for model in models:
            loss(model).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    return step


def closure(optimizer: Callable[[Any], Any], passes: int) -> Step:
    model = DDP(net())
    made, data = optimizer(model.parameters()), noise()

    def step() -> None:
        def evaluated() -> Any:
            made.zero_grad()
            for _ in range(passes):
                found = model(data).square().mean()
                found.backward()
            return found

        made.step(evaluated)

    return step


def lbfgs(parameters: Any) -> Any:
    nothing = {"tolerance_grad": 0, "tolerance_change": 0}
    return torch.optim.LBFGS(parameters, max_iter=3, **nothing)


def sgd(parameters: Any) -> Any:
    return torch.optim.SGD(parameters, 0.1)


def sharpness_aware() -> Step:
    model = DDP(net())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step() -> None:
        loss(model).backward()
        with torch.no_grad():
            climbed = [0.05 * each.grad for each in model.parameters()]
            torch._foreach_add_([*model.parameters()], climbed)
        for each in model.parameters():  # by hand, which no hook sees
            each.grad = None
        loss(model).backward()
        with torch.no_grad():
            torch._foreach_sub_([*model.parameters()], climbed)
        optimizer.step()
        optimizer.zero_grad()

    return step


def penalized(*, is_apart: bool) -> Step:
    model = DDP(net())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step() -> None:
        data = noise().requires_grad_()
        outcome = loss(model)
        if is_apart:
            outcome.backward()
        [slope] = torch.autograd.grad(model.module(data).mean(), data, create_graph=True)
        (slope.square().mean() + (0 if is_apart else outcome)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def sharded(*, is_sent_once: bool) -> Step:
    model = fully_shard(net(), mesh=init_device_mesh("cpu", (1,)))
    optimizer = torch.optim.Adam(model.parameters())

    def step() -> None:
        for number in range(2):
            model.set_requires_gradient_sync(number == 1 or not is_sent_once)
            loss(model).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def sharded_before() -> Step:
    model = FullyShardedDataParallel(net(), device_id=torch.device("cpu"), use_orig_params=True)
    optimizer = torch.optim.Adam(model.parameters())

    def step() -> None:
        for _ in range(2):
            loss(model).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


WAYS: dict[str, Callable[[], Step]] = {
    "plain": lambda: accumulated(1),
    "accumulated": lambda: accumulated(4),
    "accumulated, kept": lambda: accumulated(2, keeps=True),
    "accumulated, fused": lambda: accumulated(2, fused=True),
    "accumulated, sent once": lambda: accumulated(4, is_sent_once=True),
    "accumulated, scaled": scaled,
    "accumulated, two optimizers": two_optimizers,
    "accumulated, two tasks": two_tasks,
    "accumulated, embedded": embedded,
    "accumulated, beside one without counts": beside_one_without_counts,
    "adversarial": adversarial,
    "adversarial, in one": adversarial_in_one,
    "two models": two_models,
    "closure": lambda: closure(sgd, 1),
    "closure, accumulated": lambda: closure(sgd, 4),
    "lbfgs": lambda: closure(lbfgs, 1),
    "lbfgs, accumulated": lambda: closure(lbfgs, 2),
    "sharpness-aware": sharpness_aware,
    "penalized": lambda: penalized(is_apart=False),
    "penalized, apart": lambda: penalized(is_apart=True),
    "fsdp2": lambda: sharded(is_sent_once=False),
    "fsdp2, sent once": lambda: sharded(is_sent_once=True),
    "fsdp1": sharded_before,
}


if __name__ == "__main__":
    main()
