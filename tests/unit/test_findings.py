"""Findings, verdicts and fixes: each kind has words that fit its fields, a place and a page."""

from __future__ import annotations

import importlib
import pkgutil
import re
import string
from collections.abc import Iterator
from dataclasses import FrozenInstanceError, fields, is_dataclass, replace

import pytest

import fullwire as fw
from docs.making import reference
from fullwire.findings import verdicts
from fullwire.findings.case import Case
from fullwire.findings.finding import Finding, Length, kinds
from fullwire.findings.verdicts import Blame, VerdictKind, drawn_parts, verdict_kinds
from fullwire.fixes import Fix, fix_kinds
from fullwire.timeline.account import Part
from tests.jobs_by_hand import Rank, a_job


def modules(package: str) -> list[str]:
    found = pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}.")
    return sorted(each.name for each in found)


def all_kinds() -> list[type[Finding]]:
    for name in modules("fullwire.findings"):
        importlib.import_module(name)
    return [kind for _, kind in sorted(kinds().items()) if kind.__module__.startswith("fullwire.")]


def all_fixes() -> list[type[Fix]]:
    fix_kinds()
    return sorted(Fix.__subclasses__(), key=lambda kind: kind.__name__)


def fields_in(template: str) -> Iterator[str]:
    """Yield the fields that a template names, also those within the format of another field."""
    for _, name, spec, _ in string.Formatter().parse(template):
        if name is not None:
            yield name.partition(".")[0]
            yield from fields_in(spec or "")


def known_to(kind: type) -> set[str]:
    assert is_dataclass(kind)
    properties = {name for name in dir(kind) if isinstance(getattr(kind, name), property)}
    return {each.name for each in fields(kind)} | properties


@pytest.mark.parametrize("kind", all_kinds(), ids=lambda kind: kind.key)
def test_a_sentence_names_only_fields_of_its_finding(kind: type[Finding]) -> None:
    assert kind.__doc__
    assert set(fields_in(kind.template)) <= known_to(kind)
    assert set(fields_in(getattr(kind, "how", ""))) <= known_to(kind)


def test_no_finding_has_a_field_that_its_sentence_does_not_need() -> None:
    for kind in all_kinds():
        said = {*fields_in(kind.template), *fields_in(getattr(kind, "how", ""))}
        unsaid = {each.name for each in fields(kind)} - said  # type: ignore[arg-type]
        # figures for programs, and for the rule of a part of a machine
        assert unsaid <= {"value", "part", "is_limited", "may_trace", "is_admin"}, kind


@pytest.mark.parametrize("kind", all_fixes(), ids=lambda kind: kind.__name__)
def test_a_fix_names_only_its_own_fields(kind: type[Fix]) -> None:
    assert set(fields_in(kind.template)) <= known_to(kind)
    how = next(each for each in fields(kind) if each.name == "how").default
    if isinstance(how, str):
        assert set(fields_in(how)) <= known_to(kind)


def test_every_file_of_a_registry_registers_a_kind_under_its_own_name() -> None:
    files = {name.rpartition(".")[2] for name in modules("fullwire.findings.verdicts")}
    assert files == set(verdict_kinds())
    files = {name.rpartition(".")[2] for name in modules("fullwire.fixes")}
    assert {name for name in files if not name.startswith("_")} - {"fix"} == set(fix_kinds())


def test_a_kind_with_a_rule_of_its_own_takes_cases_of_a_part(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    usual = verdict_kinds()["host"]

    class WithoutSums(VerdictKind):
        """Time of the host in steps with at most one sum, after `host` in the alphabet."""

        key, part = "without_sums", Part.HOST.key

        def rule(self, case: Case, blame: Blame) -> tuple[Finding, ...] | None:
            is_mine = blame.part == self.part and case.collectives_per_step <= 1
            return blame.reasons if is_mine else None

        def says(self, case: Case) -> Finding:
            return usual.says(case)

    alone = Rank(length=100, spans=[("compute", "backward", 40, 100)], collectives=[(8, 50, 60)])
    before = fw.explain(a_job(alone, alone)).verdict
    with monkeypatch.context() as patch:
        patch.setitem(verdicts._KINDS, WithoutSums.key, WithoutSums())
        verdict_kinds.cache_clear()
        after = fw.explain(a_job(alone, alone)).verdict
    verdict_kinds.cache_clear()
    assert (before.kind, after.kind) == ("host", "without_sums")
    assert after.sentence == before.sentence  # nothing else is lost
    assert "host" not in after.near


def test_every_part_of_the_account_is_called_and_drawn_by_one_kind_of_verdict() -> None:
    assert list(drawn_parts()) == [part.key for part in Part]
    for kind in drawn_parts().values():
        assert kind.label
        assert kind.colour is not None


@pytest.mark.parametrize("page", ["verdicts", "fixes"])
def test_every_kind_is_documented(page: str) -> None:
    known = verdict_kinds() if page == "verdicts" else fix_kinds()
    text = getattr(reference, page)()
    for key in known:
        row = next(line for line in text.splitlines() if line.startswith(f"| `{key}` | "))
        assert "None" not in row, key


def test_a_finding_is_a_frozen_dataclass_of_its_fields() -> None:
    length = Length(step_s=0.5, is_whole_trace=False)
    assert length == Length(is_whole_trace=False, step_s=0.5)
    assert hash(length) == hash(replace(length))
    assert length != replace(length, step_s=0.25)
    assert repr(length) == ("Length(step_s=0.5, is_whole_trace=False, is_of_all=False)")
    with pytest.raises(FrozenInstanceError, match="step_s"):
        length.step_s = 1.0  # type: ignore[misc]
    with pytest.raises(TypeError, match="is_whole_trace is missing"):
        Length(step_s=0.5)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="Length has no steps"):
        Length(step_s=0.5, is_whole_trace=False, steps=3)  # type: ignore[call-arg]


def test_no_signature_of_the_reference_tells_a_place_in_memory() -> None:
    found = reference.python()
    assert re.findall(r".*\b0x[0-9a-f]{6,}.*", found) == []
    assert re.search(r"say: Say = \.\.\.", found)
