"""The arrays of a case, and its true result.

`make_inputs` draws the numbers, `make_cache` lays keys and values out in pages, and `make_reference` asks the
oracle. Everything that an operator must not read is NaN, or a page id that does not exist.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from support import oracle, oracle_backward
from support.case import Case


@dataclass(frozen=True)
class Inputs:
    """Packed float64 arrays that hold numbers of the tested dtype."""

    q: NDArray[np.float64]  # [total_q, num_q_heads, head_dim]
    k: NDArray[np.float64]  # [total_k, num_kv_heads, head_dim]
    v: NDArray[np.float64]
    alibi_slopes: NDArray[np.float32] | None
    cu_seqlens_q: NDArray[np.int32]  # [batch + 1]
    cu_seqlens_k: NDArray[np.int32]
    prefix_lens: NDArray[np.int32] | None  # [batch]
    sinks: NDArray[np.float32] | None = None  # [num_q_heads]
    block_mask: NDArray[np.bool_] | None = None  # [heads, query blocks, key blocks], or with a batch axis
    bidirectional_ranges: NDArray[np.int32] | None = None  # [batch, num_ranges, 2]


@dataclass(frozen=True)
class Cache:
    """The keys and values of a case in shuffled pages. NaN: unused pages, slots past a sequence's length,
    keys that no query sees. Table entries past a sequence's last page are far out of range."""

    k_pages: NDArray[np.float64]  # [num_pages, page_size, num_kv_heads, head_dim]
    v_pages: NDArray[np.float64]  # with head_dim_v
    page_table: NDArray[np.int32]  # [batch, max_pages]
    seq_lens: NDArray[np.int32]  # [batch]


def visible(case: Case, b: int) -> NDArray[np.bool_]:
    """[seqlen_q, seqlen_k]: which keys each query of sequence b sees."""
    return oracle.visible(
        oracle.positions(case.seqlens_q[b], case.seqlens_k[b]),
        case.seqlens_k[b],
        causal=case.causal,
        window_left=case.window_left,
        window_right=case.window_right,
        attention_chunk=case.attention_chunk,
        prefix_len=case.prefix_lens[b] if case.prefix_lens else 0,
        ranges=None if case.bidirectional_ranges is None else case.bidirectional_ranges[b],
        ranges_keep_window_left=case.keep_window_left,
    )


