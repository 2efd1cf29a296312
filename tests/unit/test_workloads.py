"""The built-in models: exact sizes and order, and times as the docstring promises."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

import fullwire as fw
from fullwire import workloads
from fullwire.collectives.closed_form import cost
from fullwire.collectives.cost import AddTimes
from fullwire.errors import UsageError
from fullwire.findings.memory import memory_finding
from fullwire.words import sentence
from fullwire.workloads import MODELS, Model, Workload, workload
from fullwire.workloads.devices import DEVICES
from fullwire.workloads.layers import Layer, Parameter, Work

NETX = Path(__file__).resolve().parents[3] / "shared" / "data" / "netx"
MEASURED_STEP_MS = {"vgg16": 194.52352295080985, "resnet50": 128.08580219559176}  # its README

needs_netx = pytest.mark.skipif(
    not NETX.is_dir(), reason=f"the measured backward passes of Zhang et al. are not at {NETX}"
)


@pytest.mark.parametrize(
    ("model", "parameters"),
    [
        ("vgg16", 138_357_544),
        ("resnet50", 25_557_032),
        ("resnet101", 44_549_160),
        ("vgg19", 143_667_240),
        ("densenet121", 7_978_856),
        ("inceptionv3", 23_834_568),
        ("inceptionv3-aux", 27_161_264),
        ("mobilenet", 4_231_976),
        ("mobilenetv2", 3_504_872),
        ("bert-large", 336_226_108),
        ("gpt2", 124_439_808),
        ("gpt2-xl", 1_557_611_200),
        ("llama3-8b", 8_030_261_248),
    ],
)
def test_a_model_has_exactly_the_parameters_of_the_original(model: str, parameters: int) -> None:
    assert MODELS[model].parameter_count == parameters


@pytest.mark.parametrize("name", workloads.names())
def test_every_workload_is_a_consistent_step(name: str) -> None:
    step = workload(name)
    assert step.name == name
    assert step.gradient_bytes.sum() == 4 * step.model.parameter_count
    assert len(set(step.gradient_names)) == len(step.gradient_names) == len(step.gradient_bytes)
    assert step.gradient_ready_ns[0] > 0
    assert (np.diff(step.gradient_ready_ns) >= 0).all()
    assert step.gradient_ready_ns[-1] == step.backward_ns
    assert step.step_ns == step.forward_ns + step.backward_ns + step.optimizer_ns
    assert step.optimizer_ns < step.forward_ns < step.backward_ns


def test_names_list_every_model_on_every_device_in_order() -> None:
    assert workloads.names()[:3] == ("bert-large@t4", "bert-large@v100", "bert-large@a100")
    assert workloads.names()[-1] == "vgg19@h200"
    assert len(workloads.names()) == len(MODELS) * len(DEVICES)
    assert len(workloads.names()) == 65, (
        "a workload or a device came or went: if that was meant, write the new number here"
    )


def test_asking_twice_gives_the_same_step() -> None:
    once, again = workload("gpt2@a100"), workload("gpt2@a100")
    assert once.gradient_names == again.gradient_names
    assert (once.gradient_ready_ns == again.gradient_ready_ns).all()


def test_columns_cannot_be_written() -> None:
    with pytest.raises(ValueError, match="read-only"):
        workload("gpt2@a100").gradient_ready_ns[0] = 0


@pytest.mark.parametrize(
    ("model", "first_gradients"),
    [
        ("vgg16", ("classifier.6.bias", "classifier.6.weight")),
        ("resnet50", ("fc.bias", "fc.weight")),
        ("resnet101", ("fc.bias", "fc.weight")),
        ("bert-large", ("cls.seq_relationship.bias", "cls.seq_relationship.weight")),
        ("gpt2", ("transformer.ln_f.bias", "transformer.ln_f.weight")),
        ("densenet121", ("classifier.bias", "classifier.weight")),
        ("inceptionv3-aux", ("fc.bias", "fc.weight")),
        ("mobilenetv2", ("classifier.1.bias", "classifier.1.weight")),
        ("llama3-8b", ("lm_head.weight", "model.norm.weight")),
    ],
)
def test_gradients_start_at_the_last_layer_with_parameters(
    model: str, first_gradients: tuple[str, str]
) -> None:
    assert workload(f"{model}@v100").gradient_names[:2] == first_gradients


def test_weight_and_bias_of_a_layer_are_ready_together() -> None:
    step = workload("vgg16@v100")
    assert step.gradient_bytes[:2].tolist() == [4_000, 16_384_000]
    assert step.gradient_ready_ns[0] == step.gradient_ready_ns[1] < step.gradient_ready_ns[2]


@pytest.mark.parametrize("model", ["resnet50", "resnet101"])
def test_the_downsample_branch_comes_back_before_the_main_branch(model: str) -> None:
    names = [n for n in workload(f"{model}@v100").gradient_names if n.startswith("layer3.0.")]
    assert [name.removeprefix("layer3.0.") for name in names] == [
        *("downsample.1.bias", "downsample.1.weight", "downsample.0.weight"),
        *("bn3.bias", "bn3.weight", "conv3.weight"),
        *("bn2.bias", "bn2.weight", "conv2.weight"),
        *("bn1.bias", "bn1.weight", "conv1.weight"),
    ]


@pytest.mark.parametrize(
    ("model", "tied", "tied_bytes"),
    [
        ("bert-large", "bert.embeddings.word_embeddings.weight", 4 * 30522 * 1024),
        ("gpt2", "transformer.wte.weight", 4 * 50257 * 768),
    ],
)
def test_tied_embeddings_are_sent_once_and_last(model: str, tied: str, tied_bytes: int) -> None:
    step = workload(f"{model}@v100")
    assert step.gradient_names[-1] == tied
    assert step.gradient_bytes[-1] == tied_bytes
    assert sum(step.gradient_bytes == tied_bytes) == 1


def test_names_are_those_of_a_state_dict() -> None:
    assert "layer1.0.conv1.weight" in workload("resnet50@v100").gradient_names
    assert "layer3.22.bn3.bias" in workload("resnet101@v100").gradient_names
    assert "features.28.weight" in workload("vgg16@v100").gradient_names
    bert = workload("bert-large@v100").gradient_names
    assert "bert.encoder.layer.23.output.dense.weight" in bert
    assert "cls.predictions.bias" in bert
    assert "transformer.h.0.attn.c_attn.weight" in workload("gpt2@v100").gradient_names


@pytest.mark.parametrize("model", MODELS)
def test_a_newer_device_is_faster_in_every_part(model: str) -> None:
    steps = [workload(f"{model}@{device}") for device in ("v100", "a100", "h100", "h200")]
    for older, newer in pairwise(steps):
        assert older.forward_ns > newer.forward_ns
        assert older.backward_ns > newer.backward_ns
        assert older.optimizer_ns > newer.optimizer_ns


def test_a_batch_is_part_of_the_name() -> None:
    usual, asked = workload("resnet50@v100"), workload("resnet50@v100:64")
    assert (usual.batch, asked.batch) == ("32 images of 224 x 224", "64 images of 224 x 224")
    assert asked.name == "resnet50@v100:64"
    assert workload("resnet50@v100:32").name == "resnet50@v100"
    assert workload("llama3-8b@h100").batch == "1 sequence of 8192"
    assert asked.backward_ns / usual.backward_ns == pytest.approx(2, rel=1e-3)
    assert asked.optimizer_ns == usual.optimizer_ns
    assert asked.gradient_bytes.tolist() == usual.gradient_bytes.tolist()
    assert asked.memory.activations == 2 * usual.memory.activations


@pytest.mark.parametrize("name", ["vgg16@v100:", "vgg16@v100:0", "vgg16@v100:-2", "vgg16@v100:1e3"])
def test_a_batch_that_cannot_be_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="batch: expected a whole number of samples from 1"):
        workload(name)


def test_memory_is_what_the_parts_add_up_to() -> None:
    load = workload("llama3-8b@t4")
    count, memory = 8_030_261_248, load.memory
    # autocast holds 16-bit copies beside the weights; AdamW has two values for each of them
    parts = (memory.weights, memory.gradients, memory.optimizer)
    assert parts == (6 * count, 4 * count, 8 * count)
    assert memory.needed == sum(parts) + memory.activations
    assert (memory.device, memory.fits, memory.largest_batch) == (16_000_000_000, False, 0)
    full = workload("vgg16@v100").memory
    parts = (full.weights, full.gradients, full.optimizer)
    assert parts == (4 * 138_357_544, 4 * 138_357_544, 4 * 138_357_544)


@pytest.mark.parametrize("name", ["resnet50@v100", "gpt2-xl@a100", "bert-large@t4"])
def test_the_largest_batch_fits_and_one_more_does_not(name: str) -> None:
    most = workload(name).memory.largest_batch
    assert workload(f"{name}:{most}").memory.fits
    assert not workload(f"{name}:{most + 1}").memory.fits


def memory_of(load: Workload) -> str:
    return sentence(memory_finding(load))


def test_what_does_not_fit_says_so_with_the_figures_and_what_would() -> None:
    said = memory_of(workload("llama3-8b@t4"))
    assert said.startswith(
        "llama3-8b@t4 does not fit: it needs at least 203.7 GB (weights 48.18 GB"
    )
    assert (
        "NVIDIA T4 16 GB has 16 GB. No batch fits: parameters, gradients and optimizer "
        "alone take 144.5 GB" in said
    )
    assert "activations of one sample alone take 59.16 GB" in said
    assert "over 7 of these devices a batch of 1 would fit" in memory_of(workload("llama3-8b@h100"))
    said = memory_of(workload("gpt2-xl@a100:32"))
    assert "A batch of up to 17 would fit." in said
    assert said.endswith("With this batch it fits on: h200.")
    assert "It fits, as would a batch of" in memory_of(workload("vgg16@v100"))
    warnings = fw.whatif("llama3-8b@t4", workers=8, bandwidth="10Gbps").warnings
    assert any(each.startswith("llama3-8b@t4 does not fit") for each in warnings)


def test_the_mit_study_comes_out_of_the_models(shared_data: Path) -> None:
    """Farhat and Ghobadi measured bytes of every flow and iteration: a ring among 16 GPUs."""
    measured = json.loads((shared_data / "farhat" / "anchors.json").read_text())["models"]
    assert sorted(measured) == ["densenet121", "inceptionv3", "mobilenet", "resnet50", "vgg19"]
    for model, found in measured.items():
        sizes = workload(f"{model}@v100").gradient_bytes
        sent = cost("allreduce", "ring", found["n_gpus"], sizes, AddTimes()).sent_bytes.sum()
        assert sent == pytest.approx(found["flow_bytes_per_iter_median"], rel=2e-3), model


def test_the_backward_is_about_twice_the_forward() -> None:
    for name in workloads.names():
        assert 1.6 < workload(name).backward_ns / workload(name).forward_ns < 2.2


@pytest.mark.parametrize("name", ["", "vgg16", "vgg16@", "@v100", "vgg99@v100", "vgg16@tpu"])
def test_an_unknown_name_is_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(UsageError) as refusal:
        workload(name)
    for known in (*MODELS, *DEVICES):
        assert known in str(refusal.value)
    assert repr(name) in str(refusal.value)


@needs_netx
@pytest.mark.parametrize(
    ("label", "log"), [("vgg16", "vgg16"), ("vgg16 +bn", "vgg16"), ("resnet50", "resnet50")]
)
def test_the_docstring_states_the_deviation_from_the_v100(label: str, log: str) -> None:
    step = step_on_v100(label)
    measured_backward_ms = measured_ready_ms(log)[-1]
    row = (
        f"    {label:<12}"
        f"{deviation(step.backward_ns / 1e6, measured_backward_ms)}   "
        f"{deviation(step.step_ns / 1e6, MEASURED_STEP_MS[log])}\n"
    )
    assert row in str(workloads.__doc__)


@needs_netx
@pytest.mark.parametrize(("label", "log"), [("vgg16 +bn", "vgg16"), ("resnet50", "resnet50")])
def test_sizes_and_order_are_those_that_were_measured(label: str, log: str) -> None:
    assert step_on_v100(label).gradient_bytes.tolist() == measured_bytes(log)


@needs_netx
@pytest.mark.parametrize(
    ("label", "log", "early_ms", "late_ms"),
    [("vgg16 +bn", "vgg16", -3, 28), ("resnet50", "resnet50", -4, 4)],
)
def test_gradients_are_ready_as_near_to_the_measurement_as_the_docstring_says(
    label: str, log: str, early_ms: float, late_ms: float
) -> None:
    late = step_on_v100(label).gradient_ready_ns / 1e6 - measured_ready_ms(log)
    assert early_ms <= late.min()
    assert late.max() <= late_ms


def deviation(modelled_ms: float, measured_ms: float) -> str:
    percent = 100 * (modelled_ms / measured_ms - 1)
    return f"{modelled_ms:7.1f} {measured_ms:7.1f} {percent:+5.0f} %"


def step_on_v100(label: str) -> workloads.Workload:
    if label == "vgg16 +bn":
        model = with_batch_norms(MODELS["vgg16"])
        return workloads._on_device(model, DEVICES["v100"], model.samples)
    return workload(f"{label}@v100")


def with_batch_norms(vgg: Model) -> Model:
    """Return the measured network: a batch norm between each convolution and its ReLU."""
    return replace(vgg, layers=tuple(layers_with_batch_norms(vgg)))


def layers_with_batch_norms(vgg: Model) -> Iterator[Layer]:
    for layer, following in zip(vgg.layers, (*vgg.layers[1:], None), strict=True):
        yield layer
        if layer.name.startswith("features.") and layer.parameters and following:
            channels = layer.parameters[0].size
            values = following.forward.activation_values // 2  # a ReLU reads and writes each once
            bias, weight = (Parameter(f"{layer.name}.bn.{k}", channels) for k in ("bias", "weight"))
            yield Layer(
                f"{layer.name}.bn", Work(0, 3 * values), Work(0, 5 * values), (bias, weight)
            )


def measured_ready_ms(log: str) -> NDArray[np.float64]:
    return np.cumsum([wait_us / 1e3 for wait_us, _ in measured(log)])


def measured_bytes(log: str) -> list[int]:
    return [gradient_bytes for _, gradient_bytes in measured(log)]


def measured(log: str) -> list[tuple[float, int]]:
    with (NETX / f"{log}.bk.log").open() as lines:
        rows = list(csv.reader(lines))[3:]
    return [(float(wait_us), int(gradient_bytes)) for wait_us, gradient_bytes in rows]


def test_a_transformer_of_plan_is_a_workload_with_all_its_parameters() -> None:
    from fullwire.workloads.architecture_files import architecture

    for name in ("llama3.1-405b", "gpt3-175b", "deepseek-v3", "qwen3-30b-a3b", "bloom-7b1"):
        load = workload(f"{name}@b200")
        assert load.model.parameter_count == architecture(name).parameters
    small, large = workload("llama3-70b@h100"), workload("llama3-70b@h100:2")
    assert large.forward_ns > 1.9 * small.forward_ns
    ours, same = workload("llama3-8b@h100"), workload("llama3.1-8b@h100")  # one of each kind
    assert same.gradient_bytes.sum() == ours.gradient_bytes.sum()
    answer = fw.whatif("mixtral-8x7b@gb200", workers=8, bandwidth="400Gbps")
    assert answer["step_s"].min() > 0
    with pytest.raises(UsageError, match="and those of `fullwire plan` such as llama3-70b"):
        workload("llama9-1b@h100")
