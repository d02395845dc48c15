"""Prefill on a GPU over scores that lie far from zero, on either side, and rise late.

Kernels visit keys from the last to the first, and mostly do not look for the maximum of a row, but for scores
that pass the last one by 8 (in units of log2(e)), as integers: a limit below zero has to be told apart.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

import octavo

BLOCK = 16  # keys that have one score, but for a little noise
# Scores in units of log2(e), around what they have to pass to raise a maximum, and far beyond; and what they
# are multiplied by in a row. Rows of one warp have different factors.
PROBLEMS = {
    "either side": (
        [-300.0, -40.0, -17.0, -9.0, -8.0, -7.0, -1.0, 0.0, 7.0, 8.0, 9.0, 17.0, 40.0, 300.0],
        [1.0, -1.0, 0.25, -0.25, 0.0],
    ),
    # All below zero, and mostly so low that exp2 of them is 0.
    "below zero": ([-300.0, -292.0, -250.0, -200.0, -192.0, -184.0], [1.0, 0.9375, 1.0625]),
}


def attended(
    q: NDArray[np.float64], k: NDArray[np.float64], v: NDArray[np.float64], causal: bool
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Attention and log-sum-exp in float64, of scores in units of log2(e)."""
    scores = q @ k.T * np.log(2.0)
    if causal:
        scores[np.arange(len(k)) > len(k) - len(q) + np.arange(len(q))[:, None]] = -np.inf
    highest = scores.max(axis=1, keepdims=True)
    weights = np.exp(scores - highest)
    total = weights.sum(axis=1, keepdims=True)
    return weights / total @ v, (highest + np.log(total))[:, 0]


@pytest.mark.gpu
@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256, 512])
def test_scores_far_from_zero(head_dim: int, dtype: str, problem: str) -> None:
    torch = pytest.importorskip("torch")
    random = np.random.default_rng(head_dim)
    levels, factors = PROBLEMS[problem]
    rounded = np.float16 if dtype == "float16" else ml_dtypes.bfloat16
    # 192 rows of 1500 keys run in the kernels for long sequences of head dims 64 and 128.
    for rows, keys in ((200, 200), (200, 700), (192, 1500)):
        for causal in (False, True):
            q, k, v = (random.standard_normal((n, head_dim)) for n in (rows, keys, keys))
            q, k = 0.1 * q, 0.1 * k
            q[:, 0] = random.choice(factors, rows)
            k[:, 0] = np.repeat(random.choice(levels, keys), BLOCK)[:keys]
            q, k, v = (x.astype(rounded).astype(np.float64) for x in (q, k, v))
            on_gpu = [torch.from_numpy(x)[None, :, None].to("cuda", getattr(torch, dtype)) for x in (q, k, v)]
            out, lse = octavo.attention(
                *on_gpu, softmax_scale=float(np.log(2.0)), causal=causal, return_lse=True
            )
            wanted, wanted_lse = attended(q, k, v, causal)
            np.testing.assert_allclose(lse[0, :, 0].cpu().numpy(), wanted_lse, atol=1e-3, rtol=1e-5)
            np.testing.assert_allclose(out[0, :, 0].double().cpu().numpy(), wanted, atol=0.01, rtol=2.0**-7)
