"""Columns added to heads, which take all weight from keys of padding inside a sequence."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo._transformers_refusals import refuse

# A hidden key's score is so low in every dtype that it has no weight beside any other. Queries of padding,
# whose results nobody uses, may see hidden keys alone: that is finite.
HIDING_COLUMNS, _HIDING_QUERY, _HIDING_KEY = 8, 128.0, -30000.0
_MAX_HEAD_DIM = 512


def hide(q: Tensor, k: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys with more columns, which take all weight from hidden keys, bool [batch, keys].

    Other keys have zeros there, so that their scores stay what they are.
    """
    if q.shape[-1] + HIDING_COLUMNS > _MAX_HEAD_DIM:
        refuse(f"heads of {q.shape[-1]} with padding inside a sequence, under a window or in a static cache")
    columns = torch.where(hidden, _HIDING_KEY, 0.0).to(k.dtype)[:, :, None, None]
    hiding = columns.expand(*columns.shape[:2], k.shape[2], HIDING_COLUMNS)
    k = torch.cat([k[:, : hidden.shape[1]], hiding], -1)
    return torch.nn.functional.pad(q, (0, HIDING_COLUMNS), value=_HIDING_QUERY), k
