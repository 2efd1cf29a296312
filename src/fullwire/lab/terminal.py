"""Who has the terminal: the lab, or the shell that it opened."""

from __future__ import annotations

import os
import signal


def take_terminal() -> None:
    """Become the foreground of the terminal, where standard input is one."""
    if not os.isatty(0):
        return
    before = signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # else this very call would stop us
    try:
        os.tcsetpgrp(0, os.getpgrp())
    finally:
        signal.signal(signal.SIGTTOU, before)
