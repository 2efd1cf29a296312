"""A watch that goes on: a screen, lines of JSON, OpenMetrics for Prometheus, alerts."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import queue
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import urllib.request
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Any, TextIO, TypeAlias
from urllib.parse import unquote

from fullwire.answers.inside import watching_recording
from fullwire.answers.opening import write
from fullwire.answers.watched import SeenRank, Watched
from fullwire.cli.options import print_json
from fullwire.cli.telling import tell
from fullwire.errors import UsageError
from fullwire.report.as_data import watched_object
from fullwire.units import show_bytes, show_rate, show_time, shown, visible
from fullwire.version import __version__
from fullwire.words import sentence

_BARS = "▁▂▃▄▅▆▇█"
_MOST_RANKS = 16  # of the screen
_LINE = 24  # windows of the line of past steps
_MOST_COMMANDS = 4  # of --exec that run at once
_HOUR_S = 3600.0
_ERASE = "\r\x1b[K"
_OTLP_PATH, _OTLP_S, _MOST_WINDOWS = "/v1/metrics", 5.0, 64
_OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"


@dataclass(kw_only=True)
class Live:
    """Shows windows as they come; remembers hours in one line each."""

    is_json: bool
    out: str | None
    command: str | None  # of --exec
    page: Page | None
    collector: Collector | None = None
    stream: TextIO = field(default_factory=lambda: sys.stdout)
    is_line: bool = False  # one line that is written over: the job writes to this terminal, too

    def __post_init__(self) -> None:
        self._screen = self.stream.isatty() and not self.is_json
        self._lines = 0
        self._steps: deque[float | None] = deque(maxlen=_LINE)
        self._said: tuple[object, ...] = ()
        self._hour: list[float] = []
        self._hour_ends_s = _HOUR_S
        self._running: list[subprocess.Popen[bytes]] = []
        self._wants_run = False
        self._runs = 0
        if self.command is not None and not shutil.which((shlex.split(self.command) or [""])[0]):
            raise UsageError(f"--exec: expected a command, got {shown(self.command)}")

    def ask_for_run(self, _number: int, _frame: FrameType | None) -> None:
        """Write what was seen as a run after the next window (SIGUSR1)."""
        self._wants_run = True

    def show(self, window: Watched, elapsed_s: float) -> None:
        """Show a window, and act on its answer."""
        self._steps.append(window.step_s)
        if window.step_s is not None:
            self._hour.append(window.step_s)
        if self.page is not None:
            self.page.text = open_metrics(window)
        if self.collector is not None and (problem := self.collector.give(window)):
            self._say(problem)
        if self.is_json:
            print_json(watched_object(window))
            sys.stdout.flush()
        elif self._screen and self.is_line:
            step = "" if window.step_s is None else f"step {show_time(window.step_s)}, "
            line = f"fullwire: {step}{visible(window.sentence)}"
            self.stream.write(f"{_ERASE}{line[: shutil.get_terminal_size().columns - 1]}\r")
            self.stream.flush()
        elif self._screen:
            lines = [
                line[: shutil.get_terminal_size().columns - 1] for line in self._lines_of(window)
            ]
            back = f"\x1b[{self._lines}F\x1b[J" if self._lines else ""
            self.stream.write(back + "".join(f"{line}\n" for line in lines))
            self.stream.flush()
            self._lines = len(lines)
        elif (said := _gist(window)) != self._said:
            self._said = said
            print(
                f"{show_time(elapsed_s)}: {visible(window.sentence)}", file=self.stream, flush=True
            )
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
        """Leave the screen to the summary, and send the last window."""
        self._clear()
        if self.collector is not None and (problem := self.collector.close()):
            tell(problem)

    def _clear(self) -> None:
        if self._screen and self.is_line:
            self.stream.write(_ERASE)
        elif self._screen and self._lines:
            self.stream.write(f"\x1b[{self._lines}F\x1b[J")
        self.stream.flush()

    def _say(self, line: str) -> None:
        self._clear()
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
            self._say("no run was written, for lack of steps")
            return
        self._runs += 1
        path = Path(self.out or "watched.run")
        path = path.with_name(f"{path.stem}-{self._runs}{path.suffix}")
        self._say(f"written: {write(window.run, path)}")

    def _lines_of(self, window: Watched) -> Iterator[str]:
        job, step_s = window.job, window.step_s
        yield from textwrap.wrap(visible(window.sentence), shutil.get_terminal_size().columns - 1)
        steps = [step for step in self._steps if step is not None]
        if step_s is not None:
            low, high = min(steps), max(steps)
            line = "".join(
                " " if step is None else _BARS[round((step - low) / (high - low or 1) * 7)]
                for step in self._steps
            )
            sent = [rank.sent_bytes for rank in window.ranks]
            a_step = max(sent) / max(window.seconds / step_s, 1)
            yield f"  step {show_time(step_s)}  {line}  {show_bytes(a_step)} a step and rank"
        of_hosts = 13 if window.hosts or window.source == "inside" else 0
        host = f"{'host':>{of_hosts}}" if of_hosts else ""
        yield f"  rank{host}       pid  computing  sending  waiting  delayed        rate  again"
        places = {
            rank.rank: f"{visible(rank.host)[-of_hosts:]:>{of_hosts}}" * bool(of_hosts)
            + f" {rank.pid or '':>9}"
            for rank in job.ranks
        }
        for rank in window.ranks[:_MOST_RANKS]:
            yield (
                f"  {rank.rank:>4}{places[rank.rank]}  {rank.computing:>9.0%}"
                f"  {rank.sending:>7.0%}  {rank.waiting:>7.0%}  {rank.delayed:>7.0%}"
                f"  {show_rate(rank.sent_bps):>10}  {rank.retransmits:>5.0f}"
                + ("" if rank.gpu_busy is None else f"  GPU {rank.gpu_busy:.0%}")
            )
        if len(window.ranks) > _MOST_RANKS:
            yield f"  and {len(window.ranks) - _MOST_RANKS} more ranks"
        for note in window.notes:
            yield f"note: {visible(sentence(note))}"
        if window.source == "outside":
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


Metric: TypeAlias = tuple[str, str, Sequence[tuple[Mapping[str, str], float]]]


def metrics_of(window: Watched) -> list[Metric]:
    """Return what a window measures: name, meaning, and values with their labels."""
    found = window.explanation
    stuck_s = 0.0 if window.stuck is None else window.stuck.since_s
    named: list[Metric] = [
        ("confidence", "How alike steps are, from 0 to 1", [({}, window.confidence)]),
        ("stuck_seconds", "Time since the last bytes were sent, 0 if the job runs",
         [({}, stuck_s)]),
        ("verdict", "The cause that limits the job", [({"kind": window.kind}, 1.0)]),
    ]  # fmt: skip
    if window.hosts:
        told = [({"host": host.host}, float(not host.problem)) for host in window.hosts]
        named.append(("host_watched", "1 for a host that is watched, 0 for one that is not", told))

    def of_ranks(value: Callable[[SeenRank], float]) -> list[tuple[Mapping[str, str], float]]:
        return [({"rank": str(rank.rank)}, float(value(rank))) for rank in window.ranks]

    if window.step_s is not None:
        named.append(("step_seconds", "Time of a step", [({}, window.step_s)]))
    if found is not None:
        low_s, high_s = window.transfer_s
        late = found.verdict.ranks
        named += [
            ("part_seconds", "Parts of a step; together they are the step",
             [({"part": part}, value_s) for part, value_s in found.account.items()]),
            ("transfer_low_seconds", "Least exposed transfer of a step", [({}, low_s)]),
            ("transfer_high_seconds", "Most exposed transfer of a step", [({}, high_s)]),
            ("straggler", "1 for a rank that the verdict names",
             of_ranks(lambda rank: rank.rank in late)),
        ]  # fmt: skip
        line_bps = None if window.run is None else window.run.facts.line_rate_bps
        if line_bps:
            used = of_ranks(lambda rank: rank.sent_bps / line_bps)
            named.append(("link_utilization", "Rate while bytes flow, of the line rate", used))
    return [
        *named,
        ("computing_ratio", "Share of the time in which a thread ran",
         of_ranks(lambda rank: rank.computing)),
        ("sending_ratio", "Share in which bytes flowed and nothing ran",
         of_ranks(lambda rank: rank.sending)),
        ("waiting_ratio", "Share in which nothing ran or flowed",
         of_ranks(lambda rank: rank.waiting)),
        ("delayed_ratio", "Share in which threads were ready and had no processor",
         of_ranks(lambda rank: rank.delayed)),
        ("link_bits_per_second", "Bits a second while bytes flow",
         of_ranks(lambda rank: rank.sent_bps)),
        ("retransmits", "Segments sent again in this window",
         of_ranks(lambda rank: rank.retransmits)),
        *_where_told(window),
    ]  # fmt: skip


def _where_told(window: Watched) -> Iterator[Metric]:
    of_rank: Callable[[SeenRank], float | None]
    for name, meaning, of_rank in (
        ("gpu_busy_ratio", "Share of the time in which a kernel ran, as NVML tells it",
         lambda rank: rank.gpu_busy),
        ("gpu_pcie_bits_per_second", "Bits a second over PCIe, both ways",
         lambda rank: rank.gpu_pcie_bps),
        ("gpu_sm_active_ratio", "Mean share of the GPU's processors that worked, as NVML tells it",
         lambda rank: rank.gpu_sm_active),
        ("memory_bytes", "Memory in use",
         lambda rank: rank.memory_bytes),
        ("read_bytes_per_second", "Bytes a second from disks",
         lambda rank: rank.read_bytes_s),
        ("faults_per_second", "Pages a second that had to come from a disk",
         lambda rank: rank.faults_s),
        ("connections_sending", "Mean count of connections with bytes to send or to acknowledge",
         lambda rank: rank.connections_sending),
        ("limited_by_receiver_ratio", "Share of the sending time without room at the receiver",
         lambda rank: rank.limited_by_receiver),
        ("limited_by_buffer_ratio", "Share of the sending time without room in the send buffer",
         lambda rank: rank.limited_by_buffer),
        ("round_trip_seconds", "Mean time from a sent byte to its acknowledgement",
         lambda rank: rank.round_trip_s),
    ):  # fmt: skip
        told = [
            ({"rank": str(rank.rank)}, value)
            for rank in window.ranks
            if (value := of_rank(rank)) is not None
        ]
        if told:
            yield name, meaning, told


def open_metrics(window: Watched) -> str:
    """Return a window as OpenMetrics text, which Prometheus reads."""
    lines = []
    for name, meaning, values in metrics_of(window):
        lines += [f"# TYPE fullwire_{name} gauge", f"# HELP fullwire_{name} {meaning}"]
        for labels, value in values:
            # JSON escapes quotes and line ends as OpenMetrics does.
            told = ",".join(
                f"{key}={json.dumps(label, ensure_ascii=False)}" for key, label in labels.items()
            )
            lines.append(f"fullwire_{name}{f'{{{told}}}' if told else ''} {value!r}")
    return "\n".join([*lines, "# EOF", ""])


def otlp(window: Watched, now_ns: int) -> bytes:
    """Return a window as the JSON that OTLP over HTTP takes (opentelemetry-proto 1.x)."""

    def attributes(labels: Mapping[str, str]) -> list[dict[str, Any]]:
        return [{"key": key, "value": {"stringValue": text}} for key, text in labels.items()]

    metrics = [
        {
            "name": f"fullwire.{name}",
            "description": meaning,
            "gauge": {
                "dataPoints": [
                    {
                        "timeUnixNano": str(now_ns),
                        "asDouble": value,
                        "attributes": attributes(labels),
                    }
                    for labels, value in values
                ]
            },
        }
        for name, meaning, values in metrics_of(window)
    ]
    command = window.job.ranks[0].command if window.job.ranks else ""
    resource = {
        "service.name": "fullwire",
        "host.name": socket.gethostname(),
        "process.command_line": command,
    }
    told = {
        "resource": {"attributes": attributes(resource)},
        "scopeMetrics": [
            {"scope": {"name": "fullwire.watch", "version": __version__}, "metrics": metrics}
        ],
    }
    return json.dumps({"resourceMetrics": [told]}).encode()


class Collector:
    """Sends windows to an OpenTelemetry collector; a collector that stalls holds up nothing."""

    def __init__(self, url: str) -> None:
        if not re.fullmatch(r"https?://[^\s/]+\S*", url, re.ASCII):
            raise UsageError(f"--otlp: expected http://HOST:4318, got {shown(url)}")
        self._url = url if url.endswith(_OTLP_PATH) else url.rstrip("/") + _OTLP_PATH
        self._waiting: queue.Queue[bytes | None] = queue.Queue(_MOST_WINDOWS)
        self._problem = ""
        # As for every exporter of OpenTelemetry: name=value,name=value, percent-encoded.
        told = os.environ.get("OTEL_EXPORTER_OTLP_HEADERS", "")
        pairs = (pair.partition("=") for pair in told.split(",") if "=" in pair)
        self._headers = {name.strip(): unquote(value.strip()) for name, _, value in pairs}
        self._sender = threading.Thread(target=self.send_all, daemon=True)
        self._sender.start()

    def give(self, window: Watched) -> str:
        """Send a window soon; return what went wrong since the last one, if that is new."""
        with contextlib.suppress(queue.Full):  # it stalls: later windows tell more
            self._waiting.put_nowait(otlp(window, time.time_ns()))
        told, self._problem = self._problem, ""
        return told

    def send_all(self) -> None:
        """Send windows until there are no more."""
        before = ""
        while (body := self._waiting.get()) is not None:
            request = urllib.request.Request(
                self._url, body, {"Content-Type": "application/json", **self._headers}
            )
            try:
                with urllib.request.urlopen(request, timeout=_OTLP_S):
                    problem = ""
            except (OSError, ValueError, http.client.HTTPException) as error:
                problem = f"--otlp {self._url}: {error}"
            if problem != before:
                self._problem = problem or f"--otlp {self._url}: it answers again"
            before = problem

    def close(self) -> str:
        """Send what waits, for a few seconds; return what went wrong."""
        with contextlib.suppress(queue.Full):
            self._waiting.put_nowait(None)
        self._sender.join(_OTLP_S)
        return self._problem


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
def recording_shown(directory: Path) -> Iterator[None]:
    """Show a job that is being recorded on standard error, while the block runs."""
    ended = threading.Event()
    live = Live(
        is_json=False,
        out=None,
        command=None,
        page=None,
        stream=sys.stderr,
        is_line=sys.stdout.isatty(),
    )

    def tell_windows() -> None:
        begun_s = time.monotonic()
        for window in watching_recording(directory, ended=ended):
            live.show(window, time.monotonic() - begun_s)

    teller = threading.Thread(target=tell_windows, daemon=True)
    teller.start()
    try:
        yield
    finally:
        ended.set()
        teller.join()
        live.finish()


@contextmanager
def on_signal(number: signal.Signals, live: Live) -> Iterator[None]:
    """Ask for a run on a signal."""
    before = signal.signal(number, live.ask_for_run)
    try:
        yield
    finally:
        signal.signal(number, before)
