"""Controls headless Chromium through its DevTools protocol over a pipe.

The protocol: https://chromedevtools.github.io/devtools-protocol/
"""

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
SECONDS = 60  # maximum time to wait for an answer or for a page
TALLEST = 16_000  # pixels; Chromium cannot take larger pictures


def chromium() -> str | None:
    """Return the path of Chromium, or None if it is not installed."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """A running Chromium with an empty profile; a context manager that ends it.

    Args:
        program: path of Chromium.
    """

    def __init__(self, program: str) -> None:
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self._events: list[dict[str, Any]] = []
        self._unread = b""
        self._number = 0
        theirs, self._commands = os.pipe()
        self._answers, theirs_too = os.pipe()
        # Chromium reads file descriptor 3 and writes to 4. So the copies must have larger numbers.
        copies = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in (theirs, theirs_too)]

        def connect() -> None:
            os.dup2(copies[0], 3)
            os.dup2(copies[1], 4)

        flags = ["--headless", "--remote-debugging-pipe", "--no-first-run", "--disable-gpu"]
        flags += ["--hide-scrollbars", "--disable-dev-shm-usage", f"--user-data-dir={self._profile.name}"]
        if os.geteuid() == 0:  # the sandbox does not work for root
            flags.append("--no-sandbox")
        self._process = subprocess.Popen(
            [program, *flags, "about:blank"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            close_fds=False,  # keeps descriptors 3 and 4; exec closes Python's others
            preexec_fn=connect,
        )
        for end in (theirs, theirs_too, *copies):
            os.close(end)

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._commands)  # Chromium ends when its pipe is closed
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._answers)
        self._profile.cleanup()

    def page(self, width: int, height: int = 900, *, dark: bool = False) -> "Page":
        """Open an empty page of a size in pixels, in light or dark mode."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        return Page(self, session, width, height, dark)

    def call(self, method: str, session: str = "", **params: Any) -> dict[str, Any]:
        """Call a method of the protocol, and return its result."""
        self._number += 1
        command = {"id": self._number, "method": method, "params": params}
        text = json.dumps(command | ({"sessionId": session} if session else {})).encode() + b"\0"
        while text:
            text = text[os.write(self._commands, text) :]
        while (answer := self._next(time.monotonic() + SECONDS)).get("id") != self._number:
            self._events.append(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        return answer["result"]

    def events(self, session: str) -> list[dict[str, Any]]:
        """Return all events of a page that have arrived until now."""
        return [event for event in self._events if event.get("sessionId") == session]

    def _next(self, deadline: float) -> dict[str, Any]:
        """Return the next answer or event."""
        while b"\0" not in self._unread:
            ready, _, _ = select.select([self._answers], [], [], max(0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError(f"Chromium has not answered for {SECONDS} seconds")
            if not (read := os.read(self._answers, 2**20)):
                raise ConnectionError("Chromium has ended")
            self._unread += read
        text, self._unread = self._unread.split(b"\0", 1)
        return json.loads(text)


class Page:
    """A page in a browser; `Browser.page` makes it."""

    def __init__(self, browser: Browser, session: str, width: int, height: int, dark: bool) -> None:
        self.browser, self.session, self.width = browser, session, width
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._call("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, address: str) -> None:
        """Load an address, and wait for the page and its pictures."""
        failure = self._call("Page.navigate", url=address).get("errorText")
        if failure:
            raise ValueError(f"{address} cannot be opened: {failure}.")
        self.wait_until("document.readyState === 'complete' && [...document.images].every(i => i.complete)")

    def wait_until(self, script: str) -> None:
        """Wait until a JavaScript expression is true, even if the page reloads during the wait."""
        deadline = time.monotonic() + SECONDS
        while True:
            with contextlib.suppress(RuntimeError):  # While the page loads, the expression has no value.
                if self.value(script):
                    return
            if time.monotonic() > deadline:
                raise TimeoutError(f"after {SECONDS} seconds, {script} is still false")
            time.sleep(0.05)

    def value(self, script: str) -> Any:
        """Return the value of a JavaScript expression, as JSON; wait for the result of a promise."""
        answer = self._call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{script}: {answer['result'].get('description')}")
        return answer["result"].get("value")

    def picture(self, tallest: int = TALLEST) -> bytes:
        """Return a picture of the page from its top, at most `tallest` pixels high, as PNG."""
        height = min(tallest, TALLEST, self.value("document.documentElement.scrollHeight"))
        clip = {"x": 0, "y": 0, "width": self.width, "height": height, "scale": 1}
        answer = self._call("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
        return base64.b64decode(answer["data"])

    def errors(self) -> list[str]:
        """Return the errors that the page has logged in the console until now."""
        self.value("0")  # this call also receives the events that Chromium has already sent
        found = []
        for event in self.browser.events(self.session):
            params = event["params"]
            if event["method"] == "Runtime.exceptionThrown":
                details = params["exceptionDetails"]
                found.append(details.get("exception", {}).get("description", details["text"]))
            elif event["method"] == "Runtime.consoleAPICalled" and params["type"] in ("error", "assert"):
                found.append(" ".join(str(argument.get("value")) for argument in params["args"]))
            elif event["method"] == "Log.entryAdded" and params["entry"]["level"] == "error":
                found.append(params["entry"]["text"])
        return found

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        return self.browser.call(method, self.session, **params)
