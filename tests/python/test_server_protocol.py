"""octavo.serving.server: what requests may say, what is refused, and how texts are cut at stops."""

import itertools

import pytest

pytest.importorskip("starlette", reason="the server needs starlette")
pytest.importorskip("uvicorn", reason="the server needs uvicorn")

from octavo.serving.server.errors import ApiError
from octavo.serving.server.guard import _without_port
from octavo.serving.server.metrics import Histogram, Metrics
from octavo.serving.server.protocol import parse_chat, parse_completion, parse_json
from octavo.serving.server.text import Answer, StopTexts

MESSAGES = [{"role": "user", "content": "Hi"}]


def completion(**fields):
    return parse_completion({"prompt": "Hi", **fields})


def chat(**fields):
    return parse_chat({"messages": MESSAGES, **fields})


def refused(parse, **fields):
    with pytest.raises(ApiError) as caught:
        parse(**fields)
    assert caught.value.status == 400
    return caught.value


def test_defaults_are_those_of_openai():
    options = completion().options
    assert (options.n, options.max_tokens, options.temperature, options.top_p) == (1, 16, 1.0, 1.0)
    assert (options.seed, options.stop, options.stream, options.logprobs) == (None, (), False, False)
    assert chat().options.max_tokens is None


def test_everything_at_once():
    asked = parse_chat(
        {
            "model": "m",
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            ],
            "n": 2,
            "max_completion_tokens": 7,
            "temperature": 0,
            "top_p": 0.5,
            "top_k": 3,
            "seed": 5,
            "stop": ["x", "yz"],
            "logprobs": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            # What changes nothing:
            "presence_penalty": 0,
            "frequency_penalty": 0.0,
            "logit_bias": {},
            "tools": [],
            "response_format": {"type": "text"},
            "top_logprobs": None,
        }
    )
    assert asked.messages == (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "ab"},
    )
    options = asked.options
    assert (options.model, options.n, options.max_tokens) == ("m", 2, 7)
    assert (options.temperature, options.top_p, options.top_k, options.seed) == (0.0, 0.5, 3, 5)
    assert options.stop == ("x", "yz")
    assert options.logprobs and options.stream and options.include_usage


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", ("a",)),
        ("", ("",)),
        (["a", "b"], ("a", "b")),
        ([1, 2], ((1, 2),)),
        ([[1, 2], [3]], ((1, 2), (3,))),
        (["a", [3]], ("a", (3,))),
    ],
)
def test_prompts(prompt, expected):
    assert completion(prompt=prompt).prompts == expected


BOTH = {
    "n": (0, 129, -1, 1.0, "1", True, []),
    "max_tokens": (0, -1, 1.5, "16", True, 2**31),
    "temperature": (-0.1, 2.1, "1", True, [1]),
    "top_p": (0, 0.0, 1.1, -1, "1", False),
    "top_k": (-1, 1.0, "1", True),
    "seed": (-1, 2**63, 1.0, "1", True),
    "stop": ("", [""], ["a"] * 5, 3, [3], {}, "\ud800"),
    "stream": (1, 0, "true", []),
    "stream_options": ({"include_usage": True}, {}),  # without stream
    "model": (3, [], {}),
    "presence_penalty": (0.5, "0", True, False),
    "frequency_penalty": (1,),
    "logit_bias": ({"50256": -100}, []),
}
ONLY = {
    completion: {
        "prompt": (None, 3, [], [[]], {}, True, [True], ["a", 3], [["a"]], [1.0], "\udc00", ["a", None]),
        "logprobs": (1, 5, True, False, -1, "0"),
        "best_of": (2, True),
        "echo": (True, 1),
        "suffix": ("x",),
    },
    chat: {
        "messages": (None, [], {}, "Hi", 3),
        "logprobs": (0, 1, "true"),
        "top_logprobs": (1, 20, False),
        "response_format": ({"type": "json_object"},),
        "tools": ([{"type": "function"}],),
        "tool_choice": ("auto",),
        "max_completion_tokens": (0, "1"),
    },
}


@pytest.mark.parametrize(
    ("parse", "name", "value"),
    [
        pytest.param(parse, name, value, id=f"{parse.__name__}-{name}-{value!r}")
        for parse in (completion, chat)
        for name, values in (BOTH | ONLY[parse]).items()
        for value in values
    ],
)
def test_wrong_values_are_refused_by_name(parse, name, value):
    error = refused(parse, **{name: value})
    assert error.param == name
    assert error.message.startswith(("completions: ", "chat completions: "))
    assert name in error.message


