"""Packets captured beside a job: all packets, of every host, without any effect on the job."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from fullwire.answers.audited import audited
from fullwire.findings.audit import audit_of_recording
from fullwire.packets.flows import analyse_flows
from fullwire.packets.pcap import read_captures
from fullwire.recorder.record import join
from fullwire.run.run import Run
from fullwire.run.store import read_run
from fullwire.words import sentences
from tests.lab.test_lab import (
    as_nobody,
    finished,
    interpreter_for_all,
    lab_run,
    needs_namespaces,
)
from tests.lab.test_sampler import SENDS, record_command

SENT = 20_000_000
CAPTURES = """
import os, socket, sys
from fullwire._native import PacketCapture
own = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
file = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT)
capture = PacketCapture(file, [("lo", own.fileno())])
print("ready", flush=True)
capture.run(os.getppid())
"""


@pytest.fixture(scope="module")
def sent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Capture a transfer between two hosts of a lab, once."""
    place = tmp_path_factory.mktemp("captured") / "job.run"
    options = ["--workers", "2", "--rate", "200Mbps", "--packets", "-o", str(place)]
    done = finished(lab_run(*options, command=[sys.executable, "-c", SENDS, str(SENT)]))
    assert done.returncode == 0, done.stderr.decode()
    assert b"captured, none dropped" in done.stderr
    return place


@needs_namespaces
def test_every_byte_of_a_job_is_captured_and_agrees_with_the_interfaces(sent: Path) -> None:
    run = read_run(sent)
    traffic = audited(analyse_flows(run))
    assert traffic.hosts == ("host0", "host1")
    unseen = dataclasses.replace(run, sockets=type(run.sockets).empty())  # of a short job
    assert analyse_flows(unseen).hosts == traffic.hosts
    assert traffic.matrix_payload_bytes.tolist() == [[0, SENT], [0, 0]]
    assert run.facts.dropped_packets == run.facts.missed_bytes == 0
    [audit] = sentences(tuple(audit_of_recording(run)))
    assert "before segmentation" in audit
    assert counted_apart(run) < 1e-4
    assert audit in traffic.audit


def counted_apart(run: Run) -> float:
    """Return the relative difference between the captures and the interfaces' counters."""
    counted = 0
    for host in set(run.links.host.tolist()):
        rows = run.links.rows(run.links.host == host)
        counted += int(rows.tx_bytes[-1] - rows.tx_bytes[0] + rows.rx_bytes[-1] - rows.rx_bytes[0])
    captured = run.facts.captured_bytes
    assert isinstance(captured, int)
    return abs(captured / counted - 1)


