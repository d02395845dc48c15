"""The adapters keep every number, in the dtype asked for."""

from __future__ import annotations

import numpy as np
import pytest

from support.libraries import get_library
from support.oracle import NUMPY_DTYPES, round_to


@pytest.mark.parametrize("dtype", NUMPY_DTYPES)
@pytest.mark.parametrize(
    ("name", "device"),
    [
        ("numpy", "cpu"),
        ("torch", "cpu"),
        ("jax", "cpu"),
        *(pytest.param(name, "cuda", marks=pytest.mark.gpu) for name in ("torch", "cupy", "jax")),
    ],
)
def test_round_trip(name: str, device: str, dtype: str) -> None:
    if name != "numpy":
        pytest.importorskip(name, reason=f"{name} is not installed")
    library = get_library(name, device)
    values = round_to(np.random.default_rng(0).standard_normal((3, 4, 5)), dtype)
    values[0, 0] = (np.nan, np.inf, -np.inf, -0.0, 0.0)
    array = library.array(values, dtype)
    assert isinstance(array, library.array_type)
    assert dtype in str(array.dtype)
    assert library.to_float64(array).tobytes() == values.tobytes()
    swapped = library.swap_axes(array, 0, 1)
    np.testing.assert_array_equal(library.to_float64(swapped), values.swapaxes(0, 1))
    integers = np.array([[1, -1], [2**31 - 1, -(2**31)]], np.int32)
    assert library.to_numpy(library.int32(integers)).dtype == np.int32
    np.testing.assert_array_equal(library.to_numpy(library.int32(integers)), integers)
