"""Blocks of tokens that see each other both ways, such as an image's (Gemma 3, PaliGemma)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import masking_utils

from octavo._transformers_functions import are_same, find_in_closures
from octavo._transformers_mask import Mask
from octavo._transformers_refusals import refuse


@dataclass(frozen=True)
class Blocks:
    """Blocks of tokens that see each other both ways beside a causal mask, as transformers describes them."""

    ids: Tensor  # int64 [batch, at least the keys seen so far]: of each token's block; below 0: of none
    window: int | None
    keep_window_left: bool  # whether the window hides keys of a block, too

    @classmethod
    def find(cls, function: Callable[..., Any], window: int | None) -> Blocks | None:
        """Those of a function that transformers makes: windows may hold inside blocks (Gemma 3) or not."""
        if torch.compiler.is_compiling():  # where functions cannot be looked at
            return None
        ids, overlay = (find_in_closures(function, name) for name in ("block_sequence_ids", "sliding_window"))
        if not isinstance(ids, Tensor):
            return None
        utils, blocks = masking_utils, masking_utils.blockwise_overlay(ids)
        causal = utils.causal_mask_function
        if window is not None:
            causal = utils.sliding_window_causal_mask_function(window)
        if are_same(function, utils.or_masks(causal, blocks)):
            return cls(ids, window, False)
        if window is None and isinstance(overlay, int):
            inside = utils.sliding_window_overlay(overlay)
            if are_same(function, utils.and_masks(utils.or_masks(causal, blocks), inside)):
                return cls(ids, overlay, True)
        return None

    def add_to(self, mask: Mask, kv_offset: int, num_keys: int, is_token: Tensor | None) -> Mask:
        """The mask with these blocks as ranges, in positions as the operator counts them."""
        ids = self.ids[:, kv_offset : kv_offset + num_keys]
        beside = torch.nn.functional.pad(ids, (1, 1), value=-1)
        is_first = (ids >= 0) & (ids != beside[:, :-2])
        is_last = (ids >= 0) & (ids != beside[:, 2:])
        place = is_first.cumsum(1) - 1
        num_ranges = int(place[:, -1].max()) + 1 if ids.numel() else 0
        if num_ranges == 0:
            return mask
        bounds = ids.new_zeros((len(ids), num_ranges, 2))
        blocks = torch.arange(-num_ranges, 0, device=ids.device).repeat(
            len(ids), 1
        )  # of each range, or below 0
        for side, (row, key) in enumerate(x.nonzero(as_tuple=True) for x in (is_first, is_last)):
            bounds[row, place[row, key], side] = key + side
            blocks[row, place[row, key]] = ids[row, key]
        if bool((blocks.sort(1).values.diff(dim=1) == 0).any()):
            refuse("a block of tokens that see each other both ways has to lie in one piece")
        if is_token is not None:  # padding is left out
            before = torch.nn.functional.pad(is_token[:, :num_keys].cumsum(1), (1, 0))
            bounds = before.gather(1, bounds.flatten(1)).view(bounds.shape)
        if mask.first_keys is not None:
            bounds = (bounds - mask.first_keys[:, None, None]).clamp(min=0)
        ranges = bounds.to(torch.int32).contiguous()
        return replace(mask, ranges=ranges, ranges_keep_window_left=self.keep_window_left)
