"""octavo.serving.Scheduler: who goes first, who is cancelled, and from which thread."""

import threading

import numpy as np
import pytest

from octavo.serving import Scheduler
from support.exact_model import ExactModel
from support.serving import finish, make_cache, prompts


@pytest.fixture
def plain():
    return ExactModel()


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
