"""The used share of a link: bits sent over the bits that its line could have sent."""

from __future__ import annotations

import numpy as np
import pytest

from fullwire.run.facts import Facts
from fullwire.run.run import Collectives, Hosts, Links, Provenance, Run, Spans
from fullwire.timeline.summary import Windows, links_in_use, processor_use

MS = 1_000_000


def a_run() -> Run:
    """Make a step of 100 ms; from 20 to 60 ms all of 1 Gbps is used, and a collective is out."""
    time_ns = np.arange(-1, 12) * 10 * MS
    sent = np.clip(time_ns - 20 * MS, 0, 40 * MS) // 8
    text = np.full(len(time_ns), "a", object)
    zero, one = np.zeros(1, np.int64), np.array([40 * MS])
    word = np.array(["x"], object)
    return Run(
        provenance=Provenance(origin="measured", source="a test"),
        facts=Facts(line_rate_bps=2e9, other_line_rates_bps=((0.0, 1e9),), hosts="a,b"),
        spans=Spans(
            rank=zero,
            step=zero,
            lane=np.array(["host"], object),
            name=np.array(["step"], object),
            start_ns=zero,
            end_ns=zero + 100 * MS,
        ),
        collectives=Collectives(
            rank=zero,
            step=zero,
            sequence=zero,
            group=word,
            op=word,
            dtype=word,
            bytes=one,
            issue_ns=zero + 20 * MS,
            start_ns=zero + 20 * MS,
            end_ns=zero + 60 * MS,
        ),
        links=Links(
            host=text,
            interface=text,
            time_ns=time_ns,
            tx_bytes=sent,
            rx_bytes=sent,
            tx_packets=sent,
            rx_packets=sent,
            drops=sent * 0,
        ),
        hosts=Hosts(
            host=text,
            device=np.full(len(text), "cpu0", object),
            time_ns=time_ns,
            utilization=np.full(len(text), 0.25),
            memory_bytes=sent * 0,
        ),
    )


def windows() -> Windows:
    windows = Windows()
    for part in windows.seen_in([a_run()]):
        assert len(part.spans) == 1
    return windows


def test_utilization_is_bits_sent_over_line_rate_and_window() -> None:
    [link] = links_in_use(a_run(), [a_run().links], windows())
    assert (link.host, link.line_rate_bps) == ("a", 1e9)
    assert link.in_steps == pytest.approx(0.4)
    assert link.while_communicating == pytest.approx(1.0)


def test_processors_count_while_steps_run() -> None:
    assert processor_use([a_run().hosts], windows()) == pytest.approx(0.25)
