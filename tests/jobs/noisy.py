"""Train under DDP with accumulation, clipping and a scaled loss, and compute the gradient noise.

The job computes each rank's own gradient again, without DDP, and logs the two squared norms that
the recorder should find: `own`, the mean of the ranks' ones, and `mean`, that of their mean.

- python noisy.py [none|summing|averaging|fsdp|elastic|rounds]: without a hook, or with one that
  sums and does not divide and with gradients that are views of DDP's buckets, or with an average in
  each pass, or under FSDP2, or as an elastic job that adds up in each step, or in rounds of steps.
"""

import contextlib
import copy
import sys
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import fullwire

BATCH, PASSES, STEPS = 4, 2, 24


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    way = sys.argv[1] if len(sys.argv) > 1 else "none"
    if way in ("elastic", "rounds"):
        train_elastic(sync_every=4 if way == "rounds" else 1)
        return
    dist.init_process_group("gloo")
    # A model that outlives its group can keep torch 2.13 from ever ending.
    train_sharded() if way == "fsdp" else train(way)
    dist.barrier()
    dist.destroy_process_group()


def a_model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 1))


def train(way: str) -> None:
    model = a_model()
    data = DistributedDataParallel(model, gradient_as_bucket_view=way == "summing")
    if way == "summing":
        data.register_comm_hook(None, summing_hook)
    optimizer = torch.optim.SGD(data.parameters(), 0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=5)
    torch.manual_seed(1 + dist.get_rank())
    inputs = torch.randn(BATCH * PASSES * STEPS, 20)
    loader = DataLoader(
        TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=BATCH, shuffle=False
    )
    held = []
    step = 0
    for batch in loader:
        held.append(batch)
        is_last = len(held) == PASSES
        with contextlib.nullcontext() if is_last or way == "averaging" else data.no_sync():
            scaler.scale(loss_of(data, batch) / PASSES).backward()
        if not is_last:
            continue
        own = torch.cat(
            [
                each.reshape(-1)
                for each in torch.autograd.grad(
                    sum(loss_of(model, each) / PASSES for each in held), list(model.parameters())
                )
            ]
        )
        squared, mean = own.square().sum(), own.clone()
        dist.all_reduce(squared)
        dist.all_reduce(mean)
        workers = dist.get_world_size()
        step += 1
        fullwire.log(own=squared / workers, mean=(mean / workers).square().sum(), step=step)
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(data.parameters(), 1e-3)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        held.clear()
        if dist.get_rank() == 0:
            print(f"step {step} loss: {1 / step:.6f}")
        if way == "summing":
            time.sleep(0.02)  # so that the recorder reads some lines before the last step


def train_sharded() -> None:
    """Train under FSDP2, whose first passes of a step reduce nothing."""
    from torch.distributed.fsdp import fully_shard

    model = a_model()
    alone = copy.deepcopy(model)
    for part in (model[0], model):
        fully_shard(part)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    torch.manual_seed(1 + dist.get_rank())
    loader = DataLoader(TensorDataset(torch.randn(BATCH * PASSES * STEPS, 20)), batch_size=BATCH)
    batches = [(inputs, inputs.sum(1, keepdim=True)) for (inputs,) in loader]
    for step in range(STEPS):
        held = batches[step * PASSES : (step + 1) * PASSES]
        for each, own in zip(alone.parameters(), model.parameters(), strict=True):
            each.data.copy_(own.full_tensor())
        losses = sum(loss_of(alone, each) / PASSES for each in held)
        own = torch.cat([g.reshape(-1) for g in torch.autograd.grad(losses, alone.parameters())])
        squared, mean = own.square().sum(), own.clone()
        dist.all_reduce(squared)
        dist.all_reduce(mean)
        workers = dist.get_world_size()
        norm = (mean / workers).square().sum()
        for number, batch in enumerate(held):
            model.set_requires_gradient_sync(number == PASSES - 1)
            (loss_of(model, batch) / PASSES).backward()
        optimizer.step()
        optimizer.zero_grad()
        fullwire.log(own=squared / workers, mean=norm, step=step)


def train_elastic(sync_every: int) -> None:
    """Train an elastic job of two workers, whose gradients stay in the memory of its sums."""
    model = a_model()
    alone = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    inputs = torch.randn(2 * BATCH * STEPS, 20)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    job = fullwire.elastic(model, optimizer, sync_every=sync_every)
    for step, batch in enumerate(job.batches(data, batch_size=2 * BATCH, shuffle=False)):
        alone.load_state_dict(model.state_dict())
        of_ranks = []
        for first in (2 * BATCH * step, 2 * BATCH * step + BATCH):
            loss = loss_of(alone, data[first : first + BATCH])
            grads = torch.autograd.grad(loss, list(alone.parameters()))
            of_ranks.append(torch.cat([each.reshape(-1) for each in grads]))
        with job.step():
            loss = loss_of(job.model, batch)
            optimizer.zero_grad(set_to_none=False)
            loss.backward()
            optimizer.step()
        own = sum(each.square().sum() for each in of_ranks) / 2
        fullwire.log(own=own, mean=(sum(of_ranks) / 2).square().sum(), step=step)


def loss_of(model: nn.Module, batch: Sequence[torch.Tensor]) -> torch.Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


def summing_hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return future.then(lambda done: done.value()[0])


if __name__ == "__main__":
    main()
