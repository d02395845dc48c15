"""Attention over a paged KV cache, and the functions that keep the cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

from octavo._operators import native
from octavo._types import Array, Integers, NumPyArray, PagedAttentionOptions, Stream, SupportsDLPack

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from typing_extensions import Unpack


@overload
def paged_attention(
    q: Array,
    k_pages: SupportsDLPack,
    v_pages: SupportsDLPack,
    page_table: Integers,
    seq_lens: Integers,
    *,
    return_lse: Literal[False] = False,
    out: Array | None = None,
    stream: Stream | None = None,
    **options: Unpack[PagedAttentionOptions],
) -> Array: ...
@overload
def paged_attention(
    q: NumPyArray,
    k_pages: SupportsDLPack,
    v_pages: SupportsDLPack,
    page_table: Integers,
    seq_lens: Integers,
    *,
    return_lse: Literal[True],
    out: NumPyArray | None = None,
    stream: Stream | None = None,
    **options: Unpack[PagedAttentionOptions],
) -> tuple[NumPyArray, NDArray[np.float32]]: ...
@overload
def paged_attention(
    q: Array,
    k_pages: SupportsDLPack,
    v_pages: SupportsDLPack,
    page_table: Integers,
    seq_lens: Integers,
    *,
    return_lse: Literal[True],
    out: Array | None = None,
    stream: Stream | None = None,
    **options: Unpack[PagedAttentionOptions],
) -> tuple[Array, Array]: ...
@overload
def paged_attention(
    q: Array,
    k_pages: SupportsDLPack,
    v_pages: SupportsDLPack,
    page_table: Integers,
    seq_lens: Integers,
    *,
    return_lse: bool,
    out: Array | None = None,
    stream: Stream | None = None,
    **options: Unpack[PagedAttentionOptions],
) -> Array | tuple[Array, Any]: ...
@native(PagedAttentionOptions)
def paged_attention(
    q: Array,
    k_pages: SupportsDLPack,
    v_pages: SupportsDLPack,
    page_table: Integers,
    seq_lens: Integers,
    *,
    return_lse: bool = False,
    out: Array | None = None,
    stream: Stream | None = None,
    **options: Unpack[PagedAttentionOptions],
) -> Array | tuple[Array, Array]:
    """Exact attention of new tokens over a paged KV cache.

    This is PagedAttention (Kwon et al. 2023, arXiv:2309.06180). It serves decoding, with one query a
    sequence, and with ``cu_seqlens_q`` any mix of decoding, chunked prefill and speculative tokens in one
    call. The new tokens' keys and values are in the cache already: first ``append_kv``, then attend.
    Positions, masks, biases and streams are as for ``attention``: query i of the n queries of sequence b sits
    at ``seq_lens[b] - n + i``.

    Entries of the page table past a sequence's last page, and slots past its length, are never used, whatever
    they hold. On the CPU a page out of range is an error; on a GPU ``check_page_table`` finds it when asked.
    Nothing is read back from a GPU: a captured CUDA graph follows the lengths and pages at its replay. Do not
    change seq_lens there until the call has finished: thread blocks derive from it which others they wait
    for, and would hang.

    Args:
        q: float32, float16 or bfloat16 [batch, num_q_heads, head_dim], one token a sequence; packed:
            [total_q, num_q_heads, head_dim]. head_dim: a multiple of 8 up to 512. On a GPU no float32. Here
            and below any strides, with a unit last one.
        k_pages: like q, [num_pages, page_size, num_kv_heads, head_dim]: the cache of keys. Any page size
            works; powers of two from 8 up are fast (above head_dim 128 from 16 up). A head-major cache is
            passed as a transposed view. Pages may hold codes as well: int8, float8_e4m3fn or float8_e5m2, or
            uint8, whose contents ``kv_dtype`` names. int4 has two numbers in a byte: the last axis is
            head_dim / 2, and the even dim is in the lower half. A GPU reads codes of head_dim up to 256.
        v_pages: like k_pages: the cache of values. It may be int4 where k_pages is int8, too, and its
            head_dim, and so that of the result, may be another one.
        page_table: int32 or int64 [batch, max_pages]: page_table[b, i] is the page with the tokens of
            sequence b from ``i * page_size`` on. On the CPU it may be a list, as may the lengths and offsets
            below. A GPU reads the lower 32 bits of int64.
        seq_lens: int32 or int64 [batch]: the length of each sequence in tokens, new ones included: at least
            the number of its queries, or 0 for padding. Any other length is an error on the CPU, unless each
            query sees all keys, as in cross attention (``causal=False`` without windows, ``alibi_slopes``
            and ``tree_mask``). A GPU does not notice it: queries before position 0 see what the masks leave
            them, and nothing if causal.
        cu_seqlens_q: int32 or int64 [batch + 1]: sequence b has the queries from cu_seqlens_q[b] up to
            cu_seqlens_q[b + 1], the last of its tokens. Rows past cu_seqlens_q[batch] are padding: they keep
            what ``out`` has there, or become 0, with a log-sum-exp of -inf. Default: one query a sequence.
        max_seqlen_q: the most queries of one sequence, for packed q; a tight bound starts less work.
            Default: total_q.
        softmax_scale: multiplies the scores. Default: ``1 / sqrt(head_dim)``.
        causal: a query sees no key past its own position; the same as window_right=0. Default: True.
        window_left: keys before its own that a query sees. Default: -1, unbounded.
        softcap: replaces a score s by ``softcap * tanh(s / softcap)``. Default: 0.0, no cap.
        alibi_slopes: float32 [num_q_heads] or [batch, num_q_heads]; adds
            ``-slope * (query position - key position)`` after the cap. Default: none.
        prefix_lens: int32 or int64 [batch]: the number of first keys that all queries of the sequence see,
            whatever the masks say (prefix-LM). Default: none.
        k_scale: multiplies what k_pages holds: a float, or for codes of 8 bits also a float32 array [1] or
            [num_kv_heads], which is read when the work runs. int8 needs it, or k_scales. Not for int4.
            Default: 1.
        v_scale: likewise for v_pages.
        num_splits: runs of keys worked on at once, from 1 to 1024 (Flash-Decoding). Default: chosen.
        batch_invariant: the bits of a sequence's result depend on that sequence and on max_seqlen_q alone,
            neither on the other sequences of the batch nor on its place among them; packed q needs
            max_seqlen_q then. On the CPU that is always the case. On a GPU arrays have to be contiguous for
            that, or to have strides that are positive multiples of 16 bytes. Default: False, which is faster
            on a GPU, most of all for few short sequences.
        shared_prefix_len: the number of leading tokens that all sequences share, a multiple of page_size.
            Their pages are those that the first row of page_table names, and are read once for all sequences
            (cascade inference: Hydragen, arXiv:2402.05099; FlashInfer, arXiv:2501.01005). The result is that
            of any other call, with one rounding more. Where that would not be faster, a GPU reads them for
            each sequence. Every query must lie behind them; a sequence of length 0 is padding, whose row must
            name them, too, if it is the first. On the CPU lengths and pages are checked, on a GPU they are
            not. Not with window_left, attention_chunk, bidirectional_ranges, alibi_slopes or batch_invariant.
            Default: 0.
        k_scales: the scales of each token and KV head, as ``append_kv`` wrote them, instead of k_scale:
            float32 [num_pages, page_size, num_kv_heads], any strides; for int4, which needs them, float16
            [num_pages, page_size, num_kv_heads, 2], (scale, minimum), with a unit last stride and aligned to
            4 bytes. A value is its code times the scale, plus the minimum. Default: none.
        v_scales: likewise for v_pages.
        kv_dtype: what pages of uint8 hold: "float8_e4m3fn", "float8_e5m2" or "int4". Default: none, for pages
            of other dtypes.
        k_channel_offset: what ``append_kv`` has subtracted from the keys before they became codes: float32
            [num_kv_heads, head_dim]. Not with softcap. Default: none.
        k_channel_scale: what ``append_kv`` has divided them by, of the same dtype and shape. Queries are
            multiplied by it. Those of float16 must be at most 65504 in magnitude once they are multiplied
            and rotated: a larger number becomes infinite, and the results of its query NaN. Take bfloat16
            queries or smaller scales then. Default: none.
        rotate_keys: whether ``append_kv`` has rotated them. Queries are rotated as well. Default: False.
        sinks: float32 [num_q_heads]: attention sinks, as for ``attention``. Default: none.
        softmax_phi: a number that softmax weights are relative to in place of their row's maximum, where that
            lies near it: a finite float, or float32 [num_q_heads], as for ``attention``. On a GPU the kernels
            for decoding use it. Default: none.
        window_right: keys past its own that a query sees; ignored if causal. Default: -1, unbounded.
        attention_chunk: the number of positions in a chunk. A query sees no key of an earlier chunk than
            its own, as in Llama 4. Needs causal. Default: 0, none.
        tree_mask: a word of 64 bits for each row of q, as ``octavo.tree_mask`` makes them: int64 or uint64
            [total_q], or pairs of int32 or uint32 [total_q, 2], the lower half first, all in C order. Or bool
            [total_q, n], n at most 64, of NumPy, PyTorch, JAX or CuPy, of which each call makes the words, on
            the array's device, as ``octavo.pack_tree_mask`` does. Bit, or column, j says whether the query
            sees the j-th of the keys that came with its sequence's queries, which are the newest ones: in a
            tree of drafts its own key and those of its ancestors. Columns that are not there count as False.
            The mask only hides: causal, which it needs, and window_left hold as ever. It hides neither
            earlier keys nor those before prefix_lens, and positions, those of alibi_slopes too, stay places
            in the sequence. -1 is plainly causal. So is a sequence of more than 64 queries, whose words are
            not looked at. On a GPU the keys and values that it hides have to be finite. Default: none.
        chosen_pages: the pages that are read, for sparse decoding over those that a score chooses (Quest,
            Tang et al. 2024, arXiv:2406.10774): int32 or int64 [batch, num_chosen], or
            [batch, num_kv_heads, num_chosen] where each KV head has a choice of its own. A page is named by
            its place in the sequence, its column of page_table, so that the masks, the biases and the last
            page's tail are those of the whole sequence. Each list ascends, and -1 fills it up. No key of
            another page is seen, not even a query's own: choose the newest page too. Entries of page_table
            that no head chooses are never used. On the CPU lists are checked, on a GPU they are not. There
            ``split_kv_decode`` serves it, always batch-invariant, on Hopper and newer data centre GPUs, for
            up to 16 rows a KV head (queries of a sequence times query heads a KV head), 8 for head dims above
            128. Not with prefix_lens, bidirectional_ranges, attention_chunk, tree_mask, shared_prefix_len or
            num_splits. Default: none, all pages.
        alibi_symmetric: ALiBi adds ``-slope * abs(query position - key position)``, as for ``attention``;
            where no query sees a key past its own position, as under causal without prefix_lens or
            bidirectional_ranges, it changes nothing. Needs alibi_slopes. Where it changes something, a GPU
            refuses it together with chosen_pages. Default: False.
        bidirectional_ranges: int32 or int64 [batch, num_ranges, 2], in C order: ranges of keys that see each
            other in both directions, as for ``attention``. Where each sequence has one query and no window,
            they change nothing, and any kernel serves. Not with tree_mask, chosen_pages or shared_prefix_len.
            Default: none.
        ranges_keep_window_left: windows and chunks hide a range's earlier keys, too, as for ``attention``.
            Needs bidirectional_ranges. Default: False.
        static_past: a promise that no work still under way on the stream writes to any array of this call,
            except for ``q`` and, in the pages, each sequence's newest tokens, as many as it has queries,
            which no other sequence of the call sees. So ``append_kv`` of these may be in front, but not
            ``copy_pages`` to pages that are read here. On Hopper the kernels for decoding then read earlier
            keys and values while that launch ends: with static_tables there, a layer of a decode step takes
            some 2 us less. No effect elsewhere. Default: False.
        return_lse: return the log-sum-exp too. Default: False.
        out: an array like q, with the head_dim of v_pages, to write the result to; never read. It may be q
            itself, with the same address and strides; otherwise its memory must be apart from that of all
            other arguments. Default: a new array of the framework of q.
        stream: a CUDA stream to work on instead of the current one, as for ``attention``.

    Returns:
        out: like q, with the head_dim of v_pages; the very object given as ``out``, if any.
        lse: only with return_lse: float32, the shape of q without its last axis; the natural logarithm of the
            sum of ``exp(score)``, every bias and the sink included.

    Raises:
        ValueError: a shape or value that does not fit; on the CPU, lengths and page numbers too.
        TypeError: not an array, a wrong dtype, a torch tensor that requires grad, a JAX array as ``out``.
        RuntimeError: arrays on several devices, or a CUDA array where CUDA cannot be used.
    """
    raise NotImplementedError  # native() makes the function that runs


@overload
def append_kv(
    k: SupportsDLPack,
    v: SupportsDLPack,
    k_pages: SupportsDLPack,
    v_pages: SupportsDLPack,
    page_table: Integers | None = None,
    seq_lens: Integers | None = None,
    *,
    cu_seqlens: Integers | None = None,
    k_scale: float | SupportsDLPack | None = None,
    v_scale: float | SupportsDLPack | None = None,
    k_scales: SupportsDLPack | None = None,
    v_scales: SupportsDLPack | None = None,
    kv_dtype: str | None = None,
    k_channel_offset: SupportsDLPack | None = None,
    k_channel_scale: SupportsDLPack | None = None,
    rotate_keys: bool = False,
    rotary_cos: SupportsDLPack | None = None,
    rotary_sin: SupportsDLPack | None = None,
    rotary_interleaved: bool = False,
    q: None = None,
    slot_mapping: Integers | None = None,
    q_out: None = None,
    static_tables: bool = False,
    stream: Stream | None = None,
) -> None: ...
@overload
def append_kv(
    k: Array,
    v: SupportsDLPack,
    k_pages: SupportsDLPack,
    v_pages: SupportsDLPack,
    page_table: Integers | None = None,
    seq_lens: Integers | None = None,
    *,
    cu_seqlens: Integers | None = None,
    k_scale: float | SupportsDLPack | None = None,
    v_scale: float | SupportsDLPack | None = None,
    k_scales: SupportsDLPack | None = None,
    v_scales: SupportsDLPack | None = None,
    kv_dtype: str | None = None,
    k_channel_offset: SupportsDLPack | None = None,
    k_channel_scale: SupportsDLPack | None = None,
    rotate_keys: bool = False,
    rotary_cos: SupportsDLPack | None = None,
    rotary_sin: SupportsDLPack | None = None,
    rotary_interleaved: bool = False,
    q: SupportsDLPack,
    slot_mapping: None = None,
    q_out: Array | None = None,
    static_tables: bool = False,
    stream: Stream | None = None,
) -> Array: ...
@native()
def append_kv(
    k: Array,
    v: SupportsDLPack,
    k_pages: SupportsDLPack,
    v_pages: SupportsDLPack,
    page_table: Integers | None = None,
    seq_lens: Integers | None = None,
    *,
    cu_seqlens: Integers | None = None,
    k_scale: float | SupportsDLPack | None = None,
    v_scale: float | SupportsDLPack | None = None,
    k_scales: SupportsDLPack | None = None,
    v_scales: SupportsDLPack | None = None,
    kv_dtype: str | None = None,
    k_channel_offset: SupportsDLPack | None = None,
    k_channel_scale: SupportsDLPack | None = None,
    rotate_keys: bool = False,
    rotary_cos: SupportsDLPack | None = None,
    rotary_sin: SupportsDLPack | None = None,
    rotary_interleaved: bool = False,
    q: SupportsDLPack | None = None,
    slot_mapping: Integers | None = None,
    q_out: Array | None = None,
    static_tables: bool = False,
    stream: Stream | None = None,
) -> Array | None:
    """Write each sequence's newest tokens to the end of its pages.

    The n new tokens of sequence b go to its positions from ``seq_lens[b] - n`` up to ``seq_lens[b]``. A
    sequence of length 0 is padding: nothing is written for it. Two tokens of one call must not go to the same
    slot: sequences that share their last page need copy-on-write first, as ``PageAllocator.extend`` plans it.
    On the CPU nothing at all is written if an argument is wrong.

    With ``rotary_cos`` and ``rotary_sin`` keys are rotated by their positions before they are stored, as in
    FlashAttention's ``flash_attn_with_kvcache`` (RoFormer, Su et al. 2021, arXiv:2104.09864), and so are the
    queries ``q`` of the same tokens, which are returned: in the cache keys are as attention needs them. The
    rotation is computed in float32, and its result is rounded once, to the dtype of the pages or, after what
    ``k_channel_offset``, ``k_channel_scale`` and ``rotate_keys`` make of it, to a code. A position past the
    end of the tables is an error on the CPU; on a GPU, where nobody looks at the lengths, NaN takes the place
    of every number that it would rotate (``check_page_table`` finds such lengths).

    Args:
        k: float32, float16 or bfloat16 [batch, num_kv_heads, head_dim], one token a sequence; packed:
            [total, num_kv_heads, head_dim]. Any strides, with a unit last one; not inside the cache's memory.
        v: like k, with the head_dim of v_pages.
        k_pages: like k, [num_pages, page_size, num_kv_heads, head_dim]: the cache of keys; written. Pages may
            be of int8, float8_e4m3fn or float8_e5m2 as well: the nearest code is stored, ties to even; what
            is too large becomes the largest (int8: 127), NaN stays NaN (int8: 0). Or they are of uint8, whose
            contents ``kv_dtype`` names; int4 has a last axis of head_dim / 2, with the even dim in the lower
            half of its byte.
        v_pages: like k_pages: the cache of values; written. It may be int4 where k_pages is int8, too, and
            its head_dim may be another one. Both may be views of one array, as of ``cache.unbind()``, but
            have no element in common.
        page_table: int32 or int64 [batch, max_pages]; on the CPU it may be a list, here and below. Entries
            past a sequence's last page are never used. A GPU reads the lower 32 bits of int64.
        seq_lens: int32 or int64 [batch]: the length of each sequence in tokens, new ones included: at least
            their number, or 0 for padding.
        cu_seqlens: int32 or int64 [batch + 1]: sequence b has the tokens of k and v from cu_seqlens[b] up to
            cu_seqlens[b + 1]; rows past cu_seqlens[batch] are padding. Default: one token a sequence.
        k_scale: what is stored is k divided by it: a float, or for codes of 8 bits also a float32 array [1]
            or [num_kv_heads], which is read when the work runs. int8 needs it, or k_scales. Not for int4.
            Default: 1.
        v_scale: likewise for v.
        k_scales: written, instead of k_scale: the scale of each new token and KV head, with which its largest
            number becomes the largest code. float32 [num_pages, page_size, num_kv_heads], any strides, also
            between the rows of k_pages; for int4, which needs them, float16
            [num_pages, page_size, num_kv_heads, 2], (scale, minimum), with a unit last stride and aligned to
            4 bytes. The scale of a row with NaN or infinity is NaN. Default: none.
        v_scales: likewise for v.
        kv_dtype: what pages of uint8 hold: "float8_e4m3fn", "float8_e5m2" or "int4". Default: none, for pages
            of other dtypes.
        k_channel_offset: for codes: float32 [num_kv_heads, head_dim], such as the mean of some keys. It is
            subtracted from k after the rotation by positions, which shifts all scores of a query alike, so
            that softmax stays the same. ``paged_attention`` needs the same array. Default: none.
        k_channel_scale: for codes: what k is divided by next, of the same dtype and shape, at least 2^-126,
            such as the largest deviations from the mean. Default: none.
        rotate_keys: for codes: last, rotate k by a Hadamard matrix over head_dim divided by the square root
            of its size, so that a channel with large numbers is spread over all. The matrix has blocks of the
            largest power of two that divides head_dim. Default: False.
        rotary_cos: the cosines of the rotary embedding, [max_positions, rotary_dim / 2], of the dtype of k or
            float32, rows at any stride. Row t is for the token at position t of its sequence. rotary_dim is
            at most head_dim; the numbers of a head past it stay as they are. Default: no rotation.
        rotary_sin: like rotary_cos, and given together with it: the sines.
        rotary_interleaved: whether numbers 2 i and 2 i + 1 of a head are rotated by angle i, as in GPT-J;
            otherwise numbers i and i + rotary_dim / 2 are, as in Llama and GPT-NeoX. Default: False.
        q: queries of the new tokens, to be rotated too: like k, with any number of heads,
            [batch or total, num_q_heads, head_dim]. Default: none.
        slot_mapping: int32 or int64 [total], instead of page_table, seq_lens and cu_seqlens, as
            ``StepArrays`` or vLLM have it: where each row of k and v goes, page * page_size + slot of the
            page; a row with a negative number is not stored. Not with rotary_cos, which needs positions.
            Default: none.
        q_out: an array like q for the rotated queries: exactly q (same address and strides), or one whose
            memory is apart from it; it shares no element with k and v, but may be a view of the same array.
            Queries of padding are copied as they are. Default: a new array of the framework of k.
        static_tables: a promise that no work still under way on the stream writes to page_table, seq_lens,
            cu_seqlens, slot_mapping, rotary_cos or rotary_sin. On Hopper they are then read while the kernel
            in front ends. No effect elsewhere. Default: False.
        stream: a CUDA stream to work on instead of the current one of the framework of k, as for
            ``attention``.

    Returns:
        q_out: only with q: like q, the rotated queries; the very object given as ``q_out``, if any.

    Raises:
        ValueError: a shape or value that does not fit, a read-only cache; on the CPU, lengths and page
            numbers too.
        TypeError: not an array, a wrong dtype, a JAX array as the cache.
        RuntimeError: arrays on several devices, or a CUDA array where CUDA cannot be used.
    """
    raise NotImplementedError


@native()
def copy_pages(
    k_pages: SupportsDLPack,
    v_pages: SupportsDLPack,
    copies: Integers,
    *,
    to_k_pages: SupportsDLPack | None = None,
    to_v_pages: SupportsDLPack | None = None,
    k_scales: SupportsDLPack | None = None,
    v_scales: SupportsDLPack | None = None,
    to_k_scales: SupportsDLPack | None = None,
    to_v_scales: SupportsDLPack | None = None,
    stream: Stream | None = None,
) -> None:
    """Copy whole pages inside a cache (what copy-on-write still has to do), or from it to another one.

    The other cache may have another number of pages, and one of the two may be in host memory while the other
    is on a GPU: what ``PageAllocator.preempt`` and ``resume`` ask for. Then the GPU copies, in stream order,
    so that the host may look at its cache, or change it, once the stream has come past the call; and the host
    memory must be pinned (``torch.empty(..., pin_memory=True)``, ``cupyx.empty_pinned``), so that the GPU
    reaches it.

    Args:
        k_pages: float32, float16, bfloat16, int8, float8_e4m3fn, float8_e5m2 or uint8,
            [num_pages, page_size, num_kv_heads, head_dim]: the cache of keys; written, unless another one
            is. Any strides, with a unit last one.
        v_pages: like k_pages: the cache of values, with a head_dim of its own. It shares no element with
            k_pages where these are written, unless its rows are those of k_pages or parts of them, as with
            latents.
        copies: int32 or int64 [n, 2]: (from, to) pages, as ``PageAllocator.take_copies`` returns them; rows
            at any stride. No page is both read and written, and none is written twice. They are on the GPU if
            either cache is, which then reads the lower 32 bits of int64.
        to_k_pages: the other cache of keys, [any number of pages, page_size, num_kv_heads, head_dim], of the
            dtype of k_pages, apart from both in memory; written. Default: k_pages.
        to_v_pages: like to_k_pages, and given together with it: the other cache of values.
        k_scales: the scales of each token and KV head that belong to k_pages, as for ``append_kv``, which are
            copied with the pages. Default: none.
        v_scales: likewise for v_pages.
        to_k_scales: those of to_k_pages; given if k_scales is and there is another cache.
        to_v_scales: likewise for to_v_pages.
        stream: a CUDA stream to work on instead of the current one of the framework of the first array given
            that is on a GPU, as for ``attention``.

    Raises:
        ValueError: a shape or value that does not fit, a read-only cache, host memory that is not pinned; on
            the CPU, page numbers too.
        TypeError: not an array, a wrong dtype, a JAX array as the cache that is written.
        RuntimeError: arrays on several GPUs, `copies` not on the GPU that copies, or a CUDA array where CUDA
            cannot be used.
    """
    raise NotImplementedError


@native()
def check_page_table(
    page_table: Integers,
    seq_lens: Integers,
    *,
    num_pages: int,
    page_size: int,
    max_positions: int | None = None,
    stream: Stream | None = None,
) -> None:
    """Check that every sequence fits its row of the page table, and that its pages exist.

    The CPU operators do this by themselves. For CUDA arrays it copies both to the host and waits for them.

    Args:
        page_table: int32 or int64 [batch, max_pages]; entries past a sequence's last page are not looked at.
            Numbers beyond 32 bits are found, which operators on a GPU do not see.
        seq_lens: int32 or int64 [batch], in tokens.
        num_pages: pages in the cache.
        page_size: tokens in a page.
        max_positions: rows of the tables of a rotary embedding, which every sequence has to fit as well.
            Default: none.
        stream: a CUDA stream to work on instead of the current one of the framework of page_table.

    Raises:
        ValueError: a length below 0 or beyond ``max_pages * page_size`` or max_positions, or an entry in use
            outside [0, num_pages); the message names the first.
        TypeError: not an array, or a wrong dtype.
        RuntimeError: arrays on several devices, or a CUDA array where CUDA cannot be used.
    """
    raise NotImplementedError
