"""Parallel plans for people and for programs: a table, its reasons, pictures, JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fullwire.findings.goodput import (
    BestCheckpoints,
    DeviceHours,
    ExpectedLosses,
    Loss,
    SameTraining,
    TrainingNeverEnds,
    TrainingTakes,
)
from fullwire.findings.notes import RunIsPartial
from fullwire.findings.plans import (
    AnotherChoice,
    BelowOneLeaf,
    BestCluster,
    BestFits,
    BestStep,
    NodesOfBest,
    OneUnknownNode,
    OnHalfTheBandwidth,
    OnOtherCluster,
    OthersLeftOut,
    PartOfStep,
    PartsOfBest,
    RecognisedModel,
    RecognisedPlan,
)
from fullwire.report.terminal import print_table, say
from fullwire.simulation.recorded_plan import UNKNOWN_CLUSTER
from fullwire.units import show_duration, show_memory, show_number, show_rate, show_short
from fullwire.words import sentence, sentences

if TYPE_CHECKING:
    from fullwire.answers.planned import FromRun, Lasting, OnNetwork, PlanAnswer, Planned

GIB = 2**30
NOT_TOLD_BYTES = 2**50  # stands for the memory of a device that nobody tells
_MOST_MARKS = 4000
_LEAST_GOODPUT = 0.001  # below it, the time until the end of a training is too long to mean much
_LOSSES = {
    "start_s": "start",
    "checkpoint_s": "checkpoints",
    "repeated_work_s": "repeated work",
    "recovery_s": "recovery",
}


def plan_data(result: PlanAnswer) -> dict[str, Any]:
    """Return the answer as JSON holds it."""
    data = asdict(result)
    for name in ("landscape", "architecture", "described"):
        data.pop(name)
    data["goodput"] = data.pop("lasting")
    data["assumed"] = list(_assumed(result))
    halved = () if result.half_bandwidth is None else (result.half_bandwidth,)
    for there, held in zip(
        (*result.networks, *halved),
        (*data["networks"], *[data["half_bandwidth"]] * len(halved)),
        strict=True,
    ):
        held["assumed"] = list(sentences(there.assumed))
    for held in data["networks"]:
        held["goodput"] = held.pop("lasting")
    for held in [data["half_bandwidth"]] * len(halved):  # it is told without a training
        held.pop("lasting")
    if result.recorded is not None:
        data["recorded"]["not_recognised"] = list(sentences(result.recorded.not_recognised))
    return data


def print_plan(result: PlanAnswer) -> None:
    """Print the best plan in two lines, then the table, then what else was asked."""
    best = result.best
    if result.recorded is not None:
        _print_recorded(result.recorded)
    if result.other_clusters:
        say(sentence(_best_cluster(result)))
    considered = result.considered if result.considered > 1 else None
    say(sentence(BestFits(considered=considered, plan=in_words(best))))
    is_told = result.device_bytes < NOT_TOLD_BYTES
    of_best = BestStep(
        step_s=best.step_s,
        low_s=best.interval.low_s,
        high_s=best.interval.high_s,
        tokens_per_s=best.tokens_per_s_per_device,
        model_flops_utilization=best.model_flops_utilization,
        held_bytes=best.memory.peak_reserved_bytes,
        device_bytes=result.device_bytes if is_told else None,
    )
    say(sentence(of_best))
    if result.parts:
        chosen = next(part for part in result.parts if part.plan.devices == best.devices)
        of_cluster = NodesOfBest(
            nodes=chosen.nodes,
            all_nodes=result.parts[0].nodes,
            devices=best.devices,
            device_hours=best.device_hours,
        )
        say(sentence(of_cluster))
    say("")
    print_table(*_table(result))
    of_parts = [part.plan for part in result.parts if part.plan != best]
    if any(one.equal for one in (*result.plans[1:], *of_parts)):
        say("= cannot be told from the best: sites differ by 3 % on the same plan.")
    say("shown: communication that no computing hides.")
    out = result.left_out
    if considered is not None:
        say(sentence(OthersLeftOut(does_not_fit=out["does_not_fit"], slower=out["slower"])))
    _print_exposed(best)
    for worth in result.why:
        other = AnotherChoice(
            choice=worth.choice,
            value=worth.value,
            other=worth.other,
            step_s=worth.step_s,
            slower=worth.slower,
        )
        say(sentence(other))
    if result.networks:
        say("")
        _print_networks(result)
    elif result.half_bandwidth is not None and result.half_bandwidth.plan is not None:
        say(_on_half(best, result.half_bandwidth.plan))
    if result.parts:
        say("")
        _print_parts(result)
    if result.lasting is not None:
        say("")
        _print_lasting(result)
    for note in _assumed(result):
        say(f"Assumed: {_lowered(note)}.")
    for note in _assumed_elsewhere(result):
        say(note)


def _assumed(result: PlanAnswer) -> Iterator[str]:
    """Yield what is assumed of all plans."""
    yield from sentences(result.assumed)
    where = result.described
    if result.recorded is not None and where is not None and where.name == UNKNOWN_CLUSTER:
        yield sentence(OneUnknownNode(devices=where.devices))


def _assumed_elsewhere(result: PlanAnswer) -> Iterator[str]:
    """Yield what is assumed on other compared clusters alone, after the name of each."""
    told = {(result.cluster, note) for note in sentences(result.assumed)}
    common = {note for _, note in told}
    for there in result.networks:
        for note in sentences(there.assumed):
            if note not in common and (there.cluster, note) not in told:
                told.add((there.cluster, note))
                yield f"Assumed on {there.cluster}: {_lowered(note)}."


def _lowered(note: str) -> str:
    """Return a note as it stands after a colon; a whole sentence ends with a full stop."""
    whole = note.removesuffix(".")
    return whole if whole == note else whole[:1].lower() + whole[1:]


def _print_recorded(one: FromRun) -> None:
    """Print the recognised plan, and how its work compares with the model's prices."""
    degrees = [f"TP {one.tp}", f"PP {one.pp}", f"DP {one.dp}"]
    degrees += [f"CP {one.cp}"] * (one.cp > 1) + [f"ZeRO-{one.zero}"] * (one.zero > 0)
    plan = RecognisedPlan(
        source=one.source,
        degrees=tuple(degrees),
        microbatch=one.microbatch,
        global_batch=one.global_batch,
        sequence=one.sequence,
        precision=one.precision,
    )
    model = RecognisedModel(
        layers=one.layers,
        hidden=one.hidden,
        heads=one.heads,
        kv_heads=one.kv_heads,
        ffn=one.ffn,
        vocab=one.vocab,
        step_s=one.step_s,
    )
    for line in sentences((plan, model)):
        say(line)
    rows = [
        [ratio.work, f"{ratio.measured_s:.3g} s", f"{ratio.modelled_s:.3g} s", f"{ratio.ratio:.2f}"]
        for ratio in one.ratios
    ]
    work = "work of the recorded step"
    print_table([work, "measured", "modelled", "ratio"], rows, {work})
    for part in sentences(one.not_recognised):
        say(f"Not recognised: {part}.")
    for line in sentences([RunIsPartial(what=gap) for gap in one.missing]):
        say(line)
    if one.not_recognised or one.missing:  # else the table ends with an empty line
        say("")


