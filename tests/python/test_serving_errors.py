"""octavo.serving.Scheduler: models that fail, and requests that are refused."""

import numpy as np
import pytest

from octavo.serving import Sampling, Scheduler
from support.exact_model import ExactModel
from support.serving import check, finish, make_cache, prompts

WINDOWS = {"full": (None, None), "window": (None, 5), "windows": (3, 9)}


@pytest.fixture(params=WINDOWS)
def model(request):
    return ExactModel(windows=WINDOWS[request.param])


@pytest.fixture
def plain():
    return ExactModel()


@pytest.mark.parametrize("failing", range(6))
def test_a_model_that_fails_can_be_called_again(model, failing):
    cache = make_cache(model, num_pages=24, prefix_cache=None in model.windows)

    def forward(step, tokens):
        if model.calls == failing:
            model.calls += 1
            raise KeyboardInterrupt
        return model.forward(step, tokens)

    scheduler = Scheduler(cache, forward, token_budget=10)
    requests = [scheduler.submit(prompt, max_tokens=5) for prompt in prompts(5)]
    requests.append(scheduler.submit([1] * 9, max_tokens=5, num_beams=2))
    with pytest.raises(KeyboardInterrupt):
        list(scheduler.run())
    cache.allocator.check_invariants()
    finish(scheduler, cache)
    for request in requests:
        check(model, request)


@pytest.mark.parametrize(
    ("logits", "message"),
    [
        (np.zeros(11, np.float32), r"shape \[1, vocabulary\]; got \[11\]"),
        (np.zeros((2, 11), np.float32), r"shape \[1, vocabulary\]; got \[2, 11\]"),
        (np.full((1, 11), np.nan, np.float32), "a finite maximum in each row; got nan in row 0"),
        (np.full((1, 11), -np.inf, np.float32), "a finite maximum in each row; got -inf in row 0"),
    ],
)
def test_logits_that_are_none(plain, logits, message):
    cache = make_cache(plain)
    wrong = [logits]
    scheduler = Scheduler(cache, lambda step, tokens: wrong[0] if wrong else plain.forward(step, tokens))
    request = scheduler.submit([1, 2], max_tokens=3)
    with pytest.raises(
        ValueError, match=rf"^Scheduler\.step: forward must return logits (of|with) {message}"
    ):
        scheduler.step()
    wrong.clear()
    finish(scheduler, cache)
    assert request.tokens() == plain.greedy([1, 2], 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt": []}, "prompt must hold a token at least"),
        ({"prompt": [-1]}, r"prompt must hold tokens from 0 to 2\*\*31 - 1; got -1"),
        ({"prompt": [2**31]}, "prompt must hold tokens from 0"),
        ({"max_tokens": 0}, r"max_tokens \(0\) must be at least 1"),
        ({"num_samples": 0}, r"num_samples \(0\) must be at least 1"),
        ({"num_beams": 0}, r"num_beams \(0\) must be at least 1"),
        ({"num_samples": 9}, r"num_samples \(9\) must be at most max_batch \(8\)"),
        ({"num_beams": 9}, r"num_beams \(9\) must be at most max_batch \(8\)"),
        ({"num_beams": 2, "num_samples": 3}, r"num_samples \(3\) must be at most num_beams \(2\)"),
        ({"num_beams": 2, "sampling": Sampling(0.5)}, "must have temperature 0 with num_beams"),
        ({"length_penalty": 10.5}, r"length_penalty \(10.5\) must be from -10 to 10"),
        ({"length_penalty": -1000}, r"length_penalty \(-1000.0\) must be"),
        ({"length_penalty": float("nan")}, r"length_penalty \(nan\) must be"),
        ({"max_tokens": 99}, r"a prompt of 3 tokens and 99 new ones exceed max_length \(100\)"),
        ({"max_tokens": 40}, "new ones need 11 pages of 4; the cache has 10"),
        ({"max_tokens": 20, "num_beams": 3}, "new ones in 3 beams need 18 pages of 4; the cache has 10"),
        ({"stop_sequences": [[]]}, "stop_sequences must not hold an empty one"),
        ({"stop_tokens": [-1]}, "stop_tokens must hold tokens from 0"),
    ],
)
def test_what_could_never_run_is_refused(plain, options, message):
    cache = make_cache(plain, num_pages=10, max_length=200)
    scheduler = Scheduler(cache, plain.forward, max_length=100)
    with pytest.raises(ValueError, match=rf"^Scheduler\.submit: .*{message}"):
        scheduler.submit(**{"prompt": [1, 2, 3], "max_tokens": 4, **options})
    assert not scheduler.unfinished


def test_nothing_is_made_for_samples_that_are_too_many(plain, monkeypatch):
    """Each has a generator of random numbers: a billion of them would not fit in memory."""
    made = []
    monkeypatch.setattr("octavo.serving.request.Draws", made.append)
    scheduler = Scheduler(make_cache(plain), plain.forward)
    with pytest.raises(ValueError, match=r"num_samples \(100\) must be at most max_batch \(8\)"):
        scheduler.submit([1, 2, 3], max_tokens=4, num_samples=100)
    assert made == []


@pytest.mark.parametrize("length_penalty", [-10.0, 10.0])
def test_the_largest_length_penalties_do_not_overflow(plain, length_penalty):
    cache = make_cache(plain)
    scheduler = Scheduler(cache, plain.forward)
    request = scheduler.submit([1, 2, 3], max_tokens=40, num_beams=2, length_penalty=length_penalty)
    finish(scheduler, cache)
    assert np.isfinite(request.score())
    assert (2**31 - 1) ** length_penalty > 0.0
    check(plain, request)


