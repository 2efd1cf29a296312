"""Wire formats: packing to the same bits on every processor, and sums that are rounded once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs PyTorch: pip install torch")

from fullwire import _native
from fullwire.errors import TransportError
from fullwire.transport import programs
from fullwire.transport.programs import Links
from fullwire.transport.wire import FORMATS, Wire, agreed, pays
from tests import transport_ranks as ranks
from tests.transport.test_transport import DamagedLine, Mesh, in_processes, in_threads

PLAIN, AVX2, AVX512, BEST = range(4)
SUM, FLOAT32 = 0, 0
PACKED = ("bf16", "fp16", "int8")
# Of the mean of gaussian gradients, for 2 to 32 workers.
MOST_ERROR = {"bf16": 2.4e-3, "fp16": 3.6e-4, "int8": 1.05e-2}
SPECIALS = np.array(
    [0.0, -0.0, math.inf, -math.inf, math.nan, -math.nan, 1e-45, -1e-45, 1e-40, 6e-8, 3e-8, 65504,
     65519.996, 65520, 1e5, 3.4028235e38, -3.4028235e38, 1.00390625, 1.01171875, 2049, 2051, 0.5],
    np.float32,
)  # fmt: skip
# Each case takes both roads of every kernel: whole vectors, and what is left of them.
CASES: dict[str, Any] = {
    "gaussian": np.random.default_rng(1).standard_normal(5003).astype(np.float32),
    "any bits": np.random.default_rng(2).integers(0, 2**32, 5003, np.uint32).view(np.float32),
    "specials": np.resize(SPECIALS, 1000),
    "one special": np.r_[np.ones(300, np.float32), SPECIALS[2:3], np.ones(300, np.float32)],
    "ties": (0x3F800000 + 0x800 * np.arange(4000)).astype(np.uint32).view(np.float32),
    "subnormals": np.linspace(-7e-43, 7e-43, 1000).astype(np.float32),
    "zeros": np.zeros(700, np.float32),
    "all infinite": np.full(300, math.inf, np.float32),
    "none": np.zeros(0, np.float32),
}


def packed(name: str, values: Any, instructions: int = BEST) -> tuple[Any, bool]:
    code = FORMATS[name]
    there = np.zeros(_native.packed_bytes(code, len(values)), np.uint8)
    return there, _native.pack_numbers(code, values, there, instructions)


def unpacked(name: str, there: Any, own: Any, *, adds: bool, instructions: int = BEST) -> Any:
    values = own.copy()
    _native.unpack_numbers(FORMATS[name], there, values, adds, instructions)
    return values


@pytest.mark.parametrize("instructions", [AVX2, AVX512, BEST])
@pytest.mark.parametrize("name", FORMATS)
def test_every_kind_of_processor_packs_to_the_same_bits(name: str, instructions: int) -> None:
    for case, values in CASES.items():
        plain, plain_fits = packed(name, values, PLAIN)
        there, fits = packed(name, values, instructions)
        assert fits == plain_fits, case
        np.testing.assert_array_equal(there, plain, case)
        for adds in (False, True):
            own = np.ones(len(values), np.float32)
            expected = unpacked(name, plain, own, adds=adds, instructions=PLAIN)
            found = unpacked(name, plain, own, adds=adds, instructions=instructions)
            np.testing.assert_array_equal(found.view(np.uint32), expected.view(np.uint32), case)


@pytest.mark.parametrize("name", PACKED)
def test_what_is_not_finite_arrives_as_it_is(name: str) -> None:
    for case, values in CASES.items():
        there, fits = packed(name, values)
        found = unpacked(name, there, np.zeros_like(values), adds=False)
        np.testing.assert_array_equal(np.isnan(found), np.isnan(values), case)
        is_infinite = np.isinf(values)
        np.testing.assert_array_equal(found[is_infinite], values[is_infinite], case)
        has_finite_only = not (np.isinf(found) & np.isfinite(values)).any()
        # bf16 rounds the largest floats up to infinity, as torch does.
        assert has_finite_only or not fits or name == "bf16", case


def test_bf16_and_fp16_round_as_torch_does() -> None:
    import torch

    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        for case, values in CASES.items():
            number = values[~np.isnan(values)]
            there, _ = packed(name, number)
            expected = torch.from_numpy(number.copy()).to(dtype).view(torch.int16).numpy()
            np.testing.assert_array_equal(there.view(np.int16), expected, case)


def test_int8_is_off_by_half_a_step_at_most() -> None:
    for case in ("gaussian", "ties", "subnormals", "zeros"):
        values = CASES[case]
        there, _ = packed("int8", values)
        found = unpacked("int8", there, np.zeros_like(values), adds=False)
        for first in range(0, len(values), 256):
            block = slice(first, first + 256)
            step = np.abs(values[block]).max() / 127 + 1e-45  # the last digit of a subnormal
            assert np.abs(found[block] - values[block]).max() <= 0.5001 * step, case


def test_fp16_says_what_is_beyond_its_range() -> None:
    for largest, expected in ((65519.0, True), (65520.0, False), (math.inf, True)):
        for place in (0, 999):
            values = np.ones(1000, np.float32)
            values[place] = -largest
            assert packed("fp16", values)[1] is expected


# ---- Collectives ----


@pytest.fixture
def mesh() -> Iterator[Callable[..., Mesh]]:
    made: list[Mesh] = []

    def make(size: int, **how: Any) -> Mesh:
        made.append(Mesh(size, **how))
        return made[-1]

    yield make
    for each in made:
        each.close()


def carried(
    made: Mesh, kind: str, source: list[list[Any]], work: list[list[Any]], name: str, **how: Any
) -> list[Any]:
    """Carry a collective out in a wire format, on every rank's blocks; return the tasks."""
    stated: dict[str, Callable[[int, int], Any]] = {
        "allreduce": programs.packed_allreduce,
        "allgather": partial(programs.allgather, small=True),
        "reducescatter": partial(programs.reducescatter, small=True),
    }
    program = stated[kind]

    def one(rank: int) -> Any:
        def places(blocks: list[Any]) -> list[tuple[int, int]]:
            return [(block.ctypes.data, block.nbytes) for block in blocks]

        task = made.engines[rank].collective(
            how.get("description", f"{kind} as {name}"),
            program(made.size, rank),
            places(source[rank]),
            places(work[rank]),
            None if kind == "allgather" else SUM,
            FLOAT32,
            how.get("divide_by", 1),
            30.0,
            rank % 2 == 0,
            FORMATS[name],
            how.get("most_error", math.inf),
        )
        made.engines[rank].wait(task, 30.0)
        assert task.is_done
        return task

    return in_threads([partial(one, rank) for rank in range(made.size)])


