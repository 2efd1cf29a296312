"""One answer of each command that prints JSON, for the page of JSON keys.

Cheap commands run. Those that need a running job, a lab or minutes of measuring are made by hand,
from the same types and through the same functions as the real ones.
"""

from __future__ import annotations

import dataclasses
import io
import json
import tempfile
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np

import fullwire
from fullwire.answers.cluster_fit import Choice, ClusterFit
from fullwire.answers.codecs import CodecRow, Codecs
from fullwire.answers.idle import Idle
from fullwire.answers.trials import Trial, Tuning
from fullwire.answers.watched import SeenRank, Watched
from fullwire.clusters.measured import Measured, Protocol, Shown
from fullwire.collectives.fitting import Residual
from fullwire.errors import FullwireError
from fullwire.findings.tuning import NoTimeToRepeat
from fullwire.findings.watching import Stuck
from fullwire.fixes._recipe import Applied
from fullwire.fixes.fix import HostWork
from fullwire.packets.jobs import NetworkJob, ReplicaGroup, SharedLink
from fullwire.recorder.jobs_here import JobHere, RankHere
from fullwire.recorder.outside import WatchedHost
from fullwire.report import as_data
from fullwire.run.facts import Facts
from fullwire.run.run import Metrics
from fullwire.run.store import write
from fullwire.studies import contest, device_speed
from fullwire.studies.papers import Study, measures, view
from fullwire.studies.papers.claims import Claim
from fullwire.studies.papers.explained import Explained
from fullwire.studies.papers.predicted import Predicted
from fullwire.studies.papers.trials import Trial as PaperTrial
from fullwire.studies.recording import overhead
from fullwire.workloads.accelerators import accelerator
from tests import trained_jobs
from tests.jobs_by_hand import a_job_by_turns, a_trained_job
from tests.unit.test_observed_goodput import in_a_course

RANK = RankHere(pid=48213, rank=0, user="me", command="train.py", network=1, uses_gpu=False)
JOB = JobHere(ranks=(RANK,), workers=8, is_guessed=False)


def answers() -> Iterator[tuple[str, Any]]:
    """Yield the words of each command, and the object that it prints."""
    for words, answer in _answers():
        yield words, json.loads(json.dumps(answer))  # lists, as a program reads them


def _answers() -> Iterator[tuple[str, Any]]:
    with tempfile.TemporaryDirectory() as place:
        run, capture = f"{place}/one.run", f"{place}/ring.pcap"
        before, after = f"{place}/before", f"{place}/after"
        elastic, by_turns = f"{place}/elastic", f"{place}/by_turns"
        _write_runs(run, before, after)
        write(dataclasses.replace(a_trained_job(), events=in_a_course()), elastic)
        write(a_job_by_turns([1, 3] * 12), by_turns)
        _write_capture(Path(capture))
        for words in (
            "whatif vgg16@v100 --workers 8 --bandwidth 10Gbps --target 0.95",
            "whatif vgg16@v100 --workers 8 --bandwidth 10Gbps --compression 1,4 --best 1",
            f"whatif {before} --workers 2,4 --target loss<=1.8 --critical-batch 200",
            f"whatif {elastic} --failures 20s --workers 3 --bandwidth 10Gbps",
            f"whatif {by_turns} --bandwidth 10Gbps",
            f"explain {run}",
            f"explain {elastic}",
            f"compare {run} {run} --fail-if-slower 5%",
            f"compare {before} {after} --until loss<=1.8",
            "collective allreduce --bytes 64MiB --workers 8 --bandwidth 10Gbps",
            "collective allreduce --bytes 64MiB --cluster dgx-h100 --workers 8 --algorithm auto",
            "plan llama3-8b --cluster dgx-h100,dgx-a100 --nodes 1 --global-batch 64 --hours 100",
            f"flows {capture}",
            "workloads",
            "workloads vgg16@v100",
            "cluster list",
            "cluster show p3dn",
            f"show {run}",
            "fixes",
            "doctor",
        ):
            try:
                answer = json.loads(printed([*words.split(), "--json"]).replace(f"{place}/", ""))
            except FullwireError as error:
                raise RuntimeError(f"the reference asks `fullwire {words}`: {error}") from error
            yield words.replace(f"{place}/", ""), answer
            if words.startswith("flows"):
                yield "flows --jobs switch.ipfix", {"jobs": [dataclasses.asdict(network_job())]}
            if words.startswith("cluster show"):
                yield "cluster fit nccl_8.log -o fitted.toml", as_data.cluster_fit_object(fitted())
    yield "watch", {**as_data.jobs_object([JOB]), "problems": [{"host": "gpu2", "problem": "-"}]}
    yield "watch 48213", as_data.watched_object(watched())
    yield "tune -o tuned -- torchrun train.py", as_data.tuning_object(tuned())
    yield "codecs bf16", as_data.codecs_object(codecs())
    yield "study --quick", view.study_object(study(), [Path("study/claims.csv")])
    yield "bench recorder", overhead.overheads_object([cost_of_recording()])
    yield "bench transport --workers 2 --rate 10Gbps", contest.contest_object(a_contest())
    yield "bench device -o mine.toml", device_speed.device_object(a_device(), Path("mine.toml"))


