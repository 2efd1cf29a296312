"""What a processor encrypts in a second of its own: beside it an encrypted transport stands."""

from __future__ import annotations

import re
import shutil
import subprocess

from fullwire.units import show_rate

_RECORD_BYTES = 256 << 10  # the transport's largest
_SPEED = ["speed", "-seconds", "1", "-evp", "aes-256-gcm", "-bytes", str(_RECORD_BYTES)]


def cipher_speed() -> list[str]:
    """Say what `openssl speed` finds for AES-256-GCM, if there is such a program."""
    program = shutil.which("openssl")
    if program is None:
        return []
    done = subprocess.run([program, *_SPEED], capture_output=True, text=True, check=False)
    found = re.search(r"^AES-256-GCM\s+([\d.]+)k$", done.stdout, re.MULTILINE | re.IGNORECASE)
    if found is None:
        return []
    rate_bps = 8000 * float(found[1])
    return [
        f"openssl speed, AES-256-GCM in pieces of 256 KiB, one processor: {show_rate(rate_bps)}"
    ]
