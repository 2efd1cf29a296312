"""The lab, with real namespaces: its hosts, its links, and its clean-up."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from pyroute2 import IPRoute, netns

from fullwire.errors import UsageError
from fullwire.lab.description import describe
from fullwire.lab.faults import Fault, parse_faults
from fullwire.lab.lab import Lab
from fullwire.lab.messages import LinkRate
from fullwire.lab.session import run_job
from tests.conftest import Cli

SRC = Path(__file__).resolve().parents[2] / "src"
UNKNOWN = 65533  # a user without a name or a home, as in containers

# Rank 0 has a connection to rank 1.
CONNECTED = """
import os, socket, sys, time
receives = os.environ["RANK"] == "1"
if receives:
    peer, _ = socket.create_server(("", 5000)).accept()
else:
    for attempt in range(2000):
        try:
            peer = socket.create_connection(("host1", 5000))
            break
        except ConnectionRefusedError:
            time.sleep(0.02)
"""
# It sends a number of bytes, and rank 1 prints how long they took.
TRANSFER = f"""{CONNECTED}
size = int(sys.argv[1])
if receives:
    began, left = time.perf_counter(), size
    while left:
        left -= len(peer.recv(min(left, 1 << 20)))
    print(time.perf_counter() - began)
else:
    peer.sendall(bytes(size))
"""
# It sends for a time. Rank 1 prints how often in a row it waited for 0.1 s in vain. A machine that
# stands still makes neither rank wait.
LONGEST_PAUSE = f"""{CONNECTED}
if receives:
    peer.settimeout(0.1)
    in_vain = longest = 0
    piece = b"something"
    while piece:
        try:
            piece, in_vain = peer.recv(1 << 20), 0
        except TimeoutError:
            in_vain += 1
            longest = max(longest, in_vain)
    print(longest)
else:
    until = time.perf_counter() + float(sys.argv[1])
    while time.perf_counter() < until:
        peer.sendall(bytes(1 << 20))
"""

# Rank 0 sends over many connections to rank 1, and prints the counts of its queue: sent and
# dropped.
SIXTEEN_AT_ONCE = """
import os, socket, threading, time
from pyroute2 import IPRoute

def take(peer):
    while peer.recv(1 << 20):
        pass

def connected():
    for attempt in range(2000):
        try:
            return socket.create_connection(("host1", 5000))
        except ConnectionRefusedError:
            time.sleep(0.02)

if os.environ["RANK"] == "1":
    listener = socket.create_server(("", 5000))
    at_work = [threading.Thread(target=take, args=listener.accept()[:1]) for _ in range(16)]
else:
    peers = [connected() for _ in range(16)]
    at_work = [threading.Thread(target=each.sendall, args=(bytes(4_000_000),)) for each in peers]
for each in at_work:
    each.start()
for each in at_work:
    each.join()
if os.environ["RANK"] == "0":
    for each in peers:
        each.close()
    with IPRoute() as own:
        [bucket] = own.get_qdiscs(own.link_lookup(ifname="eth0")[0])
    statistics = bucket.get_attr("TCA_STATS2")
    print(statistics.get_attr("TCA_STATS_BASIC")["bytes"],
          statistics.get_attr("TCA_STATS_QUEUE")["drops"])
