"""A real browser for tests: chromium, spoken to in the DevTools protocol over a pipe. `make browser` installs Debian's."""

import base64
import io
import json
import os
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.image import imread
from numpy.typing import NDArray

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
MISSING = "chromium is not installed: run make browser, or set QUANTRY_NO_BROWSER=1 to go without these tests"
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--disable-dev-shm-usage", "--no-first-run", "--disable-extensions", "--disable-background-networking", "--disable-component-update", "--force-device-scale-factor=1", "--remote-debugging-pipe")  # fmt: skip
# The protocol's pipes are the descriptors 3 and 4.
STARTER = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); os.execv(sys.argv[3], sys.argv[3:])"
)
PATIENCE = 60  # seconds for one answer


class Browser:
    """One page at a time, with its log messages and requests."""

    def __init__(self, home: Path) -> None:
        program = next(filter(None, map(shutil.which, NAMES)), None)
        assert program, MISSING
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        with (home / "stderr").open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", STARTER, str(theirs_in), str(theirs_out), program, *FLAGS, f"--user-data-dir={home / 'profile'}", "about:blank"],
                pass_fds=(theirs_in, theirs_out), stdout=subprocess.DEVNULL, stderr=log, stdin=subprocess.DEVNULL,
            )  # fmt: skip
        os.close(theirs_in)
        os.close(theirs_out)
        self._buffer = b""
        self._count = 0
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        targets = self.call("Target.getTargets")["targetInfos"]
        pages = [target for target in targets if target["type"] == "page"]
        self._session = self.call("Target.attachToTarget", targetId=pages[0]["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def close(self) -> None:
        self._session = None
        try:
            self.call("Browser.close")
        finally:
            os.close(self._out)
            os.close(self._in)
            try:
                self._process.wait(15)
            except subprocess.TimeoutExpired:
                self._process.kill()

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._count += 1
        message = {"id": self._count, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._count:
                assert "error" not in answer, f"{method}: {answer['error']}"
                result: dict[str, Any] = answer["result"]
                return result
            self.events.append(answer)

    def open(self, file: Path, *, width: int = 900, dark: bool = False, media: str = "screen") -> None:
        """Loads a file in a window of this width, and waits for it."""
        self.events.clear()
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", media=media, features=scheme)
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        self.call("Page.navigate", url=file.as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._next())

    def evaluate(self, expression: str) -> Any:
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def screenshot(self) -> NDArray[np.uint8]:
        """Returns the whole page, as rows of RGB pixels."""
        taken = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        return decoded(base64.b64decode(taken["data"]))

    def complaints(self) -> list[str]:
        """Returns what a console would show: messages, errors, and violations of the page's policy."""
        kinds = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")
        return [json.dumps(event["params"]) for event in self.events if event.get("method") in kinds]

    def requests(self) -> list[str]:
        """Returns every address that the page requested."""
        sent = [event for event in self.events if event.get("method") == "Network.requestWillBeSent"]
        return [str(event["params"]["request"]["url"]) for event in sent]

    def _next(self) -> dict[str, Any]:
        limit = time.monotonic() + PATIENCE
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], max(limit - time.monotonic(), 0))
            assert ready, f"chromium gave no answer in {PATIENCE} s"
            got = os.read(self._in, 1 << 20)
            assert got, "chromium has ended"
            self._buffer += got
        message, _, self._buffer = self._buffer.partition(b"\0")
        answer: dict[str, Any] = json.loads(message)
        return answer


def decoded(png: bytes) -> NDArray[np.uint8]:
    """Returns the RGB pixels of a PNG."""
    pixels = imread(io.BytesIO(png), format="png")[:, :, :3]
    return np.asarray(np.rint(pixels * 255), dtype=np.uint8)
