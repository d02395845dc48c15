"""The answers of OpenAI's completions and chat completions, whole or in chunks."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from octavo.serving.server.errors import ApiError
from octavo.serving.server.text import Delta, TokenLogprob

DONE = "[DONE]"


@dataclass(frozen=True)
class Usage:
    """Tokens of a request: of all its prompts, and of all its answers."""

    prompt_tokens: int
    completion_tokens: int

    def as_json(self) -> dict[str, int]:
        """As OpenAI counts them."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }


class Format(Protocol):
    """How the answers to one request look."""

    def whole(self, deltas: Sequence[Delta], usage: Usage) -> dict[str, Any]:
        """The answer to a request that does not stream. deltas: one for each choice, with all of it."""
        ...

    def first_chunks(self, num_choices: int) -> list[dict[str, Any]]:
        """What a stream begins with."""
        ...

    def chunks(self, delta: Delta) -> list[dict[str, Any]]:
        """What a delta adds to a stream."""
        ...

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        """What ends a stream whose client wants the usage."""
        ...


class _Format:
    kind: str
    chunk_kind: str
    prefix: str

    def __init__(self, model: str, include_usage: bool) -> None:
        self._head = {
            "id": f"{self.prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
        }
        # Where the usage comes in a chunk of its own, the others say that it is not there.
        self._no_usage: dict[str, None] = {"usage": None} if include_usage else {}

    def _whole(self, choices: list[dict[str, Any]], usage: Usage) -> dict[str, Any]:
        return {**self._head, "object": self.kind, "choices": choices, "usage": usage.as_json()}

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        return {**self._head, "object": self.chunk_kind, "choices": [choice], **self._no_usage}

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        return {**self._head, "object": self.chunk_kind, "choices": [], "usage": usage.as_json()}


class CompletionFormat(_Format):
    """The answers of /v1/completions."""

    kind = chunk_kind = "text_completion"
    prefix = "cmpl"

    def whole(self, deltas: Sequence[Delta], usage: Usage) -> dict[str, Any]:
        return self._whole([self._choice(delta) for delta in deltas], usage)

    def first_chunks(self, num_choices: int) -> list[dict[str, Any]]:  # noqa: ARG002
        return []

    def chunks(self, delta: Delta) -> list[dict[str, Any]]:
        return [self._chunk(self._choice(delta))]

    @staticmethod
    def _choice(delta: Delta) -> dict[str, Any]:
        return {
            "index": delta.index,
            "text": delta.text,
            "logprobs": _completion_logprobs(delta.logprobs),
            "finish_reason": delta.finish_reason,
        }


class ChatFormat(_Format):
    """The answers of /v1/chat/completions."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    prefix = "chatcmpl"

    def whole(self, deltas: Sequence[Delta], usage: Usage) -> dict[str, Any]:
        choices = [
            {
                "index": delta.index,
                "message": {"role": "assistant", "content": delta.text, "refusal": None},
                "logprobs": _chat_logprobs(delta.logprobs),
                "finish_reason": delta.finish_reason,
            }
            for delta in deltas
        ]
        return self._whole(choices, usage)

    def first_chunks(self, num_choices: int) -> list[dict[str, Any]]:
        return [self._part(index, {"role": "assistant", "content": ""}) for index in range(num_choices)]

    def chunks(self, delta: Delta) -> list[dict[str, Any]]:
        chunks = []
        if delta.text or delta.logprobs:
            chunks.append(self._part(delta.index, {"content": delta.text}, delta.logprobs))
        if delta.finish_reason is not None:
            chunks.append(self._part(delta.index, {}, finish_reason=delta.finish_reason))
        return chunks

    def _part(
        self,
        index: int,
        delta: dict[str, str],
        logprobs: Sequence[TokenLogprob] = (),
        finish_reason: str | None = None,
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": _chat_logprobs(logprobs)}
        return self._chunk({**choice, "finish_reason": finish_reason})


def event(data: dict[str, Any] | str) -> bytes:
    """A server-sent event."""
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return f"data: {text}\n\n".encode()


def error_event(error: ApiError) -> bytes:
    """What a stream ends with that cannot go on."""
    return event(error.body())


def _completion_logprobs(tokens: Sequence[TokenLogprob]) -> dict[str, Any] | None:
    if not tokens:
        return None
    return {
        "tokens": [token.text for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": None,
        "text_offset": [token.offset for token in tokens],
    }


def _chat_logprobs(tokens: Sequence[TokenLogprob]) -> dict[str, Any] | None:
    if not tokens:
        return None
    content = [
        {
            "token": token.text,
            "logprob": token.logprob,
            # The bytes of a part of a character are not known.
            "bytes": None if "\ufffd" in token.text else list(token.text.encode()),
            "top_logprobs": [],
        }
        for token in tokens
    ]
    return {"content": content, "refusal": None}
