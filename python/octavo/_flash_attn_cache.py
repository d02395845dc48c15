"""The cache of octavo.flash_attn.flash_attn_with_kvcache as the pages that Octavo's operators take."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import octavo.torch
from octavo._flash_attn import require_int32, with_unit_stride

NAME = "flash_attn_with_kvcache"


def page_table_of(
    batch: int, k_cache: Tensor, cache_batch_idx: Tensor | None, block_table: Tensor | None
) -> Tensor:
    """The page table of a dense cache, whose rows are pages: the kernels are no faster on smaller ones."""
    if block_table is not None:
        if cache_batch_idx is not None:
            raise ValueError(f"{NAME}: cache_batch_idx belongs to a dense cache, without block_table")
        require_int32(NAME, "block_table", block_table, "[batch, max_pages]", batch, None)
        return with_unit_stride(block_table)
    if cache_batch_idx is not None:
        require_int32(NAME, "cache_batch_idx", cache_batch_idx, "[batch]", batch)
        return cache_batch_idx.unsqueeze(1)
    rows = k_cache.shape[0]
    if rows < batch:
        raise ValueError(f"{NAME}: k_cache must have a row for each sequence of q ({batch}); got {rows}")
    return torch.arange(batch, dtype=torch.int32, device=k_cache.device).unsqueeze(1)


def from_slots(
    first: Tensor, k_cache: Tensor, v_cache: Tensor, page_table: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """A dense cache as pages of one token, and a page table of the slots of each sequence from `first` on."""
    rows, num_slots = k_cache.shape[:2]
    require_int32(NAME, "cache_leftpad", first, "[batch]", page_table.shape[0])
    for name, x in (("k_cache", k_cache), ("v_cache", v_cache)):
        if rows > 1 and x.stride(0) != num_slots * x.stride(1):
            raise ValueError(
                f"{NAME}: cache_leftpad needs a cache without gaps between its rows; {name} has {num_slots} "
                f"slots at a stride of {x.stride(1)}, and rows at one of {x.stride(0)}"
            )
    slots = torch.arange(num_slots, dtype=torch.int32, device=page_table.device)
    columns = first.unsqueeze(1) + slots
    # Past the end of a row come the slots of the next one; check_padding sees that no sequence reaches them.
    table = page_table * num_slots + columns
    if table.device.type == "cpu":  # the operator refuses -1, also where check_padding cannot read numbers
        table = torch.where((columns < 0) | (columns >= num_slots), -1, table)
    k_slots, v_slots = (x.view(-1, 1, *x.shape[2:]) for x in (k_cache, v_cache))
    return k_slots, v_slots, table


def _are_readable(*tensors: Tensor) -> bool:
    """Whether they have numbers, and on the CPU; tensors of a compiler have none."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0:
        return False
    return all(type(x) is Tensor and x.device.type == "cpu" for x in tensors)


def check_padding(first: Tensor, seq_lens: Tensor, num_slots: int) -> None:
    """Refuse, on the CPU, sequences that leave their row of a dense cache.

    Args:
        first: int32 [batch], the padding of each sequence.
        seq_lens: int32 [batch], padding and new tokens included.
        num_slots: of a row.
    """
    if not _are_readable(first, seq_lens):
        return
    for b, (padding, length) in enumerate(zip(first.tolist(), seq_lens.tolist(), strict=True)):
        if length > num_slots:
            raise ValueError(
                f"{NAME}: sequence {b} must end within the {num_slots} slots of its row of k_cache; "
                f"its padding and tokens are {length}"
            )
        if not 0 <= padding <= max(length, 0):
            raise ValueError(
                f"{NAME}: cache_leftpad[{b}] must be from 0 to the sequence's length ({length}); "
                f"got {padding}"
            )


def tokens_before(batch: int, k_cache: Tensor, cache_seqlens: int | Tensor | None, capacity: int) -> Tensor:
    """int32 [batch]: the tokens of each sequence that are in the cache before the call."""
    if isinstance(cache_seqlens, Tensor):
        require_int32(NAME, "cache_seqlens", cache_seqlens, "[batch]", batch)
        return with_unit_stride(cache_seqlens)
    length = capacity if cache_seqlens is None else cache_seqlens
    return torch.full((batch,), length, dtype=torch.int32, device=k_cache.device)


def check_queries(seqlen_q: int, seq_lens: Tensor, first: Tensor | None, options: dict[str, Any]) -> None:
    """Refuse, on the CPU, sequences with fewer tokens than queries.

    ``octavo.paged_attention`` does so, too, but only once ``append`` has written to the cache.

    Args:
        seqlen_q: the queries of each sequence.
        seq_lens: int32 [batch], padding and new tokens included.
        first: int32 [batch], the padding of each sequence, if there is some.
        options: those of ``octavo.paged_attention``. Queries that see all keys need not be among them.
    """
    is_bounded = options["window_left"] >= 0 or options["window_right"] >= 0
    sees_all = not is_bounded and options["alibi_slopes"] is None
    if sees_all or not _are_readable(seq_lens):
        return
    for b, length in enumerate((seq_lens if first is None else seq_lens - first).tolist()):
        if 0 < length < seqlen_q:
            raise ValueError(
                f"{NAME}: sequence {b} must have as many tokens as queries ({seqlen_q}), or none, under a "
                f"causal mask, a window or ALiBi; with the new ones it has {length}"
            )


def packing(batch: int, seqlen: int, device: torch.device) -> Tensor | None:
    """cu_seqlens of `seqlen` tokens a sequence; none for one token each, which need not be packed."""
    return None if seqlen == 1 else seqlen * torch.arange(batch + 1, dtype=torch.int32, device=device)


def append(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    queries_differ: bool,
    rotary: dict[str, Any],
) -> Tensor:
    """Write new tokens at the end of each sequence, and return q, rotated if `rotary` has tables.

    Args:
        q: [batch, seqlen_q, num_heads, head_dim].
        k: [batch, seqlen_new, num_kv_heads, head_dim].
        v: like k, with the head_dim of v_cache.
        k_cache: pages of keys.
        v_cache: pages of values.
        page_table: int32 [batch, max_pages].
        seq_lens: int32 [batch], new tokens included.
        queries_differ: whether those of a sequence see other keys each. Where they do not, FlashAttention
            rotates all of them by the position of the first.
        rotary: the arguments of ``octavo.append_kv`` for the rotation.
    """
    seqlen_q, seqlen_new = q.shape[1], k.shape[1]
    k, v = (with_unit_stride(x).flatten(0, 1) for x in (k, v))
    cu_seqlens = packing(q.shape[0], seqlen_new, q.device)
    if rotary["rotary_cos"] is None:
        octavo.torch.append_kv(k, v, k_cache, v_cache, page_table, seq_lens, cu_seqlens=cu_seqlens)
        return q
    if seqlen_q != seqlen_new:
        raise ValueError(
            f"{NAME}: rotary_cos needs as many queries as new tokens; got {seqlen_q} in q, {seqlen_new} in k"
        )
    if not queries_differ:
        raise ValueError(
            f"{NAME}: rotary_cos needs causal=True or a window where a sequence has several queries; got "
            f"{seqlen_q} in q"
        )
    rotated: Tensor = octavo.torch.append_kv(
        k,
        v,
        k_cache,
        v_cache,
        page_table,
        seq_lens,
        cu_seqlens=cu_seqlens,
        q=with_unit_stride(q).flatten(0, 1),
        **rotary,
    )
    return rotated.view(q.shape)
