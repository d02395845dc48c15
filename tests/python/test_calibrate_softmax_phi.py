"""octavo.calibrate_softmax_phi: the shift whose window holds most of the rows."""

from __future__ import annotations

import math
import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import octavo
from octavo import _core

LOG2 = math.log(2.0)
WINDOWS = {"float16": (2.0, 8.0), "bfloat16": (60.0, 8.0), "float32": (60.0, 8.0)}
every_dtype = pytest.mark.parametrize("dtype", WINDOWS)


def share_outside(phi: float, lse: Any, seq_lens: Any, dtype: str) -> float:
    """The share of rows whose maximum lies anywhere between lse - log(n) and lse, straight from that."""
    below, above = (LOG2 * x for x in WINDOWS[dtype])
    shares = []
    for value, n in zip(lse, seq_lens, strict=True):
        width = max(math.log(n), 1e-3)
        within = min(value, phi + above) - max(value - width, phi - below)
        shares.append(1.0 - max(within, 0.0) / width)
    return float(np.mean(shares))


def test_windows() -> None:
    """Those of the kernels."""
    for dtype, window in WINDOWS.items():
        assert _core.softmax_phi_window(dtype == "float16") == window


@every_dtype
def test_rows_alike(dtype: str) -> None:
    lse = np.full((5, 3), [0.0, 7.0, -300.0])
    phi, share = octavo.calibrate_softmax_phi(lse, np.full(5, 100), dtype)
    assert phi.dtype == np.float32 and share.dtype == np.float64 and phi.shape == share.shape == (3,)
    assert (share == 0.0).all()
    below, above = (LOG2 * x for x in WINDOWS[dtype])
    assert (lse[0] - math.log(100) >= phi - below).all() and (lse[0] <= phi + above).all()


def test_a_few_outliers_do_not_move_it() -> None:
    lse = np.concatenate([np.linspace(0.0, 3.0, 95), np.full(5, 200.0)])[:, None]
    for dtype in WINDOWS:
        phi, share = octavo.calibrate_softmax_phi(lse, np.full(100, 8), dtype)
        assert abs(phi[0]) < 60 and share[0] == pytest.approx(0.05, abs=1e-6)


def test_what_float16_cannot_hold() -> None:
    """As of OPT-6.7B: half of the rows lie far from the others."""
    lse = np.concatenate([np.zeros(40), np.full(60, 30.0)])[:, None]
    phi, share = octavo.calibrate_softmax_phi(lse, np.full(100, 16), "float16")
    assert share[0] == pytest.approx(0.4) and 24.0 < phi[0] < 33.0
    _, share = octavo.calibrate_softmax_phi(lse, np.full(100, 16), "bfloat16")
    assert share[0] == 0.0


lse_and_lengths = st.lists(
    st.tuples(st.floats(-200.0, 200.0), st.sampled_from([1, 2, 17, 1000, 10**6])), min_size=1, max_size=12
)


@every_dtype
@given(rows=lse_and_lengths, others=st.lists(st.floats(-260.0, 260.0), max_size=20))
def test_no_other_shift_holds_more(dtype: str, rows: list[tuple[float, int]], others: list[float]) -> None:
    lse, seq_lens = (np.array(x) for x in zip(*rows, strict=True))
    phi, share = octavo.calibrate_softmax_phi(lse[:, None], seq_lens, dtype)
    # phi is rounded to float32: a row of one key may lie a millionth to either side.
    slack = 1e-4 + 2 * len(rows) ** -1 * 3e-5 / 1e-3
    assert share[0] == pytest.approx(share_outside(float(phi[0]), lse, seq_lens, dtype), abs=1e-6)
    candidates = [*others, *(x + d for x in lse for d in (-5.0, 0.0, 1.0))]
    assert share[0] <= min(share_outside(other, lse, seq_lens, dtype) for other in candidates) + slack


@given(shift=st.floats(-1e3, 1e3))
def test_it_moves_with_the_scores(shift: float) -> None:
    lse, seq_lens = np.array([[0.0], [2.5], [4.0]]), np.array([3, 50, 900])
    phi, share = octavo.calibrate_softmax_phi(lse, seq_lens, "float16")
    moved, share_moved = octavo.calibrate_softmax_phi(lse + shift, seq_lens, "float16")
    assert moved[0] - phi[0] == pytest.approx(shift, abs=1e-3)
    assert share_moved[0] == pytest.approx(share[0], abs=1e-4)


def test_empty_rows_and_heads_without_any() -> None:
    lse = np.array([[-np.inf, 3.0], [-np.inf, -np.inf], [-np.inf, 3.5]], np.float32)
    phi, share = octavo.calibrate_softmax_phi(lse, np.array([9, 0, 9]), "bfloat16")
    assert phi[0] == 0.0 and (share == 0.0).all()
    assert phi[1] == octavo.calibrate_softmax_phi(lse[[0, 2]], 9, "bfloat16")[0][1]
    phi, share = octavo.calibrate_softmax_phi(np.zeros((0, 2)), np.zeros(0, int), "float16")
    assert (phi == 0.0).all() and (share == 0.0).all()


