"""The functions of ``octavo.jax`` that write a paged cache, which is a pytree."""

from __future__ import annotations

from typing import overload

import jax
from jax.typing import ArrayLike

import octavo
from octavo import _jax_call
from octavo._jax_call import Integers, like

# JAX would take what is not an array for one.
_NOT_ARRAYS = ("kv_dtype", "rotate_keys")
_ARRAYS = tuple(name for name in octavo.PagedCache._fields if name not in _NOT_ARRAYS)
jax.tree_util.register_pytree_node(
    octavo.PagedCache,
    lambda cache: (
        tuple(getattr(cache, name) for name in _ARRAYS),
        tuple(getattr(cache, name) for name in _NOT_ARRAYS),
    ),
    lambda others, arrays: octavo.PagedCache(
        **dict(zip(_ARRAYS, arrays, strict=True)), **dict(zip(_NOT_ARRAYS, others, strict=True))
    ),
)


@overload
def append_kv(
    k: ArrayLike,
    v: ArrayLike,
    k_pages: ArrayLike,
    v_pages: ArrayLike,
    page_table: Integers | None = None,
    seq_lens: Integers | None = None,
    *,
    cu_seqlens: Integers | None = None,
    k_scale: float | ArrayLike | None = None,
    v_scale: float | ArrayLike | None = None,
    k_scales: None = None,
    v_scales: None = None,
    kv_dtype: str | None = None,
    k_channel_offset: ArrayLike | None = None,
    k_channel_scale: ArrayLike | None = None,
    rotate_keys: bool = False,
    rotary_cos: ArrayLike | None = None,
    rotary_sin: ArrayLike | None = None,
    rotary_interleaved: bool = False,
    q: None = None,
    slot_mapping: Integers | None = None,
    static_tables: bool = False,
) -> tuple[jax.Array, jax.Array]: ...
@overload
def append_kv(
    k: ArrayLike,
    v: ArrayLike,
    k_pages: ArrayLike,
    v_pages: ArrayLike,
    page_table: Integers | None = None,
    seq_lens: Integers | None = None,
    *,
    cu_seqlens: Integers | None = None,
    k_scale: float | ArrayLike | None = None,
    v_scale: float | ArrayLike | None = None,
    k_scales: ArrayLike | None = None,
    v_scales: ArrayLike | None = None,
    kv_dtype: str | None = None,
    k_channel_offset: ArrayLike | None = None,
    k_channel_scale: ArrayLike | None = None,
    rotate_keys: bool = False,
    rotary_cos: ArrayLike | None = None,
    rotary_sin: ArrayLike | None = None,
    rotary_interleaved: bool = False,
    q: ArrayLike | None = None,
    slot_mapping: Integers | None = None,
    static_tables: bool = False,
) -> tuple[jax.Array, ...]: ...
@like(octavo.append_kv)
def append_kv(
    k: ArrayLike,
    v: ArrayLike,
    k_pages: ArrayLike,
    v_pages: ArrayLike,
    page_table: Integers | None = None,
    seq_lens: Integers | None = None,
    *,
    cu_seqlens: Integers | None = None,
    k_scale: float | ArrayLike | None = None,
    v_scale: float | ArrayLike | None = None,
    k_scales: ArrayLike | None = None,
    v_scales: ArrayLike | None = None,
    kv_dtype: str | None = None,
    k_channel_offset: ArrayLike | None = None,
    k_channel_scale: ArrayLike | None = None,
    rotate_keys: bool = False,
    rotary_cos: ArrayLike | None = None,
    rotary_sin: ArrayLike | None = None,
    rotary_interleaved: bool = False,
    q: ArrayLike | None = None,
    slot_mapping: Integers | None = None,
    static_tables: bool = False,
) -> tuple[jax.Array, ...]:
    """Write each sequence's newest tokens to the end of its pages: ``octavo.append_kv`` in a JAX program.

    Args:
        k: float32, float16 or bfloat16 [batch, num_kv_heads, head_dim], one token a sequence; packed:
            [total, num_kv_heads, head_dim].
        v: like k, with the head_dim of v_pages.
        k_pages: like k, [num_pages, page_size, num_kv_heads, head_dim]: the cache of keys.
        v_pages: like k_pages: the cache of values; its head_dim may be another one.
        page_table: int32, or int64 in JAX's x64 mode, [batch, max_pages].
        seq_lens: likewise [batch]: the length of each sequence in tokens, new ones included; 0: padding.
        cu_seqlens: likewise [batch + 1], for packed k and v: sequence b has the tokens from cu_seqlens[b] up
            to cu_seqlens[b + 1]. Default: one token a sequence.
        k_scale: what is stored is k divided by it: a Python float, or for codes of 8 bits also a float32
            array [1] or [num_kv_heads], which may be traced. int8 needs it, or k_scales. Not for int4.
            Default: 1.
        v_scale: likewise for v.
        k_scales: written, instead of k_scale: the scale of each new token and KV head, with which its largest
            number becomes the largest code. float32 [num_pages, page_size, num_kv_heads]; for int4, which
            needs them, float16 [num_pages, page_size, num_kv_heads, 2], (scale, minimum). Default: none.
        v_scales: likewise for v.
        kv_dtype: what pages of uint8 hold: "float8_e4m3fn", "float8_e5m2" or "int4". Default: none, for pages
            of other dtypes.
        k_channel_offset: as for ``octavo.append_kv``; may be traced. Default: none.
        k_channel_scale: likewise. Default: none.
        rotate_keys: as for ``octavo.append_kv``. Default: False.
        rotary_cos: as for ``octavo.append_kv``: [max_positions, rotary_dim / 2]; may be traced. Default: no
            rotation.
        rotary_sin: like rotary_cos, and given together with it.
        rotary_interleaved: as for ``octavo.append_kv``. Default: False.
        q: queries of the new tokens, to be rotated too: like k, with any number of heads. Default: none.
        slot_mapping: as for ``octavo.append_kv``: [total], instead of page_table, seq_lens and cu_seqlens.
            Default: none.
        static_tables: as for ``octavo.append_kv``. Default: False.

    Returns:
        k_pages: the cache of keys with the new tokens; in place of the argument where that was given up.
        v_pages: the cache of values with the new tokens, likewise.
        k_scales, v_scales: those that were given, with the scales of the new tokens, likewise.
        q_out: only with q: like q, the rotated queries.

    Raises:
        ValueError: a shape or number that does not fit.
        TypeError: a wrong dtype, a traced number, differentiation.
        JaxRuntimeError, ValueError: when the program runs: on the CPU lengths and pages that do not fit.
    """
    arguments = {
        "k": k,
        "v": v,
        "k_pages": k_pages,
        "v_pages": v_pages,
        "page_table": page_table,
        "seq_lens": seq_lens,
        "cu_seqlens": cu_seqlens,
        "k_scale": k_scale,
        "v_scale": v_scale,
        "k_scales": k_scales,
        "v_scales": v_scales,
        "kv_dtype": kv_dtype,
        "k_channel_offset": k_channel_offset,
        "k_channel_scale": k_channel_scale,
        "rotate_keys": rotate_keys,
        "rotary_cos": rotary_cos,
        "rotary_sin": rotary_sin,
        "rotary_interleaved": rotary_interleaved,
        "q": q,
        "slot_mapping": slot_mapping,
        "static_tables": static_tables,
    }
    return _jax_call.run(_jax_call.APPEND_KV, arguments)


