"""octavo.jax under jax.vmap."""

from __future__ import annotations

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="JAX is not installed")

import jax.numpy as jnp  # noqa: E402

import octavo  # noqa: E402
import octavo.jax  # noqa: E402
from octavo import _jax_batching  # noqa: E402
from support.jax_calls import (  # noqa: E402
    CALLS,
    HEAD_DIM,
    NUM_KV_HEADS,
    NUM_PAGES,
    PAGE_TABLE,
    RUNTIME_ERRORS,
    SEQ_LENS,
    SHARING_TABLE,
    assert_same,
    make_calls,
    normal,
    run,
)


def stack(call, num, mapped):
    """`num` variants of a call, and its arrays with those named in `mapped` stacked."""
    variants = [make_calls(seed=10 * i)[call] for i in range(num)]
    name, first, options = variants[0]
    each = [{key: v[1][key] if key in mapped else first[key] for key in first} for v in variants]
    stacked = {
        key: jnp.stack([arrays[key] for arrays in each]) if key in mapped else first[key] for key in first
    }
    return name, options, each, stacked


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("which", ["all", "first", "tables", "values"])
def test_vmap(call, which):
    names = list(make_calls()[call][1])
    mapped = {
        "all": names,
        "first": names[:1],
        "tables": [n for n in names if n in ("page_table", "seq_lens", "copies", "prefix_lens", "lse_a")],
        "values": [
            n for n in names if n in ("k", "v", "k_pages", "v_pages", "alibi_slopes", "sinks", "out_b")
        ],
    }[which]
    if not mapped:
        pytest.skip("the operator has none of these arrays")
    name, options, each, stacked = stack(call, 3, mapped)
    axes = {key: 0 if key in mapped else None for key in stacked}
    results = jax.jit(jax.vmap(lambda arrays: run(name, arrays, options), in_axes=(axes,)))(stacked)
    for i, arrays in enumerate(each):
        for x, y in zip(results, run(name, arrays, options), strict=True):
            np.testing.assert_allclose(
                x[i], y, rtol=2e-5, atol=2e-6
            )  # num_splits=None may depend on the batch


LAYERS = [i for i, (name, _, _) in enumerate(make_calls()) if name in ("linear", "rms_norm")]