def test_a_token_that_the_model_does_not_know_is_refused(plain):
    cache = make_cache(plain)
    scheduler = Scheduler(cache, plain.forward, vocab_size=11, stop_tokens=[50])
    with pytest.raises(ValueError, match=r"^Scheduler\.submit: prompt .* below vocab_size \(11\); got 11$"):
        scheduler.submit([1, 11, 3], max_tokens=4)
    assert not scheduler.unfinished
    request = scheduler.submit([1, 10], max_tokens=4, stop_tokens=[60], stop_sequences=[[70, 1]])
    finish(scheduler, cache)
    assert request.tokens() == plain.greedy([1, 10], 4)


def test_what_the_page_tables_have_no_room_for_is_refused(plain):
    cache = make_cache(plain, max_length=20)
    scheduler = Scheduler(cache, plain.forward)
    with pytest.raises(ValueError, match=r"3 tokens and 19 new ones exceed the cache's max_length \(20\)"):
        scheduler.submit([1, 2, 3], max_tokens=19)
    request = scheduler.submit([1, 2, 3], max_tokens=18)
    finish(scheduler, cache)
    assert request.tokens() == plain.greedy([1, 2, 3], 18)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt": [0.5]}, "a token of prompt must be an int; got float"),
        ({"prompt": "abc"}, "a token of prompt must be an int; got str"),
        ({"prompt": 5}, "prompt must be iterable; got int"),
        ({"max_tokens": 1.5}, "max_tokens must be an int; got float"),
        ({"priority": 0.5}, "priority must be an int; got float"),
        ({"stop_sequences": 3}, "stop_sequences must be iterable; got int"),
        ({"stop_sequences": [3]}, "stop_sequences must be iterable; got int"),
        ({"sampling": {"temperature": 1.0}}, "sampling must be an octavo.serving.Sampling; got dict"),
        ({"length_penalty": "much"}, "length_penalty must be a number; got 'much'"),
        ({"length_penalty": None}, "length_penalty must be a number; got None"),
    ],
)
def test_what_is_no_int_is_refused(plain, options, message):
    scheduler = Scheduler(make_cache(plain), plain.forward)
    with pytest.raises(TypeError, match=f"^Scheduler.submit: {message}$"):
        scheduler.submit(**{"prompt": [1, 2, 3], "max_tokens": 4, **options})


@pytest.mark.parametrize(
    ("namespace", "error", "message"),
    [
        (None, TypeError, "must be a str; got NoneType"),
        (5, TypeError, "must be a str; got int"),
        (b"x", TypeError, "must be a str; got bytes"),
        ("\ud800", ValueError, r"\('\\ud800'\) must be valid Unicode"),
    ],
)
def test_a_namespace_that_the_prefix_cache_cannot_take_is_refused(plain, namespace, error, message):
    scheduler = Scheduler(make_cache(plain, prefix_cache=True), plain.forward)
    with pytest.raises(error, match=f"^Scheduler.submit: namespace {message}"):
        scheduler.submit([1, 2, 3], max_tokens=4, namespace=namespace)
    assert not scheduler.unfinished


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_batch": 0}, r"max_batch \(0\) must be from 1 to the cache's \(8\)"),
        ({"max_batch": 9}, r"max_batch \(9\) must be from 1 to the cache's \(8\)"),
        (
            {"token_budget": 7},
            r"token_budget \(7\) must be from max_batch \(8\) to the cache's max_tokens \(64\)",
        ),
        ({"token_budget": 65}, r"token_budget \(65\) must be from max_batch \(8\)"),
        ({"max_length": 1}, r"max_length \(1\) must be at least 2"),
        ({"vocab_size": 0}, r"vocab_size \(0\) must be at least 1"),
        ({"priority_steps": 0}, r"priority_steps \(0\) must be at least 1"),
    ],
)
def test_limits_out_of_range_are_refused(plain, options, message):
    with pytest.raises(ValueError, match=f"^Scheduler: {message}"):
        Scheduler(make_cache(plain), plain.forward, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_batch": 1.5}, "max_batch must be an int; got float"),
        ({"vocab_size": "many"}, "vocab_size must be an int; got str"),
        ({"priority_steps": None}, "priority_steps must be an int; got NoneType"),
        ({"decode_batches": 3}, "decode_batches must be iterable; got int"),
        ({"decode_batches": [1, 2.5]}, "a number of decode_batches must be an int; got float"),
        ({"forward": None}, "forward must be callable; got NoneType"),
        ({"cache": None}, r"cache must be an octavo\.KVCache, .*; got builtins\.NoneType"),
    ],
)
def test_arguments_of_another_kind_are_refused(plain, options, message):
    with pytest.raises(TypeError, match=f"^Scheduler: {message}$"):
        Scheduler(**{"cache": make_cache(plain), "forward": plain.forward, **options})


def test_a_cache_of_jax_is_refused(plain):
    jax_cache = pytest.importorskip("octavo.jax", reason="JAX is not installed").KVCache
    cache = jax_cache(1, 1, 8, num_pages=4)
    with pytest.raises(
        TypeError, match=r"^Scheduler: cache must be an octavo\.KVCache, .*; got octavo\._jax"
    ):
        Scheduler(cache, plain.forward)


def test_what_is_no_request_cannot_be_cancelled(plain):
    scheduler = Scheduler(make_cache(plain), plain.forward)
    request = scheduler.submit([1], max_tokens=2)
    with pytest.raises(TypeError, match=r"^Scheduler\.cancel: request must be one that .*; got int$"):
        scheduler.cancel(3)
    with pytest.raises(TypeError, match=r"^Scheduler\.cancel: sample must be an int; got str$"):
        scheduler.cancel(request, "first")
    assert scheduler.cancel(request, np.int64(0))
