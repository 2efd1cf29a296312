"""The arguments of the scripts in this folder; --help prints the docstring of the script."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from fullwire.errors import FullwireError


def parser(words: str | None) -> argparse.ArgumentParser:
    """Return a parser for a script's arguments; --help prints the script's docstring."""
    return argparse.ArgumentParser(
        prog=f"python -m validation.{Path(sys.argv[0]).stem}",
        description=words,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def run(main: Callable[[], None]) -> None:
    """Run a script; a refusal is one line and an exit status, as in `fullwire.cli`."""
    try:
        main()
    except FullwireError as error:
        sys.stderr.write(f"validation.{Path(sys.argv[0]).stem}: {error}\n")
        sys.exit(error.exit_status)
