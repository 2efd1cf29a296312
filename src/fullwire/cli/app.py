"""All commands, in the order in which `fullwire --help` lists them.

Only the module of the command that is asked for is loaded, and it loads what it needs inside its
function, so that small questions start fast.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection, Sequence
from copy import copy
from importlib import import_module
from typing import Annotated, Any

import typer

_A_COMMAND_FOLLOWS = {"context_settings": {"allow_interspersed_args": False}}
# By name: the module in this folder, its function, and settings of the command.
_COMMANDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "record": ("record", "record", _A_COMMAND_FOLLOWS),
    "join": ("record", "join", {}),
    "explain": ("explain", "explain", {}),
    "watch": ("watch", "watch", {}),
    "report": ("report", "report", {}),
    "whatif": ("whatif", "whatif", {}),
    "plan": ("plan", "plan", {}),
    "study": ("study", "study", {}),
    "collective": ("collective", "collective", {}),
    "import": ("import_", "import_", {}),
    "export": ("export", "export", {}),
    "flows": ("flows", "flows", {}),
    "show": ("show", "show", {}),
    "compare": ("compare", "compare", {}),
    "workloads": ("workloads", "workloads", {}),
    "tune": ("tune", "tune", {}),
    "fixes": ("fixing", "fixes", {}),
    "apply": ("fixing", "apply", {}),
    "run": ("fixing", "run", _A_COMMAND_FOLLOWS),
    "codecs": ("codecs", "codecs", {}),
    "doctor": ("doctor", "doctor", {}),
}
_GROUPS = ("cluster", "lab", "bench")


def app_of(names: Collection[str] = (*_COMMANDS, *_GROUPS)) -> typer.Typer:
    """Return the program with these commands, or with all."""
    app = typer.Typer(
        name="fullwire",
        help="Is the network the bottleneck of your training, and what would fix it?",
        epilog="Start with: fullwire record -o job.run -- torchrun train.py, then fullwire explain "
        "job.run. Each command has examples: fullwire record -h. Words: fullwire explain "
        "--glossary",
        rich_markup_mode=None,  # plain help: the decorated kind takes 0.2 s longer to start
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
        no_args_is_help=True,
    )
    app.callback()(_options)
    for name, (module, function, settings) in _COMMANDS.items():
        if name in names:
            loaded = import_module(f"fullwire.cli.{module}")
            kind = {"cls": loaded.TwoSides} if name == "compare" else {}
            app.command(name, **settings, **kind)(getattr(loaded, function))
    groups = {name: import_module(f"fullwire.cli.{name}").app for name in _GROUPS if name in names}
    for name, group in groups.items():
        app.add_typer(group, name=name)
    for group in (app, *groups.values()):
        for command in group.registered_commands:
            # Examples stay on lines of their own. Prose is filled up, but not after \b.
            text = inspect.cleandoc(command.callback.__doc__ or "") if command.callback else ""
            command.help = re.sub(r"\n\n(?=(?:fullwire|srun|torchrun) )", "\n\n\b\n", text)
    return app


def _print_version(asked: bool) -> None:
    if asked:
        from fullwire.version import __version__

        typer.echo(f"fullwire {__version__}")
        raise typer.Exit


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
        return app_of()
    if first and (first[0] in _COMMANDS or first[0] in _GROUPS):
        return app_of(first)
    alone = app_of()
    for command in alone.registered_commands:
        command.callback = _without_options
    for group in alone.registered_groups:
        if group.typer_instance:
            group.typer_instance = copy(group.typer_instance)
            group.typer_instance.registered_commands = []
    return alone


def _without_options() -> None:
    """Stand for a command that is listed and not called."""
