"""Fixes on a command line and in a recipe: taken, printed, refused; the job's own end is told."""

from __future__ import annotations

import ast
import builtins
import dataclasses
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fullwire as fw
from fullwire.answers.explain import explain
from fullwire.answers.fixing import exported, notes_in, outcomes, problem_of, split_fixes
from fullwire.answers.trials import Trial, TrialRecording, difference_of
from fullwire.answers.tune import RISKS, _line_bps, _Search
from fullwire.errors import DamagedInput, UsageError
from fullwire.findings.tuning import Faster
from fullwire.fixes import Seen, _interfaces, fix_kinds
from fullwire.fixes._in_job import Applying
from fullwire.fixes._recipe import Applied, Recipe, as_toml, parse_fix, read_recipe
from fullwire.fixes.fix import Worthwhile
from fullwire.fixes.joining import Joined
from fullwire.fixes.placement import by_host, most_leaving
from fullwire.fixes.processors import share_of_rank
from fullwire.recorder.launch import TOO_LONG, run_to_its_end
from fullwire.report.as_data import tuning_object
from fullwire.report.fixing import print_tuning
from fullwire.run.run import Hosts
from fullwire.simulation.forecast import Forecast
from fullwire.transport.rendezvous import interface_address
from fullwire.words import sentence, sentences
from tests.conftest import Cli
from tests.trained_jobs import a_trained_job, a_transport

CAN = {key: kind for key, kind in fix_kinds().items() if kind.example}
PARTS_S = {"line_rate": 0.07, "latency": 0.0, "transport": 0.01, "unexplained": 0.0}
PARTS_S["contention"] = 0.0
NOTHING = [sys.executable, "-c", "raise SystemExit(7)"]


def test_each_fix_has_a_setting_that_it_takes_or_says_what_it_needs() -> None:
    for key, kind in fix_kinds().items():
        assert bool(kind.example) != bool(kind.needs), key
        assert bool(kind.example) == bool(kind.setting), key
        if kind.example:
            assert parse_fix(f"{key}:{kind.example}").setting == kind.example


def test_a_process_of_a_job_loads_the_fixes_that_it_applies_without_predictions() -> None:
    lines = (
        "import sys",
        "from fullwire.fixes.fix import fix_kind",
        f"kinds = [fix_kind(key).key for key in {sorted(CAN.keys() - {'compression'})}]",
        "loaded = [name for name in sys.modules if name.startswith('fullwire.')]",
        "loaded = [name for name in loaded if '.timeline' in name or '.forecast' in name]",
        "assert kinds and not loaded, loaded",
    )
    subprocess.run([sys.executable, "-c", "\n".join(lines)], check=True)


def test_fixes_are_listed_with_their_settings(cli: Cli) -> None:
    listed = json.loads(cli("fixes", "--json").stdout)["fixes"]
    assert {each["fix"]: each["example"] for each in listed} == {
        key: kind.example or None for key, kind in fix_kinds().items()
    }
    text = cli("fixes").stdout
    assert all(f"{key}:{kind.example}" in text for key, kind in CAN.items())
    assert max(map(len, text.splitlines())) <= 80


def test_commas_join_fixes_and_stay_in_settings() -> None:
    text = "ddp:static_graph,gradient_as_bucket_view,environment:A=b,c,threads:1"
    assert split_fixes(text) == [
        "ddp:static_graph,gradient_as_bucket_view",
        "environment:A=b,c",
        "threads:1",
    ]


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ("bucket:50", "The nearest is buckets"),
        ("buckets", "expected a setting, the MiB of a bucket, as in buckets:50"),
        ("buckets:-1", "expected MiB of a bucket, above 0"),
        ("buckets:nan", "expected MiB of a bucket, above 0"),
        ("buckets:1_0", "expected MiB of a bucket, above 0"),
        ("input:0", "expected 1 to 256 loading processes, got '0'"),
        ("input:4x0", "expected 1 to 256 loading processes, got '4x0'"),
        ("threads:²", "expected 1 to 1024 threads"),
        ("link:2", "fix link: it cannot be applied: hardware"),
        ("transport:mpi", "fix transport: expected fullwire or fullwire+bf16"),
        ("placement:1,0", "expected each rank once, and 0 first"),
        ("joining:0", "fix joining"),
        ("accumulation:1", "expected 2 to 4096 passes"),
        ("ddp:static", "fix ddp: expected options among"),
        ("environment:RANK=1", "expected a variable that no launcher sets, got RANK"),
        ("environment:A", "expected NAME=VALUE"),
        ("compression:zip", "zip"),
        ("threads:1,threads:2", "fix threads: expected one setting, got two"),
    ],
)
def test_a_fix_that_cannot_be_is_refused_before_the_job(
    cli: Cli, given: str, sentence: str
) -> None:
    done = cli("apply", given, "--", *NOTHING)
    assert (done.returncode, done.stdout) == (2, "")
    assert sentence in done.stderr
    assert done.stderr.count("\n") == 1


def test_the_status_is_the_jobs_and_an_unused_fix_is_told(cli: Cli) -> None:
    done = cli("apply", "buckets:50", "--", *NOTHING, env=None)
    assert done.returncode == 7
    assert "fix buckets:50: not applied: no process called the function" in done.stderr


@pytest.mark.parametrize("fix", ["environment:GLOO_SOCKET_IFNAME=lo", "threads:1"])
def test_a_job_without_torch_has_the_fixes_that_variables_make(cli: Cli, fix: str) -> None:
    done = cli("apply", fix, "--", *NOTHING)
    assert done.returncode == 7
    assert f"fix {fix}: its variables are set; no process loaded torch" in done.stderr


SETTINGS = st.sampled_from(sorted(CAN)).map(
    lambda key: Applied(
        fix=key, setting=CAN[key].checked(CAN[key].example), risk=CAN[key].risk, predicted_s=0.125
    )
)


