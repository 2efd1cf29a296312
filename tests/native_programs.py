"""C++ programs that tests build from the package's own sources."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

NATIVE = Path(__file__).parent.parent / "native"


def build(program: Path, sources: Sequence[Path], *flags: str, linked: Sequence[Path] = ()) -> None:
    """Build a program from all its sources at once: most of the time goes into shared headers."""
    command = ["g++", "-std=c++20", "-Wall", "-Wextra", "-pthread", f"-I{NATIVE}", *flags]
    whole = "".join(f'#include "{source.resolve()}"\n' for source in sorted(sources))
    command += ["-x", "c++", "-", "-o", str(program)]
    command += ["-x", "none", *map(str, linked)] if linked else []
    subprocess.run(command, input=whole, text=True, check=True)
