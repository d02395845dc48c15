"""What the layers of a model of transformers get as their attention_mask."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from octavo._transformers_packing import Packing


@dataclass(frozen=True)
class Mask:
    """What a model's layers get as their attention_mask, made once a forward pass."""

    causal: bool
    window_left: int = -1
    window_right: int = -1
    queries: Packing | None = None
    keys: Packing | None = None
    num_keys: int | None = None  # in front, of a static cache that holds slots without tokens behind them
    seq_lens: Tensor | None = None  # int32 [batch], likewise, where they are known on the device alone
    first_keys: Tensor | None = None  # int64 [batch]: slots before them hold padding
    attention_chunk: int = 0
    first_key: int = 0  # of those that some query sees: a chunk begins there
    ranges: Tensor | None = (
        None  # int32 [batch, n, 2]: keys that see each other both ways, such as an image's
    )
    ranges_keep_window_left: bool = False
    hidden: Tensor | None = None  # bool [batch, keys], where padding lies inside sequences

    _elsewhere: dict[torch.device, Mask] = field(default_factory=dict, compare=False, repr=False)

    def on(self, device: torch.device) -> Mask:
        """The same for a layer on this device, where a model lies on several. They share what is moved."""
        array = self.seq_lens if self.keys is None else self.keys.cu_seqlens
        for other in (self.ranges, self.hidden):
            array = other if array is None else array
        if array is None or array.device == device:
            return self
        if device not in self._elsewhere:
            self._elsewhere[device] = replace(
                self,
                queries=None if self.queries is None else self.queries.on(device),
                keys=None if self.keys is None else self.keys.on(device),
                seq_lens=None if self.seq_lens is None else self.seq_lens.to(device),
                first_keys=None if self.first_keys is None else self.first_keys.to(device),
                ranges=None if self.ranges is None else self.ranges.to(device),
                hidden=None if self.hidden is None else self.hidden.to(device),
                _elsewhere={},
            )
        return self._elsewhere[device]

    @property
    def range_arguments(self) -> dict[str, Any]:
        if self.ranges is None:
            return {}
        keep = self.ranges_keep_window_left
        return {"bidirectional_ranges": self.ranges, "ranges_keep_window_left": keep}


class Carrier(Tensor):
    """A tensor with a mask; accelerate sends the keywords of layers to their devices, and would drop it."""

    octavo_mask: Mask

    def to(self, *_: Any, **__: Any) -> Carrier:
        return self