@given(
    st.builds(
        Recipe,
        format=st.just(1),
        command=st.text(st.characters(exclude_categories=["Cs"])),
        workers=st.none() | st.integers(1, 10**6),
        versions=st.dictionaries(st.sampled_from(["torch", "python"]), st.just("2.13.0+cpu")),
        before_s=st.none() | st.floats(0, 1e6),
        after_s=st.none(),
        fixes=st.lists(SETTINGS).map(tuple),
    )
)
def test_a_recipe_reads_back_equal(
    tmp_path_factory: pytest.TempPathFactory, recipe: Recipe
) -> None:
    path = tmp_path_factory.getbasetemp() / "recipe.toml"
    path.write_text(as_toml(recipe), encoding="utf-8", newline="")
    assert read_recipe(path) == recipe


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("format = 2", "format: expected 1, got '2'"),
        ("", "format: expected 1"),
        ("nodes = 2\n[nics]\nrate = '1Gbps'", "got the description of a cluster"),
        ("format = 1\nfixes = 3", "expected a recipe in TOML"),
        ("format = [", "expected a recipe in TOML"),
        ("format = 1\na = " + "[" * 100_000, "expected a recipe in TOML"),
        ("format = 1\nworkers = -3", "workers: expected 1 or more, got -3"),
        ("format = 1\nbefore_s = nan", "before_s: expected a time of 0 s or more, got nan"),
        (
            'format = 1\n[[fixes]]\nfix = "buckets"\nsetting = "5"\nmeasured_s = -1.0',
            "measured_s: expected a time of 0 s or more, got -1",
        ),
    ],
    ids=lambda text: text[:60],
)
def test_a_recipe_with_a_mistake_is_refused(tmp_path: Path, text: str, sentence: str) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(text)
    with pytest.raises((UsageError, DamagedInput), match=sentence):
        fw.run_recipe(path, NOTHING)


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        ('fix = "buckets"', "missing required field `setting`"),
        ('fix = "buckets"\nsetting = 5', "Expected `str`, got `int`"),
        ('fix = "bucketz"\nsetting = "5"', "The nearest is buckets"),
        ('fix = "buckets"\nsetting = "5.0"', "expected 5, got 5.0"),
        ('fix = "compression"\nsetting = "later"', "later"),
        ('fix = "link"\nsetting = "2"', "it cannot be applied: hardware"),
    ],
)
def test_a_fix_that_this_version_lacks_is_left_out_of_a_recipe_or_refused(
    tmp_path: Path, entry: str, why: str
) -> None:
    path = tmp_path / "recipe.toml"
    known = '[[fixes]]\nfix = "threads"\nsetting = "1"\n'
    path.write_text(f"format = 1\n[[fixes]]\n{entry}\n{known}")
    said: list[str] = []
    assert fw.run_recipe(path, NOTHING, say=said.append) == 7
    assert len(said) == 2
    assert why in said[0]
    assert said[0].endswith(". This fix is left out, the others are applied")
    assert said[1].startswith("fix threads:1: ")
    with pytest.raises((UsageError, DamagedInput), match="recipe.toml: .*" + re.escape(why)):
        fw.run_recipe(path, NOTHING, strict=True)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("workes = 64\n", "'workes' is no key of a recipe; the nearest key is workers"),
        ("zzz = 64\n", "'zzz' is no key of a recipe; the keys are format, command, "),
        (
            '[[fixes]]\nfix = "buckets"\nsetting = "5"\nris = "exact"\n',
            "[[fixes]] 1: 'ris' is no key of a recipe; the nearest key is risk",
        ),
    ],
)
def test_an_unknown_key_of_a_recipe_is_said_or_refused(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(f"format = 1\n{text}")
    said: list[str] = []
    assert fw.run_recipe(path, NOTHING, say=said.append) == 7
    assert said[0].startswith(f"{path}: {why}")
    assert said[0].endswith(". Its value is not used")
    with pytest.raises(UsageError, match=re.escape(why)):
        fw.run_recipe(path, NOTHING, strict=True)


@pytest.mark.parametrize("entry", ["setting = 1", 'setting = "1"\nrisk = "harmless"'])
def test_a_strict_job_is_refused_for_a_mistyped_fix_as_a_usage_error(
    tmp_path: Path, entry: str
) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(f'format = 1\n[[fixes]]\nfix = "threads"\n{entry}\n')
    with pytest.raises(UsageError, match=r"recipe.toml: \[\[fixes\]\] 1: "):
        fw.run_recipe(path, NOTHING, strict=True)


@pytest.mark.parametrize(
    "setting",
    [
        "LD_PRELOAD=./evil.so",
        "PATH=.",
        "BASH_ENV=evil",
        "NCCL_NET_PLUGIN=evil",
        "NCCL_TUNER_PLUGIN=evil",
        "NCCL_COMM_ID=192.0.2.1:80",
        "NCCL_DEBUG_FILE=notes",
        "NCCL_ALGO=/tmp/evil",
        "OMP_TOOL_LIBRARIES=evil",
        "UCX_GDB_COMMAND=evil",
        "FULLWIRE_ENCRYPT=0",
        "FULLWIRE_KEY_FILE=key",
        "NCCL_ALGO=Tree\u202e",
        "NCCL_ALGO=\x1b[31mTree",
    ],
)
def test_a_recipe_of_a_stranger_runs_no_code_and_reaches_nobody(
    tmp_path: Path, setting: str
) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(as_toml(Recipe(fixes=(parse_fix(f"environment:{setting}"),))))
    with pytest.raises(UsageError, match="a recipe sets no others"):
        fw.run_recipe(path, NOTHING)


def test_an_exported_command_of_a_stranger_hides_nothing_from_its_reader(
    tmp_path: Path, cli: Cli
) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(as_toml(Recipe(command="torchrun a.py\nevil\x1b[2J")))
    printed = cli("run", "-r", path, "--export", "torchrun").stdout
    assert printed.rstrip("\n").isprintable()


def test_fixes_of_a_launcher_that_nobody_wrote_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FULLWIRE_FIXES", "[")
    with pytest.raises(UsageError, match="FULLWIRE_FIXES: expected what `fullwire apply`"):
        fw.apply_fixes(["threads:1"], NOTHING)


def test_a_recipe_of_another_job_is_told_or_refused(tmp_path: Path, cli: Cli) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(as_toml(Recipe(command="python a.py", versions={"python": "3.0"})))
    said: list[str] = []
    assert fw.run_recipe(path, NOTHING, say=said.append) == 7
    assert [each.split(": ", 1)[1].split(":")[0] for each in said] == ["command", "python"]
    done = cli("run", "--strict", "--recipe", path, "--", *NOTHING)
    assert done.returncode == 2
    assert "command: the recipe was made for python a.py" in done.stderr


def test_a_recipe_is_exported_for_people_without_fullwire(tmp_path: Path, cli: Cli) -> None:
    path = tmp_path / "recipe.toml"
    fixes = tuple(map(parse_fix, ("buckets:50", "threads:2", "environment:GLOO_SOCKET_IFNAME=e 1")))
    path.write_text(as_toml(Recipe(command="torchrun a.py", fixes=fixes)))
    shell = cli("run", "-r", path, "--export", "env").stdout
    assert "export OMP_NUM_THREADS=2\n" in shell
    assert "export GLOO_SOCKET_IFNAME='e 1'\n" in shell
    assert "# in the script: model = DistributedDataParallel(model, bucket_cap_mb=50)" in shell
    by_python = cli("run", "-r", path, "--export", "python").stdout
    assert "os.environ['OMP_NUM_THREADS'] = '2'\n" in by_python
    assert "torch.set_num_threads(2)  # threads:2" in by_python
    assert cli("run", "-r", path, "--export", "torchrun").stdout.endswith(" torchrun a.py\n")
    assert "expected env, python, torchrun, got c" in cli("run", "-r", path, "--export", "c").stderr


def test_a_command_with_other_hidden_words_is_another_command(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(as_toml(Recipe(command_sha256="0" * 64)))
    said: list[str] = []
    fw.run_recipe(path, NOTHING, say=said.append)
    assert "masked" in said[0]


@pytest.mark.parametrize("fix", CAN)
def test_each_fix_that_is_applied_can_be_written_by_hand(fix: str) -> None:
    kind = CAN[fix]
    assert kind.by_hand(kind.example) or kind.environment(kind.example), (
        f"fix {fix}: expected by_hand(), with the lines that make it in a script, or "
        "environment(), with the variables that make it"
    )


def test_an_export_leaves_out_keys_of_newer_versions_and_says_so(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text("newer_key = 3\n" + as_toml(Recipe(fixes=(parse_fix("threads:1"),))))
    said: list[str] = []
    assert "OMP_NUM_THREADS=1" in exported(path, "env", said.append)
    assert "newer_key" in " ".join(said)


def test_an_export_is_python_and_makes_each_object_once(tmp_path: Path) -> None:
    settings = [f"{key}:{kind.example}" for key, kind in CAN.items()]
    settings += ["fsdp:reshard_after_forward=False,forward_prefetch,shard_inside_hosts"]
    settings += ["processors:own+communication", "input:4x8", "transport:fullwire+bf16"]
    path = tmp_path / "recipe.toml"

    def script(*fixes: str) -> str:
        path.write_text(as_toml(Recipe(fixes=tuple(map(parse_fix, fixes)))))
        text = exported(path, "python")
        compile(text, "recipe", "exec")
        for fix in map(parse_fix, fixes):
            kind = CAN[fix.fix]
            names = kind.environment(fix.setting)
            missing = [f"os.environ[{name!r}]" for name in names]
            if fix.fix != "environment" and kind.by_hand(fix.setting):
                missing.append(str(fix))
            missing = [words for words in missing if words not in text]
            assert not missing, (
                f"the script that is exported for {fix} lacks {missing}: it holds the variables of "
                "the kind's environment(), and names the fix beside the lines of its by_hand()"
            )
        return text

    for setting in settings:
        script(setting)
    text = script(*settings[: len(CAN)])
    options = "bucket_cap_mb=50, gradient_as_bucket_view=True"
    line = f"model = DistributedDataParallel(model, {options})  # buckets:50, ddp:gradient_as_"
    assert text.count("DistributedDataParallel(") == 1
    assert line in text
    assert "# joining:1MiB: dist.all_reduce(torch.cat([...])), where none needs" in text
    # Each name has its import; the names of the script itself have none.
    of_script = {"model", "dataset", "state", "batch", "loss_of"}
    names = {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}
    have = {
        (alias.asname or alias.name).partition(".")[0]
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    assert names - have - of_script - set(dir(builtins)) == {"share", "each"}
    assert "import fullwire  # for compression:bf16\n" in text
    assert "import fullwire.transport  # for transport:fullwire\n" in text


def test_losses_are_compared_relatively_and_nan_is_far() -> None:
    assert difference_of([2.0, 2.0], [2.0, 2.1, 9.0]) == pytest.approx(0.025)
    assert difference_of([1.0], [float("nan")]) == float("inf")
    assert difference_of([], [1.0]) is None


def test_ranks_of_a_host_become_neighbours_and_share_its_processors() -> None:
    assert by_host(["a", "b", "a", "b"]) == [0, 2, 1, 3]
    assert most_leaving(["a", "b", "a", "b"]) == 2
    assert most_leaving(["a", "a", "b", "b"]) == 1
    assert most_leaving(["a", "b", "a", "c", "a"]) == 2
    assert most_leaving(["a", "a"]) == 0
    assert [share_of_rank([4, 5, 6, 7, 8], rank, 2) for rank in (0, 1)] == [[4, 5], [6, 7]]


def test_only_interfaces_that_are_up_and_have_an_address_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "fullwire.fixes._interfaces.interface_address", lambda name: "10.0.0.1" * (name != "bare")
    )
    of_each = {"a": "1000", "b": "10000", "lo": "", "silent": "", "bare": "1000", "docker0": "10"}
    for name, speed in of_each.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "speed").write_text(speed)
        state = {"b": "down", "lo": "unknown"}.get(name, "up")
        (tmp_path / name / "operstate").write_text(state)
    (tmp_path / "docker0/bridge").mkdir()
    assert _interfaces.speeds_mbps(tmp_path) == {"a": 1000.0, "silent": 0.0}


def test_the_loopback_has_an_address_and_an_unknown_interface_has_none() -> None:
    assert interface_address("lo") == "127.0.0.1"
    assert interface_address("no such") == ""


@pytest.mark.parametrize(
    ("hosts", "speeds", "tried"),
    [
        ("a,b", {"eth0": 1000.0, "eth1": 10000.0, "eth2": 100.0}, ["eth1"]),
        ("a,b", {"eth0": 1000.0, "eth1": 1000.0, "eth2": 0.0}, ["eth1", "eth2"]),
        ("a,b", {"eth1": 1000.0}, []),  # the job's own is not among them
        ("a,a", {"eth0": 1000.0, "eth1": 10000.0}, []),  # on one host nothing leaves it
    ],
)
def test_another_interface_is_tried_unless_it_is_known_to_be_slower(
    hosts: str, speeds: dict[str, float], tried: list[str]
) -> None:
    run: Any = SimpleNamespace(
        facts=SimpleNamespace(backend="gloo", hosts=hosts, nccl_network=None)
    )
    account: Any = SimpleNamespace(step_s=0.1, alone_s=0.02, parts_s=PARTS_S, crowded_s=0.0)
    seen = Seen(interface="eth0", interfaces=speeds)
    found = list(CAN["environment"].to_try(run, account, seen, None))
    assert [fix.setting for fix in found] == [f"GLOO_SOCKET_IFNAME={name}" for name in tried]


def test_an_interface_that_was_measured_is_predicted_and_a_slow_one_is_not_tried() -> None:
    run = fw.read("resnet50@v100")
    facts = dataclasses.replace(run.facts, workers=2, backend="gloo", hosts="a,b")
    run = dataclasses.replace(run, facts=facts)
    account: Any = SimpleNamespace(step_s=0.9, alone_s=0.02, parts_s=PARTS_S, crowded_s=0.0)
    speeds = dict.fromkeys(("eth0", "eth1", "eth2"), 10_000.0)

    def tried(**rates_bps: float) -> list[Worthwhile]:
        seen = Seen(interface="eth0", interfaces=speeds, interface_bps=rates_bps)
        return list(CAN["environment"].to_try(run, account, seen, None))

    [fix] = tried(eth0=1e9, eth1=7e9, eth2=0.0)  # eth2 does not lead to the other host
    assert fix.setting == "GLOO_SOCKET_IFNAME=eth1"
    told = fw.whatif(run, workers=2, bandwidth="7Gbps")
    assert fix.step_s == pytest.approx(float(told["step_s"][0]), rel=0.1)
    assert not tried(eth0=7e9, eth1=7e9, eth2=6e9)
    # What is too fast to be measured may be faster: only the job as it is bounds the gain.
    assert [fix.setting for fix in tried(eth0=7e9, eth2=7e9)] == ["GLOO_SOCKET_IFNAME=eth1"]
    assert [fix.setting for fix in tried(eth1=7e9)] == [
        "GLOO_SOCKET_IFNAME=eth1",
        "GLOO_SOCKET_IFNAME=eth2",
    ]
    facts = dataclasses.replace(facts, backend="nccl", nccl_network="IB")
    run = dataclasses.replace(run, facts=facts)
    assert not any("IFNAME" in fix.setting for fix in tried(eth0=1e9, eth1=7e9))


class Store:
    """What ranks of a job use to find each other, in one process."""

    def __init__(self) -> None:
        self.kept: dict[str, str] = {}
        self.changed = threading.Condition()

    def add(self, key: str, amount: int) -> int:
        with self.changed:
            self.kept[key] = str(int(self.kept.get(key, "0")) + amount)
            return int(self.kept[key])

    def set(self, key: str, value: str) -> None:
        with self.changed:
            self.kept[key] = value
            self.changed.notify_all()

    def get(self, key: str) -> str:
        return self.kept[key]

    def wait(self, keys: list[str], limit: timedelta) -> None:
        with self.changed:
            if not self.changed.wait_for(
                lambda: all(key in self.kept for key in keys), limit.total_seconds()
            ):
                raise RuntimeError(f"{keys[0]} has not come")


def test_hosts_measure_the_interfaces_that_all_of_them_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "fullwire.fixes._interfaces.interface_address", lambda name: "127.0.0.1" * (name != "gone")
    )
    monkeypatch.setattr(_interfaces, "_MOST_BPS", 1e15)
    store, limit_bps, begun_s = Store(), _interfaces._IN_FLIGHT * 8e6, time.monotonic()
    own = (("a", "b"), ("b", "c", "gone"), ("gone", "a", "b", "d"))
    with ThreadPoolExecutor(3) as at_once:
        asked = [at_once.submit(_interfaces.rates_bps, names, store, 3) for names in own]
        found = [each.result() for each in asked]
    assert found[0] == found[1] == found[2]
    # Within a machine the rate may be more than half of what the window allows.
    assert found[0].keys() <= {"b"}
    assert all(0 < rate < limit_bps for rate in found[0].values())
    assert time.monotonic() - begun_s < 3 * _interfaces._PATIENCE_S


def test_a_host_that_does_not_come_ends_the_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_interfaces, "_PATIENCE_S", 0.2)
    with pytest.raises(RuntimeError, match="fullwire/interfaces/1 has not come"):
        _interfaces.rates_bps(["lo"], Store(), 2)


def test_a_stranger_at_the_door_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_interfaces, "_PATIENCE_S", 1.5)
    with (
        socket.create_server(("127.0.0.1", 0)) as door,
        socket.create_server(("127.0.0.1", 0)) as other,
        socket.create_connection(door.getsockname()) as stranger,
    ):
        stranger.sendall(bytes(100_000))
        found = _interfaces._one_rate_bps(door, "t" * 32, other.getsockname(), "u" * 32)
    assert found[0] == 0.0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT])
