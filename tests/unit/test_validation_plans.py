"""The table of measured runs: names of devices, gaps, refused rows, and the figures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from validation import plan_rows, plans
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
    read_cells = {name: plan_rows.number_in(cells, name) for name in cells}
    assert read_cells == {"step_time_s": 12.3, "seq": 4096, "gbs": 1024, "mbs": None, "vpp": None}
    assert plan_rows.number_in({"step_time_s": "850 ms"}, "step_time_s") == pytest.approx(0.85)


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
