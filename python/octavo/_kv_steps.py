"""The numbers of a step of generation: written by the allocator, read by the operators."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from octavo._core import PageAllocator, StepArrays
from octavo._kv_memory import Memory, Staging

_ALIGNMENT = 64  # numbers: arrays begin at multiples of 256 bytes


class StepViews(NamedTuple):
    """Arrays of one step: views of the buffer."""

    seq_lens: Any
    cu_seqlens_q: Any
    last_rows: Any
    page_tables: tuple[Any, ...]


class PlannedStep(NamedTuple):
    """What StepBuffer.plan() has written."""

    batch: int
    num_tokens: int
    max_seqlen_q: int
    one_token_each: bool
    views: StepViews
    positions: Any
    copies: list[Any]
    """(from, to) pages of each group."""


class _Host(NamedTuple):
    """One set of numbers on the host, and the arrays in it."""

    staging: Staging
    arrays: StepArrays
    views: StepViews
    positions: NDArray[np.int32]


class StepBuffer:
    """All arrays of a step in one piece of memory, so that one transfer takes them to the device.

    The page tables come last, one after the other: rows past the batch of the last one stay where they are.
    """

    def __init__(
        self, memory: Memory, max_batch: int, max_tokens: int, max_pages: int, num_groups: int
    ) -> None:
        self.max_batch = max_batch
        self.max_tokens = max_tokens
        self._num_groups = num_groups
        self._max_pages = max_pages
        self._table = _aligned(max_batch * max_pages)
        self._begins: dict[str, int] = {}
        size = 0
        for name, length in {
            "seq_lens": max_batch,
            "cu_seqlens_q": max_batch + 1,
            "last_rows": max_batch,
            "positions": max_tokens,
            "copies": num_groups * max_batch * 2,
        }.items():
            self._begins[name] = size
            size += _aligned(length)
        self._tables = size
        self._memory = memory
        self._hosts = [self._set_up(x) for x in memory.staging(size + num_groups * self._table)]
        self._device = self._hosts[0].staging.device
        self._views: dict[int, StepViews] = {}
        self._turn = 0

    def plan(
        self, allocator: PageAllocator, seqs: Sequence[int], num_new_tokens: Any, tokens: Any
    ) -> PlannedStep:
        """Extend the sequences, all or nothing, and send what the operators need to the device.

        Args:
            allocator: of the sequences.
            seqs: handles.
            num_new_tokens: an int, or one for each sequence.
            tokens: the new tokens for the prefix cache, or None.
        """
        counts = _counts(seqs, num_new_tokens)
        total = int(counts.sum())
        if total > self.max_tokens:
            raise ValueError(
                f"step: num_new_tokens must add up to at most max_tokens ({self.max_tokens}); got {total}"
            )
        self._turn = (self._turn + 1) % len(self._hosts)
        self._memory.wait(self._turn)
        host = self._hosts[self._turn]
        num_copies = allocator.step(seqs, num_new_tokens, host.arrays, tokens)
        assert isinstance(num_copies, tuple)
        _write_rows(host, counts, total)
        rows = len(seqs)
        host.staging.send(self._tables + (self._num_groups - 1) * self._table + rows * self._max_pages)
        views = self._views.get(rows)
        if views is None:
            views = self._views[rows] = self._view(self._device, rows)
        longest = int(counts.max(initial=0))
        return PlannedStep(
            batch=len(seqs),
            num_tokens=total,
            max_seqlen_q=longest,
            one_token_each=longest == 1 and total == len(seqs),
            views=views,
            positions=self._part(self._device, "positions", total),
            copies=[self._copies(self._device, group)[:n] for group, n in enumerate(num_copies)],
        )

    def _part(self, numbers: Any, name: str, length: int) -> Any:
        begin = self._begins[name]
        return numbers[begin : begin + length]

    def _copies(self, numbers: Any, group: int) -> Any:
        length = 2 * self.max_batch
        begin = self._begins["copies"] + group * length
        return numbers[begin : begin + length].reshape(self.max_batch, 2)

    def _view(self, numbers: Any, rows: int) -> StepViews:
        begins = [self._tables + group * self._table for group in range(self._num_groups)]
        return StepViews(
            self._part(numbers, "seq_lens", rows),
            self._part(numbers, "cu_seqlens_q", rows + 1),
            self._part(numbers, "last_rows", rows),
            tuple(
                numbers[begin : begin + rows * self._max_pages].reshape(rows, self._max_pages)
                for begin in begins
            ),
        )

    def _set_up(self, staging: Staging) -> _Host:
        views = self._view(staging.host, self.max_batch)
        copies = [self._copies(staging.host, group) for group in range(self._num_groups)]
        arrays = StepArrays(list(views.page_tables), views.seq_lens, views.cu_seqlens_q, copies)
        return _Host(staging, arrays, views, self._part(staging.host, "positions", self.max_tokens))


def _aligned(length: int) -> int:
    return -(-length // _ALIGNMENT) * _ALIGNMENT


def _counts(seqs: Sequence[int], num_new_tokens: int | Iterable[int]) -> NDArray[np.int64]:
    if isinstance(num_new_tokens, int):
        return np.full(len(seqs), num_new_tokens)
    return np.asarray(num_new_tokens, np.int64)


def _write_rows(host: _Host, counts: NDArray[np.int64], total: int) -> None:
    """Positions of the new tokens, and the rows of the last ones, which the allocator does not write yet."""
    batch = len(counts)
    begins = host.views.cu_seqlens_q[:batch]
    lengths = host.views.seq_lens[:batch]
    host.positions[:total] = np.arange(total) + np.repeat(lengths - counts - begins, counts)
    host.views.last_rows[:batch] = np.where(counts > 0, begins + counts - 1, 0)
    host.views.last_rows[batch:] = 0
