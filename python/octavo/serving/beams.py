"""Beam search: which continuations of a prompt to follow."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from octavo.serving.request import Drawn, FinishReason, Output, Request
from octavo.serving.sampling import log_softmax


@dataclass(frozen=True)
class Hypothesis:
    """A continuation of the prompt."""

    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    sum_logprobs: float = 0.0
    score: float = 0.0
    finish_reason: FinishReason | None = None


class BeamSearch:
    """The beams of a request.

    In each step the most probable continuations of all beams are looked at, in descending order. Those that
    end are finished, if they are among the first num_beams; the first num_beams of the others are the next
    beams. The best num_beams of the finished ones are kept, by their score: the sum of the logarithms of
    their tokens' probabilities, divided by their number of tokens to the power of length_penalty.

    The search is done when there are num_beams finished hypotheses, of which none scores less than the best
    beam does as it is; or at max_tokens. With length_penalty 0 scores only fall as beams grow, so that no
    beam given up could have come back. transformers' ``generate(num_beams=...)`` does the same by default.
    """

    def __init__(self, request: Request) -> None:
        self.beams = [Hypothesis()]
        self.finished: list[Hypothesis] = []  # best first
        self._request = request

    @property
    def done(self) -> bool:
        return not self.beams

    def advance(self, logits: NDArray[np.float32]) -> list[int]:
        """Take a step.

        Args:
            logits: float32 [beams, vocabulary].

        Returns:
            Of each of the next beams, the one that it continues. None when the search is done.
        """
        request = self._request
        ending: list[Hypothesis] = []
        going_on: list[Hypothesis] = []
        parents: list[int] = []
        for place, (parent, token, logprob) in enumerate(self._candidates(logits)):
            if len(going_on) == request.num_beams:
                break
            hypothesis = self._extend(self.beams[parent], token, logprob)
            if hypothesis.finish_reason is None:
                parents.append(parent)
                going_on.append(hypothesis)
            elif place < request.num_beams:
                ending.append(hypothesis)
        finished = sorted([*self.finished, *ending], key=lambda hypothesis: -hypothesis.score)
        finished = finished[: request.num_beams]
        is_full = len(finished) == request.num_beams
        if going_on and is_full and going_on[0].score <= finished[-1].score:
            going_on, parents = [], []
        self.beams, self.finished = going_on, finished  # at once, so that the step is taken or it is not
        return parents

    def drawn(self) -> list[Drawn]:
        """Return the tokens of the answers, the best hypotheses of a search that is done, best first."""
        request = self._request
        drawn = []
        for index, found in enumerate(self.finished[: request.num_samples]):
            last = len(found.tokens) - 1
            for position, (token, logprob) in enumerate(zip(found.tokens, found.logprobs, strict=True)):
                reason = found.finish_reason if position == last else None
                output = Output(request, index, token, reason, logprob if request.logprobs else None)
                drawn.append(Drawn(position, output, found.score))
        return drawn

    def _candidates(self, logits: NDArray[np.float32]) -> list[tuple[int, int, float]]:
        """The most probable continuations, in descending order: beam, token and its logprob.

        At most one continuation of a beam ends for each stop token and sequence, so that these are enough.
        """
        request = self._request
        logprobs = log_softmax(logits)
        sums = (logprobs + np.array([beam.sum_logprobs for beam in self.beams])[:, None]).ravel()
        num_endings = len(request.stop_tokens) + len(request.stop_sequences)
        count = min(request.num_beams * (1 + num_endings), sums.size)
        best = np.argpartition(-sums, count - 1)[:count]
        best = best[np.lexsort((best, -sums[best]))]
        rows, tokens = np.divmod(best, logits.shape[1])
        found = zip(rows.tolist(), tokens.tolist(), logprobs[rows, tokens].tolist(), strict=True)
        return [candidate for candidate in found if candidate[2] > -math.inf]

    def _extend(self, beam: Hypothesis, token: int, logprob: float) -> Hypothesis:
        request = self._request
        sum_logprobs = beam.sum_logprobs + logprob
        return Hypothesis(
            (*beam.tokens, token),
            (*beam.logprobs, logprob),
            sum_logprobs,
            sum_logprobs / (len(beam.tokens) + 1) ** request.length_penalty,
            request.reason_to_end(beam.tokens, token),
        )
