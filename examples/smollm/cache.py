"""The pages of all layers, and a batch over them as octavo.serving.smollm's model takes it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

import octavo
from octavo.serving.smollm.arrays import Array, Arrays
from octavo.serving.smollm.weights import Config


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
        self.arrays = arrays
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
        on_device = self.arrays.asarray(copies)
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


class BatchStep:
    """A batch on the device, as Llama.forward takes it."""

    def __init__(self, batch: Batch, cache: PagedCache) -> None:
        asarray = cache.arrays.asarray
        longest = int(np.diff(batch.cu_seqlens).max())
        packed = longest > 1  # if not: one token a sequence
        self.positions = asarray(batch.positions)
        self.last_rows = asarray(batch.logit_rows)
        self._cache = cache
        self._table = {"page_table": asarray(batch.page_table), "seq_lens": asarray(batch.seq_lens)}
        self._cu_seqlens = asarray(batch.cu_seqlens) if packed else None
        self._max_seqlen = longest if packed else None

    def attend(self, layer: int, q: Array, k: Array, v: Array) -> Array:
        of_layer = {**self._table, **self._cache.layers[layer].arguments}
        octavo.append_kv(k, v, cu_seqlens=self._cu_seqlens, **of_layer)
        return octavo.paged_attention(
            q, cu_seqlens_q=self._cu_seqlens, max_seqlen_q=self._max_seqlen, **of_layer
        )
