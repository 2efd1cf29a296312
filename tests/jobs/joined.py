"""Read sums that may wait, in ways that no mode of torch sees; tell, as JSON, whether each came.

An all-reduce that doubles stands for another rank.
"""

import json
import sys
import tempfile
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.utils.flop_counter import FlopCounterMode

from fullwire.fixes import fix_kinds
from fullwire.fixes._in_job import Applying

SENT: list[int] = []
AGREED: list[int] = []


def doubled(tensor: Any, op: Any = None, group: Any = None, async_op: bool = False) -> None:
    if op == dist.ReduceOp.MIN:
        AGREED.append(int(tensor))
    else:
        SENT.append(tensor.numel())
        tensor.mul_(2)


def sent(elements: int) -> bool:
    """Say whether this sum alone was sent, maybe with the number by which ranks agree on it."""
    return SENT in ([elements], [elements + 1])


def main() -> None:
    store = dist.FileStore(tempfile.mktemp(), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    dist.all_reduce = doubled
    fix_kinds()["joining"].apply("1MiB", Applying("joining"))
    told = {}

    of_numpy = np.ones(3)
    dist.all_reduce(torch.from_numpy(of_numpy))
    told["memory of numpy"] = of_numpy.sum() == 6

    tensor = torch.ones(3)
    array = tensor.numpy()
    dist.all_reduce(tensor)
    told["memory that numpy has too"] = array.sum() == 6

    tensor = torch.ones(3).share_memory_()
    SENT.clear()
    dist.all_reduce(tensor)
    told["memory of several processes"] = sent(3)

    weight = torch.ones(3, requires_grad=True)
    weight.sum().backward()
    dist.all_reduce(weight.grad)
    SENT.clear()
    torch.autograd.backward(weight.sum())
    told["a backward pass"] = sent(3) and weight.grad.tolist() == [3, 3, 3]

    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    SENT.clear()
    functional.all_reduce(torch.ones(2), "sum", dist.group.WORLD)
    told["a functional collective"] = sent(3)

    tensor = torch.ones(3)
    view = tensor.view(-1)
    dist.all_reduce(tensor)
    tensor.data = torch.zeros(3)
    told["a tensor with other memory"] = view.sum().item() == 6 and tensor.sum().item() == 0

    tensor = torch.full((3,), 3.0)
    dist.all_reduce(tensor)
    tensor.div_(4, rounding_mode="floor")
    told["a rounded quotient"] = tensor.tolist() == [1, 1, 1]

    with FlopCounterMode(display=False):
        tensor = torch.ones(3)
        SENT.clear()
        dist.all_reduce(tensor)
    told["another mode"] = sent(3)

    for _ in range(100):
        torch.ones(3).numpy()  # freed at once: new memory gets its address
    SENT.clear()
    several = [torch.ones(3) for _ in range(4)]
    for each in several:
        dist.all_reduce(each)
    told["others wait"] = SENT == [] and several[0].sum().item() == 6
    told["others wait, and another sum was expected"] = SENT == [4, 12]

    AGREED.clear()
    for _ in range(4):  # the same sums as those before: after the first, ranks expect them
        several = [torch.ones(3) for _ in range(4)]
        SENT.clear()
        for each in several:
            dist.all_reduce(each)
            each /= 2
        told["sums that were expected"] = several[3].tolist() == [1, 1, 1] and SENT == [13]
    told["one agreement for sums that were expected"] = AGREED == [4]

    several = [torch.ones(3) for _ in range(4)]
    SENT.clear()
    begun = [dist.all_reduce(each, async_op=True) for each in several]
    is_unsent = SENT == []
    for work in begun:
        work.wait()
    told["sums that are begun"] = is_unsent and several[0].sum().item() == 6 and len(SENT) == 1
    told["an end of each"] = all(work.is_completed() for work in begun)

    tensor = torch.ones(3)
    future = dist.all_reduce(tensor, async_op=True).get_future()
    told["a future"] = future.wait() == [tensor] and tensor.sum().item() == 6

    weight = torch.ones(3, requires_grad=True)
    weight.register_hook(lambda gradient: dist.all_reduce(gradient, async_op=True))
    SENT.clear()
    weight.square().sum().backward()
    told["a sum beside a backward pass"] = SENT == [3] and weight.grad.tolist() == [4, 4, 4]

    dist.destroy_process_group()
    sys.stdout.write(json.dumps({name: bool(value) for name, value in told.items()}))


if __name__ == "__main__":
    main()
