"""A command line as a run keeps it, without the secrets in it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

_MASK = "***"
# A name with one of these words is secret, so `tokenizer` and `max_tokens` are not.
_SECRET_WORDS = {
    *("key", "keys", "token", "pass", "pwd", "pw", "pat", "sas", "auth", "authorization"),
    *("bearer", "cookie", "dsn"),
}
# A name with one of these letters is secret, like PGPASSWORD, SSHPASS and apiKeys.
_SECRET_LETTERS = re.compile(
    "password|passwd|passphrase|sshpass|secret|credential|api_?key|access_?key|private_?key"
)
_SHELL = re.compile(r"-[a-z]*c$")  # sh -c, bash -lc: the next argument holds a whole command
_NAME = re.compile(r"[\w.-]+")
_BEFORE_VALUE = re.compile(r"""\\?["']?\s*[=:]\s*|\s+(?!-)""")
_VALUE = re.compile(
    r"""(?:(?:bearer|basic|token|digest)\s+)?
    (?:"(?:\\.|[^"\\])*"|'[^']*'|\$\([^)]*\)|`[^`]*`|\\.|[^\s;&|"'\\])+""",
    re.IGNORECASE | re.VERBOSE | re.DOTALL,
)
_IN_ADDRESS = re.compile(r"(\w://[^\s/:@]*:)[^\s/]*@")  # https://user:x@host
_IN_LOGIN = re.compile(r"(?<!\S)(-u|--user|--proxy-user)([= ]?)([^\s:]+):\S+")  # curl -u user:x
# Secrets that show by themselves: Hugging Face, GitHub, GitLab, OpenAI, AWS, Slack, Google, NVIDIA,
# JSON web tokens and private keys. The last is a key of wandb, after `wandb login`.
_BY_ITSELF = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}"
    r"|sk-[\w-]{16,}|A[KS]IA[A-Z0-9]{16}|xox[abeprs]-[\w-]{10,}|AIza[\w-]{30,}|nvapi-[\w-]{16,}"
    r"|eyJ[\w-]{8,}\.[\w.-]+)|-----BEGIN [A-Z ]*PRIVATE KEY-----.*|(?<=login )[0-9a-f]{32,}",
    re.DOTALL,
)


def without_secrets(command: Sequence[str]) -> str:
    """Return a command as a user types it, with *** in place of each secret.

    A value is secret if its name says so, or if it has the form of a known kind of key.
    """
    shown: list[str] = []
    before = ""
    for argument in command:
        name = _NAME.match(argument)
        rest = argument[name.end() :] if name else ""
        is_option = before.startswith("-") and "=" not in before
        if is_option and _is_secret(before) and not argument.startswith("-"):
            shown.append(_MASK)
        elif name and rest[:1] in ("=", ":") and _is_secret(name[0]) and not _SHELL.match(before):
            shown.append(f"{name[0]}{rest[0]}{_MASK}")  # the value may hold blanks and quotes
        else:
            shown.append(_masked(argument))
        before = argument
    line = _BY_ITSELF.sub(_MASK, _IN_LOGIN.sub(rf"\1\2\3:{_MASK}", shlex.join(shown)))
    return line.replace(f"'{_MASK}'", _MASK)


def _masked(text: str) -> str:
    """Mask the values in an argument that holds several names, such as a command or JSON."""
    pieces, place = [], 0
    while (name := _NAME.search(text, place)) is not None:
        end = name.end()
        begin = _BEFORE_VALUE.match(text, end)
        is_option = name[0].startswith("-") and (
            name.start() == 0 or text[name.start() - 1].isspace()
        )
        if begin and (is_option or not begin[0].isspace()) and _is_secret(name[0]):
            value = _VALUE.match(text, begin.end())
            if value is not None:
                pieces += [text[place : begin.end()], _MASK]
                place = value.end()
                continue
        pieces.append(text[place:end])
        place = end
    return _IN_ADDRESS.sub(rf"\1{_MASK}@", "".join(pieces) + text[place:])


def _is_secret(name: str) -> bool:
    """Say whether the value of this name is a secret."""
    words = re.sub(r"([a-z])([A-Z])", r"\1_\2", name).lower()
    words = re.sub("[^a-z]+", "_", words)
    return bool(_SECRET_LETTERS.search(words)) or not _SECRET_WORDS.isdisjoint(words.split("_"))
