"""Pages in a headless Chromium, for tests of pages: open, click, press keys, evaluate and take pictures.

It speaks Chromium's protocol of developers' tools through a pipe, so it needs no package. The browser has no network.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
SECONDS = 60.0  #: that an answer may take on a busy machine
_OPTIONS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars", "--no-first-run",
    "--disable-background-networking", "--host-resolver-rules=MAP * ~NOTFOUND", "--remote-debugging-pipe",
)  # fmt: skip


def program() -> str | None:
    """The path of a Chromium; None: there is none."""
    return next(filter(None, map(shutil.which, PROGRAMS)), None)


class Browser:
    """One page.

    Attributes:
        errors: messages of the console, errors of scripts and refused loads, since the page was opened.
    """

    def __init__(self, reads: int, writes: int) -> None:
        self._reads, self._writes = reads, writes
        self._numbers = itertools.count(1)
        self._rest, self._session = b"", ""
        self.errors: list[str] = []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")

    def open(self, file: Path, width: int, height: int = 900, dark: bool = False) -> None:
        """Open a file, with a window of this size, and wait until it is drawn."""
        self.errors.clear()
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])
        self._call("Page.navigate", url=file.resolve().as_uri())
        deadline = time.monotonic() + SECONDS
        while self.evaluate("document.readyState !== 'complete' || !document.querySelector('footer')"):
            assert time.monotonic() < deadline, f"{file} is not drawn: {self.errors}"
        self.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def evaluate(self, script: str) -> Any:
        """The value of an expression in the page. A promise is awaited."""
        answer = self._call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def click(self, x: float, y: float) -> None:
        """Click at a place of the window."""
        for kind in ("mousePressed", "mouseReleased"):
            self._call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def press(self, key: str) -> None:
        """Press a key, such as ``ArrowRight`` or ``p``."""
        text = {"text": key} if len(key) == 1 else {}
        self._call("Input.dispatchKeyEvent", type="keyDown", key=key, code=key, **text, **_code(key))
        self._call("Input.dispatchKeyEvent", type="keyUp", key=key, code=key, **_code(key))

    def picture(self, file: Path) -> None:
        """Write the whole page as a PNG."""
        answer = self._call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        file.write_bytes(base64.b64decode(answer["data"]))

    def _call(self, method: str, **values: Any) -> dict[str, Any]:
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": values}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._writes, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + SECONDS
        while True:
            answer = self._next(deadline)
            if answer.get("id") == number:
                assert "error" not in answer, answer["error"]
                return answer["result"]
            self._note(answer)

    def _next(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._reads], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"Chromium does not answer in {SECONDS} s"
            more = os.read(self._reads, 1 << 20)
            assert more, "Chromium has ended"
            self._rest += more
        message, _, self._rest = self._rest.partition(b"\0")
        answer: dict[str, Any] = json.loads(message)
        return answer

    def _note(self, event: dict[str, Any]) -> None:
        values = event.get("params", {})
        match event.get("method"):
            case "Runtime.exceptionThrown":
                self.errors.append(str(values["exceptionDetails"]))
            case "Log.entryAdded":
                self.errors.append(values["entry"]["text"])
            case "Runtime.consoleAPICalled":
                self.errors.append(str(values["args"]))
            case "Network.requestWillBeSent":
                if not values["request"]["url"].startswith(("file:", "about:")):
                    self.errors.append(f"a request of {values['request']['url']}")


def _code(key: str) -> dict[str, int]:
    codes = {
        "End": 35,
        "Home": 36,
        "ArrowLeft": 37,
        "ArrowUp": 38,
        "ArrowRight": 39,
        "ArrowDown": 40,
        "Tab": 9,
    }
    return {"windowsVirtualKeyCode": codes[key]} if key in codes else {}


@contextlib.contextmanager
def browser() -> Iterator[Browser]:
    """A Chromium of our own, which ends with the context."""
    path = program()
    assert path is not None
    with tempfile.TemporaryDirectory(prefix="shardwright-chromium-") as folder:
        theirs, writes = os.pipe()
        reads, answers = os.pipe()

        def pipes() -> None:
            """The child's ends become 3 and 4. They are copied first, since one may have the other's number."""
            one, two = os.dup(theirs), os.dup(answers)
            os.dup2(one, 3)
            os.dup2(two, 4)

        process = subprocess.Popen(
            [path, *_OPTIONS, f"--user-data-dir={folder}"], preexec_fn=pipes, close_fds=False, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(theirs)
        os.close(answers)
        try:
            yield Browser(reads, writes)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            os.close(reads)
            os.close(writes)
