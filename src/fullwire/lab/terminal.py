"""The foreground of the terminal passes between the lab and the shell that it opened."""

from __future__ import annotations

import os
import signal


def take_terminal() -> None:
    """Become the foreground of the terminal, if standard input is a terminal."""
    if not os.isatty(0):
        return
    before = signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # else the next call would stop us
    try:
        os.tcsetpgrp(0, os.getpgrp())
    finally:
        signal.signal(signal.SIGTTOU, before)
