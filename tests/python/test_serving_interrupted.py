"""octavo.serving.Scheduler: exceptions from anywhere in a step lose no request, token or page."""

import pytest

import octavo
from octavo import _kv_cache
from octavo.serving import Sampling, Scheduler, beams, scheduler
from support.exact_model import ExactModel
from support.serving import check, finish, make_cache, prompts


class Interrupt:
    """Raises in one call of a function, before or after the call does its work."""

    def __init__(self, function, call, after=False):
        self._function, self._call, self._after = function, call, after
        self.calls = 0

    def __call__(self, *args, **kwargs):
        self.calls += 1
        if self.calls == self._call and not self._after:
            raise KeyboardInterrupt
        result = self._function(*args, **kwargs)
        if self.calls == self._call:
            raise KeyboardInterrupt
        return result


def run(steps, cache):
    """Run to the end over one interrupt; return the outputs."""
    outputs = []
    interrupted = False
    while steps.unfinished and not interrupted:
        try:
            outputs += steps.step()
        except KeyboardInterrupt:
            interrupted = True
    assert interrupted
    cache.allocator.check_invariants()
    outputs += finish(steps, cache)
    return outputs


def check_outputs(requests, outputs):
    """That each token was returned once, in order."""
    for request in requests:
        for index in range(request.num_samples):
            given = [output for output in outputs if output.request is request and output.sample == index]
            assert [output.token for output in given] == request.tokens(index)
            assert given[-1].finish_reason == request.finish_reason(index)


def submit_all(steps):
    requests = [steps.submit(prompt, max_tokens=5) for prompt in prompts(3, 9)]
    requests.append(
        steps.submit([1] * 9, max_tokens=5, num_samples=2, sampling=Sampling(1.2, seed=3), logprobs=True)
    )
    requests.append(steps.submit([1] * 9, max_tokens=5, num_beams=3, num_samples=2))
    return requests


def check_all(model, requests, outputs):
    """Every request has the tokens that it would have alone, and they were all handed out."""
    for request in requests:
        check(model, request)
    check_outputs(requests, outputs)


@pytest.mark.parametrize("windows", [(None, None), (None, 5), (3, 9)])
@pytest.mark.parametrize(
    ("name", "call", "after"),
    [
        *(("sample", call, after) for call in (1, 2, 5, 8, 10) for after in (False, True)),
        *(("advance", call, True) for call in (1, 2, 5)),
        *(("fork", call, False) for call in (1, 2, 3)),
        *(("_commit", call, False) for call in (1, 3, 5, 9, 12, 22, 26)),
        *(("reorder", call, True) for call in (1, 2, 3)),
    ],
)
def test_an_exception_between_tokens(monkeypatch, windows, name, call, after):
    model = ExactModel(windows=windows)
    cache = make_cache(model, num_pages=40, prefix_cache=None in windows)
    steps = Scheduler(cache, model.forward)
    requests = submit_all(steps)
    sequences = steps._batcher.sequences
    owners = {"sample": scheduler, "advance": beams.BeamSearch, "_commit": steps, "fork": sequences}
    owner = owners.get(name, cache)
    interrupt = Interrupt(getattr(owner, name), call, after)
    monkeypatch.setattr(owner, name, lambda *args: interrupt(*args))
    outputs = run(steps, cache)
    monkeypatch.undo()  # check() samples as well
    check_all(model, requests, outputs)
    assert steps.stats().generated_tokens == len(outputs)
    assert steps.stats().num_finished == len(requests)


@pytest.mark.parametrize("call", [1, 2])
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("name", ["preempt", "resume"])
def test_an_exception_on_the_way_to_host_memory_or_back(monkeypatch, name, after, call):
    model = ExactModel()
    cache = make_cache(model, num_pages=8, num_host_pages=16)
    steps = Scheduler(cache, model.forward)
    requests = [steps.submit([token] * 10, max_tokens=15) for token in (1, 2, 3)]
    monkeypatch.setattr(cache, name, Interrupt(getattr(cache, name), call, after))
    outputs = run(steps, cache)
    check_all(model, requests, outputs)


@pytest.mark.parametrize("call", range(1, 7))
def test_an_exception_while_pages_go_to_host_memory_or_back(monkeypatch, call):
    model = ExactModel()
    cache = make_cache(model, num_pages=8, num_host_pages=16)
    steps = Scheduler(cache, model.forward)
    requests = [steps.submit([token] * 10, max_tokens=15) for token in (1, 2, 3)]
    copy_pages = Interrupt(_kv_cache.copy_pages, call)
    monkeypatch.setattr(_kv_cache, "copy_pages", lambda **arrays: copy_pages(**arrays))
    outputs = run(steps, cache)
    check_all(model, requests, outputs)


