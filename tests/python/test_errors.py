"""Every refusal of an argument, word for word, and that nothing was written before it."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

import octavo
from conftest import gpu_count
from producers import Producer

Arguments = dict[str, Any]
MAX_LENGTH = 2**30


def f32(*shape: int) -> NDArray[np.float32]:
    return np.ones(shape, np.float32)


def i32(values: Any) -> NDArray[np.int32]:
    return np.array(values, np.int32)


def broadcast(shape: tuple[int, ...], dtype: Any = np.float32) -> NDArray:
    """One element, over and over: for shapes that memory could not hold."""
    return np.broadcast_to(np.zeros((), dtype), shape)


def long(*shape: int) -> NDArray[np.float32]:
    """As broadcast(), with a unit last stride."""
    return np.broadcast_to(f32(shape[-1]), shape)


_MEMORY = np.ones(400, np.float32)


def memory(begin: int, *shape: int) -> NDArray[np.float32]:
    """Elements of one and the same memory, from `begin` on."""
    return _MEMORY[begin : begin + int(np.prod(shape))].reshape(shape)


def dense() -> Arguments:
    return {"q": f32(2, 3, 4, 8), "k": f32(2, 5, 2, 8), "v": f32(2, 5, 2, 8)}


def packed() -> Arguments:
    return {
        "q": f32(3, 4, 8),
        "k": f32(5, 2, 8),
        "v": f32(5, 2, 8),
        "cu_seqlens_q": i32([0, 1, 3]),
        "cu_seqlens_k": i32([0, 2, 5]),
    }


def paged() -> Arguments:
    return {
        "q": f32(2, 4, 8),
        "k_pages": f32(3, 4, 2, 8),
        "v_pages": f32(3, 4, 2, 8),
        "page_table": i32([[2, 1], [0, -1]]),
        "seq_lens": i32([5, 1]),
    }


def append() -> Arguments:
    return {
        "k": f32(2, 2, 8),
        "v": f32(2, 2, 8),
        "k_pages": np.zeros((3, 4, 2, 8), np.float32),
        "v_pages": np.zeros((3, 4, 2, 8), np.float32),
        "page_table": i32([[2, 1], [0, -1]]),
        "seq_lens": i32([5, 1]),
    }


def copy() -> Arguments:
    return {"k_pages": f32(3, 4, 2, 8), "v_pages": f32(3, 4, 2, 8), "copies": i32([[0, 1]])}


def between() -> Arguments:
    return {**copy(), "to_k_pages": f32(5, 4, 2, 8), "to_v_pages": f32(5, 4, 2, 8)}


def merge() -> Arguments:
    return {"out_a": f32(3, 4, 8), "lse_a": f32(3, 4), "out_b": f32(3, 4, 8), "lse_b": f32(3, 4)}


def table() -> Arguments:
    return {"page_table": i32([[2, 1], [0, -1]]), "seq_lens": i32([5, 1]), "num_pages": 3, "page_size": 4}


OPERATORS: dict[str, Callable[..., Any]] = {
    name: getattr(octavo, name)
    for name in (
        "attention",
        "paged_attention",
        "append_kv",
        "copy_pages",
        "merge_states",
        "check_page_table",
    )
}


def case(
    op: str, make: Callable[[], Arguments], error: type[Exception], message: str, **overrides: Any
) -> Any:
    return pytest.param(op, make, overrides, error, message, id=f"{op}: {message}"[:100])


def read_only(array: NDArray) -> NDArray:
    array.flags.writeable = False
    return array


A, P, K, C, B, M, T = (
    ("attention", dense),
    ("paged_attention", paged),
    ("append_kv", append),
    ("copy_pages", copy),
    ("copy_pages", between),
    ("merge_states", merge),
    ("check_page_table", table),
)
PACKED = ("attention", packed)
LENGTHS = f"must lie in [0, {MAX_LENGTH}]"
NO_ARRAY = "must be an array (an object with __dlpack__ and __dlpack_device__)"
FLOATS = "must be float32, float16 or bfloat16"
PAGES = "[num_pages, page_size, num_kv_heads, head_dim]"
BOTH = f32(7, 4, 2, 8)

CASES = [
    # What is no array, or not of a kind that can be taken.
    case(*A, TypeError, f"q {NO_ARRAY}; got list", q=[1.0]),
    case(*A, TypeError, f"k {NO_ARRAY}; got NoneType", k=None),
    case(*A, TypeError, f"v {NO_ARRAY}; got numpy.float32", v=np.float32(1)),
    case(*A, TypeError, f"out {NO_ARRAY}; got str", out="out"),
    case(*P, TypeError, f"page_table {NO_ARRAY}; got list", page_table=[[2, 1], [0, -1]]),
    case(*K, TypeError, f"k_pages {NO_ARRAY}; got dict", k_pages={}),
    case(*C, TypeError, f"copies {NO_ARRAY}; got list", copies=[[0, 1]]),
    case(*M, TypeError, f"lse_b {NO_ARRAY}; got float", lse_b=1.0),
    case(*T, TypeError, f"seq_lens {NO_ARRAY}; got tuple", seq_lens=(5, 1)),
    case(*A, TypeError, f"q {FLOATS}; got float64", q=np.ones((2, 3, 4, 8))),
    case(*A, TypeError, f"q {FLOATS}; got uint8", q=np.ones((2, 3, 4, 8), np.uint8)),
    case(*A, TypeError, f"q {FLOATS}; got bool", q=np.ones((2, 3, 4, 8), bool)),
    case(*A, TypeError, f"q {FLOATS}; got complex64", q=np.ones((2, 3, 4, 8), np.complex64)),
    case(*A, TypeError, f"q {FLOATS}; got int32", q=np.ones((2, 3, 4, 8), np.int32)),
    case(*A, TypeError, f"q {FLOATS}; got float32x2", q=Producer(f32(2, 3, 4, 8), lanes=2)),
    case(*A, TypeError, f"q {FLOATS}; got float8_e5m2", q=Producer(f32(2), code=12, bits=8)),
    case(*A, TypeError, f"q {FLOATS}; got DLPack type 99", q=Producer(f32(2), code=99)),
    case(*PACKED, TypeError, "cu_seqlens_q must be int32; got int64", cu_seqlens_q=np.array([0, 1, 3])),
    case(*PACKED, TypeError, "cu_seqlens_k must be int32; got float32", cu_seqlens_k=f32(3)),
    case(*A, TypeError, "prefix_lens must be int32; got int64", prefix_lens=np.array([0, 1])),
    case(*A, TypeError, "alibi_slopes must be float32; got float64", alibi_slopes=np.ones(4)),
    case(*A, TypeError, "alibi_slopes must be float32; got float16", alibi_slopes=np.ones(4, np.float16)),
    case(*P, TypeError, "page_table must be int32; got int64", page_table=np.zeros((2, 2), np.int64)),
    case(*P, TypeError, "seq_lens must be int32; got uint32", seq_lens=np.ones(2, np.uint32)),
    case(*C, TypeError, "copies must be int32; got int64", copies=np.array([[0, 1]])),
    case(*M, TypeError, "lse_a must be float32; got float64", lse_a=np.ones((3, 4))),
    case(
        *A,
        TypeError,
        "q (numpy.ndarray of >f4) cannot be taken through DLPack: DLPack only supports native byte order.",
        q=np.ones((2, 3, 4, 8), ">f4"),
    ),
    case(
        *A,
        ValueError,
        "q must be aligned to its elements of 4 bytes",
        q=np.frombuffer(bytes(4 * 192 + 1), np.float32, offset=1).reshape(2, 3, 4, 8),
    ),
    case(*A, ValueError, "q must have at most 6 axes; got 7", q=f32(1, 1, 1, 1, 1, 1, 8)),
    *(
        case(
            op,
            make,
            TypeError,
            f"{name} is a masked array, and its mask would be ignored; use {name}.filled(...) or {name}.data",
            **{name: np.ma.masked_array(make().get(name, f32(2, 3, 4, 8)))},
        )
        for op, make, name in ((*A, "q"), (*A, "out"), (*P, "page_table"), (*K, "k_pages"))
    ),
    case(*A, TypeError, "q has no data (is it a meta or fake tensor?)", q=Producer(f32(2), with_data=False)),
    case(*A, TypeError, "k comes in a version of DLPack other than 1", k=Producer(f32(2), version=(2, 0))),
    case(*A, TypeError, "k: __dlpack__ must return a DLPack capsule; got int", k=Producer(f32(2), result=5)),
    case(
        *A,
        TypeError,
        "k (producers.Producer) cannot be taken through DLPack: not today",
        k=Producer(f32(2), error=BufferError("not today\nat line 3")),
    ),
    case(
        *A,
        TypeError,
        "k (producers.Producer) cannot be taken through DLPack: no",
        k=Producer(f32(2), error=TypeError("no")),
    ),
    case(
        *A,
        RuntimeError,
        "k (producers.Producer) cannot be taken through DLPack: out of luck",
        k=Producer(f32(2), error=RuntimeError("out of luck")),
    ),
    case(
        *A,
        TypeError,
        "q (producers.Producer) cannot be taken through DLPack: nowhere",
        q=Producer(f32(2), device_error=ValueError("nowhere")),
    ),
    case(
        *A,
        RuntimeError,
        "q must be on a CPU or CUDA device; it is on DLPack device type 10",
        q=Producer(f32(2), device=(10, 0)),
    ),
    case(
        *A,
        RuntimeError,
        "all arrays must be on one device; k is on cuda:1, the first array on cpu",
        k=Producer(f32(2), device=(2, 1)),
    ),
    case(
        *A,
        TypeError,
        "out cannot be made: producers.Producer has no __array_namespace__",
        q=Producer(f32(2, 3, 4, 8)),
    ),
    # Numbers.
    case(*A, TypeError, "causal must be a bool; got int", causal=1),
    case(*A, TypeError, "causal must be a bool; got str", causal="no"),
    case(*A, TypeError, "return_lse must be a bool; got NoneType", return_lse=None),
    case(*A, TypeError, "window_left must be an int; got float", window_left=1.5),
    case(*A, TypeError, "window_right must be an int; got NoneType", window_right=None),
    case(*A, ValueError, f"window_left must fit in 64 bits; got {2**64}", window_left=2**64),
    case(
        *A,
        ValueError,
        f"window_left must fit in 64 bits; got {-(1 << 20_000):#x}",
        window_left=-(1 << 20_000),
    ),
    case(*A, TypeError, "window_left must be an int; got numpy.ndarray", window_left=np.ones(2, int)),
    case(*A, TypeError, "softcap must be a float; got str", softcap="1"),
    case(*A, TypeError, "softcap must be a float; got numpy.ndarray", softcap=np.ones(2)),
    case(*A, ValueError, "softmax_scale does not fit in a float", softmax_scale=10**400),
    case(*A, TypeError, "softmax_scale must be a float; got list", softmax_scale=[1.0]),
    case(*PACKED, TypeError, "max_seqlen_q must be an int; got str", max_seqlen_q="3"),
    case(*P, TypeError, "num_splits must be an int; got float", num_splits=2.0),
    case(*P, TypeError, "k_scale must be a float; got str", k_scale="1"),
    case(*K, TypeError, "v_scale must be a float; got list", v_scale=[1.0]),
    case(*T, TypeError, "num_pages must be an int; got str", num_pages="3"),
    case(
        *A,
        TypeError,
        "stream must be an int, or an object with __cuda_stream__, cuda_stream or ptr; got str",
        stream="current",
    ),
    case(*A, TypeError, "stream's address must be an int; got str", stream=SimpleNamespace(ptr="5")),
    case(*A, ValueError, "stream must be an address of 0 to 64 bits; got -1", stream=-1),
    *(
        case(
            *A,
            TypeError,
            f"stream's __cuda_stream__ must give (version, address); got {pair!r}",
            stream=SimpleNamespace(__cuda_stream__=pair),
        )
        for pair in ((), (0,), (0, 5, 7), 5)
    ),
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
    case(*A, ValueError, "v must have the shape of k [2, 5, 2, 8]; got [2, 6, 2, 8]", v=f32(2, 6, 2, 8)),
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
            f"head_dim ({d}) must be a multiple of 8 from 8 to 256",
            q=f32(2, 3, 4, d),
            k=f32(2, 5, 2, d),
            v=f32(2, 5, 2, d),
        )
        for d in (0, 4, 12, 264)
    ),
    case(*A, ValueError, "num_kv_heads (0) must be at least 1", k=f32(2, 5, 0, 8), v=f32(2, 5, 0, 8)),
    case(*A, ValueError, "num_q_heads (0) must be at least 1", q=f32(2, 3, 0, 8)),
    case(*A, ValueError, "num_q_heads (3) must be a multiple of num_kv_heads (2)", q=f32(2, 3, 3, 8)),
    case(*A, ValueError, "num_q_heads (1) must be a multiple of num_kv_heads (2)", q=f32(2, 3, 1, 8)),
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
        "cu_seqlens_q[2] must equal the number of packed tokens (3); got 2",
        cu_seqlens_q=i32([0, 1, 2]),
    ),
    case(
        *PACKED,
        ValueError,
        "cu_seqlens_q must have a unit stride along its last axis; got stride 2",
        cu_seqlens_q=i32([0, 9, 1, 9, 3])[::2],
    ),
    case(*A, ValueError, "window_left must be -1 (unbounded) or at least 0; got -2", window_left=-2),
    case(*A, ValueError, "window_right must be -1 (unbounded) or at least 0; got -7", window_right=-7),
    case(*A, ValueError, "softmax_scale must be finite; got inf", softmax_scale=float("inf")),
    *(
        case(
            *A,
            ValueError,
            f"softmax_scale ({scale}) and softcap ({softcap}) must neither overflow nor vanish in float32",
            softmax_scale=float(scale.replace("inf", "1e300")),
            softcap=float(softcap),
        )
        for scale, softcap in (
            ("inf", "0"),
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
        case(*A, ValueError, f"dropout_p must lie in [0, 1); got {p}", dropout_p=float(p), dropout_seed=1)
        for p in ("1", "-0.1", "nan")
    ),
    case(*A, ValueError, "dropout_p (0.5) needs a dropout_seed; got none", dropout_p=0.5),
    case(*A, ValueError, "dropout_seed must be at least 0; got -1", dropout_seed=-1),
    case(*A, ValueError, "dropout_offset must be at least 0; got -8", dropout_offset=-8),
    case(*A, ValueError, f"dropout_seed must fit in 64 bits; got {2**63}", dropout_seed=2**63),
    case(*A, TypeError, "dropout_p must be a float; got str", dropout_p="0.1"),
    case(*A, TypeError, "dropout_seed must be an int; got float", dropout_seed=1.0),
    case(*A, TypeError, "dropout_offset must be an int; got NoneType", dropout_offset=None),
    case(*A, ValueError, "prefix_lens must have shape [batch]; got [2, 1]", prefix_lens=i32([[1], [1]])),
    case(*A, ValueError, "batch of prefix_lens (3) must equal that of q (2)", prefix_lens=i32([1, 1, 1])),
    case(*A, ValueError, "prefix_lens[1] must be at least 0; got -1", prefix_lens=i32([1, -1])),
    case(
        *A,
        ValueError,
        "alibi_slopes must have shape [num_q_heads] or [batch, num_q_heads]; got [1, 2, 4]",
        alibi_slopes=f32(1, 2, 4),
    ),
    case(*A, ValueError, "num_q_heads of alibi_slopes (2) must equal that of q (4)", alibi_slopes=f32(2)),
    case(*A, ValueError, "batch of alibi_slopes (3) must equal that of q (2)", alibi_slopes=f32(3, 4)),
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
        "k_pages must be float32 like q; got float16",
        k_pages=np.ones((3, 4, 2, 8), np.float16),
    ),
    case(
        *P,
        ValueError,
        "v_pages must have the shape of k_pages [3, 4, 2, 8]; got [2, 4, 2, 8]",
        v_pages=f32(2, 4, 2, 8),
    ),
    case(*P, ValueError, "num_q_heads (3) must be a multiple of num_kv_heads (2)", q=f32(2, 3, 8)),
    case(
        *P, ValueError, "page_size (0) must be at least 1", k_pages=f32(3, 0, 2, 8), v_pages=f32(3, 0, 2, 8)
    ),
    case(*P, ValueError, "page_table must have shape [batch, max_pages]; got [2]", page_table=i32([2, 1])),
    case(*P, ValueError, "seq_lens must have shape [batch]; got [1, 2]", seq_lens=i32([[5, 1]])),
    case(*P, ValueError, "batch of seq_lens (1) must equal that of page_table (2)", seq_lens=i32([5])),
    case(*P, ValueError, "batch of q (3) must equal that of page_table (2)", q=f32(3, 4, 8)),
    case(*P, ValueError, "max_seqlen_q belongs to packed queries; give cu_seqlens_q too", max_seqlen_q=1),
    case(
        *P,
        ValueError,
        "cu_seqlens_q[2] must equal the number of packed tokens (2); got 3",
        cu_seqlens_q=i32([0, 1, 3]),
    ),
    case(*P, ValueError, "k_scale must be finite; got nan", k_scale=float("nan")),
    case(*P, ValueError, "v_scale must be finite; got inf", v_scale=float("inf")),
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
        "v_pages must have the shape of k_pages [3, 4, 2, 8]; got [4, 4, 2, 8]",
        v_pages=f32(4, 4, 2, 8),
    ),
    case(
        *K, ValueError, "page_size (0) must be at least 1", k_pages=f32(3, 0, 2, 8), v_pages=f32(3, 0, 2, 8)
    ),
    case(*K, TypeError, "k must be float32 like k_pages; got float16", k=np.ones((2, 2, 8), np.float16)),
    case(*K, ValueError, "v must have the shape of k [2, 2, 8]; got [2, 2, 16]", v=f32(2, 2, 16)),
    case(
        *K, ValueError, "num_kv_heads of k (4) must equal that of k_pages (2)", k=f32(2, 4, 8), v=f32(2, 4, 8)
    ),
    case(
        *K, ValueError, "head_dim of k (16) must equal that of k_pages (8)", k=f32(2, 2, 16), v=f32(2, 2, 16)
    ),
    case(*K, ValueError, "batch of seq_lens (3) must equal that of page_table (2)", seq_lens=i32([1, 1, 1])),
    case(*K, ValueError, "batch of k (1) must equal that of page_table (2)", k=f32(1, 2, 8), v=f32(1, 2, 8)),
    case(*K, ValueError, "k_scale must be finite and not 0; got 0", k_scale=0.0),
    case(*K, ValueError, "v_scale must be finite and not 0; got nan", v_scale=float("nan")),
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
    # copy_pages
    case(*C, ValueError, f"v_pages must have shape {PAGES}; got [12, 2, 8]", v_pages=f32(12, 2, 8)),
    case(*C, ValueError, "k_pages must be writable; it is read-only", k_pages=read_only(f32(3, 4, 2, 8))),
    case(*C, ValueError, "copies must have shape [num_copies, 2]; got [2]", copies=i32([0, 1])),
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
        "to_v_pages must have the shape of to_k_pages [5, 4, 2, 8]; got [6, 4, 2, 8]",
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
    # check_page_table
    case(*T, ValueError, "page_table must have shape [batch, max_pages]; got [2]", page_table=i32([1, 2])),
    case(*T, ValueError, "batch of seq_lens (3) must equal that of page_table (2)", seq_lens=i32([1, 1, 1])),
    case(*T, ValueError, "page_size (0) must be at least 1", page_size=0),
    case(*T, ValueError, f"page_size {LENGTHS}; got {2**62}", page_size=2**62),
    case(*T, ValueError, "num_pages (-1) must be at least 0", num_pages=-1),
    case(*T, ValueError, "page_table[0, 0] must lie in [0, num_pages = 2); got 2", num_pages=2),
    case(*T, ValueError, "seq_lens[0] must lie in [0, max_pages * page_size = 4]; got 5", page_size=2),
]


@pytest.mark.parametrize(("op", "make", "overrides", "error", "message"), CASES)
def test_refused(
    op: str, make: Callable[[], Arguments], overrides: Arguments, error: type[Exception], message: str
) -> None:
    arguments = {**make(), **overrides}
    arrays = {
        name: (value, value.copy())
        for name, value in arguments.items()
        if isinstance(value, np.ndarray) and value.nbytes < 2**20
    }
    with pytest.raises(error) as caught:
        OPERATORS[op](**arguments)
    assert type(caught.value) is error
    assert str(caught.value) == f"{op}: {message}"
    for name, (array, before) in arrays.items():
        np.testing.assert_array_equal(array, before, err_msg=f"{name} was changed")


@pytest.mark.parametrize(("op", "make"), [A, PACKED, P, K, C, M, T], ids=lambda x: getattr(x, "__name__", x))
def test_the_calls_above_are_right_otherwise(op: str, make: Callable[[], Arguments]) -> None:
    OPERATORS[op](**make())


@pytest.mark.parametrize("op", OPERATORS)
def test_misuse_of_the_signature(op: str) -> None:
    with pytest.raises(TypeError, match=r"missing .* required"):
        OPERATORS[op]()
    with pytest.raises(TypeError, match="unexpected keyword argument 'window'"):
        OPERATORS[op](window=3)
    with pytest.raises(TypeError, match="positional"):
        OPERATORS[op](*range(20))


def test_causes_are_kept() -> None:
    problem = BufferError("not today")
    with pytest.raises(TypeError) as caught:
        octavo.attention(**{**dense(), "k": Producer(f32(2), error=problem)})
    assert caught.value.__cause__ is problem


@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError("full"), SystemExit(3)])
def test_what_is_no_fault_of_the_array_passes(error: BaseException) -> None:
    with pytest.raises(type(error)) as caught:
        octavo.attention(**{**dense(), "k": Producer(f32(2), error=error)})
    assert caught.value is error


@pytest.mark.skipif(gpu_count() > 0, reason="there is a GPU")
def test_cuda_arrays_where_cuda_cannot_be_used() -> None:
    q = Producer(f32(2, 3, 4, 8), device=(2, 0))
    with pytest.raises(RuntimeError, match=r"^attention: CUDA arrays cannot be used here: .+") as caught:
        octavo.attention(**{**dense(), "q": q})
    assert type(caught.value) is RuntimeError
    assert not q.requests  # not even asked for


class TestTorch:
    @pytest.fixture(autouse=True)
    def _torch(self) -> None:
        self.torch = pytest.importorskip("torch", reason="torch is not installed")

    def refused(self, message: str, error: type[Exception] = TypeError, **overrides: Any) -> None:
        arguments = {name: self.torch.from_numpy(x) for name, x in dense().items()}
        with pytest.raises(error, match=f"^attention: {message}"):
            octavo.attention(**{**arguments, **overrides})

    def test_gradients(self) -> None:
        needs_grad = self.torch.ones(2, 5, 2, 8, requires_grad=True)
        why = "requires grad, and this call has no backward; use"
        self.refused(rf"k {why} k.detach\(\) or torch.no_grad\(\)$", k=needs_grad)
        self.refused(rf"v {why} v.detach\(\)", v=needs_grad * 2)
        self.refused(rf"out {why} out.detach\(\)", out=self.torch.ones(2, 3, 4, 8, requires_grad=True))
        with self.torch.no_grad():
            octavo.attention(self.torch.ones(2, 3, 4, 8), needs_grad, needs_grad)

    def test_negative_bit(self) -> None:
        imaginary = self.torch.ones(2, 5, 2, 8, dtype=self.torch.complex64).conj().imag
        self.refused(r"k has its negative bit set; use k.resolve_neg\(\)$", k=imaginary)

    def test_tensors_without_memory(self) -> None:
        torch = self.torch
        through = r"k \(torch.Tensor of torch.float32\) cannot be taken through DLPack: "
        self.refused(through + ".*meta.*$", k=torch.ones(2, 5, 2, 8, device="meta"))
        self.refused(through, k=torch.ones(2, 5).to_sparse())
        fake = pytest.importorskip("torch._subclasses.fake_tensor")
        with fake.FakeTensorMode():
            pretended = torch.ones(2, 5, 2, 8)
        self.refused(r"k has no data \(is it a meta or fake tensor\?\)$", k=pretended)

    def test_dtypes(self) -> None:
        torch = self.torch
        self.refused(
            "q must be float32, float16 or bfloat16; got float64$", q=torch.ones(2, 3, 4, 8).double()
        )
        self.refused(
            "q must be float32, float16 or bfloat16; got complex64$", q=torch.ones(2, dtype=torch.complex64)
        )
        lens = torch.tensor([1, 2])
        self.refused("prefix_lens must be int32; got int64$", prefix_lens=lens)


class TestJax:
    @pytest.fixture(autouse=True)
    def _jax(self) -> None:
        self.jax = pytest.importorskip("jax", reason="jax is not installed")

    def test_results_cannot_be_written_to_jax_arrays(self) -> None:
        why = "is written to and cannot be a JAX array, which is immutable"
        cases: list[tuple[str, Arguments, str]] = [
            ("attention", {**dense(), "out": f32(2, 3, 4, 8)}, "out"),
            ("paged_attention", {**paged(), "out": f32(2, 4, 8)}, "out"),
            ("append_kv", append(), "k_pages"),
            ("append_kv", append(), "v_pages"),
            ("copy_pages", copy(), "k_pages"),
            ("copy_pages", copy(), "v_pages"),
            ("copy_pages", between(), "to_k_pages"),
            ("copy_pages", between(), "to_v_pages"),
        ]
        for op, arguments, name in cases:
            arguments[name] = self.jax.numpy.asarray(arguments[name])
            before = np.array(arguments[name])
            with pytest.raises(TypeError, match=re.escape(f"{op}: {name} {why}")):
                OPERATORS[op](**arguments)
            np.testing.assert_array_equal(arguments[name], before)

    def test_tracers(self) -> None:
        call = dense()
        with pytest.raises(TypeError, match=r"^attention: q .*Tracer"):
            self.jax.jit(lambda q: octavo.attention(q, call["k"], call["v"]))(call["q"])

    def test_dtypes(self) -> None:
        with pytest.raises(TypeError, match=r"^attention: q must be float32, float16 or bfloat16; got int8$"):
            octavo.attention(**{**dense(), "q": self.jax.numpy.zeros((2, 3, 4, 8), "int8")})


@pytest.mark.parametrize(
    "dtype", [ml_dtypes.float8_e4m3fn, ml_dtypes.int4, np.float64, "f4,f4", object, "datetime64[s]"]
)
def test_every_other_numpy_dtype_is_refused(dtype: Any) -> None:
    with pytest.raises(TypeError, match=r"^attention: q "):
        octavo.attention(**{**dense(), "q": np.zeros((2, 3, 4, 8), dtype)})


def test_set_num_threads() -> None:
    before = octavo.get_num_threads()
    for wrong in (0, -5):
        with pytest.raises(
            ValueError, match=rf"^set_num_threads: num_threads \({wrong}\) must be at least 1$"
        ):
            octavo.set_num_threads(wrong)
    with pytest.raises(TypeError, match=r"^set_num_threads: num_threads must be an int; got float$"):
        octavo.set_num_threads(2.0)  # type: ignore[arg-type]
    assert octavo.get_num_threads() == before
    octavo.set_num_threads(before)


def test_exported_exceptions() -> None:
    assert issubclass(octavo.OutOfPages, RuntimeError)
    assert issubclass(octavo.InvalidSequence, ValueError)
    allocator = octavo.PageAllocator(1, 4)
    sequence = allocator.create()
    with pytest.raises(octavo.OutOfPages):
        allocator.extend(sequence, 5)
    allocator.free(sequence)
    with pytest.raises(octavo.InvalidSequence) as caught:
        allocator.length(sequence)
    assert type(caught.value).__module__ == "octavo"
