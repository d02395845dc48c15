"""A step of generation on the GPU, in buffers that a captured graph may go on reading."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

import octavo
from support import oracle, problems
from support.libraries import ArrayLibrary

DTYPE = "bfloat16"


@dataclasses.dataclass
class Generation:
    """One step of generation over buffers whose addresses never change: append, then attend."""

    library: ArrayLibrary
    max_lens: tuple[int, ...]
    packed: bool
    num_q_heads: int = 8
    num_kv_heads: int = 2
    head_dim: int = 128
    page_size: int = 16

    def __post_init__(self) -> None:
        self.num_pages = sum(-(-n // self.page_size) for n in self.max_lens) + 2
        self.max_pages = max(-(-n // self.page_size) for n in self.max_lens)
        batch = len(self.max_lens)
        self.max_queries = 3 * batch if self.packed else batch
        self.step = 0
        pages = (self.num_pages, self.page_size, self.num_kv_heads, self.head_dim)
        self.k_pages, self.v_pages = (self._nan(*pages) for _ in "kv")
        self.q = self._nan(self.max_queries, self.num_q_heads, self.head_dim)
        self.k, self.v = (self._nan(self.max_queries, self.num_kv_heads, self.head_dim) for _ in "kv")
        self.page_table = self.library.int32(np.full((batch, self.max_pages), -1))
        self.seq_lens = self.library.int32(np.zeros(batch))
        self.cu_seqlens = self.library.int32(np.zeros(batch + 1)) if self.packed else None
        self.out: Any = None
        self.lse: Any = None

    def _nan(self, *shape: int) -> Any:
        return self.library.array(np.full(shape, np.nan), DTYPE)

    def launch(self) -> None:
        octavo.append_kv(
            self.k,
            self.v,
            self.k_pages,
            self.v_pages,
            self.page_table,
            self.seq_lens,
            cu_seqlens=self.cu_seqlens,
        )
        self.out, self.lse = octavo.paged_attention(
            self.q,
            self.k_pages,
            self.v_pages,
            self.page_table,
            self.seq_lens,
            cu_seqlens_q=self.cu_seqlens,
            return_lse=True,
        )

    def fill(self, seq_lens: Sequence[int], counts: Sequence[int]) -> None:
        """New lengths, pages and contents, in place. Slots past the lengths, and unused pages, are NaN."""
        self.step += 1
        random = np.random.default_rng(self.step)
        pages = random.permutation(self.num_pages).astype(np.int32)
        table = np.resize(problems.NO_SUCH_PAGE, (len(seq_lens), self.max_pages))
        begin = 0
        for row, length in zip(table, seq_lens, strict=True):
            held = -(-length // self.page_size)
            row[:held] = pages[begin : begin + held]
            begin += held

        def draw(n: int, heads: int) -> NDArray[np.float64]:
            return oracle.round_to(random.standard_normal((n, heads, self.head_dim)), DTYPE)

        total_k, total_q = sum(seq_lens), sum(counts)
        q, k, v = (
            draw(total_q, self.num_q_heads),
            draw(total_k, self.num_kv_heads),
            draw(total_k, self.num_kv_heads),
        )
        empty = np.full((self.num_pages, self.page_size, self.num_kv_heads, self.head_dim), np.nan)
        ends = np.cumsum(seq_lens)
        newest = np.concatenate(
            [
                np.arange(end - (n if length else 0), end)
                for end, n, length in zip(ends, counts, seq_lens, strict=True)
            ]
        ).astype(int)
        # A sequence of length 0 hands in tokens all the same, which nothing may write.
        is_padding = np.repeat(np.array(seq_lens) == 0, counts)
        for buffer, keys, cache in ((self.k, k, self.k_pages), (self.v, v, self.v_pages)):
            stored = keys.copy()
            stored[newest] = np.nan  # append_kv is to write these
            self._set(cache, oracle.append_kv(stored, empty, table, seq_lens, seq_lens))
            new = np.full((self.max_queries, *keys.shape[1:]), np.nan)
            new[:total_q][~is_padding] = keys[newest]
            self._set(buffer, new)
        all_q = np.zeros((self.max_queries, *q.shape[1:]))
        all_q[:total_q] = q
        self._set(self.q, all_q)
        self.page_table.copy_(self.library.int32(table))
        self.seq_lens.copy_(self.library.int32(seq_lens))
        if self.packed:
            self.cu_seqlens.copy_(self.library.int32(problems.cumulative(tuple(counts))))
        self.total_q = total_q
        self.reference = oracle.attention(q, k, v, counts, seq_lens, dtype=DTYPE, causal=True)

    def _set(self, buffer: Any, values: NDArray) -> None:
        buffer.copy_(self.library.array(values, DTYPE))

    def check(self) -> None:
        out, lse = (self.library.to_float64(x)[: self.total_q] for x in (self.out, self.lse))
        self.reference.check(out, lse)
