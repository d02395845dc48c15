"""octavo.serving.Scheduler: whatever happens to a request's pages, its text is that of the model alone."""

import numpy as np
import pytest

import octavo
from octavo.serving import Sampling, Scheduler
from octavo.serving.group import common_prefix
from support.exact_model import ExactModel
from support.serving import check, finish, logprobs, make_cache, prompts

WINDOWS = {"full": (None, None), "window": (None, 5), "windows": (3, 9)}


@pytest.fixture(params=WINDOWS)
def model(request):
    return ExactModel(windows=WINDOWS[request.param])


@pytest.fixture
def plain():
    return ExactModel()


# Text


@pytest.mark.parametrize("token_budget", [8, 13, 64])
@pytest.mark.parametrize("page_size", [1, 4, 7])
def test_a_batch_gives_what_the_model_gives_alone(model, page_size, token_budget):
    cache = make_cache(model, page_size=page_size, num_pages=256 // page_size)
    scheduler = Scheduler(cache, model.forward, token_budget=token_budget)
    requests = [scheduler.submit(prompt, max_tokens=12) for prompt in prompts(12)]
    outputs = finish(scheduler, cache)
    for request in requests:
        assert request.tokens() == model.greedy(request.prompt, 12)
        assert [output.token for output in outputs if output.request is request] == request.tokens()
    assert {output.finish_reason for output in outputs} == {None, "length"}
    assert scheduler.stats().generated_tokens == len(outputs) == 12 * 12


# A prefix cache needs a layer without a window.
CACHED = pytest.mark.parametrize(
    ("windows", "prefix_cache"),
    [((None, None), False), ((None, None), True), ((None, 5), False), ((None, 5), True), ((3, 9), False)],
)


@pytest.mark.parametrize("num_host_pages", [0, 3, 100])
@CACHED
def test_too_few_pages_change_nothing_but_the_time(windows, prefix_cache, num_host_pages):
    model = ExactModel(windows=windows)
    options = {"prefix_cache": prefix_cache, "num_host_pages": num_host_pages}
    cache = make_cache(model, num_pages=11, **options)
    scheduler = Scheduler(cache, model.forward, token_budget=16)
    requests = [scheduler.submit(prompt, max_tokens=14) for prompt in prompts(10)]
    finish(scheduler, cache)
    for request in requests:
        assert request.tokens() == model.greedy(request.prompt, 14)
    stats = scheduler.stats()
    assert stats.peak_used_pages <= 11
    if None in model.windows:
        assert stats.num_preemptions > 0
        assert (stats.num_moves_to_host > 0) == (num_host_pages > 0)


def test_a_request_may_take_all_pages_there_are(plain):
    """Out of pages whenever another one wants some."""
    cache = make_cache(plain, num_pages=8)
    scheduler = Scheduler(cache, plain.forward)
    requests = [scheduler.submit(prompt, max_tokens=33 - len(prompt)) for prompt in prompts(6)]
    finish(scheduler, cache)
    for request in requests:
        assert request.tokens() == plain.greedy(request.prompt, request.max_tokens)


def test_all_pages_with_a_prefix_found_in_part_of_one(plain):
    """The page that is found in part is held until it is copied, and the copy takes one too many."""
    cache = make_cache(plain, num_pages=4, prefix_cache=True)
    scheduler = Scheduler(cache, plain.forward)
    first = scheduler.submit(range(1, 10), max_tokens=8)
    finish(scheduler, cache)
    prompt = [*range(1, 10), *first.tokens()][:15]
    assert cache.allocator.num_cached_tokens(prompt[:-1]) == 14
    second = scheduler.submit(prompt, max_tokens=2)
    finish(scheduler, cache)
    assert second.tokens() == plain.greedy(prompt, 2)
    assert scheduler.stats().num_preemptions == 0


def test_a_prompt_that_is_computed_anew_stays_in_its_namespace(plain):
    """As above: the request gives up what was found, and begins with an empty sequence."""
    cache = make_cache(plain, num_pages=4, prefix_cache=True)
    scheduler = Scheduler(cache, plain.forward)
    scheduler.submit(range(9), max_tokens=1, namespace="a")
    finish(scheduler, cache)
    prompt = [0, 1, 2, 3, 4, 5, *[7] * 9]
    request = scheduler.submit(prompt, max_tokens=2, namespace="a")
    finish(scheduler, cache)
    assert request.tokens() == plain.greedy(prompt, 2)
    assert scheduler.stats().prefill_tokens == 9 + 15  # of the 6 tokens that were found, too
    assert cache.allocator.num_cached_tokens(prompt, namespace="a") == 15
    assert cache.allocator.num_cached_tokens(prompt) == 0


def test_what_others_that_were_put_aside_share_is_let_go(plain):
    """Pages that several share stay on the device while they are in host memory, all of them."""
    cache = make_cache(plain, num_pages=8, num_host_pages=100)
    scheduler = Scheduler(cache, plain.forward)
    samples = scheduler.submit(range(11), max_tokens=9, num_samples=3)
    scheduler.step()
    scheduler.step()
    high = scheduler.submit([3] * 20, max_tokens=13, priority=1)
    scheduler.step()
    assert scheduler.stats().num_moves_to_host == 3
    finish(scheduler, cache)
    check(plain, samples)
    check(plain, high)


def test_a_prompt_in_chunks_that_the_window_has_pages_for():
    model = ExactModel(windows=(3, 3))
    cache = make_cache(model, num_pages=3, max_length=64)
    scheduler = Scheduler(cache, model.forward)
    request = scheduler.submit([1, 2, 3, 4, 5] * 10, max_tokens=4)
    finish(scheduler, cache)
    check(model, request)
    assert scheduler.stats().num_steps > 7


def test_pages_of_others_are_an_error_and_nothing_is_lost(plain):
    cache = make_cache(plain, num_pages=4)
    foreign = cache.create()
    cache.allocator.extend(foreign, 12)
    scheduler = Scheduler(cache, plain.forward)
    request = scheduler.submit([1, 2, 3], max_tokens=6)
    with pytest.raises(octavo.OutOfPages, match=r"^Scheduler\.step: the cache has too few pages"):
        list(scheduler.run())
    assert request.tokens() == plain.greedy([1, 2, 3], 6)[: len(request.tokens())]
    cache.free(foreign)
    finish(scheduler, cache)
    assert request.tokens() == plain.greedy([1, 2, 3], 6)


# Samples


@pytest.mark.parametrize("num_host_pages", [0, 100])
@pytest.mark.parametrize("num_pages", [10, 64])
def test_samples_depend_on_the_seed_alone(model, num_pages, num_host_pages):
    cache = make_cache(model, num_pages=num_pages, num_host_pages=num_host_pages)
    scheduler = Scheduler(cache, model.forward, token_budget=12)
    requests = [
        scheduler.submit(
            prompt,
            max_tokens=9,
            num_samples=1 + number % 4,
            sampling=Sampling(temperature=2.0, top_k=7, top_p=0.95, seed=number),
        )
        for number, prompt in enumerate(prompts(7))
    ]
    finish(scheduler, cache)
    for request in requests:
        check(model, request)
        texts = {tuple(request.tokens(index)) for index in range(request.num_samples)}
        assert len(texts) == request.num_samples


def test_a_prompt_is_computed_once_for_all_its_samples(plain):
    cache = make_cache(plain)
    scheduler = Scheduler(cache, plain.forward)
    request = scheduler.submit(range(10), max_tokens=3, num_samples=5)
    finish(scheduler, cache)
    stats = scheduler.stats()
    assert stats.prefill_tokens == 10
    assert stats.decode_tokens == 2 * 5
    # Two pages of the prompt for all, and one each; without sharing there would be three each.
    assert (stats.peak_used_pages, stats.peak_unshared_pages) == (2 + 5, 3 * 5)
    assert [request.tokens(index) for index in range(5)] == [plain.greedy(range(10), 3)] * 5


def test_seeds_of_their_own_where_none_is_given(plain):
    cache = make_cache(plain)
    scheduler = Scheduler(cache, plain.forward)
    requests = [scheduler.submit([1], max_tokens=20, sampling=Sampling(1.0)) for _ in range(2)]
    finish(scheduler, cache)
    assert requests[0].tokens() != requests[1].tokens()


# Beams


@pytest.mark.parametrize("num_host_pages", [0, 100])
@pytest.mark.parametrize("num_pages", [20, 64])
@CACHED
def test_beams_share_and_part(windows, prefix_cache, num_pages, num_host_pages):
    model = ExactModel(windows=windows)
    cache = make_cache(model, num_pages=num_pages, prefix_cache=prefix_cache, num_host_pages=num_host_pages)
    scheduler = Scheduler(cache, model.forward, token_budget=12)
    most = 4 if num_pages == 20 else 8
    options = [{"num_beams": n, "max_tokens": 14, "stop_tokens": [3]} for n in (2, 3, 1, most, 2, 3)]
    requests = [
        scheduler.submit(prompt, num_samples=given["num_beams"], logprobs=True, **given)
        for prompt, given in zip(prompts(6, longest=20), options, strict=True)
    ]
    outputs = finish(scheduler, cache)
    if num_pages == 20 and None in model.windows:
        assert scheduler.stats().num_preemptions > 0
    for request in requests:
        check(model, request)
        assert len(request.answers) == request.num_beams
        for index in range(request.num_beams):
            ours = [output for output in outputs if output.request is request and output.sample == index]
            assert [output.token for output in ours] == request.tokens(index)
            assert [output.logprob for output in ours] == request.token_logprobs(index)
            assert [output.finish_reason for output in ours[:-1]] == [None] * (len(ours) - 1)


def test_more_beams_than_the_vocabulary_has_continuations():
    model = ExactModel(vocabulary=2)
    cache = make_cache(model)
    scheduler = Scheduler(cache, model.forward)
    request = scheduler.submit([1, 0, 1], max_tokens=2, num_beams=8, num_samples=8)
    finish(scheduler, cache)
    assert request.finished
    texts = {tuple(request.tokens(index)) for index in range(4)}
    assert texts == {(0, 0), (0, 1), (1, 0), (1, 1)}
    assert len(request.answers) == 4


def test_beams_hold_their_prompt_once(plain):
    cache = make_cache(plain)
    scheduler = Scheduler(cache, plain.forward)
    scheduler.submit(list(range(11)) * 4, max_tokens=4, num_beams=4)
    finish(scheduler, cache)
    assert scheduler.stats().peak_used_pages == 11 + 4


# The end of a text


def test_stop_tokens_and_sequences(plain):
    prompt = [5, 6]
    text = plain.greedy(prompt, 40)
    cache = make_cache(plain)
    scheduler = Scheduler(cache, plain.forward, stop_tokens=[text[20]])
    first = text.index(text[20]) + 1
    cases = [
        ({}, first, "stop"),
        ({"stop_tokens": [text[2]]}, text.index(text[2]) + 1, "stop"),
        ({"stop_sequences": [text[1:4]]}, 4, "stop"),
        ({"stop_sequences": [[99], text[3:5], text[0:5]]}, 5, "stop"),
        ({"stop_sequences": [[*prompt, text[0]]]}, first, "stop"),  # not in the prompt
        ({"max_tokens": 1}, 1, "length"),
    ]
    requests = [scheduler.submit(prompt, **{"max_tokens": 40, **options}) for options, _, _ in cases]
    outputs = finish(scheduler, cache)
    for request, (_, length, reason) in zip(requests, cases, strict=True):
        assert request.tokens() == text[:length]
        assert request.finish_reason() == reason
        ours = [output for output in outputs if output.request is request]
        assert [output.finish_reason for output in ours] == [None] * (length - 1) + [reason]


def test_logprobs_are_those_of_all_tokens_at_temperature_1(plain):
    cache = make_cache(plain)
    scheduler = Scheduler(cache, plain.forward)
    request = scheduler.submit([1, 2], max_tokens=9, sampling=Sampling(3.0, top_k=4, seed=0), logprobs=True)
    without = scheduler.submit([1, 2], max_tokens=3)
    outputs = finish(scheduler, cache)
    np.testing.assert_allclose(request.token_logprobs(), logprobs(plain, [1, 2], request.tokens()))
    assert [output.logprob for output in outputs if output.request is request] == request.token_logprobs()
    assert without.token_logprobs() == []
    assert {output.logprob for output in outputs if output.request is without} == {None}


# The prefix cache


def test_prefixes_are_computed_once(plain):
    """Those that come together wait for the first, and those that come later find what is left."""
    cache = make_cache(plain, prefix_cache=True)
    scheduler = Scheduler(cache, plain.forward, token_budget=8)
    system = list(range(11)) * 2
    requests = [scheduler.submit([*system, 1, last], max_tokens=5) for last in (2, 3, 4)]
    finish(scheduler, cache)
    stats = scheduler.stats()
    assert stats.asked_tokens == 3 * 24
    assert stats.found_tokens == 2 * 23  # the last of six full pages in part
    assert stats.hit_rate == pytest.approx(46 / 72)
    assert stats.prefill_tokens == 3 * 24 - 46
    later = scheduler.submit([*system, 1, 2], max_tokens=5)
    other = scheduler.submit([*system, 1, 2], max_tokens=5, namespace="another tenant")
    finish(scheduler, cache)
    assert scheduler.stats().found_tokens == 3 * 23
    for request in (*requests, later, other):
        assert request.tokens() == plain.greedy(request.prompt, 5)


def test_without_a_prefix_cache_everything_is_computed(plain):
    cache = make_cache(plain)
    scheduler = Scheduler(cache, plain.forward)
    for _ in range(2):
        scheduler.submit(range(11), max_tokens=2)
    finish(scheduler, cache)
    assert scheduler.stats().prefill_tokens == 22
    assert scheduler.stats().hit_rate == 0.0


def test_common_prefix():
    assert common_prefix([[1, 2, 3]]) == 3
    assert common_prefix([[1, 2, 3], [1, 2, 3]]) == 3
    assert common_prefix([[1, 2, 3, 4, 5], [1, 2, 3, 9], [1, 2, 7, 4]]) == 2
    assert common_prefix([[1], [2]]) == common_prefix([[], [2]]) == 0
    long = list(range(1000))
    for length in (0, 1, 499, 500, 998, 999):
        assert common_prefix([long, [*long[:length], -1, *long[length + 1 :]]]) == length


def test_prefill_remaining_counts_while_the_model_runs():
    model = ExactModel()
    cache = make_cache(model)
    remaining = []

    def forward(step, tokens):
        logits = model.forward(step, tokens)
        if model.calls == 3:
            scheduler.cancel(first)
            late.append(scheduler.submit([1] * 5, max_tokens=2))
        remaining.append(scheduler.prefill_remaining)
        return logits

    late = []
    scheduler = Scheduler(cache, forward)
    first = scheduler.submit([1, 2, 3], max_tokens=8)
    second = scheduler.submit([4, 5], max_tokens=8)
    assert scheduler.prefill_remaining == 5
    finish(scheduler, cache)
    assert remaining[:4] == [0, 0, 5, 0]
    for request in (first, second, *late):
        check(model, request)
    assert len(second.tokens()) == 8 and first.finish_reason() == "cancelled"


def test_prefill_remaining_does_not_count_what_was_cancelled():
    model = ExactModel()
    scheduler = Scheduler(make_cache(model), model.forward, token_budget=8)
    begun, waiting = (scheduler.submit([1] * 20, max_tokens=2) for _ in range(2))
    scheduler.step()
    assert scheduler.prefill_remaining == 12 + 20
    scheduler.cancel(waiting)
    assert scheduler.prefill_remaining == 12
    scheduler.cancel(begun)
    assert scheduler.prefill_remaining == 0


@pytest.mark.parametrize("num_steps", [0, 1, 4, 9])
def test_close_cancels_everything_and_frees_all_pages(model, num_steps):
    cache = make_cache(model, num_pages=24, num_host_pages=8)
    scheduler = Scheduler(cache, model.forward, token_budget=12)
    requests = [scheduler.submit(prompt, max_tokens=12, num_samples=2) for prompt in prompts(5)]
    requests.append(scheduler.submit([1] * 9, max_tokens=12, num_beams=2))
    for _ in range(num_steps):
        scheduler.step()
    assert scheduler.unfinished
    for _ in range(2):
        scheduler.close()
        assert not scheduler.unfinished and list(scheduler.run()) == []
        for group in range(cache.allocator.num_groups):
            stats = cache.allocator.stats(group)
            assert stats["num_sequences"] == 0 and stats["num_free_pages"] == stats["num_pages"]
        assert cache.allocator.num_free_host_pages == cache.allocator.num_host_pages
    assert {request.finish_reason() for request in requests} <= {"cancelled", "length"}
    for request in requests:
        check(model, request)
    with pytest.raises(RuntimeError, match=r"^Scheduler\.submit: the scheduler is closed$"):
        scheduler.submit([1], max_tokens=1)
    with pytest.raises(RuntimeError, match=r"^Scheduler\.step: the scheduler is closed$"):
        scheduler.step()
    other = Scheduler(cache, model.forward)
    request = other.submit([1] * 20, max_tokens=5)
    finish(other, cache)
    check(model, request)


def test_a_scheduler_is_a_context_manager():
    model = ExactModel()
    cache = make_cache(model)

    def forward(step, tokens):
        with pytest.raises(RuntimeError, match=r"^Scheduler\.close: step\(\) is under way"):
            scheduler.close()
        return model.forward(step, tokens)

    with Scheduler(cache, forward) as scheduler:
        request = scheduler.submit([1] * 20, max_tokens=5)
        scheduler.step()
        assert cache.allocator.num_free_pages < 64
    assert request.finish_reason() == "cancelled" and len(request.tokens()) == 1
    assert cache.allocator.num_free_pages == 64
