"""octavo.serving.Scheduler: whatever happens to a request's pages, its text is that of the model alone."""

import threading

import numpy as np
import pytest

import octavo
from octavo.serving import Sampling, Scheduler
from octavo.serving.group import common_prefix
from support.exact_model import ExactModel
from support.serving import check, logprobs

WINDOWS = {"full": (None, None), "window": (None, 5), "windows": (3, 9)}


def make_cache(model, num_pages=64, page_size=4, max_batch=8, max_tokens=64, **options):
    return octavo.KVCache(
        len(model.windows),
        1,
        8,
        num_pages=num_pages,
        page_size=page_size,
        max_batch=max_batch,
        max_tokens=max_tokens,
        windows=model.windows,
        **options,
    )


def prompts(number, longest=30, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 11, rng.integers(1, longest + 1)).tolist() for _ in range(number)]


def finish(scheduler, cache):
    """Run to the end, with a look at the books after each step; return the outputs."""
    outputs = []
    while scheduler.unfinished:
        outputs += scheduler.step()
        cache.allocator.check_invariants()
    for group in range(cache.allocator.num_groups):
        stats = cache.allocator.stats(group)
        assert stats["num_sequences"] == 0
        assert stats["num_free_pages"] == stats["num_pages"]
    assert cache.allocator.num_free_host_pages == cache.allocator.num_host_pages
    assert scheduler.step() == []
    assert scheduler.prefill_remaining == 0
    return outputs


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


# Order


def first_outputs(outputs):
    """The requests in the order of their first tokens."""
    return list(dict.fromkeys(output.request for output in outputs))


def test_priorities_go_first_and_among_equals_the_earlier(plain):
    cache = make_cache(plain)
    scheduler = Scheduler(cache, plain.forward, max_batch=1)
    requests = [scheduler.submit([1, 2], max_tokens=2, priority=priority) for priority in (0, 1, 0, 5, 1)]
    assert first_outputs(finish(scheduler, cache)) == [requests[i] for i in (3, 1, 4, 0, 2)]


def test_a_higher_priority_takes_the_row_of_a_lower_one(plain):
    cache = make_cache(plain)
    scheduler = Scheduler(cache, plain.forward, max_batch=2)
    low = [scheduler.submit([1, 2], max_tokens=9) for _ in range(2)]
    scheduler.step()
    high = scheduler.submit([3], max_tokens=4, priority=1)
    for _ in range(4):
        scheduler.step()
    assert high.finished
    assert len(low[0].tokens()) == 5 and len(low[1].tokens()) == 1
    finish(scheduler, cache)
    assert [request.tokens() for request in low] == [plain.greedy([1, 2], 9)] * 2
    assert scheduler.stats().num_preemptions == 1


def test_pages_are_taken_from_the_last_in_the_order(plain):
    cache = make_cache(plain, num_pages=6)
    scheduler = Scheduler(cache, plain.forward)
    requests = [scheduler.submit([1, 2, 3], max_tokens=13, priority=priority) for priority in (0, 1, 0)]
    outputs = finish(scheduler, cache)
    ends = [output.request for output in outputs if output.finish_reason]
    assert ends == [requests[1], requests[0], requests[2]]


@pytest.mark.parametrize("priority_steps", [1, 5])
def test_no_request_starves(plain, priority_steps):
    """A new request of a higher priority each step, for ever: they may overtake for priority_steps steps for
    each level, and no longer."""
    cache = make_cache(plain)
    scheduler = Scheduler(cache, plain.forward, max_batch=1, priority_steps=priority_steps)
    low = scheduler.submit([1], max_tokens=1)
    before = 0
    while not low.finished:
        scheduler.submit([2], max_tokens=1, priority=3)
        before += len(scheduler.step())
        assert before < 100
    # Those of steps 0 to 3 * priority_steps - 1 rank before it; one is done in each step.
    assert before == 3 * priority_steps + 1
    finish(scheduler, cache)


def test_decoding_goes_on_while_a_prompt_is_computed(plain):
    cache = make_cache(plain)
    scheduler = Scheduler(cache, plain.forward, max_batch=4, token_budget=4)
    first = scheduler.submit([1], max_tokens=20)
    scheduler.step()
    second = scheduler.submit([2] * 10, max_tokens=2)
    assert scheduler.prefill_remaining == 10
    for number in range(1, 4):
        scheduler.step()
        assert len(first.tokens()) == 1 + number
        assert scheduler.prefill_remaining == 10 - 3 * number
    assert second.tokens() == []
    scheduler.step()
    assert len(second.tokens()) == 1
    finish(scheduler, cache)


# Cancelling


