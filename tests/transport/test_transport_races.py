"""The engine under the compiler's sanitizers: many threads issue, wait, abort and close at once.

`make sanitize` runs these alone.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests import native_programs
from tests.native_programs import NATIVE
from validation import exhaustion

RACE = Path(__file__).parents[1] / "native" / "transport_race.cpp"


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++ with its sanitizers")
@pytest.mark.parametrize(("sanitizer", "optimized"), [("thread", "-O1"), ("address", "-O0")])
def test_no_thread_touches_memory_that_is_not_its_own_also_when_something_runs_out(
    tmp_path: Path, sanitizer: str, optimized: str
) -> None:
    """Both programs are linked with one engine, since it takes most of the time to compile."""
    flags = (optimized, f"-fsanitize={sanitizer}")
    engine = tmp_path / "engine.o"
    native_programs.build(engine, [*NATIVE.glob("transport/*.cpp")], "-c", *flags)
    program = tmp_path / "race"
    native_programs.build(program, [RACE], *flags, linked=[engine])
    done = subprocess.run([program], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr

    program = exhaustion.build(tmp_path, *flags, engine=engine)
    for kind, first, manner in [
        ("memory", 10**6, ["encrypted"]),  # no call has that number, so all succeed
        ("memory", 60, ["encrypted"]),
        ("memory", 120, ["for-good"]),
        ("send", 5, []),
        ("thread", 1, []),
    ]:
        counts = exhaustion.rounds(program, kind, first, 3, manner)
        assert (counts.wrong, counts.hangs, counts.aborts) == (0, 0, 0), counts.said