def reduced(made: Mesh, arrays: list[Any], name: str, **how: Any) -> list[Any]:
    blocks = [[array] for array in arrays]
    return carried(made, "allreduce", blocks, blocks, name, **how)


def gaussian(workers: int, count: int) -> list[Any]:
    generator = np.random.default_rng(workers)
    return [generator.standard_normal(count).astype(np.float32) for _ in range(workers)]


def relative_error(found: Any, expected: Any) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


@pytest.mark.parametrize("workers", [2, 5, 32])
@pytest.mark.parametrize("name", PACKED)
def test_a_mean_is_rounded_once_whatever_the_number_of_workers(
    mesh: Any, name: str, workers: int
) -> None:
    arrays = gaussian(workers, 100_003)
    expected = np.mean(arrays, axis=0, dtype=np.float64)
    tasks = reduced(mesh(workers), arrays, name, divide_by=workers)
    assert [task.problem for task in tasks] == [None] * workers
    assert relative_error(arrays[0], expected) <= MOST_ERROR[name]
    for array in arrays[1:]:
        np.testing.assert_array_equal(array.view(np.uint32), arrays[0].view(np.uint32))


@pytest.mark.parametrize("name", PACKED)
def test_what_is_gathered_is_the_same_on_all_ranks(mesh: Any, name: str) -> None:
    made = mesh(3)
    given = gaussian(3, 70_001)
    nothing = np.zeros(0, np.float32)
    source = [[given[r] if r == rank else nothing for r in range(3)] for rank in range(3)]
    work = [[np.zeros_like(given[0]) for _ in range(3)] for _ in range(3)]
    tasks = carried(made, "allgather", source, work, name)
    assert [task.problem for task in tasks] == [None] * 3
    for block in range(3):
        assert relative_error(work[0][block], given[block]) <= MOST_ERROR[name]
        for rank in range(3):
            np.testing.assert_array_equal(work[rank][block], work[0][block])


