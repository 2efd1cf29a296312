"""A training that chose no predicted step: python -m validation.jobs.unseen KIND [STEPS].

    unet         a U-Net of convolutions, with skips
    encoder      two layers of a transformer, and a large embedding
    waves        dilated convolutions over sound
    separable    convolutions of each channel alone, as on telephones
    tabular      many small layers with batch norms, in tiny buckets
    experts      blocks of four experts, all of which are used
    recurrent    an LSTM with attention
    narrow       ten narrow layers, in tiny buckets

BACKEND in the environment is the backend; the default is Gloo.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.functional import avg_pool2d, interpolate
from torch.nn.parallel import DistributedDataParallel

from validation.jobs.rank import as_a_rank


class _Unet(nn.Module):  # type: ignore[misc]  # torch is not checked
    def __init__(self) -> None:
        super().__init__()
        sides = ((3, 24), (24, 64), (64, 192), (192, 384), (384, 192), (384, 64), (128, 24))
        self.parts = nn.ModuleList(
            nn.Sequential(nn.Conv2d(*each, 3, padding=1), nn.GroupNorm(4, each[1]), nn.SiLU())
            for each in sides
        )
        self.last = nn.Conv2d(48, 3, 3, padding=1)

    def forward(self, samples: Any) -> Any:
        large = self.parts[0](samples)
        middle = self.parts[1](avg_pool2d(large, 2))
        small = self.parts[2](avg_pool2d(middle, 2))
        up = self.parts[5](torch.cat([self.parts[4](self.parts[3](small)), small], 1))
        up = self.parts[6](torch.cat([interpolate(up, scale_factor=2), middle], 1))
        return self.last(torch.cat([interpolate(up, scale_factor=2), large], 1))


class _Encoder(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(8000, 256), nn.Parameter(torch.zeros(1, 48, 256))
        layer = nn.TransformerEncoderLayer(256, 4, 768, 0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(256, 8000)

    def forward(self, words: Any) -> Any:
        return self.head(self.layers(self.words(words) + self.places)[:, :6])


class _Waves(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Conv1d(1, 160, 1), nn.Conv1d(160, 256, 1)
        self.gates = nn.ModuleList(
            nn.Conv1d(160, 320, 3, dilation=2**place, padding=2**place) for place in range(6)
        )
        self.outs = nn.ModuleList(nn.Conv1d(160, 160, 1) for _ in self.gates)

    def forward(self, sound: Any) -> Any:
        now = self.first(sound)
        skipped = torch.zeros_like(now)
        for gate, out in zip(self.gates, self.outs, strict=True):
            value, share = gate(now).chunk(2, 1)
            added = out(torch.tanh(value) * torch.sigmoid(share))
            now, skipped = now + added, skipped + added
        return self.head(skipped)


class _Residual(nn.Module):  # type: ignore[misc]
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, samples: Any) -> Any:
        return samples + self.inner(samples)


class _Experts(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(256, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(4)
        )

    def forward(self, samples: Any) -> Any:
        shares = self.gate(samples).softmax(-1).split(1, -1)
        return sum(
            share * expert(samples) for share, expert in zip(shares, self.experts, strict=True)
        )


class _Recurrent(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(2000, 256), nn.Linear(320, 2000)
        self.cells = nn.LSTM(256, 320, 2, batch_first=True)
        self.attention = nn.MultiheadAttention(320, 4, batch_first=True)

    def forward(self, words: Any) -> Any:
        states, _ = self.cells(self.words(words))
        return self.head(self.attention(states, states, states, need_weights=False)[0])


def _separable() -> nn.Sequential:
    parts: list[nn.Module] = [nn.Conv2d(3, 32, 3, 2, 1)]
    sides = ((32, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2), (512, 512, 1), (512, 512, 1))
    for before, after, stride in (*sides, (512, 1024, 2)):
        alone = nn.Conv2d(before, before, 3, stride, 1, groups=before, bias=False)
        parts += [alone, nn.BatchNorm2d(before), nn.ReLU6()]
        parts += [nn.Conv2d(before, after, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU6()]
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1024, 1000))


def _tabular() -> nn.Sequential:
    inner = (
        nn.Sequential(nn.BatchNorm1d(256), nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256))
        for _ in range(12)
    )
    return nn.Sequential(nn.Linear(100, 256), *map(_Residual, inner), nn.Linear(256, 1))


class _Job(NamedTuple):
    model: Callable[[], nn.Module]
    samples: Callable[[], Any]
    bucket_mb: float
    is_adam: bool = False


KINDS = {
    "unet": _Job(_Unet, lambda: torch.randn(4, 3, 32, 32), 4, is_adam=True),
    "encoder": _Job(_Encoder, lambda: torch.randint(0, 8000, (6, 48)), 25, is_adam=True),
    "waves": _Job(_Waves, lambda: torch.randn(2, 1, 256), 1),
    "separable": _Job(_separable, lambda: torch.randn(4, 3, 64, 64), 2),
    "tabular": _Job(_tabular, lambda: torch.randn(128, 100), 0.25),
    "experts": _Job(
        lambda: nn.Sequential(*(_Residual(_Experts()) for _ in range(3))),
        lambda: torch.randn(48, 256),
        10,
        is_adam=True,
    ),
    "recurrent": _Job(_Recurrent, lambda: torch.randint(0, 2000, (4, 24)), 3),
    "narrow": _Job(
        lambda: nn.Sequential(
            *(part for _ in range(10) for part in (nn.Linear(384, 384), nn.Tanh()))
        ),
        lambda: torch.randn(96, 384),
        0.6,
    ),
}


def _train(kind: str, steps: str = "24") -> None:
    job = KINDS[kind]
    plain, samples = job.model(), job.samples()
    model = DistributedDataParallel(plain, bucket_cap_mb=job.bucket_mb)
    parameters = plain.parameters()
    optimizer: torch.optim.Optimizer = (
        torch.optim.AdamW(parameters, 1e-4)
        if job.is_adam
        else torch.optim.SGD(parameters, 1e-3, momentum=0.9)
    )
    for _ in range(int(steps)):
        optimizer.zero_grad()
        model(samples).square().mean().backward()
        optimizer.step()


if __name__ == "__main__":
    as_a_rank(_train)
