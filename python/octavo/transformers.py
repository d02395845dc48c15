"""Octavo as an attention implementation of Hugging Face transformers.

``octavo.transformers.register()``, and then ``from_pretrained(..., attn_implementation="octavo")`` or
``model.set_attn_implementation("octavo")`` run a model's attention on Octavo, on the CPU and on GPUs.

What maps exactly is served: grouped heads, softcap, causal masks, causal sliding windows and full attention,
attention sinks (gpt-oss), with or without a growing cache, and padding masks [batch, seqlen] (a padded batch
is packed first, which copies its keys and values). What else a model asks for is refused with a ValueError,
never approximated: static caches, other masks, position biases, attention weights. So are models whose
attention is their own, outside of transformers' AttentionInterface: BLOOM, MPT, Falcon, GPT-J and other early
ones.

``generate_batch`` serves many prompts at once from pages; ``make_scheduler`` requests as they come.

Models train, too. In train mode each call draws a seed for its dropout from torch's generator of the CPU:
torch.manual_seed makes a run repeatable, and a checkpointed layer drops the same weights when it runs again.

Under ``torch.compile(fullgraph=True)`` give a cache, no padding mask, and no dropout. The values of
a mask, which transformers makes otherwise, and of a seed have to be read, which breaks the graph.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import transformers
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel, masking_utils

import octavo.torch
from octavo._torch_dropout import draw_seed
from octavo._transformers_batch import generate_batch, make_scheduler
from octavo._transformers_layers import Layers, LayerStep

__all__ = ["generate_batch", "make_scheduler", "register"]

_ROWS_AT_ONCE = 256  # of a mask that is compared, to bound memory
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
    AttentionMaskInterface.register(name, _describe_mask)
    if not _names:
        _let_models_refuse()
    _names.add(name)


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
    """The tokens of a padded batch that are not padding."""

    tokens: Tensor  # int64 [total]: where they are in the batch, flattened
    cu_seqlens: Tensor  # int32 [batch + 1]
    max_seqlen: int

    @classmethod
    def of(cls, is_token: Tensor) -> _Packing:
        lengths = is_token.sum(1)
        cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
        return cls(is_token.flatten().nonzero().flatten(), cu_seqlens, int(lengths.max()))

    def pack(self, array: Tensor) -> Tensor:
        """[batch, seqlen, heads, head_dim] to [total, heads, head_dim]."""
        return array.flatten(0, 1)[self.tokens]


@dataclass(frozen=True)
class _Mask:
    """What a model's layers get as their attention_mask, made once a forward pass."""

    causal: bool
    window_left: int = -1
    queries: _Packing | None = None
    keys: _Packing | None = None

    def contiguous(self) -> NoReturn:
        """Only generate() asks for it, of a mask that it makes for a static cache."""
        _refuse("static caches are not supported")


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
) -> None:
    """Refuse a function of the indices that is anything else than causal, with this window."""
    key_positions = torch.arange(keys.start, keys.stop, device=device)
    for begin in range(queries.start, queries.stop, _ROWS_AT_ONCE):
        end = min(begin + _ROWS_AT_ONCE, queries.stop)
        distance = torch.arange(begin, end, device=device)[:, None] - key_positions
        ours = distance >= 0
        if window is not None:
            ours &= distance < window
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
        if theirs is None or not torch.equal(theirs, ours.expand_as(theirs)):
            _refuse("this mask is neither causal, nor a causal sliding window, nor full")


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
        nothing_added
        and local_size is not None
        and getattr(config, "sliding_window", None) == local_size
        and getattr(config, "attention_chunk_size", None) is None
    )
    causal = mask_function is not masking_utils.bidirectional_mask_function
    window_left = -1 if local_size is None else local_size - 1
    if causal:
        if isinstance(q_offset, Tensor) or q_offset + q_length != kv_offset + kv_length:
            _refuse("the last query must be at the last key, and in static caches it is not")
        is_plain = mask_function is masking_utils.causal_mask_function and local_size is None
        if not (is_plain or is_window):
            queries, keys = range(q_offset, q_offset + q_length), range(kv_offset, kv_offset + kv_length)
            _require_causal(batch_size, queries, keys, mask_function, local_size, use_vmap, device)
    elif local_size is not None:
        _refuse("a sliding window is supported in causal attention only")

    is_token = masking_utils.prepare_padding_mask(attention_mask, kv_length, kv_offset)
    if is_token is None:
        return _Mask(causal, window_left)
    is_token = is_token[:, kv_offset : kv_offset + kv_length]
    if bool(is_token.all()):
        return _Mask(causal, window_left)
    if window_left >= 0 and bool((is_token.diff(dim=1).sum(1) > 2 - is_token[:, 0].int()).any()):
        _refuse("under a sliding window, padding must be before or after a sequence's tokens")
    is_query = is_token[:, -q_length:] if causal else is_token.new_ones(batch_size, q_length)
    return _Mask(causal, window_left, _Packing.of(is_query), _Packing.of(is_token))


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
    if isinstance(attention_mask, Tensor):
        _refuse(f"a mask of shape {tuple(attention_mask.shape)} is not supported; pass one [batch, seqlen]")
    mask = attention_mask
    if mask is None:  # the model makes none, and says in other ways what its layers see
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        if sliding_window is not None and not causal:
            _refuse("a sliding window is supported in causal attention only")
        mask = _Mask(causal, -1 if sliding_window is None else sliding_window - 1)

    q, k, v = (array.transpose(1, 2) for array in (query, key, value))
    if isinstance(step, Layers):
        step.record(module, q, k, v, mask.window_left, causal=mask.causal)
    arguments = {**scores, "causal": mask.causal, "window_left": mask.window_left}
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
    out = q.new_zeros(q.shape)
    out.view(-1, *q.shape[2:])[mask.queries.tokens] = packed
    return out, None
