"""octavo.serving.server over HTTP, in one process: what it answers, and what it refuses."""

import json
import re
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("starlette", reason="the server needs starlette")
pytest.importorskip("uvicorn", reason="the server needs uvicorn")
pytest.importorskip("httpx2", reason="Starlette's test client needs httpx2")

from starlette.testclient import TestClient

from support.served_model import NAME, greedy, load, make_parts

GREEDY = {"temperature": 0, "max_tokens": 24}
USER = [{"role": "user", "content": "What?"}]
USER_PROMPT = "user: What?\n"


@pytest.fixture
def served(request):
    """A client, the cache and the engine; at the end all pages have to be free."""
    options = getattr(request, "param", {})
    cache, (app, engine) = make_parts(load(), **options)
    with TestClient(app, base_url="http://localhost") as client:
        yield client, cache, engine
        assert engine.in_flight == 0
    cache.allocator.check_invariants()
    assert cache.allocator.num_free_pages == cache.allocator.num_pages


@pytest.fixture
def client(served):
    return served[0]


def complete(client, **fields):
    response = client.post("/v1/completions", json={**GREEDY, **fields})
    assert response.status_code == 200, response.text
    return response.json()


def chat(client, **fields):
    response = client.post("/v1/chat/completions", json={"messages": USER, **GREEDY, **fields})
    assert response.status_code == 200, response.text
    return response.json()


def events(client, path, **fields):
    """The events of a stream, the last of which is [DONE]."""
    response = client.post(path, json={**GREEDY, "stream": True, **fields})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    *lines, done, end = response.text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def refused(client, status, path="/v1/completions", **fields):
    response = client.post(path, json={"prompt": "Hi", **fields})
    assert response.status_code == status, response.text
    assert set(response.json()) == {"error"}
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    return response.json()["error"]


# Answers


def test_completion_is_what_the_model_says(client):
    text, reason = greedy("Hello", 24)
    answer = complete(client, prompt="Hello", model=NAME)
    assert answer["choices"] == [{"index": 0, "text": text, "logprobs": None, "finish_reason": reason}]
    assert answer["object"] == "text_completion" and answer["id"].startswith("cmpl-")
    assert answer["model"] == NAME
    assert answer["usage"]["prompt_tokens"] == 5
    assert answer["usage"]["total_tokens"] == 5 + answer["usage"]["completion_tokens"]


def test_chat_is_what_the_model_says(client):
    text, reason = greedy(USER_PROMPT, 24)
    answer = chat(client)
    message = {"role": "assistant", "content": text, "refusal": None}
    assert answer["choices"] == [{"index": 0, "message": message, "logprobs": None, "finish_reason": reason}]
    assert answer["object"] == "chat.completion" and answer["id"].startswith("chatcmpl-")
    assert answer["usage"]["prompt_tokens"] == len(USER_PROMPT)


@pytest.mark.parametrize("prompt", [f"prompt {i}" for i in range(12)])
def test_stop_tokens_and_lengths(client, prompt):
    """Long enough for the model to stop by itself, most of the time."""
    text, reason = greedy(prompt, 200)
    answer = complete(client, prompt=prompt, max_tokens=200)
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == (text, reason)
    assert answer["usage"]["completion_tokens"] == len(text) + (reason == "stop")


def test_prompts_of_all_kinds(client):
    texts = ["Hello", "Another", "x"]
    expected = [greedy(text, 24)[0] for text in texts]
    tokens = [list(text.encode()) for text in texts]
    for prompt in (texts, tokens, [texts[0], tokens[1], texts[2]]):
        answer = complete(client, prompt=prompt)
        assert [choice["text"] for choice in answer["choices"]] == expected
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
        assert answer["usage"]["prompt_tokens"] == sum(map(len, texts))
    assert complete(client, prompt=tokens[0])["choices"][0]["text"] == expected[0]


