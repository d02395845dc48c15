"""Block masks on a GPU whose blocks of queries keep very different blocks of keys, beside the CPU.

A CTA loads what some of its blocks of queries keep; warpgroups pass over what only others need, few tiles or
many, also at the end of a row tile and where they have none of their own.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

import octavo

QUERIES, KEYS = 1500, 4000
HEADS = 24  # more row tiles than SMs


def masks(size: int) -> dict[str, NDArray[np.bool_]]:
    rows, columns = -(-QUERIES // size), -(-KEYS // size)
    random = np.random.default_rng(size)
    row, column = np.ogrid[:rows, :columns]
    lonely = np.broadcast_to(row % 3 == 1, (rows, columns))
    in_turns = (row % 2 == 0) == (column < columns // 2)
    return {
        "a few": random.random((HEADS, rows, columns)) < 0.02,
        "some": random.random((HEADS, rows, columns)) < 0.1,
        "many": random.random((HEADS, rows, columns)) < 0.5,
        "every third row": lonely[None].copy(),
        "rows in turns": np.stack([in_turns, lonely & (column % 9 == 0)] * (HEADS // 2)),
        "the first keys, and all": ((column == 0) | (row % 4 == 2))[None],
        "the last keys, and all": ((column == columns - 1) | (row % 4 == 3))[None],
    }


def check(q: Any, k: Any, v: Any, mask: NDArray[np.bool_], name: str, **options: Any) -> None:
    """Arrays of NumPy in float32, with numbers of bfloat16."""
    import torch

    wanted, wanted_lse = octavo.attention(q, k, v, block_mask=mask, return_lse=True, **options)
    q, k, v = (torch.from_numpy(x).to("cuda", torch.bfloat16) for x in (q, k, v))
    options = {
        key: torch.from_numpy(x).cuda() if isinstance(x, np.ndarray) else x for key, x in options.items()
    }
    blocks = torch.from_numpy(mask).cuda()
    out, lse = octavo.attention(q, k, v, block_mask=blocks, return_lse=True, **options)
    np.testing.assert_allclose(out.float().cpu().numpy(), wanted, atol=0.02, rtol=2.0**-7, err_msg=name)
    np.testing.assert_allclose(lse.cpu().numpy(), wanted_lse, atol=1e-3, rtol=1e-5, err_msg=name)


def random_array(seed: int, *shape: int) -> NDArray[np.float32]:
    numbers = np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)
    return numbers.astype(ml_dtypes.bfloat16).astype(np.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_blocks_that_differ(head_dim: int, size: int, causal: bool) -> None:
    pytest.importorskip("torch")
    q = random_array(0, 1, QUERIES, HEADS, head_dim)
    k, v = (random_array(seed, 1, KEYS, 2, head_dim) for seed in (1, 2))
    for name, mask in masks(size).items():
        check(q, k, v, mask, name, causal=causal, block_size=size)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_packed_blocks_that_differ(head_dim: int, size: int) -> None:
    pytest.importorskip("torch")
    lengths = np.array([[1, 64, 65, 193, 0, QUERIES], [70, 640, 65, 3000, 30, KEYS]])
    cu_seqlens_q, cu_seqlens_k = np.pad(lengths.cumsum(1), ((0, 0), (1, 0))).astype(np.int32)
    q = random_array(0, cu_seqlens_q[-1], HEADS, head_dim)
    k, v = (random_array(seed, cu_seqlens_k[-1], 2, head_dim) for seed in (1, 2))
    packed = {
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_k": cu_seqlens_k,
        "max_seqlen_q": QUERIES,
        "max_seqlen_k": KEYS,
    }
    sinks = random_array(3, HEADS)
    for name, mask in masks(size).items():
        check(q, k, v, mask, name, block_size=size, sinks=sinks, **packed)
