"""A training as users of a framework write it, with nothing of Fullwire in it.

torchrun --nproc-per-node=2 validation/jobs/frameworks.py torchvision|transformers|lightning|fsdp2

- torchvision: ResNet-18 on images of 32 pixels, in the loop of torchvision's references.
- transformers: a small BERT in the Trainer of Hugging Face.
- lightning: a small model in Lightning's Trainer, with its DDP strategy.
- fsdp2: a small transformer of torch's own layers, each of them sharded.
"""

import os
import sys
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Made(Dataset):  # type: ignore[misc]  # torch may be absent when we check
    """Samples that are made from their number."""

    def __init__(self, make: Any, count: int = 20_000) -> None:
        self.make, self.count = make, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> Any:
        return self.make(torch.Generator().manual_seed(number))


def by_torchvision() -> None:
    """Train ResNet-18 in the loop of torchvision's references."""
    import torchvision

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torchvision.models.resnet18(num_classes=10)
    network = nn.parallel.DistributedDataParallel(model)
    images = Made(lambda made: (torch.randn(3, 32, 32, generator=made), 1))
    sampler = DistributedSampler(images)
    loader = DataLoader(images, batch_size=8, sampler=sampler, num_workers=0)
    loss_of = nn.CrossEntropyLoss(label_smoothing=0.1)
    optimizer = torch.optim.SGD(network.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
    for batch, target in loader:
        loss = loss_of(network(batch), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        # As the references do it: each step reads the loss for its log.
        loss.item()


def by_transformers() -> None:
    """Train a small BERT with the Trainer of Hugging Face."""
    from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

    torch.manual_seed(0)
    size = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = BertForSequenceClassification(
        BertConfig(vocab_size=2000, intermediate_size=256, num_labels=2, **size)
    )
    words = Made(
        lambda made: {"input_ids": torch.randint(2000, (32,), generator=made), "labels": 1}
    )
    with tempfile.TemporaryDirectory() as folder:
        given = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=8,
            max_steps=2000,
            logging_steps=10,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        )
        Trainer(model=model, args=given, train_dataset=words).train()


def by_lightning() -> None:
    """Train a small model with Lightning's Trainer."""
    import lightning

    class Model(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 10))

        def training_step(self, batch: Any, number: int) -> Any:
            loss = self.net(batch).square().mean()
            self.log("loss", loss, prog_bar=True)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), 1e-3)

    numbers = Made(lambda made: torch.randn(256, generator=made), 200_000)
    lightning.seed_everything(0)
    trainer = lightning.Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=int(os.environ["WORLD_SIZE"]),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    trainer.fit(Model(), DataLoader(numbers, batch_size=16))


def by_fsdp2() -> None:
    """Train a small transformer whose layers are sharded."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    layers = [nn.TransformerEncoderLayer(128, 4, 256, 0.0, batch_first=True) for _ in range(3)]
    model = nn.Sequential(*layers)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    words = Made(lambda made: torch.randn(16, 128, generator=made))
    for batch in DataLoader(words, batch_size=8, sampler=DistributedSampler(words)):
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    {
        "torchvision": by_torchvision,
        "transformers": by_transformers,
        "lightning": by_lightning,
        "fsdp2": by_fsdp2,
    }[sys.argv[1]]()
