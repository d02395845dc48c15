"""Packed arrays: the tokens of a padded batch, or sequences that transformers has put into one row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import masking_utils

from octavo._transformers_functions import are_same, closure_of
from octavo._transformers_refusals import refuse


@dataclass(frozen=True)
class Packing:
    """The tokens of a padded batch that are not padding, or sequences that fill its rows."""

    tokens: Tensor | None  # int64 [total]: where they are in the batch, flattened; None: all of it
    cu_seqlens: Tensor  # int32 [sequences + 1]
    max_seqlen: int

    @classmethod
    def of(cls, is_token: Tensor) -> Packing:
        lengths = is_token.sum(1)
        cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
        return cls(is_token.flatten().nonzero().flatten(), cu_seqlens, int(lengths.max()))

    @classmethod
    def of_sequences(cls, begins: Tensor) -> Packing:
        """Of sequences that begin where this is true, bool [batch, seqlen], and end where the next begins."""
        first = begins.flatten().nonzero().flatten()
        cu_seqlens = torch.nn.functional.pad(first, (0, 1), value=begins.numel()).to(torch.int32)
        return cls(None, cu_seqlens, int(cu_seqlens.diff().max()))

    def on(self, device: torch.device) -> Packing:
        tokens = None if self.tokens is None else self.tokens.to(device)
        return Packing(tokens, self.cu_seqlens.to(device), self.max_seqlen)

    def pack(self, array: Tensor) -> Tensor:
        """[batch, seqlen, heads, head_dim] to [total, heads, head_dim]."""
        flat = array.flatten(0, 1)
        return flat if self.tokens is None else flat[self.tokens]

    def unpack(self, packed: Tensor, batch: int, seqlen: int) -> Tensor:
        """[total, heads, head_dim] to [batch, seqlen, heads, head_dim], with 0 in place of padding."""
        if self.tokens is None:
            return packed.view(batch, seqlen, *packed.shape[1:])
        flat = packed.new_zeros((batch * seqlen, *packed.shape[1:]))
        flat[self.tokens] = packed
        return flat.view(batch, seqlen, *packed.shape[1:])


def find_begins(
    function: Callable[..., Any], batch_size: int, seqlen: int, device: torch.device
) -> Tensor | None:
    """Where packed sequences begin, bool [batch, seqlen]: tokens that do not see the one before them.

    None where all see it. What else they see is not looked at here.
    """
    rows, tokens = (torch.arange(n, device=device) for n in (batch_size, seqlen))
    sees = function(rows[:, None], rows.new_zeros(()), tokens, (tokens - 1).clamp(min=0))
    begins: Tensor = ~sees.expand(batch_size, seqlen)
    if not bool(begins[:, 1:].any()):
        return None
    begins[:, 0] = True
    return begins


def is_plain_packing(function: Callable[..., Any], window: int | None, begins: Tensor) -> bool:
    """Whether it is the function that transformers makes for position_ids that begin anew, and nothing else.

    Others that mean the same are compared element by element, as a window is.
    """
    if torch.compiler.is_compiling():
        return False
    parts = closure_of(function).get("mask_functions", ())
    of_positions, of_sequences = map(closure_of, parts) if len(parts) == 2 else ({}, {})
    position_ids = of_positions.get("position_ids")
    sequences = of_sequences.get("packed_sequence_mask")
    if not (isinstance(position_ids, Tensor) and isinstance(sequences, Tensor)):
        return False
    causal = masking_utils.causal_mask_function
    if window is not None:
        causal = masking_utils.sliding_window_causal_mask_function(window)
    expected = masking_utils.and_masks(
        masking_utils.remap_positions_for_packed_sequence(causal, position_ids),
        masking_utils.packed_sequence_mask_function(sequences),
    )
    if not are_same(function, expected):
        return False
    starts = (position_ids.diff(dim=1) != 1).expand(len(begins), -1)
    return torch.equal(starts, sequences.diff(dim=1) != 0) and torch.equal(starts, begins[:, 1:])


def given_packing(options: dict[str, Any], letter: str, device: torch.device) -> Packing:
    """What models hand down to FlashAttention: where packed queries or keys begin, and the most of them."""
    cu_seqlens, longest = (options.get(f"{name}_{letter}") for name in ("cu_seq_lens", "max_length"))
    if cu_seqlens is None or longest is None:
        refuse("cu_seq_lens_q, cu_seq_lens_k, max_length_q and max_length_k have to be given together")
    return Packing(None, cu_seqlens.to(device, torch.int32), int(longest))
