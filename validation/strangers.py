"""A hundred ways into a job on our transport, for somebody without its key: does one lead in?

    python -m validation.strangers

The ways are those of tests/transport/test_strangers.py, and docs/design/security.md is the threat
model that they try. Those at the door are tried twice: in clear, and with encryption. A way leads
in if a stranger becomes a rank, or a changed message or record is believed. So does a key that
others may know, if the job uses it. The exit status is then 1.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from fullwire import _native
from fullwire.errors import TransportError
from fullwire.transport import keys
from fullwire.transport.keys import Protection
from tests.transport import test_strangers as ways
from validation import arguments, results


def main() -> int:
    """Try each way, and write the count of those that led in."""
    arguments.parser(__doc__).parse_args()
    if problem := _native.encryption_problem():
        sys.exit(f"strangers: {problem}")
    tried = list(outcomes())
    kinds = list(dict.fromkeys(kind for kind, _, _ in tried))
    for kind, way, leads_in in tried:
        if leads_in:
            print(f"{kind}: {way}: leads in")
    rows: list[list[results.Cell]] = [
        [
            kind,
            sum(1 for each, _, _ in tried if each == kind),
            sum(leads_in for each, _, leads_in in tried if each == kind),
        ]
        for kind in kinds
    ]
    inside = sum(leads_in for _, _, leads_in in tried)
    distinct = len({way for _, way, _ in tried})
    results.write(
        "strangers",
        claim="Nobody without the key gets into a job that has one.",
        anchor=f"{distinct} distinct ways, {len(tried)} attempts",
        summary=f"{inside} of {len(tried)} attempts led in",
        cases=len(tried),
        tables=[results.Table(columns=["where", "attempts", "led in"], rows=rows)],
    )
    print(f"{distinct} distinct ways, {len(tried)} attempts: {inside} led in")
    return 1 if inside else 0


def outcomes() -> Iterator[tuple[str, str, bool]]:
    """Yield each attempt: where it was made, its name, and whether it led in."""
    for encrypts in (False, True):
        where = "at the door of a group that encrypts" if encrypts else "at a door in clear"
        for name in ways.WAYS:
            yield where, name, leads_in(name, encrypts)
    array = np.arange(700_000, dtype=np.float32)
    for name, change in ways.CHANGES.items():
        line = ways.Line(change)
        said, received = line.send(array)
        line.close()
        is_believed = "record" not in said or bool((received == array).all())
        yield "on an encrypted line", name, is_believed
    with tempfile.TemporaryDirectory() as folder:
        for mode in ways.MODES:
            path = Path(folder, "key")
            path.write_bytes(ways.KEY)
            path.chmod(mode)
            yield "by a key file", f"a key file of mode {mode:o}", is_taken(path)
        for kind in ways.NO_KEY_FILES:
            path = ways.no_key_file(Path(folder, f"{kind} key"), kind)
            yield "by a key file", f"a key file that is {kind}", is_taken(path)


def leads_in(name: str, encrypts: bool) -> bool:
    """Try a way at the door of rank 0; say whether it led in."""
    waiting = ways.Waiting(Protection(ways.KEY, encrypts=encrypts))
    try:
        ways.WAYS[name](waiting)
        was_believed = False
    except AssertionError:
        was_believed = True
    if waiting.met is not None:
        return True
    waiting.end()
    return was_believed


def is_taken(path: Path) -> bool:
    """Say whether the transport takes its key from this file."""
    os.environ[keys.KEY_FILE_VARIABLE] = str(path)
    try:
        return bool(keys.protection().key)
    except TransportError:
        return False
    finally:
        del os.environ[keys.KEY_FILE_VARIABLE]


if __name__ == "__main__":
    sys.exit(main())
