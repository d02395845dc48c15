"""What latent_attention refuses, word for word."""

from __future__ import annotations

import numpy as np
import pytest

import octavo
from support.refusals import (
    FLOATS,
    LATENT,
    LENGTHS,
    NO_ARRAY,
    case,
    f32,
    i32,
    memory,
    read_only,
    refused,
)

OP = LATENT

CASES = [
    case(*OP, TypeError, f"q {NO_ARRAY}; got list", q=[1.0]),
    case(*OP, TypeError, f"q {FLOATS}; got int32", q=np.ones((2, 3, 16), np.int32)),
    case(*OP, ValueError, "q must have shape [batch, num_q_heads, qk_dim]; got [2, 16]", q=f32(2, 16)),
    case(
        *OP,
        ValueError,
        "kv_pages must have shape [num_pages, page_size, qk_dim]; got [7, 16]",
        kv_pages=f32(7, 16),
    ),
    case(
        *OP,
        ValueError,
        "kv_pages must have one head, which all query heads share; got 2",
        kv_pages=f32(7, 4, 2, 16),
    ),
    case(
        *OP,
        TypeError,
        "kv_pages must be float32 like q, or float8_e4m3fn; got float16",
        kv_pages=np.ones((7, 4, 16), np.float16),
    ),
    case(*OP, ValueError, "qk_dim of kv_pages (24) must equal that of q (16)", kv_pages=f32(7, 4, 24)),
    *(
        case(
            *OP,
            ValueError,
            f"qk_dim ({dim}) must be a multiple of 8 from 8 to 1024",
            q=f32(2, 3, dim),
            kv_pages=f32(7, 4, dim),
        )
        for dim in (4, 20, 1032)
    ),
    *(
        case(*OP, ValueError, f"v_dim ({dim}) must be a multiple of 8 from 8 to qk_dim (16)", v_dim=dim)
        for dim in (0, -8, 12, 24, 512)
    ),
    case(*OP, TypeError, "v_dim must be an int; got float", v_dim=8.0),
    case(*OP, ValueError, "num_q_heads (0) must be at least 1", q=f32(2, 0, 16)),
    case(*OP, ValueError, "page_size (0) must be at least 1", kv_pages=f32(7, 0, 16)),
    case(*OP, TypeError, "page_table must be int32 or int64; got float32", page_table=f32(2, 2)),
    case(*OP, ValueError, "batch of seq_lens (3) must equal that of page_table (2)", seq_lens=i32([1, 1, 1])),
    case(*OP, ValueError, "batch of q (1) must equal that of page_table (2)", q=f32(1, 3, 16)),
    case(
        *OP,
        ValueError,
        "batch of q (3) must equal that of page_table (2); several tokens of a sequence need cu_seqlens_q",
        q=f32(3, 3, 16),
    ),
    case(
        *OP,
        ValueError,
        "max_seqlen_q belongs to packed queries; give cu_seqlens_q too",
        max_seqlen_q=1,
    ),
    case(*OP, ValueError, "cu_seqlens_q must have batch + 1 = 3 entries; got 2", cu_seqlens_q=i32([0, 2])),
    case(
        *OP,
        ValueError,
        "max_seqlen_q (1) must be at least every length in cu_seqlens_q; sequence 0 has 2",
        cu_seqlens_q=i32([0, 2, 2]),
        max_seqlen_q=1,
    ),
    case(*OP, ValueError, f"max_seqlen_q {LENGTHS}; got -1", cu_seqlens_q=i32([0, 1, 2]), max_seqlen_q=-1),
    case(
        *OP, ValueError, "seq_lens[0] must lie in [0, max_pages * page_size = 8]; got 9", seq_lens=i32([9, 1])
    ),
    case(
        *OP,
        ValueError,
        "page_table[1, 0] must lie in [0, num_pages = 7); got 7",
        page_table=i32([[2, 1], [7, 0]]),
    ),
    case(
        *OP,
        ValueError,
        "seq_lens[0] (1) counts the new tokens and must be 0 (padding) or at least their number (2)",
        cu_seqlens_q=i32([0, 2, 2]),
        seq_lens=i32([1, 1]),
    ),
    case(
        *OP,
        TypeError,
        "softmax_scale must be given: that of the heads before the absorption, such as 1 / sqrt(192) for "
        "keys of 128 + 64; it does not follow from qk_dim (16)",
        softmax_scale=None,
    ),
    *(
        case(
            *OP,
            ValueError,
            f"softmax_scale ({shown}) times kv_scale (1) must be finite in float32",
            softmax_scale=scale,
        )
        for scale, shown in ((float("inf"), "inf"), (3e38, "3e+38"))
    ),
    *(
        case(*OP, ValueError, f"kv_scale must be finite and greater than 0; got {shown}", kv_scale=scale)
        for scale, shown in ((0.0, "0"), (-1.0, "-1"), (float("inf"), "inf"), (float("nan"), "nan"))
    ),
    *(
        case(*OP, ValueError, f"num_splits must lie in [1, 1024]; got {splits}", num_splits=splits)
        for splits in (0, 1025)
    ),
    case(*OP, TypeError, "out must be float32 like q; got float16", out=np.ones((2, 3, 8), np.float16)),
    case(
        *OP,
        ValueError,
        "out must have shape [batch, num_q_heads, v_dim] = [2, 3, 8]; got [2, 3, 16]",
        out=f32(2, 3, 16),
    ),
    case(*OP, ValueError, "out must be writable; it is read-only", out=read_only(f32(2, 3, 8))),
    case(
        *OP,
        ValueError,
        "out must have a unit stride along its last axis; got stride 2",
        out=f32(2, 3, 16)[..., ::2],
    ),
    case(*OP, ValueError, "out must not overlap q in memory", out=memory(0, 2, 3, 8), q=memory(8, 2, 3, 16)),
    case(
        *OP,
        ValueError,
        "out must not overlap kv_pages in memory",
        out=memory(0, 2, 3, 8),
        kv_pages=memory(8, 4, 4, 16),
    ),
]


test_refused = refused(CASES)


@pytest.mark.parametrize(
    ("dtype", "qk_dim", "v_dim", "message"),
    [
        ("float32", 576, 512, "no CUDA kernel for float32; it has float16 and bfloat16"),
        ("bfloat16", 192, 128, "no CUDA kernel for qk_dim 192 and v_dim 128; it has 576 and 512"),
        ("bfloat16", 576, 576, "no CUDA kernel for qk_dim 576 and v_dim 576; it has 576 and 512"),
    ],
)
def test_refused_on_a_gpu(dtype: str, qk_dim: int, v_dim: int, message: str) -> None:
    torch = pytest.importorskip("torch")
    shapes = (1, 16, qk_dim), (4, 64, qk_dim)
    arrays = [torch.empty(shape, dtype=getattr(torch, dtype), device="meta") for shape in shapes]
    tables = [torch.empty(shape, dtype=torch.int32, device="meta") for shape in ((1, 4), (1,))]
    with pytest.raises(TypeError, match=f"latent_attention: {message}"):
        octavo.explain("latent_attention", *arrays, *tables, v_dim=v_dim, softmax_scale=0.1, device="h200")