def test_shapes_and_dtypes() -> None:
    random = np.random.default_rng(1)
    lse, seq_lens = random.normal(size=(4, 6, 2)), random.integers(1, 100, (4, 6))
    expected = octavo.calibrate_softmax_phi(lse.reshape(24, 2), seq_lens.reshape(24), "float16")
    for dtype in ("float16", np.float16, np.dtype(np.float16)):
        for x, y in zip(octavo.calibrate_softmax_phi(lse, seq_lens, dtype), expected, strict=True):
            np.testing.assert_array_equal(x, y)
    octavo.calibrate_softmax_phi(lse, seq_lens[0], ml_dtypes.bfloat16)  # broadcast
    octavo.calibrate_softmax_phi(lse.astype(ml_dtypes.bfloat16), seq_lens.astype(np.uint16), "bfloat16")
    assert octavo.calibrate_softmax_phi(np.zeros((0, 2)), [], "float16")[0].shape == (2,)
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    of_torch = octavo.calibrate_softmax_phi(torch.tensor(lse), torch.tensor(seq_lens), torch.float16)
    np.testing.assert_array_equal(of_torch[0], expected[0])


@pytest.mark.parametrize(
    ("lse", "seq_lens", "dtype", "message"),
    [
        (np.zeros((3, 2)), 5, "int8", "dtype must be float16, bfloat16 or float32; got int8"),
        (1.0, 5, "float16", "lse must have shape [..., num_q_heads]; got []"),
        (
            np.zeros((3, 2)),
            [5, 6],
            "float16",
            "seq_lens must have the shape of lse without its last axis, [3], or one that broadcasts to it; "
            "got [2]",
        ),
        (np.array([[np.nan]]), 5, "float16", "lse must be finite or -inf; got nan"),
        (np.array([[np.inf]]), 5, "float16", "lse must be finite or -inf; got inf"),
        (
            np.array([[0.0], [-1e14]]),
            5,
            "float16",
            "lse must be at most 2^32 in magnitude, or -inf; got -100000000000000.0",
        ),
        (np.zeros((2, 1)), [3, 0], "float16", "seq_lens must be at least 1 where lse is finite; got 0"),
    ],
)
def test_errors(lse: Any, seq_lens: Any, dtype: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"calibrate_softmax_phi: {message}")):
        octavo.calibrate_softmax_phi(lse, seq_lens, dtype)


@pytest.mark.parametrize(
    ("lse", "seq_lens", "error", "message"),
    [
        (np.zeros((3, 2)), 5.5, TypeError, "seq_lens must be of integers; got float64"),
        (np.zeros((3, 2)), [5.0, 6.0, 7.0], TypeError, "seq_lens must be of integers; got float64"),
        (np.zeros((3, 2)), True, TypeError, "seq_lens must be of integers; got bool"),
        (np.zeros((3, 2)), "5", TypeError, "seq_lens must be of integers; got <U1"),
        (np.zeros((3, 2)), None, TypeError, "seq_lens must be of integers; got object"),
        (np.zeros((3, 2)), [[5], [6, 7]], ValueError, "seq_lens must be an array of integers: "),
        ("lse", 5, TypeError, "lse must be of numbers; got <U3"),
        (["1", "2"], 5, TypeError, "lse must be of numbers; got <U1"),
        (None, 5, TypeError, "lse must be of numbers; got object"),
        ([[1.0], [2.0, 3.0]], 5, ValueError, "lse must be an array of numbers: "),
        (np.zeros((3, 2), complex), 5, TypeError, "lse must be of numbers; got complex128"),
    ],
)
def test_what_numpy_does_not_read_as_numbers(
    lse: Any, seq_lens: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=re.escape(f"calibrate_softmax_phi: {message}")):
        octavo.calibrate_softmax_phi(lse, seq_lens, "float16")


def test_tensors_that_numpy_does_not_read() -> None:
    torch = pytest.importorskip("torch")
    lse, lengths = torch.zeros(3, 2), torch.ones(3)
    message = "calibrate_softmax_phi: lse must be an array of numbers: Can't call numpy"
    with pytest.raises(TypeError, match=re.escape(message)):
        octavo.calibrate_softmax_phi(lse.requires_grad_(), 5, "float16")
    message = "calibrate_softmax_phi: seq_lens must be an array of integers: Can't call numpy"
    with pytest.raises(TypeError, match=re.escape(message)):
        octavo.calibrate_softmax_phi(lse.detach(), lengths.requires_grad_(), "float16")


def test_arrays_that_jax_traces() -> None:
    jax = pytest.importorskip("jax")
    with pytest.raises(TypeError, match=r"^calibrate_softmax_phi: lse must be an array of numbers: "):
        jax.jit(lambda lse: octavo.calibrate_softmax_phi(lse, 5, "float16"))(np.zeros((3, 2), np.float32))


@every_dtype
def test_of_calls(dtype: str) -> None:
    """From the log-sum-exps of ordinary calls: the maxima of their rows lie in the window."""
    random = np.random.default_rng(5)
    numpy_dtype = {"bfloat16": np.dtype(ml_dtypes.bfloat16)}.get(dtype) or np.dtype(dtype)
    q, k = random.standard_normal((64, 4, 32)), random.standard_normal((64, 50, 4, 32))
    k += 2.0 * q[:, None] / 32**0.5  # scores around 2
    arrays = [x.astype(numpy_dtype) for x in (q[:, None], k, k)]
    out, lse = octavo.attention(*arrays, return_lse=True)
    phi, _ = octavo.calibrate_softmax_phi(lse.reshape(64, 4), 50, dtype)
    scores = (
        np.einsum("bhd,bkhd->bhk", *(x.astype(np.float64) for x in (arrays[0][:, 0], arrays[1]))) / 32**0.5
    )
    maxima = scores.max(axis=2)
    below, above = (LOG2 * x for x in WINDOWS[dtype])
    outside = (maxima < phi - below) | (maxima > phi + above)
    assert outside.mean() <= 0.05
    with_phi = octavo.attention(*arrays, softmax_phi=phi)
    np.testing.assert_allclose(with_phi.astype(np.float64), out.astype(np.float64), rtol=2e-2, atol=2e-2)
