"""A rank of emulated accelerators that prints its gradients after many steps."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

from fullwire.lab.trainer import Trainer
from fullwire.run.emulation import Emulation

dist.init_process_group("gloo")
steps = int(sys.argv[1])
emulation = Emulation(
    name="small",
    forward_ns=0,
    backward_ns=0,
    rest_ns=0,
    ready_ns=(0, 0, 0),
    gradient_bytes=(4, 400_000, 2_000_000),
    bucket_cap_bytes=2**20,
    steps=steps,
)
trainer = Trainer(emulation)
trainer.warm_up()
places = [parameter.grad.data_ptr() for parameter in trainer.parameters]
for _ in range(steps):
    trainer.step()
values = torch.cat([parameter.grad for parameter in trainer.parameters])
same = places == [parameter.grad.data_ptr() for parameter in trainer.parameters]
is_normal = bool((values.isfinite() & (values > 1e-30)).all())
sys.stdout.write(f"numbers {is_normal}, never copied {same}, digest {values.sum().item()}\n")
dist.barrier()
dist.destroy_process_group()
