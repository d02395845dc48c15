"""Named problems for tests and benchmarks, and the arrays that go with them (NumPy only).

A case says what the problem is; `make_inputs` draws its numbers, `make_cache` lays its keys and values out
in pages. Everything that an operator must not read is NaN, or a page id that does not exist.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from support import oracle


@dataclass(frozen=True)
class Case:
    """`seqlens_k` counts every key of a sequence, its new tokens included."""

    name: str
    seqlens_q: tuple[int, ...]
    seqlens_k: tuple[int, ...]
    num_q_heads: int = 4
    num_kv_heads: int = 4
    head_dim: int = 64
    page_size: int = 16
    causal: bool = True
    window_left: int = -1
    window_right: int = -1
    prefix_lens: tuple[int, ...] | None = None
    softcap: float = 0.0
    alibi: str = ""  # "", "head": slopes [num_q_heads], "batch": slopes [batch, num_q_heads]
    softmax_scale: float | None = None
    k_scale: float | None = None
    v_scale: float | None = None
    q_gain: float = 1.0  # larger: a peaked softmax
    spare_pages: int = 3  # pages of the cache that no sequence holds

    def __str__(self) -> str:
        return self.name

    @property
    def batch(self) -> int:
        return len(self.seqlens_q)

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
    def masks(self) -> dict[str, Any]:
        """Keyword arguments that the operators and the oracle share, but for the arrays."""
        return {
            "softmax_scale": self.softmax_scale,
            "causal": self.causal,
            "window_left": self.window_left,
            "softcap": self.softcap,
        }

    def num_scores(self) -> int:
        """Visible (query, key) pairs over all heads: 4 * head_dim floating point operations each."""
        return self.num_q_heads * sum(int(np.count_nonzero(self.visible(b))) for b in range(self.batch))

    def flops(self) -> int:
        return 4 * self.head_dim * self.num_scores()

    def bytes_read_and_written(self, dtype: str) -> int:
        """q, out and every key and value once."""
        queries, keys = sum(self.seqlens_q) * self.num_q_heads, sum(self.seqlens_k) * self.num_kv_heads
        return 2 * (queries + keys) * self.head_dim * oracle.NUMPY_DTYPES[dtype].itemsize

    def visible(self, b: int) -> NDArray[np.bool_]:
        return oracle.visible(
            self.seqlens_q[b],
            self.seqlens_k[b],
            causal=self.causal,
            window_left=self.window_left,
            window_right=self.window_right,
            prefix_len=self.prefix_lens[b] if self.prefix_lens else 0,
        )

    def unseen_keys(self) -> NDArray[np.bool_]:
        """[total_k]: keys that no query of their sequence sees, which are never read."""
        return np.concatenate([~self.visible(b).any(axis=0) for b in range(self.batch)])


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


@dataclass(frozen=True)
class Cache:
    """The keys and values of a case in shuffled pages. NaN: unused pages, slots past a sequence's length,
    keys that no query sees. Table entries past a sequence's last page are far out of range."""

    k_pages: NDArray[np.float64]  # [num_pages, page_size, num_kv_heads, head_dim]
    v_pages: NDArray[np.float64]
    page_table: NDArray[np.int32]  # [batch, max_pages]
    seq_lens: NDArray[np.int32]  # [batch]


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
    v = oracle.round_to(random.standard_normal(keys), dtype)
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
    )


def poisoned(case: Case, inputs: Inputs) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """k and v with NaN where no query looks."""
    k, v = inputs.k.copy(), inputs.v.copy()
    unseen = case.unseen_keys()
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
    table = np.resize(NO_SUCH_PAGE, (case.batch, max(num_held, default=0) + 2)).astype(np.int32)
    begin = 0
    for row, count in zip(table, num_held, strict=True):
        row[:count] = pages[begin : begin + count]
        begin += count
    return table, num_pages


