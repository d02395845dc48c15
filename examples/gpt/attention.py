"""Attention over packed sequences, by octavo and by PyTorch's own operators. Both see exactly the same."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import octavo.torch

from .data import Batch


class Packed:
    """octavo.torch.attention: no token sees another sequence, and no matrix of scores is held."""

    def __init__(self, batch: Batch) -> None:
        self.sequences = {
            "cu_seqlens_q": batch.cu_seqlens,
            "cu_seqlens_k": batch.cu_seqlens,
            "max_seqlen_q": batch.context,
            "max_seqlen_k": batch.context,
        }

    def __call__(
        self,
        _: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        alibi_slopes: Tensor | None = None,
        dropout_p: float = 0.0,
    ) -> Tensor:
        # torch's generator of the CPU says which weights are dropped, and a checkpoint has its state.
        seed = int(torch.randint(2**63 - 1, ())) if dropout_p > 0 else None
        return octavo.torch.attention(
            q,
            k,
            v,
            causal=True,
            alibi_slopes=alibi_slopes,
            dropout_p=dropout_p,
            dropout_seed=seed,
            **self.sequences,
        )


class Eager:
    """Standard attention: every score of a row of the batch, and a mask for what is of other sequences."""

    def __init__(self, batch: Batch) -> None:
        self.rows = -1, batch.context
        index = torch.arange(len(batch.tokens), dtype=torch.int32, device=batch.tokens.device)
        sequence = torch.searchsorted(batch.cu_seqlens[1:], index, right=True).view(self.rows)
        position = batch.positions.view(self.rows)
        self.distance = position[:, None, :, None] - position[:, None, None, :]  # [rows, 1, queries, keys]
        same = sequence[:, None, :, None] == sequence[:, None, None, :]
        self.visible = same & (self.distance >= 0)

    def __call__(
        self,
        _: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        alibi_slopes: Tensor | None = None,
        dropout_p: float = 0.0,
    ) -> Tensor:
        q, k, v = (x.unflatten(0, self.rows).transpose(1, 2) for x in (q, k, v))  # [rows, heads, context, :]
        scores = (q @ k.transpose(-2, -1)).float() * q.shape[-1] ** -0.5
        if alibi_slopes is not None:
            scores = scores - alibi_slopes[:, None, None] * self.distance
        weights = scores.masked_fill(~self.visible, -torch.inf).softmax(-1)
        weights = nn.functional.dropout(weights, dropout_p).to(v.dtype)
        return (weights @ v).transpose(1, 2).flatten(0, 1)


ATTENTION = {"octavo": Packed, "eager": Eager}
