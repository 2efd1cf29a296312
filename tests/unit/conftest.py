"""The command line inside the test's own process: a process of its own takes 0.4 s to start."""

from __future__ import annotations

import gc
import io
import os
import signal
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from fullwire.cli import main
from tests.conftest import Cli, in_a_process


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch) -> Cli:
    """Run the command line here; with an environment or an input of its own, in a process."""

    def run(*arguments: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
        if options.keys() - {"cwd"}:
            return in_a_process(*arguments, **options)
        words = ["fullwire", *map(str, arguments)]
        output, errors = (io.TextIOWrapper(io.BytesIO(), "utf-8", newline="") for _ in range(2))
        status, here, threshold = 0, os.getcwd(), gc.get_threshold()
        interrupted = signal.getsignal(signal.SIGINT)
        with monkeypatch.context() as patch, redirect_stdout(output), redirect_stderr(errors):
            patch.setattr(sys, "argv", words)
            patch.setattr(sys, "meta_path", [*sys.meta_path])
            os.chdir(options.get("cwd", here))
            try:
                main()
            except SystemExit as left:
                status = left.code if isinstance(left.code, int) else int(left.code is not None)
            finally:
                os.chdir(here)
                signal.signal(signal.SIGINT, interrupted)
                gc.set_threshold(*threshold)
        return subprocess.CompletedProcess(words, status, _text(output), _text(errors))

    return run


def _text(stream: io.TextIOWrapper) -> str:
    stream.flush()
    stream.seek(0)
    return stream.read()
