"""BERT: layers in the order in which they run forward."""

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
    layer_norm,
    linear,
)
from fullwire.workloads.recipe import sequences


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
        name = f"bert.encoder.layer.{index}"
        for projection in ("query", "key", "value"):
            yield linear(f"{name}.attention.self.{projection}", length, width, width)
        yield attention(f"{name}.attention.self", length, width, keys_per_query=length)
        yield linear(f"{name}.attention.output.dense", length, width, width)
        yield fp32_add(f"{name}.attention.output.add", length * width)
        yield layer_norm(f"{name}.attention.output.LayerNorm", length, width)
        yield linear(f"{name}.intermediate.dense", length, width, 4 * width)
        yield activation(f"{name}.intermediate.gelu", length * 4 * width, in_place=False)
        yield linear(f"{name}.output.dense", length, 4 * width, width)
        yield fp32_add(f"{name}.output.add", length * width)
        yield layer_norm(f"{name}.output.LayerNorm", length, width)
    yield linear("bert.pooler.dense", 1, width, width)
    yield linear("cls.predictions.transform.dense", length, width, width)
    yield activation("cls.predictions.transform.gelu", length * width, in_place=False)
    yield layer_norm("cls.predictions.transform.LayerNorm", length, width)
    decoder = linear("cls.predictions.decoder", length, width, vocabulary)
    # the decoder's weight is the word embeddings', ready only with them; its bias is its own
    yield decoder._replace(parameters=(Parameter("cls.predictions.bias", vocabulary),))
    yield linear("cls.seq_relationship", 1, width, 2)
    yield cross_entropy("loss", length, vocabulary)


MODEL = sequences(
    "bert-large",
    "BERT-large, uncased, pre-training (Hugging Face)",
    lambda: bert(layers=24, width=1024, length=512),
    samples=8,
    length=512,
)
