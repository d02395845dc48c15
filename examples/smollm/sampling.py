"""The next token from its logits."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Sampling:
    temperature: float = 0.0  # 0: always the likeliest token
    top_p: float = 1.0  # only the likeliest tokens that together reach this probability
    seed: int = 0


GREEDY = Sampling()


def sample(logits: np.ndarray, sampling: Sampling, rng: np.random.Generator) -> int:
    """logits: float32 [vocabulary]."""
    if sampling.temperature == 0.0:
        return int(logits.argmax())
    weights = np.exp((logits - logits.max()) / np.float32(sampling.temperature))
    if sampling.top_p < 1.0:
        descending = np.sort(weights)[::-1]
        reached = np.cumsum(descending)
        last = np.searchsorted(reached, sampling.top_p * reached[-1])
        weights = np.where(weights >= descending[min(last, len(weights) - 1)], weights, np.float32(0))
    # The first to arrive of exponential clocks that run at these rates. A running sum over the vocabulary
    # would let the last bits of the logits, which depend on the batch, decide between neighbours.
    return int((weights / rng.standard_exponential(len(weights))).argmax())
