"""A watch that goes on: a screen, lines of JSON, OpenMetrics for Prometheus, alerts."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from statistics import median
from types import FrameType

from fullwire.answers.opening import write
from fullwire.answers.watched import Watched
from fullwire.cli.options import print_json
from fullwire.cli.telling import tell
from fullwire.errors import UsageError
from fullwire.report.as_data import watched_object
from fullwire.units import show_bytes, show_rate, show_time, shown, visible
from fullwire.words import sentence

_BARS = "▁▂▃▄▅▆▇█"
_MOST_RANKS = 16  # of the screen
_LINE = 24  # windows of the line of past steps
_MOST_COMMANDS = 4  # of --exec that run at once
_HOUR_S = 3600.0
_OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"


@dataclass(kw_only=True)
class Live:
    """Shows windows as they come; remembers hours in one line each."""

    is_json: bool
    out: str | None
    command: str | None  # of --exec
    page: Page | None

    def __post_init__(self) -> None:
        self._screen = sys.stdout.isatty() and not self.is_json
        self._lines = 0
        self._steps: deque[float | None] = deque(maxlen=_LINE)
        self._said: tuple[object, ...] = ()
        self._hour: list[float] = []
        self._hour_ends_s = _HOUR_S
        self._elapsed_s = 0.0
        self._running: list[subprocess.Popen[bytes]] = []
        self._wants_run = False
        self._runs = 0
        if self.command is not None and not shutil.which((shlex.split(self.command) or [""])[0]):
            raise UsageError(f"--exec: expected a command, got {shown(self.command)}")

    def ask_for_run(self, _number: int, _frame: FrameType | None) -> None:
        """Write what was seen as a run after the next window (SIGUSR1)."""
        self._wants_run = True

    def show(self, window: Watched, elapsed_s: float) -> None:
        """Show a window, and act on what it says."""
        explanation = window.explanation
        self._steps.append(None if explanation is None else explanation.step_s)
        if explanation is not None:
            self._hour.append(explanation.step_s)
        if self.page is not None:
            self.page.text = open_metrics(window)
        if self.is_json:
            print_json(watched_object(window))
            sys.stdout.flush()
        elif self._screen:
            lines = [
                line[: shutil.get_terminal_size().columns - 1] for line in self._lines_of(window)
            ]
            back = f"\x1b[{self._lines}F\x1b[J" if self._lines else ""
            sys.stdout.write(back + "".join(f"{line}\n" for line in lines))
            sys.stdout.flush()
            self._lines = len(lines)
        elif (gist := _gist(window)) != self._said:
            self._said = gist
            print(f"{show_time(elapsed_s)}: {visible(window.sentence)}", flush=True)
        self._elapsed_s = elapsed_s
        for alerted in window.alerts:
            self._alert(sentence(alerted))
        if elapsed_s >= self._hour_ends_s:
            self._hour_ends_s += _HOUR_S
            if self._hour:
                self._say(
                    f"hour {elapsed_s / _HOUR_S:.0f}: step {show_time(median(self._hour))} "
                    f"({show_time(min(self._hour))} to {show_time(max(self._hour))})"
                )
            self._hour = []
        if self._wants_run:
            self._wants_run = False
            self._write_run(window)

    def finish(self) -> None:
        """Leave the screen to the summary."""
        if self._screen and self._lines:
            sys.stdout.write(f"\x1b[{self._lines}F\x1b[J")

    def _say(self, line: str) -> None:
        self.finish()
        self._lines = 0
        tell(line)

    def _alert(self, text: str) -> None:
        self._say(text)
        self._running = [process for process in self._running if process.poll() is None]
        if self.command is None:
            return
        if len(self._running) >= _MOST_COMMANDS:
            self._say(f"--exec was not started: {_MOST_COMMANDS} of it still run")
            return
        environment = os.environ | {"FULLWIRE_ALERT": text}
        try:
            started = subprocess.Popen(
                shlex.split(self.command), env=environment, stdin=subprocess.DEVNULL
            )
        except OSError as error:
            self._say(f"--exec {self.command}: {error.strerror}")
        else:
            self._running.append(started)

    def _write_run(self, window: Watched) -> None:
        if window.run is None:
            self._say("no run was written: no steps were found that a run could have")
            return
        self._runs += 1
        path = Path(self.out or "watched.run")
        path = path.with_name(f"{path.stem}-{self._runs}{path.suffix}")
        self._say(f"written: {write(window.run, path)}")

    def _lines_of(self, window: Watched) -> Iterator[str]:
        explanation, job = window.explanation, window.job
        yield from textwrap.wrap(visible(window.sentence), shutil.get_terminal_size().columns - 1)
        steps = [step for step in self._steps if step is not None]
        if explanation is not None:
            low, high = min(steps), max(steps)
            line = "".join(
                " " if step is None else _BARS[round((step - low) / (high - low or 1) * 7)]
                for step in self._steps
            )
            sent = [rank.sent_bytes for rank in window.ranks]
            a_step = max(sent) / max(window.seconds / explanation.step_s, 1)
            step = show_time(explanation.step_s)
            yield f"  step {step}  {line}  {show_bytes(a_step)} a step and rank"
        yield "  rank       pid  computing  sending  waiting  delayed        rate  again"
        pids = {rank.rank: rank.pid for rank in job.ranks}
        for rank in window.ranks[:_MOST_RANKS]:
            yield (
                f"  {rank.rank:>4} {pids[rank.rank]:>9}  {rank.computing:>9.0%}"
                f"  {rank.sending:>7.0%}  {rank.waiting:>7.0%}  {rank.delayed:>7.0%}"
                f"  {show_rate(rank.sent_bps):>10}  {rank.retransmits:>5.0f}"
            )
        if len(window.ranks) > _MOST_RANKS:
            yield f"  and {len(window.ranks) - _MOST_RANKS} more ranks"
        yield "Ctrl-C ends it and prints the account."


def _gist(window: Watched) -> tuple[object, ...]:
    """Return what a verdict is about; its figures change with each window."""
    stuck = window.stuck
    return (
        window.kind,
        {*window.possible},
        stuck is not None,
        stuck and stuck.rank,
        [type(finding) for finding in window.findings],
    )


def open_metrics(window: Watched) -> str:
    """Return a window as OpenMetrics text, which Prometheus reads."""
    explanation = window.explanation
    named: list[tuple[str, str, Sequence[tuple[str, float]]]] = [
        ("confidence", "How alike steps are, from 0 to 1", [("", window.confidence)]),
        ("stuck_seconds", "For how long nothing was sent, 0 if the job is not stuck",
         [("", 0.0 if window.stuck is None else window.stuck.since_s)]),
        ("verdict", "What limits the job", [(f'{{kind="{window.kind}"}}', 1.0)]),
    ]  # fmt: skip
    if explanation is not None:
        named += [
            ("step_seconds", "Time of a step", [("", explanation.step_s)]),
            ("part_seconds", "Parts of a step; together they are the step",
             [(f'{{part="{part}"}}', value_s) for part, value_s in explanation.account.items()]),
            ("transfer_low_seconds", "Least exposed transfer of a step",
             [("", window.transfer_s[0])]),
            ("transfer_high_seconds", "Most exposed transfer of a step",
             [("", window.transfer_s[1])]),
        ]  # fmt: skip
        late = getattr(explanation.verdict.findings[0], "ranks", ())
        named += [
            ("straggler", "1 for a rank that the verdict names",
             [(f'{{rank="{rank.rank}"}}', float(rank.rank in late)) for rank in window.ranks]),
        ]  # fmt: skip
        line_bps = None if window.run is None else window.run.facts.line_rate_bps
        if line_bps:
            named.append(
                ("link_utilization", "Rate while bytes flow, of the line rate",
                 [(f'{{rank="{rank.rank}"}}', rank.sent_bps / line_bps) for rank in window.ranks]),
            )  # fmt: skip
    for name, meaning in (
        ("computing", "Share of the time in which a thread ran"),
        ("sending", "Share in which bytes flowed and nothing ran"),
        ("waiting", "Share in which nothing ran or flowed"),
        ("delayed", "Share in which threads were ready and had no processor"),
        ("sent_bps", "Bits a second while bytes flow"),
        ("retransmits", "Segments sent again in this window"),
    ):
        of_ranks = [
            (f'{{rank="{rank.rank}"}}', float(getattr(rank, name))) for rank in window.ranks
        ]
        unit = {"sent_bps": "link_bits_per_second", "retransmits": "retransmits"}.get(name)
        named.append((unit or f"{name}_ratio", meaning, of_ranks))
    lines = []
    for name, meaning, values in named:
        lines += [f"# TYPE fullwire_{name} gauge", f"# HELP fullwire_{name} {meaning}"]
        lines += [f"fullwire_{name}{labels} {value!r}" for labels, value in values]
    return "\n".join([*lines, "# EOF", ""])


class Page:
    """The latest window, served to Prometheus."""

    def __init__(self) -> None:
        self.text = "# EOF\n"
        self.url = ""


@contextmanager
def served(place: str) -> Iterator[Page]:
    """Serve a page at `HOST:PORT`, or at all addresses of this host with `:PORT`."""
    host, colon, port = place.rpartition(":")
    if not colon or not port.isdigit() or int(port) > 65535:
        raise UsageError(f"--prometheus: expected HOST:PORT or :PORT, got {shown(place)}")
    page = Page()

    class Handler(BaseHTTPRequestHandler):
        timeout = 10  # a reader that stalls holds a thread no longer

        def do_GET(self) -> None:
            body = page.text.encode()
            self.send_response(200)
            self.send_header("Content-Type", _OPENMETRICS)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Keep the screen for the watch."""

    try:
        server = ThreadingHTTPServer((host.strip("[]"), int(port)), Handler)
    except OSError as error:
        raise UsageError(f"--prometheus {place}: {error.strerror or error}") from None
    server.daemon_threads = True
    page.url = f"http://{server.server_address[0]!s}:{server.server_address[1]}/metrics"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield page
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def on_signal(number: signal.Signals, live: Live) -> Iterator[None]:
    """Ask for a run on a signal."""
    before = signal.signal(number, live.ask_for_run)
    try:
        yield
    finally:
        signal.signal(number, before)
