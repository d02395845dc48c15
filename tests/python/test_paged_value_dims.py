"""Pages of values with a head dim of their own: the faces, bits, and who serves them on a GPU.

The numbers of such calls are tested with those of all others, by the cases that support.cases names.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import numpy as np
import pytest

import octavo
from support import calls, cases, problems
from support.calls import GuardedArray, assert_same_bits
from support.case import Case
from support.quantised import KINDS, filled
from support.targets import Target, cpu_target, writable_target

ONE_EACH = cases.named("decode_dims_192_128", "decode_dims_64_128", "decode_dims_72_40_masks")
SEVERAL = cases.named("pages_192_128", "pages_8_64", "pages_80_48_everything")


@writable_target
@pytest.mark.parametrize("case", (*ONE_EACH, *SEVERAL), ids=str)
@pytest.mark.parametrize("num_splits", [None, 5])
def test_out_is_written_and_nothing_around_it(target: Target, case: Case, num_splits: int | None) -> None:
    inputs = problems.make_inputs(case, target.dtype)
    guarded = GuardedArray(target, *inputs.q.shape[:-1], case.head_dim_v)
    cache = problems.make_cache(case, inputs)
    result = calls.paged_attention(target, case, inputs, cache, num_splits=num_splits, out=guarded.array)
    problems.make_reference(case, inputs, target.dtype, paged=True).check(*result)
    guarded.check_margins()


@writable_target
@pytest.mark.parametrize("case", (*ONE_EACH, *SEVERAL), ids=str)
def test_columns_of_wider_pages(target: Target, case: Case) -> None:
    """NaN in what lies beside the columns of each array, as where keys and values share one."""
    inputs = problems.make_inputs(case, target.dtype)
    cache = problems.make_cache(case, inputs)
    pages = []
    for x in (cache.k_pages, cache.v_pages):
        wide = np.full((*x.shape[:-1], x.shape[-1] + 16), np.nan)
        wide[..., 8:-8] = x
        pages.append(target.array(wide)[..., 8:-8])
    out, lse = octavo.paged_attention(
        target.array(inputs.q),
        *pages,
        target.int32(cache.page_table),
        target.int32(cache.seq_lens),
        cu_seqlens_q=target.int32(inputs.cu_seqlens_q),
        k_scale=case.k_scale,
        v_scale=case.v_scale,
        return_lse=True,
        **calls.optional_arrays(target, inputs),
        **case.masks,
    )
    reference = problems.make_reference(case, inputs, target.dtype, paged=True)
    reference.check(*calls.read(target, (out, lse)))


@cpu_target
@pytest.mark.parametrize(
    "case", cases.named("decode_dims_192_128", "decode_dims_72_40_masks", "pages_80_48_everything"), ids=str
)
def test_is_the_call_with_padded_values(target: Target, case: Case) -> None:
    inputs = problems.make_inputs(case, target.dtype)
    cache = problems.make_cache(case, inputs)
    own = calls.paged_attention(target, case, inputs, cache)
    v_pages = np.zeros(cache.k_pages.shape)
    v_pages[..., : case.head_dim_v] = cache.v_pages
    padded = octavo.paged_attention(
        *map(target.array, (inputs.q, cache.k_pages, v_pages)),
        target.int32(cache.page_table),
        target.int32(cache.seq_lens),
        cu_seqlens_q=target.int32(inputs.cu_seqlens_q),
        k_scale=case.k_scale,
        v_scale=case.v_scale,
        return_lse=True,
        **calls.optional_arrays(target, inputs),
        **case.masks,
    )
    out, lse = calls.read(target, padded)
    assert not out[..., case.head_dim_v :].any()
    assert_same_bits(own, (out[..., : case.head_dim_v], lse))


@pytest.mark.parametrize("dims", [(128, 64), (64, 128)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_shared_prefix_of_codes(kind: str, dims: tuple[int, int]) -> None:
    cache, table, lengths = filled(kind, [200], head_dim=dims[0], head_dim_v=dims[1])
    table, lengths = np.repeat(table, 3, 0), np.array([200, 170, 0], np.int32)
    q = np.random.default_rng(5).standard_normal((3, 8, dims[0])).astype(np.float32)
    sinks = np.linspace(-2.0, 3.0, 8, dtype=np.float32)
    plain, shared = (
        octavo.paged_attention(
            q,
            page_table=table,
            seq_lens=lengths,
            sinks=sinks,
            return_lse=True,
            shared_prefix_len=length,
            **cache.arguments,
        )
        for length in (0, 160)
    )
    for one, other in zip(plain, shared, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dims", [(128, 64), (64, 128)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_transformed_keys(kind: str, dims: tuple[int, int]) -> None:
    """The transform is one of the columns of keys; sinks join the log-sum-exp behind it."""
    rng = np.random.default_rng(7)
    k, v = (rng.standard_normal((40, 2, dim)).astype(np.float32) for dim in dims)
    transform = {
        "k_channel_offset": k.mean(0),
        "k_channel_scale": np.abs(k).max(0) + np.float32(0.1),
        "rotate_keys": True,
    }
    arguments: dict[str, Any] = {
        "page_table": np.array([[4, 2, 1]], np.int32),
        "seq_lens": np.array([40], np.int32),
    }
    q = rng.standard_normal((1, 4, dims[0])).astype(np.float32)
    results = []
    for options in ({}, transform):
        cache = octavo.empty_cache(5, 16, 2, dims[0], kind, head_dim_v=dims[1], **options)
        octavo.append_kv(k, v, **arguments, cu_seqlens=np.array([0, 40], np.int32), **cache.arguments)
        results.append(
            octavo.paged_attention(
                q, **arguments, sinks=np.ones(4, np.float32), return_lse=True, **cache.arguments
            )
        )
    (out, lse), (of_transformed, own_lse) = results
    assert of_transformed.shape == (1, 4, dims[1])
    np.testing.assert_allclose(of_transformed, out, atol=0.15)
    np.testing.assert_allclose(own_lse, lse, atol=0.15)


@pytest.mark.parametrize("library", ["numpy", "torch", "jax"])
@pytest.mark.parametrize("dtype", ["float32", "int8", "int4", "int8_int4"])
def test_kv_cache(library: str, dtype: str) -> None:
    options: dict[str, Any] = {"num_pages": 8, "page_size": 4, "max_batch": 2, "dtype": dtype}
    make: Any = octavo.KVCache
    if library == "torch":
        options["like"] = pytest.importorskip("torch").zeros(1)
    elif library == "jax":
        pytest.importorskip("jax")
        make = importlib.import_module("octavo.jax").KVCache
    cache = make(2, 2, 24, head_dim_v=16, **options)
    assert (cache.head_dim, cache.head_dim_v) == (24, 16)
    assert make(2, 2, 24, **options).head_dim_v == 24
    layers = cache.pages if library == "jax" else cache.layers
    assert cache.bytes_per_token == sum(layer.bytes_per_token for layer in layers)
    rng = np.random.default_rng(0)
    q, k, v = (
        rng.standard_normal((12, heads, dim)).astype(np.float32) for heads, dim in ((8, 24), (2, 24), (2, 16))
    )
    step = cache.step([cache.create(), cache.create()], [7, 5])
    for layer in range(2):
        if library == "jax":
            out, cache.pages = step.attend(cache.pages, layer, q, k, v)
        elif library == "torch":
            out = step.attend(layer, *map(options["like"].new_tensor, (q, k, v))).numpy()
        else:
            out = step.attend(layer, q, k, v)
        for begin, end in ((0, 7), (7, 12)):
            one = (x[None, begin:end] for x in (q, k, v))
            expected = octavo.attention(*one, causal=True)[0]
            assert expected.shape == (end - begin, 8, 16)
            atol = {"float32": 1e-5, "int8": 0.05}.get(dtype, 0.5)
            np.testing.assert_allclose(np.asarray(out)[begin:end], expected, rtol=1e-5, atol=atol)


def test_kv_cache_refuses_a_dim_of_no_numbers() -> None:
    with pytest.raises(ValueError, match=r"KVCache: head_dim_v \(0\) must be at least 1"):
        octavo.KVCache(1, 2, 8, num_pages=4, head_dim_v=0)


@pytest.mark.parametrize("kind", ["float32", "int4", "int8_int4", "int8"])
def test_registered_with_torch(kind: str) -> None:
    torch = pytest.importorskip("torch")
    import octavo.torch

    cache = octavo.empty_cache(5, 16, 2, 64, kind, like=torch.zeros(1), head_dim_v=24)
    k, v = (torch.randn(3, 2, dim) for dim in (64, 24))
    q = torch.randn(3, 4, 64)
    tables = {
        "page_table": torch.tensor([[4, 0], [1, 2], [3, 0]], dtype=torch.int32),
        "seq_lens": torch.tensor([1, 1, 1], dtype=torch.int32),
    }

    def step(q: Any, k: Any, v: Any) -> Any:
        octavo.torch.append_kv(k, v, **tables, **cache.arguments)
        return octavo.torch.paged_attention(q, **tables, return_lse=True, **cache.arguments)

    out, lse = step(q, k, v)
    assert out.shape == (3, 4, 24) and lse.shape == (3, 4)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")(q, k, v)
    assert torch.equal(compiled[0], out) and torch.equal(compiled[1], lse)
    names = ("k_pages", "v_pages", "page_table", "seq_lens")
    options = {**cache.arguments, **tables}
    arrays = [options.pop(name) for name in names]
    for overload in ("default", "lse"):
        operator = getattr(torch.ops.octavo.paged_attention, overload)
        torch.library.opcheck(operator, (q, *arrays), options)
    with pytest.raises(ValueError, match="v_pages must have the shape of k_pages"):
        octavo.torch.paged_attention(q, arrays[0], arrays[1][1:], *arrays[2:], **options)


@pytest.mark.parametrize("kind", ["float32", "int4", "int8_int4"])
def test_traced_by_jax(kind: str) -> None:
    jax = pytest.importorskip("jax")
    import octavo.jax

    make = functools.partial(octavo.empty_cache, 5, 16, 2, 64, kind, head_dim_v=24)
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, 3, h, d), np.float32) for h, d in ((4, 64), (2, 64), (2, 24)))
    tables = {
        "page_table": np.array([[4, 0], [1, 2], [3, 0]], np.int32),
        "seq_lens": np.ones(3, np.int32),
    }

    def step(cache: Any, q: Any, k: Any, v: Any) -> Any:
        written = octavo.jax.append_kv(k, v, **tables, **cache.arguments)
        cache = cache._replace(**dict(zip(cache.arrays, written, strict=True)))
        return octavo.jax.paged_attention(q, **tables, **cache.arguments)

    cache = make(like=jax.numpy.zeros(1))
    assert jax.eval_shape(step, cache, q[0], k[0], v[0]).shape == (3, 4, 24)
    own = [jax.jit(step)(cache, *arrays) for arrays in zip(q, k, v, strict=True)]
    mapped = jax.vmap(step, in_axes=(None, 0, 0, 0))(cache, q, k, v)
    assert mapped.shape == (2, 3, 4, 24)
    np.testing.assert_allclose(mapped, own, rtol=1e-5, atol=1e-6)
    here = make()
    octavo.append_kv(k[0], v[0], **tables, **here.arguments)
    expected = octavo.paged_attention(q[0], **tables, **here.arguments)
    np.testing.assert_allclose(own[0], expected, rtol=1e-5, atol=1e-6)
