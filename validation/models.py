"""Are the built-in models those of torchvision and Hugging Face? Run where both are installed.

    python -m validation.models [MODEL...]

Three things are compared for each model:

- the names and sizes;
- the order in which layers' gradients become ready;
- the bytes that one sample leaves for the backward pass in fp32, which torch's hooks on saved
  tensors count.

Language models are made of two layers, since all layers are alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torchvision
import transformers

from fullwire.workloads import MODELS
from fullwire.workloads.layers import FP32_BYTES, Layer
from fullwire.workloads.models.bert import bert
from fullwire.workloads.models.gpt2 import gpt2
from fullwire.workloads.models.llama3 import llama3
from validation import arguments, results

_LAYERS = 2
_Loss = Callable[[Any, int], Any]


def main() -> None:
    """Print a line for each model."""
    known = [*_PICTURES, *_TEXTS]
    taken = arguments.parser(__doc__)
    taken.add_argument("models", nargs="*", default=known, metavar="model")
    chosen = taken.parse_args().models
    if unknown := [name for name in chosen if name not in known]:
        taken.error(f"expected some of {', '.join(known)}; got {unknown[0]!r}")
    print(f"{'model':<16} {'tensors':>8} {'same':>5} {'order':>6} {'kept':>10} {'ours':>10}  off")
    rows, errors = [], []
    for name in chosen:
        torch.manual_seed(0)
        layers, model, loss = _of_pictures(name) if name in _PICTURES else _of_text(name)
        cells, error = _compared(layers, model, loss)
        tensors, same, order, kept, ours, off = cells
        print(
            f"{name:<16} {tensors:>8} {same:>5} {order:>6} {kept:>10} {ours:>10}  {off}", flush=True
        )
        rows.append([name, *cells])
        errors.append(error)
    if chosen == known:
        alike = sum(row[2:4] == ["yes", "yes"] for row in rows)
        columns = "model,tensors,same names and sizes,same order,kept by PyTorch,kept by ours,off"
        told = results.said_of(errors)
        told["summary"] = (
            f"{alike} of {len(rows)} have the same tensors in order; {told['summary']}"
        )
        table = results.Table(columns=columns.split(","), rows=rows)
        anchor = (
            f"torchvision {torchvision.__version__} and transformers {transformers.__version__} "
            f"on PyTorch {torch.__version__}"
        )
        results.renew("models", anchor=anchor, tables=[table], **told)


def _compared(layers: list[Layer], model: Any, loss: _Loss) -> tuple[list[results.Cell], float]:
    """Return the cells of a model's row, and the relative error of our bytes."""
    ours = [parameter for layer in reversed(layers) for parameter in layer.parameters]
    theirs = {key: value.numel() for key, value in model.named_parameters()}
    same = {each.name: each.size for each in ours} == theirs
    order = _layers_of(_order(model, loss))
    kept = (_kept_bytes(model, loss, 4) - _kept_bytes(model, loss, 2)) / 2
    counted = sum(FP32_BYTES * each.kept_values + each.kept_bytes for each in layers)
    in_order = order == _layers_of([each.name for each in ours])
    error = counted / kept - 1
    bytes_kept = [f"{kept / 1e6:.1f} MB", f"{counted / 1e6:.1f} MB"]
    return [len(theirs), _yes(same), _yes(in_order), *bytes_kept, f"{error:+.1%}"], error


def _layers_of(tensors: list[str]) -> list[str]:
    """Return layers in order; PyTorch may change which tensor of a layer comes first."""
    return list(dict.fromkeys(each.rpartition(".")[0] for each in tensors))


def _order(model: Any, loss: _Loss) -> list[str]:
    """Return the names of gradients as they become ready."""
    ready: list[str] = []
    hooks = [
        value.register_post_accumulate_grad_hook(lambda _, key=key: ready.append(key))
        for key, value in model.named_parameters()
    ]
    loss(model, 2).backward()
    for each in hooks:
        each.remove()
    return ready