"""


needs_namespaces = pytest.mark.usefixtures("namespaces")


def lab_run(*options: str, command: list[str]) -> list[str]:
    return [sys.executable, "-m", "fullwire", "lab", "run", *options, "--", *command]


def finished(command: list[str]) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(command, capture_output=True, timeout=100, check=False)


def printed_by(capfd: pytest.CaptureFixture[str], lab: Lab, program: str, *words: str) -> str:
    """Run a Python program on every host and return what all of them print."""
    capfd.readouterr()
    assert run_job(lab, [sys.executable, "-c", program, *words]) == 0
    return capfd.readouterr().out


def shortest_s(take: Callable[[], float], enough_s: float) -> float:
    """Return the shortest of several times, because a busy machine may lengthen any of them."""
    took_s = take()
    for _ in range(9):
        if took_s <= enough_s:
            break
        took_s = min(took_s, take())
    return took_s


def eventually(holds: Callable[[], bool], within_s: float = 30.0) -> bool:
    until_s = time.monotonic() + within_s
    while not holds() and time.monotonic() < until_s:
        time.sleep(0.02)
    return holds()


def machine_networks() -> tuple[list[str], list[str]]:
    with IPRoute() as netlink:
        names = [link.get_attr("IFLA_IFNAME") for link in netlink.get_links()]
    return sorted(names), sorted(netns.listnetns())


def processes_with(word: str) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdecimal() and word.encode() in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
        except OSError:  # it has ended since
            continue
    return found


def children_of(parent: int) -> set[int]:
    listed = Path(f"/proc/{parent}/task/{parent}/children").read_text()
    return {int(number) for number in listed.split()}


def supervisors() -> set[int]:
    """Find the processes that hold labs, including other users' labs."""
    return set(processes_with("fullwire.lab.supervisor"))


# Descriptions of labs


def test_a_rate_for_all_and_one_for_a_single_host() -> None:
    description = describe(workers=3, rate=["1Gbps", "2:300Mbps"])
    assert description.rates_bps == [1e9, 1e9, 300e6]
    assert description.payload_share == pytest.approx(1448 / 1514)


def test_a_timetable_is_put_in_order() -> None:
    description = describe(workers=3, rate=["1Gbps"])
    assert parse_faults(["8s cut 2", "500ms slow 0 100Mbps"], description) == (
        Fault(at_s=0.5, kind="slow", host=0, rate_bps=100e6),
        Fault(at_s=8, kind="cut", host=2),
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--workers", "2", "--rate", "1"], "rate: expected a rate with its unit"),
        (["--workers", "2", "--rate", "1kbps"], "expected 1 Mbps to 34.36 Gbps"),
        (["--workers", "2", "--rate", "40Gbps"], "expected 1 Mbps to 34.36 Gbps"),
        (["--workers", "2", "--rate", "1:1Gbps"], "expected one line rate for all hosts"),
        (["--workers", "2", "--rate", "1Gbps", "--rate", "2:1Gbps"], "a worker from 0 to 1, got 2"),
        (["--workers", "2", "--rate", "1Gbps", "--rate", "x:1Gbps"], "the number of a host"),
        (["--workers", "999", "--rate", "1Gbps"], "at most 128 hosts"),
        (["--workers", "2", "--rate", "1Gbps", "--mtu", "9"], "mtu: expected 576 to 9000"),
        (["--workers", "2", "--rate", "1Gbps", "--loss", "2"], "loss: expected a percentage"),
        (["--workers", "2", "--rate", "1Gbps", "--cpus", "x"], "cpus: expected a list"),
        (["--workers", "2", "--rate", "1Gbps", "--cpus", "99999"], "which we may use here"),
        (["--workers", "2", "--rate", "1Gbps", "--at", "5s", "cut", "2"], "host from 0 to 1"),
        (["--workers", "2", "--rate", "1Gbps", "--at", "5s", "melt", "1"], "like 5s slow 2 100Mb"),
        (["--workers", "2", "--rate", "1Gbps", "--at", "5", "cut", "1"], "a time with its unit"),
        (["--workers", "2", "--rate", "1Gbps", "--at", "5s", "slow", "1"], "got '5s slow 1'"),
        (["--workers", "2", "--rate", "1Gbps", "--at", "5s"], "got '5s'"),
    ],
)
def test_a_mistake_is_one_line_and_status_2_before_anything_is_made(
    options: list[str], message: str
) -> None:
    done = finished(lab_run(*options, command=["true"]))
    assert done.returncode == 2
    assert message in done.stderr.decode()
    assert done.stderr.count(b"\n") == 1


