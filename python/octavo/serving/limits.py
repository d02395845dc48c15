"""What a scheduler can take."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from octavo._cache import int_argument
from octavo._kv_cache import KVCache
from octavo.serving.request import Request
from octavo.serving.room import Room


@dataclass(frozen=True)
class Limits:
    """The numbers that a scheduler was given, as ``Scheduler`` describes them.

    Raises:
        TypeError: a number that is no int.
        ValueError: a number out of range.
    """

    cache: KVCache
    max_batch: int
    token_budget: int
    max_length: int | None
    vocab_size: int | None
    decode_batches: list[int]
    priority_steps: int

    @classmethod
    def of(
        cls,
        cache: KVCache,
        *,
        max_batch: int | None,
        token_budget: int | None,
        decode_batches: Iterable[int],
        **numbers: Any,
    ) -> Limits:
        """Fill in the defaults, which are the cache's limits."""
        if not isinstance(cache, KVCache):
            raise TypeError(
                "Scheduler: cache must be an octavo.KVCache, of NumPy, PyTorch or CuPy; "
                f"got {type(cache).__module__}.{type(cache).__name__}"
            )
        return cls(
            cache=cache,
            max_batch=cache.max_batch if max_batch is None else max_batch,
            token_budget=cache.max_tokens if token_budget is None else token_budget,
            decode_batches=_sizes(decode_batches),
            **numbers,
        )

    def __post_init__(self) -> None:
        for name in ("max_batch", "token_budget", "max_length", "vocab_size", "priority_steps"):
            has_none = name in ("max_length", "vocab_size") and getattr(self, name) is None
            if not has_none:
                int_argument("Scheduler", name, getattr(self, name))
        cache, sizes = self.cache, self.decode_batches
        if not 1 <= self.max_batch <= cache.max_batch:
            raise ValueError(
                f"Scheduler: max_batch ({self.max_batch}) must be from 1 to the cache's ({cache.max_batch})"
            )
        if not self.max_batch <= self.token_budget <= cache.max_tokens:
            raise ValueError(
                f"Scheduler: token_budget ({self.token_budget}) must be from max_batch ({self.max_batch}) "
                f"to the cache's max_tokens ({cache.max_tokens})"
            )
        if self.max_length is not None and self.max_length < 2:
            raise ValueError(
                f"Scheduler: max_length ({self.max_length}) must be at least 2, of a token and a new one"
            )
        if self.vocab_size is not None and self.vocab_size < 1:
            raise ValueError(f"Scheduler: vocab_size ({self.vocab_size}) must be at least 1")
        if sizes and not 1 <= sizes[0] <= sizes[-1] <= self.max_batch:
            raise ValueError(
                f"Scheduler: decode_batches must be from 1 to max_batch ({self.max_batch}); "
                f"got {sizes[0] if sizes[0] < 1 else sizes[-1]}"
            )
        if self.priority_steps < 1:
            raise ValueError(f"Scheduler: priority_steps ({self.priority_steps}) must be at least 1")

    def check_rows(self, **numbers: int) -> None:
        """Raise ValueError if a request of so many samples or beams could never run.

        Before there is one: it has an answer for each sample.
        """
        for name, rows in numbers.items():
            if rows > self.max_batch:
                raise ValueError(
                    f"Scheduler.submit: {name} ({rows}) must be at most max_batch ({self.max_batch})"
                )

    def check(self, request: Request, room: Room) -> None:
        """Raise ValueError if the request could never run."""
        self._check_prompt(request)
        self._check_beams(request)
        num_prompt, num_new = len(request.prompt), request.max_tokens
        asked = f"Scheduler.submit: a prompt of {num_prompt} tokens and {num_new} new ones"
        if self.max_length is not None and num_prompt + num_new > self.max_length:
            raise ValueError(f"{asked} exceed max_length ({self.max_length})")
        num_cached = num_prompt + num_new - 1  # the last token is never read
        num_pages, page_group = room.needed(num_prompt, num_cached, request.num_beams)
        if num_pages > page_group.num_pages:
            beams = f" in {request.num_beams} beams" if request.num_beams > 1 else ""
            raise ValueError(
                f"{asked}{beams} need {num_pages} pages of {page_group.page_size}; "
                f"the cache has {page_group.num_pages}"
            )
        if num_cached > self.cache.max_length:
            raise ValueError(f"{asked} exceed the cache's max_length ({self.cache.max_length})")

    def _check_prompt(self, request: Request) -> None:
        if not request.prompt:
            raise ValueError("Scheduler.submit: prompt must hold a token at least")
        if self.vocab_size is not None and max(request.prompt) >= self.vocab_size:
            raise ValueError(
                f"Scheduler.submit: prompt must hold tokens below vocab_size ({self.vocab_size}); "
                f"got {max(request.prompt)}"
            )

    def _check_beams(self, request: Request) -> None:
        if request.num_beams > 1:
            if request.num_samples > request.num_beams:
                raise ValueError(
                    f"Scheduler.submit: num_samples ({request.num_samples}) must be at most num_beams "
                    f"({request.num_beams}), whose best hypotheses are returned"
                )
            if request.sampling.temperature != 0.0:
                raise ValueError(
                    "Scheduler.submit: sampling must have temperature 0 with num_beams, which draws nothing; "
                    f"got {request.sampling.temperature}"
                )


def _sizes(decode_batches: Iterable[int]) -> list[int]:
    if not isinstance(decode_batches, Iterable):
        raise TypeError(f"Scheduler: decode_batches must be iterable; got {type(decode_batches).__name__}")
    return sorted({int_argument("Scheduler", "a number of decode_batches", size) for size in decode_batches})
