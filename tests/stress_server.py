"""Many clients at once against `python -m octavo.serving`: no error, no page lost, no memory that grows.

    python tests/stress_server.py --clients 200 --seconds 120

Each client sends one request after another, streamed or not, with random prompts and lengths: greedy ones,
whose text has to be what the model says without a cache; others with samples and stops; wrong ones, which
have to be refused; some that it leaves in the middle of the answer, and some in the middle of the request.
The pages of the cache are fewer than these requests would like to have. At the end all pages have to be free
and the allocator's invariants to hold, which the server checks as it stops, with status 0 if so; and its
memory must not have grown since the first half. Prints a report in JSON; the exit status is 1 if anything
was wrong. The model is tests/python/support's.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "python"))

from support.served_model import STOP, greedy
from support.server_process import ServerProcess

WAIT_SECONDS = 60  # for the next bytes of an answer
MOST_TOKENS = 48  # of an answer
MOST_GROWTH = 10.0  # of the server's memory, MiB


@dataclass
class Result:
    counts: Counter[str] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)
    rss_mib: list[float] = field(default_factory=list)  # once a second

    def wrong(self, what: str) -> None:
        """Notes what should not have happened."""
        self.counts["errors"] += 1
        if len(self.errors) < 20:
            self.errors.append(what)


def make_prompts(number: int) -> list[str]:
    """Most begin as others do, for a while."""
    rng = random.Random(0)
    beginning = "The beginning that many of them share. " * 2
    letters = [chr(code) for code in range(32, 127)]
    return [
        beginning[: rng.randint(0, len(beginning))] + "".join(rng.choices(letters, k=rng.randint(1, 80)))
        for _ in range(number)
    ]


PROMPTS = make_prompts(200)


@functools.cache
def longest(prompt: str) -> str:
    return greedy(prompt, MOST_TOKENS, stops=False)[0]


def expected(prompt: str, max_tokens: int) -> tuple[str, str]:
    """The text of a greedy request, and why it ends."""
    text, stop, _ = longest(prompt)[:max_tokens].partition(chr(STOP))
    return text, "stop" if stop else "length"


async def send(
    port: int, body: object, part: float = 1.0
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, int]:
    """A request, or this part of it; the answer's status, 0 to a part, and where its body comes from."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n"
    request = head.encode() + b"Content-Type: application/json\r\nConnection: close\r\n\r\n" + data
    writer.write(request[: int(part * len(request))])
    if part < 1:
        await writer.drain()
        return reader, writer, 0
    status = int((await asyncio.wait_for(reader.readline(), WAIT_SECONDS)).split()[1])
    while (await reader.readline()).strip():
        pass
    return reader, writer, status


async def one_request(port: int, rng: random.Random, result: Result) -> None:
    kind = rng.choices(["greedy", "stream", "samples", "leave", "cut", "wrong"], [6, 8, 4, 4, 1, 2])[0]
    prompt, max_tokens = rng.choice(PROMPTS), rng.randint(1, MOST_TOKENS)
    body: dict[str, object] = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
    if kind in ("stream", "leave"):
        body["stream"] = True
    if kind in ("samples", "leave"):
        body |= {"temperature": 1, "n": rng.randint(1, 4), "stop": "q"}
    if kind == "wrong":
        body |= rng.choice([{"n": 0}, {"prompt": 3}, {"unknown": 1}, {"max_tokens": 10**6}])
    reader, writer, status = await send(port, body, rng.random() if kind == "cut" else 1.0)
    try:
        if kind == "cut":
            await asyncio.sleep(rng.uniform(0, 0.2))
            writer.transport.abort()
            result.counts["left before the request was whole"] += 1
            return
        if kind == "leave" and status == 200:
            for _ in range(rng.randint(0, 20)):
                await asyncio.wait_for(reader.readline(), WAIT_SECONDS)
            writer.transport.abort()
            result.counts["left"] += 1
            return
        content = await asyncio.wait_for(reader.read(), WAIT_SECONDS)
    finally:
        writer.close()
    if status == 429:
        result.counts["refused for now"] += 1
        await asyncio.sleep(rng.uniform(0.2, 1))
    elif kind == "wrong":
        result.counts["wrong ones refused"] += 1
        if status != 400:
            result.wrong(f"{body}: status {status}")
    elif status != 200:
        result.wrong(f"{body}: status {status}: {content[:300]!r}")
    elif kind == "stream":
        check(result, "streams", text_of_stream(content), expected(prompt, max_tokens))
    else:
        choices = json.loads(content)["choices"]
        if kind == "greedy":
            (choice,) = choices
            answer = choice["text"], choice["finish_reason"]
            check(result, "answers", answer, expected(prompt, max_tokens))
        else:
            result.counts["samples"] += len(choices)
            if len(choices) != body["n"] or any("q" in choice["text"] for choice in choices):
                result.wrong(f"{body}: {choices}")


