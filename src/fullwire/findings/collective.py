"""The findings of a timed collective: its time, and the quickest algorithm."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fullwire.collectives.left_open import FASTEST_NIC_BPS, SLOWEST_NIC_BPS, OpenOfNics
from fullwire.collectives.playing import CollectiveTime, TunedTime
from fullwire.collectives.tuning import Range
from fullwire.findings.finding import Finding

_TOLD_APART = 0.005  # less is printed as one time


class InClosedForm(Finding):
    """A formula gave the time of the collective."""

    template = "in closed form"


class Played(Finding):
    """The simulation played every transfer of the collective."""

    template = "{transfers:,} transfers played"

    transfers: int


class PlayedForAlike(Finding):
    """The simulation played some transfers, each of which stands for many equal ones."""

    template = "{transfers:,} transfers, {played:,} played for all that are alike"

    transfers: int | None
    played: int


class FromTables(Finding):
    """Tables that were measured on this cluster gave the time."""

    template = "as its tables say, by protocol {protocol}"

    protocol: str | None


class FromProtocols(Finding):
    """The cluster has tables, but none of this operation, or of as many nodes."""

    template = "by the fitted protocol {protocol}, for no table is of {lacking}"

    protocol: str | None
    lacking: str


class MayTakeAnother(Finding):
    """The tables leave open whether the library has a tree between nodes."""

    template = (
        "The tables leave open whether this library has a tree between nodes. It may take "
        "{algorithm} instead, and the interval holds both. Tables of more nodes tell it."
    )

    algorithm: str


class MayAdd(Finding):
    """Nothing tells whether the library lets the switches in the nodes add."""

    template = (
        "Nothing tells whether this library lets the switches in the nodes add. It may take "
        "{algorithm} instead, and the interval holds both. Tables of one node, with several "
        "numbers of devices, mostly tell it."
    )

    algorithm: str


class PairIsOpen(Finding):
    """Nothing tells what an all-reduce of two nodes sends, beside one of more nodes."""

    template = (
        "Nothing tells whether an all-reduce of two nodes sends half as much here as one of more "
        "nodes. The interval holds both. Tables of two nodes and of more, together, mostly tell it."
    )


class NicsAreUnknown(Finding):
    """No table is of several nodes, and no description states the NICs."""

    template = (
        "The rate of the NICs is a guess: the tables are of one node, and a description is "
        "missing. The interval reaches from one NIC of {fastest_bps:rate} a device to one of "
        "{slowest_bps:rate} a node. Fit a table of two nodes or more, or fit these with "
        "--cluster FILE that states nics.rate."
    )

    fastest_bps: float
    slowest_bps: float


class NicsOfAPart(Finding):
    """The last node is partly filled, and tables of full nodes leave open how many NICs it uses."""

    template = (
        "The last node is partly filled, and tables of full nodes leave open how many NICs it "
        "uses. The interval also holds the time of a last node that sends as fast as a full one. "
        "Fit a table with such a node, or fit these with --cluster FILE that states nics.per_node."
    )


class NicsMayBeFaster(Finding):
    """Tables of rings show of the NICs only that they are no slower than links in the nodes."""

    template = (
        "The NICs may be faster than the tables show: the links within a node may be what holds up "
        "their rings. The interval reaches down to one NIC of {fastest_bps:rate} a device. Fit a "
        "table of an all-to-all over several nodes, or these with --cluster FILE that states "
        "nics.rate."
    )

    fastest_bps: float


class RestsOnLeastRate(Finding):
    """The rate within a node comes from tables of several nodes, and may be higher."""

    template = (
        "The rate of the links within a node is only known to be reached, because no table is of "
        "one node. They may be much faster, and the interval reaches down to the fastest known. "
        "Fit a table of one node, or state inside.rate."
    )


class SendsNothing(Finding):
    """One worker has nothing to send."""

    template = "one worker sends nothing"


class FromOthersTables(Finding):
    """Public tables of machines with this kind of link gave the time."""

    template = "as libraries take on such links, by protocol {protocol}"

    protocol: str | None


class UsualStartUp(Finding):
    """The cluster states no start-up times, so the time rests on public tables."""

    template = (
        "{cluster} states no start-up: protocols and start-ups are medians of public tables of its "
        "kind of link. `fullwire cluster fit` takes them from your own tables; --level event plays "
        "transfers alone."
    )

    cluster: str | None


class UsualProtocols(Finding):
    """The cluster states its start-up, and public tables gave the protocols beside it."""

    template = (
        "{cluster} states a start-up of {startup_s:time}, which large messages take. Protocols are "
        "medians of public tables of its kind of link, and quicker ones keep their ratio to that "
        "start-up. `fullwire cluster fit` takes all from your own tables; --level event plays "
        "transfers alone."
    )

    cluster: str | None
    startup_s: float


class AsPacked(Finding):
    """Ranks in another order, or scattered over leaves, take the time of packed ones."""

    template = "Ranks in this order take as long as packed ones, of which tables are."


class InAnotherOrder(Finding):
    """Tables are of packed ranks, and the transfers of these ranks take longer or shorter."""

    template = (
        "Ranks in this order take {times:.3g} times as long as packed ones, by transfers alone. "
        "Tables are of packed ranks, so their time is multiplied by that. The interval also holds "
        "the time of packed ranks."
    )

    times: float


class ExpectedBetween(Finding):
    """The range in which such a machine is expected.

    From tables it should hold nine of ten machines. For a single algorithm, played in events or
    timed in closed form, the range is set by hand and uncalibrated.
    """

    template = "expected between {low_s:time} and {high_s:time}"

    low_s: float
    high_s: float


class CollectiveAsked(Finding):
    """The collective that was timed, its workers and its links."""

    template = (
        "{op} of {bytes:bytes} by {algorithm} over {workers} {workers:worker|workers}"
        "{cluster:? of {cluster}} at {rate_bps:rate}{latency_s:?, {latency_s:time} latency}"
        "{is_chunked:?, {chunks} chunks, {chunk_order}}"
    )

    op: str
    bytes: int
    algorithm: str
    workers: int
    cluster: str | None
    rate_bps: float
    latency_s: float
    is_chunked: bool
    chunks: int
    chunk_order: str


class CollectiveTook(Finding):
    """The time of the collective, its bus bandwidth, and the method that gave them."""

    template = "{time_s:time}, bus bandwidth {bus_bps:rate} ({found})"

    time_s: float
    bus_bps: float
    found: Finding


class BusiestLinks(Finding):
    """The link that needs the longest time for its bytes."""

    template = "busiest are the {kind}: {link} for {share:.0%} of it"

    kind: str | None
    link: str | None
    share: float


class AlgorithmTook(Finding):
    """The time of another algorithm."""

    template = "{algorithm} {time_s:time}"

    algorithm: str
    time_s: float


class Quickest(Finding):
    """The quickest algorithm, with the times of the others."""

    template = "{algorithm} is the quickest of {count}{others:? ({others:list})}."

    algorithm: str
    count: int
    others: tuple[AlgorithmTook, ...]


class AlgorithmLeftOut(Finding):
    """The reason why an algorithm could not be timed."""

    template = "{algorithm} is left out: {why}"

    algorithm: str
    why: str


class ForEverySize(Finding):
    """One algorithm is the cheapest for every size."""

    template = "{algorithm} for every size"

    algorithm: str


class UpTo(Finding):
    """The algorithm that is the cheapest up to a size."""

    template = "{algorithm} up to {to_bytes:bytes}"

    algorithm: str
    to_bytes: int


class Beyond(Finding):
    """The algorithm of all larger sizes."""

    template = "{lower:list}, {algorithm} beyond"

    lower: tuple[UpTo, ...]
    algorithm: str


class ByFormulas(Finding):
    """The algorithm that the formulas choose for each range of sizes."""

    template = "By the formulas, trees cut into many chunks: {choices}."

    choices: Finding


class ByFormulasInOnePiece(Finding):
    """The same, where it would take long to play some algorithms in chunks for so many sizes."""

    template = (
        "By the formulas, trees cut into many chunks, and {algorithms:list} in one piece, because "
        "chunks of so many sizes would take long to play: {choices}."
    )

    algorithms: tuple[str, ...]
    choices: Finding


class AsLibraries(Finding):
    """These algorithms were also timed by the protocols of libraries."""

    template = (
        "{algorithms:list} {count:is|are} also timed as libraries take {count:it|them} on such "
        "links, by the usual protocols."
    )

    algorithms: tuple[str, ...]
    count: int


class ByOwnTables(Finding):
    """The cluster's tables gave the times of the algorithms that its library has."""

    template = (
        "{algorithms:list} {count:is|are} timed by this cluster's tables, and the others are "
        "played on its links. Without --algorithm, its library takes {in_use}."
    )

    algorithms: tuple[str, ...]
    count: int
    in_use: str


