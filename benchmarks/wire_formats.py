"""Times sums in each wire format, in turns, beside float16 on Gloo.

    fullwire lab run --workers 4 --rate 1Gbps -- python benchmarks/wire_formats.py [MiB] [rounds]

Gloo casts to float16, adds float16 and casts back, as torch's fp16 hook of DDP does.
"""

from __future__ import annotations

import statistics
import sys
import time

import torch
import torch.distributed as dist

import fullwire
from fullwire.transport.wire import FORMATS

MIB = 1 << 20


def main() -> None:
    """Print the median time, the ratio to float32, and the error of a mean of gaussian numbers."""
    mib, rounds = (int(said) for said in (*sys.argv[1:], *("25", "7")[len(sys.argv) - 1 :]))
    torch.set_num_threads(1)
    dist.init_process_group("fullwire")
    gloo = dist.new_group(backend="gloo")
    torch.manual_seed(dist.get_rank())
    own = torch.randn(mib * MIB // 4)
    mean = own.double()
    dist.all_reduce(mean, op=dist.ReduceOp.AVG)

    def on_gloo(values: torch.Tensor) -> torch.Tensor:
        halves = (values / dist.get_world_size()).half()
        dist.all_reduce(halves, group=gloo)
        return halves.float()

    def in_format(values: torch.Tensor, name: str) -> torch.Tensor:
        with fullwire.wire(name):
            dist.all_reduce(values, op=dist.ReduceOp.AVG)
        return values

    with fullwire.wire("auto"):
        pass  # tries once, outside of what is timed
    times_s: dict[str, list[float]] = {}
    errors: dict[str, float] = {}
    for turn in range(rounds + 1):  # the first one warms up
        for name in (*FORMATS, "auto", "gloo fp16"):
            values = own.clone()
            dist.barrier()
            began = time.perf_counter()
            found = on_gloo(values) if name == "gloo fp16" else in_format(values, name)
            taken_s = time.perf_counter() - began
            errors[name] = float((found - mean).norm() / mean.norm())
            if turn:
                times_s.setdefault(name, []).append(taken_s)
    if dist.get_rank() == 0:
        plain_s = statistics.median(times_s["float32"])
        for name, all_s in times_s.items():
            middle_s = statistics.median(all_s)
            print(
                f"{name:10} {middle_s * 1e3:8.1f} ms ({min(all_s) * 1e3:.1f} to "
                f"{max(all_s) * 1e3:.1f})  {plain_s / middle_s:5.2f} x  error {errors[name]:.2e}"
            )
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