@overload
def copy_pages(
    k_pages: ArrayLike,
    v_pages: ArrayLike,
    copies: Integers,
    *,
    to_k_pages: ArrayLike | None = None,
    to_v_pages: ArrayLike | None = None,
    k_scales: None = None,
    v_scales: None = None,
    to_k_scales: None = None,
    to_v_scales: None = None,
) -> tuple[jax.Array, jax.Array]: ...
@overload
def copy_pages(
    k_pages: ArrayLike,
    v_pages: ArrayLike,
    copies: Integers,
    *,
    to_k_pages: ArrayLike | None = None,
    to_v_pages: ArrayLike | None = None,
    k_scales: ArrayLike | None = None,
    v_scales: ArrayLike | None = None,
    to_k_scales: ArrayLike | None = None,
    to_v_scales: ArrayLike | None = None,
) -> tuple[jax.Array, ...]: ...
@like(octavo.copy_pages)
def copy_pages(
    k_pages: ArrayLike,
    v_pages: ArrayLike,
    copies: Integers,
    *,
    to_k_pages: ArrayLike | None = None,
    to_v_pages: ArrayLike | None = None,
    k_scales: ArrayLike | None = None,
    v_scales: ArrayLike | None = None,
    to_k_scales: ArrayLike | None = None,
    to_v_scales: ArrayLike | None = None,
) -> tuple[jax.Array, ...]:
    """Copy whole pages inside a cache, or from it to another one: ``octavo.copy_pages`` in a JAX program.

    Both caches are on the device of the program.

    Args:
        k_pages: float32, float16 or bfloat16, or codes of 8 bits [num_pages, page_size, num_kv_heads,
            head_dim]: the cache of keys.
        v_pages: like k_pages: the cache of values, with a head_dim of its own.
        copies: int32 or int64 [n, 2]: (from, to) pages, as ``PageAllocator.take_copies`` returns them. No
            page is both read and written, and none is written twice.
        to_k_pages: the other cache of keys, [any number of pages, page_size, num_kv_heads, head_dim], of the
            dtype of k_pages. Default: k_pages.
        to_v_pages: like to_k_pages, and given together with it: the other cache of values.
        k_scales: the scales of each token and KV head that belong to k_pages, as for ``append_kv``, which are
            copied with the pages. Default: none.
        v_scales: likewise for v_pages.
        to_k_scales: those of to_k_pages; given if k_scales is and there is another cache.
        to_v_scales: likewise for to_v_pages.

    Returns:
        k_pages: the cache of keys after the copies, the other one if there is one; in place of the argument
            where that was given up.
        v_pages: the cache of values after the copies, likewise.
        k_scales, v_scales: those that were given, of the same cache after the copies, likewise.

    Raises:
        ValueError: a shape that does not fit.
        TypeError: a wrong dtype, differentiation.
        JaxRuntimeError, ValueError: when the program runs: on the CPU pages that do not fit.
    """
    arrays = {
        "k_pages": k_pages,
        "v_pages": v_pages,
        "copies": copies,
        "to_k_pages": to_k_pages,
        "to_v_pages": to_v_pages,
        "k_scales": k_scales,
        "v_scales": v_scales,
        "to_k_scales": to_k_scales,
        "to_v_scales": to_v_scales,
    }
    return _jax_call.run(_jax_call.COPY_PAGES, arrays)
