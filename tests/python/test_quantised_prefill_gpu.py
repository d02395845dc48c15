"""Prefill over caches of codes on a GPU, against the CPU."""

from __future__ import annotations

import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import octavo
from support.quantised import KINDS, filled, spoil_unused_scales
from support.quantised_gpu import (
    PREFILL,
    check_attention,
    explanation,
    is_hopper,
    kernel_of,
    on_gpu,
    queries,
    to_gpu,
)

pytestmark = pytest.mark.gpu


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
def test_prefill(torch: Any, kind: str, head_dim: int, dtype: str, options: dict[str, Any]) -> None:
    """Chunks, a draft and a sequence that decodes, in one launch."""
    cache, table, lengths = filled(kind, [900, 731, 1300, 40, 1], head_dim=head_dim)
    if "prefix_lens" in options:
        options = options | {"prefix_lens": np.resize(options["prefix_lens"], 5)}
    cu_seqlens_q = np.array([0, 150, 151, 341, 345, 346], np.int32)
    spoil_unused_scales(cache, table, lengths)
    q = queries(346, 8, head_dim, dtype)
    given: dict[str, Any] = {"cu_seqlens_q": cu_seqlens_q, **options}
    check_attention(torch, cache, q, table, lengths, **given)
    if is_hopper(torch):
        found = explanation(torch, cache, q, table, lengths, **given)
        of_hopper = f"sm90_attention<{dtype} over codes"
        # With ALiBi, keys are not cut into splits, and there are too few rows for all SMs.
        assert found.kernel.startswith("sm80_attention<" if "alibi_slopes" in options else of_hopper)


@pytest.mark.parametrize("num_tokens", [4, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_row_tiles_of_one_tile_of_keys(torch: Any, kind: str, num_tokens: int) -> None:
    """Many more of them than SMs, so that each CTA takes several, one right behind the other.

    Two warpgroups convert, each of which once waited for the row tile after next while consumers waited for
    the keys that it had not handed on.
    """
    lengths_of = [num_tokens + i % 90 for i in range(96)]
    cache, table, lengths = filled(kind, lengths_of, num_kv_heads=8, head_dim=128)
    cu_seqlens_q = np.arange(0, 96 * num_tokens + 1, num_tokens, dtype=np.int32)
    q = queries(96 * num_tokens, 96, 128, "bfloat16")
    check_attention(torch, cache, q, table, lengths, cu_seqlens_q=cu_seqlens_q)
    if is_hopper(torch):
        found = explanation(torch, cache, q, table, lengths, cu_seqlens_q=cu_seqlens_q)
        assert found.kernel == "sm90_attention<bfloat16 over codes, head_dim 128, 64 rows>"


@pytest.mark.parametrize("room", [0, 16000])
@pytest.mark.parametrize(("head_dim", "group_size", "num_tokens"), [(128, 12, 4), (128, 12, 9), (64, 12, 9)])
@pytest.mark.parametrize("kind", ["int8", "float8_e4m3fn", "int4"])
def test_row_tiles_without_keys(
    torch: Any, kind: str, head_dim: int, group_size: int, num_tokens: int, room: int
) -> None:
    """Sequences that are padding, and splits of sequences that are short, between others.

    A warpgroup that converts once waited for row tiles behind these with a tile that consumers needed.
    """
    lengths_of = [0 if i % 3 else num_tokens + 67 * i % 300 for i in range(12 if room else 160)]
    cache, table, lengths = filled(kind, lengths_of, num_kv_heads=4, head_dim=head_dim)
    table = np.pad(table, ((0, 0), (0, room // 16)))
    num_queries = num_tokens * len(lengths_of)
    cu_seqlens_q = np.arange(0, num_queries + 1, num_tokens, dtype=np.int32)
    q = queries(num_queries, 4 * group_size, head_dim, "bfloat16")
    check_attention(torch, cache, q, table, lengths, cu_seqlens_q=cu_seqlens_q)


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
    given: dict[str, Any] = {"cu_seqlens_q": cu_seqlens_q, **options}
    check_attention(torch, cache, q, table, lengths, **given)
    if is_hopper(torch):
        found = explanation(torch, cache, q, table, lengths, **given)
        assert found.kernel.startswith(f"expand_codes<{dtype}, ")


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
