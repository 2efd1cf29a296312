"""Train a small model in workers that may be killed.

    fullwire run --workers 3 --min 2 --respawn -- python examples/elastic.py

Kill any of its workers meanwhile: the loss goes on, and each sample counts once an epoch.
"""

import torch

import fullwire

torch.set_num_threads(1)
torch.manual_seed(0)
inputs = torch.randn(4800, 16)
dataset = torch.utils.data.TensorDataset(inputs, inputs.square().sum(1, keepdim=True))
model = torch.nn.Sequential(torch.nn.Linear(16, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

job = fullwire.elastic(model, optimizer)
job.on_change(lambda rank, size: print(f"rank {rank} of {size}, after step {job.step_number}"))
for given, wanted in job.batches(dataset, batch_size=48, epochs=20):
    with job.step():
        loss = torch.nn.functional.mse_loss(job.model(given), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if job.rank == 0 and job.step_number % 100 == 0:
        print(
            f"step {job.step_number}: loss {loss.item():.2f}, {job.world_size} workers", flush=True
        )
