"""Masks as transformers describes them, by functions and sizes, as the arguments of Octavo's operators."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor
from transformers import masking_utils

from octavo._transformers_blocks import Blocks
from octavo._transformers_functions import are_same
from octavo._transformers_mask import Carrier, Mask
from octavo._transformers_packing import Packing, find_begins, is_plain_packing
from octavo._transformers_refusals import refuse, require_causal
from octavo._transformers_static import describe_static_mask


def make_mask(
    *, batch_size: int, q_length: int, kv_length: int, device: torch.device, **description: Any
) -> Tensor | Mask:
    """Return a tensor that has the mask as its octavo_mask, and a mask's shape, but says nothing itself.

    For a static cache generate() asks for masks and gives them to the model, which passes a tensor of four
    axes on to its layers as it is. Where that cannot be, in a graph or where gradients are computed, layers
    take the mask itself: a checkpointed one would get a copy of the tensor.
    """
    mask = _describe_mask(
        batch_size=batch_size, q_length=q_length, kv_length=kv_length, device=device, **description
    )
    mask = replace(mask, kv_length=kv_length)
    if torch.compiler.is_compiling() or torch.is_grad_enabled():
        return mask
    one = torch.empty(1, 1, 1, 1, device=device)
    carrier = one.expand(batch_size, 1, q_length, kv_length).as_subclass(Carrier)
    carrier.octavo_mask = mask
    return carrier


def _describe_mask(
    *,
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor,
    kv_offset: int,
    mask_function: Callable[..., Any],
    attention_mask: Tensor | None,
    device: torch.device,
    local_size: int | None = None,
    use_vmap: bool = False,
    allow_is_causal_skip: bool = False,
    config: Any = None,
    **_: Any,
) -> Mask:
    """Return Octavo's arguments for the mask that transformers describes."""
    # transformers lets an implementation skip a mask to which nothing was added: packed sequences, blocks, or
    # functions of the caller's. What is left is causal, in windows or in chunks.
    nothing_added = allow_is_causal_skip and not use_vmap
    is_window = (
        local_size is not None
        and getattr(config, "sliding_window", None) == local_size
        and getattr(config, "attention_chunk_size", None) is None
        and (nothing_added or _is_plain_window(mask_function, local_size))
    )
    is_chunked = _is_chunked(config, local_size, nothing_added)
    if is_chunked and not isinstance(q_offset, Tensor) and q_offset + q_length - kv_offset == kv_length:
        chunk = cast(int, local_size)
        return _describe_chunks(q_length, kv_length, q_offset, kv_offset, chunk, attention_mask)
    is_two_sided = _is_two_sided_window(mask_function, local_size) and q_length == kv_length
    causal = not (is_two_sided or mask_function is masking_utils.bidirectional_mask_function)
    window_left, window_right = -1 if local_size is None else local_size - 1, -1
    if is_two_sided:
        window_left = window_right = cast(int, local_size)
    end = q_offset + q_length - kv_offset  # of the keys that the last query sees
    blocks: Blocks | None = None
    if causal:
        if not isinstance(end, Tensor) and end > kv_length:
            refuse(f"the last query sees {end} keys, and there are {kv_length}")
        is_plain = mask_function is masking_utils.causal_mask_function and local_size is None
        if not (is_plain or is_window):
            blocks = Blocks.find(mask_function, local_size)
        if blocks is not None:
            window_left = -1 if blocks.window is None else blocks.window - 1
        elif not (is_plain or is_window):
            window, begins = local_size, None
            is_whole = (
                q_length == kv_length > 1 and not isinstance(q_offset, Tensor) and q_offset == kv_offset
            )
            if is_whole and attention_mask is None and not use_vmap:
                begins = find_begins(mask_function, batch_size, q_length, device)
                # Chunks begin anew in each sequence, and are sequences of their own here.
                if begins is not None and local_size == getattr(config, "attention_chunk_size", None):
                    window = None
            if begins is None or not is_plain_packing(mask_function, window, begins):
                begin = int(q_offset)  # a compiled graph that ends in the lines above keeps no range
                queries, keys = range(begin, begin + q_length), range(kv_offset, kv_offset + kv_length)
                require_causal(batch_size, queries, keys, mask_function, window, use_vmap, device, begins)
            if begins is not None:
                packing = Packing.of_sequences(begins)
                return Mask(True, -1 if window is None else window - 1, queries=packing, keys=packing)
    elif local_size is not None and not is_two_sided:
        refuse("a sliding window is supported in causal attention only")

    is_token = masking_utils.prepare_padding_mask(attention_mask, kv_length, kv_offset)
    if is_token is not None:
        is_token = is_token[:, kv_offset : kv_offset + kv_length]
        if causal:  # in a static cache there are no tokens yet in slots behind the last query's
            behind = torch.arange(kv_length, device=device) >= end
            is_padded = ~(is_token | behind).all()
            is_token = is_token & ~behind
        else:
            is_padded = ~is_token.all()
        if not bool(is_padded):
            is_token = None
    if causal and (q_length == 1 or is_token is None) and (isinstance(end, Tensor) or end < kv_length):
        mask = describe_static_mask(batch_size, q_length, end, is_token, window_left, device)
        return mask if blocks is None else blocks.add_to(mask, kv_offset, kv_length, None)
    num_keys = int(end) if causal else kv_length
    mask = Mask(causal, window_left, window_right, num_keys=None if num_keys == kv_length else num_keys)
    is_token = None if is_token is None else is_token[:, :num_keys]
    if is_token is not None and window_left >= 0 and _has_holes(is_token):  # which the window counts
        mask, is_token = replace(mask, hidden=~is_token), None
    if blocks is not None:
        mask = blocks.add_to(mask, kv_offset, num_keys, is_token)
    if is_token is None:
        return mask
    has_positions = causal or is_two_sided  # of queries, which windows count from
    is_query = is_token[:, -q_length:] if has_positions else is_token.new_ones(batch_size, q_length)
    return replace(mask, queries=Packing.of(is_query), keys=Packing.of(is_token))