@pytest.mark.parametrize("name", PACKED)
def test_a_reduced_part_stays_as_exact_as_the_sum(mesh: Any, name: str) -> None:
    made = mesh(3)
    given = [gaussian(3 + rank, 40_003)[:3] for rank in range(3)]
    nothing = np.zeros(0, np.float32)
    result = [np.zeros(40_003, np.float32) for _ in range(3)]
    work = [[result[rank] if r == rank else nothing for r in range(3)] for rank in range(3)]
    tasks = carried(made, "reducescatter", given, work, name)
    assert [task.problem for task in tasks] == [None] * 3
    for rank in range(3):
        expected = np.sum([given[other][rank] for other in range(3)], axis=0, dtype=np.float64)
        assert relative_error(result[rank], expected) <= MOST_ERROR[name]


@pytest.mark.parametrize("name", PACKED)
def test_sums_of_what_is_not_finite(mesh: Any, name: str) -> None:
    made = mesh(2)
    for one, other, expected in (
        (math.inf, 1.0, math.inf),
        (-math.inf, 1.0, -math.inf),
        (math.inf, -math.inf, math.nan),
        (math.nan, 1.0, math.nan),
        (2e-39, 0.0, 0.0 if name == "fp16" else None),
        (0.0, 0.0, 0.0),
    ):
        arrays = [np.full(999, one, np.float32), np.full(999, other, np.float32)]
        assert [task.problem for task in reduced(made, arrays, name)] == [None] * 2
        np.testing.assert_array_equal(arrays[0].view(np.uint32), arrays[1].view(np.uint32))
        if expected is None:
            np.testing.assert_allclose(arrays[0], one, rtol=0.03)
        else:
            np.testing.assert_array_equal(arrays[0], np.float32(expected))


def test_a_sum_beyond_fp16_goes_as_bf16_and_is_counted(mesh: Any) -> None:
    arrays = [np.full(100_000, 4e4, np.float32) for _ in range(2)]
    arrays[0][-1] = 1e5  # the second block alone is too large on its way to its owner
    tasks = reduced(mesh(2), arrays, "fp16")
    np.testing.assert_allclose(arrays[0][:-1], 8e4, rtol=4e-3)
    np.testing.assert_allclose(arrays[0][-1], 1.4e5, rtol=4e-3)
    np.testing.assert_array_equal(arrays[0], arrays[1])
    chunks, beyond = np.sum([task.rounding[1:] for task in tasks], axis=0)
    assert beyond == chunks / 2 + 1  # every sum, and one contribution


def test_sizes_that_blocks_do_not_divide_and_several_streams(mesh: Any) -> None:
    made = mesh(3, more=[None, None])
    for count in (1, 2, 3, 255, 257, 769, 300_007):
        arrays = [np.full(count, rank + 1, np.float32) for rank in range(3)]
        assert [task.problem for task in reduced(made, arrays, "int8")] == [None] * 3
        for array in arrays:
            np.testing.assert_allclose(array, 6, rtol=1e-6)


def test_too_large_an_error_makes_all_ranks_fall_back_together(mesh: Any) -> None:
    made = mesh(3)
    for collective in range(3):
        arrays = gaussian(3, 30_001)
        expected = np.sum(arrays, axis=0)
        tasks = reduced(made, arrays, "int8", most_error=1e-7, description=f"sum {collective}")
        assert [task.problem for task in tasks] == [None] * 3
        for array in arrays:
            np.testing.assert_array_equal(array, arrays[0])
        is_exact = bool(np.allclose(arrays[0], expected, rtol=1e-5, atol=1e-5))
        assert is_exact == (collective > 0)
        assert [engine.fallen_back_after for engine in made.engines] == ["sum 0"] * 3
        assert all((task.rounding[0] > 0) == (collective == 0) for task in tasks)


