"""Static caches of transformers: what a mask over one says, and attention to its front."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

import octavo.torch
from octavo._flash_attn_cache import packing, page_table_of
from octavo._transformers_hiding import HIDING_COLUMNS
from octavo._transformers_mask import Mask


def describe_static_mask(
    batch_size: int,
    q_length: int,
    end: int | Tensor,
    is_token: Tensor | None,
    window_left: int,
    device: torch.device,
) -> Mask:
    """Return a mask over a static cache whose keys up to `end` are of tokens, or of padding before them.

    A prompt that fills the front of an empty cache has its number of keys in Python. Everything else has
    lengths on the device, so that a compiled step, or a captured one, serves all lengths.
    """
    if q_length > 1 and not isinstance(end, Tensor):
        return Mask(True, window_left, num_keys=end)
    seq_lens = torch.as_tensor(end, device=device).to(torch.int32).expand(batch_size)
    if is_token is None:
        return Mask(True, window_left, seq_lens=seq_lens.contiguous())
    first = torch.where(is_token.any(1), is_token.int().argmax(1), end)  # of a row without tokens: none
    slots = torch.arange(is_token.shape[1], device=device)
    if bool((is_token != ((slots >= first[:, None]) & (slots < end))).any()):
        return Mask(True, window_left, seq_lens=seq_lens.contiguous(), hidden=~is_token)
    return Mask(True, window_left, seq_lens=(seq_lens - first).to(torch.int32), first_keys=first)


def over_static_cache(q: Tensor, k: Tensor, v: Tensor, mask: Mask, **arguments: Any) -> Tensor:
    """Attention to the front of a static cache, each row of which is a page: arrays [batch, seqlen, ...]."""
    batch, seqlen = q.shape[:2]
    value_dim = v.shape[-1]
    if mask.hidden is not None:
        v = torch.nn.functional.pad(v, (0, HIDING_COLUMNS))
    if mask.first_keys is not None:
        slots = mask.first_keys[:, None] + torch.arange(k.shape[1], device=k.device)
        at = slots.clamp(max=k.shape[1] - 1)[:, :, None, None]
        k, v = (x.gather(1, at.expand(x.shape)) for x in (k, v))
    out = octavo.torch.paged_attention(
        q.flatten(0, 1),
        k,
        v,
        page_table_of(batch, k, None, None),
        cast(Tensor, mask.seq_lens),
        cu_seqlens_q=packing(batch, seqlen, q.device),
        max_seqlen_q=None if seqlen == 1 else seqlen,
        window_left=mask.window_left,
        **mask.range_arguments,
        **arguments,
    )
    return cast(Tensor, out).view(*q.shape[:-1], v.shape[-1])[..., :value_dim]