def test_several_answers_to_several_prompts(client):
    asked = {"prompt": ["ab", "cd"], "n": 3, "temperature": 1.0, "seed": 7}
    first, again = (complete(client, **asked)["choices"] for _ in range(2))
    assert [choice["index"] for choice in first] == list(range(6))
    assert [choice["text"] for choice in first] == [choice["text"] for choice in again]
    assert len({choice["text"] for choice in first}) == 6
    other = complete(client, **asked | {"seed": 8})["choices"]
    assert [choice["text"] for choice in first] != [choice["text"] for choice in other]


def test_sampling_options_reach_the_sampler(client):
    expected = greedy("abc", 24)[0]
    for options in ({"top_k": 1}, {"top_p": 1e-9}, {"temperature": 0}):
        answer = complete(client, prompt="abc", **{"temperature": 1.0, **options})
        assert answer["choices"][0]["text"] == expected


def test_default_number_of_tokens(client):
    answer = client.post("/v1/completions", json={"prompt": "prompt 0", "temperature": 0}).json()
    assert answer["usage"]["completion_tokens"] == 16
    # A chat has all the room that there is, here until the model stops.
    fields = {"messages": [{"role": "user", "content": "0"}], "temperature": 0}
    answer = client.post("/v1/chat/completions", json=fields).json()
    text, reason = greedy("user: 0\n", 1000)
    assert reason == "stop"
    assert answer["choices"][0]["message"]["content"] == text


# Streams


def test_stream_of_a_completion_adds_up(client):
    chunks = events(client, "/v1/completions", prompt="Hello")
    text, reason = greedy("Hello", 24)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == text
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-2:] == [None, reason]
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert all("usage" not in chunk for chunk in chunks)


def test_stream_of_a_chat_adds_up(client):
    chunks = events(client, "/v1/chat/completions", messages=USER)
    text, reason = greedy(USER_PROMPT, 24)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""} and deltas[-1] == {}
    assert "".join(delta.get("content", "") for delta in deltas) == text
    assert chunks[-1]["choices"][0]["finish_reason"] == reason
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_stream_with_usage(client, path):
    fields = {"prompt": "Hello"} if path == "/v1/completions" else {"messages": USER}
    *chunks, last = events(client, path, stream_options={"include_usage": True}, **fields)
    whole = client.post(path, json={**GREEDY, **fields}).json()
    assert last["choices"] == [] and last["usage"] == whole["usage"]
    assert all(chunk["usage"] is None for chunk in chunks)


def test_stream_of_several_answers(client):
    asked = {"prompt": ["ab", "cd"], "n": 2, "temperature": 1.0, "seed": 3}
    whole = [choice["text"] for choice in complete(client, **asked)["choices"]]
    texts = [""] * 4
    for chunk in events(client, "/v1/completions", **asked):
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["text"]
    assert texts == whole


# Stops


def test_stop_text_ends_an_answer_and_is_no_part_of_it(served):
    client, cache, _ = served
    whole = greedy("Hello", 24)[0]
    stop = whole[10:12]
    cut = whole[: whole.index(stop)]
    answer = complete(client, prompt="Hello", stop=stop)
    assert answer["choices"][0]["text"] == cut
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == len(cut) + 2  # what was computed
    chunks = events(client, "/v1/completions", prompt="Hello", stop=["never", stop])
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == cut
    end = time.monotonic() + 10
    while cache.allocator.stats()["num_sequences"]:  # until the next step
        assert time.monotonic() < end


def test_stop_text_ends_one_answer_of_several(client):
    asked = {"prompt": "ab", "n": 4, "temperature": 1.0, "seed": 3}
    whole = [choice["text"] for choice in complete(client, **asked)["choices"]]
    stop = whole[1][5]
    choices = complete(client, **asked, stop=[stop])["choices"]
    assert [choice["text"] for choice in choices] == [text.split(stop)[0] for text in whole]
    assert choices[1]["finish_reason"] == "stop"


# Logprobs


