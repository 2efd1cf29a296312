"""What the samplers of a job saw, as the tables links, sockets and hosts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from fullwire.recorder.inside.journal import ENDED, FAILED
from fullwire.recorder.samples import HostSamples, Kind
from fullwire.run.run import Hosts, Links, Real, Sockets, Text, Whole

Shift = Callable[[HostSamples], int]  # what brings its times to the run's zero


def tables_of(samples: HostSamples, shift_ns: int) -> Iterator[Links | Sockets | Hosts]:
    """Go through what a sampler saw, some rows at a time: links, connections, then devices."""
    for number, rows in samples.of(Kind.LINK):
        link = samples.links[number]
        yield Links(
            host=_text(samples.host, rows),
            interface=_text(link["name"], rows),
            speed_bps=np.full(len(rows["time_ns"]), float(link["speed_bps"])),
            **{**rows, "time_ns": rows["time_ns"] + shift_ns},
        )
    for number, rows in samples.of(Kind.SOCKET):
        yield _sockets(samples, number, rows, shift_ns)
    for device, shares in _devices(samples):
        time_ns = {"time_ns": shares["time_ns"] + shift_ns}
        named = {"host": _text(samples.host, shares), "device": _text(device, shares)}
        yield Hosts(**{**shares, **time_ns, **named})


def _sockets(
    samples: HostSamples, number: int, rows: Mapping[str, Whole], shift_ns: int
) -> Sockets:
    """Return rows of one connection of the job."""
    return Sockets(
        host=_text(samples.host, rows),
        flow=_text(samples.flows[number], rows),
        time_ns=rows["time_ns"] + shift_ns,
        bytes_acked=rows["bytes_acked"],
        retransmits=rows["retransmits"],
        rtt_ns=rows["rtt_us"] * 1000,
        cwnd_packets=rows["cwnd_packets"],
        delivery_rate_bps=rows["delivery_rate_bytes"].astype(np.float64) * 8,
        application_limited=rows["application_limited"],
        busy_ns=rows["busy_us"] * 1000,
        receiver_window_limited_ns=rows["receiver_window_limited_us"] * 1000,
        send_buffer_limited_ns=rows["send_buffer_limited_us"] * 1000,
    )


def sampler_defects(samples: Sequence[HostSamples]) -> list[str]:
    """Say of each sampler what went wrong with it."""
    return [f"host {each.host}: {defect}" for each in samples for defect in _defects(each)]


def sampler_share(samples: Sequence[HostSamples]) -> float | None:
    """Return the processor time of the costliest sampler, over the time that it ran."""
    shares = [
        float(last["processor_ns"] / (last["time_ns"] - each.header["monotonic_ns"]))
        for each in samples
        for _, _, last in each.ends_of(Kind.OWN_COST)
        if last["time_ns"] > each.header["monotonic_ns"]
    ]
    return max(shares, default=None)


def line_rates_bps(samples: Sequence[HostSamples]) -> dict[str, float]:
    """Return the line rate of each host's busiest link, where its adapter tells one."""
    rates: dict[str, float] = {}
    for each in samples:
        moved = {
            number: last["tx_bytes"] - first["tx_bytes"]
            for number, first, last in each.ends_of(Kind.LINK)
        }
        if moved:
            busiest = max(moved, key=lambda number: moved[number])
            rates[each.host] = float(each.links[busiest]["speed_bps"])
    return {host: rate_bps for host, rate_bps in rates.items() if rate_bps > 0}


def _devices(samples: HostSamples) -> Iterator[tuple[str, Mapping[str, Any]]]:
    last: dict[int, Mapping[str, Whole]] = {}  # of each processor: shares are between two samples
    for number, rows in samples.of(Kind.PROCESSOR):
        before = last.get(number, {name: column[:0] for name, column in rows.items()})
        last[number] = {name: column[-1:] for name, column in rows.items()}
        joined = {name: np.append(before[name], column) for name, column in rows.items()}
        yield f"cpu{number}", _shares(joined)
    for _, rows in samples.of(Kind.MEMORY):
        share = rows["used_bytes"] / np.maximum(rows["all_bytes"], 1)
        yield "memory", _device_rows(rows["time_ns"], share, rows["used_bytes"])
    for number, rows in samples.of(Kind.GPU):
        share = rows["percent"] / 100
        yield f"gpu{number}", _device_rows(rows["time_ns"], share, rows["memory_bytes"])


def _shares(rows: Mapping[str, Whole]) -> Mapping[str, Any]:
    """Turn a processor's counted ticks into its share in use between two samples."""
    passed = np.diff(rows["all"])
    is_known = passed > 0
    share = np.diff(rows["busy"])[is_known] / passed[is_known]
    time_ns = rows["time_ns"][1:][is_known]
    return _device_rows(time_ns, np.clip(share, 0.0, 1.0), np.zeros(len(time_ns), np.int64))


def _device_rows(time_ns: Whole, utilization: Real, memory_bytes: Whole) -> Mapping[str, Any]:
    return {"time_ns": time_ns, "utilization": utilization, "memory_bytes": memory_bytes}


def _defects(samples: HostSamples) -> list[str]:
    status, reason = samples.header["status"], samples.header["reason"]
    found = []
    if status == FAILED:
        found.append(f"its sampler failed and the job went on without it ({reason})")
    elif status != ENDED:
        found.append("its sampler ended before the job (was it killed?)")
    if samples.bytes_not_read:
        found.append(f"the last {samples.bytes_not_read} bytes of its samples are no whole block")
    return found


def _text(value: str, rows: Mapping[str, Whole]) -> Text:
    return np.full(len(rows["time_ns"]), value, object)
