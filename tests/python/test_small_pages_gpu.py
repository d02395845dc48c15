"""Prompts on a GPU over pages that are too small for Hopper's copy engine, in every layout of a cache."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import octavo
from support.quantised_gpu import is_hopper

pytestmark = pytest.mark.gpu

NUM_KV_HEADS, GROUP_SIZE, HEAD_DIM = 2, 4, 128
LAYOUTS = ("token_major", "head_major", "interleaved", "padded", "every_other")


def pages(torch: Any, layout: str, num_pages: int, page_size: int) -> tuple[Any, Any]:
    """K and V [num_pages, page_size, NUM_KV_HEADS, HEAD_DIM] full of NaN, in arrays of that layout."""
    shape = num_pages, page_size, NUM_KV_HEADS, HEAD_DIM

    def full(*shape: int) -> Any:
        return torch.full(shape, torch.nan, dtype=torch.bfloat16, device="cuda")

    if layout == "head_major":
        k, v = (full(num_pages, NUM_KV_HEADS, page_size, HEAD_DIM).transpose(1, 2) for _ in "kv")
    elif layout == "interleaved":
        k, v = full(num_pages, 2, *shape[1:]).unbind(1)
    elif layout == "padded":
        k, v = (full(*shape[:3], HEAD_DIM + 8)[..., :HEAD_DIM] for _ in "kv")
    elif layout == "every_other":
        k, v = (full(2 * num_pages, *shape[1:])[::2] for _ in "kv")
    else:
        k, v = full(*shape), full(*shape)
    return k, v


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("page_size", [1, 3, 4, 20])
@pytest.mark.parametrize("options", [{}, {"window_left": 70}, {"softcap": 20.0}], ids=str)
def test_layouts(torch: Any, layout: str, page_size: int, options: dict[str, Any]) -> None:
    lengths_q, lengths_k = [200, 1, 64, 130, 7], [650, 300, 64, 131, 7]
    rng = np.random.default_rng(page_size)
    counts = [-(-length // page_size) for length in lengths_k]
    num_pages = sum(counts) + 3
    k, v = pages(torch, layout, num_pages, page_size)
    table = np.full((len(counts), max(counts) + 2), 1 << 30, np.int32)
    free = rng.permutation(num_pages)
    shape = num_pages, page_size, NUM_KV_HEADS, HEAD_DIM
    host_k, host_v = (torch.full(shape, torch.nan, dtype=torch.bfloat16) for _ in "kv")
    for b, (count, length) in enumerate(zip(counts, lengths_k, strict=True)):
        table[b, :count], free = free[:count], free[count:]
        positions = np.arange(length)
        at = table[b, positions // page_size], positions % page_size
        for host in (host_k, host_v):
            rows = rng.standard_normal((length, NUM_KV_HEADS, HEAD_DIM), np.float32)
            host[at] = torch.from_numpy(rows).bfloat16()
    k.copy_(host_k)
    v.copy_(host_v)
    if "window_left" in options:  # pages that no query sees have been given back, and hold NaN
        table[0, : (lengths_k[0] - lengths_q[0] - options["window_left"]) // page_size] = free[0]
    q = torch.from_numpy(
        rng.standard_normal((sum(lengths_q), NUM_KV_HEADS * GROUP_SIZE, HEAD_DIM), np.float32)
    ).bfloat16()
    cu_seqlens_q = np.cumsum([0, *lengths_q], dtype=np.int32)
    seq_lens = np.array(lengths_k, np.int32)
    options = options | {"max_seqlen_q": max(lengths_q)}
    want = octavo.paged_attention(
        *(x.float().numpy() for x in (q, host_k, host_v)),
        table,
        seq_lens,
        cu_seqlens_q=cu_seqlens_q,
        **options,
    )
    arrays = q.cuda(), k, v, torch.from_numpy(table).cuda(), torch.from_numpy(seq_lens).cuda()
    options["cu_seqlens_q"] = torch.from_numpy(cu_seqlens_q).cuda()
    got = octavo.paged_attention(*arrays, **options)
    if is_hopper(torch):
        kernel = octavo.explain("paged_attention", *arrays, **options).kernel
        assert "over small pages, head_dim 128" in kernel
    np.testing.assert_allclose(got.float().cpu().numpy(), want, rtol=2e-2, atol=1e-2)
