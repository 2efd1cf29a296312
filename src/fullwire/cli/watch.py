"""fullwire watch: a verdict on a job that is already running, from outside."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from fullwire.cli.options import Json, print_json, with_options
from fullwire.cli.telling import tell
from fullwire.errors import UsageError
from fullwire.units import shown


def _pid(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise UsageError(
            f"watch: expected the id of a process, got {shown(text)}; --job finds a job by the "
            "words of its command"
        ) from None


class Lasting:
    """Options of a watch that goes on."""

    alert: Annotated[
        list[str] | None,
        typer.Option(metavar="CONDITION", help="Tell when it begins: 'step > 1.2x', stuck"),
    ] = None
    until_alert: Annotated[
        bool, typer.Option("--until-alert", help="End at the first alert, with exit status 1.")
    ] = False
    exec_: Annotated[
        str | None,
        typer.Option("--exec", metavar="COMMAND", help="Run it at each alert: $FULLWIRE_ALERT"),
    ] = None
    prometheus: Annotated[
        str | None,
        typer.Option(metavar="[HOST]:PORT", help="Serve OpenMetrics there: 127.0.0.1:9400"),
    ] = None
    otlp: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Send each window to OpenTelemetry: http://HOST:4318"),
    ] = None


@with_options(Lasting)
def watch(
    pid: Annotated[
        int | None,
        typer.Argument(metavar="[PID]", help="A rank, or the launcher of its ranks", parser=_pid),
    ] = None,
    *,
    job: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Words of its command, slurm:1234, k8s:POD"),
    ] = None,
    hosts: Annotated[
        str, typer.Option(metavar="NAMES", help="Its hosts, over your own ssh: gpu[1-8]")
    ] = "",
    bandwidth: Annotated[
        str | None, typer.Option("--line-rate", help="Line rate of the job's links: 10Gbps")
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(help="Look for so long at most  [default: no end, with --once 30]"),
    ] = None,
    recording: Annotated[
        Path | None,
        typer.Option(metavar="X.run.recording", help="A job that is being recorded, from inside"),
    ] = None,
    once: Annotated[
        bool, typer.Option("--once", help="One answer; ends as soon as it is sure.")
    ] = False,
    out: Annotated[
        str | None,
        typer.Option("-o", "--output", "--out", metavar="X.run", help="Write a run of this time"),
    ] = None,
    verbose: Annotated[
        bool, typer.Option("-v", "--verbose", help="All parts, processes and notes.")
    ] = False,
    json: Json = False,
    agent: Annotated[bool, typer.Option("--agent", hidden=True)] = False,  # of --hosts
    **lasting: Any,
) -> None:
    """Say what limits a job that is already running. Nothing enters the job.

    It needs the job's user, or root. Without a process or a name, it lists the jobs of this host.
    It goes on until Ctrl-C or the job's end, and then prints the account. A job that sends nothing
    any more is stuck: the answer names the rank that the others wait for.

    fullwire watch
    fullwire watch 48213 --line-rate 10Gbps
    fullwire watch --job train.py --once -o x.run
    fullwire watch --job slurm:1234 --hosts gpu[1-8]
    fullwire watch 48213 --alert 'step > 1.2x' --alert stuck --until-alert
    """
    if sum(each is not None for each in (pid, job, recording)) > 1:
        raise UsageError("watch: expected one of a PID, --job and --recording")
    if agent:
        from fullwire.recorder.several_hosts import serve

        serve(pid, job)
        return
    named: int | str | Path | None = job if pid is None else pid
    named = named if recording is None else recording
    if named is None:
        _list_jobs(hosts, json=json)
        return
    unused = [option for option in lasting if once and lasting[option]]
    if unused:
        option = unused[0].strip("_").replace("_", "-")
        raise UsageError(f"watch --once: expected no --{option}, which needs a watch that goes on")
    if (lasting["until_alert"] or lasting["exec_"] is not None) and not lasting["alert"]:
        raise UsageError("watch: expected an --alert that --until-alert or --exec is about")
    if isinstance(named, Path):
        if hosts:
            raise UsageError("watch --recording: expected no --hosts; its folder has all of them")
        if once:
            raise UsageError(
                "watch --recording: expected no --once; `fullwire join` makes a run of it"
            )
    elif once:
        _once(named, hosts, 30 if seconds is None else seconds, bandwidth, out, verbose, json)
        return
    _on_and_on(named, hosts, seconds, bandwidth, out, verbose, json, **lasting)


def _once(
    named: int | str,
    hosts: str,
    seconds: float,
    bandwidth: str | None,
    out: str | None,
    verbose: bool,
    json: bool,
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
        named,
        hosts=hosts,
        seconds=seconds,
        bandwidth=bandwidth,
        out=out,
        on_look=show if is_shown else None,
    )
    if is_shown:
        sys.stderr.write("\r\x1b[K")
    if out is not None and result.run is None:
        tell(f"{out} was not written, for lack of steps")
    if json:
        print_json(watched_object(result))
    else:
        print_watched(result, out if result.run is not None else None, is_full=verbose)


def _on_and_on(
    named: int | str | Path,
    hosts: str,
    seconds: float | None,
    bandwidth: str | None,
    out: str | None,
    verbose: bool,
    json: bool,
    *,
    alert: list[str] | None,
    until_alert: bool,
    exec_: str | None,
    prometheus: str | None,
    otlp: str | None,
) -> None:
    import signal
    import time
    from contextlib import ExitStack

    from fullwire.answers.alerts import alert as read_alert
    from fullwire.answers.inside import watching_recording
    from fullwire.answers.opening import write
    from fullwire.answers.watch import watching
    from fullwire.cli.live import Collector, Live, on_signal, served
    from fullwire.outputs import refuse_existing
    from fullwire.report.explanation import print_watched

    if out is not None:
        refuse_existing(Path(out), replace=False)
    last, is_alerted, begun_s = None, False, time.monotonic()
    most_s = float("inf") if seconds is None else seconds
    alerts = [read_alert(condition) for condition in alert or []]
    windows = (
        watching_recording(named, seconds=most_s, bandwidth=bandwidth, alerts=alerts)
        if isinstance(named, Path)
        else watching(named, hosts=hosts, seconds=most_s, bandwidth=bandwidth, alerts=alerts)
    )
    with ExitStack() as held:
        page = None if prometheus is None else held.enter_context(served(prometheus))
        collector = None if otlp is None else Collector(otlp)
        live = Live(is_json=json, out=out, command=exec_, page=page, collector=collector)
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
        tell(f"{out} was not written, for lack of steps")
    if last is not None and not json:
        print_watched(last, name, is_full=verbose)
    if until_alert and is_alerted:
        raise typer.Exit(1)


def _list_jobs(hosts: str, *, json: bool) -> None:
    from fullwire.recorder.jobs_here import jobs_here
    from fullwire.report.as_data import jobs_object
    from fullwire.report.terminal import print_table

    found = jobs_object([] if hosts else jobs_here())
    problems = []
    if hosts:  # a list of this host needs no numpy
        from fullwire.recorder.several_hosts import host_names, jobs_on

        for host, listed, problem in jobs_on(host_names(hosts)):
            found["jobs"] += [{**row, "host": host} for row in listed]
            problems += [{"host": host, "problem": problem}] if problem else []
    if json:
        print_json({**found, "problems": problems})
        return
    rows = [
        [
            str(row["pid"]),
            row["host"],
            row["user"],
            f"{len(row['ranks'])} of {row['workers']}",
            row["command"],
        ]
        for row in found["jobs"]
    ]
    if rows:
        heads = ["pid", "host", "user", "ranks", "command"]
        print_table(heads, rows, texts={"host", "user", "command"})
    for told in problems:
        tell(f"{told['host']} does not list its jobs: {told['problem']}")
    if not rows:
        where = "on these hosts" if hosts else "here"
        typer.echo(f"No training job runs {where}: of your processes, none has loaded torch.")
