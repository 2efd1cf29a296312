"""The command line as scripts and people meet it."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import fullwire as fw
from fullwire.report.contents import fact_rows
from fullwire.run.facts import REGISTRY, Facts
from tests.builders import steps_run
from tests.conftest import Cli
from tests.jobs_by_hand import a_trained_job

WHATIF = ("whatif", "vgg16@v100", "--workers", "8,64", "--bandwidth", "10Gbps,100Gbps")
ROW_KEYS = {
    "accumulate",
    "local_steps",
    "jitter",
    "run",
    "workers",
    "bandwidth_bps",
    "compression",
    "transport",
    "step_s",
    "baseline_step_s",
    "backward_s",
    "communication_s",
    "overhead_s",
    "scaling_factor",
    "network_utilization",
    "interval",
    "buckets",
    "algorithm",
    "latency_s",
    "codec",
}


def test_whatif_prints_one_json_object_with_the_promised_keys(cli: Cli) -> None:
    done = cli(*WHATIF, "--json")
    shown = json.loads(done.stdout)
    assert set(shown["rows"][0]) == ROW_KEYS
    assert [(row["workers"], row["bandwidth_bps"]) for row in shown["rows"]] == [
        (8, 10e9),
        (8, 100e9),
        (64, 10e9),
        (64, 100e9),
    ]
    assert shown["basis"] == {"vgg16@v100": "modelled"}
    assert done.returncode == 0
    assert done.stderr == ""


def test_json_and_csv_and_python_agree(cli: Cli) -> None:
    rows = json.loads(cli(*WHATIF, "--format", "json").stdout)["rows"]
    lines = list(csv.DictReader(io.StringIO(cli(*WHATIF, "--format", "csv").stdout)))
    assert [float(line["step_s"]) for line in lines] == [row["step_s"] for row in rows]


def test_the_table_says_what_it_rests_on(cli: Cli) -> None:
    done = cli(*WHATIF)
    assert "modelled, not measured" in done.stdout
    assert "buckets ddp, ring, transport full" in done.stdout
    assert done.stdout.count("Gbps") == 6  # four rows, and both ends in the first line


def test_the_papers_headline_comes_out_of_one_command(cli: Cli) -> None:
    done = cli(
        "whatif",
        "vgg16@v100",
        "resnet50@v100",
        "resnet101@v100",
        "--workers",
        "64",
        "--bandwidth",
        "10Gbps,100Gbps",
        "--buckets",
        "paper",
        "--target",
        "0.95",
        "--json",
    )
    cases = json.loads(done.stdout)["target"]["least_compression"]
    needed = {(case["run"], case["bandwidth_bps"]): case["compression"] for case in cases}
    for run in ("vgg16@v100", "resnet50@v100", "resnet101@v100"):
        assert needed[run, 100e9] == 1
    assert 2 < needed["resnet50@v100", 10e9] < 5
    assert 2 < needed["resnet101@v100", 10e9] < 5
    assert 7 < needed["vgg16@v100", 10e9] < 9


def test_collective_answers_with_the_promised_keys(cli: Cli) -> None:
    done = cli(
        "collective",
        "allreduce",
        "--bytes",
        "64MiB",
        "--workers",
        "64",
        "--bandwidth",
        "100Gbps",
        "--latency",
        "5us",
        "--json",
    )
    shown = json.loads(done.stdout)
    assert shown["transfers"] == 2 * 63 * 64
    assert shown["time_s"] == pytest.approx(2 * 63 / 64 * 64 * 2**20 * 8 / 100e9 + 126 * 5e-6)
    assert shown["bus_bandwidth_bps"] == pytest.approx(
        2 * 63 / 64 * 64 * 2**20 * 8 / shown["time_s"]
    )


def test_a_workload_is_listed_with_its_gradients(cli: Cli) -> None:
    [shown] = json.loads(cli("workloads", "gpt2@h100", "--json").stdout)["workloads"]
    assert shown["parameters"] == 124_439_808
    assert sum(each["bytes"] for each in shown["gradients"]) == 4 * 124_439_808
    assert shown["basis"] == "modelled"


def test_a_simulated_step_is_written_shown_and_compared(cli: Cli, tmp_path: Path) -> None:
    one = ("whatif", "resnet50@v100", "--workers", "8", "--bandwidth")
    assert cli(*one, "1Gbps", "-o", tmp_path / "slow.run").returncode == 0
    assert cli(*one, "10Gbps", "-o", tmp_path / "fast.run").returncode == 0
    shown = json.loads(cli("show", tmp_path / "slow.run", "--json").stdout)
    assert shown["origin"] == "simulated"
    assert shown["basis"] == "modelled"
    assert shown["complete"] is True
    assert shown["tables"]["gradients"] == 161
    done = cli("compare", tmp_path / "slow.run", tmp_path / "fast.run")
    assert "Too few steps to tell a change from noise: 1.466 s -> 177.9 ms" in done.stdout
    assert "nan" not in done.stdout


def test_what_each_rank_has_is_shown_in_its_unit() -> None:
    for fact in (each for each in REGISTRY.values() if each.unit.startswith("(rank,")):
        unit = fact.unit.removeprefix("(rank, ").removesuffix(")").replace("bit/s", "bps")
        # Without a unit it is a share.
        of_one, said, last = (2.0, f"2 {unit}", f"1 {unit}") if unit else (0.5, "0.5", "1")
        facts = {fact.name: ((0.0, of_one), (1.0, 1.0))}
        [[_, shown, _]] = fact_rows(steps_run([1.0], facts=facts))
        assert shown == f"rank 0: {said}, rank 1: {last}", fact.name


def test_facts_are_shown_with_few_digits_and_of_few_ranks_one_by_one() -> None:
    facts = Facts(
        delivered_out_bps=((0.0, 478e6), (1.0, 95.6e6)),
        processor_s=tuple((float(rank), 0.02) for rank in range(9)),
        payload_share=1448 / 1514,
    )
    job = dataclasses.replace(a_trained_job(), facts=facts)
    shown = [value for _, value, _ in fact_rows(job)]
    assert shown == ["9 points (rank, s)", "rank 0: 478 Mbps, rank 1: 95.6 Mbps", "0.9564"]


def test_an_existing_run_is_replaced_only_when_forced(cli: Cli, tmp_path: Path) -> None:
    write = ("whatif", "resnet50@v100", "--workers", "8", "--bandwidth", "1Gbps", "-o")
    assert cli(*write, tmp_path / "x.run").returncode == 0
    refused = cli(*write, tmp_path / "x.run")
    assert refused.returncode == 2
    assert "exists: name another, or ask for --force" in refused.stderr
    assert cli(*write, tmp_path / "x.run", "--force").returncode == 0


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (("whatif", "nonsense.run"), 2, "no such file"),
        (("whatif", "vgg17@v100"), 2, "vgg16"),
        (("whatif", "vgg16@v100", "--bandwidth", "10"), 2, "expected a rate with its unit"),
        (("whatif", "vgg16@v100", "--format", "xml"), 2, "--format: expected table, csv or json"),
        (("whatif", "vgg16@v100", "--plot", "x.pdf"), 2, "--plot: expected a file ending in"),
        (("whatif", "vgg16@v100", "--plot", "/nowhere/x.png"), 2, "there is no directory"),
        (
            ("collective", "allreduce", "--bytes", "1", "--workers", "2", "--bandwidth", "1Gbps"),
            2,
            "bytes: expected a size with its unit",
        ),
        (
            ("collective", "scan", "--bytes", "1B", "--workers", "2", "--bandwidth", "1Gbps"),
            2,
            "collective: expected one of allreduce",
        ),
        (
            (
                "collective",
                "allreduce",
                "--bytes",
                "1GB",
                "--workers",
                "10000000",
                "--bandwidth",
                "1Gbps",
            ),
            2,
            "too many to play one by one",
        ),
        (("compare", "vgg16@v100", "resnet50@v100"), 2, "cannot be compared"),
    ],
)
def test_a_mistake_gives_one_line_and_status_2(
    cli: Cli, arguments: tuple[str, ...], status: int, message: str
) -> None:
    done = cli(*arguments)
    assert done.returncode == status
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert message in done.stderr


def test_an_unknown_option_is_refused_without_a_traceback(cli: Cli) -> None:
    done = cli("whatif", "vgg16@v100", "--bandwith", "1Gbps")
    assert done.returncode == 2
    assert "--bandwith" in done.stderr
    assert "Traceback" not in done.stderr


def test_examples_of_help_stand_on_lines_of_their_own(cli: Cli) -> None:
    shown = cli("report", "--help").stdout.splitlines()
    assert "  fullwire report job.run -o report.html" in shown
    assert "  fullwire report before.run after.run -o report.html" in shown


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    command = f"{sys.executable} -m fullwire whatif vgg16@v100 --workers "
    command += ",".join(map(str, range(2, 2000))) + " --format csv | head -n 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.stdout.startswith("run,")
    assert done.stderr == ""


def test_output_is_the_same_to_the_byte_in_every_process_idle_or_loaded(cli: Cli) -> None:
    def printed(seed: str) -> str:
        return cli(*WHATIF, "--json", env=os.environ | {"PYTHONHASHSEED": seed}).stdout

    idle = printed("1")
    spin = [sys.executable, "-c", "while True: pass"]
    load = [subprocess.Popen(spin) for _ in range(2 * (os.cpu_count() or 1))]
    try:
        assert printed("2") == printed("3") == idle
    finally:
        for each in load:
            each.kill()
            each.wait()


def test_the_version_is_printed(cli: Cli) -> None:
    assert cli("--version").stdout.startswith("fullwire 0.")


def test_a_line_rate_completes_a_run_under_both_of_its_names(cli: Cli, tmp_path: Path) -> None:
    job = a_trained_job()
    job = dataclasses.replace(job, facts=job.facts.without(["line_rate_bps"]))
    place = fw.write(job, tmp_path / "job.run")
    asked = [
        cli("explain", place, name, "1Gbps", "--json") for name in ("--line-rate", "--bandwidth")
    ]
    assert asked[0].returncode == 0, asked[0].stderr
    assert asked[0].stdout == asked[1].stdout
    assert json.loads(asked[0].stdout)["account"]["line_rate"] > 0
