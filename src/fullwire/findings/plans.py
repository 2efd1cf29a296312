"""Assumptions of a search of parallel plans, gaps of a recorded plan, and other plans."""

from __future__ import annotations

from fullwire.findings.finding import Finding


class NearestFamily(Finding):
    """No measured run of the device is known."""

    template = "no measured run of {device}: its nearest family stands for it"
    is_assumption = True

    device: str


class NoNearFamily(Finding):
    """No measured run of the device is known, and none of a family like it."""

    template = (
        "no measured run of {device}, nor of a family like it: what all measured families have in "
        "common stands for it"
    )
    is_assumption = True

    device: str


class MemoryOfAnother(Finding):
    """The name of the device states memory that no such device has."""

    template = "{device} has {gib:.0f} GiB: the {stated_gb} GB in its name are not its own memory"
    is_assumption = True

    device: str
    gib: float
    stated_gb: int


class UsualMemory(Finding):
    """The name of the device does not tell its memory, and such devices come with unlike ones."""

    template = (
        "{device} has {gib:.0f} GiB: its name states no memory, and such devices come with "
        "{sizes:list}"
    )
    is_assumption = True

    device: str
    gib: float
    sizes: tuple[str, ...]


class BelowOneLeaf(Finding):
    """The user asked for other oversubscription, and the job has no link to the spine."""

    template = "All nodes of {cluster} lie below one leaf, so oversubscription changes nothing."

    cluster: str


class UsualShareOfLinks(Finding):
    """The cluster is described, and nothing was measured on it."""

    template = "collectives take the usual share of the described links"
    is_assumption = True


class OneUnknownNode(Finding):
    """Nobody described the nodes of a recorded job, so that no link is between nodes."""

    template = (
        "nobody described the nodes of the recording: its {devices:,} {devices:device|devices} "
        "{devices:is|are} one node with equal links, however many ranks a host had. --cluster "
        "describes the nodes"
    )
    is_assumption = True

    devices: int


class LongerThanPositions(Finding):
    """Sequences are longer than the model's learned table of positions."""

    template = (
        "the model has learned positions for {positions:,} tokens, and sequences have "
        "{sequence:,}: the further rows of that table are not counted"
    )
    is_assumption = True

    positions: int
    sequence: int


class EvenExperts(Finding):
    """The router of a mixture of experts is taken as balanced."""

    template = "tokens are spread evenly over the experts"
    is_assumption = True


class LessToExperts(Finding):
    """Messages to experts of one node take less time than all their rows need on its links."""

    template = (
        "messages to experts within a node take {share:.0%} of the time of all rows on the "
        "described links, as in measured runs: these may send a token once to a device, send 8 "
        "bits, or hide a part"
    )
    is_assumption = True

    share: float


class FastestStands(Finding):
    """Measured steps leave degrees of their plans out."""

    template = (
        "the measured steps leave out {degrees:list}: each counts as a step of the fastest plan "
        "that fits and has its other degrees"
    )
    is_assumption = True

    degrees: tuple[str, ...]


class ColumnsPassedOver(Finding):
    """The table of measured steps has columns that no part of a plan is named by."""

    template = (
        "{columns:column|columns} {columns:list} of the measured steps {columns:tells|tell} "
        "nothing of a plan"
    )
    is_assumption = True

    columns: tuple[str, ...]


class RowsUnmeasured(Finding):
    """Rows of the table of measured steps tell no time."""

    template = (
        "{lines:line|lines} {lines:list} of the measured steps {lines:has|have} no time and "
        "{lines:is|are} left out"
    )
    is_assumption = True

    lines: tuple[int, ...]


class MeasuredFarOff(Finding):
    """A measured step is far from its price."""

    template = (
        "line {line} of the measured steps is right, though {times:,.0f} times as "
        "{is_longer:long|short} as priced: "
        "{is_rate:tokens_s_gpu is of one device in a second|step_time_s is in seconds}"
    )
    is_assumption = True

    line: int
    times: float
    is_longer: bool
    is_rate: bool


class MeasuredDiffer(Finding):
    """Measured steps of one plan contradict each other."""

    template = (
        "the measured steps of {plan} count alike, though they took {low_s:.3g} s to {high_s:.3g} s"
    )
    is_assumption = True

    plan: str
    low_s: float
    high_s: float


class NotInRecording(Finding):
    """The plan has communication that the recorded plan does not show."""

    template = "no {messages} in the recorded plan: the modelled network prices them"
    is_assumption = True

    messages: str


