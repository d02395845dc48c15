"""Caches of codes on a GPU: the codes and scales of the CPU bit for bit, and its results."""

from __future__ import annotations

import importlib
import itertools
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

import octavo
from support import oracle
from support.quantised import KINDS, OPTIONS, Cache, append_packed, awkward_rows, filled

pytestmark = pytest.mark.gpu
ARRAYS = ("k_pages", "v_pages", "k_scales", "v_scales")
TOLERANCE = {"float16": 2e-3, "bfloat16": 1.6e-2}


def to_gpu(torch: ModuleType, array: NDArray[Any]) -> Any:
    if array.dtype.name in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):
        kind = np.uint16 if array.itemsize == 2 else np.uint8
        tensor = torch.from_numpy(array.view(kind).copy()).cuda()
        return tensor.view(getattr(torch, array.dtype.name))
    return torch.from_numpy(np.ascontiguousarray(array)).cuda()


def to_cpu(torch: ModuleType, tensor: Any) -> bytes:
    return bytes(tensor.contiguous().view(torch.uint8).cpu().numpy().tobytes())


def head_major(tensor: Any) -> Any:
    """The same array in memory that has the heads before the slots of a page."""
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


def on_gpu(torch: ModuleType, cache: Cache, *, is_head_major: bool = False) -> dict[str, Any]:
    arrays = {name: to_gpu(torch, getattr(cache, name)) for name in ARRAYS}
    if is_head_major:
        arrays = {name: head_major(x) for name, x in arrays.items()}
    return arrays | ({"kv_dtype": "int4"} if cache.kind.endswith("int4") else {})