def in_words(one: Planned) -> str:
    """Return a plan as people name it."""
    is_told = one.schedule in ("1f1b", "interleaved")  # by the chunks of a stage
    schedule = "" if is_told else f" ({one.schedule})"
    parts = [f"TP {one.tp}", f"PP {one.pp}{schedule}"]
    parts += [f"{one.vpp} chunks a stage"] * (one.vpp > 1)
    parts += [f"DP {one.dp}"]
    kind = f" ({one.context_kind})"
    parts += [f"CP {one.cp}{kind}"] * (one.cp > 1)
    beside = " beside computing" if one.ep_overlap else ""
    parts += [f"EP {one.ep}{beside}"] * (one.ep > 1) + [f"ETP {one.etp}"] * (one.etp > 1)
    sharded = f" among {one.shard}" if one.shard < one.dp * one.cp else ""
    parts += [f"ZeRO-{one.zero}{sharded}"] * (one.zero > 0)
    parts.append(f"microbatch {one.microbatch}")
    if one.recompute_layers is not None:
        parts.append(f"full recomputation of {one.recompute_layers} layers a stage")
    else:
        parts.append(f"{'no' if one.recompute == 'none' else one.recompute} recomputation")
    return ", ".join(parts)


def _time(one: Planned) -> str:
    ends = f"{show_short(one.interval.low_s)}-{show_short(one.interval.high_s)}"
    return f"{show_short(one.step_s)} s ({ends})"


