"""A GAN in a process group of one: python gan.py generator|discriminator, which learns first.

Each step makes samples without gradients.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS = 9


def main(first: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    generator = DistributedDataParallel(nn.Linear(8, 16))
    discriminator = DistributedDataParallel(nn.Linear(16, 1))
    makes = torch.optim.SGD(generator.parameters(), 0.1)
    judges = torch.optim.SGD(discriminator.parameters(), 0.1)
    noise = torch.randn(4, 8)

    def judge() -> None:
        judges.zero_grad()
        with torch.no_grad():
            samples = generator(noise)
        discriminator(samples).square().mean().backward()
        judges.step()

    def make() -> None:
        makes.zero_grad()
        discriminator.module(generator(noise)).square().mean().backward()
        makes.step()

    for _ in range(STEPS):
        for learns in (make, judge) if first == "generator" else (judge, make):
            learns()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
