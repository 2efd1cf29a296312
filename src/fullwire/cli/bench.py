"""fullwire bench: cost and speed of Fullwire's own parts on this machine."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from fullwire.cli.leaving import signals_end_it
from fullwire.cli.options import Force, Json, print_json
from fullwire.cli.telling import introduce
from fullwire.errors import UsageError

app = typer.Typer(
    name="bench",
    help="Measure Fullwire's own parts on this machine.",
    rich_markup_mode=None,
    no_args_is_help=True,
)


Peers = Annotated[
    str | None, typer.Option(help="gloo, mpi (OpenMPI), plain (ours)  [default: gloo]")
]
Wires = Annotated[
    str, typer.Option(help="Ours in each of float32,bf16,fp16,int8,auto; against plain")
]


@app.command("recorder")
def recorder(
    job: Annotated[
        str, typer.Option(help="usual, short-steps (1 ms), many-ranks (8 on 2 processors) or all")
    ] = "usual",
    pairs: Annotated[
        int,
        typer.Option(help="So many pairs of turns, at least 5; measured four at a time"),
    ] = 48,
    json: Json = False,
) -> None:
    """Measure the cost of recording a job.

    The ranks of each job train a model, recorded and unrecorded in turns:

    fullwire bench recorder
    fullwire bench recorder --job short-steps,many-ranks
    """
    from fullwire.report.terminal import say
    from fullwire.studies.recording.overhead import (
        jobs_named,
        measure_overhead,
        overhead_lines,
        overheads_object,
        unmeasured_line,
    )

    results = []
    for chosen in jobs_named(job.split(",")):

        def tell(done: int, name: str = chosen.name) -> None:
            if sys.stderr.isatty():
                typer.echo(
                    f"\r{name}: {done} of {pairs} pairs" + "\n" * (done == pairs),
                    err=True,
                    nl=False,
                )

        results.append(measure_overhead(pairs, job=chosen, tell=tell))
        if not json:
            for line in overhead_lines(results[-1]):
                say(line)
            say("")
    if json:
        print_json(overheads_object(results))
    elif others := unmeasured_line(results):
        say(others)


@app.command("transport")
def transport(
    rate: Annotated[str, typer.Option(help="Line rate of every host, headers included: 10Gbps")],
    workers: Annotated[
        int | None, typer.Option(help="Hosts of the lab; under torchrun its ranks take part")
    ] = None,
    against: Peers = None,
    encrypt: Annotated[
        bool, typer.Option("--encrypt", help="Encrypt ours; compared with ours in clear")
    ] = False,
    wire: Wires = "float32",
    sizes: Annotated[
        str | None, typer.Option(help="All-reduces of: 4B,1MiB  [default: ten from 4B to 256MiB]")
    ] = None,
    rounds: Annotated[int, typer.Option(help="So many turns of each with each size")] = 7,
    plot: Annotated[
        Path | None, typer.Option(help="Draw bandwidth and time against size: x.png, .svg, .html")
    ] = None,
    force: Force = False,
    json: Json = False,
) -> None:
    """Compare our transport with others.

    They reduce in turns, in a lab or as a rank of torchrun:

    fullwire bench transport --workers 2 --rate 10Gbps --against gloo
    fullwire bench transport --workers 2 --rate 5Gbps --encrypt
    fullwire bench transport --workers 4 --rate 1Gbps --wire bf16,int8
    torchrun ... --no-python fullwire bench transport --rate 25Gbps
    """
    from fullwire.report.charts import check_plot_path
    from fullwire.studies.contest import (
        PLAIN,
        USUAL_SIZES,
        Contest,
        check_torch,
        contest_in_lab,
        contest_object,
        plot_contest,
        print_contest,
    )
    from fullwire.units import bits_per_second, size_bytes

    usual = PLAIN if encrypt or wire != "float32" else "gloo"
    contest = Contest(
        rate_bps=bits_per_second(rate),
        against=tuple((against or usual).split(",")),
        encrypts=encrypt,
        wires=tuple(wire.split(",")),
        sizes_bytes=USUAL_SIZES
        if sizes is None
        else tuple(size_bytes(size, "sizes") for size in sizes.split(",")),
        rounds=rounds,
    )
    if plot is not None:
        check_plot_path(plot, replace=force)
    if {"RANK", "WORLD_SIZE"} <= os.environ.keys():
        ranks = os.environ["WORLD_SIZE"]
        if workers is not None and str(workers) != ranks:
            raise UsageError(
                f"workers: under torchrun its ranks take part, and they are {ranks}: got {workers}"
            )
        check_torch()
        from fullwire.studies.contest.rank import take_part

        outcome = take_part(contest)
    elif workers is None:
        raise UsageError("workers: expected how many hosts the lab is to have, like --workers 2")
    else:
        with signals_end_it():
            outcome = contest_in_lab(contest, workers, introduce)
    if outcome is None:  # another rank says it
        return
    if plot is not None:
        plot_contest(outcome, plot)
    if json:
        print_json(contest_object(outcome))
    else:
        print_contest(outcome)


@app.command("device")
def device(
    output: Annotated[
        Path, typer.Option("-o", "--output", help="File to write, such as mine.toml")
    ],
    seconds: Annotated[float, typer.Option(min=5, help="At most about so many seconds")] = 120,
    quick: Annotated[bool, typer.Option("--quick", help="Small shapes only: a first look")] = False,
    force: Force = False,
    json: Json = False,
) -> None:
    """Measure this machine's device, for large models.

    It times matrix products, attention and copies. Commands that take a device take the file:

    fullwire bench device -o mine.toml
    """
    from fullwire.report.terminal import say
    from fullwire.studies.device_speed import device_object, measure_device

    found = measure_device(output, seconds=seconds, replace_file=force, quick=quick)
    peak = found.device.peak_flops_per_s(found.precision)
    rate = found.device.memory_bytes_per_s
    if json:
        print_json(device_object(found, output))
        return
    say(
        f"{found.device.title}: {peak / 1e12:.2f} TFLOP/s in {found.precision}, copies "
        f"{rate / 2e9:.0f} GB/s"
    )
    say(
        f"{found.shapes} products in {found.took_s:.0f} s. {found.judged} of them judged the fit: "
        f"it is off by {found.median_error:.1%} in the median"
    )
    say(f"wrote {output}")
