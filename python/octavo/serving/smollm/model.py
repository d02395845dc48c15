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

    last_rows: Array
    """int [batch]: of the T rows those whose logits are wanted."""

    def attend(
        self,
        layer: int,
        q: Array,
        k: Array,
        v: Array,
        *,
        rotary_cos: Array,
        rotary_sin: Array,
        rotary_interleaved: bool,
    ) -> Array:
        """Append keys and values [T, num_kv_heads, head_dim] of a layer, and attend to them with q, [T,
        num_q_heads, head_dim], all queries and keys rotated by their positions.
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
            return arrays.asarray(tensors[f"{name}.weight"], arrays.product_dtype)

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
        self._rotary = {
            "rotary_cos": arrays.asarray(np.cos(angles).astype(np.float32)),
            "rotary_sin": arrays.asarray(np.sin(angles).astype(np.float32)),
            # GGUF stores Llama's Q and K rows so that neighbours (2i, 2i + 1) turn together; Hugging Face's
            # checkpoints have them half a head apart.
            "rotary_interleaved": True,
        }

    def forward(self, step: Step, tokens: NDArray[np.int64]) -> NDArray[np.float32]:
        """Appends the tokens [T] to the cache; returns float32 logits [batch, vocabulary]."""
        arrays, eps = self.arrays, self.config.rms_norm_eps
        # Numbers of a text's first token become the largest ones: up to 30755, which float16 holds.
        hidden = arrays.cast(self._embedding[arrays.asarray(tokens)], arrays.product_dtype)
        for index, layer in enumerate(self._layers):
            qkv = octavo.linear(hidden, layer.qkv, norm_weight=layer.attn_norm, norm_eps=eps)
            hidden = octavo.linear(self._attend(step, index, qkv), layer.attn_out, residual=hidden)
            gated = octavo.linear(
                hidden, layer.gate_up, activation="silu_gate", norm_weight=layer.ffn_norm, norm_eps=eps
            )
            hidden = octavo.linear(gated, layer.down, residual=hidden)
        last = hidden[step.last_rows]
        return arrays.to_host(
            octavo.linear(last, self._embedding, norm_weight=self._output_norm, norm_eps=eps)
        )

    def _attend(self, step: Step, layer: int, qkv: Array) -> Array:
        config, arrays = self.config, self.arrays
        heads = arrays.cast(qkv, arrays.cache_dtype).reshape(len(qkv), -1, config.head_dim)
        end_of_q, end_of_k = config.num_q_heads, config.num_q_heads + config.num_kv_heads
        q, k, v = heads[:, :end_of_q], heads[:, end_of_q:end_of_k], heads[:, end_of_k:]
        out = step.attend(layer, q, k, v, **self._rotary)
        return arrays.cast(out.reshape(len(qkv), -1), arrays.product_dtype)
