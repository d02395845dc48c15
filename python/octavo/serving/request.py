"""What a caller asks of the scheduler, and what comes back."""

from __future__ import annotations

import operator
import secrets
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np

from octavo.serving.sampling import Draws, Sampling

FinishReason = Literal["stop", "length", "cancelled"]


class Output(NamedTuple):
    """A new token."""

    request: Request
    sample: int
    """Which of the request's samples, from 0. Of beam search: the hypotheses, the best first."""
    token: int
    finish_reason: FinishReason | None
    """None, unless this is the sample's last token. "stop": it is a stop token, or ends a stop sequence;
    "length": it is the last that max_tokens allows."""
    logprob: float | None
    """The logarithm of its probability at temperature 1, among all tokens; None unless asked for."""


class Drawn(NamedTuple):
    """A token that is an answer's next one from now on, and that step() has not returned yet."""

    position: int
    """Among the answer's tokens."""
    output: Output
    score: float | None = None
    """The answer's, if it comes from beam search."""


@dataclass(eq=False)
class Answer:
    """One sample of a request, as far as it has come."""

    draws: Draws
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    score: float | None = None


@dataclass(eq=False)
class Request:
    """What ``Scheduler.submit`` was given and has made of it so far. May be read from any thread."""

    index: int
    """Requests are numbered from 0 in the order of submission."""
    prompt: list[int]
    max_tokens: int
    sampling: Sampling
    num_samples: int
    num_beams: int
    length_penalty: float
    stop_tokens: frozenset[int]
    stop_sequences: tuple[tuple[int, ...], ...]
    priority: int
    logprobs: bool
    namespace: str
    rank: tuple[int, int]
    """Requests with a smaller one go first."""
    answers: list[Answer] = field(init=False, repr=False)
    seed: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        seed = self.sampling.seed
        self.seed = secrets.randbits(64) if seed is None else seed
        self.answers = [Answer(Draws([self.seed, index])) for index in range(self.num_samples)]

    def tokens(self, sample: int = 0) -> list[int]:
        """Return the tokens of a sample so far, a stop token included. Of beam search: once it is done."""
        return list(self.answers[sample].tokens)

    def token_logprobs(self, sample: int = 0) -> list[float]:
        """Return the logarithm of each token's probability; empty unless logprobs were asked for."""
        return list(self.answers[sample].logprobs)

    def finish_reason(self, sample: int = 0) -> FinishReason | None:
        """Return why a sample ended, as ``Output.finish_reason``, or "cancelled"; None while it goes on."""
        return self.answers[sample].finish_reason

    def score(self, sample: int = 0) -> float | None:
        """Return what a hypothesis of beam search is ranked by, once it is done; None of other samples."""
        return self.answers[sample].score

    @property
    def finished(self) -> bool:
        """Whether every sample has ended."""
        return all(answer.finish_reason is not None for answer in self.answers)

    @property
    def needs_logits(self) -> bool:
        """Whether it takes more of a row of logits than the likeliest token."""
        return self.logprobs or self.num_beams > 1 or self.sampling.temperature > 0.0

    def stops(self, generated: Sequence[int], token: int) -> bool:
        """Whether this token after the generated ones ends a sample."""
        if token in self.stop_tokens:
            return True
        for *head, last in self.stop_sequences:
            begin = len(generated) - len(head)
            if token == last and begin >= 0 and list(generated[begin:]) == head:
                return True
        return False

    def reason_to_end(self, generated: Sequence[int], token: int) -> FinishReason | None:
        """Why a sample ends with this token after the generated ones; None if it goes on."""
        if self.stops(generated, token):
            return "stop"
        return "length" if len(generated) + 1 == self.max_tokens else None


def int_of(what: str, value: Any) -> int:
    """Return an int argument of submit()."""
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"Scheduler.submit: {what} must be an int; got {type(value).__name__}") from None


def _iterator(what: str, value: Any) -> Iterator[Any]:
    try:
        return iter(value)
    except TypeError:
        raise TypeError(f"Scheduler.submit: {what} must be iterable; got {type(value).__name__}") from None


def token_list(what: str, tokens: Any) -> list[int]:
    """Return tokens as ints, each of them at least 0 and below 2**31."""
    name = f"a token of {what}"
    numbers = [int_of(name, token) for token in _iterator(what, tokens)]
    for token in numbers:
        if not 0 <= token <= np.iinfo(np.int32).max:
            raise ValueError(f"Scheduler.submit: {what} must hold tokens from 0 to 2**31 - 1; got {token}")
    return numbers


def stop_sequences_of(given: Iterable[Iterable[int]]) -> tuple[tuple[int, ...], ...]:
    """Return stop sequences as tuples; none may be empty."""
    sequences = tuple(
        tuple(token_list("stop_sequences", sequence)) for sequence in _iterator("stop_sequences", given)
    )
    if not all(sequences):
        raise ValueError("Scheduler.submit: stop_sequences must not hold an empty one")
    return sequences


def at_least(what: str, value: Any, least: int) -> int:
    """Return an int argument of submit() that is large enough."""
    number = int_of(what, value)
    if number < least:
        raise ValueError(f"Scheduler.submit: {what} ({number}) must be at least {least}")
    return number


def length_penalty_of(value: Any) -> float:
    """Return an exponent with which no number of tokens overflows."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise TypeError(f"Scheduler.submit: length_penalty must be a number; got {value!r:.60}") from None
    if not abs(number) <= 10.0:  # nor is it NaN
        raise ValueError(f"Scheduler.submit: length_penalty ({number}) must be from -10 to 10")
    return number


def sampling_of(value: Any) -> Sampling:
    """Return the sampling, if it is one."""
    if not isinstance(value, Sampling):
        raise TypeError(
            f"Scheduler.submit: sampling must be an octavo.serving.Sampling; got {type(value).__name__}"
        )
    return value


def namespace_of(value: Any) -> str:
    """Return a name that the prefix cache can take."""
    if not isinstance(value, str):
        raise TypeError(f"Scheduler.submit: namespace must be a str; got {type(value).__name__}")
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise ValueError(f"Scheduler.submit: namespace ({value!a}) must be valid Unicode, without surrogates")
    return value
