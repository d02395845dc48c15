"""Head dims up to 512, and values with a head dim of their own."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

import octavo
from support import calls, cases, oracle_backward, problems
from support.calls import GuardedArray, assert_same_bits
from support.case import Case
from support.oracle import Dropout, Reference
from support.problems import Inputs, OutputGradients
from support.targets import Target, cpu_target, every_target, writable_target
from test_explain import Shape

FORWARD = (*cases.VALUE_DIMS, *cases.WIDE)
DROPOUT = Dropout(0.3, 2**35 + 11, 5)


@functools.lru_cache(maxsize=8)
def problem(case: Case, dtype: str, dropout: Dropout | None = None) -> tuple[Inputs, Reference]:
    inputs = problems.make_inputs(case, dtype)
    return inputs, problems.make_reference(case, inputs, dtype, dropout=dropout)


@functools.lru_cache(maxsize=8)
def backward_problem(
    case: Case, dtype: str, dropout: Dropout | None = None
) -> tuple[Inputs, OutputGradients, oracle_backward.Reference]:
    inputs, gradients = problems.make_inputs(case, dtype), problems.make_output_gradients(case, dtype)
    reference = problems.make_backward_reference(case, inputs, gradients, dtype, dropout=dropout)
    return inputs, gradients, reference


def arguments(dropout: Dropout) -> dict[str, float | int]:
    return {"dropout_p": dropout.p, "dropout_seed": dropout.seed, "dropout_offset": dropout.offset}


@every_target
@pytest.mark.parametrize("case", FORWARD, ids=str)
def test_dense(target: Target, case: Case) -> None:
    inputs, reference = problem(case, target.dtype)
    reference.check(*calls.attention(target, case, inputs))


@every_target
@pytest.mark.parametrize("case", FORWARD, ids=str)
def test_packed(target: Target, case: Case) -> None:
    inputs, reference = problem(case, target.dtype)
    reference.check(*calls.packed_attention(target, case, inputs))


@every_target
@pytest.mark.parametrize(
    "case", cases.named("dims_192_128", "dims_72_40", "dims_96_256", "wide_320", "wide_64_512"), ids=str
)
def test_dropout(target: Target, case: Case) -> None:
    inputs, reference = problem(case, target.dtype, DROPOUT)
    reference.check(*calls.attention(target, case, inputs, **arguments(DROPOUT)))


@every_target
@pytest.mark.parametrize("dims", [(192, 128), (72, 40), (128, 120), (64, 256), (512, 512)], ids=str)
@pytest.mark.parametrize("block_size", [64, 128])
def test_block_mask(target: Target, dims: tuple[int, int], block_size: int) -> None:
    case = Case(
        f"blocks_of_{block_size}_{dims}",
        (200,),
        (391,),
        num_kv_heads=2,
        head_dim=dims[0],
        value_dim=dims[1],
        block_size=block_size,
    )
    inputs, reference = problem(case, target.dtype)
    reference.check(*calls.attention(target, case, inputs))


@every_target
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("case", cases.VALUE_DIMS, ids=str)
def test_gradients(target: Target, case: Case, packed: bool) -> None:
    inputs, gradients, reference = backward_problem(case, target.dtype)
    reference.check(*calls.attention_backward(target, case, inputs, gradients, packed=packed))


@every_target
@pytest.mark.parametrize("case", cases.named("dims_192_128", "dims_72_40", "dims_96_256"), ids=str)
def test_gradients_with_dropout(target: Target, case: Case) -> None:
    inputs, gradients, reference = backward_problem(case, target.dtype, DROPOUT)
    reference.check(*calls.attention_backward(target, case, inputs, gradients, **arguments(DROPOUT)))


@every_target
@pytest.mark.parametrize("case", cases.named("dims_192_128", "dims_128_120"), ids=str)
def test_deterministic_gradients(target: Target, case: Case) -> None:
    inputs, gradients, reference = backward_problem(case, target.dtype)
    results = [
        calls.attention_backward(target, case, inputs, gradients, deterministic=True) for _ in range(2)
    ]
    reference.check(*results[0])
    for one, other in zip(*results, strict=True):
        assert one.tobytes() == other.tobytes()


@cpu_target
@pytest.mark.parametrize("case", cases.WIDE, ids=str)
def test_gradients_above_256(target: Target, case: Case) -> None:
    inputs, gradients, reference = backward_problem(case, target.dtype)
    reference.check(*calls.attention_backward(target, case, inputs, gradients))


@writable_target
@pytest.mark.parametrize(
    "case", cases.named("dims_192_128", "dims_72_40", "dims_96_256", "wide_320_64", "wide_512"), ids=str
)
def test_out_is_written_and_nothing_around_it(target: Target, case: Case) -> None:
    inputs, reference = problem(case, target.dtype)
    guarded = GuardedArray(target, case.batch, case.seqlens_q[0], case.num_q_heads, case.head_dim_v)
    result = calls.attention(target, case, inputs, out=guarded.array)
    reference.check(*result)
    guarded.check_margins()


@writable_target
@pytest.mark.parametrize("case", cases.named("dims_192_128", "dims_72_40", "wide_320_64"), ids=str)
def test_rows_inside_wider_arrays(target: Target, case: Case) -> None:
    """NaN in what lies beside the columns of each array, and rows that begin anywhere."""
    inputs, _ = problem(case, target.dtype)
    arrays = [calls.dense(case, x) for x in (inputs.q, inputs.k, inputs.v)]
    plain = octavo.attention(*map(target.array, arrays), causal=True, return_lse=True)
    for before, behind in ((8, 8), (1, 2)):
        views = []
        for x in arrays:
            wide = np.full((*x.shape[:-1], x.shape[-1] + before + behind), np.nan)
            wide[..., before:-behind] = x
            views.append(target.array(wide)[..., before:-behind])
        result = octavo.attention(*views, causal=True, return_lse=True)
        if target.on_cpu:
            assert_same_bits(calls.read(target, result), calls.read(target, plain))
        else:  # another kernel may serve rows that are not aligned
            problem(case, target.dtype)[1].check(*calls.read(target, result))


@cpu_target
@pytest.mark.parametrize("case", cases.named("dims_192_128", "dims_64_8"), ids=str)
def test_is_the_call_with_padded_values(target: Target, case: Case) -> None:
    inputs, _ = problem(case, target.dtype)
    q, k, v = (calls.dense(case, x) for x in (inputs.q, inputs.k, inputs.v))
    padded = np.zeros((*v.shape[:-1], case.head_dim))
    padded[..., : case.head_dim_v] = v
    own, of_padded = (
        calls.read(target, octavo.attention(*map(target.array, (q, k, x)), causal=True, return_lse=True))
        for x in (v, padded)
    )
    assert_same_bits(own, (of_padded[0][..., : case.head_dim_v], of_padded[1]))


def kernels(q: int, v: int, device: str, **options: Any) -> str:
    arrays = [Shape((2, 2048, heads, dim)) for heads, dim in ((8, q), (2, q), (2, v))]
    return octavo.explain("attention", *arrays, device=device, **options).kernel


def test_kernels_that_serve() -> None:
    assert kernels(192, 128, "h200", causal=True).startswith("sm90_attention<bfloat16, head_dim 192, values")
    assert kernels(160, 72, "h200").startswith("sm90_attention<bfloat16, head_dim 192, values of 128")
    assert kernels(128, 120, "h200").startswith("sm90_attention<bfloat16, head_dim 128, ")
    assert kernels(192, 192, "h200").startswith("sm90_attention<bfloat16, head_dim 192, 128 rows")
    for dims in ((456, 456), (512, 512)):
        assert kernels(*dims, "h200") == "sm90_wide_attention<bfloat16, head_dim 512>"
    for dims in ((192, 64), (64, 128), (256, 192), (448, 448), (512, 456), (320, 64), (64, 512)):
        instance = max(64, *(-(-dim // 64) * 64 for dim in dims))
        instance = 256 if instance == 192 else 512 if instance > 256 else instance
        assert kernels(*dims, "h200").startswith(f"sm80_attention<bfloat16, head_dim {instance}, 2 stages")
        assert kernels(*dims, "a100").startswith(f"sm80_attention<bfloat16, head_dim {instance}, 1 stage>")
    arrays = [Shape((2, 2048, heads, dim)) for heads, dim in ((8, 64), (2, 64), (2, 128))]
    why_not = octavo.explain("attention", *arrays, device="h200").why_not["sm90_attention"]
    assert "keys of head_dim 64 and values of 128" in why_not


def backward_shapes(q: int, v: int) -> list[Shape]:
    rows, keys, lse = (2, 512, 8), (2, 512, 2), Shape((2, 512, 8), "float32")
    out = Shape((*rows, v))
    return [out, Shape((*rows, q)), Shape((*keys, q)), Shape((*keys, v)), out, lse]


def test_kernels_that_serve_gradients() -> None:
    explanation = octavo.explain("attention_backward", *backward_shapes(192, 128), device="h200")
    assert explanation.kernel.startswith("sm80_backward<bfloat16, head_dim 256, ")
    assert "equally many blocks of 64 columns" in explanation.why_not["sm90_backward"]
    explanation = octavo.explain("attention_backward", *backward_shapes(128, 120), device="h200")
    assert explanation.kernel.startswith("sm90_backward<bfloat16, head_dim 128")
    for dims in ((512, 512), (64, 264)):
        assert octavo.explain("attention_backward", *backward_shapes(*dims), device="cpu").kernel
        message = rf"no CUDA kernel for gradients of head_dim {max(dims)}; it may be up to 256"
        with pytest.raises(TypeError, match=message):
            octavo.explain("attention_backward", *backward_shapes(*dims), device="h200")


def paged_shapes(batch: int, length: int, queries: int, dtype: str = "bfloat16") -> list[Shape]:
    pages = Shape((batch * length // 16, 16, 4, 512), dtype)
    table = Shape((batch, length // 16), "int32"), Shape((batch,), "int32")
    return [Shape((batch * queries, 32, 512)), pages, pages, *table]


def test_kernels_that_serve_pages() -> None:
    def kernel(batch: int, length: int, **options: Any) -> str:
        shapes = paged_shapes(batch, length, 1)
        return octavo.explain("paged_attention", *shapes, device="h200", **options).kernel

    assert kernel(1, 8192).startswith("split_kv_decode<bfloat16, head_dim 512, 8 rows>")
    assert kernel(64, 8192).startswith("split_kv_decode<bfloat16, head_dim 512, 8 rows>")
    assert kernel(64, 16384).startswith("stream_k_decode<bfloat16, head_dim 512, 8 rows>")
    assert kernel(64, 8192, batch_invariant=True).startswith("split_kv_decode<bfloat16, head_dim 512")
    many = {"cu_seqlens_q": Shape((5,), "int32"), "max_seqlen_q": 512}
    explanation = octavo.explain("paged_attention", *paged_shapes(4, 4096, 512), device="h200", **many)
    assert explanation.kernel.startswith("sm90_wide_attention<bfloat16, head_dim 512>")
    scales = {"k_scale": 1.0, "v_scale": 1.0}
    with pytest.raises(TypeError, match="no CUDA kernel reads codes of head_dim 512; it may be up to 256"):
        octavo.explain("paged_attention", *paged_shapes(4, 4096, 1, "int8"), device="h200", **scales)
    new = [Shape((4, 4, 512)) for _ in "kv"]
    with pytest.raises(TypeError, match="no CUDA kernel makes codes of head_dim 512; it may be up to 256"):
        octavo.explain("append_kv", *new, *paged_shapes(4, 4096, 1, "int8")[1:], device="h200", **scales)


def test_compiled_by_torch() -> None:
    torch = pytest.importorskip("torch")
    import octavo.torch

    q, k, v = (torch.randn(2, 37, 4, dim, requires_grad=True) for dim in (192, 192, 128))
    seqlens = torch.tensor([0, 20, 37], dtype=torch.int32)

    def dense(q: Any, k: Any, v: Any) -> Any:
        return octavo.torch.attention(q, k, v, causal=True)

    expected = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), is_causal=True
    ).transpose(1, 2)
    gradients = torch.autograd.grad(expected.square().sum(), (q, k, v))
    for call in (dense, torch.compile(dense, fullgraph=True)):
        out = call(q, k, v)
        assert out.shape == (2, 37, 4, 128)
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
        for one, other in zip(torch.autograd.grad(out.square().sum(), (q, k, v)), gradients, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)
    args = (q[0], k[0], v[0], seqlens, seqlens)
    torch.library.opcheck(torch.ops.octavo.attention.default, args)
    torch.library.opcheck(torch.ops.octavo.attention.lse, args)


def test_traced_by_jax() -> None:
    jax = pytest.importorskip("jax")
    import octavo.jax

    random = np.random.default_rng(0)
    q, k, v = (random.standard_normal((3, 2, 37, 4, dim), np.float32) for dim in (72, 72, 40))

    def loss(q: Any, k: Any, v: Any) -> Any:
        return (octavo.jax.attention(q, k, v, causal=True) ** 2).sum()

    def expected_loss(q: Any, k: Any, v: Any) -> Any:
        return (jax.nn.dot_product_attention(q, k, v_padded(v), is_causal=True) ** 2).sum()

    def v_padded(v: Any) -> Any:
        return jax.numpy.pad(v, [(0, 0)] * 3 + [(0, 72 - 40)])

    out, lse = jax.jit(octavo.jax.attention, static_argnames="return_lse")(q[0], k[0], v[0], return_lse=True)
    assert out.shape == (2, 37, 4, 40) and lse.shape == (2, 37, 4)
    mapped = jax.vmap(octavo.jax.attention)(q, k, v)
    assert mapped.shape == (3, 2, 37, 4, 40)
    np.testing.assert_allclose(mapped[0], out, rtol=1e-5, atol=1e-6)
    gradients = jax.grad(loss, (0, 1, 2))(q[0], k[0], v[0])
    expected = jax.grad(expected_loss, (0, 1, 2))(q[0], k[0], v[0])
    for one, other in zip(gradients, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize("dims", [(24, 16), (20, 33), (63, 1)], ids=str)
def test_flash_attn_takes_values_of_another_dim(dims: tuple[int, int]) -> None:
    torch = pytest.importorskip("torch")
    import octavo.flash_attn

    q, k, v = (torch.randn(2, 19, 4, dim) for dim in (dims[0], *dims))
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), is_causal=True
    ).transpose(1, 2)
    out = octavo.flash_attn.flash_attn_func(q, k, v, causal=True)
    assert out.shape == v.shape
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


def test_kv_cache_of_512() -> None:
    random = np.random.default_rng(0)
    cache = octavo.KVCache(1, 2, 512, num_pages=8, page_size=4, max_batch=2, dtype="float32")
    seqs = [cache.create(), cache.create()]
    q, k, v = (random.standard_normal((12, heads, 512), np.float32) for heads in (8, 2, 2))
    step = cache.step(seqs, [7, 5])
    out = step.attend(0, q, k, v)
    for begin, end in ((0, 7), (7, 12)):
        one = (x[None, begin:end] for x in (q, k, v))
        expected = octavo.attention(*one, causal=True)[0]
        np.testing.assert_allclose(out[begin:end], expected, rtol=1e-5, atol=1e-6)
