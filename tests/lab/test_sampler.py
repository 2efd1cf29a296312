"""The sampler beside a job: real counters of interfaces and connections, and its file."""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import time
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fullwire.recorder.inside.journal import BLOCK, HEADER_BYTES, TAG
from fullwire.recorder.record import join
from fullwire.recorder.sampler import SUFFIX, network_key
from fullwire.recorder.samples import SAMPLES, HostSamples, Kind, read_samples, sampler_share
from fullwire.run.run import Run, Sockets
from fullwire.run.store import read_run
from tests.lab.test_lab import CONNECTED, eventually, finished, lab_run, needs_namespaces

SAMPLER = Path(__file__).resolve().parents[2] / "src/fullwire/recorder/sampler.py"
SENT = 30_000_000

# `grown(512)` waits until this host's sampler has written its first samples after the header of its
# file. `sampled()` waits until it has written everything up to now.
AWAITS = """
import glob, os, socket, time
samples = os.path.join(os.environ["FULLWIRE_RECORD_INTO"], socket.gethostname() + "-*.samples")

def size():
    return max(map(os.path.getsize, glob.glob(samples)), default=0)

def grown(beyond):
    while size() <= beyond:
        time.sleep(0.01)

def sampled():
    for _ in range(2):  # the first time may have been under way
        grown(size())

grown(512)
"""
# Rank 0 sends to rank 1; both stay until the sampler has seen the connection at rest.
SENDS = f"""{AWAITS}{CONNECTED}
left = int(sys.argv[1])
if receives:
    while left:
        left -= len(peer.recv(min(left, 1 << 20)))
else:
    peer.sendall(bytes(left))
sampled()
"""
# Talks to itself over loopback, prints the port, and waits for its input to end or to be sampled.
TALKS = """
import socket, sys
server = socket.create_server(("127.0.0.1", 0))
ours = socket.create_connection(server.getsockname())
theirs, _ = server.accept()
ours.sendall(bytes(10_000))
print(ours.getsockname()[1], flush=True)
"""
STRANGER = f"{TALKS}\nsys.stdin.read()"
TALKER = f"{TALKS}{AWAITS}\nsampled()"


def record_command(place: Path, *command: str) -> list[str]:
    return [sys.executable, "-m", "fullwire", "record", "-o", str(place), "--", *command]


def python(program: str) -> list[str]:
    return [sys.executable, "-c", program]