def test_a_command_that_does_not_exist_is_refused_before_anything_is_made() -> None:
    done = finished(lab_run("--workers", "2", "--rate", "1Gbps", command=["no-such-program"]))
    assert done.returncode == 2
    assert done.stderr == (
        b"fullwire: no-such-program: expected a command that exists and may be executed\n"
    )


def test_a_link_that_delivers_too_little_is_refused_with_both_figures() -> None:
    from fullwire.lab.rates import check_delivery

    link = LinkRate(
        host=3, line_rate_bps=20e9, payload_limit_bps=19e9, sent_bps=15e9, received_bps=19e9
    )
    with pytest.raises(UsageError, match=r"host 3: the link delivers 15 Gbps .* allows 19 Gbps"):
        check_delivery(link, "host 3")


def test_closed_namespaces_are_refused_with_the_sysctl_that_closes_them() -> None:
    """Set the limit inside a user namespace of the test, so the machine keeps its own."""
    if shutil.which("unshare") is None or finished(["unshare", "-r", "true"]).returncode:
        pytest.skip("user namespaces cannot be made here: ask for user.max_user_namespaces > 0")
    command = lab_run("--workers", "1", "--rate", "1Gbps", command=["true"])
    close = 'echo 0 > /proc/sys/user/max_net_namespaces && exec "$@"'
    done = finished(["unshare", "-r", "sh", "-c", close, "sh", *command])
    assert done.returncode == 2
    assert b"user.max_net_namespaces=0 forbids here" in done.stderr
    assert done.stderr.count(b"\n") == 1


# Hosts and links


@needs_namespaces
def test_every_host_knows_who_it_is(capfd: pytest.CaptureFixture[str]) -> None:
    program = (
        "import os, socket; e = os.environ; "
        "print(e['RANK'], e['WORLD_SIZE'], e['LOCAL_RANK'], e['LOCAL_WORLD_SIZE'], "
        "e['MASTER_ADDR'], socket.gethostname(), socket.gethostbyname('host1'), "
        "sorted(os.listdir('/sys/class/net')), e['GLOO_SOCKET_IFNAME'], os.getuid())"
    )
    with Lab(describe(workers=2, rate=["1Gbps"])) as lab:
        lines = sorted(printed_by(capfd, lab, program).splitlines())
    assert lines == [
        f"{rank} 2 0 1 10.77.0.1 host{rank} 10.77.0.2 ['eth0', 'lo'] eth0 {os.getuid()}"
        for rank in (0, 1)
    ]


@needs_namespaces
def test_a_lab_leaves_the_machine_as_it_was_while_it_stands_and_after() -> None:
    before = machine_networks()
    with Lab(describe(workers=2, rate=["1Gbps"])) as lab:
        assert machine_networks() == before
        ours = {lab._supervisor.pid, *children_of(lab._supervisor.pid)}
        assert ours <= supervisors()
    assert machine_networks() == before
    assert not ours & supervisors()


@needs_namespaces
@pytest.mark.alone  # it measures links as fast as this machine can fill beside nothing else
def test_links_deliver_their_line_rates_each_its_own() -> None:
    description = describe(workers=3, rate=["1Gbps", "1:300Mbps", "2:100Mbps"])
    for _ in range(5):  # The machine may be shared, and another's work may slow any of the labs.
        with Lab(description) as lab:
            links = lab.links
        assert [link.line_rate_bps for link in links] == [1e9, 300e6, 100e6]
        shares = [link.delivered_share for link in links]
        assert max(shares) <= 1.03
        if min(shares) >= 0.97:
            break
    assert min(shares) >= 0.97


