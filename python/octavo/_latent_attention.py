"""Multi-head latent attention over a paged cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

from octavo._operators import native
from octavo._types import Array, Integers, LatentAttentionOptions, NumPyArray, Stream, SupportsDLPack

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from typing_extensions import Unpack


@overload
def latent_attention(
    q: Array,
    kv_pages: SupportsDLPack,
    page_table: Integers,
    seq_lens: Integers,
    *,
    return_lse: Literal[False] = False,
    out: Array | None = None,
    stream: Stream | None = None,
    **options: Unpack[LatentAttentionOptions],
) -> Array: ...
@overload
def latent_attention(
    q: NumPyArray,
    kv_pages: SupportsDLPack,
    page_table: Integers,
    seq_lens: Integers,
    *,
    return_lse: Literal[True],
    out: NumPyArray | None = None,
    stream: Stream | None = None,
    **options: Unpack[LatentAttentionOptions],
) -> tuple[NumPyArray, NDArray[np.float32]]: ...
@overload
def latent_attention(
    q: Array,
    kv_pages: SupportsDLPack,
    page_table: Integers,
    seq_lens: Integers,
    *,
    return_lse: Literal[True],
    out: Array | None = None,
    stream: Stream | None = None,
    **options: Unpack[LatentAttentionOptions],
) -> tuple[Array, Array]: ...
@overload
def latent_attention(
    q: Array,
    kv_pages: SupportsDLPack,
    page_table: Integers,
    seq_lens: Integers,
    *,
    return_lse: bool,
    out: Array | None = None,
    stream: Stream | None = None,
    **options: Unpack[LatentAttentionOptions],
) -> Array | tuple[Array, Any]: ...
@native(LatentAttentionOptions)
def latent_attention(
    q: Array,
    kv_pages: SupportsDLPack,
    page_table: Integers,
    seq_lens: Integers,
    *,
    return_lse: bool = False,
    out: Array | None = None,
    stream: Stream | None = None,
    **options: Unpack[LatentAttentionOptions],
) -> Array | tuple[Array, Array]:
    """Exact attention of new tokens over a paged cache of latents, as models with MLA decode.

    Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1) caches one vector a token for all
    heads: a compressed latent of keys and values, and a rotary key. With the up-projections absorbed into
    those of queries and outputs, every query head attends over these very vectors: the whole of one is its
    key, the first ``v_dim`` numbers are its value. ``docs/latent_attention.md`` shows such a layer.

    It serves decoding, with one query a sequence, and with ``cu_seqlens_q`` any mix of decoding and
    speculative tokens. The new tokens are in the cache already. Positions, padding, page tables and streams
    are as for ``paged_attention``.

    Args:
        q: float32, float16 or bfloat16 [batch, num_q_heads, qk_dim], one token a sequence; packed:
            [total_q, num_q_heads, qk_dim]. qk_dim: a multiple of 8 up to 1024; on a GPU 576, and no float32.
            Here and below any strides, with a unit last one.
        kv_pages: like q, or float8_e4m3fn, [num_pages, page_size, qk_dim], or with an axis of one head:
            [num_pages, page_size, 1, qk_dim]. Any page size works; 32 and multiples of 64 are fastest.
        page_table: int32 or int64 [batch, max_pages]: page_table[b, i] is the page with the tokens of
            sequence b from ``i * page_size`` on. On the CPU it may be a list, as may the lengths and offsets
            below.
        seq_lens: int32 or int64 [batch]: the length of each sequence in tokens, new ones included: at least
            the number of its queries, or 0 for padding.
        v_dim: the first numbers of each cached vector that are its value: a multiple of 8 up to qk_dim; on a
            GPU 512. Default: 512.
        cu_seqlens_q: int32 or int64 [batch + 1]: sequence b has the queries from cu_seqlens_q[b] up to
            cu_seqlens_q[b + 1], the last of its tokens. Rows past cu_seqlens_q[batch] are padding, as for
            ``paged_attention``. Default: one query a sequence.
        max_seqlen_q: the most queries of one sequence, for packed q; a tight bound starts less work.
            Default: total_q.
        softmax_scale: multiplies the scores, and must be given: it is that of the heads before the
            absorption, which are not qk_dim wide. For DeepSeek's keys of 128 + 64 it is ``1 / sqrt(192)``,
            times the square of what their YaRN multiplies queries and keys by. Default: none.
        causal: a query sees no key past its own position. Default: True.
        kv_scale: multiplies what kv_pages holds, keys and values alike; greater than 0. Default: 1.
        num_splits: runs of keys worked on at once, from 1 to 1024 (Flash-Decoding). Default: chosen.
        return_lse: return the log-sum-exp too. Default: False.
        out: an array [..., num_q_heads, v_dim] of the dtype of q to write the result to; never read, and
            apart from all other arguments. Default: a new array of the framework of q.
        stream: a CUDA stream to work on instead of the current one, as for ``attention``.

    Returns:
        out: like q with v_dim in place of qk_dim; the very object given as ``out``, if any.
        lse: only with return_lse: float32, the shape of q without its last axis; the natural logarithm of the
            sum of ``exp(score)``.

    Raises:
        ValueError: a shape or value that does not fit; on the CPU, lengths and page numbers too.
        TypeError: not an array, a wrong dtype, no softmax_scale, on a GPU what there is no kernel for, a
            torch tensor that requires grad, a JAX array as ``out``.
        RuntimeError: arrays on several devices, or a CUDA array where CUDA cannot be used.
    """
    raise NotImplementedError  # native() makes the function that runs
