"""A training with one known flaw on Gloo; with --cured, as somebody would set it by hand.

torchrun --nproc-per-node=2 validation/jobs/flawed.py FLAW [--cured]
"""

import argparse
import os
import time
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from pyroute2 import IPRoute
from pyroute2.netlink.rtnl import TC_H_ROOT
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

FLAWS = (
    "tiny-buckets",  # of 0.05 MiB
    "loader",  # on the main thread
    "small-sums",  # one for each gradient
    "unused",  # parameters are searched for, and there are none
    "threads",  # more than processors
    "checkpoint",  # in the step
    "item",  # metrics are summed and read in each step
    "gloo",  # on a fast link
    "float32",  # on a slow link
    "accumulation",  # without no_sync
    "interface",  # the slow one of two, in a lab of hosts with two ranks and two NICs
    "placement",  # neighbours of the ring on other hosts, in a lab of hosts with two ranks
)
STEPS = 100_000


class Samples(Dataset):  # type: ignore[misc]  # torch may be absent when we check
    """Samples that take some time to read, where the flaw is the loader."""

    def __init__(self, width: int, read_s: float) -> None:
        self.width, self.read_s = width, read_s

    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, number: int) -> Any:
        time.sleep(self.read_s)
        return torch.full((self.width,), (number % 7) / 7)


def main() -> None:
    """Train as one of the ranks."""
    taken = argparse.ArgumentParser(description=__doc__)
    taken.add_argument("flaw", choices=FLAWS)
    taken.add_argument("--cured", action="store_true")
    asked = taken.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(8 if asked.flaw == "threads" and not asked.cured else 1)
    if asked.flaw == "interface":
        slow_down("eth0", 100_000_000)
        os.environ["GLOO_SOCKET_IFNAME"] = "eth1" if asked.cured else "eth0"
    if asked.flaw == "placement" and not asked.cured:
        os.environ["RANK"] = "0213"[int(os.environ["RANK"])]
    on_ours = asked.cured and asked.flaw in ("tiny-buckets", "gloo", "float32", "accumulation")
    if on_ours:
        import fullwire.transport

        fullwire.transport.register()
        if asked.flaw == "float32":
            os.environ["FULLWIRE_WIRE"] = "bf16"
    dist.init_process_group("fullwire" if on_ours else "gloo")
    train(asked.flaw, asked.cured)


def train(flaw: str, is_cured: bool) -> None:
    """Train a stack of layers until somebody ends it."""
    depth, width = {"small-sums": (60, 64), "unused": (120, 64), "gloo": (6, 1024)}.get(
        flaw, (6, 512)
    )
    layers = [each for _ in range(depth) for each in (nn.Linear(width, width), nn.ReLU())]
    network = nn.Sequential(*layers)
    model: Any = network
    if flaw != "small-sums":
        model = DistributedDataParallel(
            network,
            bucket_cap_mb=0.05 if flaw == "tiny-buckets" and not is_cured else 25,
            find_unused_parameters=flaw == "unused" and not is_cured,
        )
    is_slow = flaw == "loader"
    samples = Samples(width, 0.002 if is_slow else 0.0)
    batch = 16 if is_slow else 64
    loaders = 2 if is_slow and is_cured else 0
    sampler = DistributedSampler(samples)
    batches = DataLoader(samples, batch, sampler=sampler, num_workers=loaders)
    optimizer = torch.optim.SGD(network.parameters(), 0.01)
    passes = 4 if flaw == "accumulation" else 1
    for number, images in enumerate(batches):
        is_last = number % passes == passes - 1
        holds_back = flaw == "accumulation" and is_cured and not is_last
        with model.no_sync() if holds_back else nullcontext():
            loss = model(images).square().mean()
            loss.backward()
        if flaw == "small-sums":
            sum_by_hand(network, is_cured)
        if flaw == "item" and (not is_cured or number % 20 == 0):
            for _ in range(10):
                metric = loss.detach().clone()
                dist.all_reduce(metric)
                metric.item()
        if is_last:
            optimizer.step()
            optimizer.zero_grad()
        if flaw == "checkpoint" and number % (50 if is_cured else 2) == 0:
            state = [network.state_dict() for _ in range(10)]
            torch.save(state, f"/tmp/flawed-{dist.get_rank()}.pt")


def slow_down(interface: str, rate_bps: int) -> None:
    """Hold an interface of this host to a rate, as a bad cable would."""
    with IPRoute() as own:
        [index] = own.link_lookup(ifname=interface)
        burst = {"burst": 64_000, "limit": 1_000_000}
        own.tc("replace", "tbf", index, handle="1:", parent=TC_H_ROOT, rate=rate_bps // 8, **burst)


def sum_by_hand(network: Any, is_joined: bool) -> None:
    """Make the gradients means over the ranks: one by one, or together."""
    gradients = [each.grad for each in network.parameters()]
    if not is_joined:
        for gradient in gradients:
            dist.all_reduce(gradient)
            gradient /= dist.get_world_size()
        return
    flat = torch.cat([each.reshape(-1) for each in gradients])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    parts = flat.split([each.numel() for each in gradients])
    for gradient, part in zip(gradients, parts, strict=True):
        gradient.copy_(part.view_as(gradient))


if __name__ == "__main__":
    main()