@pytest.fixture(scope="module")
def sent(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Record a transfer between two hosts of a lab, once."""
    place = tmp_path_factory.mktemp("sent") / "job.run"
    options = ["--workers", "2", "--rate", "200Mbps", "-o", str(place)]
    done = finished(lab_run(*options, command=[sys.executable, "-c", SENDS, str(SENT)]))
    assert done.returncode == 0, done.stderr.decode()
    return read_run(place)


@needs_namespaces
def test_the_interfaces_count_the_bytes_that_the_job_moved(sent: Run) -> None:
    counted = {}
    for host in ("host0", "host1"):
        here = sent.links.rows((sent.links.host == host) & (sent.links.interface == "eth0"))
        assert (np.diff(here.time_ns) > 0).all()
        assert (np.diff(here.tx_bytes) >= 0).all()
        counted[host] = (int(np.ptp(here.tx_bytes)), int(np.ptp(here.rx_bytes)))
    # A veth counts the headers of segments that are handed down in one piece: between one in all
    # and one for each segment.
    assert SENT <= counted["host0"][0] <= SENT * 1514 / 1448 * 1.02
    assert counted["host1"][1] == pytest.approx(counted["host0"][0], rel=0.001)
    assert counted["host0"][1] < SENT / 20


@needs_namespaces
def test_the_connection_has_acknowledged_what_was_sent(sent: Run) -> None:
    sender = flow_to(sent.sockets, "host0", ":5000")
    assert 0 <= sender.bytes_acked[-1] - SENT <= 1  # the kernel counts the opening as one byte
    assert sender.rtt_ns.max() > 0
    assert 0 < sender.busy_ns[-1] <= np.ptp(sent.links.time_ns)
    usual_bps = np.median(sender.delivery_rate_bps[sender.application_limited == 0])
    assert 0 < usual_bps < 1e9  # after a standstill the kernel may estimate more for a moment


def flow_to(sockets: Sockets, host: str, end: str) -> Sockets:
    is_it = np.array([flow.endswith(end) for flow in sockets.flow], bool)
    found = sockets.rows(is_it & (sockets.host == host))
    assert len(set(found.flow)) == 1
    return found


@needs_namespaces
def test_processors_and_memory_are_shares(sent: Run) -> None:
    assert {"cpu0", "memory"} <= set(sent.hosts.device)
    assert (sent.hosts.utilization >= 0).all()
    assert (sent.hosts.utilization <= 1).all()
    assert (sent.hosts.memory_bytes[sent.hosts.device == "memory"] > 2**20).all()
    share = sent.facts.sampler_share
    assert isinstance(share, float)
    assert 0 < share < 0.5


def test_only_the_jobs_connections_are_sampled(tmp_path: Path) -> None:
    with subprocess.Popen(
        python(STRANGER), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as stranger:
        assert stranger.stdout is not None
        foreign = stranger.stdout.readline().strip()
        done = subprocess.run(
            record_command(tmp_path / "job.run", *python(TALKER)),
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
    ports = {
        flow.split(">")[0].split(":")[1] for flow in read_run(tmp_path / "job.run").sockets.flow
    }
    assert done.stdout.strip() in ports
    assert len(ports) == 2  # both ends of the connection
    assert foreign not in ports


def test_when_the_sampler_is_killed_the_job_goes_on_and_the_run_says_so(tmp_path: Path) -> None:
    place = tmp_path / "job.run"
    with subprocess.Popen(record_command(place, "cat"), stdin=subprocess.PIPE) as job:
        os.kill(sampler_of(the_file(tmp_path / "job.run.recording")), signal.SIGKILL)
    assert job.returncode == 0
    run = read_run(place)
    assert len(run.links) + len(run.hosts) > 0
    assert any("its sampler ended before the job (was it killed?)" in each for each in run.missing)


def the_file(directory: Path) -> Path:
    """Return the only file of samples, once it holds some."""

    def sizes() -> list[int]:
        return [path.stat().st_size for path in directory.glob(f"*{SUFFIX}")]

    assert eventually(lambda: len(sizes()) == 1 and sizes()[0] > HEADER_BYTES)
    [file] = directory.glob(f"*{SUFFIX}")
    return file


def sampler_of(file: Path) -> int:
    return int(file.name.split("-")[-2])


def test_the_sampler_of_a_recorder_that_was_killed_ends_with_the_job(tmp_path: Path) -> None:
    directory = tmp_path / "x.run.recording"
    command = record_command(tmp_path / "x.run", "cat")
    with subprocess.Popen(command, stdin=subprocess.PIPE) as recorder:
        sampler = sampler_of(the_file(directory))
        recorder.kill()
        recorder.wait()
        assert statuses(directory) == ["running"]
    assert eventually(lambda: statuses(directory) == ["ended"])
    assert eventually(lambda: is_over(sampler))


def is_over(process: int) -> bool:
    """Say whether a process has ended, even if its parent has not reaped it."""
    try:
        return " Z " in Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return True


def test_one_samples_a_host_and_another_goes_on_when_it_ends(tmp_path: Path) -> None:
    with sampling(tmp_path, "cat") as one, sampling(tmp_path, "cat") as other:
        tasks = {one.pid: one, other.pid: other}
        the_file(tmp_path)
        [sampled] = of(tmp_path)
        tasks.pop(sampled.header["watched"]).communicate()
        assert eventually(lambda: len(statuses(tmp_path)) == 2)
    assert one.returncode == other.returncode == 0
    assert eventually(lambda: statuses(tmp_path) == ["ended", "ended"])
    first, second = sorted((times_of(each) for each in of(tmp_path)), key=lambda each: each[0])
    assert first[-1] < second[0]


def test_no_other_user_can_take_the_place_of_the_sampler(tmp_path: Path) -> None:
    """A lock leaves no name in /proc/net/unix that somebody could take after its holder."""
    with sampling(tmp_path, "cat") as task:
        the_file(tmp_path)
        [lock] = tmp_path.glob("sampler-*.lock")
        assert lock.stat().st_mode & 0o777 == 0o600
        assert not holds_a_name(tmp_path)
        task.communicate()


def test_a_planted_lock_does_not_keep_the_sampler_away(tmp_path: Path) -> None:
    (tmp_path / f"sampler-{network_key()}.lock").symlink_to(tmp_path / "elsewhere")
    with sampling(tmp_path, "cat") as task:
        the_file(tmp_path)
        assert holds_a_name(tmp_path)
        task.communicate()
    assert not (tmp_path / "elsewhere").exists()


def holds_a_name(directory: Path) -> bool:
    known = f"{directory}\n{(directory / 'secret').read_text()}"
    name = f"fullwire-sampler-{hashlib.sha256(known.encode()).hexdigest()}"
    return name in Path("/proc/net/unix").read_text()


def sampling(directory: Path, *command: str) -> subprocess.Popen[bytes]:
    """Start a command with its sampler; `cat` ends when its input is closed."""
    words = [sys.executable, str(SAMPLER), str(directory), *command]
    return subprocess.Popen(words, stdin=subprocess.PIPE)


def of(directory: Path) -> list[HostSamples]:
    return read_samples([directory])[0]


def statuses(directory: Path) -> list[str]:
    return [each.header["status"] for each in of(directory)]


def times_of(samples: HostSamples) -> list[int]:
    return [time for _, rows in samples.of(Kind.OWN_COST) for time in rows["time_ns"].tolist()]


def test_a_job_keeps_its_process_and_sees_no_child_of_ours(tmp_path: Path) -> None:
    code = "import os\ntry: os.wait()\nexcept ChildProcessError: print(os.getpid())"
    with subprocess.Popen(
        [sys.executable, str(SAMPLER), str(tmp_path), sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        text=True,
    ) as job:
        assert job.stdout is not None
        assert int(job.stdout.read()) == job.pid  # to its end: the sampler does not hold it open


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Sample a real host for a while; return the file."""
    directory = tmp_path_factory.mktemp("whole")
    environment = {**os.environ, "FULLWIRE_RECORD_INTO": str(directory)}
    command = [sys.executable, str(SAMPLER), str(directory), *python(TALKER)]
    subprocess.run(command, env=environment, check=True, capture_output=True, timeout=30)
    assert eventually(lambda: statuses(directory) == ["ended"])
    return the_file(directory).read_bytes()


def test_a_file_cut_anywhere_opens_up_to_its_last_whole_block(whole: bytes, tmp_path: Path) -> None:
    counts = []
    for length in range(HEADER_BYTES, len(whole) + 1, 61):
        (tmp_path / f"x{SUFFIX}").write_bytes(whole[:length])
        [samples], unreadable = read_samples([tmp_path])
        assert not unreadable
        counts.append(sum(len(rows["time_ns"]) for kind in Kind for _, rows in samples.of(kind)))
    assert counts == sorted(counts)
    assert counts[0] == 0
    assert counts[-1] > 20


def test_damaged_files_leave_a_run_that_opens_and_says_so(whole: bytes, tmp_path: Path) -> None:
    chance = random.Random(0)
    (tmp_path / "recording").mkdir()
    for _ in range(60):
        damaged = bytearray(whole)
        for _ in range(chance.randrange(1, 20)):
            damaged[chance.randrange(len(damaged))] = chance.randrange(256)
        (tmp_path / "recording" / f"x{SUFFIX}").write_bytes(damaged)
        assert not join([tmp_path / "recording"], tmp_path / "x.run", replace=True).run.complete


@given(payload=st.binary(max_size=80))
def test_blocks_of_nonsense_with_a_right_checksum_are_refused_in_a_sentence(
    tmp_path_factory: pytest.TempPathFactory, whole: bytes, payload: bytes
) -> None:
    directory = tmp_path_factory.mktemp("nonsense")
    (directory / f"x{SUFFIX}").write_bytes(whole[:HEADER_BYTES] + block(payload))
    samples, unreadable = read_samples([directory])
    assert len(samples) + len(unreadable) == 1
    assert not unreadable or "not a readable file of samples" in unreadable[0]


def block(payload: bytes) -> bytes:
    return BLOCK.pack(TAG, SAMPLES, len(payload), zlib.crc32(payload)) + payload


@given(rows=st.lists(st.tuples(*[st.integers(-(2**63), 2**63 - 1)] * 2), min_size=1, max_size=6))
def test_any_numbers_are_read_as_they_were(
    tmp_path_factory: pytest.TempPathFactory, whole: bytes, rows: list[tuple[int, int]]
) -> None:
    numbers = [Kind.OWN_COST, 0]
    for column in zip(*rows, strict=True):
        numbers += [after - before for before, after in zip((0, *column), column, strict=False)]
    payload = b"".join(map(as_written, numbers))
    directory = tmp_path_factory.mktemp("numbers")
    (directory / f"x{SUFFIX}").write_bytes(whole[:HEADER_BYTES] + block(payload))
    [samples], _ = read_samples([directory])
    [(_, columns)] = samples.of(Kind.OWN_COST)
    assert [*zip(*columns.values(), strict=True)] == rows


def as_written(number: int) -> bytes:
    """Write one number as native/sampling/sample_file.cpp does."""
    wrapped = (number + 2**63) % 2**64 - 2**63
    folded, out = (wrapped << 1) ^ (wrapped >> 63), b""
    folded %= 2**64
    while folded >= 128:
        out += struct.pack("B", folded & 127 | 128)
        folded >>= 7
    return out + struct.pack("B", folded)


NVML = """
extern "C" {
struct Utilization { unsigned gpu, memory; };
struct Memory { unsigned long long total, free, used; };
int nvmlInit_v2() { return 0; }
int nvmlShutdown() { return 0; }
int nvmlDeviceGetCount_v2(unsigned* count) { *count = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned at, void** out) { *out = (void*)(at + 1ul); return 0; }
int nvmlDeviceGetUtilizationRates(void* device, Utilization* out) {
    *out = {40 + (unsigned)(unsigned long)device, 0};
    return 0;
}
int nvmlDeviceGetMemoryInfo(void*, Memory* out) { *out = {100, 30, 70}; return 0; }
}
"""


@pytest.mark.skipif(shutil.which("g++") is None, reason="a stand-in for NVML needs g++")
def test_gpus_are_sampled_through_nvml_where_it_is(tmp_path: Path) -> None:
    (tmp_path / "nvml.cpp").write_text(NVML)
    library = str(tmp_path / "libnvidia-ml.so.1")
    subprocess.run(["g++", "-shared", "-fPIC", "-o", library, tmp_path / "nvml.cpp"], check=True)
    environment = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}
    command = record_command(tmp_path / "x.run", *python(AWAITS))
    subprocess.run(command, env=environment, check=True, capture_output=True, timeout=30)
    hosts = read_run(tmp_path / "x.run").hosts
    second = hosts.rows(hosts.device == "gpu1")
    assert set(second.utilization.tolist()) == {0.42}
    assert set(second.memory_bytes.tolist()) == {70}
    assert (hosts.device == "gpu0").any()