@pytest.mark.parametrize("num_steps", range(9))
@pytest.mark.parametrize("kind", [{}, {"num_samples": 3}, {"num_beams": 3}])
def test_cancelling_at_any_moment_frees_the_pages(plain, kind, num_steps):
    cache = make_cache(plain, num_pages=13, num_host_pages=4)
    scheduler = Scheduler(cache, plain.forward, token_budget=8)
    others = [scheduler.submit(prompt, max_tokens=8) for prompt in prompts(3)]
    request = scheduler.submit([1] * 12, max_tokens=5, **kind)
    others.append(scheduler.submit([2] * 5, max_tokens=8))
    for _ in range(num_steps):
        scheduler.step()
    given = [request.tokens(index) for index in range(len(request.answers))]
    unfinished = not request.finished
    assert scheduler.cancel(request) is unfinished
    assert scheduler.cancel(request) is False
    assert request.finished
    assert all(output.request is not request for output in finish(scheduler, cache))
    assert [request.tokens(index) for index in range(len(request.answers))] == given
    if unfinished:
        assert "cancelled" in [request.finish_reason(index) for index in range(len(request.answers))]
        assert scheduler.stats().num_cancelled == 1
    for other in others:
        assert other.tokens() == plain.greedy(other.prompt, 8)


def test_cancelled_while_the_model_runs(plain):
    cache = make_cache(plain)
    cancelled = []

    def forward(step, tokens):
        if plain.calls == 2:
            cancelled.append(scheduler.cancel(request))
        return plain.forward(step, tokens)

    scheduler = Scheduler(cache, forward)
    request = scheduler.submit([1, 2], max_tokens=9)
    other = scheduler.submit([3], max_tokens=9)
    scheduler.step()
    scheduler.step()
    assert [output.request for output in scheduler.step()] == [other]
    assert cancelled == [True]
    assert len(request.tokens()) == 2
    assert cache.stats()["num_sequences"] == 1
    finish(scheduler, cache)


def test_a_request_of_another_scheduler_is_not_cancelled(plain):
    schedulers = [Scheduler(make_cache(plain), plain.forward) for _ in range(2)]
    request = schedulers[0].submit([1], max_tokens=1)
    with pytest.raises(ValueError, match=r"^Scheduler\.cancel: the request is another scheduler's"):
        schedulers[1].cancel(request)


# Threads


def test_submitted_and_cancelled_from_other_threads(plain):
    cache = make_cache(plain, num_pages=24, num_host_pages=5, prefix_cache=True)
    scheduler = Scheduler(cache, plain.forward)
    requests, cancelled = [], []
    still_submitting = threading.Event()
    still_submitting.set()

    def client(number):
        rng = np.random.default_rng(number)
        for prompt in prompts(12, seed=number):
            request = scheduler.submit(prompt, max_tokens=6, num_samples=int(rng.integers(1, 4)))
            requests.append(request)
            if rng.random() < 0.3 and scheduler.cancel(request):
                cancelled.append(request)
            assert scheduler.stats().num_requests >= len(requests) - 3

    def serve():
        while still_submitting.is_set() or scheduler.unfinished:
            scheduler.step()
            cache.allocator.check_invariants()

    server = threading.Thread(target=serve)
    clients = [threading.Thread(target=client, args=(number,)) for number in range(3)]
    for thread in (server, *clients):
        thread.start()
    for thread in clients:
        thread.join()
    still_submitting.clear()
    server.join()
    finish(scheduler, cache)
    assert len(requests) == 36
    assert sorted(request.index for request in requests) == list(range(36))
    for request in requests:
        expected = plain.greedy(request.prompt, 6)
        for index in range(request.num_samples):
            if request not in cancelled:
                assert request.tokens(index) == expected
            else:
                assert request.tokens(index) == expected[: len(request.tokens(index))]


def test_two_threads_cannot_step_at_once(plain):
    cache = make_cache(plain)
    errors = []

    def step_too():
        with pytest.raises(RuntimeError) as error:
            scheduler.step()
        errors.append(str(error.value))

    def forward(step, tokens):
        thread = threading.Thread(target=step_too)
        thread.start()
        thread.join()
        return plain.forward(step, tokens)

    scheduler = Scheduler(cache, forward)
    scheduler.submit([1], max_tokens=1)
    scheduler.step()
    assert errors == ["Scheduler.step: another thread is in it; one at a time may step"]
    finish(scheduler, cache)


# What goes wrong


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


def test_what_the_page_tables_have_no_room_for_is_refused(plain):
    cache = make_cache(plain, max_length=20)
    scheduler = Scheduler(cache, plain.forward)
    with pytest.raises(ValueError, match=r"3 tokens and 19 new ones exceed the cache's max_length \(20\)"):
        scheduler.submit([1, 2, 3], max_tokens=19)
    request = scheduler.submit([1, 2, 3], max_tokens=18)
    finish(scheduler, cache)
    assert request.tokens() == plain.greedy([1, 2, 3], 18)


@pytest.mark.parametrize(
    "options", [{"prompt": [0.5]}, {"prompt": ["a"]}, {"max_tokens": 1.5}, {"priority": 0.5}]
)
def test_what_is_no_int_is_refused(plain, options):
    scheduler = Scheduler(make_cache(plain), plain.forward)
    with pytest.raises(TypeError):
        scheduler.submit(**{"prompt": [1, 2, 3], "max_tokens": 4, **options})


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
        ({"priority_steps": 0}, r"priority_steps \(0\) must be at least 1"),
    ],
)
def test_limits_out_of_range_are_refused(plain, options, message):
    with pytest.raises(ValueError, match=f"^Scheduler: {message}"):
        Scheduler(make_cache(plain), plain.forward, **options)
