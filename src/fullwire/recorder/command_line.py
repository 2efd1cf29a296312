"""A command line as a run keeps it, without the secrets in it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

_MASK = "***"
_SECRET_WORDS = {
    *("key", "apikey", "accesskey", "token", "secret", "password", "passwd", "passphrase", "pwd"),
    *("credential", "credentials"),
}
_VALUE = r"""("[^"]*"|'[^']*'|[^\s;&|"']+)"""
_ASSIGNED = re.compile(rf"(?P<before>[\w.-]+=){_VALUE}")  # WANDB_API_KEY=x, --api-key=x
_FOLLOWED = re.compile(
    rf"(?P<before>(?<!\S)--?[\w.-]+\s+){_VALUE}"
)  # --api-key x, in one argument of sh
_IN_ADDRESS = re.compile(r"(\w://[^\s/:@]*:)[^\s/@]+@")  # https://user:x@host


def without_secrets(command: Sequence[str]) -> str:
    """Return a command as a user types it; values whose names mark them as secret are masked."""
    shown, is_next_secret = [], False
    for argument in command:
        is_value = is_next_secret and not argument.startswith("-")
        shown.append(_MASK if is_value else _masked(argument))
        is_option = argument.startswith("-") and "=" not in argument
        is_next_secret = is_option and _is_secret(argument)
    return shlex.join(shown).replace(f"'{_MASK}'", _MASK)


def _masked(text: str) -> str:
    def masked(found: re.Match[str]) -> str:
        return f"{found['before']}{_MASK}" if _is_secret(found["before"]) else found[0]

    return _IN_ADDRESS.sub(rf"\1{_MASK}@", _FOLLOWED.sub(masked, _ASSIGNED.sub(masked, text)))


def _is_secret(name: str) -> bool:
    """Say whether a name has a word for secrets; `tokenizer` and `max_tokens` have none."""
    words = re.sub(r"([a-z])([A-Z])", r"\1_\2", name).lower()
    return not _SECRET_WORDS.isdisjoint(re.split(r"[^a-z]+", words))
