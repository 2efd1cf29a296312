"""What a script of this folder is given; asked for help, it says what stands at its head."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def parser(words: str | None) -> argparse.ArgumentParser:
    """Return what takes a script's arguments, and answers --help with the script's own words."""
    return argparse.ArgumentParser(
        prog=f"python -m validation.{Path(sys.argv[0]).stem}",
        description=words,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
