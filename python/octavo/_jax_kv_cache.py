"""octavo.jax.KVCache: the pages as a pytree that programs give up and return, and the host half beside it."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
from jax.typing import ArrayLike

from octavo._cache import PagedCache
from octavo._jax_cache import append_kv, copy_pages
from octavo._jax_call import Integers
from octavo._kv_layout import check_rows
from octavo._kv_memory import free_host_bytes
from octavo._kv_sequences import KVSequences
from octavo._kv_steps import HostStep, StepCounts, StepLayout

if TYPE_CHECKING:
    from octavo._types import SupportsDLPack


class KVCache(KVSequences):
    """The KV cache of a model, for programs of JAX: ``octavo.KVCache`` where arrays are values.

    The host half, as there, is the ``PageAllocator`` and the numbers of a step. The pages are
    ``cache.pages``, a list with an ``octavo.PagedCache`` for each layer, which a program takes, gives up and
    returns::

        @functools.partial(jax.jit, donate_argnames="pages")
        def forward(pages, step, x): ...  # in each layer: out, pages = step.attend(pages, layer, q, k, v)

        step = cache.step(seqs, pad_batch=8)  # first, since it may replace the pages
        logits, cache.pages = forward(cache.pages, step, x)

    A step is a pytree as well, whose arrays go to the device in one transfer. A program is compiled anew for
    other shapes: pad_batch and pad_tokens make them the same. There is no host memory for preempted
    sequences.

    Args:
        num_layers: as are all others, as for ``octavo.KVCache``.
        like: a JAX array with the device of the pages. Default: JAX's default device.
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
        like: jax.Array | None = None,
        windows: Sequence[int | None] | None = None,
        prefix_cache: bool = False,
        head_dim_v: int | None = None,
    ) -> None:
        if like is None:
            like = jax.numpy.zeros((), jax.numpy.float32)  # with jax_enable_x64 the default is float64
        if not isinstance(like, jax.Array) or isinstance(like, jax.core.Tracer):
            raise TypeError(
                f"KVCache: like must be a JAX array outside of a program; got {type(like).__name__}"
            )
        devices = sorted(like.devices(), key=lambda device: device.id)
        if len(devices) != 1:
            raise ValueError(f"KVCache: like must be on one device; it is on {len(devices)}")
        self._device = devices[0]
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
            num_host_pages=0,
            head_dim_v=head_dim_v,
            free_bytes=self._free_bytes,
        )
        self.pages: list[PagedCache] = self._make_layers(like)
        """The pages of each layer. Assign what a program returns."""
        self._layout = StepLayout(self.max_batch, self.max_tokens, self.max_pages, len(self._groups))
        self._host = HostStep(self._layout, np.zeros(self._layout.size, np.int32))
        self._late_copies: list[Any] = []  # of a step that raised
        self._groups_of_layers = tuple(
            (group, self._groups[group].window_left) for group in self._group_of_layer
        )

    def step(
        self,
        seqs: Sequence[int],
        num_new_tokens: int | Iterable[int] | SupportsDLPack = 1,
        tokens: Iterable[int] | SupportsDLPack | None = None,
        *,
        pad_batch: int | None = None,
        pad_tokens: int | None = None,
    ) -> KVCacheStep:
        """Begin a step of generation: ``octavo.KVCache.step``, with its arguments and errors.

        Where a page has to be copied first, a program of its own gives up ``pages`` and replaces them.
        KeyboardInterrupt in the midst of that loses them, as in any program that gives them up.
        """
        if not self.prefix_cache:
            tokens = None
        self._make_copies(self._late_copies)
        self._late_copies = []
        self._host.begin()
        try:
            return self._make_step(
                self._host.write(self.allocator, seqs, num_new_tokens, tokens, pad_batch, pad_tokens)
            )
        except BaseException:
            copies = self._host.undo(self.allocator, seqs)
            if copies is not None:
                self._late_copies = copies
            raise

    def _make_step(self, counts: StepCounts) -> KVCacheStep:
        numbers = self._host.numbers
        self._make_copies(
            [self._layout.copies(numbers, group, n) for group, n in enumerate(counts.num_copies)]
        )
        # A copy, since JAX may read it at any time, and the next step writes to the original.
        numbers = jax.device_put(numbers[: self._layout.used(counts.rows)].copy(), self._device)
        shapes = _Shapes(
            self._layout,
            self._groups_of_layers,
            counts.rows,
            counts.num_rows_of_tokens,
            _max_seqlen(counts) if counts.is_packed else None,
        )
        return KVCacheStep(numbers, counts.batch, counts.num_tokens, counts.max_seqlen_q, shapes)

    def _make_copies(self, copies: Sequence[Any]) -> None:
        for group, of_group in enumerate(copies):
            if len(of_group):
                self._copy_on_write(group, of_group)

    def _copy_on_write(self, group: int, copies: Any) -> None:
        layers = self._groups[group].layers
        of_group = [self.pages[layer] for layer in layers]
        begin = 0
        while begin < len(copies):  # as many at a time as is a power of two, for few compiled programs
            count = 1 << (len(copies) - begin).bit_length() - 1
            now = jax.device_put(copies[begin : begin + count].copy(), self._device)
            of_group = _copy_pages(of_group, now)
            begin += count
        changed = dict(zip(layers, of_group, strict=True))
        self.pages = [changed.get(layer, pages) for layer, pages in enumerate(self.pages)]

    def _free_bytes(self) -> int:
        stats = self._device.memory_stats()  # None on the CPU
        return free_host_bytes() if stats is None else stats["bytes_limit"] - stats["bytes_in_use"]


