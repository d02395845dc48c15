"""Octavo as an attention implementation of Hugging Face transformers.

``octavo.transformers.register()``, and then ``from_pretrained(..., attn_implementation="octavo")`` or
``model.set_attn_implementation("octavo")`` run a model's attention on Octavo, on the CPU and on GPUs.

What maps exactly is served: grouped heads, softcap, causal masks, causal sliding windows and full attention,
attention sinks (gpt-oss), with or without a growing or static cache, and padding masks [batch, seqlen] (a
padded batch is packed first, which copies its keys and values); attention in chunks (Llama 4) without a
static cache. So are sequences packed into a row, whose position_ids begin anew (DataCollatorWithFlattening):
each of them sees itself alone; tokens of images that see each other both ways (Gemma 3, PaliGemma), where a
mask is not made in a compiled graph; and windows to both sides (ModernBERT). Padding inside a sequence under
a window takes a copy of queries and keys. What else a model asks for is refused with a ValueError, never
approximated: other masks, position biases, attention weights. So are models whose attention is their own,
outside of transformers' AttentionInterface: BLOOM, MPT, Falcon and other early ones. Values with a head dim
of their own (DeepSeek-V3) need a growing cache. ``generate_batch`` wants one head dim for all layers, keys
and values, and refuses DeepSeek-V3 and Gemma 4.

``generate_batch`` serves many prompts at once from pages; ``make_scheduler`` requests as they come. The
models' own ``model.generate_batch`` runs on Octavo, too, over the pages of transformers.

Models train, too. In train mode each call draws a seed for its dropout from torch's generator of the CPU:
torch.manual_seed makes a run repeatable, and a checkpointed layer drops the same weights when it runs again.

Under ``torch.compile(fullgraph=True)`` give a cache, no padding mask, and no dropout. The values of
a mask, which transformers makes otherwise, and of a seed have to be read, which breaks the graph. The lengths
of a static cache stay on the device, so that one graph serves all of them.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import FunctionType
from typing import Any, NoReturn, cast

import torch
import transformers
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel, masking_utils

import octavo.torch
from octavo import _transformers_paged
from octavo._flash_attn_cache import packing, page_table_of
from octavo._torch_dropout import draw_seed
from octavo._transformers_batch import generate_batch, make_scheduler
from octavo._transformers_layers import Layers, LayerStep

__all__ = ["generate_batch", "make_scheduler", "register"]

_ROWS_AT_ONCE = 256  # of a mask that is compared, to bound memory
# Added to heads where padding is hidden. A hidden key's score is so low in every dtype that it has no weight
# beside any other. Queries of padding, whose results nobody uses, may see hidden keys alone: that is finite.
_HIDING_COLUMNS, _HIDING_QUERY, _HIDING_KEY = 8, 128.0, -30000.0
_MAX_HEAD_DIM = 512
_OTHER_MASK = "this mask is neither causal, nor a causal sliding window, nor full"
_names: set[str] = set()  # under which Octavo is registered


def register(name: str = "octavo") -> None:
    """Add Octavo to the attention implementations of transformers, under this name.

    Raises:
        ImportError: this transformers is too old: it describes its masks, or its models, in another way.
    """
    describes_offsets = "q_offset" in inspect.signature(masking_utils.sdpa_mask).parameters
    if not (describes_offsets and hasattr(PreTrainedModel, "_can_set_attn_implementation")):
        raise ImportError(
            f"octavo.transformers cannot serve transformers {transformers.__version__}: too old"
        )
    AttentionInterface.register(name, _attention)
    AttentionMaskInterface.register(name, _make_mask)
    if not _names:
        _let_models_refuse()
    _names.add(name)
    _transformers_paged.register(name)


def _let_models_refuse() -> None:
    """Have the models without AttentionInterface refuse Octavo by name.

    transformers takes a registered name for any model. Those that do not know it fail while they are built
    or run, each in its own way; ``set_attn_implementation`` logs a line and leaves them as they are.
    """
    get_correct = PreTrainedModel.get_correct_attn_implementation
    set_implementation = PreTrainedModel.set_attn_implementation

    def refuse(model: PreTrainedModel) -> NoReturn:
        _refuse(
            f"{type(model).__name__} does not call transformers' AttentionInterface, so that its attention "
            "cannot be replaced",
            instead="eager",
        )

    @functools.wraps(get_correct)  # transformers calls it while a model, or a part of one, is made
    def get_correct_or_refuse(self: PreTrainedModel, requested: str | None, *args: Any, **kwargs: Any) -> str:
        if requested in _names and not (
            self._can_set_attn_implementation()
            or hasattr(sys.modules.get(type(self).__module__), "ALL_ATTENTION_FUNCTIONS")
        ):
            refuse(self)
        return get_correct(self, requested, *args, **kwargs)

    @functools.wraps(set_implementation)
    def set_or_refuse(self: PreTrainedModel, requested: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(requested, str) and requested in _names:
            for part in self.modules():
                if isinstance(part, PreTrainedModel) and not part._can_set_attn_implementation():
                    refuse(part)
        set_implementation(self, requested, *args, **kwargs)

    models: Any = PreTrainedModel
    models.get_correct_attn_implementation = get_correct_or_refuse
    models.set_attn_implementation = set_or_refuse


@dataclass(frozen=True)
class _Packing:
    """The tokens of a padded batch that are not padding, or sequences that fill its rows."""

    tokens: Tensor | None  # int64 [total]: where they are in the batch, flattened; None: all of it
    cu_seqlens: Tensor  # int32 [sequences + 1]
    max_seqlen: int

    @classmethod
    def of(cls, is_token: Tensor) -> _Packing:
        lengths = is_token.sum(1)
        cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
        return cls(is_token.flatten().nonzero().flatten(), cu_seqlens, int(lengths.max()))

    @classmethod
    def of_sequences(cls, begins: Tensor) -> _Packing:
        """Of sequences that begin where this is true, bool [batch, seqlen], and end where the next begins."""
        first = begins.flatten().nonzero().flatten()
        cu_seqlens = torch.nn.functional.pad(first, (0, 1), value=begins.numel()).to(torch.int32)
        return cls(None, cu_seqlens, int(cu_seqlens.diff().max()))

    def on(self, device: torch.device) -> _Packing:
        tokens = None if self.tokens is None else self.tokens.to(device)
        return _Packing(tokens, self.cu_seqlens.to(device), self.max_seqlen)

    def pack(self, array: Tensor) -> Tensor:
        """[batch, seqlen, heads, head_dim] to [total, heads, head_dim]."""
        flat = array.flatten(0, 1)
        return flat if self.tokens is None else flat[self.tokens]

    def unpack(self, packed: Tensor, batch: int, seqlen: int) -> Tensor:
        """[total, heads, head_dim] to [batch, seqlen, heads, head_dim], with 0 in place of padding."""
        if self.tokens is None:
            return packed.view(batch, seqlen, *packed.shape[1:])
        flat = packed.new_zeros((batch * seqlen, *packed.shape[1:]))
        flat[self.tokens] = packed
        return flat.view(batch, seqlen, *packed.shape[1:])


@dataclass(frozen=True)
class _Mask:
    """What a model's layers get as their attention_mask, made once a forward pass."""

    causal: bool
    window_left: int = -1
    window_right: int = -1
    queries: _Packing | None = None
    keys: _Packing | None = None
    num_keys: int | None = None  # in front, of a static cache that holds slots without tokens behind them
    seq_lens: Tensor | None = None  # int32 [batch], likewise, where they are known on the device alone
    first_keys: Tensor | None = None  # int64 [batch]: slots before them hold padding
    attention_chunk: int = 0
    first_key: int = 0  # of those that some query sees: a chunk begins there
    ranges: Tensor | None = (
        None  # int32 [batch, n, 2]: keys that see each other both ways, such as an image's
    )
    ranges_keep_window_left: bool = False
    hidden: Tensor | None = None  # bool [batch, keys], where padding lies inside sequences

    _elsewhere: dict[torch.device, _Mask] = field(default_factory=dict, compare=False, repr=False)

    def on(self, device: torch.device) -> _Mask:
        """The same for a layer on this device, where a model lies on several. They share what is moved."""
        array = self.seq_lens if self.keys is None else self.keys.cu_seqlens
        for other in (self.ranges, self.hidden):
            array = other if array is None else array
        if array is None or array.device == device:
            return self
        if device not in self._elsewhere:
            self._elsewhere[device] = replace(
                self,
                queries=None if self.queries is None else self.queries.on(device),
                keys=None if self.keys is None else self.keys.on(device),
                seq_lens=None if self.seq_lens is None else self.seq_lens.to(device),
                first_keys=None if self.first_keys is None else self.first_keys.to(device),
                ranges=None if self.ranges is None else self.ranges.to(device),
                hidden=None if self.hidden is None else self.hidden.to(device),
                _elsewhere={},
            )
        return self._elsewhere[device]

    @property
    def range_arguments(self) -> dict[str, Any]:
        if self.ranges is None:
            return {}
        keep = self.ranges_keep_window_left
        return {"bidirectional_ranges": self.ranges, "ranges_keep_window_left": keep}