def expected_logprobs(prompt, tokens):
    logits = load().forward.__self__.logits([*prompt.encode(), *tokens]).astype(np.float64)
    rows = logits[len(prompt) - 1 : -1]
    rows -= np.log(np.exp(rows).sum(axis=1, keepdims=True))
    return rows[np.arange(len(tokens)), tokens]


def test_logprobs_of_a_completion(client):
    (choice,) = complete(client, prompt="Hello", logprobs=0)["choices"]
    found = choice["logprobs"]
    assert "".join(found["tokens"]) == choice["text"]
    assert found["text_offset"] == list(range(len(choice["text"])))
    tokens = [ord(token) for token in found["tokens"]]
    np.testing.assert_allclose(found["token_logprobs"], expected_logprobs("Hello", tokens), atol=1e-5)


def test_logprobs_of_a_chat(client):
    (choice,) = chat(client, logprobs=True)["choices"]
    content = choice["logprobs"]["content"]
    assert "".join(token["token"] for token in content) == choice["message"]["content"]
    assert all(bytes(token["bytes"]).decode() == token["token"] for token in content)
    tokens = [ord(token["token"]) for token in content]
    actual = [token["logprob"] for token in content]
    np.testing.assert_allclose(actual, expected_logprobs(USER_PROMPT, tokens), atol=1e-5)
    streamed = [
        token
        for chunk in events(client, "/v1/chat/completions", messages=USER, logprobs=True)
        for token in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]
    ]
    assert streamed == content


# The cache


def test_prompts_that_begin_alike_share_pages(served):
    client, _, _ = served
    beginning = "The same beginning of forty characters. "
    assert len(beginning) == 40
    complete(client, prompt=beginning + "one")
    complete(client, prompt=beginning + "two")
    metrics = parse_metrics(client.get("/metrics").text)
    assert metrics["octavo_prefix_found_tokens_total"] == 40
    assert metrics["octavo_prefix_asked_tokens_total"] == 86


@pytest.mark.parametrize("served", [{"num_pages": 16, "max_batch": 4}], indirect=True)
def test_answers_survive_preemption(served):
    """Sixteen pages of four tokens for what would need thirty."""
    client, _, _ = served
    prompts = [f"prompt {i}" for i in range(6)]
    answer = complete(client, prompt=prompts, max_tokens=30)
    assert [choice["text"] for choice in answer["choices"]] == [greedy(prompt, 30)[0] for prompt in prompts]
    assert parse_metrics(client.get("/metrics").text)["octavo_preemptions_total"] > 0


# Refusals


def test_fields_are_checked(client):
    error = refused(client, 400, temperature=-1)
    assert error["param"] == "temperature" and error["type"] == "invalid_request_error"
    assert refused(client, 400, guided_json={})["code"] == "unknown_field"
    assert refused(client, 400, "/v1/chat/completions", messages=[])["param"] == "messages"


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"prompt": ""}, "invalid_value", "prompt"),
        ({"prompt": [128]}, "invalid_value", "prompt"),
        ({"prompt": [-1]}, "invalid_value", "prompt"),
        ({"prompt": [10**30]}, "invalid_value", "prompt"),
        # The pages hold 1024 of the model's 4096 tokens.
        ({"prompt": "x" * 1024}, "context_length_exceeded", "prompt"),
        ({"prompt": "x" * 1000, "max_tokens": 25}, "context_length_exceeded", "max_tokens"),
        ({"prompt": "x", "n": 9}, "cannot_run", "n"),  # more than a batch
        ({"prompt": ["x"] * 65}, "too_many_answers", None),
    ],
)
def test_what_could_never_run(served, fields, code, param):
    client, cache, engine = served
    error = refused(client, 400, **fields)
    assert (error["code"], error["param"]) == (code, param), error
    assert engine.in_flight == 0
    assert cache.allocator.stats()["num_sequences"] == 0


LONG = [{"role": "user", "content": "x" * 990}]  # 997 tokens


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": [{"role": "user", "content": "x" * 1024}]}, "messages"),
        ({"messages": LONG, "max_tokens": 28}, "max_tokens"),
        ({"messages": LONG, "max_tokens": None, "max_completion_tokens": 28}, "max_completion_tokens"),
    ],
)
def test_errors_of_a_chat_name_its_fields(client, fields, param):
    response = client.post("/v1/chat/completions", json=fields)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", param)


