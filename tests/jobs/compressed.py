"""Train with codecs and print what came of it, as JSON: python compressed.py BACKEND CODEC...

Each rank's gradients are constants of the rank and the step, so a step's true mean is known.
"""

import hashlib
import json
import os
import sys
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fullwire
from fullwire.compression import hook
from fullwire.errors import UsageError

CODECS = sys.argv[2:]
STEPS = 6
hook.MEASURED_EVERY = 2


class Linear(nn.Module):  # type: ignore[misc]  # torch may be absent when we check
    """A model whose gradients are the coefficients that it is called with."""

    def __init__(self, dtype: Any = torch.float32) -> None:
        super().__init__()
        same = torch.Generator().manual_seed(0)
        sizes = [(40, 70), (70,), (64, 64), (300,), (3, 8, 5), (1,), (0, 5)]
        self.weights = nn.ParameterList(
            torch.randn(size, generator=same, dtype=dtype) for size in sizes
        )

    def forward(self, coefficients: Any) -> Any:
        pairs = zip(self.weights, coefficients, strict=False)
        return sum((weight * each).sum() for weight, each in pairs)


def coefficients(model: Any, rank: int, step: int) -> Any:
    own = torch.Generator().manual_seed(1000 * rank + step)
    return [torch.randn(each.shape, generator=own, dtype=each.dtype) for each in model.weights]


def parallel(model: Any, group: Any = None, **more: Any) -> Any:
    return DistributedDataParallel(model, bucket_cap_mb=0.02, process_group=group, **more)


def flat(tensors: Any) -> Any:
    return torch.cat([each.reshape(-1).double() for each in tensors])


def gradient(data: Any) -> Any:
    return flat([each.grad for each in data.module.weights])


def step_with(data: Any, rank: int, step: int, scale: float = 1.0) -> Any:
    data.zero_grad()
    data([scale * each for each in coefficients(data.module, rank, step)]).backward()
    return gradient(data)


def digests(tensor: Any, group: Any = None) -> bool:
    """Return whether all ranks hold the same bits."""
    own = hashlib.sha256(tensor.numpy().tobytes()).hexdigest()
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, own, group=group)
    return len(set(everyone)) == 1


def true_mean(model: Any, ranks: Any, step: int) -> Any:
    return sum(flat(coefficients(model, rank, step)) for rank in ranks) / len(ranks)


def mean_over_ranks(tensor: Any, group: Any = None) -> Any:
    dist.all_reduce(tensor, group=group)
    return tensor / dist.get_world_size(group)


def unsent(compression: Any, data: Any) -> Any:
    kept = compression.state_dict()["unsent"]
    names = [name for name, _ in data.module.named_parameters()]
    return flat([kept[name] for name in names]) if kept else torch.zeros(())


def one_codec(codec: str, rank: int, ranks: Any) -> tuple[dict[str, Any], tuple[Any, Any]]:
    """Train, go through a checkpoint, and lose a rank."""
    data = parallel(Linear())
    compression = fullwire.compress(data, codec)
    sent: Any = 0.0
    given: Any = 0.0
    is_equal = True
    for step in range(STEPS):
        got = step_with(data, rank, step)
        is_equal &= digests(got)
        sent, given = sent + got, given + true_mean(data.module, range(ranks), step)
    missing = given - sent - mean_over_ranks(unsent(compression, data))
    error = float(missing.norm() / given.norm())
    # Another process that loads the checkpoint goes on alike.
    state = compression.state_dict()
    again = parallel(Linear())
    loaded = fullwire.compress(again, codec)
    step_with(again, rank, 0)  # Its buckets are rebuilt after the first step.
    loaded.load_state_dict(state)
    is_same = bool((step_with(data, rank, STEPS) == step_with(again, rank, STEPS)).all())
    # The passes without communication are added up, and sent with the last one.
    data.zero_grad()
    for number in range(2):
        with data.no_sync() if number == 0 else nullcontext():
            data(coefficients(data.module, rank, number)).backward()
    accumulated = gradient(data)
    is_equal &= digests(accumulated)
    wanted = sum(true_mean(data.module, range(ranks), number) for number in range(2))
    similarity = float(torch.cosine_similarity(accumulated, wanted, dim=0))
    measured = compression.loss
    assert measured is not None
    return {
        "equal": is_equal,
        "error": error,
        "same": is_same,
        "similarity": similarity,
        "squared_error": measured.squared_error,
        "unsent_norm": measured.unsent_norm,
        "off": compression.is_off,
    }, (data, compression)


def with_fewer(codec: str, data: Any, rank: int, few: Any, step: int = 20) -> bool:
    """Go on in a group that a rank has left."""
    data._update_process_group(few)
    equal = [digests(step_with(data, rank, step + more), few) for more in range(3)]
    return all(equal)


