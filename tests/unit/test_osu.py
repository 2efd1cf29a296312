"""Output of the OSU benchmarks, in the forms in which people publish it.

The forms are those of converged-computing/metrics-operator (examples/tests/network-osu-benchmark),
of converged-computing's runs on Usernetes, and of sites' guides for versions 5.6 to 7.5.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fullwire
from fullwire.errors import DamagedInput, FullwireError
from fullwire.importers import read, tables
from tests.strategies import cases

ALLREDUCE = """mpirun -n 16 -N 8 -hostfile hosts.txt -x PATH osu_xccl_allreduce -d cuda D D
[node1:28293] SET UCX_NET_DEVICES=mlx5_6:1
#Using NCCL

# OSU NCCL-CUDA Allreduce Latency Test v7.5
# Datatype: MPI_FLOAT.
# Size       Avg Latency(us)   Min Latency(us)   Max Latency(us)  Iterations
4                      11.69             11.01             12.55        1000
1048576                64.00             61.52             66.72        1000

real    0m7.045s
user    0m0.077s
100 200
"""
METRICS = """METRICS OPERATOR TIMEPOINT
mpirun --hostfile ./hostfile.txt --allow-run-as-root -np 4 /opt/osu/mpi/collective/osu_allgather
# OSU MPI Allgather Latency Test v5.8
# Size       Avg Latency(us)
1                       1.60
262144                100.00
METRICS OPERATOR TIMEPOINT
mpirun --hostfile ./hostfile.txt --allow-run-as-root -np 2 /opt/osu/mpi/pt2pt/osu_latency
# OSU MPI Latency Test v5.8
# Size          Latency (us)
0                       0.80
1024                    0.51
METRICS OPERATOR TIMEPOINT
mpirun --hostfile ./hostfile.txt --allow-run-as-root -np 2 /opt/osu/mpi/pt2pt/osu_bibw
# OSU MPI Bi-Directional Bandwidth Test v5.8
# Size      Bandwidth (MB/s)
1                       2.41
METRICS OPERATOR TIMEPOINT
mpirun --hostfile ./hostfile.txt --allow-run-as-root -np 2 /opt/osu/mpi/pt2pt/osu_bw
# OSU MPI Bandwidth Test v5.8
# Size      Bandwidth (MB/s)
1048576              10485.76
METRICS OPERATOR COLLECTION END
"""


def written(where: Path, text: str, name: str = "osu.out") -> Path:
    (where / name).write_text(text)
    return where / name


def test_a_table_is_read_with_the_ranks_of_its_command(tmp_path: Path) -> None:
    [table] = tables(written(tmp_path, ALLREDUCE))
    assert (table.op, table.workers, table.backend) == ("allreduce", 16, "nccl")
    assert [(row.bytes, row.time_us) for row in table.rows] == [(4, 11.69), (1 << 20, 64.0)]
    assert table.rows[1].algorithm_gb_s == pytest.approx(16.384)
    assert table.rows[1].bus_gb_s == pytest.approx(16.384 * 2 * 15 / 16)
    assert (table.rows[0].dtype, table.problems) == ("float32", ())


def test_sizes_of_an_all_gather_are_of_one_rank_and_become_the_whole(tmp_path: Path) -> None:
    gather, latency, bandwidth = tables(written(tmp_path, METRICS))
    assert (gather.op, gather.workers, gather.rows[1].bytes) == ("allgather", 4, 4 * 262_144)
    assert gather.rows[1].bus_gb_s == pytest.approx(4 * 2.62144 * 3 / 4)
    assert (latency.op, latency.workers, latency.rows[0].bytes) == ("sendrecv", 2, 0)
    assert bandwidth.rows[0].time_us == pytest.approx(100.0)
    assert "these tables are not read: Bi-Directional Bandwidth" in gather.problems[0]


def test_a_barrier_has_no_size_and_ranks_that_nothing_tells_are_said(tmp_path: Path) -> None:
    text = "# OSU MPI Barrier Latency Test v5.8\n# Avg Latency(us)\n            12.57\n"
    [table] = tables(written(tmp_path, text))
    assert (table.op, table.rows[0].bytes, table.rows[0].time_us) == ("barrier", 0, 12.57)
    assert "its number of ranks is not told: taken for one" in table.problems[0]


@pytest.mark.parametrize(
    "tag",
    ["[1,0]<stdout>:", " 0: ", "[0] ", "node1: ", "job-0 | ", "2024-05-01 12:00:00,123 INFO "],
)
def test_launchers_tags_do_not_matter(tmp_path: Path, tag: str) -> None:
    tagged = "".join(f"{tag}{line}\n" for line in ALLREDUCE.splitlines())
    [table] = tables(written(tmp_path, tagged))
    assert len(table.rows) == 2


def test_the_benchmarks_in_python_print_the_same_table(tmp_path: Path) -> None:
    text = "# OMB Python MPI Latency Test\n# Size (B)      Latency (us)\n1024          21.92\n"
    [table] = tables(written(tmp_path, text))
    assert (table.op, table.workers) == ("sendrecv", 2)
    assert [(row.bytes, row.time_us) for row in table.rows] == [(1024, 21.92)]


def test_tables_are_a_run_of_collectives_one_after_another(tmp_path: Path) -> None:
    run = read(written(tmp_path, METRICS))
    assert (run.facts.workers, run.facts.backend) == (4, "mpi")
    assert sorted(set(run.collectives.op)) == ["allgather", "sendrecv"]
    ends = run.collectives.end_ns[run.collectives.rank == 0]
    assert (np.diff(ends) > 0).all()


def test_a_table_is_a_transport(tmp_path: Path) -> None:
    place = written(tmp_path, ALLREDUCE)
    grid = fullwire.whatif("vgg16@v100", workers=16, bandwidth="10Tbps", transport=str(place))
    full = fullwire.whatif("vgg16@v100", workers=16, bandwidth="10Tbps")
    assert grid["communication_s"][0] > full["communication_s"][0]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("# OSU MPI_Put Latency Test v5.8\n# Size  Latency (us)\n1  0.44\n", "Put Latency"),
        ("# OSU MPI Non-blocking Allreduce Latency Test v5.6.3\n4 1 1 1 1\n", "Non-blocking"),
        ("# OSU MPI Allreduce Latency Test v5.6.3\n# Size  Avg Latency(us)\n", "no whole row"),
    ],
)
def test_what_is_not_read_is_named(tmp_path: Path, text: str, why: str) -> None:
    with pytest.raises(DamagedInput, match=why):
        read(written(tmp_path, text))


@pytest.mark.parametrize(
    "row",
    [
        "16384 -400.00",
        "16384 4x0.00",
        "16384",
        "16384 400",
        "16384 400.0",
        "16y84 400.00",
        "x16384 400.00",
        "400.00",
        "16384 0.00",
    ],
)
def test_a_row_that_is_damaged_is_said_and_the_table_is_not_fitted(
    tmp_path: Path, row: str
) -> None:
    head = "# mpirun -np 16 osu_allreduce\n# OSU MPI Allreduce Latency Test v5.9\n"
    begin = "# Size       Avg Latency(us)\n1024       14.20\n"
    path = written(tmp_path, f"{head}{begin}{row}\n1048576 6000.00\n")
    [table] = tables(path)
    assert [size.bytes for size in table.rows] == [1024, 1048576]
    for ask in (
        lambda: fullwire.fit_cluster([path], devices_per_node=8),
        lambda: fullwire.whatif("vgg16@v100", workers=16, transport=str(path)),
    ):
        with pytest.raises(
            DamagedInput, match="line 5 is not whole or not in order, and is left out"
        ):
            ask()


def test_rows_that_are_not_in_ascending_order_are_damage(tmp_path: Path) -> None:
    head = "# mpirun -np 16 osu_allreduce\n# OSU MPI Allreduce Latency Test v5.9\n"
    rows = "1024       14.20\n4096       20.10\n2048       16.00\n8192       30.00\n"
    path = written(tmp_path, f"{head}# Size       Avg Latency(us)\n{rows}\n512 1000\n")
    [table] = tables(path)
    assert [row.bytes for row in table.rows] == [1024, 4096, 8192]
    assert table.problems == (f"{path}: line 6 is not whole or not in order, and is left out",)
    with pytest.raises(DamagedInput, match="line 6 is not whole or not in order"):
        fullwire.fit_cluster([path], devices_per_node=8)


@pytest.mark.parametrize(
    ("command", "ranks", "nodes", "fullest"),
    [
        ("srun -N 4 --ntasks-per-node=4 osu_allreduce", 16, 4, 4),
        ("srun -N 4 -n 16 osu_allreduce", 16, 4, 0),
        ("srun --nodes=4 --ntasks=16 osu_allreduce", 16, 4, 0),
        ("mpirun -np 16 -npernode 4 osu_allreduce", 16, 4, 4),
        ("mpirun -np 16 -N 4 osu_allreduce", 16, 4, 4),
        ("mpirun -np 16 --map-by ppr:4:node osu_allreduce", 16, 4, 4),
        ("mpiexec -n 8 -ppn 4 osu_allreduce : -n 8 osu_allreduce", 16, 4, 4),
        ("mpirun -np 16 osu_allreduce", 16, 0, 0),
        ("salloc -N 2 mpirun -np 16 osu_allreduce", 16, 0, 0),
        ("mpirun -np 16 numactl -N 1 osu_allreduce", 16, 0, 0),
        ("mpirun -np 16 --allow-run-as-root numactl -N 1 osu_allreduce", 16, 0, 0),
        ("mpirun --mca btl tcp,self -x A='b c' -np 16 -N 4 osu_allreduce -n 3", 16, 4, 4),
        ("srun -n16 -N4 bash -c 'exec ./osu_allreduce -N 2'", 16, 4, 0),
        ("mpirun -np 16 --merge-stderr-to-stdout numactl -N 1 osu_allreduce", 16, 0, 0),
        ("mpirun.openmpi -np 16 -N 4 osu_allreduce | tee osu_allreduce.log", 16, 4, 4),
        ("jsrun -n 16 bash -c 'source e.sh; ./osu_allreduce' &> osu_allreduce.txt", 16, 0, 0),
        ("export N=4; nice -n 10 mpirun -np 16 -N 4 osu_allreduce 2>&1 | tail -n 4", 16, 4, 4),
    ],
)
def test_hosts_that_a_command_states_are_those_of_its_table(
    tmp_path: Path, command: str, ranks: int, nodes: int, fullest: int
) -> None:
    head = f"# {command}\n# OSU MPI Allreduce Latency Test v5.9\n# Size  Avg Latency(us)\n"
    path = written(tmp_path, f"{head}1024       14.20\n1048576       140.00\n")
    [table] = tables(path)
    assert (table.workers, table.nodes, table.fullest) == (ranks, nodes, fullest)
    if nodes:
        with pytest.raises(fullwire.UsageError, match=r"osu\.out, line 1: 16 ranks on 4 hosts"):
            fullwire.fit_cluster([path], devices_per_node=8)
    fullwire.fit_cluster([path], devices_per_node=4)


@pytest.mark.parametrize(
    "command",
    [
        "nice -n 10 ./osu_allreduce",
        "mpirun -np 8 hostname; ./osu_allreduce",
        "mpirun -np 8 osu_bcast",
    ],
)
def test_a_command_that_does_not_start_the_table_tells_no_ranks(
    tmp_path: Path, command: str
) -> None:
    title = "# OSU MPI Allreduce Latency Test v5.9\n# Size  Avg Latency(us)\n1024       14.20\n"
    [table] = tables(written(tmp_path, f"# {command}\n{title}"))
    assert (table.workers, table.nodes, table.line) == (1, 0, 0)
    assert "its number of ranks is not told: taken for one" in table.problems[0]


@pytest.mark.parametrize(
    "command",
    [
        "mpirun --hostfile hosts osu_allreduce",
        "mpirun -np 4 osu_latency; mpirun -np 8 osu_allreduce",
        "./osu_allreduce",
    ],
)
def test_a_later_command_without_a_number_does_not_keep_that_of_an_earlier_table(
    tmp_path: Path, command: str
) -> None:
    table = "# OSU MPI Allreduce Latency Test v5.9\n# Size  Avg Latency(us)\n1024       14.20\n"
    path = written(tmp_path, f"$ mpirun -np 8 osu_allreduce\n{table}\n$ {command}\n{table}")
    first, second = tables(path)
    assert (first.workers, first.line, first.problems) == (8, 1, ())
    assert (second.workers, second.line) == (1, 0)
    assert "its number of ranks is not told: taken for one" in second.problems[0]


@cases(100)
@given(place=st.integers(0, len(METRICS) - 1), byte=st.integers(0, 255), cut=st.booleans())
def test_any_damage_gives_tables_or_one_line(
    tmp_path: Path, place: int, byte: int, cut: bool
) -> None:
    data = METRICS.encode()
    damaged = data[:place] if cut else data[:place] + bytes([byte]) + data[place + 1 :]
    (tmp_path / "osu.out").write_bytes(damaged)
    with contextlib.suppress(FullwireError):
        found = tables(tmp_path / "osu.out", format="osu")
        assert all(row.time_us > 0 for table in found for row in table.rows)
