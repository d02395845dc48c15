"""octavo.rms_norm."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

import octavo
from support import oracle
from support.calls import GuardedArray
from support.targets import Target, cpu_target, every_target, writable_target

# Rows that a warp, some warps or a whole CTA take, and those that do not fit in its registers; with pieces of
# 16 bytes, and without.
DIMS = (1, 7, 8, 63, 100, 128, 257, 576, 1000, 4096, 5120, 8200, 16384, 16400, 20001)


def drawn(target: Target, *shape: int, seed: int = 0) -> NDArray[np.float64]:
    values = np.random.default_rng([seed, *shape]).standard_normal(shape)
    return oracle.round_to(values * 3.0, target.dtype)


def drawn_weight(target: Target, dim: int, dtype: str) -> tuple[NDArray[np.float64], Any]:
    """Its numbers, and its array."""
    values = oracle.round_to(1.0 + 0.3 * np.random.default_rng(dim).standard_normal(dim), dtype)
    return values, target.library.array(values, dtype)


def rounded_sum(target: Target, x: NDArray, residual: NDArray) -> NDArray[np.float64]:
    """Added in float32, then rounded."""
    return oracle.round_to(x.astype(np.float32) + residual.astype(np.float32), target.dtype)


def check_norm(target: Target, out: Any, x: NDArray, weight: NDArray, eps: float = 1e-6) -> None:
    """float32 inside, one rounding at the end."""
    assert isinstance(out, target.library.array_type)
    assert target.dtype in str(out.dtype) and tuple(out.shape) == x.shape
    expected = oracle.rms_norm(x, weight, eps)
    tolerance = (0.5 * oracle.SPACING[target.dtype] + oracle.EPSILON_OUT["float32"]) * np.abs(expected)
    if target.dtype == "float16":
        tolerance += 2.0**-25  # half the spacing of the smallest
    assert (np.abs(target.library.to_float64(out) - expected) <= tolerance).all()


def check(target: Target, shape: tuple[int, ...], weight_dtype: str, *, with_residual: bool) -> None:
    x, residual = drawn(target, *shape), drawn(target, *shape, seed=1)
    weight, weight_array = drawn_weight(target, shape[-1], weight_dtype)
    if not with_residual:
        check_norm(target, octavo.rms_norm(target.array(x), weight_array), x, weight)
        return
    result = octavo.rms_norm(target.array(x), weight_array, 1e-5, target.array(residual))
    expected = rounded_sum(target, x, residual)
    assert isinstance(result, tuple) and isinstance(result[1], target.library.array_type)
    np.testing.assert_array_equal(target.library.to_float64(result[1]), expected)
    check_norm(target, result[0], expected, weight, eps=1e-5)
    of_sum = octavo.rms_norm(target.array(expected), weight_array, eps=1e-5)
    np.testing.assert_array_equal(target.library.to_float64(result[0]), target.library.to_float64(of_sum))


@every_target
@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("dim", DIMS)
def test_dims(target: Target, dim: int, with_residual: bool) -> None:
    check(target, (3, dim), target.dtype, with_residual=with_residual)
    check(target, (2, dim), "float32", with_residual=with_residual)


@every_target
@pytest.mark.parametrize(
    "shape", [(64,), (1, 64), (300, 64), (2, 3, 5, 64), (65, 1, 576), (0, 64), (3, 0, 64), (3, 4, 0), (0,)]
)
def test_shapes(target: Target, shape: tuple[int, ...]) -> None:
    for with_residual in (False, True):
        check(target, shape, target.dtype, with_residual=with_residual)


@every_target
@given(
    axes=st.lists(st.integers(0, 9), max_size=3),
    dim=st.integers(1, 700),
    is_float32=st.booleans(),
    with_residual=st.booleans(),
)
def test_any_shape(target: Target, axes: list[int], dim: int, is_float32: bool, with_residual: bool) -> None:
    check(target, (*axes, dim), "float32" if is_float32 else target.dtype, with_residual=with_residual)


@every_target
@pytest.mark.parametrize("dim", [63, 127, 443, 491, 504, 575])
def test_what_whole_vectors_leave_over(target: Target, dim: int) -> None:
    """Its squares, one by one beside the sum of all others, took some rows of float32 over the tolerance."""
    check(target, (1500, dim), target.dtype, with_residual=False)


@every_target
@pytest.mark.parametrize("eps", [0.0, 1e-12, 1e-6, 0.5, 100])
def test_eps(target: Target, eps: float) -> None:
    x = drawn(target, 4, 96) / 256
    x = oracle.round_to(x, target.dtype)
    weight, array = drawn_weight(target, 96, target.dtype)
    check_norm(target, octavo.rms_norm(target.array(x), array, eps), x, weight, eps)


@every_target
def test_rows_of_zeros(target: Target) -> None:
    weight = target.array(np.ones(40))
    zeros = target.array(np.zeros((3, 40)))
    assert not target.library.to_float64(octavo.rms_norm(zeros, weight)).any()
    assert np.isnan(target.library.to_float64(octavo.rms_norm(zeros, weight, 0.0))).all()  # 0 / 0


@every_target
@pytest.mark.parametrize("dim", [64, 1000, 20001])
def test_rows_are_apart(target: Target, dim: int) -> None:
    """A row's bits do not depend on the others, whatever these hold."""
    x = drawn(target, 5, dim)
    x[1, dim // 2], x[3, 0] = np.nan, np.inf
    _, weight = drawn_weight(target, dim, target.dtype)
    out = target.library.to_float64(octavo.rms_norm(target.array(x), weight))
    assert np.isnan(out[1]).all() and np.isnan(out[3, 0]) and not out[3, 1:].any()
    for row in (0, 2, 4):
        alone = octavo.rms_norm(target.array(x[row]), weight)
        np.testing.assert_array_equal(out[row], target.library.to_float64(alone))


@writable_target
@pytest.mark.parametrize("dim", [72, 1001, 20001])
def test_out(target: Target, dim: int) -> None:
    """Unread, however full of NaN, and nothing is written around it."""
    x, residual = drawn(target, 5, dim), drawn(target, 5, dim, seed=1)
    _, weight = drawn_weight(target, dim, target.dtype)
    expected = octavo.rms_norm(target.array(x), weight, residual=target.array(residual))
    for names in (("out",), ("residual_out",), ("out", "residual_out")):
        given = {name: GuardedArray(target, 5, dim) for name in names}
        arrays = {name: guarded.array for name, guarded in given.items()}
        results = octavo.rms_norm(target.array(x), weight, residual=target.array(residual), **arrays)
        for name, result, wanted in zip(("out", "residual_out"), results, expected, strict=True):
            assert name not in arrays or result is arrays[name]
            np.testing.assert_array_equal(
                target.library.to_float64(result), target.library.to_float64(wanted)
            )
        for guarded in given.values():
            guarded.check_margins()
    guarded = GuardedArray(target, 5, dim)
    assert octavo.rms_norm(target.array(x), weight, out=guarded.array) is guarded.array
    guarded.check_margins()


@writable_target
@pytest.mark.parametrize("dim", [64, 1001, 20000])
def test_in_place(target: Target, dim: int) -> None:
    """As FlashInfer and vLLM do it, and every other way round; otherwise the inputs stay as they are."""
    x, residual = drawn(target, 5, dim), drawn(target, 5, dim, seed=1)
    _, weight = drawn_weight(target, dim, target.dtype)
    kept = target.array(x), target.array(residual)
    expected = [target.library.to_float64(y) for y in octavo.rms_norm(kept[0], weight, 1e-6, kept[1])]
    np.testing.assert_array_equal(target.library.to_float64(kept[0]), x)
    np.testing.assert_array_equal(target.library.to_float64(kept[1]), residual)
    for out, residual_out in (
        ("x", "residual"),
        ("residual", "x"),
        ("x", None),
        (None, "x"),
        (None, "residual"),
    ):
        arrays = {"x": target.array(x), "residual": target.array(residual)}
        outs = {"out": arrays.get(out or ""), "residual_out": arrays.get(residual_out or "")}
        results = octavo.rms_norm(weight=weight, **arrays, **outs)
        for result, wanted in zip(results, expected, strict=True):
            np.testing.assert_array_equal(target.library.to_float64(result), wanted)
    alone = target.array(x)
    wanted = target.library.to_float64(octavo.rms_norm(alone, weight))
    octavo.rms_norm(alone, weight, out=alone)
    np.testing.assert_array_equal(target.library.to_float64(alone), wanted)


@writable_target
@pytest.mark.parametrize("dim", [64, 80, 129])
def test_strided(target: Target, dim: int) -> None:
    """The heads of q within a projection, transposed axes, rows that lie apart, and one row for all."""
    library = target.library
    x = drawn(target, 4, 3, 2, dim)
    _, weight = drawn_weight(target, dim, target.dtype)
    expected = library.to_float64(octavo.rms_norm(target.array(x), weight))

    wide = np.full((4, 3, 5, dim + 3), np.nan)
    wide[:, :, 1:3, 2:-1] = x
    views = [
        target.array(wide)[:, :, 1:3, 2:-1],
        library.swap_axes(target.array(x.swapaxes(0, 2)), 0, 2),
        library.swap_axes(target.array(x.swapaxes(1, 2)), 1, 2),
    ]
    for view in views:
        np.testing.assert_array_equal(library.to_float64(octavo.rms_norm(view, weight)), expected)
        sums = octavo.rms_norm(view, weight, residual=target.array(np.zeros(x.shape)))
        np.testing.assert_array_equal(library.to_float64(sums[0]), expected)
        np.testing.assert_array_equal(library.to_float64(sums[1]), x)
        octavo.rms_norm(target.array(x), weight, out=view)
        np.testing.assert_array_equal(library.to_float64(view), expected)
    both = target.array(wide)
    octavo.rms_norm(both[:, :, 1:3, 2:-1], weight, out=both[:, :, 1:3, 2:-1])  # and nothing beside it
    around = library.to_float64(both)
    np.testing.assert_array_equal(around[:, :, 1:3, 2:-1], expected)
    around[:, :, 1:3, 2:-1] = np.nan
    assert np.isnan(around).all()


@cpu_target
def test_one_row_for_all(target: Target) -> None:
    row = drawn(target, 72)
    weight = target.array(np.ones(72))
    x = np.broadcast_to(target.array(row), (4, 3, 72))
    out = octavo.rms_norm(x, weight)
    expected = octavo.rms_norm(target.array(row), weight)
    assert (target.library.to_float64(out) == target.library.to_float64(expected)).all()


@writable_target
def test_weight_between_other_numbers(target: Target) -> None:
    """At an address that is no multiple of 16 bytes."""
    x, (weight, _) = drawn(target, 3, 64), drawn_weight(target, 64, target.dtype)
    for dtype in {target.dtype, "float32"}:
        array = target.library.array(np.concatenate([[np.nan], weight, [np.nan]]), dtype)[1:-1]
        check_norm(target, octavo.rms_norm(target.array(x), array), x, weight)


@pytest.mark.parametrize("shape", [(2, 5, 576), (7, 4096)])
def test_equals_that_of_transformers(shape: tuple[int, ...]) -> None:
    torch = pytest.importorskip("torch")
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    x, residual = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0))
    layer = llama.LlamaRMSNorm(shape[-1], eps=1e-5)
    layer.weight.data = 1 + 0.1 * torch.randn(shape[-1], generator=torch.Generator().manual_seed(1))
    weight = layer.weight.detach()
    close = {"rtol": 1e-6, "atol": 1e-7}
    torch.testing.assert_close(octavo.rms_norm(x, weight, 1e-5), layer(x).detach(), **close)
    out, residual_out = octavo.rms_norm(x, weight, 1e-5, residual)
    torch.testing.assert_close(out, layer(x + residual).detach(), **close)
    assert torch.equal(residual_out, x + residual)


