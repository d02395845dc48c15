"""Calls that do not fit a function's signature, above all those with the keywords of other libraries."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import octavo
from octavo import _misuse

ATTENTION = {
    "query": "q",
    "is_causal": "causal",
    "scale": "softmax_scale",
    "sm_scale": "softmax_scale",
    "window_size": "window_left or window_right",
    "sliding_window": "window_left",
    "local_window_size": "window_left or window_right",
    "attention_chunk_size": "attention_chunk",
    "logits_soft_cap": "softcap",
    "attn_mask": "causal or window_left or prefix_lens or bidirectional_ranges or block_mask",
    "cu_seqlens": "cu_seqlens_q or cu_seqlens_k",
    "max_seqlen": "max_seqlen_q or max_seqlen_k",
    "return_softmax_lse": "return_lse",
    "return_attn_probs": "return_lse",
    "dropout": "dropout_p",
    "alibi_slope": "alibi_slopes",
    "s_aux": "sinks",
    "windowleft": "window_left",
    "deterministic": None,
    "enable_gqa": None,
    "rotary_cos": None,
    "k_scale": None,  # of paged_attention, and much like softmax_scale
}
PAGED_ATTENTION = {
    "k_cache": "k_pages",
    "value_cache": "v_pages",
    "block_table": "page_table",
    "block_tables": "page_table",
    "cache_seqlens": "seq_lens",
    "seqused_k": "seq_lens",
    "cu_seqlens_k": "seq_lens",
    "window_size": "window_left or window_right",
    "kv_cache_dtype": "kv_dtype",
    "kv_indices": "page_table",
    "kv_indptr": "page_table",
    "kv_last_page_len": "seq_lens",
    "paged_kv_indptr": "page_table",
    "paged_kv_last_page_len": "seq_lens",
    "qo_indptr": "cu_seqlens_q",
    "query_start_loc": "cu_seqlens_q",
    "k_descale": "k_scale",
    "q_descale": None,
    "cache_batch_idx": None,
    "dropout_p": None,
}
MEANT = [
    *(("attention", *pair) for pair in ATTENTION.items()),
    *(("paged_attention", *pair) for pair in PAGED_ATTENTION.items()),
    ("append_kv", "key", "k"),
    ("append_kv", "value_cache", "v_pages"),
    ("paged_attention", "slot_mapping", "page_table"),
    ("append_kv", "cu_seqlens_q", "cu_seqlens"),
    ("append_kv", "query", "q"),
    ("append_kv", "cos_cache", "rotary_cos"),
    ("append_kv", "cos_sin_cache", "rotary_cos or rotary_sin"),
    ("append_kv", "is_neox", "rotary_interleaved"),
    ("copy_pages", "block_mapping", "copies"),
    ("merge_states", "s_b", "lse_b"),
    ("merge_states", "causal", None),
    ("attention_backward", "grad_out", "dout"),
    ("attention_backward", "softmax_lse", "lse"),
    ("attention_backward", "window_size", "window_left or window_right"),
    ("attention_backward", "return_lse", None),
    ("attention_backward", "dbias", None),
    ("linear", "input", "x"),
    ("linear", "weight", "w"),
    ("linear", "act", "activation"),
    ("linear", "dtype", None),
    ("rms_norm", "input", "x"),
    ("rms_norm", "epsilon", "eps"),
    ("rms_norm", "gamma", "weight"),
    ("rms_norm", "scale", None),
    ("latent_attention", "block_table", "page_table"),
    ("latent_attention", "scale", "softmax_scale"),
    ("latent_attention", "k_scale", "kv_scale"),
    ("latent_attention", "head_dim_v", "v_dim"),
    ("latent_attention", "softcap", None),
    ("check_page_table", "block_table", "page_table"),
    ("check_page_table", "num_blocks", "num_pages"),
]
FUNCTIONS = list(dict.fromkeys(function for function, *_ in MEANT))
NEEDS = {"octavo": "numpy", "octavo.torch": "torch", "octavo.jax": "jax"}


def has(module: str, function: str) -> bool:
    return module == "octavo" or function != "check_page_table"


def get(module: str, function: str) -> Callable[..., Any]:
    pytest.importorskip(NEEDS[module])
    return getattr(importlib.import_module(module), function)


@pytest.mark.parametrize(
    ("module", "function", "keyword", "meant"),
    [(m, *case) for m in NEEDS for case in MEANT if has(m, case[0])],
)
def test_unknown_keywords_are_answered(module: str, function: str, keyword: str, meant: str | None) -> None:
    """Also in place of an argument that is required."""
    with pytest.raises(TypeError) as caught:
        get(module, function)(**{keyword: 1})
    advice = f"; did you mean {meant}?" if meant else ""
    assert str(caught.value) == f"{function}() got an unexpected keyword argument '{keyword}'{advice}"


@pytest.mark.parametrize("module", NEEDS)
def test_unknown_keywords_beside_arguments_that_fit(module: str) -> None:
    function = get(module, "attention")
    q: Any = np.ones((1, 3, 2, 8), np.float32)
    if module == "octavo.torch":
        q = importlib.import_module("torch").from_numpy(q)
    function(q, q, q, causal=True)
    for options in ({}, {"return_lse": True}):
        with pytest.raises(TypeError, match="did you mean window_left or window_right"):
            function(q, q, q, causal=True, window_size=(3, 0), **options)


@pytest.mark.parametrize(("module", "function"), [(m, f) for m in NEEDS for f in FUNCTIONS if has(m, f)])
def test_missing_arguments_are_named(module: str, function: str) -> None:
    called = get(module, function)
    parameters = inspect.signature(called).parameters.values()
    required = [p for p in parameters if p.default is p.empty]
    assert required
    for absent in required:
        given = {p.name: [1] for p in required if p is not absent}
        kind = "keyword-only" if absent.kind is absent.KEYWORD_ONLY else "positional"
        with pytest.raises(TypeError) as caught:
            called(**given)
        assert str(caught.value) == f"{function}() missing 1 required {kind} argument: '{absent.name}'"


@pytest.mark.parametrize(
    ("module", "function"),
    [(m, f) for m in ("octavo", "octavo.jax") for f in FUNCTIONS if has(m, f)],
)
def test_positional_arguments_in_place_of_keywords(module: str, function: str) -> None:
    called = get(module, function)
    parameters = list(inspect.signature(called).parameters.values())
    keywords = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    count = len(parameters) - len(keywords)
    last = parameters[count - 1].name
    advice = f"; those after {last} must be given by keyword, such as {keywords[0]}" if keywords else ""
    for given in (count + 1, count + 2):
        with pytest.raises(TypeError) as caught:
            called(*[4] * given)
        message = f"{function}() takes {count} positional arguments but {given} were given{advice}"
        assert str(caught.value) == message


def test_only_parameters_are_suggested() -> None:
    """Each other name leads to parameters of a function that does not have it."""
    signatures = [inspect.signature(getattr(octavo, function)).parameters for function in FUNCTIONS]
    for other, names in _misuse._OTHER_NAMES.items():
        asked = [parameters for parameters in signatures if other not in parameters]
        for name in names:
            assert any(name in parameters for parameters in asked), f"{other}: {name}"