FAKE_SYS = """
mount -t tmpfs none /sys/class || exit 77
counters=/sys/class/infiniband/mlx5_0/ports/1/counters
mkdir -p $counters
echo "400 Gb/sec (4X NDR)" > $counters/../rate
for name in xmit_data rcv_data xmit_packets rcv_packets xmit_discards; do
    echo 25 > $counters/port_$name
done
exec "$@"
"""


def apart(*namespaces: str) -> list[str]:
    """Return how to enter new namespaces, which an ordinary user may as root of one more."""
    return ["unshare", *([] if os.geteuid() == 0 else ["--map-root-user"]), *namespaces]


@needs_namespaces
def test_rdma_ports_are_sampled_where_they_are(tmp_path: Path) -> None:
    command = [
        *apart("--mount"),
        "sh",
        "-c",
        FAKE_SYS,
        "sh",
        sys.executable,
        str(SAMPLER),
        str(tmp_path),
    ]
    environment = {**os.environ, "FULLWIRE_RECORD_INTO": str(tmp_path)}
    done = subprocess.run(
        [*command, *python(AWAITS)], env=environment, capture_output=True, check=False, timeout=30
    )
    if done.returncode == 77:
        pytest.skip(f"a /sys of our own cannot be mounted: {done.stderr.decode()}")
    assert eventually(lambda: statuses(tmp_path) == ["ended"])
    [samples] = of(tmp_path)
    at = [link["name"] for link in samples.links].index("mlx5_0/1")
    assert samples.links[at]["speed_bps"] == 400e9
    rows = dict(samples.of(Kind.LINK))[at]
    assert (rows["tx_bytes"][-1], rows["rx_packets"][-1], rows["drops"][-1]) == (100, 25, 25)


