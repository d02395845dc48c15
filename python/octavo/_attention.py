"""Attention over dense and packed arrays, and the merge of partial results."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

from octavo._operators import native
from octavo._types import Array, AttentionOptions, Integers, NumPyArray, Stream, SupportsDLPack  # noqa: F401 (of options)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from typing_extensions import Unpack


@overload
def attention(
    q: Array,
    k: SupportsDLPack,
    v: SupportsDLPack,
    *,
    return_lse: Literal[False] = False,
    out: Array | None = None,
    stream: Stream | None = None,
    **options: Unpack[AttentionOptions],
) -> Array: ...
@overload
def attention(
    q: NumPyArray,
    k: SupportsDLPack,
    v: SupportsDLPack,
    *,
    return_lse: Literal[True],
    out: NumPyArray | None = None,
    stream: Stream | None = None,
    **options: Unpack[AttentionOptions],
) -> tuple[NumPyArray, NDArray[np.float32]]: ...
@overload
def attention(
    q: Array,
    k: SupportsDLPack,
    v: SupportsDLPack,
    *,
    return_lse: Literal[True],
    out: Array | None = None,
    stream: Stream | None = None,
    **options: Unpack[AttentionOptions],
) -> tuple[Array, Array]: ...
@overload
def attention(
    q: Array,
    k: SupportsDLPack,
    v: SupportsDLPack,
    *,
    return_lse: bool,
    out: Array | None = None,
    stream: Stream | None = None,
    **options: Unpack[AttentionOptions],
) -> Array | tuple[Array, Any]: ...
@native(AttentionOptions)
def attention(
    q: Array,
    k: SupportsDLPack,
    v: SupportsDLPack,
    *,
    return_lse: bool = False,
    out: Array | None = None,
    stream: Stream | None = None,
    **options: Unpack[AttentionOptions],
) -> Array | tuple[Array, Array]:
    """Exact attention over arrays [batch, seqlen, heads, head_dim], or packed ones, with an online softmax.

    Computes ``dropout(softmax(softcap(softmax_scale * q @ k.T) + alibi, masked)) @ v`` without ever holding
    the matrix of scores (FlashAttention, Dao et al. 2022, arXiv:2205.14135). Every group of
    ``num_q_heads / num_kv_heads`` query heads shares a key/value head.

    Query i of n sits at position ``seqlen_k - n + i`` (bottom-right aligned). Key j is visible to the query
    at position p if ``p - window_left <= j <= p + window_right``, if ``j < prefix_lens[b]``, or if both are
    in one of ``bidirectional_ranges[b]``. Keys that no query of a sequence sees are never read. A query that
    sees no key gets output 0 and log-sum-exp ``-inf``, or that of its sink.

    Work runs on the current stream of the framework of ``q``. Arrays of several frameworks may be mixed, as
    long as they are on one device; the current stream of each then waits for the work. With JAX arrays on a
    GPU the call returns when the work is done.

    Args:
        q: float32, float16 or bfloat16 [batch, seqlen_q, num_q_heads, head_dim]; packed:
            [total_q, num_q_heads, head_dim]. head_dim: a multiple of 8 up to 512. On a GPU no float32. Here
            and below any strides, with a unit last one.
        k: like q, [batch, seqlen_k, num_kv_heads, head_dim]; packed: [total_k, num_kv_heads, head_dim].
            num_kv_heads divides num_q_heads.
        v: like k; its head_dim, and so that of the result, may be another one (192 and 128 in DeepSeek's
            prefill).
        cu_seqlens_q: int32 or int64 [batch + 1], for packed arrays: sequence b has the queries from
            cu_seqlens_q[b] up to cu_seqlens_q[b + 1]. Rows past cu_seqlens_q[batch] are padding: they keep
            what ``out`` has there, or become 0, with a log-sum-exp of -inf. On the CPU also a list, like the
            integers below; of int64 a GPU reads the lower 32 bits. Default: dense arrays.
        cu_seqlens_k: int32 or int64 [batch + 1], the same for keys and values; given together with
            cu_seqlens_q.
        max_seqlen_q: the most queries of one sequence, for packed arrays; a tight bound starts less work.
            Default: total_q.
        max_seqlen_k: the most keys of one sequence, for packed arrays. Default: total_k.
        softmax_scale: multiplies the scores. Default: ``1 / sqrt(head_dim)``.
        causal: a query sees no key past its own position; the same as window_right=0. Default: False.
        window_left: keys before its own that a query sees. Default: -1, unbounded.
        window_right: keys past its own that a query sees; ignored if causal. Default: -1, unbounded.
        softcap: replaces a score s by ``softcap * tanh(s / softcap)``. Default: 0.0, no cap.
        alibi_slopes: float32 [num_q_heads] or [batch, num_q_heads]; adds
            ``-slope * (query position - key position)`` after the cap (ALiBi, Press et al. 2022,
            arXiv:2108.12409). Default: none.
        prefix_lens: int32 or int64 [batch]: the number of first keys that all queries of the sequence see,
            whatever the masks say (prefix-LM). Default: none.
        dropout_p: in [0, 1 - 2**-17). Each softmax weight is dropped with this probability (kept to within
            2**-17) and multiplied by ``1 / (1 - dropout_p)`` otherwise; the log-sum-exp is that without
            dropout. Below 2**-17 nothing is dropped, and nothing multiplied. Default: 0.0, no dropout.
        dropout_seed: from 0 to 2**63 - 1; with dropout_offset it says which weights are dropped: the same
            ones on every device, whether the arrays are dense or packed (Philox 4x32-7, Salmon et al. 2011).
            Default: none; needed if dropout_p > 0.
        dropout_offset: from 0 to 2**63 - 1. Head h of sequence b takes the mask number
            ``dropout_offset + b * num_q_heads + h`` of the seed's: the next call is to start
            batch * num_q_heads further. Default: 0.
        sinks: float32 [num_q_heads]: attention sinks, as gpt-oss (OpenAI 2025, arXiv:2508.10925) learns them
            (StreamingLLM, Xiao et al. 2023, arXiv:2309.17453). The number of a head joins the sum of
            exponentials of each of its queries and weighs no value; it is neither scaled, capped nor masked.
            The log-sum-exp includes it. -inf is none; NaN and inf spoil the results of their head. Default:
            none.
        softmax_phi: a number that softmax weights are relative to in place of their row's maximum, where that
            lies near it: the unified maximum of FlashDecoding++ (Hong et al. 2024, arXiv:2311.01282). Any
            other row keeps its own, by itself, so that the result is the same, but for rounding. In units of
            scores, scaled, capped and biased; a finite float, or float32 [num_q_heads], which is read when
            the work runs (a number there that is not finite is an error on the CPU, and counts as none on a
            GPU). ``calibrate_softmax_phi`` finds it. On a GPU it changes nothing here: the kernels of
            ``paged_attention`` for decoding alone use it. Default: none.
        attention_chunk: the number of positions in a chunk. A query sees no key of an earlier chunk than
            its own, as in Llama 4. Needs causal. Default: 0, none.
        block_mask: bool or uint8 [1 or num_q_heads, query blocks, key blocks], or with a leading batch axis:
            0 where the queries of a block do not look at the keys of one, whatever else says that they may
            (block-sparse attention, FlashAttention, section 3.3). Time goes with the blocks that are kept.
            Blocks are counted from the first query and the first key of each sequence, so that there are
            ``ceil(seqlen / block_size)`` of them; packed sequences each use the first rows and columns of
            as many as max_seqlen_q and max_seqlen_k have. Default: none, every block is kept.
        block_size: queries and keys of a block: 64 or 128. Default: 128.
        alibi_symmetric: ALiBi adds ``-slope * abs(query position - key position)``, as encoders and
            FlashAttention have it, so that keys past the query's own position lose weight with the distance,
            too. Where no query sees such a key, as under causal without prefix_lens or
            bidirectional_ranges, it changes nothing. Needs alibi_slopes. Default: False.
        bidirectional_ranges: int32 or int64 [batch, num_ranges, 2], in C order: ranges of keys that see each
            other in both directions, such as the tokens of an image in Gemma 3 and PaliGemma, as the position
            of the first and the one behind the last. A query in a range sees all of it that there is, besides
            what causal and the window let it see. Ranges of a sequence ascend and do not overlap; ranges
            without keys, such as [0, 0], fill a row up. On the CPU that is checked, on a GPU it is not. Not
            with block_mask. Default: none.
        ranges_keep_window_left: window_left and attention_chunk hide a range's earlier keys, too, so that a
            query sees of its range the later keys, and of the earlier ones those in its window: Gemma 3 and 4
            have it so, PaliGemma not. Needs bidirectional_ranges. Default: False.
        return_lse: return the log-sum-exp too. Default: False.
        out: an array like q, with the head_dim of v, to write the result to; never read. It may be q itself,
            with the same address and strides; otherwise its memory must be apart from that of all other
            arguments. Default: a new array of the framework of q.
        stream: a CUDA stream to work on instead of the current one: its address, or an object with
            ``__cuda_stream__``, ``cuda_stream`` (torch) or ``ptr`` (CuPy). The work waits for the current
            streams of the arrays' frameworks; to make them wait for the work, and to keep the arrays alive
            until it is done, is the caller's part. Ignored on the CPU.

    Returns:
        out: like q, with the head_dim of v; the very object given as ``out``, if any.
        lse: only with return_lse: float32, the shape of q without its last axis; the natural logarithm of the
            sum of ``exp(score)``, every bias and the sink included.

    Raises:
        ValueError: a shape or value that does not fit; on the CPU, lengths too.
        TypeError: not an array, a wrong dtype, a JAX array as ``out``; a torch tensor that requires grad:
            ``octavo.torch.attention`` takes those, without ``out``.
        RuntimeError: arrays on several devices, or a CUDA array where CUDA cannot be used.
    """
    raise NotImplementedError  # native() makes the function that runs


@overload
def merge_states(
    out_a: NumPyArray,
    lse_a: SupportsDLPack,
    out_b: SupportsDLPack,
    lse_b: SupportsDLPack,
    *,
    stream: Stream | None = None,
) -> tuple[NumPyArray, NDArray[np.float32]]: ...
@overload
def merge_states(
    out_a: Array,
    lse_a: SupportsDLPack,
    out_b: SupportsDLPack,
    lse_b: SupportsDLPack,
    *,
    stream: Stream | None = None,
) -> tuple[Array, Array]: ...
@native()
def merge_states(
    out_a: Array,
    lse_a: SupportsDLPack,
    out_b: SupportsDLPack,
    lse_b: SupportsDLPack,
    *,
    stream: Stream | None = None,
) -> tuple[Array, Array]:
    """Merge the attention of the same queries over two disjoint sets of keys into that over both.

    The result is exact, up to rounding (Flash-Decoding's combine step; FlashAttention, arXiv:2205.14135). A
    part that saw no key has log-sum-exp ``-inf`` and counts for nothing. Sinks have to be given to one of the
    parts only.

    Args:
        out_a: float32, float16 or bfloat16 [..., head_dim], with one to three leading axes: attention over
            the first set.
        lse_a: float32 [...]: its log-sum-exp, natural logarithm.
        out_b: like out_a: attention over the second set.
        lse_b: like lse_a.
        stream: as for ``attention``. Default: the current stream.

    Returns:
        out: like out_a, in its framework.
        lse: like lse_a, in the framework of out_a.

    Raises:
        ValueError: shapes that do not fit.
        TypeError: not an array, or a wrong dtype.
        RuntimeError: as for ``attention``.
    """
    raise NotImplementedError
