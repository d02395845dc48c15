"""What the model needs of an array library beyond what the arrays of NumPy, PyTorch and CuPy share."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any, Protocol

import numpy as np

Array = Any  # of the library at hand


class Arrays(Protocol):
    weight_dtype: Any  # of the matrices
    product_dtype: Any  # of what they are multiplied with, and of what is between layers
    cache_dtype: Any  # of queries and of new keys and values, and of the cache if it is not quantised

    def asarray(self, host: np.ndarray, dtype: Any = None) -> Array: ...
    def cast(self, x: Array, dtype: Any) -> Array: ...
    def to_host(self, x: Array) -> np.ndarray: ...


class NumPyArrays:
    """NumPy computes in float32 and float64 only, so a 16-bit `dtype` is that of the cache alone.

    Weights are float16, half of what would be read for each token in float32. The file has four bits of
    each and a scale, so that next to nothing is lost.
    """

    def __init__(self, dtype: str) -> None:
        self.weight_dtype: Any = np.dtype("float16")
        self.product_dtype: Any = np.dtype("float32")
        self.cache_dtype: Any = numpy_dtype(dtype)

    def asarray(self, host: np.ndarray, dtype: Any = None) -> Array:
        return np.asarray(host, dtype)

    def cast(self, x: Array, dtype: Any) -> Array:
        return x.astype(dtype, copy=False)

    def to_host(self, x: Array) -> np.ndarray:
        host: np.ndarray = x.astype(np.float32, copy=False)
        return host


class CuPyArrays(NumPyArrays):
    def __init__(self, dtype: str) -> None:
        cupy = load("cupy", "CuPy", "cupy-cuda12x, or cupy-cuda13x for CUDA 13")
        if not cupy.cuda.is_available():
            raise ValueError("CuPy finds no CUDA device")
        super().__init__(dtype)
        self._cupy = cupy
        self.weight_dtype = self.product_dtype = self.cache_dtype

    def asarray(self, host: np.ndarray, dtype: Any = None) -> Array:
        return self._cupy.asarray(host, dtype)

    def to_host(self, x: Array) -> np.ndarray:
        host: np.ndarray = self._cupy.asnumpy(x.astype(np.float32))
        return host


class TorchArrays:
    def __init__(self, device: str, dtype: str) -> None:
        torch = load("torch", "PyTorch", "torch" if device == "cpu" else "torch, or CuPy with cupy-cuda12x")
        if device == "cuda" and not torch.cuda.is_available():
            raise ValueError("PyTorch finds no CUDA device")
        self._torch = torch
        self.device = device
        self.weight_dtype: Any = getattr(torch, dtype)
        self.product_dtype: Any = self.weight_dtype
        self.cache_dtype: Any = self.weight_dtype

    def asarray(self, host: np.ndarray, dtype: Any = None) -> Array:
        return self._torch.from_numpy(host).to(self.device, dtype)

    def cast(self, x: Array, dtype: Any) -> Array:
        return x.to(dtype)

    def to_host(self, x: Array) -> np.ndarray:
        host: np.ndarray = x.float().cpu().numpy()
        return host


def load(module: str, what: str, packages: str) -> ModuleType:
    """Import a library that may not be installed, or say how to install it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as missing:
        raise ImportError(f"{what} is not installed; get it with pip install {packages}") from missing


def numpy_dtype(name: str) -> np.dtype:
    if name == "bfloat16":
        ml_dtypes = load("ml_dtypes", "NumPy's bfloat16", "ml_dtypes")
        dtype: np.dtype = np.dtype(ml_dtypes.bfloat16)
        return dtype
    return np.dtype(name)


def make_arrays(library: str, device: str, dtype: str) -> Arrays:
    """Raises ValueError where the three do not go together, ImportError where the library is missing."""
    if device == "cuda" and dtype == "float32":
        raise ValueError("octavo's CUDA kernels take float16 and bfloat16, not float32")
    if library == "numpy" and device == "cuda":
        raise ValueError("NumPy has no CUDA arrays: use torch or cupy")
    if library == "cupy" and device == "cpu":
        raise ValueError("CuPy has no CPU arrays: use numpy or torch")
    if library == "numpy":
        return NumPyArrays(dtype)
    if library == "cupy":
        return CuPyArrays(dtype)
    return TorchArrays(device, dtype)