@pytest.mark.parametrize("new", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("head_dim", [8, 80, 128, 256])
@pytest.mark.parametrize("kind", KINDS)
def test_codes_and_scales_are_those_of_the_cpu(torch: Any, kind: str, head_dim: int, new: str) -> None:
    with np.errstate(over="ignore"):
        rows = awkward_rows(head_dim).astype(oracle.NUMPY_DTYPES[new])
    rows = np.concatenate([rows, rows[:1]])
    rows[-1, 3] = np.nan
    k, v = np.stack([rows, rows[::-1]], 1), np.stack([-rows, rows], 1)
    table, lengths = np.array([[1]], np.int32), np.array([len(rows)], np.int32)
    cache = Cache.empty(kind, 2, len(rows), 2, head_dim)
    gpu = on_gpu(torch, cache, is_head_major=head_dim != 80)
    append_packed(cache, k, v, table, len(rows))
    octavo.append_kv(
        to_gpu(torch, k),
        to_gpu(torch, v),
        page_table=to_gpu(torch, table),
        seq_lens=to_gpu(torch, lengths),
        cu_seqlens=to_gpu(torch, np.array([0, len(rows)], np.int32)),
        **gpu,
    )
    for name in ARRAYS:
        assert to_cpu(torch, gpu[name]) == getattr(cache, name).tobytes(), name


def check_attention(
    torch: Any, cache: Cache, q: NDArray[Any], table: NDArray[Any], lengths: NDArray[Any], **options: Any
) -> None:
    """Against the CPU, in both layouts and twice with the same bits."""
    given = {"page_table": table, "seq_lens": lengths}
    expected, lse = octavo.paged_attention(
        q.astype(np.float32), return_lse=True, **given, **cache.arguments, **options
    )
    arrays = {n: to_gpu(torch, x) if isinstance(x, np.ndarray) else x for n, x in (given | options).items()}
    if "cu_seqlens_q" in options:
        arrays["max_seqlen_q"] = int(np.diff(options["cu_seqlens_q"]).max())
    for is_head_major in (False, True):
        gpu = on_gpu(torch, cache, is_head_major=is_head_major)
        results = [
            octavo.paged_attention(to_gpu(torch, q), return_lse=True, **arrays, **gpu) for _ in range(2)
        ]
        for x, y in zip(*results, strict=True):
            assert to_cpu(torch, x) == to_cpu(torch, y)
        out, out_lse = (x.float().cpu().numpy() for x in results[0])
        size = np.abs(expected).max() if expected.size else 0.0
        tolerance = TOLERANCE[q.dtype.name]
        np.testing.assert_allclose(out, expected, rtol=tolerance, atol=tolerance * max(size, 1e-30))
        # sm80_attention rounds keys to the dtype of the queries.
        np.testing.assert_allclose(out_lse, lse, rtol=tolerance, atol=tolerance)


def queries(num: int, num_heads: int, head_dim: int, dtype: str) -> NDArray[Any]:
    q = np.random.default_rng(num).standard_normal((num, num_heads, head_dim))
    return q.astype(oracle.NUMPY_DTYPES[dtype])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("head_dim", [8, 64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("kind", KINDS)
def test_head_dims(torch: Any, kind: str, head_dim: int, dtype: str) -> None:
    cache, table, lengths = filled(kind, [70, 1, 333], head_dim=head_dim)
    check_attention(torch, cache, queries(3, 8, head_dim, dtype), table, lengths)


@pytest.mark.parametrize("group_size", [1, 4, 8, 16, 24])
@pytest.mark.parametrize("page_size", [1, 5, 16, 256])
@pytest.mark.parametrize("kind", KINDS)
def test_page_sizes_and_groups(torch: Any, kind: str, page_size: int, group_size: int) -> None:
    cache, table, lengths = filled(kind, [900, 7], page_size=page_size, head_dim=128)
    check_attention(torch, cache, queries(2, 2 * group_size, 128, "float16"), table, lengths)


@pytest.mark.parametrize(
    "options",
    [
        *OPTIONS,
        {"cu_seqlens_q": np.array([0, 2, 4, 6, 8], np.int32), "alibi_slopes": np.ones(8, np.float32)},
    ],
    ids=lambda options: "+".join(options),
)
@pytest.mark.parametrize("kind", KINDS)
def test_every_option(torch: Any, kind: str, options: dict[str, Any]) -> None:
    cache, table, lengths = filled(kind, [190, 140, 150, 629], head_dim=64)
    num_queries = int(options.get("cu_seqlens_q", [4])[-1])
    check_attention(torch, cache, queries(num_queries, 8, 64, "float16"), table, lengths, **options)


def is_hopper(torch: Any) -> bool:
    return bool(torch.cuda.get_device_capability() == (9, 0))


def kernel_of(q: Any, **arguments: Any) -> str:
    return octavo.explain("paged_attention", q, **arguments).kernel


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"softmax_scale": 0.3, "softcap": 3.0},
        {"alibi_slopes": np.linspace(0.01, 0.3, 8, dtype=np.float32)},
        {"window_left": 100, "prefix_lens": np.array([0, 60, 1300], np.int32)},
        {"window_left": 127, "sinks": np.linspace(-3.0, 6.0, 8, dtype=np.float32)},
        {"sinks": np.ones(8, np.float32), "alibi_slopes": np.linspace(0.01, 0.3, 8, dtype=np.float32)},
        {"causal": False},
    ],
    ids=lambda options: "+".join(options) or "plain",
)
@pytest.mark.parametrize(("head_dim", "dtype"), [(64, "float16"), (96, "bfloat16"), (128, "bfloat16")])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunks", [(150, 190), (300, 500)], ids=str)
def test_prefill(
    torch: Any, chunks: tuple[int, int], kind: str, head_dim: int, dtype: str, options: dict[str, Any]
) -> None:
    """Chunks, a draft and a sequence that decodes; in slots that are not used, scales are NaN.

    Longer chunks by numbers that codes become once.
    """
    cache, table, lengths = filled(kind, [900, 731, 1300, 40, 1], head_dim=head_dim)
    if "prefix_lens" in options:
        options = options | {"prefix_lens": np.resize(options["prefix_lens"], 5)}
    cu_seqlens_q = np.cumsum([0, chunks[0], 1, chunks[1], 4, 1], dtype=np.int32)
    unused = np.ones(cache.k_scales.shape[:2], bool)
    for row, length in zip(table, lengths, strict=True):
        positions = np.arange(length)
        unused[row[positions // 16], positions % 16] = False
    cache.k_scales[unused], cache.v_scales[unused] = np.nan, np.nan
    q = queries(int(cu_seqlens_q[-1]), 8, head_dim, dtype)
    check_attention(torch, cache, q, table, lengths, cu_seqlens_q=cu_seqlens_q, **options)
    if is_hopper(torch):
        tables = {"page_table": table, "seq_lens": lengths, "cu_seqlens_q": cu_seqlens_q}
        arrays = {name: to_gpu(torch, x) for name, x in tables.items()} | on_gpu(torch, cache)
        found = octavo.explain("paged_attention", to_gpu(torch, q), max_seqlen_q=chunks[1], **arrays)
        over_codes = f"sm90_attention<{dtype} over codes"
        if chunks[1] == 500:
            assert found.kernel.startswith("expand_codes<")
            assert found.plan["few"].startswith("stream_k_decode<")
            assert found.plan["between"].startswith(over_codes)
        else:
            assert found.kernel.startswith(over_codes)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"softmax_scale": 0.3, "softcap": 3.0},
        {"alibi_slopes": np.linspace(0.01, 0.3, 16, dtype=np.float32)},
        {"window_left": 400, "prefix_lens": np.array([0, 60, 1300], np.int32)},
        {"window_left": 300, "sinks": np.linspace(-3.0, 6.0, 16, dtype=np.float32)},
        {"causal": False},
    ],
    ids=lambda options: "+".join(options) or "plain",
)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("kind", KINDS)
def test_prefill_of_many_rows(
    torch: Any, kind: str, head_dim: int, dtype: str, options: dict[str, Any]
) -> None:
    """By numbers that codes become once, of the dtype of the queries."""
    cache, table, lengths = filled(kind, [900, 731, 1300], head_dim=head_dim)
    cu_seqlens_q = np.array([0, 300, 900, 1400], np.int32)
    q = queries(1400, 16, head_dim, dtype)
    check_attention(torch, cache, q, table, lengths, cu_seqlens_q=cu_seqlens_q, **options)
    if is_hopper(torch):
        given = {"page_table": table, "seq_lens": lengths, "cu_seqlens_q": cu_seqlens_q, **options}
        arrays = {n: to_gpu(torch, x) if isinstance(x, np.ndarray) else x for n, x in given.items()}
        kernel = kernel_of(to_gpu(torch, q), max_seqlen_q=600, **arrays, **on_gpu(torch, cache))
        assert kernel.startswith(f"expand_codes<{dtype}, ")


