"""The command line: parse, call one library function, hand the result to a view."""

from __future__ import annotations

import io
import os
import sys
from contextlib import suppress
from typing import NoReturn

# One thread is enough for what we compute; a pool of idle ones would spin at every start.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def main() -> None:
    """Run the command line, and turn what Fullwire refuses into one line and an exit status."""
    from typer import Exit
    from typer._click.exceptions import ClickException, NoArgsIsHelpError  # pinned in pyproject

    from fullwire.errors import FullwireError

    try:
        _run(sys.argv[1:])
    except Exit as done:
        sys.exit(done.exit_code)
    except FullwireError as error:
        _stop(str(error), error.exit_status)
    except MemoryError:
        _stop("out of memory: ask for a smaller grid or fewer workers", 2)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # whoever was reading has seen enough, as in `| head`
        _abandon_output()
        sys.exit(0)
    except OSError as error:
        _abandon_output()
        _stop(f"{error.filename or 'standard output'}: {error.strerror or error}", 2)
    except NoArgsIsHelpError as error:
        error.show()
        sys.exit(2)
    except ClickException as error:
        _stop(error.format_message(), 2)


def _run(arguments: list[str]) -> None:
    """Run one command; what goes wrong is left to `main`, which typer's own runner would print."""
    from typer.main import get_command

    from fullwire.cli.app import app

    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115  # open as long as the process is
    if sys.stdout is None:
        _stop("standard output is closed", 2)
    if isinstance(sys.stdout, io.TextIOWrapper):  # what it cannot encode is escaped, as on stderr
        sys.stdout.reconfigure(errors="backslashreplace")
    command = get_command(app)
    with command.make_context("fullwire", arguments) as context:
        command.invoke(context)
    sys.stdout.flush()


def _abandon_output() -> None:
    """Let what is still to be printed go nowhere, so that leaving raises no second complaint."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _stop(message: str, status: int) -> NoReturn:
    from fullwire.units import visible

    line = visible(" ".join(message.split()))
    with suppress(OSError):  # the status says it too, where nobody can be told
        sys.stderr.write(f"fullwire: {line}\n")
    sys.exit(status)
