"""Errors for calls that do not fit a function's signature, with advice for users of other libraries."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from octavo import _core

MISSING: Any = object()
"""The default of what must be given.

A function that takes any keyword, to answer unknown ones, needs it: otherwise Python complains of seq_lens,
which is missing, and not of cache_seqlens, which was given in its place.
"""

# What FlashAttention, FlashInfer, vLLM, PyTorch, xFormers and JAX call Octavo's parameters. Where several are
# named, those that the function has are meant.
_OTHER_NAMES = {
    "act": ("activation",),
    "append_key": ("k",),
    "append_value": ("v",),
    "attn_bias": ("causal", "window_left", "prefix_lens", "alibi_slopes"),
    "attn_logits_soft_cap": ("softcap",),
    "attention_chunk_size": ("attention_chunk",),
    "attention_sinks": ("sinks",),
    "attn_mask": (
        "causal",
        "window_left",
        "prefix_lens",
        "bidirectional_ranges",
        "block_mask",
        "tree_mask",
    ),
    "bias": ("causal", "window_left", "prefix_lens", "alibi_slopes"),
    "block_indices": ("chosen_pages",),
    "block_mapping": ("copies",),
    "block_size": ("page_size",),
    "block_table": ("page_table",),
    "block_tables": ("page_table",),
    "cache_seqlens": ("seq_lens",),
    "chunk_size": ("attention_chunk",),
    "context_lens": ("seq_lens",),
    "cos": ("rotary_cos",),
    "cos_cache": ("rotary_cos",),
    "cos_sin_cache": ("rotary_cos", "rotary_sin"),
    "cu_q_lens": ("cu_seqlens_q",),
    "cu_seqlens": ("cu_seqlens_q", "cu_seqlens_k"),
    "cu_seqlens_k": ("seq_lens",),
    "cu_seqlens_k_new": ("cu_seqlens",),
    "cu_seqlens_q": ("cu_seqlens",),
    "custom_mask": ("causal", "window_left", "prefix_lens", "tree_mask"),
    "deterministic": ("batch_invariant",),
    "do": ("dout",),
    "dropout": ("dropout_p",),
    "dropout_rng": ("dropout_seed",),
    "epsilon": ("eps",),
    "gamma": ("weight",),
    "grad": ("dout",),
    "grad_out": ("dout",),
    "grad_output": ("dout",),
    "head_dim_v": ("v_dim",),
    "hidden_states": ("x",),
    "input": ("x",),
    "is_causal": ("causal",),
    "interleaved": ("rotary_interleaved",),
    "is_neox": ("rotary_interleaved",),
    "k_cache": ("k_pages", "kv_pages"),
    "k_descale": ("k_scale", "kv_scale"),
    "k_scale": ("kv_scale",),
    "key": ("k",),
    "key_cache": ("k_pages",),
    "key_caches": ("k_pages",),
    "key_value_seq_lengths": ("seq_lens",),
    "kv_cache": ("k_pages", "v_pages", "kv_pages"),
    "kv_cache_dtype": ("kv_dtype",),
    "kv_indices": ("page_table",),
    "kv_indptr": ("cu_seqlens_k", "page_table"),
    "kv_last_page_len": ("seq_lens",),
    "kv_lens": ("seq_lens",),
    "learnable_sink": ("sinks",),
    "lengths": ("seq_lens",),
    "local_window_size": ("window_left", "window_right"),
    "logits_soft_cap": ("softcap",),
    "logsumexp": ("lse", "return_lse"),
    "lse": ("return_lse",),
    "mask": ("causal", "window_left", "prefix_lens", "tree_mask"),
    "max_seq_len": ("max_seqlen_q", "max_seqlen_k"),
    "max_seqlen": ("max_seqlen_q", "max_seqlen_k"),
    "num_blocks": ("num_pages",),
    "o": ("out",),
    "output": ("out",),
    "p": ("dropout_p",),
    "page_indices": ("page_table",),
    "paged_kv_cache": ("k_pages", "v_pages"),
    "paged_kv_indices": ("page_table",),
    "paged_kv_indptr": ("page_table",),
    "paged_kv_last_page_len": ("seq_lens",),
    "prefix_len": ("prefix_lens", "shared_prefix_len"),
    "prefix_lse": ("lse_a",),
    "prefix_output": ("out_a",),
    "qo_indptr": ("cu_seqlens_q",),
    "query_start_loc": ("cu_seqlens_q",),
    "query": ("q",),
    "query_seq_lengths": ("cu_seqlens_q",),
    "return_attn_probs": ("return_lse",),
    "return_residual": ("return_lse",),
    "return_softmax_lse": ("return_lse",),
    "s_a": ("lse_a",),
    "s_aux": ("sinks",),
    "s_b": ("lse_b",),
    "scale": ("softmax_scale",),
    "scaling": ("softmax_scale",),
    "seqlens": ("seq_lens",),
    "seqlens_k": ("seq_lens",),
    "seqused_k": ("seq_lens",),
    "sin": ("rotary_sin",),
    "sin_cache": ("rotary_sin",),
    "sink": ("sinks",),
    "sliding_window": ("window_left",),
    "slopes": ("alibi_slopes",),
    "slot_mapping": ("page_table",),
    "sm_scale": ("softmax_scale",),
    "soft_cap": ("softcap",),
    "softmax_lse": ("lse",),
    "suffix_lse": ("lse_b",),
    "suffix_output": ("out_b",),
    "topk_indices": ("chosen_pages",),
    "v_a": ("out_a",),
    "v_b": ("out_b",),
    "v_cache": ("v_pages",),
    "v_descale": ("v_scale",),
    "value": ("v",),
    "value_cache": ("v_pages",),
    "value_caches": ("v_pages",),
    "variance_epsilon": ("eps",),
    "weight": ("w",),
    "window": ("window_left", "window_right"),
    "window_size": ("window_left", "window_right"),
}
_OWN_NAMES = {x["name"] for arguments in _core.operator_arguments().values() for x in arguments}


def _meant_by(keyword: str, parameters: tuple[str, ...]) -> list[str]:
    if keyword in _OTHER_NAMES:
        return [name for name in _OTHER_NAMES[keyword] if name in parameters]
    if keyword in _OWN_NAMES:  # another operator has it: no slip of the pen
        return []
    import difflib  # here, since it takes longer to import than most of octavo

    return difflib.get_close_matches(keyword, parameters, n=1, cutoff=0.8)


def refuse_call(
    signature: Callable[..., None], given: Mapping[str, object], excess: Sequence[object] = ()
) -> None:
    """Raise TypeError, as Python would, if a call does not fit the signature.

    Args:
        signature: a function with that signature which does nothing.
        given: the arguments by name, those without a default and unknown ones among them; some are MISSING.
        excess: arguments by position, behind all that the signature takes.
    """
    code = signature.__code__
    count = code.co_argcount
    parameters = code.co_varnames[: count + code.co_kwonlyargcount]
    for keyword in given:
        if keyword not in parameters:
            meant = " or ".join(_meant_by(keyword, parameters))
            raise TypeError(
                f"{signature.__name__}() got an unexpected keyword argument '{keyword}'"
                + (f"; did you mean {meant}?" if meant else "")
            ) from None
    if excess:
        last, *keywords = parameters[count - 1 :]
        advice = f"; those after {last} must be given by keyword, such as {keywords[0]}" if keywords else ""
        raise TypeError(
            f"{signature.__name__}() takes {count} positional arguments but {count + len(excess)} were given"
            + advice
        ) from None
    try:
        signature(**{name: value for name, value in given.items() if value is not MISSING})
    except TypeError as error:
        raise error.with_traceback(None) from None