@pytest.mark.parametrize("of_heads", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("kind", ["int8", "float8_e4m3fn", "float8_e5m2"])
def test_prefill_of_many_rows_with_static_scales(
    torch: Any, kind: str, head_dim: int, of_heads: bool
) -> None:
    """A number is outside of what codes become, scales of heads are part of it."""
    cache, table, lengths = filled(kind, [900, 731], head_dim=head_dim)
    q = queries(1100, 32, head_dim, "bfloat16")
    size = {"int8": 0.02, "float8_e4m3fn": 0.005, "float8_e5m2": 5e-5}[kind]
    scales: dict[str, Any] = {"k_scale": size, "v_scale": 3 * size}
    if of_heads:
        scales = {name: x * np.array([1.0, 0.7], np.float32) for name, x in scales.items()}
    pages = {"k_pages": cache.k_pages, "v_pages": cache.v_pages}
    given = {
        "page_table": table,
        "seq_lens": lengths,
        "cu_seqlens_q": np.array([0, 500, 1100], np.int32),
        **scales,
    }
    expected = octavo.paged_attention(q.astype(np.float32), **pages, **given)
    arrays = {n: to_gpu(torch, x) if isinstance(x, np.ndarray) else x for n, x in (pages | given).items()}
    if is_hopper(torch):
        assert kernel_of(to_gpu(torch, q), max_seqlen_q=600, **arrays) == f"expand_codes<bfloat16, {kind}>"
    out = octavo.paged_attention(to_gpu(torch, q), max_seqlen_q=600, **arrays)
    np.testing.assert_allclose(
        out.float().cpu().numpy(), expected, rtol=1.6e-2, atol=1.6e-2 * np.abs(expected).max()
    )


@pytest.mark.parametrize("kind", KINDS)
def test_prefill_of_many_rows_in_a_graph(torch: Any, kind: str) -> None:
    """Lengths and pages are those at the replay."""
    cache, table, lengths = filled(kind, [900, 731], head_dim=128)
    q = queries(900, 16, 128, "bfloat16")
    cu_seqlens_q = np.array([0, 400, 900], np.int32)
    given = {"page_table": table, "seq_lens": lengths, "cu_seqlens_q": cu_seqlens_q}
    arrays = {name: to_gpu(torch, x) for name, x in given.items()} | on_gpu(torch, cache)
    arrays |= {"max_seqlen_q": 500, "out": torch.empty_like(to_gpu(torch, q))}
    gpu_q = to_gpu(torch, q)
    graph = torch.cuda.CUDAGraph()
    octavo.paged_attention(gpu_q, **arrays)
    with torch.cuda.graph(graph):
        octavo.paged_attention(gpu_q, **arrays)
    for lengths_now, rows in (([400, 731], [0, 1]), ([900, 500], [0, 1]), ([650, 900], [1, 0])):
        now = {"page_table": table[rows], "seq_lens": np.array(lengths_now, np.int32)}
        for name, x in now.items():
            arrays[name].copy_(to_gpu(torch, x))
        arrays["out"].fill_(np.nan)
        graph.replay()
        expected = octavo.paged_attention(q.astype(np.float32), **(given | now), **cache.arguments)
        np.testing.assert_allclose(
            arrays["out"].float().cpu().numpy(), expected, rtol=1.6e-2, atol=1.6e-2 * np.abs(expected).max()
        )


PREFILL = {"cu_seqlens_q": np.array([0, 300, 301, 601], np.int32)}
"""Many queries of the first and the last of three sequences."""


@pytest.mark.parametrize("scale", [0.0, 0.02])
@pytest.mark.parametrize("size", [1e-30, 0.0, 1e4])
@pytest.mark.parametrize("alibi", [False, True])
@pytest.mark.parametrize("kind", ["int8", "float8_e4m3fn"])
def test_prefill_with_static_scales(torch: Any, kind: str, alibi: bool, size: float, scale: float) -> None:
    """Queries of bfloat16 of all sizes, in float16 products; a scale of 0 makes all keys of a head zeros."""
    cache, table, lengths = filled(kind, [900, 731, 1300], head_dim=128, num_kv_heads=4)
    q = queries(601, 16, 128, "float32")
    q[40:50] *= 30
    q[100:200] *= 0
    q = (q * size).astype(ml_dtypes.bfloat16)
    options: dict[str, Any] = {"softmax_scale": 0.1 / max(size, 1e-30)} | PREFILL
    if alibi:
        options["alibi_slopes"] = np.linspace(0.01, 1.0, 16, dtype=np.float32)
    scales = {
        "k_scale": np.array([scale, 0.03, 0.01, 0.02], np.float32),
        "v_scale": np.array([0.01, 0.5, 0.1, 0.03], np.float32),
    }
    pages, given = (cache.k_pages, cache.v_pages), {"page_table": table, "seq_lens": lengths}
    tiny = {name: np.maximum(x, np.float32(1e-30)) for name, x in scales.items()}  # the CPU refuses 0
    expected = octavo.paged_attention(q.astype(np.float32), *pages, **given, **tiny, **options)
    arrays = {
        n: to_gpu(torch, x) if isinstance(x, np.ndarray) else x for n, x in (given | scales | options).items()
    }
    gpu_pages = [to_gpu(torch, x) for x in pages]
    if is_hopper(torch):
        names = dict(zip(("k_pages", "v_pages"), gpu_pages, strict=True))
        kernel = kernel_of(to_gpu(torch, q), max_seqlen_q=300, **names, **arrays)
        assert kernel.startswith("sm90_attention<bfloat16 over codes")
    out = octavo.paged_attention(to_gpu(torch, q), *gpu_pages, max_seqlen_q=300, **arrays)
    np.testing.assert_allclose(
        out.float().cpu().numpy(), expected, rtol=1.6e-2, atol=1.6e-2 * np.abs(expected).max()
    )


@pytest.mark.parametrize("group_size", [4, 32])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_numbers_of_prefill(torch: Any, kind: str, dtype: str, group_size: int) -> None:
    """A query that sees one key alone gives its value, from a scale and a product in float16. Of many rows,
    from a product that is rounded to the dtype of the queries."""
    lengths_q, num = 64, 40
    cache, table, lengths = filled(kind, [lengths_q] * num, head_dim=128)
    gpu, q = on_gpu(torch, cache), to_gpu(torch, queries(lengths_q * num, 2 * group_size, 128, dtype))
    begins = np.arange(0, lengths_q * num + 1, lengths_q).astype(np.int32)
    arguments = {
        "page_table": to_gpu(torch, table),
        "seq_lens": to_gpu(torch, lengths),
        "cu_seqlens_q": to_gpu(torch, begins),
        "max_seqlen_q": lengths_q,
        **gpu,
    }
    if is_hopper(torch):
        assert kernel_of(q, **arguments).startswith(
            "expand_codes<" if group_size == 32 else "sm90_attention<"
        )
    out = octavo.paged_attention(q, **arguments)
    # Of the first keys, for each query head.
    values = cache.values()[1][table[:, 0], 0].repeat(group_size, 1)
    expected = torch.from_numpy(values).cuda()
    bound = 2 * 2**-11 + (2**-8 if dtype == "bfloat16" else 0)
    assert ((out[::lengths_q].double() - expected).abs() <= 1.01 * bound * expected.abs() + 1e-7).all()


def test_int4_with_the_same_scale_for_all_keys(torch: Any) -> None:
    """By strides of zero."""
    cache, table, lengths = filled("int4", [900, 731, 1300], head_dim=128)
    cache.k_scales[:], cache.v_scales[:] = cache.k_scales[0, 0, 0], cache.v_scales[0, 0, 0]
    q = queries(601, 8, 128, "float16")
    given = {"page_table": table, "seq_lens": lengths} | PREFILL
    expected = octavo.paged_attention(q.astype(np.float32), **given, **cache.arguments)
    gpu = on_gpu(torch, cache)
    for name in ("k_scales", "v_scales"):
        gpu[name] = gpu[name][:1, :1, :1].contiguous().expand(gpu[name].shape)
    arrays = {name: to_gpu(torch, x) for name, x in given.items()}
    out = octavo.paged_attention(to_gpu(torch, q), max_seqlen_q=300, **arrays, **gpu)
    np.testing.assert_allclose(out.float().cpu().numpy(), expected, rtol=2e-3, atol=4e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_batch_invariant_prefill(torch: Any, kind: str) -> None:
    cache, table, lengths = filled(kind, [900, 700, 1300, 300, 555], head_dim=128)
    cu_seqlens_q = np.array([0, 300, 400, 401, 701, 710], np.int32)
    gpu, q = on_gpu(torch, cache), to_gpu(torch, queries(710, 8, 128, "bfloat16"))
    table, lengths = to_gpu(torch, table), to_gpu(torch, lengths)
    options = {"batch_invariant": True, "max_seqlen_q": 300, **gpu}
    many = octavo.paged_attention(
        q, page_table=table, seq_lens=lengths, cu_seqlens_q=to_gpu(torch, cu_seqlens_q), **options
    )
    for b, (begin, end) in enumerate(itertools.pairwise(cu_seqlens_q.tolist())):
        alone = octavo.paged_attention(
            q[begin:end],
            page_table=table[b : b + 1],
            seq_lens=lengths[b : b + 1],
            cu_seqlens_q=torch.tensor([0, end - begin]).int().cuda(),
            **options,
        )
        assert torch.equal(alone, many[begin:end])


@pytest.mark.parametrize("kind", KINDS)
def test_shared_prefix(torch: Any, kind: str) -> None:
    """Read once where that pays: over int4, not here."""
    cache, table, _ = filled(kind, [2200], head_dim=128, num_kv_heads=8)
    table, lengths = np.repeat(table, 64, 0), np.full(64, 2200, np.int32)
    lengths[3:7] = 0, 2049, 2100, 2060
    q = queries(64, 32, 128, "float16")
    check_attention(torch, cache, q, table, lengths, shared_prefix_len=2048)
    sinks = np.linspace(-3.0, 9.0, 32, dtype=np.float32)
    check_attention(torch, cache, q, table, lengths, shared_prefix_len=2048, sinks=sinks)
    if is_hopper(torch):
        arrays = {name: to_gpu(torch, x) for name, x in {"page_table": table, "seq_lens": lengths}.items()}
        kernel = kernel_of(to_gpu(torch, q), shared_prefix_len=2048, **arrays, **on_gpu(torch, cache))
        assert (kernel == "shared_prefix<float16>") == (kind != "int4")


@pytest.mark.parametrize("kind", ["int8", "float8_e4m3fn"])
def test_shared_prefix_of_many_rows(torch: Any, kind: str) -> None:
    """The prefix becomes numbers once."""
    cache, table, _ = filled(kind, [4100], head_dim=128, num_kv_heads=8)
    table, lengths = np.repeat(table, 224, 0), np.full(224, 4100, np.int32)
    lengths[3:6] = 0, 4097, 4099
    q = queries(224, 32, 128, "bfloat16")
    check_attention(torch, cache, q, table, lengths, shared_prefix_len=4096)
    if is_hopper(torch):
        arrays = {name: to_gpu(torch, x) for name, x in {"page_table": table, "seq_lens": lengths}.items()}
        gpu = on_gpu(torch, cache)
        explained = octavo.explain(
            "paged_attention", to_gpu(torch, q), shared_prefix_len=4096, **arrays, **gpu
        )
        assert explained.plan["over_prefix"].startswith(f"expand_codes<bfloat16, {kind}>")


@pytest.mark.parametrize("factor", [1e-3, 1e3])
@pytest.mark.parametrize("kind", KINDS)
def test_values_of_any_size(torch: Any, kind: str, factor: float) -> None:
    cache, table, lengths = filled(kind, [120], factors=factor)
    check_attention(torch, cache, queries(1, 4, 64, "bfloat16"), table, lengths)


@pytest.mark.parametrize("kind", ["int8", "float8_e4m3fn", "float8_e5m2"])
def test_values_of_many_sizes(torch: Any, kind: str) -> None:
    """Scales of one sequence that are a million times apart, and some that float16 would not hold."""
    factors = 10.0 ** np.random.default_rng(1).integers(-4, 3, (120, 1, 1))
    for size in (1.0, 1e-6, 1e4):
        cache, table, lengths = filled(kind, [120], factors=factors * size)
        check_attention(torch, cache, queries(1, 4, 64, "bfloat16"), table, lengths)


@pytest.mark.parametrize("size", [3e4, 1e-5])
@pytest.mark.parametrize("kind", KINDS)
def test_queries_of_any_size(torch: Any, kind: str, size: float) -> None:
    cache, table, lengths = filled(kind, [120])
    q = (queries(1, 4, 64, "float16").astype(np.float32) * size).clip(-6e4, 6e4)
    check_attention(torch, cache, q.astype(np.float16), table, lengths, softmax_scale=0.1 / size)


def test_codes_made_elsewhere(torch: Any) -> None:
    """int8 -128, which append_kv never writes, and scales of 0."""
    rng = np.random.default_rng(4)
    cache = Cache.empty("int8", 2, 16, 1, 64)
    cache.k_pages[:], cache.v_pages[:] = rng.integers(-128, 128, (2, 2, 16, 1, 64))
    cache.k_pages[0, 3], cache.v_pages[0, 5] = -128, -128
    cache.k_scales[:], cache.v_scales[:] = rng.uniform(0.01, 0.03, (2, 2, 16, 1))
    cache.v_scales[0, 2] = cache.k_scales[1, 1] = 0
    table, lengths = np.array([[1, 0]], np.int32), np.array([27], np.int32)
    check_attention(torch, cache, queries(1, 2, 64, "float16"), table, lengths)


@pytest.mark.parametrize("kind", KINDS)
def test_batch_invariant(torch: Any, kind: str) -> None:
    cache, table, lengths = filled(kind, [900, 70, 2500, 33, 1400], head_dim=128, num_kv_heads=4)
    gpu, q = on_gpu(torch, cache), to_gpu(torch, queries(5, 16, 128, "float16"))
    table, lengths = to_gpu(torch, table), to_gpu(torch, lengths)
    rows = torch.arange(5).repeat(250)  # several launches
    many = octavo.paged_attention(
        q[rows], page_table=table[rows], seq_lens=lengths[rows], batch_invariant=True, **gpu
    )
    for i in range(5):
        alone = octavo.paged_attention(
            q[i : i + 1],
            page_table=table[i : i + 1],
            seq_lens=lengths[i : i + 1],
            batch_invariant=True,
            **gpu,
        )
        assert torch.equal(alone[0], many[i]) and torch.equal(alone[0], many[1245 + i])


@pytest.mark.parametrize("length", [1, 2])
@pytest.mark.parametrize("codes", ["int8", "float8_e4m3fn", "float8_e5m2"])
def test_static_scales_in_memory(torch: Any, codes: str, length: int) -> None:
    """What the CPU gives, and read anew whenever a captured graph runs."""
    rng = np.random.default_rng(0)
    k, v = rng.standard_normal((2, 40, 2, 64)).astype(np.float16)
    q = rng.standard_normal((2, 4, 64)).astype(np.float16)
    tables = {"page_table": np.array([[1, 3], [0, 2]], np.int32), "seq_lens": np.array([23, 17], np.int32)}
    cu_seqlens = np.array([0, 23, 40], np.int32)
    scales = {
        "k_scale": np.array([0.25, 0.5], np.float32)[:length],
        "v_scale": np.array([0.03125, 0.125], np.float32)[:length],
    }
    dtype = np.int8 if codes == "int8" else np.dtype(getattr(ml_dtypes, codes))
    pages = [np.zeros((4, 16, 2, 64), dtype) for _ in range(2)]

    def run(k: Any, v: Any, q: Any, pages: Any, cu_seqlens: Any, tables: Any, given: Any) -> list[Any]:
        octavo.append_kv(k, v, *pages, cu_seqlens=cu_seqlens, **tables, **given)
        return [*pages, octavo.paged_attention(q, *pages, **tables, **given)]

    arrays = [to_gpu(torch, x) for x in (k, v, q)]
    gpu_tables = {name: to_gpu(torch, x) for name, x in tables.items()}
    gpu_scales = {name: to_gpu(torch, x) for name, x in scales.items()}
    gpu_pages = [to_gpu(torch, x) for x in pages]
    gpu_cu_seqlens = to_gpu(torch, cu_seqlens)

    def check(results: list[Any]) -> None:
        *codes, out = run(k, v, q.astype(np.float32), pages, cu_seqlens, tables, scales)
        assert [to_cpu(torch, x) for x in results[:2]] == [x.tobytes() for x in codes]
        np.testing.assert_allclose(results[2].float().cpu().numpy(), out, rtol=2e-3, atol=4e-3)

    check(run(*arrays, gpu_pages, gpu_cu_seqlens, gpu_tables, gpu_scales))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(*arrays, gpu_pages, gpu_cu_seqlens, gpu_tables, gpu_scales)
    for name in scales:
        scales[name] = scales[name] * 2
        gpu_scales[name].mul_(2)
    graph.replay()
    check(captured)


@pytest.mark.parametrize("options", [{}, PREFILL], ids=["decode", "prefill"])
@pytest.mark.parametrize(("kind", "array"), [("int8", "k"), ("int8", "v"), ("int8_int4", "v")])
def test_scales_of_one_tensor_in_memory(
    torch: Any, kind: str, array: str, options: dict[str, NDArray[Any]]
) -> None:
    """Those of the other are a number."""
    cache, table, lengths = filled(kind, [900, 731, 1300], head_dim=128)
    number = {"v_scale" if array == "k" else "k_scale": 0.02}
    q = queries(int(options.get("cu_seqlens_q", [3])[-1]), 8, 128, "float16")
    gpu, arguments = on_gpu(torch, cache), dict(cache.arguments)
    for given in (gpu, arguments):
        del given["v_scales" if array == "k" else "k_scales"]
    tables = {"page_table": table, "seq_lens": lengths} | options
    expected = octavo.paged_attention(q.astype(np.float32), **tables, **arguments, **number)
    gpu_tables: dict[str, Any] = {name: to_gpu(torch, x) for name, x in tables.items()}
    if options:
        gpu_tables["max_seqlen_q"] = 300
    out = octavo.paged_attention(to_gpu(torch, q), **gpu_tables, **gpu, **number)
    np.testing.assert_allclose(out.float().cpu().numpy(), expected, rtol=2e-3, atol=4e-3)


def test_codes_of_many_dims_are_refused(torch: Any) -> None:
    cache = on_gpu(torch, Cache.empty("int8", 1, 4, 1, 264))
    k = torch.zeros(1, 1, 264, dtype=torch.float16, device="cuda")
    tables = {"page_table": torch.zeros(1, 1).int().cuda(), "seq_lens": torch.ones(1).int().cuda()}
    with pytest.raises(TypeError, match="append_kv: no CUDA kernel makes codes of head_dim 264"):
        octavo.append_kv(k, k, **tables, **cache)


@pytest.mark.parametrize("kind", KINDS)
def test_copies(torch: Any, kind: str) -> None:
    """Inside a cache, and to pinned host memory and back."""
    cache, _, _ = filled(kind, [100], head_dim=96)
    gpu = on_gpu(torch, cache, is_head_major=True)
    gpu.pop("kv_dtype", None)
    host = {name: torch.zeros_like(x, device="cpu").pin_memory() for name, x in gpu.items()}
    copies = torch.tensor([[0, 2], [1, 0]]).int().cuda()
    octavo.copy_pages(copies=copies, **gpu, **{f"to_{name}": x for name, x in host.items()})
    torch.cuda.synchronize()
    back = {name: torch.zeros_like(x) for name, x in gpu.items()}
    octavo.copy_pages(copies=copies.flip(1).contiguous(), **host, **{f"to_{n}": x for n, x in back.items()})
    for name in ARRAYS:
        original = getattr(cache, name)
        assert to_cpu(torch, host[name][2]) == original[0].tobytes(), name
        assert to_cpu(torch, back[name][:2]) == original[:2].tobytes(), name
    octavo.copy_pages(copies=torch.tensor([[1, 3]]).int().cuda(), **gpu)
    for name in ARRAYS:
        assert to_cpu(torch, gpu[name][3]) == getattr(cache, name)[1].tobytes(), name


@pytest.mark.parametrize("kind", [*KINDS, "float16"])
def test_empty_cache(torch: Any, kind: str) -> None:
    k, v, q = (to_gpu(torch, queries(3, 4, 128, "float16") + i) for i in range(3))
    cache = octavo.empty_cache(8, 16, 4, 128, kind, like=k)
    tables = {
        "page_table": torch.tensor([[1], [5], [2]]).int().cuda(),
        "seq_lens": torch.ones(3).int().cuda(),
    }
    octavo.append_kv(k, v, **tables, **cache.arguments)
    out = octavo.paged_attention(q, **tables, **cache.arguments)
    tolerance = {"int4": 0.3, "int8_int4": 0.3, "float8_e5m2": 0.5, "float8_e4m3fn": 0.3}.get(kind, 0.03)
    assert torch.allclose(out, v, atol=tolerance)


@pytest.mark.parametrize("kind", KINDS)
def test_cupy(kind: str) -> None:
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
    k = cupy.asarray(queries(3, 4, 64, "float16"))
    cache = octavo.empty_cache(8, 16, 4, 64, kind, like=k)
    tables = {
        "page_table": cupy.asarray([[1], [5], [2]], dtype=cupy.int32),
        "seq_lens": cupy.ones(3, dtype=cupy.int32),
    }
    octavo.append_kv(k, k, **tables, **cache.arguments)
    assert cupy.allclose(octavo.paged_attention(k, **tables, **cache.arguments), k, atol=0.5)


@pytest.mark.parametrize("kind", KINDS)
def test_jax(kind: str) -> None:
    jax = pytest.importorskip("jax", reason="JAX is not installed")
    octavo_jax = importlib.import_module("octavo.jax")
    cache, table, lengths = filled(kind, [300, 70], head_dim=128)
    q = queries(2, 8, 128, "float16")
    expected = octavo.paged_attention(
        q.astype(np.float32), page_table=table, seq_lens=lengths, **cache.arguments
    )
    kv_dtype = "int4" if kind.endswith("int4") else None
    arrays = {name: jax.numpy.asarray(getattr(cache, name)) for name in ARRAYS}

    @jax.jit
    def attend(q: Any, table: Any, lengths: Any, arrays: Any) -> Any:
        return octavo_jax.paged_attention(q, page_table=table, seq_lens=lengths, kv_dtype=kv_dtype, **arrays)

    out = np.asarray(attend(q, table, lengths, arrays)).astype(np.float32)
    np.testing.assert_allclose(out, expected, rtol=2e-3, atol=4e-3)