@needs_namespaces
@pytest.mark.parametrize("mtu", [1500, 9000])
def test_a_transfer_between_hosts_takes_what_the_line_allows(
    capfd: pytest.CaptureFixture[str], mtu: int
) -> None:
    description = describe(workers=2, rate=["200Mbps"], mtu=mtu)
    size = 20 * 2**20
    floor_s = 8 * size / 200e6 / description.payload_share
    with Lab(description) as lab:
        took_s = shortest_s(
            lambda: float(printed_by(capfd, lab, TRANSFER, str(size))), floor_s * 1.10
        )
    assert floor_s * 0.97 <= took_s <= floor_s * 1.10


@needs_namespaces
def test_a_host_drops_nothing_of_what_it_sends(capfd: pytest.CaptureFixture[str]) -> None:
    """Sixteen connections hold more data than a switch would queue, but a NIC makes them wait."""
    with Lab(describe(workers=2, rate=["1Gbps"])) as lab:
        sent, dropped = map(int, printed_by(capfd, lab, SIXTEEN_AT_ONCE).split())
    assert sent > 16 * 4_000_000
    assert dropped == 0


@needs_namespaces
def test_settings_reach_the_job(capfd: pytest.CaptureFixture[str]) -> None:
    program = (
        "import os; print(open('/sys/class/net/eth0/mtu').read().strip(), "
        "sorted(os.sched_getaffinity(0)))"
    )
    cpu = min(os.sched_getaffinity(0))
    description = describe(workers=1, rate=["1Gbps"], mtu=4000, cpus=[str(cpu)])
    with Lab(description) as lab:
        assert printed_by(capfd, lab, program) == f"4000 [{cpu}]\n"


@needs_namespaces
def test_congestion_control_is_the_one_asked_for(capfd: pytest.CaptureFixture[str]) -> None:
    program = TRANSFER + "\nprint(peer.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16))"
    with Lab(describe(workers=2, rate=["1Gbps"], congestion="reno")) as lab:
        assert printed_by(capfd, lab, program, "1000").count("b'reno\\x00") == 2
    with Lab(describe(workers=2, rate=["1Gbps"])) as lab:
        assert printed_by(capfd, lab, program, "1000").count(f"b'{lab.congestion}\\x00") == 2
    with (
        pytest.raises(UsageError, match="congestion: expected one of"),
        Lab(describe(workers=2, rate=["1Gbps"], congestion="nonsense")),
    ):
        pass


@needs_namespaces
def test_latency_is_added_or_refused_with_a_sentence(capfd: pytest.CaptureFixture[str]) -> None:
    program = (
        "import socket, time; began = time.perf_counter()\n"
        "try: socket.create_connection(('10.77.255.254', 9))\n"
        "except ConnectionRefusedError: print(time.perf_counter() - began)"
    )
    try:
        with Lab(describe(workers=1, rate=["1Gbps"], latency="20ms")) as lab:
            took_s = shortest_s(lambda: float(printed_by(capfd, lab, program)), 0.2)
            assert 0.02 <= took_s < 0.2
    except UsageError as error:
        assert "need the kernel's netem, which this machine has not" in str(error)  # noqa: PT017


