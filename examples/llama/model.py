"""Llama as a stack of Octavo's operators, on a paged KV cache: six of them a layer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

import octavo

from .weights import Layer, Weights


class Llama:
    """Computes the logits of new tokens, whose keys and values it appends to the cache.

    A call is safe in a CUDA graph: pages and lengths are read on the device. With `static_weight` the weights
    may be read before the launch in front has ended; whoever sets it promises that no work still under way
    writes to them. With `static_past` so may the keys and values of earlier tokens, and pages and lengths.
    """

    def __init__(
        self, weights: Weights, max_positions: int, static_weight: bool = False, static_past: bool = False
    ) -> None:
        self.config, self.weights = weights.config, weights
        self.static_weight, self.static_past = static_weight, static_past
        frequencies = weights.rotary_frequencies
        angles = torch.outer(torch.arange(max_positions, device=frequencies.device), frequencies)
        self._rotary = {"rotary_cos": angles.cos(), "rotary_sin": angles.sin()}

    def empty_caches(
        self, num_pages: int, page_size: int, kv_dtype: str | None = None
    ) -> list[octavo.PagedCache]:
        """One for each layer. Page 5 of every layer belongs to the same tokens: one allocator serves all."""
        config, like = self.config, self.weights.embedding
        shape = (num_pages, page_size, config.num_kv_heads, config.head_dim)
        return [
            octavo.empty_cache(*shape, kv_dtype or like.dtype, like=like) for _ in range(config.num_layers)
        ]

    def logits(
        self,
        tokens: Tensor,
        caches: Sequence[octavo.PagedCache],
        page_table: Tensor,
        seq_lens: Tensor,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
    ) -> Tensor:
        """The logits of the last new token of each sequence, [batch, vocabulary].

        Args:
            tokens: int64 [total]: the new tokens of the sequences, one after another.
            caches: of `empty_caches`; written.
            page_table: int32 [batch, max_pages].
            seq_lens: int32 [batch], the new tokens counted.
            cu_seqlens: int32 [batch + 1]: sequence b has the tokens from cu_seqlens[b] up to
                cu_seqlens[b + 1]. Default: one token a sequence.
            max_seqlen: the most new tokens of a sequence; given with cu_seqlens.
        """
        weights = self.weights
        tables = {"page_table": page_table, "seq_lens": seq_lens}
        to_append = {**tables, "cu_seqlens": cu_seqlens}
        to_attend = {**tables, "cu_seqlens_q": cu_seqlens, "max_seqlen_q": max_seqlen}
        hidden = weights.embedding[tokens]
        for layer, cache in zip(weights.layers, caches, strict=True):
            hidden = self._attention(hidden, layer, cache, to_append, to_attend)
            hidden = self._ffn(hidden, layer)
        if cu_seqlens is not None:
            hidden = hidden[cu_seqlens[1:].long() - 1]
        return self._linear(hidden, weights.head, norm_weight=weights.norm)

    def _attention(
        self,
        hidden: Tensor,
        layer: Layer,
        cache: octavo.PagedCache,
        to_append: dict[str, Tensor | None],
        to_attend: dict[str, Tensor | int | None],
    ) -> Tensor:
        config, pages = self.config, cache.arguments
        qkv = self._linear(hidden, layer.qkv, norm_weight=layer.attention_norm)
        heads = qkv.unflatten(-1, (-1, config.head_dim))
        q, k, v = heads.split((config.num_q_heads, config.num_kv_heads, config.num_kv_heads), dim=1)
        static = self.static_past
        # This rotates q in place.
        octavo.append_kv(k, v, q=q, q_out=q, **self._rotary, **to_append, **pages, static_tables=static)
        attended = octavo.paged_attention(q, **to_attend, **pages, static_past=static)
        return self._linear(attended.flatten(1), layer.attention_out, residual=hidden)

    def _ffn(self, hidden: Tensor, layer: Layer) -> Tensor:
        gated = self._linear(hidden, layer.gate_up, norm_weight=layer.ffn_norm, activation="silu_gate")
        return self._linear(gated, layer.down, residual=hidden)

    def _linear(
        self,
        x: Tensor,
        w: Tensor,
        *,
        norm_weight: Tensor | None = None,
        activation: str | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        return octavo.linear(
            x,
            w,
            activation=activation,
            residual=residual,
            static_weight=self.static_weight,
            norm_weight=norm_weight,
            norm_eps=self.config.rms_norm_eps,
        )