class NoLatencyGiven(Finding):
    """The latency is 0, so the number of messages costs nothing."""

    template = "The latency is 0, so fewer messages in a row gain nothing. Give it with --latency."


class TunerTakes(Finding):
    """The algorithms that "auto" takes on one cluster."""

    template = (
        "auto, {workers} {workers:worker|workers} at {rate_bps:rate}"
        "{latency_s:?, {latency_s:time} latency}: {choices}."
    )

    workers: int
    rate_bps: float
    latency_s: float
    choices: Finding


def about_nics(left_open: OpenOfNics | None) -> Iterator[Finding]:
    """Yield what no table tells of the NICs."""
    if left_open == "rate":
        yield NicsAreUnknown(fastest_bps=FASTEST_NIC_BPS, slowest_bps=SLOWEST_NIC_BPS)
    elif left_open == "count":
        yield NicsOfAPart()
    elif left_open == "faster":
        yield NicsMayBeFaster(fastest_bps=FASTEST_NIC_BPS)


def collective_findings(result: CollectiveTime) -> Iterator[Finding]:
    """Yield the findings of a timed collective."""
    yield CollectiveAsked(
        op=result.op,
        bytes=result.bytes,
        algorithm=result.algorithm,
        workers=result.workers,
        cluster=result.cluster,
        rate_bps=result.bandwidth_bps,
        latency_s=result.latency_s,
        is_chunked=result.chunks != 1,
        chunks=result.chunks,
        chunk_order=result.chunk_order,
    )
    how: Finding = InClosedForm()
    if result.workers == 1:
        how = SendsNothing()
    elif result.level == "tables" and result.tables_lack:
        how = FromProtocols(protocol=result.protocol, lacking=" or of ".join(result.tables_lack))
    elif result.level == "tables":
        how = FromTables(protocol=result.protocol)
    elif result.level == "usual":
        how = FromOthersTables(protocol=result.protocol)
    elif result.played is not None and result.played != result.transfers:
        how = PlayedForAlike(transfers=result.transfers, played=result.played)
    elif result.transfers is not None:
        how = Played(transfers=result.transfers)
    yield CollectiveTook(time_s=result.time_s, bus_bps=result.bus_bandwidth_bps, found=how)
    if result.interval is not None and result.interval.high_s > 0:  # one worker sends nothing
        yield ExpectedBetween(low_s=result.interval.low_s, high_s=result.interval.high_s)
    if result.may_take is not None:
        yield MayTakeAnother(algorithm=result.may_take)
    if result.may_add is not None:
        yield MayAdd(algorithm=result.may_add)
    if result.pair_is_open:
        yield PairIsOpen()
    yield from about_nics(result.open_of_nics)
    if result.rests_on_least:
        yield RestsOnLeastRate()
    if result.times_packed is not None and abs(result.times_packed - 1) < _TOLD_APART:
        yield AsPacked()
    elif result.times_packed is not None:
        yield InAnotherOrder(times=result.times_packed)
    if result.level == "usual" and result.workers > 1 and result.stated_startup_s:
        yield UsualProtocols(cluster=result.cluster, startup_s=result.stated_startup_s)
    elif result.level == "usual" and result.workers > 1:
        yield UsualStartUp(cluster=result.cluster)
    if result.busiest_share is not None:
        yield BusiestLinks(
            kind=result.busiest, link=result.busiest_link, share=result.busiest_share
        )


