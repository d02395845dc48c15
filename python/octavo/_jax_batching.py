"""How a mapped axis (jax.vmap) goes into the axes that the operators have.

Each function takes the arrays of one operator, all mapped along a leading axis of length n, but for those in
`shared`, and returns them without that axis. Of packed tokens it also returns the places that they have now,
[n * total], by the names of the results that have a row for each: each of the n may use less than its arrays
hold.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import jax.numpy as jnp
from jax import Array

Arrays = Mapping[str, Array]
Folded = tuple[dict[str, Array], dict[str, Array]]


def _fold(array: Array) -> Array:
    """[n, m, ...] to [n * m, ...]."""
    return array.reshape(array.shape[0] * array.shape[1], *array.shape[2:])


def _fold_packed(cu_seqlens: Array, *arrays: Array) -> tuple[Array, ...]:
    """Offsets [n, batch + 1] into packed arrays [n, total, ...] to [n * batch + 1] into [n * total, ...].

    The tokens in use close up; the others come last. Returns offsets, places of all tokens, arrays.
    """
    # Neither ranks nor dtypes are promoted here: a program may forbid either.
    n, total = arrays[0].shape[:2]
    integer = cu_seqlens.dtype
    token = jnp.arange(total, dtype=integer)[None]
    used = cu_seqlens[:, -1:]
    all_used = used.sum(axis=0, keepdims=True, dtype=integer)
    starts = jnp.cumsum(used, axis=0, dtype=integer) - used
    unused = jnp.cumsum(total - used, axis=0, dtype=integer)
    unused_starts = all_used + unused - total  # of token 0, if it were not in use
    places = jnp.where(token < used, starts + token, unused_starts + token).reshape(-1)
    source = jnp.zeros_like(places).at[places].set(jnp.arange(n * total, dtype=places.dtype))
    offsets = jnp.append(_fold(cu_seqlens[:, :-1] + starts), all_used[0])
    return offsets, places, *(_fold(array)[source] for array in arrays)


def _fold_pages(ids: Array, num_pages: int) -> Array:
    """Page numbers [n, m, ...] in caches of `num_pages`, which lie one behind the other now.

    Those of no page become -1: they must not name one of the next cache.
    """
    first = num_pages * jnp.arange(ids.shape[0], dtype=ids.dtype).reshape(-1, *[1] * (ids.ndim - 1))
    return _fold(jnp.where((ids >= 0) & (ids < num_pages), ids + first, -1))


def _fold_slots(slots: Array, num_slots: int) -> Array:
    """Slots [n, total] of caches that lie one behind the other now; those of no slot become -1."""
    n = slots.shape[0]
    if n * num_slots > 2 ** (8 * slots.dtype.itemsize - 1):
        raise ValueError(
            f"append_kv: slot_mapping must be int64 to be mapped over {n} caches of {num_slots} slots each; "
            f"it is {slots.dtype}"
        )
    first = num_slots * jnp.arange(n, dtype=slots.dtype)[:, None]
    return _fold(jnp.where((slots >= 0) & (slots < num_slots), slots + first, -1))


def _fold_slopes(slopes: Array, is_shared: bool, n: int, batch: int) -> Array:
    """To [n * batch, num_q_heads]; what all share may stay [num_q_heads]."""
    if is_shared:
        return slopes if slopes.ndim == 1 else jnp.tile(slopes, (n, 1))
    return jnp.repeat(slopes, batch, axis=0) if slopes.ndim == 2 else _fold(slopes)


def _fold_block_mask(mask: Array, is_shared: bool, n: int, batch: int) -> Array:
    """To [n * batch, heads, ...]; what all share may stay [heads, ...]."""
    if is_shared:
        return mask if mask.ndim == 3 else jnp.tile(mask, (n, 1, 1, 1))
    return jnp.repeat(mask, batch, axis=0) if mask.ndim == 4 else _fold(mask)


_OF_QUERIES = ("q", "dout", "out", "lse", "dlse")
"""What has a row for each query, in attention and in its backward."""


def fold_attention(arrays: Arrays, shared: frozenset[str]) -> Folded:
    folded = {name: _fold(array) for name, array in arrays.items() if name not in shared}
    batch = arrays["q"].shape[1]
    places: dict[str, Array] = {}
    if "cu_seqlens_q" in arrays:
        batch = arrays["cu_seqlens_q"].shape[1] - 1
        of_queries = [name for name in _OF_QUERIES if name in arrays]
        packed = _fold_packed(arrays["cu_seqlens_q"], *(arrays[name] for name in of_queries))
        folded.update(zip(("cu_seqlens_q", "places", *of_queries), packed, strict=True))
        places |= dict.fromkeys(("out", "lse", "dq"), folded.pop("places"))
    if "cu_seqlens_k" in arrays:
        offsets, places_of_keys, k, v = _fold_packed(arrays["cu_seqlens_k"], arrays["k"], arrays["v"])
        folded.update(cu_seqlens_k=offsets, k=k, v=v)
        places |= dict.fromkeys(("dk", "dv"), places_of_keys)
    if "alibi_slopes" in arrays:
        is_shared = "alibi_slopes" in shared
        folded["alibi_slopes"] = _fold_slopes(arrays["alibi_slopes"], is_shared, len(arrays["q"]), batch)
    if "block_mask" in arrays:
        is_shared = "block_mask" in shared
        folded["block_mask"] = _fold_block_mask(arrays["block_mask"], is_shared, len(arrays["q"]), batch)
    return {**arrays, **folded}, places


def fold_paged_attention(arrays: Arrays, shared: frozenset[str]) -> Folded:
    folded = {name: _fold(array) for name, array in arrays.items() if name not in shared}
    places = {}
    if "cu_seqlens_q" in arrays:
        names = [name for name in ("q", "tree_mask") if name in arrays]
        offsets, of_queries, *packed = _fold_packed(arrays["cu_seqlens_q"], *(arrays[name] for name in names))
        folded.update(zip(("cu_seqlens_q", *names), (offsets, *packed), strict=True))
        places = {"out": of_queries, "lse": of_queries}
    if "k_pages" in folded:
        folded["page_table"] = _fold_pages(arrays["page_table"], arrays["k_pages"].shape[1])
    if "alibi_slopes" in arrays:
        is_shared = "alibi_slopes" in shared
        folded["alibi_slopes"] = _fold_slopes(arrays["alibi_slopes"], is_shared, *arrays["seq_lens"].shape)
    return {**arrays, **folded}, places


def fold_latent_attention(arrays: Arrays, shared: frozenset[str]) -> Folded:
    folded = {name: array if name in shared else _fold(array) for name, array in arrays.items()}
    places = {}
    if "cu_seqlens_q" in arrays:
        folded["cu_seqlens_q"], of_queries, folded["q"] = _fold_packed(arrays["cu_seqlens_q"], arrays["q"])
        places = {"out": of_queries, "lse": of_queries}
    if "kv_pages" not in shared:
        folded["page_table"] = _fold_pages(arrays["page_table"], arrays["kv_pages"].shape[1])
    return folded, places


def fold_append_kv(arrays: Arrays, shared: frozenset[str]) -> Folded:
    folded = {name: array if name in shared else _fold(array) for name, array in arrays.items()}
    num_pages, page_size = arrays["k_pages"].shape[1:3]
    if "slot_mapping" in arrays:
        folded["slot_mapping"] = _fold_slots(arrays["slot_mapping"], num_pages * page_size)
    if "page_table" in arrays:
        folded["page_table"] = _fold_pages(arrays["page_table"], num_pages)
    if "cu_seqlens" not in arrays:
        return folded, {}
    of_tokens = [name for name in ("k", "v", "q") if name in arrays]
    offsets, places, *packed = _fold_packed(arrays["cu_seqlens"], *(arrays[name] for name in of_tokens))
    folded.update(zip(("cu_seqlens", *of_tokens), (offsets, *packed), strict=True))
    return folded, {"q_out": places}


def fold_copy_pages(arrays: Arrays, _: frozenset[str]) -> Folded:
    folded = {name: _fold(array) for name, array in arrays.items()}
    copies, num_pages = arrays["copies"], arrays["k_pages"].shape[1]
    if "to_k_pages" in arrays and copies.shape[2:] == (2,):  # or else it will be refused
        counts = num_pages, arrays["to_k_pages"].shape[1]
        columns = [_fold_pages(copies[..., i], count) for i, count in enumerate(counts)]
        folded["copies"] = jnp.stack(columns, axis=-1)
    else:
        folded["copies"] = _fold_pages(copies, num_pages)
    return folded, {}


def fold_merge_states(arrays: Arrays, _: frozenset[str]) -> Folded:
    return {name: _fold(array) for name, array in arrays.items()}, {}


def fold_linear(arrays: Arrays, shared: frozenset[str]) -> Folded:
    folded = {
        name: array.reshape(-1, array.shape[-1]) for name, array in arrays.items() if name not in shared
    }
    return {**arrays, **folded}, {}


def fold_rms_norm(arrays: Arrays, shared: frozenset[str]) -> Folded:
    """To [rows, dim]."""
    return {
        name: x if name in shared else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
        for name, x in arrays.items()
    }, {}
