"""The numbers of a step of generation: written by the allocator, read by the operators."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from octavo._core import PageAllocator, StepArrays
from octavo._kv_sequences import listed

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from octavo._kv_memory import Memory
    from octavo._types import SupportsDLPack

_ALIGNMENT = 64  # numbers: arrays begin at multiples of 256 bytes


class StepLayout(NamedTuple):
    """Where the arrays of a step lie in one array of int32, so that one transfer takes them to the device.

    The page tables come last, one after the other, so that rows past the batch of the last one need not move.
    """

    max_batch: int
    max_tokens: int
    max_pages: int
    num_groups: int

    @property
    def max_rows_of_tokens(self) -> int:
        """With padding: a batch of single tokens has a row for each row of its arrays."""
        return max(self.max_tokens, self.max_batch)

    @property
    def size(self) -> int:
        return self._begin_of_table(self.num_groups)

    def used(self, rows: int) -> int:
        """How many of the numbers a step with this many rows needs."""
        return self._begin_of_table(self.num_groups - 1) + rows * self.max_pages

    def seq_lens(self, numbers: Any, rows: int) -> Any:
        return numbers[:rows]

    def last_rows(self, numbers: Any, rows: int) -> Any:
        begin = self._rows
        return numbers[begin : begin + rows]

    def cu_seqlens_q(self, numbers: Any, rows: int) -> Any:
        begin = 2 * self._rows
        return numbers[begin : begin + rows + 1]

    def positions(self, numbers: Any, num_tokens: int) -> Any:
        begin = 3 * self._rows
        return numbers[begin : begin + num_tokens]

    def copies(self, numbers: Any, group: int, num_copies: int) -> Any:
        begin = 3 * self._rows + _aligned(self.max_rows_of_tokens) + group * 2 * self._rows
        return numbers[begin : begin + 2 * num_copies].reshape(num_copies, 2)

    def page_table(self, numbers: Any, group: int, rows: int) -> Any:
        begin = self._begin_of_table(group)
        return numbers[begin : begin + rows * self.max_pages].reshape(rows, self.max_pages)

    @property
    def _rows(self) -> int:
        return _aligned(self.max_batch + 1)

    def _begin_of_table(self, group: int) -> int:
        others = (3 + 2 * self.num_groups) * self._rows + _aligned(self.max_rows_of_tokens)
        return others + group * _aligned(self.max_batch * self.max_pages)


def _aligned(length: int) -> int:
    return -(-length // _ALIGNMENT) * _ALIGNMENT


class StepCounts(NamedTuple):
    """What is in the numbers of a step, as far as the host has to know."""

    batch: int
    num_tokens: int
    max_seqlen_q: int
    rows: int
    """Rows of the arrays: batch, or more with padding."""
    num_rows_of_tokens: int
    """Rows of queries, keys and values: num_tokens, or more with padding."""
    num_copies: tuple[int, ...]
    """The copies of each group."""

    @property
    def is_packed(self) -> bool:
        """Whether the operators need cu_seqlens: not where each row of the arrays is a row of tokens."""
        each_has_one = self.max_seqlen_q == 1 and self.num_tokens == self.batch
        return not (each_has_one and self.num_rows_of_tokens == self.rows)


class HostStep:
    """The numbers of a step on the host, where the allocator writes them."""

    def __init__(self, layout: StepLayout, numbers: NDArray[np.int32]) -> None:
        self.numbers = numbers
        """[layout.size]."""
        self._layout = layout
        rows = layout.max_batch
        groups = range(layout.num_groups)
        self._arrays = StepArrays(
            [layout.page_table(numbers, group, rows) for group in groups],
            layout.seq_lens(numbers, rows),
            layout.cu_seqlens_q(numbers, rows),
            [layout.copies(numbers, group, rows) for group in groups],
            positions=layout.positions(numbers, layout.max_tokens),
            last_rows=layout.last_rows(numbers, rows),
        )
        self._first = layout.cu_seqlens_q(numbers, 0).data  # [1], which is 0 in every step
        self._is_marked = False

    def begin(self) -> None:
        """To be called before ``write``: what comes from here on, ``undo`` can take back."""
        self._is_marked = False

    def write(
        self,
        allocator: PageAllocator,
        seqs: Sequence[int],
        num_new_tokens: int | Iterable[int] | SupportsDLPack,
        tokens: Iterable[int] | SupportsDLPack | None,
        pad_batch: int | None,
        pad_tokens: int | None,
    ) -> StepCounts:
        """Extend the sequences, all or nothing: ``KVCache.step`` as far as it is the host's."""
        num_new_tokens = listed(num_new_tokens)
        try:
            batch = len(seqs)
        except TypeError:
            raise TypeError(
                f"step: seqs must be a sequence of handles, such as a list; got {type(seqs).__name__}"
            ) from None
        total, longest = _total_and_longest(num_new_tokens, batch)
        rows = _padded("pad_batch", pad_batch, batch, self._layout.max_batch)
        one_each = longest == 1 and total == batch
        num_rows_of_tokens = _padded(
            "pad_tokens", pad_tokens, rows if one_each else total, self._layout.max_rows_of_tokens
        )
        # The allocator writes a 0 over it when it makes the step. An interrupt may come right before its call
        # or right after it, and undo() has nothing else to tell by.
        self._first[0] = -1
        self._is_marked = True
        try:
            num_copies = allocator.step(seqs, num_new_tokens, self._arrays, tokens)
        except ValueError as error:
            if str(error).startswith("step: page_table's max_pages"):  # which KVCache has from max_length
                self._refuse_lengths(allocator, seqs, num_new_tokens)
            raise
        assert isinstance(num_copies, tuple)  # since page_table was given as a list
        return StepCounts(batch, total, longest, rows, num_rows_of_tokens, num_copies)

    def _refuse_lengths(self, allocator: PageAllocator, seqs: Sequence[int], num_new_tokens: Any) -> None:
        """Say which sequence is too long, once the allocator has found that one is."""
        most = self._layout.max_pages * allocator.page_size
        counts = np.broadcast_to(_counts(num_new_tokens), len(seqs))
        for seq, count in zip(seqs, counts.tolist(), strict=True):
            length = allocator.length(seq) + count
            if length > most:
                raise ValueError(
                    f"step: sequence {seq} would have {length} tokens; max_length of the KVCache, in whole "
                    f"pages, is {most}"
                ) from None

    def undo(self, allocator: PageAllocator, seqs: Sequence[int]) -> list[NDArray[np.int32]] | None:
        """Take the new tokens back, wherever ``write`` or what followed it has raised.

        Returns:
            The copies of the step, for each group or none at all. They have to be made later: the allocator
            counts them as made, and a sequence keeps the page that was to be its own. None where there was
            no step yet: then everything is as before.
        """
        is_made = self._is_marked and self._first[0] == 0
        self._first[0] = 0
        if not is_made:
            return None
        batch = len(seqs)
        new = np.diff(self._layout.cu_seqlens_q(self.numbers, batch))
        before = self._layout.seq_lens(self.numbers, batch) - new
        for seq, length in zip(seqs, before.tolist(), strict=True):
            allocator.truncate(seq, length)
        num_copies = self._arrays.num_copies
        assert isinstance(num_copies, tuple)
        if not any(num_copies):
            return []
        return [self._layout.copies(self.numbers, group, n).copy() for group, n in enumerate(num_copies)]


