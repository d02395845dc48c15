"""Block masks on a GPU whose blocks of queries keep very different blocks of keys, beside the CPU.

A CTA loads what some of its blocks of queries keep; warpgroups pass over what only others need, few tiles or
many, also at the end of a row tile and where they have none of their own.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

import octavo

QUERIES, KEYS, HEADS = 1500, 6000, 2


def masks(size: int) -> dict[str, NDArray[np.bool_]]:
    rows, columns = -(-QUERIES // size), -(-KEYS // size)
    random = np.random.default_rng(size)
    row, column = np.ogrid[:rows, :columns]
    lonely = np.broadcast_to(row % 3 == 1, (rows, columns))
    return {
        "a few": random.random((HEADS, rows, columns)) < 0.02,
        "some": random.random((HEADS, rows, columns)) < 0.1,
        "many": random.random((HEADS, rows, columns)) < 0.5,
        "every third row": lonely[None],
        "rows in turns": np.stack([(row % 2 == 0) == (column < columns // 2), lonely & (column % 9 == 0)]),
        "the first keys, and all": ((column == 0) | (row % 4 == 2))[None],
        "the last keys, and all": ((column == columns - 1) | (row % 4 == 3))[None],
    }


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_blocks_that_differ(head_dim: int, size: int, causal: bool) -> None:
    torch = pytest.importorskip("torch")
    random = np.random.default_rng(head_dim)
    q, k, v = (
        random.standard_normal((1, n, HEADS, head_dim)).astype(ml_dtypes.bfloat16).astype(np.float32)
        for n in (QUERIES, KEYS, KEYS)
    )
    on_gpu = [torch.from_numpy(x).to("cuda", torch.bfloat16) for x in (q, k, v)]
    for name, view in masks(size).items():
        mask = np.ascontiguousarray(view)
        options = {"causal": causal, "block_size": size, "return_lse": True}
        wanted, wanted_lse = octavo.attention(q, k, v, block_mask=mask, **options)
        blocks = torch.from_numpy(mask).cuda()
        out, lse = octavo.attention(*on_gpu, block_mask=blocks, **options)
        np.testing.assert_allclose(out.float().cpu().numpy(), wanted, atol=0.02, rtol=2.0**-7, err_msg=name)
        np.testing.assert_allclose(lse.cpu().numpy(), wanted_lse, atol=1e-3, rtol=1e-5, err_msg=name)
