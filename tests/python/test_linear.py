"""octavo.linear."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

import octavo
from octavo import _linear_on_cuda
from support.linear import ACTIVATIONS, Problem, activate, erfc
from support.oracle import NUMPY_DTYPES
from support.targets import Target, cpu_target, every_target, writable_target

BFLOAT16 = NUMPY_DTYPES["bfloat16"]


def run(target: Target, problem: Problem, **options: Any) -> NDArray[np.float64]:
    """The result for arrays of the target's library, with weights of the problem's own dtype."""

    def array(values: NDArray[np.float64] | None) -> Any:
        return None if values is None else target.array(values)

    out = octavo.linear(
        array(problem.x),
        target.library.array(problem.w, problem.w_dtype),
        array(problem.bias),
        activation=problem.activation,
        residual=array(problem.residual),
        norm_weight=array(problem.norm_weight),
        norm_eps=problem.norm_eps,
        **options,
    )
    assert isinstance(out, target.library.array_type)
    return target.library.to_float64(out)


def is_by_library(target: Target, problem: Problem) -> bool:
    """Whether the arrays' own library computes it, which rounds at each step."""
    x, w = target.array(problem.x), target.library.array(problem.w, problem.w_dtype)
    return octavo.explain("linear", x, w, activation=problem.activation).plan.get("kernel") == "library"


def check(target: Target, problem: Problem) -> None:
    problem.check(run(target, problem), every_step_rounds=is_by_library(target, problem))


@every_target
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(
    ("rows", "width", "depth"),
    [
        ((), 5, 3),
        ((1,), 1, 1),
        ((1,), 576, 576),
        ((4,), 70, 2049),
        ((2, 3), 33, 40),
        ((3, 1, 2, 2, 5), 6, 100),
        ((16,), 130, 1000),
        ((150,), 65, 333),
        ((70,), 4, 1500),
        ((7,), 3, 20000),
    ],
)
def test_shapes(
    target: Target, rows: tuple[int, ...], width: int, depth: int, activation: str | None
) -> None:
    check(target, Problem.drawn(target.dtype, rows, width, depth, activation))


