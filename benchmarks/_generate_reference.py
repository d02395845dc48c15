"""What every engine computes, written from the formulas of Llama: the logits of a few tokens after a context.

The context has no prompt: its keys and values are drawn, with the spread that projections of normalised rows
have, and are the same for everybody. Nobody keeps them but in a cache of its own, since they are drawn anew,
layer by layer, wherever they are needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import _examples_path  # noqa: F401
import torch
from _generate_cases import CHECKED_STEPS, Case
from llama.weights import Layer, Weights
from torch import Tensor
from torch.nn.functional import linear, silu

WEIGHT_STD = 0.02


@dataclass(frozen=True)
class Problem:
    """A case with its weights, and tokens that all engines take one after another."""

    case: Case
    weights: Weights
    tokens: Tensor  # of the steps whose logits are compared: int64 [batch, CHECKED_STEPS]
    seed: int

    @classmethod
    def drawn(cls, case: Case, weights: Weights, seed: int) -> Problem:
        """With random tokens."""
        device, shape = weights.embedding.device, (case.batch, CHECKED_STEPS)
        generator = torch.Generator(device).manual_seed(seed)
        tokens = torch.randint(case.config.vocabulary, shape, generator=generator, device=device)
        return cls(case, weights, tokens, seed)

    @property
    def device(self) -> torch.device:
        return self.tokens.device

    def contexts(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Keys (rotated already) and values of each layer: [batch, context, num_kv_heads, head_dim]."""
        config, generator = self.weights.config, torch.Generator(self.device).manual_seed(self.seed + 1)
        shape = (self.case.batch, self.case.context, config.num_kv_heads, config.head_dim)
        for _ in range(config.num_layers):
            k, v = (self.weights.embedding.new_empty(shape) for _ in "kv")
            std = WEIGHT_STD * config.hidden_size**0.5
            yield k.normal_(std=std, generator=generator), v.normal_(std=std, generator=generator)


def reference_logits(problem: Problem, dtype: torch.dtype) -> Tensor:
    """The logits of all checked steps, [batch, CHECKED_STEPS, vocabulary].

    In float32 they are what engines are compared with; in bfloat16 those of a plain implementation, which
    rounds the result of every operator.
    """
    config, weights, batch = problem.weights.config, problem.weights, problem.case.batch
    positions = problem.case.context + torch.arange(CHECKED_STEPS, device=problem.device)
    angles = torch.outer(positions, weights.rotary_frequencies)
    cos, sin = (x.to(dtype)[:, None] for x in (angles.cos(), angles.sin()))
    hidden = weights.embedding[problem.tokens].to(dtype)
    for layer, context in zip(weights.layers, problem.contexts(), strict=True):
        x = _norm(hidden, layer.attention_norm, config.rms_norm_eps)
        heads = linear(x, layer.qkv.to(dtype)).unflatten(-1, (-1, config.head_dim))
        q, k, v = heads.split((config.num_q_heads, config.num_kv_heads, config.num_kv_heads), dim=2)
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        old_k, old_v = context
        attended = torch.stack(
            [
                _attend(q[b], torch.cat([old_k[b].to(dtype), k[b]]), torch.cat([old_v[b].to(dtype), v[b]]))
                for b in range(batch)
            ]
        )
        hidden = hidden + linear(attended.flatten(2), layer.attention_out.to(dtype))
        hidden = hidden + _ffn(_norm(hidden, layer.ffn_norm, config.rms_norm_eps), layer)
    return linear(_norm(hidden, weights.norm, config.rms_norm_eps), weights.head.to(dtype))


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    mean_squares = x.float().square().mean(-1, keepdim=True)
    return (x.float() * (mean_squares + eps).rsqrt()).to(x.dtype) * weight.to(x.dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of one sequence: q [n, num_q_heads, head_dim] are the last n of the tokens of k and v."""
    n, length, num_kv_heads = len(q), len(k), k.shape[1]
    groups = q.unflatten(1, (num_kv_heads, -1))
    scores = torch.einsum("nhgd,mhd->hgnm", groups, k) * q.shape[-1] ** -0.5
    hidden = torch.ones(n, length, dtype=torch.bool, device=q.device).triu(length - n + 1)
    weights = scores.float().masked_fill(hidden, -torch.inf).softmax(-1).to(q.dtype)
    return torch.einsum("hgnm,mhd->nhgd", weights, v).flatten(1, 2)


def _ffn(x: Tensor, layer: Layer) -> Tensor:
    gate, up = linear(x, layer.gate_up.to(x.dtype)).chunk(2, dim=-1)
    return linear(silu(gate) * up, layer.down.to(x.dtype))
