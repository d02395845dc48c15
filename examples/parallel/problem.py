"""One step of decoding, and each rank's part of it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

import octavo

SEQ_LENS = (1, 300, 77, 128)  # with the new token
NUM_Q_HEADS, NUM_KV_HEADS, HEAD_DIM, HIDDEN_SIZE, PAGE_SIZE = 8, 4, 64, 96, 16


@dataclass(frozen=True)
class Step:
    """Attention of one new token a sequence, and the projection of its output."""

    q: NDArray  # [batch, num_q_heads, head_dim]
    k: NDArray  # [batch, num_kv_heads, head_dim]: the new tokens'
    v: NDArray
    k_pages: NDArray  # [num_pages, page_size, num_kv_heads, head_dim]: the tokens' before
    v_pages: NDArray
    page_table: NDArray[np.int32]
    seq_lens: NDArray[np.int32]
    lens_to_append: NDArray[np.int32]  # seq_lens, or 0 where another rank gets the new token
    w_out: NDArray  # [num_q_heads, head_dim, hidden_size]

    def on_one_device(self) -> NDArray:
        """[batch, hidden_size]"""
        cache = self.k_pages.copy(), self.v_pages.copy()
        octavo.append_kv(self.k, self.v, *cache, self.page_table, self.seq_lens)
        out = octavo.paged_attention(self.q, *cache, self.page_table, self.seq_lens)
        return np.einsum("bhd,hdn->bn", out, self.w_out)

    def heads_of(self, rank: int, num_ranks: int) -> Step:
        """Tensor parallel: some KV heads, the query heads that they serve, and these heads' rows of w_out."""
        q, k = (
            slice(rank * n // num_ranks, (rank + 1) * n // num_ranks) for n in (NUM_Q_HEADS, NUM_KV_HEADS)
        )
        return Step(
            self.q[:, q],
            self.k[:, k],
            self.v[:, k],
            self.k_pages[:, :, k],
            self.v_pages[:, :, k],
            self.page_table,
            self.seq_lens,
            self.lens_to_append,
            self.w_out[q],
        )

    def pages_of(self, rank: int, num_ranks: int) -> Step:
        """Context parallel: page i of each sequence lies on rank i % num_ranks, in that rank's own cache."""
        table = self.page_table[:, rank::num_ranks]
        first_tokens = PAGE_SIZE * np.arange(rank, self.page_table.shape[1], num_ranks)
        tokens = np.clip(self.seq_lens[:, None] - first_tokens, 0, PAGE_SIZE)  # [batch, pages]
        seq_lens = tokens.sum(axis=1, dtype=np.int32)
        last_page = (self.seq_lens - 1) // PAGE_SIZE
        return Step(
            self.q,
            self.k,
            self.v,
            self.k_pages[table.reshape(-1)],
            self.v_pages[table.reshape(-1)],
            np.arange(table.size, dtype=np.int32).reshape(table.shape),
            seq_lens,
            np.where(last_page % num_ranks == rank, seq_lens, 0),
            self.w_out,
        )


def make_step(num_ranks: int) -> Step:
    """Every rank makes the same one. Its page table has a multiple of num_ranks columns."""
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> NDArray[np.float32]:
        return rng.standard_normal(shape, np.float32)

    columns = -(-max(SEQ_LENS) // PAGE_SIZE // num_ranks) * num_ranks
    num_pages = len(SEQ_LENS) * columns
    cache_shape = num_pages, PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM
    batch = len(SEQ_LENS)
    return Step(
        q=normal(batch, NUM_Q_HEADS, HEAD_DIM),
        k=normal(batch, NUM_KV_HEADS, HEAD_DIM),
        v=normal(batch, NUM_KV_HEADS, HEAD_DIM),
        k_pages=normal(*cache_shape),
        v_pages=normal(*cache_shape),
        page_table=rng.permutation(num_pages).astype(np.int32).reshape(batch, columns),
        seq_lens=np.array(SEQ_LENS, np.int32),
        lens_to_append=np.array(SEQ_LENS, np.int32),
        w_out=normal(NUM_Q_HEADS, HEAD_DIM, HIDDEN_SIZE) / 16,
    )
