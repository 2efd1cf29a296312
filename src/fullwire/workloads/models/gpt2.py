"""GPT-2: layers in the order in which they run forward."""

from __future__ import annotations

from collections.abc import Iterator

from fullwire.workloads.layers import (
    Layer,
    activation,
    attention,
    cross_entropy,
    embedding,
    fp32_add,
    layer_norm,
    linear,
)
from fullwire.workloads.recipe import sequences


def gpt2(*, layers: int, width: int, length: int) -> Iterator[Layer]:
    """Go through GPT-2."""
    vocabulary = 50257
    yield embedding("transformer.wte", length, vocabulary, width, uses=2)
    yield embedding("transformer.wpe", length, length, width)
    yield fp32_add("transformer.add", length * width)
    for index in range(layers):
        name = f"transformer.h.{index}"
        yield layer_norm(f"{name}.ln_1", length, width)
        yield linear(f"{name}.attn.c_attn", length, width, 3 * width)
        # causal: a token looks at those before it, half of the sequence on average
        yield attention(f"{name}.attn", length, width, keys_per_query=length // 2)
        yield linear(f"{name}.attn.c_proj", length, width, width)
        yield fp32_add(f"{name}.attn.add", length * width)
        yield layer_norm(f"{name}.ln_2", length, width)
        yield linear(f"{name}.mlp.c_fc", length, width, 4 * width)
        yield activation(f"{name}.mlp.gelu", length * 4 * width, in_place=False)
        yield linear(f"{name}.mlp.c_proj", length, 4 * width, width)
        yield fp32_add(f"{name}.mlp.add", length * width)
    yield layer_norm("transformer.ln_f", length, width)
    # the head's weight is wte's, ready only with it
    yield linear("lm_head", length, width, vocabulary)._replace(parameters=())
    yield cross_entropy("loss", length, vocabulary)


MODEL = (
    sequences(
        "gpt2",
        "GPT-2 124M (Hugging Face)",
        lambda: gpt2(layers=12, width=768, length=1024),
        samples=8,
        length=1024,
    ),
    sequences(
        "gpt2-xl",
        "GPT-2 XL 1.5B (Hugging Face)",
        lambda: gpt2(layers=48, width=1600, length=1024),
        samples=8,
        length=1024,
    ),
)
