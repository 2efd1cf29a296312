"""The table of measured runs: names of devices, gaps, refused rows, and the figures."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from validation import plan_cells, plan_rows, plans
from validation.plan_rows import device_named, read

HEADER = (
    "source_id,model,layers,hidden,ffn,heads,kv_heads,vocab,glu,seq,gbs,mbs,gpus,gpu,precision,tp,"
    "pp,vpp,dp,cp,ep,dp_mode,sp,recompute,network,step_time_s,tokens_s_gpu,config_group"
)
ROWS = (
    "a,gpt3,96,12288,49152,96,96,51200,0,2048,2048,1,512,H100-SXM-80GB,fp8,4,8,12,16,1,,zero1,1,"
    "none,8x400Gb/s,12.1,,1",
    "a,gpt3,96,12288,49152,96,96,51200,0,2048,2048,2,512,H100-SXM-80GB,fp8,4,8,6,16,,,zero1,1,"
    "none,8x400Gb/s,9.5,,2",
    "b,gpt3,96,12288,49152,96,96,51200,0,2048,2048,,512,H100,not logged,4,8,,,,,,,?,,,700,3",
    "b,gpt3,96,12288,49152,96,96,51200,0,2048,2048,1,512,Cerebras,fp8,4,8,1,16,,,,,,,12,,4",
    "b,gpt3,96,12288,49152,96,96,51200,0,2048,2048,1,512,H100,fp8,4,8,1,16,,,,,,,,,5",
    "c,,,x,,,,,,,oops,,-3,A100-80GB(Ampere),,,,,,,,,,,,inf,900,6",
)


def table(folder: Path) -> Path:
    path = folder / "runs.csv"
    path.write_text("\n".join([HEADER, *ROWS]) + "\n")
    return path


@pytest.mark.parametrize(
    ("text", "family", "memory_gb", "is_limited"),
    [
        ("H100-96GB-HBM2e-500W", "h100", 96, True),
        ("GB200/B200 184GB", "gb200", 184, False),
        ("A100-80GB(Ampere)", "a100", 80, False),
        ("A100-SXM-40GB", "a100", 40, False),
        ("TPU7x Ironwood", "tpu7x", 192, False),
        ("NVIDIA H100 80GB HBM3", "h100", 80, False),
    ],
)
def test_devices_are_recognised_as_sources_write_them(
    text: str, family: str, memory_gb: int, is_limited: bool
) -> None:
    device = device_named(text, [])
    assert device.family == family
    assert device.memory_bytes == pytest.approx(memory_gb * 1e9, rel=0.08)
    assert (device.power_share < 1) == is_limited


def test_gaps_are_assumed_and_only_two_kinds_of_rows_refused(tmp_path: Path) -> None:
    rows, refused = read(table(tmp_path))
    assert [row.source for row in rows] == ["a", "a", "b"]
    assert refused == {
        "unknown device Cerebras": 1,
        "no measured time": 1,
        "unknown model (empty)": 1,
    }
    assert set(rows[0].assumed) == {"overlap"}
    assert {"recomputation", "precision", "microbatch", "network"} <= set(rows[2].assumed)
    assert rows[2].layout.cp == 1


def test_a_pipeline_without_a_schedule_is_interleaved_since_hopper(tmp_path: Path) -> None:
    table = tmp_path / "runs.csv"
    table.write_text(
        "gpu,gpus,model,layers,hidden,seq,gbs,mbs,tp,pp,vpp,dp,precision,schedule,step_time_s\n"
        "H100,64,x,96,8192,2048,64,1,8,8,,1,bf16,,9\n"
        "H100,64,x,96,8192,2048,64,1,8,8,,1,bf16,1f1b,9\n"
        "A100-80GB,64,x,96,8192,2048,64,1,8,8,,1,bf16,,9\n"
    )
    (open_row, stated, older), _ = read(table)
    assert open_row.layout.vpp == 6
    assert "interleaving" in open_row.assumed
    assert stated.layout.vpp == older.layout.vpp == 1
    assert "interleaving" not in stated.assumed + older.assumed


def test_the_last_line_is_one_object(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plans.main([str(table(tmp_path))])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(result) == {"blind", "one_run_given", "memory", "ranking", "refused"}
    assert result["blind"]["dense"]["rows"] == 3
    assert result["one_run_given"]["dense"]["rows"] == 2
    assert result["ranking"]["groups"] == 1


def test_cells_may_hold_units() -> None:
    cells = {"step_time_s": "12.3 s", "seq": "4k", "gbs": "1,024", "mbs": "?", "vpp": "-"}
    read_cells = {name: plan_cells.number_in(cells, name) for name in cells}
    assert read_cells == {"step_time_s": 12.3, "seq": 4096, "gbs": 1024, "mbs": None, "vpp": None}
    assert plan_cells.number_in({"step_time_s": "850 ms"}, "step_time_s") == pytest.approx(0.85)


@pytest.mark.parametrize(
    ("cell", "number"),
    [("10,5", 10.5), ("8,192", 8192), ("1,234,567", 1234567), ("1,234.5", 1234.5), ("10,50", 10.5)],
)
def test_a_comma_groups_three_digits_or_is_a_decimal_point(cell: str, number: float) -> None:
    assert plan_cells.number_in({"step_time_s": cell}, "step_time_s") == pytest.approx(number)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("full", "full"), ("Full (uniform, 1 layer)", "full"), ("activation ckpt: full", "full"),
        ("selective(attn core)", "selective"), ("op-level SAC", "selective"), ("none", "none"),
        ("none (recipes)", "none"), ("?", None), ("", None), ("see perf recipe", None),
        ("off", "none"), ("not stated", None), ("full?", "full"),
    ],
)  # fmt: skip
def test_recomputation_is_read_as_sources_write_it(text: str, kind: str | None) -> None:
    assert plan_rows.recompute_of(text) == kind


def test_hybrid_sharding_is_fsdp_within_a_node(tmp_path: Path) -> None:
    table = tmp_path / "runs.csv"
    table.write_text(
        "gpu,gpus,model,layers,hidden,seq,gbs,mbs,tp,pp,dp,dp_mode,precision,recompute,step_time_s\n"
        "H100-96GB-HBM2e-500W,64,x,32,4096,4096,64,1,1,1,64,HSDP,tf32,op SAC,3\n",
        encoding="utf-8",
    )
    (row,), refused = read(table)
    assert not refused
    assert (row.layout.zero, row.layout.shard, row.framework) == (3, 8, "fsdp")
    assert (row.layout.precision, row.layout.recompute) == ("fp32", "selective")


def test_a_table_that_is_absent_is_refused_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        plans.main(["absent.csv"])
    assert stopped.value.code == 2
    assert "absent.csv: expected a table of runs" in capsys.readouterr().err


def one_row(folder: Path, **cells: str) -> plan_rows.Measured:
    """Read a row of a whole description, with some other cells."""
    usual = {
        "gpu": "H100-80GB",
        "gpus": "64",
        "model": "x",
        "layers": "32",
        "hidden": "4096",
        "heads": "32",
        "ffn": "16384",
        "vocab": "50304",
        "seq": "4096",
        "gbs": "64",
        "mbs": "1",
        "tp": "1",
        "pp": "1",
        "vpp": "1",
        "dp": "64",
        "dp_mode": "zero1",
        "schedule": "1f1b",
        "precision": "bf16",
        "recompute": "none",
        "network": "400 Gb/s",
        "tp_overlap": "0",
        "step_time_s": "3",
    }
    row = {**usual, **cells}
    path = folder / "row.csv"
    path.write_text(f"{','.join(row)}\n{','.join(row.values())}\n")
    rows, refused = read(path)
    assert not refused
    return rows[0]


@pytest.mark.parametrize("gpu", ["MI250", "MI300A", "A10G", "RTX 4090", "T4", "L4", "RTX A6000"])
def test_devices_without_a_measured_family_stand_in_a_usual_node(tmp_path: Path, gpu: str) -> None:
    row = one_row(tmp_path, gpu=gpu)
    assert row.cluster.devices == 64
    assert "device" in row.assumed


@pytest.mark.parametrize(
    ("mode", "zero"),
    [("zero-3", 3), ("ZeRO stage 3", 3), ("zero 2", 2), ("zero1 (DeepSpeed)", 1), ("ZeRO_0", 0)],
)
def test_stages_of_zero_are_read_as_sources_write_them(
    tmp_path: Path, mode: str, zero: int
) -> None:
    row = one_row(tmp_path, dp_mode=mode)
    assert row.layout.zero == zero
    assert not row.assumed


@pytest.mark.parametrize(
    ("cells", "gap"),
    [
        ({"dp_mode": "?"}, "sharding"),
        ({"ffn": ""}, "feed-forward"),
        ({"vocab": "?"}, "vocabulary"),
        ({"seq": "", "gbs": "1M tokens"}, "sequence"),
        ({"heads": ""}, "heads"),
        ({"gpus": "", "dp": ""}, "devices"),
        ({"pp": "8", "dp": "8", "vpp": "?", "schedule": "1f1b-interleaved"}, "interleaving"),
        ({"pp": "8", "dp": "8", "vpp": "", "schedule": "?"}, "interleaving"),
    ],
)
def test_each_gap_is_named(tmp_path: Path, cells: dict[str, str], gap: str) -> None:
    row = one_row(tmp_path, **cells)
    assert row.assumed == (gap,)
    assert (row.layout.vpp > 1) == (gap == "interleaving")


def test_of_batch_sequence_and_devices_one_follows_from_both_times(tmp_path: Path) -> None:
    both = {"step_time_s": "2.5", "tokens_s_gpu": str(64 * 4096 / (64 * 2.5))}
    whole = one_row(tmp_path, **both)
    for gap in ({"gbs": ""}, {"seq": "?"}, {"gpus": "", "dp": ""}):
        row = one_row(tmp_path, **both, **gap)
        assert (row.layout, row.cluster.devices, row.assumed) == (whole.layout, 64, ())


@pytest.mark.parametrize(("pp", "dp"), [("1", "64"), ("1", ""), ("4", ""), ("4", "?")])
def test_devices_that_rounded_times_tell_fit_the_degrees_and_the_batch(
    tmp_path: Path, pp: str, dp: str
) -> None:
    """512 devices take 7.26 s. The row says 7.3 s, which would be 510 devices."""
    job = {"gpus": "", "tp": "8", "pp": pp, "seq": "8192", "gbs": "1024", "step_time_s": "7.3"}
    row = one_row(tmp_path, **job, dp=dp, tokens_s_gpu="2254", sp="1")
    assert row.cluster.devices == row.layout.devices == 512
    assert row.layout.global_batch == 1024
    assert not row.assumed


def test_devices_that_no_division_of_the_batch_tells_are_assumed(tmp_path: Path) -> None:
    row = one_row(
        tmp_path, gpus="", dp="", seq="8192", gbs="1024", step_time_s="7.3", tokens_s_gpu="3000"
    )
    assert "devices" in row.assumed
    assert row.cluster.devices == 384


def test_both_times_tell_the_tokens_of_a_step_without_batch_and_sequence(tmp_path: Path) -> None:
    times = {"step_time_s": "5", "tokens_s_gpu": "10000"}
    row = one_row(tmp_path, gbs="", seq="", **times)
    assert row.layout.tokens * row.batch_share == pytest.approx(64 * 5 * 10000, rel=0.001)
    assert row.assumed == ("sequence",)


def test_a_step_without_its_tokens_has_at_least_one_short_sequence(tmp_path: Path) -> None:
    row = {"model": "llama3-70b", "gpu": "H100", "gpus": "64", "gbs": "64", "step_time_s": "0.001"}
    path = tmp_path / "runs.csv"
    path.write_text(f"{','.join(row)}\n{','.join(row.values())}\n")
    assert read(path) == ([], {"faster than the device's peak": 1})


def test_rows_whose_name_is_a_number_are_no_remarks(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    path.write_text(
        "uid,gpu,gpus,model,seq,gbs,step_time_s\n# of 2024\n#1,H100,8,llama3-8b,4096,64,9\n"
    )
    rows, refused = read(path)
    assert ([row.uid for row in rows], refused) == (["#1"], {})


@pytest.mark.parametrize(
    ("text", "gaps"),
    [
        ("fp8?", ("precision", "eight bits")), ("float8 (?)", ("precision", "eight bits")),
        ("bf16?", ("precision",)), ("nvfp4?", ("precision", "four bits")),
        ("not logged", ("precision", "four bits")), ("", ("precision", "four bits")),
    ],
)  # fmt: skip
def test_a_precision_in_doubt_is_at_most_as_narrow_as_its_text(
    tmp_path: Path, text: str, gaps: tuple[str, ...]
) -> None:
    assert one_row(tmp_path, gpu="B200-180GB", precision=text).assumed == gaps


def test_a_step_of_an_unknown_batch_may_have_been_any(tmp_path: Path) -> None:
    row = one_row(tmp_path, gbs="", step_time_s="0.01")
    assert row.assumed == ("global batch", "tokens of a step")
    (judged,) = plans.blind([row], np.array([1.0]))
    assert judged.factor > 4
    rate = one_row(tmp_path, gbs="", step_time_s="", tokens_s_gpu="8000")
    assert rate.assumed == ("global batch",)


@pytest.mark.parametrize(
    ("gpu", "low", "high"), [("A100-80GB", 1.2, 1.45), ("H100-80GB", 1.5, 1.8), ("B200", 2.1, 3)]
)
def test_a_step_whose_precision_is_not_told_may_be_as_quick_as_the_device_allows(
    tmp_path: Path, gpu: str, low: float, high: float
) -> None:
    """Dense steps in fp8 take 0.65 of the time in bf16, and those in nvfp4 about half."""
    row = one_row(tmp_path, gpu=gpu, precision="not logged")
    (judged,) = plans.blind([row], np.array([row.step_s]))
    assert low < judged.factor < high


@pytest.mark.parametrize("separator", [";", "\t"])
def test_a_table_may_have_other_separators_and_capital_letters(
    tmp_path: Path, separator: str
) -> None:
    other = tmp_path / "other.csv"
    lines = [HEADER.upper(), *ROWS]
    other.write_text("\n".join(line.replace(",", separator) for line in lines) + "\n")
    assert read(other) == read(table(tmp_path))


def test_devices_that_are_not_counted_are_the_product_of_the_degrees(tmp_path: Path) -> None:
    row = one_row(tmp_path, gpus="", tp="4", pp="4", dp="32", seq="8192", gbs="2048")
    assert row.layout.devices == row.cluster.devices == 512
    assert not row.assumed


@pytest.mark.parametrize(
    ("name", "dimensions", "billions"),
    [
        ("llama3-8b", {"layers": "", "hidden": "", "ffn": "", "vocab": ""}, 8.03),
        ("qwen3-30b-a3b", {"layers": "", "hidden": ""}, 30.53),
        ("llama3-70b", {"layers": "80", "hidden": "8192", "heads": "", "ffn": ""}, 69.5),
        ("deepseek_v3", {"layers": "61", "hidden": "7168", "heads": "", "ffn": ""}, 671.0),
    ],
)
def test_the_name_of_a_known_model_tells_its_open_dimensions(
    tmp_path: Path, name: str, dimensions: dict[str, str], billions: float
) -> None:
    vocab = "" if "deepseek" in name else "50304"
    row = one_row(tmp_path, model=name, **{"vocab": vocab, **dimensions})
    assert row.architecture.parameters / 1e9 == pytest.approx(billions, rel=0.01)
    assert not row.assumed


def test_a_row_of_an_impossible_size_is_refused_alone(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    path.write_text(
        "gpu,gpus,model,layers,hidden,seq,gbs,step_time_s\n"
        "H100,8,x,1e9,4096,4096,64,3\nH100,8,x,32,1e11,4096,64,3\nH100,8,x,32,4096,4096,64,3\n"
    )
    rows, refused = read(path)
    assert len(rows) == 1
    assert sum(refused.values()) == 2


@pytest.mark.parametrize("table_kind", ["runs", "memory"])
def test_a_table_without_its_columns_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], table_kind: str
) -> None:
    wrong = tmp_path / "wrong.csv"
    wrong.write_text("test,num_layers\na,2\n")
    runs = wrong if table_kind == "runs" else table(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        plans.main([str(runs), "--memory", str(wrong)])
    assert stopped.value.code == 2
    assert "wrong.csv: expected" in capsys.readouterr().err.splitlines()[-1]


def test_degrees_of_more_devices_than_are_counted_are_assumed(tmp_path: Path) -> None:
    row = one_row(tmp_path, dp="128")
    assert row.layout.dp == 64
    assert "parallel plan" in row.assumed
    assert "parallel plan" not in one_row(tmp_path).assumed


@pytest.mark.parametrize(
    ("cells", "degrees"),
    [
        ({"dp": "7", "cp": "1"}, (1, 1, 64)),
        ({"dp": "16", "cp": "1"}, (1, 1, 64)),
        ({"dp": "16", "cp": ""}, (1, 1, 64)),  # an empty cp means 1
        ({"dp": "16", "tp": "2"}, (2, 1, 32)),
    ],
)
def test_degrees_of_fewer_devices_than_are_counted_are_assumed(
    tmp_path: Path, cells: dict[str, str], degrees: tuple[int, int, int]
) -> None:
    row = one_row(tmp_path, sp="1", **cells)
    assert (row.layout.tp, row.layout.cp, row.layout.dp) == degrees
    assert row.layout.global_batch == 64
    assert row.assumed == ("parallel plan",)


@pytest.mark.parametrize(
    ("cell", "sequences", "gaps"),
    [
        ("4M tokens", 1024, ()),
        ("524288 tokens", 128, ()),
        ("128 sequences", 128, ()),
        ("2M", 512, ("global batch", "tokens of a step")),
        ("2 million", 512, ("global batch", "tokens of a step")),
    ],
)
def test_a_batch_in_tokens_is_read_and_an_unknown_unit_is_a_gap(
    tmp_path: Path, cell: str, sequences: int, gaps: tuple[str, ...]
) -> None:
    row = one_row(tmp_path, gbs=cell, step_time_s="60")
    assert row.layout.global_batch == sequences
    assert row.assumed == gaps


def test_devices_may_be_counted_by_node(tmp_path: Path) -> None:
    assert one_row(tmp_path, gpus="8x8") == one_row(tmp_path)
    assert one_row(tmp_path, gpus="8 nodes") == one_row(tmp_path)  # as its degrees tell


@pytest.mark.parametrize(
    ("cell", "count"),
    [
        *(("32", 32), ("32 GPUs", 32), ("4x8", 32), ("4\u00d78", 32), ("4 x 8 GPUs", 32)),
        *(("1,024x8", 8192), ("1024 H100", 1024), ("8xH100", 8), ("2x8xH100", 16)),
        *(("1,024 NVIDIA H100 SXM", 1024), ("64 MI300X", 64), ("72 GB200", 72)),
        *(
            ("16 nodes", None),
            ("16 H100 nodes", None),
            ("4\u00d78 nodes", None),
            ("4 DGX H100", None),
            ("8x what", None),
        ),
        *(("", None), ("0", None), ("4x0", None)),
    ],
)
def test_devices_are_counted_as_sources_write_them(cell: str, count: int | None) -> None:
    assert plan_cells.devices_in({"gpus": cell}) == count


def test_a_batch_may_be_written_with_the_length_of_its_sequences() -> None:
    cells = ("2048 x 4096", "2,048\u00d74096", "2048\u00d78192", "2048")
    read_cells = [plan_cells.sequences_in({"gbs": cell}, 4096) for cell in cells]
    assert read_cells == [2048, 2048, None, 2048]


def test_a_step_that_is_quicker_than_the_device_can_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        one_row(tmp_path, step_time_s="1e-9")
    assert read(tmp_path / "row.csv") == ([], {"faster than the device's peak": 1})


def test_other_tables_do_not_renew_the_published_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "runs.csv"
    table.write_text("")
    with pytest.raises(SystemExit):
        plans.main([str(table), "--left-out"])
    assert "expected the published table llm/train_runs.csv" in capsys.readouterr().err


GOLDEN = {
    "test": "gpt/gpt3_15b_8t_release",
    "gpu": "H100",
    "mem_max_alloc_gib": "26.2262",
    "num_layers": "32",
    "hidden_size": "6144",
    "num_attention_heads": "48",
    "num_query_groups": "8",
    "seq_length": "4096",
    "micro_batch_size": "4",
    "tensor_model_parallel_size": "8",
    "pipeline_model_parallel_size": "1",
    "sequence_parallel": "true",
}


def golden(folder: Path, **cells: str) -> Path:
    path = folder / "goldens.csv"
    row = {**GOLDEN, **cells}
    path.write_text(f"{','.join(row)}\n{','.join(row.values())}\n")
    return path


@pytest.mark.parametrize(
    ("cells", "reason"),
    [
        ({"mem_max_alloc_gib": "-4"}, "mem_max_alloc_gib: expected GiB above 0, got '-4'"),
        ({"mem_max_alloc_gib": "0"}, "mem_max_alloc_gib: expected GiB above 0, got '0'"),
        ({"mem_max_alloc_gib": "inf"}, "mem_max_alloc_gib: expected a number, got 'inf'"),
        ({"mem_max_alloc_gib": "abc"}, "mem_max_alloc_gib: expected a number, got 'abc'"),
        ({"mem_max_alloc_gib": ""}, "no peak logged"),
        ({"micro_batch_size": "3.5"}, "micro_batch_size: expected a whole number from 1 on"),
        ({"pipeline_model_parallel_size": "0"}, "pipeline_model_parallel_size: expected a whole"),
        ({"pipeline_model_parallel_size": "7"}, "pp: expected a divisor of 32 layers, got 7"),
        ({"num_attention_heads": ""}, "num_attention_heads: expected a whole number from 1 on"),
        ({"num_attention_heads": "7", "num_query_groups": "7"}, "tp: expected a divisor of 7"),
        ({"num_layers": ""}, "num_layers: expected a whole number from 1 on, got an empty cell"),
        ({"hidden_size": "1e9"}, "hidden: expected at most 10,000,000, got 1,000,000,000"),
    ],
)
def test_a_peak_that_cannot_be_judged_is_refused_with_its_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], cells: dict[str, str], reason: str
) -> None:
    plans.main([str(table(tmp_path)), "--memory", str(golden(tmp_path, **cells)), "--json"])
    result = json.loads(capsys.readouterr().out)
    assert result["memory"]["rows"] == 0
    [(said, count)] = result["memory"]["refused"].items()
    assert reason in said
    assert count == 1
    assert not any(reason in said for said in result["refused"])
    assert result["refused"]["unknown device Cerebras"] == 1


def test_a_logged_peak_is_judged(tmp_path: Path) -> None:
    found = plans.judged_memory(golden(tmp_path))
    assert (found["rows"], found["refused"]) == (1, {})


@pytest.mark.parametrize(
    ("name", "cell"),
    [("tp", "?"), ("tp", ""), ("pp", "?"), ("pp", ""), ("dp", "?"), ("dp", ""), ("cp", "?")],
)
def test_one_open_degree_follows_from_the_devices_and_the_others(
    tmp_path: Path, name: str, cell: str
) -> None:
    told = {"tp": "4", "pp": "2", "dp": "4", "cp": "2"}
    row = one_row(tmp_path, **told, sp="1")
    guessed = one_row(tmp_path, **{**told, name: cell}, sp="1")
    assert guessed.layout == row.layout
    assert guessed.assumed == row.assumed == ()


@pytest.mark.parametrize(
    ("cells", "degrees"),
    [
        ({"tp": "", "pp": "", "dp": "4"}, (8, 2, 4)),
        ({"tp": "", "pp": "2", "dp": ""}, (1, 2, 32)),
        ({"tp": "2", "pp": "", "dp": ""}, (2, 1, 32)),
        ({"tp": "", "pp": "", "dp": ""}, (1, 1, 64)),
        ({"gpus": "60", "tp": "4", "pp": "", "dp": "1"}, (4, 1, 1)),  # 15 do not divide 32 layers
        ({"gpus": "", "tp": "", "pp": "2", "dp": "4"}, (1, 2, 4)),
    ],
)
def test_several_open_degrees_are_assumed(
    tmp_path: Path, cells: dict[str, str], degrees: tuple[int, int, int]
) -> None:
    row = one_row(tmp_path, **cells)
    assert (row.layout.tp, row.layout.pp, row.layout.dp) == degrees
    assert "parallel plan" in row.assumed
