"""Networks for text, as layers in the order in which they run forward.

Names, sizes and order are Hugging Face's. Attention, GELU, SwiGLU and norms are taken as fused.
"""

from __future__ import annotations

from collections.abc import Iterator

from fullwire.workloads.layers import (
    Layer,
    Parameter,
    activation,
    attention,
    cross_entropy,
    embedding,
    fp32_add,
    gate,
    layer_norm,
    linear,
    rotation,
)


def bert(*, layers: int, width: int, length: int) -> Iterator[Layer]:
    """Go through BERT in pre-training."""
    vocabulary = 30522
    yield embedding("bert.embeddings.word_embeddings", length, vocabulary, width, uses=2)
    yield embedding("bert.embeddings.token_type_embeddings", length, 2, width)
    yield fp32_add("bert.embeddings.add1", length * width)
    yield embedding("bert.embeddings.position_embeddings", length, length, width)
    yield fp32_add("bert.embeddings.add2", length * width)
    yield layer_norm("bert.embeddings.LayerNorm", length, width)
    for index in range(layers):
        yield from _bert_layer(f"bert.encoder.layer.{index}", length, width)
    yield linear("bert.pooler.dense", 1, width, width)
    yield linear("cls.predictions.transform.dense", length, width, width)
    yield activation("cls.predictions.transform.gelu", length * width, in_place=False)
    yield layer_norm("cls.predictions.transform.LayerNorm", length, width)
    decoder = linear("cls.predictions.decoder", length, width, vocabulary)
    # the decoder's weight is the word embeddings', ready only with them; its bias is its own
    yield decoder._replace(parameters=(Parameter("cls.predictions.bias", vocabulary),))
    yield linear("cls.seq_relationship", 1, width, 2)
    yield cross_entropy("loss", length, vocabulary)


def _bert_layer(name: str, tokens: int, width: int) -> Iterator[Layer]:
    for projection in ("query", "key", "value"):
        yield linear(f"{name}.attention.self.{projection}", tokens, width, width)
    yield attention(f"{name}.attention.self", tokens, width, keys_per_query=tokens)
    yield linear(f"{name}.attention.output.dense", tokens, width, width)
    yield fp32_add(f"{name}.attention.output.add", tokens * width)
    yield layer_norm(f"{name}.attention.output.LayerNorm", tokens, width)
    yield linear(f"{name}.intermediate.dense", tokens, width, 4 * width)
    yield activation(f"{name}.intermediate.gelu", tokens * 4 * width, in_place=False)
    yield linear(f"{name}.output.dense", tokens, 4 * width, width)
    yield fp32_add(f"{name}.output.add", tokens * width)
    yield layer_norm(f"{name}.output.LayerNorm", tokens, width)


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
