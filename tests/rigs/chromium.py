"""A headless Chromium that a test steers through the DevTools protocol: Debian's package, one window per test."""

import base64
import itertools
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

from tests.rigs.waiting import LIMIT_S, until

OPTIONS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-port=0",
    "--no-first-run", "--disable-background-networking", "--disable-component-update", "--mute-audio",
    "--force-color-profile=srgb", "--hide-scrollbars", "--no-proxy-server",
)  # fmt: skip
KEYS = {"Escape": 27, "Enter": 13, "ArrowLeft": 37, "ArrowRight": 39}


def chromium() -> str:
    """The program; fails, because a page that no browser has shown is not tested."""
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    assert found, "no Chromium here; launch/test.sh installs Debian's package as root, else: apt-get install chromium"
    return found


class Page:
    """A tab. `errors` has every error on its console and every exception."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket, self._numbers = socket, itertools.count(1)
        self.errors: list[str] = []
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **words: Any) -> Any:
        """The answer to a command of the protocol."""
        number = next(self._numbers)
        self._socket.send(json.dumps({"id": number, "method": method, "params": words}))
        while True:
            message = json.loads(self._socket.recv(LIMIT_S))
            if message.get("id") == number:
                assert "error" not in message, message
                return message["result"]
            self._note(message)

    def _note(self, message: dict[str, Any]) -> None:
        words, method = message.get("params", {}), message.get("method")
        if method == "Runtime.exceptionThrown":
            details = words["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description") or details["text"])
        if method == "Runtime.consoleAPICalled" and words["type"] in ("error", "assert"):
            self.errors.append(str([argument.get("value") for argument in words["args"]]))
        if method == "Log.entryAdded" and words["entry"]["level"] == "error":
            self.errors.append(f"{words['entry']['text']} {words['entry'].get('url', '')}")

    def open(self, address: str) -> None:
        self.call("Page.navigate", url=address)

    def get(self, script: str) -> Any:
        """The value of a JavaScript expression; promises are awaited."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def until(self, script: str) -> Any:
        """The first true value of an expression; one that throws, because the page is not there yet, is not true."""

        def told() -> str:
            return f"{self.errors}\n{self.text()[:3000]}"

        return until(
            lambda: self.get(f"(() => {{ try {{ return {script} }} catch {{ return null }} }})()"), script, told=told
        )

    def text(self) -> str:
        return self.get("document.body.innerText")

    def has(self, text: str) -> None:
        """Wait until the page shows a text."""
        self.until(f"document.body.innerText.includes({json.dumps(text)})")

    def click(self, selector: str) -> None:
        self.until(f"document.querySelector({json.dumps(selector)}) !== null")
        self.get(f"document.querySelector({json.dumps(selector)}).click()")

    def press(self, key: str) -> None:
        code = KEYS.get(key) or ord(key.upper())
        text = {} if key in KEYS else {"text": key}
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, **text)

    def size(self, width: int, height: int = 900, dark: bool = False, scale: float = 1) -> None:
        """The window, and the theme that its system prefers."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=width < 600,
        )
        preference = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[preference])

    def picture(self, path: Path, whole: bool = False) -> None:
        """Save a PNG; `whole`: also of what one has to scroll to."""
        data = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"]
        path.write_bytes(base64.b64decode(data))


@contextmanager
def serving(folder: Path, *words: str) -> Iterator[tuple[str, int]]:
    """`slipstream web` on a free port; its address and process id."""
    command = [sys.executable, "-m", "launch.cli", "web", *words, "--port", "0"]
    with (folder / "web.log").open("wb") as log:
        server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        try:
            assert server.stdout is not None
            line = server.stdout.readline()
            assert "http://" in line, (folder / "web.log").read_text()
            yield line.split()[-1].partition("?")[0], server.pid
        finally:
            server.terminate()
            server.communicate(timeout=LIMIT_S)
        assert server.returncode == 0, "SIGTERM ends it, also while a browser listens"


@contextmanager
def browser(folder: Path) -> Iterator[Page]:
    """A browser with one empty tab; its profile is in `folder`."""
    profile = folder / "chromium"
    profile.mkdir()
    env = {**os.environ, "HOME": str(folder)}
    words = [chromium(), *OPTIONS, f"--user-data-dir={profile}", "about:blank"]
    with (folder / "chromium.log").open("wb") as log:
        process = subprocess.Popen(words, stdout=log, stderr=log, env=env)
    try:
        port = until(lambda: _port(profile), told=(folder / "chromium.log").read_text)
        with connect(f"ws://127.0.0.1:{port}{_tab(port)}", max_size=None, compression=None, proxy=None) as socket:
            yield Page(socket)
    finally:
        process.terminate()
        process.wait(LIMIT_S)
        for _ in range(100):  # helper processes of the browser may still write
            shutil.rmtree(profile, ignore_errors=True)
            if not profile.exists():
                break
            time.sleep(0.05)


def _port(profile: Path) -> str:
    file = profile / "DevToolsActivePort"
    lines = file.read_text().split("\n") if file.exists() else []
    return lines[0] if len(lines) > 1 else ""


def _tab(port: str) -> str:
    """The path of the first tab."""
    import urllib.request

    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def first() -> str:
        tabs = json.loads(opener.open(f"http://127.0.0.1:{port}/json/list", timeout=LIMIT_S).read())
        return next((t["webSocketDebuggerUrl"].partition(port)[2] for t in tabs if t["type"] == "page"), "")

    return until(first)
