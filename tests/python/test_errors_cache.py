"""What append_kv, copy_pages and check_page_table refuse, word for word."""

from __future__ import annotations

import numpy as np
from numpy.lib.stride_tricks import as_strided

from support.refusals import (
    BOTH,
    FLOATS,
    LENGTHS,
    PAGES,
    B,
    C,
    K,
    T,
    case,
    f32,
    i32,
    memory,
    read_only,
    refused,
)

CASES = [
    # append_kv
    case(*K, ValueError, "k must have shape [batch, num_kv_heads, head_dim]; got [2, 8]", k=f32(2, 8)),
    case(
        *K,
        ValueError,
        "v must have shape [total, num_kv_heads, head_dim]; got [2, 8]",
        v=f32(2, 8),
        cu_seqlens=i32([0, 1, 2]),
    ),
    case(*K, TypeError, f"k_pages {FLOATS}; got int32", k_pages=np.ones((3, 4, 2, 8), np.int32)),
    case(*K, ValueError, f"k_pages must have shape {PAGES}; got [12, 2, 8]", k_pages=f32(12, 2, 8)),
    case(*K, ValueError, "v_pages must be writable; it is read-only", v_pages=read_only(f32(3, 4, 2, 8))),
    case(
        *K,
        ValueError,
        "k_pages must not overlap itself: the stride of axis 0 (0) must be at least 1 in magnitude",
        k_pages=as_strided(f32(4, 2, 8), (3, 4, 2, 8), (0, 64, 32, 4)),
    ),
    case(
        *K,
        TypeError,
        "v_pages must be float32 like k_pages; got float16",
        v_pages=np.ones((3, 4, 2, 8), np.float16),
    ),
    case(
        *K,
        ValueError,
        "v_pages must have the shape of k_pages [3, 4, 2, 8], but for head_dim; got [4, 4, 2, 8]",
        v_pages=f32(4, 4, 2, 8),
    ),
    case(
        *K, ValueError, "page_size (0) must be at least 1", k_pages=f32(3, 0, 2, 8), v_pages=f32(3, 0, 2, 8)
    ),
    case(*K, TypeError, "k must be float32 like k_pages; got float16", k=np.ones((2, 2, 8), np.float16)),
    case(
        *K,
        ValueError,
        "v must have the shape of k [2, 2, 8], but for head_dim; got [2, 4, 8]",
        v=f32(2, 4, 8),
    ),
    case(*K, ValueError, "head_dim of v (16) must equal that of v_pages (8)", v=f32(2, 2, 16)),
    case(*K, ValueError, "head_dim of v (8) must equal that of v_pages (16)", v_pages=f32(3, 4, 2, 16)),
    case(
        *K, ValueError, "num_kv_heads of k (4) must equal that of k_pages (2)", k=f32(2, 4, 8), v=f32(2, 4, 8)
    ),
    case(
        *K, ValueError, "head_dim of k (16) must equal that of k_pages (8)", k=f32(2, 2, 16), v=f32(2, 2, 16)
    ),
    case(*K, ValueError, "batch of seq_lens (3) must equal that of page_table (2)", seq_lens=i32([1, 1, 1])),
    case(*K, ValueError, "batch of k (1) must equal that of page_table (2)", k=f32(1, 2, 8), v=f32(1, 2, 8)),
    case(
        *K,
        ValueError,
        "batch of k (3) must equal that of page_table (2); several tokens of a sequence need cu_seqlens",
        k=f32(3, 2, 8),
        v=f32(3, 2, 8),
    ),
    case(*K, ValueError, "k_scale must be finite and greater than 0; got 0", k_scale=0.0),
    case(*K, ValueError, "k_scale must be finite and greater than 0; got -1", k_scale=-1.0),
    case(
        *K,
        ValueError,
        "v_scale must be at least 2^-126, as the inverse of a smaller number may be "
        "beyond float32; got 5.87747e-39",
        v_scale=2**-127,
    ),
    case(*K, TypeError, "static_tables must be a bool; got int", static_tables=1),
    case(*K, ValueError, "v_scale must be finite and greater than 0; got nan", v_scale=float("nan")),
    case(*K, ValueError, "cu_seqlens must have batch + 1 = 3 entries; got 2", cu_seqlens=i32([0, 2])),
    case(
        *K, ValueError, "cu_seqlens must not decrease; cu_seqlens[2] is 2 after 3", cu_seqlens=i32([0, 3, 2])
    ),
    case(
        *K, ValueError, "seq_lens[0] must lie in [0, max_pages * page_size = 8]; got 9", seq_lens=i32([9, 1])
    ),
    case(
        *K,
        ValueError,
        "page_table[1, 0] must lie in [0, num_pages = 3); got 7",
        page_table=i32([[2, 1], [7, -1]]),
    ),
    case(
        *K,
        ValueError,
        "seq_lens[1] (1) counts the new tokens and must be 0 (padding) or at least their number (2)",
        k=f32(3, 2, 8),
        v=f32(3, 2, 8),
        cu_seqlens=i32([0, 1, 3]),
    ),
    *(
        case(
            *K,
            ValueError,
            f"{name} must not overlap {pages} in memory",
            **{name: memory(191, 2, 2, 8), pages: memory(0, 3, 4, 2, 8)},
        )
        for name in ("k", "v")
        for pages in ("k_pages", "v_pages")
    ),
    case(
        *K,
        ValueError,
        "v_pages must not share elements with k_pages; both may be views of one array, but not of the same "
        "part",
        k_pages=BOTH[:3],
        v_pages=BOTH[2:5],
    ),
    case(  # v_pages begin behind k_pages by a page of both, less a slot
        *K,
        ValueError,
        "v_pages must not share elements with k_pages; both may be views of one array, but not of the same "
        "part",
        k_pages=(both := f32(4, 8, 2, 8))[:3, 1:5],
        v_pages=both[1:, :4],
    ),
    # copy_pages
    case(*C, ValueError, f"v_pages must have shape {PAGES}; got [12, 2, 8]", v_pages=f32(12, 2, 8)),
    case(*C, ValueError, "k_pages must be writable; it is read-only", k_pages=read_only(f32(3, 4, 2, 8))),
    case(*C, ValueError, "copies must have shape [num_copies, 2]; got [2]", copies=i32([0, 1])),
    case(*C, ValueError, "copies must have shape [num_copies, 2]; got [0]", copies=i32([])),
    case(*C, ValueError, "copies must have shape [num_copies, 2]; got [1, 0]", copies=[[]]),
    case(*C, ValueError, "copies must have shape [num_copies, 2]; got [1, 3]", copies=i32([[0, 1, 2]])),
    case(
        *C,
        ValueError,
        "copies must have a unit stride along its last axis; got stride 2",
        copies=i32([[0, 9, 1]])[:, ::2],
    ),
    case(
        *C,
        ValueError,
        "copies[1, 1] must lie in [0, num_pages = 3); got 3",
        copies=i32([[0, 1, 9], [0, 3, 9]])[:, :2],
    ),
    case(*C, ValueError, "copies[0, 0] must lie in [0, num_pages = 3); got 3", copies=i32([[3, 1]])),
    case(
        *C, ValueError, "copies[1, 1] must lie in [0, num_pages = 3); got -1", copies=i32([[0, 1], [0, -1]])
    ),
    case(
        *C,
        ValueError,
        "copies[0, 1] (1) is also copied from; copies are made in no particular order",
        copies=i32([[0, 1], [1, 2]]),
    ),
    case(
        *C,
        ValueError,
        "copies[1, 1] (2) is also copied to by another row; copies are made in no particular order",
        copies=i32([[0, 2], [1, 2]]),
    ),
    *(
        case(
            *C,
            ValueError,
            f"a token and head of {name} must take less than 2 GiB; got head_dim {size} of {dtype}",
            **(
                dict.fromkeys(("k_pages", "v_pages"), np.ones((0, 4, 2, 8), dtype))
                | {name: np.ones((0, 4, 2, size), dtype)}
            ),
        )
        for name in ("k_pages", "v_pages")
        for dtype, size in (("float32", 2**29), ("float16", 2**30))
    ),
    *(
        case(
            *C,
            ValueError,
            "v_pages must not share elements with k_pages; both may be views of one array, but not of the "
            "same part",
            k_pages=BOTH[:3],
            v_pages=v_pages,
        )
        for v_pages in (BOTH[1:4], BOTH[2::-1])
    ),
    # copy_pages between caches
    case(
        *B,
        ValueError,
        "to_k_pages and to_v_pages must be given together; got only to_v_pages",
        to_k_pages=None,
    ),
    case(
        *B,
        ValueError,
        "to_k_pages and to_v_pages must be given together; got only to_k_pages",
        to_v_pages=None,
    ),
    case(*B, ValueError, f"to_k_pages must have shape {PAGES}; got [4, 2, 8]", to_k_pages=f32(4, 2, 8)),
    case(
        *B,
        ValueError,
        "to_v_pages must not share elements with to_k_pages; both may be views of one array, but not of the "
        "same part",
        **dict.fromkeys(("to_k_pages", "to_v_pages"), f32(5, 4, 2, 8)),
    ),
    case(
        *B,
        ValueError,
        "to_v_pages must have the shape of to_k_pages [5, 4, 2, 8], but for head_dim; got [6, 4, 2, 8]",
        to_v_pages=f32(6, 4, 2, 8),
    ),
    case(
        *B,
        TypeError,
        "to_k_pages must be float16 like k_pages; got float32",
        k_pages=np.ones((3, 4, 2, 8), np.float16),
        v_pages=np.ones((3, 4, 2, 8), np.float16),
    ),
    case(
        *B,
        TypeError,
        "to_v_pages must be float32 like to_k_pages; got float16",
        to_v_pages=np.ones((5, 4, 2, 8), np.float16),
    ),
    *(
        case(
            *B,
            ValueError,
            f"{axis} of to_k_pages ({got}) must equal that of k_pages ({wanted})",
            to_k_pages=f32(*shape),
            to_v_pages=f32(*shape),
        )
        for axis, got, wanted, shape in (
            ("page_size", 5, 4, (5, 5, 2, 8)),
            ("num_kv_heads", 1, 2, (5, 4, 1, 8)),
            ("head_dim", 16, 8, (5, 4, 2, 16)),
        )
    ),
    case(
        *B,
        ValueError,
        "head_dim of to_v_pages (16) must equal that of v_pages (8)",
        to_v_pages=f32(5, 4, 2, 16),
    ),
    case(
        *B,
        ValueError,
        "to_k_pages must be writable; it is read-only",
        to_k_pages=read_only(f32(5, 4, 2, 8)),
    ),
    *(
        case(*B, ValueError, f"{name} must not overlap {to} in memory", **{name: BOTH[:3], to: BOTH[2:7]})
        for name in ("k_pages", "v_pages")
        for to in ("to_k_pages", "to_v_pages")
    ),
    case(
        *B,
        ValueError,
        "copies[0, 0] must lie in [0, num_pages = 3); got 3",
        copies=i32([[3, 4]]),
    ),
    case(
        *B,
        ValueError,
        "copies[0, 1] must lie in [0, num_pages = 5); got 5",
        copies=i32([[2, 5]]),
    ),
    case(
        *B,
        ValueError,
        "copies[2, 1] (4) is also copied to by another row; copies are made in no particular order",
        copies=i32([[0, 4], [0, 3], [1, 4]]),
    ),
    case(
        *B,
        ValueError,
        "copies[0, 0] must be below 2^31, as pages are numbered in int32; got 2147483648",
        **dict.fromkeys(("k_pages", "v_pages"), np.broadcast_to(f32(4, 2, 8), (2**31 + 1, 4, 2, 8))),
        copies=np.array([[2**31, 4]]),
    ),
    # check_page_table
    case(*T, ValueError, "page_table must have shape [batch, max_pages]; got [2]", page_table=i32([1, 2])),
    case(*T, ValueError, "batch of seq_lens (3) must equal that of page_table (2)", seq_lens=i32([1, 1, 1])),
    case(*T, ValueError, "page_size (0) must be at least 1", page_size=0),
    case(*T, ValueError, f"page_size {LENGTHS}; got {2**62}", page_size=2**62),
    case(*T, ValueError, "num_pages (-1) must be at least 0", num_pages=-1),
    case(*T, ValueError, "page_table[0, 0] must lie in [0, num_pages = 2); got 2", num_pages=2),
    case(
        *T,
        ValueError,
        "page_table[1, 0] must be below 2^31, as pages are numbered in int32; got 4294967296",
        page_table=np.array([[2**31 - 1, 1], [2**32, -1]]),
        num_pages=2**40,
    ),
    case(*T, ValueError, "seq_lens[0] must lie in [0, max_pages * page_size = 4]; got 5", page_size=2),
]


test_refused = refused(CASES)