class DeviceStep:
    """The same numbers for the operators: on a GPU a copy of them, elsewhere the same memory."""

    def __init__(self, layout: StepLayout, memory: Memory) -> None:
        self.layout = layout
        self._memory = memory
        self._staging = memory.staging(layout.size)
        self._hosts = [HostStep(layout, x.host) for x in self._staging]
        self._turn = 0  # of the last step that was sent
        self._next = 0  # of the one that has begun
        self.numbers = self._staging[0].device

    def begin(self) -> HostStep:
        """Begin a step on the host, where no transfer reads its numbers any more."""
        self._next = (self._turn + 1) % len(self._hosts)
        self._memory.wait(self._next)
        host = self._hosts[self._next]
        host.begin()
        return host

    def send(self, counts: StepCounts) -> None:
        """Queue the transfer of the step that has begun, once it is written."""
        self._turn = self._next
        self._staging[self._turn].send(self.layout.used(counts.rows))

    def check_ranges(
        self, ranges: Any, seq_lens: Any, cu_seqlens_q: Any, layer: int, window_left: int
    ) -> None:
        """On the CPU, refuse ranges that reach behind a layer's window, whose pages are others' by now."""
        if not self._staging[0].is_on_cpu:
            return
        ranges, seq_lens = np.asarray(ranges), np.asarray(seq_lens)
        counts = 1 if cu_seqlens_q is None else np.diff(np.asarray(cu_seqlens_q))
        first_new = seq_lens - counts
        if ranges.ndim != 3 or ranges.shape[0] != len(first_new) or ranges.shape[2] != 2:
            return  # which the operator refuses
        oldest = np.maximum(first_new - window_left, 0)[:, None]
        is_lost = (ranges[..., 1] > first_new[:, None]) & (ranges[..., 0] < oldest)
        if is_lost.any():
            b, i = (int(index[0]) for index in np.nonzero(is_lost))
            raise ValueError(
                f"attend: bidirectional_ranges[{b}, {i}] must begin at position {oldest[b, 0]} or later, "
                f"since layer {layer} has no pages of what its window of {window_left} has passed; got "
                f"{ranges[b, i, 0]}. With ranges_keep_window_left=True windows hold in ranges, too"
            )


def _total_and_longest(num_new_tokens: Any, batch: int) -> tuple[int, int]:
    """0 and 0 where they are no integers, which the allocator refuses."""
    if isinstance(num_new_tokens, int):
        return num_new_tokens * batch, num_new_tokens if batch else 0
    try:
        counts = _counts(num_new_tokens)
    except (TypeError, ValueError):
        return 0, 0
    return int(counts.sum()), int(counts.max(initial=0))


def _counts(num_new_tokens: Any) -> NDArray[Any]:
    """An array of integers. One by one, as the allocator does, where NumPy cannot read them, as on a GPU."""
    try:
        counts = np.asarray(num_new_tokens)
        if counts.dtype.kind in "iu":
            return counts
    except (TypeError, ValueError, RuntimeError):  # the last one of tensors that require grad
        pass
    return np.array([operator.index(count) for count in num_new_tokens], object)


def _padded(name: str, padded: int | None, number: int, most: int) -> int:
    if padded is None:
        return number
    try:
        padded = operator.index(padded)
    except TypeError:
        raise TypeError(f"step: {name} must be an int; got {type(padded).__name__}") from None
    if not number <= padded <= most:
        raise ValueError(
            f"step: {name} ({padded}) must be at least the {number} of the step and at most {most}"
        )
    return padded
