"""C++ programs that tests build from the package's own sources."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

NATIVE = Path(__file__).parent.parent / "native"


def build(program: Path, sources: Sequence[Path], *flags: str) -> None:
    """Build a program in a folder that its objects may use too, one compiler a processor."""
    command = ["g++", "-std=c++20", "-Wall", "-Wextra", "-pthread", f"-I{NATIVE}", *flags]

    def compiled(source: Path) -> str:
        made = str(program.with_name(f"{source.stem}.o"))
        subprocess.run([*command, "-c", str(source), "-o", made], check=True)
        return made

    largest_first = sorted(sources, key=lambda source: source.stat().st_size, reverse=True)
    with ThreadPoolExecutor(os.cpu_count()) as beside:
        made = list(beside.map(compiled, largest_first))
    subprocess.run([*command, *made, "-o", str(program)], check=True)
