"""Compares gradients with exact ones, in some heads."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from _backward_formulas import gradients_of_head
from _backward_inputs import Inputs
from _backward_rows import Task
from torch import Tensor

Pair = tuple[int, int]  # a sequence, and a KV head
Kept = dict[Pair, Tensor]  # of its query heads, [group_size, n, m]: what dropout multiplies the weights by


class Sample:
    """The exact gradients of some KV heads and their groups, and the errors of plain ones."""

    def __init__(self, task: Task, inputs: Inputs) -> None:
        self._task, self._inputs = task, inputs
        case = task.case
        self.pairs: list[Pair] = sorted({(0, 0), (case.batch - 1, case.num_kv_heads - 1)})
        self._without_dropout: list[tuple[list[Tensor], float]] | None = None

    def errors(self, gradients: Sequence[Tensor], kept: Kept | None = None) -> tuple[float, float]:
        """The largest ||x - exact|| / ||exact|| of dq, dk and dv, and that of a plain implementation.

        NaN if there is one in `gradients`.
        """
        if kept is not None:
            references = [self._reference(pair, kept[pair]) for pair in self.pairs]
        else:
            if self._without_dropout is None:
                self._without_dropout = [self._reference(pair) for pair in self.pairs]
            references = self._without_dropout
        errors = [
            _relative_error(self._of_pair(gradients, pair), exact)
            for pair, (exact, _) in zip(self.pairs, references, strict=True)
        ]
        return _largest(errors), _largest(plain for _, plain in references)

    def _heads(self, kv_head: int) -> range:
        size = self._task.case.group_size
        return range(kv_head * size, (kv_head + 1) * size)

    def _of_pair(self, gradients: Sequence[Tensor], pair: Pair) -> list[Tensor]:
        b, kv_head = pair
        heads = self._heads(kv_head)
        dq, dk, dv = gradients
        return [dq[b, :, heads.start : heads.stop], dk[b, :, kv_head], dv[b, :, kv_head]]

    def _gradients(self, pair: Pair, kept: Tensor | None, exact: bool) -> list[Tensor]:
        (b, kv_head), inputs = pair, self._inputs
        of_heads: list[Any] = []
        for i, head in enumerate(self._heads(kv_head)):
            arrays = (
                inputs.q[b, :, head],
                inputs.k[b, :, kv_head],
                inputs.v[b, :, kv_head],
                inputs.dout[b, :, head],
            )
            of_head = None if kept is None else kept[i]
            of_heads.append(gradients_of_head(inputs.scores(self._task, head), *arrays, of_head, exact))
        dq, dk, dv = (torch.stack(parts, 1) for parts in zip(*of_heads, strict=True))
        return [dq, dk.sum(1), dv.sum(1)]

    def _reference(self, pair: Pair, kept: Tensor | None = None) -> tuple[list[Tensor], float]:
        exact = self._gradients(pair, kept, exact=True)
        plain = [x.to(self._inputs.q.dtype) for x in self._gradients(pair, kept, exact=False)]
        return exact, _relative_error(plain, exact)


def _relative_error(found: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    norms = (((x.double() - true).norm() / true.norm()).item() for x, true in zip(found, exact, strict=True))
    return _largest(norms)


def _largest(numbers: Iterable[float]) -> float:
    """NaN if one is."""
    return max(numbers, key=lambda x: (math.isnan(x), x))