def _table(result: PlanAnswer) -> tuple[list[str], list[list[str]], set[str]]:
    has_experts = any(one.ep > 1 for one in result.plans)
    has_sizes = len({one.devices for one in result.plans}) > 1
    has_schedule = any(one.schedule not in ("1f1b", "interleaved") for one in result.plans)
    headings = [*["devices"] * has_sizes, "tp", "pp", "vpp", *["schedule"] * has_schedule]
    headings += ["dp", "cp", *["ep"] * has_experts, "zero", "recompute", "mb"]
    headings += ["step (90 %)", "memory"]
    headings += [f"{kind} shown" for kind in ("tp", "pp", "dp", "cp", *["ep"] * has_experts)]
    rows = []
    for number, one in enumerate(result.plans):
        degrees: list[int | str]
        degrees = [*[one.devices] * has_sizes, one.tp, one.pp, one.vpp]
        degrees += [*[one.schedule] * has_schedule, one.dp, one.cp, *[one.ep] * has_experts]
        degrees += [one.zero]
        partly = "" if one.recompute_layers is None else f" ({one.recompute_layers})"
        exposed = one.exposed
        least_s = min(0.005, 0.005 * one.step_s)  # of short steps, as the sentence below tells
        sent = [exposed.tp_s, exposed.pp_s, exposed.dp_s, exposed.cp_s]
        sent += [exposed.ep_s] * has_experts
        rows.append(
            [
                *map(str, degrees),
                one.recompute + partly,
                str(one.microbatch),
                _time(one) + (" =" if one.equal and number else ""),
                show_memory(one.memory.peak_reserved_bytes),
                *(f"{part_s:.2g} s" if part_s >= least_s else "-" for part_s in sent),
            ]
        )
    return headings, rows, {"schedule", "recompute", "step (90 %)"}


def _print_exposed(best: Planned) -> None:
    parts = {
        "computing": best.compute_s,
        "pipeline bubble": best.bubble_s,
        "tensor parallelism": best.exposed.tp_s,
        "transfers between stages": best.exposed.pp_s,
        "data parallelism": best.exposed.dp_s,
        "context parallelism": best.exposed.cp_s,
        "expert parallelism": best.exposed.ep_s,
        "computing slowed by communication": best.slowdown_s,
        "optimizer": best.optimizer_s,
        "host": best.host_s,
    }
    shares = sorted(parts.items(), key=lambda part: -part[1])
    told = tuple(
        PartOfStep(part=name, share=part_s / best.step_s)
        for name, part_s in shares
        if part_s > best.step_s / 200
    )
    say(sentence(PartsOfBest(is_pipeline=best.pp > 1, parts=told)))


def _on_half(best: Planned, half: Planned) -> str:
    slower = half.step_s / best.step_s - 1
    names = ("tp", "pp", "vpp", "dp", "cp", "ep", "zero", "recompute", "microbatch", "shard")
    is_same = all(getattr(best, name) == getattr(half, name) for name in names)
    found = OnHalfTheBandwidth(
        step_s=half.step_s,
        slower=slower,
        is_slower=slower >= 0.05,
        plan="" if is_same else in_words(half),
    )
    return sentence(found)


def _print_networks(result: PlanAnswer) -> None:
    rows = [_row_of_network(there) for there in result.networks]
    # A column that says nothing here is left out: all have the same devices, or nobody asked.
    differ = len({there.plan.devices for there in result.networks if there.plan}) > 1
    shown = {
        "devices": differ,
        "tokens/s a device": differ,
        "device-hours": differ or bool(result.other_clusters),
        "same training": result.lasting is not None,
        "cost": result.lasting is not None and result.lasting.cost is not None,
    }
    heads = [name for name in rows[0] if shown.get(name, True)]
    texts = {"cluster", "step (90 %)", "best plan there"}
    print_table(heads, [[row[name] for name in heads] for row in rows], texts=texts)
    if shown["device-hours"]:
        say("Device-hours are those of a million tokens.")
    if result.lasting is not None:
        same = SameTraining(hours=result.lasting.work_s / 3600, cluster=result.cluster)
        say(sentence(same))
    if len({there.oversubscription for there in result.networks}) > 1:
        for cluster in {one.cluster: None for one in result.networks if one.is_below_one_leaf}:
            say(sentence(BelowOneLeaf(cluster=cluster)))
    reasons = {(one.cluster, one.does_not_fit): None for one in result.networks if not one.plan}
    for cluster, reason in reasons:
        say(f"{cluster} does not fit: {reason}.")


