"""The Llama architecture on a paged KV cache, written once for every array library."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

import octavo

from .arrays import Array, Arrays
from .weights import Checkpoint, Config


class PagedCache:
    """Pages for every layer's keys and values. One page id means the same page in all layers, so a
    single allocator keeps them."""

    def __init__(
        self,
        config: Config,
        arrays: Arrays,
        num_pages: int,
        page_size: int,
        kv_dtype: str | None = None,  # None: that of the queries
    ) -> None:
        shape = (num_pages, page_size, config.num_kv_heads, config.head_dim)
        like = arrays.asarray(np.empty(0, np.float32))
        self._arrays = arrays
        self.num_pages = num_pages
        self.page_size = page_size
        self.layers = [
            octavo.empty_cache(*shape, kv_dtype or arrays.cache_dtype, like=like)
            for _ in range(config.num_layers)
        ]

    @property
    def bytes_per_token(self) -> int:
        """In all layers, scales counted."""
        return sum(layer.bytes_per_token for layer in self.layers)

    def copy_pages(self, copies: np.ndarray) -> None:
        on_device = self._arrays.asarray(copies)
        for layer in self.layers:
            octavo.copy_pages(copies=on_device, **layer.arrays)


@dataclass(frozen=True)
class Batch:
    """The new tokens of several sequences, one after another: whole or partial prompts and single
    decode tokens in any mix."""

    tokens: np.ndarray  # int64 [total]
    positions: np.ndarray  # int64 [total]
    cu_seqlens: np.ndarray  # int32 [batch + 1]
    page_table: np.ndarray  # int32 [batch, max_pages]
    seq_lens: np.ndarray  # int32 [batch], the new tokens counted
    logit_rows: np.ndarray  # int64, the tokens whose logits are wanted


@dataclass(frozen=True)
class Layer:
    attn_norm: Array  # [hidden_size]
    qkv: Array  # [(num_q_heads + 2 * num_kv_heads) * head_dim, hidden_size]
    attn_out: Array  # [hidden_size, num_q_heads * head_dim]
    ffn_norm: Array  # [hidden_size]
    gate_up: Array  # [2 * ffn_size, hidden_size]
    down: Array  # [hidden_size, ffn_size]


@dataclass(frozen=True)
class Step:
    """What every layer needs of a batch, on the device."""

    cos: Array  # [total, 1, head_dim / 2]
    sin: Array
    page_table: Array
    seq_lens: Array
    cu_seqlens: Array | None  # None, as the next: one token a sequence
    max_seqlen: int | None


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

    def forward(self, batch: Batch, cache: PagedCache) -> np.ndarray:
        """Appends the batch to the cache; returns float32 logits [len(logit_rows), vocabulary]."""
        arrays = self.arrays
        positions = arrays.asarray(batch.positions)
        longest = int(np.diff(batch.cu_seqlens).max())
        packed = longest > 1
        step = Step(
            cos=self._cos[positions][:, None, :],
            sin=self._sin[positions][:, None, :],
            page_table=arrays.asarray(batch.page_table),
            seq_lens=arrays.asarray(batch.seq_lens),
            cu_seqlens=arrays.asarray(batch.cu_seqlens) if packed else None,
            max_seqlen=longest if packed else None,
        )
        hidden = arrays.cast(self._embedding[arrays.asarray(batch.tokens)], arrays.float32)
        for layer, pages in zip(self._layers, cache.layers, strict=True):
            hidden = hidden + self._attention(self._norm(hidden, layer.attn_norm), layer, pages, step)
            hidden = hidden + self._ffn(self._norm(hidden, layer.ffn_norm), layer)
        last = self._norm(hidden[arrays.asarray(batch.logit_rows)], self._output_norm)
        return arrays.to_host(octavo.linear(last, self._embedding))

    def _attention(self, x: Array, layer: Layer, pages: octavo.PagedCache, step: Step) -> Array:
        config, arrays = self.config, self.arrays
        num_q, num_kv = config.num_q_heads, config.num_kv_heads
        qkv = octavo.linear(x, layer.qkv).reshape(len(x), num_q + 2 * num_kv, config.head_dim)
        qk = arrays.cast(self._rotate(qkv[:, : num_q + num_kv], step), arrays.cache_dtype)
        q, k = qk[:, :num_q], qk[:, num_q:]
        v = arrays.cast(qkv[:, num_q + num_kv :], arrays.cache_dtype)
        of_batch = {"page_table": step.page_table, "seq_lens": step.seq_lens, **pages.arguments}
        octavo.append_kv(k, v, cu_seqlens=step.cu_seqlens, **of_batch)
        out = octavo.paged_attention(
            q, cu_seqlens_q=step.cu_seqlens, max_seqlen_q=step.max_seqlen, **of_batch
        )
        return octavo.linear(arrays.cast(out.reshape(len(x), -1), arrays.product_dtype), layer.attn_out)

    def _rotate(self, x: Array, step: Step) -> Array:
        # GGUF stores Llama's Q and K rows so that neighbours (2i, 2i + 1) turn together; Hugging Face's
        # checkpoints have them half a head apart.
        even, odd = x[..., 0::2], x[..., 1::2]
        turned = even * step.cos - odd * step.sin, even * step.sin + odd * step.cos
        return self.arrays.xp.stack(turned, -1).reshape(x.shape)

    def _ffn(self, x: Array, layer: Layer) -> Array:
        return octavo.linear(octavo.linear(x, layer.gate_up, activation="silu_gate"), layer.down)

    def _norm(self, x: Array, weight: Array) -> Array:
        mean_square = self.arrays.xp.mean(x * x, axis=-1, keepdims=True)
        return self.arrays.cast(
            x * (mean_square + self.config.rms_norm_eps) ** -0.5 * weight, self.arrays.product_dtype
        )
