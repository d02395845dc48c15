"""Calls of every operator of octavo.jax, for its tests."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import octavo
import octavo.jax

NUM_PAGES, PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM = 6, 16, 2, 16
PAGE_TABLE = np.array([[4, 1, -1], [0, 3, 5]], np.int32)
SHARING_TABLE = np.array([[4, 1, -1], [4, 3, 5]], np.int32)
SEQ_LENS = np.array([20, 41], np.int32)
CHOSEN_PAGES = np.array([[[0, 1], [1, -1]], [[0, 2], [1, 2]]], np.int32)
CU_SEQLENS = np.array([0, 3, 8], np.int32)
WRITTEN = {"append_kv": ("k_pages", "v_pages"), "copy_pages": ("k_pages", "v_pages")}
# The errors of a program that runs: some versions of JAX make a ValueError of an invalid argument.
RUNTIME_ERRORS = (getattr(jax.errors, "JaxRuntimeError", RuntimeError), ValueError)


def normal(*shape, dtype="float32", seed=0):
    values = np.random.default_rng([seed, *shape]).standard_normal(shape, np.float32)
    return jnp.asarray(values).astype(dtype)


def cache(dtype="float32", seed=0):
    shape = NUM_PAGES, PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM
    return {
        "k_pages": normal(*shape, dtype=dtype, seed=seed),
        "v_pages": normal(*shape, dtype=dtype, seed=seed + 1),
    }


def make_calls(dtype="float32", seed=0):
    """Every operator, with the arguments that change what it takes and returns: (name, arrays, options)."""
    make = partial(normal, dtype=dtype, seed=seed)
    index = partial(jnp.asarray, dtype=jnp.int32)
    masks = {
        "alibi_slopes": jnp.array([0.5, 0.25, 0.125, 0.0625], jnp.float32),
        "prefix_lens": index([2, 0]),
    }
    ranges = {"bidirectional_ranges": index([[[0, 3], [4 + seed % 2, 9]], [[1, 6 - seed % 2], [0, 0]]])}
    sinks = {"sinks": normal(4, seed=seed)}
    blocks = {"block_mask": jnp.roll(jnp.array([True, False, True, True]), seed).reshape(4, 1, 1)}
    batch_blocks = {"block_mask": jnp.stack([blocks["block_mask"], ~blocks["block_mask"]]).astype(jnp.uint8)}
    scores = {"window_left": 7, "softcap": 5.0, "softmax_scale": 0.3, "return_lse": True}
    dense = {
        "q": make(2, 5, 4, HEAD_DIM),
        "k": make(2, 9, NUM_KV_HEADS, HEAD_DIM),
        "v": make(2, 9, NUM_KV_HEADS, HEAD_DIM) + 1,
    }
    packed = {
        "q": make(8, 4, HEAD_DIM),
        "k": make(8, NUM_KV_HEADS, HEAD_DIM),
        "v": make(8, NUM_KV_HEADS, HEAD_DIM) + 1,
        "cu_seqlens_q": index(CU_SEQLENS),
        "cu_seqlens_k": index(CU_SEQLENS),
    }
    tables = {"page_table": index(PAGE_TABLE), "seq_lens": index(SEQ_LENS)}
    paged = {"q": make(2, 4, HEAD_DIM), **cache(dtype, seed), **tables}
    batch_slopes = {"alibi_slopes": jnp.stack([masks["alibi_slopes"], 2 * masks["alibi_slopes"]])}
    new = {"k": make(8, NUM_KV_HEADS, HEAD_DIM), "v": make(8, NUM_KV_HEADS, HEAD_DIM) + 1}
    one_each = {name: x[:2] for name, x in new.items()}
    of_values = make(NUM_PAGES, PAGE_SIZE, NUM_KV_HEADS, 24)
    many = {**new, **cache(dtype, seed), **tables, "cu_seqlens": index(CU_SEQLENS)}
    rotary = {name: normal(60, HEAD_DIM // 4, seed=seed) for name in ("rotary_cos", "rotary_sin")}
    state = {"out_a": make(2, 4, HEAD_DIM), "lse_a": normal(2, 4, seed=seed)}
    state |= {"out_b": state["out_a"] + 1, "lse_b": state["lse_a"] - 1}

    def backward(arrays, options, **others):
        """The arrays of attention_backward after this call of attention."""
        out, lse = octavo.attention(**arrays, **options, return_lse=True)
        return {"dout": make(*out.shape) - 1, **arrays, "out": out, "lse": lse, **others}

    layer = {"x": make(2, 3, HEAD_DIM), "w": make(6, HEAD_DIM)}
    whole_layer = {**layer, "bias": make(6), "residual": make(2, 3, 3)}
    masked = {"causal": True, "softcap": 5.0, "softmax_scale": 0.3}
    dropout = {"dropout_p": 0.3, "dropout_seed": 7}
    symmetric = {"alibi_symmetric": True}
    return [
        ("attention", dense, {}),
        ("attention", {**dense, **masks}, {"window_right": 2, **scores}),
        ("attention", {**dense, **batch_slopes}, {"causal": True}),
        ("attention", packed, {"max_seqlen_q": 5, "max_seqlen_k": 5, "return_lse": True}),
        ("attention", {**packed, **masks}, {}),
        ("paged_attention", paged, {}),
        ("paged_attention", {**paged, **masks}, {"num_splits": 2, "k_scale": 0.5, "v_scale": 2.0, **scores}),
        (
            "paged_attention",
            {**paged, **batch_slopes, "q": packed["q"], "cu_seqlens_q": index(CU_SEQLENS)},
            {"max_seqlen_q": 5, "causal": False, "window_right": 1, "return_lse": True},
        ),
        ("append_kv", {**one_each, **cache(dtype, seed), **tables}, {}),
        ("append_kv", many, {"k_scale": 2.0, "v_scale": 0.5}),
        ("copy_pages", {**cache(dtype, seed), "copies": index([[4, 2], [0, 1]])}, {}),
        ("merge_states", state, {}),
        ("attention", packed, {"dropout_p": 0.3, "dropout_seed": 2**63 - 1, "return_lse": True}),
        ("attention", dense, {"dropout_p": 0.5, "dropout_seed": 1, "dropout_offset": 2**40}),
        ("attention_backward", backward(dense, {}), {}),
        (
            "attention_backward",
            backward({**dense, **masks}, masked, dlse=normal(2, 5, 4, seed=seed)),
            {**masked, "return_dalibi": True, "deterministic": True},
        ),
        ("attention_backward", backward({**packed, **batch_slopes}, {}), {"return_dalibi": True}),
        ("attention_backward", backward(packed, dropout), dropout),
        ("append_kv", {**one_each, **cache(dtype, seed), **tables, **rotary}, {}),
        (
            "append_kv",
            {**many, **rotary, "q": packed["q"]},
            {"rotary_interleaved": True, "k_scale": 2.0},
        ),
        ("linear", layer, {}),
        ("linear", whole_layer, {"activation": "silu_gate", "static_weight": True}),
        ("linear", {**layer, "norm_weight": make(HEAD_DIM)}, {"norm_eps": 0.01}),
        ("rms_norm", {"x": make(2, 3, HEAD_DIM), "weight": make(HEAD_DIM)}, {"eps": 0.01}),
        (
            "latent_attention",
            {"q": make(2, 4, 576), "kv_pages": make(6, PAGE_SIZE, 576), **tables},
            {"softmax_scale": 0.1},
        ),
        (
            "latent_attention",
            {"q": make(8, 4, 576), "kv_pages": make(6, PAGE_SIZE, 576), **tables}
            | {"cu_seqlens_q": index(CU_SEQLENS)},
            {"softmax_scale": 0.1, "max_seqlen_q": 5, "return_lse": True, "kv_scale": 0.5},
        ),
        ("rms_norm", {"x": make(3, 16), "weight": normal(16, seed=seed), "residual": make(3, 16) + 1}, {}),
        (
            "paged_attention",
            {**paged, "page_table": index(SHARING_TABLE)},
            {"shared_prefix_len": PAGE_SIZE, "return_lse": True},
        ),
        ("attention", {**dense, **sinks}, {"causal": True, "window_left": 3, "return_lse": True}),
        ("attention", {**packed, **sinks, **masks}, {}),
        ("paged_attention", {**paged, **sinks}, {"window_left": 7, "return_lse": True}),
        ("paged_attention", paged, {"attention_chunk": 4, "return_lse": True}),
        ("attention", packed, {"causal": True, "attention_chunk": 2, "return_lse": True}),
        (
            "paged_attention",
            {
                **paged,
                "q": packed["q"],
                "cu_seqlens_q": index(CU_SEQLENS),
                "tree_mask": octavo.tree_mask(jnp.array([-1, 0, 0, -1, 0, 1, 1, -1])),
            },
            {"max_seqlen_q": 5, "return_lse": True},
        ),
        ("attention", {**dense, **batch_slopes}, {**symmetric, "return_lse": True}),
        (
            "paged_attention",
            {**paged, **batch_slopes, "q": packed["q"], "cu_seqlens_q": index(CU_SEQLENS)},
            {"causal": False, **symmetric},
        ),
        (
            "attention_backward",
            backward({**packed, **batch_slopes}, symmetric),
            {"return_dalibi": True, **symmetric},
        ),
        ("paged_attention", {**paged, "chosen_pages": index(CHOSEN_PAGES)}, {"window_left": 30}),
        (
            "paged_attention",
            {**paged, **batch_slopes, "chosen_pages": index(CHOSEN_PAGES[:, 0])},
            {"return_lse": True},
        ),
        ("attention_backward", backward({**dense, **sinks}, masked), {**masked, "return_dsinks": True}),
        ("attention_backward", backward({**packed, **sinks}, {}), {}),
        (
            "attention_backward",
            backward(dense, {"causal": True, "attention_chunk": 4}),
            {"causal": True, "attention_chunk": 4},
        ),
        (
            "attention_backward",
            backward({**dense, **sinks, **masks}, {}, dlse=normal(2, 5, 4, seed=seed)),
            {"return_dalibi": True, "return_dsinks": True},
        ),
        ("attention", {**dense, **ranges}, {"causal": True, "return_lse": True}),
        (
            "attention",
            {**packed, **ranges},
            {"causal": True, "window_left": 1, "ranges_keep_window_left": True},
        ),
        (
            "paged_attention",
            {**paged, **ranges, "q": packed["q"], "cu_seqlens_q": index(CU_SEQLENS)},
            {"window_left": 3, "return_lse": True},
        ),
        (
            "attention_backward",
            backward({**dense, **ranges}, {"causal": True, "window_left": 2}),
            {"causal": True, "window_left": 2},
        ),
        ("attention", {**dense, **blocks}, {"causal": True, "return_lse": True}),
        ("attention", {**packed, **batch_blocks}, {"block_size": 64}),
        ("attention_backward", backward({**dense, **batch_blocks}, {}), {}),
        ("attention_backward", backward({**packed, **blocks}, {"block_size": 64}), {"block_size": 64}),
        (
            "paged_attention",
            {
                **paged,
                "q": packed["q"],
                "cu_seqlens_q": index(CU_SEQLENS),
                "tree_mask": normal(8, 5, seed=seed) > 0,
            },
            {"max_seqlen_q": 5, "return_lse": True},
        ),
        (
            "paged_attention",
            {**paged, "v_pages": of_values, "q": packed["q"], "cu_seqlens_q": index(CU_SEQLENS)},
            {"return_lse": True},
        ),
        ("append_kv", {**many, "v": make(8, NUM_KV_HEADS, 24), "v_pages": of_values}, {}),
    ]


# Calls in a dtype that a GPU computes too, which may be where JAX makes arrays.
NAMES = [name for name, _, _ in make_calls("bfloat16")]
CALLS = [pytest.param(i, id=f"{name}-{i}") for i, name in enumerate(NAMES)]


def results_of_octavo(name, arrays, options):
    """What octavo itself makes of the arrays. JAX's cannot be written to: those are NumPy's then."""
    if name not in WRITTEN:
        results = getattr(octavo, name)(**arrays, **options)
        return results if isinstance(results, tuple) else (results,)
    ours = {key: np.array(x) for key, x in arrays.items()}
    result = getattr(octavo, name)(**ours, **options)
    return *(ours[key] for key in WRITTEN[name]), *(() if result is None else (result,))


def run(name, arrays, options):
    results = getattr(octavo.jax, name)(**arrays, **options)
    return results if isinstance(results, tuple) else (results,)


def assert_same(actual, expected):
    assert len(actual) == len(expected)
    for x, y in zip(actual, expected, strict=True):
        assert isinstance(x, jax.Array) and x.dtype == y.dtype and x.shape == y.shape
        assert np.array(x).tobytes() == np.array(y).tobytes()