@needs_namespaces
def test_two_labs_stand_side_by_side_with_the_same_addresses(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with (
        Lab(describe(workers=2, rate=["100Mbps"])) as one,
        Lab(describe(workers=2, rate=["100Mbps"])) as other,
    ):
        assert one.addresses == other.addresses
        for lab in (one, other):
            assert float(printed_by(capfd, lab, TRANSFER, "1000000")) > 0


# Rates, latency and loss


@needs_namespaces
def test_output_passes_through_byte_for_byte() -> None:
    program = (
        "import os; out = bytes(range(256)) * 999\n"
        "while out: out = out[os.write(1, out):]\n"
        "os.write(2, bytes(range(256)))"
    )
    command = lab_run("--workers", "1", "--rate", "1Gbps", command=[sys.executable, "-c", program])
    done = finished(command)
    assert done.stdout == bytes(range(256)) * 999
    assert done.stderr.endswith(bytes(range(256)))
    assert done.stderr.startswith(b"fullwire: 1 host up")
    assert done.returncode == 0


@needs_namespaces
@pytest.mark.parametrize(("end", "status"), [("exit 7", 7), ("kill -9 $$", 137)])
def test_the_exit_status_is_the_failing_ranks(end: str, status: int) -> None:
    script = f'if [ "$RANK" = 1 ]; then {end}; fi'
    done = finished(lab_run("--workers", "2", "--rate", "1Gbps", command=["sh", "-c", script]))
    assert done.returncode == status
    assert f"rank 1 failed with exit status {status}" in done.stderr.decode()


@needs_namespaces
def test_a_shell_opens_on_the_host_asked_for() -> None:
    command = [*lab_run(command=[])[:4], "shell", "--workers", "2", "--rate", "1Gbps"]
    done = subprocess.run(
        [*command, "--host", "1"],
        input=b"hostname; exit 5",
        capture_output=True,
        timeout=30,
        env=os.environ | {"SHELL": "/bin/sh"},
        check=False,
    )
    assert done.stdout == b"host1\n"
    assert done.returncode == 5


# Faults


@needs_namespaces
def test_a_slow_link_is_slow_and_restored_is_not(capfd: pytest.CaptureFixture[str]) -> None:
    with Lab(describe(workers=2, rate=["200Mbps"])) as lab:
        usual_floor_s, slow_floor_s = (
            8 * 2_000_000 / rate_bps / lab.description.payload_share for rate_bps in (200e6, 50e6)
        )

        def transfer() -> float:
            return float(printed_by(capfd, lab, TRANSFER, "2000000"))

        lab.disturb(Fault(at_s=0, kind="slow", host=1, rate_bps=50e6))
        assert 0.9 < shortest_s(transfer, 1.25 * slow_floor_s) / slow_floor_s < 1.25
        lab.disturb(Fault(at_s=0, kind="restore", host=1))
        assert 0.9 < shortest_s(transfer, 1.25 * usual_floor_s) / usual_floor_s < 1.25


@needs_namespaces
def test_a_link_that_becomes_slow_goes_on_with_what_was_on_its_way(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The kernel may have handed down one piece that is larger than a slow link lets pass."""
    faults = ["1s slow 0 50Mbps", "2s restore 0", "2500ms slow 1 50Mbps", "3500ms restore 1"]
    with Lab(describe(workers=2, rate=["1Gbps"])) as lab:
        capfd.readouterr()
        timetable = parse_faults(faults, lab.description)
        assert run_job(lab, [sys.executable, "-c", LONGEST_PAUSE, "4"], timetable) == 0
    assert int(capfd.readouterr().out) < 8


@needs_namespaces
def test_a_link_that_was_made_faster_than_it_is_goes_on_at_its_own_rate(
    capfd: pytest.CaptureFixture[str],
) -> None:
    faults = ["0s slow 0 1Gbps", "0s slow 1 1Gbps", "1s restore 0", "1s restore 1"]
    faults += ["20s kill 0", "20s kill 1"]  # where it stands still
    with Lab(describe(workers=2, rate=["40Mbps"])) as lab:
        capfd.readouterr()
        timetable = parse_faults(faults, lab.description)
        program = f"import time; time.sleep(0.3)\n{LONGEST_PAUSE}"
        assert run_job(lab, [sys.executable, "-c", program, "2"], timetable) == 0
    assert float(capfd.readouterr().out) < 2


@needs_namespaces
def test_a_cut_cable_has_no_carrier_until_restored(capfd: pytest.CaptureFixture[str]) -> None:
    program = "print(open('/sys/class/net/eth0/carrier').read(), end='')"
    with Lab(describe(workers=1, rate=["1Gbps"])) as lab:
        for kind, carrier in (("cut", "0\n"), ("restore", "1\n")):
            lab.disturb(Fault(at_s=0, kind=kind, host=0))  # type: ignore[arg-type]
            assert printed_by(capfd, lab, program) == carrier


@needs_namespaces
def test_a_timetable_kills_every_process_of_a_host_and_of_no_other() -> None:
    script = 'if [ $RANK = 1 ]; then setsid sleep 30 & wait; else sleep 1; echo "0 lives"; fi'
    options = ["--workers", "2", "--rate", "1Gbps", "--at", "0.2s", "kill", "1"]
    done = finished(lab_run(*options, command=["sh", "-c", script]))
    assert done.returncode == 137
    assert done.stdout == b"0 lives\n"
    assert b"fullwire: 200 ms: kill 1\n" in done.stderr


@needs_namespaces
def test_no_process_of_a_killed_host_sees_another_die() -> None:
    # As in a host that loses its power. Python walks a set of few numbers by their last three bits.
    child_is_walked_first = "[ $(($! % 8)) -lt $(($$ % 8)) ] || { kill $!; exit 1; }"
    parent = f"sleep 30 & {child_is_walked_first}; wait; echo survived"
    script = f"while :; do bash -c '{parent}' && break; done; sleep 30"
    options = ["--workers", "1", "--rate", "1Gbps", "--at", "0.4s", "kill", "0"]
    done = finished(lab_run(*options, command=["bash", "-c", script]))
    assert done.returncode == 137
    assert done.stdout == b""


@needs_namespaces
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_command_that_has_only_just_been_started_is_reached(number: signal.Signals) -> None:
    """The command is then still moving to its host and to a group of its own."""
    with Lab(describe(workers=1, rate=["1Gbps"])) as lab:
        for _ in range(10):
            lab.start(0, ["sleep", "20"], os.environ)
            if number == signal.SIGKILL:
                lab.disturb(Fault(at_s=0, kind="kill", host=0))
            else:
                lab.signal(number)
            ended = lab.next_end(10)
            assert ended is not None
            assert ended.status == 128 + number


def test_a_child_that_ends_after_its_lab_was_left_is_no_error() -> None:
    program = (
        "import os, signal\n"
        "from fullwire.lab.supervisor import _children_wake_us\n"
        "with _children_wake_us() as woken:\n"
        "    os.kill(os.getpid(), signal.SIGCHLD)\n"
        "    assert woken.recv(1)\n"
        "os.kill(os.getpid(), signal.SIGCHLD)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert done.stderr == b""


@needs_namespaces
def test_a_paused_host_stands_still_until_restored(capfd: pytest.CaptureFixture[str]) -> None:
    program = (
        "import time; longest = 0; last = began = time.monotonic()\n"
        "while longest < 0.4 and last < began + 30:\n"
        "    time.sleep(0.01); now = time.monotonic()\n"
        "    longest = max(longest, now - last); last = now\n"
        "print(longest)"
    )
    # A busy machine may start the program in the middle of a pause: then the next one is seen.
    faults = [
        "200ms pause 0",
        "700ms restore 0",
        "3s pause 0",
        "3500ms restore 0",
        "10s pause 0",
        "10500ms restore 0",
    ]
    with Lab(describe(workers=1, rate=["1Gbps"])) as lab:
        capfd.readouterr()
        timetable = parse_faults(faults, lab.description)
        assert run_job(lab, [sys.executable, "-c", program], timetable) == 0
    assert 0.4 < float(capfd.readouterr().out) < 5


@needs_namespaces
def test_a_job_of_which_only_a_paused_host_is_left_is_ended() -> None:
    script = "if [ $RANK = 1 ]; then sleep 60; else sleep 0.5; fi"
    options = ["--workers", "2", "--rate", "1Gbps", "--at", "100ms", "pause", "1"]
    done = finished(lab_run(*options, command=["sh", "-c", script]))
    assert done.returncode == 137
    assert b"only paused hosts are left, and nothing restores them: they are killed" in done.stderr


# Clean-up


@needs_namespaces
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_a_signal_leaves_nothing_behind(number: signal.Signals) -> None:
    before = machine_networks()
    marker = f"marker-{os.getpid()}-{number}"
    stubborn = "trap '' TERM;" if number == signal.SIGTERM else ""
    script = f"{stubborn} echo on; setsid sleep 300 & : {marker}; while :; do sleep 1; done"
    command = lab_run("--workers", "2", "--rate", "1Gbps", command=["sh", "-c", script])
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as lab:
        assert lab.stdout is not None
        assert [lab.stdout.readline() for _ in range(2)] == [b"on\n", b"on\n"]
        [supervisor] = children_of(lab.pid)
        ours = {supervisor, *children_of(supervisor)}
        lab.send_signal(number)
    expected = -number if number == signal.SIGKILL else 128 + number
    assert lab.returncode == expected
    assert eventually(lambda: not processes_with(marker))
    assert eventually(lambda: not ours & supervisors())
    assert machine_networks() == before


@needs_namespaces
def test_a_killed_supervisor_takes_the_job_along() -> None:
    marker = f"marker-{os.getpid()}-supervisor"
    command = ["sh", "-c", f"echo on; : {marker}; while :; do sleep 1; done"]
    command = lab_run("--workers", "1", "--rate", "1Gbps", command=command)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as lab:
        assert lab.stdout is not None
        assert lab.stderr is not None
        lab.stdout.readline()
        children = Path(f"/proc/{lab.pid}/task/{lab.pid}/children").read_text().split()
        os.kill(int(children[0]), signal.SIGKILL)
        assert b"its supervisor was killed or failed" in lab.stderr.read()
    assert lab.returncode == 1
    assert eventually(lambda: not processes_with(marker))


# Without root


def interpreter_for_all() -> str | None:
    """Find our Python in a place where a user without rights may run it."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    for candidate in (sys.executable, f"/usr/local/bin/{version}", f"/usr/bin/{version}"):
        if Path(candidate).exists() and finished([*as_nobody(), candidate, "-V"]).returncode == 0:
            return candidate
    return None


def as_nobody() -> list[str]:
    become = ["setpriv", f"--reuid={UNKNOWN}", f"--regid={UNKNOWN}", "--clear-groups"]
    homeless = ["env", "-u", "HOME", "-u", "XDG_CACHE_HOME"]
    return [*become, *homeless, f"PYTHONPATH={SRC}:{':'.join(sys.path[1:])}"]


@needs_namespaces
def test_an_ordinary_user_gets_the_same_and_stays_who_they_are() -> None:
    if os.geteuid() != 0:
        pytest.skip("every other test of this file has just shown it: they ran without root")
    python = interpreter_for_all()
    if python is None:
        pytest.skip(f"user {UNKNOWN} may run no Python {sys.version_info[:2]} here")
    if finished([*as_nobody(), "test", "-r", str(SRC / "fullwire/__init__.py")]).returncode != 0:
        pytest.skip(f"user {UNKNOWN} may not read this checkout: {SRC}")
    before = machine_networks()
    command = lab_run(
        "--workers", "2", "--rate", "100Mbps", command=["sh", "-c", "id -u; hostname"]
    )
    done = finished([*as_nobody(), python, *command[1:]])
    assert done.returncode == 0, done.stderr.decode()
    assert sorted(done.stdout.split()) == [b"65533", b"65533", b"host0", b"host1"]
    assert machine_networks() == before


@needs_namespaces
def test_a_fault_that_is_weeks_away_hinders_nothing(cli: Cli) -> None:
    lab = ("lab", "run", "--workers", "2", "--rate", "1Gbps", "--at", "600h cut 1")
    done = cli(*lab, "--", "true")
    assert done.returncode == 0, done.stderr
