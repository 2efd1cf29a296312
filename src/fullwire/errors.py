"""The errors that Fullwire raises, as a small tree.

    FullwireError
    ├── UsageError      a person asked for something impossible: exit status 2
    ├── DamagedInput    a file is damaged, truncated or of another kind than claimed: exit status 3
    └── TransportError  a collective cannot finish: raised in a training job, as other backends
                        raise RuntimeError

One place, `fullwire.cli`, turns them into exit statuses. Any other exception that escapes is a bug.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any


class FullwireError(Exception):
    """The base of all errors that Fullwire raises on purpose; its text is one plain sentence."""

    exit_status: int = 1


class UsageError(FullwireError):
    """The request is impossible; the message gives the expected and the given value."""

    exit_status = 2


class DamagedInput(FullwireError):
    """An input cannot be believed; the message begins with the place."""

    exit_status = 3

    def __init__(self, path: Path | str, problem: str, *, line: int | None = None) -> None:
        self.path = Path(path)
        self.line = line
        place = str(path) if line is None else f"{path}:{line}"
        super().__init__(f"{place}: {problem}")
        self._given = (path, problem, line)

    def __reduce__(self) -> tuple[Any, ...]:
        """Return how pickle rebuilds the error, so that it crosses processes unchanged."""
        path, problem, line = self._given
        return partial(DamagedInput, line=line), (path, problem)


class TransportError(FullwireError, RuntimeError):
    """Ranks cannot continue together; the message names the rank that is gone, late or unlike."""