def specials(rank: int, ranks: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for codec in ("bf16", "fp16", "int8", "topk:density=0.1", "onebit", "powersgd"):
        data = parallel(Linear())
        compression = fullwire.compress(data, codec)
        step_with(data, rank, 0)
        own = coefficients(data.module, rank, 1)
        if rank == 1:
            own[0][0, 0], own[2][3, 3] = torch.inf, torch.nan
        data.zero_grad()
        data(own).backward()
        bad = gradient(data)
        places = [0, 40 * 70 + 70 + 3 * 64 + 3]
        arrived = [bool(each.isinf()) or bool(each.isnan()) for each in bad[places]]
        after = step_with(data, rank, 2)
        found[codec] = [*arrived, bool(after.isfinite().all()), digests(after)]
        del compression
    data = parallel(Linear())
    compression = fullwire.compress(data, "fp16")
    large = step_with(data, rank, 0, scale=1e5)
    wanted = 1e5 * true_mean(data.module, range(ranks), 0)
    found["large"] = [
        float((large - wanted).norm() / wanted.norm()),
        list(compression.measured)[-1].widened,
    ]
    return found


def small(rank: int, ranks: int, codec: str, **options: Any) -> float:
    """Return the error of biases and such, which lie in buckets among matrices."""
    data = parallel(Linear())
    compression = fullwire.compress(data, codec, **options)
    step_with(data, rank, 0)
    step_with(data, rank, 1)
    got = torch.cat([data.module.weights[place].grad.reshape(-1) for place in (1, 3, 4, 5)])
    each = [coefficients(data.module, other, 1) for other in range(ranks)]
    mean = sum(flat([of[place] for place in (1, 3, 4, 5)]) for of in each) / ranks
    kept = compression.state_dict()["unsent"]
    assert not kept or options or not bool(kept["weights.3"].any())
    return float((got - mean).norm() / mean.norm())


def guarded(rank: int) -> list[bool]:
    """The guard stops a codec on all ranks in the same step."""
    data = parallel(Linear())
    compression = fullwire.compress(data, "topk:density=0.1", max_error=0.3)
    first = step_with(data, rank, 0)
    second = step_with(data, rank, 1)
    exact = mean_over_ranks(flat(coefficients(data.module, rank, 1)))
    return [compression.is_off, digests(first), bool(torch.allclose(second, exact, atol=1e-6))]


def with_two_choices(rank: int, codec: str, limit: float | None) -> str:
    data = parallel(Linear())
    fullwire.compress(data, codec, max_error=limit)
    try:
        step_with(data, rank, 0)
    except RuntimeError as error:
        return str(error)
    return "nothing"


def with_a_new_rank(rank: int, few: Any, alone: Any) -> list[Any]:
    """Rank 2 comes to two ranks that have made more steps, which their guards have counted."""
    is_new = rank == 2
    data = parallel(Linear(), alone if is_new else few)
    compression = fullwire.compress(data, "int8")
    for step in range(2 if is_new else 3):
        step_with(data, rank, step)
    data._update_process_group(dist.group.WORLD)
    is_equal = digests(step_with(data, rank, 3))
    return [is_equal, compression.steps, [each.step for each in compression.measured]]


def with_no_others(rank: int, alone: Any) -> bool:
    """A rank in a group of its own gets its gradients to the last bit."""
    found = []
    for codec in CODECS:
        data = parallel(Linear(), alone)
        fullwire.compress(data, codec)
        wanted = flat(coefficients(data.module, rank, 0))
        found.append(bool((step_with(data, rank, 0) == wanted).all()))
    return all(found)


def unused(rank: int) -> bool:
    data = parallel(Linear(), find_unused_parameters=True)
    fullwire.compress(data, "bf16")
    data.zero_grad()
    data(coefficients(data.module, rank, 0)[: 3 + rank]).backward()
    return digests(flat([each.grad for each in data.module.weights if each.grad is not None][:3]))


def doubles(rank: int) -> bool:
    data = parallel(Linear(torch.float64))
    fullwire.compress(data, "int8")
    exact = mean_over_ranks(flat(coefficients(data.module, rank, 0)))
    return bool(torch.allclose(step_with(data, rank, 0), exact))


def complex_numbers(rank: int) -> bool:
    data = parallel(Linear(torch.complex64))
    fullwire.compress(data, "int8")
    given = coefficients(data.module, rank, 0)
    data(given).real.backward()
    exact = mean_over_ranks(torch.cat([each.conj().resolve_conj().reshape(-1) for each in given]))
    return bool(torch.allclose(torch.cat([w.grad.reshape(-1) for w in data.module.weights]), exact))


def refused() -> list[str]:
    said = []
    for model, codec, limit in (
        (nn.Linear(2, 2), "bf16", None),
        (parallel(Linear()), "powersdg", None),
        (parallel(Linear()), "bf16", 0),
    ):
        try:
            fullwire.compress(model, codec, max_error=limit)
        except UsageError as error:
            said.append(str(error))
    data = parallel(Linear())
    fullwire.compress(data, "bf16")
    try:
        fullwire.compress(data, "bf16")
    except UsageError as error:
        said.append(str(error))
    return said


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group(sys.argv[1])
    rank, ranks = dist.get_rank(), dist.get_world_size()
    few = dist.new_group(list(range(ranks - 1)))
    alone = [dist.new_group([member]) for member in range(ranks)][rank]
    found: dict[str, Any] = {}
    kept: dict[str, Any] = {}
    for codec in CODECS:
        found[codec], kept[codec] = one_codec(codec, rank, ranks)
    found["specials"] = specials(rank, ranks)
    found["small"] = {codec: small(rank, ranks, codec) for codec in CODECS}
    found["small packed"] = small(rank, ranks, "bf16", packs_small=True)
    found["guarded"], found["unused"] = guarded(rank), unused(rank)
    found["doubles"], found["complex"] = doubles(rank), complex_numbers(rank)
    found["refused"] = refused()
    found["two limits"] = with_two_choices(rank, "int8", 0.1 + rank)
    found["two codecs"] = with_two_choices(rank, "int8" if rank else "bf16", None)
    found["alone"] = with_no_others(rank, alone)
    found["new rank"] = with_a_new_rank(rank, few, alone)
    if rank < ranks - 1:
        for codec, (data, _) in kept.items():
            found[codec]["fewer"] = with_fewer(codec, data, rank, few)
    dist.barrier()
    if rank == 0:
        sys.stdout.write(json.dumps(found) + "\n")
        sys.stdout.flush()
    del kept
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    os._exit(0)
