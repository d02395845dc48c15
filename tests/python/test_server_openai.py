"""OpenAI's own client against the server."""

import pytest

pytest.importorskip("starlette", reason="the server needs starlette")
pytest.importorskip("uvicorn", reason="the server needs uvicorn")
pytest.importorskip("openai", reason="this tests OpenAI's client")

import openai

from support.served_model import NAME, greedy
from support.server_process import serve

MESSAGES = [{"role": "user", "content": "What?"}]
TEXT, REASON = greedy("user: What?\n", 24)


@pytest.fixture(scope="module")
def client():
    with serve("--num-pages", "256", "--page-size", "4", "--api-key", "secret") as server:
        url = f"http://127.0.0.1:{server.port}/v1"
        with openai.OpenAI(base_url=url, api_key="secret") as client:
            yield client


def test_chat(client):
    answer = client.chat.completions.create(
        model=NAME, messages=MESSAGES, temperature=0, max_completion_tokens=24, n=2, logprobs=True
    )
    assert [choice.message.content for choice in answer.choices] == [TEXT, TEXT]
    assert answer.choices[0].finish_reason == REASON
    assert "".join(token.token for token in answer.choices[1].logprobs.content) == TEXT
    assert answer.usage.prompt_tokens == len("user: What?\n")


def test_an_answer_is_part_of_the_next_request(client):
    """As in OpenAI's documentation; the client sends all fields of the answer's message along."""
    options = {"model": NAME, "temperature": 0, "max_tokens": 24}
    answer = client.chat.completions.create(messages=MESSAGES, **options).choices[0].message
    messages = [*MESSAGES, answer, {"role": "user", "content": "And?"}]
    said = client.chat.completions.create(messages=messages, **options).choices[0].message.content
    assert said == greedy(f"user: What?\nassistant: {TEXT}\nuser: And?\n", 24)[0]
    messages[1] = answer.model_dump()
    assert client.chat.completions.create(messages=messages, **options).choices[0].message.content == said


def test_chat_stream(client):
    with client.chat.completions.create(
        model=NAME,
        messages=MESSAGES,
        temperature=0,
        max_tokens=24,
        stream=True,
        stream_options={"include_usage": True},
    ) as stream:
        *chunks, last = stream
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == TEXT
    assert chunks[-1].choices[0].finish_reason == REASON
    assert last.usage.completion_tokens == 24


def test_completion(client):
    answer = client.completions.create(
        model=NAME, prompt=["Hello", "x"], temperature=0, max_tokens=24, logprobs=0
    )
    assert [choice.text for choice in answer.choices] == [greedy("Hello", 24)[0], greedy("x", 24)[0]]
    assert "".join(answer.choices[0].logprobs.tokens) == answer.choices[0].text


def test_completion_stream(client):
    stream = client.completions.create(model=NAME, prompt="Hello", temperature=0, max_tokens=24, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == greedy("Hello", 24)[0]


def test_models(client):
    assert [model.id for model in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).owned_by == "octavo"


def test_errors(client):
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=NAME, prompt="Hello", best_of=3)
    assert (caught.value.param, caught.value.code) == ("best_of", "unsupported_value")
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="gpt-9", prompt="Hello")
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()


def test_a_client_that_leaves_its_stream(client):
    stream = client.completions.create(
        model=NAME, prompt="prompt 7", temperature=1, max_tokens=900, stream=True
    )
    next(iter(stream))
    stream.close()