def test_plan() -> None:
    """Chunks of 16 bytes where all rows and the weight are on such addresses; warps as rows need them."""

    def plan(shape: tuple[int, ...], dtype: Any = np.float16, weight: Any = None, **arrays: Any) -> Any:
        weight = np.ones(shape[-1], dtype) if weight is None else weight
        explanation = octavo.explain("rms_norm", np.ones(shape, dtype), weight, **arrays, device="h200")
        return tuple(
            explanation.plan[name] for name in ("num_ctas", "threads", "threads_per_row", "in_chunks")
        )

    assert plan((5, 4096)) == (5, 512, 512, True)
    assert plan((5, 4096), np.float32) == (5, 1024, 1024, True)
    assert plan((5, 14336)) == (5, 896, 896, True)
    assert plan((5, 576)) == (5, 96, 96, True)
    assert plan((7, 10, 128)) == (18, 128, 32, True)
    assert plan((1, 128)) == (1, 128, 32, True)
    assert plan((5, 4097)) == (5, 832, 832, False)
    assert plan((5, 128), weight=np.ones(129, np.float16)[1:]) == (5, 128, 128, False)
    assert plan((5, 128), residual=np.ones((5, 129), np.float16)[:, 1:]) == (5, 128, 128, False)
    assert plan((5, 0))[0] == 0
