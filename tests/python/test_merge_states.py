"""octavo.merge_states."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

import octavo
from support import oracle
from support.targets import Target, every_target, writable_target


def drawn_states(
    dtype: str, shape: tuple[int, ...], seed: int, empty: float = 0.2
) -> list[tuple[NDArray, NDArray]]:
    """Two pairs (out, lse) of which a part is empty: 0 and -inf."""
    random = np.random.default_rng(seed)
    states = []
    for _ in range(2):
        out = oracle.round_to(random.standard_normal(shape), dtype)
        lse = (5.0 * random.standard_normal(shape[:-1])).astype(np.float32).astype(np.float64)
        is_empty = random.random(shape[:-1]) < empty
        out[is_empty] = 0.0
        lse[is_empty] = -np.inf
        states.append((out, lse))
    return states


def check_merge(
    target: Target, states: list[tuple[NDArray, NDArray]], result: tuple[NDArray, NDArray]
) -> None:
    (out_a, lse_a), (out_b, lse_b) = states
    out, lse = oracle.merge_states(out_a, lse_a, out_b, lse_b)
    # float32 inside, one rounding at the end.
    largest = np.maximum(np.abs(out_a), np.abs(out_b))
    tolerance = (0.5 * oracle.SPACING[target.dtype] + oracle.EPSILON_OUT["float32"]) * largest
    assert (np.abs(result[0] - out) <= tolerance).all()
    empty = np.isneginf(lse)
    np.testing.assert_array_equal(np.isneginf(result[1]), empty)
    error = np.abs(np.where(empty, 0.0, result[1]) - np.where(empty, 0.0, lse))
    assert (error <= oracle.EPSILON_LSE * np.maximum(1.0, np.abs(np.where(empty, 0.0, lse)))).all()


def merge(target: Target, states: list[tuple[NDArray, NDArray]]) -> tuple[NDArray, NDArray]:
    (out_a, lse_a), (out_b, lse_b) = states
    out, lse = octavo.merge_states(
        target.array(out_a), target.library.float32(lse_a), target.array(out_b), target.library.float32(lse_b)
    )
    assert isinstance(out, target.library.array_type)
    assert isinstance(lse, target.library.array_type)
    assert tuple(out.shape) == out_a.shape
    assert tuple(lse.shape) == lse_a.shape
    return target.library.to_float64(out), target.library.to_float64(lse)


@every_target
@pytest.mark.parametrize(
    "shape",
    [
        (5, 64),
        (1, 8),
        (17, 6, 80),
        (3, 17, 5, 112),
        (2, 300, 2, 128),
        (7, 3, 256),
        (0, 4, 64),
        (3, 0, 4, 64),
        (3, 4, 0),
    ],
)
def test_shapes(target: Target, shape: tuple[int, ...]) -> None:
    states = drawn_states(target.dtype, shape, seed=0)
    check_merge(target, states, merge(target, states))


@every_target
@given(
    axes=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    head_dim=st.integers(1, 33).map(lambda n: 8 * n),
    seed=st.integers(0, 1000),
)
def test_any_shape(target: Target, axes: list[int], head_dim: int, seed: int) -> None:
    states = drawn_states(target.dtype, (*axes, head_dim), seed)
    check_merge(target, states, merge(target, states))


@every_target
def test_empty_states(target: Target) -> None:
    (out, lse), _ = drawn_states(target.dtype, (4, 3, 64), seed=1, empty=0.0)
    nothing = (np.zeros_like(out), np.full_like(lse, -np.inf))
    unwritten = (np.full_like(out, np.nan), nothing[1])
    for states in (
        [(out, lse), nothing],
        [nothing, (out, lse)],
        [(out, lse), unwritten],
        [unwritten, (out, lse)],
    ):
        merged_out, merged_lse = merge(target, states)
        np.testing.assert_array_equal(merged_out, out)
        np.testing.assert_array_equal(merged_lse, lse)
    for states in ([nothing, nothing], [unwritten, unwritten]):
        merged_out, merged_lse = merge(target, states)
        assert not merged_out.any()
        assert np.isneginf(merged_lse).all()


@every_target
def test_distant_lse(target: Target) -> None:
    """The heavier state wins, without overflow."""
    (out_a, _), (out_b, _) = drawn_states(target.dtype, (4, 3, 64), seed=2, empty=0.0)
    for heavy in (1e4, -1e4):
        lse_a, lse_b = np.full((4, 3), heavy), np.full((4, 3), -heavy)
        states = [(out_a, lse_a), (out_b, lse_b)]
        check_merge(target, states, merge(target, states))


@writable_target
def test_strided(target: Target) -> None:
    library = target.library
    (out_a, lse_a), (out_b, lse_b) = drawn_states(target.dtype, (3, 7, 5, 64), seed=3)
    expected = merge(target, [(out_a, lse_a), (out_b, lse_b)])
    wide = np.full((3, 7, 5, 80), np.nan)
    wide[..., 8:72] = out_b
    out, lse = octavo.merge_states(
        library.swap_axes(target.array(out_a.swapaxes(1, 2)), 1, 2),
        library.swap_axes(library.float32(lse_a.swapaxes(0, 2)), 0, 2),
        target.array(wide)[..., 8:72],
        library.float32(np.stack([lse_b, lse_b], axis=-1))[..., 1],
    )
    assert library.to_float64(out).tobytes() == expected[0].tobytes()
    assert library.to_float64(lse).tobytes() == expected[1].tobytes()


@every_target
@pytest.mark.parametrize("middle", [0, 1, 50, 113])
def test_merge_of_halves_is_the_whole(target: Target, middle: int) -> None:
    random = np.random.default_rng(4)
    q, k, v = (oracle.round_to(random.standard_normal((n, 4, 64)), target.dtype) for n in (31, 113, 113))
    states = []
    for keys in (slice(0, middle), slice(middle, None)):
        states += octavo.attention(*(target.array(x[None]) for x in (q, k[keys], v[keys])), return_lse=True)
    out, lse = octavo.merge_states(*states)
    reference = oracle.attention(q, k, v, (31,), (113,), dtype=target.dtype)
    # Besides the sums, the halves were rounded to the dtype.
    error = np.abs(target.library.to_float64(out)[0] - reference.out)
    plain_error = np.abs(reference.plain_out - reference.out).max()
    assert error.max() <= 2 * plain_error + oracle.SPACING[target.dtype] * np.abs(reference.out).max()
    reference.check_lse(target.library.to_float64(lse)[0])