def _row_of_network(there: OnNetwork) -> dict[str, str]:
    """Return all cells of a network by their headings."""
    one, lasting = there.plan, there.lasting
    ending = lasting if lasting and _may_end(lasting.wall_s, lasting) else None
    return {
        "cluster": there.cluster,
        "devices": f"{one.devices:,}" if one else "-",
        "NIC": show_rate(there.bandwidth_bps),
        "oversubscription": f"{there.oversubscription:g}",
        "step (90 %)": _time(one) if one else "-",
        "tokens/s a device": f"{one.tokens_per_s_per_device:,.0f}" if one else "-",
        "device-hours": show_number(one.device_hours) if one else "-",
        "same training": show_duration(ending.wall_s) if ending else "-",
        "cost": _cost(ending) if ending else "-",
        "best plan there": _degrees(one) if one else "does not fit",
    }


def _print_parts(result: PlanAnswer) -> None:
    best = result.best
    rows = [
        [
            f"{part.nodes:,}",
            f"{part.plan.devices:,}",
            _time(part.plan) + (" =" if part.plan.equal and part.plan != best else ""),
            show_number(part.plan.device_hours),
            _degrees(part.plan),
        ]
        for part in result.parts
    ]
    heads = ["nodes", "devices", "step (90 %)", "device-hours", "best plan there"]
    print_table(heads, rows, texts={"step (90 %)", "best plan there"})
    say("Device-hours are those of a million tokens.")


def _degrees(one: Planned) -> str:
    """Return the degrees above 1 in short."""
    names = ("tp", "pp", "dp", "cp", "ep")
    degrees = [f"{name} {getattr(one, name)}" for name in names if getattr(one, name) > 1]
    return ", ".join(degrees) or "one device"


def _best_cluster(result: PlanAnswer) -> BestCluster:
    """Return the best of the compared clusters, with the distance of the others."""
    measure, as_much = {
        "step": ("as long", "as long"),
        "cost": ("the device-hours", "as many device-hours"),
        "goodput": ("as long with failures", "as long with failures"),
    }[result.objective]
    others = []
    for one in result.other_clusters:
        differs = one.times is not None and f"{one.times:.3g}" != "1"
        others.append(
            OnOtherCluster(
                cluster=one.cluster,
                fits=one.times is not None,
                differs=differs,
                times=one.times,
                measure=measure if differs else as_much,
            )
        )
    return BestCluster(clusters=1 + len(others), cluster=result.cluster, others=tuple(others))


def _cost(found: Lasting) -> str:
    """Return the cost in the user's currency; empty without a price."""
    if found.cost is None:
        return ""
    return f"{found.cost:{',.0f' if found.cost >= 100 else ',.2f'}} {found.currency or ''}".strip()


def _may_end(wall_s: float, found: Lasting) -> bool:
    """Return whether a training gets on so well that the time until its end says something."""
    return wall_s * _LEAST_GOODPUT < found.work_s


def _print_lasting(result: PlanAnswer) -> None:
    found = result.lasting
    if found is None:
        return
    hours, cluster = found.work_s / 3600, result.cluster if result.other_clusters else ""
    if not _may_end(found.wall_s, found):
        between_s = found.wall_s / found.interruptions
        never = TrainingNeverEnds(
            hours=hours, cluster=cluster, between_s=between_s, least=_LEAST_GOODPUT
        )
        say(sentence(never))
        return
    losses = [
        Loss(reason=_LOSSES[name], lost_s=lost_s)
        for name, lost_s in found.losses.items()
        if lost_s > 0
    ]
    told = (
        TrainingTakes(
            hours=hours,
            wall_s=found.wall_s,
            low_s=found.wall_interval.low_s,
            high_s=found.wall_interval.high_s,
            goodput=found.goodput,
            goodput_low=found.goodput_low,
            goodput_high=found.goodput_high,
            may_end=_may_end(found.wall_interval.high_s, found),
            cluster=cluster,
        ),
        ExpectedLosses(losses=tuple(losses), interruptions=found.interruptions),
        BestCheckpoints(
            interval_s=found.checkpoint_interval_s, checkpoint_bytes=found.checkpoint_bytes
        ),
        DeviceHours(device_hours=found.device_hours, cost=_cost(found)),
    )
    for line in sentences(told):
        say(line)