@needs_namespaces
def test_flows_are_on_the_clock_of_the_run(sent: Path) -> None:
    run = read_run(sent)
    sender = run.links.rows(run.links.host == "host0")
    is_later = sender.tx_bytes - sender.tx_bytes[0] > SENT // 2
    before, after = sender.time_ns[~is_later].max(), sender.time_ns[is_later].min()
    half = int(run.flows.start_ns[run.flows.payload_bytes.cumsum() > SENT // 2][0])
    assert before - 200_000_000 < half < after + 200_000_000


@needs_namespaces
def test_the_run_holds_a_capture_of_each_host_that_other_tools_read(sent: Path) -> None:
    captures = sorted((sent / "packets").iterdir())
    assert [path.name.partition("-")[0] for path in captures] == ["host0", "host1"]
    again = read_captures(captures)
    assert again.complete
    assert again.facts.captured_packets == read_run(sent).facts.captured_packets
    assert max(map(os.path.getsize, captures)) < SENT / 10  # headers only
    if tcpdump := shutil.which("tcpdump"):
        read = finished([tcpdump, "-nr", str(captures[0]), "tcp port 5000"])
        assert b"10.77.0.1" in read.stdout


@needs_namespaces
def test_the_job_finds_no_socket_and_no_word_of_the_capture(tmp_path: Path) -> None:
    looks = "import os, json; print(json.dumps([os.listdir('/proc/self/fd'), list(os.environ)]))"
    place = tmp_path / "job.run"
    options = ["--workers", "1", "--rate", "1Gbps", "--packets", "-o", str(place)]
    done = finished(lab_run(*options, command=[sys.executable, "-c", looks]))
    assert done.returncode == 0, done.stderr.decode()
    files, names = json.loads(done.stdout)
    assert len(files) <= 4  # its own three, and the one of this listing
    assert not [name for name in names if "PACKET" in name]


@needs_namespaces
def test_after_kill_9_of_it_all_the_captures_open_and_can_be_joined(tmp_path: Path) -> None:
    place = tmp_path / "job.run"
    options = ["--workers", "2", "--rate", "200Mbps", "--packets", "-o", str(place)]
    command = lab_run(*options, command=[sys.executable, "-c", SENDS, "100000000"])
    directory = tmp_path / "job.run.recording"
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as job:

        def is_under_way() -> bool:
            written = [path.stat().st_size for path in directory.glob("*.capturing")]
            return len(written) == 2 and min(written) > 100_000

        began_s = time.monotonic()
        while not is_under_way() and time.monotonic() < began_s + 30:
            time.sleep(0.05)
        job.send_signal(signal.SIGKILL)
    run = join([directory], place).run
    assert 1_000_000 < int(run.flows.payload_bytes.sum()) < 100_000_000
    assert sum("captured until it was killed" in sentence for sentence in run.missing) == 2


@pytest.fixture
def may_capture() -> None:
    try:
        socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0).close()
    except PermissionError:
        pytest.skip("capturing on this machine's loopback needs CAP_NET_RAW")


@pytest.mark.usefixtures("may_capture")
def test_packets_that_find_no_room_are_counted_and_said(tmp_path: Path) -> None:
    """Stop the capture, so that its ring overflows; loopback shows each packet twice."""
    path, sent = tmp_path / "x.pcapng", 100_000
    job = subprocess.Popen([sys.executable, "-c", CAPTURES, str(path)], stdout=subprocess.PIPE)
    with job, socket.socket(type=socket.SOCK_DGRAM) as ours, socket.socket(type=ours.type) as sink:
        assert job.stdout is not None
        assert job.stdout.readline() == b"ready\n"
        job.send_signal(signal.SIGSTOP)
        os.waitpid(job.pid, os.WUNTRACED)  # it has stopped
        sink.bind(("127.0.0.1", 0))
        ours.connect(sink.getsockname())
        for _ in range(sent):
            ours.send(bytes(100))
        job.send_signal(signal.SIGCONT)
        job.send_signal(signal.SIGTERM)
    run = read_captures([path])
    captured, dropped = run.facts.captured_packets, run.facts.dropped_packets
    assert isinstance(captured, int)
    assert isinstance(dropped, int)
    assert dropped > 10_000
    assert captured + dropped >= 2 * sent
    assert f"{dropped:,} packets were dropped by the capture" in run.missing[0]


def test_without_the_right_to_capture_one_sentence_says_so_before_the_job_starts(
    tmp_path: Path,
) -> None:
    if os.geteuid() != 0 or not shutil.which("setpriv"):
        pytest.skip("giving rights up by setpriv needs root")
    left = tmp_path / "left"
    command = record_command(tmp_path / "job.run", "touch", str(left))
    command.insert(command.index("--"), "--packets")
    done = finished(["setpriv", "--bounding-set=-net_raw", "--inh-caps=-net_raw", *command])
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert b"CAP_NET_RAW" in done.stderr
    assert not list(tmp_path.iterdir())


@needs_namespaces
def test_an_ordinary_user_captures_in_a_lab(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("every other test of this file has just shown it: they ran without root")
    python = interpreter_for_all()
    native = "import fullwire._native"
    if python is None or finished([*as_nobody(), python, "-c", native]).returncode != 0:
        pytest.skip("another user may run no Python of this version here that has our native part")
    with tempfile.TemporaryDirectory() as folder:  # pytest's own folders are for one user only
        os.chmod(folder, 0o777)
        place = Path(folder) / "job.run"
        options = ["--workers", "2", "--rate", "200Mbps", "--packets", "-o", str(place)]
        command = lab_run(*options, command=[python, "-c", SENDS, "1000000"])
        done = finished([*as_nobody(), python, *command[1:]])
        assert done.returncode == 0, done.stderr.decode()
        assert int(read_run(place).flows.payload_bytes.sum()) == 1_000_000


def test_packets_without_a_run_to_hold_them_are_a_mistake() -> None:
    done = finished(lab_run("--workers", "1", "--rate", "1Gbps", "--packets", command=["true"]))
    assert done.returncode == 2
    assert b"-o X.run" in done.stderr
