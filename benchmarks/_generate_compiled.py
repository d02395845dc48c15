"""Llama as gpt-fast would have it: plain PyTorch on static caches, compiled with tuned kernels.

A layer is compiled once for all of them, and one CUDA graph holds the step, so that no launch costs the host
anything. A layer takes what the one before has to add apart from what it is added to: so the sum becomes one
kernel with the norm, as it does where the whole step is compiled at once (`CompiledWhole`), which takes as
long for every single layer as this does for all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import _examples_path  # noqa: F401
import torch
from _generate_engines import Engine
from _generate_reference import Problem
from llama.config import Config
from llama.decoding import captured
from llama.weights import Layer
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import linear, scaled_dot_product_attention, silu

Attend = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def attend_by_math(q: Tensor, k: Tensor, v: Tensor, position: Tensor) -> Tensor:
    """Products and a softmax that the compiler makes its own kernels of."""
    visible = torch.arange(k.shape[2], device=k.device) <= position
    with sdpa_kernel(SDPBackend.MATH):
        return scaled_dot_product_attention(q, k, v, attn_mask=visible[None, None, None], enable_gqa=True)


def attend_by_flex(q: Tensor, k: Tensor, v: Tensor, position: Tensor) -> Tensor:
    """PyTorch's template of split-KV decoding."""

    def mask(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:  # noqa: ARG001
        return torch.where(j <= position[0], score, -torch.inf)

    return flex_attention(q, k, v, score_mod=mask, enable_gqa=True)


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return (wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt()).to(x.dtype) * weight


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


def _begin(tokens: Tensor, embedding: Tensor) -> tuple[Tensor, Tensor]:
    hidden = embedding[tokens]
    return hidden, torch.zeros_like(hidden)


def _end(hidden: Tensor, added: Tensor, weight: Tensor, head: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    logits = linear(_norm(hidden + added, weight, eps), head)
    return logits, logits.argmax(-1)


def _layer(
    attend: Attend,
    config: Config,
    hidden: Tensor,  # [batch, hidden_size]
    added: Tensor,  # likewise, by the layer before
    weights: tuple[Tensor, ...],
    k_cache: Tensor,  # [batch, num_kv_heads, capacity, head_dim]
    v_cache: Tensor,
    cos: Tensor,  # [capacity, head_dim / 2]
    sin: Tensor,
    position: Tensor,  # int64 [1], that of the new tokens
) -> tuple[Tensor, Tensor]:
    attention_norm, qkv, attention_out, ffn_norm, gate_up, down = weights
    hidden = hidden + added
    x = _norm(hidden, attention_norm, config.rms_norm_eps)
    heads = linear(x, qkv).view(len(x), -1, config.head_dim)
    q, k, v = heads.split((config.num_q_heads, config.num_kv_heads, config.num_kv_heads), dim=1)
    row, column = cos[position], sin[position]
    k_cache.index_copy_(2, position, _rotate(k, row, column)[:, :, None])
    v_cache.index_copy_(2, position, v[:, :, None])
    attended = attend(_rotate(q, row, column)[:, :, None], k_cache, v_cache, position)
    hidden = hidden + linear(attended.flatten(1), attention_out)
    gate, up = linear(_norm(hidden, ffn_norm, config.rms_norm_eps), gate_up).chunk(2, dim=-1)
    return hidden, linear(silu(gate) * up, down)


def _tensors(layer: Layer) -> tuple[Tensor, ...]:
    return tuple(vars(layer).values())


def _compiled(function: Any) -> Any:
    return torch.compile(function, fullgraph=True, dynamic=False, options={"coordinate_descent_tuning": True})


class Compiled(Engine):
    name = "compiled"
    compiles = True
    attend: ClassVar[Attend] = staticmethod(attend_by_math)
    whole_step: ClassVar[bool] = False

    def __init__(self, problem: Problem) -> None:
        case, weights, device = problem.case, problem.weights, problem.device
        self._weights = weights
        self._layers = [_tensors(layer) for layer in weights.layers]
        shape = (case.batch, weights.config.num_kv_heads, case.capacity, weights.config.head_dim)
        self._caches = []
        for context in problem.contexts():
            # Zeros: what is not visible yet is multiplied all the same, by weights of zero.
            caches = [torch.zeros(shape, dtype=x.dtype, device=device) for x in context]
            for cache, x in zip(caches, context, strict=True):
                cache[:, :, : case.context] = x.transpose(1, 2)
            self._caches.append(caches)
        angles = torch.outer(torch.arange(case.capacity, device=device), weights.rotary_frequencies)
        self._cos, self._sin = angles.cos(), angles.sin()
        self._position = torch.tensor([case.context], device=device)
        self.tokens = problem.tokens[:, 0].clone()

        self._functions = _begin, _layer, _end
        self._compute = self._compute_step
        if self.whole_step:
            self._compute = _compiled(self._compute_step)
        else:
            self._functions = tuple(map(_compiled, self._functions))
        on_gpu = device.type == "cuda"
        self._step = captured(self._run, (self.tokens, self._position)) if on_gpu else self._run

    def _compute_step(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        weights, config = self._weights, self._weights.config
        begin, layer, end = self._functions
        hidden, added = begin(tokens, weights.embedding)
        for of_layer, caches in zip(self._layers, self._caches, strict=True):
            tables = (*caches, self._cos, self._sin, self._position)
            hidden, added = layer(self.attend, config, hidden, added, of_layer, *tables)
        return end(hidden, added, weights.norm, weights.head, config.rms_norm_eps)

    def _run(self) -> None:
        self.logits, chosen = self._compute(self.tokens)
        self.tokens.copy_(chosen)
        self._position += 1

    def step(self) -> None:
        self._step()


class CompiledFlex(Compiled):
    """With PyTorch's FlexAttention."""

    name = "compiled_flex"
    attend = staticmethod(attend_by_flex)


class CompiledWhole(Compiled):
    """The whole step at once, which takes minutes for a model of 32 layers."""

    name = "compiled_whole"
    whole_step = True
