"""The engine under ThreadSanitizer: many threads issue, wait, abort and close at once.

AddressSanitizer finds the rest: put `address,undefined` in the place of `thread`.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = ["native/transport.cpp", "native/arithmetic.cpp", "tests/native/transport_race.cpp"]


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++ with its sanitizers")
def test_no_two_threads_meet_over_the_same_memory(tmp_path: Path) -> None:
    program = tmp_path / "race"
    subprocess.run(
        ["g++", "-std=c++20", "-O1", "-fsanitize=thread", "-pthread", "-I", "native", *SOURCES,
         "-o", str(program)],
        cwd=ROOT, check=True,
    )  # fmt: skip
    done = subprocess.run([program], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
