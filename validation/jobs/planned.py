"""A transformer under a parallel plan of PyTorch's own parts: TP PP DP ZERO MICROBATCH MODEL OUT.

TP is `parallelize_module`, and PP is `torch.distributed.pipelining` with 1F1B. DP is FSDP2 with
ZERO 3, and DDP without it. Behind a pipeline DDP of torch 2.13 fails, so each layer's gradients are
summed at the end of the step. Rank 0 writes OUT/times: the seconds of each step without the
profiler. Each rank writes a trace with shapes, OUT/rankN.json.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.functional import cross_entropy, scaled_dot_product_attention, silu
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile
from torch.profiler import schedule as schedule_of

BATCH, WARM, PLAIN, TRACED = 8, 2, 10, 4


class Sizes(NamedTuple):
    """The widths of a model."""

    hidden: int
    inner: int
    heads: int
    layers: int
    words: int
    tokens: int


MODELS = {
    "wide": Sizes(512, 1536, 8, 4, 2048, 64),
    "deep": Sizes(256, 768, 4, 8, 4096, 96),
    "small": Sizes(128, 384, 4, 2, 512, 32),
}


class Attention(nn.Module):  # type: ignore[misc]
    """Attention with heads of equal width."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.width = sizes.hidden // sizes.heads
        for name in ("query", "key", "value", "out"):
            setattr(self, name, nn.Linear(sizes.hidden, sizes.hidden, bias=False))

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        """Attend to earlier words."""
        batch, tokens, _ = given.shape
        query, key, value = (
            part(given).view(batch, tokens, -1, self.width).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        found = scaled_dot_product_attention(query, key, value, is_causal=True)
        out: torch.Tensor = self.out(found.transpose(1, 2).reshape(batch, tokens, -1))
        return out


class Gated(nn.Module):  # type: ignore[misc]
    """A gated MLP."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.gate = nn.Linear(sizes.hidden, sizes.inner, bias=False)
        self.up = nn.Linear(sizes.hidden, sizes.inner, bias=False)
        self.down = nn.Linear(sizes.inner, sizes.hidden, bias=False)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        """Work on each word."""
        out: torch.Tensor = self.down(silu(self.gate(given)) * self.up(given))
        return out


class Layer(nn.Module):  # type: ignore[misc]
    """Attention and a gated MLP, as in Llama."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.before, self.between = nn.RMSNorm(sizes.hidden), nn.RMSNorm(sizes.hidden)
        self.attention, self.mlp = Attention(sizes), Gated(sizes)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        """Add attention, then the MLP."""
        given = given + self.attention(self.before(given))
        out: torch.Tensor = given + self.mlp(self.between(given))
        return out


class Stage(nn.Module):  # type: ignore[misc]
    """Some layers, with the embedding before the first ones and the head behind the last ones."""

    def __init__(self, sizes: Sizes, stage: int, stages: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(sizes.words, sizes.hidden) if stage == 0 else nn.Identity()
        count = sizes.layers // stages
        self.layers = nn.ModuleList(Layer(sizes) for _ in range(count))
        is_last = stage == stages - 1
        self.norm = nn.RMSNorm(sizes.hidden) if is_last else nn.Identity()
        head = nn.Linear(sizes.hidden, sizes.words, bias=False)
        self.head = head if is_last else nn.Identity()

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        """Go through the stage."""
        values = self.embedding(given)
        for layer in self.layers:
            values = layer(values)
        found: torch.Tensor = self.head(self.norm(values))
        return found


def split(stage: Stage, mesh: Any) -> None:
    """Split the layers, and the head, over the ranks of a mesh."""
    rows, columns, whole = RowwiseParallel, ColwiseParallel, (Replicate(),)
    given = {"input_layouts": whole, "desired_input_layouts": whole}
    plan: dict[str, Any] = {
        part: PrepareModuleInput(**given)  # so one sum serves all gradients of the input
        for part in ("attention", "mlp")
    }
    plan |= {f"attention.{name}": columns() for name in ("query", "key", "value")}
    plan |= {"mlp.gate": columns(), "mlp.up": columns()}
    plan |= {"attention.out": rows(), "mlp.down": rows()}
    for layer in stage.layers:
        parallelize_module(layer, mesh, plan)
    if isinstance(stage.head, nn.Linear):
        parallelize_module(stage, mesh, {"head": columns(output_layouts=Replicate())})


def loss_of(found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Return the loss of each word."""
    return cross_entropy(found.flatten(0, 1), wanted.flatten())


def sum_gradients(model: Stage, group: Any, ranks: int) -> None:
    """Average the gradients: those of a layer in one message, and the others in one."""
    layers = list(model.layers)
    own = {parameter for layer in layers for parameter in layer.parameters()}
    beside = [parameter for parameter in model.parameters() if parameter not in own]
    for part in [*(list(layer.parameters()) for layer in reversed(layers)), beside]:
        gradients = [parameter.grad for parameter in part if parameter.grad is not None]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat, group=group)
        sizes = [gradient.numel() for gradient in gradients]
        for gradient, summed in zip(gradients, flat.split(sizes), strict=True):
            gradient.copy_(summed.view_as(gradient) / ranks)


def main(tp: int, pp: int, dp: int, zero: int, micro: int, sizes: Sizes, place: Path) -> None:
    """Train as one of the ranks."""
    mesh = init_device_mesh("cpu", (pp, dp, tp), mesh_dim_names=("pp", "dp", "tp"))
    stage_number = mesh["pp"].get_local_rank()
    torch.manual_seed(stage_number)
    model: Any = Stage(sizes, stage_number, pp)
    if tp > 1:
        split(model, mesh["tp"])
    if zero == 3:
        for layer in model.layers:
            fully_shard(layer, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
    elif dp > 1 and pp == 1:
        model = DistributedDataParallel(model, process_group=mesh["dp"].get_group())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    passes = BATCH // dp // micro
    schedule: Any = None
    if pp > 1:
        group = mesh["pp"].get_group()
        stage = PipelineStage(model, stage_number, pp, torch.device("cpu"), group=group)
        schedule = Schedule1F1B(stage, passes, loss_fn=loss_of)
    samples = BATCH // dp
    given = torch.randint(sizes.words, (samples, sizes.tokens))
    wanted = torch.randint(sizes.words, (samples, sizes.tokens))

    def step() -> None:
        if schedule is not None:
            is_first, is_last = stage_number == 0, stage_number == pp - 1
            schedule.step(*([given] if is_first else []), target=wanted if is_last else None)
        else:
            parts = zip(given.split(micro), wanted.split(micro), strict=True)
            for number, (words, next_words) in enumerate(parts):
                held = dp > 1 and zero == 0 and number < passes - 1
                with model.no_sync() if held else nullcontext():
                    (loss_of(model(words), next_words) / passes).backward()
        if dp > 1 and pp > 1 and zero == 0:
            sum_gradients(model, mesh["dp"].get_group(), dp)
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(WARM):
        step()
    times = []
    for _ in range(PLAIN):
        dist.barrier()
        began = time.perf_counter()
        step()
        dist.barrier()
        times.append(time.perf_counter() - began)
    rank = dist.get_rank()
    with profile(
        activities=[ProfilerActivity.CPU],
        schedule=schedule_of(wait=0, warmup=1, active=TRACED, repeat=1),
        on_trace_ready=lambda told: told.export_chrome_trace(str(place / f"rank{rank}.json")),
        record_shapes=True,
    ) as profiler:
        for _ in range(1 + TRACED):
            step()
            dist.barrier()
            profiler.step()
    dist.barrier()  # a folder with times is complete
    if rank == 0:
        (place / "times").write_text("\n".join(map(str, times)))


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    tp, pp, dp, zero, micro = map(int, sys.argv[1:6])
    main(tp, pp, dp, zero, micro, MODELS[sys.argv[6]], Path(sys.argv[7]))
    dist.barrier()
    time.sleep(0.5)  # the other ranks may still be in the barrier
    os._exit(0)  # a model that outlives its group can keep torch 2.13 from ever ending
