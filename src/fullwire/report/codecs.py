"""Codecs on this machine, for people: a table, and a picture of steps by bandwidth."""

from __future__ import annotations

from math import isinf
from pathlib import Path
from typing import Any

import altair as alt

from fullwire.answers.codecs import CodecRow, Codecs, pays
from fullwire.report.charts import COLOURS, save, titled
from fullwire.report.terminal import print_table, say
from fullwire.units import show_bytes, show_rate


def print_codecs(result: Codecs) -> None:
    """Print the table, and the conditions of its last column."""
    say(f"Codecs on {result.machine}, for a bucket of {show_bytes(result.bucket_bytes)}.")
    headings = ["codec", "bytes", "ratio"]
    for speed in result.codecs[0].speeds:
        count = int(speed["threads"])
        threads = f"{count} thread{'s' * (count > 1)}"
        headings += [f"pack, {threads}", f"unpack, {threads}"]
    headings += ["error, gaussian", "error, real", "pays"]
    print_table(headings, [_cells(row) for row in result.codecs], texts={"codec", "pays"})
    say("")
    say(
        f"Pays: {result.model} on {result.workers} workers takes a shorter step with the codec, "
        "packed by one thread in line with the transfer, on a full line. Errors are squared and "
        f"relative to the gradients; the real ones are of {result.gradients}."
    )


def _cells(row: CodecRow) -> list[str]:
    cells = [row.codec, show_bytes(row.packed_bytes), f"{row.ratio:.4g}"]
    for speed in row.speeds:
        cells += [f"{speed[name] / 8e9:.3g} GB/s" for name in ("pack_bps", "unpack_bps")]
    return [*cells, f"{row.gaussian_error:.2g}", f"{row.gradient_error:.2g}", pays(row)]


def plot_codecs(result: Codecs, path: Path) -> None:
    """Draw the step by bandwidth for each codec, with the bandwidths at which it stops to pay."""
    points: list[dict[str, Any]] = [
        {"codec": codec, "gbps": rate_bps / 1e9, "step": step_s}
        for codec, steps in result.step_s.items()
        for rate_bps, step_s in zip(result.bandwidth_bps, steps, strict=True)
    ]
    across = alt.X("gbps:Q", title="bandwidth (Gbps)", scale=alt.Scale(type="log", nice=False))
    up = alt.Y("step:Q", title="step (s)", scale=alt.Scale(type="log"))
    colour = alt.Color("codec:N", sort=None, scale=alt.Scale(range=COLOURS))
    chart: Any = alt.Chart(alt.Data(values=points)).mark_line(strokeWidth=2.5)
    chart = chart.encode(x=across, y=up, color=colour)
    crossings = [
        {
            "codec": row.codec,
            "gbps": row.pays_below_bps / 1e9,
            "step": _step_at(result, row.pays_below_bps),
            "words": f"{row.codec} pays below {show_rate(row.pays_below_bps)}",
        }
        for row in result.codecs
        if row.pays_below_bps is not None and not isinf(row.pays_below_bps)
    ]
    if crossings:
        dots = alt.Chart(alt.Data(values=crossings)).mark_point(size=80, filled=True, opacity=1)
        chart += dots.encode(x=across, y=up, color=colour, tooltip=alt.Tooltip("words:N"))
    lines = [f"{result.workers} workers, full line; dots: a codec pays below this bandwidth"]
    save(titled(chart.properties(width=520, height=320), f"Steps of {result.model}", lines), path)


def _step_at(result: Codecs, rate_bps: float) -> float:
    """Return the uncompressed step at a bandwidth, between those that were predicted."""
    import numpy as np

    rates, steps = np.log(result.bandwidth_bps), np.log(result.step_s["float32"])
    return float(np.exp(np.interp(np.log(rate_bps), rates, steps)))