def make_cache(case: Case, inputs: Inputs, *, shuffle: int = 0) -> Cache:
    table, num_pages = make_page_table(case, shuffle=shuffle)
    seq_lens = np.array(case.seqlens_k, np.int32)
    k, v = poisoned(case, inputs)
    empty = np.full((num_pages, case.page_size, case.num_kv_heads, case.head_dim), np.nan)
    k_pages = oracle.append_kv(k, empty, table, case.seqlens_k, case.seqlens_k)
    v_pages = oracle.append_kv(v, empty, table, case.seqlens_k, case.seqlens_k)
    return Cache(k_pages, v_pages, table, seq_lens)


def make_reference(
    case: Case,
    inputs: Inputs,
    dtype: str,
    *,
    paged: bool = False,
    dropout: oracle.Dropout | None = None,
) -> oracle.Reference:
    return oracle.attention(
        inputs.q,
        inputs.k,
        inputs.v,
        case.seqlens_q,
        case.seqlens_k,
        dtype=dtype,
        window_right=case.window_right,
        prefix_lens=case.prefix_lens,
        alibi_slopes=inputs.alibi_slopes,
        k_scale=case.k_scale if paged else None,
        v_scale=case.v_scale if paged else None,
        dropout=dropout,
        **case.masks,
    )


# Sequences of equal lengths: for dense arrays, and as well for packed and paged ones.
DENSE = (
    Case("square", (33, 33), (33, 33)),
    Case("square_not_causal", (64,), (64,), causal=False),
    Case("prefill_gqa_4", (257,), (257,), num_q_heads=8, num_kv_heads=2, head_dim=128),
    Case("prefill_mqa_8", (131,), (131,), num_q_heads=8, num_kv_heads=1),
    Case("group_3", (61, 61), (61, 61), num_q_heads=9, num_kv_heads=3),
    Case("group_5", (37,), (101,), num_q_heads=10, num_kv_heads=2, head_dim=80),
    Case("group_7", (17, 17), (53, 53), num_q_heads=7, num_kv_heads=1, head_dim=112),
    Case("group_64", (9,), (67,), num_q_heads=64, num_kv_heads=1),
    Case("more_queries_than_keys", (67, 67), (29, 29)),
    Case("more_queries_than_keys_not_causal", (67,), (29,), causal=False),
    Case("more_queries_than_keys_alibi_prefix", (31, 31), (7, 7), alibi="head", prefix_lens=(3, 0)),
    Case("no_keys", (5, 5), (0, 0)),
    Case("no_keys_not_causal", (5,), (0,), causal=False, prefix_lens=(4,)),
    Case("no_queries", (0, 0), (5, 5)),
    Case("one_of_each", (1,), (1,), num_q_heads=1, num_kv_heads=1, head_dim=8),
    Case("one_query", (1, 1, 1), (197, 197, 197), num_q_heads=6, num_kv_heads=2),
    Case("one_query_many_keys", (1,), (4099,), num_q_heads=4, num_kv_heads=1, causal=False),
    Case("last_queries_of_many_keys", (5,), (1013,), num_q_heads=8, num_kv_heads=2),
    Case("long", (1201,), (1201,), num_q_heads=2, num_kv_heads=1),
    Case("head_dim_8", (31,), (77,), head_dim=8, num_kv_heads=2),
    Case("head_dim_16", (31,), (77,), head_dim=16, num_kv_heads=1),
    Case("head_dim_24", (31,), (77,), head_dim=24),
    Case("head_dim_96", (65,), (129,), head_dim=96, num_kv_heads=2),
    Case("head_dim_160", (31,), (77,), head_dim=160, num_kv_heads=2),
    Case("head_dim_192", (31,), (77,), head_dim=192, num_kv_heads=2),
    Case("head_dim_256", (65,), (129,), head_dim=256, num_kv_heads=2),
    Case("window_left", (97, 97), (211, 211), window_left=37, num_kv_heads=2),
    Case("window_left_0", (33,), (65,), window_left=0),
    Case("window_right_0", (33,), (65,), window_right=0, causal=False),
    Case("window_both", (97,), (211,), window_left=19, window_right=11, causal=False),
    Case("window_both_queries_outnumber", (211,), (97,), window_left=19, window_right=11, causal=False),
    Case("window_right", (43,), (151,), window_right=5, causal=False),
    Case("window_causal_wins", (41,), (41,), window_left=7, window_right=9),
    Case("window_long", (401,), (1399,), window_left=255, num_q_heads=2, num_kv_heads=1),
    Case("softcap", (71,), (113,), softcap=5.0, q_gain=4.0),
    Case("softcap_high", (71,), (113,), softcap=50.0, num_kv_heads=1),
    Case("alibi", (71,), (113,), alibi="head", num_kv_heads=2),
    Case("alibi_batch", (40, 40, 40), (90, 90, 90), alibi="batch", num_kv_heads=2),
    Case("alibi_not_causal", (47,), (83,), alibi="head", causal=False),
    Case("alibi_long", (307,), (1021,), alibi="head", num_q_heads=2, num_kv_heads=2),
    Case("scale", (47,), (83,), softmax_scale=0.3, head_dim=16),
    Case("scale_0", (47,), (83,), softmax_scale=0.0, head_dim=16),
    Case("scale_negative", (47,), (83,), softmax_scale=-0.2, head_dim=16),
    Case("peaked", (83,), (307,), q_gain=12.0, num_kv_heads=2),
    Case("prefix", (83, 83, 83), (83, 83, 83), prefix_lens=(0, 29, 83), num_kv_heads=2),
    Case("prefix_past_the_end", (19, 19), (31, 31), prefix_lens=(500, 31)),
    Case("prefix_and_window", (131,), (257,), prefix_lens=(40,), window_left=16, num_kv_heads=2),
    Case("prefix_inside_window", (60,), (90,), prefix_lens=(45,), window_left=70),
    Case(
        "everything",
        (101, 101),
        (303, 303),
        num_q_heads=10,
        num_kv_heads=2,
        head_dim=80,
        window_left=50,
        prefix_lens=(33, 7),
        softcap=20.0,
        alibi="batch",
        softmax_scale=0.15,
    ),
)