def _kept_bytes(model: Any, loss: _Loss, samples: int) -> int:
    """Return the bytes that a forward pass keeps, each storage once, without the parameters."""
    own = {each.untyped_storage().data_ptr() for each in model.parameters()}
    kept: dict[int, int] = {}
    held = []

    def keep(value: Any) -> Any:
        storage = value.untyped_storage()
        held.append(value)  # so that no other tensor gets its place meanwhile
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return value

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
        loss(model, samples)
    return sum(kept.values())


def _of_pictures(name: str) -> tuple[list[Layer], Any, _Loss]:
    side = 299 if name.startswith("inception") else 224
    labels = torch.zeros(4, dtype=torch.long)

    def loss(model: Any, samples: int) -> Any:
        given = model(torch.randn(samples, 3, side, side))
        each = [given] if isinstance(given, torch.Tensor) else list(given)
        return sum(torch.nn.functional.cross_entropy(one, labels[:samples]) for one in each)

    return list(MODELS[name].layers), _PICTURES[name]().train(), loss


def _of_text(name: str) -> tuple[list[Layer], Any, _Loss]:
    layers, model, vocabulary, length = _TEXTS[name]()

    def loss(model: Any, samples: int) -> Any:
        tokens = torch.randint(vocabulary, (samples, length))
        if name == "bert-large":
            none = torch.zeros(samples, dtype=torch.long)
            return model(tokens, labels=tokens, next_sentence_label=none).loss
        return model(tokens, labels=tokens, use_cache=False).loss

    return list(layers), model.train(), loss


def _inception(with_auxiliary: bool) -> Any:
    return torchvision.models.inception_v3(aux_logits=with_auxiliary, init_weights=False)


_PICTURES: dict[str, Callable[[], Any]] = {
    "vgg16": torchvision.models.vgg16,
    "vgg19": torchvision.models.vgg19,
    "resnet50": torchvision.models.resnet50,
    "resnet101": torchvision.models.resnet101,
    "densenet121": torchvision.models.densenet121,
    "mobilenetv2": torchvision.models.mobilenet_v2,
    "inceptionv3": lambda: _inception(False),
    "inceptionv3-aux": lambda: _inception(True),
}


def _bert() -> tuple[Iterator[Layer], Any, int, int]:
    config = transformers.BertConfig(
        vocab_size=30522,
        hidden_size=1024,
        num_hidden_layers=_LAYERS,
        num_attention_heads=16,
        intermediate_size=4096,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    layers = bert(layers=_LAYERS, width=1024, length=512)
    return layers, transformers.BertForPreTraining(config), 30522, 512


def _gpt2(width: int, heads: int) -> tuple[Iterator[Layer], Any, int, int]:
    config = transformers.GPT2Config(
        n_positions=256,
        n_embd=width,
        n_layer=_LAYERS,
        n_head=heads,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        activation_function="gelu",
    )
    layers = gpt2(layers=_LAYERS, width=width, length=256)
    return layers, transformers.GPT2LMHeadModel(config), 50257, 256


def _llama() -> tuple[Iterator[Layer], Any, int, int]:
    # a quarter as wide as the real one, of which two layers need 8 GB to train
    config = transformers.LlamaConfig(
        vocab_size=128256,
        hidden_size=1024,
        intermediate_size=3584,
        num_hidden_layers=_LAYERS,
        num_attention_heads=8,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )
    layers = llama3(layers=_LAYERS, width=1024, inner=3584, shared_heads=4, length=256)
    return layers, transformers.LlamaForCausalLM(config), 128256, 256


def _yes(is_so: bool) -> str:
    return "yes" if is_so else "NO"


_TEXTS: dict[str, Callable[[], tuple[Iterator[Layer], Any, int, int]]] = {
    "bert-large": _bert,
    "gpt2": lambda: _gpt2(768, 12),
    "gpt2-xl": lambda: _gpt2(1600, 25),
    "llama3-8b": _llama,
}


if __name__ == "__main__":
    main()
