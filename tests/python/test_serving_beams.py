"""Beam search against all continuations, one by one."""

import itertools

import numpy as np
import pytest

from octavo.serving.beams import BeamSearch
from octavo.serving.request import Request
from octavo.serving.sampling import Sampling, log_softmax

VOCABULARY = 4


def make_request(num_beams, max_tokens, length_penalty=0.0, stop_tokens=(), stop_sequences=()):
    return Request(
        index=0,
        prompt=[0],
        max_tokens=max_tokens,
        sampling=Sampling(),
        num_samples=num_beams,
        num_beams=num_beams,
        length_penalty=length_penalty,
        stop_tokens=frozenset(stop_tokens),
        stop_sequences=tuple(stop_sequences),
        priority=0,
        logprobs=False,
        namespace="",
        rank=(0, 0),
    )


def logits_after(seed, tokens):
    """The logits of a model that remembers everything."""
    return (
        np.random.default_rng([seed, len(tokens), *tokens]).standard_normal(VOCABULARY).astype(np.float32) * 2
    )


def search(seed, request):
    beams = BeamSearch(request)
    while not beams.done:
        before = beams.beams
        parents = beams.advance(np.stack([logits_after(seed, beam.tokens) for beam in before]))
        assert len(parents) == len(beams.beams) <= request.num_beams
        for parent, beam in zip(parents, beams.beams, strict=True):
            assert beam.tokens[:-1] == before[parent].tokens
    return beams.finished


def all_continuations(seed, request):
    """Each with its score, best first."""
    found = {}
    for tokens in itertools.product(range(VOCABULARY), repeat=request.max_tokens):
        for length in range(1, request.max_tokens + 1):
            if request.stops(tokens[: length - 1], tokens[length - 1]):
                break
        logprobs = [log_softmax(logits_after(seed, tokens[:i]))[tokens[i]] for i in range(length)]
        found[tokens[:length]] = sum(logprobs) / length**request.length_penalty
    return sorted(found.items(), key=lambda item: -item[1])


@pytest.mark.parametrize("length_penalty", [0.0, 1.0])
@pytest.mark.parametrize(
    "ends",
    [
        {},
        {"stop_tokens": [2]},
        {"stop_tokens": [1, 3]},
        {"stop_sequences": [(1, 2), (3, 3, 0)], "stop_tokens": [0]},
    ],
)
@pytest.mark.parametrize("seed", range(5))
def test_as_many_beams_as_continuations_find_the_best_of_all(seed, ends, length_penalty):
    request = make_request(VOCABULARY**4, 4, length_penalty, **ends)
    expected = all_continuations(seed, request)
    found = search(seed, request)
    assert [hypothesis.tokens for hypothesis in found] == [tokens for tokens, _ in expected]
    np.testing.assert_allclose([hypothesis.score for hypothesis in found], [score for _, score in expected])
    for hypothesis in found:
        stops = request.stops(hypothesis.tokens[:-1], hypothesis.tokens[-1])
        assert hypothesis.finish_reason == ("stop" if stops else "length")
        assert np.isclose(sum(hypothesis.logprobs), hypothesis.sum_logprobs)


def reference(seed, request):
    """The definition, without any bound on the candidates."""
    beams, finished = [((), 0.0)], []
    for length in range(1, request.max_tokens + 1):
        candidates = sorted(
            (
                ((*tokens, token), score + log_softmax(logits_after(seed, tokens))[token])
                for tokens, score in beams
                for token in range(VOCABULARY)
            ),
            key=lambda candidate: -candidate[1],
        )
        ends = [
            request.stops(tokens[:-1], tokens[-1]) or length == request.max_tokens for tokens, _ in candidates
        ]
        normalised = [(tokens, score / length**request.length_penalty) for tokens, score in candidates]
        finished += [x for x, end in zip(normalised[: request.num_beams], ends, strict=False) if end]
        finished = sorted(finished, key=lambda hypothesis: -hypothesis[1])[: request.num_beams]
        beams = [x for x, end in zip(candidates, ends, strict=True) if not end][: request.num_beams]
        best = beams[0][1] / length**request.length_penalty if beams else -np.inf
        if len(finished) == request.num_beams and best <= finished[-1][1]:
            break
    return finished


@pytest.mark.parametrize("length_penalty", [0.0, 0.7, 1.0, -1.0])
@pytest.mark.parametrize("num_beams", [1, 2, 3, 7])
@pytest.mark.parametrize("seed", range(5))
def test_few_beams_follow_the_definition(seed, num_beams, length_penalty):
    request = make_request(num_beams, 7, length_penalty, [3], [(0, 1)])
    found = search(seed, request)
    expected = reference(seed, request)
    assert [hypothesis.tokens for hypothesis in found] == [tokens for tokens, _ in expected]
    np.testing.assert_allclose([hypothesis.score for hypothesis in found], [score for _, score in expected])


def test_all_beams_find_what_the_greedy_one_misses():
    greedy = [search(seed, make_request(1, 4))[0].score for seed in range(20)]
    best = [search(seed, make_request(VOCABULARY**4, 4))[0].score for seed in range(20)]
    assert all(a <= b for a, b in zip(greedy, best, strict=True))
    assert any(a < b for a, b in zip(greedy, best, strict=True))


def test_one_beam_is_greedy():
    (found,) = search(1, make_request(1, 6))
    tokens = []
    for _ in range(6):
        tokens.append(int(logits_after(1, tokens).argmax()))
    assert list(found.tokens) == tokens


def test_tokens_that_cannot_be_are_not_followed():
    beams = BeamSearch(make_request(3, 2))
    logits = np.full((1, VOCABULARY), -np.inf, np.float32)
    logits[0, 2] = 1.0
    assert beams.advance(logits) == [0]
    assert [beam.tokens for beam in beams.beams] == [(2,)]
