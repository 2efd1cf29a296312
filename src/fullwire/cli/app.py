"""All commands, in the order in which `fullwire --help` lists them.

Each module loads what it needs inside its command, so that `--help` and small questions start fast.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from copy import copy
from typing import Annotated

import typer

from fullwire.cli import (
    bench,
    cluster,
    codecs,
    collective,
    compare,
    doctor,
    explain,
    export,
    fixing,
    flows,
    import_,
    lab,
    plan,
    record,
    report,
    show,
    study,
    tune,
    watch,
    whatif,
    workloads,
)

app = typer.Typer(
    name="fullwire",
    help="Is the network the bottleneck of your training, and what would fix it?",
    epilog="Start with: fullwire record -o job.run -- torchrun train.py, then fullwire explain "
    "job.run. Each command has examples: fullwire record -h. Words: fullwire explain --glossary",
    rich_markup_mode=None,  # plain help: the decorated kind takes 0.2 s longer to start
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=True,
)
app.command("record", context_settings={"allow_interspersed_args": False})(record.record)
app.command("join")(record.join)
app.command("explain")(explain.explain)
app.command("watch")(watch.watch)
app.command("report")(report.report)
app.command("whatif")(whatif.whatif)
app.command("plan")(plan.plan)
app.command("study")(study.study)
app.command("collective")(collective.collective)
app.command("import")(import_.import_)
app.command("export")(export.export)
app.command("flows")(flows.flows)
app.command("show")(show.show)
app.command("compare", cls=compare.TwoSides)(compare.compare)
app.command("workloads")(workloads.workloads)
app.command("tune")(tune.tune)
app.command("fixes")(fixing.fixes)
app.command("apply")(fixing.apply)
app.command("run", context_settings={"allow_interspersed_args": False})(fixing.run)
app.command("codecs")(codecs.codecs)
app.command("doctor")(doctor.doctor)
app.add_typer(cluster.app, name="cluster")
app.add_typer(lab.app, name="lab")
app.add_typer(bench.app, name="bench")

for _group in (app, cluster.app, lab.app, bench.app):
    for _command in _group.registered_commands:
        # Examples stay on lines of their own: a paragraph after \b is not filled up as prose is.
        _text = inspect.cleandoc(_command.callback.__doc__ or "") if _command.callback else ""
        _command.help = re.sub(r"\n\n(?=(?:fullwire|srun|torchrun) )", "\n\n\b\n", _text)


def _print_version(asked: bool) -> None:
    if asked:
        from fullwire.version import __version__

        typer.echo(f"fullwire {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Hold the options that every command shares."""


def app_for(arguments: Sequence[str]) -> typer.Typer:
    """Return what is asked for, alone: to make the options of a command takes a while.

    Where nothing is (--help, --version, a mistake), each command has its name and its help only.
    """
    first = arguments[:1]
    if first == ["--"]:  # a command may follow
        return app
    alone = copy(app)
    alone.registered_commands = [known for known in app.registered_commands if known.name in first]
    alone.registered_groups = [known for known in app.registered_groups if known.name in first]
    if not alone.registered_commands and not alone.registered_groups:
        alone.registered_commands = [copy(known) for known in app.registered_commands]
        alone.registered_groups = [copy(known) for known in app.registered_groups]
        for command in alone.registered_commands:
            command.callback = _without_options
        for group in alone.registered_groups:
            if group.typer_instance:
                group.typer_instance = copy(group.typer_instance)
                group.typer_instance.registered_commands = []
    return alone


def _without_options() -> None:
    """Stand for a command that is listed and not called."""
