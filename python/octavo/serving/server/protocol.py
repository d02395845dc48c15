"""The requests of OpenAI's completions and chat completions, checked field by field.

Nothing that a client asks for is ignored: a field that this server does not know, or cannot serve, is an
error that names it, unless it has the value that changes nothing. A null stands for the field's default.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from octavo.serving.server.errors import ApiError, too_long

MAX_SAMPLES = 128
MAX_STOPS = 4
MAX_SEED = 2**63 - 1
ROLES = ("system", "user", "assistant")

# Fields that OpenAI has and this server lacks, where they have a value that changes nothing.
_NEUTRAL: dict[str, Any] = {"presence_penalty": 0, "frequency_penalty": 0, "logit_bias": {}}
_NEUTRAL_OF_COMPLETION = {**_NEUTRAL, "best_of": 1, "echo": False, "suffix": ""}
_NEUTRAL_OF_CHAT = {
    **_NEUTRAL,
    "response_format": {"type": "text"},
    "modalities": ["text"],
    "store": False,
    "tool_choice": "none",
    "tools": [],
    "top_logprobs": 0,
}
# Those of a message: OpenAI's client sends an answer's along where it is part of a later request.
_NEUTRAL_OF_MESSAGE: dict[str, Any] = {
    "annotations": [],
    "audio": None,
    "function_call": None,
    "name": None,
    "refusal": None,
    "tool_calls": [],
}


@dataclass(frozen=True)
class Options:
    """What both kinds of requests have."""

    model: str | None
    n: int
    max_tokens: int | None
    max_tokens_field: str  # in which it is
    temperature: float
    top_p: float
    top_k: int
    seed: int | None
    stop: tuple[str, ...]
    logprobs: bool
    stream: bool
    include_usage: bool


@dataclass(frozen=True)
class CompletionRequest:
    """A request to /v1/completions."""

    options: Options
    prompts: tuple[str | tuple[int, ...], ...]  # texts, or tokens


@dataclass(frozen=True)
class ChatRequest:
    """A request to /v1/chat/completions."""

    options: Options
    messages: tuple[dict[str, str], ...]  # of role and content


def parse_json(body: bytes) -> dict[str, Any]:
    """The object that a body holds; ApiError (400) where it holds none."""
    try:
        value = json.loads(body, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:  # ValueError: of JSON, of UTF-8, of too many digits
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ApiError(400, f"the body must be JSON: {reason}", code="invalid_json") from error
    if not isinstance(value, dict):
        raise ApiError(400, f"the body must be a JSON object; got {_show(value)}", code="invalid_json")
    return value


def parse_completion(body: Mapping[str, Any], max_length: int | None = None) -> CompletionRequest:
    """Checks a request to /v1/completions; ApiError (400) names the field that is wrong.

    max_length: of a prompt and an answer, in tokens. The tokens of longer prompts are not looked at.
    """
    fields = _Fields("completions", body, neutral=_NEUTRAL_OF_COMPLETION)
    logprobs = fields.integer("logprobs", None, 0, 0, "the chosen token alone has one")
    options = _options(fields, "max_tokens", logprobs is not None, default_max_tokens=16)
    prompts = _prompts(fields, max_length)
    fields.refuse_others()
    return CompletionRequest(options, prompts)


def parse_chat(body: Mapping[str, Any]) -> ChatRequest:
    """Checks a request to /v1/chat/completions; ApiError (400) names the field that is wrong."""
    fields = _Fields("chat completions", body, neutral=_NEUTRAL_OF_CHAT)
    name = "max_completion_tokens"
    if fields.has(name) and fields.has("max_tokens"):
        fields.refuse(name, f"{name} and max_tokens mean the same: give one of them")
    name, without = (name, "max_tokens") if fields.has(name) else ("max_tokens", name)
    fields.take(without)  # a null
    options = _options(fields, name, fields.boolean("logprobs", False), default_max_tokens=None)
    messages = fields.take("messages")
    if not isinstance(messages, list) or not messages:
        fields.refuse("messages", f"messages must be a list of one message or more; got {_show(messages)}")
    parsed = tuple(_message(fields, f"messages[{i}]", message) for i, message in enumerate(messages))
    fields.refuse_others()
    return ChatRequest(options, parsed)


def _options(fields: _Fields, max_tokens: str, logprobs: bool, default_max_tokens: int | None) -> Options:
    stream = fields.boolean("stream", False)
    n = fields.integer("n", 1, 1, MAX_SAMPLES)
    top_k = fields.integer("top_k", 0, 0, 2**31 - 1)
    assert n is not None and top_k is not None
    return Options(
        model=fields.text("model"),
        n=n,
        max_tokens=fields.integer(max_tokens, default_max_tokens, 1, 2**31 - 1),
        max_tokens_field=max_tokens,
        temperature=fields.number("temperature", 1.0, 0.0, 2.0),
        top_p=fields.number("top_p", 1.0, 0.0, 1.0, without_low=True),
        top_k=top_k,
        seed=fields.integer("seed", None, 0, MAX_SEED),
        stop=_stop(fields),
        logprobs=logprobs,
        stream=stream,
        include_usage=_include_usage(fields, stream),
    )


def _stop(fields: _Fields) -> tuple[str, ...]:
    stop = fields.take("stop")
    if stop is None:
        return ()
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or len(stops) > MAX_STOPS or not all(_is_text(s) and s for s in stops):
        fields.refuse(
            "stop", f"stop must be a text or up to {MAX_STOPS} texts, none of them empty; got {_show(stop)}"
        )
    return tuple(stops)


def _include_usage(fields: _Fields, stream: bool) -> bool:
    options = fields.take("stream_options")
    if options is None:
        return False
    if not stream:
        fields.refuse("stream_options", "stream_options needs stream: true")
    if not isinstance(options, dict):
        fields.refuse("stream_options", f"stream_options must be an object; got {_show(options)}")
    inner = _Fields(fields.what, options, "stream_options.")
    include_usage = inner.boolean("include_usage", False)
    inner.refuse_others()
    return include_usage


def _prompts(fields: _Fields, max_length: int | None) -> tuple[str | tuple[int, ...], ...]:
    prompt = fields.take("prompt")
    if max_length is not None and isinstance(prompt, list):
        for tokens in [prompt] if prompt and _is_token(prompt[0]) else prompt:
            if isinstance(tokens, list) and len(tokens) >= max_length:
                raise too_long(max_length, f"the prompt has {len(tokens)}", "prompt")
    several = prompt if isinstance(prompt, list) and not all(map(_is_token, prompt)) else [prompt]
    if prompt == [] or not all(_is_text(p) or _is_tokens(p) for p in several):
        fields.refuse(
            "prompt",
            "prompt must be a text, a list of tokens, or a list of texts or of lists of tokens; "
            f"got {_show(prompt)}",
        )
    return tuple(p if isinstance(p, str) else tuple(p) for p in several)


def _message(fields: _Fields, name: str, message: object) -> dict[str, str]:
    if not isinstance(message, dict):
        fields.refuse(name, f"{name} must be an object; got {_show(message)}")
    inner = _Fields(fields.what, message, f"{name}.", _NEUTRAL_OF_MESSAGE)
    role, content = inner.take("role"), inner.take("content")
    if role not in ROLES:
        fields.refuse(f"{name}.role", f"{name}.role must be one of {', '.join(ROLES)}; got {_show(role)}")
    inner.refuse_others()
    if isinstance(content, list):
        content = "".join(_text_part(fields, f"{name}.content[{i}]", part) for i, part in enumerate(content))
    if not _is_text(content):
        fields.refuse(
            f"{name}.content", f"{name}.content must be a text or a list of text parts; got {_show(content)}"
        )
    return {"role": role, "content": content}


def _text_part(fields: _Fields, name: str, part: object) -> str:
    if not isinstance(part, dict) or set(part) != {"type", "text"} or part["type"] != "text":
        fields.refuse(name, f'{name} must be {{"type": "text", "text": ...}}; got {_show(part)}')
    if not _is_text(part["text"]):
        fields.refuse(f"{name}.text", f"{name}.text must be a text; got {_show(part['text'])}")
    text: str = part["text"]
    return text


class _Fields:
    """The fields of an object, each to be taken once."""

    def __init__(
        self, what: str, body: Mapping[str, Any], prefix: str = "", neutral: Mapping[str, Any] | None = None
    ) -> None:
        self.what = what
        self._body = body
        self._prefix = prefix
        self._neutral = {} if neutral is None else neutral
        self._taken: set[str] = set()

    def has(self, name: str) -> bool:
        return self._body.get(name) is not None

    def take(self, name: str) -> Any:
        self._taken.add(name)
        return self._body.get(name)

    def refuse(self, param: str, message: str) -> NoReturn:
        raise ApiError(400, f"{self.what}: {message}", param=param, code="invalid_value")

    def refuse_others(self) -> None:
        """Refuses what was not taken, unless it has the value that changes nothing."""
        neutral = self._neutral
        for name in self._body:
            if name in self._taken or (self._body[name] is None and name in neutral):
                continue
            full_name = self._prefix + (_shorten(name) if _is_text(name) else _show(name))
            if name not in neutral:
                raise ApiError(
                    400,
                    f"{self.what}: {full_name} is no field that this server has",
                    param=full_name,
                    code="unknown_field",
                )
            if self._body[name] != neutral[name] or isinstance(self._body[name], bool) != isinstance(
                neutral[name], bool
            ):
                raise ApiError(
                    400,
                    f"{self.what}: {full_name} is not supported, other than {_show(neutral[name])}; "
                    f"got {_show(self._body[name])}",
                    param=full_name,
                    code="unsupported_value",
                )

    def integer(self, name: str, default: int | None, low: int, high: int, why: str = "") -> int | None:
        value = self.take(name)
        if value is None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            wanted = f"an integer from {low} to {high}" if low < high else f"{low}, since {why}"
            self.refuse(self._prefix + name, f"{self._prefix}{name} must be {wanted}; got {_show(value)}")
        return value

    def number(
        self, name: str, default: float, low: float, high: float, *, without_low: bool = False
    ) -> float:
        value = self.take(name)
        if value is None:
            return default
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not low <= value <= high or (without_low and value == low):
            interval = f"{'(' if without_low else '['}{low:g}, {high:g}]"
            self.refuse(name, f"{name} must be a number in {interval}; got {_show(value)}")
        return float(value)

    def boolean(self, name: str, default: bool) -> bool:
        value = self.take(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.refuse(
                self._prefix + name, f"{self._prefix}{name} must be true or false; got {_show(value)}"
            )
        return value

    def text(self, name: str) -> str | None:
        value = self.take(name)
        if value is not None and not _is_text(value):
            self.refuse(name, f"{name} must be a text; got {_show(value)}")
        return None if value is None else str(value)


def _is_text(value: object) -> bool:
    """Half of a surrogate pair, which JSON can hold, is none."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_token(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_tokens(value: object) -> bool:
    return isinstance(value, list) and len(value) > 0 and all(map(_is_token, value))


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _show(value: object) -> str:
    try:
        return _shorten(json.dumps(value))
    except RecursionError:  # of what could just be read
        return "a value that is nested too deeply"


def _shorten(text: str, most: int = 80) -> str:
    return text if len(text) <= most else f"{text[:most]}..."
