"""A small training job that is slow for one known reason; `python cause.py CAUSE`.

Real PyTorch with DistributedDataParallel over Gloo. Layers sleep as long as a device would compute,
so that ranks that share a machine do not take each other's processors, and give real gradients.
"""

import argparse
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

MIB = 2**20
LATE_RANK = 1


class Sleeping(torch.autograd.Function):
    """Pass a number on; take time both ways."""

    @staticmethod
    def forward(ctx, x, weight, forward_s, backward_s):
        """Sleep as a layer would compute."""
        ctx.save_for_backward(weight)
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return x + weight.view(-1)[0]

    @staticmethod
    def backward(ctx, grad):
        """Sleep, and give the weight a gradient of its size."""
        (weight,) = ctx.saved_tensors
        time.sleep(ctx.backward_s)
        return grad, torch.full_like(weight, 1e-3), None, None


class Layer(nn.Module):
    """A layer of so many bytes, a third of whose time is in the forward pass."""

    def __init__(self, size_bytes, compute_s):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(max(size_bytes // 4, 1)))
        self.forward_s, self.backward_s = compute_s / 3, compute_s * 2 / 3

    def forward(self, x):
        """Apply the layer."""
        return Sleeping.apply(x, self.weight, self.forward_s, self.backward_s)


class Batches(torch.utils.data.Dataset):
    """Batches that take a while to load."""

    def __init__(self, count, load_s):
        self.count, self.load_s = count, load_s

    def __len__(self):
        return self.count

    def __getitem__(self, number):
        time.sleep(self.load_s)
        return torch.zeros(1)


def main():
    """Train for some steps."""
    given = argparse.ArgumentParser()
    given.add_argument("--layers", type=int, default=8)
    given.add_argument("--layer-bytes", type=int, default=16 * 1024)
    given.add_argument("--compute", type=float, default=0.08)
    given.add_argument("--load", type=float, default=0.0)
    given.add_argument("--late", choices=("forward", "backward", "input", "between"))
    given.add_argument("--late-s", type=float, default=0.06)
    given.add_argument("--bucket-mb", type=float, default=None)
    given.add_argument("--without-ddp", action="store_true", help="add up each gradient by itself")
    given.add_argument("--loss", action="store_true", help="add the loss up in every step")
    given.add_argument("--steps", type=int, default=12)
    options = given.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train(options, options.late if dist.get_rank() == LATE_RANK else None)
    dist.barrier()
    dist.destroy_process_group()


def train(options, late):
    """Take the steps; `late` is where this rank sleeps in each."""
    compute_s = options.compute / options.layers
    layers = [Layer(options.layer_bytes, compute_s) for _ in range(options.layers)]
    if late == "forward":
        layers[0].forward_s += options.late_s
    if late == "backward":
        layers[-1].weight.register_hook(lambda grad: time.sleep(options.late_s))
    inner = nn.Sequential(*layers)
    model = inner
    if not options.without_ddp:
        model = DistributedDataParallel(inner, bucket_cap_mb=options.bucket_mb)
    optimizer = torch.optim.SGD(inner.parameters(), 0.1)
    load_s = options.load + (options.late_s if late == "input" else 0.0)
    for batch in torch.utils.data.DataLoader(Batches(options.steps, load_s)):
        optimizer.zero_grad()
        loss = model(batch).sum()
        loss.backward()
        if options.without_ddp:
            for parameter in inner.parameters():
                dist.all_reduce(parameter.grad)
        if options.loss:
            dist.all_reduce(loss.detach())
        optimizer.step()
        if late == "between":
            time.sleep(options.late_s)


if __name__ == "__main__":
    main()
