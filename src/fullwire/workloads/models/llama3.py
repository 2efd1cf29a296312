"""Llama 3: layers in the order in which they run forward."""

from __future__ import annotations

from collections.abc import Iterator

from fullwire.workloads.layers import (
    Layer,
    attention,
    cross_entropy,
    embedding,
    fp32_add,
    gate,
    layer_norm,
    linear,
    rotation,
)
from fullwire.workloads.recipe import sequences


def llama3(
    *, layers: int, width: int, inner: int, shared_heads: int, length: int
) -> Iterator[Layer]:
    """Go through Llama 3; `shared_heads` queries have a key and a value in common."""
    vocabulary = 128256
    yield embedding("model.embed_tokens", length, vocabulary, width)
    for index in range(layers):
        name = f"model.layers.{index}"
        narrow = width // shared_heads
        yield layer_norm(f"{name}.input_layernorm", length, width, shifts=False)
        for projection, outputs in (("q_proj", width), ("k_proj", narrow), ("v_proj", narrow)):
            yield linear(f"{name}.self_attn.{projection}", length, width, outputs, bias=False)
        yield rotation(f"{name}.self_attn.rotary_emb", length * (width + narrow))
        yield attention(
            f"{name}.self_attn",
            length,
            width,
            keys_per_query=length // 2,
            shared_heads=shared_heads,
        )
        yield linear(f"{name}.self_attn.o_proj", length, width, width, bias=False)
        yield fp32_add(f"{name}.self_attn.add", length * width)
        yield layer_norm(f"{name}.post_attention_layernorm", length, width, shifts=False)
        for projection in ("gate_proj", "up_proj"):
            yield linear(f"{name}.mlp.{projection}", length, width, inner, bias=False)
        yield gate(f"{name}.mlp.act_fn", length * inner)
        yield linear(f"{name}.mlp.down_proj", length, inner, width, bias=False)
        yield fp32_add(f"{name}.mlp.add", length * width)
    yield layer_norm("model.norm", length, width, shifts=False)
    yield linear("lm_head", length, width, vocabulary, bias=False)
    yield cross_entropy("loss", length, vocabulary)


MODEL = sequences(
    "llama3-8b",
    "Llama 3 8B (Hugging Face)",
    lambda: llama3(layers=32, width=4096, inner=14336, shared_heads=4, length=8192),
    samples=1,
    length=8192,
)
