"""A real Chromium without a window, driven over a pipe with its own protocol."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PATIENCE_S = 60  # for an answer, on a machine that is busy
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-default-apps",
    "--no-first-run",
    "--disable-dev-shm-usage",
    "--mute-audio",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)


class Browser:
    """One page in a browser, with everything that it logged and asked for."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._writing, self._reading = to_browser, from_browser
        self._buffer, self._number, self._session = b"", 0, ""
        self.events: list[dict[str, Any]] = []
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        attached = self.ask("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")

    def ask(self, method: str, **params: Any) -> Any:
        """Call a method of the protocol and wait for its answer."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._writing, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._number:
            self.events.append(answer)
        assert "error" not in answer, answer
        return answer["result"]

    def _next(self) -> dict[str, Any]:
        end_s = time.monotonic() + PATIENCE_S
        while b"\0" not in self._buffer:
            assert time.monotonic() < end_s, "the browser does not answer"
            piece = os.read(self._reading, 1 << 16)
            assert piece, "the browser has gone"
            self._buffer += piece
        message, _, self._buffer = self._buffer.partition(b"\0")
        shown: dict[str, Any] = json.loads(message)
        return shown

    def open(self, page: Path) -> None:
        """Open a file, and wait until it is drawn."""
        self.ask("Page.navigate", url=page.resolve().as_uri())
        self.run(
            "new Promise((done) => { const drawn = () => requestAnimationFrame(() => setTimeout("
            "done, 50)); document.readyState === 'complete' ? drawn() : "
            "addEventListener('load', drawn); })"
        )

    def run(self, code: str) -> Any:
        """Evaluate an expression in the page; a promise is waited for."""
        found = self.ask("Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def press(self, *keys: str) -> None:
        """Press keys, one after the other, on whatever has the focus."""
        for key in keys:
            text = {"text": key} if len(key) == 1 else {}
            for kind in ("keyDown", "keyUp"):
                self.ask(
                    "Input.dispatchKeyEvent",
                    type=kind,
                    key=key,
                    code=key,
                    windowsVirtualKeyCode=_CODES.get(key, 0),
                    **(text if kind == "keyDown" else {}),
                )

    def screen(self, width: int, height: int, *, dark: bool = False) -> None:
        """Be a screen of this size."""
        self.ask(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 500,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.ask("Emulation.setEmulatedMedia", features=[scheme])

    def picture(self) -> bytes:
        """Return the whole page as PNG."""
        shot = self.ask("Page.captureScreenshot", captureBeyondViewport=True)
        return base64.b64decode(shot["data"])

    def end(self) -> None:
        """Ask the browser to end, with all its processes."""
        self._session = ""
        self.ask("Browser.close")

    def complaints(self) -> list[str]:
        """Return all that the console was told of, and exceptions that nobody caught."""
        return [
            json.dumps(event["params"])
            for event in self.events
            if event.get("method")
            in ("Log.entryAdded", "Runtime.exceptionThrown", "Runtime.consoleAPICalled")
        ]

    def requests(self) -> list[str]:
        """Return every address that was asked for."""
        return [
            event["params"]["request"]["url"]
            for event in self.events
            if event.get("method") == "Network.requestWillBeSent"
        ]


_CODES = {"ArrowLeft": 37, "ArrowRight": 39, "Home": 36, "End": 35, "Tab": 9}


@contextmanager
def browser(program: str, place: Path, flags: Sequence[str] = ()) -> Iterator[Browser]:
    """Start a browser with a profile of its own, and end it."""
    to_it, from_us = os.pipe()
    from_it, to_us = os.pipe()
    command = [program, *FLAGS, *flags, f"--user-data-dir={place}", "about:blank"]
    # The protocol is spoken on descriptors 3 and 4.
    shell = f'exec "$@" 3<&{to_it} 4>&{to_us}'
    started = subprocess.Popen(
        ["bash", "-c", shell, "bash", *command],
        pass_fds=(to_it, to_us),
        env={**os.environ, "TMPDIR": "/tmp"},  # it puts a socket there, whose name has to be short
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(to_it)
    os.close(to_us)
    try:
        page = Browser(from_us, from_it)
        yield page
        page.end()
    finally:
        try:
            started.wait(20)
        except subprocess.TimeoutExpired:
            started.kill()
            started.wait()
        os.close(from_us)
        os.close(from_it)