def _refuse(what: str, instead: str = "sdpa") -> NoReturn:
    raise ValueError(f"octavo.transformers: {what}; use another attn_implementation, such as {instead}")


def _require_causal(
    batch_size: int,
    queries: range,
    keys: range,
    mask_function: Callable[..., Any],
    window: int | None,
    use_vmap: bool,
    device: torch.device,
    begins: Tensor | None = None,
) -> None:
    """Refuse a function of the indices that is anything else than causal, with this window.

    `begins`: where sequences begin that lie one behind the other in a row, and do not see each other.
    """
    sequences = None if begins is None else begins.cumsum(1)
    key_positions = torch.arange(keys.start, keys.stop, device=device)
    for begin in range(queries.start, queries.stop, _ROWS_AT_ONCE):
        end = min(begin + _ROWS_AT_ONCE, queries.stop)
        distance = torch.arange(begin, end, device=device)[:, None] - key_positions
        ours = distance >= 0
        if window is not None:
            ours &= distance < window
        if sequences is not None:
            ours = ours & (sequences[:, None, begin:end, None] == sequences[:, None, None])
        theirs = masking_utils.sdpa_mask(
            batch_size,
            end - begin,
            len(keys),
            begin,
            keys.start,
            mask_function,
            allow_is_causal_skip=False,
            use_vmap=use_vmap,
            device=device,
        )
        if len(queries) == 1 and torch.compiler.is_compiling():  # a step: its graph holds the comparison
            torch._assert_async(cast(Tensor, theirs == ours).all(), f"octavo.transformers: {_OTHER_MASK}")
        elif theirs is None or not torch.equal(theirs, ours.expand_as(theirs)):
            _refuse(_OTHER_MASK)


