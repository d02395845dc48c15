"""The Llama architecture on a paged KV cache, written once for every array library."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

import octavo
from octavo.serving.smollm.arrays import Array, Arrays
from octavo.serving.smollm.weights import Checkpoint


class Step(Protocol):
    """The new tokens of several sequences, one after another, over a cache: octavo.KVCache.step()'s."""

    positions: Array
    """int [T]: of each new token in its sequence."""
    last_rows: Array
    """int [batch]: of the T rows those whose logits are wanted."""

    def attend(self, layer: int, q: Array, k: Array, v: Array) -> Array:
        """Append keys and values [T, num_kv_heads, head_dim] of a layer, and attend to them with q, [T,
        num_q_heads, head_dim].
        """
        ...


@dataclass(frozen=True)
class Layer:
    attn_norm: Array  # [hidden_size]
    qkv: Array  # [(num_q_heads + 2 * num_kv_heads) * head_dim, hidden_size]
    attn_out: Array  # [hidden_size, num_q_heads * head_dim]
    ffn_norm: Array  # [hidden_size]
    gate_up: Array  # [2 * ffn_size, hidden_size]
    down: Array  # [hidden_size, ffn_size]


class Llama:
    def __init__(self, checkpoint: Checkpoint, arrays: Arrays) -> None:
        self.config = config = checkpoint.config
        self.arrays = arrays
        tensors = checkpoint.tensors()

        def norm(name: str) -> Array:
            return arrays.asarray(tensors[f"{name}.weight"], arrays.float32)

        def matrix(*names: str) -> Array:
            parts = [tensors[f"{name}.weight"] for name in names]
            return arrays.asarray(parts[0] if len(parts) == 1 else np.concatenate(parts), arrays.weight_dtype)

        self._embedding = matrix("token_embd")  # tied: it also makes the logits
        self._layers = [
            Layer(
                attn_norm=norm(f"{blk}.attn_norm"),
                qkv=matrix(f"{blk}.attn_q", f"{blk}.attn_k", f"{blk}.attn_v"),
                attn_out=matrix(f"{blk}.attn_output"),
                ffn_norm=norm(f"{blk}.ffn_norm"),
                gate_up=matrix(f"{blk}.ffn_gate", f"{blk}.ffn_up"),
                down=matrix(f"{blk}.ffn_down"),
            )
            for blk in (f"blk.{i}" for i in range(config.num_layers))
        ]
        self._output_norm = norm("output_norm")
        frequencies = config.rope_theta ** (-np.arange(0, config.head_dim, 2) / config.head_dim)
        angles = np.arange(config.context_length)[:, None] * frequencies
        self._cos = arrays.asarray(np.cos(angles), arrays.float32)
        self._sin = arrays.asarray(np.sin(angles), arrays.float32)

    def forward(self, step: Step, tokens: NDArray[np.int64]) -> NDArray[np.float32]:
        """Appends the tokens [T] to the cache; returns float32 logits [batch, vocabulary]."""
        arrays = self.arrays
        cos, sin = self._cos[step.positions][:, None, :], self._sin[step.positions][:, None, :]
        hidden = arrays.cast(self._embedding[arrays.asarray(tokens)], arrays.float32)
        for index, layer in enumerate(self._layers):
            q, k, v = self._project(self._norm(hidden, layer.attn_norm), layer, cos, sin)
            out = step.attend(index, q, k, v).reshape(len(tokens), -1)
            hidden = hidden + octavo.linear(arrays.cast(out, arrays.product_dtype), layer.attn_out)
            hidden = hidden + self._ffn(self._norm(hidden, layer.ffn_norm), layer)
        last = self._norm(hidden[step.last_rows], self._output_norm)
        return arrays.to_host(octavo.linear(last, self._embedding))

    def _project(self, x: Array, layer: Layer, cos: Array, sin: Array) -> tuple[Array, Array, Array]:
        config, arrays = self.config, self.arrays
        num_q, num_kv = config.num_q_heads, config.num_kv_heads
        qkv = octavo.linear(x, layer.qkv).reshape(len(x), num_q + 2 * num_kv, config.head_dim)
        qk = arrays.cast(self._rotate(qkv[:, : num_q + num_kv], cos, sin), arrays.cache_dtype)
        v = arrays.cast(qkv[:, num_q + num_kv :], arrays.cache_dtype)
        return qk[:, :num_q], qk[:, num_q:], v

    def _rotate(self, x: Array, cos: Array, sin: Array) -> Array:
        # GGUF stores Llama's Q and K rows so that neighbours (2i, 2i + 1) turn together; Hugging Face's
        # checkpoints have them half a head apart.
        even, odd = x[..., 0::2], x[..., 1::2]
        turned = even * cos - odd * sin, even * sin + odd * cos
        return self.arrays.xp.stack(turned, -1).reshape(x.shape)

    def _ffn(self, x: Array, layer: Layer) -> Array:
        return octavo.linear(octavo.linear(x, layer.gate_up, activation="silu_gate"), layer.down)

    def _norm(self, x: Array, weight: Array) -> Array:
        mean_square = self.arrays.xp.mean(x * x, axis=-1, keepdims=True)
        return self.arrays.cast(
            x * (mean_square + self.config.rms_norm_eps) ** -0.5 * weight, self.arrays.product_dtype
        )
