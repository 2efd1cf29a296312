"""The engine under the compiler's sanitizers: many threads issue, wait, abort and close at once.

`make sanitize` runs these alone.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = [
    *sorted(str(each) for each in ROOT.glob("native/transport*.cpp")),
    "native/arithmetic.cpp", "native/checksum.cpp",
    "tests/native/transport_race.cpp",
]  # fmt: skip


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++ with its sanitizers")
@pytest.mark.parametrize("sanitizer", ["thread", "address"])
def test_no_thread_touches_memory_that_is_not_its_own(tmp_path: Path, sanitizer: str) -> None:
    program = tmp_path / "race"
    subprocess.run(
        ["g++", "-std=c++20", "-O1", f"-fsanitize={sanitizer}", "-pthread", "-I", "native",
         *SOURCES, "-o", str(program)],
        cwd=ROOT, check=True,
    )  # fmt: skip
    done = subprocess.run([program], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
