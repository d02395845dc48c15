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
from test_explain import Shape

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


def shapes(
    dims: tuple[int, int], *, batch: int = 64, queries: int = 1, heads: int = 32, kv_dtype: str = "bfloat16"
) -> tuple[list[Any], dict[str, Any]]:
    """A call over sequences of up to 8192 tokens with 4 KV heads, of shapes alone."""
    rows = [dim // 2 if kv_dtype == "int4" else dim for dim in dims]
    element = "uint8" if kv_dtype == "int4" else kv_dtype
    pages = [Shape((batch * 512, 16, 4, row), element) for row in rows]
    arrays = [Shape((batch * queries, heads, dims[0])), *pages]
    arrays += [Shape((batch, 512), "int32"), Shape((batch,), "int32")]
    options: dict[str, Any] = {}
    if queries > 1:
        options |= {"cu_seqlens_q": Shape((batch + 1,), "int32"), "max_seqlen_q": queries}
    if kv_dtype == "int4":
        scales = Shape((batch * 512, 16, 4, 2), "float16")
        options |= {"k_scales": scales, "v_scales": scales, "kv_dtype": "int4"}
    elif kv_dtype != "bfloat16":
        options |= {"k_scale": 1.0, "v_scale": 1.0}
    return arrays, options


def explained(dims: tuple[int, int], device: str = "h200", **given: Any) -> Any:
    ours = {name: given.pop(name) for name in ("batch", "queries", "heads", "kv_dtype") if name in given}
    arrays, options = shapes(dims, **ours)
    return octavo.explain("paged_attention", *arrays, device=device, **options, **given)


@pytest.mark.parametrize(
    ("dims", "instance"),
    [
        ((192, 128), 192),
        ((128, 64), 128),
        ((64, 128), 128),
        ((80, 96), 96),
        ((8, 256), 256),
        ((512, 64), 512),
    ],
    ids=str,
)
def test_decode_kernels_hold_the_larger_dim(dims: tuple[int, int], instance: int) -> None:
    for options in ({}, {"batch_invariant": True}, {"chosen_pages": Shape((64, 16), "int32")}):
        name, _, of = explained(dims, **options).kernel.partition("<")
        assert name == "split_kv_decode" or (name == "stream_k_decode" and not options)
        assert of == f"bfloat16, head_dim {instance}, 8 rows>"
    assert "head_dim" in explained(dims, heads=256).why_not["split_kv_decode"]
    tiles = 256 if instance == 192 else instance
    assert explained(dims, "a100").kernel.startswith(f"sm80_attention<bfloat16, head_dim {tiles}, ")


def test_decode_kernels_over_codes() -> None:
    for dtype, name in (("int8", "int8"), ("float8_e4m3fn", "e4m3"), ("int4", "int4")):
        kernel = explained((192, 128), kv_dtype=dtype).kernel
        assert name in kernel and "head_dim 256, 8 rows" in kernel
    for dims in ((128, 72), (72, 128)):
        explanation = explained(dims, kv_dtype="int4")
        assert explanation.kernel.startswith("sm80_attention<bfloat16, head_dim 128")
        assert "it moves 16 bytes at a time" in explanation.why_not["split_kv_decode"]
    with pytest.raises(TypeError, match="no CUDA kernel reads codes of head_dim 264; it may be up to 256"):
        explained((64, 264), kv_dtype="int8")


def test_kernels_that_serve_prompts() -> None:
    prompts: dict[str, Any] = {"batch": 8, "queries": 512}
    assert explained((192, 128), **prompts).kernel.startswith(
        "sm90_attention<bfloat16, head_dim 192, values of"
    )
    assert explained((128, 72), **prompts).kernel.startswith("sm90_attention<bfloat16, head_dim 128, ")
    assert explained((128, 64), **prompts).kernel.startswith("sm80_attention<bfloat16, head_dim 128, ")
    tree = explained((192, 128), **prompts, tree_mask=Shape((4096,), "int64"))
    assert tree.kernel.startswith("sm80_attention<bfloat16, head_dim 256, ")
    assert "values of 128 has tree masks" in tree.why_not["sm90_attention"]
    ranges = explained((192, 128), **prompts, bidirectional_ranges=Shape((8, 2, 2), "int32"))
    assert "values of 128 has bidirectional_ranges" in ranges.why_not["sm90_attention"]
    wide = explained((512, 264), **prompts)
    assert wide.kernel.startswith("sm80_attention<bfloat16, head_dim 512, ")
    assert "of both keys and values, and these have 512 and 264" in wide.why_not["sm90_wide_attention"]
    codes = explained((128, 64), **prompts, kv_dtype="int8")
    assert codes.kernel.startswith("sm80_attention<bfloat16, head_dim 128, ")
    assert codes.plan["feature"] == "codes"
    assert "values of another, 64" in codes.why_not["sm90_attention"]
    assert "keys and values of one head_dim" in codes.why_not["expand_codes"]


def test_kernels_that_serve_a_shared_prefix() -> None:
    explanation = explained((192, 128), shared_prefix_len=4096, queries=4, heads=4)
    assert explanation.kernel.startswith("shared_prefix<bfloat16>"), explanation
    rows, num_runs = 64 * 4 * 4, explanation.plan["num_runs"]
    out_bytes = (num_runs + explanation.plan["overlaps"]) * rows * 128 * 2
    assert explanation.plan["workspace_bytes"] == out_bytes + (num_runs + 1) * rows * 4


@pytest.mark.parametrize("dims", [(192, 128), (64, 128)], ids=str)
def test_kernels_that_write_pages(dims: tuple[int, int]) -> None:
    new = [Shape((64, 4, dim)) for dim in dims]
    _, *tables = shapes(dims)[0]
    plain = octavo.explain("append_kv", *new, *tables, device="h200")
    assert plain.kernel.startswith("append_kv_kernel<bfloat16>") and plain.plan["in_chunks"]
    angles = Shape((8192, 32), "float32")
    rotated = octavo.explain("append_kv", *new, *tables, rotary_cos=angles, rotary_sin=angles, device="h200")
    assert rotated.kernel.startswith("append_rotary_kernel") and rotated.plan["in_chunks"]
    # A thread has 16 numbers of a row, of which each head of keys and of values has as many as the longer.
    assert rotated.plan["num_ctas"] == 64 * -(-2 * 4 * max(dims) // 16 // 128)
    arrays, options = shapes(dims, kv_dtype="int8")
    codes = octavo.explain("append_kv", *new, *arrays[1:], device="h200", **options)
    assert codes.kernel.startswith("append_codes_kernel")
    arrays, options = shapes((64, 264), kv_dtype="int8")
    wide = [Shape((64, 4, dim)) for dim in (64, 264)]
    with pytest.raises(TypeError, match="no CUDA kernel makes codes of head_dim 264; it may be up to 256"):
        octavo.explain("append_kv", *wide, *arrays[1:], device="h200", **options)
    copies = octavo.explain("copy_pages", *tables[:2], Shape((3, 2), "int32"), device="h200")
    assert copies.plan["k_aligned"] and copies.plan["v_aligned"]