class OtherDevice(Finding):
    """The plans are for another device than the recorded one."""

    template = (
        "the trace is of {recorded}: each class of work of {device} takes as many times its "
        "modelled time{is_network_told:|, and messages take that of the modelled network}"
    )
    is_assumption = True

    recorded: str
    device: str
    is_network_told: bool


class OtherNodes(Finding):
    """A host of the recording had more ranks than a node of the given cluster has devices."""

    template = (
        "the trace is not of {cluster}: a host had {ranks} ranks, and its nodes have {devices} "
        "{devices:device|devices}. Messages take the time of the modelled network"
    )
    is_assumption = True

    cluster: str
    ranks: int
    devices: int


class UnlikeHosts(Finding):
    """The hosts of the recording had unlike numbers of ranks."""

    template = (
        "hosts of the recording had {least} to {most} ranks: its messages are priced as if each "
        "host but the last had {most}"
    )
    is_assumption = True

    least: int
    most: int


class ScatteredRanks(Finding):
    """Ranks of one host of the recording do not follow each other."""

    template = (
        "ranks of a host do not follow each other in the recording: its messages are priced as if "
        "they did"
    )
    is_assumption = True


class OtherType(Finding):
    """The device cannot multiply in the precision that the user asks for."""

    template = "{device} has no {lacks}: {instead} stands for it, in time and in memory"
    is_assumption = True

    device: str
    lacks: str
    instead: str


class ProcessorsStay(Finding):
    """The cluster's name tells a device, and the recording is one of processors."""

    template = "the recorded processors compute: their trace does not tell the work of {device}"
    is_assumption = True

    device: str


class DataParallelFills(Finding):
    """The plan asked for leaves out its data parallelism, and has devices for more or fewer."""

    template = (
        "DP is {dp}, not {recorded} as recorded: without dp in --to, it fills the {devices:,} "
        "devices"
    )
    is_assumption = True

    dp: int
    recorded: int
    devices: int


class OptimizerOnly(Finding):
    """A plan with stages shards less than the recorded job."""

    template = (
        "ZeRO-1, where the recorded job has ZeRO-{zero}: stages would gather or add up its shards "
        "for each microbatch (--fix zero={zero} prices that)"
    )
    is_assumption = True

    zero: int


class DevicesLeftOut(Finding):
    """Nodes have more devices than the plans use."""

    template = (
        "plans use {used} of the {whole} devices of a node{is_chosen:, a power of two|}; "
        "device-hours and cost count all {whole}"
    )
    is_assumption = True

    used: int
    whole: int
    is_chosen: bool  # few degrees divide another number; else the recorded job left them out


class OnOtherCluster(Finding):
    """A compared cluster that is not the best."""

    template = (
        "{cluster} {fits:takes|has no plan that fits}{differs:? {times:.3g} times}"
        "{fits:? {measure}}"
    )

    cluster: str
    fits: bool
    differs: bool
    times: float | None  # The objective there, as times of the best plan's.
    measure: str


class BestCluster(Finding):
    """The best of the compared clusters, and how far the others are from it."""

    template = "Best of {clusters} clusters: {cluster}. {others:list}."

    clusters: int
    cluster: str
    others: tuple[OnOtherCluster, ...]


class ProcessorsNotTold(Finding):
    """Ranks on processors are taken as independent, however many there are."""

    template = (
        "{devices:,} ranks compute as quickly as the {recorded:,} recorded ones: the trace does "
        "not tell how many processors they share"
    )
    is_assumption = True

    devices: int
    recorded: int


class ProcessorsShared(Finding):
    """All ranks are on this machine's processors, however many ranks there are."""

    template = (
        "all ranks share {processors} processors, and each has one thread: the trace names this "
        "machine as the host of all of them"
    )
    is_assumption = True

    processors: int


class SplitByMesh(Finding):
    """A job with a DeviceMesh would get tensor parallelism from PyTorch, on the host's time."""

    template = (
        "PyTorch's splitting of tensors over the mesh takes {milliseconds:.0f} ms of a processor "
        "for each layer and microbatch"
    )
    is_assumption = True

    milliseconds: float


class UnlikeGroup(Finding):
    """A group that is data parallel by its name does not fit the degrees of the plan."""

    template = "a group of {ranks} ranks that its name calls data parallel"

    ranks: int


class UsualMlp(Finding):
    """No matrix product of the trace shows the width of the MLP."""

    template = "the MLP, which is taken for one of four times the hidden vector"


