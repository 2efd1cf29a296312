"""Emulated accelerators: real DDP over real links, with the times and sizes of a profile."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import fullwire as fw
from fullwire.answers.emulation import emulated_job
from fullwire.errors import UsageError
from fullwire.lab.description import describe
from fullwire.lab.emulated import available_bytes, trainer_command
from fullwire.lab.faults import parse_faults
from fullwire.recorder.assemble import Known
from fullwire.recorder.record import join, keep
from fullwire.run.emulation import undilated
from fullwire.run.facts import Facts
from fullwire.run.run import Collectives, Gradients, Provenance, Run, Sockets
from fullwire.run.store import read_run, write
from tests.builders import MS, a_run, spans
from tests.lab.test_lab import finished, needs_namespaces
from tests.torch.test_record import needs_torch, together

PROFILE = ((5.0, 2_000_000), (12.0, 400_000), (30.0, 1_200_000))  # ready in ms, bytes


def emulated(*options: str | Path) -> list[str]:
    words = [sys.executable, "-m", "fullwire", "lab", "run", *map(str, options)]
    return words if "--rate" in words else [*words, "--rate", "1Gbps"]


def of_rank(run: Run, rank: int, name: str) -> tuple[np.ndarray, np.ndarray]:
    chosen = (run.spans.rank == rank) & (run.spans.name == name) & (run.spans.step >= 0)
    return run.spans.start_ns[chosen], run.spans.end_ns[chosen]


def check_profile(run: Run, rank: int, steps: int) -> None:
    """Check that every step has the profile's gradients, none of them ready before its time."""
    step_start, step_end = of_rank(run, rank, "step")
    begin, end = of_rank(run, rank, "backward")
    assert len(step_start) == len(begin) == steps
    early_ns = 0.4 * MS  # an accelerator's clock begins a pass a little before torch calls it
    after_ns = []  # the step's start; on a busy machine any one step may note it late
    for step in range(steps):
        chosen = (run.gradients.rank == rank) & (run.gradients.step == step)
        gradients = run.gradients.rows(chosen)
        assert gradients.bytes.tolist() == [size for _, size in PROFILE]
        after_ns.append(gradients.ready_ns - step_start[step])
    ready_ns = np.array([ready * MS for ready, _ in PROFILE])
    assert (np.median(after_ns, axis=0) >= 10 * MS + ready_ns - 2 * MS).all()
    assert np.median(end - begin) >= 30 * MS - 10 * early_ns
    assert np.median(step_end - step_start) >= 45 * MS - early_ns


# On a lab


@needs_namespaces
@needs_torch
@pytest.mark.usefixtures("uncompiled")
def test_a_run_is_played_and_what_it_did_can_be_played_again(tmp_path: Path) -> None:
    profile, alone, dilated = (tmp_path / name for name in ("profile.run", "1.run", "2.run"))
    write(a_run(gradients=PROFILE, forward_ms=10, optimizer_ms=5), profile)

    done = finished(emulated("--workload", profile, "--workers", "1", "--steps", "8", "-o", alone))
    assert done.returncode == 0, done.stderr.decode()
    assert b"profile.run: 8 steps of" in done.stdout
    assert b"The profile alone takes 45 ms, scaling factor" in done.stdout
    run = read_run(alone)
    assert run.complete
    assert run.facts.dilation is None
    check_profile(run, 0, steps=8)
    # One worker sends nothing. Only this time is checked from above, because a busy machine may
    # lengthen any time.
    assert np.median(np.diff(of_rank(run, 0, "step"), axis=0)) < 90 * MS

    done = finished(
        emulated(
            "--workload",
            alone,
            "--workers",
            "2",
            "--rate",
            "100Mbps",
            "--dilate",
            "3",
            "--steps",
            "3",
            "--buckets",
            "ddp:1MiB",
            "--backend",
            "fullwire",
            "-o",
            dilated,
        )
    )
    assert done.returncode == 0, done.stderr.decode()
    assert b"(median, undilated from 3 times that)" in done.stdout
    assert b"dilated 3 times: compute and links are that much slower" in done.stderr
    assert b"all times; the job ran 3 times slower" in done.stderr
    check_dilated(read_run(dilated), alone)