class _Carrier(Tensor):
    """A tensor with a mask; accelerate sends the keywords of layers to their devices, and would drop it."""

    octavo_mask: _Mask

    def to(self, *_: Any, **__: Any) -> _Carrier:
        return self


def _make_mask(*, device: torch.device, **description: Any) -> Tensor | _Mask:
    """Return a tensor that has the mask as its octavo_mask.

    For a static cache generate() asks for masks and gives them to the model, which passes a tensor of four
    axes on to its layers as it is. Where that cannot be, in a graph or where gradients are computed, layers
    take the mask itself: a checkpointed one would get a copy of the tensor.
    """
    mask = _describe_mask(device=device, **description)
    if torch.compiler.is_compiling() or torch.is_grad_enabled():
        return mask
    carrier = torch.empty(1, 1, 1, 1, device=device).as_subclass(_Carrier)
    carrier.octavo_mask = mask
    return carrier


def _describe_mask(
    *,
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor,
    kv_offset: int,
    mask_function: Callable[..., Any],
    attention_mask: Tensor | None,
    device: torch.device,
    local_size: int | None = None,
    use_vmap: bool = False,
    allow_is_causal_skip: bool = False,
    config: Any = None,
    **_: Any,
) -> _Mask:
    """Return Octavo's arguments for the mask that transformers describes."""
    # transformers lets an implementation skip a mask to which nothing was added: packed sequences, blocks, or
    # functions of the caller's. What is left is causal, in windows or in chunks.
    nothing_added = allow_is_causal_skip and not use_vmap
    is_window = (
        local_size is not None
        and getattr(config, "sliding_window", None) == local_size
        and getattr(config, "attention_chunk_size", None) is None
        and (nothing_added or _is_plain_window(mask_function, local_size))
    )
    is_chunked = _is_chunked(config, local_size, nothing_added)
    if is_chunked and not isinstance(q_offset, Tensor) and q_offset + q_length - kv_offset == kv_length:
        chunk = cast(int, local_size)
        return _describe_chunks(q_length, kv_length, q_offset, kv_offset, chunk, attention_mask)
    is_two_sided = _is_two_sided_window(mask_function, local_size) and q_length == kv_length
    causal = not (is_two_sided or mask_function is masking_utils.bidirectional_mask_function)
    window_left, window_right = -1 if local_size is None else local_size - 1, -1
    if is_two_sided:
        window_left = window_right = cast(int, local_size)
    end = q_offset + q_length - kv_offset  # of the keys that the last query sees
    blocks: _Blocks | None = None
    if causal:
        if not isinstance(end, Tensor) and end > kv_length:
            _refuse(f"the last query sees {end} keys, and there are {kv_length}")
        is_plain = mask_function is masking_utils.causal_mask_function and local_size is None
        if not (is_plain or is_window):
            blocks = _Blocks.find(mask_function, local_size)
        if blocks is not None:
            window_left = -1 if blocks.window is None else blocks.window - 1
        elif not (is_plain or is_window):
            window, begins = local_size, None
            is_whole = (
                q_length == kv_length > 1 and not isinstance(q_offset, Tensor) and q_offset == kv_offset
            )
            if is_whole and attention_mask is None and not use_vmap:
                begins = _find_begins(mask_function, batch_size, q_length, device)
                # Chunks begin anew in each sequence, and are sequences of their own here.
                if begins is not None and local_size == getattr(config, "attention_chunk_size", None):
                    window = None
            if begins is None or not _is_plain_packing(mask_function, window, begins):
                begin = int(q_offset)  # a compiled graph that ends in the lines above keeps no range
                queries, keys = range(begin, begin + q_length), range(kv_offset, kv_offset + kv_length)
                _require_causal(batch_size, queries, keys, mask_function, window, use_vmap, device, begins)
            if begins is not None:
                packing = _Packing.of_sequences(begins)
                return _Mask(True, -1 if window is None else window - 1, queries=packing, keys=packing)
    elif local_size is not None and not is_two_sided:
        _refuse("a sliding window is supported in causal attention only")

    is_token = masking_utils.prepare_padding_mask(attention_mask, kv_length, kv_offset)
    if is_token is not None:
        is_token = is_token[:, kv_offset : kv_offset + kv_length]
        if causal:  # in a static cache there are no tokens yet in slots behind the last query's
            behind = torch.arange(kv_length, device=device) >= end
            is_padded = ~(is_token | behind).all()
            is_token = is_token & ~behind
        else:
            is_padded = ~is_token.all()
        if not bool(is_padded):
            is_token = None
    if causal and (q_length == 1 or is_token is None) and (isinstance(end, Tensor) or end < kv_length):
        mask = _describe_static_mask(batch_size, q_length, end, is_token, window_left, device)
        return mask if blocks is None else blocks.add_to(mask, kv_offset, kv_length, None)
    num_keys = int(end) if causal else kv_length
    mask = _Mask(causal, window_left, window_right, num_keys=None if num_keys == kv_length else num_keys)
    is_token = None if is_token is None else is_token[:, :num_keys]
    if is_token is not None and window_left >= 0 and _has_holes(is_token):  # which the window counts
        mask, is_token = replace(mask, hidden=~is_token), None
    if blocks is not None:
        mask = blocks.add_to(mask, kv_offset, num_keys, is_token)
    if is_token is None:
        return mask
    has_positions = causal or is_two_sided  # of queries, which windows count from
    is_query = is_token[:, -q_length:] if has_positions else is_token.new_ones(batch_size, q_length)
    return replace(mask, queries=_Packing.of(is_query), keys=_Packing.of(is_token))


