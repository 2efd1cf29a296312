"""Issue collectives and end without waiting for them, which a job may do."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
values = torch.zeros(200_000)
for _ in range(3):
    dist.all_reduce(values)
under_way = [dist.all_reduce(values, async_op=True) for _ in range(4)]
