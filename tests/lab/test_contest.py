"""The measurements of `fullwire bench transport`, and their table."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from ctypes.util import find_library
from pathlib import Path

import pytest

from fullwire.errors import FullwireError
from fullwire.studies.contest import (
    Contest,
    Measured,
    Moved,
    Outcome,
    Turn,
    contest_in_lab,
    contest_object,
    mpi_program,
    plot_contest,
    print_contest,
)
from tests.conftest import Cli
from tests.lab.test_lab import needs_namespaces
from tests.torch.test_record import needs_torch

MIB = 1 << 20
# At 10 Gbps a mebibyte takes two workers 0.877 ms at the payload limit.
OURS = tuple(Turn(time_s, 0.5e-3) for time_s in (1.0e-3, 1.1e-3, 0.9e-3))
THEIRS = tuple(Turn(time_s, 1.0e-3) for time_s in (3.0e-3, 3.3e-3, 1.8e-3))


def an_outcome() -> Outcome:
    return Outcome(
        contest=Contest(rate_bps=10e9, against=("gloo", "mpi"), sizes_bytes=(MIB,), rounds=3),
        workers=2,
        measured=(
            Measured(who=0, size_bytes=MIB, turns=OURS),
            Measured(who=1, size_bytes=MIB, turns=THEIRS),
        ),
        moved=(Moved(1, 8.2e9),),
        notes=("OpenMPI is not installed: sudo apt install openmpi-bin",),
    )


def test_a_row_says_who_is_faster_and_what_share_of_the_limit_both_reach() -> None:
    (row,) = contest_object(an_outcome())["rows"]
    assert (row["bytes"], row["workers"], row["rate_bps"]) == (MIB, 2, 10e9)
    assert (row["against"], row["ours_s"], row["theirs_s"]) == ("gloo", 1.0e-3, 3.0e-3)
    assert row["limit_bps"] == pytest.approx(10e9 * 1448 / 1514)
    assert row["ours_bus_bps"] == pytest.approx(8 * MIB / 1.0e-3)
    assert row["theirs_limit_share"] == pytest.approx(8 * MIB / 3.0e-3 / row["limit_bps"])
    assert row["ours_cpu_s_per_gb"] == pytest.approx(0.5e-3 / MIB * 1e9)
    assert row["times_faster"] == pytest.approx(3.0)  # round by round: 3, 3 and 2
    assert row["times_faster_interval"]["low"] == pytest.approx(2.0)


def test_each_wire_format_is_a_row_against_plain_float32(
    capsys: pytest.CaptureFixture[str],
) -> None:
    contest = Contest(
        rate_bps=1e9, against=("plain",), sizes_bytes=(MIB,), rounds=3, wires=("bf16", "int8")
    )
    assert contest.participants == (
        ("fullwire", "bf16"),
        ("fullwire", "int8"),
        ("plain", "float32"),
    )
    turns = (OURS, tuple(Turn(each.time_s / 2, 1e-3) for each in OURS), THEIRS)
    measured = tuple(Measured(who=w, size_bytes=MIB, turns=t) for w, t in enumerate(turns))
    outcome = Outcome(contest=contest, workers=2, measured=measured, moved=(), notes=())
    rows = contest_object(outcome)["rows"]
    assert [(row["wire"], row["times_faster"]) for row in rows] == [
        ("bf16", pytest.approx(3.0)),
        ("int8", pytest.approx(6.0)),
    ]
    print_contest(outcome)
    table = [line for line in capsys.readouterr().out.splitlines() if "plain" in line]
    assert ["bf16, plain" in table[0], "int8, plain" in table[1]] == [True, True]


def test_what_iperf3_moves_and_who_is_missing_stand_beside_the_table(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_contest(an_outcome())
    said = capsys.readouterr().out
    assert "Payload limit (rate x 1448/1514): 9.564 Gbps" in said
    assert "iperf3 both ways at once, 1 stream: 8.2 Gbps each way" in said
    assert "3.00x (2.00 to 3.00)" in said
    assert "OpenMPI is not installed: sudo apt install openmpi-bin" in said


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    plot_contest(an_outcome(), tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


@needs_torch
def test_of_iperf3_both_ways_count() -> None:
    """The JSON of iperf 3.12 with --bidir -J, reduced to the fields that are read."""
    from fullwire.studies.contest.rank import IperfFailed, both_ways_bps

    end = {
        "sum_sent": {"bits_per_second": 9.9e9, "sender": True},
        "sum_received": {"bits_per_second": 9.0e9, "sender": True},
        "sum_sent_bidir_reverse": {"bits_per_second": 7.9e9, "sender": False},
        "sum_received_bidir_reverse": {"bits_per_second": 7.0e9, "sender": False},
    }
    assert both_ways_bps({"end": end}) == 8.0e9
    with pytest.raises(IperfFailed, match="measured nothing: unable to connect"):
        both_ways_bps({"error": "unable to connect to server"})


def test_a_turn_is_one_large_reduction_or_many_small_ones() -> None:
    contest = Contest(rate_bps=1e9, against=("gloo",))
    assert contest.repeats(4, 2) == 200
    assert contest.repeats(256 * MIB, 2) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--workers", "2", "--against", "nccl"],
            "against: expected gloo or mpi or plain, got 'nccl'",
        ),
        (["--workers", "2", "--against", "gloo,gloo"], "against: expected each peer once"),
        (["--workers", "2", "--wire", "fp8"], "wire: expected float32, bf16, fp16, int8, auto"),
        (["--workers", "2", "--against", "plain"], "plain is ours in clear and float32"),
        (["--workers", "2", "--sizes", "4B,6B"], "sizes: expected multiples of 4 bytes"),
        (["--workers", "2", "--sizes", "4"], "sizes: expected a size with its unit"),
        (["--workers", "2", "--rounds", "1"], "rounds: expected at least 3"),
        (["--workers", "1"], "workers: expected at least 2"),
        (["--workers", "100000"], "of memory, and"),
        ([], "workers: expected how many hosts"),
    ],
)
@needs_torch
def test_a_mistake_is_one_line_before_anything_is_made(
    cli: Cli, options: list[str], message: str
) -> None:
    done = cli("bench", "transport", "--rate", "1Gbps", *options)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


@needs_torch
def test_under_torchrun_the_ranks_are_those_of_torchrun(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    done = cli("bench", "transport", "--rate", "1Gbps", "--workers", "2")
    assert done.returncode == 2
    assert "workers: under torchrun its ranks take part, and they are 3: got 2" in done.stderr


@needs_torch
def test_half_of_torchruns_environment_is_refused_with_what_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from fullwire.studies.contest.rank import take_part

    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(FullwireError, match=r"bench transport: .*MASTER_ADDR"):
        take_part(Contest(rate_bps=1e9, against=("gloo",)))


@needs_torch
def test_a_rank_alone_in_the_environment_makes_nobody_a_rank(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert "workers: expected how many" in cli("bench", "transport", "--rate", "1Gbps").stderr


@needs_torch
@needs_namespaces
@pytest.mark.usefixtures("uncompiled")
def test_all_take_part_in_turns_on_the_hosts_of_a_lab(monkeypatch: pytest.MonkeyPatch) -> None:
    """The participants check the sums; here, that each took part or is named as missing."""
    monkeypatch.setenv("PATH", "")
    contest = Contest(
        rate_bps=1e9,
        against=("gloo", "mpi"),
        sizes_bytes=(4, 256 << 10),
        rounds=3,
        encrypts=True,
        wires=("float32", "int8"),
    )
    outcome = contest_in_lab(contest, workers=2)
    assert [(each.who, each.size_bytes, len(each.turns)) for each in outcome.measured] == [
        (who, size_bytes, 3) for size_bytes in contest.sizes_bytes for who in (0, 1, 2)
    ]
    assert all(turn.time_s > 0 for each in outcome.measured for turn in each.turns)
    assert outcome.moved == ()
    missing_iperf, missing_mpi = outcome.notes
    assert [row["wire"] for row in contest_object(outcome)["rows"]] == ["float32", "int8"] * 2
    assert missing_iperf.startswith("iperf3 is missing")
    assert missing_mpi.startswith("OpenMPI is not installed")


@pytest.mark.skipif(
    find_library("mpi") != mpi_program.LIBRARY,
    reason="OpenMPI is not installed: apt install openmpi-bin",
)
def test_openmpi_reduces_on_request(short_folder: Path) -> None:
    """One rank alone, as MPI programs may be started, so mpirun is not needed."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(short_folder / "mpi"))
        listener.listen()
        listener.settimeout(30)
        program = subprocess.Popen(
            [sys.executable, str(mpi_program.__file__)],
            env={**os.environ, mpi_program.SOCKET_VARIABLE: str(short_folder / "mpi")},
        )
        connection, _ = listener.accept()
    with connection, connection.makefile("r") as lines:
        connection.sendall(b"4096\n4096 0\n4096 3\n")
        assert json.loads(lines.readline()) == {"wrong": 0}
        assert json.loads(lines.readline())["time_s"] > 0
        connection.shutdown(socket.SHUT_RDWR)
    assert program.wait(30) == 0