def test_what_a_reduce_scatter_loses_is_told_in_the_next_gather(mesh: Any) -> None:
    made = mesh(2)
    given = [gaussian(rank, 5000)[:2] for rank in (2, 3)]
    nothing, results = np.zeros(0, np.float32), [np.zeros(5000, np.float32) for _ in range(2)]
    work = [[results[0], nothing], [nothing, results[1]]]
    carried(made, "reducescatter", given, work, "int8", most_error=1e-7)
    assert [engine.fallen_back_after for engine in made.engines] == [""] * 2
    zeros = [np.zeros(5000, np.float32) for _ in range(2)]
    reduced(made, zeros, "int8", most_error=1e-7, description="of zeros")
    assert [engine.fallen_back_after for engine in made.engines] == ["of zeros"] * 2


@pytest.mark.parametrize(("position", "words"), [(48, "a chunk in wire format"), (60_000, "")])
def test_a_damaged_chunk_ends_the_group_with_the_name_of_its_sender(
    mesh: Any, position: int, words: str
) -> None:
    """Byte 48 is the format that a chunk says; without a checksum no more can be noticed."""
    line = DamagedLine(position)
    made = mesh(2, pair=line.pair, checks=not words)
    arrays = [np.ones(100_000, np.float32) for _ in range(2)]
    problems = [task.problem for task in reduced(made, arrays, "bf16")]
    expected = words or "bytes that were damaged on the way"
    assert all(problem and f"0 sent rank 1 {expected}" in problem for problem in problems)
    for engine in made.engines:
        engine.close()
    line.join()


def test_ranks_with_two_formats_find_out(mesh: Any) -> None:
    made = mesh(2)
    arrays = [np.ones(100_000, np.float32) for _ in range(2)]

    def one(rank: int) -> Any:
        place = [(arrays[rank].ctypes.data, arrays[rank].nbytes)]
        name = ("bf16", "fp16")[rank]
        task = made.engines[rank].collective(
            f"all_reduce as {name}",
            programs.packed_allreduce(2, rank),
            place,
            place,
            SUM,
            FLOAT32,
            1,
            30.0,
            False,
            FORMATS[name],
            math.inf,
        )
        made.engines[rank].wait(task, 30.0)
        return task.problem

    for problem in in_threads([partial(one, rank) for rank in range(2)]):
        assert "rank 0 called all_reduce as bf16; rank 1 called all_reduce as fp16" in problem


def test_small_tensors_of_many_workers_stay_float32() -> None:
    slow, fast = Links(rate_bps=1e9, latency_s=5e-5), Links(rate_bps=1e10, latency_s=5e-5)
    assert pays(4, 2**16, "bf16", slow)
    assert pays(32, 2**17, "bf16", slow)
    assert not pays(32, 2**17, "bf16", fast)
    assert pays(32, 2**20 + 4, "bf16", fast)
    for workers in (2, 4, 32):
        for links in (slow, fast):
            is_worth = [pays(workers, 2**power, "int8", links) for power in range(10, 24)]
            assert is_worth == sorted(is_worth), "what is worth it stays so in larger tensors"


def test_a_choice_is_about_large_float32_tensors() -> None:
    wire = Wire(4, Links(rate_bps=1e9, latency_s=5e-5), "int8", tells=False)
    large = 2**20
    assert wire.packing("float32", large, 4 * large, "AVG") == ("int8", 1e-2)
    assert wire.packing("float32", large, 4 * large, "MAX") is None
    assert wire.packing("float64", large, 8 * large, "SUM") is None
    assert wire.packing("float32", 0, 0, "SUM") is None
    assert wire.packing("float32", 1000, 4000, "SUM") is None
    assert replace(wire, workers=1).packing("float32", large, 4 * large, "SUM") is None
    assert replace(wire, name="auto").packing("float32", large, 4 * large, "SUM") is None
    of_one_size = replace(wire, by_numbers={large: "float32"})
    assert of_one_size.packing("float32", large, 4 * large, "SUM") is None


