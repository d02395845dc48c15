"""Octavo and PyTorch's operators behind one face: each turns a task's inputs into a call for gradients."""

from __future__ import annotations

import contextlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from _backward_check import Kept, Pair
from _backward_inputs import Inputs
from _backward_rows import DROPOUT_SEED, Task
from _contestants import UnsupportedError
from _report import OCTAVO
from torch import Tensor

import octavo
from support import oracle

OCTAVO_PLAIN = "octavo_plain"

Call = Callable[[], Sequence[Tensor]]  # returns dq, dk and dv


class Contestant(ABC):
    name: str
    peer = True
    checked = True

    def takes_part(self, task: Task) -> bool:
        return not task.standard

    @abstractmethod
    def prepare(self, task: Task, inputs: Inputs) -> Call:
        """Everything that need not be done at every step; raises UnsupportedError."""

    def kept(self, task: Task, inputs: Inputs, pairs: Sequence[Pair]) -> Kept:
        """What dropout multiplies the weights by in what prepare() returns."""
        raise NotImplementedError


class Octavo(Contestant):
    name = OCTAVO
    peer = False

    def takes_part(self, task: Task) -> bool:  # noqa: ARG002
        return True

    def prepare(self, task: Task, inputs: Inputs) -> Call:
        arrays = (inputs.q, inputs.k, inputs.v)
        options: dict[str, Any] = {**task.masks, "alibi_slopes": inputs.alibi_slopes}
        if task.dropout_p > 0.0:
            options |= {"dropout_p": task.dropout_p, "dropout_seed": DROPOUT_SEED}
        forward = partial(octavo.attention, *arrays, return_lse=True, **options)
        backward = partial(
            octavo.attention_backward, inputs.dout, *arrays, deterministic=task.deterministic, **options
        )
        if task.forward:
            return lambda: backward(*forward())
        out, lse = forward() if inputs.out is None else (inputs.out, inputs.lse)
        return partial(backward, out, lse)

    def kept(self, task: Task, inputs: Inputs, pairs: Sequence[Pair]) -> Kept:
        case, (n, m) = task.case, (inputs.q.shape[1], inputs.k.shape[1])

        def of_head(b: int, head: int) -> Tensor:
            dropout = oracle.Dropout(task.dropout_p, DROPOUT_SEED, b * case.num_q_heads + head)
            return torch.from_numpy(dropout.keep(0, 1, n, m)[0] / (1.0 - task.dropout_p))

        return {
            (b, kv_head): torch.stack(
                [of_head(b, kv_head * case.group_size + i) for i in range(case.group_size)]
            ).to(inputs.q.device)
            for b, kv_head in pairs
        }


class PlainOctavo(Octavo):
    """The same shape without the options, in turns with the rest: its own row checks it."""

    name = OCTAVO_PLAIN
    checked = False

    def takes_part(self, task: Task) -> bool:
        return task.plain != task and not task.standard

    def prepare(self, task: Task, inputs: Inputs) -> Call:
        return super().prepare(task.plain, replace(inputs, alibi_slopes=None, out=None, lse=None))


@contextlib.contextmanager
def _deterministic(is_wanted: bool) -> Iterator[None]:
    """Without what the mode does besides: filling new tensors with NaN."""
    fills = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(is_wanted)
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = fills


