"""Do the lab's links deliver what their line rates allow? Payload against rate x 1448/1514.

    .venv/bin/python -m validation.links [LABS]

For each rate, LABS labs of two hosts are made, in turns. `link` is the lab's own measurement before
a job: host and switch, the worse direction. For `job`, host 0 sends to host 1 for about half a
second with plain send and recv, as a job would. Each lab waits, for up to 20 s, until the
processors are idle. Above 1 Gbps, other work on them would change the result.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from fullwire.errors import UsageError
from fullwire.lab.description import describe
from fullwire.lab.lab import Lab
from fullwire.lab.session import run_job
from fullwire.units import show_rate
from validation import arguments, results

RATES = ("100Mbps", "200Mbps", "500Mbps", "1Gbps", "2.5Gbps", "5Gbps", "10Gbps")
JOB_S = 0.5
PATIENCE_S, IDLE_SHARE, GLANCE_S = 20.0, 0.9, 0.2

# Counted from the first arrival after 50 ms, when the token bucket's burst is spent.
JOB = """
import os, socket, sys, time
size, result = int(sys.argv[1]), sys.argv[2]
if os.environ["RANK"] == "1":
    with socket.create_server(("", 5000)) as listener:
        peer, _ = listener.accept()
    buffer, began = bytearray(1 << 20), time.perf_counter()
    while peer.recv_into(buffer) and time.perf_counter() < began + 0.05:
        pass
    arrived, counted_from = 0, time.perf_counter()
    while count := peer.recv_into(buffer):
        arrived, last = arrived + count, time.perf_counter()
    open(result, "w").write(str(8 * arrived / (last - counted_from)))
else:
    while True:
        try:
            peer = socket.create_connection(("host1", 5000))
            break
        except ConnectionRefusedError:
            time.sleep(0.02)
    piece = bytes(1 << 18)
    for _ in range(1 + size // len(piece)):
        peer.sendall(piece)
"""


class Delivered(NamedTuple):
    """Payload delivered, as a share of the most that the line rate allows."""

    link_share: float
    job_share: float


def delivered(rate: str) -> Delivered:
    """Make a lab of two hosts, and measure its links and a job on it."""
    description = describe(workers=2, rate=[rate])
    limit_bps = description.cluster.nics.rate_bps * description.payload_share
    with tempfile.TemporaryDirectory() as place, Lab(description) as lab:
        result = Path(place, "bps")
        size_bytes = round(limit_bps / 8 * JOB_S)
        run_job(lab, [sys.executable, "-c", JOB, str(size_bytes), str(result)])
        return Delivered(
            link_share=min(link.delivered_share for link in lab.links),
            job_share=float(result.read_text()) / limit_bps,
        )


def wait_for_quiet() -> None:
    """Wait until the processors are idle, or for the longest time that a lab waits."""
    until_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < until_s:
        before_s = idle_s()
        time.sleep(GLANCE_S)
        if idle_s() - before_s >= IDLE_SHARE * GLANCE_S * (os.cpu_count() or 1):
            return


def idle_s() -> float:
    """Return the time that all processors together have been idle."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()
    return int(fields[4]) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Print the table."""
    taken = arguments.parser(__doc__)
    taken.add_argument("labs", type=int, nargs="?", default=7)
    labs = taken.parse_args().labs
    found: dict[str, list[Delivered]] = {rate: [] for rate in RATES}
    refusals = dict.fromkeys(RATES, 0)
    for _ in range(labs):
        for rate in RATES:
            wait_for_quiet()
            try:
                found[rate].append(delivered(rate))
            except UsageError as error:
                refusals[rate] += 1
                sys.stderr.write(f"{error}\n")
    print(f"{labs} labs a rate, {os.cpu_count()} processors; median (least to most)")
    print("     rate     1448/1514  link                       job                        refused")
    rows: list[list[results.Cell]] = []
    for rate, samples in found.items():
        limit = show_rate(describe(workers=2, rate=[rate]).cluster.nics.rate_bps * 1448 / 1514)
        link, job = (spread([each[column] for each in samples]) for column in (0, 1))
        print(f"{rate:>9}  {limit:>12}  {link:<25}  {job:<25}  {refusals[rate]}")
        rows.append([rate, limit, link, job, refusals[rate]])
    missing = [1 - statistics.median(e.job_share for e in each) for each in found.values() if each]
    figures = results.spread(missing)
    results.renew(
        "links",
        summary=f"a job gets {1 - figures['worst']:.1%} of the payload limit at worst (medians)",
        cases=sum(map(len, found.values())),
        tables=[
            results.Table(columns=["rate", "payload limit", "link", "job", "refused"], rows=rows)
        ],
        **figures,
    )


def spread(shares: list[float]) -> str:
    """Print the centre and the extremes of shares."""
    if not shares:
        return "-"
    return f"{statistics.median(shares):.1%} ({min(shares):.1%} to {max(shares):.1%})"


if __name__ == "__main__":
    main()
