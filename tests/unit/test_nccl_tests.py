"""Output of nccl-tests: real output with known answers, and broken output."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fullwire
from fullwire.errors import DamagedInput, FullwireError, UsageError
from fullwire.importers import nccl_tests, read, tables
from fullwire.importers._tables import Table
from fullwire.importers.nccl_tests import read_tables
from fullwire.simulation.transport import TableTransport
from tests.conftest import Cli
from tests.strategies import cases

HEAD = """# nThread 1 nGpus 2 minBytes 8 maxBytes 2048 step: 2(factor)
# Using devices
#  Rank  0 Group  0 Pid  64904 on       mew0 device  0 [0000:17:00] NVIDIA A100 80GB PCIe
#  Rank  1 Group  0 Pid  64904 on       mew0 device  1 [0000:65:00] NVIDIA A100 80GB PCIe
#       size         count      type   redop    root     time   algbw   busbw #wrong     time
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)
"""


def tail(rows: str) -> str:
    """Return the end that nccl-tests prints after these rows: the mean of their bandwidths."""
    words = [row.split("h:1:2")[0].split() for row in rows.splitlines()]
    bus = [row[place] for row in words for place in (7, 11) if row[place:] and row[0].isdigit()]
    bus_gb_s = [float(each) for each in bus if each.replace(".", "").isdigit()]
    return f"# Avg bus bandwidth    : {mean(bus_gb_s) if bus_gb_s else 0:g}\n"


def a_log(where: Path, rows: str, name: str = "all_reduce.log") -> Path:
    (where / name).write_text(HEAD + rows + tail(rows))
    return where / name


def read_table(path: Path) -> Table:
    """Read the table of a file; of several, the all-reduce's, or else the first."""
    found = read_tables(path)
    return next((table for table in found if table.op == "allreduce"), found[0])


def test_a_real_table_is_read_exactly(shared_data: Path) -> None:
    table = read_table(shared_data / "nccl/nccl_allreduce.log")
    last = table.rows[-1]
    assert (table.op, table.workers, table.device) == ("allreduce", 8, "A100-SXM4-40GB")
    assert (last.bytes, last.time_us) == (8_589_934_592, 63_896)
    assert (last.algorithm_gb_s, last.bus_gb_s) == (134.44, 235.26)
    assert (last.in_place_us, last.in_place_bus_gb_s) == (63_959, 235.03)
    assert not table.problems


@pytest.mark.parametrize(
    ("name", "op", "time_us"),
    [
        ("allgather", "allgather", 33_646),
        ("alltoall", "alltoall", 33_508),
        ("reduce", "reduce", 37_613),
        ("broadcast", "broadcast", None),
        ("reducescatter", "reducescatter", None),
    ],
)
def test_each_test_has_columns_of_its_own(
    shared_data: Path, name: str, op: str, time_us: float | None
) -> None:
    table = read_table(shared_data / f"nccl/nccl_{name}.log")
    assert table.op == op
    assert table.rows[-1].bytes == 8_589_934_592
    assert time_us is None or table.rows[-1].time_us == time_us
    sent, time_s = table.points()[-1]
    assert sent / time_s / 1e9 == pytest.approx(table.rows[-1].bus_gb_s, rel=1e-3)


def test_several_tests_in_one_file_are_told_apart(tmp_path: Path) -> None:
    row = "     1024000  256000   float     sum      -1    {0}    {1}      0    {0}    {1}    0\n"
    rows = [
        row.format("10.5", "97.52   48.76"),
        row.format("20.5", "49.95   24.98"),
        row.format("30.5", "33.57   33.57"),
    ]
    begins = "# Collective test starting: {}_perf\n"
    (tmp_path / "all.log").write_text(
        "".join(
            [
                begins.format("all_gather"),
                HEAD,
                rows[0],
                tail(rows[0]),
                "======== reduce_scatter_perf\n",
                HEAD,
                rows[1],
                tail(rows[1]),
                begins.format("all_reduce"),
                HEAD,
                rows[2],
                tail(rows[2]),
            ]
        )
    )
    run = read(tmp_path / "all.log")
    first = run.collectives.rows(run.collectives.rank == 0)
    assert first.op.tolist() == ["allgather", "reducescatter", "allreduce"]
    assert (first.end_ns - first.start_ns).tolist() == [10_500, 20_500, 30_500]
    assert run.complete
    table = read_table(tmp_path / "all.log")
    assert (table.op, [row.time_us for row in table.rows]) == ("allreduce", [30.5])


def test_launchers_tags_do_not_matter_even_within_a_row(tmp_path: Path) -> None:
    tagged = "".join(f"[1,0]<stdout>:{line}" for line in HEAD.splitlines(True))
    (tmp_path / "all_reduce.log").write_text(
        tagged
        + "[0]        1024     256   float     sum      -1[0]     9.41    0.10    0.20   0[0]\n"
        "0:   2048   512   float   sum   -1   10.52   0.19   0.20  N/A  10.33  0.2  0.21 N/A\n"
        + "# Avg bus bandwidth    : 0.2\n"
    )
    table = read_table(tmp_path / "all_reduce.log")
    assert [(row.bytes, row.time_us, row.in_place_us) for row in table.rows] == [
        (1024, 9.41, None),
        (2048, 10.52, 10.33),
    ]
    assert table.workers == 2


@pytest.mark.parametrize(
    "prefix",
    [
        "node1: ",
        "worker-0  | ",
        "(RayWorker pid=1234, ip=10.0.0.1) ",
        "[default0]:",
        "2024-05-01 12:00:0{0},123 INFO: ",
        "2024-05-01T12:00:00.12345678{0}Z stdout F ",
        "[prterun-node1-123@1,0]<stdout>: ",
        "Wed May  1 12:00:0{0} 2024[1,0]<stdout>:",
        "\x1b[32m",
        "> ",
    ],
)
def test_words_before_each_line_do_not_matter(
    shared_data: Path, tmp_path: Path, prefix: str
) -> None:
    plain = shared_data / "nccl" / "nccl_allreduce.log"
    lines = plain.read_text().splitlines()
    path = tmp_path / plain.name
    path.write_text("".join(f"{prefix.format(n % 10)}{line}\n" for n, line in enumerate(lines)))
    [table], [expected] = read_tables(path), read_tables(plain)
    assert table.rows == expected.rows
    assert (table.op, table.workers, table.device) == ("allreduce", 8, expected.device)
    path.write_text("".join(json.dumps({"log": f"{line}\n", "time": "1"}) + "\n" for line in lines))
    path.write_text(path.read_text().replace('{"log": "', '{"log":"'))  # as Docker writes it
    assert read_tables(path)[0].rows == expected.rows


def a_report(**more: object) -> dict[str, Any]:
    """Return the JSON of `all_reduce_perf -J FILE`, as src/util.cu of nccl-tests writes it."""
    place = {"time": 79.83, "alg_bw": 26.27, "bus_bw": 26.27, "nwrong": 0.0}
    row = {"size": 2097152, "count": 524288, "type": "float", "redop": "sum", "root": "    -1"}
    device = {"rank": 0, "group": 0, "pid": 7, "device": 0, "device_info": "NVIDIA GH200 120GB"}
    return {
        "version": 4,
        "start_time": "2026-05-01 12:00:00",
        "args": ["./build/all_reduce_perf", "-b", "1M", "-J", "out.json"],
        "env": ["HOME=/root"],
        "nccl_version": 22703,
        "config": {
            "nthreads": 1,
            "devices": [device | {"hostname": "n1"}, device | {"rank": 1, "hostname": "n2"}],
        },
        "results": [
            row | {"out_of_place": place, "in_place": place | {"time": 79.84, "nwrong": None}}
        ],
        "out_of_bounds": {"count": 0, "okay": "true"},
        "average_bus_bandwidth": {"bandwidth": 26.27},
        "end_time": "2026-05-01 12:00:09",
    } | more


