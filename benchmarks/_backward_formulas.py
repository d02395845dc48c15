"""Attention in float32 and its gradients in float64, by blocks of queries, on the device of the inputs.

The formulas are those of the tests' oracle (support/oracle_backward.py), and
tests/python/test_bench_backward_check.py compares the two. The oracle keeps all scores, and takes too long
for 16384 keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

QUERIES = 2048  # of a block, whose scores are kept at a time

Rounding = Callable[[Tensor], Tensor]


def _exact(x: Tensor) -> Tensor:
    return x


@dataclass(frozen=True)
class Scores:
    """How the scores of one query head come from its queries and keys."""

    causal: bool
    softcap: float
    slope: float | None  # of ALiBi
    alibi_symmetric: bool = False

    def __call__(
        self, q: Tensor, k: Tensor, first_position: int, rounded: Rounding = _exact
    ) -> tuple[Tensor, Tensor | float]:
        """[len(q), len(k)], and the derivative of the cap there. The queries sit at successive positions."""
        scores = rounded(q.shape[1] ** -0.5 * rounded(q @ k.T))
        slope_of_cap: Tensor | float = 1.0
        if self.softcap > 0.0:
            tanh = rounded(torch.tanh(scores / self.softcap))
            scores, slope_of_cap = rounded(self.softcap * tanh), 1.0 - tanh**2
        if self.causal or self.slope is not None:
            positions = first_position + torch.arange(len(q), device=q.device)
            distance = positions[:, None] - torch.arange(len(k), device=q.device)
            if self.slope is not None:
                scores = rounded(scores - self.slope * (distance.abs() if self.alibi_symmetric else distance))
            if self.causal:
                scores = scores.masked_fill(distance < 0, -math.inf)
        return scores, slope_of_cap


@dataclass(frozen=True)
class Block:
    """Some queries, and the keys that one of them sees."""

    queries: slice
    keys: slice
    first_position: int


def _blocks(num_queries: int, num_keys: int, causal: bool) -> Iterable[Block]:
    for begin in range(0, num_queries, QUERIES):
        end = min(begin + QUERIES, num_queries)
        positions = range(num_keys - num_queries + begin, num_keys - num_queries + end)
        yield Block(
            slice(begin, end), slice(positions.stop if causal else num_keys), first_position=positions.start
        )


def output_of_head(scores: Scores, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """out [n, head_dim] and lse [n] in float32."""
    q, k, v = (x.float() for x in (q, k, v))
    out, lse = torch.empty_like(q), q.new_empty(len(q))
    for block in _blocks(len(q), len(k), scores.causal):
        of_block, _ = scores(q[block.queries], k[block.keys], block.first_position)
        lse[block.queries] = of_block.logsumexp(1)
        out[block.queries] = of_block.softmax(1) @ v[block.keys]
    return out, lse


def gradients_of_head(
    scores: Scores, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, kept: Tensor | None, exact: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv of one query head: in float64, or as a plain implementation computes them.

    That one sums products in float32, and rounds to the inputs' type what a framework would keep between two
    operations.

    Args:
        scores: Of this head.
        q: [n, head_dim].
        k: [m, head_dim].
        v: Like k.
        dout: Like q.
        kept: [n, m], what dropout multiplies the weights by.
        exact: In float64.
    """
    work, dtype = torch.float64 if exact else torch.float32, q.dtype
    rounded: Rounding = _exact if exact else lambda x: x.to(dtype).to(work)
    q, k, v, dout = (x.to(work) for x in (q, k, v, dout))
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
    scale = q.shape[1] ** -0.5
    for block in _blocks(len(q), len(k), scores.causal):
        rows, keys = block.queries, block.keys
        of_block, slope_of_cap = scores(q[rows], k[keys], block.first_position, rounded)
        weights = rounded(of_block.softmax(1))
        multiplied_by = 1.0 if kept is None else kept[rows, keys].to(work)
        dropped = rounded(weights * multiplied_by)
        dweights = rounded(rounded(dout[rows] @ v[keys].T) * multiplied_by)
        delta = (weights * dweights).sum(1, keepdim=True)
        dscores = rounded(weights * (dweights - delta))
        dproducts = rounded(scale * rounded(dscores * slope_of_cap))
        dq[rows] = dproducts @ k[keys]
        dk[keys] += dproducts.T @ q[rows]
        dv[keys] += dropped.T @ dout[rows]
    return dq, dk, dv
