"""Caches of codes, computed by NumPy from the formulas in docs/conventions.md."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

import octavo

Floats = NDArray[np.float32]

DTYPES: dict[str, np.dtype[Any]] = {
    "int8": np.dtype(np.int8),
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
    "float8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
}
LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}
KINDS = (*DTYPES, "int4", "int8_int4")
"""The kinds of caches: what keys and values hold, or keys and then values."""


def split(kind: str) -> tuple[str, str]:
    k = kind.removesuffix("_int4")
    return k, k if k == kind else "int4"


def round_codes(scaled: Floats, codes: str) -> NDArray[Any]:
    """The nearest codes, ties to even, saturated."""
    bounded = np.clip(scaled, -LARGEST[codes], LARGEST[codes])
    if codes == "int8":
        return np.rint(np.where(np.isnan(bounded), 0, bounded)).astype(np.int8)
    with np.errstate(invalid="ignore"):
        rounded = bounded.astype(DTYPES[codes]).view(np.uint8)
    return np.where(np.isnan(bounded), np.uint8(0x7F), rounded).view(DTYPES[codes])


def pack(nibbles: NDArray[Any]) -> NDArray[np.uint8]:
    """[..., n] numbers from 0 to 15 to [..., n / 2] bytes."""
    nibbles = nibbles.astype(np.uint8)
    return nibbles[..., ::2] | nibbles[..., 1::2] << 4


def unpack(pages: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return np.stack([pages & 15, pages >> 4], -1).reshape(*pages.shape[:-1], -1)


def quantise(rows: NDArray[Any], codes: str) -> tuple[NDArray[Any], NDArray[Any]]:
    """The codes of [..., head_dim], as pages hold them, and the scale of each row."""
    x = rows.astype(np.float32)
    one = np.float32(1)
    spoilt = ~np.isfinite(x).all(-1)
    with np.errstate(all="ignore"):
        if codes != "int4":
            scale = np.abs(x).max(-1) / np.float32(LARGEST[codes])
            is_small = scale < np.finfo(np.float32).tiny
            scale = np.where(spoilt, np.float32(np.nan), np.where(is_small, one, scale))
            inverse = np.where(is_small, np.float32(0), one / scale)
            return round_codes(x * inverse[..., None], codes), scale.astype(np.float32)
        low, high = x.min(-1), x.max(-1)
        step = ((high - low) / np.float32(15)).astype(np.float16)
        minimum = low.astype(np.float16) + np.float16(0)  # no -0
        spoilt |= ~np.isfinite(step) | ~np.isfinite(minimum)
        is_narrow = ~spoilt & (step == 0)
        step = np.where(spoilt, np.float16(np.nan), np.where(is_narrow, np.float16(1), step))
        minimum = np.where(spoilt, np.float16(0), minimum)
        inverse = np.where(is_narrow, np.float32(0), one / step.astype(np.float32))
        scaled = (x - minimum.astype(np.float32)[..., None]) * inverse[..., None]
        nibbles = np.where(np.isnan(scaled), 0, np.rint(np.clip(scaled, 0, 15)))
    return pack(nibbles), np.stack([step, minimum], -1)


def dequantise(pages: NDArray[Any], scales: NDArray[Any], codes: str) -> NDArray[np.float64]:
    """The values of pages and their scales of each token and head, exactly."""
    if codes == "int4":
        scale, minimum = (scales[..., i, None].astype(np.float64) for i in range(2))
        return unpack(pages) * scale + minimum
    if codes == "int8":
        return pages.astype(np.float64) * scales[..., None]
    return pages.view(DTYPES[codes]).astype(np.float64) * scales[..., None]


def empty_pages(shape: tuple[int, int, int, int], codes: str) -> tuple[NDArray[Any], NDArray[Any]]:
    """Pages [num_pages, page_size, num_kv_heads, head_dim] and their scales, poisoned."""
    *leading, head_dim = shape
    if codes == "int4":
        pages = np.full((*leading, head_dim // 2), 0xFF, np.uint8)
        return pages, np.full((*leading, 2), np.nan, np.float16)
    return np.full(shape, 0xFF, np.uint8).view(DTYPES[codes]), np.full(leading, np.nan, np.float32)


@dataclass
class Cache:
    """Pages of codes and the scale of each token and head, poisoned where nothing was appended."""

    kind: str
    k_pages: NDArray[Any]
    v_pages: NDArray[Any]
    k_scales: NDArray[Any]
    v_scales: NDArray[Any]

    @classmethod
    def empty(cls, kind: str, *shape: int, head_dim_v: int = 0) -> Cache:
        num_pages, page_size, num_kv_heads, head_dim = shape
        k, v = split(kind)
        k_pages, k_scales = empty_pages((num_pages, page_size, num_kv_heads, head_dim), k)
        v_pages, v_scales = empty_pages((num_pages, page_size, num_kv_heads, head_dim_v or head_dim), v)
        return cls(kind, k_pages, v_pages, k_scales, v_scales)

    @property
    def scales(self) -> dict[str, Any]:
        """What append_kv and paged_attention take beside the pages."""
        kv_dtype = {"kv_dtype": "int4"} if self.kind.endswith("int4") else {}
        return {"k_scales": self.k_scales, "v_scales": self.v_scales, **kv_dtype}

    @property
    def arguments(self) -> dict[str, Any]:
        return {"k_pages": self.k_pages, "v_pages": self.v_pages, **self.scales}

    def values(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """The numbers of keys and values [num_pages, page_size, num_kv_heads, head_dim]."""
        k, v = split(self.kind)
        return dequantise(self.k_pages, self.k_scales, k), dequantise(self.v_pages, self.v_scales, v)


OPTIONS: list[dict[str, Any]] = [
    {"causal": False},
    {"window_left": 33},
    {"window_left": 5, "prefix_lens": np.array([3, 9, 20, 0], np.int32)},
    {"causal": False, "window_left": 33, "window_right": 4},
    {"attention_chunk": 20},
    {"attention_chunk": 30, "cu_seqlens_q": np.array([0, 1, 1, 41, 44], np.int32)},
    {"softcap": 5.0},
    {"alibi_slopes": np.linspace(0.1, 0.8, 8, dtype=np.float32)},
    {
        "alibi_slopes": np.linspace(0.1, 0.8, 8, dtype=np.float32),
        "alibi_symmetric": True,
        "causal": False,
        "cu_seqlens_q": np.array([0, 1, 1, 41, 44], np.int32),
    },
    {"sinks": np.linspace(-3.0, 4.0, 8, dtype=np.float32)},
    {"sinks": np.linspace(-3.0, 4.0, 8, dtype=np.float32), "window_left": 33, "num_splits": 3},
    {"batch_invariant": True},
    {"num_splits": 7},
    {"softmax_scale": 0.5},
    {"cu_seqlens_q": np.array([0, 1, 1, 41, 44], np.int32)},
]
"""Options of paged_attention, for a batch of four sequences and eight query heads."""


def append_packed(cache: Cache, k: NDArray[Any], v: NDArray[Any], table: NDArray[Any], *lengths: int) -> None:
    """Append all tokens of sequences of these lengths."""
    octavo.append_kv(
        k,
        v,
        page_table=table,
        seq_lens=np.array(lengths, np.int32),
        cu_seqlens=np.cumsum([0, *lengths], dtype=np.int32),
        **cache.arguments,
    )


def awkward_rows(head_dim: int) -> NDArray[np.float32]:
    """Rows [n, head_dim] for which the rules of scales matter."""
    rng = np.random.default_rng(head_dim)
    normal = rng.standard_normal((64, head_dim))
    one_large = np.zeros((4, head_dim))
    one_large[range(4), [0, 1, head_dim // 2, -1]] = [1, -3, 500, -1e-3]
    sizes = normal[:32] * 10.0 ** rng.integers(-42, 38, (32, 1))
    offsets = normal[:16] + rng.choice([100.0, -1000.0, 2049.0], (16, 1))
    narrow = 3.0 + 1e-8 * normal[:4]
    equal = np.repeat([[0.0], [-0.0], [1.0], [-2049.0], [1e-40], [7e4]], head_dim, 1)
    halves = np.tile(np.arange(head_dim) % 15 + 0.5, (2, 1)) * [[1], [-1]]  # ties of int4 and of int8
    halves[:, :2] = [[0, 15], [-127, 0]]
    return np.concatenate([normal, one_large, sizes, offsets, narrow, equal, halves]).astype(np.float32)


def filled(
    kind: str,
    lengths: list[int],
    *,
    page_size: int = 16,
    num_kv_heads: int = 2,
    head_dim: int = 64,
    factors: NDArray[Any] | float = 1.0,
    num_pages: int = 0,
    head_dim_v: int = 0,  # 0: head_dim
) -> tuple[Cache, NDArray[np.int32], NDArray[np.int32]]:
    """A cache with sequences of these lengths in scattered pages, their table and lengths."""
    head_dim_v = head_dim_v or head_dim
    rng = np.random.default_rng([page_size, head_dim])
    columns = [-(-n // page_size) for n in lengths]
    num_pages = max(num_pages, sum(columns) + 2)
    cache = Cache.empty(kind, num_pages, page_size, num_kv_heads, head_dim, head_dim_v=head_dim_v)
    pages = iter(rng.permutation(num_pages).tolist())
    # An odd number, so that offsets of 32 bits do not take it for page 0.
    table = np.full((len(lengths), max(columns)), 2**30 - 12345, np.int32)
    for row, count in zip(table, columns, strict=True):
        row[:count] = [next(pages) for _ in range(count)]
    k, v = (rng.standard_normal((sum(lengths), num_kv_heads, dim)) for dim in (head_dim, head_dim_v))
    append_packed(cache, k.astype(np.float32), (v * factors).astype(np.float32), table, *lengths)
    return cache, table, np.array(lengths, np.int32)


def unused_slots(cache: Cache, table: NDArray[Any], lengths: NDArray[Any]) -> NDArray[np.bool_]:
    """Of each page and slot, whether no sequence uses it."""
    page_size = cache.k_pages.shape[1]
    unused = np.ones(cache.k_scales.shape[:2], bool)
    for row, length in zip(table, lengths, strict=True):
        positions = np.arange(length)
        unused[row[positions // page_size], positions % page_size] = False
    return unused


def spoil_unused_scales(cache: Cache, table: NDArray[Any], lengths: NDArray[Any]) -> None:
    """Scales of slots that no sequence uses become NaN."""
    unused = unused_slots(cache, table, lengths)
    cache.k_scales[unused], cache.v_scales[unused] = np.nan, np.nan


def check_spoilt_queries(
    attend: Callable[[NDArray[Any]], tuple[NDArray[Any], NDArray[Any]]],
    q: NDArray[Any],
    counts: tuple[int, int],
) -> None:
    """NaN or infinity in a head of one query spoils its own result, and leaves the bits of all others.

    attend(q) gives the results and LSE of two sequences, which have `counts` queries, with two KV heads.
    """
    clean = attend(q)
    assert all(np.isfinite(x).all() for x in clean)
    num_heads = q.shape[1]
    for value, row, head in [(np.nan, 0, num_heads // 2 - 1), (np.inf, counts[0], num_heads - 1)]:
        with_value, spoilt = q.copy(), np.zeros(q.shape[:2], bool)
        with_value[row, head, 5] = value
        spoilt[row, head] = True
        for x, expected in zip(attend(with_value), clean, strict=True):
            assert np.isnan(x[spoilt]).all()
            assert x[~spoilt].tobytes() == expected[~spoilt].tobytes()