def test_the_json_of_nccl_tests_is_read(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    path.write_text(json.dumps(a_report()))
    [table] = tables(path)
    assert (table.op, table.workers, table.nodes, table.problems) == ("allreduce", 2, 2, ())
    [row] = table.rows
    assert (row.bytes, row.dtype, row.time_us, row.bus_gb_s) == (2097152, "float32", 79.83, 26.27)
    assert row.in_place_us == 79.84
    run = fullwire.read(path)
    assert run.facts.device == "NVIDIA GH200 120GB"
    assert set(run.collectives.op) == {"allreduce"}
    assert "HOME=/root" not in str(run)  # the environment may hold secrets


def split(groups: tuple[int, ...], *, is_json: bool) -> str:
    """Return an output of NCCL_TESTS_SPLIT: the group of each rank, two ranks on a host."""
    if is_json:
        device = a_report()["config"]["devices"][0]
        devices = [
            device | {"rank": rank, "group": group, "hostname": f"n{rank // 2}"}
            for rank, group in enumerate(groups)
        ]
        [row] = a_report()["results"]
        place = row["out_of_place"] | {"bus_bw": 39.41}  # 1.5 times, as among 4
        return json.dumps(
            a_report(config={"devices": devices}, results=[row | {"out_of_place": place}])
        )
    head, ranks = HEAD.splitlines(keepends=True), ""
    for rank, group in enumerate(groups):
        ranks += f"#  Rank {rank:2} Group {group:2} Pid 7 on n{rank // 2} device 0 [0x00] H100\n"
    row = "2097152 524288 float sum -1 79.83 26.27 39.41 0 79.84 26.27 39.41 0\n"
    return "".join([*head[:2], ranks, *head[4:], row, tail(row)])


@pytest.mark.parametrize("is_json", [False, True])
def test_ranks_that_a_test_splits_into_groups_are_counted_by_group(
    tmp_path: Path, is_json: bool
) -> None:
    """`NCCL_TESTS_SPLIT="MOD 2"`: the devices of one place on all hosts sum among themselves."""
    path = tmp_path / "all_reduce.log"
    path.write_text(split((0, 1, 0, 1, 0, 1, 0, 1), is_json=is_json))
    [table] = read_tables(path)
    assert (table.workers, table.nodes, table.is_damaged) == (4, 4, False)
    assert "its 8 ranks ran as 2 groups of 4 side by side" in table.problems[0]
    found = fullwire.fit_cluster([path]).cluster
    assert (found.nodes, found.devices_per_node) == (4, 1)
    path.write_text(split((0, 0, 0, 1), is_json=is_json))
    with pytest.raises(DamagedInput, match=r"expected groups of as many ranks .* got 1 on 1, 3 on"):
        read_tables(path)


def test_a_cluster_is_fitted_to_that_json_too(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    path.write_text(json.dumps(a_report()))
    found = fullwire.fit_cluster([path]).cluster
    assert (found.nodes, found.devices_per_node) == (2, 1)
    path.write_text('{"workers": 2, "rows": [{"bytes": 1048576}]}')
    with pytest.raises(DamagedInput, match=r"JSON of fullwire bench transport: .* `ours_s`"):
        fullwire.fit_cluster([path])


def test_a_cluster_fit_tells_that_osu_prints_no_number_of_ranks(tmp_path: Path) -> None:
    path = tmp_path / "osu.txt"
    table = (
        "# OSU MPI Allreduce Latency Test v7.4\n# Size       Avg Latency(us)\n1048576    250.00\n"
    )
    path.write_text(table)
    with pytest.raises(UsageError, match=r"osu\.txt does not say its number of ranks"):
        fullwire.fit_cluster([path], devices_per_node=1)
    path.write_text("+ srun -N2 --ntasks-per-node=4 ./osu_allreduce\n" + table)
    assert fullwire.fit_cluster([path], devices_per_node=4).cluster.devices == 8


def test_rows_of_that_json_that_cannot_be_are_told(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    [row] = a_report()["results"]
    wrong = row | {"out_of_place": row["out_of_place"] | {"nwrong": 3.0}}
    report = a_report(results=[wrong, row | {"out_of_place": None}], end_time="")
    path.write_text(json.dumps(report))
    [table] = tables(path)
    assert len(table.rows) == 1
    assert [problem.partition(": ")[2] for problem in table.problems] == [
        "3 values were wrong, by its own validation",
        "1 row is not whole, and is left out",
        "it ends before its average, so sizes may be missing",
    ]
    slip = row | {"out_of_place": row["out_of_place"] | {"time": 798.3}}
    path.write_text(json.dumps(a_report(results=[slip])))
    [table] = tables(path)
    assert table.problems == (
        f"{path}: 2,097,152 bytes in 798.3 us are 2.63 GB/s, and its algbw is 26.27",
    )
    path.write_text(json.dumps(report)[:-200])
    with pytest.raises(DamagedInput, match="expected the JSON of nccl-tests"):
        tables(path)


@pytest.mark.parametrize("width", [1, 2, 5])
def test_srun_pads_its_labels(shared_data: Path, tmp_path: Path, width: int) -> None:
    whole = shared_data / "nccl/nccl_allreduce.log"
    lines = whole.read_text().splitlines(True)
    path = tmp_path / "slurm-1234.out"
    path.write_text("".join(f"{0:>{width}}: {line}" for line in lines))
    read(path)  # recognised
    table, same = read_table(path), read_table(whole)
    assert (table.rows, table.workers, table.device) == (same.rows, same.workers, same.device)


@pytest.mark.parametrize(
    ("columns", "bus_gb_s", "op"),
    [
        ("sum -1", 100.0, "allreduce"),
        ("sum -1", 50.0, "reducescatter"),
        ("sum 0", 100.0, "reduce"),
        ("none 0", 100.0, "broadcast"),
        ("none 0", 50.0, "unknown"),  # a gather, or a scatter
        ("none -1", 50.0, "unknown"),  # an all-gather, or an all-to-all
        ("sum -1", 80.0, "unknown"),
    ],
)
def test_a_table_without_a_name_tells_its_operation_by_its_bandwidths(
    tmp_path: Path, columns: str, bus_gb_s: float, op: str
) -> None:
    row = f"1048576 262144 float {columns} 10.49 100.00 {bus_gb_s:.2f} 0\n"
    run = read(a_log(tmp_path, row, "slurm-1234.out"))
    assert set(run.collectives.op) == {op}
    assert any("its operation is not named: by its bandwidths" in each for each in run.missing) is (
        op != "unknown"
    )


@pytest.mark.parametrize(("old", "new"), [("allgather", "allreduce"), ("allreduce", "alltoall")])
def test_a_name_that_the_bandwidths_contradict_is_told(
    shared_data: Path, tmp_path: Path, old: str, new: str
) -> None:
    path = tmp_path / f"{new}_8.log"
    path.write_text((shared_data / f"nccl/nccl_{old}.log").read_text())
    with pytest.raises(DamagedInput, match=rf"line \d+: busbw .* operation, {new} among 8, has"):
        fullwire.fit_cluster([path])
    assert read(path).missing


def test_a_second_operation_in_a_file_does_not_take_the_name_of_the_first(
    shared_data: Path, tmp_path: Path
) -> None:
    path = tmp_path / "all_reduce_2ops.log"
    both = [shared_data / f"nccl/nccl_{op}.log" for op in ("allreduce", "allgather")]
    path.write_text("".join(log.read_text() for log in both))
    assert [table.is_damaged for table in read_tables(path)] == [False, True]


def test_old_tables_without_a_root_tell_their_operation(shared_data: Path, tmp_path: Path) -> None:
    path = tmp_path / "half.log"
    for op in ("allreduce", "reducescatter", "reduce", "broadcast"):
        path.write_text((shared_data / f"nccl/nccl_{op}.log").read_text())
        assert read_table(path).op == op


@pytest.mark.parametrize(
    ("name", "bus_gb_s"), [("healthy_24_channels", 216.61), ("fault_2_channels", 28.47)]
)
def test_rows_between_lines_of_nccl_are_put_together(
    shared_data: Path, name: str, bus_gb_s: float
) -> None:
    table = read_table(shared_data / f"nccl/info/{name}.log")
    assert [row.bytes for row in table.rows] == [2**power for power in range(23, 34)]
    assert (table.op, table.workers) == ("allreduce", 2)
    assert table.rows[-1].in_place_bus_gb_s == pytest.approx(bus_gb_s, rel=0.05)


ROWS = """\
     1048576        262144     float     sum      -1    105.9    9.90   17.33      0    105.7    9.92   17.37      0
     2097152        524288     float     sum      -1    142.1   14.76   25.83      0    140.4   14.94   26.14    N/A
"""  # noqa: E501 as NVIDIA's all_reduce_perf prints it


@pytest.mark.parametrize(
    "heading",
    ["", "       size         count      type   redop    root     time   algbw   busbw\n"],
)
def test_a_table_is_read_without_its_marks(tmp_path: Path, heading: str) -> None:
    path = tmp_path / "all_reduce.txt"
    path.write_text(heading + ROWS)
    table = read_table(path)
    assert [(row.bytes, row.time_us, row.bus_gb_s) for row in table.rows] == [
        (1_048_576, 105.9, 17.33),
        (2_097_152, 142.1, 25.83),
    ]
    assert (table.op, table.workers, table.rows[1].in_place_us) == ("allreduce", 8, 140.4)
    assert not any("average" in problem for problem in table.problems)
    assert read(path).facts.workers == 8


@pytest.mark.parametrize("tag", ["[1,0]<stdout>:", " 0: ", "2026-02-16T10:00:02.000000000Z "])
def test_rows_alone_are_recognised_behind_the_tag_of_a_launcher(tmp_path: Path, tag: str) -> None:
    path = tmp_path / "all_reduce.txt"
    path.write_text("## Two workers\n" + "".join(f"{tag}{row}\n" for row in ROWS.splitlines()))
    assert read(path).facts.workers == 8
    assert [row.time_us for row in read_table(path).rows] == [105.9, 142.1]


@pytest.mark.parametrize(
    "row", ["8 2 int8 0 1268.1 31.58 31.58 0 1279.3 31.30 31.30 0", "8 2 float 5.63 0.01 0.01 0"]
)
def test_columns_are_told_by_a_whole_row(tmp_path: Path, row: str) -> None:
    (tmp_path / "perf.txt").write_text(row + "\n")
    assert len(read_table(tmp_path / "perf.txt").rows) == 1
    (tmp_path / "perf.txt").write_text(row.rpartition(" ")[0] + "\n")
    with pytest.raises(DamagedInput, match="no whole row"):
        read_table(tmp_path / "perf.txt")


CSV = """\
numCycle,collective,nodes,ranks,ranksPerNode,gpusPerRank,size,type,redop,inplace,time,algbw,busbw,#wrong
0,AllReduce,1,8,8,1,1048576,float,sum,0,105.9,9.90,17.33,0
0,AllReduce,1,8,8,1,1048576,float,sum,1,105.7,9.92,17.37,0
0,AllReduce,1,8,8,1,2097152,float,sum,0,142.1,14.76,25.83,N/A
0,AllReduce,1,8,8,1,2097152,float,sum
"""
JSON = """[
{"numCycle":0, "name":"AllReduce", "gpus":8, "size":1048576, "type":"float", "redop":"sum", \
"inPlace":0, "time":105.9, "algBw":9.90, "busBw":17.33, "wrong":"0"},
{"numCycle":0, "name":"AllReduce", "gpus":8, "size":1048576, "type":"float", "redop":"sum", \
"inPlace":1, "time":105.7, "algBw":9.92, "busBw":17.37, "wrong":"0"}
]
"""


@pytest.mark.parametrize(("text", "sizes", "broken"), [(CSV, 2, 1), (JSON, 1, 0)])
def test_files_that_rccl_tests_write_are_read(
    tmp_path: Path, text: str, sizes: int, broken: int
) -> None:
    """Their form is that of ROCm/rccl-tests, src/common.cu, Reporter::writeFile."""
    (tmp_path / "out").write_text(text)
    [table] = tables(tmp_path / "out")
    assert (table.op, table.workers, len(table.rows)) == ("allreduce", 8, sizes)
    row = table.rows[0]
    assert (row.bytes, row.dtype, row.time_us, row.in_place_us) == (2**20, "float32", 105.9, 105.7)
    assert len(table.problems) == broken
    assert table.is_damaged == bool(broken)


@pytest.mark.parametrize(("text", "line"), [(CSV.rpartition("0,AllR")[0], "line 2: "), (JSON, "")])
def test_a_bandwidth_of_rccl_tests_that_its_time_contradicts_is_told(
    tmp_path: Path, text: str, line: str
) -> None:
    (tmp_path / "out").write_text(text.replace("105.9", "1059.0"))
    [table] = tables(tmp_path / "out")
    assert table.is_damaged
    assert f"{line}1,048,576 bytes in 1,059 us are 0.99 GB/s, and its algbw is 9.9" in str(
        table.problems
    )


def test_rows_of_rccl_tests_that_are_wrong_or_too_many_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "out.csv"
    path.write_text(CSV.replace("17.33,0", "17.33,3"))
    monkeypatch.setattr(nccl_tests, "_MOST_ROWS", 3)
    [table] = tables(path)
    assert table.is_damaged
    assert table.problems == (
        f"{path}: 3 values were wrong, by its own validation",
        f"{path}: 1 row is left out, for it has over 3",
    )


def test_a_csv_without_ranks_tells_them_by_its_bandwidths(tmp_path: Path) -> None:
    path = tmp_path / "all_reduce.csv"
    sizes = [2**power for power in range(20, 24)]
    rows = [f"{size},float,sum,{size / 5e4},50.0,{50 * 2 * 15 / 16}" for size in sizes]
    path.write_text("\n".join(["size,type,redop,time,algbw,busbw", *rows]) + "\n")
    table = read_table(path)
    assert (table.op, table.workers, len(table.rows)) == ("allreduce", 16, 4)
    assert table.problems == (f"{path}: its ranks are not listed: by their bandwidths 16",)
    assert not table.is_damaged
    rows = [row.replace("93.75", "99.98") for row in rows]  # too many ranks for two digits
    path.write_text("\n".join(["size,type,redop,time,algbw,busbw", *rows]) + "\n")
    table = read_table(path)
    assert table.workers == 1
    assert table.problems == (f"{path}: its ranks are not listed: taken for one",)


def test_rows_beyond_the_most_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = "".join(f"  {8 * n}  2  float  sum  -1  9.5  0.1  0.1  0\n" for n in (1, 2, 3))
    monkeypatch.setattr(nccl_tests, "_MOST_ROWS", 1)
    table = read_table(a_log(tmp_path, rows))
    assert table.is_damaged
    assert table.problems[0].endswith("2 rows are left out, for it has over 1")


def test_rows_without_marks_stay_among_lines_of_nccl(tmp_path: Path) -> None:
    line = "n1:7:8 [0] NCCL INFO Using network Socket\n"
    rows = "".join(
        f"  {8 * n}  2  float  sum  -1  9.50  0.10  0.10  0  9.10  0.10  0.10  0\n" for n in (1, 2)
    )
    path = tmp_path / "all_reduce.txt"
    path.write_text(line + rows)
    run = read(path)
    assert len(set(run.collectives.bytes)) == 2
    assert run.facts.nccl_network == "Socket"


def test_the_table_is_a_run_of_collectives(shared_data: Path) -> None:
    run = read(shared_data / "nccl/nccl_allreduce.log")
    table = run.collectives
    assert run.facts.workers == 8
    assert table.bytes[-1] == 8_589_934_592
    assert table.end_ns[-1] - table.issue_ns[-1] == 63_896_000
    assert fullwire.explain(run).verdict.kind == "unknown"


def test_a_table_is_a_transport(shared_data: Path) -> None:
    path = shared_data / "nccl/nccl_allreduce.log"
    table = fullwire.whatif(
        "vgg16@v100", bandwidth="10Tbps", workers=8, buckets="none", transport=str(path)
    )
    full = fullwire.whatif("vgg16@v100", bandwidth="10Tbps", workers=8, buckets="none")
    assert table["communication_s"][0] > full["communication_s"][0]
    # Of VGG16's 553 MB, 411 are one gradient: at its bandwidth in the table, 220 GB/s, 1.75 times.
    assert 1.75 * 553.4e6 / 240e9 < table["communication_s"][0] < 1.75 * 553.4e6 / 150e9


def test_a_table_goes_through_its_points_and_never_backwards() -> None:
    timed = TableTransport(name="t", points=((0.0, 3e-5), (1e3, 2e-5), (1e6, 1e-4), (2e6, 2e-4)))
    sent = np.array([0.0, 500.0, 1e3, 1e6, 1.5e6, 4e6])
    found = timed.message_s(np.zeros(6), sent, np.ones(6), np.ones(6))
    assert found.tolist() == pytest.approx([3e-5, 3e-5, 3e-5, 1e-4, 1.5e-4, 4e-4])
    slow = timed.message_s(np.full(6, 1.0), sent, np.ones(6), np.ones(6))
    assert slow.tolist() == [1.0] * 6


@pytest.mark.parametrize(
    "cut", ["", "  32  8  float  sum  -1", "  32  8  float  sum  -1  9.6  0.1  0.1  0"]
)
@pytest.mark.parametrize("joint", ["", "\n"])
def test_a_test_that_failed_keeps_the_sizes_before(tmp_path: Path, cut: str, joint: str) -> None:
    """It prints a row while it measures, and then its own message: src/common.h of nccl-tests."""
    row = "  {0}  {1}  float  sum  -1  9.5  0.1  0.1  0  9.1  0.1  0.1  0\n"
    failure = (
        "mew0: Test NCCL failure all_reduce.cu:44 'remote process exited / '\n"
        " .. mew0 pid 64904: Test failure common.cu:401\n"
    )
    path = a_log(tmp_path, row.format(8, 2) + row.format(16, 4))
    rows = path.read_text().rpartition("# Avg")[0] + cut + joint + failure
    path.write_text(rows)
    table = read_table(path)
    assert [row.bytes for row in table.rows] == [8, 16]
    assert not table.is_damaged
    [problem] = [each for each in table.problems if "failed" in each]
    assert "later sizes are missing" in problem
    other = HEAD.replace("minBytes 8", "minBytes 4") + row.format(4, 1) + tail(row.format(4, 1))
    path.write_text(rows + other)
    [failed, whole] = read_tables(path)
    assert [len(failed.rows), len(whole.rows)] == [2, 1]
    assert not whole.problems


@pytest.mark.parametrize("cut", ["", "  32  8  float  sum  -1  9.6  0.1"])
@pytest.mark.parametrize(
    "message",
    [
        "slurmstepd: error: *** STEP 7.0 ON n0 CANCELLED AT 2025-05-01T10:00 DUE TO TIME LIMIT ***",
        "srun: error: n0: tasks 0-7: Terminated",
        "mpirun noticed that process rank 3 with PID 0 on node n0 exited on signal 9 (Killed).",
        "=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES",
        "Killed",
        "srun: Job step aborted: Waiting up to 32 seconds for job step to finish.",
        "run.sh: line 3: 12345 Killed                  ./run -b 8",
        "Terminated                 mpirun -np 2 ./run",
    ],
)
def test_a_test_that_its_launcher_ended_keeps_the_sizes_before_and_the_tables_before(
    tmp_path: Path, cut: str, message: str
) -> None:
    row = "  {0}  {1}  float  sum  -1  9.5  0.1  0.1  0  9.1  0.1  0.1  0\n"
    path = a_log(tmp_path, row.format(8, 2) + row.format(16, 4))
    whole = path.read_text()
    ended = whole.rpartition("# Avg")[0].replace("# Out of bounds values : 0 OK\n", "")
    path.write_text(f"{whole}{ended}{cut}\n{message}\n")
    first, second = read_tables(path)
    assert not first.problems
    assert [row.bytes for row in second.rows] == [8, 16]
    assert not second.is_damaged
    [problem] = second.problems
    assert "was ended in line" in problem
    assert problem.endswith("later sizes are missing")


@pytest.mark.parametrize(
    "message",
    [
        "srun: Job 7 step creation temporarily disabled, retrying (Requested nodes are busy)",
        "slurmstepd: error: couldn't chdir to `/x': No such file or directory: going to /tmp",
    ],
)
def test_rows_and_an_average_after_a_message_show_that_it_ended_no_test(
    tmp_path: Path, message: str
) -> None:
    row = "  {0}  {1}  float  sum  -1  9.5  0.1  0.1  0  9.1  0.1  0.1  0\n"
    first, second = row.format(8, 2), row.format(16, 4)
    path = a_log(tmp_path, first + second)
    text = path.read_text()
    for place, rest in (
        (text.index(second), ""),
        (text.index("# Avg"), ""),
        (text.index("  0.1", text.index(second)), "\n"),
    ):
        path.write_text(f"{text[:place]}{rest}{message}\n{text[place:]}")
        whole = read_table(path)
        assert [row.bytes for row in whole.rows] == [8, 16]
        assert not whole.problems
    path.write_text(text.rpartition("# Avg")[0].replace(second, f"{message}\n{second}"))
    cut = read_table(path)
    assert "it ends before its average" in cut.problems[0]


def test_a_whole_row_before_a_message_in_its_line_is_kept(tmp_path: Path) -> None:
    row = "  {0}  {1}  float  sum  -1  9.5  0.1  0.1  0  9.1  0.1  0.1  0"
    path = a_log(tmp_path, f"{row.format(8, 2)}\n{row.format(16, 4)}\n")
    ended = path.read_text().rpartition("\n# Avg")[0]
    path.write_text(f"{ended} slurmstepd: error: *** STEP 7.0 CANCELLED DUE TO TIME LIMIT ***\n")
    table = read_table(path)
    assert [row.bytes for row in table.rows] == [8, 16]
    assert not table.is_damaged
    assert table.problems[0].endswith("later sizes are missing")


FAILURE = "srun: error: mew0: Test failure common.cu:401\n .. mew0 pid 64904: Test failure\n"


def test_a_failure_after_the_average_is_of_no_size(tmp_path: Path) -> None:
    path = a_log(tmp_path, "  8  2  float  sum  -1  9.5  0.1  0.1  0  9.1  0.1  0.1  0\n")
    path.write_text(path.read_text() + FAILURE)
    table = read_table(path)
    assert (len(table.rows), table.problems) == (1, ())


def test_a_test_that_failed_and_was_started_again_lacks_no_later_sizes(tmp_path: Path) -> None:
    row = "  {0}  {1}  float  sum  -1  9.5  0.1  0.1  0  9.1  0.1  0.1  0\n"
    path = a_log(tmp_path, row.format(8, 2) + FAILURE + row.format(8, 2) + row.format(16, 4))
    table = read_table(path)
    assert len(table.rows) == 3
    [problem] = [each for each in table.problems if "failed" in each]
    assert problem.endswith(f"its test failed or was ended in line {len(HEAD.splitlines()) + 2}")
    path.write_text(path.read_text().rpartition("# Avg")[0] + FAILURE)
    [problem] = [each for each in read_table(path).problems if "failed" in each]
    assert problem.endswith(f"line {len(HEAD.splitlines()) + 6}: later sizes are missing")


def test_a_row_that_is_cut_is_left_out_and_said(tmp_path: Path) -> None:
    path = a_log(
        tmp_path, "  8  2  float  sum  -1  9.5  0.1  0.1  0  9.1  0.1  0.1  0\n 16 4 float"
    )
    path.write_text(path.read_text().rpartition("# Avg")[0])
    table = read_table(path)
    assert [row.bytes for row in table.rows] == [8]
    assert "1 row is not whole, and is left out" in table.problems[0]
    assert "ends before its average" in table.problems[1]


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("1048576 ", "1048576x ", "1 row is not whole, and is left out, from line 10"),
        ("1048576 ", "1048576B ", "1 row is not whole, and is left out, from line 10"),
        ("1048576 ", "", "1 row is not whole, and is left out, from line 10"),
        ("1048576 ", "10485 76 ", "1 row is not whole, and is left out, from line 10"),
        ("104.9 ", "10x.9 ", "1 row is not whole, and is left out, from line 10"),
        (
            "104.9 ",
            "1049.0 ",
            "line 10: 1,048,576 bytes in 1,049 us are 1.00 GB/s, and its algbw is 10",
        ),
    ],
)
def test_damage_within_a_row_is_said_and_neither_fitted_nor_a_transport(
    tmp_path: Path, old: str, new: str, why: str
) -> None:
    rows = "".join(
        f"{size} {size // 4} float sum -1 {time_us} 10.00 10.00 0 {time_us} 10.00 10.00 0\n"
        "h:1:2 [0] NCCL WARN 1048576 262144 float sum -1 104.9 10.00 10.00 0 9.1\n"
        "Warning: 3 of 4 processes are bound to 2 cores on 1 of 2 sockets\n"
        for size, time_us in ((524288, "52.4"), (1048576, "104.9"))
    )
    path = a_log(tmp_path, rows.replace(old, new))
    if not new.startswith("1049"):
        assert len(read_table(path).rows) == 1
    for ask in (
        lambda: fullwire.fit_cluster([path]),
        lambda: fullwire.whatif("vgg16@v100", workers=8, transport=str(path)),
    ):
        with pytest.raises(DamagedInput, match=why):
            ask()
    assert not read_table(a_log(tmp_path, rows)).problems


def test_tests_that_name_themselves_at_their_start_and_end_are_told_apart(tmp_path: Path) -> None:
    """The last line of one is no name of the next."""
    text = ""
    for name, bus in (("all_gather", 5.0), ("reduce_scatter", 5.0), ("all_reduce", 10.0)):
        row = f"1048576 262144 float sum -1 104.9 10.00 {bus} 0 104.9 10.00 {bus} 0\n"
        begin = f"# Collective test starting: {name}_perf\n"
        text += f"{begin}{HEAD}{row}{tail(row)}#\n# Collective test concluded: {name}_perf\n"
    path = tmp_path / "all.log"
    path.write_text(text)
    found = read_tables(path)
    assert [table.op for table in found] == ["allgather", "reducescatter", "allreduce"]
    assert not any(table.is_damaged for table in found)


def test_a_benchmark_of_a_container_names_its_operation_too(tmp_path: Path) -> None:
    row = "1048576 131072 float none -1 104.9 10.00 5.00 0 104.9 10.00 5.00 0\n"
    path = a_log(tmp_path, row)
    path.write_text(f"mpirun -np 1 alltoall_perf_mpi -g 2\n{path.read_text()}")
    assert read_table(path).op == "alltoall"


def test_an_average_that_is_not_that_of_the_rows_is_told(tmp_path: Path) -> None:
    rows = [
        f"{size} {size // 4} float sum -1 {size / rate / 1e3:.2f} {rate} {rate} 0 "
        f"{size / rate / 1e3:.2f} {rate} {rate} 0\n"
        for size, rate in ((2**20, 5.0), (2**21, 8.0), (2**22, 12.0))
    ]
    path = a_log(tmp_path, "".join(rows))
    assert not read_table(path).problems
    path.write_text(path.read_text().replace(rows[2], ""))
    *_, doubt = fullwire.fit_cluster([path], devices_per_node=8).doubts
    assert "is 8.33333 GB/s, and that of its rows 6.5, so rows are missing or changed." in doubt
    path.write_text(HEAD + "".join(rows) + tail("".join(rows)).replace(": 8", ": 98"))
    *_, doubt = fullwire.fit_cluster([path], devices_per_node=8).doubts
    assert "its average bus bandwidth is 98.3333 GB/s" in doubt


@pytest.mark.parametrize(
    ("command", "ranks"),
    [
        ("mpirun -np 2 ./build/all_reduce_perf -b 8 -g 2 -n 20", 4),
        ("+ srun -N 2 --ntasks-per-node=1 all_reduce_perf -g 2", 4),
        ("srun -N2 --ntasks-per-node=1 /usr/local/bin/all_reduce_perf_mpi -g 2", 4),
        ("mpirun -np 1 ./build/all_reduce_perf -g 2 : -np 1 ./build/all_reduce_perf -g 2", 4),
        ("mpirun -np 1 ./build/all_reduce_perf -b 8 -g 2 -n 20", 2),
        ("./build/all_reduce_perf -b 8 -g 2 -n 20", 2),
    ],
)
def test_ranks_that_a_command_starts_and_the_list_lacks_are_damage(
    tmp_path: Path, command: str, ranks: int
) -> None:
    """The last ranks of a list may be cut, as those of a host whose lines were lost."""
    path = a_log(tmp_path, "1048576 262144 float sum -1 104.9 10.00 10.00 0 104.9 10.00 10.00 0\n")
    path.write_text(f"{command}\n{path.read_text()}{command.replace('2 ', '9 ')}\n")
    if ranks == 2:
        assert not read_table(path).problems
    else:
        alone = "line 1 starts 4 ranks, and 2 are listed, as many as one process has: .* MPI=1"
        with pytest.raises(DamagedInput, match=alone):
            fullwire.fit_cluster([path])


@pytest.mark.parametrize(
    "command",
    [
        "nice -n 10 mpirun -np 1 ./build/all_reduce_perf -g 2",
        "nice -n 10 ./build/all_reduce_perf -g 2",
        "mpirun -np 8 hostname; ./build/all_reduce_perf -g 2",
        "mpirun -np 8 ./build/all_gather_perf\n# Collective test starting: all_reduce_perf",
        "mpirun -np 8 ./build/all_gather_perf\n./build/all_reduce_perf -g 2",
        "mpirun -np 1 --tag-output ./build/all_reduce_perf -b 8 -n 20",
        "mpirun --a-flag ./build/all_reduce_perf -b 8 -n 20",
    ],
)
def test_a_command_that_does_not_start_more_ranks_leaves_its_table_whole(
    tmp_path: Path, command: str
) -> None:
    path = a_log(tmp_path, "1048576 262144 float sum -1 104.9 10.00 10.00 0 104.9 10.00 10.00 0\n")
    path.write_text(f"{command}\n{path.read_text()}")
    [table] = read_tables(path)
    assert not table.problems
    assert not table.is_damaged


@pytest.mark.parametrize("is_mixed", [False, True])
def test_processes_that_print_a_list_each_have_whole_tables(tmp_path: Path, is_mixed: bool) -> None:
    """Without MPI, each process takes itself for the only one, and lists the ranks of its own."""
    path = a_log(tmp_path, "1048576 262144 float sum -1 104.9 10.00 10.00 0 104.9 10.00 10.00 0\n")
    lines = path.read_text().splitlines(keepends=True)
    both = [line for line in lines for _ in range(2)] if is_mixed else lines * 2
    path.write_text("".join(["mpirun -np 2 ./build/all_reduce_perf -b 8 -g 2\n", *both]))
    assert not any("starts" in problem for table in read_tables(path) for problem in table.problems)


SHORTENED = """\
# Collective test starting: {perf}
# nThread 1 nGpus 1 minBytes 8589934592 maxBytes 17179869184 step: 2(factor) warmup iters: 1
#
# Using devices
#  Rank  0 Group  0 Pid 568399 on   gpu-5705 device  0 [0008:06:00] NVIDIA GB300
...
#  Rank 62 Group  0 Pid 480831 on   gpu-6569 device  2 [0018:06:00] NVIDIA GB300
#  Rank 63 Group  0 Pid 480833 on   gpu-6569 device  3 [0019:06:00] NVIDIA GB300
#
#       size         count      type   redop    root     time   algbw   busbw #wrong     time
# Truncated  smaller message sizes
{rows}"""
REDUCED = """\
  8589934592    2147483648     float     sum      -1    18842  455.88  897.52      0    18790
 17179869184    4294967296     float     sum      -1    36350  472.63  930.48      0    36345
"""
EXCHANGED = """\
  8589934592      33554432     float    none      -1    13028  659.33  649.03      0    12953
 17179869184      67108864     float    none      -1    25357  677.51  666.92      0    25565
"""


@pytest.mark.parametrize(
    ("perf", "rows"), [("all_reduce_perf", REDUCED), ("alltoall_perf", EXCHANGED)]
)
def test_a_list_that_its_owner_shortened_tells_the_ranks_by_its_last_one(
    tmp_path: Path, perf: str, rows: str
) -> None:
    path = tmp_path / "posted.log"
    path.write_text(SHORTENED.format(perf=perf, rows=rows) + "# Avg bus bandwidth    : 455.539\n")
    [table] = read_tables(path)
    assert (table.workers, table.nodes, len(table.rows)) == (64, 0, 2)
    assert not table.is_damaged
    assert any("3 ranks are listed, the last is rank 63: by its" in it for it in table.problems)
    assert fullwire.fit_cluster([path], devices_per_node=64).cluster.devices == 64


def a_list(ranks: int, of_a_host: int, listed: Sequence[int] | None = None) -> str:
    """Return the beginning of a table of an all-reduce, with these of its ranks listed."""
    lines = [
        f"#  Rank {rank:2} Group  0 Pid 9 on   host-{rank // of_a_host} device  {rank % of_a_host} "
        "[0x01] NVIDIA H100\n"
        for rank in (range(ranks) if listed is None else listed)
    ]
    head = "# nThread 1 nGpus 1 minBytes 8589934592\n#\n# Using devices\n" + "".join(lines)
    return (
        head
        + "#       size         count      type   redop    root     time   algbw   busbw #wrong\n"
    )


OF_64 = (
    "  8589934592  2147483648  float  sum  -1  48321  177.77  349.98  0  48348  177.67  349.79  0\n"
)
OF_8 = (
    "  8589934592  2147483648  float  sum  -1  47217  181.93  318.37  0  47268  181.73  318.03  0\n"
)


@pytest.mark.parametrize(
    "listed",
    [range(0, 64, 8), [*range(30), *range(31, 63)]],
    ids=["the first of each host", "without the last"],
)
def test_a_list_without_its_last_ranks_is_damage(tmp_path: Path, listed: Sequence[int]) -> None:
    path = tmp_path / "all_reduce.log"
    path.write_text(a_list(64, 8, listed) + OF_64 + "# Avg bus bandwidth    : 349.885\n")
    with pytest.raises(DamagedInput, match=rf"{len(listed)} ranks are listed, the last is rank"):
        fullwire.fit_cluster([path], devices_per_node=8)


def test_bandwidths_of_a_broadcast_show_no_shortened_list(tmp_path: Path) -> None:
    """They are equal for any number of ranks."""
    path = tmp_path / "broadcast.log"
    row = (
        OF_64.replace(" sum  -1", "none   0")
        .replace("349.98", "177.77")
        .replace("349.79", "177.67")
    )
    path.write_text(a_list(64, 8, [0, 1, 8]) + row + "# Avg bus bandwidth    : 177.72\n")
    with pytest.raises(DamagedInput, match="3 ranks are listed, the last is rank 8"):
        fullwire.fit_cluster([path], devices_per_node=8)


@pytest.mark.parametrize("of_a_host", [8, 16])
def test_a_shortened_list_tells_some_hosts(tmp_path: Path, of_a_host: int) -> None:
    path = tmp_path / "all_reduce.log"
    text = a_list(64, of_a_host, [*range(of_a_host), 62, 63]) + OF_64
    path.write_text(text + "# Avg bus bandwidth    : 349.885\n")
    with pytest.raises(UsageError, match="lists only some of its hosts"):
        fullwire.fit_cluster([path])
    if of_a_host == 8:
        assert fullwire.fit_cluster([path], devices_per_node=8).cluster.nodes == 8
    else:
        with pytest.raises(UsageError, match="16 of its 64 ranks are on one host"):
            fullwire.fit_cluster([path], devices_per_node=8)


def test_two_rows_that_grep_left_of_two_tables_are_damage(tmp_path: Path) -> None:
    path = tmp_path / "result.log"
    path.write_text(OF_8 + OF_64)
    with pytest.raises(DamagedInput, match=r"busbw is 1\.75 times algbw, and 1\.97 times in other"):
        fullwire.fit_cluster([path], devices_per_node=8)


def test_grep_rows_of_256_and_512_ranks_are_of_two_tables(tmp_path: Path) -> None:
    """Their ratios differ by 0.004."""
    path = tmp_path / "result.log"
    row = "  {0}  {1}  float  sum  -1  {2}  {3}  {4}  0  {2}  {3}  {4}  0\n"
    of_256 = row.format(8589934592, 2147483648, 48532, "177.00", "352.62")
    path.write_text(of_256 + row.format(17179869184, 4294967296, 97610, "176.01", "351.33"))
    with pytest.raises(DamagedInput, match="times in other rows"):
        fullwire.fit_cluster([path], devices_per_node=8)


def test_equal_bandwidths_of_a_sum_name_no_operation(tmp_path: Path) -> None:
    """So prints sendrecv, and its rows have a sum."""
    path = tmp_path / "posted.log"
    path.write_text("  1073741824  268435456  float  sum  -1  26843  40.00  40.00  0\n")
    assert read_table(path).op == ""
    with pytest.raises(UsageError, match="does not name its operation"):
        fullwire.fit_cluster([path], devices_per_node=8)


def test_sizes_that_begin_anew_in_a_table_without_its_average_are_damage(tmp_path: Path) -> None:
    path = tmp_path / "all_reduce.log"
    slower = OF_64.replace("48321  177.77  349.98", "60000  143.17  281.86")
    path.write_text(a_list(64, 8) + OF_64 + "$ cat of_another.txt\n\n" + slower)
    with pytest.raises(DamagedInput, match="sizes begin anew after other words"):
        fullwire.fit_cluster([path])
    path.write_text(a_list(64, 8) + OF_64 + "\n" + slower)  # as of several types or repetitions
    assert len(fullwire.fit_cluster([path]).residuals) == 1


@pytest.mark.parametrize("where", [{"cluster": "gb200-nvl72"}, {"devices_per_node": 72}, {}])
def test_hosts_that_exchange_more_than_nics_carry_are_parts_of_a_node(
    tmp_path: Path, where: dict[str, Any]
) -> None:
    """A rack of NVL72: hosts of four devices on one NVLink."""
    listed = "".join(
        f"#  Rank {rank:2} Group  0 Pid 9 on   gb-{rank // 4} device  {rank % 4} [0x01] GB200\n"
        for rank in range(72)
    )
    row = "8589934592 2147483648 float sum -1 {0} {1} {2} 0 {0} {1} {2} 0\n"
    text = "# nThread 1 nGpus 1 minBytes 8589934592\n#\n# Using devices\n" + listed
    text += "#       size         count      type   redop    root     time   algbw   busbw #wrong\n"
    path = tmp_path / "all_reduce_72.log"
    path.write_text(text + row.format("20299", "423.16", "834.57"))
    fit = fullwire.fit_cluster([path], **where)
    assert fit.cluster.devices_per_node == 72
    assert any("its 18 hosts exchange more than NICs carry" in doubt for doubt in fit.doubts)
    path.write_text(text + row.format("202990", "42.32", "83.46"))  # as much as NICs carry
    if where:
        with pytest.raises(UsageError, match="72 ranks on 18 hosts"):
            fullwire.fit_cluster([path], **where)
    else:
        assert fullwire.fit_cluster([path]).cluster.devices_per_node == 4


def test_hosts_like_those_of_another_table_are_parts_of_a_node_too(tmp_path: Path) -> None:
    """A second rack is behind NICs, and small sizes show no rate."""
    row = "{0} {1} float sum -1 {2} {3} {4} 0 {2} {3} {4} 0\n"
    rows = {
        72: row.format(8589934592, 2147483648, 20299, "423.16", "834.57"),
        144: row.format(8589934592, 2147483648, "47420.5", "181.14", "359.77"),
        8: row.format(65536, 16384, "30.00", "2.18", "3.82"),
    }
    paths = {}
    for ranks in rows:
        paths[ranks] = tmp_path / f"all_reduce_{ranks}.log"
        paths[ranks].write_text(a_list(ranks, 4) + rows[ranks])
    for ranks in (144, 8):
        fit = fullwire.fit_cluster([paths[72], paths[ranks]])
        assert (fit.cluster.devices_per_node, fit.cluster.nodes) == (72, max(ranks // 72, 1))
        hosts = f"its {ranks // 4} hosts are like those of another table"
        assert any(hosts in doubt for doubt in fit.doubts)
        assert fullwire.fit_cluster([paths[ranks]]).cluster.devices_per_node == 4
    fit = fullwire.fit_cluster([paths[144]], devices_per_node=72)  # of racks: no host is as large
    assert any("its 36 hosts are parts of stated nodes" in doubt for doubt in fit.doubts)
    with pytest.raises(UsageError, match="8 ranks on 2 hosts"):
        fullwire.fit_cluster([paths[8]], devices_per_node=72)


def test_switches_that_add_between_hosts_make_them_no_parts_of_a_node(tmp_path: Path) -> None:
    """Four hosts of eight devices, each with 75 % of 800 Gbps: each host sends a byte once."""
    path = tmp_path / "all_reduce.log"
    row = "8589934592 2147483648 float sum -1 {0} {1} {2} 0 {0} {1} {2} 0\n"
    path.write_text(a_list(32, 8) + row.format("14352.7", "598.49", "1159.57"))
    assert fullwire.fit_cluster([path]).cluster.devices_per_node == 8


def test_of_a_table_that_was_cut_after_a_row_the_rows_are_fitted(tmp_path: Path) -> None:
    path = tmp_path / "posted.log"
    path.write_text(SHORTENED.format(perf="all_reduce_perf", rows=REDUCED))
    fit = fullwire.fit_cluster([path], devices_per_node=64)
    assert len(fit.residuals) == 2
    assert any("it ends before its average" in doubt for doubt in fit.doubts)


def test_rows_of_several_tables_that_grep_left_are_told_apart(tmp_path: Path) -> None:
    """Posted so of 8 MI325X a node: `egrep "node|8589934592|17179869184" result.log`."""
    rows = """\
====== 1-node ======
  8589934592  2147483648  float  sum  -1  47217  181.93  318.37  0  47268  181.73  318.03  0
 17179869184  4294967296  float  sum  -1  94222  182.33  319.08  0  94185  182.40  319.21  0
====== 8-node ======
  8589934592  2147483648  float  sum  -1  48321  177.77  349.98  0  48348  177.67  349.79  0
 17179869184  4294967296  float  sum  -1  96405  178.21  350.84  0  96498  178.03  350.50  0
"""
    path = tmp_path / "result-multi.log"
    path.write_text(rows)
    found = read_tables(path)
    assert [(table.op, table.workers, len(table.rows)) for table in found] == [
        ("allreduce", 8, 2),
        ("allreduce", 64, 2),
    ]
    assert fullwire.fit_cluster([path], devices_per_node=8).cluster.nodes == 8
    path.write_text(rows.replace("====== 8-node ======\n", ""))
    with pytest.raises(DamagedInput, match=r"busbw is 1\.75 times algbw"):
        fullwire.fit_cluster([path], devices_per_node=8)


def test_rows_of_a_data_type_that_is_slow_to_add_are_not_fitted(tmp_path: Path) -> None:
    """`--datatype all` of nccl-tests prints each size once a type."""
    slow = "  1073741824 1073741824 f8e4m3 sum -1 5572.2 192.70 192.70 0 5572.2 192.70 192.70 0\n"
    usual = "  1073741824 268435456 float sum -1 4154.9 258.43 258.43 0 4154.9 258.43 258.43 0\n"
    path = a_log(tmp_path, usual + slow)
    fit = fullwire.fit_cluster([path])
    assert [row.measured_s for row in fit.residuals] == [pytest.approx(4154.9e-6)]
    assert any("rows of f8e4m3 are left out beside those of float32" in it for it in fit.doubts)


@pytest.mark.parametrize("first_half", [16, 21], ids=["less of float", "no size of two types"])
def test_a_data_type_with_fewer_sizes_leaves_out_no_other(tmp_path: Path, first_half: int) -> None:
    lines = ["collective,ranks,size,type,inplace,time,algbw,busbw"]
    for dtype, powers in (("half", range(first_half, 31)), ("float", range(16, 21))):
        for size in (2**power for power in powers):
            gb_s = size / (time_us := round(30 + size / 1e5, 2)) * 1e-3
            lines.append(f"AllReduce,8,{size},{dtype},0,{time_us},{gb_s:.5f},{1.75 * gb_s:.5f}")
    path = tmp_path / "rccl.csv"
    path.write_text("\n".join(lines) + "\n")
    fit = fullwire.fit_cluster([path], devices_per_node=8)
    assert {row.bytes for row in fit.residuals} == {2**power for power in range(16, 31)}


def test_a_rank_that_is_missing_from_the_list_is_damage(tmp_path: Path) -> None:
    path = a_log(tmp_path, "1048576 262144 float sum -1 104.9 10.00 10.00 0 104.9 10.00 10.00 0\n")
    path.write_text(path.read_text().replace("Rank  1", "Rank  2"))
    with pytest.raises(DamagedInput, match="2 ranks are listed, the last is rank 2"):
        fullwire.fit_cluster([path])


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("2097152 524288 float", "2097152 524288\n", "1 row is not whole, and is left out, from"),
        ("209.8 10.00 10.00 0\n", "209.8 10.00 10.00\n", "1 row is not whole.*from line 8"),
        ("209.8 10.00 10.00 0\n", "20x.8 10.00 10.00 0\n", "1 row is not whole.*from line 8"),
        (
            "209.8 10.00 10.00 0\n",
            "1.23 10.00 10.00 0\n",
            r"line 8: 2,097,152 bytes in 1\.23 us are 1,705\.00 GB/s, and its algbw is 10",
        ),
        (
            "2097152 524288 float",
            "2097152 5 float",
            "line 8: 5 elements of float32 are 20 bytes, and its size is 2,097,152",
        ),
        ("209.8 10.00 10.00 0\n", "209.8 10.00 10.00 5\n", "5 values were wrong, by its own"),
        (
            "209.7 10.00 10.00",
            "209.7 10.00 5.00",
            r"line 8: busbw is 0\.5 times algbw, and 1 times in other rows",
        ),
    ],
)
def test_damage_in_a_column_that_no_fit_uses_or_at_a_rows_end_is_said(
    tmp_path: Path, old: str, new: str, why: str
) -> None:
    rows = "".join(
        f"{size} {size // 4} float sum -1 {size / 1e4:.1f} 10.00 10.00 0 "
        f"{size / 1e4 + 0.1:.1f} 10.00 10.00 0\n"
        for size in (2**20, 2**21, 2**22, 2**23)
    )
    assert rows.count(old) == 1
    assert not read_table(a_log(tmp_path, rows)).problems
    path = a_log(tmp_path, rows.replace(old, new))
    with pytest.raises(DamagedInput, match=why):
        fullwire.fit_cluster([path])


def test_a_table_of_another_operation_is_no_transport(shared_data: Path) -> None:
    path = shared_data / "nccl/nccl_alltoall.log"
    with pytest.raises(UsageError, match=r"expected one table of allreduce, .* are: alltoall of"):
        fullwire.whatif("vgg16@v100", workers=8, transport=str(path))


def test_of_several_tables_none_is_taken_as_the_transport(
    shared_data: Path, tmp_path: Path
) -> None:
    table = (shared_data / "nccl/nccl_allreduce.log").read_bytes()
    (tmp_path / "twice.log").write_bytes(table + table)
    told = r"are: allreduce of 8 ranks, allreduce of 8 ranks"
    with pytest.raises(UsageError, match=told):
        fullwire.whatif("vgg16@v100", workers=8, transport=str(tmp_path / "twice.log"))


def test_values_that_were_wrong_are_said(tmp_path: Path) -> None:
    path = a_log(tmp_path, "  8  2  float  sum  -1  9.5  0.1  0.1  999  9.1  0.1  0.1  0\n")
    path.write_text(path.read_text() + "# Out of bounds values : 1234 FAILED\n")
    assert read(path).missing == (f"{path}: 1,234 values were wrong, by its own validation",)


def test_the_time_before_each_line_does_not_matter(tmp_path: Path) -> None:
    path = a_log(tmp_path, "  8  2  float  sum  -1  9.5  0.1  0.1  0  9.1  0.1  0.1  0\n")
    for time in ("2024-11-21T10:00:00.123456789Z ", "2024-11-21 10:00:00 "):
        stamped = "".join(time + line for line in path.read_text().splitlines(True))
        (tmp_path / "all_reduce.stamped").write_text(stamped)
        assert read_table(tmp_path / "all_reduce.stamped") == read_table(path)


@pytest.mark.parametrize(
    "rows",
    [
        "",
        "8 2 float sum -1 nan 0 0\n",
        "8 2 float sum -1 0 0 0\n",
        "8 2 float\n",
        "x" * 100_000,
        "9" * 40 + " 1 float sum -1 1 1 1\n",
        "8 2 float sum -1 " + "9" * 30 + " 1 1\n",
    ],
)
def test_tables_without_a_usable_row_are_refused(tmp_path: Path, rows: str) -> None:
    with pytest.raises(DamagedInput):
        read(a_log(tmp_path, rows))


_COLUMNS = "#       size         count      type   redop    root     time   algbw   busbw #wrong\n"
_OLD_RCCL = """# nThread: 1 nGpus: 1 minBytes: 8 maxBytes: 134217728 step: 2(factor) warmupIters: 5
#   Rank  0 Pid 106347 on  nid000013 device  0 [0000:c9:00.0] Device 738c
#   Rank  1 Pid  97185 on  nid000014 device  0 [0000:c9:00.0] Device 738c
"""
_NAMELESS = (
    "# Collective test starting: all_reduce_perf\n"
    "#  Rank  0 Group  0 Pid 864817 on gpu611e device  0 [0000:05:00] \n"
    "#  Rank  1 Group  0 Pid 864818 on gpu611e device  1 [0000:29:00] \n"
)


@pytest.mark.parametrize(
    ("head", "bus_gb_s", "workers"),
    [
        pytest.param(_OLD_RCCL, "10.00", 2, id="old RCCL"),
        pytest.param(_NAMELESS, "10.00", 2, id="devices without a name"),
        pytest.param("", "18.75", 16, id="ranks by their bandwidths"),
        pytest.param("", "19.99", 1, id="too many for the digits"),
    ],
)
def test_whoever_made_it_its_ranks_are_counted(
    tmp_path: Path, head: str, bus_gb_s: str, workers: int
) -> None:
    path = tmp_path / "all_reduce.txt"
    row = f"  16777216  4194304  float  sum  -1  1678  10.00  {bus_gb_s}  0\n"
    path.write_text(head + _COLUMNS + row + tail(row))
    run = read(path)
    assert run.facts.workers == workers
    assert run.complete == bool(head)


def test_a_table_of_one_rank_is_no_transport(tmp_path: Path) -> None:
    path = tmp_path / "all_reduce.txt"
    row = "  1024  256  float  sum  -1  3.5  0.29  0.00  0\n"
    path.write_text(_COLUMNS + row + tail(row))
    with pytest.raises(UsageError, match="one alone sends nothing"):
        fullwire.whatif("vgg16@v100", workers=8, transport=str(path))


def test_a_transport_that_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nccl-tests"):
        fullwire.whatif("vgg16@v100", transport="nothing.log")


_ROWS = HEAD + "".join(
    f"{2**power} {2**power // 4} float sum -1 {power}.5 1 1 0\nh:1:2 [0] NCCL INFO x\n 1 1 1 0\n"
    for power in range(3, 9)
)


@cases(300)
@given(
    st.lists(
        st.tuples(
            st.integers(0, len(_ROWS)),
            st.integers(0, 30),
            st.sampled_from(
                [
                    "#",
                    "\n",
                    "float",
                    "-1",
                    "1e999",
                    "9" * 400,
                    "N/A",
                    "\0",
                    "nan",
                    "é",
                    " 8 2 float ",
                    "²",
                ]
            ),
        ),
        max_size=6,
    )
)
def test_any_damage_gives_a_run_or_one_line(
    tmp_path: Path, edits: list[tuple[int, int, str]]
) -> None:
    text = _ROWS
    for place, length, splice in edits:
        text = text[:place] + splice + text[place + length :]
    path = tmp_path / "fuzzed.log"
    path.write_text(text)
    with contextlib.suppress(FullwireError):
        fullwire.explain(read(path, format="nccl-tests"))


def test_the_commands_take_a_table(tmp_path: Path, cli: Cli) -> None:
    rows = ""
    for size, time_us in ((8**n, 10.5 + n) for n in range(2, 9)):
        rate = f"{size / time_us / 1e3:.2f}"
        rows += (
            f"{size} {size // 4} float sum -1 {time_us} {rate} {rate} 0 {time_us} {rate} {rate} 0\n"
        )
    path = a_log(tmp_path, rows)
    assert cli("import", path, "-o", tmp_path / "x.run").returncode == 0
    done = cli("whatif", "vgg16@v100", "--workers", "8", "--transport", path)
    assert done.returncode == 0, done.stderr
    assert "all_reduce.log" in done.stdout