def test_a_signal_reaches_the_job(number: signal.Signals) -> None:
    job = (
        "import signal, sys, time\n"
        f"signal.signal({int(number)}, lambda *of: sys.exit(9))\n"
        "print('ready', flush=True)\n"
        "while True: time.sleep(0.01)"  # a pause might begin after the signal
    )
    runs = (
        "import os, sys; from fullwire.recorder.launch import run_to_its_end\n"
        f"sys.exit(run_to_its_end([sys.executable, '-c', {job!r}], os.environ))"
    )
    process = subprocess.Popen([sys.executable, "-c", runs], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    process.send_signal(number)
    assert process.wait(20) == 9
    process.stdout.close()


def test_a_signal_before_the_job_is_there_reaches_it() -> None:
    """The job is started by a function that sends the signal to us first."""
    runs = (
        "import os, signal, subprocess, sys; from fullwire.recorder import launch\n"
        "true = subprocess.Popen\n"
        "def started(*words, **more):\n"
        "    os.kill(os.getpid(), signal.SIGUSR1)\n"
        "    return true(*words, **more)\n"
        "subprocess.Popen = started\n"
        "sys.exit(launch.run_to_its_end(['sleep', '60'], os.environ))"
    )
    done = subprocess.run([sys.executable, "-c", runs], timeout=20, check=False)
    assert done.returncode == 128 + signal.SIGUSR1


@pytest.mark.parametrize("way", ["record", "apply", "run"])
def test_an_interrupt_of_the_command_line_alone_reaches_the_job_which_ends_both(
    tmp_path: Path, way: str
) -> None:
    (tmp_path / "recipe.toml").write_text(as_toml(Recipe()))
    words = {
        "record": ["record", "-o", str(tmp_path / "job.run")],
        "apply": ["apply", "buckets:50"],
        "run": ["run", "-r", str(tmp_path / "recipe.toml")],
    }[way]
    job = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGINT, lambda *of: sys.exit(9))\n"
        "print('ready', flush=True)\n"
        "while True: time.sleep(0.01)"
    )
    command = [sys.executable, "-m", "fullwire", *words, "--", sys.executable, "-c", job]
    # A session of its own has no terminal, which would send Ctrl-C to the job too.
    process = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 9
    process.stdout.close()


