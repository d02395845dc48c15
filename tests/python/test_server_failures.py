"""octavo.serving.server: what goes wrong for one request, or is too much, does not concern the others."""

import asyncio
import dataclasses
import json

import pytest

pytest.importorskip("starlette", reason="the server needs starlette")
pytest.importorskip("uvicorn", reason="the server needs uvicorn")
pytest.importorskip("httpx2", reason="Starlette's test client needs httpx2")

from starlette.testclient import TestClient

from octavo.serving.server import app as app_module
from octavo.serving.server.models import max_token_bytes
from support.served_model import AsciiTokenizer, greedy, load, make_parts

PATH = "/v1/completions"
GREEDY = {"temperature": 0, "max_tokens": 24}


def error_of(response, status):
    assert response.status_code == status, response.text
    return response.json()["error"]


class BrokenStream:
    """Answers to prompts that end in "!": their third token has no text."""

    def __init__(self, prompt):
        self.left = 2 if prompt and prompt[-1] == ord("!") else 1000

    def feed(self, token):
        self.left -= 1
        if self.left < 0:
            raise Exception("Invalid prefix encountered while decoding stream")
        return chr(token)

    def flush(self):
        return ""


class BrokenTokenizer(AsciiTokenizer):
    def encode_messages(self, messages):
        return [ord("!")]

    def text_stream(self, prompt=()):
        return BrokenStream(prompt)


def test_a_text_that_cannot_be_made_ends_its_request_alone():
    cache, (app, engine) = make_parts(dataclasses.replace(load(), tokenizer=BrokenTokenizer()))
    with TestClient(app, base_url="http://localhost") as client:
        error = error_of(client.post(PATH, json={"prompt": ["fine", "broken!"], "n": 2, **GREEDY}), 500)
        assert (error["code"], error["message"]) == ("text_failed", "the text of the answer cannot be made")
        response = client.post(PATH, json={"prompt": "broken!", "stream": True, **GREEDY})
        *chunks, last, done, end = response.text.split("\n\n")
        assert (len(chunks), done, end) == (2, "data: [DONE]", "")
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "text_failed"
        answer = client.post(PATH, json={"prompt": "fine", **GREEDY}).json()
        assert answer["choices"][0]["text"] == greedy("fine", 24)[0]
        assert client.get("/health").status_code == 200
        assert cache.allocator.stats()["num_sequences"] == 0
        assert engine.in_flight == 0
        # The answer of a chat is a text of its own.
        messages = [{"role": "user", "content": "Hi"}]
        answer = client.post("/v1/chat/completions", json={"messages": messages, **GREEDY}).json()
        assert answer["choices"][0]["message"]["content"] == greedy("!", 24)[0]
    assert cache.allocator.num_free_pages == cache.allocator.num_pages


class CountedTokenizer(AsciiTokenizer):
    """Tokens of up to three letters."""

    def __init__(self):
        self.num_calls = 0

    def encode(self, text):
        self.num_calls += 1
        return super().encode(text)[::3]


def test_texts_that_are_too_long_are_not_encoded():
    """There is room for 256 tokens of three bytes each, one of which is for the answer."""
    tokenizer = CountedTokenizer()
    model = dataclasses.replace(load(), tokenizer=tokenizer, max_token_bytes=3)
    _, (app, _) = make_parts(model, num_pages=64)
    with TestClient(app, base_url="http://localhost") as client:
        for text in ("x" * 766, "x" * 2**20, "\u00fc" * 400):
            error = error_of(client.post(PATH, json={"prompt": ["Hi", text], "max_tokens": 1}), 400)
            assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
            assert f"room for 256 tokens; the request has {len(text.encode())} bytes" in error["message"]
        messages = [{"role": "user", "content": "x" * 400}] * 2
        error = error_of(client.post("/v1/chat/completions", json={"messages": messages}), 400)
        assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
        assert tokenizer.num_calls == 0
        answer = client.post(PATH, json={"prompt": "x" * 765, "max_tokens": 1})
        assert answer.json()["usage"]["prompt_tokens"] == 255


def test_longest_token():
    assert max_token_bytes(["a", "\u2581b", "ccc"]) == 4


def test_head_of_the_events_ends():
    _, (app, _) = make_parts(load())
    with TestClient(app, base_url="http://localhost") as client:
        response = client.head("/events")
        assert response.status_code == 200 and response.content == b""
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert response.headers["cache-control"] == "no-store"


@pytest.mark.parametrize("takes_all", [True, False])
def test_a_client_that_takes_nothing_of_its_stream_counts_as_gone(monkeypatch, takes_all):
    """One that is slow does not."""
    monkeypatch.setattr(app_module, "SEND_SECONDS", 0.2)
    closed, sent = [], []

    async def events():
        for _ in range(10):
            yield b"data: x\n\n"

    async def receive():
        await asyncio.Event().wait()

    async def send(message):
        await asyncio.sleep(0.05 if takes_all or len(sent) < 3 else 3600)
        sent.append(message)

    async def respond():
        stream = app_module.EventStream(events(), lambda: closed.append(True))
        await asyncio.wait_for(stream({"type": "http"}, receive, send), 10)

    asyncio.run(respond())
    assert closed == [True]
    assert len(sent) == (12 if takes_all else 3)
    assert sent[-1].get("more_body") is not takes_all