def make_block_mask(case: Case) -> NDArray[np.bool_] | None:
    """A random one, in which the first row of blocks keeps nothing."""
    if not case.block_size:
        return None
    counts = (-(-max(lengths, default=0) // case.block_size) for lengths in (case.seqlens_q, case.seqlens_k))
    heads = 1 if case.block_masks == "all" else case.num_q_heads
    shape = (*((case.batch,) if case.block_masks == "batch" else ()), heads, *counts)
    mask = _generator(case, "blocks").random(shape) < case.blocks_kept
    mask[..., :1, :] = False
    return mask


def unseen_keys(case: Case) -> NDArray[np.bool_]:
    """[total_k]: keys that no query of their sequence sees, which are never read."""
    return _unseen_keys_of_heads(case).all(axis=1)


def _unseen_keys_of_heads(case: Case) -> NDArray[np.bool_]:
    """[total_k, num_kv_heads]: keys that no query of the sequence sees, or that lie in a block which no query
    of the KV head's own looks at."""
    mask, unseen = make_block_mask(case), []
    for b in range(case.batch):
        seen = np.repeat(visible(case, b).any(axis=0)[:, None], case.num_kv_heads, axis=1)
        if mask is not None:
            of_sequence = mask[b] if mask.ndim == 4 else mask
            kept = oracle.expand_blocks(of_sequence, case.block_size, *visible(case, b).shape).any(axis=1)
            kept = np.broadcast_to(kept, (case.num_q_heads, kept.shape[1]))
            seen &= kept.reshape(case.num_kv_heads, case.group_size, -1).any(axis=1).T
        unseen.append(~seen)
    return np.concatenate(unseen)


def cumulative(lengths: tuple[int, ...]) -> NDArray[np.int32]:
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int32)


def _generator(case: Case, purpose: str) -> np.random.Generator:
    return np.random.default_rng(zlib.crc32(f"{case.name}/{purpose}".encode()))


def make_inputs(case: Case, dtype: str) -> Inputs:
    random = _generator(case, "inputs")
    queries = (sum(case.seqlens_q), case.num_q_heads, case.head_dim)
    keys = (sum(case.seqlens_k), case.num_kv_heads, case.head_dim)
    q = oracle.round_to(random.standard_normal(queries) * case.q_gain, dtype)
    k = oracle.round_to(random.standard_normal(keys), dtype)
    v = oracle.round_to(random.standard_normal((*keys[:-1], case.head_dim_v)), dtype)
    slopes = None
    if case.alibi:
        shape = (case.batch, case.num_q_heads) if case.alibi == "batch" else (case.num_q_heads,)
        slopes = (2.0 ** -random.uniform(1.0, 8.0, shape)).astype(np.float32)
    return Inputs(
        q,
        k,
        v,
        slopes,
        cumulative(case.seqlens_q),
        cumulative(case.seqlens_k),
        np.array(case.prefix_lens, np.int32) if case.prefix_lens else None,
        _make_sinks(case),
        make_block_mask(case),
        case.bidirectional_ranges,
    )


def _make_sinks(case: Case) -> NDArray[np.float32] | None:
    if not case.sinks:
        return None
    if case.sinks == "extreme":
        return np.resize(np.array([60.0, 2.0, -np.inf, -80.0, 5.0], np.float32), case.num_q_heads)
    return (2.0 * _generator(case, "sinks").standard_normal(case.num_q_heads)).astype(np.float32)


@dataclass(frozen=True)
class OutputGradients:
    """With respect to the results of a case."""

    dout: NDArray[np.float64]  # [total_q, num_q_heads, head_dim_v], numbers of the tested dtype
    dlse: NDArray[np.float32]  # [total_q, num_q_heads]


def make_output_gradients(case: Case, dtype: str) -> OutputGradients:
    random = _generator(case, "gradients")
    rows = sum(case.seqlens_q), case.num_q_heads
    dout = oracle.round_to(random.standard_normal((*rows, case.head_dim_v)), dtype)
    return OutputGradients(dout, random.standard_normal(rows).astype(np.float32))


def poisoned(case: Case, inputs: Inputs) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """k and v with NaN where no query looks."""
    k, v = inputs.k.copy(), inputs.v.copy()
    unseen = _unseen_keys_of_heads(case)
    k[unseen] = np.nan
    v[unseen] = np.nan
    return k, v


NO_SUCH_PAGE = np.array([2**31 - 1, -(2**31), -1, 2**30], np.int32)


def make_page_table(case: Case, *, shuffle: int = 0) -> tuple[NDArray[np.int32], int]:
    """The table [batch, max_pages + 2] and num_pages. Another `shuffle` is another choice of pages."""
    random = _generator(case, f"pages {shuffle}")
    num_held = [-(-length // case.page_size) for length in case.seqlens_k]
    num_pages = sum(num_held) + case.spare_pages
    pages = random.permutation(num_pages).astype(np.int32)
    columns = max(max(num_held, default=0) + 2, case.room // max(case.page_size, 1))
    table = np.resize(NO_SUCH_PAGE, (case.batch, columns)).astype(np.int32)
    begin = 0
    for row, count in zip(table, num_held, strict=True):
        row[:count] = pages[begin : begin + count]
        begin += count
    return table, num_pages


def make_cache(case: Case, inputs: Inputs, *, shuffle: int = 0) -> Cache:
    table, num_pages = make_page_table(case, shuffle=shuffle)
    seq_lens = np.array(case.seqlens_k, np.int32)
    k, v = poisoned(case, inputs)
    k_pages, v_pages = (
        oracle.append_kv(
            new,
            np.full((num_pages, case.page_size, *new.shape[1:]), np.nan),
            table,
            case.seqlens_k,
            case.seqlens_k,
        )
        for new in (k, v)
    )
    return Cache(k_pages, v_pages, table, seq_lens)


def make_reference(
    case: Case,
    inputs: Inputs,
    dtype: str,
    *,
    paged: bool = False,
    **masks: Any,
) -> oracle.Reference:
    """`masks` are those of `oracle.sequences` that a case does not have: dropout, trees, chosen pages."""
    return oracle.attention(
        inputs.q,
        inputs.k,
        inputs.v,
        case.seqlens_q,
        case.seqlens_k,
        dtype=dtype,
        prefix_lens=case.prefix_lens,
        bidirectional_ranges=case.bidirectional_ranges,
        alibi_slopes=inputs.alibi_slopes,
        sinks=inputs.sinks,
        block_mask=inputs.block_mask,
        block_size=case.block_size,
        k_scale=case.k_scale if paged else None,
        v_scale=case.v_scale if paged else None,
        **masks,
        **case.masks,
    )


def make_backward_reference(
    case: Case,
    inputs: Inputs,
    gradients: OutputGradients,
    dtype: str,
    *,
    dropout: oracle.Dropout | None = None,
) -> oracle_backward.Reference:
    masks = {
        **case.masks,
        "prefix_lens": case.prefix_lens,
        "bidirectional_ranges": case.bidirectional_ranges,
        "alibi_slopes": inputs.alibi_slopes,
        "sinks": inputs.sinks,
        "block_mask": inputs.block_mask,
        "block_size": case.block_size,
        "dropout": dropout,
    }
    arrays = inputs.q, inputs.k, inputs.v
    lengths = case.seqlens_q, case.seqlens_k
    forward = oracle.attention(*arrays, *lengths, dtype="float32", **masks)
    return oracle_backward.attention_backward(
        *arrays, gradients.dout, gradients.dlse, *lengths, dtype=dtype, lse=forward.lse, **masks
    )


def sequence_of(case: Case, inputs: Inputs, cache: Cache, b: int) -> tuple[Case, Inputs, Cache]:
    """Sequence b alone, over the same pages."""
    queries = slice(inputs.cu_seqlens_q[b], inputs.cu_seqlens_q[b + 1])
    slopes, prefix_lens, ranges = inputs.alibi_slopes, inputs.prefix_lens, inputs.bidirectional_ranges
    one = replace(
        inputs,
        q=inputs.q[queries],
        cu_seqlens_q=np.array([0, case.seqlens_q[b]], np.int32),
        alibi_slopes=slopes[b : b + 1] if slopes is not None and slopes.ndim == 2 else slopes,
        prefix_lens=prefix_lens[b : b + 1] if prefix_lens is not None else None,
        bidirectional_ranges=ranges[b : b + 1] if ranges is not None else None,
    )
    rows = replace(cache, page_table=cache.page_table[b : b + 1], seq_lens=cache.seq_lens[b : b + 1])
    return replace(case, seqlens_q=case.seqlens_q[b : b + 1]), one, rows