class OtherParallelism(Finding):
    """A group tells a degree of parallelism that the recognised plan does not hold."""

    template = "{kind} parallelism over {ranks:,} ranks"

    kind: str  # expert, sequence
    ranks: int


class OpenVocabulary(Finding):
    """With tensor parallelism, a rank may hold all rows of the embedding, or its part of them."""

    template = (
        "the vocabulary: a rank holds {rows:,} rows of the embedding, which are taken for all"
    )

    rows: int


class OpenTensorParallelism(Finding):
    """Ranks sum activations, and nothing in the trace tells among how many of them."""

    template = (
        "the degree of tensor parallelism: {tp} makes all heads as wide as the hidden vector, "
        "{others:list} {others:is|are} possible too, and a given model tells (plan MODEL --from)"
    )

    tp: int
    others: tuple[int, ...]


class OnlyKernels(Finding):
    """No operation of the trace shows a class of work."""

    template = "operations of {work}: kernels count by their names"

    work: str


class OpenRecomputation(Finding):
    """Only kernels show attention, and they do not tell a pass from its repetition."""

    template = "recomputation, which is taken for none"


class BestFits(Finding):
    """The best of the plans that fit."""

    template = "Fits{considered:?, best of {considered:,} plans}: {plan}"

    considered: int | None  # if several were asked about
    plan: str


class BestStep(Finding):
    """The step of the best plan, and what it makes of a device."""

    template = (
        "step {step_s:short} s ({low_s:short}-{high_s:short}) · {tokens_per_s:,.0f} tokens/s a "
        "device · {model_flops_utilization:?{model_flops_utilization:.0%} of peak · }"
        "{held_bytes:memory}{device_bytes:? of {device_bytes:memory}}"
    )

    step_s: float
    low_s: float
    high_s: float
    tokens_per_s: float
    model_flops_utilization: float | None  # None where nobody tells the peak of the device.
    held_bytes: int
    device_bytes: int | None  # None where nobody tells the memory of the device


class NodesOfBest(Finding):
    """How much of the cluster the best plan takes, where parts of it were tried."""

    template = (
        "{nodes} of {all_nodes} nodes, {devices:,} devices: {device_hours:number} device-hours a "
        "million tokens"
    )

    nodes: int
    all_nodes: int
    devices: int
    device_hours: float


class PartOfStep(Finding):
    """A part of a planned step."""

    template = "{part} {share:.0%}"

    part: str
    share: float


class PartsOfBest(Finding):
    """The parts of the best plan's step, a mean over its stages, the largest first."""

    template = "The best plan's step{is_pipeline:?, a mean over its stages}: {parts:list}."

    is_pipeline: bool
    parts: tuple[PartOfStep, ...]


class RecognisedPlan(Finding):
    """The plan that a recorded job had."""

    template = (
        "Recognised in {source}: {degrees:list}, microbatch {microbatch}, global batch "
        "{global_batch} of {sequence:,} tokens, {precision}"
    )

    source: str
    degrees: tuple[str, ...]
    microbatch: int
    global_batch: int
    sequence: int
    precision: str


class RecognisedModel(Finding):
    """The model that a recorded job trained, and its step."""

    template = (
        "{layers} layers of {hidden:,}, {heads} heads ({kv_heads} of keys), MLP {ffn:,}, "
        "{vocab:,} words; step {step_s:.3g} s"
    )

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    step_s: float


class OthersLeftOut(Finding):
    """Plans that the answer does not list."""

    template = "{does_not_fit:,} plans do not fit. {slower:,} more are slower (--why)."

    does_not_fit: int
    slower: int


class AnotherChoice(Finding):
    """The best plan that chooses otherwise in one point."""

    template = (
        "{choice} {value} instead of {other}: the best such plan takes {step_s:.3g} s, "
        "{slower:+.1%}."
    )

    choice: str
    value: object
    other: object
    step_s: float
    slower: float  # Share of the best plan's step.


class OnHalfTheBandwidth(Finding):
    """The best plan where the links between nodes have half the bandwidth."""

    template = (
        "With half the bandwidth between nodes: {step_s:.3g} s ({slower:+.0%}){plan:?, with "
        "{plan}}. {is_slower:The network counts.|The network is not your problem.}"
    )

    step_s: float
    slower: float  # Share of the best plan's step.
    is_slower: bool
    plan: str  # Empty if it is the same.