def test_one_bad_prompt_takes_the_others_with_it(served):
    client, cache, _ = served
    error = refused(client, 400, prompt=["fine", "x" * 2000])
    assert "2000" in error["message"]
    assert refused(client, 400, prompt=["fine", "also"], n=9)["code"] == "cannot_run"
    complete(client, prompt="fine")
    metrics = parse_metrics(client.get("/metrics").text)
    assert metrics["octavo_answers_total"] == 1
    assert metrics["octavo_answers_cancelled_total"] == 0
    assert cache.allocator.stats()["num_sequences"] == 0


def test_models(client):
    (listed,) = client.get("/v1/models").json()["data"]
    assert (listed["id"], listed["object"], listed["max_model_len"]) == (NAME, "model", 1024)
    assert client.get(f"/v1/models/{NAME}").json() == listed
    for error in (refused(client, 404, model="gpt-9"), client.get("/v1/models/gpt-9").json()["error"]):
        assert error["code"] == "model_not_found"
        assert NAME in error["message"]


@pytest.mark.parametrize(
    ("content", "content_type", "status"),
    [
        (b"{", "application/json", 400),
        (b"", "application/json", 400),
        (b"\xff\xfe", "application/json; charset=utf-16", 400),
        (b'{"prompt": "Hi"}', "text/plain", 415),
        (b'{"prompt": "Hi"}', "application/x-www-form-urlencoded", 415),
        (b'{"prompt": "' + b"x" * 5 * 2**20 + b'"}', "application/json", 413),
    ],
)
def test_bad_bodies(client, content, content_type, status):
    response = client.post("/v1/completions", content=content, headers={"Content-Type": content_type})
    assert response.status_code == status
    assert response.json()["error"]["message"]


def test_half_of_a_surrogate_pair(client):
    """JSON can hold it, and an answer cannot."""
    for body, param in (
        ('{"prompt": "Hi", "\\ud800": 1}', '"\\ud800"'),
        ('{"prompt": "\\ud800"}', "prompt"),
        ('{"prompt": "Hi", "model": "\\ud800"}', "model"),
        ('{"prompt": "Hi", "stop": ["\\udfff"]}', "stop"),
    ):
        headers = {"Content-Type": "application/json"}
        response = client.post("/v1/completions", content=body.encode(), headers=headers)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == param


NAMES = ["n", "max_tokens", "temperature", "top_p", "top_k", "seed", "stop", "stream", "logprobs", "model"]
NAMES += ["stream_options", "messages", "echo", "suffix", "logit_bias", "tools", "max_completion_tokens"]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 9) | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["role", "content", "type", "text", "include_usage"]), inner)
    ),
    max_leaves=6,
)


def test_no_request_is_the_servers_fault(client):
    """The test's client raises what the server did not expect."""
    statuses = set()

    @given(
        st.sampled_from(["/v1/completions", "/v1/chat/completions"]),
        st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=3),
        st.sampled_from([{"prompt": "Hi", "max_tokens": 2}, {"messages": USER, "max_tokens": 2}]),
        st.none() | VALUES,
    )
    def ask(path, fields, known, prompt):
        body = {**known, **fields} | ({} if prompt is None else {"prompt": prompt})
        response = client.post(path, content=json.dumps(body), headers={"Content-Type": "application/json"})
        assert response.status_code in (200, 400, 404), response.text
        statuses.add(response.status_code)

    settings(max_examples=200)(ask)()
    assert {200, 400} <= statuses


def test_no_such_place(client):
    for response, status in ((client.get("/v2"), 404), (client.get("/v1/completions"), 405)):
        assert response.status_code == status
        assert response.json()["error"]["type"] == "invalid_request_error"
    assert client.get("/v1/completions").headers["allow"] == "POST"


