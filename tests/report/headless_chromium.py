"""A headless Chromium for tests, spoken to over a pipe: no port, no extra package, no network."""

from __future__ import annotations

import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from patience import patience

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)
PATIENCE_S = 60.0


PROGRAM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
needs_chromium = [
    pytest.mark.slow,
    pytest.mark.skipif(PROGRAM is None, reason="no Chromium on this machine"),
]


class Page:
    """One tab, with its errors, the addresses of its requests, and the names of all events."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._out, self._in = to_browser, from_browser
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self.errors: list[str] = []
        self.requests: list[str] = []
        self.events: list[str] = []

    def attach(self) -> None:
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        answer = self.send("Target.attachToTarget", targetId=target, flatten=True)
        self._session = answer["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._number:
            pass
        assert "error" not in answer, (method, answer["error"])
        return dict(answer["result"])

    def open(
        self, page: Path | str, width: int = 1280, dark: bool = False, touch: bool = False
    ) -> float:
        """Load a file or an address; return the seconds until its ``load`` event."""
        screen = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": touch}
        self.send("Emulation.setDeviceMetricsOverride", **screen)
        self.send("Emulation.setTouchEmulationEnabled", enabled=touch)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])
        elapsed = self.load(page)
        self.settle()
        return elapsed

    def load(self, page: Path | str) -> float:
        """Load a file or an address, maybe without scripts: nothing can be evaluated then."""
        for log in (self.errors, self.requests, self.events):
            log.clear()
        started = time.monotonic()
        self.send("Page.navigate", url=page if isinstance(page, str) else page.resolve().as_uri())
        while "Page.loadEventFired" not in self.events:
            self._next()
        return time.monotonic() - started

    def visible_text(self) -> str:
        """The text that a reader of the page gets, from the accessibility tree."""
        nodes = self.send("Accessibility.getFullAXTree")["nodes"]
        named = (node["name"] for node in nodes if not node["ignored"] and "name" in node)
        return " ".join(str(name.get("value", "")) for name in named)

    def evaluate(self, script: str) -> Any:
        """The value of a JavaScript expression; promises are awaited."""
        options = {"returnByValue": True, "awaitPromise": True}
        result = self.send("Runtime.evaluate", expression=script, **options)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def settle(self) -> None:
        """Wait until what was asked of the next frames has been drawn."""
        self.evaluate("new Promise(r => requestAnimationFrame(() => requestAnimationFrame(r)))")

    def wait_for(self, script: str) -> None:
        deadline = time.monotonic() + patience(PATIENCE_S)
        while not self.evaluate(script):
            assert time.monotonic() < deadline, f"not true after {PATIENCE_S:g} s: {script}"
            time.sleep(0.05)

    def press(self, key: str) -> None:
        text = {"text": key} if len(key) == 1 else {}
        self.send("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
        self.send("Input.dispatchKeyEvent", type="keyUp", key=key)
        self.settle()

    def mouse(self, kind: str, x: float, y: float) -> None:
        button = {} if kind == "Moved" else {"button": "left", "buttons": 1, "clickCount": 1}
        self.send("Input.dispatchMouseEvent", type=f"mouse{kind}", x=x, y=y, **button)

    def drag(self, start: tuple[float, float], across: float, touch: bool = False) -> None:
        """Drag to the right with the mouse or one finger."""
        x, y = start
        places = [(x + across * share, y) for share in (0, 0.5, 1)]
        for number, (x, y) in enumerate(places):
            if touch:
                kind, points = "touchMove" if number else "touchStart", [{"x": x, "y": y}]
                self.send("Input.dispatchTouchEvent", type=kind, touchPoints=points)
            elif number:
                drag = {"type": "mouseMoved", "button": "left", "buttons": 1}
                self.send("Input.dispatchMouseEvent", x=x, y=y, **drag)
            else:
                self.mouse("Pressed", x, y)
        if touch:
            self.send("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])
        else:
            self.mouse("Released", x, y)
        self.settle()

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], PATIENCE_S)
            assert ready, f"Chromium said nothing for {PATIENCE_S:.0f} s"
            chunk = os.read(self._in, 1 << 20)
            assert chunk, "Chromium closed its pipe"
            self._buffer += chunk
        text, self._buffer = self._buffer.split(b"\0", 1)
        message: dict[str, Any] = json.loads(text)
        self._note(message)
        return message

    def _note(self, message: dict[str, Any]) -> None:
        method, parameters = message.get("method", ""), message.get("params", {})
        self.events.append(method)
        if method == "Runtime.exceptionThrown":
            self.errors.append(str(parameters["exceptionDetails"]))
        elif method == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
            self.errors.append(parameters["entry"]["text"])
        elif method == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning"):
            self.errors.append(str(parameters["args"]))
        elif method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """One browser with a profile of its own for all tests; it is gone afterwards."""
    assert PROGRAM is not None
    child_in, to_browser = os.pipe()
    from_browser, child_out = os.pipe()
    # The browser reads descriptor 3 and writes 4; copies above them keep the two from colliding.
    high_in, high_out = (fcntl.fcntl(one, fcntl.F_DUPFD, 10) for one in (child_in, child_out))
    command = f'exec 3<&{high_in} 4>&{high_out}; exec "$0" "$@"'
    profile = f"--user-data-dir={tmp_path_factory.mktemp('profile')}"
    process = subprocess.Popen(
        ["bash", "-c", command, PROGRAM, *FLAGS, profile],
        pass_fds=(high_in, high_out),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    for descriptor in (child_in, child_out, high_in, high_out):
        os.close(descriptor)
    page = Page(to_browser, from_browser)
    try:
        page.attach()
        yield page
    finally:
        os.close(to_browser)
        process.terminate()
        try:
            process.wait(timeout=patience(10))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        os.close(from_browser)