def tuning_findings(result: TunedTime) -> Iterator[Finding]:
    """Yield why an algorithm was chosen, and the choice for other sizes."""
    others = tuple(
        AlgorithmTook(algorithm=name, time_s=time_s)
        for name, time_s in result.times_s.items()
        if name != result.algorithm
    )
    yield Quickest(algorithm=result.algorithm, count=len(result.times_s), others=others)
    for name, why in result.left_out.items():
        yield AlgorithmLeftOut(algorithm=name, why=why)
    ways = result.library_ways
    if ways and result.in_use is not None:
        yield ByOwnTables(algorithms=ways, count=len(ways), in_use=result.in_use)
    elif ways:
        yield AsLibraries(algorithms=ways, count=len(ways))
    choices, in_one_piece = by_size(result.tuning.ranges), result.tuning.in_one_piece
    if in_one_piece:
        yield ByFormulasInOnePiece(algorithms=in_one_piece, choices=choices)
    else:
        yield ByFormulas(choices=choices)
    if result.latency_s == 0:
        yield NoLatencyGiven()


def by_size(served: Sequence[Range]) -> Finding:
    """Return the algorithm of each range of sizes."""
    *lower, last = served
    if not lower:
        return ForEverySize(algorithm=last.algorithm)
    up_to = tuple(UpTo(algorithm=one.algorithm, to_bytes=one.to_bytes or 0) for one in lower)
    return Beyond(lower=up_to, algorithm=last.algorithm)


