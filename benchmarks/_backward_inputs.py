"""Inputs of a task as torch tensors, drawn on the device that computes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from _backward_formulas import Scores, output_of_head
from _backward_rows import Task
from _inputs import as_dense
from _inputs import make_inputs as make_forward_inputs
from torch import Tensor


@dataclass(frozen=True)
class Inputs:
    """Dense, [batch, seqlen, heads, head_dim], with the results of the forward."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    alibi_slopes: Tensor | None  # float32 [num_q_heads]
    out: Tensor | None = None  # None where the forward is part of the task, or has dropout
    lse: Tensor | None = None  # float32 [batch, seqlen, num_q_heads]

    def scores(self, task: Task, head: int) -> Scores:
        slope = None if self.alibi_slopes is None else float(self.alibi_slopes[head])
        return Scores(**task.masks, slope=slope)


def output(task: Task, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """out like q and lse [batch, seqlen, num_q_heads], in float32 until out is rounded."""
    out, lse = torch.empty_like(inputs.q), inputs.q.new_empty(inputs.q.shape[:3], dtype=torch.float32)
    for head in range(task.case.num_q_heads):
        scores, kv_head = inputs.scores(task, head), head // task.case.group_size
        for b in range(task.case.batch):
            of_head = (inputs.q[b, :, head], inputs.k[b, :, kv_head], inputs.v[b, :, kv_head])
            out[b, :, head], lse[b, :, head] = output_of_head(scores, *of_head)
    return out, lse


def make_inputs(task: Task, device: str = "cuda") -> Inputs:
    """Random values, and the output of the forward as it is computed here: no contestant has a part in it."""
    drawn = make_forward_inputs(task.case, device)
    q, k, v = as_dense(task.case, drawn.q, drawn.k, drawn.v)
    inputs = Inputs(q, k, v, torch.randn_like(q), drawn.alibi_slopes)
    if task.forward or task.dropout_p > 0.0:
        return inputs
    out, lse = output(task, inputs)
    return replace(inputs, out=out, lse=lse)
