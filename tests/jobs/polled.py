"""Sum each gradient when it is ready, and ask meanwhile whether sums have ended.

The argument says who asks what. The backward pass asks a work or its future until the sum of the
gradient before has ended. Or a thread asks all works, again and again. The job prints the digest of
the weights.
"""

import hashlib
import sys
import threading
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

STEPS = 24


def ask_all(works: list[Any], is_over: threading.Event) -> None:
    while not is_over.wait(1e-4):
        for work in list(works):
            work.is_completed()


def has_ended(work: Any) -> bool:
    return bool(work.get_future().done() if sys.argv[1] == "future" else work.is_completed())


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    works: list[Any] = []
    is_over = threading.Event()
    asking = threading.Thread(target=ask_all, args=(works, is_over))
    if sys.argv[1] == "thread":
        asking.start()

    def ready(parameter: torch.Tensor) -> None:
        while works and sys.argv[1] != "thread" and not has_ended(works[-1]):
            time.sleep(1e-4)
        works.append(dist.all_reduce(parameter.grad, async_op=True))

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(ready)
    for _ in range(STEPS):
        model(torch.randn(4, 8)).square().mean().backward()
        for work in works:
            work.wait()
        works.clear()
        optimizer.step()
        optimizer.zero_grad()
    is_over.set()
    if asking.ident is not None:
        asking.join()
    weights = b"".join(each.detach().numpy().tobytes() for each in model.parameters())
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.write(hashlib.sha256(weights).hexdigest() + "\n")


if __name__ == "__main__":
    main()
