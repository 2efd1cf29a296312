"""What codecs cost and lose on this machine: packing, unpacking, and the error of gradients."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from fullwire.compression.codec import Choice
from fullwire.compression.method import FLOAT_BYTES, Format, Tensor
from fullwire.errors import DamagedInput, UsageError

SIDE = 2560  # A bucket of DDP, 25 MiB, is a square of so many float32.
BUCKET_BYTES = FLOAT_BYTES * SIDE**2
_BUCKETS = 4  # Looked at in turn: no cache holds the next one, as after a backward pass.
_STEPS = 30  # Of the small network whose gradients are real.


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """The speeds of one codec, in bits of float32 a second, for so many threads."""

    threads: int
    pack_bps: float
    unpack_bps: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredCodec:
    """One codec on this machine. Errors are relative and squared: |arrived - sent|^2 / |sent|^2."""

    codec: str
    ratio: float
    packed_bytes: int
    speeds: tuple[Speeds, ...]  # On one thread, then on all.
    gaussian_error: float
    gradient_error: float


def measure(choice: Choice, gradients: Sequence[Tensor], *, repeats: int) -> MeasuredCodec:
    """Time a codec on buckets, and compare gradients with their packed form."""
    same = torch.Generator().manual_seed(0)
    bucket = torch.randn((SIDE, SIDE), generator=same)
    method = choice.method()
    packed = method.pack(bucket)
    shape = SIDE, SIDE
    arrived = method.unpack(packed, shape)
    buckets = [bucket.clone() for _ in range(_BUCKETS)]
    errors = [torch.zeros_like(bucket) for _ in range(_BUCKETS * method.keeps_error)]
    all_packed = [packed.clone() for _ in range(_BUCKETS)]

    def unpack(given: tuple[Tensor, Tensor]) -> None:
        """Unpack into the memory of a bucket where the hook does; new memory costs more."""
        row, out = given
        if isinstance(method, Format):
            method.unpack_row(row, out.view(-1))
        else:
            method.unpack(row, shape)

    def feed_back(given: tuple[Tensor, Tensor]) -> None:
        """Add what was not sent, and keep what is not sent now, as the hook does."""
        values, error = given
        values += error
        error.copy_(values)
        error -= arrived
        error.sum()

    speeds = []
    for threads in sorted({1, torch.get_num_threads()}):
        with _on_threads(threads):
            pack_s = _least_s(method.pack, buckets, repeats)
            if errors:
                pack_s += _least_s(feed_back, list(zip(buckets, errors, strict=True)), repeats)
            unpack_s = _least_s(unpack, list(zip(all_packed, buckets, strict=True)), repeats)
        bits = 8 * BUCKET_BYTES
        speeds.append(Speeds(threads=threads, pack_bps=bits / pack_s, unpack_bps=bits / unpack_s))
    return MeasuredCodec(
        codec=str(choice),
        ratio=BUCKET_BYTES / packed.numel(),
        packed_bytes=packed.numel(),
        speeds=tuple(speeds),
        gaussian_error=_error(choice, [bucket]),
        gradient_error=_error(choice, gradients),
    )


def gradients_in(path: Path) -> list[Tensor]:
    """Read gradients from a file: tensors or a dictionary of them (.pt), or arrays (.npy, .npz)."""
    import numpy as np

    if path.suffix not in (".pt", ".npy", ".npz"):
        raise UsageError(f"gradients: expected a file .pt, .npy or .npz, got {path}")
    try:
        if path.suffix == ".pt":
            held = torch.load(path, weights_only=True, map_location="cpu")
        else:
            loaded = np.load(path, allow_pickle=False)
            held = loaded if path.suffix == ".npy" else dict(loaded)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from None
    except Exception as error:  # Torch and zipfile raise many kinds.
        raise DamagedInput(str(path), f"cannot be read as gradients: {error}") from None
    values = list(held.values()) if isinstance(held, Mapping) else held
    each = values if isinstance(values, list | tuple) else [values]
    tensors = [torch.as_tensor(one).float() for one in each if not isinstance(one, str)]
    if not any(tensor.numel() for tensor in tensors):
        raise UsageError(f"{path}: expected gradients with values, got none")
    return [tensor for tensor in tensors if tensor.numel()]


def gradients_of_small_network() -> list[Tensor]:
    """Train a small network on generated pictures for some steps, and return its gradients."""
    same = torch.Generator().manual_seed(0)
    centres = torch.randn((10, 256), generator=same)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        sides = pairwise((256, 512, 256, 10))
        layers = [part for side in sides for part in (torch.nn.Linear(*side), torch.nn.ReLU())]
        network = torch.nn.Sequential(*layers[:-1])
    for _ in range(_STEPS):
        labels = torch.randint(10, (64,), generator=same)
        pictures = centres[labels] + 2 * torch.randn((64, 256), generator=same)
        network.zero_grad()
        torch.nn.functional.cross_entropy(network(pictures), labels).backward()
        with torch.no_grad():  # By hand, as torch.optim takes seconds to load.
            for parameter in network.parameters():
                parameter -= 0.1 * parameter.grad
    return [parameter.grad for parameter in network.parameters()]


def machine() -> str:
    """Return the processor of this machine, and the torch that ran on it."""
    name = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        if line.startswith("model name"):
            name = line.partition(":")[2].strip()
            break
    return f"{name}, torch {torch.__version__}"


@contextmanager
def _on_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _least_s(work: Callable[[Any], Any], places: Sequence[Any], repeats: int) -> float:
    """Return the time that work takes when nothing else runs: other work only adds to it."""
    work(places[0])  # Memory is taken and pages are touched.
    took_s = []
    for number in range(repeats):
        place = places[(number + 1) % len(places)]
        began_s = time.perf_counter()
        work(place)
        took_s.append(time.perf_counter() - began_s)
    return min(took_s)


def _error(choice: Choice, gradients: Sequence[Tensor]) -> float:
    method, lost, given = choice.method(), 0.0, 0.0
    for gradient in gradients:
        shape = tuple(gradient.shape)
        arrived = method.unpack(method.pack(gradient), shape)
        lost += float((gradient - arrived).square().sum())
        given += float(gradient.square().sum())
    return lost / given if given else 0.0
