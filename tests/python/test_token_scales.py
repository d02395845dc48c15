"""Caches of codes with a scale of each token and head, which append_kv computes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import octavo
from support import oracle
from support.quantised import (
    KINDS,
    OPTIONS,
    Cache,
    append_packed,
    awkward_rows,
    check_spoilt_queries,
    dequantise,
    filled,
    quantise,
    split,
    unused_slots,
)

NEW = ("float32", "float16", "bfloat16")


@pytest.mark.parametrize("new", NEW)
@pytest.mark.parametrize("head_dim", [8, 80, 256])
@pytest.mark.parametrize("kind", KINDS)
def test_codes_and_scales(kind: str, head_dim: int, new: str) -> None:
    with np.errstate(over="ignore"):
        rows = awkward_rows(head_dim).astype(oracle.NUMPY_DTYPES[new])
    cache = Cache.empty(kind, 1, len(rows), 2, head_dim)
    k, v = np.stack([rows, rows[::-1]], 1), np.stack([-rows, rows], 1)
    append_packed(cache, k, v, np.zeros((1, 1), np.int32), len(rows))
    for codes, new_rows, pages, scales in zip(
        split(kind), (k, v), (cache.k_pages, cache.v_pages), (cache.k_scales, cache.v_scales), strict=True
    ):
        wanted_codes, wanted_scales = quantise(new_rows, codes)
        assert scales[0].tobytes() == wanted_scales.tobytes()
        assert pages[0].tobytes() == wanted_codes.tobytes()


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_with_nan_or_infinity_spoils_no_other(kind: str) -> None:
    rows = np.random.default_rng(0).standard_normal((5, 2, 16)).astype(np.float32)
    rows[1, 0, 3], rows[2, 1, 0], rows[3, 1, 15] = np.nan, np.inf, -np.inf
    cache = Cache.empty(kind, 1, 5, 2, 16)
    append_packed(cache, rows, rows, np.zeros((1, 1), np.int32), 5)
    for values in cache.values():
        spoilt = np.isnan(values).any(-1)[0]
        assert np.argwhere(spoilt).tolist() == [[1, 0], [2, 1], [3, 1]]
    assert np.array_equal(cache.k_pages[0].view(np.uint8), quantise(rows, split(kind)[0])[0].view(np.uint8))


def decode(
    cache: Cache, q: NDArray[Any], table: NDArray[Any], lengths: NDArray[Any], **options: Any
) -> tuple[NDArray[Any], NDArray[Any]]:
    out, lse = octavo.paged_attention(
        q, page_table=table, seq_lens=lengths, return_lse=True, **cache.arguments, **options
    )
    return out, lse


@pytest.mark.parametrize("num_tokens", [1, 3, 40])
@pytest.mark.parametrize("group_size", [1, 4, 16])
@pytest.mark.parametrize("kind", KINDS)
def test_a_query_with_nan_or_infinity_spoils_no_other(kind: str, group_size: int, num_tokens: int) -> None:
    """Queries of a KV head share its tiles, and spoil only their own result."""
    cache, table, lengths = filled(kind, [70, 333], head_dim=64)
    q = np.random.default_rng(0).standard_normal((2 * num_tokens, 2 * group_size, 64)).astype(np.float16)
    options = {"cu_seqlens_q": np.array([0, num_tokens, 2 * num_tokens], np.int32)}
    check_spoilt_queries(
        lambda q: decode(cache, q, table, lengths, **options), q, counts=(num_tokens, num_tokens)
    )


def check_against_oracle(
    cache: Cache, q: NDArray[Any], table: NDArray[Any], lengths: NDArray[Any], **options: Any
) -> None:
    out, lse = decode(cache, q, table, lengths, **options)
    with np.errstate(invalid="ignore"):
        k, v = (oracle.gather_pages(x, table, lengths.tolist()) for x in cache.values())
    options = {name: x for name, x in options.items() if name not in ("num_splits", "batch_invariant")}
    options.pop("shared_prefix_len", None)
    counts = np.diff(options.pop("cu_seqlens_q", np.arange(len(q) + 1))).tolist()
    options.setdefault("causal", True)
    reference = oracle.attention(
        q.astype(np.float64), k, v, counts, lengths.tolist(), dtype=q.dtype.name, **options
    )
    reference.check(out, lse)


@pytest.mark.parametrize("head_dim", [8, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("kind", KINDS)
def test_attention_over_appended_tokens(kind: str, head_dim: int) -> None:
    cache, table, lengths = filled(kind, [70, 1, 33], head_dim=head_dim)
    q = np.random.default_rng(head_dim).standard_normal((3, 8, head_dim)).astype(np.float32)
    check_against_oracle(cache, q, table, lengths)


VALUE_DIMS = ((192, 128), (128, 64), (72, 40), (8, 256), (264, 512))


@pytest.mark.parametrize("new", NEW)
@pytest.mark.parametrize("dims", VALUE_DIMS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_codes_and_scales_of_values_of_another_dim(kind: str, dims: tuple[int, int], new: str) -> None:
    with np.errstate(over="ignore"):
        k, v = (awkward_rows(dim).astype(oracle.NUMPY_DTYPES[new]) for dim in dims)
    cache = Cache.empty(kind, 1, len(k), 2, dims[0], head_dim_v=dims[1])
    keys, values = np.stack([k, k[::-1]], 1), np.stack([-v, v], 1)
    append_packed(cache, keys, values, np.zeros((1, 1), np.int32), len(k))
    for codes, new_rows, pages, scales in zip(
        split(kind),
        (keys, values),
        (cache.k_pages, cache.v_pages),
        (cache.k_scales, cache.v_scales),
        strict=True,
    ):
        wanted_codes, wanted_scales = quantise(new_rows, codes)
        assert scales[0].tobytes() == wanted_scales.tobytes()
        assert pages[0].tobytes() == wanted_codes.tobytes()


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "+".join(options))
@pytest.mark.parametrize("dims", VALUE_DIMS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_values_of_another_dim(kind: str, dims: tuple[int, int], options: dict[str, Any]) -> None:
    cache, table, lengths = filled(kind, [190, 140, 150, 629], head_dim=dims[0], head_dim_v=dims[1])
    num_queries = options.get("cu_seqlens_q", [4])[-1]
    q = np.random.default_rng(5).standard_normal((num_queries, 8, dims[0])).astype(np.float32)
    check_against_oracle(cache, q, table, lengths, **options)


@pytest.mark.parametrize("group_size", [1, 4, 8, 16])
@pytest.mark.parametrize("page_size", [1, 5, 16, 256])
@pytest.mark.parametrize("kind", KINDS)
def test_page_sizes_and_groups(kind: str, page_size: int, group_size: int) -> None:
    cache, table, lengths = filled(kind, [300, 7], page_size=page_size)
    q = np.random.default_rng(group_size).standard_normal((2, 2 * group_size, 64)).astype(np.float32)
    check_against_oracle(cache, q, table, lengths)


@pytest.mark.parametrize(
    "options",
    OPTIONS,
    ids=lambda options: "+".join(options),
)
@pytest.mark.parametrize("kind", KINDS)
def test_every_option(kind: str, options: dict[str, Any]) -> None:
    cache, table, lengths = filled(kind, [190, 140, 150, 629], head_dim=72)
    num_queries = options.get("cu_seqlens_q", [4])[-1]
    q = np.random.default_rng(5).standard_normal((num_queries, 8, 72)).astype(np.float32)
    check_against_oracle(cache, q, table, lengths, **options)


@pytest.mark.parametrize("kind", KINDS)
def test_shared_prefix(kind: str) -> None:
    cache, table, lengths = filled(kind, [200])
    table, lengths = np.repeat(table, 3, 0), np.array([200, 170, 0], np.int32)
    q = np.random.default_rng(5).standard_normal((3, 8, 64)).astype(np.float32)
    out, lse = decode(cache, q, table, lengths)
    assert (out[2] == 0).all() and np.isneginf(lse[2]).all()
    shared = decode(cache, q, table, lengths, shared_prefix_len=160)
    for x, y in zip(shared, (out, lse), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)
    check_against_oracle(cache, q[:2], table[:2], lengths[:2], shared_prefix_len=160)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("factor", [1e-6, 1e4, "mixed"])
def test_values_of_any_size(kind: str, factor: Any) -> None:
    if factor == "mixed":
        if kind == "int4":
            pytest.skip("float16 has no scales for these")
        factor = 10.0 ** np.random.default_rng(1).integers(-3, 4, (120, 1, 1))
    cache, table, lengths = filled(kind, [120], factors=factor)
    q = np.random.default_rng(2).standard_normal((1, 4, 64)).astype(np.float32)
    check_against_oracle(cache, q, table, lengths)


@pytest.mark.parametrize("page_size", [5, 16, 256])
@pytest.mark.parametrize("counts", [(1, 1), (70, 20)])
@pytest.mark.parametrize("kind", KINDS)
def test_unused_slots_may_hold_any_code(kind: str, counts: tuple[int, int], page_size: int) -> None:
    """Those of NaN, 0x7f and 0xff in float8_e4m3fn, too: with scales that make numbers of the others."""
    cache, table, lengths = filled(kind, [70, 33], page_size=page_size)
    q = np.random.default_rng(2).standard_normal((sum(counts), 4, 64)).astype(np.float32)
    options = {"cu_seqlens_q": np.cumsum([0, *counts], dtype=np.int32)}
    expected = decode(cache, q, table, lengths, **options)
    unused = unused_slots(cache, table, lengths)
    assert unused[table[1, 32 // page_size]].any()  # in pages that are used, too
    for code in (0x7F, 0xFF):
        for scale in (1.0, np.nan):
            cache.k_pages.view(np.uint8)[unused], cache.v_pages.view(np.uint8)[unused] = code, code
            cache.k_scales[unused], cache.v_scales[unused] = scale, scale
            for x, y in zip(decode(cache, q, table, lengths, **options), expected, strict=True):
                assert x.tobytes() == y.tobytes()


def test_codes_made_elsewhere() -> None:
    """int8 -128, which append_kv never writes, scales of 0 and below, and every pair of int4."""
    rng = np.random.default_rng(4)
    cache = Cache.empty("int8", 2, 16, 1, 16)
    cache.k_pages[:], cache.v_pages[:] = rng.integers(-128, 128, (2, 2, 16, 1, 16))
    cache.k_pages[0, 3], cache.v_pages[0, 5] = -128, -128
    cache.k_scales[:], cache.v_scales[:] = rng.standard_normal((2, 2, 16, 1)) / 100
    cache.v_scales[0, 2] = 0
    table, lengths = np.array([[1, 0]], np.int32), np.array([27], np.int32)
    q = rng.standard_normal((1, 2, 16)).astype(np.float32)
    check_against_oracle(cache, q, table, lengths)
    cache = Cache.empty("int4", 2, 16, 1, 16)
    cache.k_pages[:] = np.arange(256, dtype=np.uint8).reshape(2, 16, 1, 8)
    cache.v_pages[:] = cache.k_pages[::-1]
    cache.k_scales[:], cache.v_scales[:] = rng.standard_normal((2, 2, 16, 1, 2)) / 10
    check_against_oracle(cache, q, table, lengths)


def head_major(array: NDArray[Any]) -> NDArray[Any]:
    """The same numbers, in memory that has heads before slots."""
    return np.ascontiguousarray(np.swapaxes(array, 1, 2)).swapaxes(1, 2)


def beside_each_other(a: NDArray[Any], b: NDArray[Any]) -> list[NDArray[Any]]:
    """Views of one array [num_pages, page_size, num_kv_heads, 2, ...] with these numbers."""
    both = np.stack([a, b], 3)
    return [both[:, :, :, i] for i in range(2)]


def inline(pages: NDArray[Any], scales: NDArray[Any]) -> list[NDArray[Any]]:
    """Views of one array of bytes with a row of codes and then its scale, as in vLLM."""
    row = pages.shape[-1]
    both = np.zeros((*pages.shape[:3], row + 4), np.uint8)
    both[..., :row] = pages.view(np.uint8)
    views = both[..., :row].view(pages.dtype), both[..., row:].view(scales.dtype)
    views[1][:] = scales.reshape(views[1].shape)
    return [views[0], views[1] if scales.ndim == 4 else views[1][..., 0]]


def relaid(cache: Cache, layout: str) -> Cache:
    arrays = cache.k_pages, cache.v_pages, cache.k_scales, cache.v_scales
    if layout == "head-major":
        return Cache(cache.kind, *map(head_major, arrays))
    if layout == "beside each other":
        pages = arrays[:2] if cache.kind == "int8_int4" else beside_each_other(*arrays[:2])
        scales = arrays[2:] if cache.kind == "int8_int4" else beside_each_other(*arrays[2:])
        return Cache(cache.kind, *pages, *scales)
    (k_pages, k_scales), (v_pages, v_scales) = inline(*arrays[::2]), inline(*arrays[1::2])
    if layout == "inline keys, head-major values":
        v_pages, v_scales = map(head_major, arrays[1::2])
    elif layout == "head-major keys, inline values":
        k_pages, k_scales = map(head_major, arrays[::2])
    return Cache(cache.kind, k_pages, v_pages, k_scales, v_scales)


LAYOUTS = [
    "head-major",
    "beside each other",
    "inline",
    "inline keys, head-major values",
    "head-major keys, inline values",
]


@pytest.mark.parametrize("page_size", [1, 5, 16, 256])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_layouts(kind: str, layout: str, page_size: int) -> None:
    """What lies elsewhere is written and read alike, also where keys and values have other strides."""
    cache, table, lengths = filled(kind, [71, 34], page_size=page_size)
    other = relaid(cache, layout)
    q, k, v = np.random.default_rng(3).standard_normal((3, 2, 2, 64)).astype(np.float32)
    for each in (cache, other):
        octavo.append_kv(k, v, page_table=table, seq_lens=lengths, **each.arguments)
    for x, y in zip(cache.arguments.values(), other.arguments.values(), strict=True):
        assert isinstance(x, str) or x.tobytes() == y.tobytes()
    for x, y in zip(decode(cache, q, table, lengths), decode(other, q, table, lengths), strict=True):
        assert x.tobytes() == y.tobytes()


@pytest.mark.parametrize("kind", KINDS)
def test_copies(kind: str) -> None:
    """Copied pages give the same bits, in this cache and in another one."""
    cache, table, lengths = filled(kind, [40], num_pages=8)
    other = Cache.empty(kind, 5, 16, 2, 64)
    q = np.random.default_rng(3).standard_normal((1, 4, 64)).astype(np.float32)
    out, lse = decode(cache, q, table, lengths)
    arrays = {name: x for name, x in cache.arguments.items() if name != "kv_dtype"}
    to = {f"to_{name}": x for name, x in other.arguments.items() if name != "kv_dtype"}
    moved = np.array([[4, 0, 2]], np.int32)
    octavo.copy_pages(copies=np.stack([table[0], moved[0]], 1), **arrays, **to)
    free = np.setdiff1d(np.arange(8, dtype=np.int32), table)[None, :3]
    octavo.copy_pages(copies=np.stack([table[0], free[0]], 1), **arrays)
    for x, y in zip(decode(cache, q, table, lengths), (out, lse), strict=True):
        assert x.tobytes() == y.tobytes()
    cache.k_pages[table], cache.k_scales[table] = other.k_pages[1], np.nan
    for again in (decode(cache, q, free, lengths), decode(other, q, moved, lengths)):
        for x, y in zip(again, (out, lse), strict=True):
            assert x.tobytes() == y.tobytes()
    assert np.isnan(other.k_scales[1]).all()  # not copied to


@pytest.mark.parametrize("kind", KINDS)
def test_accuracy(kind: str) -> None:
    """Scales of each token and head leave the errors that the codes have."""
    cache, table, _ = filled(kind, [400], head_dim=128)
    rng = np.random.default_rng([16, 128])
    rng.permutation(len(cache.k_pages))
    k, v = rng.standard_normal((2, 400, 2, 128)).astype(np.float32)
    for rows, scales, codes in zip((k, v), (cache.k_scales, cache.v_scales), split(kind), strict=True):
        pages, own = quantise(rows, codes)
        worst = {"int8": 1 / 254, "float8_e4m3fn": 1 / 16, "float8_e5m2": 1 / 8, "int4": 0.55 / 7.5}[codes]
        error = np.abs(dequantise(pages, own, codes) - rows).max(-1)
        assert (error <= worst * np.abs(rows).max(-1) * 1.001).all()
        assert oracle.gather_pages(scales, table, [400]).tobytes() == own.tobytes()


@pytest.mark.parametrize("kind", ["int8", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("shape", ["one", "each head"])
def test_static_scales_in_memory(kind: str, shape: str) -> None:
    """An array in place of a number gives the same bits."""
    rng = np.random.default_rng(6)
    k, v = rng.standard_normal((2, 50, 3, 40)).astype(np.float16)
    q = rng.standard_normal((1, 6, 40)).astype(np.float16)
    table, lengths = np.array([[1, 3, 0, 2]], np.int32), np.array([50], np.int32)
    numbers = {"k_scale": 0.037, "v_scale": 0.0421}
    length = 1 if shape == "one" else 3
    arrays = {name: np.full(length, x, np.float32) for name, x in numbers.items()}
    results = []
    for scales in (numbers, arrays):
        cache = Cache.empty(kind, 4, 16, 3, 40)
        pages = {"k_pages": cache.k_pages, "v_pages": cache.v_pages}
        cu_seqlens = np.array([0, 50], np.int32)
        tables = {"page_table": table, "seq_lens": lengths}
        octavo.append_kv(k, v, cu_seqlens=cu_seqlens, **pages, **tables, **scales)
        out, lse = octavo.paged_attention(q, return_lse=True, **pages, **tables, **scales)
        results.append((cache.k_pages, cache.v_pages, out, lse))
    for x, y in zip(*results, strict=True):
        assert x.tobytes() == y.tobytes()


def test_static_scales_of_heads() -> None:
    """Each KV head has its own."""
    rng = np.random.default_rng(7)
    k, v = rng.standard_normal((2, 20, 3, 64)).astype(np.float32) * [[[1], [30], [0.01]]]
    scales = {
        name: (np.abs(x).max((0, 2)) / 127).astype(np.float32) for name, x in (("k_scale", k), ("v_scale", v))
    }
    cache = Cache.empty("int8", 2, 16, 3, 64)
    tables = {"page_table": np.array([[1, 0]], np.int32), "seq_lens": np.array([20], np.int32)}
    pages = {"k_pages": cache.k_pages, "v_pages": cache.v_pages}
    new = (k.astype(np.float32), v.astype(np.float32))
    octavo.append_kv(*new, cu_seqlens=np.array([0, 20], np.int32), **pages, **tables, **scales)
    for x, codes, scale in zip(new, (cache.k_pages, cache.v_pages), scales.values(), strict=True):
        wanted = np.rint(x * (np.float32(1) / scale)[:, None]).astype(np.int8)
        assert np.array_equal(codes[[1, 0]].reshape(-1, 3, 64)[:20], wanted)
    cache.k_scales[:], cache.v_scales[:] = scales["k_scale"], scales["v_scale"]
    q = rng.standard_normal((1, 6, 64)).astype(np.float32)
    out = octavo.paged_attention(q, **pages, **tables, **scales)
    of_tokens, _ = decode(cache, q, *tables.values())
    np.testing.assert_allclose(out, of_tokens, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("codes", ["float8_e4m3fn", "float8_e5m2"])
def test_bytes_that_kv_dtype_names(codes: str) -> None:
    """Pages of uint8 hold what kv_dtype says."""
    cache, table, lengths = filled(codes, [40])
    k, v = np.random.default_rng(3).standard_normal((2, 1, 2, 64)).astype(np.float32)
    lengths += 1
    as_bytes = Cache(
        codes,
        cache.k_pages.view(np.uint8).copy(),
        cache.v_pages.view(np.uint8),
        *map(np.copy, (cache.k_scales, cache.v_scales)),
    )
    octavo.append_kv(k, v, page_table=table, seq_lens=lengths, kv_dtype=codes, **as_bytes.arguments)
    octavo.append_kv(k, v, page_table=table, seq_lens=lengths, **cache.arguments)
    assert as_bytes.k_pages.tobytes() == cache.k_pages.tobytes()
    for x, y in zip(
        decode(cache, k, table, lengths), decode(as_bytes, k, table, lengths, kv_dtype=codes), strict=True
    ):
        assert x.tobytes() == y.tobytes()


@pytest.mark.parametrize("kind", KINDS)
def test_prefix_cache(kind: str) -> None:
    """A prompt found again, whose pages have the scales of the first time; then copy-on-write."""
    alloc = octavo.PageAllocator(12, 4, prefix_cache=True)
    cache = Cache.empty(kind, 12, 4, 2, 64)
    rng = np.random.default_rng(8)
    tokens = np.arange(11, dtype=np.int32)
    k, v = rng.standard_normal((2, 11, 2, 64)).astype(np.float32)
    q = rng.standard_normal((1, 4, 64)).astype(np.float32)
    step = octavo.StepArrays(
        table := np.empty((1, 4), np.int32),
        lengths := np.empty(1, np.int32),
        cu_seqlens := np.empty(2, np.int32),
        copies := np.empty((4, 2), np.int32),
    )
    scales_and_pages = {name: x for name, x in cache.arguments.items() if name != "kv_dtype"}

    def run(seq: int, new: NDArray[np.int32], rows: slice) -> Any:
        num_copies = alloc.step([seq], len(new), step, tokens=new)
        octavo.copy_pages(copies=copies[:num_copies], **scales_and_pages)
        arrays = {"page_table": table, "seq_lens": lengths, "cu_seqlens": cu_seqlens}
        octavo.append_kv(k[rows], v[rows], **arrays, **cache.arguments)
        check_against_oracle(cache, q, table, lengths)
        return decode(cache, q, table, lengths)

    first = alloc.create(tokens)
    wanted = run(first, tokens, slice(None))
    alloc.free(first)
    second = alloc.create(tokens)
    assert alloc.length(second) == 8
    for x, y in zip(run(second, tokens[8:], slice(8, None)), wanted, strict=True):
        assert x.tobytes() == y.tobytes()
    (fork,) = alloc.fork(second)
    run(fork, tokens[:1], slice(1))
    assert alloc.pages(fork)[2] != alloc.pages(second)[2]
    for x, y in zip(decode(cache, q, *alloc.page_table([second])), wanted, strict=True):
        assert x.tobytes() == y.tobytes()
