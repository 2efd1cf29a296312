"""The lock of `make environment` holds versions, and no paths or names of a machine."""

from __future__ import annotations

import re
import sys
from importlib.metadata import distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).resolve().parents[2]
LINE = re.compile(
    r'([a-z0-9-]+)==([\w.]+); python_version == "3\.\d+"'
    r'(?: and python_full_version >= "3\.\d+\.\d+")?'
)


def locked() -> dict[str, str]:
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    found = [LINE.fullmatch(line) for line in lines if not line.startswith("#")]
    assert all(found), "a line is no version of one Python: no address, no build of one machine"
    return {each[1]: each[2] for each in found if each}


def test_a_release_is_asked_only_of_pythons_that_it_supports() -> None:
    """Debian's Python is 3.11.2, and a release may need 3.11.5."""
    asked = [
        Requirement(line)
        for line in (ROOT / "requirements.lock").read_text().splitlines()
        if not line.startswith("#")
    ]
    installed = {each.name.lower(): each for each in distributions()}
    compared = 0
    for each in asked:
        distribution = installed.get(each.name)
        if distribution is None or f"=={distribution.version}" != str(each.specifier):
            continue  # another Python made this environment, or it was made without the lock
        compared += 1
        supported = SpecifierSet(distribution.metadata["Requires-Python"] or "")
        for python in ("3.11.0", "3.11.2", "3.11.5"):
            environment = {"python_version": "3.11", "python_full_version": python}
            if each.marker is not None and each.marker.evaluate(environment):
                assert python in supported, f"{each} on Python {python}"
    assert compared > 10 or sys.version_info[:2] != (3, 11)


def test_the_core_draws_no_pictures_and_brings_no_torch() -> None:
    """An install without extras stays small; docs/design/install.md gives the reasons."""
    text = (ROOT / "pyproject.toml").read_text()
    core = "".join(re.findall(r"^dependencies = (\[.*?^\])$", text, re.M | re.S))
    assert "pyarrow" in core
    assert not re.search(r"altair|vl-convert|torch|ray\b", core)


def test_the_lock_holds_what_the_environment_is_asked_for_and_no_torch() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    lists = r"^(?:dependencies|pictures|test|bench|docs) = (\[.*?\])(?:  #.*)?$"
    asked = "".join(re.findall(lists, text, re.M | re.S))
    names = set(re.findall(r'"([a-zA-Z0-9-]+)[<>=][^"]*"', asked)) - {"tomli"}  # Python 3.10's
    assert len(names) > 10
    assert names <= locked().keys()
    assert "torch" not in locked()
