"""What append_kv refuses of a rotary embedding, word for word."""

from __future__ import annotations

import numpy as np

from support.refusals import (
    LENGTHS,
    NO_ARRAY,
    Arguments,
    K,
    T,
    append,
    case,
    f32,
    i32,
    long,
    memory,
    read_only,
    refused,
)


def rotated() -> Arguments:
    """Arguments for two sequences, one of 5 tokens and one of 1."""
    return {**append(), "rotary_cos": f32(6, 3), "rotary_sin": f32(6, 3)}


def with_queries() -> Arguments:
    return {**rotated(), "q": f32(2, 4, 8)}


def f16(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float16)


R, Q = ("append_kv", rotated), ("append_kv", with_queries)
TABLE = "[max_positions, rotary_dim / 2]"
APART = "; both may be views of one array, but not of the same part"

CASES = [
    case(
        *K,
        ValueError,
        "rotary_cos and rotary_sin must be given together; got only rotary_cos",
        rotary_cos=f32(6, 4),
    ),
    case(
        *K,
        ValueError,
        "rotary_cos and rotary_sin must be given together; got only rotary_sin",
        rotary_sin=f32(6, 4),
    ),
    case(
        *K,
        ValueError,
        "rotary_interleaved needs rotary_cos and rotary_sin; got none",
        rotary_interleaved=True,
    ),
    case(*K, ValueError, "q needs rotary_cos and rotary_sin, which rotate it; got none", q=f32(2, 4, 8)),
    case(*K, ValueError, "q_out needs q, whose rotated copy it gets; got none", q_out=f32(2, 4, 8)),
    case(*R, ValueError, "q_out needs q, whose rotated copy it gets; got none", q_out=f32(2, 4, 8)),
    case(*R, TypeError, f"rotary_cos {NO_ARRAY}; got list", rotary_cos=[1.0]),
    case(*R, TypeError, "rotary_interleaved must be a bool; got int", rotary_interleaved=1),
    case(*R, TypeError, "rotary_cos must be float32 like k; got float16", rotary_cos=f16(6, 3)),
    case(
        *R,
        TypeError,
        "rotary_cos must be float16 like k, or float32; got int32",
        **{name: f16(2, 2, 8) for name in ("k", "v")},
        **{name: f16(3, 4, 2, 8) for name in ("k_pages", "v_pages")},
        rotary_cos=i32([[1, 1, 1]]),
    ),
    case(*R, TypeError, "rotary_sin must be float32 like rotary_cos; got float16", rotary_sin=f16(6, 3)),
    case(*R, ValueError, f"rotary_cos must have shape {TABLE}; got [3]", rotary_cos=f32(3)),
    case(*R, ValueError, f"rotary_sin must have shape {TABLE}; got [1, 6, 3]", rotary_sin=f32(1, 6, 3)),
    case(
        *R,
        ValueError,
        "rotary_sin must have the shape of rotary_cos [6, 3]; got [6, 4]",
        rotary_sin=f32(6, 4),
    ),
    *(
        case(
            *R,
            ValueError,
            f"rotary_cos must have shape {TABLE} with rotary_dim from 2 to head_dim (8); got [6, {columns}]",
            rotary_cos=f32(6, columns),
        )
        for columns in (0, 5, 8)
    ),
    case(
        *R,
        ValueError,
        f"max_positions {LENGTHS}; got {2**30 + 1}",
        rotary_cos=long(2**30 + 1, 3),
        rotary_sin=long(2**30 + 1, 3),
    ),
    case(
        *R,
        ValueError,
        "rotary_cos must have a unit stride along its last axis; got stride 2",
        rotary_cos=f32(6, 6)[:, ::2],
    ),
    *(
        case(
            *R,
            ValueError,
            "seq_lens[0] (5) must be at most the number of rows of rotary_cos, max_positions (4)",
            rotary_cos=f32(4, 3),
            rotary_sin=f32(4, 3),
            **others,
        )
        for others in ({}, {"cu_seqlens": i32([0, 1, 2])})
    ),
    case(*Q, TypeError, "q must be float32 like k; got float16", q=f16(2, 4, 8)),
    case(*Q, ValueError, "q must have shape [batch, num_q_heads, head_dim]; got [2, 8]", q=f32(2, 8)),
    case(
        *Q,
        ValueError,
        "q must have shape [total, num_q_heads, head_dim]; got [2, 8]",
        q=f32(2, 8),
        cu_seqlens=i32([0, 1, 2]),
    ),
    case(*Q, ValueError, "batch of q (3) must equal that of k (2)", q=f32(3, 4, 8)),
    case(
        *Q, ValueError, "total of q (3) must equal that of k (2)", q=f32(3, 4, 8), cu_seqlens=i32([0, 1, 2])
    ),
    case(
        *Q,
        ValueError,
        f"num_q_heads {LENGTHS}; got {2**30 + 1}",
        q=long(2, 2**30 + 1, 8),
        q_out=long(2, 2**30 + 1, 8),
    ),
    case(*Q, ValueError, "head_dim of q (16) must equal that of k (8)", q=f32(2, 4, 16)),
    case(*Q, TypeError, "q_out must be float32 like q; got float16", q_out=f16(2, 4, 8)),
    case(*Q, ValueError, "q_out must have the shape of q [2, 4, 8]; got [2, 2, 8]", q_out=f32(2, 2, 8)),
    case(*Q, ValueError, "q_out must be writable; it is read-only", q_out=read_only(f32(2, 4, 8))),
    case(
        *Q,
        ValueError,
        "q_out must not overlap q in memory",
        q=memory(0, 2, 4, 8),
        q_out=memory(8, 2, 4, 8),
    ),
    *(
        case(
            *Q,
            ValueError,
            f"q_out must not share elements with {name}{APART}",
            **{name: memory(0, 2, 6, 8)[:, 3:5], "q_out": memory(0, 2, 6, 8)[:, :4]},
        )
        for name in ("k", "v")
    ),
    case(
        *Q,
        ValueError,
        f"q_out must not share elements with k{APART}",
        k=np.broadcast_to(memory(0, 1, 1, 8), (2, 2, 8)),
        q_out=memory(0, 2, 4, 8),
    ),
    *(
        case(
            *Q,
            ValueError,
            f"q_out must not overlap {name} in memory",
            **{name: memory(60, 6, 3), "q_out": memory(0, 2, 4, 8)},
        )
        for name in ("rotary_cos", "rotary_sin")
    ),
    *(
        case(
            *Q,
            ValueError,
            f"{name} must not overlap {pages} in memory",
            **{name: memory(180, *shape), pages: memory(0, 3, 4, 2, 8)},
        )
        for name, shape in (
            ("q", (2, 4, 8)),
            ("q_out", (2, 4, 8)),
            ("rotary_cos", (6, 3)),
            ("rotary_sin", (6, 3)),
        )
        for pages in ("k_pages", "v_pages")
    ),
    # check_page_table
    case(*T, ValueError, "seq_lens[0] (5) must be at most max_positions (4)", max_positions=4),
    case(*T, TypeError, "max_positions must be an int; got float", max_positions=4.0),
]


test_refused = refused(CASES)


def test_sequences_without_new_tokens_may_be_longer_than_the_tables() -> None:
    import octavo

    arguments = {
        **with_queries(),
        "rotary_cos": f32(4, 3),
        "rotary_sin": f32(4, 3),
        "cu_seqlens": i32([0, 0, 2]),
    }
    octavo.append_kv(**{**arguments, "seq_lens": i32([5, 3])})


def test_queries_may_lie_beside_keys_and_values() -> None:
    import octavo

    projection = f32(2, 8, 8)
    q, k, v = projection[:, :4], projection[:, 4:6], projection[:, 6:]
    assert octavo.append_kv(**{**rotated(), "k": k, "v": v}, q=q, q_out=q) is q
