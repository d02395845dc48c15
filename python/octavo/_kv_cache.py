"""The KV cache of a whole model: pages of every layer, the allocator, and the arrays of a step."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from octavo._cache import PagedCache, library_of
from octavo._kv_layout import check_rows
from octavo._kv_sequences import KVSequences, handles
from octavo._paged_attention import append_kv, copy_pages, paged_attention

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from octavo._kv_memory import Memory
    from octavo._kv_steps import StepCounts
    from octavo._types import SupportsDLPack


class KVCache(KVSequences):
    """The KV cache of a model, for NumPy, PyTorch or CuPy: everything between a scheduler and the layers.

    It owns the pages of every layer, the ``PageAllocator`` that hands them out (PagedAttention, Kwon et al.
    2023, arXiv:2309.06180), and the arrays that the operators read in a step, which go to a GPU in one
    transfer from pinned memory. A step of generation is ``step``, and ``step.attend`` in each layer.

    On a GPU its work is queued on the library's current stream, on which the layers have to run as well.
    A step waits only until the numbers of the step before the last one are on the GPU.
    One thread at a time may call a cache and its steps.

    Args:
        num_layers: layers with a cache.
        num_kv_heads: heads of keys and values.
        head_dim: of a head: a multiple of 8 up to 512.
        num_pages: pages of each layer. Give this, memory or memory_fraction. A layer with a window gets no
            more than max_batch sequences need that are all in every step.
        memory: bytes for the pages of all layers; as many pages are made as fit.
        memory_fraction: the same as a share, above 0 and at most 1, of the memory that is free now on the GPU
            or on the host. On Linux the host's page cache counts as free. What PyTorch or CuPy keeps for
            later use does not.
        page_size: tokens in a page. Default: 16.
        max_batch: the most sequences in a step. Default: 64.
        max_tokens: the most new tokens in a step, of all sequences together. Default: 2048.
        max_length: of a sequence, in tokens. The page tables have room for it in whole pages, and go to the
            GPU at each step. Default: what the pages hold, at most 8192.
        dtype: of the pages, as for ``empty_cache``, codes of 8 and 4 bits included, which get scales of each
            token. Default: that of `like`, or float32.
        like: an array of the library and device wanted, of NumPy, PyTorch or CuPy. Default: NumPy.
        windows: for each layer how many tokens before its own a query sees, or None for all. Layers with one
            window share a page table, and pages behind it are used again. Default: no windows.
        prefix_cache: whether pages are found again by their tokens; then at least one layer has no window.
            Default: False.
        num_host_pages: pages of each layer in host memory, for ``preempt``. Default: 0.
        head_dim_v: the head_dim of values, where it is another. Default: head_dim.

    Raises:
        ValueError: a number out of range, none or several of num_pages, memory and memory_fraction, memory
            for less than a page, windows that do not fit.
        TypeError: `like` is not an array of these libraries.
        RuntimeError: `like` is a tensor of a device that is neither the CPU nor a CUDA GPU.
    """

    def __init__(
        self,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        num_pages: int | None = None,
        memory: int | None = None,
        memory_fraction: float | None = None,
        page_size: int = 16,
        max_batch: int = 64,
        max_tokens: int = 2048,
        max_length: int | None = None,
        dtype: Any = None,
        like: Any = None,
        windows: Sequence[int | None] | None = None,
        prefix_cache: bool = False,
        num_host_pages: int = 0,
        head_dim_v: int | None = None,
    ) -> None:
        from octavo._kv_memory import memory_of  # here, since these import NumPy
        from octavo._kv_steps import DeviceStep, StepLayout

        library = library_of("KVCache", like)
        if library == "jax":
            raise TypeError(
                "KVCache: like must not be a JAX array, whose pages cannot be written; use octavo.jax.KVCache"
            )
        self._memory: Memory = memory_of(library, like)
        super().__init__(
            num_layers,
            num_kv_heads,
            head_dim,
            num_pages=num_pages,
            memory=memory,
            memory_fraction=memory_fraction,
            page_size=page_size,
            max_batch=max_batch,
            max_tokens=max_tokens,
            max_length=max_length,
            dtype=dtype,
            like=like,
            windows=windows,
            prefix_cache=prefix_cache,
            num_host_pages=num_host_pages,
            head_dim_v=head_dim_v,
            free_bytes=self._memory.free_bytes,
        )
        self.layers: list[PagedCache] = self._make_layers(like)
        """The arrays of each layer."""
        self._host_layers = [
            self._memory.host_pages(x, num_host_pages) for x in self.layers if num_host_pages
        ]
        layout = StepLayout(self.max_batch, self.max_tokens, self.max_pages, len(self._groups))
        self._numbers = DeviceStep(layout, self._memory)
        self._views: dict[int, _Views] = {}
        self._of_layer = [
            (layer.k_pages, layer.v_pages, _others(layer), group, self._groups[group].window_left)
            for layer, group in zip(self.layers, self._group_of_layer, strict=True)
        ]
        self._step_number = 0  # of the step that the arrays hold
        self._late_copies: list[NDArray[np.int32]] = []

    def step(
        self,
        seqs: Sequence[int],
        num_new_tokens: int | Iterable[int] | SupportsDLPack = 1,
        tokens: Iterable[int] | SupportsDLPack | None = None,
        *,
        pad_batch: int | None = None,
        pad_tokens: int | None = None,
    ) -> KVCacheStep:
        """Begin a step of generation: room for the new tokens of a batch, all or nothing.

        Pages that are written and shared are copied in all layers (copy-on-write). With a prefix cache, where
        a layer of the step fails so that keys and values of `tokens` are not written, ``truncate`` the
        sequences before the next ``step``, ``create`` with tokens or a namespace, ``fork``, ``reorder``,
        ``preempt`` or ``free``, which store full pages: or pages are found that were never written.

        Args:
            seqs: handles, at most max_batch; none may come twice.
            num_new_tokens: an int for all of them, or one for each, at least 0; at most max_tokens together.
                Default: 1.
            tokens: the new tokens of all sequences, one after the other, for the prefix cache: their full
                pages are found by ``create``. Without a prefix cache they are not used. Default: none, and
                these sequences are not found from there on.
            pad_batch: rows of the step's arrays, at least as many as sequences; those left over are padding,
                with length 0. A CUDA graph captured so serves every smaller batch. Default: no padding.
            pad_tokens: rows of queries, keys and values, at least as many as new tokens; those left over are
                not appended, and their results are nothing to be used. Default: no padding, but that of
                pad_batch where each sequence has one token.

        Returns:
            step: for the layers; until the next step begins.

        Raises:
            octavo.OutOfPages: too few free pages; ``indices`` of the error says which sequences did not fit.
            octavo.InvalidSequence: one of seqs is no live sequence.
            TypeError, ValueError: a bad argument, too many tokens, a sequence longer than max_length, which
                counts in whole pages.

        In each case the cache is as before, and the last step can still be used. Any other exception, such as
        one of the array library or KeyboardInterrupt, ends the last step; the sequences have their lengths of
        before.
        """
        if not self.prefix_cache:
            tokens = None
        if self._late_copies:
            self._make_late_copies()
        host = self._numbers.begin()
        try:
            counts = host.write(self.allocator, seqs, num_new_tokens, tokens, pad_batch, pad_tokens)
            self._step_number += 1
            self._numbers.send(counts)
            if any(counts.num_copies):
                layout, numbers = self._numbers.layout, self._numbers.numbers
                self._copy([layout.copies(numbers, group, n) for group, n in enumerate(counts.num_copies)])
            return KVCacheStep(self, counts, self._views_of(counts.rows))
        except BaseException:
            copies = host.undo(self.allocator, seqs)
            if copies is not None:
                self._late_copies = copies
                self._step_number += 1
            raise

    def _copy(self, copies: Sequence[Any]) -> None:
        """Copy-on-write, in all layers."""
        for pages, group in zip(self.layers, self._group_of_layer, strict=True):
            if len(copies[group]):
                copy_pages(copies=copies[group], **pages.arrays)

    def _make_late_copies(self) -> None:
        """Those of a step that raised: before anything else can take or write the pages that they read."""
        if self._late_copies:
            self._copy([self._memory.to_device(copies) for copies in self._late_copies])
            self._late_copies = []

    def _views_of(self, rows: int) -> _Views:
        """Made once for each number of rows: to make them takes longer than a step."""
        views = self._views.get(rows)
        if views is None:
            layout, numbers = self._numbers.layout, self._numbers.numbers
            views = self._views[rows] = _Views(
                layout.last_rows(numbers, rows),
                layout.cu_seqlens_q(numbers, rows),
                layout.seq_lens(numbers, rows),
                tuple(layout.page_table(numbers, group, rows) for group in range(layout.num_groups)),
            )
        return views

    def preempt(self, seqs: Iterable[int]) -> None:
        """Move sequences to host memory: their pages are free for others. ``PageAllocator.preempt``.

        Until ``resume`` they can only be freed, or asked their length. On a GPU the copies are queued on the
        current stream, and the pages are written again by later work on it. Which pages these are goes to the
        GPU from pageable memory, for which PyTorch waits until the stream is that far; so in ``resume``.

        Raises:
            octavo.OutOfPages: too few free host pages.
            octavo.InvalidSequence: one of seqs is no live sequence.
            ValueError: one that is preempted already.

        In each case everything is as before. Any other exception, such as one of the array library or
        KeyboardInterrupt, leaves the sequences where they were, or moved, or, if it comes while pages are
        copied, freed.
        """
        self._transfer(self.allocator.preempt, handles("preempt", seqs), self.layers, self._host_layers)

    def resume(self, seqs: Iterable[int]) -> None:
        """Bring preempted sequences back: ``PageAllocator.resume``.

        Sequences that share pages still do if they come back in one call.

        Raises:
            octavo.OutOfPages: too few free pages.
            octavo.InvalidSequence: one of seqs is no live sequence.
            ValueError: one that is not preempted.

        In each case everything is as before. Any other exception, such as one of the array library or
        KeyboardInterrupt, leaves the sequences where they were, or moved, or, if it comes while pages are
        copied, freed.
        """
        self._transfer(self.allocator.resume, handles("resume", seqs), self._host_layers, self.layers)

    def _transfer(
        self,
        begin: Callable[[list[int]], tuple[int, NDArray[np.int32] | list[NDArray[np.int32]]]],
        seqs: list[int],
        source: Sequence[PagedCache],
        target: Sequence[PagedCache],
    ) -> None:
        self._make_late_copies()
        # An interrupt right after `begin` takes along what that returns. Transfers are numbered one after the
        # other, so that an empty one tells the number of the next.
        empty, _ = self.allocator.resume([])
        self.allocator.confirm(empty)
        transfer = empty + 1
        try:
            _, copies = begin(seqs)
            of_groups = copies if isinstance(copies, list) else [copies]
            for group, of_group in enumerate(of_groups):
                if len(of_group):
                    on_device = self._memory.to_device(of_group)
                    for layer in self._groups[group].layers:
                        copy_pages(copies=on_device, **source[layer].arrays, **target[layer].to_arrays)
            # Whatever takes these pages from here on is queued behind the copies.
            self.allocator.confirm(transfer)
        except BaseException:
            if self._was_under_way(transfer):
                for seq in seqs:
                    if target is self.layers:
                        self.allocator.truncate(seq, 0)  # or the prefix cache would find what was not copied
                    self.allocator.free(seq)
            raise

    def _was_under_way(self, transfer: int) -> bool:
        """Whether there was a transfer to confirm. Not where it never began, nor where it is confirmed."""
        try:
            self.allocator.confirm(transfer)
        except ValueError:
            return False
        return True


class _Views(NamedTuple):
    last_rows: Any
    cu_seqlens_q: Any
    seq_lens: Any
    page_tables: tuple[Any, ...]


class KVCacheStep:
    """A step of generation, as ``KVCache.step`` returns it.

    Its arrays are the cache's own, on its device, at the same addresses in every step. They hold this step
    until the next one begins; then ``attend`` raises RuntimeError.
    """

    last_rows: Any
    """int32 [batch]: the row of each sequence's last new token among the T; 0 where it has none."""
    cu_seqlens_q: Any
    """int32 [batch + 1]: sequence b has the rows from cu_seqlens_q[b] up to cu_seqlens_q[b + 1]."""
    seq_lens: Any
    """int32 [batch]: the length of each sequence, new tokens included; 0 for padding."""
    page_tables: tuple[Any, ...]
    """int32 [batch, max_pages], one for each group of layers: those without a window, then the others."""

    __slots__ = (
        "_cache",
        "_cu_seqlens",
        "_has_copies",
        "_max_seqlen",
        "_num_rows",
        "_number",
        "batch",
        "cu_seqlens_q",
        "last_rows",
        "max_seqlen_q",
        "num_tokens",
        "page_tables",
        "positions",
        "seq_lens",
    )

    def __init__(self, cache: KVCache, counts: StepCounts, views: _Views) -> None:
        self._cache = cache
        self._number = cache._step_number
        self.batch: int = counts.batch
        """Sequences in the step."""
        self.num_tokens: int = counts.num_tokens
        """New tokens in the step: T, where nothing is padded."""
        self.max_seqlen_q: int = counts.max_seqlen_q
        """The most new tokens of a sequence."""
        self._num_rows = counts.num_rows_of_tokens
        self._has_copies = any(counts.num_copies)  # which are made behind the transfer
        numbers = cache._numbers
        self.positions: Any = numbers.layout.positions(numbers.numbers, counts.num_rows_of_tokens)
        """int32 [T]: where each new token lies in its sequence; 0 for padding."""
        self.last_rows, self.cu_seqlens_q, self.seq_lens, self.page_tables = views
        self._cu_seqlens = views.cu_seqlens_q if counts.is_packed else None
        self._max_seqlen = counts.max_seqlen_q if counts.is_packed else None

    def attend(
        self,
        layer: int,
        q: Any,
        k: Any,
        v: Any,
        *,
        softmax_scale: float | None = None,
        causal: bool = True,
        window_right: int = -1,
        attention_chunk: int = 0,
        softcap: float = 0.0,
        alibi_slopes: Any = None,
        alibi_symmetric: bool = False,
        sinks: Any = None,
        softmax_phi: Any = None,
        tree_mask: Any = None,
        bidirectional_ranges: Any = None,
        ranges_keep_window_left: bool = False,
        chosen_pages: Any = None,
        rotary_cos: Any = None,
        rotary_sin: Any = None,
        rotary_interleaved: bool = False,
        out: Any = None,
    ) -> Any:
        """Append the new keys and values to a layer's pages, and attend over them.

        ``append_kv``, then ``paged_attention`` with the layer's window. Once for each layer in a step;
        a second time would write the same slots again. On a GPU it makes their promises ``static_tables`` and
        ``static_past``: arrays other than q, k and v must not be written to by work that may still be under
        way, such as a kernel that lets the next one start early (programmatic dependent launch). PyTorch's
        own kernels and CuPy's do not.

        Args:
            layer: from 0 to num_layers - 1.
            q: [T, num_q_heads, head_dim]: queries of the new tokens, packed, in the order of the sequences.
            k: like q, [T, num_kv_heads, head_dim].
            v: like k, with the head_dim of values.
            softmax_scale: as for ``paged_attention``, as are causal and the following up to
                chosen_pages.
            causal: Default: True.
            window_right: keys past its own that a query sees, of those there are; ignored if causal. Default:
                -1, unbounded.
            attention_chunk: with ``windows`` of one less for this layer, pages of past chunks are used again.
                Default: 0, none.
            softcap: Default: 0.0, no cap.
            alibi_slopes: Default: none.
            alibi_symmetric: Default: False.
            sinks: Default: none.
            softmax_phi: Default: none.
            tree_mask: for each row of q one word, or a row of bools. Default: none.
            bidirectional_ranges: a row of ranges for each sequence of the step, by positions in the sequence,
                past and new. In a layer with a window, one that holds new tokens must not reach behind the
                window of the first of them, unless ranges_keep_window_left is set: those pages are gone. On
                the CPU that is checked; on a GPU the result is unspecified. Default: none.
            ranges_keep_window_left: Default: False.
            chosen_pages: a list for each sequence of the step, or for each KV head of it; among the pages
                that it names is the newest one. Default: none, all pages.
            rotary_cos: as for ``append_kv``, as are rotary_sin and rotary_interleaved: the queries and keys
                are rotated by their positions; q itself stays as it is, unless it is `out`. Default: no
                rotation.
            rotary_sin: given together with rotary_cos.
            rotary_interleaved: Default: False.
            out: an array for the result; may be q, where values have its head_dim. Default: a new array.

        Returns:
            out: like q, with the head_dim of v.

        Raises:
            RuntimeError: another step of the cache has begun.
            ValueError: q has more rows than the step, or q, k or v fewer than new tokens.
            ValueError, TypeError, RuntimeError: as ``append_kv`` and ``paged_attention``; nothing is written
                where it is append_kv that refuses.
        """
        cache = self._cache
        if cache._step_number != self._number:
            raise RuntimeError(
                "attend: this step is over, since another one has begun; its arrays hold that one"
            )
        try:
            layer = operator.index(layer)
        except TypeError:
            raise TypeError(f"attend: layer must be an int; got {type(layer).__name__}") from None
        if not 0 <= layer < cache.num_layers:
            raise ValueError(f"attend: layer ({layer}) must be from 0 to {cache.num_layers - 1}")
        k_pages, v_pages, others, group, window_left = cache._of_layer[layer]
        if self._cu_seqlens is not None:
            check_rows(q, k, v, self.num_tokens, self._num_rows)
        page_table, seq_lens, cu_seqlens = self.page_tables[group], self.seq_lens, self._cu_seqlens
        if bidirectional_ranges is not None and window_left >= 0 and not ranges_keep_window_left:
            cache._numbers.check_ranges(bidirectional_ranges, seq_lens, cu_seqlens, layer, window_left)
        # Nothing under way writes to tables or earlier tokens: the step's arrays come by a transfer, which
        # lets no kernel start before it has ended, and the prefix cache finds tokens of earlier steps alone.
        if rotary_cos is None and rotary_sin is None:
            append_kv(
                k,
                v,
                k_pages,
                v_pages,
                page_table,
                seq_lens,
                cu_seqlens=cu_seqlens,
                static_tables=True,
                **others,
            )
        else:
            is_like_q = cache.head_dim_v == cache.head_dim  # the result
            q = append_kv(
                k,
                v,
                k_pages,
                v_pages,
                page_table,
                seq_lens,
                cu_seqlens=cu_seqlens,
                rotary_cos=rotary_cos,
                rotary_sin=rotary_sin,
                rotary_interleaved=rotary_interleaved,
                q=q,
                q_out=out if is_like_q else None,
                static_tables=True,
                **others,
            )
            if is_like_q:
                out = q  # rotated, and read for the last time by what writes over them
        return paged_attention(
            q,
            k_pages,
            v_pages,
            page_table,
            seq_lens,
            cu_seqlens_q=cu_seqlens,
            max_seqlen_q=self._max_seqlen,
            softmax_scale=softmax_scale,
            causal=causal,
            window_left=window_left,
            window_right=window_right,
            attention_chunk=attention_chunk,
            softcap=softcap,
            alibi_slopes=alibi_slopes,
            alibi_symmetric=alibi_symmetric,
            sinks=sinks,
            softmax_phi=softmax_phi,
            tree_mask=tree_mask,
            bidirectional_ranges=bidirectional_ranges,
            ranges_keep_window_left=ranges_keep_window_left,
            chosen_pages=chosen_pages,
            static_past=not self._has_copies,
            out=out,
            **others,
        )


def _others(layer: PagedCache) -> dict[str, Any]:
    """Those of its arguments that are not pages."""
    return {name: x for name, x in layer.arguments.items() if name not in ("k_pages", "v_pages")}
