"""fullwire watch: a verdict on a job that is already running, from outside."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fullwire.cli.options import Json, print_json
from fullwire.cli.telling import tell
from fullwire.errors import UsageError
from fullwire.units import visible

if TYPE_CHECKING:
    from fullwire.answers.alerts import Alert


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
    seconds: Annotated[
        float | None,
        typer.Option(help="Look for so long at most: with --once 30 and up to 600, else no end"),
    ] = None,
    once: Annotated[
        bool, typer.Option("--once", help="One answer; ends as soon as it is sure.")
    ] = False,
    alert: Annotated[
        list[str] | None,
        typer.Option(metavar="CONDITION", help="Tell when it begins: 'step > 1.2x', stuck"),
    ] = None,
    until_alert: Annotated[
        bool, typer.Option("--until-alert", help="End at the first alert, with exit status 1.")
    ] = False,
    exec_: Annotated[
        str | None,
        typer.Option("--exec", metavar="COMMAND", help="Run it at each alert: $FULLWIRE_ALERT"),
    ] = None,
    prometheus: Annotated[
        str | None,
        typer.Option(metavar="[HOST]:PORT", help="Serve OpenMetrics there: 127.0.0.1:9400"),
    ] = None,
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
    It goes on until Ctrl-C or the job's end, and then prints the account. A job that sends nothing
    any more is stuck: the answer names the rank that the others wait for.

    fullwire watch
    fullwire watch 48213 --line-rate 10Gbps
    fullwire watch --job train.py --once -o x.run
    fullwire watch 48213 --alert 'step > 1.2x' --alert stuck --until-alert
    """
    from fullwire.answers.alerts import alert as read_alert
    from fullwire.answers.watch import job_named

    if pid is not None and job is not None:
        raise UsageError("watch: expected a PID or --job, got both")
    if pid is None and job is None:
        _list_jobs(json=json)
        return
    lasting = {"--alert": alert, "--until-alert": until_alert, "--exec": exec_}
    lasting |= {"--prometheus": prometheus}
    unused = [option for option, value in lasting.items() if once and value]
    if unused:
        raise UsageError(f"watch --once: expected no {unused[0]}, which needs a watch that goes on")
    if (until_alert or exec_ is not None) and not alert:
        raise UsageError("watch: expected an --alert that --until-alert or --exec is about")
    conditions = [read_alert(condition) for condition in alert or []]
    watched = job_named(job) if pid is None and job is not None else pid or 0
    if once:
        _once(watched, 30 if seconds is None else seconds, bandwidth, out, verbose, json)
        return
    _on_and_on(
        watched, seconds, bandwidth, out, verbose, json, conditions, until_alert, exec_, prometheus
    )


def _once(
    pid: int, seconds: float, bandwidth: str | None, out: str | None, verbose: bool, json: bool
) -> None:
    from fullwire.answers.watch import watch as answer
    from fullwire.answers.watched import Watched
    from fullwire.report.as_data import watched_object
    from fullwire.report.explanation import print_watched

    def show(so_far: Watched) -> None:
        step = "no step yet" if so_far.explanation is None else so_far.sentence
        sys.stderr.write(f"\r\x1b[K{so_far.seconds:.0f} s: {step[:60]}")
        sys.stderr.flush()

    is_shown = sys.stderr.isatty()
    result = answer(
        pid,
        seconds=seconds,
        bandwidth=bandwidth,
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


def _on_and_on(
    pid: int,
    seconds: float | None,
    bandwidth: str | None,
    out: str | None,
    verbose: bool,
    json: bool,
    alerts: list[Alert],
    until_alert: bool,
    command: str | None,
    prometheus: str | None,
) -> None:
    import signal
    import time
    from contextlib import ExitStack
    from pathlib import Path

    from fullwire.answers.opening import write
    from fullwire.answers.watch import watching
    from fullwire.cli.live import Live, on_signal, served
    from fullwire.outputs import refuse_existing
    from fullwire.report.explanation import print_watched

    if out is not None:
        refuse_existing(Path(out), replace=False)
    last, is_alerted, begun_s = None, False, time.monotonic()
    windows = watching(
        pid,
        seconds=float("inf") if seconds is None else seconds,
        bandwidth=bandwidth,
        alerts=alerts,
    )
    with ExitStack() as held:
        page = None if prometheus is None else held.enter_context(served(prometheus))
        live = Live(is_json=json, out=out, command=command, page=page)
        held.enter_context(on_signal(signal.SIGUSR1, live))
        try:
            for last in windows:
                live.show(last, time.monotonic() - begun_s)
                is_alerted = is_alerted or bool(last.alerts)
                if until_alert and is_alerted:
                    break
        except KeyboardInterrupt:
            tell("")  # the answer so far is the answer
        live.finish()
    name = None
    if last is not None and out is not None and last.run is not None:
        name = str(write(last.run, out))
    elif out is not None:
        tell(f"{out} was not written: no steps were found that a run could have")
    if last is not None and not json:
        print_watched(last, name, is_full=verbose)
    if until_alert and is_alerted:
        raise typer.Exit(1)


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
