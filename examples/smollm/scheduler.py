"""Continuous batching over one page allocator: sequences join, share prefixes, split into samples, give
way when pages run out, and leave, while one batch after another runs through the model.

The tokens of a sequence are its prompt and what it has generated; the allocator knows how many of them
are in the cache. One missing token is a decode step, more are (part of) a prefill, and a sequence whose
tokens are all in the cache has earned its next one.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

import octavo
from octavo.serving.smollm.model import Llama

from .cache import Batch, BatchStep, PagedCache
from .sampling import GREEDY, Sampling, sample


@dataclass(frozen=True)
class Limits:
    num_pages: int
    page_size: int = 16
    max_batch: int = 16  # sequences that run at once
    prefill_chunk: int = 128  # prompt tokens a step


@dataclass(eq=False)
class Sequence:
    prompt_index: int
    sample_index: int
    tokens: list[int]
    num_prompt_tokens: int
    max_tokens: int
    rng: np.random.Generator
    num_samples: int = 1  # this one and those still to be forked from its prompt
    handle: Any = None  # the allocator's; None while waiting and once finished
    finished: bool = False

    @property
    def generated(self) -> list[int]:
        return self.tokens[self.num_prompt_tokens :]


class Share(NamedTuple):
    """A sequence's part of one batch."""

    sequence: Sequence
    num_tokens: int
    is_prefill: bool


@dataclass
class Statistics:
    prefill_tokens: int = 0  # those of a sequence that gave way count again
    prefill_seconds: float = 0.0  # of the steps with any prefill in them
    decode_tokens: int = 0  # of the other steps
    decode_seconds: float = 0.0
    shared_tokens: int = 0  # taken over from another sequence instead of computed
    preemptions: int = 0
    # At the step that used the most pages:
    used_pages: int = 0
    unshared_pages: int = 0  # what the same sequences would hold without sharing
    waste_percent: float = 0.0


