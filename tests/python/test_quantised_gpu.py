"""Caches of codes on a GPU: the codes and scales of the CPU bit for bit, and its results."""

from __future__ import annotations

import importlib
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

import octavo
from support import oracle
from support.quantised import (
    DTYPES,
    KINDS,
    LARGEST,
    OPTIONS,
    Cache,
    append_packed,
    awkward_rows,
    check_spoilt_queries,
    filled,
)
from support.quantised_gpu import (
    ARRAYS,
    PREFILL,
    check_attention,
    is_hopper,
    kernel_of,
    on_gpu,
    queries,
    to_cpu,
    to_gpu,
)

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("new", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize(
    ("head_dim", "head_dim_v"), [(8, 8), (80, 80), (128, 128), (256, 256), (192, 128), (8, 256), (72, 40)]
)
@pytest.mark.parametrize("kind", KINDS)
def test_codes_and_scales_are_those_of_the_cpu(
    torch: Any, kind: str, head_dim: int, head_dim_v: int, new: str
) -> None:
    with np.errstate(over="ignore"):
        rows, values = (awkward_rows(dim).astype(oracle.NUMPY_DTYPES[new]) for dim in (head_dim, head_dim_v))
    rows, values = (np.concatenate([x, x[:1]]) for x in (rows, values))
    rows[-1, 3] = values[-1, 3] = np.nan
    k, v = np.stack([rows, rows[::-1]], 1), np.stack([-values, values], 1)
    table, lengths = np.array([[1]], np.int32), np.array([len(rows)], np.int32)
    cache = Cache.empty(kind, 2, len(rows), 2, head_dim, head_dim_v=head_dim_v)
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


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    ("head_dim", "head_dim_v"),
    [
        *((dim, dim) for dim in (8, 64, 80, 96, 128, 192, 256)),
        *((192, 128), (128, 64), (64, 128), (256, 32), (72, 40), (8, 256)),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_head_dims(torch: Any, kind: str, head_dim: int, head_dim_v: int, dtype: str) -> None:
    cache, table, lengths = filled(kind, [70, 1, 333], head_dim=head_dim, head_dim_v=head_dim_v)
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
        {},
        {"batch_invariant": True},
        {"window_left": 100, "prefix_lens": np.array([0, 60, 500], np.int32)},
        {"alibi_slopes": np.linspace(0.01, 0.3, 48, dtype=np.float32), "softcap": 3.0},
        {"sinks": np.linspace(-3.0, 6.0, 48, dtype=np.float32)},
    ],
    ids=lambda options: "+".join(options) or "plain",
)
@pytest.mark.parametrize(
    ("group_size", "num_tokens", "parts"), [(12, 1, 2), (16, 1, 2), (24, 1, 3), (16, 4, 8), (9, 1, 3)]
)
@pytest.mark.parametrize("head_dim", [192, 256])
@pytest.mark.parametrize("kind", KINDS)
def test_groups_of_wide_heads(
    torch: Any,
    kind: str,
    head_dim: int,
    group_size: int,
    num_tokens: int,
    parts: int,
    options: dict[str, Any],
) -> None:
    """Query heads in parts, which read the same head of the pages."""
    cache, table, lengths = filled(kind, [900, num_tokens, 1333], head_dim=head_dim)
    num_heads, num_queries = 2 * group_size, 3 * num_tokens
    given = {name: x[:num_heads] if np.size(x) == 48 else x for name, x in options.items()}
    if num_tokens > 1:
        given |= {"cu_seqlens_q": np.arange(0, num_queries + 1, num_tokens, dtype=np.int32)}
        given |= {"max_seqlen_q": num_tokens}
    q = queries(num_queries, num_heads, head_dim, "bfloat16")
    check_attention(torch, cache, q, table, lengths, **given)
    if is_hopper(torch):
        given |= {"page_table": table, "seq_lens": lengths}
        arrays = {n: to_gpu(torch, x) if isinstance(x, np.ndarray) else x for n, x in given.items()}
        found = octavo.explain("paged_attention", to_gpu(torch, q), **arrays, **on_gpu(torch, cache))
        assert found.kernel.startswith(("split_kv_decode<", "stream_k_decode<"))
        assert found.plan["group_parts"] == parts


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


@pytest.mark.parametrize(("head_dim", "dtype"), [(64, "float16"), (128, "bfloat16"), (256, "float16")])
@pytest.mark.parametrize("counts", [(1, 1), (2, 2), (4, 3), (40, 40), (1, 300)], ids=str)
@pytest.mark.parametrize("group_size", [1, 4, 8, 16])
@pytest.mark.parametrize(
    ("kind", "is_static"), [*((kind, False) for kind in KINDS), *((kind, True) for kind in DTYPES)]
)
def test_a_query_with_nan_or_infinity_spoils_no_other(
    torch: Any,
    kind: str,
    is_static: bool,
    group_size: int,
    counts: tuple[int, int],
    head_dim: int,
    dtype: str,
) -> None:
    """Queries of a KV head share its tiles where sequences decode, draft or have chunks of a prompt."""
    cache, table, lengths = filled(kind, [70, 333], head_dim=head_dim)
    tables = {
        "page_table": table,
        "seq_lens": lengths,
        "cu_seqlens_q": np.cumsum([0, *counts], dtype=np.int32),
    }
    arguments = {name: to_gpu(torch, x) for name, x in tables.items()} | on_gpu(torch, cache)
    if is_static:  # These numbers have about the size of the scales of each token.
        for name in ("k_scale", "v_scale"):
            arguments[name] = 2.5 / LARGEST[kind]
            del arguments[f"{name}s"]

    def attend(q: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
        out, lse = octavo.paged_attention(
            to_gpu(torch, q), return_lse=True, max_seqlen_q=max(counts), **arguments
        )
        return out.float().cpu().numpy(), lse.cpu().numpy()

    check_spoilt_queries(attend, queries(sum(counts), 2 * group_size, head_dim, dtype), counts)


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
