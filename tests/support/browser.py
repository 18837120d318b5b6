"""A page in a real headless Chromium, over a pipe: what it shows, what its console says, and keys that are pressed."""

import base64
import contextlib
import fcntl
import json
import os
import shutil
import signal
from collections.abc import Iterator
from io import RawIOBase
from pathlib import Path
from typing import Any, Self

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
_OPTIONS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--remote-debugging-pipe")


class Page:
    """One tab. `errors` has what its console, and exceptions in it, have said."""

    def __init__(self, write: RawIOBase, read: RawIOBase) -> None:
        self._write, self._read = write, read
        self._number, self._session, self._rest, self.errors = 0, {}, b"", list[str]()
        self._events: list[str] = []
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = {"sessionId": self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]}
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")

    def ask(self, method: str, **params: Any) -> Any:
        """The result of one command of the DevTools protocol."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params, **self._session}
        self._write.write(json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._number:
            self._note(answer)
        assert "error" not in answer, answer
        return answer["result"]

    def open(self, url: str, *, width: int = 1280, height: int = 900, theme: str = "light", scale: float = 1.0) -> Self:
        """Loads the page and waits until its scripts have run."""
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=width < 600)
        self.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}])
        for address in ("about:blank", url):  # a page that differs from the last in its hash only would not be loaded
            self._events.clear()
            self.ask("Page.navigate", url=address)
            while "Page.loadEventFired" not in self._events:
                self._note(self._next())
        self.ask("Page.bringToFront")
        return self

    def value(self, expression: str) -> Any:
        """The value of a JavaScript expression, after what waits for the next picture is done."""
        code = f"new Promise(done => requestAnimationFrame(() => setTimeout(() => done({expression}))))"
        result = self.ask("Runtime.evaluate", expression=code, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def press(self, key: str) -> None:
        code = {"Tab": 9, "ArrowRight": 39, "ArrowLeft": 37, "Enter": 13}[key]
        for kind in ("keyDown", "keyUp"):
            text = {"text": "\r"} if (key, kind) == ("Enter", "keyDown") else {}
            self.ask("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **text)

    def picture(self) -> bytes:
        """All of the page as PNG."""
        self.value("0")
        shot = self.ask("Page.captureScreenshot", captureBeyondViewport=True)
        return base64.b64decode(shot["data"])

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            read = self._read.read(1 << 20)
            assert read, "the browser has ended"
            self._rest += read
        line, self._rest = self._rest.split(b"\0", 1)
        return dict(json.loads(line))

    def _note(self, event: dict[str, Any]) -> None:
        method, params = event.get("method", ""), event.get("params", {})
        self._events.append(method)
        match method:
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                self.errors.append(str([it.get("value", it.get("description")) for it in params["args"]]))
            case "Runtime.exceptionThrown":
                self.errors.append(json.dumps(params["exceptionDetails"]))
            case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                self.errors.append(params["entry"]["text"])
            case "Network.requestWillBeSent" if not params["request"]["url"].startswith(("file:", "data:", "blob:", "about:")):
                self.errors.append(f"asked for {params['request']['url']}")


@contextlib.contextmanager
def browser(folder: Path) -> Iterator[Page]:
    """A tab of a browser whose own files are in `folder`."""
    assert CHROMIUM is not None
    (theirs, write), (read, theirs_too) = os.pipe(), os.pipe()
    # Chromium reads from 3 and writes to 4; far from these, so that neither is overwritten before it is copied.
    far = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10) for fd in (theirs, theirs_too)]
    log = os.open(folder / "log", os.O_CREAT | os.O_WRONLY)
    actions = [(os.POSIX_SPAWN_DUP2, *pair) for pair in zip((log, log, *far), (1, 2, 3, 4), strict=True)]
    pid = os.posix_spawn(CHROMIUM, [CHROMIUM, *_OPTIONS, f"--user-data-dir={folder}"], os.environ, file_actions=actions)
    for fd in (theirs, theirs_too, *far, log):
        os.close(fd)
    try:
        with os.fdopen(write, "wb", buffering=0) as to_browser, os.fdopen(read, "rb", buffering=0) as from_browser:
            yield Page(to_browser, from_browser)
    finally:
        os.kill(pid, signal.SIGTERM)
        os.waitpid(pid, 0)