# Sequences of any lengths.
PACKED = (
    Case("ragged", (0, 1, 7, 128, 65), (13, 1, 7, 200, 65), num_kv_heads=2),
    Case("ragged_not_causal", (3, 61, 0, 17), (59, 0, 11, 127), causal=False, num_q_heads=6, num_kv_heads=2),
    Case("ragged_empty_keys", (4, 1, 5), (0, 0, 0)),
    Case("all_empty", (0, 0), (0, 0)),
    Case("chunked_prefill", (64, 1, 1, 37, 5), (128, 77, 1, 1009, 5), num_q_heads=8, num_kv_heads=2),
    Case("speculative", (4, 4, 3, 1), (260, 31, 3, 700), num_q_heads=8, num_kv_heads=1, head_dim=128),
    Case("group_7_head_dim_112", (19, 1, 2), (83, 311, 2), num_q_heads=14, num_kv_heads=2, head_dim=112),
    Case("group_64_packed", (3, 1, 11), (41, 97, 11), num_q_heads=64, num_kv_heads=1, head_dim=80),
    Case("more_queries_than_keys_packed", (20, 9), (7, 0), prefix_lens=(2, 0)),
    Case("window_packed", (50, 1, 33), (250, 90, 33), window_left=31, num_kv_heads=1),
    Case("alibi_packed", (50, 1, 33), (250, 90, 33), alibi="batch", num_kv_heads=2),
    Case(
        "everything_packed",
        (33, 0, 1, 70),
        (181, 5, 333, 70),
        num_q_heads=6,
        num_kv_heads=2,
        head_dim=96,
        window_left=60,
        prefix_lens=(20, 0, 100, 70),
        softcap=15.0,
        alibi="batch",
    ),
    Case(
        "thirty_sequences", tuple(range(30)), tuple(2 * n for n in range(30)), num_q_heads=2, num_kv_heads=1
    ),
)

# Only where keys lie in pages: page sizes, many pages, scales, a right window that packed queries lack.
PAGED = (
    Case("page_size_1", (5, 1, 17), (67, 130, 17), page_size=1, num_kv_heads=2),
    Case("page_size_17", (5, 1, 17), (67, 530, 17), page_size=17, num_kv_heads=2),
    Case("page_size_256", (300, 1, 5), (300, 513, 255), page_size=256, num_kv_heads=1, num_q_heads=2),
    Case("page_size_24", (33, 3), (240, 71), page_size=24, num_q_heads=10, num_kv_heads=2, head_dim=80),
    Case("scales_packed", (33, 3), (240, 71), k_scale=0.5, v_scale=1.75, num_kv_heads=2),
    Case("pages_2000_chunk", (7,), (31_990,), num_q_heads=3, num_kv_heads=1),
)

