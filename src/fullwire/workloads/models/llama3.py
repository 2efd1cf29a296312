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
        yield from _llama_block(f"model.layers.{index}", length, width, inner, shared_heads)
    yield layer_norm("model.norm", length, width, shifts=False)
    yield linear("lm_head", length, width, vocabulary, bias=False)
    yield cross_entropy("loss", length, vocabulary)


def _llama_block(
    name: str, tokens: int, width: int, inner: int, shared_heads: int
) -> Iterator[Layer]:
    narrow = width // shared_heads
    yield layer_norm(f"{name}.input_layernorm", tokens, width, shifts=False)
    for projection, outputs in (("q_proj", width), ("k_proj", narrow), ("v_proj", narrow)):
        yield linear(f"{name}.self_attn.{projection}", tokens, width, outputs, bias=False)
    yield rotation(f"{name}.self_attn.rotary_emb", tokens * (width + narrow))
    yield attention(
        f"{name}.self_attn", tokens, width, keys_per_query=tokens // 2, shared_heads=shared_heads
    )
    yield linear(f"{name}.self_attn.o_proj", tokens, width, width, bias=False)
    yield fp32_add(f"{name}.self_attn.add", tokens * width)
    yield layer_norm(f"{name}.post_attention_layernorm", tokens, width, shifts=False)
    for projection in ("gate_proj", "up_proj"):
        yield linear(f"{name}.mlp.{projection}", tokens, width, inner, bias=False)
    yield gate(f"{name}.mlp.act_fn", tokens * inner)
    yield linear(f"{name}.mlp.down_proj", tokens, inner, width, bias=False)
    yield fp32_add(f"{name}.mlp.add", tokens * width)


MODEL = sequences(
    "llama3-8b",
    "Llama 3 8B (Hugging Face)",
    lambda: llama3(layers=32, width=4096, inner=14336, shared_heads=4, length=8192),
    samples=1,
    length=8192,
)