def check_dilated(run: Run, profile: Path) -> None:
    assert run.complete
    assert run.facts.dilation == 3
    assert run.facts.line_rate_bps == 100e6
    assert run.facts.buckets == "ddp:1MiB"
    assert run.facts.backend == "fullwire"
    delivered = run.facts.delivered_out_bps
    assert isinstance(delivered, tuple)
    assert all(0.9 * 95.6e6 < bps < 1.1 * 95.6e6 for _, bps in delivered)
    for rank in (0, 1):
        check_profile(run, rank, steps=3)
        here = (run.collectives.rank == rank) & (run.collectives.step == 1)
        assert run.collectives.bytes[here].sum() == sum(size for _, size in PROFILE)
    # 3.6 MB each way at 100 Mbps are 288 ms: no transport is faster than a full wire.
    predicted = fw.whatif(profile, workers=2, bandwidth="100Mbps", buckets="ddp:1MiB")
    steps_ns = np.diff(of_rank(run, 0, "step"), axis=0)
    assert 0.97 * predicted["step_s"][0] < np.median(steps_ns) * 1e-9 < 3 * predicted["step_s"][0]


@needs_torch
def test_gradients_stay_numbers_in_their_place_however_long_it_goes() -> None:
    command = together(4, "emulated.py", "130")
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    said = set(done.stdout.splitlines())
    assert len(said) == 1
    assert said.pop().startswith("numbers True, never copied True")


# Arguments


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "expected --workload, or a command after --"),
        (["--workload", "vgg16@v100", "--", "true"], "--workload or a command, got both: true"),
        (["--steps", "3", "--", "true"], "--steps: expected --workload with it"),
        (["--dilate", "3", "--", "true"], "--dilate: expected --workload with it"),
        (["--buckets", "ddp", "--", "true"], "--buckets: expected --workload with it"),
        (["--backend", "gloo", "--", "true"], "--backend: expected --workload with it"),
        (["--metric", "loss: (.)", "--", "true"], "--metric reads the job's output for the run"),
        (["--noise", "--", "true"], "--noise notes gradient noise in the run that -o names"),
        (["--workload", "vgg16@v100", "--backend", "nccl"], "expected gloo or fullwire, got 'nccl"),
        (["--workload", "vgg16@nothing"], "vgg16@nothing"),
        (["--workload", "vgg16@v100", "--dilate", "0.5"], "dilate: expected 1 or more"),
        (["--workload", "vgg16@v100", "--dilate", "10x"], "dilate: expected a plain number"),
        (["--workload", "vgg16@v100", "--buckets", "paper"], "expected ddp or ddp:SIZE, got paper"),
        (["--workload", "vgg16@v100", "--dilate", "2000"], "rate: expected 1 Mbps to"),
    ],
)
def test_a_mistake_is_one_line_before_anything_is_made(options: list[str], message: str) -> None:
    place = options.index("--") if "--" in options else len(options)
    words = [*options[:place], "--workers", "2", "--rate", "1Gbps", *options[place:]]
    done = finished(emulated(*words))
    assert done.returncode == 2
    assert message in done.stderr.decode()
    assert done.stderr.count(b"\n") == 1