KEY = {"Authorization": "Bearer secret"}


@pytest.mark.parametrize("served", [{"api_key": "secret"}], indirect=True)
@pytest.mark.parametrize(
    "headers", [{}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}, {"X-Api-Key": "secret"}]
)
def test_without_the_key(client, headers):
    for path in ("/v1/models", "/metrics", "/events", "/v1/nothing"):
        response = client.get(path, headers=headers)
        assert response.status_code == 401
        assert response.headers["www-authenticate"] == "Bearer"
    response = client.post("/v1/completions", json={"prompt": "Hi"}, headers=headers)
    assert response.status_code == 401
    assert response.json()["error"]["code"] == "invalid_api_key"
    for path in ("/", "/page.js", "/page.css", "/health"):
        assert client.get(path, headers=headers).status_code == 200


@pytest.mark.parametrize("served", [{"api_key": "secret"}], indirect=True)
def test_with_the_key(client):
    response = client.post("/v1/completions", json={"prompt": "Hello", **GREEDY}, headers=KEY)
    assert response.json()["choices"][0]["text"] == greedy("Hello", 24)[0]
    assert client.get("/v1/models", headers={**KEY, "Host": "evil.example"}).status_code == 200


def test_other_names_of_this_machine_are_refused(client):
    """What a page of evil.example can send, once that name leads to 127.0.0.1."""
    for host in ("evil.example", "evil.example:8000", "localhost.evil.example", ""):
        response = client.get("/v1/models", headers={"Host": host})
        assert response.status_code == 403
        assert response.json()["error"]["code"] == "host_refused"
    for host in ("localhost:1", "127.0.0.1:8000", "[::1]:80", "LOCALHOST"):
        assert client.get("/v1/models", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize("served", [{"local_only": False}], indirect=True)
def test_any_name_where_all_are_served(client):
    assert client.get("/v1/models", headers={"Host": "example.org"}).status_code == 200


# Metrics and health


def parse_metrics(text):
    """By name and labels; every line has to be well formed, and every sample declared before."""
    declared, found = set(), {}
    for line in text.splitlines():
        if match := re.fullmatch(r"# (HELP|TYPE) (\w+) (.+)", line):
            declared.add(match[2])
            assert match[1] == "HELP" or match[3] in ("counter", "gauge", "histogram")
        else:
            match = re.fullmatch(r'((\w+?)(?:_bucket|_sum|_count)?(?:\{\w+=".*"\})?) ([\d.e+-]+)', line)
            assert match, line
            assert match[2] in declared or re.sub(r"\{.*", "", match[1]) in declared, line
            found[match[1]] = float(match[3])
    assert text.endswith("\n")
    return found


def test_metrics(client):
    complete(client, prompt="Hello", n=2)
    refused(client, 400, temperature=-1)
    client.get("/nowhere")
    response = client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    found = parse_metrics(response.text)
    assert found['octavo_http_requests_total{path="/v1/completions",status="200"}'] == 1
    assert found['octavo_http_requests_total{path="/v1/completions",status="400"}'] == 1
    assert found['octavo_http_requests_total{path="other",status="404"}'] == 1
    assert found["octavo_answers_total"] == 2
    assert found["octavo_prompt_tokens_total"] == 5
    assert found["octavo_generated_tokens_total"] == 48
    assert found['octavo_answers_finished_total{reason="length"}'] == 2
    assert found["octavo_first_token_seconds_count"] == 1
    assert found["octavo_next_token_seconds_count"] == 46
    assert found["octavo_answer_seconds_count"] == 2
    assert found["octavo_in_flight_answers"] == 0
    assert found['octavo_free_pages{group="0"}'] == 256
    assert found['octavo_used_pages{group="0"}'] == 0


def test_health(client):
    assert client.get("/health").json() == {"status": "ok"}


def test_page(client):
    page = client.get("/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    for path in re.findall(r'(?:src|href)="(/[^"]*)"', page.text):
        assert client.get(path).status_code == 200
