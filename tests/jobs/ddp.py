"""Train a small model with DistributedDataParallel and print a digest of the weights."""

import hashlib
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS = 5


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    model = nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.Tanh())])
    data = DistributedDataParallel(model, bucket_cap_mb=0.05)
    if "own-hook" in sys.argv:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

        data.register_comm_hook(None, fp16_compress_hook)
    optimizer = torch.optim.Adam(data.parameters(), 0.01)
    torch.manual_seed(dist.get_rank())
    for _ in range(STEPS):
        optimizer.zero_grad()
        data(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
    weights = b"".join(each.detach().numpy().tobytes() for each in model.parameters())
    sys.stdout.write(f"{hashlib.sha256(weights).hexdigest()}\n")  # in one piece, unlike print
    sys.stdout.flush()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