# One query a sequence.
DECODE = (
    Case("decode", (1,) * 5, (1, 17, 64, 131, 1021), num_q_heads=8, num_kv_heads=2, head_dim=128),
    Case("decode_mha", (1,) * 3, (7, 97, 300)),
    Case("decode_group_3", (1,) * 3, (5, 66, 311), num_q_heads=9, num_kv_heads=3),
    Case("decode_group_5", (1,) * 3, (5, 66, 311), num_q_heads=10, num_kv_heads=2, head_dim=80),
    Case("decode_group_7", (1,) * 3, (5, 66, 311), num_q_heads=14, num_kv_heads=2, head_dim=112),
    Case("decode_group_8", (1,) * 3, (5, 66, 311), num_q_heads=8, num_kv_heads=1, head_dim=256),
    Case("decode_group_64", (1,) * 2, (66, 311), num_q_heads=64, num_kv_heads=1),
    Case("decode_group_17", (1,) * 2, (66, 311), num_q_heads=34, num_kv_heads=2),
    Case("decode_empty", (1,) * 4, (0, 1, 0, 77), num_kv_heads=2),
    Case("decode_all_empty", (1,) * 2, (0, 0)),
    Case("decode_empty_not_causal", (1,) * 3, (0, 5, 0), causal=False, prefix_lens=(3, 2, 0)),
    Case("decode_page_size_1", (1,) * 3, (1, 97, 311), page_size=1, num_kv_heads=2),
    Case("decode_page_size_17", (1,) * 3, (17, 97, 1003), page_size=17, num_kv_heads=2),
    Case("decode_page_size_256", (1,) * 3, (256, 97, 1003), page_size=256, num_kv_heads=2),
    Case("decode_head_dim_8", (1,) * 2, (41, 200), head_dim=8),
    Case("decode_head_dim_16", (1,) * 2, (41, 200), head_dim=16, num_kv_heads=2),
    Case("decode_head_dim_96", (1,) * 2, (41, 200), head_dim=96, num_kv_heads=1),
    Case("decode_head_dim_160", (1,) * 2, (41, 200), head_dim=160, num_kv_heads=2),
    Case("decode_head_dim_192", (1,) * 2, (41, 200), head_dim=192, num_kv_heads=2),
    Case("decode_window", (1,) * 3, (20, 211, 1500), window_left=100, num_kv_heads=2),
    Case("decode_window_0", (1,) * 2, (20, 211), window_left=0),
    Case("decode_window_prefix", (1,) * 3, (20, 211, 1500), window_left=100, prefix_lens=(4, 4, 130)),
    Case("decode_softcap", (1,) * 2, (41, 500), softcap=8.0, q_gain=4.0),
    Case("decode_alibi", (1,) * 2, (41, 500), alibi="head", num_kv_heads=2),
    Case("decode_alibi_batch", (1,) * 3, (41, 500, 0), alibi="batch", num_kv_heads=2),
    Case("decode_peaked", (1,) * 2, (41, 1500), q_gain=12.0, num_kv_heads=2),
    Case("decode_scales", (1,) * 2, (41, 500), k_scale=0.125, v_scale=3.0, num_kv_heads=2),
    Case(
        "decode_everything",
        (1,) * 4,
        (41, 500, 0, 1200),
        num_q_heads=10,
        num_kv_heads=2,
        head_dim=80,
        page_size=17,
        window_left=300,
        prefix_lens=(5, 100, 0, 64),
        softcap=20.0,
        alibi="batch",
        softmax_scale=0.2,
        k_scale=0.5,
        v_scale=1.5,
    ),
    Case("decode_batch_64", (1,) * 64, tuple(range(3, 67)), num_q_heads=2, num_kv_heads=1),
    Case("decode_pages_2000", (1,) * 3, (31_990, 257, 3), num_kv_heads=2),
)