def test_a_disk_that_takes_no_more_ends_the_sampler_and_not_the_job(tmp_path: Path) -> None:
    code = (
        "import os, resource, sys\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1024, 1024))\n"
        "import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "os.environ['PYTHONDONTWRITEBYTECODE'] = '1'\n"  # else it leaves beginnings of modules
        "os.execv(sys.argv[1], sys.argv[1:])"
    )
    command = [sys.executable, str(SAMPLER), str(tmp_path), "cat"]
    with subprocess.Popen([*python(code), *command], stdin=subprocess.PIPE) as job:
        assert eventually(lambda: statuses(tmp_path) == ["failed"])
        assert job.poll() is None
    assert job.returncode == 0
    run = join([tmp_path], tmp_path / "x.run").run
    assert any("its sampler failed and the job went on" in each for each in run.missing)


def test_a_sampler_is_there_at_once(tmp_path: Path) -> None:
    began_s = time.monotonic()
    with sampling(tmp_path, "true") as job:
        pass
    assert job.returncode == 0
    assert time.monotonic() - began_s < 10


@needs_namespaces
def test_a_host_with_still_links_wakes_its_sampler_less_often(tmp_path: Path) -> None:
    # A namespace of its own has no link that moves bytes. A busy machine wakes the sampler less.
    calm = [*apart("--net"), sys.executable, str(SAMPLER), str(tmp_path), "cat"]
    with subprocess.Popen(calm, stdin=subprocess.PIPE) as job:
        eventually(lambda: bool(of(tmp_path)))
        [found] = tmp_path.glob(f"*{SUFFIX}")
        status = Path(f"/proc/{found.name.split('-')[-2]}/status")
        time.sleep(1.2)  # until it takes the links for still
        before = wake_ups(status)
        time.sleep(1)
        assert 1 <= wake_ups(status) - before <= 40  # 100 where bytes move
        time.sleep(8.5)  # until links have been still for ten seconds
        before = wake_ups(status)
        time.sleep(2)
        assert 2 <= wake_ups(status) - before <= 16  # 40 before
        assert job.stdin is not None
        job.stdin.close()


def wake_ups(status: Path) -> int:
    return int(status.read_text().partition("voluntary_ctxt_switches:")[2].split()[0])


@dataclass(frozen=True)
class OneSampler:
    """A sampler of a host: when it began, when it wrote last, and its processor time."""

    host: str
    began_ms: int
    last_ms: int
    used_ms: int

    @property
    def header(self) -> dict[str, int]:
        return {"monotonic_ns": self.began_ms * 1_000_000}

    def ends_of(self, kind: Kind) -> list[tuple[int, dict[str, int], dict[str, int]]]:
        assert kind == Kind.OWN_COST
        last = {"time_ns": self.last_ms * 1_000_000, "processor_ns": self.used_ms * 1_000_000}
        return [(0, last, last)]


def test_a_sampler_that_takes_over_at_the_end_does_not_count_as_a_host_of_its_own() -> None:
    """Formerly 20 % of a processor: it waited for its turn all the time, and then ran 100 ms."""
    both = [OneSampler("a", 0, 10_000, 30), OneSampler("a", 10_000, 10_100, 20)]
    samplers = [*both, OneSampler("b", 0, 10_000, 10)]
    assert sampler_share(cast("Any", samplers)) == pytest.approx(50 / 10_100)
    assert sampler_share([]) is None