@pytest.mark.parametrize("windows", [(None, None), (None, 5)])
@pytest.mark.parametrize("call", range(1, 7))
def test_an_exception_after_a_step_took_its_pages(monkeypatch, windows, call):
    model = ExactModel(windows=windows)
    cache = make_cache(model, num_pages=40, prefix_cache=True)
    steps = Scheduler(cache, model.forward)
    requests = submit_all(steps)
    monkeypatch.setattr(cache, "step", Interrupt(cache.step, call, after=True))
    outputs = run(steps, cache)
    check_all(model, requests, outputs)


@pytest.mark.parametrize("call", range(1, 5))
def test_an_exception_while_pages_are_copied(monkeypatch, call):
    model = ExactModel()
    cache = make_cache(model, prefix_cache=True)
    steps = Scheduler(cache, model.forward, token_budget=8)
    requests = [steps.submit([1, 2, 3, 4, 5, 6, 7, 8, 9], max_tokens=1)]
    outputs = list(steps.run())
    copy_pages = Interrupt(_kv_cache.copy_pages, call)
    monkeypatch.setattr(_kv_cache, "copy_pages", lambda **arrays: copy_pages(**arrays))
    # The first finds a page in part, and its samples share one.
    prompt = [1, 2, 3, 4, 5, 6, *[3] * 13]
    requests.append(steps.submit(prompt, max_tokens=6, num_samples=2, sampling=Sampling(1.0, seed=3)))
    outputs += run(steps, cache)
    check_all(model, requests, outputs)


@pytest.mark.parametrize("prefix_cache", [False, True])
@pytest.mark.parametrize("token_budget", [8, 64])
def test_an_exception_before_the_model_runs(monkeypatch, token_budget, prefix_cache):
    """Keys and values of the step are not written, and the prefix cache must not say so either."""
    model = ExactModel()
    cache = make_cache(model, prefix_cache=prefix_cache)
    steps = Scheduler(cache, model.forward, token_budget=token_budget)
    requests = [steps.submit([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4], max_tokens=4)]
    batcher = steps._batcher
    monkeypatch.setattr(batcher, "begin_batch", Interrupt(batcher.begin_batch, 1, after=True))
    outputs = run(steps, cache)
    requests.append(steps.submit(requests[0].prompt, max_tokens=4))
    outputs += finish(steps, cache)
    check_all(model, requests, outputs)


def test_an_iteration_that_ends_early_loses_no_token():
    model = ExactModel()
    cache = make_cache(model)
    steps = Scheduler(cache, model.forward)
    requests = [steps.submit(prompt, max_tokens=3) for prompt in prompts(4, 9)]
    outputs = [next(steps.run()), next(steps.run())]
    assert steps.stats().generated_tokens == 2 and steps.stats().num_steps == 1
    outputs += finish(steps, cache)
    check_all(model, requests, outputs)


@pytest.mark.parametrize("num_host_pages", [0, 40])
@pytest.mark.parametrize("windows", [(None, None), (None, 5), (3, 9)])
def test_out_of_pages_at_every_step(windows, num_host_pages):
    """Before each of the steps in turn, somebody else takes all pages that are free."""
    model = ExactModel(windows=windows)
    number = refused = 0
    while True:
        cache = make_cache(model, num_pages=24, prefix_cache=None in windows, num_host_pages=num_host_pages)
        steps = Scheduler(cache, model.forward, token_budget=16)
        requests = [*submit_all(steps), steps.submit([2] * 5, max_tokens=20, priority=-1)]  # the last: alone
        outputs = [output for _ in range(number) for output in steps.step()]
        if not steps.unfinished:
            break
        foreign = [cache.create()]  # several, of a page each: one would give back those behind its windows
        while cache.allocator.try_extend(foreign[-1], cache.page_size):
            foreign.append(cache.create())
        before = [request.tokens(i) for request in requests for i in range(len(request.answers))]
        try:
            outputs += steps.step()
        except octavo.OutOfPages:
            refused += 1
            after = [request.tokens(i) for request in requests for i in range(len(request.answers))]
            assert before == after
        cache.allocator.check_invariants()
        for seq in foreign:
            cache.free(seq)
        outputs += finish(steps, cache)
        check_all(model, requests, outputs)
        number += 1
    assert number > 20 and refused > 2
