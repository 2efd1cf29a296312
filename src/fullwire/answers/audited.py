"""A training as packets show it, with the audit of its bytes. (In a module that is loaded late.)"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from itertools import product
from typing import Any

from fullwire.answers.believable import check_shares, check_steps, check_times
from fullwire.display import Result, html_table
from fullwire.findings.audit import audit
from fullwire.findings.finding import Finding
from fullwire.findings.traffic import traffic_findings
from fullwire.packets.edges import EdgeFacts
from fullwire.packets.flows import Traffic
from fullwire.words import sentences


@dataclass(frozen=True, eq=False, repr=False, slots=True, kw_only=True)
class AuditedTraffic(Result, Traffic):
    """A training as packets show it, and the findings about its bytes."""

    groups: tuple[AuditedTraffic, ...] = ()
    findings: tuple[Finding, ...]

    @property
    def audit(self) -> tuple[str, ...]:
        """Return the findings of the audit, a sentence each."""
        return sentences(self.findings)

    @property
    def story(self) -> tuple[Finding, ...]:
        """Return the findings about the training, in everyday words."""
        return tuple(traffic_findings(self))

    def _in_short(self) -> Iterator[str]:
        yield from sentences(self.story[:3])

    def _tables(self) -> Mapping[str, Mapping[str, Any]]:
        names = [field.name for field in fields(EdgeFacts)]
        pairs = list(product(self.hosts, self.hosts))
        return {
            "edges": {name: [getattr(edge, name) for edge in self.edges] for name in names},
            "matrix": {
                "source": [source for source, _ in pairs],
                "target": [target for _, target in pairs],
                "payload_bytes": self.matrix_payload_bytes.reshape(-1),
                "wire_bytes": self.matrix_wire_bytes.reshape(-1),
            },
        }

    def _picture(self) -> str:
        return html_table(self._tables()["edges"])


def audited(traffic: Traffic) -> AuditedTraffic:
    """Return traffic with its audit, of each training by itself."""
    known = {field.name: getattr(traffic, field.name) for field in fields(traffic)}
    # Packets with such times are impossible: every iteration takes some time.
    source = traffic.detail.run.place
    check_shares(source, busy_share=traffic.busy_fractions)
    check_shares(source, packets_sent_again=[edge.sent_again for edge in traffic.edges])
    check_times(source, round_trip=[edge.rtt_least_s or 0.0 for edge in traffic.edges])
    check_times(source, burst=[edge.burst_s for edge in traffic.edges])
    if traffic.iterations is not None:
        check_steps(source, period=traffic.iterations.period_s)
        check_times(source, communication=traffic.iterations.communicating_s)
        check_shares(source, confidence=traffic.iterations.confidence)
    known["groups"] = tuple(audited(group) for group in traffic.groups)
    return AuditedTraffic(**known, findings=tuple(audit(traffic)))
