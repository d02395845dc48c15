"""The functions of FlashAttention 2 over Octavo's operators: a program that calls them changes one import.

``from octavo.flash_attn import ...`` takes the place of ``from flash_attn import ...``. Names, parameters,
their order and their defaults are those of FlashAttention 2.6.1 to 2.8, as are the shapes, dtypes and layouts
of the results. All of it runs on the CPU as well, in float32 too, and over pages of any size. Other than
there, the log-sum-exp and ALiBi's slopes have gradients, and dropout goes with softcap.

What FlashAttention has and Octavo has not is refused with a ValueError, never approximated:

* the attention weights that ``return_attn_probs`` returns under dropout;
* dropout over pages (``block_table``), and dropout while a CUDA graph is captured;
* a rotary embedding of queries that are not those of the new tokens, or that all sit at one position.

With ALiBi the log-sum-exp is that of the bias as FlashAttention documents it. The seeds of dropout come from
torch's generator of the CPU, and drop other weights than FlashAttention's do.

The operators' errors name arguments of their own: ``page_table`` is ``block_table`` here, and ``seq_lens``
counts ``cache_seqlens`` and the new tokens.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from octavo._flash_attn import (
    attend,
    attend_to_pages,
    require_shape,
    score_options,
    their_lse,
    their_results,
    with_unit_stride,
)
from octavo._flash_attn_cache import (
    append,
    check_padding,
    check_queries,
    from_slots,
    packing,
    page_table_of,
    tokens_before,
)
from octavo._torch_autograd import refuse_gradients

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Attention over dense arrays, differentiable as ``octavo.torch.attention`` is.

    Args:
        q: float16 or bfloat16, on the CPU also float32, [batch, seqlen_q, num_heads, head_dim]. head_dim: up
            to 512; one that is no multiple of 8 is padded, which copies the arrays.
        k: like q, [batch, seqlen_k, num_kv_heads, head_dim]. num_kv_heads divides num_heads.
        v: like k; its head_dim, and so that of the result, may be another.
        dropout_p: the probability in [0, 1 - 2**-17) with which a softmax weight is dropped. The call draws
            a seed from torch's generator of the CPU, which breaks a graph of torch.compile unless
            ``torch._dynamo.config.capture_scalar_outputs`` is on. Default: 0.0.
        softmax_scale: multiplies the scores. Default: ``1 / sqrt(head_dim)``.
        causal: whether a query sees no key past its own position; query i sits at
            ``seqlen_k - seqlen_q + i``. Default: False.
        window_size: how many keys before its own position and past it a query sees; below 0: all. Default:
            (-1, -1).
        softcap: replaces a score s by ``softcap * tanh(s / softcap)``. Default: 0.0, no cap.
        alibi_slopes: float32 [num_heads] or [batch, num_heads]; adds ``-slope * distance`` after the cap, the
            distance being ``abs(i + seqlen_k - seqlen_q - j)``. Default: none.
        deterministic: whether the backward pass gives the same bits each time. On the CPU it always does,
            and on a GPU also under ``torch.use_deterministic_algorithms``. Default: False.
        return_attn_probs: whether to return the log-sum-exp as well; not under dropout. Default: False.

    Returns:
        out: like q, with the head_dim of v; 0 for a query that sees no key.
        softmax_lse: only with return_attn_probs: float32 [batch, num_heads, seqlen_q], the natural logarithm
            of the sum of ``exp(score)``, bias included; inf for a query that sees no key.
        S_dmask: likewise: an empty tensor, as the original's without dropout.

    Raises:
        ValueError: a shape or value that does not fit, or what Octavo lacks, as the module says.
        TypeError: a wrong dtype.
    """
    name = "flash_attn_func"
    scores = softmax_scale, causal, window_size, softcap, alibi_slopes
    options = score_options(name, q, q.shape[1], *scores)
    return attend(name, q, k, v, dropout_p, deterministic, return_attn_probs, options)


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """``flash_attn_func`` of keys and values in one: kv [batch, seqlen_k, 2, num_kv_heads, head_dim]."""
    scores = softmax_scale, causal, window_size, softcap, alibi_slopes
    k, v = kv.unbind(2)
    return flash_attn_func(q, k, v, dropout_p, *scores, deterministic, return_attn_probs)


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """``flash_attn_func`` of all three in one array: qkv [batch, seqlen, 3, num_heads, head_dim]."""
    scores = softmax_scale, causal, window_size, softcap, alibi_slopes
    q, k, v = qkv.unbind(2)
    return flash_attn_func(q, k, v, dropout_p, *scores, deterministic, return_attn_probs)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Any:
    """Attention over packed arrays, differentiable; or of packed queries over pages, which is not.

    Args:
        q: as for ``flash_attn_func``, but packed: [total_q, num_heads, head_dim].
        k: like q, [total_k, num_kv_heads, head_dim]; with block_table: pages,
            [num_pages, page_size, num_kv_heads, head_dim], of any size.
        v: like k; its head_dim, and so that of the result, may be another.
        cu_seqlens_q: int32 [batch + 1]: sequence b has the queries from cu_seqlens_q[b] up to
            cu_seqlens_q[b + 1].
        cu_seqlens_k: int32 [batch + 1], the same for keys and values; with block_table its differences are
            the lengths of the sequences.
        max_seqlen_q: the most queries of one sequence.
        max_seqlen_k: the most keys of one sequence; with block_table it is not needed.
        dropout_p: this and the following as for ``flash_attn_func``; with block_table 0.
        softmax_scale: likewise.
        causal: likewise.
        window_size: likewise.
        softcap: likewise.
        alibi_slopes: likewise.
        deterministic: likewise.
        return_attn_probs: likewise.
        block_table: int32 [batch, max_pages]: block_table[b, i] holds the tokens of sequence b from
            ``i * page_size`` on. Default: none.

    Returns:
        out: like q, with the head_dim of v.
        softmax_lse: only with return_attn_probs: float32 [num_heads, total_q], as for ``flash_attn_func``.
        S_dmask: likewise: an empty tensor.

    Raises:
        ValueError: as for ``flash_attn_func``; with block_table, on the CPU, also a sequence that has more
            queries than tokens.
        TypeError: a wrong dtype; with block_table a tensor that requires grad.
    """
    name = "flash_attn_varlen_func"
    scores = softmax_scale, causal, window_size, softcap, alibi_slopes
    queries = {"cu_seqlens_q": cu_seqlens_q, "max_seqlen_q": max_seqlen_q}
    if block_table is None:
        options = score_options(name, q, max_seqlen_q, *scores)
        options |= {**queries, "cu_seqlens_k": cu_seqlens_k, "max_seqlen_k": max_seqlen_k}
        return attend(name, q, k, v, dropout_p, deterministic, return_attn_probs, options)
    if dropout_p != 0.0:
        raise ValueError(f"{name}: dropout_p must be 0 with block_table; got {dropout_p}")
    refuse_gradients(name, ["q", "k", "v"], (q, k, v))
    options = score_options(name, q, max_seqlen_q, *scores)
    block_table = with_unit_stride(block_table)
    out, lse = attend_to_pages(q, k, v, block_table, cu_seqlens_k.diff(), options | queries)
    return their_results(q, out, lse) if return_attn_probs else out


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """``flash_attn_varlen_func`` of keys and values in one: kv [total_k, 2, num_kv_heads, head_dim]."""
    k, v = kv.unbind(1)
    scores = softmax_scale, causal, window_size, softcap, alibi_slopes
    others = dropout_p, *scores, deterministic, return_attn_probs
    return flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *others)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """``flash_attn_varlen_func`` of all three in one array: qkv [total, 3, num_heads, head_dim]."""
    q, k, v = qkv.unbind(1)
    scores = softmax_scale, causal, window_size, softcap, alibi_slopes
    others = dropout_p, *scores, deterministic, return_attn_probs
    return flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, *others)


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Write new keys and values to a cache, then attend to it.

    A dense cache is read as pages, one for each sequence, without a copy. Lengths and tables stay on the
    device: a captured CUDA graph follows them at its replay. The call is not differentiable.

    Args:
        q: float16 or bfloat16, on the CPU also float32, [batch, seqlen_q, num_heads, head_dim]. head_dim: up
            to 512; one that is no multiple of 8 is padded, which copies the whole cache at every call.
        k_cache: like q, [batch_cache, seqlen_cache, num_kv_heads, head_dim]; with block_table: pages,
            [num_pages, page_size, num_kv_heads, head_dim], of any size. Written if k is given.
        v_cache: like k_cache; its head_dim, and so that of the result, may be another.
        k: the keys of new tokens, [batch, seqlen_new, num_kv_heads, head_dim], which are written behind the
            first cache_seqlens tokens. Default: none.
        v: their values, given together with k.
        rotary_cos: cosines of a rotary embedding, of the dtype of q or float32,
            [max_positions, rotary_dim / 2]: row t rotates a new key at slot t of the cache, and the query of
            the same token. Needs k, of as many tokens as q, and causal or a window where they are several.
            Default: no rotation.
        rotary_sin: the sines, given together with rotary_cos.
        cache_seqlens: the tokens of each sequence that are in the cache before the call: a number, or int32
            [batch]. Default: as many as there is room for, which leaves none for k.
        cache_batch_idx: int32 [batch]: which row of a dense cache is that of each sequence; with k all
            differ. Default: row b for sequence b.
        cache_leftpad: int32 [batch]: slots of a dense cache at the beginning of each sequence that are not
            attended to. The cache is read as pages of one token, which is slower for several queries a
            sequence, and must have no gaps between its rows. Default: 0.
        block_table: int32 [batch, max_pages]: block_table[b, i] holds the tokens of sequence b from
            ``i * page_size`` on. Default: none, the cache is dense.
        softmax_scale: as for ``flash_attn_func``, as are causal, softcap and alibi_slopes.
        causal: likewise. Query i sits at ``cache_seqlens + seqlen_new - seqlen_q + i``.
        window_size: likewise.
        softcap: likewise.
        rotary_interleaved: whether numbers 2 i and 2 i + 1 of a head are rotated by angle i, else numbers i
            and ``i + rotary_dim / 2``. Default: True, other than in ``octavo.append_kv``.
        alibi_slopes: likewise.
        num_splits: runs of keys worked on at once; 0: Octavo chooses. Default: 0.
        return_softmax_lse: whether to return the log-sum-exp as well. Default: False.

    Returns:
        out: like q, with the head_dim of v_cache; 0 for a query that sees no key.
        softmax_lse: only with return_softmax_lse: float32 [batch, num_heads, seqlen_q], as for
            ``flash_attn_func``.

    Raises:
        ValueError: a shape or value that does not fit, or what Octavo lacks, as the module says; on the CPU,
            lengths and tables too, among them, under a causal mask, a window or ALiBi, a sequence with fewer
            tokens than queries.
        TypeError: a wrong dtype; a tensor that requires grad, unless gradients are off.
    """
    name = "flash_attn_with_kvcache"
    refuse_gradients(name, ["q", "k_cache", "v_cache", "k", "v"], (q, k_cache, v_cache, k, v))
    require_shape(name, "q", q, "[batch, seqlen_q, num_heads, head_dim]", None, None, None, None)
    batch, seqlen_q, _, head_dim = q.shape
    pages = "[batch_cache, seqlen_cache, " if block_table is None else "[num_pages, page_size, "
    axes = pages + "num_kv_heads, head_dim]"
    require_shape(name, "k_cache", k_cache, axes, None, None, None, head_dim)
    require_shape(name, "v_cache", v_cache, axes, *k_cache.shape[:3], None)
    scores = softmax_scale, causal, window_size, softcap, alibi_slopes
    options = score_options(name, q, seqlen_q, *scores)

    page_table = page_table_of(batch, k_cache, cache_batch_idx, block_table)
    attended = k_cache, v_cache, page_table
    if cache_leftpad is not None:
        if block_table is not None:
            raise ValueError(f"{name}: cache_leftpad belongs to a dense cache, without block_table")
        attended = from_slots(cache_leftpad, k_cache, v_cache, page_table)
    capacity = page_table.shape[1] * k_cache.shape[1]
    seq_lens = tokens_before(batch, k_cache, cache_seqlens, capacity)
    if cache_leftpad is not None:
        check_padding(cache_leftpad, seq_lens + (0 if k is None else k.shape[1]), capacity)

    if (rotary_cos is None) != (rotary_sin is None):
        given = "rotary_sin" if rotary_cos is None else "rotary_cos"
        raise ValueError(f"{name}: rotary_cos and rotary_sin must be given together; got {given} alone")
    if k is not None and v is not None:
        if cache_seqlens is None:
            raise ValueError(f"{name}: k needs cache_seqlens; got none")
        new_axes = "[batch, seqlen_new, num_kv_heads, head_dim]"
        require_shape(name, "k", k, new_axes, batch, None, *k_cache.shape[2:])
        require_shape(name, "v", v, new_axes, *k.shape[:3], v_cache.shape[3])
        seq_lens = seq_lens + k.shape[1]
        check_queries(seqlen_q, seq_lens, cache_leftpad, options)
        queries_differ = options["window_left"] >= 0 or options["window_right"] >= 0
        rotary = {
            "rotary_cos": rotary_cos,
            "rotary_sin": rotary_sin,
            "rotary_interleaved": rotary_interleaved,
        }
        q = append(q, k, v, k_cache, v_cache, page_table, seq_lens, queries_differ, rotary)
    elif k is not None or v is not None:
        raise ValueError(f"{name}: k and v must be given together; got {'v' if k is None else 'k'} alone")
    elif rotary_cos is not None:
        raise ValueError(f"{name}: rotary_cos needs k and v; got none")

    if cache_leftpad is not None:
        seq_lens = seq_lens - cache_leftpad
    cu_seqlens_q = packing(batch, seqlen_q, q.device)
    if cu_seqlens_q is not None:
        options |= {"cu_seqlens_q": cu_seqlens_q, "max_seqlen_q": seqlen_q}
    if num_splits > 0:
        options |= {"num_splits": num_splits}
    out, lse = attend_to_pages(q.flatten(0, 1), *attended, seq_lens, options)
    out = out.view(*q.shape[:-1], out.shape[-1])
    return (out, their_lse(lse.view(q.shape[:-1]))) if return_softmax_lse else out