def check(result: Result, kind: str, actual: tuple[str, str], wanted: tuple[str, str]) -> None:
    result.counts[kind] += 1
    if actual != wanted:
        result.wrong(f"got {actual}; expected {wanted}")


def text_of_stream(content: bytes) -> tuple[str, str]:
    """The body comes in chunks, of which each holds whole events."""
    *events, done = [line[6:] for line in content.splitlines() if line.startswith(b"data: ")]
    if done != b"[DONE]":
        return f"no end: {done!r}", ""
    choices = [json.loads(event)["choices"][0] for event in events]
    return "".join(choice["text"] for choice in choices), choices[-1]["finish_reason"]


async def client(port: int, seed: int, end: float, result: Result) -> None:
    rng = random.Random(seed)
    while time.monotonic() < end:
        try:
            await one_request(port, rng, result)
        except (OSError, asyncio.TimeoutError, ValueError, LookupError) as error:
            result.wrong(f"client {seed}: {error!r}")
        await asyncio.sleep(rng.uniform(0, 0.05))


async def watch(pid: int, end: float, result: Result) -> None:
    """Memory of the server; Linux alone says so."""
    status = Path(f"/proc/{pid}/status")
    while time.monotonic() < end:
        for line in status.read_text().splitlines():
            if line.startswith("VmRSS:"):
                result.rss_mib.append(int(line.split()[1]) / 1024)
        await asyncio.sleep(1)


async def run(server: ServerProcess, clients: int, seconds: float) -> Result:
    result = Result()
    end = time.monotonic() + seconds
    await asyncio.gather(
        watch(server.process.pid, end, result), *(client(server.port, i, end, result) for i in range(clients))
    )
    return result


def stress(clients: int, seconds: float, num_pages: int = 128, max_in_flight: int = 160) -> dict[str, object]:
    """Runs everything; the report."""
    for prompt in PROMPTS:
        longest(prompt)  # before the clock runs
    server = ServerProcess(
        *("--num-pages", str(num_pages), "--page-size", "4", "--max-batch", "32"),
        *("--max-in-flight", str(max_in_flight), "--log-level", "warning"),
    )
    try:
        result = asyncio.run(run(server, clients, seconds))
        found = server.wait_for(lambda metrics: metrics["octavo_in_flight_answers"] == 0)
        found = server.wait_for(lambda metrics: metrics['octavo_used_pages{group="0"}'] == 0)
        status, output = server.stop()
    finally:
        server.process.kill()
    quarter = max(1, len(result.rss_mib) // 4)
    first_half = max(result.rss_mib[quarter : 2 * quarter], default=0.0)
    last = max(result.rss_mib[-quarter:], default=0.0)
    if last - first_half > MOST_GROWTH:
        result.wrong(f"the server's memory grew from {first_half:.1f} to {last:.1f} MiB")
    return {
        "clients": clients,
        "seconds": seconds,
        **result.counts,
        "tokens": int(found["octavo_generated_tokens_total"]),
        "preemptions": int(found["octavo_preemptions_total"]),
        "cancelled": int(found["octavo_answers_cancelled_total"]),
        "rss_mib_second_quarter": round(first_half, 1),
        "rss_mib_last_quarter": round(last, 1),
        "status": status,
        "output": output[-2000:],
        "wrong": result.errors,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=120.0)
    args = parser.parse_args()
    report = stress(args.clients, args.seconds)
    print(json.dumps(report, indent=2))
    return 1 if report["wrong"] or report["status"] != 0 else 0


if __name__ == "__main__":
    sys.exit(main())
