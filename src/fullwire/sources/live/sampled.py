"""What the samplers of a job saw, as the tables links, sockets and hosts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from fullwire.model.run import Hosts, Links, Real, Sockets, Text, Whole
from fullwire.sources.live.inside.journal import ENDED, FAILED
from fullwire.sources.live.samples import HostSamples, Kind

Shift = Callable[[HostSamples], int]  # what brings its times to the run's zero


def links_of(samples: Sequence[HostSamples], shift_ns: Shift) -> Links:
    """Return the rows of every link, by host and interface, in the order of time."""
    parts = [
        {
            "host": _text(each.host, rows), "interface": _text(each.links[number]["name"], rows),
            **rows, "time_ns": rows["time_ns"] + shift_ns(each),
        }
        for each in samples
        for number, rows in each.of(Kind.LINK)
    ]  # fmt: skip
    return Links(**_joined(parts, Links))


def sockets_of(samples: Sequence[HostSamples], shift_ns: Shift) -> Sockets:
    """Return the rows of every connection of the job."""
    parts = [
        {
            "host": _text(each.host, rows), "flow": _text(each.flows[number], rows),
            "time_ns": rows["time_ns"] + shift_ns(each),
            "bytes_acked": rows["bytes_acked"], "retransmits": rows["retransmits"],
            "rtt_ns": rows["rtt_us"] * 1000, "cwnd_packets": rows["cwnd_packets"],
            "delivery_rate_bps": rows["delivery_rate_bytes"] * 8.0,
            "application_limited": rows["application_limited"],
            "busy_ns": rows["busy_us"] * 1000,
            "receiver_window_limited_ns": rows["receiver_window_limited_us"] * 1000,
            "send_buffer_limited_ns": rows["send_buffer_limited_us"] * 1000,
        }
        for each in samples
        for number, rows in each.of(Kind.SOCKET)
    ]  # fmt: skip
    return Sockets(**_joined(parts, Sockets))


def hosts_of(samples: Sequence[HostSamples], shift_ns: Shift) -> Hosts:
    """Return the rows of every processor, of memory and of every GPU."""
    parts = [
        {
            "host": _text(each.host, rows), "device": _text(device, rows), **rows,
            "time_ns": rows["time_ns"] + shift_ns(each),
        }
        for each in samples
        for device, rows in _devices(each)
    ]  # fmt: skip
    return Hosts(**_joined(parts, Hosts))


def sampler_defects(samples: Sequence[HostSamples]) -> list[str]:
    """Say of each sampler what went wrong with it."""
    return [f"host {each.host}: {defect}" for each in samples for defect in _defects(each)]


def sampler_share(samples: Sequence[HostSamples]) -> float | None:
    """Return the processor time of the costliest sampler, over the time that it ran."""
    shares = [
        float(rows["processor_ns"][-1] / (rows["time_ns"][-1] - each.header["monotonic_ns"]))
        for each in samples
        for _, rows in each.of(Kind.OWN_COST)
        if rows["time_ns"][-1] > each.header["monotonic_ns"]
    ]
    return max(shares, default=None)


def line_rates_bps(samples: Sequence[HostSamples]) -> dict[str, float]:
    """Return the line rate of each host's busiest link, where its adapter tells one."""
    rates: dict[str, float] = {}
    for each in samples:
        moved = {
            number: int(rows["tx_bytes"][-1] - rows["tx_bytes"][0])
            for number, rows in each.of(Kind.LINK)
        }
        if moved:
            busiest = max(moved, key=lambda number: moved[number])
            rates[each.host] = float(each.links[busiest]["speed_bps"])
    return {host: rate_bps for host, rate_bps in rates.items() if rate_bps > 0}


def _devices(samples: HostSamples) -> list[tuple[str, Mapping[str, Any]]]:
    found: list[tuple[str, Mapping[str, Any]]] = []
    for number, rows in samples.of(Kind.PROCESSOR):
        found.append((f"cpu{number}", _shares(rows)))
    for _, rows in samples.of(Kind.MEMORY):
        share = rows["used_bytes"] / np.maximum(rows["all_bytes"], 1)
        found.append(("memory", _device_rows(rows["time_ns"], share, rows["used_bytes"])))
    for number, rows in samples.of(Kind.GPU):
        found.append(
            (
                f"gpu{number}",
                _device_rows(rows["time_ns"], rows["percent"] / 100, rows["memory_bytes"]),
            )
        )
    return found


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


def _joined(
    parts: Sequence[Mapping[str, Any]], table: type[Links | Sockets | Hosts]
) -> dict[str, Any]:
    if not parts:
        return dict(table.empty().columns())
    return {name: np.concatenate([part[name] for part in parts]) for name in table.column_types()}
