"""What packets say besides: bytes against theory, what else was on the wire, who was waited for.

Each kind of line has its rule and its sentence in one file of this folder.
"""

from __future__ import annotations

from collections.abc import Iterator

from fullwire.findings.audit.capture import capture_audit
from fullwire.findings.audit.hot_spots import hot_spots
from fullwire.findings.audit.idle import idle_network
from fullwire.findings.audit.latecomer import latecomer
from fullwire.findings.audit.outside import half_seen, outside
from fullwire.findings.audit.steps import steps_against
from fullwire.findings.audit.theory import against_theory
from fullwire.findings.audit.wire import on_the_wire
from fullwire.findings.finding import Finding
from fullwire.packets.flows import Traffic


def audit(traffic: Traffic) -> Iterator[Finding]:
    """Go through what else there is to say of traffic, one training or all hosts together."""
    run, edges, expected = traffic.detail.run, traffic.detail.edges, traffic.detail.expected
    yield from against_theory(traffic.pattern, expected)
    yield from outside(edges, traffic.iterations, expected)
    yield from half_seen(edges)
    yield from on_the_wire(run, edges)
    if not traffic.groups:
        yield from latecomer(edges.hosts, traffic.iterations, traffic.collectives)
        yield from hot_spots(edges)
        yield from idle_network(traffic.iterations)
        yield from steps_against(run, traffic.iterations)
    yield from capture_audit(run)
