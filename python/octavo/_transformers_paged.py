"""Octavo in transformers' own continuous batching: ``model.generate_batch`` and its manager.

transformers hands the attention of a layer its cache and flat slots to read and to write. Of layers of full
attention these name pages, which lie in memory as Octavo's operators take them: no layer copies the keys and
values of the batch. A layer with a sliding window keeps a ring of slots for each sequence, in which a new
token takes the place of the one that has left the window.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn, TypeVar, cast

import torch
import transformers
from torch import Tensor
from transformers import AttentionInterface, modeling_flash_attention_utils

import octavo
import octavo.flash_attn
from octavo._transformers_layers import look_at_layers, refusal
from octavo._transformers_refusals import refuse_options

Function = TypeVar("Function", bound=Callable[..., Any])

try:
    from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager
except ImportError:  # transformers has no continuous batching, or has moved it
    HAS_MANAGER = False
else:
    HAS_MANAGER = hasattr(ContinuousBatchingManager, "switch_to_cb_friendly_attn")
try:
    from transformers.generation.continuous_batching import cache as their_cache
    from transformers.generation.continuous_batching.cache_allocators import FullAttentionCacheAllocator
except ImportError:  # an earlier transformers, whose cache lies in memory in another way
    IS_KNOWN = False
else:
    IS_KNOWN = HAS_MANAGER and hasattr(modeling_flash_attention_utils, "_lazy_imports")

_outside_of_graphs = cast(Callable[[Function], Function], torch.compiler.disable)
_names: dict[str, str] = {}  # under which Octavo is registered, and its names in continuous batching


def register(name: str) -> None:
    """Let continuous batching take models whose attention is registered under this name.

    transformers takes "sdpa", "paged|eager" and names with "flash". The latter get no mask, which Octavo does
    not need, and those of versions 2 and 3 block tables and CUDA graphs.
    """
    if not _names and HAS_MANAGER:
        _let_manager_switch()
    if not _names and IS_KNOWN:
        _let_flash_attention_be_found()
        _let_attention_see_the_cache()
    _names[name] = f"{name}_paged_flash_2"
    if IS_KNOWN:
        AttentionInterface.register(_names[name], _attention)


def _let_manager_switch() -> None:
    """Have the manager set the name for continuous batching, as it does for "eager", until it stops."""
    switch = ContinuousBatchingManager.switch_to_cb_friendly_attn

    @functools.wraps(switch)
    def switch_or_refuse(self: Any, model: Any, *args: Any, **kwargs: Any) -> None:
        before = model.config._attn_implementation
        name = {paged: name for name, paged in _names.items()}.get(before, before)
        if name not in _names:
            switch(self, model, *args, **kwargs)
            return
        if not IS_KNOWN:
            _refuse(
                "transformers' continuous batching is supported with the caches of versions 5.23 and "
                "5.24, and this one's is another; use octavo.transformers.generate_batch"
            )
        only = getattr(model, "_compatible_flash_implementations", None)
        if only is not None and _names[name] not in only:  # transformers would take one of these instead
            raise refusal(model, f"transformers gives it only {', '.join(only)} in continuous batching")
        model.set_attn_implementation(name)
        try:
            _require_servable(model)
            model.set_attn_implementation(_names[name])
        except BaseException:
            model.set_attn_implementation(before)
            raise
        if before != _names[name]:
            self._original_attn_impl = before

    manager: Any = ContinuousBatchingManager
    manager.switch_to_cb_friendly_attn = switch_or_refuse


def _let_flash_attention_be_found() -> None:
    """Give transformers octavo.flash_attn for the functions that it looks for under a name with "flash"."""
    theirs: Any = modeling_flash_attention_utils
    find = theirs._lazy_imports

    @functools.wraps(find)
    def find_ours_too(implementation: str | None, *args: Any, **kwargs: Any) -> Any:
        if implementation not in _names.values():
            return find(implementation, *args, **kwargs)
        ours = octavo.flash_attn
        functions = (ours.flash_attn_func, ours.flash_attn_varlen_func, ours.flash_attn_with_kvcache)
        return *functions, theirs._pad_input, theirs._unpad_input

    theirs._lazy_imports = find_ours_too


def _let_attention_see_the_cache() -> None:
    """Have layers hand on the cache and the new keys and values as they are.

    Since version 5.24 a layer itself updates the cache, and its attention gets copies of all keys and values.
    Before, the cache was one of the attention's arguments, as it is again for Octavo's names.
    """
    update = their_cache.PagedAttentionCache.update
    if "kwargs" not in inspect.signature(update).parameters:
        return

    @functools.wraps(update)
    def update_or_hand_on(
        self: Any, key_states: Tensor, value_states: Tensor, layer_idx: int, kwargs: dict[str, Any]
    ) -> Any:
        if self.config._attn_implementation not in _names.values():
            return update(self, key_states, value_states, layer_idx, kwargs)
        kwargs["cache"] = self
        return key_states, value_states

    theirs: Any = their_cache.PagedAttentionCache
    theirs.update = update_or_hand_on


@torch.no_grad()
def _require_servable(model: Any) -> None:
    """Refuse by name, before there is a request, a model that would fail in the midst of one."""
    model.eval()  # as the manager does
    text = torch.arange(1, 4, device=model.device)[None] % model.get_input_embeddings().weight.shape[0]
    _, layers = look_at_layers(model, text)
    config = model.config.get_text_config()
    types = {i: kind for kind, group in their_cache.group_layers_by_attn_type(config).items() for i in group}
    for module, number in layers.numbers.items():
        kind = types.get(getattr(module, "layer_idx", -1))
        if kind is None:
            raise refusal(model, f"{type(module).__name__} {number} has no layer of the cache (layer_idx)")
        layer = layers.all[number]
        if layer.head_dim_v != layer.head_dim:  # its pages have one head dim
            dims = f"({layer.head_dim_v}) than its keys ({layer.head_dim})"
            raise refusal(model, f"its values have another head dim {dims}, and transformers' cache has one")
        window = layer.window_left + 1
        if window != (config.sliding_window if kind == "sliding_attention" else 0):
            raise refusal(model, f"layer {number} has a sliding window of {window}, and a cache for {kind}")


class _Layer(NamedTuple):
    """Where the keys and values of a layer are."""

    rows: tuple[Tensor, Tensor]  # of keys and of values: [num_rows, num_kv_heads, head_dim], by slots
    pages: tuple[Tensor, Tensor]  # [num_pages, page_size, num_kv_heads, head_dim]
    page_size: int
    stride: int  # from a page to the next, in rows: other layers' pages lie between them
    group: int  # of layers whose tokens are in the same slots
    layer_type: str
    window_left: int
    new: int  # the slot that stands for the new tokens where a ring is read
    nowhere: int  # the slot that padding is written to

    @classmethod
    def of(cls, cache: Any, layer: int) -> _Layer:
        allocator = cache.layer_to_allocator[layer]
        # Rings have no block tables; their pages lie as those of full attention do.
        k_pages, v_pages = FullAttentionCacheAllocator.get_cache_for_block_table(allocator, layer)
        page_size, stride = allocator.tokens_per_page, allocator.block_physical_stride
        return cls(
            (k_pages.view(-1, *k_pages.shape[2:]), v_pages.view(-1, *v_pages.shape[2:])),
            (k_pages[:: stride // page_size], v_pages[:: stride // page_size]),
            page_size,
            stride,
            allocator.index,
            allocator.layer_type,
            allocator.sliding_window - 1 if allocator.layer_type == "sliding_attention" else -1,
            allocator.sentinel_index,
            allocator.write_trash_index,
        )

    def slots_in_pages(self, slots: Tensor) -> Tensor:
        """Which slots of ``pages`` rows are: page * page_size + slot of the page."""
        return slots // self.stride * self.page_size + slots % self.stride

    def read_ring(self, slots: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Copy what a ring holds, and the new tokens behind it: [len(slots), num_kv_heads, head_dim]."""
        is_new = (slots == self.new)[:, None, None]
        k_rows, v_rows = self.rows
        return k_rows[slots].masked_scatter_(is_new, k), v_rows[slots].masked_scatter_(is_new, v)


