"""The arguments of the scripts in this folder; --help prints the docstring of the script."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def parser(words: str | None) -> argparse.ArgumentParser:
    """Return a parser for a script's arguments; --help prints the script's docstring."""
    return argparse.ArgumentParser(
        prog=f"python -m validation.{Path(sys.argv[0]).stem}",
        description=words,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
