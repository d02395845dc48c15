"""ALiBi on a GPU, where a score passes its row's maximum by 2^8 to within a rounding.

Only then does the maximum rise. Threads that share a row have biases of their own, and have to agree on it.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

import octavo

ROWS, KEYS = 64, 512
HIDDEN = -50.0  # the scores of all keys but two, in units of log2(e)
STEP = 2.0**-18  # by which rows differ: about a rounding


def pieces(number: float) -> list[float]:
    """Three numbers of bfloat16 that add up to a number of float32, nearly."""
    result = []
    for _ in range(3):
        result.append(float(ml_dtypes.bfloat16(number)))
        number -= result[-1]
    return result


def problem(
    head_dim: int, slope: float, late: int, early: int
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """q [ROWS, head_dim] and k [KEYS, head_dim].

    A kernel visits `late` first. In row 32 the weight of `early` is 2^8 times that of `late`, and later more.
    """
    q, k = np.zeros((ROWS, head_dim), np.float32), np.zeros((KEYS, head_dim), np.float32)
    q[:, :3], q[:, 3] = 1.0, np.arange(ROWS) - ROWS // 2
    k[:, 0], k[late, 0] = HIDDEN, 12.0
    k[early, :3] = pieces(12.0 + 8.0 + slope / np.log(2.0) * (late - early))
    k[early, 3] = STEP
    return q, k


def attended(
    q: NDArray[np.float32], k: NDArray[np.float32], v: NDArray[np.float64], slope: float
) -> NDArray[np.float64]:
    """Attention in float64."""
    scores = q.astype(np.float64) @ k.T.astype(np.float64) * np.log(2.0)
    scores -= slope * (KEYS - ROWS + np.arange(ROWS)[:, None] - np.arange(KEYS))
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True) @ v


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_row_raises_its_maximum_as_one(head_dim: int) -> None:
    torch = pytest.importorskip("torch")
    random = np.random.default_rng(head_dim)
    for _ in range(100):
        slope = float(np.float32(2.0 ** -random.uniform(1, 9)))
        late, early = int(random.integers(KEYS - 64, KEYS)), int(random.integers(0, KEYS - 256))
        q, k = problem(head_dim, slope, late, early)
        v = random.standard_normal((KEYS, head_dim)).astype(ml_dtypes.bfloat16).astype(np.float32)
        q_gpu, k_gpu, v_gpu = (
            torch.from_numpy(x)[None, :, None].to("cuda", torch.bfloat16) for x in (q, k, v)
        )
        slopes = torch.tensor([slope], device="cuda")
        out = octavo.attention(q_gpu, k_gpu, v_gpu, softmax_scale=float(np.log(2.0)), alibi_slopes=slopes)
        wanted = attended(q, k, v.astype(np.float64), slope)
        np.testing.assert_allclose(out[0, :, 0].float().cpu().numpy(), wanted, atol=0.03, rtol=0.02)