@every_target
@given(
    rows=st.lists(st.integers(1, 40), min_size=0, max_size=2).map(tuple),
    width=st.integers(1, 200),
    depth=st.integers(1, 300),
    activation=st.sampled_from(ACTIVATIONS),
    has_bias=st.booleans(),
    has_residual=st.booleans(),
    has_norm=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_any_shape(target: Target, rows: tuple[int, ...], width: int, depth: int, **options: Any) -> None:
    check(target, Problem.drawn(target.dtype, rows, width, depth, **options))


@every_target
@pytest.mark.parametrize("depth", range(140, 160))
def test_one_number(target: Target, depth: int) -> None:
    """Whose plain error is near 0 by chance for some of them."""
    problem = Problem.drawn(target.dtype, (), 1, depth, has_bias=False, has_residual=False)
    check(target, problem)


@every_target
@pytest.mark.parametrize("rows", [(), (1,), (16,), (2, 3), (3, 1, 2, 2, 5), (150,)])
def test_norm(target: Target, rows: tuple[int, ...]) -> None:
    for activation, depth in ((None, 576), ("silu_gate", 1000), ("gelu", 0)):
        check(target, Problem.drawn(target.dtype, rows, 70, depth, activation, has_norm=True))


@cpu_target
def test_norm_has_the_bits_of_rms_norm(target: Target) -> None:
    """And takes a weight of float32, and rows anywhere."""
    problem = Problem.drawn(target.dtype, (5, 4, 3), 21, 77, "silu", has_norm=True)
    x, w, bias = (problem.numpy(values) for values in (problem.x, problem.w, problem.bias))
    assert problem.norm_weight is not None
    for weight in (problem.numpy(problem.norm_weight), problem.norm_weight.astype(np.float32)):
        for rows in (x, padded(x), x.transpose(2, 0, 1, 3)[::-1]):
            normalised = octavo.rms_norm(np.ascontiguousarray(rows), weight, 0.25)
            expected = octavo.linear(normalised, w, bias, activation="silu")
            out = octavo.linear(rows, w, bias, activation="silu", norm_weight=weight, norm_eps=0.25)
            np.testing.assert_array_equal(out, expected)


@cpu_target
def test_norm_takes_rows_behind_one_another_beside_others(target: Target) -> None:
    """However many axes ``residual`` and ``out`` have."""
    problem = Problem.drawn(target.dtype, (2, 3, 2, 2), 21, 77, has_norm=True)
    x, w, weight = (problem.numpy(values) for values in (problem.x, problem.w, problem.norm_weight))
    residual = padded(np.ones((3, 4, 3, 3, 21), x.dtype))[:2, :3, :2, :2]
    memory = np.zeros((3, 4, 3, 3, 21), x.dtype)
    expected = octavo.linear(x, w, residual=residual.copy(), norm_weight=weight)
    np.testing.assert_array_equal(octavo.linear(x, w, residual=residual, norm_weight=weight), expected)
    out = memory[:2, :3, :2, :2]
    np.testing.assert_array_equal(
        octavo.linear(x, w, residual=residual, norm_weight=weight, out=out), expected
    )
    gaps = np.zeros((2, 3, 2, 3, 77), x.dtype)[:, :, :, :2]  # two axes of x beside four of residual
    gaps[...] = x
    np.testing.assert_array_equal(octavo.linear(gaps, w, residual=residual, norm_weight=weight), expected)


def test_who_normalises_on_a_gpu() -> None:
    x, w = np.zeros((4, 64), BFLOAT16), np.zeros((32, 64), BFLOAT16)
    plan = octavo.LinearPlan("sm90_flat", "bfloat16", 16, 8, 1, 1)

    def explained(x: NDArray[Any], **options: Any) -> Any:
        given = {"norm_weight": np.zeros(64, x.dtype), "device": "h200", **options}
        return octavo.explain("linear", x, w.astype(x.dtype), **given)

    explanation = explained(x)
    assert explanation.plan["norm"] == "sm90_flat"
    assert explanation.kernel == "sm90_flat<bfloat16, 16x8, normalises x>"
    assert explanation.summary.endswith("; it normalises x as well")
    assert explained(x, plan=plan).kernel == explanation.kernel
    assert explained(np.zeros((16, 64), BFLOAT16)).kernel == "sm90_flat<bfloat16, 32x16, normalises x>"
    explanation = explained(x, norm_weight=None)
    assert explanation.kernel == "sm90_flat<bfloat16, 16x8>" and "norm" not in explanation.plan
    wide = octavo.LinearPlan("sm90_wide", "bfloat16", 64, 16, 1, 1)
    for why, rows, options in (
        ("up to 16 rows of x", np.zeros((17, 64), BFLOAT16), {}),
        ("might not fit in float16", np.zeros((4, 64), np.float16), {}),
        ("norm_weight must be bfloat16 like x", x, {"norm_weight": np.zeros(64, np.float32)}),
        ("with batch_invariant all numbers of rows", x, {"batch_invariant": True}),
        ("the plan of the call names another kernel", x, {"plan": wide}),
        ("rows of x and w must start on 16 bytes", np.zeros((4, 66), BFLOAT16)[:, 1:-1], {}),
        ("it is for Hopper", x, {"device": "a100"}),
    ):
        refused = explained(rows, **options)
        assert refused.plan["norm"] == "rms_norm" and "normalises" not in refused.kernel
        assert refused.summary.endswith("; rms_norm normalises x before")
        assert why in refused.why_not["sm90_flat that normalises x"]
    assert explained(np.zeros((129, 64), BFLOAT16)).summary.startswith("rms_norm, torch.nn.functional.linear")
    library = octavo.LinearPlan("library", "bfloat16")
    assert explained(x, plan=library).summary.startswith("rms_norm, torch.nn.functional.linear")


@every_target
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_empty_axes(target: Target, activation: str | None) -> None:
    """As with NumPy: a sum over nothing is 0, and there may be nothing to compute."""
    for rows, width, depth in (((3,), 5, 0), ((0,), 5, 4), ((2, 0), 5, 4), ((3,), 0, 4), ((0,), 0, 0)):
        problem = Problem.drawn(target.dtype, rows, width, depth, activation)
        check(target, problem)
        assert run(target, problem).shape == (*rows, width)


@pytest.mark.parametrize("w_dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_weights_of_16_bits_beside_float32(w_dtype: str, activation: str | None) -> None:
    target = Target("numpy", "cpu", "float32")
    for rows, depth in ((1, 576), (5, 31), (40, 1100)):
        check(target, Problem.drawn("float32", (rows,), 45, depth, activation, w_dtype=w_dtype))


def padded(values: NDArray[Any], around: int = 3) -> NDArray[Any]:
    """The same numbers in the midst of NaN along every axis; the last axis keeps its unit stride."""
    memory = np.full([n + 2 * around for n in values.shape], np.nan, values.dtype)
    inner = memory[(slice(around, -around),) * values.ndim]
    inner[...] = values
    return inner


@cpu_target
@pytest.mark.parametrize("rows", [1, 5, 70])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_poison(target: Target, rows: int, activation: str | None) -> None:
    """Nothing but the arrays' own elements is read; nothing but the elements of out is written."""
    problem = Problem.drawn(target.dtype, (rows,), 21, 77, activation)
    arrays = {name: padded(problem.numpy(getattr(problem, name))) for name in ("x", "w", "bias", "residual")}
    out = padded(np.full((rows, 21), np.nan, arrays["x"].dtype))
    assert octavo.linear(**arrays, activation=activation, out=out) is out
    problem.check(out.astype(np.float64))
    np.testing.assert_array_equal(out, run(target, problem).astype(out.dtype))
    out[...] = np.nan
    assert np.isnan(out.base.astype(np.float32)).all()


@cpu_target
def test_strides(target: Target) -> None:
    """Rows that lie backwards, apart or one over another, and leading axes in any order."""
    problem = Problem.drawn(target.dtype, (4, 3), 10, 50)
    expected = run(target, problem)
    x, w, bias, residual = (
        problem.numpy(values) for values in (problem.x, problem.w, problem.bias, problem.residual)
    )
    backwards = w[::-1].copy()[::-1]
    turned = x.swapaxes(0, 1).copy().swapaxes(0, 1)  # its first two axes in another order
    assert backwards.strides[0] < 0 and turned.strides[0] < turned.strides[1]
    for a, b in ((x, backwards), (turned, w), (padded(x, 1)[::-1], w)):
        reference = expected[::-1] if a.strides[0] < 0 else expected
        others = residual[::-1] if a.strides[0] < 0 else residual
        out = np.empty((3, 4, 10), x.dtype).swapaxes(0, 1)
        octavo.linear(a, b, bias, residual=others, out=out)
        np.testing.assert_array_equal(out.astype(np.float64), reference)
    one = np.broadcast_to(x[0, 0], (6, 50))
    assert (octavo.linear(one, np.broadcast_to(w[0], (9, 50))) == octavo.linear(x[0, 0], w[:1])).all()


@writable_target
def test_residual_may_be_out(target: Target) -> None:
    problem = Problem.drawn(target.dtype, (9,), 130, 60)
    residual = target.array(problem.residual)
    x, w, bias = (target.array(values) for values in (problem.x, problem.w, problem.bias))
    out = octavo.linear(x, w, bias, residual=residual, out=residual)
    assert out is residual
    problem.check(target.library.to_float64(out), every_step_rounds=not target.on_cpu)


@pytest.fixture
def set_threads() -> Any:
    before = octavo.get_num_threads()
    yield octavo.set_num_threads
    octavo.set_num_threads(before)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(
    ("dtype", "w_dtype"),
    [
        *((dtype, dtype) for dtype in ("float32", "float16", "bfloat16")),
        ("float32", "float16"),
        ("float32", "bfloat16"),
    ],
)
def test_bits_depend_neither_on_other_rows_nor_on_threads(
    dtype: str, w_dtype: str, activation: str | None, set_threads: Any
) -> None:
    target = Target("numpy", "cpu", dtype)
    for rows, width, depth in ((150, 70, 333), (17, 300, 1100), (64, 9, 5000)):
        problem = Problem.drawn(dtype, (rows,), width, depth, activation, w_dtype=w_dtype)
        set_threads(1)
        together = run(target, problem, batch_invariant=True)
        for threads in (2, 3, 7):
            set_threads(threads)
            np.testing.assert_array_equal(run(target, problem), together)
        for row in (0, 1, 13, rows - 1):
            np.testing.assert_array_equal(run(target, problem.with_row(row)), together[row])
        for count in (2, 3, 5, 6, 7, 12, 13, 16):
            some = run(target, problem.with_row(slice(count)))
            np.testing.assert_array_equal(some, together[:count])


@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_activations_over_their_whole_range(activation: str) -> None:
    ends = [-np.inf, -3e38, -200, -88, 88, 200, 3e38, np.inf]
    x = np.concatenate([np.linspace(-30, 30, 60001), ends]).astype(np.float32)
    out = octavo.linear(x[:, None], np.ones((1, 1), np.float32), activation=activation)[:, 0]
    with np.errstate(over="ignore", invalid="ignore"):
        exact = activate(x.astype(np.float64), activation)
    exact[np.isneginf(x)] = 0.0  # the limit, where the formulas are -inf / inf and -inf * 0
    np.testing.assert_allclose(out, exact, rtol=2e-6, atol=2e-7)
    one, no_number = np.ones((1, 1), np.float32), np.full((1, 1), np.nan, np.float32)
    assert np.isnan(octavo.linear(no_number, one, activation=activation)).all()


@cpu_target
def test_numbers_that_are_not_finite_stay_in_their_place(target: Target) -> None:
    problem = Problem.drawn(target.dtype, (8,), 40, 70, has_residual=False)
    clean = run(target, problem)
    x, w = problem.x.copy(), problem.w.copy()
    x[3, 5], w[7, 69] = np.nan, np.inf
    out = run(target, Problem(target.dtype, target.dtype, x, w, problem.bias, None, None))
    assert np.isnan(out[3]).all() and not np.isfinite(out[:, 7]).any()
    rest = np.delete(np.delete(out, 3, axis=0), 7, axis=1)
    np.testing.assert_array_equal(rest, np.delete(np.delete(clean, 3, axis=0), 7, axis=1))


def test_explanations() -> None:
    x, w = np.ones((4, 64), np.float16), np.ones((32, 64), np.float16)
    explanation = octavo.explain("linear", x, w, activation="silu")
    assert explanation.kernel.startswith("cpu_linear<float16") and explanation.file == "src/cpu/linear.cpp"
    for device, kernel in (("h200", "sm90_flat<float16, 16x8>"), ("a100", "sm80_linear<float16, 8 rows>")):
        assert octavo.explain("linear", x, w, device=device).kernel == kernel
    for rows, width, depth in ((0, 32, 64), (4, 0, 64), (4, 32, 0)):
        empty = np.ones((rows, depth), np.float16), np.ones((width, depth), np.float16)
        assert octavo.explain("linear", *empty, device="h200").kernel.startswith("sm90_flat")
    odd = (np.ones((rows, 63), np.float16) for rows in (4, 32))
    assert "must start on 16 bytes" in octavo.explain("linear", *odd, device="h200").summary
    many = np.ones((129, 64), np.float16)
    explanation = octavo.explain("linear", many, w, device="h200")
    assert explanation.kernel == "matmul of the arrays' library<float16>"
    assert explanation.file == "python/octavo/_linear_on_cuda.py"
    assert explanation.summary.endswith("with more than 128 rows of x it is the faster one")
    assert next(iter(explanation.why_not)).startswith("sm90_")
    explanation = octavo.explain("linear", many, w, batch_invariant=True, device="h200")
    assert explanation.kernel == "sm90_flat<float16, 16x64>"
    wide = x.astype(np.float32)
    explanation = octavo.explain("linear", wide, w.astype(np.float32), device="h200")
    assert explanation.why_not["CUDA kernels"].endswith("multiply float16 and bfloat16; x is float32")
    with pytest.raises(TypeError, match="linear: batch_invariant=True needs a kernel of Octavo's, since the"):
        octavo.explain("linear", wide, w.astype(np.float32), batch_invariant=True, device="h200")
    with pytest.raises(TypeError, match="linear: w must be float32 like x on a GPU; got float16"):
        octavo.explain("linear", wide, w, device="h200")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_one_order_of_addition_for_all_rows_on_a_gpu(dtype: str) -> None:
    target = Target("torch", "cuda", dtype)
    problem = Problem.drawn(dtype, (200,), 576, 1536, "silu")
    together = run(target, problem, batch_invariant=True)
    problem.check(together)
    for count in (1, 8, 9, 64, 130):
        some = run(target, problem.with_row(slice(count)), batch_invariant=True)
        np.testing.assert_array_equal(some, together[:count])


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("library", ["torch", "jax"])
def test_what_libraries_compute_on_a_gpu(library: str, activation: str | None) -> None:
    """The functions that take over there are told the same, here on the CPU, and know other arrays."""
    pytest.importorskip(library)
    target = Target(library, "cpu", "float32")
    problem = Problem.drawn("float32", (3, 4), 20, 50, activation)
    norm_weight = np.linspace(-1.0, 1.5, 50).astype(np.float32).astype(np.float64)
    x = target.array(problem.x)
    others = [problem.numpy(values) for values in (problem.w, problem.bias, problem.residual)]
    w, bias, residual = others if library == "torch" else map(target.library.from_numpy, others)
    result = getattr(_linear_on_cuda, f"by_{library}")(x, w, bias, activation, residual)
    assert isinstance(result, target.library.array_type)
    problem.check(target.library.to_float64(result))
    if library == "torch":
        out = np.empty((3, 4, 20), np.float32)
        no_norm = (None, 1e-6)
        assert _linear_on_cuda.linear(x, w, bias, activation, residual, *no_norm, out, None) is out
        problem.check(out.astype(np.float64))
        plain = _linear_on_cuda.linear(x, w, None, activation, None, *no_norm, None, None)
        Problem("float32", "float32", problem.x, problem.w, None, None, activation).check(plain.numpy())
        norm = (problem.numpy(norm_weight), problem.norm_eps)
        normalised = _linear_on_cuda.linear(x, w, bias, activation, residual, *norm, None, None)
    else:
        with pytest.raises(ValueError, match="linear: stream must be None for JAX arrays on a GPU"):
            _linear_on_cuda.linear(x, w, bias, activation, residual, None, 1e-6, None, 1)
        norm = (target.library.from_numpy(problem.numpy(norm_weight)), problem.norm_eps)
        normalised = _linear_on_cuda.by_jax(x, w, bias, activation, residual, *norm)
    replace(problem, norm_weight=norm_weight).check(target.library.to_float64(normalised))


@pytest.mark.parametrize("is_strided", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("has_residual", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_torch_writes_to_out(
    activation: str | None, has_residual: bool, has_bias: bool, is_strided: bool
) -> None:
    torch = pytest.importorskip("torch")
    problem = Problem.drawn(
        "float32", (3, 4), 20, 50, activation, has_bias=has_bias, has_residual=has_residual
    )
    arrays = (problem.x, problem.w, problem.bias, problem.residual)
    x, w, bias, residual = (
        None if values is None else torch.from_numpy(problem.numpy(values)) for values in arrays
    )
    shape = (3, 4, 20)
    out = torch.full((4, 3, 20), torch.nan).transpose(0, 1) if is_strided else torch.full(shape, torch.nan)
    assert _linear_on_cuda.by_torch(x, w, bias, activation, residual, out) is out
    problem.check(out.double().numpy())
    if has_residual:  # which may be out itself
        assert _linear_on_cuda.by_torch(x, w, bias, activation, residual, residual) is residual
        np.testing.assert_array_equal(residual, out)


def test_torch_writes_zeros_to_out_where_there_is_nothing_to_add_up() -> None:
    torch = pytest.importorskip("torch")
    out = torch.full((3, 5), torch.nan)
    _linear_on_cuda.by_torch(torch.empty(3, 0), torch.empty(5, 0), None, None, None, out)
    assert (out == 0).all()


def test_autocast_changes_no_dtype() -> None:
    torch = pytest.importorskip("torch")
    x, w = torch.ones(3, 8), torch.ones(5, 8)
    with torch.autocast("cpu", torch.bfloat16):
        assert _linear_on_cuda.by_torch(x, w, None, None, None).dtype == torch.float32


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_what_cupy_computes_on_a_gpu(
    dtype: str, activation: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With NumPy in place of CuPy, whose functions are called alike. Of float16 CuPy's erf makes float32."""
    ufuncs = SimpleNamespace(erf=lambda x: 1 - erfc(x).astype(np.float32))
    monkeypatch.setitem(sys.modules, "cupy", np)
    monkeypatch.setitem(sys.modules, "cupyx.scipy.special", ufuncs)  # type: ignore[arg-type]
    numbers = np.array([[2.0, 0.5], [-12.0, 1.0], [-600.0, 2.0], [30.0, -1.0]])
    x, w = np.array([[1.0, 0.0]], dtype), numbers.astype(dtype)
    with np.errstate(over="ignore"):
        result = _linear_on_cuda.by_cupy(x, w, None, activation, None)
    assert result.dtype == dtype
    np.testing.assert_allclose(result, activate(numbers[None, :, 0], activation), rtol=2e-3, atol=1e-6)


def test_arrays_without_a_product_on_a_gpu() -> None:
    message = r"linear: x must be an array of PyTorch, CuPy or JAX on a GPU; got numpy\.ndarray"
    with pytest.raises(TypeError, match=message):
        _linear_on_cuda.linear(np.ones(3), np.ones((2, 3)), None, None, None, None, 1e-6, None, None)


@pytest.mark.gpu
@pytest.mark.parametrize("library", ["torch", "cupy"])
def test_out_and_stream_on_a_gpu(library: str) -> None:
    pytest.importorskip(library)
    target = Target(library, "cuda", "float16")
    problem = Problem.drawn("float16", (5,), 64, 128, "silu")
    arrays = [target.array(values) for values in (problem.x, problem.w, problem.bias)]
    residual, out = target.array(problem.residual), target.nan(5, 64)
    if library == "torch":
        import torch

        stream: Any = torch.cuda.Stream()
        wait = stream.synchronize
    else:
        import cupy

        stream = cupy.cuda.Stream(non_blocking=True)
        wait = stream.synchronize
    assert octavo.linear(*arrays, activation="silu", residual=residual, out=out, stream=stream) is out
    wait()
    problem.check(target.library.to_float64(out))