def watched() -> Watched:
    """Return an answer about a job that is stuck: `watch` needs a running one."""
    found = fullwire.explain(a_trained_job())
    seen = SeenRank(
        rank=0,
        computing=0.3,
        sending=0.5,
        waiting=0.2,
        delayed=0.0,
        sent_bytes=1e9,
        received_bytes=1e9,
        sent_bps=1e9,
        retransmits=0.0,
    )
    return Watched(
        job=JOB,
        seconds=10.0,
        confidence=0.9,
        explanation=found,
        ranges={part: (time_s, 2 * time_s) for part, time_s in found.account.items()},
        stuck=Stuck(rank=5, host="gpu2", where=(), since_s=94.0, waiting=(0, 1)),
        idle=Idle(rank=5, line="dataset.py:88 (load)", is_loading=True),
        no_step=None,
        run=None,
        ranks=(seen,),
        looked_share=0.01,
        between_looks_s=0.1,
        has_ended=False,
        hosts=(WatchedHost(host="gpu1", ranks=(0,)),),
    )


def tuned() -> Tuning:
    """Return a tuning of one trial: `tune` runs a job."""
    trial = Trial(
        fix="buckets",
        setting="25",
        risk="exact",
        words="buckets of 25 MiB",
        from_s=0.2,
        predicted_s=0.1,
        low_s=0.09,
        high_s=0.11,
        measured_s=0.1,
        kept=True,
        outcome=NoTimeToRepeat(),
        loss_difference=0.0,
    )
    return Tuning(
        before_s=0.2,
        before_interval=(0.19, 0.21),
        after_s=0.1,
        after_interval=(0.09, 0.11),
        is_significant=True,
        trials=(trial,),
        riskier=Applied(
            fix="codec",
            setting="int8",
            risk="numeric",
            why="gradients sent as int8",
            predicted_s=0.08,
            low_s=0.07,
            high_s=0.09,
        ),
        host_work=(HostWork(call="item", place="train.py:12", step_s=0.001),),
        wrote=("/tmp/log",),
        recipe=Path("tuned/recipe.toml"),
        recordings=(Path("tuned/before.run"), Path("tuned/after.run")),
        command="torchrun train.py",
        took_s=60.0,
    )


def network_job() -> NetworkJob:
    """Return a job that `flows --jobs` found."""
    pair = ("10.0.0.1", "10.0.0.2")
    return NetworkJob(
        hosts=pair,
        step_s=0.4,
        confidence=0.9,
        step_bytes=1e9,
        data_parallel=(pair,),
        groups=(ReplicaGroup(pattern="ring", hosts=pair),),
        pipeline=(pair,),
        slowest=pair,
        slowest_bps=9e9,
        shares=(SharedLink(job=1, slower=1.5, cost=0.1, cost_s=0.04, pairs=1),),
    )


def fitted() -> ClusterFit:
    """Return a fit of one protocol to one table."""
    protocol = Protocol(
        name="large",
        startup_s=4e-5,
        inside_hop_s=2e-6,
        between_hop_s=3e-5,
        inside_share=0.8,
        between_share=0.8,
    )
    measured = Measured(
        protocols=(protocol,),
        tree_share=0.9,
        pair_share=0.5,
        spread=0.06,
        source="nccl_8.log",
        shown=(Shown(op="allreduce", workers=8, bytes=(2**26,), times=(1.0,)),),
    )
    return ClusterFit(
        cluster=dataclasses.replace(fullwire.cluster("dgx-h100"), measured=measured),
        residuals=(
            Residual(
                table=1,
                op="allreduce",
                workers=8,
                bytes=2**26,
                measured_s=1e-3,
                predicted_s=1.02e-3,
                algorithm="ring",
            ),
        ),
        choices=(
            Choice(
                op="allreduce",
                workers=8,
                algorithm="ring",
                protocol="large",
                from_bytes=2**20,
                to_bytes=2**30,
            ),
        ),
    )


