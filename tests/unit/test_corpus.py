"""Each file of a folder is read, refused with the reason, or read wrongly by the known truth."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.unit.test_nccl_tests import a_log


def corpus(*words: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "validation.corpus", *map(str, words)]
    root = Path(__file__).parents[2]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=root)


def test_files_are_read_refused_or_wrong(tmp_path: Path) -> None:
    folder = tmp_path / "found"
    folder.mkdir()
    a_log(folder, "1048576 262144 float sum -1 10.49 100.00 100.00 0\n")
    (folder / "notes.txt").write_text("nothing that anybody reads")
    done = corpus(folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "read    all_reduce.log: nccl-tests, 2 collectives",
        "refused notes.txt: a text of an unknown tool: not read. --pattern REGEX says "
        "how the lines of a log tell a step",
        "1 read, 1 refused, 0 wrong",
    ]
    truth = tmp_path / "truth.csv"
    truth.write_text(
        "path,fact,value\nall_reduce.log,workers,2\nall_reduce.log,ops,allgather\n"
        "notes.txt,format,kineto\n"
    )
    done = corpus(folder, "--truth", truth)
    assert done.returncode == 1
    assert "wrong   all_reduce.log: ops is allreduce, expected allgather\n" in done.stdout
    assert "wrong   notes.txt: a text of an unknown tool" in done.stdout
    assert done.stdout.endswith("0 read, 0 refused, 2 wrong\n")