def test_what_travels_unchanged_is_named_once_on_one_rank(
    capsys: pytest.CaptureFixture[str],
) -> None:
    links = Links(rate_bps=1e9, latency_s=5e-5)
    for tells in (True, False):
        wire = Wire(4, links, "bf16", tells=tells)
        for kind in ("int64", "int32", "complex64", "float64", "bfloat16") * 2:
            assert wire.packing(kind, 2**20, 2**22, "SUM") is None
    *lines, last = capsys.readouterr().err.splitlines()
    named = [line.split()[1] for line in (*lines, last)]
    assert named == ["int64", "int32", "complex64", "float64", "bfloat16"]
    assert last == ("fullwire: bfloat16 travels unchanged. Sums and gathers of float32 go as bf16")


def test_a_world_of_one_and_empty_tensors_travel_as_they_are() -> None:
    links = Links(rate_bps=1e9, latency_s=5e-5)
    for name in (*PACKED, "auto"):
        assert Wire(1, links, name, automatic_from=0).packing("float32", 9, 2**22, "SUM") is None
        assert Wire(4, links, name, 0, automatic_from=0).packing("float32", 0, 0, "SUM") is None


def test_ranks_whose_version_knows_another_format_get_no_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FULLWIRE_WIRE", "bf16")
    trials = SimpleNamespace(most=lambda *own: (9.0, -1.0, 0.0, 0.0))
    with pytest.raises(TransportError, match=r"got bf16 and a format that rank's version alone"):
        agreed(trials, 2, Links(rate_bps=1e9, latency_s=5e-5))


def test_an_unknown_format_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FULLWIRE_WIRE", "fp8")
    with pytest.raises(
        TransportError, match="expected float32, bf16, fp16, int8 or auto, got 'fp8'"
    ):
        agreed(None, 2, Links(rate_bps=1e9, latency_s=5e-5))


# ---- Torch ----


def test_a_job_in_bf16_rounds_once_and_keeps_its_ranks_equal() -> None:
    first, *others = in_processes(ranks.in_a_wire_format, 3)
    for told in (first, *others):
        assert told["error"] <= MOST_ERROR["bf16"]
        assert told["is rounded"]
        assert told["exact"] < 1e-12, "float64 travels unchanged"
        assert told["complex"] < 1e-5, "complex numbers travel unchanged"
        assert told["integers"]
        assert told["small"] < 1e-6, "a small tensor travels unchanged"
        assert told["part"] < 0.02
        assert told["fallen back"]
        assert told["was rounded before"]
        assert told["bits"] == first["bits"]


def test_norm_layers_and_biases_of_ddp_travel_as_float32_and_matrices_packed() -> None:
    for told in in_processes(ranks.sparing_small_gradients, 2):
        for what, are_rounded in told.items():
            kind, how = what.split(", ")
            is_packed = how != "float32" and (kind == "large" or how == "with packs_small")
            assert set(are_rounded) == {is_packed}, what


def test_a_rank_without_inputs_knows_what_lies_in_the_buckets_too() -> None:
    first, second = in_processes(ranks.joining_with_no_inputs, 2)
    assert first == second


def test_ranks_that_ask_for_two_formats_get_no_group() -> None:
    for problem in in_processes(partial(ranks.failing, ranks.in_two_wire_formats), 2):
        assert problem == "FULLWIRE_WIRE: expected the same on every rank, got bf16 and int8"


def test_ranks_that_call_for_two_formats_are_told_both() -> None:
    role = partial(ranks.failing, ranks.calling_for_two_wire_formats)
    for problem in in_processes(role, 2):
        for rank, name in enumerate(("bf16", "int8")):
            assert f"rank {rank} called all_reduce(SUM) of 50000 float32 as {name}" in problem


def test_auto_makes_the_same_choice_on_every_rank() -> None:
    assert len(set(in_processes(ranks.automatically, 2))) == 1
