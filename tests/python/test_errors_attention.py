"""What attention and merge_states refuse, word for word."""

from __future__ import annotations

import ml_dtypes
import numpy as np
from numpy.lib.stride_tricks import as_strided

from support.refusals import (
    FLOATS,
    LENGTHS,
    MAX_LENGTH,
    PACKED,
    A,
    M,
    broadcast,
    case,
    f32,
    i32,
    long,
    memory,
    read_only,
    refused,
)

CASES = [
    # attention
    case(
        *PACKED,
        ValueError,
        "cu_seqlens_q and cu_seqlens_k must be given together; only cu_seqlens_q was",
        cu_seqlens_k=None,
    ),
    case(
        *PACKED,
        ValueError,
        "cu_seqlens_q and cu_seqlens_k must be given together; only cu_seqlens_k was",
        cu_seqlens_q=None,
    ),
    case(
        *A,
        ValueError,
        "q must have shape [batch, seqlen_q, num_q_heads, head_dim]; got [3, 4, 8]",
        q=f32(3, 4, 8),
    ),
    case(
        *PACKED,
        ValueError,
        "q must have shape [total_q, num_q_heads, head_dim]; got [2, 3, 4, 8]",
        q=f32(2, 3, 4, 8),
    ),
    case(
        *A,
        ValueError,
        "k must have shape [batch, seqlen_k, num_kv_heads, head_dim]; got [5, 2, 8]",
        k=f32(5, 2, 8),
    ),
    case(
        *PACKED,
        ValueError,
        "v must have shape [total_k, num_kv_heads, head_dim]; got [1, 5, 2, 8]",
        v=f32(1, 5, 2, 8),
    ),
    case(
        *A,
        ValueError,
        "q must have a unit stride along its last axis; got stride 2",
        q=f32(2, 3, 4, 16)[..., ::2],
    ),
    case(
        *A,
        ValueError,
        "v must have a unit stride along its last axis; got stride 0",
        v=broadcast((2, 5, 2, 8)),
    ),
    case(*A, TypeError, "k must be float32 like q; got float16", k=f32(2, 5, 2, 8).astype(np.float16)),
    case(
        *A, TypeError, "v must be float32 like q; got bfloat16", v=f32(2, 5, 2, 8).astype(ml_dtypes.bfloat16)
    ),
    case(*A, TypeError, "v must be float32 like q; got int32", v=np.ones((2, 5, 2, 8), np.int32)),
    case(
        *A,
        ValueError,
        "v must have the shape of k [2, 5, 2, 8], but for head_dim; got [2, 6, 2, 8]",
        v=f32(2, 6, 2, 8),
    ),
    case(
        *A,
        ValueError,
        "v must have the shape of k [2, 5, 2, 8], but for head_dim; got [2, 5, 4, 16]",
        v=f32(2, 5, 4, 16),
    ),
    *(
        case(
            *A,
            ValueError,
            f"head_dim of v ({d}) must be a multiple of 8 from 8 to 512",
            v=f32(2, 5, 2, d),
        )
        for d in (0, 4, 12, 520)
    ),
    case(
        *A,
        ValueError,
        "out must have the shape of q with the head_dim of v [2, 3, 4, 16]; got [2, 3, 4, 8]",
        v=f32(2, 5, 2, 16),
        out=f32(2, 3, 4, 8),
    ),
    case(
        *A,
        ValueError,
        "head_dim of k (16) must equal that of q (8)",
        k=f32(2, 5, 2, 16),
        v=f32(2, 5, 2, 16),
    ),
    *(
        case(
            *A,
            ValueError,
            f"head_dim ({d}) must be a multiple of 8 from 8 to 512",
            q=f32(2, 3, 4, d),
            k=f32(2, 5, 2, d),
            v=f32(2, 5, 2, d),
        )
        for d in (0, 4, 12, 520)
    ),
    case(*A, ValueError, "num_kv_heads (0) must be at least 1", k=f32(2, 5, 0, 8), v=f32(2, 5, 0, 8)),
    case(*A, ValueError, "num_q_heads (0) must be at least 1", q=f32(2, 3, 0, 8)),
    case(*A, ValueError, "num_q_heads (3) must be a multiple of num_kv_heads (2)", q=f32(2, 3, 3, 8)),
    case(*A, ValueError, "num_q_heads (1) must be a multiple of num_kv_heads (2)", q=f32(2, 3, 1, 8)),
    case(
        *A,
        ValueError,
        "num_q_heads (10) must be a multiple of num_kv_heads (4); are heads and tokens in the right order? "
        "q, k and v are [batch, seqlen, heads, head_dim]: otherwise swap their axes 1 and 2",
        q=f32(2, 8, 10, 8),
        k=f32(2, 2, 4, 8),
        v=f32(2, 2, 4, 8),
    ),
    case(*A, ValueError, "batch of k (1) must equal that of q (2)", k=f32(1, 5, 2, 8), v=f32(1, 5, 2, 8)),
    case(
        *A,
        ValueError,
        f"seqlen_k {LENGTHS}; got {MAX_LENGTH + 1}",
        k=long(2, MAX_LENGTH + 1, 2, 8),
        v=long(2, MAX_LENGTH + 1, 2, 8),
    ),
    case(
        *PACKED,
        ValueError,
        f"total_k {LENGTHS}; got {MAX_LENGTH + 1}",
        k=long(MAX_LENGTH + 1, 2, 8),
        v=long(MAX_LENGTH + 1, 2, 8),
    ),
    case(
        *A,
        ValueError,
        "max_seqlen_q belongs to packed arrays; give cu_seqlens_q and cu_seqlens_k too",
        max_seqlen_q=3,
    ),
    case(
        *A,
        ValueError,
        "max_seqlen_k belongs to packed arrays; give cu_seqlens_q and cu_seqlens_k too",
        max_seqlen_k=5,
    ),
    case(*PACKED, ValueError, f"max_seqlen_q {LENGTHS}; got -1", max_seqlen_q=-1),
    case(
        *PACKED,
        ValueError,
        "max_seqlen_q (1) must be at least every length in cu_seqlens_q; sequence 1 has 2",
        max_seqlen_q=1,
    ),
    case(
        *PACKED,
        ValueError,
        "max_seqlen_k (2) must be at least every length in cu_seqlens_k; sequence 1 has 3",
        max_seqlen_k=2,
    ),
    case(
        *PACKED,
        ValueError,
        "cu_seqlens_q must have batch + 1 entries, at least 1; got 0",
        cu_seqlens_q=i32([]),
    ),
    case(
        *PACKED,
        ValueError,
        "cu_seqlens_q must have shape [batch + 1]; got [1, 3]",
        cu_seqlens_q=i32([[0, 1, 3]]),
    ),
    case(
        *PACKED, ValueError, "cu_seqlens_k must have batch + 1 = 3 entries; got 2", cu_seqlens_k=i32([0, 5])
    ),
    case(*PACKED, ValueError, "cu_seqlens_q[0] must be 0; got 1", cu_seqlens_q=i32([1, 2, 3])),
    case(
        *PACKED,
        ValueError,
        "cu_seqlens_k must not decrease; cu_seqlens_k[2] is 5 after 6",
        cu_seqlens_k=i32([0, 6, 5]),
    ),
    case(
        *PACKED,
        ValueError,
        "cu_seqlens_q[2] must be at most the number of packed rows (3); got 4",
        cu_seqlens_q=i32([0, 1, 4]),
    ),
    case(
        *PACKED,
        ValueError,
        "cu_seqlens_q must have a unit stride along its last axis; got stride 2",
        cu_seqlens_q=i32([0, 9, 1, 9, 3])[::2],
    ),
    case(*A, ValueError, "window_left must be -1 (unbounded) or at least 0; got -2", window_left=-2),
    case(*A, ValueError, "attention_chunk must be 0 (none) or positive; got -1", attention_chunk=-1),
    case(*A, ValueError, "attention_chunk (64) needs causal", attention_chunk=64, window_right=1),
    case(*A, ValueError, "alibi_symmetric needs alibi_slopes; got none", alibi_symmetric=True, causal=True),
    case(*A, TypeError, "alibi_symmetric must be a bool; got int", alibi_symmetric=1),
    case(*A, ValueError, "window_right must be -1 (unbounded) or at least 0; got -7", window_right=-7),
    *(
        case(
            *A,
            ValueError,
            f"softmax_scale must be finite in float32; got {scale}",
            softmax_scale=float(scale),
        )
        for scale in ("inf", "1e+39", "-1e+300")
    ),
    *(
        case(
            *A,
            ValueError,
            f"softmax_scale ({scale}) and softcap ({softcap}) must neither overflow nor vanish in float32",
            softmax_scale=float(scale),
            softcap=float(softcap),
        )
        for scale, softcap in (
            ("3e+38", "0"),
            ("1", "1e-50"),
            ("1", "1e-40"),
            ("1e+10", "1e-30"),
            ("1", "3e+38"),
            ("1", "1e+300"),
        )
    ),
    case(*A, ValueError, "softcap must be 0 (none) or positive; got -1", softcap=-1.0),
    case(*A, ValueError, "softcap must be 0 (none) or positive; got nan", softcap=float("nan")),
    *(
        case(
            *A,
            ValueError,
            f"dropout_p must lie in [0, 1 - 2^-17); got {p}",
            dropout_p=float(p),
            dropout_seed=1,
        )
        for p in ("1", "-0.1", "nan")
    ),
    case(
        *A,
        ValueError,
        "dropout_p must lie in [0, 1 - 2^-17); got 0.999992",
        dropout_p=1 - 2.0**-17,
        dropout_seed=1,
    ),
    case(*A, ValueError, "dropout_p (0.5) needs a dropout_seed; got none", dropout_p=0.5),
    case(*A, ValueError, "dropout_seed must be at least 0; got -1", dropout_seed=-1),
    case(*A, ValueError, "dropout_offset must be at least 0; got -8", dropout_offset=-8),
    case(*A, ValueError, f"dropout_seed must fit in 64 bits with a sign; got {2**63}", dropout_seed=2**63),
    case(*A, TypeError, "dropout_p must be a float; got str", dropout_p="0.1"),
    case(*A, TypeError, "dropout_seed must be an int; got float", dropout_seed=1.0),
    case(*A, TypeError, "dropout_offset must be an int; got NoneType", dropout_offset=None),
    case(*A, ValueError, "prefix_lens must have shape [batch]; got [2, 1]", prefix_lens=i32([[1], [1]])),
    case(*A, ValueError, "batch of prefix_lens (3) must equal that of q (2)", prefix_lens=i32([1, 1, 1])),
    case(*A, ValueError, "prefix_lens[1] must be at least 0; got -1", prefix_lens=i32([1, -1])),
    case(
        *A,
        ValueError,
        "prefix_lens[1] must be below 2^31; got 4294967299",
        prefix_lens=np.array([1, 2**32 + 3], np.int64),
    ),
    case(
        *A,
        ValueError,
        "alibi_slopes must have shape [num_q_heads] or [batch, num_q_heads]; got [1, 2, 4]",
        alibi_slopes=f32(1, 2, 4),
    ),
    case(*A, ValueError, "num_q_heads of alibi_slopes (2) must equal that of q (4)", alibi_slopes=f32(2)),
    case(*A, ValueError, "batch of alibi_slopes (3) must equal that of q (2)", alibi_slopes=f32(3, 4)),
    case(*A, ValueError, "sinks must have shape [num_q_heads]; got [2, 4]", sinks=f32(2, 4)),
    case(*A, ValueError, "num_q_heads of sinks (2) must equal that of q (4)", sinks=f32(2)),
    case(*A, TypeError, "sinks must be float32; got float64", sinks=np.ones(4)),
    case(*A, ValueError, "softmax_phi must be finite in float32; got inf", softmax_phi=float("inf")),
    case(*A, ValueError, "softmax_phi must be finite in float32; got nan", softmax_phi=float("nan")),
    case(*A, ValueError, "softmax_phi must be finite in float32; got -1e+39", softmax_phi=-1e39),
    case(*A, ValueError, "num_q_heads of softmax_phi (2) must equal that of q (4)", softmax_phi=f32(2)),
    case(*A, ValueError, "softmax_phi must have shape [num_q_heads]; got [1, 4]", softmax_phi=f32(1, 4)),
    case(*A, TypeError, "softmax_phi must be float32; got float16", softmax_phi=np.ones(4, np.float16)),
    case(*A, TypeError, "softmax_phi must be a float, or an array of float32; got str", softmax_phi="high"),
    case(
        *A,
        ValueError,
        "softmax_phi[2] must be finite; got -inf",
        softmax_phi=np.array([0.0, 1.0, -np.inf, np.nan], np.float32),
    ),
    case(*A, ValueError, "out must be writable; it is read-only", out=read_only(f32(2, 3, 4, 8))),
    case(
        *A,
        ValueError,
        "out must not overlap itself: the stride of axis 1 (0) must be at least 1 in magnitude",
        out=as_strided(f32(2, 1, 4, 8), (2, 3, 4, 8), (128, 0, 32, 4)),
    ),
    case(
        *A,
        ValueError,
        "out must not overlap itself: the stride of axis 1 (1) must be at least 11 in magnitude",
        out=as_strided(f32(200), (2, 3, 4, 8), (400, 4, 4, 4)),
    ),
    case(
        *A,
        ValueError,
        "out must not overlap itself: the stride of axis 0 (-95) must be at least 96 in magnitude",
        out=as_strided(f32(200)[95:], (2, 3, 4, 8), (-380, 128, 32, 4)),
    ),
    *(
        case(*A, ValueError, f"out must not overlap {name} in memory", **arrays)
        for name, arrays in (
            ("k", {"out": memory(0, 2, 3, 4, 8), "k": memory(191, 2, 5, 2, 8)}),
            ("v", {"out": memory(159, 2, 3, 4, 8), "v": memory(0, 2, 5, 2, 8)}),
            ("v", {"out": memory(0, 2, 3, 4, 8), "v": memory(8, 2, 5, 2, 8)[:, ::-1]}),
            ("q", {"out": memory(0, 2, 3, 4, 8), "q": memory(8, 2, 3, 4, 8)}),
            ("q", {"out": memory(0, 2, 3, 4, 8), "q": memory(0, 2, 4, 3, 8).swapaxes(1, 2)}),
        )
    ),
    case(
        *A, ValueError, "out must have the shape of q [2, 3, 4, 8]; got [2, 3, 4, 16]", out=f32(2, 3, 4, 16)
    ),
    case(*A, TypeError, "out must be float32 like q; got float16", out=np.ones((2, 3, 4, 8), np.float16)),
    # merge_states
    case(
        *M,
        ValueError,
        "out_a must have shape [..., head_dim] with one to three leading axes; got [8]",
        out_a=f32(8),
    ),
    case(*M, TypeError, f"out_a {FLOATS}; got int32", out_a=np.ones((3, 4, 8), np.int32)),
    case(
        *M,
        ValueError,
        "out_b must have shape [..., head_dim] with one to three leading axes; got [4, 8]",
        out_b=f32(4, 8),
    ),
    case(*M, ValueError, "out_b must have the shape of out_a [3, 4, 8]; got [3, 5, 8]", out_b=f32(3, 5, 8)),
    case(
        *M, TypeError, "out_b must be float32 like out_a; got float16", out_b=np.ones((3, 4, 8), np.float16)
    ),
    case(*M, TypeError, "lse_b must be float32; got float16", lse_b=np.ones((3, 4), np.float16)),
    case(
        *M,
        ValueError,
        "lse_b must have the shape of out_a without its last axis; out_a has [3, 4, 8], lse_b [4, 3]",
        lse_b=f32(4, 3),
    ),
]


test_refused = refused(CASES)