class _Shapes(NamedTuple):
    """What a program that takes a step is compiled for."""

    layout: StepLayout
    groups_of_layers: tuple[tuple[int, int], ...]
    """For each layer the number of its group, and its window_left."""
    rows: int
    num_rows_of_tokens: int
    max_seqlen_q: int | None
    """None: one token a sequence."""


class KVCacheStep:
    """A step of generation, as ``octavo.jax.KVCache.step`` returns it: a pytree of arrays.

    Its arrays can be read inside of a program and outside; batch, num_tokens and max_seqlen_q are Python ints
    outside, and traced inside.
    """

    def __init__(self, numbers: Any, batch: Any, num_tokens: Any, max_seqlen_q: Any, shapes: _Shapes) -> None:
        self._numbers = numbers
        self._shapes = shapes
        self.batch = batch
        """Sequences in the step."""
        self.num_tokens = num_tokens
        """New tokens in the step."""
        self.max_seqlen_q = max_seqlen_q
        """The most new tokens of a sequence."""

    @property
    def positions(self) -> jax.Array:
        """int32 [T]: where each new token lies in its sequence; 0 for padding."""
        positions: jax.Array = self._shapes.layout.positions(self._numbers, self._shapes.num_rows_of_tokens)
        return positions

    @property
    def last_rows(self) -> jax.Array:
        """int32 [batch]: the row of each sequence's last new token among the T; 0 where it has none."""
        last_rows: jax.Array = self._shapes.layout.last_rows(self._numbers, self._shapes.rows)
        return last_rows

    @property
    def cu_seqlens_q(self) -> jax.Array:
        """int32 [batch + 1]: sequence b has the rows from cu_seqlens_q[b] up to cu_seqlens_q[b + 1]."""
        cu_seqlens_q: jax.Array = self._shapes.layout.cu_seqlens_q(self._numbers, self._shapes.rows)
        return cu_seqlens_q

    @property
    def seq_lens(self) -> jax.Array:
        """int32 [batch]: the length of each sequence, new tokens included; 0 for padding."""
        seq_lens: jax.Array = self._shapes.layout.seq_lens(self._numbers, self._shapes.rows)
        return seq_lens

    @property
    def page_tables(self) -> tuple[jax.Array, ...]:
        """int32 [batch, max_pages], one for each group of layers: those without a window, then the others."""
        layout = self._shapes.layout
        return tuple(
            layout.page_table(self._numbers, group, self._shapes.rows) for group in range(layout.num_groups)
        )

    def attend(
        self,
        pages: Sequence[PagedCache],
        layer: int,
        q: ArrayLike,
        k: ArrayLike,
        v: ArrayLike,
        *,
        softmax_scale: float | None = None,
        causal: bool = True,
        window_right: int = -1,
        attention_chunk: int = 0,
        softcap: float = 0.0,
        alibi_slopes: ArrayLike | None = None,
        alibi_symmetric: bool = False,
        sinks: ArrayLike | None = None,
        softmax_phi: float | ArrayLike | None = None,
        tree_mask: ArrayLike | None = None,
        bidirectional_ranges: Integers | None = None,
        ranges_keep_window_left: bool = False,
        chosen_pages: Integers | None = None,
        rotary_cos: ArrayLike | None = None,
        rotary_sin: ArrayLike | None = None,
        rotary_interleaved: bool = False,
    ) -> tuple[jax.Array, list[PagedCache]]:
        """Append the new keys and values to a layer's pages, and attend over them.

        ``octavo.KVCacheStep.attend`` in a JAX program.

        Args:
            pages: of all layers: ``KVCache.pages``, or what the call for the layer before returned.
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
            bidirectional_ranges: a row of ranges for each row of the step's tables, padding included, by
                positions in the sequence, past and new. In a layer with a window, one that holds new tokens
                must not reach behind the window of the first of them, unless ranges_keep_window_left is set:
                those pages are gone, and the result is unspecified. Default: none.
            ranges_keep_window_left: Default: False.
            chosen_pages: a list for each sequence of the step, or for each KV head of it; among the pages
                that it names is the newest one. Default: none, all pages.
            rotary_cos: as for ``append_kv``, as are rotary_sin and rotary_interleaved: the queries and keys
                are rotated by their positions. Default: no rotation.
            rotary_sin: given together with rotary_cos.
            rotary_interleaved: Default: False.

        Returns:
            out: like q, with the head_dim of v.
            pages: of all layers, those of this one with the new tokens.

        Raises:
            ValueError, TypeError: as ``append_kv`` and ``paged_attention`` of octavo.jax; a layer out of
                range, more rows than the step has or, outside of a program, fewer than new tokens, or the
                pages of another number of layers.
        """
        from octavo.jax import paged_attention  # here, since octavo.jax imports this file

        shapes = self._shapes
        num_layers = len(shapes.groups_of_layers)
        if len(pages) != num_layers:
            raise ValueError(f"attend: pages must be those of the {num_layers} layers; got {len(pages)}")
        if not 0 <= layer < num_layers:
            raise ValueError(f"attend: layer ({layer}) must be from 0 to {num_layers - 1}")
        if shapes.max_seqlen_q is not None:
            num_tokens = self.num_tokens if isinstance(self.num_tokens, int) else None  # traced in a program
            check_rows(q, k, v, num_tokens, shapes.num_rows_of_tokens)
        group, window_left = shapes.groups_of_layers[layer]
        page_table = shapes.layout.page_table(self._numbers, group, shapes.rows)
        seq_lens = self.seq_lens
        cu_seqlens = None if shapes.max_seqlen_q is None else self.cu_seqlens_q
        cache = pages[layer]
        rotates = rotary_cos is not None or rotary_sin is not None
        written: Sequence[Any] = append_kv(
            k,
            v,
            page_table=page_table,
            seq_lens=seq_lens,
            cu_seqlens=cu_seqlens,
            rotary_cos=rotary_cos,
            rotary_sin=rotary_sin,
            rotary_interleaved=rotary_interleaved,
            q=q if rotates else None,
            **cache.arguments,
        )
        if rotates:
            *written, q = written
        cache = _with_arrays(cache, written)
        out = paged_attention(
            q,
            page_table=page_table,
            seq_lens=seq_lens,
            cu_seqlens_q=cu_seqlens,
            max_seqlen_q=shapes.max_seqlen_q,
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
            **cache.arguments,
        )
        return out, [cache if i == layer else x for i, x in enumerate(pages)]


jax.tree_util.register_pytree_node(
    KVCacheStep,
    lambda step: ((step._numbers, step.batch, step.num_tokens, step.max_seqlen_q), step._shapes),
    lambda shapes, numbers: KVCacheStep(*numbers, shapes),
)


@functools.partial(jax.jit, donate_argnums=0)
def _copy_pages(layers: list[PagedCache], copies: jax.Array) -> list[PagedCache]:
    return [_with_arrays(layer, copy_pages(copies=copies, **layer.arrays)) for layer in layers]


def _with_arrays(cache: PagedCache, arrays: Iterable[Any]) -> PagedCache:
    changed: dict[str, Any] = dict(zip(cache.arrays, arrays, strict=True))
    return cache._replace(**changed)


def _max_seqlen(counts: StepCounts) -> int:
    """A bound that is the same for many steps, whose programs are then the same."""
    return min(1 << max(0, counts.max_seqlen_q - 1).bit_length(), counts.num_rows_of_tokens)
