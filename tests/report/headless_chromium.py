"""A headless Chromium for tests, spoken to over a pipe: no port, no extra package, no network."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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


def find_chromium() -> str | None:
    return next(
        filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
    )


class Page:
    """One tab."""

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
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                return dict(answer["result"])

    def open(
        self,
        page: Path | str,
        width: int = 1280,
        height: int = 900,
        dark: bool = False,
        touch: bool = False,
        ratio: float = 1.0,
    ) -> float:
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=ratio,
            mobile=touch,
        )
        self.send("Emulation.setTouchEmulationEnabled", enabled=touch)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])
        self.errors.clear()
        self.requests.clear()
        self.events.clear()
        started = time.monotonic()
        url = page if isinstance(page, str) else page.resolve().as_uri()
        self.send("Page.navigate", url=url)
        while "Page.loadEventFired" not in self.events:
            self._next()
        elapsed = time.monotonic() - started
        self.settle()
        return elapsed

    def open_without_scripts(self, path: Path) -> None:
        self.events.clear()
        self.send("Page.navigate", url=path.resolve().as_uri())
        while "Page.loadEventFired" not in self.events:
            self._next()

    def visible_text(self) -> str:
        nodes = self.send("Accessibility.getFullAXTree")["nodes"]
        return " ".join(
            str(node["name"].get("value", ""))
            for node in nodes
            if not node["ignored"] and "name" in node
        )

    def evaluate(self, script: str) -> Any:
        result = self.send(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def settle(self) -> None:
        self.evaluate("new Promise(r => requestAnimationFrame(() => requestAnimationFrame(r)))")

    def wait_for(self, script: str, patience_s: float = PATIENCE_S) -> None:
        deadline = time.monotonic() + patience(patience_s)
        while not self.evaluate(script):
            assert time.monotonic() < deadline, f"not true after {patience_s:g} s: {script}"
            time.sleep(0.05)

    def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self.send(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                **({"text": key} if len(key) == 1 and kind == "keyDown" else {}),
            )
        self.settle()

    def drag(
        self, start: tuple[float, float], end: tuple[float, float], touch: bool = False
    ) -> None:
        steps = [
            (start[0] + (end[0] - start[0]) * i / 10, start[1] + (end[1] - start[1]) * i / 10)
            for i in range(11)
        ]
        for i, (x, y) in enumerate(steps):
            if touch:
                kind = "touchStart" if i == 0 else "touchMove"
                self.send("Input.dispatchTouchEvent", type=kind, touchPoints=[{"x": x, "y": y}])
            else:
                kind = "mousePressed" if i == 0 else "mouseMoved"
                self.send(
                    "Input.dispatchMouseEvent",
                    type=kind,
                    x=x,
                    y=y,
                    button="left",
                    buttons=1,
                    clickCount=1,
                )
        if touch:
            self.send("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])
        else:
            self.send(
                "Input.dispatchMouseEvent",
                type="mouseReleased",
                x=end[0],
                y=end[1],
                button="left",
                clickCount=1,
            )
        self.settle()

    def screenshot(self, path: Path, whole: bool = True) -> Path:
        self.settle()
        shot = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))
        return path

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


@contextmanager
def chromium(profile: Path) -> Iterator[Page]:
    program = find_chromium()
    assert program is not None
    child_in, to_browser = os.pipe()
    from_browser, child_out = os.pipe()
    # The browser reads descriptor 3 and writes 4; copies above them keep the two from colliding.
    high_in, high_out = _above(child_in), _above(child_out)
    command = f'exec 3<&{high_in} 4>&{high_out}; exec "$0" "$@"'
    process = subprocess.Popen(
        ["bash", "-c", command, program, *FLAGS, f"--user-data-dir={profile}"],
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


def _above(descriptor: int) -> int:
    import fcntl

    return fcntl.fcntl(descriptor, fcntl.F_DUPFD, 10)