def test_a_command_that_is_ended_at_its_limit_leaves_no_process_behind(tmp_path: Path) -> None:
    script = f"setsid sleep 61 & echo $! > {tmp_path}/pid; wait"
    status = run_to_its_end(["sh", "-c", script], dict(os.environ), limit_s=0.5)
    assert status == TOO_LONG
    state = Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}/stat")
    for _ in range(2000):  # the kernel ends it a little later
        if not state.exists() or ") Z" in state.read_text():
            return
        time.sleep(0.005)
    raise AssertionError(f"{state} is still there")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--allow", "all"], "--allow: expected exact, numeric, semantic, got all"),
        (["--rate", "1Gbps"], "expected --lab with them"),
        (["--budget", "soon"], "budget: expected a time with its unit"),
        (["--budget", "0s"], "budget: expected a time above 0, got '0s'"),
    ],
)
def test_a_tuning_that_cannot_be_is_refused_before_the_job(
    tmp_path: Path, cli: Cli, options: list[str], sentence: str
) -> None:
    done = cli("tune", *options, "-o", tmp_path / "tuned", "--", *NOTHING)
    assert (done.returncode, done.stdout) == (2, "")
    assert sentence in done.stderr
    assert not (tmp_path / "tuned").exists()
    taken = cli("tune", "-o", tmp_path, "--", *NOTHING)
    assert (taken.returncode, "expected a new folder" in taken.stderr) == (2, True)


