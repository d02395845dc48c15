"""What octavo.transformers does not serve: the error, and masks that are not causal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, cast

import torch
from torch import Tensor
from transformers import masking_utils

_ROWS_AT_ONCE = 256  # of a mask that is compared, to bound memory
_OTHER_MASK = "this mask is neither causal, nor a causal sliding window, nor full"
_UNSERVED = {  # keywords of attention functions that change what these return
    "sinks": "sinks",
    "position_bias": "position_bias",
    "head_mask": "head_mask",
    "indices": "sparse attention (indices)",
    "block_indices": "sparse attention (block_indices)",
}


def refuse(what: str, error: type[ValueError] = ValueError) -> NoReturn:
    # All models have eager attention; sdpa has no softcap, no sinks and no weights to return.
    raise error(f"octavo.transformers: {what}; use another attn_implementation, such as eager")


def refuse_options(options: dict[str, Any], refuse: Callable[[str], NoReturn] = refuse) -> None:
    """Refuse the keywords of a layer that have a meaning, and none for Octavo, where they are not None."""
    for name, what in _UNSERVED.items():
        if options.get(name) is not None:
            refuse(f"{what} is not supported")


def require_causal(
    batch_size: int,
    queries: range,
    keys: range,
    mask_function: Callable[..., Any],
    window: int | None,
    use_vmap: bool,
    device: torch.device,
    begins: Tensor | None = None,
) -> None:
    """Refuse a function of the indices that is anything else than causal, with this window.

    `begins`: where sequences begin that lie one behind the other in a row, and do not see each other.
    """
    sequences = None if begins is None else begins.cumsum(1)
    key_positions = torch.arange(keys.start, keys.stop, device=device)
    for begin in range(queries.start, queries.stop, _ROWS_AT_ONCE):
        end = min(begin + _ROWS_AT_ONCE, queries.stop)
        distance = torch.arange(begin, end, device=device)[:, None] - key_positions
        ours = distance >= 0
        if window is not None:
            ours &= distance < window
        if sequences is not None:
            ours = ours & (sequences[:, None, begin:end, None] == sequences[:, None, None])
        theirs = masking_utils.sdpa_mask(
            batch_size,
            end - begin,
            len(keys),
            begin,
            keys.start,
            mask_function,
            allow_is_causal_skip=False,
            use_vmap=use_vmap,
            device=device,
        )
        if len(queries) == 1 and torch.compiler.is_compiling():  # a step: its graph holds the comparison
            torch._assert_async(cast(Tensor, theirs == ours).all(), f"octavo.transformers: {_OTHER_MASK}")
        elif theirs is None or not torch.equal(theirs, ours.expand_as(theirs)):
            refuse(_OTHER_MASK)
