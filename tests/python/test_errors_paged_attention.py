"""What paged_attention refuses, word for word."""

from __future__ import annotations

import numpy as np

from support.refusals import (
    MAX_LENGTH,
    PAGES,
    P,
    case,
    f32,
    i32,
    long,
    memory,
    read_only,
    refused,
)

CASES = [
    # paged_attention
    case(
        *P,
        ValueError,
        "q must have shape [batch, num_q_heads, head_dim]; got [2, 1, 4, 8]",
        q=f32(2, 1, 4, 8),
    ),
    case(
        *P,
        ValueError,
        "q must have shape [total_q, num_q_heads, head_dim]; got [2, 1, 4, 8]",
        q=f32(2, 1, 4, 8),
        cu_seqlens_q=i32([0, 1, 2]),
    ),
    case(*P, ValueError, f"k_pages must have shape {PAGES}; got [12, 2, 8]", k_pages=f32(12, 2, 8)),
    case(*P, ValueError, f"v_pages must have shape {PAGES}; got [12, 2, 8]", v_pages=f32(12, 2, 8)),
    case(
        *P,
        TypeError,
        "k_pages must be float32 like q, or int8, float8_e4m3fn, float8_e5m2 or uint8; got float16",
        k_pages=np.ones((3, 4, 2, 8), np.float16),
    ),
    case(
        *P,
        ValueError,
        "v_pages must have the shape of k_pages [3, 4, 2, 8], but for head_dim; got [2, 4, 2, 8]",
        v_pages=f32(2, 4, 2, 8),
    ),
    *(
        case(
            *P,
            ValueError,
            f"head_dim of v_pages ({d}) must be a multiple of 8 from 8 to 512",
            v_pages=f32(3, 4, 2, d),
        )
        for d in (0, 4, 12, 520)
    ),
    case(
        *P,
        ValueError,
        "out must have the shape of q with the head_dim of v_pages [2, 4, 16]; got [2, 4, 8]",
        v_pages=f32(3, 4, 2, 16),
        out=f32(2, 4, 8),
    ),
    case(
        *P,
        ValueError,
        "out must have the shape of q with the head_dim of v_pages [2, 4, 16]; got [2, 4, 8]",
        v_pages=f32(3, 4, 2, 16),
        page_table=np.zeros((2, 0), np.int32),
        seq_lens=i32([0, 0]),
        out=f32(2, 4, 8),
    ),
    case(*P, ValueError, "num_q_heads (3) must be a multiple of num_kv_heads (2)", q=f32(2, 3, 8)),
    case(
        *P,
        ValueError,
        "num_q_heads (4) must be a multiple of num_kv_heads (16); are heads and slots in the right order? "
        "k_pages and v_pages are [num_pages, page_size, num_kv_heads, head_dim]: otherwise swap their axes 1 "
        "and 2",
        k_pages=f32(3, 2, 16, 8),
        v_pages=f32(3, 2, 16, 8),
    ),
    case(
        *P, ValueError, "page_size (0) must be at least 1", k_pages=f32(3, 0, 2, 8), v_pages=f32(3, 0, 2, 8)
    ),
    case(*P, ValueError, "page_table must have shape [batch, max_pages]; got [2]", page_table=i32([2, 1])),
    case(*P, ValueError, "seq_lens must have shape [batch]; got [1, 2]", seq_lens=i32([[5, 1]])),
    case(*P, ValueError, "batch of seq_lens (1) must equal that of page_table (2)", seq_lens=i32([5])),
    case(*P, ValueError, "batch of q (1) must equal that of page_table (2)", q=f32(1, 4, 8)),
    case(
        *P,
        ValueError,
        "batch of q (3) must equal that of page_table (2); several tokens of a sequence need cu_seqlens_q",
        q=f32(3, 4, 8),
    ),
    case(*P, ValueError, "max_seqlen_q belongs to packed queries; give cu_seqlens_q too", max_seqlen_q=1),
    case(
        *P,
        ValueError,
        "cu_seqlens_q[2] must be at most the number of packed rows (2); got 3",
        cu_seqlens_q=i32([0, 1, 3]),
    ),
    case(*P, ValueError, "window_right must be -1 (unbounded) or at least 0; got -7", window_right=-7),
    case(*P, ValueError, "alibi_symmetric needs alibi_slopes; got none", alibi_symmetric=True),
    case(*P, ValueError, "attention_chunk must be 0 (none) or positive; got -2", attention_chunk=-2),
    case(*P, ValueError, "attention_chunk (5) needs causal", attention_chunk=5, causal=False),
    case(
        *P,
        ValueError,
        "shared_prefix_len (4) cannot go with attention_chunk",
        shared_prefix_len=4,
        attention_chunk=8192,
    ),
    case(*P, ValueError, "shared_prefix_len (-4) must be at least 0", shared_prefix_len=-4),
    case(*P, ValueError, "shared_prefix_len (6) must be a multiple of page_size (4)", shared_prefix_len=6),
    case(
        *P,
        ValueError,
        "shared_prefix_len (12) must be at most max_pages * page_size (8)",
        shared_prefix_len=12,
    ),
    case(
        *P,
        ValueError,
        "shared_prefix_len (4) needs window_left -1 (unbounded); got 0",
        shared_prefix_len=4,
        window_left=0,
    ),
    case(
        *P,
        ValueError,
        "shared_prefix_len (4) cannot go with alibi_slopes",
        shared_prefix_len=4,
        alibi_slopes=f32(4),
    ),
    case(
        *P,
        ValueError,
        "shared_prefix_len (4) cannot go with batch_invariant, as all queries share its work",
        shared_prefix_len=4,
        batch_invariant=True,
    ),
    case(
        *P,
        ValueError,
        "shared_prefix_len (4) must not exceed the length of a sequence minus the number of its queries; for "
        "sequence 1 that is 1 - 1 = 0",
        shared_prefix_len=4,
    ),
    case(
        *P,
        ValueError,
        "shared_prefix_len (4) must not exceed the length of a sequence minus the number of its queries; for "
        "sequence 0 that is 5 - 2 = 3",
        shared_prefix_len=4,
        cu_seqlens_q=i32([0, 2, 2]),
    ),
    case(
        *P,
        ValueError,
        "shared_prefix_len (4) needs the same pages in every row of page_table; page_table[1, 0] is 0, "
        "page_table[0, 0] is 2",
        shared_prefix_len=4,
        seq_lens=i32([5, 5]),
        page_table=i32([[2, 1], [0, 1]]),
    ),
    case(
        *P,
        ValueError,
        "page_table[0, 0] must lie in [0, num_pages = 3); got 7",
        shared_prefix_len=4,
        seq_lens=i32([0, 0]),
        page_table=i32([[7, 1], [0, 1]]),
    ),
    case(*P, TypeError, "shared_prefix_len must be an int; got float", shared_prefix_len=4.0),
    case(*P, TypeError, "static_past must be a bool; got int", static_past=1),
    case(*P, ValueError, "k_scale must be finite and greater than 0; got nan", k_scale=float("nan")),
    case(*P, ValueError, "softmax_phi must be finite in float32; got inf", softmax_phi=float("inf")),
    case(*P, ValueError, "softmax_phi must be finite in float32; got nan", softmax_phi=float("nan")),
    case(*P, ValueError, "softmax_phi must be finite in float32; got -1e+39", softmax_phi=-1e39),
    case(*P, ValueError, "num_q_heads of softmax_phi (2) must equal that of q (4)", softmax_phi=f32(2)),
    case(*P, ValueError, "softmax_phi must have shape [num_q_heads]; got [1, 4]", softmax_phi=f32(1, 4)),
    case(*P, TypeError, "softmax_phi must be float32; got float16", softmax_phi=np.ones(4, np.float16)),
    case(*P, TypeError, "softmax_phi must be a float, or an array of float32; got str", softmax_phi="high"),
    case(
        *P,
        ValueError,
        "softmax_phi[2] must be finite; got -inf",
        softmax_phi=np.array([0.0, 1.0, -np.inf, np.nan], np.float32),
    ),
    case(*P, ValueError, "v_scale must be finite and greater than 0; got inf", v_scale=float("inf")),
    case(*P, ValueError, "v_scale must be finite and greater than 0; got -1", v_scale=-1.0),
    case(
        *P,
        ValueError,
        "k_scale must be at least 2^-126, as the inverse of a smaller number may be "
        "beyond float32; got 5.87747e-39",
        k_scale=2**-127,
    ),
    case(
        *P,
        ValueError,
        "softmax_scale * k_scale (inf) and softcap (0) must neither overflow nor vanish in float32",
        softmax_scale=1e20,
        k_scale=1e20,
    ),
    case(
        *P,
        ValueError,
        f"seq_lens[1] must be at most {MAX_LENGTH}; got {MAX_LENGTH + 1}",
        k_pages=long(1, MAX_LENGTH, 2, 8),
        v_pages=long(1, MAX_LENGTH, 2, 8),
        page_table=i32([[0, 0], [0, 0]]),
        seq_lens=i32([1, MAX_LENGTH + 1]),
    ),
    case(*P, ValueError, "num_splits must lie in [1, 1024]; got 0", num_splits=0),
    case(*P, ValueError, "num_splits must lie in [1, 1024]; got 1025", num_splits=1025),
    case(
        *P,
        ValueError,
        "batch_invariant needs max_seqlen_q with packed queries",
        cu_seqlens_q=i32([0, 1, 2]),
        batch_invariant=True,
    ),
    case(
        *P, ValueError, "seq_lens[0] must lie in [0, max_pages * page_size = 8]; got 9", seq_lens=i32([9, 1])
    ),
    case(
        *P,
        ValueError,
        "seq_lens[1] must lie in [0, max_pages * page_size = 8]; got -1",
        seq_lens=i32([5, -1]),
    ),
    case(
        *P,
        ValueError,
        "page_table[0, 1] must lie in [0, num_pages = 3); got 3",
        page_table=i32([[2, 3], [0, -1]]),
    ),
    case(
        *P,
        ValueError,
        "page_table[1, 0] must lie in [0, num_pages = 3); got -1",
        page_table=i32([[2, 1], [-1, 0]]),
    ),
    case(
        *P,
        ValueError,
        "seq_lens[0] (1) counts the new tokens and must be 0 (padding) or at least their number (2)",
        cu_seqlens_q=i32([0, 2, 2]),
        seq_lens=i32([1, 1]),
    ),
    *(
        case(  # of queries that see all keys, some need a position
            *P,
            ValueError,
            "seq_lens[0] (1) counts the new tokens and must be 0 (padding) or at least their number (2)",
            cu_seqlens_q=i32([0, 2, 2]),
            seq_lens=i32([1, 1]),
            causal=False,
            **option,
        )
        for option in ({"alibi_slopes": f32(4)}, {"window_left": 5}, {"window_right": 5})
    ),
    case(
        *P,
        ValueError,
        "seq_lens[1] (2) counts the new tokens and must be 0 (padding) or at least their number (3)",
        q=f32(4, 4, 8),
        cu_seqlens_q=i32([0, 1, 4]),
        seq_lens=i32([0, 2]),
        causal=False,
        window_left=2,
        batch_invariant=True,
        max_seqlen_q=3,
    ),
    case(
        *P,
        TypeError,
        "chosen_pages must be int32 or int64; got float32",
        chosen_pages=f32(2, 1),
    ),
    case(
        *P,
        ValueError,
        "chosen_pages must have shape [batch, num_chosen] or [batch, num_kv_heads, num_chosen]; got [2]",
        chosen_pages=i32([0, 0]),
    ),
    case(
        *P,
        ValueError,
        "batch of chosen_pages (1) must equal that of page_table (2)",
        chosen_pages=i32([[0]]),
    ),
    case(
        *P,
        ValueError,
        "num_kv_heads of chosen_pages (1) must equal that of k_pages (2)",
        chosen_pages=i32([[[0]], [[0]]]),
    ),
    case(
        *P,
        ValueError,
        "chosen_pages must have room for at least one page; its shape is [2, 0]",
        chosen_pages=np.zeros((2, 0), np.int32),
    ),
    case(
        *P,
        ValueError,
        "chosen_pages[0, 1] must be -1, or in [0, 2), the pages of sequence 0 of length 5; got 2",
        chosen_pages=i32([[0, 2], [0, -1]]),
    ),
    case(
        *P,
        ValueError,
        "chosen_pages[1, 0] must be -1, or in [0, 1), the pages of sequence 1 of length 1; got -2",
        chosen_pages=i32([[0, 1], [-2, -1]]),
    ),
    case(
        *P,
        ValueError,
        "chosen_pages[0, 1, 1] must be greater than the entry before it (1); got 0",
        chosen_pages=i32([[[0, 1], [1, 0]], [[0, -1], [0, -1]]]),
    ),
    case(
        *P,
        ValueError,
        "chosen_pages[0, 1] must be greater than the entry before it (0); got 0",
        chosen_pages=i32([[0, 0], [0, -1]]),
    ),
    case(
        *P,
        ValueError,
        "chosen_pages[0, 0, 1] must be -1 like the entry before it, which ends the list; got 1",
        chosen_pages=i32([[[-1, 1], [1, -1]], [[0, -1], [0, -1]]]),
    ),
    case(
        *P,
        ValueError,
        "page_table[0, 1] must lie in [0, num_pages = 3); got 3",
        page_table=i32([[7, 3], [0, -1]]),
        chosen_pages=i32([[1], [0]]),
    ),
    case(
        *P,
        ValueError,
        "seq_lens[0] must lie in [0, max_pages * page_size = 8]; got 9",
        seq_lens=i32([9, 1]),
        chosen_pages=i32([[1], [0]]),
    ),
    *(
        case(
            *P,
            ValueError,
            f"chosen_pages cannot go with {name}",
            **{name: value, "chosen_pages": i32([[1], [0]])},
        )
        for name, value in {
            "prefix_lens": i32([1, 0]),
            "attention_chunk": 3,
            "tree_mask": np.array([-1, -1]),
            "shared_prefix_len": 4,
            "num_splits": 2,
        }.items()
    ),
    case(
        *P,
        ValueError,
        "page_table[0, 0] must be below 2^31, as pages are numbered in int32; got 2147483648",
        **dict.fromkeys(("k_pages", "v_pages"), np.broadcast_to(f32(4, 2, 8), (2**31 + 1, 4, 2, 8))),
        page_table=np.array([[2**31, 1], [0, -1]]),
    ),
    case(*P, ValueError, "window_left must be -1 (unbounded) or at least 0; got -3", window_left=-3),
    case(*P, ValueError, "out must be writable; it is read-only", out=read_only(f32(2, 4, 8))),
    *(
        case(
            *P,
            ValueError,
            f"out must not overlap {name} in memory",
            **{"out": memory(63, 2, 4, 8), name: memory(0, *shape)},
        )
        for name, shape in (("q", (2, 4, 8)), ("k_pages", (3, 4, 2, 8)), ("v_pages", (3, 4, 2, 8)))
    ),
]


test_refused = refused(CASES)
