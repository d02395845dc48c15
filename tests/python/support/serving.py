"""Caches for the ExactModel, and what octavo.serving should answer: by the model alone, without a cache."""

from __future__ import annotations

import numpy as np

import octavo
from octavo.serving import sample
from octavo.serving.beams import BeamSearch
from octavo.serving.sampling import log_softmax


def text(model, request, index=0):
    """The tokens of a sample, and why it ends."""
    rng = np.random.default_rng([request.seed, index])
    tokens = []
    while True:
        token = sample(model.logits([*request.prompt, *tokens])[-1], request.sampling, rng)
        stops = request.stops(tokens, token)
        tokens.append(token)
        if stops or len(tokens) == request.max_tokens:
            return tokens, "stop" if stops else "length"


def logprobs(model, prompt, tokens):
    """The logprobs of these tokens after a prompt."""
    logits = model.logits([*prompt, *tokens])[len(prompt) - 1 : -1]
    return [float(log_softmax(row)[token]) for row, token in zip(logits, tokens, strict=True)]


def hypotheses(model, request):
    """The hypotheses of beam search, the best first."""
    search = BeamSearch(request)
    while not search.done:
        search.advance(np.stack([model.logits([*request.prompt, *beam.tokens])[-1] for beam in search.beams]))
    return search.finished[: request.num_samples]


def check(model, request):
    """That a request has the answers that it should have; of a cancelled one, the beginning of them."""
    assert request.finished
    reasons = [request.finish_reason(index) for index in range(len(request.answers))]
    if request.num_beams > 1:
        if "cancelled" in reasons:
            assert set(reasons) == {"cancelled"}
            assert all(request.tokens(index) == [] for index in range(len(reasons)))
            return
        found = hypotheses(model, request)
        assert [request.tokens(index) for index in range(len(reasons))] == [list(x.tokens) for x in found]
        assert reasons == [x.finish_reason for x in found]
        np.testing.assert_allclose([request.score(i) for i in range(len(found))], [x.score for x in found])
    else:
        assert len(reasons) == request.num_samples
        for index, reason in enumerate(reasons):
            assert request.score(index) is None
            tokens, expected = text(model, request, index)
            given = request.tokens(index)
            if reason == "cancelled":
                assert given == tokens[: len(given)] and len(given) < len(tokens)
            else:
                assert (given, reason) == (tokens, expected)
    for index in range(len(reasons)):
        expected = logprobs(model, request.prompt, request.tokens(index)) if request.logprobs else []
        np.testing.assert_allclose(request.token_logprobs(index), expected)


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