def test_the_other_tasks_of_a_launcher_follow_the_tuning_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_PROCID", "3")
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    with pytest.raises(UsageError, match=r"task 3 of 4 \(Slurm\): expected `fullwire run --follow"):
        fw.tune(NOTHING, tmp_path / "tuned")
    assert not (tmp_path / "tuned").exists()


def test_a_job_that_follows_nobody_keeps_its_status_and_says_so(cli: Cli) -> None:
    done = cli("run", "--follow", "--", *NOTHING)
    assert done.returncode == 7
    assert "no fixes came from rank 0" in done.stderr
    both = cli("run", "--follow", "-r", "recipe.toml", "--", *NOTHING)
    assert (both.returncode, "expected one of --recipe" in both.stderr) == (2, True)


def test_each_outcome_of_a_fix_is_told_with_its_processes(tmp_path: Path) -> None:
    for number, did in enumerate(("applied: a", "applied: a", "not applied: b")):
        (tmp_path / f"{number}.fixes").write_text(json.dumps({"fix": "buckets", "did": did}))
    chosen = [parse_fix("buckets:50"), parse_fix("threads:1")]
    assert sentences(outcomes(chosen, notes_in(tmp_path))) == (
        "fix buckets:50: applied: a, in 2 processes",
        "fix buckets:50: not applied: b, in 1 process",
        "fix threads:1: not applied: no process called the function that it changes",
    )


@pytest.mark.parametrize(
    ("ranks", "problem"),
    [
        ([["applied: a"], ["applied: b", "not applied: another loader"]], ""),
        ([["applied: a"], ["applied: a", "undone: E: e"]], "undone: E: e"),
        ([["applied: a"], ["not applied: c"]], "applied in 1 of 2 ranks"),
        ([["not applied: c"], ["not applied: c"]], "not applied: c"),
        ([], "not applied: no process called the function that it changes"),
    ],
)
def test_a_fix_that_was_undone_or_is_not_on_each_rank_is_told(
    tmp_path: Path, ranks: list[list[str]], problem: str
) -> None:
    for number, told in enumerate(ranks):
        lines = [json.dumps({"fix": "buckets", "did": did}) for did in told]
        (tmp_path / f"{number}.fixes").write_text("\n".join(lines))
    found = problem_of(parse_fix("buckets:50"), 2, notes_in(tmp_path))
    assert (sentence(found) if found else "") == problem


def test_a_call_that_fails_with_a_fix_is_made_again_as_the_script_makes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FULLWIRE_FIXES_INTO", str(tmp_path))

    def make(size: int, kind: str = "usual") -> tuple[int, str]:
        if kind == "other":
            raise ValueError("no such kind")
        return size, kind

    def cannot(given: Any) -> Any:
        raise RuntimeError("no place for it")

    owner: Any = SimpleNamespace(make=make, may_not_repeat=make, unchanged=make)
    fix = Applying("buckets")
    fix.around(owner, "make", lambda given: {"kind": "other"})
    fix.around(owner, "may_not_repeat", lambda given: {"kind": "other"}, may_repeat=False)
    fix.around(owner, "unchanged", cannot)
    assert owner.make(3) == owner.unchanged(3) == (3, "usual")
    with pytest.raises(ValueError, match="no such kind"):
        owner.may_not_repeat(3)
    [told] = notes_in(tmp_path)
    assert [note["did"] for note in told] == [
        "undone: ValueError: no such kind",
        "not applied: no place for it",
    ]


def test_nccl_between_hosts_gets_more_threads_or_more_channels() -> None:
    parts_s = {"line_rate": 0.01, "latency": 0.02, "transport": 0.05, "straggler": 0.0}
    account: Any = SimpleNamespace(step_s=0.1, alone_s=0.02, parts_s=parts_s)
    for network, first in (("Socket", "NCCL_SOCKET_NTHREADS=4"), ("IB", "NCCL_IB_QPS")):
        facts = SimpleNamespace(backend="nccl", hosts="a,b", nccl_network=network)
        run: Any = SimpleNamespace(facts=facts)
        found = CAN["environment"].to_try(run, account, Seen(), None)
        settings = [fix.setting for fix in found]
        assert settings[0].startswith(first)
        assert settings[2] == "NCCL_ALGO=Tree"
        assert all(CAN["environment"].checked_in_recipe(setting) for setting in settings)


def test_a_measured_interface_tells_the_line_rate_of_a_run_without_one() -> None:
    """Without it, transfers were unexplained, and no fix of communication was tried."""
    known = a_trained_job(a_transport(), steps=6)
    facts = dataclasses.replace(known.facts, line_rate_bps=None)
    run = dataclasses.replace(known, facts=facts)
    assert _line_bps(run, Seen(interface_bps={"eth0": 0.478e9})) == pytest.approx(0.5e9, rel=0.01)
    both = Seen(interface="eth1", interface_bps={"eth0": 0.478e9, "eth1": 0.956e9})
    assert _line_bps(run, both) == pytest.approx(1e9, rel=0.01)
    unknown = Seen(interface="eth1", interface_bps={"eth0": 0.478e9, "eth1": 0.0})
    assert _line_bps(run, unknown) is _line_bps(run, Seen()) is None
    assert _line_bps(known, both) is None
    over_rdma = dataclasses.replace(run, facts=dataclasses.replace(facts, backend="nccl"))
    assert _line_bps(over_rdma, both) is None
    # Where nobody measured, the account bounds the gain.
    found = explain(run).detail
    assert found.parts_s["unexplained"] > 0
    [trial, *_] = CAN["transport"].to_try(run, found, Seen(), None)
    assert trial.low_s < found.step_s - 0.5 * found.parts_s["unexplained"]


