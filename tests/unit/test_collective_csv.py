"""People's own tables of collectives in CSV are read, whatever they call their columns."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import fullwire as fw
from fullwire.errors import DamagedInput, UsageError
from fullwire.importers import read, tables

TIMES_US = {2**16: 31.5, 2**20: 104.3, 2**26: 1404.0}


def written(tmp_path: Path, text: str, name: str = "table.csv") -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


def rows(row: str, ranks: int = 16) -> str:
    """Fill a row's form for each size and operation."""
    return "\n".join(
        row.format(
            op=op,
            ranks=ranks,
            nodes=ranks // 8,
            size=size,
            kib=size // 1024,
            us=us,
            ms=us / 1e3,
            comma=f"{us}".replace(".", ","),
            rate=size / us / 1e3,
        )
        for op in ("all_reduce", "AllGather")
        for size, us in TIMES_US.items()
    )


@pytest.mark.parametrize(
    ("heading", "row"),
    [
        ("nodes,gpus,collective,size_bytes,time_us,busbw", "{nodes},{ranks},{op},{size},{us},1.2"),
        ("op;ranks;size;time(us)", "{op};{ranks};{size};{comma}"),
        ("Operation, World Size, Message Size (KiB), Latency [ms]", "{op}, {ranks}, {kib}, {ms}"),
        ("primitive\tnGPUs\tbytes\tavg_time_us", "{op}\t{ranks}\t{kib}K\t{us}"),
        ("# op,ranks,size,algbw,time", "{op},{ranks},{size},{rate:.3f},{ms:.5f}"),
        ("collective,nodes,gpus_per_node,msg_size,mean_latency_µs", "{op},{nodes},8,{size},{us}"),
        ("op,ranks,size,time,algbw,busbw", "{op},{ranks},{size},{us},{rate:.6f},0"),
        ("op,ranks,size,time_us,algbw,busbw", "{op},{ranks},{size},{us},{rate:.6f},0"),
        ("system,gpus,collective,size,oop_time_us", 'ours,{ranks},{op},"{size:,}",{us}'),
    ],
)
def test_columns_are_found_by_their_names_and_units(tmp_path: Path, heading: str, row: str) -> None:
    path = written(tmp_path, f"{heading}\n{rows(row)}\n\n")
    found = tables(path)
    assert [(table.op, table.workers) for table in found] == [("allreduce", 16), ("allgather", 16)]
    for table in found:
        times_us = {each.bytes: each.time_us for each in table.rows}
        assert times_us == pytest.approx(TIMES_US)
        assert not table.is_damaged
    devices = None if "nodes" in heading else 8
    fitted = fw.fit_cluster([path], devices_per_node=devices).cluster
    assert (fitted.nodes, fitted.devices_per_node) == (2, 8)
    assert read(path).facts.workers == 16


def test_the_name_of_the_file_tells_an_operation_that_no_column_names(tmp_path: Path) -> None:
    text = "ranks,size,time_us\n8,1048576,104.3\n"
    [table] = tables(written(tmp_path, text, "reduce_scatter_8.csv"))
    assert table.op == "reducescatter"
    [table] = tables(written(tmp_path, text))
    assert not table.op
    rates = "op,ranks,redop,size,time_us,algbw,busbw\n,8,sum,67108864,1404.0,47.80,83.65\n"
    [table] = tables(written(tmp_path, rates))
    assert table.op == "allreduce"
    assert table.problems[0].endswith("not named: by its bandwidths allreduce")


