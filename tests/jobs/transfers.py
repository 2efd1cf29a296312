"""Two ranks pass a tensor to and fro in every way that torch has, and train a little between."""

import sys

import torch
import torch.distributed as dist
from torch import nn

ROUNDS = 3


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    here, other = dist.get_rank(), 1 - dist.get_rank()
    sent, got = torch.full((1000,), float(here)), torch.zeros(1000)
    for _ in range(ROUNDS):
        optimizer.zero_grad()
        model(torch.ones(4)).sum().backward()
        if here == 0:
            dist.send(sent, other)
            dist.recv(got)  # from any rank
        else:
            dist.recv(got, other)
            dist.isend(sent, other).wait()
        both = [dist.P2POp(dist.isend, sent, other), dist.P2POp(dist.irecv, got, other)]
        for work in dist.batch_isend_irecv(both):
            work.wait()
        optimizer.step()
    sys.stdout.write(f"{got.sum().item()}\n")
    sys.stdout.flush()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