@pytest.mark.parametrize("parse", [completion, chat])
@pytest.mark.parametrize("name", ["top_a", "guided_json", "Temperature", "ignore_eos", "user", ""])
def test_unknown_fields_are_refused_by_name(parse, name):
    error = refused(parse, **{name: 1})
    assert (error.param, error.code) == (name, "unknown_field")
    assert refused(parse, **{name: None}).code == "unknown_field"


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "user"}, "messages[0].content"),
        ({"content": "a"}, "messages[0].role"),
        ({"role": "tool", "content": "a"}, "messages[0].role"),
        ({"role": ["user"], "content": "a"}, "messages[0].role"),
        ({"role": "user", "content": "a", "name": "b"}, "messages[0].name"),
        ({"role": "user", "content": "a", "cache_control": None}, "messages[0].cache_control"),
        ({"role": "assistant", "content": "a", "refusal": "No"}, "messages[0].refusal"),
        ({"role": "assistant", "content": "a", "refusal": []}, "messages[0].refusal"),
        ({"role": "assistant", "content": "a", "tool_calls": [{"id": "b"}]}, "messages[0].tool_calls"),
        ({"role": "assistant", "content": None, "tool_calls": None}, "messages[0].content"),
        ({"role": "user", "content": 3}, "messages[0].content"),
        ({"role": "user", "content": "\udfff"}, "messages[0].content"),
        ({"role": "user", "content": ["a"]}, "messages[0].content[0]"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": "a"}]}, "messages[0].content[0]"),
        ({"role": "user", "content": [{"type": "text", "text": 3}]}, "messages[0].content[0].text"),
        ("Hi", "messages[0]"),
    ],
)
def test_wrong_messages(message, param):
    assert refused(chat, messages=[message]).param == param


def test_what_changes_nothing_in_a_message():
    nulls = dict.fromkeys(("refusal", "name", "tool_calls", "function_call", "audio", "annotations"))
    for more in (nulls, {"tool_calls": [], "annotations": []}):
        message = {"role": "assistant", "content": "a"}
        assert chat(messages=[{**message, **more}]).messages == (message,)


def test_stream_options():
    error = refused(completion, stream=True, stream_options={"include_obfuscation": False})
    assert error.param == "stream_options.include_obfuscation"
    error = refused(completion, stream=True, stream_options={"include_usage": 1})
    assert error.param == "stream_options.include_usage"
    assert refused(completion, stream=True, stream_options=[]).param == "stream_options"
    assert completion(stream=True, stream_options=None).options.include_usage is False


def test_max_tokens_twice():
    error = refused(chat, max_tokens=3, max_completion_tokens=3)
    assert error.param == "max_completion_tokens"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"max_completion_tokens": None}, None),
        ({"max_tokens": None}, None),
        ({"max_completion_tokens": None, "max_tokens": None}, None),
        ({"max_completion_tokens": 5, "max_tokens": None}, 5),
        ({"max_completion_tokens": None, "max_tokens": 4}, 4),
    ],
)
def test_max_tokens_beside_a_null(fields, expected):
    assert chat(**fields).options.max_tokens == expected


def test_messages_of_errors_name_rule_and_value():
    error = refused(completion, temperature=3)
    assert error.message == "completions: temperature must be a number in [0, 2]; got 3"
    assert error.body() == {
        "error": {
            "message": error.message,
            "type": "invalid_request_error",
            "param": "temperature",
            "code": "invalid_value",
        }
    }
    assert len(refused(completion, stop=[["x" * 10_000]]).message) < 250
    assert len(refused(completion, **{"x" * 10_000: 1}).message) < 250


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"{", b"[1]", b"3", b"null", b'"a"', b"\xff", b'{"a": NaN}', b'{"a": Infinity}', b"{} {}"),
        *(b"[" * 100_000, b'{"a":' * 100_000, b'{"a": ' + b"9" * 5000 + b"}", b"{'a': 1}"),
    ],
    ids=lambda body: repr(body[:12]),
)
def test_bodies_that_are_no_json_object(body):
    with pytest.raises(ApiError, match=r"^the body must be JSON|^the body must be a JSON object"):
        parse_json(body)


def test_depths_around_the_limit_of_recursion():
    for depth in range(900, 1010):
        body = b'{"prompt": "Hi", "stop": ' + b"[" * depth + b"]" * depth + b"}"
        with pytest.raises(ApiError):
            parse_completion(parse_json(body))


def test_body():
    assert parse_json('{"a": "ä"}'.encode()) == {"a": "ä"}


@pytest.mark.parametrize("prompt", [[1, "x"] * 500, [[1], [None] * 1000], ["Hi", [-1] * 1001]])
def test_prompts_of_too_many_tokens_are_not_read(prompt):
    with pytest.raises(ApiError, match=r"^this server has room for 1000 tokens; the prompt has 100"):
        parse_completion({"prompt": prompt}, 1000)


@pytest.mark.parametrize("prompt", [[1] * 999, ["x"] * 1000, "x" * 1000, [[1] * 999] * 2])
def test_prompts_that_may_fit_are_read(prompt):
    parse_completion({"prompt": prompt}, 1000)


# Texts


class Characters:
    """Tokens are the numbers of characters, and 0 has no text."""

    def decode(self, tokens):
        return "".join(chr(token) for token in tokens if token)

    def text_stream(self, prompt=()):
        return self

    def flush(self):
        return ""

    def feed(self, token):
        return self.decode([token])


