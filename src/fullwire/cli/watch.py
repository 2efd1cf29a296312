"""fullwire watch: a verdict on a job that is already running, from outside."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from fullwire.cli.options import Json, print_json
from fullwire.cli.telling import tell
from fullwire.errors import UsageError
from fullwire.units import visible


def watch(
    pid: Annotated[
        int | None,
        typer.Argument(metavar="[PID]", help="A rank, or the launcher above its ranks"),
    ] = None,
    job: Annotated[
        str | None, typer.Option(metavar="NAME", help="Words of the job's command: train.py")
    ] = None,
    bandwidth: Annotated[
        str | None, typer.Option("--line-rate", help="Line rate of the job's links: 10Gbps")
    ] = None,
    seconds: Annotated[float, typer.Option(help="Look for so long at most, up to 600.")] = 30,
    once: Annotated[
        bool, typer.Option("--once", help="End as soon as the answer is sure.")
    ] = False,
    out: Annotated[
        str | None, typer.Option("-o", "--out", metavar="x.run", help="Write what was seen as run")
    ] = None,
    verbose: Annotated[
        bool, typer.Option("-v", "--verbose", help="All parts, processes and notes.")
    ] = False,
    json: Json = False,
) -> None:
    """Say what limits a job that is already running. Nothing enters the job.

    It needs the job's user, or root. Without a process or a name, it lists the jobs of this host.
    Ctrl-C ends it and prints the answer so far. A job that sends nothing any more is stuck: the
    answer names the rank that the others wait for.

    fullwire watch
    fullwire watch 48213 --line-rate 10Gbps
    fullwire watch --job train.py --once -o x.run
    """
    from fullwire.answers.watch import job_named
    from fullwire.answers.watch import watch as answer
    from fullwire.answers.watched import Watched
    from fullwire.report.as_data import watched_object
    from fullwire.report.explanation import print_watched

    if pid is not None and job is not None:
        raise UsageError("watch: expected a PID or --job, got both")
    if pid is None and job is None:
        _list_jobs(json=json)
        return

    def show(so_far: Watched) -> None:
        step = "no step yet" if so_far.explanation is None else so_far.sentence
        sys.stderr.write(f"\r\x1b[K{so_far.seconds:.0f} s: {visible(step[:60])}")
        sys.stderr.flush()

    is_shown = sys.stderr.isatty()
    result = answer(
        job_named(job) if pid is None and job is not None else pid or 0,
        seconds=seconds,
        bandwidth=bandwidth,
        until_sure=once,
        out=out,
        on_look=show if is_shown else None,
    )
    if is_shown:
        sys.stderr.write("\r\x1b[K")
    if out is not None and result.run is None:
        tell(f"{out} was not written: no steps were found that a run could have")
    if json:
        print_json(watched_object(result))
    else:
        print_watched(result, out if result.run is not None else None, is_full=verbose)


def _list_jobs(*, json: bool) -> None:
    from fullwire.recorder.jobs_here import jobs_here

    rows: list[dict[str, Any]] = [
        {
            "pid": job.ranks[0].pid,
            "ranks": [one.rank for one in job.ranks],
            "workers": job.workers,
            "user": job.ranks[0].user,
            "command": job.ranks[0].command,
        }
        for job in jobs_here()
    ]
    if json:
        print_json({"jobs": rows})
        return
    for row in rows:
        typer.echo(
            f"{row['pid']:>8}  {row['user']}  {len(row['ranks'])} of {row['workers']} "
            f"rank{'' if row['workers'] == 1 else 's'}  "
            f"{visible(row['command'])}"
        )
    if not rows:
        typer.echo("No training job of yours runs here: no process has loaded torch.")