def plot_plans(result: PlanAnswer, path: Path) -> None:
    """Draw time against memory and the best step of each TP and PP, or time by bandwidth."""
    import altair as alt

    from fullwire.report.charts import check_plot_path, save, titled

    check_plot_path(path)
    title = f"{result.model} on {result.cluster}"
    if len({there.bandwidth_bps for there in result.networks}) > 1:
        save(titled(_by_bandwidth(result), title, ["the best plan at each bandwidth"]), path)
        return
    points = list(_points(result))
    dots = (
        alt.Chart(alt.Data(values=points))
        .mark_circle(size=40, opacity=0.6)
        .encode(
            x=alt.X("memory:Q", title="memory of a device (GiB)", scale=alt.Scale(zero=False)),
            y=alt.Y("step:Q", title="step (s)", scale=alt.Scale(type="log", nice=False)),
            color=alt.Color("tp:O", title="TP", scale=alt.Scale(scheme="viridis")),
            tooltip=["plan:N", "step:Q", "memory:Q"],
        )
        .properties(width=380, height=300)
    )
    front: list[dict[str, Any]] = []  # no plan has less memory and a shorter step
    for point in sorted(points, key=lambda point: (point["memory"], point["step"])):
        if not front or point["step"] < front[-1]["step"]:
            front.append(point)
    line = (
        alt.Chart(alt.Data(values=front))
        .mark_line(interpolate="step-after", color="#444444", point=True)
        .encode(x="memory:Q", y="step:Q", tooltip=["plan:N", "step:Q", "memory:Q"])
    )
    squares = (
        alt.Chart(alt.Data(values=points))
        .mark_rect()
        .encode(
            x=alt.X("pp:O", title="PP"),
            y=alt.Y("tp:O", title="TP", sort="descending"),
            color=alt.Color("min(step):Q", title="best step (s)", scale=alt.Scale(scheme="blues")),
        )
        .properties(width=300, height=300)
    )
    both = alt.hconcat(dots + line, squares).resolve_scale(color="independent")
    save(
        titled(
            both,
            title,
            ["plans that fit: time and memory, the least of both, and the best of each TP and PP"],
        ),
        path,
    )


def _points(result: PlanAnswer) -> Iterator[dict[str, Any]]:
    columns = result.landscape or {}
    count = len(columns["step_s"])
    few = set(range(0, count, max(1, count // _MOST_MARKS)))
    least = np.minimum.accumulate(columns["peak_reserved_bytes"])  # plans are in order of time
    few |= {row for row in range(count) if row == 0 or least[row] < least[row - 1]}
    for row in sorted(few):
        degrees = {name: int(columns[name][row]) for name in ("tp", "pp", "dp", "cp", "ep")}
        yield {
            **degrees,
            "plan": ", ".join(f"{name} {value}" for name, value in degrees.items()),
            "step": float(columns["step_s"][row]),
            "memory": float(columns["peak_reserved_bytes"][row]) / GIB,
        }


def _by_bandwidth(result: PlanAnswer) -> Any:
    import altair as alt

    points: list[dict[str, Any]] = [
        {
            "rate": there.bandwidth_bps / 1e9,
            "step": there.plan.step_s,
            "low": there.plan.interval.low_s,
            "high": there.plan.interval.high_s,
            "where": f"{there.cluster}, oversubscription {there.oversubscription:g}",
            "plan": _degrees(there.plan),
        }
        for there in result.networks
        if there.plan is not None
    ]
    chart = alt.Chart(alt.Data(values=points)).encode(
        x=alt.X("rate:Q", title="NIC (Gbps)", scale=alt.Scale(type="log", nice=False)),
        color=alt.Color("where:N", title=""),
    )
    line = chart.mark_line(point=True).encode(
        y=alt.Y("step:Q", title="step (s)", scale=alt.Scale(zero=False))
    )
    band = chart.mark_area(opacity=0.12).encode(y="low:Q", y2="high:Q")
    # At the ends of the axis a word begins or ends at its point, so that none lies over the axis.
    first, last = (end(point["rate"] for point in points) for end in (min, max))
    sides = (
        ("left", 6, f"datum.rate == {first}"),
        ("right", -6, f"datum.rate == {last}"),
        ("center", 0, f"datum.rate > {first} && datum.rate < {last}"),
    )
    words = [
        chart.transform_filter(where)
        .mark_text(align=side, dx=dx, dy=-12, fontSize=11)
        .encode(y="step:Q", text="plan:N")
        for side, dx, where in sides
    ]
    return alt.layer(band, line, *words).properties(width=620, height=320)