class TorchOperators(Contestant):
    """What scaled_dot_product_attention and its autograd call: heads come before tokens."""

    @abstractmethod
    def forward(self, task: Task, q: Tensor, k: Tensor, v: Tensor) -> Any:
        """The output and what the backward needs besides."""

    @abstractmethod
    def backward(self, task: Task, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, results: Any) -> Any: ...

    def prepare(self, task: Task, inputs: Inputs) -> Call:
        if task.case.alibi or task.case.softcap > 0.0:
            raise UnsupportedError("no ALiBi and no softcap in PyTorch's operator")
        q, k, v, dout = (x.transpose(1, 2) for x in (inputs.q, inputs.k, inputs.v, inputs.dout))

        def forward() -> Any:
            return self.forward(task, q, k, v)

        def backward(results: Any) -> list[Tensor]:
            with _deterministic(task.deterministic):
                gradients = self.backward(task, dout, q, k, v, results)
            return [x.transpose(1, 2) for x in gradients]

        if task.forward:
            return lambda: backward(forward())
        torch.manual_seed(DROPOUT_SEED)  # as kept() does
        return partial(backward, forward())

    def kept(self, task: Task, inputs: Inputs, pairs: Sequence[Pair]) -> Kept:
        """Read off: where the values of some keys are one-hot, each output is the weight of one key."""
        size, dim, num_keys = task.case.group_size, task.case.head_dim, inputs.k.shape[1]
        q, k = (x.transpose(1, 2) for x in (inputs.q, inputs.k))
        kept = {pair: q.new_empty(size, q.shape[2], num_keys, dtype=torch.float64) for pair in pairs}
        for begin in range(0, num_keys, dim):
            count = min(dim, num_keys - begin)
            v = torch.zeros_like(k)
            v[:, :, begin : begin + count, :count] = torch.eye(count, dtype=v.dtype, device=v.device)
            torch.manual_seed(DROPOUT_SEED)
            out = self.forward(task, q, k, v)[0]
            for (b, kv_head), mask in kept.items():
                of_group = out[b, kv_head * size : (kv_head + 1) * size, :, :count]
                mask[:, :, begin : begin + count] = (of_group != 0.0) / (1.0 - task.dropout_p)
        return kept


class CuDnn(TorchOperators):
    name = "cudnn"

    def prepare(self, task: Task, inputs: Inputs) -> Call:
        if task.deterministic:
            raise UnsupportedError("PyTorch keeps the plan of an earlier call, deterministic or not")
        return super().prepare(task, inputs)

    def forward(self, task: Task, q: Tensor, k: Tensor, v: Tensor) -> Any:
        return torch.ops.aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, task.dropout_p, task.case.causal
        )

    def backward(self, task: Task, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, results: Any) -> Any:
        out, lse, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seed, offset, _ = results
        return torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            *(dout, q, k, v, out, lse, seed, offset, None),
            *(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k),
            *(task.dropout_p, task.case.causal),
        )


class FlashAttention2(TorchOperators):
    name = "fa2"

    def forward(self, task: Task, q: Tensor, k: Tensor, v: Tensor) -> Any:
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, task.dropout_p, task.case.causal)

    def backward(self, task: Task, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, results: Any) -> Any:
        out, lse, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seed, offset, _ = results
        return torch.ops.aten._scaled_dot_product_flash_attention_backward(
            *(dout, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k),
            *(task.dropout_p, task.case.causal, seed, offset),
        )


class Eager(Contestant):
    """Standard attention: PyTorch's products and softmax, which keep all scores."""

    name = "eager"

    def takes_part(self, task: Task) -> bool:
        return task.standard

    def prepare(self, task: Task, inputs: Inputs) -> Call:
        case = task.case
        has_options = task.dropout_p > 0.0 or case.alibi or case.softcap > 0.0
        if not task.forward or has_options or case.group_size > 1:
            raise UnsupportedError("forward and backward of plain attention with equal heads only")
        q, k, v = (x.transpose(1, 2).requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
        dout = inputs.dout.transpose(1, 2)
        unseen = None
        if case.causal:
            seqlens = q.shape[2], k.shape[2]
            unseen = torch.ones(seqlens, dtype=torch.bool, device=q.device).triu_(1 + seqlens[1] - seqlens[0])

        def call() -> list[Tensor]:
            scores = (q * case.head_dim**-0.5) @ k.transpose(2, 3)
            if unseen is not None:
                scores.masked_fill_(unseen, -math.inf)
            gradients = torch.autograd.grad(scores.softmax(3) @ v, (q, k, v), dout)
            return [x.transpose(1, 2) for x in gradients]

        return call
