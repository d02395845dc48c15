"""octavo.serving.Scheduler under random requests, cancellations and failures, with hardly any pages."""

import contextlib

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import octavo
from octavo.serving import Sampling, Scheduler
from support.exact_model import ExactModel
from support.serving import check

VOCABULARY = 5
TOKENS = st.integers(0, VOCABULARY - 1)
SAMPLING = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.7, 2.0]),
    top_k=st.sampled_from([0, 1, 3]),
    top_p=st.sampled_from([0.6, 1.0]),
    seed=st.sampled_from([None, 0, 1]),
)


class ModelError(Exception):
    pass


class Requests(RuleBasedStateMachine):
    @initialize(
        windows=st.sampled_from([(None, None), (None, 3), (2, 5)]),
        page_size=st.integers(1, 5),
        num_pages=st.integers(2, 14),
        max_batch=st.integers(1, 5),
        more_tokens=st.integers(0, 20),
        num_host_pages=st.sampled_from([0, 2, 100]),
        prefix_cache=st.booleans(),
        priority_steps=st.integers(1, 9),
        seed=st.integers(0, 9),
    )
    def begin(
        self,
        windows,
        page_size,
        num_pages,
        max_batch,
        more_tokens,
        num_host_pages,
        prefix_cache,
        priority_steps,
        seed,
    ):
        self.model = ExactModel(VOCABULARY, windows, seed)
        self.fails = False
        self.cache = octavo.KVCache(
            2,
            1,
            8,
            num_pages=num_pages,
            page_size=page_size,
            max_batch=max_batch,
            max_tokens=max_batch + more_tokens,
            windows=windows,
            prefix_cache=prefix_cache and None in windows,
            num_host_pages=num_host_pages,
            max_length=60,
        )
        self.scheduler = Scheduler(self.cache, self.forward, stop_tokens=[0], priority_steps=priority_steps)
        self.requests = []
        self.outputs = []

    def forward(self, step, tokens):
        if self.fails:
            raise ModelError
        return self.model.forward(step, tokens)

    def submit(self, prompt, begin_as, beams, num_samples, sampling, **options):
        if begin_as and self.requests:  # what another begins with, and has gone on with
            other = self.requests[begin_as % len(self.requests)]
            prompt = [*other.prompt, *other.tokens(0)][: 4 * begin_as] + prompt
        if beams > 1:
            sampling, num_samples = Sampling(), min(num_samples, beams)
        try:
            request = self.scheduler.submit(
                prompt, num_beams=beams, num_samples=num_samples, sampling=sampling, **options
            )
        except ValueError as error:
            if not any(limit in str(error) for limit in ("pages", "max_batch", "max_length")):
                raise
            return
        self.requests.append(request)

    @rule(
        prompt=st.lists(TOKENS, min_size=1, max_size=12),
        begin_as=st.integers(0, 3),
        max_tokens=st.integers(1, 9),
        beams=st.sampled_from([1, 1, 2, 3]),
        num_samples=st.integers(1, 3),
        sampling=SAMPLING,
        stop_sequences=st.sampled_from([(), [(1, 1)], [(2,), (3, 4, 1)]]),
        priority=st.integers(-1, 2),
        namespace=st.sampled_from(["", "other"]),
        logprobs=st.booleans(),
    )
    def submit_one(self, **options):
        self.submit(**options)

    @rule(seed=st.integers(0, 999), number=st.integers(2, 8))
    def crowd(self, seed, number):
        """Several at once, or there would hardly ever be too few pages."""
        rng = np.random.default_rng(seed)
        common = rng.integers(0, VOCABULARY, 6).tolist()
        for _ in range(number):
            self.submit(
                common[: rng.integers(0, 7)] + rng.integers(0, VOCABULARY, rng.integers(1, 9)).tolist(),
                begin_as=0,
                beams=int(rng.choice([1, 1, 1, 2, 4])),
                num_samples=int(rng.choice([1, 1, 2, 3])),
                sampling=Sampling(float(rng.choice([0.0, 1.5])), seed=int(rng.integers(9))),
                max_tokens=int(rng.integers(1, 12)),
                stop_sequences=(),
                priority=int(rng.integers(-1, 2)),
                namespace="",
                logprobs=False,
            )

    @rule(number=st.integers(1, 4))
    def step(self, number):
        for _ in range(number):
            self.outputs += self.scheduler.step()

    @precondition(lambda self: self.requests)
    @rule(number=st.integers(0, 99))
    def cancel(self, number):
        request = self.requests[number % len(self.requests)]
        unfinished = not request.finished
        assert self.scheduler.cancel(request) is unfinished
        assert request.finished

    @precondition(lambda self: self.requests)
    @rule(number=st.integers(0, 99), sample=st.integers(0, 2))
    def cancel_one(self, number, sample):
        request = self.requests[number % len(self.requests)]
        if request.num_beams == 1 and sample < request.num_samples:
            unfinished = request.finish_reason(sample) is None
            assert self.scheduler.cancel(request, sample) is unfinished
            assert request.finish_reason(sample) is not None

    @rule()
    def fail(self):
        """The model raises, and everything is as it was."""
        before = [request.tokens(index) for request in self.requests for index in range(len(request.answers))]
        self.fails = True
        calls = self.model.calls
        with contextlib.suppress(ModelError):
            assert self.scheduler.step() == []
        self.fails = False
        assert self.model.calls == calls
        after = [request.tokens(index) for request in self.requests for index in range(len(request.answers))]
        assert before == after

    @invariant()
    def books_are_right(self):
        if hasattr(self, "cache"):
            self.cache.allocator.check_invariants()

    def teardown(self):
        if not hasattr(self, "cache"):
            return
        # Each step gives at least the first request something: a chunk, a token, or its place.
        remaining = sum(
            (len(request.prompt) + request.max_tokens) * (request.num_samples + request.num_beams)
            for request in self.requests
        )
        for _ in range(10 + 20 * remaining):
            if not self.scheduler.unfinished:
                break
            self.outputs += self.scheduler.step()
            self.cache.allocator.check_invariants()
        assert not self.scheduler.unfinished
        for group in range(self.cache.allocator.num_groups):
            stats = self.cache.allocator.stats(group)
            assert stats["num_sequences"] == 0
            assert stats["num_free_pages"] == stats["num_pages"]
        assert self.cache.allocator.num_free_host_pages == self.cache.allocator.num_host_pages
        for request in self.requests:
            check(self.model, request)
            for index in range(len(request.answers)):
                ours = [x for x in self.outputs if x.request is request and x.sample == index]
                assert [output.token for output in ours] == request.tokens(index)
                assert all(output.finish_reason is None for output in ours[:-1])
        assert self.scheduler.stats().generated_tokens == len(self.outputs)


Requests.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
test_random_requests = pytest.mark.timeout(600)(Requests.TestCase)
