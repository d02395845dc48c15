"""What a case is: one call of attention, and how much work it is. Needs NumPy alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

ITEMSIZE = {"float32": 4, "float16": 2, "bfloat16": 2}
KV_BITS = {"float8_e4m3fn": 8 + 8, "int8": 8 + 8, "int4": 4 + 4, "int8_int4": 8 + 4}
"""Bits of an element of keys and one of values, in a cache of codes."""
TOKEN_SCALES = ("int8", "int4", "int8_int4")
"""Which of them have 4 bytes of scales for each token and KV head, of keys and of values."""


@dataclass(frozen=True)
class Case:
    """`seqlens_k` counts every key of a sequence, its new tokens included."""

    name: str
    seqlens_q: tuple[int, ...]
    seqlens_k: tuple[int, ...]
    num_q_heads: int = 4
    num_kv_heads: int = 4
    head_dim: int = 64
    page_size: int = 16  # 0: the keys lie in no pages
    causal: bool = True
    window_left: int = -1
    window_right: int = -1
    attention_chunk: int = 0
    prefix_lens: tuple[int, ...] | None = None
    ranges: tuple[tuple[tuple[int, int], ...], ...] | None = None  # of each sequence, that see both ways
    keep_window_left: bool = False  # ranges do not show what windows hide before a query
    softcap: float = 0.0
    alibi: str = ""  # "", "head": slopes [num_q_heads], "batch": slopes [batch, num_q_heads]
    alibi_symmetric: bool = False
    sinks: str = ""  # "", "normal", "extreme": among them -inf, and such as leave keys no weight or all of it
    block_size: int = 0  # 0: no block mask
    blocks_kept: float = 0.3  # of a random mask
    block_masks: str = "heads"  # "all": one for all heads, "heads": one each, "batch": those of each sequence
    softmax_scale: float | None = None
    k_scale: float | None = None
    v_scale: float | None = None
    q_gain: float = 1.0  # larger: a peaked softmax
    spare_pages: int = 3  # pages of the cache that no sequence holds
    value_dim: int = 0  # the head dim of values and results; 0: head_dim

    # What a row of a benchmark fixes. Most tests run a case in every dtype, and ask for the LSE.
    dtype: str = "bfloat16"  # of queries and results
    kv_dtype: str = ""  # of keys and values, or what codes they are; empty: dtype
    return_lse: bool = False
    head_major: bool = False  # the cache in memory: [num_pages, num_kv_heads, page_size, head_dim]
    shared_prefix: int = 0  # the first tokens of every sequence, in the same pages
    cascade: bool = False  # whether the call says so
    room: int = 0  # keys of a sequence that the page table has room for; 0: those of the longest

    def __str__(self) -> str:
        return self.name

    @property
    def batch(self) -> int:
        return len(self.seqlens_q)

    @property
    def group_size(self) -> int:
        return self.num_q_heads // self.num_kv_heads

    @property
    def head_dim_v(self) -> int:
        return self.value_dim or self.head_dim

    @property
    def is_dense(self) -> bool:
        return len(set(self.seqlens_q)) == 1 and len(set(self.seqlens_k)) == 1

    @property
    def is_decode(self) -> bool:
        return set(self.seqlens_q) == {1}

    @property
    def is_cacheable(self) -> bool:
        """No sequence has more queries than tokens, unless it is padding: keys are in the cache before."""
        lengths = zip(self.seqlens_q, self.seqlens_k, strict=True)
        return all(seqlen_k == 0 or seqlen_k >= seqlen_q for seqlen_q, seqlen_k in lengths)

    @property
    def sees_all(self) -> bool:
        """Each query sees all keys, without a bias: it does not matter where it sits."""
        return not (self.causal or self.alibi) and self.window_left < 0 and self.window_right < 0

    @property
    def cache_dtype(self) -> str:
        return self.kv_dtype or self.dtype

    @property
    def masks(self) -> dict[str, Any]:
        """Keyword arguments that the operators and the oracle share, except for the arrays."""
        return {
            "softmax_scale": self.softmax_scale,
            "causal": self.causal,
            "window_left": self.window_left,
            "window_right": self.window_right,
            "attention_chunk": self.attention_chunk,
            "softcap": self.softcap,
            "alibi_symmetric": self.alibi_symmetric,
            "ranges_keep_window_left": self.keep_window_left,
        }

    @property
    def bidirectional_ranges(self) -> NDArray[np.int32] | None:
        """[batch, num_ranges, 2], with ranges without keys behind those of a sequence that has fewer."""
        if self.ranges is None:
            return None
        bounds = np.zeros((self.batch, max(map(len, self.ranges), default=0), 2), np.int32)
        for b, ranges in enumerate(self.ranges):
            bounds[b, : len(ranges)] = np.reshape(ranges, (-1, 2))
        return bounds

    def _window(self, b: int, q_pos: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Where the keys begin and end that each of these queries sees beside the prefix."""
        m = self.seqlens_k[b]
        begin = q_pos - self.window_left if self.window_left >= 0 else np.zeros(len(q_pos), int)
        window_right = 0 if self.causal else self.window_right
        end = np.minimum(q_pos + window_right + 1, m) if window_right >= 0 else np.full(len(q_pos), m)
        if self.attention_chunk > 0:
            begin = np.maximum(begin, q_pos // self.attention_chunk * self.attention_chunk)
        for first, last in self.ranges[b] if self.ranges else ():
            inside = (first <= q_pos) & (q_pos < last)
            end = np.where(inside, np.maximum(end, min(last, m)), end)
            if not self.keep_window_left:
                begin = np.where(inside, np.minimum(begin, first), begin)
        return np.maximum(begin, 0), end

    def num_visible(self, b: int) -> int:
        """Pairs of a query and a key that it sees, in one head of sequence b."""
        n, m = self.seqlens_q[b], self.seqlens_k[b]
        begin, end = self._window(b, np.arange(m - n, m))
        prefix = min(self.prefix_lens[b], m) if self.prefix_lens else 0
        return int((prefix + np.maximum(end - np.maximum(begin, prefix), 0)).sum())

    def num_seen_keys(self, b: int) -> int:
        """Keys of sequence b that some query sees. The last query, at the last key, sees to the end."""
        n, m = self.seqlens_q[b], self.seqlens_k[b]
        if n == 0:
            return 0
        begin = int(self._window(b, np.array([m - n]))[0][0])
        prefix = min(self.prefix_lens[b], m) if self.prefix_lens else 0
        return prefix + max(0, m - max(begin, prefix))

    @property
    def flops(self) -> int:
        """Floating point operations of both matrix products.

        A causal mask alone counts as half of its square, without the diagonal's other half, as everyone
        counts it.
        """
        pairs = sum(map(self.num_visible, range(self.batch)))
        is_plain = self.window_left < 0 and not (self.attention_chunk or self.prefix_lens or self.ranges)
        if self.causal and is_plain:
            diagonals = map(min, self.seqlens_q, self.seqlens_k)
            pairs -= sum((length + 1) // 2 for length in diagonals)
        return 2 * pairs * self.num_q_heads * (self.head_dim + self.head_dim_v)

    @property
    def kv_bytes(self) -> int:
        """Keys and values that some query sees; those in shared pages count once."""
        tokens = sum(map(self.num_seen_keys, range(self.batch)))
        tokens -= max(0, self.batch - 1) * self.shared_prefix
        if self.kv_dtype in KV_BITS:
            scales = 2 * 4 if self.kv_dtype in TOKEN_SCALES else 0
            return tokens * self.num_kv_heads * (self.head_dim * KV_BITS[self.kv_dtype] // 8 + scales)
        return tokens * self.num_kv_heads * (self.head_dim + self.head_dim_v) * ITEMSIZE[self.dtype]

    @property
    def num_bytes(self) -> int:
        """Keys and values read, queries read, results written."""
        rows = sum(self.seqlens_q) * self.num_q_heads
        queries_and_results = rows * (self.head_dim + self.head_dim_v) * ITEMSIZE[self.dtype]
        return self.kv_bytes + queries_and_results + 4 * rows * self.return_lse
