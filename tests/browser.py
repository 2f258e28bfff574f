"""Headless Chromium over its DevTools protocol: what the tests of the page need of it."""

import base64
import itertools
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import httpx
from websockets.sync.client import connect

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

LIMIT_S = 60
"""Seconds after which a state of the page is given up, on the slowest machine."""

_KEYS = {
    "Enter": ("\r", 13),
    "Escape": ("", 27),
    "Tab": ("", 9),
    "ArrowRight": ("", 39),
    "ArrowLeft": ("", 37),
}
_FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"),
    *("--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--disable-extensions", "--mute-audio", "--remote-debugging-port=0", "--force-color-profile=srgb"),
)


class Browser:
    """A browser with a profile of its own, which is dropped at the end."""

    def __init__(self) -> None:
        assert PROGRAM is not None
        self._profile = tempfile.mkdtemp(prefix="octavo-browser-")
        command = [PROGRAM, *_FLAGS, f"--user-data-dir={self._profile}", "about:blank"]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        port_file = Path(self._profile) / "DevToolsActivePort"
        wait_until(lambda: port_file.exists() and port_file.read_text().count("\n") >= 1)
        self._address = f"127.0.0.1:{port_file.read_text().split()[0]}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._process.terminate()
        self._process.wait(LIMIT_S)
        shutil.rmtree(self._profile, ignore_errors=True)

    def page(self) -> "Page":
        """Open an empty tab."""
        target = httpx.put(f"http://{self._address}/json/new?about:blank", timeout=LIMIT_S).json()
        return Page(target["webSocketDebuggerUrl"])


class Page:
    """A tab; `errors` and `requests` are what its console and network have shown so far."""

    def __init__(self, address: str) -> None:
        self._open = ExitStack()
        self._socket = self._open.enter_context(connect(address, max_size=None))
        self._numbers = itertools.count(1)
        self.errors: list[str] = []
        self.requests: list[str] = []
        """URLs, of WebSockets too."""
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.call("Page.close")
        self._open.close()

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol and return its result."""
        number = next(self._numbers)
        self._socket.send(json.dumps({"id": number, "method": method, "params": parameters}))
        while True:
            message = json.loads(self._socket.recv(LIMIT_S))
            if message.get("id") == number:
                assert "error" not in message, message["error"]
                return message["result"]
            self._note(message)

    def _note(self, message: dict[str, Any]) -> None:
        facts = message.get("params", {})
        match message.get("method"):
            case "Runtime.exceptionThrown":
                self.errors.append(str(facts["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if facts["type"] in ("error", "warning", "assert"):
                self.errors.append(str(facts["args"]))
            case "Log.entryAdded" if facts["entry"]["level"] in ("error", "warning"):
                self.errors.append(str(facts["entry"]))
            case "Network.requestWillBeSent":
                self.requests.append(facts["request"]["url"])
            case "Network.webSocketCreated":
                self.requests.append(facts["url"])

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.wait_for("document.readyState === 'complete'")

    def show(self, width: int, height: int, *, dark: bool = False) -> None:
        """Set the size of the window and the colour scheme that the system prefers."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def eval(self, expression: str) -> Any:
        """Return the value of an expression, awaited if it is a promise."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def wait_for(self, expression: str) -> Any:
        """Wait until an expression is true, and return its value."""
        found: list[Any] = []

        def holds() -> bool:
            found[:] = [self.eval(expression)]
            return bool(found[0])

        wait_until(holds, expression)
        return found[0]

    def text(self, selector: str) -> str:
        return self.eval(f"document.querySelector({json.dumps(selector)}).textContent")

    def type(self, text: str) -> None:
        """Type into what has the focus."""
        self.call("Input.insertText", text=text)

    def press(self, key: str, *, shift: bool = False) -> None:
        text, code = _KEYS[key]
        facts = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": 8 * shift}
        if text:
            facts["text"] = text
        self.call("Input.dispatchKeyEvent", type="keyDown", **facts)
        facts.pop("text", None)
        self.call("Input.dispatchKeyEvent", type="keyUp", **facts)

    def hover(self, selector: str) -> None:
        box = self.eval(
            f"(({{x, y, width, height}}) => [x + width / 2, y + height / 2])"
            f"(document.querySelector({json.dumps(selector)}).getBoundingClientRect())"
        )
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=box[0], y=box[1])

    def click(self, selector: str) -> None:
        self.eval(f"document.querySelector({json.dumps(selector)}).click()")

    def screenshot(self, path: Path, *, whole: bool = False) -> None:
        """Write a PNG, of the window or of the whole page."""
        result = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(result["data"]))


def wait_until(condition: Callable[[], bool], what: str = "") -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.03)