@pytest.mark.parametrize("stops", [("ab",), ("b", "abc"), ("aab", "ba"), ("abab", "bb"), ("aaa",), ()])
def test_stops_are_found_at_once(stops):
    """In all texts of six letters, of which each is sent as soon as it can be no part of a stop."""
    for letters in itertools.product("abc", repeat=6):
        stream, fed, sent = StopTexts(stops), "", ""
        for letter in letters:
            fed += letter
            sent += stream.feed(letter)
            begins = [fed.find(stop) for stop in stops if stop in fed]
            if begins:
                assert stream.found and sent == fed[: min(begins)]
                break
            held = [n for stop in stops for n in range(len(stop)) if fed.endswith(stop[:n])]
            assert not stream.found and sent == fed[: len(fed) - max(held, default=0)]
        else:
            assert sent + stream.rest() == fed


def test_text_that_may_be_a_stop_is_held_back_until_it_is_not():
    stream = StopTexts(["stop", "top hat"])
    assert [stream.feed(piece) for piece in ("a s", "t", "o", "x s", "to")] == ["a ", "", "", "stox ", ""]
    assert stream.rest() == "sto"
    stream = StopTexts(["stop"])
    assert stream.feed("a stop b") == "a "
    assert stream.found and stream.rest() == ""


def feed(answer, text, reason=None):
    deltas = [answer.feed(ord(c), -1.0, reason if i == len(text) - 1 else None) for i, c in enumerate(text)]
    return [delta for delta in deltas if delta is not None]


def test_answer_ends_before_its_stop():
    answer = Answer(0, Characters(), ["END"], logprobs=False)
    deltas = feed(answer, "some END")
    assert "".join(delta.text for delta in deltas) == "some "
    assert sum(delta.num_tokens for delta in deltas) == 8
    assert [delta.finish_reason for delta in deltas][-2:] == [None, "stop"]
    assert answer.finish_reason == "stop"


def test_answer_sends_what_it_held_back_at_its_end():
    answer = Answer(3, Characters(), ["END"], logprobs=False)
    (first, last) = feed(answer, "aEN", "length")
    assert (first.text, last.text, last.finish_reason, last.index) == ("a", "EN", "length", 3)


class Late(Characters):
    """Returns all text at the end."""

    def text_stream(self, prompt=()):
        self.text = ""
        return self

    def feed(self, token):
        self.text += self.decode([token])
        return ""

    def flush(self):
        return self.text


@pytest.mark.parametrize(
    ("text", "reason", "expected"),
    [
        ("some text", "length", ("some text", "length")),
        ("some END text", "length", ("some ", "stop")),
        ("some EN\0", "stop", ("some EN", "stop")),
    ],
)
def test_text_that_the_tokenizer_held_back_comes_at_the_end(text, reason, expected):
    (delta,) = feed(Answer(0, Late(), ["END"], logprobs=False), text, reason)
    assert (delta.text, delta.finish_reason) == expected
    assert delta.num_tokens == len(text)


def test_stop_token_has_no_text():
    answer = Answer(0, Characters(), [], logprobs=False)
    (first, last) = feed(answer, "ax", "stop")
    assert (first.text, last.text, last.finish_reason, last.num_tokens) == ("a", "", "stop", 1)


def test_logprobs_say_where_their_tokens_begin():
    answer = Answer(0, Characters(), ["cd"], logprobs=True)
    deltas = feed(answer, "abce", "length")
    assert [token.offset for delta in deltas for token in delta.logprobs] == [0, 1, 2, 3]
    assert "".join(token.text for delta in deltas for token in delta.logprobs) == "abce"
    assert [delta.text for delta in deltas] == ["a", "b", "ce"]


# Numbers


def test_histogram():
    histogram = Histogram([0.1, 1.0])
    for value in (0.05, 0.1, 0.5, 7.0):
        histogram.observe(value)
    assert list(histogram.lines("x")) == [
        'x_bucket{le="0.1"} 2',
        'x_bucket{le="1.0"} 3',
        'x_bucket{le="+Inf"} 4',
        "x_sum 7.65",
        "x_count 4",
    ]


def test_rate_counts_the_last_seconds():
    metrics = Metrics()
    for second in range(100):
        metrics.step(float(second), 10)
    assert metrics.tokens_per_second(99.0) == 6 * 10 / 5  # from 94 to 99
    assert metrics.tokens_per_second(200.0) == 0.0
    assert metrics.generated_tokens == 1000


@pytest.mark.parametrize(
    ("host", "name"),
    [
        ("localhost:80", "localhost"),
        ("LOCALHOST", "localhost"),
        ("[::1]:80", "[::1]"),
        ("[::1]", "[::1]"),
        ("127.0.0.1:8000", "127.0.0.1"),
        ("", ""),
        ("evil.example:80", "evil.example"),
    ],
)
def test_names_of_hosts(host, name):
    assert _without_port(host) == name
