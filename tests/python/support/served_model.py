"""A model for tests of the server: support.exact_model, whose tokens are the characters of ASCII."""

from __future__ import annotations

import functools
import time

import octavo
from octavo.serving import Scheduler
from octavo.serving.server import Engine, Model, create_app
from support.exact_model import HEAD_DIM, ExactModel

VOCABULARY = 128
STOP = 0
NAME = "exact"


class AsciiTokenizer:
    def encode(self, text):
        return [ord(character) for character in text.encode("ascii").decode()]

    def encode_messages(self, messages):
        return self.encode("".join(f"{message['role']}: {message['content']}\n" for message in messages))

    def decode(self, tokens):
        return "".join(map(chr, tokens))

    def text_stream(self, prompt=()):
        return AsciiStream()


class AsciiStream:
    def feed(self, token):
        return chr(token)

    def flush(self):
        return ""


def load(forward=None, stop_tokens=frozenset({STOP})) -> Model:
    exact = ExactModel(VOCABULARY)
    return Model(
        name=NAME,
        forward=forward or exact.forward,
        tokenizer=AsciiTokenizer(),
        make_cache=functools.partial(octavo.KVCache, len(exact.windows), 1, HEAD_DIM),
        vocab_size=VOCABULARY,
        max_length=4096,
        stop_tokens=stop_tokens,
    )


def load_slow() -> Model:
    """A step takes 10 ms, and nothing stops it but the number of tokens."""
    exact = ExactModel(VOCABULARY)

    def forward(step, tokens):
        time.sleep(0.01)
        return exact.forward(step, tokens)

    return load(forward, frozenset())


def load_broken() -> Model:
    """Fails in its tenth step."""
    exact = ExactModel(VOCABULARY)

    def forward(step, tokens):
        if exact.calls == 9:
            raise ArithmeticError("the tenth step")
        return exact.forward(step, tokens)

    return load(forward)


def not_a_model() -> int:
    return 3


def greedy(prompt: str, num_tokens: int, stops: bool = True) -> tuple[str, str]:
    """What the model says at temperature 0 after a prompt, and why it stops, without any cache."""
    tokens = ExactModel(VOCABULARY).greedy(prompt.encode("ascii"), num_tokens)
    if stops and STOP in tokens:
        return "".join(map(chr, tokens[: tokens.index(STOP)])), "stop"
    return "".join(map(chr, tokens)), "length"


def make_app(cache, scheduler, model, *, max_in_flight=64, **options):
    """The application, and its engine."""
    engine = Engine(scheduler, cache, model.tokenizer, max_in_flight=max_in_flight)
    return create_app(engine, model, **options), engine


def make_parts(model, num_pages=256, page_size=4, max_batch=8, **options):
    """A cache, and the application and its engine."""
    cache = model.make_cache(
        num_pages=num_pages,
        page_size=page_size,
        max_batch=max_batch,
        max_tokens=64,
        max_length=min(model.max_length, num_pages * page_size),
        prefix_cache=True,
    )
    scheduler = Scheduler(cache, model.forward, stop_tokens=model.stop_tokens)
    return cache, make_app(cache, scheduler, model, **options)
