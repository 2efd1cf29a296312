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
        yield from _gpt2_block(f"transformer.h.{index}", length, width)
    yield layer_norm("transformer.ln_f", length, width)
    # the head's weight is wte's, ready only with it
    yield linear("lm_head", length, width, vocabulary)._replace(parameters=())
    yield cross_entropy("loss", length, vocabulary)


def _gpt2_block(name: str, tokens: int, width: int) -> Iterator[Layer]:
    yield layer_norm(f"{name}.ln_1", tokens, width)
    yield linear(f"{name}.attn.c_attn", tokens, width, 3 * width)
    # causal: a token looks at those before it, half of the sequence on average
    yield attention(f"{name}.attn", tokens, width, keys_per_query=tokens // 2)
    yield linear(f"{name}.attn.c_proj", tokens, width, width)
    yield fp32_add(f"{name}.attn.add", tokens * width)
    yield layer_norm(f"{name}.ln_2", tokens, width)
    yield linear(f"{name}.mlp.c_fc", tokens, width, 4 * width)
    yield activation(f"{name}.mlp.gelu", tokens * 4 * width, in_place=False)
    yield linear(f"{name}.mlp.c_proj", tokens, 4 * width, width)
    yield fp32_add(f"{name}.mlp.add", tokens * width)


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
