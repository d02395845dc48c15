"""What octavo.serving should answer, from the ExactModel alone: no cache, no batch."""

from __future__ import annotations

import numpy as np

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
    """Of these tokens after a prompt."""
    logits = model.logits([*prompt, *tokens])[len(prompt) - 1 : -1]
    return [float(log_softmax(row)[token]) for row, token in zip(logits, tokens, strict=True)]


def hypotheses(model, request):
    """Of beam search, best first."""
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