@dataclass
class _Group:
    """What the layers of a group have in common in a forward pass."""

    slots: Tensor | None  # int64 [T]: where the new tokens go, -1 for padding; None: at the end of seq_lens
    page_table: Tensor | None = None  # int32 [batch, max_pages]; None: no pages are read
    seq_lens: Tensor | None = None


@dataclass
class _Cache:
    """What is known of a cache of transformers, and of the forward pass that it is in."""

    layers: dict[int, _Layer] = field(default_factory=dict)
    arguments: object = None  # of the pass: which one it is
    have_run: set[int] = field(default_factory=set)  # layers
    groups: dict[int, _Group] = field(default_factory=dict)

    def enter(self, number: int, arguments: object) -> None:
        """See whether a layer runs in another pass: with other arguments, or once more.

        A CUDA graph is captured with the arguments of a pass that has run, and has to make its own tables.
        """
        if self.arguments is not arguments or number in self.have_run:
            self.arguments = arguments
            self.have_run, self.groups = set(), {}
        self.have_run.add(number)


_caches: weakref.WeakKeyDictionary[Any, _Cache] = weakref.WeakKeyDictionary()


def _make_group(
    layer: _Layer,
    read: Tensor,
    write: Tensor,
    block_table: Tensor | None,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
) -> _Group:
    """The tables by which a group's layers write and read, from the flat slots that transformers gives."""
    seq_lens = cu_seqlens_k.diff()
    if block_table is not None:  # one new token for each sequence
        pages = block_table[layer.group] // (layer.stride // layer.page_size)
        return _Group(None, pages, seq_lens)
    slots = layer.slots_in_pages(write).where(write != layer.nowhere, -1)
    is_ring = layer.layer_type == "sliding_attention"
    # None where prompts have no past, nor where new tokens overwrite what the first of them see.
    if not read.numel() or (is_ring and max_seqlen_q > 1):
        return _Group(slots)
    # A ring is read in pages of one token, in any order: the one new token sees all that it holds.
    first = torch.arange(0, max_seqlen_k, 1 if is_ring else layer.page_size, device=read.device)
    at = (cu_seqlens_k[:-1, None] + first).clamp_(max=read.numel() - 1)
    table = read[at]
    if is_ring:
        table = table.where(table != layer.new, write[: len(table), None])
    else:
        table //= layer.stride
    return _Group(slots, table.to(torch.int32), seq_lens)


