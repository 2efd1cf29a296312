"""Conditions on a job that is watched: `step > 1.2x`, `link < 5Gbps`, `stuck`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median

from fullwire import units
from fullwire.answers.watched import Watched
from fullwire.errors import UsageError
from fullwire.findings.finding import Finding
from fullwire.findings.watching import Alerted

_WORDS = re.compile(r"\s*(\w+)\s*(?:([<>])\s*(\S.*?))?\s*", re.ASCII)
_BASELINE = 3  # first windows; their median is 1x


@dataclass(frozen=True, slots=True, kw_only=True)
class _Figure:
    """A figure of a window that an alert may be about."""

    of: Callable[[Watched], float | None]
    read: Callable[[str, str], float]
    show: Callable[[float], str]
    usual: tuple[str, str] | None = None  # the condition where only the figure is named
    example: str = ""


def _of_step(value: Callable[[Watched, float], float]) -> Callable[[Watched], float | None]:
    def of(window: Watched) -> float | None:
        found = window.explanation
        return None if found is None or not found.step_s else value(window, found.step_s)

    return of


def _percent(value: float) -> str:
    return f"{value:.1%}"


FIGURES: Mapping[str, _Figure] = {
    "step": _Figure(
        of=lambda window: window.step_s,
        read=units.seconds,
        show=units.show_time,
        example="step > 1.2x",
    ),
    "transfer": _Figure(
        of=_of_step(lambda window, step_s: window.transfer_s[0] / step_s),
        read=units.share,
        show=_percent,
        example="transfer > 50%",
    ),
    "link": _Figure(
        of=lambda window: min(
            (rank.sent_bps for rank in window.ranks if rank.sent_bps > 0), default=None
        ),
        read=units.bits_per_second,
        show=units.show_rate,
        example="link < 5Gbps",
    ),
    "retransmits": _Figure(
        of=lambda window: sum(rank.retransmits for rank in window.ranks) / max(window.seconds, 1),
        read=lambda text, what: float(units.ratio(text, what)),
        show=lambda value: f"{value:.3g} a second",
        usual=(">", "1"),
        example="retransmits > 10",
    ),
    "delay": _Figure(
        of=lambda window: max((rank.delayed for rank in window.ranks), default=None),
        read=units.share,
        show=_percent,
        example="delay > 20%",
    ),
    "straggler": _Figure(
        of=_of_step(
            lambda window, step_s: (
                window.explanation.account["straggler"] / step_s if window.explanation else 0.0
            )
        ),
        read=units.share,
        show=_percent,
        usual=(">", "10%"),
        example="straggler > 10%",
    ),
    "stuck": _Figure(
        of=lambda window: 0.0 if window.stuck is None else window.stuck.since_s,
        read=units.seconds,
        show=units.show_time,
        usual=(">", "0s"),
        example="stuck",
    ),
}


@dataclass(slots=True)
class Alert:
    """A condition, and whether it holds. It is told when it begins to hold, and again later."""

    figure: str
    is_above: bool
    limit: float
    is_relative: bool  # to the first windows
    holds: bool = False
    _first: list[float] = field(default_factory=list)

    def check(self, window: Watched) -> Finding | None:
        """Look at a window; return the alert if it holds now and did not before."""
        about = FIGURES[self.figure]
        value = about.of(window)
        if value is None:
            return None
        limit = self.limit
        if self.is_relative:
            if len(self._first) < _BASELINE:
                self._first.append(value)
                return None
            limit *= median(self._first)
        held, self.holds = self.holds, value > limit if self.is_above else value < limit
        if not self.holds or held:
            return None
        return Alerted(
            figure=self.figure,
            value=about.show(value),
            limit=about.show(limit),
            stuck=None if window.stuck is None else window.stuck.finding,
        )


def alert(text: str) -> Alert:
    """Read a condition as `step > 1.2x`."""
    found = _WORDS.fullmatch(text)
    figure = found[1] if found else ""
    if found is None or figure not in FIGURES:
        examples = ", ".join(repr(about.example) for about in FIGURES.values())
        raise UsageError(f"--alert: expected one of {examples}, got {units.shown(text)}")
    about = FIGURES[figure]
    sign, limit = found[2], found[3]
    if sign is None:
        if about.usual is None:
            raise UsageError(
                f"--alert: expected a limit, as {about.example!r}, got {units.shown(text)}"
            )
        sign, limit = about.usual
    is_relative = limit.endswith("x")
    what = f"--alert {figure}"
    value = units.ratio(limit[:-1], what) if is_relative else about.read(limit, what)
    return Alert(figure, sign == ">", float(value), is_relative)
