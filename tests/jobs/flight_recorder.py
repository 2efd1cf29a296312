"""Two ranks train with DDP over Gloo; each dumps its Flight Recorder and an execution trace."""

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ExecutionTraceObserver

where = Path(sys.argv[1])
for form in ("pickled", "json", "chakra"):
    (where / form).mkdir(exist_ok=True)
c10d: Any = torch._C._distributed_c10d
rank = int(os.environ["RANK"])
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 32))
observer = ExecutionTraceObserver()
observer.register_callback(str(where / f"chakra/et_rank{rank}.json"))
observer.start()
for _ in range(3):
    model(torch.ones(4, 64)).sum().backward()
dist.all_gather([torch.zeros(10) for _ in range(2)], torch.ones(10))
dist.barrier()
observer.stop()
observer.unregister_callback()
(where / f"pickled/fr_rank_{rank}").write_bytes(c10d._dump_fr_trace())
(where / f"json/fr_rank_{rank}.json").write_bytes(c10d._dump_fr_trace_json())
dist.barrier()
sys.stdout.flush()
os._exit(0)  # everything is written, and torch 2.13 sometimes aborts at the end of such a job