@pytest.mark.parametrize("call", LAYERS)
def test_vmap_of_one_array_of_a_layer(call):
    """Of some arrays an element of the axis has its own in a call of its own."""
    for mapped in make_calls()[call][1]:
        name, options, each, stacked = stack(call, 3, [mapped])
        axes = {key: 0 if key == mapped else None for key in stacked}
        results = jax.vmap(lambda arrays: run(name, arrays, options), in_axes=(axes,))(stacked)  # noqa: B023
        for i, arrays in enumerate(each):
            for x, y in zip(results, run(name, arrays, options), strict=True):
                np.testing.assert_allclose(x[i], y, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("mapped", ["all", "to", "copies"])
def test_vmap_of_copies_to_another_cache(mapped):
    """With numbers of pages of their own."""
    rng = np.random.default_rng(2)
    caches = {
        name: rng.standard_normal((2, 5, 4, 1, 8)).astype(np.float32) for name in ("k_pages", "v_pages")
    }
    to = {f"to_{name}": rng.standard_normal((2, 3, 4, 1, 8)).astype(np.float32) for name in caches}
    arrays = {**caches, **to, "copies": np.array([[[4, 0], [1, 2]], [[0, 1], [2, 0]]], np.int32)}
    names = {"all": list(arrays), "to": list(to), "copies": ["copies"]}[mapped]
    axes = {name: 0 if name in names else None for name in arrays}
    given = {name: x if name in names else x[0] for name, x in arrays.items()}
    results = jax.vmap(lambda arrays: octavo.jax.copy_pages(**arrays), in_axes=(axes,))(given)
    for i in range(2):
        one = {name: x[i] if name in names else x for name, x in given.items()}
        for x, y in zip(results, octavo.jax.copy_pages(**one), strict=True):
            np.testing.assert_array_equal(x[i], y)
    wrong = {**given, "copies": np.zeros((2, 2, 3), np.int32)}
    with pytest.raises(ValueError, match=r"copy_pages: copies must have shape \[num_copies, 2\]"):
        jax.vmap(lambda arrays: octavo.jax.copy_pages(**arrays), in_axes=({**axes, "copies": 0},))(wrong)


def test_vmap_of_different_tables():
    paged = make_calls()[5][1]
    tables = np.stack([PAGE_TABLE, np.roll(PAGE_TABLE, 1, axis=0)])
    lens = np.stack([SEQ_LENS, np.array([41, 20], np.int32)])
    both = jax.vmap(lambda t, n: octavo.jax.paged_attention(**{**paged, "page_table": t, "seq_lens": n}))
    for i, out in enumerate(both(tables, lens)):
        alone = octavo.paged_attention(
            **{**paged, "page_table": jnp.array(tables[i]), "seq_lens": jnp.array(lens[i])}
        )
        np.testing.assert_allclose(out, alone, rtol=2e-5, atol=2e-6)


def test_vmap_of_different_prefixes():
    """Every element has a prefix of its own, which the sequences of another do not share."""
    (call,) = (call for call in make_calls() if "shared_prefix_len" in call[2])
    _, paged, options = call
    tables = np.stack([SHARING_TABLE, np.where(SHARING_TABLE == 4, 2, SHARING_TABLE)])
    both = jax.vmap(lambda table: octavo.jax.paged_attention(**{**paged, "page_table": table}, **options))
    for i, table in enumerate(tables):
        alone = octavo.paged_attention(**{**paged, "page_table": jnp.array(table)}, **options)
        for mapped, expected in zip(both(tables), alone, strict=True):
            np.testing.assert_allclose(mapped[i], expected, rtol=2e-5, atol=2e-6)


def packed_attention(q, k, v, lengths_q, lengths_k, call=octavo.jax.attention):
    offsets = (jnp.cumulative_sum(n, include_initial=True) for n in (lengths_q, lengths_k))
    cu_seqlens_q, cu_seqlens_k = (x.astype(jnp.int32) for x in offsets)
    return call(q, k, v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, return_lse=True)


def test_packed_tokens_close_up():
    q = np.arange(3 * 8).reshape(3, 8)
    offsets = np.array([[0, 2, 5], [0, 0, 1], [0, 4, 8]], np.int32)
    used = np.concatenate([tokens[: end[-1]] for tokens, end in zip(q, offsets, strict=True)])
    folded_offsets, places, folded = _jax_batching._fold_packed(jnp.asarray(offsets), jnp.asarray(q))
    assert folded_offsets.tolist() == [0, 2, 5, 5, 6, 10, 14]
    assert folded[: len(used)].tolist() == used.tolist()
    assert folded[places].tolist() == q.reshape(-1).tolist()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_vmap_of_packed_arrays_that_are_not_full(device):
    """Rows past the last token of each are padding, wherever those of the next begin."""
    lengths_q, lengths_k = jnp.array([[2, 3], [0, 1], [4, 4]]), jnp.array([[3, 2], [5, 4], [0, 7]])
    with jax.default_device(jax.devices(device)[0]):
        q = normal(3, 8, 4, HEAD_DIM, dtype="bfloat16")
        k, v = normal(2, 3, 9, NUM_KV_HEADS, HEAD_DIM, dtype="bfloat16")
        outs = jax.vmap(packed_attention)(q, k, v, lengths_q, lengths_k)
        for i in range(3):
            num_q, num_k = int(lengths_q[i].sum()), int(lengths_k[i].sum())
            wanted = packed_attention(q[i, :num_q], k[i, :num_k], v[i, :num_k], lengths_q[i], lengths_k[i])
            assert_same([x[i, :num_q] for x in outs], wanted)


def test_vmap_nests_and_has_out_axes():
    q, k, v = (normal(2, 3, 2, 5, 4, HEAD_DIM, seed=i) for i in range(3))
    nested = jax.vmap(jax.vmap(octavo.jax.attention, out_axes=1), in_axes=(1, 1, 1))(q, k, v)
    for i in range(2):
        for j in range(3):
            np.testing.assert_allclose(
                nested[j, :, i], octavo.attention(q[i, j], k[i, j], v[i, j]), rtol=2e-5, atol=2e-6
            )


def test_vmap_keeps_to_its_cache():
    """A page past the end of one cache is not the first of the next."""
    name, _, _, arrays = stack(5, 2, ["q", "k_pages", "v_pages", "page_table"])
    arrays["page_table"] = arrays["page_table"].at[0, 0, 0].set(NUM_PAGES)
    axes = {key: None if key == "seq_lens" else 0 for key in arrays}
    with pytest.raises(RUNTIME_ERRORS, match=r"paged_attention: page_table\[0, 0\] must lie in"):
        jax.block_until_ready(jax.vmap(lambda arrays: run(name, arrays, {}), in_axes=(axes,))(arrays))


def test_axes_of_no_length_are_mapped():
    q = jnp.zeros((0, 2, 3, 2, 16))
    assert jax.vmap(octavo.jax.attention)(q, q, q).shape == q.shape
    lengths = jnp.zeros((0, 2), jnp.int32)
    assert jax.vmap(packed_attention)(q[:, 0], q[:, 0], q[:, 0], lengths, lengths)[0].shape == (0, 3, 2, 16)
