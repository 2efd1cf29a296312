"""The command line: parse, call one library function, hand the result to a view."""

from __future__ import annotations

import os
import sys

# One thread is enough for what we compute; a pool of idle ones would spin at every start.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def main() -> None:
    """Run the command line, and turn what Fullwire refuses into one line and an exit status."""
    from fullwire.cli.app import app
    from fullwire.errors import FullwireError

    try:
        app(prog_name="fullwire")
    except FullwireError as error:
        _complain(str(error))
        sys.exit(error.exit_status)
    except MemoryError:
        _complain("out of memory: ask for a smaller grid or fewer workers")
        sys.exit(2)
    except BrokenPipeError:  # whoever was reading has seen enough, as in `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)


def _complain(message: str) -> None:
    line = " ".join(message.split())
    sys.stderr.write(f"fullwire: {line}\n")
