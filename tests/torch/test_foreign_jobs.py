"""Jobs whose answers are known by construction, written by many profilers: is `explain` right?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import fullwire
from fullwire.importers import read
from tests.foreign_jobs import (
    GENERIC,
    MSCCLPP,
    NCCL_2_8,
    NCCL_2_10,
    NEARBY,
    NETWORK,
    OLD_RCCL,
    ROCM,
    Do,
    Groups,
    Of,
    Played,
    Writing,
    cut,
    figures,
    of_an_intel_device,
    of_kineto_in_2026,
    of_mtia,
    of_rocm_6_1,
    of_torch_2_3_on_rocm,
    play,
    replace,
    write,
)

NEAR_AND_FAR: Groups = {"near": [(0, 1), (2, 3)], "far": [(0, 2), (1, 3)]}
GRID: Groups = {
    "near": [tuple(range(n, n + 4)) for n in (0, 4, 8, 12)],
    "far": [(n, n + 4, n + 8, n + 12) for n in range(4)],
}


def ddp(
    compute: Of | int = 1_500,
    transfer: Of | int = 600,
    inputs: Of | int = 40,
    host: Of | int = 20,
    **more: bool,
) -> list[Do]:
    """A step of data-parallel training with two buckets."""
    hidden = more.get("hidden", False)
    return [
        Do(what="input", us=inputs),
        Do(what="copy", us=20, stream=COPY),
        Do(what="compute", us=200),
        Do(what="host", us=host),
        Do(what="compute", us=compute, is_backward=True),
        Do(what="collective", us=transfer, stream=NETWORK, is_waited_for=False, is_backward=True),
        Do(what="compute", us=300, is_backward=True),
        Do(
            what="collective",
            us=transfer,
            stream=NETWORK,
            is_waited_for=not hidden,
            is_backward=True,
        ),
        Do(what="compute", us=100),
        Do(what="sync"),
    ]


def tensor_parallel(near: Of | int, far: int, compute: Of | int = 400) -> list[Do]:
    """A step of two layers split over neighbours, with gradients reduced across."""
    layer = [
        Do(what="compute", us=compute),
        Do(what="collective", op="allgather", us=near, group="near", stream=NEARBY),
        Do(what="compute", us=compute),
        Do(what="collective", op="reducescatter", us=near, group="near", stream=NEARBY),
    ]
    return [
        Do(what="input", us=30),
        *layer,
        *layer,
        Do(what="compute", us=compute, is_backward=True),
        Do(what="collective", us=far, group="far", stream=NETWORK, is_backward=True),
        Do(what="compute", us=60),
        Do(what="sync"),
    ]


def fully_sharded(compute: Of | int, gather: int) -> list[Do]:
    """A step of FSDP: each layer is gathered while the one before is computed."""
    fetch = Do(
        what="collective",
        op="allgather",
        us=gather,
        stream=NETWORK,
        is_waited_for=False,
        is_after_compute=False,
    )
    layer = [fetch, Do(what="compute", us=compute)]
    shrink = Do(
        what="collective",
        op="reducescatter",
        us=gather,
        stream=NEARBY,
        is_waited_for=False,
        is_backward=True,
    )
    return [
        Do(what="input", us=30),
        replace(fetch, is_waited_for=True),
        *layer * 3,
        *[Do(what="compute", us=compute, is_backward=True), shrink] * 3,
        Do(what="compute", us=40),
        Do(what="sync"),
    ]


def accumulated(compute: Of | int) -> list[Do]:
    """A step of which only every second reduces gradients."""
    return [replace(do, every=2) if do.what == "collective" else do for do in ddp(compute)]


def usual(value: int, *, but: dict[int, int]) -> Of:
    return lambda rank, step: but.get(rank, value)


COPY = 30
APART: Of = lambda rank, step: (0, 3_700_000_000, -12_000_000_000, 450_000)[rank % 4]  # noqa: E731


@dataclass(frozen=True, kw_only=True)
class Case:
    program: Sequence[Do]
    kind: str
    says: tuple[str, ...] = ()
    never: tuple[str, ...] = ()
    ranks: int = 4
    steps: int = 8
    groups: Groups | None = None
    writing: Writing = field(default_factory=Writing)
    recorded: tuple[int, ...] | None = None
    bandwidth: str | None = None
    begins_ns: Of = lambda rank, step: 0


LATE_2 = usual(1_500, but={2: 3_000})
LATE_2_SAID = ("Rank 2 is late", "computation")
NETWORK_SAID = "this is the network and no late rank"
ONE_SAID = "1 of 4 ranks"
CASES = {
    "hidden": Case(program=ddp(3_000, 200, hidden=True), kind="scales"),
    "network": Case(program=ddp(500, 2_000), kind="unknown", says=(NETWORK_SAID,)),
    "bandwidth": Case(program=ddp(500, 2_000), kind="line_rate", bandwidth="26Gbps"),
    "transport": Case(program=ddp(500, 2_000), kind="transport", bandwidth="400Gbps"),
    "overlap": Case(program=ddp(4_000, 2_000), kind="overlap", bandwidth="26Gbps"),
    "slow-rank": Case(program=ddp(LATE_2), kind="straggler", says=LATE_2_SAID),
    "slow-first": Case(
        program=ddp(usual(1_500, but={0: 3_000})),
        kind="straggler",
        says=("Rank 0 is late", "computation"),
    ),
    "slow-input": Case(
        program=ddp(inputs=usual(40, but={1: 2_000})),
        kind="straggler",
        says=("Rank 1 is late", "input"),
    ),
    "slow-host": Case(
        program=ddp(host=usual(20, but={3: 2_000})), kind="straggler", says=("Rank 3 is late",)
    ),
    "in-turn": Case(
        program=ddp(lambda rank, step: 3_000 if step % 4 == rank else 1_000),
        kind="straggler",
        says=("now one and now another",),
    ),
    "late-start": Case(
        program=ddp(3_000, 150),
        kind="scales",
        never=("Rank 1 is late",),
        begins_ns=usual(0, but={1: 400_000_000}),
    ),
    "input": Case(program=ddp(1_000, 100, inputs=3_000), kind="input"),
    "host": Case(
        program=[*[Do(what="compute", us=20), Do(what="host", us=60)] * 30, *ddp(100, 100)],
        kind="host",
    ),
    "latency": Case(
        program=[*ddp(500, 100), *[Do(what="collective", us=30, elements=16)] * 60],
        kind="latency",
        bandwidth="100Gbps",
    ),
    "near": Case(
        program=tensor_parallel(900, 100), kind="unknown", groups=NEAR_AND_FAR, says=(NETWORK_SAID,)
    ),
    "far": Case(
        program=tensor_parallel(30, 3_000),
        kind="unknown",
        groups=NEAR_AND_FAR,
        says=(NETWORK_SAID,),
    ),
    "late-in-groups": Case(
        program=tensor_parallel(30, 100, usual(400, but={3: 900})),
        kind="straggler",
        groups=NEAR_AND_FAR,
        says=("Rank 3 is late",),
    ),
    "one": Case(
        program=ddp(LATE_2),
        kind="unknown",
        recorded=(0,),
        says=(ONE_SAID,),
        never=("is late", "the network, not"),
    ),
    "one-late": Case(
        program=ddp(LATE_2),
        kind="unknown",
        recorded=(2,),
        says=(ONE_SAID,),
        never=("is late", "the network, not"),
    ),
    "three": Case(
        program=ddp(LATE_2),
        kind="unknown",
        recorded=(0, 1, 3),
        says=("3 of 4 ranks",),
        never=("the network, not",),
    ),
    "one-busy": Case(program=ddp(4_000, 100, hidden=True), kind="scales", recorded=(1,)),
    "slow-node": Case(
        program=ddp(lambda rank, step: 3_000 if rank > 3 else 1_500),
        ranks=8,
        kind="straggler",
        says=("Ranks 4 to 7 are late",),
    ),
    "two-late": Case(
        program=ddp(usual(1_500, but={1: 3_000, 6: 3_000})),
        ranks=8,
        kind="straggler",
        says=("Ranks 1 and 6 are late",),
    ),
    "lagging": Case(program=ddp(LATE_2)[:-1], kind="straggler", says=("Rank 2 is late",)),
    "lagging-network": Case(program=ddp(500, 2_000)[:-1], kind="unknown", says=(NETWORK_SAID,)),
    "sharded": Case(program=fully_sharded(600, 150), kind="scales"),
    "sharded-late": Case(
        program=fully_sharded(usual(600, but={1: 900}), 300),
        kind="straggler",
        says=("Rank 1 is late",),
    ),
    "sharded-network": Case(program=fully_sharded(300, 900), kind="unknown", says=(NETWORK_SAID,)),
    "accumulated": Case(program=accumulated(LATE_2), kind="straggler", says=("Rank 2 is late",)),
    "late-in-a-grid": Case(
        program=tensor_parallel(30, 100, usual(400, but={9: 900})),
        ranks=16,
        kind="straggler",
        groups=GRID,
        says=("Rank 9 is late",),
    ),
    "slow-near": Case(
        program=tensor_parallel(lambda rank, step: 900 if rank > 11 else 50, 100),
        ranks=16,
        groups=GRID,
        kind="straggler",
        says=("Ranks 12 to 15 are late",),
    ),
    "alone": Case(
        program=[*ddp(800)[:5], Do(what="sync")], ranks=1, kind="unknown", says=("one worker",)
    ),
    "deep-ep": Case(
        program=[*ddp(800, 100), *[Do(what="unnamed", us=900)] * 3],
        kind="unknown",
        never=("is late", "the network, not"),
    ),
}

WRITINGS = {
    "plain": Writing(),
    "numbered": Writing(has_sequence=True),
    "marks": Writing(arguments="marks"),
    "2.10": Writing(names=NCCL_2_10, arguments="library"),
    "2.8": Writing(names=NCCL_2_8, arguments="none", is_old=True),
    "base": Writing(base_ns=1_741_000_000_000_000_000),
    "text": Writing(stamps="text", is_packed=True),
    "apart": Writing(clock_ns=APART),
    "apart-without": Writing(clock_ns=APART, arguments="none"),
    "optimizer": Writing(marks="optimizer"),
    "rocm": ROCM,
    "rocm-old": replace(ROCM, names=OLD_RCCL, arguments="marks"),
    "rocm-2.3": replace(ROCM, arguments="marks", form=of_torch_2_3_on_rocm),
    "xpu": Writing(
        names=dict.fromkeys(NCCL_2_10, "oneapi::ccl::kernel"),
        arguments="marks",
        form=of_an_intel_device,
    ),
    "2026": Writing(form=of_kineto_in_2026),
    "mtia": Writing(form=of_mtia),
    "mscclpp": Writing(names=MSCCLPP, arguments="marks"),
    "generic": Writing(names=GENERIC, arguments="library"),
    "unlabelled": Writing(has_distributed_info=False, name=lambda rank: f"trace_rank{rank}.json"),
}
NAMES_NO_GROUPS = ("2.10", "2.8", "apart-without", "generic")


def explained(case: Case, where: Path, played: list[Played]) -> fullwire.Explanation:
    write(played, where, case.writing, case.recorded)
    return fullwire.explain(read(where), bandwidth=case.bandwidth)


def play_case(case: Case) -> list[Played]:
    return play(
        case.program,
        ranks=case.ranks,
        steps=case.steps,
        groups=case.groups,
        begins_ns=case.begins_ns,
    )


def check_figures(
    found: fullwire.Explanation,
    played: list[Played],
    among: Sequence[int],
    within_s: float = 0.0,
    is_told: bool = True,
) -> None:
    expected = figures(played, among)
    for mine, theirs in zip(found.ranks, expected, strict=True):
        within = max(2e-6, 2e-4 * (theirs["span"] or 0)) + within_s
        for key, value in theirs.items():
            if key == "waiting" and not is_told:
                continue
            assert getattr(mine, f"{key}_s") == pytest.approx(value, abs=within), (mine.rank, key)


@pytest.mark.parametrize("name", CASES)
def test_each_cause_gets_its_verdict(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    played = play_case(case)
    found = explained(case, tmp_path, played)
    sentence = found.verdict.sentence
    check_figures(found, played, case.recorded or range(case.ranks))
    assert found.verdict.kind == case.kind, sentence
    for words in case.says:
        assert words in sentence
    for words in case.never:
        assert words not in sentence


@pytest.mark.parametrize("writing", WRITINGS)
@pytest.mark.parametrize("name", ["slow-rank", "late-in-groups", "hidden", "network", "one"])
def test_no_way_of_writing_changes_an_answer(tmp_path: Path, name: str, writing: str) -> None:
    case = replace(CASES[name], writing=WRITINGS[writing])
    played = play_case(case)
    found = explained(case, tmp_path, played)
    is_told = case.groups is None or writing not in NAMES_NO_GROUPS
    check_figures(
        found,
        played,
        case.recorded or range(case.ranks),
        is_told=is_told,
        within_s=20e-6 if "apart" in writing else 0,
    )
    assert found.verdict.kind == case.kind, found.verdict.sentence
    for words in case.says:
        assert words in found.verdict.sentence
    assert any("do not name groups" in each for each in found.warnings) != is_told


# the first and last step that each profiler saw
WINDOWS = {0: (0, 8), 1: (2, 10), 2: (1, 9), 3: (3, 11)}
SEEN_APART = {
    "numbered": Writing(first_step=lambda rank, step: 3 + WINDOWS[rank][0]),
    "restarted": Writing(first_step=lambda rank, step: 0, clock_ns=APART),
    "optimizer": Writing(marks="optimizer", has_sequence=True, clock_ns=APART),
    "optimizer-without": Writing(marks="optimizer", arguments="none"),
    "none": Writing(marks="none", has_sequence=True),
}


@pytest.mark.parametrize("writing", SEEN_APART)
@pytest.mark.parametrize("name", ["slow-rank", "network", "hidden"])
def test_ranks_need_not_be_recorded_from_the_same_step_on(
    tmp_path: Path, name: str, writing: str
) -> None:
    case = replace(CASES[name], writing=SEEN_APART[writing], steps=12)
    seen = [cut(each, *WINDOWS[each.rank]) for each in play_case(case)]
    found = explained(case, tmp_path, seen)
    assert found.verdict.kind == case.kind, found.verdict.sentence
    for words in case.says:
        assert words in found.verdict.sentence


@pytest.mark.parametrize("name", ["slow-rank", "network", "hidden", "in-turn", "input", "one"])
def test_without_steps_the_whole_trace_is_judged(tmp_path: Path, name: str) -> None:
    case = replace(CASES[name], writing=Writing(marks="none"))
    played = play_case(case)
    found = explained(case, tmp_path, played)
    check_figures(found, played, case.recorded or range(case.ranks))
    assert found.verdict.kind == case.kind, found.verdict.sentence
    assert "of the trace" in found.verdict.sentence
    assert "No step is marked: the whole trace is taken for one." in found.warnings


@pytest.mark.parametrize("name", ["slow-rank", "network", "hidden", "one"])
def test_kernels_without_a_launch_get_it_in_turn(tmp_path: Path, name: str) -> None:
    writing = replace(ROCM, arguments="marks", form=of_rocm_6_1)
    case = replace(CASES[name], writing=writing)
    played = play_case(case)
    found = explained(case, tmp_path, played)
    check_figures(found, played, case.recorded or range(case.ranks))
    assert found.verdict.kind == case.kind, found.verdict.sentence
    for words in case.says:
        assert words in found.verdict.sentence


def test_whole_microseconds_are_enough(tmp_path: Path) -> None:
    case = replace(CASES["slow-rank"], writing=Writing(stamps="whole"))
    played = play_case(case)
    check_figures(explained(case, tmp_path, played), played, range(4), within_s=20e-6)


def test_a_rank_that_shares_no_step_is_left_out_and_said(tmp_path: Path) -> None:
    case = replace(
        CASES["slow-rank"],
        writing=replace(Writing(), first_step=lambda rank, step: 90 if rank == 3 else 3),
    )
    found = explained(case, tmp_path, play_case(case))
    assert any("leaves out 1 ranks that share no step" in warning for warning in found.warnings)


@pytest.mark.parametrize("writing", [Writing(), Writing(arguments="marks")])
def test_a_trace_without_devices_is_not_judged(tmp_path: Path, writing: Writing) -> None:
    case = replace(CASES["slow-rank"], writing=replace(writing, has_devices=False))
    found = explained(case, tmp_path, play_case(case))
    assert found.verdict.kind == "unknown"
    assert any("ranks 0 to 3: the job communicates by NCCL" in each for each in found.warnings)
    assert not found.evidence
