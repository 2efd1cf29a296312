"""A job of two ranks that trains on our own transport."""

import os

import torch
import torch.distributed as dist

torch.set_num_threads(1)
dist.init_process_group("fullwire")
layers = [torch.nn.Linear(128, 128) for _ in range(3)]
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=0.05)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(int(os.environ.get("STEPS", "5"))):
    optimizer.zero_grad()
    model(torch.randn(8, 128)).square().mean().backward()
    optimizer.step()
dist.destroy_process_group()
