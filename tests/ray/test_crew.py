"""The answer is the same by one process, by several, and by a Ray cluster that loses nodes."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import fullwire as fw
from fullwire.crew import Crew, Result, Task, crew
from fullwire.errors import DamagedInput, UsageError
from fullwire.importers import import_run
from tests.conftest import Cli
from tests.unit.test_fleet import five_ranks

QUESTIONS: dict[str, dict[str, Any]] = {
    "a sweep": {
        "workers": "1,2,8,64",
        "bandwidth": "1Gbps,10Gbps,100Gbps",
        "compression": "1,4",
        "codec": "8,5GB/s,20GB/s,gather",
        "algorithm": "auto,ring,tree",
        "latency": "0s,20us",
        "buckets": "ddp,paper,none",
        "jitter": "none,lognormal:5%",
        "accumulate": "1,4",
    },
    "a target": {
        "workers": "8,64",
        "bandwidth": "1Gbps,10Gbps",
        "buckets": "ddp,none",
        "algorithm": "ring,tree",
        "target": "0.9",
    },
    "a described cluster": {"cluster": "dgx-h100", "nodes": "1,2,4", "algorithm": "auto,ring"},
}


def half(number: int) -> float:
    return number / 2


def refused(why: str, number: int) -> int:
    if number == 2:
        raise {
            "damaged": DamagedInput("./x.json", "no trace", line=7),
            "refused": UsageError("no"),
            "disk": OSError(28, "No space left on device", "x.run"),
        }[why]
    return number


class TwoNodes:
    """A Ray cluster of two nodes on this machine, each of one processor; others may join."""

    def __init__(self, place: Path) -> None:
        from ray.cluster_utils import Cluster

        soon = {
            "health_check_initial_delay_ms": 0,
            "health_check_period_ms": 200,
            "health_check_failure_threshold": 3,
        }
        self._cluster = Cluster(
            initialize_head=True,
            head_node_args={
                "num_cpus": 1,
                "include_dashboard": False,
                "_system_config": soon,
                "temp_dir": str(place),
            },
        )
        self.second = self.another()

    @property
    def address(self) -> str:
        address: str = self._cluster.address
        return address

    def another(self) -> Any:
        return self._cluster.add_node(num_cpus=1)

    def lose(self, node: Any) -> None:
        """Kill a node as a power cut does."""
        self._cluster.remove_node(node, allow_graceful=False)

    def end(self) -> None:
        self._cluster.shutdown()


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[TwoNodes]:
    pytest.importorskip("ray", reason="Ray is not here: pip install 'fullwire[ray]'")
    patched = pytest.MonkeyPatch()
    # otherwise they wait for all other processes on a busy machine
    patched.setenv("RAY_worker_niceness", "0")
    with tempfile.TemporaryDirectory(prefix="fw", dir="/tmp", ignore_cleanup_errors=True) as place:
        # A cluster of tests writes its address below this folder, and does not make the folder.
        patched.setenv("RAY_TMPDIR", place)
        Path(place, "ray").mkdir()
        nodes = TwoNodes(Path(place))
        yield nodes
        nodes.end()
    patched.undo()


@pytest.fixture(scope="module", params=["alone", "pool", "ray"])
def those(request: pytest.FixtureRequest) -> Iterator[Crew]:
    if request.param == "ray":
        nodes: TwoNodes = request.getfixturevalue("two_nodes")
        with crew(nodes.address) as found:
            yield found
        return
    with crew(processes=2 if request.param == "pool" else 1) as found:
        yield found


def test_results_come_in_the_order_of_the_tasks(those: Crew) -> None:
    assert list(those.each(half, range(100))) == [number / 2 for number in range(100)]
    assert list(those.each(half, [])) == []


@pytest.mark.parametrize(
    ("why", "kind", "said"),
    [
        ("damaged", DamagedInput, "./x.json:7: no trace"),
        ("refused", UsageError, "no"),
        ("disk", OSError, "[Errno 28] No space left on device: 'x.run'"),
    ],
)
def test_what_a_task_refuses_is_raised_as_it_is(
    those: Crew, why: str, kind: type[Exception], said: str
) -> None:
    found = those.each(partial(refused, why), range(4))
    assert [next(found), next(found)] == [0, 1]
    with pytest.raises(kind) as caught:
        next(found)
    assert type(caught.value) is kind
    assert str(caught.value) == said


def answer(on: str, **conditions: Any) -> list[Any]:
    found = fw.whatif(["resnet50@v100", "vgg16@v100"], on=on, **conditions)
    return [found.targets, *((name, each.tolist()) for name, each in found.columns().items())]


@pytest.mark.parametrize("question", QUESTIONS)
def test_an_answer_is_the_same_on_a_cluster(two_nodes: TwoNodes, question: str) -> None:
    conditions = QUESTIONS[question]
    assert answer(two_nodes.address, **conditions) == answer("here", **conditions)


def test_plans_are_the_same_on_a_cluster(two_nodes: TwoNodes) -> None:
    asked = {"cluster": "dgx-h100,dgx-a100", "nodes": 1, "global_batch": 64, "objective": "cost"}
    there, here = (fw.plan("llama3-8b", **asked, on=on) for on in (two_nodes.address, "here"))  # type: ignore[arg-type]
    assert (there.plans, there.networks) == (here.plans, here.networks)


def content(run: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(run)): path.read_bytes() for path in run.rglob("*") if path.is_file()
    }


def test_an_import_is_the_same_on_a_cluster(two_nodes: TwoNodes, tmp_path: Path, cli: Cli) -> None:
    traces = five_ranks(tmp_path / "traces")
    (traces / "3.json").write_text("garbage")
    for name, where in (("here", "here"), ("there", two_nodes.address)):
        done = cli("import", "traces", "-o", f"{name}.run", "--on", where, cwd=tmp_path)
        assert (done.returncode, done.stdout) == (0, "")
        assert done.stderr.startswith(
            f"written: {name}.run\nnote: PARTIAL: traces/3.json: not a profiler trace"
        )
    assert content(tmp_path / "there.run") == content(tmp_path / "here.run")


def test_a_node_that_is_lost_in_the_middle_changes_nothing(
    two_nodes: TwoNodes, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    third = two_nodes.another()
    began, go_on = tmp_path / "began", tmp_path / "go_on"
    began.mkdir()

    def lose_it() -> None:
        wait_for(lambda: any(began.iterdir()))
        two_nodes.lose(third)
        go_on.touch()

    meanwhile = threading.Thread(target=lose_it)
    with crew(two_nodes.address) as those:
        meanwhile.start()
        results = list(those.each(partial(slow_half, third.node_id, began, go_on), range(60)))
    meanwhile.join()
    assert results == [number / 2 for number in range(60)]
    assert capfd.readouterr() == ("", "")


def test_a_node_that_is_lost_when_it_is_asked_is_done_without(two_nodes: TwoNodes) -> None:
    """Ray still counts the lost node as alive, until its checks of health notice the loss."""
    third = two_nodes.another()
    two_nodes.lose(third)
    with crew(two_nodes.address) as those:
        assert list(those.each(half, [1, 3])) == [0.5, 1.5]


def slow_half(lost: str, began: Path, go_on: Path, number: int) -> float:
    """Divide; on the node to be lost wait for `go_on`, elsewhere wait until `began`."""
    import ray

    if ray.get_runtime_context().get_node_id() == lost:
        (began / str(number)).touch()
        wait_for(go_on.exists)
    else:
        wait_for(lambda: any(began.iterdir()))
    return number / 2


def wait_for(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 100
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class Twice:
    """Does each task twice, as after the loss of a node that had finished a task."""

    def each(self, function: Callable[[Task], Result], tasks: Sequence[Task]) -> Iterator[Result]:
        return ((function(task), function(task))[1] for task in tasks)


def test_a_rank_that_is_read_and_written_twice_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    traces = five_ranks(tmp_path / "traces")
    once = content(import_run(tmp_path / "once.run", traces))
    monkeypatch.setattr(
        "fullwire.importers.kineto.fleet.crew", lambda processes: nullcontext(Twice())
    )
    assert content(import_run(tmp_path / "twice.run", traces)) == once


def test_what_ends_its_process_is_not_done_for_ever(
    two_nodes: TwoNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fullwire.crew._RETRIES", 1)
    with (
        crew(two_nodes.address) as those,
        pytest.raises(UsageError, match="work was given up after 2 attempts"),
    ):
        list(those.each(os._exit, [1]))


def test_a_node_that_cannot_do_the_work_is_named(
    two_nodes: TwoNodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        pytest.raises(
            UsageError, match=r"node .* does not see .*nowhere: expected imported modules"
        ),
        crew(two_nodes.address, shared=[tmp_path, tmp_path / "nowhere"]),
    ):
        pass
    monkeypatch.setattr("fullwire.crew.__version__", "0.2.0")
    with (
        pytest.raises(UsageError, match=r"has Fullwire 0\.1\.0: expected 0\.2\.0 on every node"),
        crew(two_nodes.address),
    ):
        pass


def test_a_cluster_of_this_machine_is_quiet_private_and_gone(cli: Cli, short_folder: Path) -> None:
    pytest.importorskip("ray", reason="Ray is not here: pip install 'fullwire[ray]'")
    code = (
        "from fullwire.crew import crew; from tests.ray.test_crew import half, listening\n"
        "with crew('ray') as those:\n"
        "    print(list(those.each(half, [1, 3])), listening())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "RAY_TMPDIR": str(short_folder)},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "[0.5, 1.5] {'0100007F'}\n"
    assert list(short_folder.iterdir()) == []


def listening() -> set[str]:
    """Return the addresses at which this process and its children listen, as the kernel does."""
    ours = set(sockets_of(os.getpid()))
    lines = [
        line.split()
        for family in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{family}").read_text().splitlines()[1:]
    ]
    return {
        each[1].partition(":")[0].removeprefix("0000000000000000FFFF0000")
        for each in lines
        if each[3] == "0A" and f"socket:[{each[9]}]" in ours
    }


def sockets_of(process: int) -> Iterator[str]:
    """Yield the open files of a process and its children."""
    for file in Path(f"/proc/{process}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            yield os.readlink(file)
    for task in Path(f"/proc/{process}/task").iterdir():
        for child in (task / "children").read_text().split():
            yield from sockets_of(int(child))


@pytest.mark.parametrize(
    ("on", "said"),
    [
        ("spark", "on: expected here, ray, or the address of a Ray cluster such as"),
        ("127.0.0.1:1", "on: no Ray cluster at 127.0.0.1:1"),
    ],
)
def test_what_is_no_cluster_is_refused_in_one_line(cli: Cli, on: str, said: str) -> None:
    if ":" in on:
        pytest.importorskip("ray", reason="Ray is not here: pip install 'fullwire[ray]'")
    done = cli("whatif", "vgg16@v100", "--on", on)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_folder_for_ray_that_is_not_there_is_named(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray", reason="Ray is not here: pip install 'fullwire[ray]'")
    monkeypatch.setenv("RAY_TMPDIR", "/nowhere")
    done = cli("whatif", "vgg16@v100", "--on", "ray")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "fullwire: RAY_TMPDIR: expected a folder to write in, got '/nowhere': "
        "No such file or directory\n"
    )


def test_without_ray_the_line_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError, match=r"pip install 'fullwire\[ray\]'"), crew("ray"):
        pass


def test_processes_are_for_work_that_is_done_here(tmp_path: Path) -> None:
    traces = five_ranks(tmp_path / "traces")
    with pytest.raises(UsageError, match="--processes is for work that is done here"):
        import_run(tmp_path / "x.run", traces, processes=2, on="ray")
    with pytest.raises(UsageError, match="--on belongs to profiler traces"):
        import_run(tmp_path / "x.run", "vgg16@v100", on="ray")
