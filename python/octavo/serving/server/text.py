"""From tokens to the text that a client gets: whole characters, up to the first stop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class TextStream(Protocol):
    """Turns tokens into text as they come."""

    def feed(self, token: int) -> str:
        """The text that this token completes; "" while a character still lacks bytes."""
        ...

    def flush(self) -> str:
        """The rest, once there are no more tokens."""
        ...


class Tokenizer(Protocol):
    """What the server needs of a tokenizer.

    Several threads call encode and encode_messages; a ValueError of theirs tells the client what is wrong.
    """

    def encode(self, text: str) -> list[int]:
        """The tokens of a text."""
        ...

    def encode_messages(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """The tokens of messages, of role and content each, up to where the assistant speaks."""
        ...

    def decode(self, tokens: list[int]) -> str:
        """The text of tokens; control tokens have none."""
        ...

    def text_stream(self, prompt: Sequence[int] = ()) -> TextStream:
        """For the tokens of one answer. prompt: tokens whose text it continues; none where it starts anew."""
        ...


@dataclass(frozen=True)
class TokenLogprob:
    """A generated token, for requests that ask for logprobs."""

    text: str
    logprob: float
    offset: int  # in the answer, of its first character


@dataclass(frozen=True)
class Delta:
    """What a step, or several, adds to an answer."""

    index: int  # of the answer among those of its request
    text: str
    num_tokens: int
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: str | None


class Answer:
    """One answer while it grows.

    Args:
        index: among the answers of its request.
        tokenizer: of the model.
        stops: texts that end the answer, and are no part of it.
        logprobs: whether the client wants them.
        prompt: tokens whose text the answer continues.
    """

    def __init__(
        self,
        index: int,
        tokenizer: Tokenizer,
        stops: Sequence[str],
        logprobs: bool,
        prompt: Sequence[int] = (),
    ) -> None:
        self.index = index
        self.finish_reason: str | None = None
        self.last_token: float | None = None  # when it came
        self._tokenizer = tokenizer
        self._stream = tokenizer.text_stream(prompt)
        self._stops = StopTexts(stops)
        self._wants_logprobs = logprobs
        self._pending: list[TokenLogprob] = []
        self._num_pending = 0  # tokens since the last delta
        self._length = 0  # of the text so far, held back or not
        self._is_empty = not prompt  # there is no text yet, nor one that this continues

    def feed(self, token: int, logprob: float | None, finish_reason: str | None) -> Delta | None:
        """Adds a token; None while there is nothing to send.

        A finish_reason "stop" says that the token is one at which the model stops: it has no text.
        """
        text = "" if finish_reason == "stop" else self._stream.feed(token)
        if self._wants_logprobs:
            assert logprob is not None
            self._pending.append(TokenLogprob(self._text_of(token), logprob, self._length))
        self._num_pending += 1
        self._length += len(text)
        ready = self._stops.feed(text)
        if finish_reason is not None and not self._stops.found:
            ready += self._stops.feed(self._stream.flush())
        if self._stops.found:
            finish_reason = "stop"
        elif finish_reason is not None:
            ready += self._stops.rest()
        self.finish_reason = finish_reason
        if not ready and finish_reason is None:
            return None
        delta = Delta(self.index, ready, self._num_pending, tuple(self._pending), finish_reason)
        self._pending, self._num_pending = [], 0
        return delta

    def _text_of(self, token: int) -> str:
        """The text of one token: behind others what a second one adds, for decoders that leave out a space in
        front of all, as those of SentencePiece.
        """
        alone, twice = self._tokenizer.decode([token]), self._tokenizer.decode([token, token])
        is_first, self._is_empty = self._is_empty, self._is_empty and not twice
        return alone if is_first or not twice.startswith(alone) else twice[len(alone) :]


class StopTexts:
    """Looks for texts in a stream, and holds back what may be the beginning of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.found = False
        self._stops = tuple(stops)
        self._held = ""

    def feed(self, text: str) -> str:
        """What may be sent: up to the first stop, once it is there."""
        text = self._held + text
        places = [place for place in map(text.find, self._stops) if place >= 0]
        if places:
            self.found, self._held = True, ""
            return text[: min(places)]
        held = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def rest(self) -> str:
        """What was held back, at the end of the stream."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """The most characters at the end of text that stop begins with, fewer than all of stop."""
    most = min(len(text), len(stop) - 1)
    return next((n for n in range(most, 0, -1) if text.endswith(stop[:n])), 0)