def test_larger_buckets_do_not_save_the_time_of_bytes_on_the_line() -> None:
    """Buckets of 25 MiB took 87 ms a step on 1 Gbps, and those of 0.05 MiB 73 ms."""
    parts_s = {**PARTS_S, "line_rate": 0.038, "latency": 0.001, "transport": 0.004}
    account: Any = SimpleNamespace(step_s=0.073, alone_s=0.030, parts_s=parts_s, crowded_s=0.0)
    seen, run = Seen(ddp={"bucket_cap_mb": 0.05}), a_trained_job(a_transport(), steps=2)
    tried = [*CAN["buckets"].to_try(run, account, seen, None)]
    saved_s = sum(parts_s[part] for part in ("latency", "transport", "unexplained", "contention"))
    assert [fix.low_s for fix in tried] == pytest.approx([0.98 * (0.073 - saved_s)])


def test_fsdp_is_tried_with_what_the_job_lacks() -> None:
    account: Any = SimpleNamespace(step_s=0.1, alone_s=0.02, parts_s=PARTS_S, crowded_s=0.0)
    run: Any = SimpleNamespace(facts=SimpleNamespace(hosts="a,a,b,b"))
    has = {"reshard_after_forward": None, "forward_prefetch": False, "is_whole": True}
    seen = Seen(fsdp=has, local_ranks=2)
    found = [fix.setting for fix in CAN["fsdp"].to_try(run, account, seen, None)]
    assert found == ["reshard_after_forward=False", "forward_prefetch", "shard_inside_hosts"]
    run.facts.hosts = "a,a"
    has |= {"reshard_after_forward": False, "forward_prefetch": True}
    assert list(CAN["fsdp"].to_try(run, account, seen, None)) == []


def test_sums_of_ranks_on_one_host_have_another_transport_to_try() -> None:
    """Two ranks with FSDP2 on two processors: our transport made 296 ms 210 ms."""
    parts_s = {"compute": 0.116, "contention": 0.139, "straggler": 0.023, "host": 0.053}
    parts_s |= dict.fromkeys(("line_rate", "latency", "transport", "unexplained"), 0.0)
    account: Any = SimpleNamespace(
        step_s=0.331, alone_s=0.169, parts_s=parts_s, crowded_s=0.0135, is_typical=np.ones(1, bool)
    )
    run = a_trained_job(a_transport(), steps=2, facts={"hosts": "a,a"})
    seen = Seen(local_ranks=2, fsdp={"is_whole": True})
    first = next(iter(CAN["transport"].to_try(run, account, seen, None)))
    assert first.low_s < 0.331 * 210 / 296 < first.high_s
    assert [fix.setting for fix in CAN["fsdp"].to_try(run, account, seen, None)] == [
        "reshard_after_forward=False",
        "forward_prefetch",
    ]


def test_an_option_that_a_later_step_may_break_is_not_tried_by_default() -> None:
    assert parse_fix("ddp:static_graph").risk == "semantic"
    assert parse_fix("ddp:gradient_as_bucket_view,find_unused_parameters=False").risk == "exact"


def test_loading_ahead_is_predicted_by_what_its_processes_load() -> None:
    """A step of 47 ms waits 34 ms for data; two processes give a batch in 17 ms. Measured: 18."""
    run = a_trained_job(a_transport(), gradients_mib=(1, 2), steps=30)
    middle_ns = int(np.median(run.spans.start_ns))
    free = Hosts(
        host=np.array(["a"], object),
        device=np.array(["cpu0"], object),
        time_ns=np.array([middle_ns]),
        utilization=np.array([0.3]),
        memory_bytes=np.array([0]),
    )
    of_idle_host = dataclasses.replace(run, hosts=free)
    account: Any = SimpleNamespace(
        step_s=0.0474, alone_s=0.0474, parts_s={"input": 0.034, "straggler": 0.0016}
    )
    seen = Seen(loading_processes=0)
    [found] = CAN["input"].to_try(of_idle_host, account, seen, None)
    assert found.step_s == pytest.approx(0.0182, rel=0.06)
    assert found.low_s < 0.0182 < found.high_s
    taken = dataclasses.replace(free, utilization=np.array([0.82]))
    of_busy_host = dataclasses.replace(run, hosts=taken)
    assert not [*CAN["input"].to_try(of_busy_host, account, seen, None)]  # none can load
    assert "num_workers" not in CAN["input"].in_few_steps(of_busy_host, account)
    assert "num_workers=8" in CAN["input"].in_few_steps(of_idle_host, account)
    # The thread that steps is ready to run for 10 of 47 ms, so loading sleeps: for a disk, say.
    asleep = dataclasses.replace(run.facts, run_s=((0.0, 0.006),), run_delay_s=((0.0, 0.004),))
    of_sleeper = dataclasses.replace(of_busy_host, facts=asleep)
    assert [*CAN["input"].to_try(of_sleeper, account, seen, None)]
    assert "num_workers=8" in CAN["input"].in_few_steps(of_sleeper, account)
    of_loaders = dataclasses.replace(asleep, children_processor_s=((0.0, 0.02),))
    beside_loaders = dataclasses.replace(of_sleeper, facts=of_loaders)
    hardly: Any = SimpleNamespace(
        step_s=0.0474, alone_s=0.0474, parts_s={"input": 0.0002, "straggler": 0.02}
    )
    assert not [*CAN["input"].to_try(of_sleeper, hardly, seen, None)]  # it does not wait for data
    assert "num_workers" not in CAN["input"].in_few_steps(beside_loaders, account)


