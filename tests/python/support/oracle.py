"""What the operators mean: float64 NumPy straight from the formulas, and the yardstick for errors.

Every function works on packed arrays: q [total_q, num_q_heads, head_dim], k and v [total_k, num_kv_heads,
head_dim], and the lengths of the sequences, one after the other. Dense arrays are packed ones with equal
lengths; a paged cache becomes packed by `gather_pages`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

NUMPY_DTYPES: dict[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}

Result = tuple[NDArray[np.float64], NDArray[np.float64]]  # out and lse

# Relative spacing of the numbers of a dtype.
SPACING = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}

# The stated epsilon of the tolerance, relative to a row's largest element: half a spacing, for rounding the
# result. In float32 the rounding of the scores counts as well. A score of size s is off by several s * 2^-24,
# and a weight by as much relative to itself: there the epsilon is also relative to the sequence's largest LSE
# (or to 1).
EPSILON_OUT = {"float32": 2.0**-21, "float16": 2.0**-11, "bfloat16": 2.0**-8}
EPSILON_LSE = 2.0**-20  # relative to the sequence's largest LSE, or to 1

HALF_SPACING = 2.0**-24  # of float32

# How many epsilons the result has where weights are relative to one number for all rows: softmax_phi, or the
# zero that fixed splits begin with on a GPU. Then a row's largest weight is not exactly 1: its rounding to 16
# bits adds up with that of the result, also where one key has all the weight.
EPSILONS_OF_UNIFIED_MAX = 2.0


def round_to(values: NDArray[Any], dtype: str) -> NDArray[np.float64]:
    """The nearest numbers of `dtype`, as float64."""
    return np.asarray(values).astype(np.float32).astype(NUMPY_DTYPES[dtype]).astype(np.float64)


def positions(seqlen_q: int, seqlen_k: int) -> NDArray[np.int64]:
    """[seqlen_q]: where the queries of a sequence sit among its keys. The last one sits at the last key."""
    return np.arange(seqlen_k - seqlen_q, seqlen_k)


def visible(
    q_pos: NDArray[np.int64],
    seqlen_k: int,
    *,
    causal: bool = False,
    window_left: int = -1,
    window_right: int = -1,
    attention_chunk: int = 0,
    prefix_len: int = 0,
    ranges: NDArray[Any] | None = None,
    ranges_keep_window_left: bool = False,
) -> NDArray[np.bool_]:
    """[len(q_pos), seqlen_k]: which keys the queries at these positions see. `ranges`: [n, 2]."""
    distance = _distances(q_pos, seqlen_k)
    if causal:
        window_right = 0
    left, right = np.ones(distance.shape, bool), np.ones(distance.shape, bool)  # what hides neither side
    if window_left >= 0:
        left &= distance <= window_left
    if window_right >= 0:
        right &= distance >= -window_right
    if attention_chunk > 0:
        left &= q_pos[:, None] // attention_chunk <= np.arange(seqlen_k) // attention_chunk
    see = left & right
    if ranges is not None:
        alike = in_one_range(q_pos, np.arange(seqlen_k), ranges)
        see |= alike & left if ranges_keep_window_left else alike
    see[:, :prefix_len] = True
    return see


def in_one_range(
    q_pos: NDArray[np.int64], k_pos: NDArray[np.int64], ranges: NDArray[Any]
) -> NDArray[np.bool_]:
    """[len(q_pos), len(k_pos)]: whether both lie in the same range [begin, end) of `ranges`, [n, 2]."""
    alike = np.zeros((len(q_pos), len(k_pos)), bool)
    for begin, end in np.asarray(ranges, np.int64):
        of_queries, of_keys = ((begin <= x) & (x < end) for x in (q_pos, k_pos))
        alike |= of_queries[:, None] & of_keys
    return alike


def expand_blocks(block_mask: NDArray[Any], block_size: int, n: int, m: int) -> NDArray[np.bool_]:
    """[heads, query blocks, key blocks] to [heads, n, m], counted from the first query and the first key."""
    blocks = block_mask != 0
    return blocks[:, np.arange(n)[:, None] // block_size, np.arange(m) // block_size]


def hidden_by_tree(words: Sequence[int], seqlen_k: int, prefix_len: int) -> NDArray[np.bool_]:
    """[n, seqlen_k]: which keys the words of n queries hide; bit j is of the j-th of the n newest."""
    n = len(words)
    hidden = np.zeros((n, seqlen_k), bool)
    for i, word in enumerate(words if n <= 64 else ()):
        for j in range(n):
            key = seqlen_k - n + j
            if key >= prefix_len:
                hidden[i, key] = not int(word) >> j & 1
    return hidden


def in_chosen_pages(
    lists: NDArray[Any], page_size: int, num_q_heads: int, seqlen_k: int
) -> NDArray[np.bool_]:
    """[num_q_heads, 1, seqlen_k]: which keys lie in chosen pages. `lists`: [KV heads or 1, num_chosen] pages,
    -1 for none."""
    pages = np.arange(seqlen_k) // page_size
    chosen = (lists[:, :, None] == pages).any(axis=1)
    return np.repeat(chosen, num_q_heads // len(chosen), axis=0)[:, None]


def _distances(q_pos: NDArray[np.int64], seqlen_k: int) -> NDArray[np.int64]:
    """[len(q_pos), seqlen_k]: how far each key lies before each query."""
    return q_pos[:, None] - np.arange(seqlen_k)


_PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_PHILOX_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)


def philox(counter: Sequence[NDArray[Any] | int], key: Sequence[int]) -> list[NDArray[np.uint64]]:
    """Philox 4x32-7 (Salmon et al. 2011): four counter words and two key words to four random words."""
    words = [np.asarray(word, np.uint64) for word in counter]
    for i in range(7):
        keys = [np.uint64((key[n] + i * _PHILOX_WEYL[n]) % 2**32) for n in range(2)]
        a, b = np.uint64(_PHILOX_MULTIPLIERS[0]) * words[0], np.uint64(_PHILOX_MULTIPLIERS[1]) * words[2]
        shift = np.uint64(32)
        words = [(b >> shift) ^ words[1] ^ keys[0], b & _LOW, (a >> shift) ^ words[3] ^ keys[1], a & _LOW]
    return words


@dataclass(frozen=True)
class Dropout:
    p: float
    seed: int
    offset: int = 0

    def keep(self, b: int, num_q_heads: int, seqlen_q: int, seqlen_k: int) -> NDArray[np.bool_]:
        """[num_q_heads, seqlen_q, seqlen_k]: the weights of sequence b that stay."""
        h, i, j = np.ogrid[:num_q_heads, :seqlen_q, :seqlen_k]
        head = np.uint64(self.offset + b * num_q_heads) + h.astype(np.uint64)
        counter = (4 * (j // 32) + j % 8 // 2, i, head & _LOW, head >> np.uint64(32))
        words = philox(counter, (self.seed & 0xFFFFFFFF, self.seed >> 32))
        word = np.choose(j // 8 % 4, words)
        bits = np.where(j % 2 == 0, word & np.uint64(0xFFFF), word >> np.uint64(16))
        return bits >= round(self.p * 2**16)


def sum_errors(squares: NDArray[Any], num_summands: int) -> NDArray[np.float64]:
    """How far float32 sums may be off, however close to 0 they are, of summands with these sums of squares.

    With signs as at random the first j of n summands add up to about s * sqrt(j / n), where s^2 is the sum
    of all squares. An addition is off by 0.39 * 2^-24 of that, as a rounding is by any part of half a
    spacing, and a number is anywhere between two powers of 2. The variance of n of them is
    (0.39 * 2^-24 * s)^2 * n / 2, its root 0.28 * sqrt(n) * 2^-24 * s. The result is 3.6 times that.
    """
    return HALF_SPACING * np.sqrt(num_summands * np.asarray(squares, np.float64))


def score_errors(
    products: NDArray[Any], slopes_of_cap: NDArray[Any] | float, capped: Any, bias: NDArray[Any] | None
) -> NDArray[Any]:
    """[num_q_heads, n, m]: how far float32 scores may be off, given how far the scaled products may be.

    To that add four roundings of a capped score, as many as the CPU's tanh has (`capped` is 0 without a cap),
    and four of a bias, which may cancel the score: of the slope in units of log2(e), of its product with the
    distance, and of two sums with it.
    """
    of_bias = 0.0 if bias is None else np.abs(bias)
    return products * slopes_of_cap + 4.0 * HALF_SPACING * (np.abs(capped) + of_bias)


def _by_kv_head(x: NDArray[Any], num_kv_heads: int) -> NDArray[Any]:
    """[n, heads, head_dim] -> [num_kv_heads, heads of a KV head * n, head_dim]."""
    n, heads, head_dim = x.shape
    return x.transpose(1, 0, 2).reshape(num_kv_heads, heads // num_kv_heads * n, head_dim)


def attend(
    q: NDArray[Any],
    k: NDArray[Any],
    v: NDArray[Any],
    see: NDArray[np.bool_],
    scale: float,
    softcap: float,
    bias: NDArray[Any] | None,
    kept: NDArray[Any] | None = None,
    sinks: NDArray[Any] | None = None,
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """One sequence in float64: out [n, num_q_heads, head_dim of v], lse and errors [n, num_q_heads].

    `errors` is how far float32 scores of keys may be off, on average by weight: as far as the logarithm of
    the sum of the keys' weights may be, or this sum, relative to itself, beside the weight of a sink.

    Args:
        q: [n, num_q_heads, head_dim].
        k: [m, num_kv_heads, head_dim].
        v: Like k, with a head_dim of its own.
        see: [n, m].
        scale: Multiplies the products of queries and keys.
        softcap: 0 for none.
        bias: [num_q_heads, n, m], added to the scores.
        kept: [num_q_heads, n, m], what dropout multiplies the weights by.
        sinks: [num_q_heads], a score more of each query, whose value is 0.
    """
    (n, num_q_heads, head_dim), (m, num_kv_heads, _) = q.shape, k.shape
    q, k, v = (_by_kv_head(x, num_kv_heads) for x in (q, k, v))
    scores = scale * (q @ k.transpose(0, 2, 1)).reshape(num_q_heads, n, m)
    errors = abs(scale) * sum_errors(q**2 @ k.transpose(0, 2, 1) ** 2, head_dim).reshape(num_q_heads, n, m)
    tanh: Any = 0.0
    if softcap > 0.0:
        tanh = np.tanh(scores / softcap)
        scores = softcap * tanh
    errors = score_errors(errors, 1.0 - tanh**2, softcap * tanh, bias)
    if bias is not None:
        scores = scores + bias
    scores = np.where(see, scores, -np.inf)
    sink = -np.inf if sinks is None else sinks[:, None, None]
    highest = np.maximum(scores.max(axis=2, keepdims=True, initial=-np.inf), sink)
    finite = np.where(np.isneginf(highest), 0.0, highest)
    weights = np.exp(scores - finite)
    total = weights.sum(axis=2, keepdims=True) + np.exp(sink - finite)
    empty = total == 0.0
    of_keys = np.maximum(weights.sum(axis=2), np.finfo(np.float64).tiny)
    errors = (weights * errors).sum(axis=2) / of_keys
    weights = weights / np.where(empty, 1.0, total) * (1.0 if kept is None else kept)
    out = (weights.reshape(*q.shape[:2], m) @ v).reshape(num_q_heads, n, v.shape[2])
    lse = np.where(empty, -np.inf, highest + np.log(np.where(empty, 1.0, total)))
    return out.transpose(1, 0, 2), lse[:, :, 0].T, errors.T


def plain(
    q: NDArray[Any],
    k: NDArray[Any],
    v: NDArray[Any],
    see: NDArray[np.bool_],
    scale: float,
    softcap: float,
    bias: NDArray[Any] | None,
    kept: NDArray[Any] | None,
    sinks: NDArray[Any] | None,
    dtype: str,
) -> Result:
    """The same sequence as a plain implementation computes it: its error is the yardstick for the operators'.

    Products of the dtype are summed in float32; scores, probabilities and result are rounded to the dtype.
    """

    def rounded(x: NDArray[Any]) -> NDArray[np.float32]:
        return x.astype(NUMPY_DTYPES[dtype]).astype(np.float32)

    (n, num_q_heads, _), (m, num_kv_heads, _) = q.shape, k.shape
    q, k, v = (_by_kv_head(x.astype(np.float32), num_kv_heads) for x in (q, k, v))
    products = (q @ k.transpose(0, 2, 1)).reshape(num_q_heads, n, m)
    scores = rounded(np.float32(scale) * rounded(products))
    if softcap > 0.0:
        scores = rounded(np.float32(softcap) * np.tanh(scores / np.float32(softcap)))
    if bias is not None:
        scores = rounded(scores + bias.astype(np.float32))
    scores = np.where(see, scores, np.float32(-np.inf))
    sink = np.float32(-np.inf) if sinks is None else sinks[:, None, None].astype(np.float32)
    highest = np.maximum(scores.max(axis=2, keepdims=True, initial=-np.inf), sink)
    finite = np.where(np.isneginf(highest), np.float32(0), highest)
    weights = np.exp(scores - finite)
    total = weights.sum(axis=2, keepdims=True) + np.exp(sink - finite)
    empty = total == 0.0
    total_or_one = np.where(empty, np.float32(1), total)
    probabilities = weights / total_or_one
    if kept is not None:
        probabilities = probabilities * kept.astype(np.float32)
    out = rounded(rounded(probabilities).reshape(*q.shape[:2], m) @ v).reshape(num_q_heads, n, v.shape[2])
    lse = np.where(empty, np.float32(-np.inf), highest + np.log(total_or_one))
    return out.transpose(1, 0, 2).astype(np.float64), lse[:, :, 0].T.astype(np.float64)


@dataclass(frozen=True)
class Reference:
    """The true result, the plain one, and the tolerance that they give."""

    dtype: str
    seqlens_q: tuple[int, ...]
    out: NDArray[np.float64]  # [total_q, num_q_heads, head_dim of v]
    lse: NDArray[np.float64]  # [total_q, num_q_heads]
    plain_out: NDArray[np.float64]
    plain_lse: NDArray[np.float64]
    score_errors: NDArray[np.float64]  # like lse: how far float32 scores may be off

    def _sequences(self) -> list[slice]:
        ends = np.cumsum(self.seqlens_q, dtype=int)
        return [slice(end - n, end) for end, n in zip(ends, self.seqlens_q, strict=True)]

    def _largest_lse(self, rows: slice) -> float:
        """In magnitude, and at least 1."""
        lse = np.abs(self.lse[rows])
        return float(lse.max(initial=1.0, where=np.isfinite(lse)))

    def check_out(self, out: NDArray, epsilons: float = 1.0) -> None:
        """The error is at most twice the plain one plus `epsilons` stated epsilons; empty rows are exactly 0.

        Row by row for the 16-bit dtypes, so that rows over many keys, whose results are small, are held to
        their own error. A float32 row's error is a few roundings of one sum and owes much to luck: there the
        plain error is the sequence's, and an LSE near 0 of scores that are sums of large products counts as
        if it were as large as they make it expect.
        """
        out = np.asarray(out, np.float64).reshape(self.out.shape)
        if out.size == 0:
            return
        assert np.isfinite(out).all(), f"out has {np.count_nonzero(~np.isfinite(out))} non-finite elements"
        error = np.abs(out - self.out).max(axis=(1, 2))
        plain_error = np.abs(self.plain_out - self.out).max(axis=(1, 2))
        epsilon = epsilons * EPSILON_OUT[self.dtype] * np.abs(self.out).max(axis=(1, 2))
        if self.dtype == "float32":
            for rows in self._sequences():
                plain_error[rows] = plain_error[rows].max(initial=0.0)
                of_scores = self.score_errors[rows].max(initial=0.0) / EPSILON_OUT[self.dtype]
                epsilon[rows] *= max(self._largest_lse(rows), of_scores)
        plain_error[np.isneginf(self.lse).all(axis=1)] = 0.0
        tolerance = 2.0 * plain_error + epsilon
        row = int(np.argmax(error - tolerance))
        assert error[row] <= tolerance[row], (
            f"out: error {error[row]:.3g} in row {row} of {len(error)}, tolerance {tolerance[row]:.3g} "
            f"(plain error {plain_error[row]:.3g}); {np.count_nonzero(error > tolerance)} rows are off"
        )

    def check_lse(self, lse: NDArray) -> None:
        """Each sequence: at most twice the plain error plus the stated epsilon, or plus what float32 scores
        may be off by. Empty rows are -inf."""
        lse = np.asarray(lse, np.float64).reshape(self.lse.shape)
        empty = np.isneginf(self.lse)
        np.testing.assert_array_equal(np.isneginf(lse), empty, "lse is -inf for empty rows and no others")
        for b, rows in enumerate(self._sequences()):
            true = np.where(empty[rows], 0.0, self.lse[rows])
            error = np.abs(np.where(empty[rows], 0.0, lse[rows]) - true).max(initial=0.0)
            plain_error = np.abs(np.where(empty[rows], 0.0, self.plain_lse[rows]) - true).max(initial=0.0)
            of_scores = self.score_errors[rows].max(initial=0.0)
            tolerance = 2.0 * plain_error + max(EPSILON_LSE * self._largest_lse(rows), of_scores)
            assert error <= tolerance, (
                f"lse: error {error:.3g} in sequence {b}, tolerance {tolerance:.3g} "
                f"(plain error {plain_error:.3g})"
            )

    def check(self, out: NDArray[Any], lse: NDArray[Any], epsilons: float = 1.0) -> None:
        self.check_out(out, epsilons)
        self.check_lse(lse)

    def max_relative_error(self, out: NDArray[Any]) -> float:
        """The largest error, relative to the largest element of its query and head, or to 1 where all are 0.

        NaN if `out` has one.
        """
        error = np.abs(np.asarray(out, np.float64).reshape(self.out.shape) - self.out).max(axis=2)
        largest = np.abs(self.out).max(axis=2)
        return float((error / np.where(largest == 0.0, 1.0, largest)).max())


@dataclass(frozen=True)
class PackedSequence:
    """One sequence of packed arrays: where it lies, who sees what, and what becomes of its scores."""

    index: int
    rows: slice  # of the queries
    keys: slice
    see: NDArray[np.bool_]  # [n, m], or [num_q_heads or 1, n, m]
    distance: NDArray[np.int64]  # [n, m]: how far each key lies before each query, or from it
    slopes: NDArray[np.float64] | None  # [num_q_heads]
    kept: NDArray[np.float64] | None  # [num_q_heads, n, m], what dropout multiplies the weights by
    sinks: NDArray[np.float64] | None  # [num_q_heads]

    @property
    def bias(self) -> NDArray[np.float64] | None:
        """[num_q_heads, n, m]."""
        return None if self.slopes is None else -self.slopes[:, None, None] * self.distance


def sequences(
    num_q_heads: int,
    seqlens_q: Sequence[int],
    seqlens_k: Sequence[int],
    *,
    causal: bool = False,
    window_left: int = -1,
    window_right: int = -1,
    attention_chunk: int = 0,
    prefix_lens: Sequence[int] | None = None,
    bidirectional_ranges: NDArray[Any] | None = None,
    ranges_keep_window_left: bool = False,
    block_mask: NDArray[Any] | None = None,
    block_size: int = 128,
    alibi_slopes: NDArray[Any] | None = None,
    alibi_symmetric: bool = False,
    dropout: Dropout | None = None,
    sinks: NDArray[Any] | None = None,
    tree_mask: Sequence[int] | None = None,
    chosen_pages: NDArray[Any] | None = None,
    page_size: int = 0,
    q_pos: Sequence[NDArray[np.int64]] | None = None,
) -> Iterator[PackedSequence]:
    """Each in turn. `q_pos` is for some of the queries alone: where those that are given sit. `chosen_pages`,
    of `page_size` tokens each: [batch, KV heads or 1, num_chosen]."""
    assert q_pos is None or dropout is None, "dropout counts all queries"
    if q_pos is None:
        q_pos = [positions(n, m) for n, m in zip(seqlens_q, seqlens_k, strict=True)]
    q_begin = k_begin = 0
    for b, (n, m) in enumerate(zip(seqlens_q, seqlens_k, strict=True)):
        see = visible(
            q_pos[b],
            m,
            causal=causal,
            window_left=window_left,
            window_right=window_right,
            attention_chunk=attention_chunk,
            prefix_len=prefix_lens[b] if prefix_lens is not None else 0,
            ranges=None if bidirectional_ranges is None else bidirectional_ranges[b],
            ranges_keep_window_left=ranges_keep_window_left,
        )
        if block_mask is not None:
            assert len(q_pos[b]) == n, "blocks count all queries"
            see = see & expand_blocks(block_mask[b] if block_mask.ndim == 4 else block_mask, block_size, n, m)
        if tree_mask is not None and m:
            prefix_len = prefix_lens[b] if prefix_lens is not None else 0
            see &= ~hidden_by_tree(tree_mask[q_begin : q_begin + n], m, prefix_len)
        if chosen_pages is not None:
            see = see & in_chosen_pages(chosen_pages[b], page_size, num_q_heads, m)
        slopes = alibi_slopes[b] if alibi_slopes is not None and alibi_slopes.ndim == 2 else alibi_slopes
        yield PackedSequence(
            b,
            slice(q_begin, q_begin + n),
            slice(k_begin, k_begin + m),
            see,
            np.abs(_distances(q_pos[b], m)) if alibi_symmetric else _distances(q_pos[b], m),
            None if slopes is None else slopes.astype(np.float64),
            dropout.keep(b, num_q_heads, n, m) / (1.0 - dropout.p) if dropout else None,
            None if sinks is None else sinks.astype(np.float64),
        )
        q_begin, k_begin = q_begin + n, k_begin + m


def attention(
    q: NDArray[Any],
    k: NDArray[Any],
    v: NDArray[Any],
    seqlens_q: Sequence[int],
    seqlens_k: Sequence[int],
    *,
    dtype: str,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    k_scale: float | None = None,
    v_scale: float | None = None,
    **masks: Any,
) -> Reference:
    """Both results for packed arrays, sequence by sequence. q, k and v hold numbers of `dtype`.

    `masks` are those of `sequences`.
    """
    assert sum(seqlens_q) == len(q) and sum(seqlens_k) == len(k) == len(v)
    scale = (q.shape[2] ** -0.5 if softmax_scale is None else softmax_scale) * (k_scale or 1.0)
    out_scale = v_scale or 1.0
    outs = [np.empty((*q.shape[:2], v.shape[2])) for _ in range(2)]
    lses = [np.empty(q.shape[:2], np.float64) for _ in range(2)]
    errors = np.empty(q.shape[:2], np.float64)
    for each in sequences(q.shape[1], seqlens_q, seqlens_k, **masks):
        rows, keys = each.rows, each.keys
        arguments = (q[rows], k[keys], v[keys], each.see, scale, softcap, each.bias, each.kept, each.sinks)
        true, same_precision = attend(*arguments), plain(*arguments, dtype)
        outs[0][rows], lses[0][rows], errors[rows] = true[0] * out_scale, true[1], true[2]
        outs[1][rows], lses[1][rows] = round_to(same_precision[0] * out_scale, dtype), same_precision[1]
    return Reference(dtype, tuple(seqlens_q), outs[0], lses[0], outs[1], lses[1], errors)


def gather_pages(pages: NDArray[Any], page_table: NDArray[Any], seq_lens: Sequence[int]) -> NDArray[Any]:
    """[num_pages, page_size, heads, head_dim] -> packed [total, heads, head_dim]."""
    page_size = pages.shape[1]
    tokens = [
        pages[page_table[b, : -(-length // page_size)]].reshape(-1, *pages.shape[2:])[:length]
        for b, length in enumerate(seq_lens)
    ]
    return np.concatenate(tokens) if tokens else pages[:0].reshape(0, *pages.shape[2:])


def append_kv(
    new: NDArray[Any],
    pages: NDArray[Any],
    page_table: NDArray[Any],
    seq_lens: Sequence[int],
    counts: Sequence[int],
) -> NDArray[Any]:
    """A copy of `pages` with each sequence's newest tokens at its end; a sequence of length 0 is padding."""
    pages = pages.copy()
    page_size = pages.shape[1]
    begin = 0
    for b, (length, count) in enumerate(zip(seq_lens, counts, strict=True)):
        if length:
            for i in range(count):
                slot = length - count + i
                pages[page_table[b, slot // page_size], slot % page_size] = new[begin + i]
        begin += count
    return pages


def merge_states(
    out_a: NDArray[Any], lse_a: NDArray[Any], out_b: NDArray[Any], lse_b: NDArray[Any]
) -> Result:
    """softmax over the union of two disjoint sets of keys, from the results over each."""
    highest = np.maximum(lse_a, lse_b)
    highest = np.where(np.isneginf(highest), 0.0, highest)
    a, b = np.exp(lse_a - highest), np.exp(lse_b - highest)
    total = a + b
    empty = total == 0.0
    total = np.where(empty, 1.0, total)
    out = (a / total)[..., None] * out_a + (b / total)[..., None] * out_b
    return out, np.where(empty, -np.inf, highest + np.log(total))


def rms_norm(x: NDArray[Any], weight: NDArray[Any], eps: float = 1e-6) -> NDArray[np.float64]:
    """Each row over its root mean square, times the weight."""
    x = x.astype(np.float64)
    mean = np.square(x).sum(axis=-1, keepdims=True) / max(1, x.shape[-1])
    return x / np.sqrt(mean + eps) * weight


def rotate(
    x: NDArray[Any],
    positions: NDArray[np.int64],
    cos: NDArray[Any],
    sin: NDArray[Any],
    *,
    interleaved: bool = False,
    dtype: type = np.float64,
) -> NDArray[Any]:
    """Rotary embedding of packed rows [total, heads, head_dim], each product and sum rounded to `dtype`."""
    half = cos.shape[1]
    pairs = np.arange(half)
    first, second = (2 * pairs, 2 * pairs + 1) if interleaved else (pairs, pairs + half)
    c, s = (table[positions].astype(dtype)[:, None] for table in (cos, sin))
    rotated = x.astype(dtype)
    a, b = rotated[..., first].copy(), rotated[..., second].copy()
    rotated[..., first] = a * c - b * s
    rotated[..., second] = b * c + a * s
    return rotated


def latent_attention(
    q: NDArray[Any],
    keys: list[NDArray[Any]],
    cu_seqlens_q: Sequence[int],
    softmax_scale: float,
    v_dim: int,
    *,
    causal: bool = True,
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Attention of packed queries [total_q, num_q_heads, qk_dim] over keys [length, qk_dim] of each sequence.

    Returns out, lse, and the sums of weights times the sizes of values, which rounding errors grow with.
    """
    out, lse = np.zeros((*q.shape[:2], v_dim)), np.full(q.shape[:2], -np.inf)
    sizes = np.zeros_like(out)
    for b, of_sequence in enumerate(keys):
        first, last = cu_seqlens_q[b], cu_seqlens_q[b + 1]
        for i, position in enumerate(positions(last - first, len(of_sequence))):
            seen = of_sequence[: position + 1] if causal else of_sequence
            if position < 0 or len(seen) == 0:
                continue
            scores = q[first + i].astype(np.float64) @ seen.T * softmax_scale
            highest = scores.max(axis=-1, keepdims=True)
            weights = np.exp(scores - highest)
            total = weights.sum(axis=-1, keepdims=True)
            out[first + i] = weights / total @ seen[:, :v_dim]
            sizes[first + i] = weights / total @ np.abs(seen[:, :v_dim])
            lse[first + i] = (highest + np.log(total))[:, 0]
    return out, lse, sizes