class Scheduler:
    def __init__(
        self,
        model: Llama,
        limits: Limits,
        sampling: Sampling = GREEDY,
        stop_tokens: frozenset[int] = frozenset(),
        share_prefixes: bool = True,
        kv_dtype: str | None = None,  # what the cache holds; None: what the model computes
    ) -> None:
        self.allocator = octavo.PageAllocator(limits.num_pages, limits.page_size)
        self.cache = PagedCache(model.config, model.arrays, limits.num_pages, limits.page_size, kv_dtype)
        self.statistics = Statistics()
        self._model = model
        self._limits = limits
        self._sampling = sampling
        self._stop_tokens = stop_tokens
        self._share_prefixes = share_prefixes
        self._num_prompts = 0
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []  # oldest first

    def submit(self, prompt: list[int], max_tokens: int, num_samples: int = 1) -> int:
        """Queues a prompt; returns its index. ValueError if it could never run."""
        asked = f"a prompt of {len(prompt)} tokens and {max_tokens} new ones"
        context_length = self._model.config.context_length
        num_pages = self._pages_for(len(prompt) + max_tokens)
        if len(prompt) + max_tokens > context_length:
            raise ValueError(f"{asked} exceed the model's context of {context_length}")
        if num_pages > self._limits.num_pages:
            raise ValueError(
                f"{asked} need {num_pages} pages of {self._limits.page_size}; "
                f"the cache has {self._limits.num_pages}"
            )
        index = self._num_prompts
        self._num_prompts += 1
        self._waiting.append(
            Sequence(index, 0, list(prompt), len(prompt), max_tokens, self._rng(index, 0), num_samples)
        )
        return index

    def run(self) -> Iterator[tuple[Sequence, int]]:
        """Each new token with its sequence, until every sequence has finished."""
        while self.unfinished:
            yield from self.step()

    @property
    def unfinished(self) -> bool:
        return bool(self._waiting or self._running)

    @property
    def prefill_remaining(self) -> int:
        """Prompt tokens that are not in the cache yet."""
        return sum(len(sequence.tokens) for sequence in self._waiting) + sum(
            self._num_missing(sequence) for sequence in self._running if self._is_prefilling(sequence)
        )

    def step(self) -> list[tuple[Sequence, int]]:
        """One batch through the model; returns the new tokens, each with its sequence."""
        start = time.perf_counter()
        self._admit()
        shares = self._plan()
        copies = self.allocator.take_copies()
        if len(copies):
            self.cache.copy_pages(copies)
        self._record_pages()
        complete = [share.sequence for share in shares if self._num_missing(share.sequence) == 0]
        batch = self._batch(shares)
        logits = self._model.forward(BatchStep(batch, self.cache), batch.tokens)
        new_tokens = [
            pair
            for sequence, row in zip(complete, logits, strict=True)
            for pair in self._advance(sequence, row)
        ]
        self._record_time(shares, time.perf_counter() - start)
        return new_tokens

    # Joining

    def _admit(self) -> None:
        """First come, first served. The first in line also waits while a running sequence is still
        computing a prefix that it can share."""
        while self._waiting:
            sequence = self._waiting[0]
            donor, shared = self._longest_prefix(sequence)
            if donor and self.allocator.length(donor.handle) < shared:
                return
            if self._running and not self._fits(sequence, shared):
                return
            self._waiting.popleft()
            if donor:
                (sequence.handle,) = self.allocator.fork(donor.handle)
                self.allocator.truncate(sequence.handle, shared)
                self.statistics.shared_tokens += shared
            else:
                sequence.handle = self.allocator.create()
            self._running.append(sequence)

    def _longest_prefix(self, sequence: Sequence) -> tuple[Sequence | None, int]:
        """The running sequence with the most leading tokens in common, a page of them at least. The last
        token is never shared: its logits are wanted."""
        best, best_length = None, 0
        for other in self._running if self._share_prefixes else ():
            length = min(common_prefix(sequence.tokens, other.tokens), len(sequence.tokens) - 1)
            if length > best_length and length >= self._limits.page_size:
                best, best_length = other, length
        return best, best_length

    def _fits(self, sequence: Sequence, shared: int) -> bool:
        """Whether the running sequences keep the pages for their prompts and next tokens."""
        num_running = sum(running.num_samples for running in self._running)
        promised = sum(
            self._pages_for(len(running.tokens) + 1)
            + running.num_samples
            - 1
            - self._pages_for(self.allocator.length(running.handle))
            for running in self._running
        )
        needed = self._pages_for(len(sequence.tokens) + 1) - shared // self._limits.page_size
        return (
            num_running + sequence.num_samples <= self._limits.max_batch
            and promised + needed <= self.allocator.num_free_pages
        )

    # One batch

    def _plan(self) -> list[Share]:
        """Every decoding sequence and as much prefill as a step takes, with pages for their tokens."""
        shares = []
        budget = self._limits.prefill_chunk
        for sequence in list(self._running):
            if sequence.handle is None:
                continue  # just now gave way to an older one
            num_tokens, is_prefill = self._num_missing(sequence), self._is_prefilling(sequence)
            if is_prefill:
                num_tokens = min(num_tokens, budget)
                budget -= num_tokens
            if num_tokens and self._extend(sequence, num_tokens):
                shares.append(Share(sequence, num_tokens, is_prefill))
        return shares

    def _extend(self, sequence: Sequence, num_tokens: int) -> bool:
        """When pages run out the youngest sequence gives way, be it this one. Sequences are planned oldest
        first, so none that is in the batch already loses its pages."""
        while True:
            try:
                self.allocator.extend(sequence.handle, num_tokens)
                return True
            except octavo.OutOfPages:
                youngest = self._running[-1]
                self._preempt(youngest)
                if youngest is sequence:
                    return False

    def _preempt(self, sequence: Sequence) -> None:
        """Back to the head of the queue; all its tokens will be computed, or shared, again."""
        self._running.remove(sequence)
        self._release(sequence)
        self._waiting.appendleft(sequence)
        self.statistics.preemptions += 1

    def _release(self, sequence: Sequence) -> None:
        self.allocator.free(sequence.handle)
        sequence.handle = None

    def _batch(self, shares: list[Share]) -> Batch:
        page_table, seq_lens = self.allocator.page_table([share.sequence.handle for share in shares])
        tokens: list[int] = []
        positions: list[int] = []
        cu_seqlens = [0]
        logit_rows = []
        for (sequence, num_tokens, _), end in zip(shares, seq_lens.tolist(), strict=True):
            tokens += sequence.tokens[end - num_tokens : end]
            positions += range(end - num_tokens, end)
            cu_seqlens.append(len(tokens))
            if end == len(sequence.tokens):
                logit_rows.append(len(tokens) - 1)
        return Batch(
            tokens=np.array(tokens, np.int64),
            positions=np.array(positions, np.int64),
            cu_seqlens=np.array(cu_seqlens, np.int32),
            page_table=page_table,
            seq_lens=seq_lens,
            logit_rows=np.array(logit_rows, np.int64),
        )

    def _advance(self, sequence: Sequence, logits: np.ndarray) -> Iterator[tuple[Sequence, int]]:
        """Gives a sequence, and the samples forked from its prompt, their next tokens."""
        for member in [sequence, *self._fork_samples(sequence)]:
            token = sample(logits, self._sampling, member.rng)
            member.tokens.append(token)
            if token in self._stop_tokens or len(member.generated) == member.max_tokens:
                member.finished = True
                self._running.remove(member)
                self._release(member)
            yield member, token

    def _fork_samples(self, sequence: Sequence) -> list[Sequence]:
        if sequence.num_samples == 1:
            return []
        handles = self.allocator.fork(sequence.handle, sequence.num_samples - 1)
        sequence.num_samples = 1
        samples = [
            replace(
                sequence,
                sample_index=index,
                tokens=list(sequence.tokens),
                rng=self._rng(sequence.prompt_index, index),
                handle=handle,
            )
            for index, handle in enumerate(handles, 1)
        ]
        self._running += samples
        return samples

    def _rng(self, prompt_index: int, sample_index: int) -> np.random.Generator:
        """Of its own for every sequence, so that what else is in the batch changes nothing."""
        return np.random.default_rng([self._sampling.seed, prompt_index, sample_index])

    # Counting

    def _pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._limits.page_size)

    def _num_missing(self, sequence: Sequence) -> int:
        return len(sequence.tokens) - self.allocator.length(sequence.handle)

    def _is_prefilling(self, sequence: Sequence) -> bool:
        return self._num_missing(sequence) > 1 or not sequence.generated

    def _record_pages(self) -> None:
        stats = self.allocator.stats()
        unshared = sum(self._pages_for(self.allocator.length(sequence.handle)) for sequence in self._running)
        if (stats["num_used_pages"], unshared) > (self.statistics.used_pages, self.statistics.unshared_pages):
            self.statistics.used_pages = stats["num_used_pages"]
            self.statistics.unshared_pages = unshared
            self.statistics.waste_percent = stats["waste_percent"]

    def _record_time(self, shares: list[Share], seconds: float) -> None:
        prefill_tokens = sum(share.num_tokens for share in shares if share.is_prefill)
        if prefill_tokens:
            self.statistics.prefill_tokens += prefill_tokens
            self.statistics.prefill_seconds += seconds
        else:
            self.statistics.decode_tokens += len(shares)
            self.statistics.decode_seconds += seconds


def common_prefix(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