def _is_chunked(config: Any, local_size: int | None, nothing_added: bool) -> bool:
    """Whether a mask is transformers' own for chunks; a model with windows as well would be neither."""
    chunk = getattr(config, "attention_chunk_size", None)
    has_windows = getattr(config, "sliding_window", None) is not None
    return nothing_added and local_size is not None and local_size == chunk and not has_windows


def _describe_chunks(
    q_length: int,
    kv_length: int,
    q_offset: int,
    kv_offset: int,
    chunk: int,
    attention_mask: Tensor | None,
) -> _Mask:
    """Return a mask of chunks over a growing cache, which may have lost keys that no query sees.

    A chunk is one of a sequence's positions behind its padding. Octavo counts positions from the first key
    that it gets, so that it gets those from the beginning of the first query's chunk on.
    """
    mask = _Mask(True, attention_chunk=chunk, first_key=q_offset // chunk * chunk - kv_offset)
    if attention_mask is None or bool(attention_mask.all()):
        return mask
    is_token = masking_utils.prepare_padding_mask(attention_mask, kv_length, kv_offset)
    is_token = cast(Tensor, is_token)[:, kv_offset : kv_offset + kv_length]
    padding = (attention_mask.cumsum(1) == 0).sum(1)  # before each sequence
    keys = torch.arange(kv_offset, kv_offset + kv_length, device=is_token.device)
    begin = padding + (q_offset - padding).clamp(min=0) // chunk * chunk
    is_key = is_token & (keys >= begin[:, None])
    if _has_holes(is_key):
        _refuse("in chunks, padding must be before or after a sequence's tokens")
    queries, packed_keys = _Packing.of(is_token[:, -q_length:]), _Packing.of(is_key)
    return replace(mask, first_key=0, queries=queries, keys=packed_keys)


def _has_holes(is_token: Tensor) -> bool:
    """Whether padding lies between the tokens of some row."""
    return bool((is_token.diff(dim=1).sum(1) > 2 - is_token[:, 0].int()).any())


def _is_two_sided_window(function: Callable[..., Any], window: int | None) -> bool:
    """Whether it is the function that transformers makes for an encoder's window, and nothing else."""
    if window is None or torch.compiler.is_compiling():  # where functions cannot be looked at
        return False
    make = getattr(masking_utils, "sliding_window_bidirectional_mask_function", None)
    return make is not None and _are_same(function, make(window))


def _is_plain_window(function: Callable[..., Any], window: int) -> bool:
    """Whether it is the function that transformers makes for a causal sliding window, and nothing else."""
    if torch.compiler.is_compiling():  # where functions cannot be looked at
        return False
    return _are_same(function, masking_utils.sliding_window_causal_mask_function(window))


@dataclass(frozen=True)
class _Blocks:
    """Blocks of tokens that see each other both ways beside a causal mask, as transformers describes them."""

    ids: Tensor  # int64 [batch, at least the keys seen so far]: of each token's block; below 0: of none
    window: int | None
    keep_window_left: bool  # whether the window hides keys of a block, too

    @classmethod
    def find(cls, function: Callable[..., Any], window: int | None) -> _Blocks | None:
        """Those of a function that transformers makes: windows may hold inside blocks (Gemma 3) or not."""
        if torch.compiler.is_compiling():  # where functions cannot be looked at
            return None
        ids, overlay = (
            _find_in_closures(function, name) for name in ("block_sequence_ids", "sliding_window")
        )
        if not isinstance(ids, Tensor):
            return None
        utils, blocks = masking_utils, masking_utils.blockwise_overlay(ids)
        causal = utils.causal_mask_function
        if window is not None:
            causal = utils.sliding_window_causal_mask_function(window)
        if _are_same(function, utils.or_masks(causal, blocks)):
            return cls(ids, window, False)
        if window is None and isinstance(overlay, int):
            inside = utils.sliding_window_overlay(overlay)
            if _are_same(function, utils.and_masks(utils.or_masks(causal, blocks), inside)):
                return cls(ids, overlay, True)
        return None

    def add_to(self, mask: _Mask, kv_offset: int, num_keys: int, is_token: Tensor | None) -> _Mask:
        """The mask with these blocks as ranges, in positions as the operator counts them."""
        ids = self.ids[:, kv_offset : kv_offset + num_keys]
        beside = torch.nn.functional.pad(ids, (1, 1), value=-1)
        is_first = (ids >= 0) & (ids != beside[:, :-2])
        is_last = (ids >= 0) & (ids != beside[:, 2:])
        place = is_first.cumsum(1) - 1
        num_ranges = int(place[:, -1].max()) + 1 if ids.numel() else 0
        if num_ranges == 0:
            return mask
        bounds = ids.new_zeros((len(ids), num_ranges, 2))
        blocks = torch.arange(-num_ranges, 0, device=ids.device).repeat(
            len(ids), 1
        )  # of each range, or below 0
        for side, (row, key) in enumerate(x.nonzero(as_tuple=True) for x in (is_first, is_last)):
            bounds[row, place[row, key], side] = key + side
            blocks[row, place[row, key]] = ids[row, key]
        if bool((blocks.sort(1).values.diff(dim=1) == 0).any()):
            _refuse("a block of tokens that see each other both ways has to lie in one piece")
        if is_token is not None:  # padding is left out
            before = torch.nn.functional.pad(is_token[:, :num_keys].cumsum(1), (1, 0))
            bounds = before.gather(1, bounds.flatten(1)).view(bounds.shape)
        if mask.first_keys is not None:
            bounds = (bounds - mask.first_keys[:, None, None]).clamp(min=0)
        ranges = bounds.to(torch.int32).contiguous()
        return replace(mask, ranges=ranges, ranges_keep_window_left=self.keep_window_left)


def _find_in_closures(function: Any, name: str) -> Any:
    """What some function, or one that it is closed over, calls by this name."""
    variables = _closure_of(function)
    if name in variables:
        return variables[name]
    for value in variables.values():
        for inner in value if isinstance(value, tuple) else (value,):
            found = _find_in_closures(inner, name)
            if found is not None:
                return found
    return None


def _find_begins(
    function: Callable[..., Any], batch_size: int, seqlen: int, device: torch.device
) -> Tensor | None:
    """Where packed sequences begin, bool [batch, seqlen]: tokens that do not see the one before them.

    None where all see it. What else they see is not looked at here.
    """
    rows, tokens = (torch.arange(n, device=device) for n in (batch_size, seqlen))
    sees = function(rows[:, None], rows.new_zeros(()), tokens, (tokens - 1).clamp(min=0))
    begins: Tensor = ~sees.expand(batch_size, seqlen)
    if not bool(begins[:, 1:].any()):
        return None
    begins[:, 0] = True
    return begins


def _is_plain_packing(function: Callable[..., Any], window: int | None, begins: Tensor) -> bool:
    """Whether it is the function that transformers makes for position_ids that begin anew, and nothing else.

    Others that mean the same are compared element by element, as a window is.
    """
    if torch.compiler.is_compiling():
        return False
    parts = _closure_of(function).get("mask_functions", ())
    of_positions, of_sequences = map(_closure_of, parts) if len(parts) == 2 else ({}, {})
    position_ids = of_positions.get("position_ids")
    sequences = of_sequences.get("packed_sequence_mask")
    if not (isinstance(position_ids, Tensor) and isinstance(sequences, Tensor)):
        return False
    causal = masking_utils.causal_mask_function
    if window is not None:
        causal = masking_utils.sliding_window_causal_mask_function(window)
    expected = masking_utils.and_masks(
        masking_utils.remap_positions_for_packed_sequence(causal, position_ids),
        masking_utils.packed_sequence_mask_function(sequences),
    )
    if not _are_same(function, expected):
        return False
    starts = (position_ids.diff(dim=1) != 1).expand(len(begins), -1)
    return torch.equal(starts, sequences.diff(dim=1) != 0) and torch.equal(starts, begins[:, 1:])


def _closure_of(function: Any) -> dict[str, Any]:
    """What a function is closed over, by name."""
    return dict(inspect.getclosurevars(function).nonlocals) if isinstance(function, FunctionType) else {}


def _are_same(a: Any, b: Any) -> bool:
    """Whether two functions have the same code, and are closed over equal values, or the same tensors."""
    if isinstance(a, Tensor):
        return a is b
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(_are_same, a, b))
    if not (isinstance(a, FunctionType) and isinstance(b, FunctionType)):
        return type(a) is type(b) and isinstance(a, int) and a == b
    cells, others = ([cell.cell_contents for cell in x.__closure__ or ()] for x in (a, b))
    return a.__code__ is b.__code__ and _are_same(tuple(cells), tuple(others))


