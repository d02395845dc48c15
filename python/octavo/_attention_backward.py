"""The gradients of attention."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, overload

from octavo._operators import native
from octavo._types import Array, AttentionBackwardOptions, Integers, Stream, SupportsDLPack  # noqa: F401 (of options)

if TYPE_CHECKING:
    from typing_extensions import Unpack


@overload
def attention_backward(
    dout: Array,
    q: SupportsDLPack,
    k: SupportsDLPack,
    v: SupportsDLPack,
    out: SupportsDLPack,
    lse: SupportsDLPack,
    *,
    return_dalibi: Literal[False] = False,
    return_dsinks: Literal[False] = False,
    dq: Array | None = None,
    dk: Array | None = None,
    dv: Array | None = None,
    stream: Stream | None = None,
    **options: Unpack[AttentionBackwardOptions],
) -> tuple[Array, Array, Array]: ...
@overload
def attention_backward(
    dout: Array,
    q: SupportsDLPack,
    k: SupportsDLPack,
    v: SupportsDLPack,
    out: SupportsDLPack,
    lse: SupportsDLPack,
    *,
    return_dalibi: Literal[True],
    return_dsinks: Literal[False] = False,
    dq: Array | None = None,
    dk: Array | None = None,
    dv: Array | None = None,
    stream: Stream | None = None,
    **options: Unpack[AttentionBackwardOptions],
) -> tuple[Array, Array, Array, Array]: ...
@overload
def attention_backward(
    dout: Array,
    q: SupportsDLPack,
    k: SupportsDLPack,
    v: SupportsDLPack,
    out: SupportsDLPack,
    lse: SupportsDLPack,
    *,
    return_dalibi: Literal[False] = False,
    return_dsinks: Literal[True],
    dq: Array | None = None,
    dk: Array | None = None,
    dv: Array | None = None,
    stream: Stream | None = None,
    **options: Unpack[AttentionBackwardOptions],
) -> tuple[Array, Array, Array, Array]: ...
@overload
def attention_backward(
    dout: Array,
    q: SupportsDLPack,
    k: SupportsDLPack,
    v: SupportsDLPack,
    out: SupportsDLPack,
    lse: SupportsDLPack,
    *,
    return_dalibi: Literal[True],
    return_dsinks: Literal[True],
    dq: Array | None = None,
    dk: Array | None = None,
    dv: Array | None = None,
    stream: Stream | None = None,
    **options: Unpack[AttentionBackwardOptions],
) -> tuple[Array, Array, Array, Array, Array]: ...
@overload
def attention_backward(
    dout: Array,
    q: SupportsDLPack,
    k: SupportsDLPack,
    v: SupportsDLPack,
    out: SupportsDLPack,
    lse: SupportsDLPack,
    *,
    return_dalibi: bool = False,
    return_dsinks: bool = False,
    dq: Array | None = None,
    dk: Array | None = None,
    dv: Array | None = None,
    stream: Stream | None = None,
    **options: Unpack[AttentionBackwardOptions],
) -> tuple[Array, ...]: ...
@native(AttentionBackwardOptions)
def attention_backward(
    dout: Array,
    q: SupportsDLPack,
    k: SupportsDLPack,
    v: SupportsDLPack,
    out: SupportsDLPack,
    lse: SupportsDLPack,
    *,
    return_dalibi: bool = False,
    return_dsinks: bool = False,
    dq: Array | None = None,
    dk: Array | None = None,
    dv: Array | None = None,
    stream: Stream | None = None,
    **options: Unpack[AttentionBackwardOptions],
) -> tuple[Array, ...]:
    """The gradients of ``attention`` with respect to q, k, v, the slopes of ALiBi and sinks.

    From a loss's gradient with respect to the output comes that with respect to the inputs. The softmax
    weights are computed again from the log-sum-exp, tile by tile, so that memory grows with the lengths and
    not with their product (FlashAttention, Dao et al. 2022, arXiv:2205.14135; FlashAttention-2, Dao 2023,
    arXiv:2307.08691).

    ``out`` and ``lse`` are what ``attention`` returned for these q, k and v with ``return_lse=True``, and the
    options have to be those of that call: dropout is drawn again. A query that sees no key gets a gradient of
    0 and adds nothing to others, whatever its dout; on a GPU its q and dout have to be finite for that. A key
    that no query sees gets 0. prefix_lens, bidirectional_ranges, block_mask and cu_seqlens have no gradient.

    Sums are float32, and results are rounded to the dtype of q once. float16 overflows beyond 65504: scale
    the loss.

    Args:
        dout: like out: the gradient of the loss with respect to it. All arrays here may
            have any strides, 0 too, but 1 along the last axis.
        q: as for ``attention``; so are k and v.
        k: [batch, seqlen_k, num_kv_heads, head_dim]; packed: [total_k, num_kv_heads, head_dim].
        v: like k, with a head_dim of its own. On a GPU both are 256 at most.
        out: like q, with the head_dim of v: the output of ``attention``, with dropout where there was some.
        lse: float32, the shape of q without its last axis: its log-sum-exp.
        dlse: like lse: the gradient of the loss with respect to it. Default: none, for zeros.
        cu_seqlens_q: int32 or int64 [batch + 1], for packed arrays; rows past cu_seqlens_q[batch] are
            padding, and their gradients 0. Default: dense arrays.
        cu_seqlens_k: int32 or int64 [batch + 1], given together with cu_seqlens_q.
        max_seqlen_q: the most queries of one sequence, for packed arrays. Default: total_q.
        max_seqlen_k: the most keys of one sequence, for packed arrays. Default: total_k.
        softmax_scale: multiplies the scores. Default: ``1 / sqrt(head_dim)``.
        causal: a query sees no key past its own position. Default: False.
        window_left: keys before its own that a query sees. Default: -1, unbounded.
        window_right: keys past its own that a query sees; ignored if causal. Default: -1, unbounded.
        softcap: replaces a score s by ``softcap * tanh(s / softcap)``. Default: 0.0, no cap.
        alibi_slopes: float32 [num_q_heads] or [batch, num_q_heads]. Default: none.
        prefix_lens: int32 or int64 [batch]: the number of first keys that all queries of the sequence see.
            Default: none.
        dropout_p: in [0, 1 - 2**-17). Default: 0.0, no dropout.
        dropout_seed: from 0 to 2**63 - 1. Default: none; needed if dropout_p > 0.
        dropout_offset: from 0 to 2**63 - 1. Default: 0.
        deterministic: the same bits at every call. On the CPU they always are, whatever the number of
            threads; on a GPU this takes longer. Default: False.
        sinks: float32 [num_q_heads], with which ``attention`` computed out and lse. Default: none.
        attention_chunk: the number of positions in a chunk. A query sees no key of an earlier chunk than
            its own. Needs causal. Default: 0, none.
        block_mask: bool or uint8 [1 or num_q_heads, query blocks, key blocks], or with a leading batch axis.
            Default: none, every block is kept.
        block_size: 64 or 128. Default: 128.
        alibi_symmetric: ALiBi has the absolute value of the distance. Needs alibi_slopes. Default: False.
        bidirectional_ranges: int32 or int64 [batch, num_ranges, 2], in C order: ranges of keys that see each
            other in both directions, as for ``attention``. Not with block_mask. Default: none.
        ranges_keep_window_left: windows and chunks hide a range's earlier keys, too. Needs
            bidirectional_ranges. Default: False.
        return_dalibi: return the gradient of alibi_slopes, which have to be given, too. Default: False.
        return_dsinks: return the gradient of sinks, which have to be given, too. Default: False.
        dq: an array like q to write the gradient to; never read. dq, dk and dv may be views of one array, but
            share no element, and their memory must be apart from that of the inputs. Default: a new array of
            the framework of ``dout``.
        dk: the same for the gradient with respect to k: an array like k.
        dv: the same for the gradient with respect to v: an array like v.
        stream: as for ``attention``. Default: the current stream.

    Returns:
        dq: like q; the very object given as ``dq``, if any.
        dk: like k; the very object given as ``dk``, if any.
        dv: like v; the very object given as ``dv``, if any.
        dalibi_slopes: only with return_dalibi: float32, like alibi_slopes; over the batch it is summed where
            the batch shares its slopes.
        dsinks: only with return_dsinks: float32, like sinks; summed in one order, whatever ``deterministic``.

    Raises:
        ValueError: a shape or value that does not fit; on the CPU, lengths too.
        TypeError: not an array, a wrong dtype, a torch tensor that requires grad, a JAX array as dq, dk or
            dv; float32 on a GPU.
        RuntimeError: as for ``attention``.
    """
    raise NotImplementedError  # native() makes the function that runs
