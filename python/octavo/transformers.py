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
approximated: other masks, position biases, keys that a model selects (DeepSeek-V3.2) or adds to those of its
mask (DeepSeek-V4), attention weights. So are models whose attention is their own, outside of transformers'
AttentionInterface: BLOOM, MPT, Falcon and other early ones; and those that choose a class of it by name (GIT,
SAM). Values may have a head dim of their own (DeepSeek-V3). ``generate_batch`` wants the same head dims in
all layers, and refuses Gemma 4.

``generate_batch`` serves many prompts at once from pages; ``make_scheduler`` requests as they come. The
models' own ``model.generate_batch`` runs on Octavo, too, over the pages of transformers.

Models train, too. In train mode each call draws a seed for its dropout from torch's generator of the CPU:
torch.manual_seed makes a run repeatable, and a checkpointed layer drops the same weights when it runs again.

Under ``torch.compile(fullgraph=True)`` give a cache, no padding mask, and no dropout. The values of
a mask, which transformers makes otherwise, and of a seed have to be read, which breaks the graph. The lengths
of a static cache stay on the device, so that one graph serves all of them.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel, masking_utils

import octavo.torch
from octavo import _transformers_paged
from octavo._torch_dropout import draw_seed
from octavo._transformers_batch import generate_batch, make_scheduler
from octavo._transformers_descriptions import make_mask
from octavo._transformers_hiding import hide
from octavo._transformers_layers import Layers, LayerStep
from octavo._transformers_mask import Carrier, Mask, refuse_to_be_read
from octavo._transformers_models import let_models_refuse
from octavo._transformers_packing import given_packing
from octavo._transformers_refusals import refuse, refuse_options
from octavo._transformers_static import over_static_cache

__all__ = ["generate_batch", "make_scheduler", "register"]

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
    AttentionMaskInterface.register(name, make_mask)
    if not _names:
        let_models_refuse(_names)
    _names.add(name)
    _transformers_paged.register(name)


def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Mask | Tensor | None,
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
        refuse("attention weights are never held, and cannot be returned")
    if options.get("cache") is not None:
        refuse("cache is not supported")
    refuse_options(options)
    query, key, value = _in_autocast(query, key, value)
    scores: dict[str, Any] = {"softmax_scale": scaling, "softcap": softcap or 0.0}
    if s_aux is not None:  # gpt-oss: a sink for each head
        scores["sinks"] = s_aux.to(torch.float32)
    step = options.get("octavo_step")
    if isinstance(step, LayerStep):
        return step.attend(module, query, key, value, **scores), None
    if isinstance(attention_mask, Carrier):
        if not hasattr(attention_mask, "octavo_mask"):
            refuse_to_be_read()
        attention_mask = attention_mask.octavo_mask
    if isinstance(attention_mask, Tensor):
        refuse(
            f"a mask of shape {tuple(attention_mask.shape)} is not supported: callers may pass one [batch, "
            "seqlen], and models that make such a mask of it themselves are not served"
        )
    mask = attention_mask
    if mask is None:  # the model makes none, and says in other ways what its layers see
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        if sliding_window is not None and not causal:
            refuse("a sliding window is supported in causal attention only")
        mask = Mask(causal, -1 if sliding_window is None else sliding_window - 1)
    if mask.kv_length is not None and mask.kv_length != key.shape[2]:
        refuse(f"a layer's keys ({key.shape[2]}) must be those that its mask was made for ({mask.kv_length})")
    mask = mask.on(query.device)

    q, k, v = (array.transpose(1, 2) for array in (query, key, value))
    if isinstance(step, Layers):
        window_left = max(mask.window_left, mask.attention_chunk - 1)
        step.record(module, q, k, v, window_left, mask.attention_chunk, causal=mask.causal)
    if mask.hidden is not None:
        if scores["softcap"]:
            refuse("with a softcap, padding under a window must be before or after a sequence's tokens")
        scores["softmax_scale"] = q.shape[-1] ** -0.5 if scaling is None else scaling
        q, k = hide(q, k, mask.hidden)
    if mask.seq_lens is not None:
        if dropout != 0.0:
            refuse("dropout is not supported with a static cache")
        return over_static_cache(q, k, v, mask, **scores), None
    k, v = (array[:, mask.first_key : mask.num_keys] for array in (k, v))
    if mask.keys is None and options.get("cu_seq_lens_q") is not None:  # of a caller's own packing
        queries, keys = (given_packing(options, letter, q.device) for letter in "qk")
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


def _in_autocast(*arrays: Tensor) -> tuple[Tensor, ...]:
    """Queries, keys and values in the dtype of torch.autocast, where it is on, as torch's attention has them.

    Rotary embeddings leave queries and keys in float32 there, and values come from a product of 16 bits.
    """
    device = arrays[0].device.type
    # Others may have no autocast; is_autocast_available() would say so, and break a graph of PyTorch 2.11.
    if device not in ("cpu", "cuda") or not torch.is_autocast_enabled(device):
        return arrays
    dtype = torch.get_autocast_dtype(device)
    return tuple(array if array.dtype == torch.float64 else array.to(dtype) for array in arrays)