@pytest.mark.parametrize(
    ("cells", "reason"),
    [
        ("16,{size},1x4.3", "expected a number above 0, got time_us '1x4.3'"),
        ("16,n/a,104.3", "expected a number above 0, got size 'n/a'"),
        ("16,{size},104M", "expected a number above 0, got time_us '104M'"),
        ("?,{size},104.3", "expected a number above 0, got ranks '?'"),
        ("16,{size},-1", "expected a number above 0, got time_us '-1'"),
        ("16,{size},1e999", "expected a number above 0, got time_us '1e999'"),
        ("16,{size},5e12", r"expected a time from 1 ns to an hour, got 5e\+12 us"),
        ('16,{size},"12,3x"', "expected a number above 0, got time_us '12,3x'"),
        ("16,1,048,576,104.3", "expected 4 cells, got 6"),
        ("16,{size},104.3,7", "expected 4 cells, got 5"),
        ("16,13l072,6.3l", "expected a number above 0, got size '13l072'"),
        ("16,65.536,104.3", "expected a whole number, got size '65.536'"),
        ("16.5,{size},104.3", "expected a whole number, got ranks '16.5'"),
    ],
)
def test_a_garbled_row_is_left_out_and_told_and_the_others_are_fitted(
    tmp_path: Path, cells: str, reason: str
) -> None:
    text = "op,ranks,size,time_us\n" + rows("{op},{ranks},{size},{us}")
    whole = written(tmp_path, text, "whole.csv")
    path = written(tmp_path, text.replace("16,1048576,104.3", cells.format(size=2**20), 1))
    found = fw.fit_cluster([path], devices_per_node=8)
    assert len(found.residuals) == 2 * len(TIMES_US) - 1
    [doubt] = found.problems
    assert re.search(f"1 row is left out: line 3: {reason}", doubt)
    [problem] = [gap.reason for gap in read(path).gaps]
    assert problem in doubt
    kept = {(each.op, each.bytes, each.measured_s) for each in found.residuals}
    every = fw.fit_cluster([whole], devices_per_node=8).residuals
    assert {(each.op, each.bytes, each.measured_s) for each in every} > kept


def test_one_comma_for_a_point_leaves_its_row_out_where_other_numbers_have_points(
    tmp_path: Path,
) -> None:
    text = "op;ranks;size;time_us\n" + "".join(
        f"allreduce;8;{2**power};{2**power / 1e3:.3f}\n" for power in range(10, 30)
    )
    path = written(tmp_path, text.replace("1048.576", "1048,576"))
    [table] = tables(path)
    assert len(table.rows) == 19
    assert "line 12: expected a number above 0, got time_us '1048,576'" in table.problems[0]
    few = "\n".join(text.splitlines()[:7]).replace("4.096", "4,0960")
    with pytest.raises(UsageError, match="may stand between thousands or before decimals"):
        tables(written(tmp_path, few))


def test_an_operation_that_is_unknown_is_not_that_of_the_files_name(tmp_path: Path) -> None:
    text = "op,ranks,size,time_us\nallreduce,8,1024,12\n,8,2048,13\nbcast,8,1024,5\nbarrier,8,8,6\n"
    reduced, sent = tables(written(tmp_path, text, "my_allreduce.csv"))
    assert (reduced.op, len(reduced.rows), sent.op, len(sent.rows)) == (
        "allreduce",
        2,
        "broadcast",
        1,
    )
    assert "line 5: expected an operation, such as allreduce, got 'barrier'" in sent.problems[0]
    unnamed = text.replace("allreduce", "first").replace("bcast", "next")
    [table] = tables(written(tmp_path, unnamed, "all_reduce.csv"))
    assert (table.op, len(table.rows)) == ("allreduce", 4)


def test_gpus_of_all_nodes_may_be_as_many_on_several_numbers_of_nodes(tmp_path: Path) -> None:
    rows_of_nodes = "size,time_us\nAR,1,8,1024,12\nAR,8,8,1024,13\n"
    found = tables(written(tmp_path, f"op,nodes,total_gpus,{rows_of_nodes}"))
    assert [(table.workers, table.nodes) for table in found] == [(8, 1), (8, 8)]
    found = tables(written(tmp_path, f"op,nodes,gpus,{rows_of_nodes.replace('R,1', 'R,')}"))
    assert [(table.workers, table.nodes) for table in found] == [(8, 0), (8, 8)]