def codecs() -> Codecs:
    """Return a table of one codec."""
    row = CodecRow(
        codec="bf16",
        label="gradients as bfloat16",
        ratio=2.0,
        packed_bytes=2**20,
        speeds=({"threads": 1, "pack_bps": 1e11, "unpack_bps": 1e11},),
        gaussian_error=1e-6,
        gradient_error=1e-6,
        pays_below_bps=2e10,
    )
    return Codecs(
        machine="a processor",
        model="vgg16@v100",
        workers=4,
        gradients="a small network",
        bucket_bytes=2**21,
        codecs=(row,),
        bandwidth_bps=(1e9,),
        step_s={"float32": (0.2,), "bf16": (0.1,)},
    )


def study() -> Study:
    """Return a study of one trial."""
    trial = PaperTrial(kind="real", model="mlp-1024", workers=2, rate="1Gbps")
    measured = measures.Measured(
        trial=trial,
        step_s=0.1,
        deviation=0.01,
        compute_s=0.05,
        communication_s=0.06,
        gradient_bytes=1e7,
        sent_bytes=1e7,
        sent_from="NIC counters",
        processor_utilization=0.5,
        processors_from="/proc/stat, all work on the machine",
        processors=2,
        sends_to=(1, 0),
    )
    return Study(
        directory=Path("study"),
        measured=(measured,),
        predicted=(
            Predicted(
                trial=trial,
                measured_s=0.1,
                full_s=0.09,
                transport_s=0.1,
                low_s=0.09,
                high_s=0.11,
                was_shown=False,
            ),
        ),
        explained=(
            Explained(
                basis="measured",
                count=9,
                alone={"model size": 0.5},
                only_it={"model size": 0.4},
                together=0.9,
            ),
        ),
        figures=(),
        claims=(
            Claim(
                key="scaling",
                paper="NetAI 2020",
                claim="The network is idle.",
                measured="40%",
                holds="yes",
                why="-",
                basis="measured",
            ),
        ),
        failed=((trial, "a rank was killed"),),
    )


def cost_of_recording() -> overhead.Overhead:
    """Return the cost of recording, of equal pairs."""
    pairs = [overhead.Pair(step_s=0.1, step_ratio=1.01, cpu_s=1e-5)] * overhead.FEWEST_PAIRS
    return overhead.Overhead(
        job=overhead.USUAL,
        pairs={"record": pairs, "control": pairs},
        asked=len(pairs),
        load=2.0,
    )


def a_contest() -> contest.Outcome:
    """Return a contest with one peer and one size."""
    turns = (contest.Turn(time_s=0.1, cpu_s=0.01),) * contest.FEWEST_ROUNDS
    return contest.Outcome(
        contest=contest.Contest(rate_bps=1e10, against=("gloo",), sizes_bytes=(2**26,)),
        workers=2,
        measured=tuple(contest.Measured(who=who, size_bytes=2**26, turns=turns) for who in (0, 1)),
        moved=(contest.Moved(streams=1, rate_bps=9e9),),
        notes=("OpenMPI is not installed.",),
    )


def a_device() -> device_speed.Measured:
    """Return a measured device."""
    return device_speed.Measured(
        device=accelerator("h100"),
        precision="bf16",
        shapes=40,
        judged=10,
        median_error=0.05,
        took_s=100.0,
    )


def printed(words: list[str]) -> str:
    """Return the output of a command."""
    from fullwire.cli.app import app_of

    told = io.StringIO()
    with redirect_stdout(told):
        app_of()(words, standalone_mode=False)
    return told.getvalue()


def _write_runs(run: str, before: str, after: str) -> None:
    """Write a recording, and two trainings whose loss falls."""
    curve = np.arange(1, 201)
    write(a_trained_job(), run)
    for place, need in ((before, 1.0), (after, 0.8)):
        loss = 1.5 + need * curve**-0.5
        metrics = Metrics(
            step=curve,
            name=np.full(len(curve), "loss", object),
            value=np.asarray(loss, np.float64),
            time_ns=curve * 10**7,
        )
        job = trained_jobs.a_trained_job(trained_jobs.a_transport(), workers=2)
        job = dataclasses.replace(job, metrics=metrics, facts=job.facts | Facts(pass_samples=16))
        write(job, place)


def _write_capture(path: Path) -> None:
    from validation.wires import rings

    first, *_ = next(iter(rings())).captures()
    path.write_bytes(first)
