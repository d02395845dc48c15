"""Random inputs of a case, its exact results, and how far others are from them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from _linear_cases import Case, Product
from torch import Tensor
from torch.nn.functional import silu

RUN = 128  # results beside one another whose errors are taken together


@dataclass(frozen=True)
class Step:
    """One product of a case: x [M, K], w [N, K] and where the result goes."""

    product: Product
    x: Tensor
    w: Tensor
    out: Tensor
    residual: Tensor | None


@dataclass(frozen=True)
class Inputs:
    case: Case
    x: Tensor
    weights: Sequence[Tensor]
    outs: Sequence[Tensor]

    @classmethod
    def drawn(cls, case: Case, weights: Sequence[Tensor]) -> Inputs:
        """With these weights."""
        first = weights[0]
        x = torch.randn(case.num_rows, case.products[0].depth, dtype=first.dtype, device=first.device)
        return cls(case, x, weights, [x.new_empty(case.num_rows, each.outputs) for each in case.products])

    def steps(self) -> Iterator[Step]:
        before, x = self.x, self.x
        for product, w, out in zip(self.case.products, self.weights, self.outs, strict=True):
            yield Step(product, x[:, : product.depth], w, out, before if product.residual else None)
            before, x = x, out


def draw_weights(case: Case, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """So large that results are about as large as inputs."""
    shapes = [(product.w_rows, product.depth) for product in case.products]
    return [torch.randn(shape, dtype=dtype, device=device).mul_(shape[1] ** -0.5) for shape in shapes]


def results_of(inputs: Inputs, dtype: torch.dtype, rounded_to: torch.dtype | None = None) -> list[Tensor]:
    """Compute them in one dtype, and round each of them, and of what lies between, to another one."""

    def rounded(result: Tensor) -> Tensor:
        return result if rounded_to is None else result.to(rounded_to).to(dtype)

    before = x = inputs.x.to(dtype)
    results: list[Tensor] = []
    for product, w in zip(inputs.case.products, inputs.weights, strict=True):
        result = rounded(x[:, : product.depth] @ w.to(dtype).t())
        if product.gated:
            gate, up = result.chunk(2, dim=-1)
            result = rounded(rounded(silu(gate)) * up)
        if product.residual:
            result = rounded(result + before)
        before, x = x, result
        results.append(result)
    return results


class Exact:
    """The results in float64, and the error of a plain implementation: float32 sums, every step rounded."""

    def __init__(self, inputs: Inputs) -> None:
        self._results = results_of(inputs, torch.float64)
        self.plain_error = self.error(results_of(inputs, torch.float32, rounded_to=inputs.x.dtype))

    def error(self, results: Sequence[Tensor]) -> float:
        """The largest ||x - exact|| / ||exact|| of a run of results in a row; NaN if there is one in them.

        Of a run and not of an element: a library may round the partial sums of parts of K, which of ten
        thousand elements costs the unluckiest more than twice the largest rounding error. One wrong element
        of a run shows all the same.
        """
        errors = []
        for result, exact in zip(results, self._results, strict=True):
            exact_runs = exact.unflatten(-1, (-1, RUN))
            difference = result.double().unflatten(-1, (-1, RUN)) - exact_runs
            errors.append((difference.norm(dim=-1) / exact_runs.norm(dim=-1)).max().item())
        return math.nan if any(map(math.isnan, errors)) else max(errors)
