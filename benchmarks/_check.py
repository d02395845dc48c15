"""Compares results with the oracle of the tests: in all rows of a small case, in some rows of a large one."""

from __future__ import annotations

import random
from collections.abc import Sequence

import _support_path  # noqa: F401
import numpy as np
from _inputs import Inputs
from numpy.typing import NDArray
from torch import Tensor

from support import oracle
from support.case import Case

MAX_PAIRS = 24  # (sequence, KV head) pairs of a case, and queries of each pair, in all heads of its group
MAX_QUERIES = 8
MAX_KEYS = 1 << 18  # of all pairs, but two pairs are taken in any case


def _with_ends(ends: Sequence[int], others: Sequence[int], count: int) -> list[int]:
    """`count` numbers: the ends, and some of the others."""
    chosen = list(dict.fromkeys(ends))
    rest = sorted(set(others) - set(chosen))
    return chosen + random.Random(0).sample(rest, min(len(rest), count - len(chosen)))


def choose_pairs(case: Case) -> list[tuple[int, int]]:
    """(sequence, KV head): the first, the last, one each of the longest and the shortest sequence, others."""
    heads, lengths = case.num_kv_heads, case.seqlens_k
    longest, shortest = (choose(range(case.batch), key=lengths.__getitem__) for choose in (max, min))
    num_pairs = case.batch * heads
    ends = (0, num_pairs - 1, longest * heads, shortest * heads + heads - 1)
    pairs = [divmod(i, heads) for i in _with_ends(ends, range(num_pairs), MAX_PAIRS)]
    num_keys = np.cumsum([lengths[b] for b, _ in pairs])
    return pairs[: max(2, int(np.count_nonzero(num_keys <= MAX_KEYS)))]


def choose_queries(seqlen_q: int) -> NDArray[np.int64]:
    return np.array(sorted(_with_ends((0, seqlen_q - 1), range(seqlen_q), MAX_QUERIES)))


class Sample:
    """Some rows of a case, and the oracle's results there."""

    def __init__(self, case: Case, inputs: Inputs) -> None:
        assert case.k_scale is None and case.v_scale is None, case
        self._group_size = case.group_size
        self._pairs = choose_pairs(case)
        queries = [choose_queries(case.seqlens_q[b]) for b, _ in self._pairs]
        begin = np.cumsum([0, *case.seqlens_q])
        self._rows = [begin[b] + chosen for (b, _), chosen in zip(self._pairs, queries, strict=True)]
        k, v = zip(
            *(inputs.keys_and_values(case, b, slice(head, head + 1)) for b, head in self._pairs), strict=True
        )
        slopes = None
        if inputs.alibi_slopes is not None:
            slopes = inputs.alibi_slopes.cpu().numpy().reshape(-1, case.group_size)
            slopes = slopes[[head for _, head in self._pairs]]
        self.reference = oracle.attention(
            self.of(inputs.q),
            _to_float64(k),
            _to_float64(v),
            [len(chosen) for chosen in queries],
            [case.seqlens_k[b] for b, _ in self._pairs],
            dtype=case.dtype,
            alibi_slopes=slopes,
            q_pos=[
                oracle.positions(case.seqlens_q[b], case.seqlens_k[b])[chosen]
                for (b, _), chosen in zip(self._pairs, queries, strict=True)
            ],
            **case.masks,
        )

    def of(self, x: Tensor) -> NDArray[np.float64]:
        """The rows of an array like q, pair by pair: [rows, group_size, head_dim]."""
        size = self._group_size
        return _to_float64(
            [
                x[rows.tolist(), head * size : (head + 1) * size]
                for (_, head), rows in zip(self._pairs, self._rows, strict=True)
            ]
        )

    def max_error(self, out: Tensor) -> float:
        """The largest error, relative to the largest element of its query and head; NaN if `out` has one."""
        return self.reference.max_relative_error(self.of(out))


def _to_float64(parts: Sequence[Tensor]) -> NDArray[np.float64]:
    return np.concatenate([part.cpu().double().numpy() for part in parts])