def _is_chunked(config: Any, local_size: int | None, nothing_added: bool) -> bool:
    """Whether a mask is transformers' own for chunks; a model with windows as well would be neither."""
    chunk = getattr(config, "attention_chunk_size", None)
    has_windows = getattr(config, "sliding_window", None) is not None
    return nothing_added and local_size is not None and local_size == chunk and not has_windows


def _describe_chunks(
    q_length: int,
    kv_length: int,
    q_offset: int,
    kv_offset: int,
    chunk: int,
    attention_mask: Tensor | None,
) -> Mask:
    """Return a mask of chunks over a growing cache, which may have lost keys that no query sees.

    A chunk is one of a sequence's positions behind its padding. Octavo counts positions from the first key
    that it gets, so that it gets those from the beginning of the first query's chunk on.
    """
    mask = Mask(True, attention_chunk=chunk, first_key=q_offset // chunk * chunk - kv_offset)
    if attention_mask is None or bool(attention_mask.all()):
        return mask
    is_token = masking_utils.prepare_padding_mask(attention_mask, kv_length, kv_offset)
    is_token = cast(Tensor, is_token)[:, kv_offset : kv_offset + kv_length]
    padding = (attention_mask.cumsum(1) == 0).sum(1)  # before each sequence
    keys = torch.arange(kv_offset, kv_offset + kv_length, device=is_token.device)
    begin = padding + (q_offset - padding).clamp(min=0) // chunk * chunk
    is_key = is_token & (keys >= begin[:, None])
    # Chunks are counted from the first key: behind padding that begins a chunk they would begin late.
    first = kv_offset + is_key.int().argmax(1)
    into_chunk = (first - begin) % chunk
    is_beyond = is_key & (keys >= (first - into_chunk + chunk)[:, None])
    if _has_holes(is_key) or bool(is_beyond[into_chunk > 0].any()):
        refuse("in chunks, padding must be before or after a sequence's tokens")
    queries, packed_keys = Packing.of(is_token[:, -q_length:]), Packing.of(is_key)
    return replace(mask, first_key=0, queries=queries, keys=packed_keys)


def _has_holes(is_token: Tensor) -> bool:
    """Whether padding lies between the tokens of some row."""
    return bool((is_token.diff(dim=1).sum(1) > 2 - is_token[:, 0].int()).any())


def _is_two_sided_window(function: Callable[..., Any], window: int | None) -> bool:
    """Whether it is the function that transformers makes for an encoder's window, and nothing else."""
    if window is None or torch.compiler.is_compiling():  # where functions cannot be looked at
        return False
    make = getattr(masking_utils, "sliding_window_bidirectional_mask_function", None)
    return make is not None and are_same(function, make(window))


def _is_plain_window(function: Callable[..., Any], window: int) -> bool:
    """Whether it is the function that transformers makes for a causal sliding window, and nothing else."""
    if torch.compiler.is_compiling():  # where functions cannot be looked at
        return False
    return are_same(function, masking_utils.sliding_window_causal_mask_function(window))
