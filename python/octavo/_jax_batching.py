"""How a mapped axis (jax.vmap) goes into the axes that the operators have.

Each function takes the arrays of one operator, all mapped along a leading axis of length n, but for those in
`shared`, and returns them without that axis.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax.numpy as jnp
from jax import Array

Arrays = Mapping[str, Array]


def _fold(array: Array) -> Array:
    """[n, m, ...] to [n * m, ...]."""
    return array.reshape(array.shape[0] * array.shape[1], *array.shape[2:])


def _fold_offsets(cu_seqlens: Array, total: int) -> Array:
    """[n, batch + 1], each over `total` tokens, to [n * batch + 1] over all of them."""
    n = cu_seqlens.shape[0]
    starts = cu_seqlens[:, :-1] + total * jnp.arange(n, dtype=cu_seqlens.dtype)[:, None]
    return jnp.append(_fold(starts), jnp.asarray(n * total, cu_seqlens.dtype))


def _fold_pages(ids: Array, num_pages: int) -> Array:
    """Page numbers [n, m, ...] in caches of `num_pages`, which lie one behind the other now.

    Those of no page become -1: they must not name one of the next cache.
    """
    first = num_pages * jnp.arange(ids.shape[0], dtype=ids.dtype).reshape(-1, *[1] * (ids.ndim - 1))
    return _fold(jnp.where((ids >= 0) & (ids < num_pages), ids + first, -1))


def _fold_slopes(slopes: Array, is_shared: bool, n: int, batch: int) -> Array:
    """To [n * batch, num_q_heads]; what all share may stay [num_q_heads]."""
    if is_shared:
        return slopes if slopes.ndim == 1 else jnp.tile(slopes, (n, 1))
    return jnp.repeat(slopes, batch, axis=0) if slopes.ndim == 2 else _fold(slopes)


def fold_attention(arrays: Arrays, shared: frozenset[str]) -> dict[str, Array]:
    folded = {name: _fold(array) for name, array in arrays.items() if name not in shared}
    batch = arrays["q"].shape[1]
    for name, of in (("cu_seqlens_q", "q"), ("cu_seqlens_k", "k")):
        if name in arrays:
            folded[name] = _fold_offsets(arrays[name], arrays[of].shape[1])
            batch = arrays[name].shape[1] - 1
    if "alibi_slopes" in arrays:
        is_shared = "alibi_slopes" in shared
        folded["alibi_slopes"] = _fold_slopes(arrays["alibi_slopes"], is_shared, len(arrays["q"]), batch)
    return {**arrays, **folded}


def fold_paged_attention(arrays: Arrays, shared: frozenset[str]) -> dict[str, Array]:
    folded = {name: _fold(array) for name, array in arrays.items() if name not in shared}
    if "cu_seqlens_q" in arrays:
        folded["cu_seqlens_q"] = _fold_offsets(arrays["cu_seqlens_q"], arrays["q"].shape[1])
    if "k_pages" in folded:
        folded["page_table"] = _fold_pages(arrays["page_table"], arrays["k_pages"].shape[1])
    if "alibi_slopes" in arrays:
        is_shared = "alibi_slopes" in shared
        folded["alibi_slopes"] = _fold_slopes(arrays["alibi_slopes"], is_shared, *arrays["seq_lens"].shape)
    return {**arrays, **folded}


def fold_append_kv(arrays: Arrays, _: frozenset[str]) -> dict[str, Array]:
    folded = {name: _fold(array) for name, array in arrays.items()}
    folded["page_table"] = _fold_pages(arrays["page_table"], arrays["k_pages"].shape[1])
    if "cu_seqlens" in arrays:
        folded["cu_seqlens"] = _fold_offsets(arrays["cu_seqlens"], arrays["k"].shape[1])
    return folded


def fold_copy_pages(arrays: Arrays, _: frozenset[str]) -> dict[str, Array]:
    folded = {name: _fold(array) for name, array in arrays.items()}
    folded["copies"] = _fold_pages(arrays["copies"], arrays["k_pages"].shape[1])
    return folded


def fold_merge_states(arrays: Arrays, _: frozenset[str]) -> dict[str, Array]:
    return {name: _fold(array) for name, array in arrays.items()}