def _describe_static_mask(
    batch_size: int,
    q_length: int,
    end: int | Tensor,
    is_token: Tensor | None,
    window_left: int,
    device: torch.device,
) -> _Mask:
    """Return a mask over a static cache whose keys up to `end` are of tokens, or of padding before them.

    A prompt that fills the front of an empty cache has its number of keys in Python. Everything else has
    lengths on the device, so that a compiled step, or a captured one, serves all lengths.
    """
    if q_length > 1 and not isinstance(end, Tensor):
        return _Mask(True, window_left, num_keys=end)
    seq_lens = torch.as_tensor(end, device=device).to(torch.int32).expand(batch_size)
    if is_token is None:
        return _Mask(True, window_left, seq_lens=seq_lens.contiguous())
    first = is_token.int().argmax(1)
    slots = torch.arange(is_token.shape[1], device=device)
    if bool((is_token != ((slots >= first[:, None]) & (slots < end))).any()):
        return _Mask(True, window_left, seq_lens=seq_lens.contiguous(), hidden=~is_token)
    return _Mask(True, window_left, seq_lens=(seq_lens - first).to(torch.int32), first_keys=first)


def _over_static_cache(q: Tensor, k: Tensor, v: Tensor, mask: _Mask, **arguments: Any) -> Tensor:
    """Attention to the front of a static cache, each row of which is a page: arrays [batch, seqlen, ...]."""
    batch, seqlen = q.shape[:2]
    value_dim = v.shape[-1]
    if k.shape[-1] - (0 if mask.hidden is None else _HIDING_COLUMNS) != value_dim:
        _refuse("values of another head dim than keys are not supported with a static cache")
    if mask.hidden is not None:
        v = torch.nn.functional.pad(v, (0, _HIDING_COLUMNS))
    if mask.first_keys is not None:
        slots = mask.first_keys[:, None] + torch.arange(k.shape[1], device=k.device)
        at = slots.clamp(max=k.shape[1] - 1)[:, :, None, None]
        k, v = (x.gather(1, at.expand(x.shape)) for x in (k, v))
    out = octavo.torch.paged_attention(
        q.flatten(0, 1),
        k,
        v,
        page_table_of(batch, k, None, None),
        cast(Tensor, mask.seq_lens),
        cu_seqlens_q=packing(batch, seqlen, q.device),
        max_seqlen_q=None if seqlen == 1 else seqlen,
        window_left=mask.window_left,
        **mask.range_arguments,
        **arguments,
    )
    return cast(Tensor, out).view(q.shape)[..., :value_dim]