def test_what_does_not_fit_into_memory_is_refused_with_the_figure(tmp_path: Path) -> None:
    size = 4 * (available_bytes() // 3 // 2 // 4 + 2**26)  # two workers take more than there is
    place = write(a_run(gradients=[(1.0, size)]), tmp_path / "large.run")
    done = finished(emulated("--workload", place, "--workers", "2"))
    assert done.returncode == 2
    assert f"need some {6 * size / 1e9 + 0.4:.4g} GB of memory" in done.stderr.decode()


def test_the_file_of_one_who_was_killed_is_removed_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    profile = write(a_run(gradients=[(1.0, 8)]), tmp_path / "small.run")
    emulation = emulated_job(str(profile)).emulation
    orphan, foreign = tmp_path / "fullwire-emulation-dead.json", tmp_path / "fullwire-notes.json"
    with trainer_command(emulation) as living:
        for each in (orphan, foreign):
            each.touch()
        for each in (orphan, foreign, Path(living[-1])):
            os.utime(each, (0, 0))
        with trainer_command(emulation):
            assert not orphan.exists()
            assert foreign.exists()
            assert Path(living[-1]).exists()
    assert sorted(tmp_path.iterdir()) == [foreign, profile]


def test_gradients_that_float32_cannot_fill_are_refused(tmp_path: Path) -> None:
    place = write(a_run(gradients=[(1.0, 10)]), tmp_path / "odd.run")
    with pytest.raises(UsageError, match="multiples of 4 bytes, got one of 10"):
        emulated_job(str(place))


def test_an_imported_log_of_the_paper_is_a_workload(shared_data: Path, tmp_path: Path) -> None:
    log = fw.read(shared_data / "netx" / "vgg16.bk.log", step_time="194.5ms")
    emulation = emulated_job(str(write(log, tmp_path / "vgg16.run"))).emulation
    assert emulation.step_ns == 194_500_000
    assert emulation.backward_ns == np.diff(of_rank(log, 0, "backward"), axis=0)
    assert sum(emulation.gradient_bytes) == log.gradients.bytes.sum()


def test_a_run_of_several_workers_is_played_without_its_waiting(tmp_path: Path) -> None:
    """The step is its computation, although it began with waiting for other ranks."""
    computed = a_run(gradients=PROFILE, forward_ms=10).gradients.columns()
    computed["ready_ns"] = computed["ready_ns"] + 60 * MS
    run = Run(
        provenance=Provenance(origin="measured", source="a test"),
        facts=Facts(workers=2),
        gradients=Gradients(**computed),
        collectives=a_collective("allgather", 0, 60 * MS),
        spans=spans(
            ("host", "step", 0, 100 * MS),
            ("compute", "forward", 60 * MS, 70 * MS),
            ("compute", "backward", 70 * MS, 100 * MS),
        ),
    )
    job = emulated_job(str(write(run, tmp_path / "two.run")))
    [warning] = job.warnings
    assert warning.startswith("1 other collective of each recorded step (allgather)")
    emulation = job.emulation
    assert (emulation.forward_ns, emulation.backward_ns, emulation.rest_ns) == (10 * MS, 30 * MS, 0)


def a_collective(op: str, issue_ns: int, end_ns: int) -> Collectives:
    none, text = np.zeros(1, np.int64), np.array([op], object)
    return Collectives(
        rank=none,
        step=none,
        sequence=none,
        group=text,
        op=text,
        dtype=text,
        bytes=none + 4,
        issue_ns=none + issue_ns,
        start_ns=none + issue_ns,
        end_ns=none + end_ns,
    )


# Dilation


def test_links_and_faults_are_slowed_with_the_rest() -> None:
    description = describe(
        workers=2, rate=["100Gbps", "1:10Gbps"], latency="1ms", dilation=10
    )  # a link of the lab can be 10 Gbps, but not 100 Gbps
    assert description.rates_bps == [10e9, 1e9]
    assert description.latency_s == pytest.approx(0.01)
    with pytest.raises(UsageError, match=r"got 5 Mbps, 500 kbps when dilated"):
        parse_faults(["1s slow 0 5Mbps"], description)


def test_undilated_times_are_shorter_rates_higher_and_sizes_as_they_were() -> None:
    one, text = np.array([10]), np.array(["a"], object)
    sockets = Sockets(
        host=text,
        flow=text,
        time_ns=one,
        bytes_acked=one,
        retransmits=one,
        rtt_ns=one,
        cwnd_packets=one,
        delivery_rate_bps=np.array([1e9]),
        application_limited=one,
        busy_ns=one,
        receiver_window_limited_ns=one,
        send_buffer_limited_ns=one,
    )
    facts = Facts(
        recorder_s=0.5,
        line_rate_bps=1e9,
        workers=2,
        payload_share=0.9,
        processor_s=((0.0, 1.0), (1.0, 2.0)),
    )
    provenance = Provenance(origin="measured", source="a test")
    run = undilated(Run(provenance=provenance, facts=facts, sockets=sockets), 10.0)
    assert (run.sockets.time_ns[0], run.sockets.rtt_ns[0], run.sockets.busy_ns[0]) == (1, 1, 1)
    assert (run.sockets.bytes_acked[0], run.sockets.cwnd_packets[0]) == (10, 10)
    assert run.sockets.delivery_rate_bps[0] == 1e10
    assert run.facts == Facts(
        recorder_s=0.05,
        line_rate_bps=1e10,
        workers=2,
        payload_share=0.9,
        processor_s=((0.0, 0.1), (1.0, 0.2)),
    )


def test_what_was_known_of_a_job_outlives_it(tmp_path: Path) -> None:
    """After everything is killed, `join` still knows that the times were dilated."""

    def killed(_directory: Path) -> int:
        raise RuntimeError

    known = Known(source="a job", basis="modelled", facts=Facts(dilation=10.0, hosts="a,b"))
    with pytest.raises(RuntimeError):
        keep(killed, tmp_path / "x.run", known)
    run = join([tmp_path / "x.run.recording"], tmp_path / "x.run").run
    assert (run.facts.dilation, run.facts.hosts) == (10.0, "a,b")
    assert (run.provenance.source, run.provenance.basis) == ("a job", "modelled")