def test_a_bandwidth_of_too_few_digits_is_told_as_that(tmp_path: Path) -> None:
    path = written(tmp_path, "op,ranks,size,busbw\nAR,8,1024,0.1\nAR,8,1048576,20.97\n")
    [table] = tables(path)
    assert table.problems[0].endswith("1 row lacks enough digits of busbw, from line 2")


def test_a_time_in_microseconds_may_be_in_the_encoding_of_a_spreadsheet(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    for text in (
        "op,ranks,size,time (µs)\nAR,8,1024,12\n",
        "op,ranks,size,time\nAR,8,1024,12 µs\n",
    ):
        path.write_bytes(text.encode("latin-1"))
        [table] = tables(path)
        assert [row.time_us for row in table.rows] == [12]


def test_a_table_of_another_kind_does_not_resemble_one_of_collectives(tmp_path: Path) -> None:
    with pytest.raises(DamagedInput) as refused:
        read(written(tmp_path, "step,time,size,loss\n1,2,3,4\n"))
    assert "lacks columns" not in str(refused.value)


def test_rows_with_a_cell_before_the_first_column_are_not_read_shifted(tmp_path: Path) -> None:
    path = written(tmp_path, "ranks,size,time_us\n1,8,1024,12.5\n2,8,2048,13.5\n", "all_reduce.csv")
    with pytest.raises(DamagedInput, match="line 2: expected 3 cells, got 4"):
        tables(path)


def test_where_most_rows_are_garbled_the_others_are_not_fitted(tmp_path: Path) -> None:
    text = "op,ranks,size,time_us\n" + rows("{op},{ranks},{size},{us}x")
    path = written(tmp_path, f"{text}\nall_reduce,16,4194304,300\n")
    with pytest.raises(DamagedInput, match=r"6 rows are left out: line 2: .*also lines 3, 4, 5"):
        fw.fit_cluster([path], devices_per_node=8)


def test_a_time_that_its_own_bandwidth_contradicts_is_left_out(tmp_path: Path) -> None:
    text = "op,ranks,size,time_us,algbw\n" + rows("{op},{ranks},{size},{us},{rate:.2f}")
    path = written(tmp_path, text.replace(",104.3,", ",1043,", 1))
    found = fw.fit_cluster([path], devices_per_node=8)
    assert len(found.residuals) == 2 * len(TIMES_US) - 1
    assert "line 3: 1,048,576 bytes in 1,043 us are 1.01 GB/s, and its algbw is 10.05" in str(
        found.doubts
    )


@pytest.mark.parametrize(
    ("heading", "row", "reason"),
    [
        ("op,ranks,size,time", "AR,8,2048,13", "expected a time with its unit, got time '13'"),
        ("ranks,size,busbw", "8,2048,13", "expected an operation, without which this bandwidth"),
        ("op,ranks,size,busbw", "AR,1,2048,13", "expected 2 ranks or more, without which this"),
        ("op,ranks,size,algbw", "AR,8,2048,30.97 GB", "a number above 0, got algbw '30.97 GB'"),
        ("op,ranks,size,algbw", "AR,8,2048,20 gbps", "a number above 0, got algbw '20 gbps'"),
    ],
)
def test_a_cell_without_the_word_that_it_needs_is_left_out_for_that(
    tmp_path: Path, heading: str, row: str, reason: str
) -> None:
    text = f"{heading}\n{row}\n" + "AR,8,1024,12us\n" * ("time" in heading)
    with pytest.raises(DamagedInput, match=reason):
        fw.fit_cluster([written(tmp_path, text)], devices_per_node=8)


def test_words_below_a_table_are_no_rows(tmp_path: Path) -> None:
    text = "op,ranks,size,time_us\n" + rows("{op},{ranks},{size},{us}")
    noted = written(tmp_path, f"{text}\n# by hand\naverage,,,\n")
    assert [table.problems for table in tables(noted)] == [(), ()]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("op,ranks,size,time\nallreduce,8,1024,12\n", "its times have no unit: name the column"),
        ("op,ranks,size,time,algbw\nallreduce,8,1024,12,9\n", "no unit fits its algbw"),
        (
            "gpu,op,ranks,size,time_us\na100,allreduce,8,1024,12\nh100,allreduce,8,1024,9\n",
            r"of several systems \(a100, h100\): keep those of one",
        ),
        (
            "op,ranks,algorithm,size,time_us\nallreduce,8,Ring,1024,12\nallreduce,8,Tree,1024,9\n",
            r"of one size differ in their algorithm \(ring, tree\): keep those of one",
        ),
        (
            "op,ranks,dtype,size_B,time_us\nallreduce,8,half,1024,12\nallreduce,8,float,1024,9\n",
            r"differ in their dtype \(float, half\)",
        ),
        (
            "op,ranks,in_place,size,time_us\nallreduce,8,a,1024,12\nallreduce,8,b,1024,9\n",
            r"differ in their in_place \(a, b\)",
        ),
        (
            "op,nodes,gpus,size,time_us\nallreduce,1,8,1024,12\nallreduce,2,8,1024,19\n",
            "gpus is 8 on 1 and on 2 nodes: name the column gpus_per_node",
        ),
        (
            "op,nodes,gpus,size,time_us\nAR,1,4,1024,12\nAR,1,8,1024,13\nAR,2,4,1024,19\n",
            "gpus is 8 on 1 and 4 on 2 nodes: name the column gpus_per_node",
        ),
        (
            "op,ranks,size,time_us\nAR,8,1024,12\nop,ranks,time_us,size\nAG,8,9,1024\n",
            "line 3: another heading: expected one in a file",
        ),
        ("op,ranks,size,busbw_gbps\nallreduce,8,1024,12\n", "may be of bits or of bytes"),
        (
            "op,ranks,dtype,message_size,time_us\nallreduce,8,half,524288,50\n",
            "may be bytes or elements: expected size_bytes",
        ),
        (
            "op,ranks,dtype,size,time_us,algbw\nallreduce,8,half,1048576,50,41.94\n",
            "0.5 times its algbw",
        ),
        (
            "op,ranks,size,time_us,algbw_GBps\nallreduce,8,1048576,0.05,20.97\n",
            r"1e\+03 times its algbw",
        ),
        ("op\tranks\tsize\ttime_us\nallreduce\t8\t1024\t2,100\n", "may stand between thousands"),
        (
            'op,ranks,size,time_us\nallreduce,8,"65,536","35,5"\n',
            "a comma, as in '35,5', may stand between thousands or before decimals",
        ),
    ],
)
def test_a_table_that_may_mean_two_things_is_refused(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        tables(written(tmp_path, text))


@pytest.mark.parametrize(
    ("text", "times_us"),
    [
        ("ranks\top\tsize\ttime_us\n8\tallreduce\t1,048,576\t2,100\n", {2**20: 2100.0}),
        ('ranks,op,size,time_us\n8,allreduce,65536,"35,5"\n', {2**16: 35.5}),
        (
            "op,ranks,in_place,size,time_us\nallreduce,8,0,1024,12\nallreduce,8,1,1024,9\n",
            {1024: 12.0},
        ),
        ("op,ranks,size,time\nAR,8,1024,12 us\nAR,8,1048576,1.5ms\n", {1024: 12, 2**20: 1500}),
        ("op,ranks,size,time_ms\nAR,8,1024,12 µs\nAR,8,1048576,1.5\n", {1024: 12, 2**20: 1500}),
        ("op,ranks,size,min_us,avg_us,max_us\nAR,8,1024,9,12,19\n", {1024: 12.0}),
        ("op,ranks,size,time_us_oop,time_us_ip\nAR,8,1024,12,9\n", {1024: 12.0}),
        ("op,gpus,bytes,lat_us\nAR,8 GPUs,1024,12\nAR,8x,2048,13\n", {1024: 12.0, 2048: 13.0}),
        ("of March,,,\n\nop,ranks,size,time_us\nallreduce,8,1024,12\n", {1024: 12.0}),
        ("op,ranks,size,algbw\nAR,8,1024,0.00\nAR,8,1048576,20.97\n", {2**20: 50.0}),
        ("op,ranks,size,time,algbw (GBytes/s)\nAR,8,1048576,50,20.97\n", {2**20: 50.0}),
        ("op,ranks,size,busbw (Gbit/s)\nAR,8,1048576,293.6\n", {2**20: 50.0}),
        ("op,ranks,size,time_us\nAR,8,1024,12\nop,ranks,size,time_us\n", {1024: 12.0}),
        ("op,ranks,size,busbw (GiB/s)\nAR,8,1073741824,100\n", {2**30: 17500.0}),
        ("op,ranks,size,algbw\nAR,8,1048576,20.97 GB/s\n", {2**20: 50.0}),
        ("op,ranks,size,algbw_GBps\nAR,8,1048576,167.8 Gbit/s\n", {2**20: 50.0}),
        ("run,ranks,size,time_us,op\n1,8.0,1024.0,12,AR\n", {1024: 12.0}),
        ("t_s,op,ranks,size,time_us\n1.5,AR,8,1024,12\n", {1024: 12.0}),
        ("mean_s,op,ranks,size,latency_us\n3,AR,8,1024,12\n", {1024: 12.0}),
        ("op,ranks,size,time_us,mean_s\nAR,8,1024,12,3\n", {1024: 12.0}),
        (
            "op,ranks,size_GB,time_us\nAR,8,1,12\nAR,8,2,13\nAR,8,1e300,14\n",
            {10**9: 12, 2 * 10**9: 13},
        ),
        (f"op,ranks,size,algbw\nAR,8,1048576,0.{'0' * 400}\nAR,8,1024,1.0\n", {1024: 1.024}),
        ("name,collective,ranks,size,time_us\nrun1,all_reduce,8,1024,9\n", {1024: 9.0}),
        ("op,collective,ranks,size,time_us\nsum,all_reduce,8,1024,9\n", {1024: 9.0}),
        (
            "op,ranks,device,size,time_us\nallreduce,8,0,1024,9\nallreduce,8,1,2048,9\n",
            {1024: 9.0, 2048: 9.0},
        ),
        ("op,ranks,size,time_us\nallreduce,8,1GB,9\nallreduce,8,1G,9\n", {10**9: 9.0, 2**30: 9.0}),
        ("op,ranks,size_GB,time_us\nallreduce,8,1,9\n", {10**9: 9.0}),
        ("op,ranks,size,time,algbw (Gbps)\nallreduce,8,1048576,0.05,167.8\n", {2**20: 50.0}),
    ],
)
def test_columns_and_numbers_mean_what_their_whole_column_says(
    tmp_path: Path, text: str, times_us: dict[int, float]
) -> None:
    [table] = tables(written(tmp_path, text))
    assert table.op == "allreduce"
    assert {row.bytes: row.time_us for row in table.rows} == pytest.approx(times_us, rel=1e-3)


def test_rows_in_place_are_left_out_and_told_only_beside_rows_out_of_place(tmp_path: Path) -> None:
    heading = "op,ranks,in_place,size,time_us\n"
    text = f"{heading}AR,8,0,1024,12\nAR,8,1,1024,9\nAR,8,1,2048,10\nAG,8,1,1024,8\n"
    reduced, gathered = tables(written(tmp_path, text))
    assert [(row.bytes, row.time_us) for row in reduced.rows] == [(1024, 12), (2048, 10)]
    assert [(row.bytes, row.time_us) for row in gathered.rows] == [(1024, 8)]
    assert "1 in-place row is left out beside rows out of place" in reduced.problems[0]
    blank = "AR,8,,1024,12\nAR,8,1,2048,9\nAR,8,0,4096,14\nAR,8,1,8192,15\n"
    [table] = tables(written(tmp_path, heading + blank))
    assert [row.time_us for row in table.rows] == [12, 9, 14, 15]
    assert not table.problems


def test_rows_in_place_count_among_the_whole_rows_of_a_file(tmp_path: Path) -> None:
    rows_of_both = "AR,8,0,{0},12\nAR,8,1,{0},9\n"
    garbled = "".join(f"AR,8,0,{2**power},1x\n" for power in range(10, 13))
    text = "".join(rows_of_both.format(2**power) for power in range(20, 22))
    [table] = tables(written(tmp_path, f"op,ranks,in_place,size,time_us\n{text}{garbled}"))
    assert not table.is_damaged
    assert len(table.rows) == 2


def test_of_repeated_rows_the_middle_one_counts(tmp_path: Path) -> None:
    times_us = (48, 47, 49, 48, 192)
    lines = [f"allreduce,8,{2**20},{us},{count}" for count, us in enumerate(times_us)]
    path = written(tmp_path, "\n".join(["op,ranks,size_bytes,time_us,iter", *lines]))
    assert len(tables(path)[0].rows) == len(times_us)
    [residual] = fw.fit_cluster([path], devices_per_node=8).residuals
    assert residual.measured_s == pytest.approx(48e-6)


def test_comments_and_rows_without_a_size_or_a_time_leave_the_rest_to_the_fit(
    tmp_path: Path,
) -> None:
    text = "op,ranks,size,time_us\n" + rows("{op},{ranks},{size},{us}")
    odd = "\n# all_reduce,16,64,77\nall_reduce,16,0,12\nall_reduce,16,4194304,N/A\n"
    path = written(tmp_path, text + odd)
    found = fw.fit_cluster([path], devices_per_node=8)
    assert len(found.residuals) == 2 * len(TIMES_US)
    assert [problem.split(": ")[1] for problem in found.problems] == [
        "1 row lacks a time, from line 10"
    ]


def test_a_csv_without_an_operation_is_asked_for_a_column(tmp_path: Path) -> None:
    path = written(tmp_path, "ranks,size,time_us\n8,1048576,104.3\n")
    with pytest.raises(UsageError, match="expected a column op, such as alltoall"):
        fw.fit_cluster([path], devices_per_node=8)


def test_a_contradiction_names_the_line_of_a_row(tmp_path: Path) -> None:
    path = written(tmp_path, "op,ranks,size,time_us\n" + rows("{op},{ranks},{size},{us}"))
    with pytest.raises(UsageError, match=r"table\.csv, line 4: allreduce of 67.11 MB.*nics\.rate"):
        fw.fit_cluster([path], cluster="p3dn")


def test_a_text_that_is_no_table_is_refused_without_an_option_of_other_commands(
    tmp_path: Path,
) -> None:
    path = written(tmp_path, "hello world\nno table\n", "notes.txt")
    with pytest.raises(DamagedInput, match="tables of nccl-tests") as refused:
        fw.fit_cluster([path], devices_per_node=8)
    assert "--pattern" not in str(refused.value)
    with pytest.raises(DamagedInput, match="--pattern REGEX"):
        read(path)
    heading = written(tmp_path, "op,ranks,size,time_us\n")
    with pytest.raises(DamagedInput, match="expected rows with a size, a time and ranks"):
        fw.fit_cluster([heading], devices_per_node=8)
    lacking = written(tmp_path, "op,size,time_us\nallreduce,1024,12\n")
    with pytest.raises(DamagedInput, match="lacks columns: ranks"):
        fw.fit_cluster([lacking], devices_per_node=8)
