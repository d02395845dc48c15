"""`python -m octavo.serving` in a process of its own, and a client that can leave at any point."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]


class ServerProcess:
    """Listens on a free port; `port` says which."""

    def __init__(self, *arguments, model="support.served_model:load", **environment):
        self.process = subprocess.Popen(
            [sys.executable, "-m", "octavo.serving", "--port", "0", "--model", model, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**environment_with_tests(), **environment},
        )
        self.output = []
        for line in self.process.stdout:
            self.output.append(line)
            if match := re.search(r"octavo\.serving: .* at http://\S+:(\d+)$", line):
                self.port = int(match[1])
                return
        raise AssertionError(f"the server ended ({self.process.wait()}): {''.join(self.output)}")

    def stop(self, number=signal.SIGTERM, timeout=30):
        """Sends a signal, and returns the exit status and all that the server printed."""
        self.process.send_signal(number)
        return self.wait(timeout)

    def wait(self, timeout=30):
        rest, _ = self.process.communicate(timeout=timeout)
        return self.process.returncode, "".join(self.output) + rest

    def request(self, method, path, body=None, headers=None, timeout=60):
        """A response, whose body is still to be read."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        if body is not None and not isinstance(body, bytes):
            body = json.dumps(body)
        headers = {**({"Content-Type": "application/json"} if body is not None else {}), **(headers or {})}
        connection.request(method, path, body, headers)
        response = connection.getresponse()
        response.connection = connection  # which closes the socket when it goes
        return response

    def post(self, body, path="/v1/completions", **options):
        """Status and JSON of the answer."""
        response = self.request("POST", path, body, **options)
        return response.status, json.loads(response.read())

    def metrics(self):
        text = self.request("GET", "/metrics").read().decode()
        return {
            name: float(value) for name, value in re.findall(r"^(octavo_[^ ]+) (\S+)$", text, re.MULTILINE)
        }

    def wait_for(self, condition, seconds=10):
        """Until metrics are as wanted."""
        end = time.monotonic() + seconds
        while not condition(metrics := self.metrics()):
            assert time.monotonic() < end, metrics
            time.sleep(0.02)
        return metrics


def environment_with_tests():
    path = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}


@contextlib.contextmanager
def serve(*arguments, **options):
    """A server that has to stop cleanly at the end: with status 0, and all pages free."""
    server = ServerProcess(*arguments, **options)
    try:
        yield server
        if server.process.poll() is None:
            status, output = server.stop()
            assert status == 0, output
    finally:
        server.process.kill()
        server.process.wait()
        server.process.stdout.close()


def read_events(response):
    """What the events of a stream hold, as they come; the last one may be the text [DONE]."""
    for line in response:
        if line.startswith(b"data: "):
            text = line.removeprefix(b"data: ").decode().strip()
            yield text if text == "[DONE]" else json.loads(text)