class FittedTo(Finding):
    """The sources of a fitted cluster: its description, and the tables of the fit."""

    template = "{before:?{before} }Fitted by fullwire cluster fit to {sources:list}."

    before: str  # The sources of its description.
    sources: tuple[str, ...]


class RatesOfTables(Finding):
    """A cluster without a description has the line rates that its tables show."""

    template = "Line rates are the best bandwidths of the tables over their usual shares."


class RateOfBench(Finding):
    """A cluster without a description has the line rate that our own bench states."""

    template = "The line rate is that of fullwire bench transport --rate."


class FitIsOff(Finding):
    """The fitted protocols are far from the tables."""

    template = (
        "Half of the rows are at least {median:.0%} off the fitted protocols, so they do not "
        "describe these tables. The farthest is {op} of {bytes:bytes} among {workers}: measured "
        "{measured_s:time}, fitted {predicted_s:time}."
    )

    median: float
    op: str
    workers: int
    bytes: int
    measured_s: float
    predicted_s: float


class FillsLittle(Finding):
    """Large messages use a small part of the NICs that the description states."""

    template = (
        "Large messages fill {share:.0%} of the NICs' stated rate. On public tables they fill 60% "
        "to 96%, so the library may use only a part of the NICs. NCCL_DEBUG=INFO names those that "
        "it uses."
    )

    share: float


class FillsMore(Finding):
    """Large messages take more of the NICs than the description states."""

    template = (
        "Large messages fill {share:.0%} of the NICs' stated rate, and no NIC carries more than "
        "100%. Either switches between nodes add (SHARP), or nics.rate, nics.per_node or the "
        "number of ranks is not that of the tables."
    )

    share: float


class TablesDisagree(Finding):
    """Two tables of one operation and device count have different times."""

    template = (
        "{second}: {op} of {bytes:bytes} among {workers} takes {second_s:time}, and {first} has "
        "{first_s:time}: expected tables of one machine"
    )

    op: str
    workers: int
    bytes: int
    first: str
    first_s: float
    second: str
    second_s: float