def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: _Mask | Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer: query, key and value are [batch, heads, seqlen, head_dim]."""
    if options.get("output_attentions"):
        _refuse("attention weights are never held, and cannot be returned")
    for name in ("sinks", "position_bias", "head_mask", "cache"):
        if options.get(name) is not None:
            _refuse(f"{name} is not supported")
    scores: dict[str, Any] = {"softmax_scale": scaling, "softcap": softcap or 0.0}
    if s_aux is not None:  # gpt-oss: a sink for each head
        scores["sinks"] = s_aux.to(torch.float32)
    step = options.get("octavo_step")
    if isinstance(step, LayerStep):
        return step.attend(module, query, key, value, **scores), None
    if isinstance(attention_mask, _Carrier):
        attention_mask = attention_mask.octavo_mask
    if isinstance(attention_mask, Tensor):
        _refuse(f"a mask of shape {tuple(attention_mask.shape)} is not supported; pass one [batch, seqlen]")
    mask = attention_mask
    if mask is None:  # the model makes none, and says in other ways what its layers see
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        if sliding_window is not None and not causal:
            _refuse("a sliding window is supported in causal attention only")
        mask = _Mask(causal, -1 if sliding_window is None else sliding_window - 1)
    mask = mask.on(query.device)

    q, k, v = (array.transpose(1, 2) for array in (query, key, value))
    if isinstance(step, Layers):
        window_left = max(mask.window_left, mask.attention_chunk - 1)
        step.record(module, q, k, v, window_left, mask.attention_chunk, causal=mask.causal)
    if mask.hidden is not None:
        if scores["softcap"]:
            _refuse("with a softcap, padding under a window must be before or after a sequence's tokens")
        scores["softmax_scale"] = q.shape[-1] ** -0.5 if scaling is None else scaling
        q, k = _hide(q, k, mask.hidden)
    if mask.seq_lens is not None:
        if dropout != 0.0:
            _refuse("dropout is not supported with a static cache")
        return _over_static_cache(q, k, v, mask, **scores), None
    k, v = (array[:, mask.first_key : mask.num_keys] for array in (k, v))
    if mask.keys is None and options.get("cu_seq_lens_q") is not None:  # of a caller's own packing
        queries, keys = (_given_packing(options, letter, q.device) for letter in "qk")
        mask = replace(mask, queries=queries, keys=keys)
    arguments = {**scores, "causal": mask.causal, "window_left": mask.window_left, **mask.range_arguments}
    arguments["attention_chunk"] = mask.attention_chunk
    arguments["window_right"] = mask.window_right
    if dropout != 0.0:
        arguments |= {"dropout_p": dropout, "dropout_seed": draw_seed("octavo.transformers", q.device)}
    if mask.queries is None or mask.keys is None:
        return octavo.torch.attention(q, k, v, **arguments), None
    packed = octavo.torch.attention(
        mask.queries.pack(q),
        mask.keys.pack(k),
        mask.keys.pack(v),
        cu_seqlens_q=mask.queries.cu_seqlens,
        cu_seqlens_k=mask.keys.cu_seqlens,
        max_seqlen_q=mask.queries.max_seqlen,
        max_seqlen_k=mask.keys.max_seqlen,
        **arguments,
    )
    return mask.queries.unpack(packed, *q.shape[:2]), None


def _hide(q: Tensor, k: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys with more columns, which take all weight from hidden keys, bool [batch, keys].

    Other keys have zeros there, so that their scores stay what they are.
    """
    if q.shape[-1] + _HIDING_COLUMNS > _MAX_HEAD_DIM:
        _refuse(f"heads of {q.shape[-1]} with padding inside a sequence, under a window or in a static cache")
    columns = torch.where(hidden, _HIDING_KEY, 0.0).to(k.dtype)[:, :, None, None]
    hiding = columns.expand(*columns.shape[:2], k.shape[2], _HIDING_COLUMNS)
    k = torch.cat([k[:, : hidden.shape[1]], hiding], -1)
    return torch.nn.functional.pad(q, (0, _HIDING_COLUMNS), value=_HIDING_QUERY), k


def _given_packing(options: dict[str, Any], letter: str, device: torch.device) -> _Packing:
    """What models hand down to FlashAttention: where packed queries or keys begin, and the most of them."""
    cu_seqlens, longest = (options.get(f"{name}_{letter}") for name in ("cu_seq_lens", "max_length"))
    if cu_seqlens is None or longest is None:
        _refuse("cu_seq_lens_q, cu_seq_lens_k, max_length_q and max_length_k have to be given together")
    return _Packing(None, cu_seqlens.to(device, torch.int32), int(longest))
