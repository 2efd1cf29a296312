"""fullwire flows: a training seen from its packets."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fullwire.cli.options import Force, Json, print_json
from fullwire.cli.telling import tell
from fullwire.errors import UsageError


def flows(
    captures: Annotated[
        list[str],
        typer.Argument(metavar="CAPTURE...", help="pcap or pcapng, packed or not; or flow records"),
    ],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="X.run", help="Write a run as well")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="PICTURE", help="Draw traffic: .png, .svg or .html")
    ] = None,
    hosts: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Lines such as: node0 10.0.0.1 10.0.1.1 ranks=0-7"),
    ] = None,
    gradient: Annotated[
        str | None, typer.Option(help="How large the gradients are, to hold bytes against: 102MB")
    ] = None,
    jobs: Annotated[
        bool,
        typer.Option("--jobs", help="Tell the jobs of a network apart: NetFlow, IPFIX, sFlow"),
    ] = False,
    force: Force = False,
    json: Json = False,
) -> None:
    """Find the training in captured packets.

    The answer names the ring or tree, its iterations, the bytes of the gradient and a slow link.
    Capture headers on every host, or on a switch, with tcpdump -s 128 -w rank0.pcap:

    fullwire flows rank0.pcap rank1.pcap.zst
    fullwire flows captures/*.pcap --gradient 102MB --plot traffic.html
    fullwire flows --jobs switch.ipfix
    """
    if jobs:
        given = {"--plot": plot, "--output": output, "--hosts": hosts, "--gradient": gradient}
        for option, value in given.items():
            if value is not None:
                raise UsageError(f"flows --jobs: expected no {option}")
        from dataclasses import asdict

        from fullwire.answers.traffic import jobs_in
        from fullwire.report.terminal import print_jobs

        found = jobs_in(*captures)
        if json:
            print_json({"jobs": [asdict(job) for job in found]})
        else:
            print_jobs(found)
        return
    from fullwire.answers.traffic import flows_and_run

    if plot is not None:
        from fullwire.report.charts import check_plot_path

        check_plot_path(plot, replace=force)
    result, run = flows_and_run(*captures, hosts=hosts, gradient=gradient)
    # Not before captures have been read: loading this takes a while.
    from fullwire.report.as_data import traffic_object
    from fullwire.report.terminal import print_traffic

    if json:
        print_json(traffic_object(result))
    else:
        print_traffic(result)
    if plot is not None:
        from fullwire.report.traffic_picture import plot_traffic

        plot_traffic(run, result, plot)
    if output is not None:
        from fullwire.run.store import write

        tell(f"written: {write(run, output, replace=force)}")
