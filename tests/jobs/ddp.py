"""Train a small model with DistributedDataParallel and print a digest of the weights.

- python ddp.py [none|fp16|builtin-fp16|powersgd|int8|slow]: with this communication hook.
- python ddp.py compiled: without a hook, through torch.compile.
- python ddp.py buffers: without a hook, and with a layer whose buffers rank 0 broadcasts.
- python ddp.py sparse: without a hook, and with an embedding whose gradients are sparse.

With several of these words it trains a model for each of them, and each digest follows its word.
"""

import hashlib
import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS = int(os.environ.get("STEPS", "5"))


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    # A model that outlives its group is the last to let go of it. Then torch waits for the group's
    # threads while it holds the lock that they need to forget the last collective.
    for hook in sys.argv[1:] or ["none"]:
        train(hook, f"{hook} " if len(sys.argv) > 2 else "")
    dist.barrier()
    dist.destroy_process_group()


def train(hook: str, before: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.Tanh())])
    if hook == "buffers":
        model.append(nn.BatchNorm1d(64))
    if hook == "sparse":
        model.insert(0, nn.Embedding(128, 64, sparse=True))
    # With more than one bucket, PowerSGD over Gloo stands still: pytorch#48478. The compiler
    # refuses a first bucket of 1 MiB that is larger than the others.
    whole = hook in ("powersgd", "compiled")
    data = DistributedDataParallel(model, bucket_cap_mb=50 if whole else 0.05)
    register(data, hook)
    trained = torch.compile(data, backend="eager") if hook == "compiled" else data
    kind = torch.optim.SGD if hook == "sparse" else torch.optim.Adam  # Adam refuses sparse ones
    optimizer = kind(data.parameters(), 0.01)
    torch.manual_seed(dist.get_rank())
    for _ in range(STEPS):
        optimizer.zero_grad()
        inputs = torch.randint(128, (8,)) if hook == "sparse" else torch.randn(8, 64)
        trained(inputs).square().mean().backward()
        optimizer.step()
    weights = b"".join(each.detach().numpy().tobytes() for each in model.parameters())
    digest = hashlib.sha256(weights).hexdigest()
    sys.stdout.write(f"{before}{digest}\n")  # in one piece, unlike print
    sys.stdout.flush()


def register(data: DistributedDataParallel, hook: str) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    if hook == "fp16":
        data.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif hook == "builtin-fp16":
        data._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    elif hook == "powersgd":
        state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2)
        data.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    elif hook == "int8":
        import fullwire

        fullwire.compress(data, hook)
    elif hook == "slow":
        data.register_comm_hook(None, slow_hook)


def slow_hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Take 20 ms to pack, and 10 ms to unpack when the sum is there."""

    def unpack(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        time.sleep(0.01)
        return future.value()[0]

    time.sleep(0.02)
    return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(unpack)


if __name__ == "__main__":
    main()
