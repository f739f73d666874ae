"""A headless Chromium, driven by its DevTools protocol over pipes: https://chromedevtools.github.io/devtools-protocol.

`python -m tests.report.browser REPORT PICTURE.png [WIDTH [light|dark [HEIGHT]]]` writes a screenshot.
"""

import base64
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-pipe", "--mute-audio")


class Browser:
    """A page in a browser. `messages` are the warnings, errors and exceptions of its console."""

    def __init__(self) -> None:
        assert BROWSER
        self.messages: list[str] = []
        self.questions: list[str] = []  # Those that the page has asked, which are answered with yes.
        self._number = 0
        self._answered: dict[int, dict[str, Any]] = {}
        self._session = ""
        self._is_loaded = False
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        (read, self._to), (self._from, write) = os.pipe(), os.pipe()

        def connect() -> None:  # The browser reads descriptor 3 and writes 4.
            first, second = os.dup(read), os.dup(write)
            os.dup2(first, 3)
            os.dup2(second, 4)

        self._process = subprocess.Popen(
            [BROWSER, *FLAGS, f"--user-data-dir={self._profile.name}"], preexec_fn=connect, close_fds=False,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(read)
        os.close(write)
        self._answers = os.fdopen(self._from, "rb")
        page = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.wait()
        self._answers.close()
        os.close(self._to)
        self._profile.cleanup()

    def call(self, method: str, **values: object) -> dict[str, Any]:
        self._number += 1
        session = {"sessionId": self._session} if self._session else {}
        number, message = self._number, {"id": self._number, "method": method, "params": values, **session}
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while number not in self._answered:
            self._next()
        answer = self._answered.pop(number)
        assert "error" not in answer, answer
        return answer["result"]

    def open(self, path: Path | str, width: int, *, dark: bool = False, height: int = 900) -> None:
        """Opens a file or an address and waits until it is loaded. Widths below 600 pixels are those of a phone."""
        phone = width < 600
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone,
            screenWidth=width, screenHeight=height,
        )  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self._is_loaded = False
        self.call("Page.navigate", url=path if isinstance(path, str) else path.as_uri())
        while not self._is_loaded:
            self._next()

    def run(self, script: str) -> Any:
        """Returns the value of a JavaScript expression, awaited if it is a promise."""
        answer = self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True, userGesture=True
        )
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def screenshot(self, path: Path, *, height: int = 0) -> None:
        """Writes a picture of the whole page, or of its first `height` pixels."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": height or size["height"], "scale": 1}
        made = self.call("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(made["data"]))

    def _next(self) -> dict[str, Any]:
        message = bytearray()
        while (byte := self._answers.read(1)) not in (b"\0", b""):
            message += byte
        assert message, "the browser has ended"
        answer: dict[str, Any] = json.loads(message)
        if "id" in answer:
            self._answered[answer["id"]] = answer
        values = answer.get("params", {})
        match answer.get("method"):
            case "Page.loadEventFired":
                self._is_loaded = True
            case "Page.javascriptDialogOpening":
                self.questions.append(values["message"])
                self.call("Page.handleJavaScriptDialog", accept=True)
            case "Runtime.exceptionThrown":
                self.messages.append(str(values["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if values["type"] in ("error", "warning", "assert"):
                self.messages.append(str(values["args"]))
            case "Log.entryAdded" if values["entry"]["level"] in ("error", "warning"):
                self.messages.append(values["entry"]["text"])
        return answer


if __name__ == "__main__":
    page, picture, *further = sys.argv[1:]
    with Browser() as browser:
        browser.open(
            page if "://" in page else Path(page).resolve(), int((further or ["1280"])[0]), dark="dark" in further
        )
        browser.screenshot(Path(picture), height=int(further[2]) if len(further) > 2 else 0)
        print(browser.messages)
