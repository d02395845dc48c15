"""The next token from its logits."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo._cache import int_argument


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn.

    Args:
        temperature: what logits are divided by; 0: always the likeliest token.
        top_k: draw from this many of the likeliest tokens, and those as likely as the last; 0: from all.
        top_p: draw from the likeliest tokens that together reach this probability, after top_k; in (0, 1].
        seed: of the request's own random numbers; None: another one each time. Equal seeds give equal
            tokens, whatever else is in the batch.

    Raises:
        ValueError: a number out of range.
        TypeError: temperature or top_p is no number; top_k or seed is no int.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        numbers = {
            "temperature": _float("temperature", self.temperature),
            "top_k": int_argument("Sampling", "top_k", self.top_k),
            "top_p": _float("top_p", self.top_p),
            "seed": None if self.seed is None else int_argument("Sampling", "seed", self.seed),
        }
        for name, number in numbers.items():  # of Python's own kinds, so that arithmetic has no surprises
            object.__setattr__(self, name, number)
        if not 0.0 <= self.temperature < math.inf:
            raise ValueError(f"Sampling: temperature ({self.temperature}) must be finite and at least 0")
        if self.top_k < 0:
            raise ValueError(f"Sampling: top_k ({self.top_k}) must be at least 0")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"Sampling: top_p ({self.top_p}) must be above 0 and at most 1")
        if self.seed is not None and self.seed < 0:
            raise ValueError(f"Sampling: seed ({self.seed}) must be at least 0")


def _float(name: str, value: Any) -> float:
    try:
        if isinstance(value, (str, bytes, bytearray)):  # of which float() reads some
            raise TypeError
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise TypeError(f"Sampling: {name} must be a number; got {type(value).__name__}") from None


class Draws:
    """The random numbers of a sample, which are the same when a token has to be drawn once more."""

    def __init__(self, seeds: Sequence[int]) -> None:
        self._rng = np.random.default_rng(seeds)
        self._before: tuple[int, Mapping[str, Any]] = -1, {}  # a position, and the state before its draw

    def at(self, position: int) -> np.random.Generator:
        """Return the generator for the token at this position, which is the last one's or the next."""
        if self._before[0] == position:
            self._rng.bit_generator.state = self._before[1]
        else:
            self._before = position, self._rng.bit_generator.state
        return self._rng


def sample(logits: NDArray[np.float32], sampling: Sampling, rng: np.random.Generator) -> int:
    """Return a token.

    Args:
        logits: float32 [vocabulary]; the largest is finite.
        sampling: how to draw.
        rng: advanced by one number for each entry of the vocabulary, unless temperature is 0.
    """
    if sampling.temperature == 0.0:
        return int(logits.argmax())
    with np.errstate(over="ignore"):  # to -inf, whose exponential is 0
        weights = np.exp((logits.astype(np.float64) - logits.max()) / sampling.temperature)
    if 0 < sampling.top_k < len(weights):
        weights[weights < np.partition(weights, -sampling.top_k)[-sampling.top_k]] = 0.0
    if sampling.top_p < 1.0:
        descending = np.sort(weights)[::-1]
        reached = np.cumsum(descending)
        last = np.searchsorted(reached, sampling.top_p * reached[-1])
        weights[weights < descending[min(int(last), len(weights) - 1)]] = 0.0
    # The first to arrive of exponential clocks that run at these rates. A running sum over the vocabulary
    # would let the last bits of the logits, which depend on the batch, decide between neighbours.
    return int((weights / rng.standard_exponential(len(weights))).argmax())


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return the logarithms of the probabilities, over the last axis."""
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True)))