def test_a_batch_from_another_process_takes_time_where_ranks_have_no_more_processors() -> None:
    """A step of 61 ms waits 37 ms for data, and then two ranks fill two processors.

    Two processes for each rank made it 31.7 ms, not the 24 ms that it computes.
    """
    run = a_trained_job(a_transport(), gradients_mib=(1, 2), steps=30)
    both = Hosts(
        host=np.array(["a", "a"], object),
        device=np.array(["cpu0", "cpu1"], object),
        time_ns=np.full(2, int(np.median(run.spans.start_ns))),
        utilization=np.array([0.4, 0.4]),
        memory_bytes=np.array([0, 0]),
    )
    facts = dataclasses.replace(run.facts, machines=1, processors=2, workers=2)
    crowded = dataclasses.replace(run, hosts=both, facts=facts)
    account: Any = SimpleNamespace(
        step_s=0.0612, alone_s=0.0612, parts_s={"input": 0.0369, "straggler": 0.0}
    )
    seen = Seen(loading_processes=0)
    [found] = CAN["input"].to_try(crowded, account, seen, None)
    assert found.step_s == pytest.approx(0.0317, rel=0.1)
    wide = dataclasses.replace(crowded, facts=dataclasses.replace(facts, processors=64))
    [found] = CAN["input"].to_try(wide, account, seen, None)
    assert found.step_s == pytest.approx(0.026, rel=0.02)


def test_the_search_for_unused_parameters_has_its_share_of_contention_on_one_host() -> None:
    """Of two sums in a step of 43 ms one is the search's. It gained 13 % on the same machine."""
    parts_s = {"compute": 0.0226, "contention": 0.0067, "latency": 0.0, "transport": 0.0}
    run = a_trained_job(a_transport(), gradients_mib=(1, 2), steps=30)
    account: Any = SimpleNamespace(
        step_s=0.0432,
        alone_s=0.0290,
        crowded_s=0.001,
        parts_s=parts_s,
        steps=[*range(30)],
        ranks=[0, 1],
    )
    options = {"find_unused_parameters": True}
    [found] = CAN["ddp"].to_try(run, account, Seen(ddp=options), None)
    sums = len(run.collectives) / 60
    most_s = 0.0057 / sums + 0.15 * 0.0226
    assert found.step_s == pytest.approx(0.0432 - most_s / 2)
    assert found.low_s == pytest.approx(0.98 * (0.0432 - most_s))


@pytest.mark.parametrize(
    ("threads", "step_s", "parts_s", "became_s"),
    [
        (8, 0.0542, {"compute": 0.0118, "contention": 0.0191, "straggler": 0.0151}, 0.0405),
        # They wait busily, for each could have a processor.
        (2, 0.0982, {"compute": 0.0293, "contention": 0.0324, "straggler": 0.0203}, 0.0371),
    ],
)
def test_threads_beyond_the_processors_lose_what_they_wait(
    threads: int, step_s: float, parts_s: dict[str, float], became_s: float
) -> None:
    """Two ranks on two processors computed with so many threads each, and then with one."""
    account: Any = SimpleNamespace(step_s=step_s, alone_s=0.0202, parts_s=parts_s)
    seen = Seen(threads=threads, processors=2, local_ranks=2)
    [found] = CAN["threads"].to_try(a_trained_job(a_transport(), steps=2), account, seen, None)
    assert found.setting == "1"
    assert found.step_s == pytest.approx(became_s, rel=0.1)
    assert found.low_s < became_s < found.high_s


def test_on_a_faster_interface_only_the_time_of_bytes_and_of_neighbours_becomes_shorter() -> None:
    """Two hosts of two ranks that a slow interface held: 844 ms a step, and 120 ms on a faster."""
    run = a_trained_job(
        a_transport(), workers=4, rate_bps=1e8, slower_ms=50, steps=6, facts={"hosts": "a,a,b,b"}
    )
    line_s = explain(run).detail.parts_s["line_rate"]
    # The lab tells of faster links than the job's interface is.
    run = dataclasses.replace(run, facts=dataclasses.replace(run.facts, line_rate_bps=1e9))
    late = explain(run).detail
    speeds = dict.fromkeys(("eth0", "eth1"), 10_000.0)
    payload = {"eth0": 0.0956e9, "eth1": 0.956e9}
    seen = Seen(interface="eth0", interfaces=speeds, interface_bps=payload, local_ranks=2)
    [fix] = CAN["environment"].to_try(run, late, seen, None)
    # One rank is slow by itself: others wait for it on any interface.
    assert late.parts_s["straggler"] > 0.02
    assert fix.step_s == pytest.approx(late.step_s - 0.9 * line_s, rel=0.01)
    assert fix.low_s < fix.step_s < fix.high_s
    # Where nobody is, they wait for a neighbour's transfer.
    neighbours = dataclasses.replace(late, excess_ns=0 * late.excess_ns)
    [fix] = CAN["environment"].to_try(run, neighbours, seen, None)
    gone_s = 0.9 * (line_s + late.parts_s["straggler"])
    assert fix.step_s == pytest.approx(late.step_s - gone_s, rel=0.01)
    # If both ranks of each host send to the other host, the line takes twice as long.
    facts = dataclasses.replace(run.facts, hosts="a,b,a,b")
    [both] = CAN["environment"].to_try(
        dataclasses.replace(run, facts=facts), neighbours, seen, None
    )
    assert both.step_s < fix.step_s


def test_no_transport_saves_the_bytes_of_a_known_line() -> None:
    """Two hosts of two ranks on 500 Mbps, 190 ms a step: our transport made it 167 to 171 ms."""
    parts_s = {"line_rate": 0.1443, "latency": 0.0, "transport": 0.004, "unexplained": 0.0}
    parts_s |= {"contention": 0.0056, "straggler": 0.0179}
    account: Any = SimpleNamespace(
        step_s=0.1898,
        alone_s=0.0202,
        parts_s=parts_s,
        crowded_s=0.0056,
        is_typical=np.ones(1, bool),
        excess_ns=np.zeros((4, 1, 3), np.int64),
    )
    run, kind = a_trained_job(a_transport(), steps=2, facts={"hosts": "a,a,b,b"}), CAN["transport"]
    first = next(iter(kind.to_try(run, account, Seen(local_ranks=2), None)))
    assert first.setting == "fullwire"
    assert first.step_s == pytest.approx(0.169, rel=0.06)
    assert first.low_s < 0.167 < 0.171 < first.high_s
    # A rank alone on its host is late for other reasons.
    first = next(iter(kind.to_try(run, account, Seen(local_ranks=1), None)))
    assert first.low_s > 0.176


def test_a_fix_in_vain_may_cost_something() -> None:
    """In nine of ten trials in vain the step became up to 12 % longer."""
    parts_s = {"contention": 0.01, "straggler": 0.02}
    account: Any = SimpleNamespace(step_s=0.1, alone_s=0.07, parts_s=parts_s)
    run, seen = a_trained_job(a_transport(), steps=2), Seen(processors=4, local_ranks=2)
    first = next(iter(CAN["processors"].to_try(run, account, seen, None)))
    assert first.high_s == pytest.approx(0.112)


