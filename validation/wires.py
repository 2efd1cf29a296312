"""Check the answers of `fullwire flows` on captures with known answers, case by case.

python -m validation.wires [GROUP | WORDS OF A NAME]

Each case is a training played on a network, packet by packet (tests/wires.py), and captured
somewhere. Each statement of the answer is right, left open, or wrong. It must never be wrong.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np

import fullwire as fw
from fullwire.answers.audited import AuditedTraffic
from fullwire.words import sentences
from tests import wires as w
from validation import arguments, results

MB = 10**6
NONE = "nothing"  # a fact that cannot be known, so the answer should leave it out


@dataclass(frozen=True, kw_only=True)
class Truth:
    """The known facts of a training; `None` where the answer should be silent."""

    kind: str | None = "ring"
    order: Sequence[int] = ()
    iterations: int | None = 12
    gradient: float | None = 2 * MB
    slow: int | None = None
    slow_may_be_missed: bool = False
    may_be_sharded: bool = False  # and both gradients be named


NOTHING = Truth(kind=None, iterations=None, gradient=None)


@dataclass(frozen=True, kw_only=True)
class Case:
    """Captures, and the truth about them."""

    name: str
    captures: Callable[[], list[bytes]]
    truth: Truth = field(default_factory=Truth)


def played(
    training: w.Training, hosts: int, *, slow: dict[int, float] | None = None, connections: int = 1
) -> w.Packets:
    """Play a training; `slow` are the rates of hosts whose links are slower."""
    network = w.Network(hosts=hosts, slow_bps=slow or {}, connections=connections)
    return w.packets(training.on(network).sent)


def everywhere(seen: w.Packets, how: w.Capturing | None = None) -> list[bytes]:
    """Capture at a place that all packets pass, as in a switch."""
    return [w.capture(seen, how)]


def at_each(seen: w.Packets, hosts: Sequence[int], apart_ns: int = 0) -> list[bytes]:
    """Capture at each of these hosts; their clocks differ by `apart_ns`."""
    return [
        w.capture(w.seen_at(seen, host), w.Capturing(ahead_ns=host * apart_ns)) for host in hosts
    ]


def of(
    name: str,
    training: w.Training,
    hosts: int,
    truth: Truth | None = None,
    *,
    slow: dict[int, float] | None = None,
    connections: int = 1,
) -> Case:
    """Return the case of a training whose packets are all captured."""

    def captures() -> list[bytes]:
        return everywhere(played(training, hosts, slow=slow, connections=connections))

    return Case(name=name, captures=captures, truth=truth or Truth())


def ring_of(hosts: int, *, back: bool = True) -> list[int]:
    """Return hosts in the order in which Gloo sends, or the other way."""
    return [0, *range(hosts - 1, 0, -1)] if back else list(range(hosts))


def plain(hosts: int = 4) -> w.Training:
    """Return a training over a ring that begins with a broadcast."""
    return w.Training(collective=w.ring(ring_of(hosts)), broadcast=w.spread(hosts))


def rings() -> Iterator[Case]:
    """Rings of several sizes, either way, with a start-up broadcast and without."""
    for hosts in (2, 3, 4, 5, 6, 8, 12, 16):
        gradient = MB if hosts > 8 else 2 * MB
        back = replace(plain(hosts), gradient=gradient)
        yield of(
            f"ring of {hosts} back", back, hosts, Truth(order=ring_of(hosts), gradient=gradient)
        )
        order = ring_of(hosts, back=False)
        on = w.Training(collective=w.ring(order), gradient=gradient)
        yield of(
            f"ring of {hosts} on, no broadcast",
            on,
            hosts,
            Truth(order=order, gradient=gradient, may_be_sharded=True),
        )
    order = [0, 5, 2, 7, 1, 3, 6, 4]
    yield of(
        "ring of 8 in another order",
        w.Training(collective=w.ring(order)),
        8,
        Truth(order=order, may_be_sharded=True),
    )
    told = w.Training(collective=w.ring(ring_of(4), 16), broadcast=w.spread(4))
    yield of("ring of 4 hosts with 16 ranks, broadcast", told, 4, Truth(order=ring_of(4)))
    # The sentence says "at N=4", the audit how it would be with more ranks.
    yield of(
        "ring of 4 hosts with 16 ranks",
        replace(told, broadcast=None),
        4,
        Truth(gradient=2.5 * MB, may_be_sharded=True),
    )
    yield of("4 connections between hosts", plain(), 4, connections=4)


def shapes() -> Iterator[Case]:
    """Patterns other than a ring, or several rings."""

    def shape(name: str, kind: str, collective: w.Collective, hosts: int) -> Case:
        gradient = None if kind == "all-to-all" else 2 * MB
        truth = Truth(kind=kind, gradient=gradient, may_be_sharded=True)
        return of(name, w.Training(collective=collective), hosts, truth)

    for hosts in (4, 5, 8):
        both = w.at_once(w.ring(ring_of(hosts)), w.ring(ring_of(hosts, back=False)))
        yield shape(f"two-way ring of {hosts}", "two-way ring", both, hosts)
    orders = ([0, 1, 2, 3, 4, 5, 6, 7], [0, 2, 4, 6, 1, 3, 5, 7])
    yield shape("two rings in two orders", "2 rings", w.at_once(*map(w.ring, orders)), 8)
    for hosts in (4, 8, 16):
        name = f"halving-doubling of {hosts}"
        yield shape(name, "halving-doubling", w.halving_doubling(hosts), hosts)
    trees: list[list[int | None]] = [[None, 0, 0], [None, 0, 0, 1, 1, 2, 2], [None, 0, 1, 2, 3]]
    for above in trees:
        yield shape(f"tree of {len(above)}", "tree", w.tree(above), len(above))
    for hosts in (4, 6, 8, 16):
        yield shape(f"double tree of {hosts}", "double tree", w.double_tree(hosts), hosts)
    for hosts in (3, 4, 8):
        yield shape(f"all-to-all of {hosts}", "all-to-all", w.all_to_all(range(hosts)), hosts)
    for count, hosts in ((1, 4), (1, 9), (2, 6), (4, 12)):
        name = f"{count} servers, {hosts - count} workers"
        yield shape(name, "parameter server", w.servers(count, hosts), hosts)
    yield shape("3 groups of 3", "hierarchical", w.hierarchy(3, 3), 9)
    yield shape("4 groups of 4", "hierarchical", w.hierarchy(4, 4), 16)
    yield shape("2 groups of 2, which are a tree", "tree", w.hierarchy(2, 2), 4)


def evaluation(network: w.Network) -> None:
    """Compute for long, and broadcast other data."""
    network.compute(400)
    network.play(w.spread(network.hosts)(300_000))
    network.compute(200)


def metric(network: w.Network) -> None:
    """Compute for long, and reduce a few bytes."""
    network.compute(300)
    network.play(w.ring(ring_of(network.hosts))(4_000))
    network.compute(20)


def checkpoint(network: w.Network) -> None:
    """Let rank 0 write its data to the last host, which does not train."""
    network.upload(0, network.hosts - 1, 6 * MB)
    network.compute(150)


def jobs() -> Iterator[Case]:
    """Trainings whose work changes over time."""
    training = plain()
    yield of(
        "evaluation every 5",
        replace(training, every=5, pause=evaluation, iterations=23),
        4,
        Truth(iterations=23),
    )
    yield of(
        "metrics every 4",
        replace(training, every=4, pause=metric, iterations=18),
        4,
        Truth(iterations=18),
    )
    stored = replace(training, every=4, pause=checkpoint, iterations=14)
    yield of("checkpoints to a store", stored, 5, Truth(iterations=14))
    yield of("two buckets", replace(training, buckets=(0.3, 0.7), between_ms=6), 4)
    yield of("five equal buckets", replace(training, buckets=(0.2,) * 5, between_ms=3), 4)
    many = replace(training, buckets=(0.02, 0.5, 0.3, 0.18), between_ms=4)
    yield of("four buckets", many, 4)
    unknown = Truth(may_be_sharded=True)
    yield of("four buckets, no broadcast", replace(many, broadcast=None), 4, unknown)
    yield of("four buckets, hardly any silence", replace(many, compute_ms=1.0, between_ms=0.4), 4)
    together = replace(training, buckets=(0.05, 0.55, 0.4), compute_ms=0.0)
    yield of("overlap without gaps", together, 4)
    yield of("overlap without gaps, no broadcast", replace(together, broadcast=None), 4, unknown)
    alike = replace(together, buckets=(1.0,), broadcast=None)
    ring = replace(NOTHING, kind="ring")
    yield of("overlap without gaps, one bucket, no broadcast", alike, 4, ring)
    yield of("accumulation: one in four synchronises", replace(training, compute_ms=160.0), 4)
    drifting = replace(training, compute_ms=lambda n: 20.0 * 1.15**n, iterations=16)
    yield of("iterations that take longer and longer", drifting, 4, Truth(iterations=16))
    doubling = replace(training, compute_ms=lambda n: 30.0 if n < 10 else 110.0, iterations=20)
    yield of("iteration time triples half-way", doubling, 4, Truth(iterations=20))
    random = replace(training, compute_ms=lambda n: (17 * n % 11) * 12.0 + 8, iterations=20)
    yield of("iteration times at random", random, 4, Truth(iterations=20))
    yield of("three iterations", replace(training, iterations=3), 4, Truth(iterations=3))
    few = replace(training, iterations=2, broadcast=None)
    yield of("two iterations, too few to repeat", few, 4, ring)
    yield of(
        "a hundred iterations",
        replace(training, iterations=100, gradient=200_000),
        4,
        Truth(iterations=100, gradient=200_000),
    )
    yield of("a late host", replace(training, late={2: 30.0}), 4)
    yield of("a late host, four buckets", replace(many, late={1: 25.0}), 4)
    both = w.at_once(w.ring(ring_of(4)), w.ring(ring_of(4, back=False)))
    quick = w.Training(collective=both, buckets=(0.25,) * 4, compute_ms=5.0, late={3: 20.0})
    yield of(
        "a late host, hardly any computation",
        quick,
        4,
        Truth(kind="two-way ring", may_be_sharded=True),
    )
    yield of(
        "a broadcast of as many bytes as an iteration",
        w.Training(collective=w.all_to_all(range(6)), broadcast=w.spread(6), iterations=4),
        6,
        Truth(kind="all-to-all", iterations=4, gradient=None),
    )
    yield of("small gradient", replace(training, gradient=40_000), 4, Truth(gradient=40_000))


def sharded() -> Iterator[Case]:
    """FSDP: gather each layer forwards, gather and reduce-scatter it backwards."""
    one = w.gathered(ring_of(4))

    def step(network: w.Network, sizes: Sequence[float], apart_ms: float) -> None:
        for size in sizes:
            network.play(one(round(size * 2 * MB)))
            network.compute(apart_ms)
        for size in reversed(sizes):
            network.play(one(round(size * 2 * MB)))
            network.compute(2 * apart_ms)
            network.play(one(round(size * 2 * MB)))

    def captures(sizes: Sequence[float], apart_ms: float) -> list[bytes]:
        network = w.Network(hosts=4)
        for _ in range(12):
            network.compute(30)
            step(network, sizes, apart_ms)
        return everywhere(w.packets(network.sent))

    for name, sizes in {"unequal": (0.1, 0.2, 0.3, 0.4), "equal": (0.25,) * 4}.items():
        for apart_ms, how in ((6.0, ""), (0.0, ", without gaps")):
            yield Case(
                name=f"FSDP of {name} layers{how}",
                captures=partial(captures, sizes, apart_ms),
                truth=Truth(may_be_sharded=True),
            )

    def over_gloo() -> list[bytes]:
        on, back = w.gathered(ring_of(4, back=False)), w.ring(ring_of(4))
        network = w.Network(hosts=4)
        for _ in range(12):
            network.compute(60)
            for collective in (on, on, on, on, back, back):
                network.play(collective(MB))
                network.compute(4)
        return everywhere(w.packets(network.sent))

    yield Case(
        name="FSDP that gathers one way and reduces the other",
        captures=over_gloo,
        truth=Truth(kind="two-way ring"),
    )


def slow_links() -> Iterator[Case]:
    """One link that is slower than the others, and cases that only look like one."""
    for hosts in (2, 3, 4, 8):
        for times in (2, 3, 5, 10):
            training = replace(plain(hosts), compute_ms=30.0, gradient=MB)
            slow = hosts // 2
            hard = times == 2 or hosts == 2
            yield of(
                f"slow link, 1/{times}, {hosts} hosts",
                training,
                hosts,
                Truth(slow=slow, gradient=MB, slow_may_be_missed=hard),
                slow={slow: 1e9 / times},
            )
    training = replace(plain(), compute_ms=5.0, gradient=MB, buckets=(0.2, 0.8))
    seen = partial(played, training, 4, slow={2: 3e8})
    yield Case(
        name="slow link, seen at each",
        captures=lambda: at_each(seen(), range(4)),
        truth=Truth(slow=2, gradient=MB),
    )
    yield Case(
        name="slow link, seen at one",
        captures=lambda: at_each(seen(), [2]),
        truth=Truth(slow=2, kind=None, gradient=None, slow_may_be_missed=True),
    )
    yield of(
        "slow link, all-to-all",
        w.Training(collective=w.all_to_all(range(4))),
        4,
        Truth(kind="all-to-all", slow=1, gradient=None),
        slow={1: 2e8},
    )
    tree = w.Training(collective=w.tree([None, 0, 0, 1, 1, 2, 2]))
    yield of(
        "slow link, tree",
        tree,
        7,
        Truth(kind="tree", slow=1, slow_may_be_missed=True),
        slow={1: 2e8},
    )
    yield of(
        "a parameter server whose link is everyone's",
        w.Training(collective=w.servers(1, 7)),
        7,
        Truth(kind="parameter server", slow=0, slow_may_be_missed=True),
    )
    together = replace(plain(), buckets=(0.05, 0.55, 0.4), compute_ms=0.0)
    yield of("slow link and overlap without gaps", together, 4, Truth(slow=1), slow={1: 3e8})


def places() -> Iterator[Case]:
    """The same training, captured in many ways."""

    def place(
        name: str, see: Callable[[w.Packets], list[bytes]], truth: Truth | None = None
    ) -> Case:
        return Case(name=name, captures=lambda: see(played(plain(), 4)), truth=truth or Truth())

    def taken(name: str, how: w.Capturing) -> Case:
        return place(name, partial(everywhere, how=how))

    def with_losses(seen: w.Packets, share: float) -> list[bytes]:
        return everywhere(w.lossy(seen, share))

    for snap in (54, 64, 66, 128, 262_144):
        yield taken(f"snap {snap}", w.Capturing(snap=snap))
    for link in ("vlan", "cooked", "cooked2", "raw", "vxlan"):
        yield taken(link, w.Capturing(link=link, snap=128))
    yield taken("IPv6", w.Capturing(version=6))
    yield taken("RoCEv2", w.Capturing(transport="roce"))
    yield taken("RoCEv2 over IPv6", w.Capturing(transport="roce", version=6))
    yield taken("UDP", w.Capturing(transport="udp"))
    for digits in (3, 6, 9):
        yield taken(f"pcapng, 10^-{digits} s", w.Capturing(format="pcapng", resolution=digits))
    yield place("at each host", lambda seen: at_each(seen, range(4)))
    for name, apart_ns in {"40 ms": 40 * w.MS, "hours": 3600 * 10**9}.items():
        yield place(
            f"at each host, clocks {name} apart",
            partial(at_each, hosts=range(4), apart_ns=apart_ns),
        )
    yield place("at two opposite hosts", lambda seen: at_each(seen, (0, 2)))
    partly = Truth(kind=None, gradient=None)
    yield place("at two neighbours", lambda seen: at_each(seen, (0, 1)), partly)
    yield place("at one host", lambda seen: at_each(seen, [1]), partly)
    yield place("begun in mid-job", begun_late, Truth(iterations=7, may_be_sharded=True))
    yield place("one way only", lambda seen: everywhere(seen.rows(seen.payload > 0)))
    for percent in (0.1, 1, 5):
        yield place(f"{percent} % of packets missed", partial(with_losses, share=percent / 100))
    yield place("each packet twice", lambda seen: everywhere(w.twice(seen)))
    yield place("each packet twice, 50 us later", lambda seen: everywhere(w.twice(seen, 50_000)))
    sent = partial(w.packets, plain().on(w.Network(hosts=4)).sent)
    yield Case(
        name="super-segments of 43", captures=lambda: everywhere(sent(burst=43, acknowledge=1))
    )
    yield Case(
        name="sequence numbers that wrap",
        captures=lambda: everywhere(sent(first_sequence=2**32 - 3 * MB)),
    )
    yield Case(name="jumbo frames", captures=lambda: everywhere(sent(segment=8948)))
    yield Case(name="small segments", captures=lambda: everywhere(sent(segment=536)))


def begun_late(seen: w.Packets) -> list[bytes]:
    """Capture from half a second on, when five iterations are over."""
    return everywhere(seen.rows(seen.time_ns > seen.time_ns[0] + 500 * w.MS))


def mixtures() -> Iterator[Case]:
    """Several kinds of traffic on the wire, or another kind."""
    yield Case(name="two jobs of their own", captures=two_jobs, truth=NOTHING)
    yield Case(
        name="input from a store all the while", captures=with_input, truth=Truth(iterations=14)
    )
    yield Case(name="heartbeats every 3 ms", captures=with_heartbeats, truth=Truth(iterations=14))
    yield Case(name="one download", captures=download, truth=NOTHING)
    yield Case(name="requests and answers at random", captures=noise, truth=NOTHING)
    yield Case(
        name="a monitor that polls",
        captures=polling,
        truth=Truth(kind=None, iterations=60, gradient=None),
    )


def two_jobs() -> list[bytes]:
    """Capture two rings of four hosts each."""
    one, other = w.Network(hosts=8), w.Network(hosts=8, seed=1)
    plain().on(one)
    training = w.Training(collective=w.ring([4, 5, 6, 7]), gradient=5 * MB, iterations=7)
    replace(training, compute_ms=70.0).on(other)
    return everywhere(w.packets([*one.sent, *other.sent]))


def with_input() -> list[bytes]:
    """Capture a training that reads from a store, at random times and in random amounts."""
    network = replace(plain(), iterations=14).on(w.Network(hosts=5))
    ends_ns, random = network.ends_ns(), np.random.default_rng(1)
    for host in range(4):
        at_ns = 0.0
        while at_ns < ends_ns:
            size = int(random.integers(20_000, 400_000))
            network.send(4, host, size, at_ns, lasts_ns=8 * size, connection=1)
            at_ns += float(random.exponential(20 * w.MS))
    return everywhere(w.packets(network.sent))


def with_heartbeats() -> list[bytes]:
    """Capture a training whose hosts send another host a heartbeat every 3 ms."""
    network = replace(plain(), iterations=14).on(w.Network(hosts=6))
    for at_ns in np.arange(0, network.ends_ns(), 3 * w.MS).tolist():
        for host in range(4):
            network.send(host, 5, 200, at_ns, lasts_ns=1000, connection=2)
    return everywhere(w.packets(network.sent))


def download() -> list[bytes]:
    """Capture one long transfer."""
    network = w.Network(hosts=4)
    network.upload(1, 0, 40 * MB)
    return everywhere(w.packets(network.sent))


def noise() -> list[bytes]:
    """Capture traffic without any repetition."""
    network, random = w.Network(hosts=5), np.random.default_rng(2)
    for _ in range(300):
        a, b = random.choice(5, 2, replace=False).tolist()
        size = min(int(random.pareto(1.2) * 20_000) + 500, 4 * MB)
        network.send(a, b, size, float(random.random() * 3e9), lasts_ns=10 * size)
    return everywhere(w.packets(network.sent))


def polling() -> list[bytes]:
    """Capture hosts that report to one host, which repeats and is no all-reduce."""
    network = w.Network(hosts=5)
    for n in range(60):
        for host in range(1, 5):
            network.send(host, 0, 30_000, n * 100.0 * w.MS + host, lasts_ns=3e5)
    return everywhere(w.packets(network.sent))


GROUPS = (rings, shapes, jobs, sharded, slow_links, places, mixtures)


# ---------------------------------------------------------------------------------------------
# The answers against the truth.


def judged(result: AuditedTraffic, truth: Truth) -> tuple[list[str], list[str]]:
    """Return the wrong statements, and those left open that could be known."""
    wrong: list[str] = []
    left: list[str] = []

    def hold(name: str, said: object, known: object, agrees: bool) -> None:
        if said is not None and not agrees:
            wrong.append(f"{name} {said}, not {NONE if known is None else known}")
        elif said is None and known is not None:
            left.append(name)

    kind = None if result.pattern.kind == "none" else result.pattern.kind
    hold("pattern", kind, truth.kind, kind == truth.kind)
    if truth.order and kind == "ring":
        around = [w.address(host) for host in truth.order]
        hold("order", list(result.order), around, list(result.order) == around)
    count = None if result.iterations is None else result.iterations.count
    hold("iterations", count, truth.iterations, count == truth.iterations)
    gradients = [each for each in (result.gradient_bytes, result.if_sharded_bytes) if each]
    near = [each for each in gradients if abs(each / (truth.gradient or 1) - 1) < 1e-3]
    hold("gradient", result.gradient_bytes, truth.gradient, bool(near))
    if result.if_sharded_bytes is not None and not truth.may_be_sharded:
        left.append("whether parameters are sharded")
    slow = None if result.slow_link is None else result.slow_link.host
    known = None if truth.slow is None else w.address(truth.slow)
    hold("slow link", slow, known, slow == known)
    if truth.slow_may_be_missed:
        left = [each for each in left if each != "slow link"]
    return wrong, left


def said_of(captures: Sequence[bytes], folder: Path) -> AuditedTraffic:
    """Read captures as files."""
    paths = [folder / f"{number}.pcap" for number in range(len(captures))]
    for path, content in zip(paths, captures, strict=True):
        path.write_bytes(content)
    return fw.flows(*paths)


def main() -> None:
    """Print the cases with mistakes, or the whole answer to the cases that are named."""
    taken = arguments.parser(__doc__)
    taken.add_argument("words", nargs="*", metavar="word")
    words = [each.lower() for each in taken.parse_args().words]
    groups = [each for each in GROUPS if each.__name__ in words] or GROUPS
    words = [each for each in words if each not in [group.__name__ for group in groups]]
    tally = {"right": 0, "left open": 0, "WRONG": 0}
    for case in (case for group in groups for case in group()):
        if not all(word in case.name.lower() for word in words):
            continue
        captures = case.captures()
        with tempfile.TemporaryDirectory() as folder:
            began_s = time.monotonic()
            result = said_of(captures, Path(folder))
            took_s = time.monotonic() - began_s
        wrong, left = judged(result, case.truth)
        verdict = "WRONG" if wrong else "left open" if left else "right"
        tally[verdict] += 1
        if words or verdict != "right":
            print(f"{verdict:9} {case.name:42} {'; '.join([*wrong, *left])}")
        if words:
            print(" ", " ".join(sentences(result.story)))
            print(*(f"    {each}" for each in result.audit), f"    {took_s:.2f} s", sep="\n")
    summary = ", ".join(f"{count} {verdict}" for verdict, count in tally.items())
    print(summary)
    if not words and groups is GROUPS:
        results.write(
            "wires",
            claim="`flows` says the truth about a capture, or leaves it open.",
            anchor="trainings played packet by packet, whose answers are known",
            summary=summary,
            cases=sum(tally.values()),
        )


if __name__ == "__main__":
    main()
