"""octavo.empty_cache: the arrays of a cache, as the operators take them."""

from __future__ import annotations

import importlib
import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import octavo
from support import oracle

KINDS = ("float32", "float16", "bfloat16", "int8", "float8_e4m3fn", "float8_e5m2", "int4", "int8_int4")
SHAPE = (5, 16, 2, 64)
BYTES_PER_TOKEN = dict(
    zip(KINDS, (1024, 512, 512, 256 + 16, 256 + 16, 256 + 16, 128 + 16, 128 + 64 + 16), strict=True)
)
ERRORS = dict(zip(KINDS, (1e-5, 0.003, 0.02, 0.02, 0.06, 0.2, 0.3, 0.2), strict=True))


def array_of(library: str) -> Any:
    if library == "numpy":
        return np.zeros(1, np.float32)
    module = pytest.importorskip({"jax": "jax.numpy"}.get(library, library))
    return module.zeros(1)


@pytest.mark.parametrize("library", ["none", "numpy", "torch", "jax"])
@pytest.mark.parametrize("head_dim_v", [None, 40])
@pytest.mark.parametrize("kind", KINDS)
def test_appended_and_attended(kind: str, head_dim_v: int | None, library: str) -> None:
    like = None if library == "none" else array_of(library)
    cache = octavo.empty_cache(*SHAPE, kind, like=like, head_dim_v=head_dim_v)
    of_values = head_dim_v or 64
    assert cache.k_pages.shape == (5, 16, 2, 32 if kind == "int4" else 64)
    assert cache.v_pages.shape == (5, 16, 2, of_values // 2 if kind.endswith("int4") else of_values)
    if head_dim_v is None:
        assert cache.bytes_per_token == BYTES_PER_TOKEN[kind]
    pages = octavo.PageAllocator.from_memory(
        1000 * cache.bytes_per_token,
        page_size=1,
        num_layers=1,
        num_kv_heads=2,
        head_dim=64,
        dtype=kind,
        head_dim_v=head_dim_v,
    )
    assert pages.num_pages == 1000
    assert (cache.k_scales is None) == (kind in KINDS[:3])
    assert (cache.kv_dtype is None) == (not kind.endswith("int4"))
    if like is not None:
        assert {type(x) for x in cache.arrays.values()} == {type(like)}
    new = kind if kind in KINDS[1:3] else "float32"
    rng = np.random.default_rng(0)
    k, v = (rng.standard_normal((40, 2, dim)).astype(oracle.NUMPY_DTYPES[new]) for dim in (64, of_values))
    q = rng.standard_normal((1, 4, 64)).astype(np.float32).astype(oracle.NUMPY_DTYPES[new])
    exact = oracle.attention(q.astype(float), k.astype(float), v.astype(float), [1], [40], dtype=new).out
    table, moved = np.array([[4, 2, 1]], np.int32), np.array([[4, 2, 0]], np.int32)
    lengths, cu_seqlens, copies = (np.array(x, np.int32) for x in ([40], [0, 40], [[1, 0]]))
    arrays = [k, v, q, table, lengths, cu_seqlens, copies, moved]
    if library == "torch":
        torch = importlib.import_module("torch")
        arrays = [
            torch.from_numpy(x.astype(np.float32)).to(getattr(torch, new)) if i < 3 else torch.from_numpy(x)
            for i, x in enumerate(arrays)
        ]
    k, v, q, table, lengths, cu_seqlens, copies, moved = arrays
    if library == "jax":
        octavo_jax = importlib.import_module("octavo.jax")
        names = list(cache.arrays)
        written = octavo_jax.append_kv(
            k, v, page_table=table, seq_lens=lengths, cu_seqlens=cu_seqlens, **cache.arguments
        )
        cache = cache._replace(**dict(zip(names, written, strict=True)))
        copied = octavo_jax.copy_pages(copies=copies, **cache.arrays)
        cache = cache._replace(**dict(zip(names, copied, strict=True)))
        out = octavo_jax.paged_attention(q, page_table=moved, seq_lens=lengths, **cache.arguments)
    else:
        octavo.append_kv(k, v, page_table=table, seq_lens=lengths, cu_seqlens=cu_seqlens, **cache.arguments)
        other = octavo.empty_cache(*SHAPE, kind, like=like, head_dim_v=head_dim_v)
        octavo.copy_pages(copies=copies, **cache.arrays)
        out = octavo.paged_attention(q, page_table=moved, seq_lens=lengths, **cache.arguments)
        all_pages = (
            table[0].repeat(2, 1).T.contiguous() if library == "torch" else np.stack([table[0]] * 2, 1)
        )
        octavo.copy_pages(copies=all_pages, **cache.arrays, **other.to_arrays)
        again = octavo.paged_attention(q, page_table=table, seq_lens=lengths, **other.arguments)
        assert bool((out == again).all())
    assert tuple(out.shape) == (1, 4, of_values)
    out = out.float().numpy() if library == "torch" else np.asarray(out).astype(np.float32)
    assert np.abs(out - exact).max() < ERRORS[kind] * np.abs(exact).max()


@pytest.mark.parametrize("kind", ["float16", "int8", "int4"])
def test_jax_programs_take_a_cache(kind: str) -> None:
    jax = pytest.importorskip("jax")
    octavo_jax = importlib.import_module("octavo.jax")
    tables = {"page_table": np.array([[4]], np.int32), "seq_lens": np.ones(1, np.int32)}

    def append(cache: octavo.PagedCache, k: Any) -> octavo.PagedCache:
        written = octavo_jax.append_kv(k, k, **tables, **cache.arguments)
        return cache._replace(**dict(zip(cache.arrays, written, strict=True)))

    cache = octavo.empty_cache(*SHAPE, kind, like=jax.numpy.zeros(1))
    k = jax.numpy.ones((1, 2, 64), "float16")
    expected = append(cache, k)
    addresses = [x.unsafe_buffer_pointer() for x in cache.arrays.values()]
    written = jax.jit(append, donate_argnums=0)(cache, k)
    assert written.kv_dtype == cache.kv_dtype
    assert [x.unsafe_buffer_pointer() for x in written.arrays.values()] == addresses
    for x, y in zip(written.arrays.values(), expected.arrays.values(), strict=True):
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()
    made = jax.jit(lambda x: octavo.empty_cache(*SHAPE, kind, like=x))(k)
    assert made.k_pages.shape == cache.k_pages.shape


@pytest.mark.parametrize("kind", KINDS)
def test_memory_has_heads_before_slots(kind: str) -> None:
    """But for floats on the CPU; the device "meta" stands for others."""
    torch = pytest.importorskip("torch")
    is_float = kind in ("float32", "float16", "bfloat16")
    for like, is_on_cpu in ((None, True), (torch.zeros(1), True), (torch.zeros(1, device="meta"), False)):
        for x in octavo.empty_cache(*SHAPE, kind, like=like).arrays.values():
            assert tuple(x.shape[:3]) == SHAPE[:3]
            in_order = x if is_float and is_on_cpu else x.swapaxes(1, 2)
            assert in_order.is_contiguous() if hasattr(x, "is_contiguous") else in_order.flags.c_contiguous


def test_static_scales() -> None:
    cache = octavo.empty_cache(*SHAPE, "int8", token_scales=False)
    assert list(cache.arguments) == ["k_pages", "v_pages"] and cache.bytes_per_token == 256


@pytest.mark.parametrize("dtype", [np.float16, np.dtype(np.float16), ml_dtypes.bfloat16, np.dtype(np.int8)])
def test_dtypes_of_libraries(dtype: Any) -> None:
    assert octavo.empty_cache(*SHAPE, dtype).k_pages.dtype == np.dtype(dtype)
    torch = pytest.importorskip("torch")
    name = np.dtype(dtype).name
    cache = octavo.empty_cache(*SHAPE, getattr(torch, name), like=torch.zeros(1))
    assert cache.k_pages.dtype == getattr(torch, name)


def test_devices() -> None:
    torch = pytest.importorskip("torch")
    cache = octavo.empty_cache(*SHAPE, "int8_int4", like=torch.zeros(1, device="meta"))
    assert {str(x.device) for x in cache.arrays.values()} == {"meta"}


@pytest.mark.gpu
@pytest.mark.parametrize("library", ["torch", "cupy"])
@pytest.mark.parametrize("kind", KINDS)
def test_on_a_gpu(kind: str, library: str) -> None:
    module = pytest.importorskip(library)
    like = module.zeros(1, device="cuda") if library == "torch" else module.zeros(1)
    cache = octavo.empty_cache(*SHAPE, kind, like=like)
    assert cache.bytes_per_token == BYTES_PER_TOKEN[kind]
    assert all(x.device == like.device for x in cache.arrays.values())
    is_named = kind.endswith("int4") or (library == "cupy" and kind.startswith("float8"))
    assert (cache.kv_dtype is not None) == is_named


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"num_pages": -1}, ValueError, "num_pages (-1) must be at least 0"),
        ({"page_size": 0}, ValueError, "page_size (0) must be at least 1"),
        ({"head_dim": 2.5}, TypeError, "empty_cache: head_dim must be an int; got float"),
        ({"num_pages": "4"}, TypeError, "empty_cache: num_pages must be an int; got str"),
        ({"rotate_keys": 1}, TypeError, "empty_cache: rotate_keys must be a bool; got int"),
        ({"token_scales": "no"}, TypeError, "empty_cache: token_scales must be a bool; got str"),
        ({"token_scales": None}, TypeError, "empty_cache: token_scales must be a bool; got NoneType"),
        (
            {"dtype": "float32", "rotate_keys": np.True_},
            ValueError,
            "empty_cache: rotate_keys belongs to codes of 8 or 4 bits; dtype is float32",
        ),
        (
            {"dtype": "int2"},
            ValueError,
            "empty_cache: dtype must be one of float32, float16, bfloat16, int8, ",
        ),
        ({"dtype": "int4", "head_dim": 65}, ValueError, "empty_cache: head_dim (65) must be even for int4"),
        ({"head_dim_v": 0}, ValueError, "empty_cache: head_dim_v (0) must be at least 1"),
        (
            {"dtype": "int8_int4", "head_dim_v": 31},
            ValueError,
            "empty_cache: head_dim_v (31) must be even for int4, two numbers in a byte",
        ),
        ({"dtype": "int4", "token_scales": False}, ValueError, "token_scales must be True for int4"),
        (
            {"like": [1]},
            TypeError,
            "empty_cache: like must be an array of NumPy, PyTorch, CuPy or JAX, or None",
        ),
    ],
)
def test_errors(change: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments = {
        "num_pages": 5,
        "page_size": 16,
        "num_kv_heads": 2,
        "head_dim": 64,
        "dtype": "int8",
        **change,
    }
    with pytest.raises(error, match=re.escape(message)):
        octavo.empty_cache(**arguments)


def test_a_bool_may_be_of_numpy() -> None:
    assert octavo.empty_cache(5, 16, 2, 64, "float32", rotate_keys=np.False_).rotate_keys is False
    assert octavo.empty_cache(5, 16, 2, 64, "int8", rotate_keys=np.True_).rotate_keys is True
    assert octavo.empty_cache(5, 16, 2, 64, "int8", token_scales=np.False_).k_scales is None


def test_a_bool_is_a_number_as_it_is_for_operators() -> None:
    assert octavo.empty_cache(True, 16, True, 64, "int8").k_pages.shape == (1, 16, 1, 64)