@_outside_of_graphs  # the cache is written in place, through views
def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,  # noqa: ARG001  # none is made for this name
    *,
    cache: Any = None,
    scaling: float | None = None,
    softcap: float | None = None,
    read_index: list[Tensor] | None = None,
    write_index: list[Tensor] | None = None,
    block_table: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: dict[str, Tensor] | None = None,
    max_length_q: int = 0,
    max_length_k: dict[str, int] | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer over new tokens of several sequences: arrays [1, heads, T, head_dim]."""
    if cache is None or read_index is None or write_index is None:
        name = getattr(getattr(module, "config", None), "_attn_implementation", "")
        _refuse(f"{name!r} is for continuous batching only; use {min(_names)!r}")
    if cu_seq_lens_q is None or cu_seq_lens_k is None or max_length_k is None:
        _refuse("continuous batching says nothing of the sequences' lengths")
    if options.get("s_aux") is not None:
        _refuse("s_aux is not supported")
    refuse_options(options, _refuse)
    number = int(module.layer_idx)
    known = _caches.setdefault(cache, _Cache())
    known.enter(number, read_index)
    if number not in known.layers:
        known.layers[number] = _Layer.of(cache, number)
    layer = known.layers[number]
    cu_seqlens_k, max_seqlen_k = cu_seq_lens_k[layer.layer_type], max_length_k[layer.layer_type]
    read, write = read_index[layer.group], write_index[layer.group]
    if layer.group not in known.groups:
        known.groups[layer.group] = _make_group(
            layer, read, write, block_table, cu_seqlens_k, max_length_q, max_seqlen_k
        )
    group = known.groups[layer.group]

    q, k, v = (array[0].transpose(0, 1) for array in (query, key, value))
    k_pages, v_pages = layer.pages
    scores: dict[str, Any] = {"softmax_scale": scaling, "softcap": softcap or 0.0}
    if group.slots is None:
        octavo.append_kv(k, v, k_pages, v_pages, group.page_table, group.seq_lens)
    elif group.page_table is not None:
        octavo.append_kv(k, v, k_pages, v_pages, slot_mapping=group.slots)
        scores |= {"cu_seqlens_q": cu_seq_lens_q, "max_seqlen_q": max_length_q}
    if group.page_table is not None and group.seq_lens is not None:
        if layer.layer_type == "sliding_attention":
            k_pages, v_pages = (rows.unsqueeze(1) for rows in layer.rows)
        out = octavo.paged_attention(q, k_pages, v_pages, group.page_table, group.seq_lens, **scores)
        return out[None], None
    keys, values = k, v
    if read.numel():
        keys, values = layer.read_ring(read, k, v)
    octavo.append_kv(k, v, k_pages, v_pages, slot_mapping=group.slots)
    out = octavo.attention(
        q,
        keys,
        values,
        cu_seqlens_q=cu_seq_lens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_length_q,
        max_seqlen_k=max_seqlen_k,
        causal=True,
        window_left=layer.window_left,
        **scores,
    )
    return out[None], None


def _refuse(what: str) -> NoReturn:
    raise ValueError(f"octavo.transformers: {what} (transformers {transformers.__version__})")
