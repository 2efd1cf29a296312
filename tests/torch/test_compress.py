"""Codecs on real gradients: under DDP on two backends, and packing alone."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from fullwire.compression.codec import CODECS, parse_choice
from fullwire.compression.method import Bucket
from tests.ports import held_port
from tests.torch.test_record import JOBS, UNCOMPILED, needs_torch

torch = pytest.importorskip("torch", reason="needs PyTorch: pip install torch")


pytestmark = needs_torch
RANKS = 3
PACKING = [key for key, codec in CODECS.items() if codec.method is not None]
SENT = ("bf16", "fp16", "int8")
WITH_FEEDBACK = ("onebit", "powersgd:rank=2", "topk:density=0.1")
# The relative error of the mean of three ranks' gaussian gradients.
MOST_ERROR = {"bf16": 2.4e-3, "fp16": 3.6e-4, "int8": 1.05e-2}


@pytest.fixture(scope="module", params=["gloo", "fullwire"])
def trained(request: pytest.FixtureRequest) -> Mapping[str, Any]:
    """Train with every codec on one backend, and return what came of it."""
    with held_port() as port:
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(RANKS)}
        command = [sys.executable, UNCOMPILED, str(JOBS / "compressed.py"), request.param]
        command += [*SENT, *WITH_FEEDBACK]
        ranks = [
            subprocess.Popen(
                command,
                env={**os.environ, **place, "RANK": str(rank), "OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(RANKS)
        ]
        try:
            said = [process.communicate(timeout=240) for process in ranks]
        finally:
            for process in ranks:
                process.kill()
                process.wait()
    assert [process.returncode for process in ranks] == [0] * RANKS, said
    found: dict[str, Any] = json.loads(said[0][0])
    return {**found, "said": said[0][1]}


def test_every_codec_that_packs_is_trained_with() -> None:
    trained_with = {choice.partition(":")[0] for choice in (*SENT, *WITH_FEEDBACK)}
    assert trained_with == set(PACKING), "add the codec to SENT or WITH_FEEDBACK of this file"
    assert set(SENT) == set(MOST_ERROR)


def test_every_rank_holds_equal_bits_also_after_a_rank_has_left(trained: Mapping[str, Any]) -> None:
    for codec in (*SENT, *WITH_FEEDBACK):
        assert trained[codec]["equal"], codec
        assert trained[codec]["fewer"], codec


def test_formats_round_little_and_feedback_loses_nothing(trained: Mapping[str, Any]) -> None:
    for codec in SENT:
        assert 0 < trained[codec]["error"] < MOST_ERROR[codec], codec
    for codec in WITH_FEEDBACK:  # What was sent and what is kept is what was given.
        assert trained[codec]["error"] < 1e-6, codec
        assert 0 < trained[codec]["unsent_norm"] < 2, codec


def test_norm_layers_biases_and_small_gradients_travel_as_float32_whatever_their_bucket(
    trained: Mapping[str, Any],
) -> None:
    assert all(error < 1e-6 for error in trained["small"].values()), trained["small"]
    assert trained["small packed"] > 1e-4


def test_a_checkpoint_continues_with_the_same_bits(trained: Mapping[str, Any]) -> None:
    assert all(trained[codec]["same"] for codec in (*SENT, *WITH_FEEDBACK))


def test_passes_without_communication_are_sent_with_the_last(trained: Mapping[str, Any]) -> None:
    for codec in SENT:
        assert trained[codec]["similarity"] > min(0.999, 1 - MOST_ERROR[codec] ** 2)
    for codec in WITH_FEEDBACK:
        assert trained[codec]["similarity"] > 0.2


def test_inf_and_nan_arrive_and_are_forgotten(trained: Mapping[str, Any]) -> None:
    for codec in ("bf16", "fp16", "int8", "onebit", "powersgd", "topk:density=0.1"):
        assert trained["specials"][codec] == [True, True, True, True], codec


def test_values_too_large_for_float16_are_sent_as_bfloat16_and_counted(
    trained: Mapping[str, Any],
) -> None:
    error, widened = trained["specials"]["large"]
    assert error < 2.4e-3
    assert widened > 0


def test_the_guard_stops_a_codec_on_all_ranks_and_says_so_once(trained: Mapping[str, Any]) -> None:
    assert trained["guarded"] == [True, True, True]
    assert trained["said"].count("compression topk:density=0.1 stops after step 1") == 1


def test_ranks_with_two_choices_are_told_both_before_they_send(trained: Mapping[str, Any]) -> None:
    told = "compress: expected the same on every rank, got "
    for what, own, other in (
        ("two limits", "int8 with max_error=0.1,", "int8 with max_error=1.1,"),
        ("two codecs", "bf16 with max_error=0.0001,", "int8 with max_error=0.01,"),
    ):
        problem = trained[what]
        assert told + own in problem, problem
        assert f" on rank 0 and {other}" in problem, problem


def test_a_world_of_one_loses_nothing(trained: Mapping[str, Any]) -> None:
    assert trained["alone"]


def test_a_rank_that_is_new_goes_on_in_the_steps_of_the_others(trained: Mapping[str, Any]) -> None:
    assert trained["new rank"] == [True, 4, [1, 3]]


def test_unused_parameters_and_other_types_are_no_problem(trained: Mapping[str, Any]) -> None:
    assert trained["unused"]
    assert trained["doubles"]
    assert trained["complex"]
    assert trained["said"].count("leaves gradients of torch.float64 as they are") == 1
    assert trained["said"].count("leaves gradients of torch.complex64 as they are") == 1


def test_mistakes_are_refused_with_what_was_expected(trained: Mapping[str, Any]) -> None:
    kind, name, limit, second = trained["refused"]
    assert kind == "compress: expected a DistributedDataParallel, got Linear"
    assert name.endswith("got 'powersdg'; did you mean powersgd?")
    assert limit == "compress: max_error: expected a number above 0, got 0"
    assert "got one with fullwire.compress(bf16): torch allows one hook" in second


class Threads:
    """A group whose ranks are threads, with the collectives that codecs use."""

    def __init__(self, size: int) -> None:
        self.size, self.here = size, threading.local()
        self._barrier, self._given = threading.Barrier(size), [None] * size

    def everyones(self, tensor: Any) -> list[Any]:
        self._given[self.here.rank] = tensor.clone()
        self._barrier.wait()
        given = list(self._given)
        self._barrier.wait()
        return given

    def patch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        dist = torch.distributed
        monkeypatch.setattr(dist, "get_world_size", lambda group: self.size)
        monkeypatch.setattr(dist, "get_rank", lambda group: self.here.rank)
        monkeypatch.setattr(dist, "all_to_all_single", self.all_to_all)
        monkeypatch.setattr(dist, "all_gather_single", self.all_gather, raising=False)

    def all_to_all(self, out: Any, given: Any, group: Any) -> None:
        out.copy_(torch.stack([rows[self.here.rank] for rows in self.everyones(given)]))

    def all_gather(self, out: Any, given: Any, group: Any) -> None:
        out.copy_(torch.cat(self.everyones(given)))


@pytest.mark.parametrize("workers", [2, 8, 32])
@pytest.mark.parametrize("codec", SENT)
def test_the_error_of_the_mean_does_not_grow_with_workers(
    codec: str, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    group, size = Threads(workers), 32 * 1024 - 7
    group.patch(monkeypatch)
    gradients = [
        torch.randn(size, generator=torch.Generator().manual_seed(rank)) for rank in range(workers)
    ]
    mean = sum(gradient.double() for gradient in gradients) / workers

    def average(rank: int) -> Any:
        group.here.rank = rank
        values = gradients[rank].clone()
        bucket = Bucket(values=values, gradients=[values], names=("all",), error=None)
        parse_choice(codec).method().average(bucket, group)
        return values

    with ThreadPoolExecutor(workers) as pool:
        results = list(pool.map(average, range(workers)))
    assert all(bool((result == results[0]).all()) for result in results)
    assert float((results[0] - mean).norm() / mean.norm()) < MOST_ERROR[codec]


def test_on_gloo_a_rank_is_ready_to_receive_before_it_sends() -> None:
    """Gloo sends the word that a rank is ready behind the data that the rank sends first."""
    posted: list[tuple[str, int]] = []

    class Gloo:
        def __getattr__(self, name: str) -> Any:
            def post(tensors: Any, other: int, tag: int) -> Any:
                posted.append((name, other))
                if name == "recv":
                    tensors[0].fill_(other)
                return SimpleNamespace(wait=lambda: posted.append(("wait", other)))

            return post

    class Group:
        group_name = "0"
        rank, size = staticmethod(lambda: 1), staticmethod(lambda: 4)

        def _get_backend(self, _: Any) -> Any:
            return Gloo()

    from fullwire.compression.hook import ReceivesFirst

    given = torch.full((4, 5), 1, dtype=torch.uint8)
    received = torch.zeros(20, dtype=torch.uint8)
    group = ReceivesFirst(Group())
    for collective in (group.all_to_all_single, group.alltoall_base):
        posted.clear()
        collective(received, given).wait()
        kinds = [kind for kind, _ in posted]
        assert kinds == ["recv"] * 3 + ["send"] * 3 + ["wait"] * 6
        assert {other for _, other in posted[:3]} == {0, 2, 3}
        assert received.view(4, 5)[:, 0].tolist() == [0, 1, 2, 3]
    group.all_gather_single(received.zero_(), given[0]).wait()
    assert received.view(4, 5)[:, 4].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("codec", [*PACKING, "powersgd:rank=4", "topk:density=1%"])
@pytest.mark.parametrize("shape", [(300, 200), (1,), (511,), (0,), (4, 3, 7, 7)])
def test_packed_gradients_have_the_bytes_that_are_predicted(
    codec: str, shape: tuple[int, ...]
) -> None:
    method = parse_choice(codec).method()
    gradient = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    packed = method.pack(gradient)
    assert packed.dtype == torch.uint8
    assert packed.numel() == method.wire_bytes(shape)
    arrived = method.unpack(packed, shape)
    assert arrived.shape == gradient.shape
    assert float((gradient - arrived).square().sum()) <= float(gradient.square().sum())


@pytest.mark.parametrize("codec", PACKING)
@pytest.mark.parametrize("value", [0.0, 1e-40, -1e-40, 3e38])
def test_zeros_subnormals_and_the_largest_values_arrive_finite(codec: str, value: float) -> None:
    method = parse_choice(codec).method()
    gradient = torch.full((64, 64), value)
    arrived = method.unpack(method.pack(gradient), (64, 64))
    if not (codec == "powersgd" and value > 1):  # Its products of such values exceed float32.
        assert bool(arrived.isfinite().all())
    if value == 0:
        assert not bool(arrived.any())


def test_the_sampled_search_finds_the_largest_values() -> None:
    method = parse_choice("topk:density=0.01").method()
    gradient = torch.randn(2**19, generator=torch.Generator().manual_seed(2))
    arrived = method.unpack(method.pack(gradient), (2**19,))
    count = round(0.01 * 2**19)
    assert int((arrived != 0).sum()) == count
    least = gradient.abs().topk(count).values[-1]
    assert float(arrived[arrived != 0].abs().min()) == float(least)


def test_rounding_blocks_keeps_each_value_within_half_a_step() -> None:
    method = CODECS["int8"].method
    assert method is not None
    gradient = torch.randn(1000) * torch.logspace(-6, 6, 1000)
    arrived = method().unpack(method().pack(gradient), (1000,))
    for block, other in zip(gradient.split(256), arrived.split(256), strict=True):
        half = float(block.abs().max()) / 127 / 2
        assert float((block - other).abs().max()) <= half * (1 + 1e-5)
    assert math.isclose(float(arrived.abs().max()), float(gradient.abs().max()), rel_tol=1e-6)


ENDING = """
import time, torch
from fullwire.compression.hook import _lane

def works(_):
    for _ in range(500):
        time.sleep(0.001)

begin = torch.futures.Future()
begin.then(works)
_lane.put(begin)
"""


def test_a_job_that_ends_while_a_message_is_completed_ends_as_it_would() -> None:
    """Formerly Python ended first, and the rank aborted when its thread came back from torch."""
    command = [sys.executable, UNCOMPILED, "-c", ENDING]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
