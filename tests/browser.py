"""A real Chromium without a window, driven over a pipe with its own protocol."""

from __future__ import annotations

import base64
import json
import os
import struct
import subprocess
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

PATIENCE_S = 60  # for an answer, on a busy machine
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
    """One page in a browser, with its log and its requests."""

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

    def open(self, page: Path, hash_: str = "") -> None:
        """Open a file, and wait until it is drawn."""
        self.leave()  # otherwise a URL that differs only in its hash would load nothing
        self.ask("Page.navigate", url=page.resolve().as_uri() + hash_)
        self.run(
            "new Promise((done) => { const drawn = () => requestAnimationFrame(() => setTimeout("
            "done, 50)); document.readyState === 'complete' ? drawn() : "
            "addEventListener('load', drawn); })"
        )

    def leave(self) -> None:
        """Open an empty page, and wait for it."""
        self.ask("Page.navigate", url="about:blank")
        self.run("1")

    def settle(self) -> None:
        """Wait until a change of the layout is drawn: its observer asks for a frame of its own."""
        self.run(
            "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => "
            "setTimeout(done, 50))))"
        )

    def run(self, code: str) -> Any:
        """Evaluate an expression in the page, and wait for a promise."""
        found = self.ask("Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def press(self, *keys: str) -> None:
        """Press keys, one after the other, on the element with the focus."""
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
        """Set the size of the screen."""
        self.ask(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 500,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.ask("Emulation.setEmulatedMedia", features=[scheme])

    def picture(self, of: str = "html") -> bytes:
        """Return the whole page, or an element of it, as PNG."""
        clip = self.run(
            f"(() => {{ const at = document.querySelector({of!r}).getBoundingClientRect();"
            " return { x: at.x + scrollX, y: at.y + scrollY, width: at.width, height: at.height,"
            " scale: 1 }; })()"
        )
        shot = self.ask("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        return base64.b64decode(shot["data"])

    def end(self) -> None:
        """Ask the browser to end, with all its processes."""
        self._session = ""
        self.ask("Browser.close")

    def complaints(self) -> list[str]:
        """Return all messages of the console, and the uncaught exceptions."""
        return [
            json.dumps(event["params"])
            for event in self.events
            if event.get("method")
            in ("Log.entryAdded", "Runtime.exceptionThrown", "Runtime.consoleAPICalled")
        ]

    def requests(self) -> list[str]:
        """Return the address of every request."""
        return [
            event["params"]["request"]["url"]
            for event in self.events
            if event.get("method") == "Network.requestWillBeSent"
        ]


def pixels(png: bytes) -> NDArray[np.uint8]:
    """Return the rows, columns and colours of a PNG as a browser writes it, with 8 bits."""
    at, header, packed = 8, b"", b""
    while at < len(png):
        size, kind = struct.unpack_from(">I4s", png, at)
        piece = png[at + 8 : at + 8 + size]
        header, packed = (piece, packed) if kind == b"IHDR" else (header, packed)
        packed += piece if kind == b"IDAT" else b""
        at += size + 12
    width, height, depth, colour, *_, interlaced = struct.unpack(">IIBBBBB", header)
    assert (depth, interlaced) == (8, 0)
    bytes_ = {2: 3, 6: 4}[colour]
    rows = np.frombuffer(zlib.decompress(packed), np.uint8).reshape(height, 1 + width * bytes_)
    shown = np.zeros(
        (height + 1, width + 1, bytes_), np.uint8
    )  # with the edge that filters look at
    for number, row in enumerate(rows, 1):
        values = row[1:].reshape(width, bytes_)
        above = shown[number - 1]
        if row[0] == 0:
            shown[number, 1:] = values
        elif row[0] == 1:
            shown[number, 1:] = np.cumsum(values, axis=0, dtype=np.uint8)
        elif row[0] == 2:
            shown[number, 1:] = values + above[1:]
        else:
            _unfiltered(shown[number], values, above, is_paeth=row[0] == 4)
    return shown[1:, 1:, :3]


def png(picture: NDArray[np.uint8]) -> bytes:
    """Return rows, columns and colours as PNG."""
    height, width, _ = picture.shape
    rows = b"".join(b"\0" + row.tobytes() for row in picture)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    pieces = ((b"IHDR", header), (b"IDAT", zlib.compress(rows, 9)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(piece)) + kind + piece + struct.pack(">I", zlib.crc32(kind + piece))
        for kind, piece in pieces
    )


def _unfiltered(
    row: NDArray[np.uint8], values: NDArray[np.uint8], above: NDArray[np.uint8], *, is_paeth: bool
) -> None:
    """Undo the filters that look at the left and above at once (PNG, part 9)."""
    up, found = above.tolist(), [[0] * row.shape[1]]
    for place, given in enumerate(values.tolist(), 1):
        left, point = found[-1], []
        for value, a, b, c in zip(given, left, up[place], up[place - 1], strict=True):
            guess = (a + b) // 2
            if is_paeth:
                near = a + b - c
                guess = min((abs(near - a), 0, a), (abs(near - b), 1, b), (abs(near - c), 2, c))[2]
            point.append((value + guess) % 256)
        found.append(point)
    row[:] = found


_CODES = {"ArrowLeft": 37, "ArrowRight": 39, "Home": 36, "End": 35, "Tab": 9}


@contextmanager
def browser(program: str, place: Path, flags: Sequence[str] = ()) -> Iterator[Browser]:
    """Start a browser with a profile of its own, and end it."""
    to_it, from_us = os.pipe()
    from_it, to_us = os.pipe()
    command = [program, *FLAGS, *flags, f"--user-data-dir={place}", "about:blank"]
    # The protocol uses descriptors 3 and 4.
    shell = f'exec "$@" 3<&{to_it} 4>&{to_us}'
    started = subprocess.Popen(
        ["bash", "-c", shell, "bash", *command],
        pass_fds=(to_it, to_us),
        # the browser puts a socket there, and names of sockets must be short
        env={**os.environ, "TMPDIR": "/tmp"},
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
