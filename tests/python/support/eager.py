"""Attention of plain PyTorch operators in float64, through which autograd goes back step by step."""

from __future__ import annotations

from typing import Any

import torch

from support import oracle


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    alibi_slopes: Any = None,
    alibi_symmetric: bool = False,
    prefix_lens: Any = None,
    bidirectional_ranges: Any = None,
    dropout_p: float = 0.0,
    dropout_seed: int = 0,
    dropout_offset: int = 0,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    sinks: Any = None,
    **masks: Any,
) -> tuple[Any, Any]:
    """out and lse of ``octavo.attention``, on the CPU.

    A query that sees nothing and has no sink has an lse below -1e20.
    """
    if cu_seqlens_q is None:
        sequences = list(zip(q, k, v, strict=True))
    else:
        parts = [x.cpu().diff().tolist() for x in (cu_seqlens_q, cu_seqlens_k)]
        sequences = list(zip(q.split(parts[0]), k.split(parts[1]), v.split(parts[1]), strict=True))
    dropout = oracle.Dropout(dropout_p, dropout_seed, dropout_offset)
    outs, lses = [], []
    for b, sequence in enumerate(sequences):
        one_q, one_k, one_v = (x.cpu().double() for x in sequence)
        (n, num_q_heads, head_dim), (m, num_kv_heads, _) = one_q.shape, one_k.shape
        one_k, one_v = (x.repeat_interleave(num_q_heads // num_kv_heads, 1) for x in (one_k, one_v))
        scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
        scores = scale * torch.einsum("ihd,jhd->hij", one_q, one_k)
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        positions = oracle.positions(n, m)
        if alibi_slopes is not None:
            slopes = alibi_slopes.cpu().double()
            distances = torch.from_numpy(positions)[:, None] - torch.arange(m)
            distances = distances.abs() if alibi_symmetric else distances
            scores = scores - (slopes[b] if slopes.ndim == 2 else slopes)[:, None, None] * distances
        prefix_len = 0 if prefix_lens is None else int(prefix_lens[b])
        ranges = None if bidirectional_ranges is None else bidirectional_ranges[b].cpu().numpy()
        see = torch.from_numpy(oracle.visible(positions, m, prefix_len=prefix_len, ranges=ranges, **masks))
        scores = scores.masked_fill(~see, -1e30)
        joined = scores
        if sinks is not None:
            column = sinks.cpu().double()[:, None, None].expand(num_q_heads, n, 1)
            joined = torch.cat([scores, column], dim=-1)
        lse = joined.logsumexp(-1, keepdim=True)
        kept = torch.from_numpy(dropout.keep(b, num_q_heads, n, m)) / (1.0 - dropout_p)
        outs.append(torch.einsum("hij,jhd->ihd", (scores - lse).exp() * see * kept, one_v))
        lses.append(lse.squeeze(-1).T)
    combine = torch.stack if cu_seqlens_q is None else torch.cat
    return combine(outs), combine(lses)
