"""Small calls for the tests of arrays: inputs, the wanted result, the libraries."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import octavo
from support.libraries import ArrayLibrary, get_library

DTYPES = ("float32", "float16", "bfloat16")
CPU_LIBRARIES = [("numpy", "cpu"), ("torch", "cpu"), ("jax", "cpu")]
GPU_LIBRARIES = [("torch", "cuda"), ("cupy", "cuda"), ("jax", "cuda")]


def each_of(libraries: list[tuple[str, str]]) -> list[Any]:
    return [
        pytest.param(name, device, id=f"{name}_{device}", marks=[pytest.mark.gpu] if device == "cuda" else [])
        for name, device in libraries
    ]


def installed(name: str, device: str) -> ArrayLibrary:
    if name != "numpy":
        pytest.importorskip(name, reason=f"{name} is not installed")
    return get_library(name, device)


every_library = pytest.mark.parametrize(("name", "device"), each_of(CPU_LIBRARIES + GPU_LIBRARIES))
writable_library = pytest.mark.parametrize(
    ("name", "device"), each_of([x for x in CPU_LIBRARIES + GPU_LIBRARIES if x[0] != "jax"])
)


def dtypes_of(device: str) -> tuple[str, ...]:
    return DTYPES if device == "cpu" else DTYPES[1:]


def random(*shape: int) -> NDArray[np.float32]:
    return np.random.default_rng(len(shape)).standard_normal(shape, np.float32)


def qkv() -> tuple[NDArray[np.float32], ...]:
    return random(2, 3, 4, 64), random(2, 5, 2, 64), random(2, 5, 2, 64) + 1


def expected(dtype: str, *arrays: NDArray) -> NDArray[np.float64]:
    """The same call on NumPy's arrays, which the operators' tests hold against the oracle."""
    numpy = get_library("numpy", "cpu")
    return numpy.to_float64(octavo.attention(*(numpy.array(x, dtype) for x in arrays)))


def assert_equal_results(device: str, actual: NDArray, wanted: NDArray) -> None:
    if device == "cpu":
        np.testing.assert_array_equal(actual, wanted)
    else:  # another backend: within a few roundings of bfloat16
        np.testing.assert_allclose(actual, wanted, atol=0.03)


def cache(num_pages: int = 3, page_size: int = 4) -> SimpleNamespace:
    """A call of append_kv: one new token for each of two sequences."""
    return SimpleNamespace(
        k=random(2, 2, 64),
        v=random(2, 2, 64) + 1,
        k_pages=np.zeros((num_pages, page_size, 2, 64), np.float32),
        v_pages=np.zeros((num_pages, page_size, 2, 64), np.float32),
        page_table=np.array([[2], [0]], np.int32),
        seq_lens=np.array([3, 1], np.int32),
    )
