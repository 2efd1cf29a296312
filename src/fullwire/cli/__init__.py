"""The command line: parse, call one library function, hand the result to a view."""

from __future__ import annotations

import atexit
import errno
import gc
import io
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any, NoReturn, TextIO

# One thread is enough for our sums. A pool of idle threads would spin at every start.
if "OPENBLAS_NUM_THREADS" not in os.environ:
    os.putenv("OPENBLAS_NUM_THREADS", "1")  # not in os.environ, which the jobs we start are given


_INTERRUPTED = 128 + signal.SIGINT  # the exit status after Ctrl-C
_OBJECTS_BETWEEN_COLLECTIONS = 200_000


class _WithoutPandas:
    """Says that pandas is not installed: pyarrow loads it for 0.2 s, and no command needs it."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: object = None) -> None:
        if name == "pandas":
            raise ModuleNotFoundError("the command line does without pandas", name=name)


def main() -> None:
    """Run the command line; Ctrl-C ends it without a word, also while it is still being loaded."""
    sys.meta_path.insert(0, _WithoutPandas())
    # Imports make objects by the hundred thousand and little garbage. The collector can look
    # through them seldom, and skips them at the end.
    gc.set_threshold(_OBJECTS_BETWEEN_COLLECTIONS)
    atexit.register(gc.freeze)
    is_asked: list[int] = []

    def leave(number: int, _: object) -> NoReturn:
        is_asked.append(number)
        raise KeyboardInterrupt

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, leave)
    try:
        _run_or_refuse()
    except KeyboardInterrupt:
        pass
    except SystemExit as ended:
        if ended.code != _INTERRUPTED:
            raise  # else a command has ended its own work first, as record does with its job
    except Exception:
        if not is_asked:
            raise  # else numpy makes another error of it while it is being imported
    else:
        return
    # Python gives the signal back to the system while it ends, and another Ctrl-C would kill it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.exit(_INTERRUPTED)


def _run_or_refuse() -> None:
    """Run one command; turn what Fullwire refuses into one line and an exit status."""
    from typer import Exit
    from typer._click.exceptions import ClickException, NoArgsIsHelpError  # pinned in pyproject
    from typer.main import get_command

    from fullwire.errors import FullwireError

    arguments = sys.argv[1:]
    if arguments and arguments[0] in ("plan", "whatif", "workloads"):  # none runs a job's words
        # A model as Megatron's arguments is one word and no option, which begins without a space.
        arguments = [
            f" {word}" if "--num-layers" in word and len(word.split()) > 1 else word
            for word in arguments
        ]
    # Nothing that we open may take the place of a standard stream that was closed.
    for standard in (0, 1, 2):
        try:
            os.fstat(standard)
        except OSError:
            os.dup2(os.open(os.devnull, os.O_RDWR), standard)  # it may be that very number
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115  # open as long as the process is
    if sys.stdout is None and arguments[:1] == ["record"]:  # it is the job's, which may not want it
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    if sys.stdout is None:
        _stop("standard output is closed", 2)
    if isinstance(
        sys.stdout, io.TextIOWrapper
    ):  # characters that it lacks are escaped, as on stderr
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        from fullwire.cli.app import app_for, app_of

        if "_FULLWIRE_COMPLETE" in os.environ:  # a shell asks how a line may go on
            app_of()(prog_name="fullwire")
        command = get_command(app_for(arguments))
        # Not by typer's own runner, which would print what goes wrong.
        with command.make_context("fullwire", arguments) as context:
            command.invoke(context)
        sys.stdout.flush()
    except Exit as done:
        sys.exit(done.exit_code)
    except FullwireError as error:
        _stop(str(error), error.exit_status)
    except MemoryError:
        _stop("out of memory: ask for a smaller grid or fewer workers", 2)
    except BrokenPipeError:  # the reader has seen enough, as in `| head`
        _abandon(sys.stdout)
        sys.exit(0)
    except OSError as error:
        _abandon(sys.stdout)
        # Python names no file where the folder of the command is gone, nor where a write fails.
        nameless = "the current folder" if error.errno == errno.ENOENT else "standard output"
        _stop(f"{error.filename or nameless}: {error.strerror or error}", 2)
    except NoArgsIsHelpError as error:
        error.show()
        sys.exit(2)
    except ClickException as error:
        _stop(_with_help(error), 2)


def _with_help(error: Any) -> str:
    """Return what is wrong with a command line, and the command that tells how it is written."""
    message = error.format_message()
    if (context := getattr(error, "ctx", None)) is None:
        return str(message)
    return f"{message}{'' if message[-1] in '.?!' else '.'} See {context.command_path} -h"


def _abandon(stream: TextIO) -> None:
    """Let what is still to be printed go nowhere, so that leaving raises no second complaint."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _stop(message: str, status: int) -> NoReturn:
    from fullwire.units import visible

    line = visible(" ".join(message.split()))
    try:
        sys.stderr.write(f"fullwire: {line}\n")
        sys.stderr.flush()
    except OSError:  # the status says it too, where nobody can be told
        _abandon(sys.stderr)
    sys.exit(status)
