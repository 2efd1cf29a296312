"""The bytes of an iteration, compared with theory.

A ring of N ranks moves 2(N-1)/N of the gradient over each edge. An edge between hosts moves as
much, however many of the ranks a host has. So the bytes tell the number of ranks, if the size of
the model is known.
"""

from __future__ import annotations

from collections.abc import Iterator

from fullwire.findings.audit import Line
from fullwire.findings.finding import Finding
from fullwire.packets.expected import AGREES, RINGS, Expected
from fullwire.packets.pattern import Pattern


class Sharded(Finding):
    """An iteration gathers parameters, and reduces gradients."""

    template = (
        "an iteration gathers {gathered_bytes:bytes} and reduces {gradient_bytes:bytes}: "
        "parameters are sharded, as by FSDP or ZeRO"
    )

    gathered_bytes: float
    gradient_bytes: float


class RanksByBytes(Finding):
    """The bytes show that hosts have several ranks."""

    template = "by its bytes the {pattern} has {ranks} ranks on {hosts} hosts"

    pattern: str
    ranks: int
    hosts: int


class RanksNotSeen(Finding):
    """The number of ranks of a host is unknown, and with it the size of the gradient."""

    template = (
        "how many ranks a host has is not seen: with {ranks} ranks in all the gradient would be "
        "{gradient_bytes:bytes}, with very many {least_bytes:bytes}"
    )

    ranks: int
    gradient_bytes: float
    least_bytes: float


_BITS = (16, 8, 4, 1)  # The bits with which a number of 32 bits may be sent.
_SOURCE = "{is_given:the gradient given|what start-up broadcast}"


class EdgesAgree(Finding):
    """The bytes of an edge are those of a ring's all-reduce."""

    template = (
        "{edge_bytes:bytes} per edge is {is_of_pair:all|2({ranks}-1)/{ranks}} of "
        f"{_SOURCE}, {{model_bytes:bytes}}, within {{error:.2%}}"
    )

    edge_bytes: float
    ranks: int
    is_of_pair: bool  # Each of two ranks sends as much as it reduces: 2(2-1)/2 is 1.
    is_given: bool
    model_bytes: float
    error: float


class GradientAgrees(Finding):
    """The gradient is as large as the model."""

    template = f"the gradient agrees with {_SOURCE}, {{model_bytes:bytes}}, within {{error:.2%}}"

    is_given: bool
    model_bytes: float
    error: float


class GradientDiffers(Finding):
    """An iteration moves another amount than the size of the model, for the given reason."""

    template = f"{{cause}} ({_SOURCE} is {{model_bytes:bytes}})"

    cause: Finding
    is_given: bool
    model_bytes: float


class FewerBits(Finding):
    """Gradients are sent with fewer bits each."""

    template = "the edges carry 1/{part:g} of the model: gradients go as {bits} bits each"

    part: float
    bits: int


class LessThanTheModel(Finding):
    """Gradients are compressed, or some are not sent."""

    template = (
        "the edges carry {share:.2f} of the model: gradients are compressed {times:.1f} times, or "
        "not all of the model is trained"
    )

    share: float
    times: float


class SeveralTimes(Finding):
    """An iteration moves the model a whole number of times."""

    template = (
        "the edges carry {times} times the model: it is reduced {times} times in an iteration, or "
        "sharded and gathered"
    )

    times: int


class MoreThanTheModel(Finding):
    """An iteration moves more than the model, by no whole number."""

    template = (
        "the edges carry {share:.2f} times the model: other ranks than the hosts, or parameters "
        "that are gathered too"
    )

    share: float


def against_theory(pattern: Pattern, expected: Expected) -> Iterator[Finding]:
    """Compare an iteration's bytes with an all-reduce of the model."""
    gradient, model = expected.gradient_bytes, expected.model_bytes
    if expected.gathered_bytes and gradient:
        yield Sharded(gathered_bytes=expected.gathered_bytes, gradient_bytes=gradient)
    if gradient is None or expected.edge_bytes is None or expected.gathered_bytes:
        return
    hosts = len(pattern.order)
    if expected.ranks is not None and expected.ranks > hosts:
        yield RanksByBytes(pattern=pattern.kind, ranks=expected.ranks, hosts=hosts)
    if model is None:
        if pattern.kind in RINGS and expected.ranks is None:
            way, more = 1 if pattern.kind == "ring" else 2, 4 * hosts
            yield RanksNotSeen(
                ranks=more,
                gradient_bytes=way * expected.edge_bytes * more / (2 * (more - 1)),
                least_bytes=way * expected.edge_bytes / 2,
            )
        return
    error, is_given = gradient / model - 1, expected.model_is_told
    if abs(error) >= AGREES:
        share = gradient / model
        bits = next((bits for bits in _BITS if abs(share * 32 / bits - 1) < 2 * AGREES), None)
        cause: Finding = MoreThanTheModel(share=share)
        if bits is not None:
            cause = FewerBits(part=32 / bits, bits=bits)
        elif share < 1:
            cause = LessThanTheModel(share=share, times=1 / share)
        elif abs(share - round(share)) < 2 * AGREES * share:
            cause = SeveralTimes(times=round(share))
        yield GradientDiffers(cause=cause, is_given=is_given, model_bytes=model)
    elif pattern.kind == "ring":
        ranks = expected.ranks or hosts
        yield EdgesAgree(
            edge_bytes=expected.edge_bytes,
            ranks=ranks,
            is_of_pair=ranks == 2,
            is_given=is_given,
            model_bytes=model,
            error=max(abs(error), 1e-5),
        )
    else:
        yield GradientAgrees(is_given=is_given, model_bytes=model, error=max(abs(error), 1e-5))


LINE = Line(
    key="theory",
    place=1,
    of=lambda traffic: against_theory(traffic.pattern, traffic.detail.expected),
)