def test_hosts_of_a_lab_share_the_processors_of_one_machine() -> None:
    """Two threads a rank took twice as long there."""
    account: Any = SimpleNamespace(step_s=0.1, alone_s=0.07, parts_s={"compute": 0.06})
    run, seen = a_trained_job(a_transport(), steps=2), Seen(threads=1, processors=2)
    assert not list(CAN["threads"].to_try(run, account, seen, None))
    facts = dataclasses.replace(run.facts, machines=2)
    apart = dataclasses.replace(run, facts=facts)
    assert [fix.setting for fix in CAN["threads"].to_try(apart, account, seen, None)] == ["2"]


def test_fixes_that_name_nothing_are_refused() -> None:
    with pytest.raises(UsageError, match="fixes: expected some such as buckets:50, or none"):
        split_fixes("")


class Recordings:
    """A job of a tuning whose recordings are made, and which fails after some of them."""

    def __init__(self, folder: Path, most: int, error: BaseException) -> None:
        self.command, self.folder = ["train"], folder
        self.steps: int | None = None
        self.start_s = 5.0
        self.left_s, self.most, self._error = 60.0, most, error
        self.made = 0

    def allows(self, recordings: int) -> bool:
        """Say that there is time for all of them."""
        return True

    def go_on_unless_interrupted(self) -> None:
        """Go on: no signal comes."""

    def adapt(self, paces: Any, *, chooses: bool) -> None:
        """Leave the steps as they are."""

    def recorded(self, fixes: Sequence[Applied]) -> TrialRecording:
        """Return a recording, faster with fixes, or fail."""
        if self.made == self.most:
            raise self._error
        self.made += 1
        mib = (1, 2) if fixes else (16, 24)
        run = a_trained_job(a_transport(), gradients_mib=mib, steps=30)
        return TrialRecording(run=run, path=Path(f"{self.made}.run"), seen=Seen(), problem=None)


def test_ctrl_c_before_the_first_trial_leaves_the_job_as_it_is(tmp_path: Path) -> None:
    job: Any = Recordings(tmp_path, 1, KeyboardInterrupt())
    search = _Search(job, ("exact",), lambda sentence: None)
    with pytest.raises(KeyboardInterrupt):
        search.begin()
    found = search.end()
    assert found.trials == ()
    assert found.after_s == found.before_s > 0
    assert read_recipe(found.recipe).fixes == ()


def test_a_tuning_names_the_best_fix_of_a_larger_risk(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job: Any = Recordings(tmp_path, 99, UsageError("none"))
    search = _Search(job, ("exact",), lambda sentence: None)
    search.begin()
    found = search.end()
    assert found.riskier is not None
    assert found.riskier.risk == "numeric"
    assert (found.riskier.high_s or math.inf) < found.before_s
    print_tuning(found)
    assert f"With --allow numeric: {found.riskier.why}" in capsys.readouterr().out
    assert tuning_object(found)["riskier"]["fix"] == found.riskier.fix
    search = _Search(job, RISKS, lambda sentence: None)
    search.begin()
    assert search.end().riskier is None


def test_a_step_that_is_recorded_slower_is_predicted_by_its_ratio(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many small sums of 210 ms become 22 ms; in steps of 192 ms, that is no time below 0."""
    job: Any = Recordings(tmp_path, 99, UsageError("none"))
    search = _Search(job, ("exact",), lambda sentence: None)
    search.begin()
    told = explain(search._best[-1].run)
    now_s = search._judged(search._best, search._best).before_s
    joined = Joined(
        count=120,
        ops="all-reduces",
        how="",
        setting="1MiB",
        forecast=Forecast(
            step_s=0.22 * now_s, scaling_factor=0.5, low_s=0.2 * now_s, high_s=0.3 * now_s
        ),
    )
    slower = dataclasses.replace(told, fixes=(joined,), fixes_from_s=2 * now_s)
    monkeypatch.setattr("fullwire.answers.tune.explain", lambda run, bandwidth: slower)
    found = search._candidates(now_s, ("exact",))
    [applied] = [each for each in found if each.fix == "joining"]
    predicted = applied.low_s, applied.predicted_s, applied.high_s
    assert predicted == pytest.approx((0.1 * now_s, 0.11 * now_s, 0.15 * now_s))


def test_a_confirmation_that_fails_loses_no_trial(tmp_path: Path) -> None:
    said: list[str] = []
    job: Any = Recordings(tmp_path, 99, UsageError("the job ended with status 1"))
    search = _Search(job, ("exact",), said.append)
    search.begin()
    for text in ("buckets:50", "threads:1"):
        applied = parse_fix(text)
        search._kept, search._best = [*search._kept, applied], [job.recorded([applied])]
        search.trials.append(
            Trial(
                fix=applied.fix,
                setting=applied.setting,
                risk="exact",
                words=text,
                from_s=1.0,
                predicted_s=0.5,
                low_s=None,
                high_s=None,
                measured_s=0.5,
                kept=True,
                outcome=Faster(times=2.0),
                loss_difference=None,
            )
        )
    job.most = job.made
    search.confirm()
    found = search.end()
    assert "not held against the job as it is once more: the job ended with status 1" in said
    assert [str(each) for each in read_recipe(found.recipe).fixes] == ["buckets:50", "threads:1"]
    assert found.after_s < found.before_s
    assert found.is_significant is None


@pytest.mark.parametrize(
    ("pairs", "gain", "is_kept"), [(3, 0.1, True), (9, 0.1, False), (3, 0.02, False)]
)
def test_a_gain_that_may_be_noise_gets_more_pairs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pairs: int, gain: float, is_kept: bool
) -> None:
    """Two pairs cannot tell a gain of a tenth here; so many can. A gain of 2 % gets no more."""
    job: Any = Recordings(tmp_path, 99, UsageError("none"))
    search = _Search(job, ("exact",), lambda sentence: None)
    search.begin()

    def judged(
        before: Sequence[TrialRecording], after: Sequence[TrialRecording]
    ) -> SimpleNamespace:
        is_clear = len(after) >= pairs
        return SimpleNamespace(
            ratio=1 - gain, after_s=1 - gain, before_s=1.0, is_significant=is_clear
        )

    monkeypatch.setattr(search, "_judged", judged)
    made = job.made
    [look] = search._looked_at(parse_fix("buckets:50"), 1.0)
    search._settle(look)
    assert [trial.kept for trial in search.trials] == [is_kept]
    assert job.made - made == {True: 5, False: 7 if gain > 0.03 else 3}[is_kept]
