"""Decode context parallelism of vLLM (DCP): ranks with the same KV heads share each sequence's tokens out.

The token at position p lies in the cache of rank ``p // interleave % ranks``. Each rank has the queries of
its own heads, and keys and values of all new tokens. A layer attends in parts, merged by their log-sum-exp:

    new tokens                   own queries, without the cache               one part
    tokens from before the step  queries of all ranks, this rank's tokens     a part from each rank
"""

from __future__ import annotations

import torch
from torch import Tensor
from vllm.distributed.parallel_state import GroupCoordinator

from octavo import merge_states


def exchange_parts(group: GroupCoordinator, out: Tensor, lse: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Of the own heads, the part of each rank.

    Args:
        group: of the ranks.
        out: [tokens, ranks * heads, head_size]: over this rank's tokens, for the heads of all ranks in turn.
        lse: float32 [tokens, ranks * heads].

    Returns:
        For each rank out [tokens, heads, head_size] and lse [tokens, heads].
    """
    # One message carries both, as bytes.
    both = torch.cat([out.view(torch.uint8), lse.unsqueeze(-1).view(torch.uint8)], -1)
    sent = both.unflatten(1, (group.world_size, -1)).transpose(0, 1).contiguous()
    received = torch.empty_like(sent)
    torch.distributed.all_to_all_single(received, sent, group=group.device_group)
    size = out.shape[-1] * out.itemsize
    outs, lses = received[..., :size].view(out.dtype), received[..., size:].view(torch.float32).squeeze(-1)
    return list(zip(outs, lses, strict=True))


def merge_parts(parts: list[tuple[Tensor, Tensor]]) -> Tensor:
    """The attention over the keys of all parts, in their order."""
    out, lse = parts[0]
    for part in parts[1:]:
        out, lse = merge_states(out, lse, *part)
    return out
