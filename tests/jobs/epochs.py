"""Train three epochs of shuffled batches with dropout, and print the end to the bit.

- python epochs.py [own]: the shuffles come from torch's generator, or from one of the loader's own.
"""

import sys

import torch
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
data = TensorDataset(torch.arange(64.0).reshape(-1, 1))
generator = torch.Generator().manual_seed(5) if "own" in sys.argv else None
model = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), 1e-5)
loader = DataLoader(data, batch_size=4, shuffle=True, generator=generator)
for _ in range(3):
    for (batch,) in loader:
        model(batch).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
print([parameter.sum().item() for parameter in model.parameters()], torch.rand(1).item())
