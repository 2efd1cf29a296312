"""Train a small network on two or more workers: an ordinary script that does not import Fullwire.

    torchrun --nproc-per-node=2 examples/train.py [--half] [--steps 20] [--bucket-mb 25]

`--half` sends gradients as float16, with PyTorch's own hook.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main() -> None:
    """Train as one of the workers."""
    options = parsed()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    train(options)  # a model that outlives its group can keep torch 2.13 from ever ending
    dist.barrier()
    dist.destroy_process_group()


def train(options: argparse.Namespace) -> None:
    """Train on random digits for the given number of steps."""
    digits = TensorDataset(torch.randn(4096, 784), torch.randint(10, (4096,)))
    batches = DataLoader(digits, batch_size=32, sampler=DistributedSampler(digits), drop_last=True)
    network = nn.Sequential(
        nn.Linear(784, 1536),
        nn.ReLU(),
        nn.Linear(1536, 1536),
        nn.ReLU(),
        nn.Linear(1536, 1536),
        nn.ReLU(),
        nn.Linear(1536, 10),
    )
    model = DistributedDataParallel(network, bucket_cap_mb=options.bucket_mb)
    if options.half:
        model.register_comm_hook(None, fp16_compress_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step, (images, labels) in enumerate(batches):
        if step == options.steps:
            break
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
    if dist.get_rank() == 0:
        print(f"{options.steps} steps on {dist.get_world_size()} workers, loss {loss.item():.3f}")


def parsed() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--half", action="store_true", help="send gradients as float16")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--bucket-mb", type=float, help="bucket_cap_mb of DDP [its own default]")
    return parser.parse_args()


if __name__ == "__main__":
    main()
