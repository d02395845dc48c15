"""A headless Chromium, driven over a pipe by the Chrome DevTools Protocol."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")

# Starts a program with two descriptors under the numbers that it wants them to have.
AS_3_AND_4 = """
import fcntl, os, sys
descriptors = [fcntl.fcntl(int(number), fcntl.F_DUPFD, 10) for number in sys.argv[1:3]]
for number, descriptor in enumerate(descriptors, 3):
    os.dup2(descriptor, number)
os.execv(sys.argv[3], sys.argv[3:])
"""


def find_browser() -> str | None:
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One page. The browser reads commands from its descriptor 3 and writes answers to 4."""

    def __init__(self, program, profile):
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        os.set_blocking(self._read, False)
        arguments = ["--headless", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu"]
        arguments += ["--no-first-run", "--disable-dev-shm-usage", "--window-size=1000,900"]
        arguments += [f"--user-data-dir={profile}", "about:blank"]
        self._process = subprocess.Popen(
            [sys.executable, "-c", AS_3_AND_4, str(to_browser), str(from_browser), program, *arguments],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._received = b""
        self._number = 0
        self._session = None
        self.errors = []  # that the page raised, or the browser reported
        (target,) = [
            found["targetId"]
            for found in self.send("Target.getTargets")["targetInfos"]
            if found["type"] == "page"
        ]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.send(f"{domain}.enable")

    def send(self, method, **parameters):
        """The result of a command."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + 60
        while time.monotonic() < end:
            for answer in self._receive():
                if answer.get("id") == self._number:
                    assert "error" not in answer, answer
                    return answer["result"]
                if answer.get("method") == "Runtime.exceptionThrown":
                    self.errors.append(answer["params"]["exceptionDetails"])
                entry = answer.get("params", {}).get("entry", {})
                if entry.get("level") == "error":
                    self.errors.append(entry)
        raise TimeoutError(method)

    def _receive(self):
        try:
            self._received += os.read(self._read, 2**20)
        except BlockingIOError:
            time.sleep(0.01)
        *messages, self._received = self._received.split(b"\0")
        return [json.loads(message) for message in messages]

    def open(self, url):
        self.send("Page.navigate", url=url)

    def evaluate(self, expression):
        """The value of an expression of JavaScript."""
        result = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait_for(self, expression, seconds=20):
        """The value of an expression as soon as it is true."""
        end = time.monotonic() + seconds
        while not (value := self.evaluate(expression)):
            assert time.monotonic() < end, (expression, self.evaluate("document.body.innerText"))
            time.sleep(0.05)
        return value

    def picture(self, path):
        data = self.send("Page.captureScreenshot", format="png")["data"]
        Path(path).write_bytes(base64.b64decode(data))

    def close(self):
        self._process.terminate()
        self._process.wait()
        os.close(self._read)
        os.close(self._write)


@contextlib.contextmanager
def open_browser(program):
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        browser = Browser(program, profile)
        try:
            yield browser
        finally:
            browser.close()
