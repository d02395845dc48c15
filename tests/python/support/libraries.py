"""One face for the array libraries that the operators take, so that one test serves all."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from support.oracle import NUMPY_DTYPES


class ArrayLibrary(ABC):
    """Makes a library's arrays from NumPy's, and reads them back."""

    name: str
    device: str  # "cpu" or "cuda"
    array_type: type
    writable = True  # whether an operator may write into the library's arrays
    has_views = True  # whether slices and transposes share memory

    @abstractmethod
    def from_numpy(self, values: NDArray) -> Any:
        """A contiguous copy with the same dtype."""

    @abstractmethod
    def to_numpy(self, array: Any) -> NDArray:
        """A copy with the same dtype, once the array is ready."""

    @abstractmethod
    def swap_axes(self, array: Any, a: int, b: int) -> Any: ...

    def array(self, values: NDArray, dtype: str) -> Any:
        """Numbers of the float `dtype`."""
        return self.from_numpy(np.asarray(values).astype(np.float32).astype(NUMPY_DTYPES[dtype]))

    def int32(self, values: Any) -> Any:
        return self.from_numpy(np.asarray(values, np.int32))

    def float32(self, values: Any) -> Any:
        return self.from_numpy(np.asarray(values, np.float32))

    def boolean(self, values: Any) -> Any:
        return self.from_numpy(np.asarray(values, np.bool_))

    def to_float64(self, array: Any) -> NDArray[np.float64]:
        """Exact: results with the same bits, and only those, have the same float64 bits (but for NaNs)."""
        return self.to_numpy(array).astype(np.float64)


class NumPy(ArrayLibrary):
    name = "numpy"
    device = "cpu"
    array_type = np.ndarray

    def from_numpy(self, values: NDArray) -> Any:
        return np.array(values, order="C")

    def to_numpy(self, array: Any) -> NDArray:
        return np.array(array)

    def swap_axes(self, array: Any, a: int, b: int) -> Any:
        return array.swapaxes(a, b)


class Torch(ArrayLibrary):
    name = "torch"

    def __init__(self, device: str, index: int = 0) -> None:
        import torch

        self.torch = torch
        self.device = device
        self.torch_device = torch.device(device, index)  # JAX may make another GPU the current one
        self.array_type = torch.Tensor

    def from_numpy(self, values: NDArray) -> Any:
        values = np.array(values, order="C")
        if values.dtype == NUMPY_DTYPES["bfloat16"]:
            return (
                self.torch.from_numpy(values.view(np.int16)).view(self.torch.bfloat16).to(self.torch_device)
            )
        return self.torch.from_numpy(values).to(self.torch_device)

    def to_numpy(self, array: Any) -> NDArray:
        array = array.detach().cpu()
        if array.dtype == self.torch.bfloat16:
            return array.contiguous().view(self.torch.int16).numpy().view(NUMPY_DTYPES["bfloat16"]).copy()
        return array.numpy().copy()

    def swap_axes(self, array: Any, a: int, b: int) -> Any:
        return array.transpose(a, b)


class CuPy(ArrayLibrary):
    name = "cupy"
    device = "cuda"

    def __init__(self) -> None:
        import cupy

        self.cupy = cupy
        self.array_type = cupy.ndarray

    def from_numpy(self, values: NDArray) -> Any:
        with self.cupy.cuda.Device(0):
            return self.cupy.asarray(np.array(values, order="C"))

    def to_numpy(self, array: Any) -> NDArray:
        return self.cupy.asnumpy(array)

    def swap_axes(self, array: Any, a: int, b: int) -> Any:
        return array.swapaxes(a, b)


class Jax(ArrayLibrary):
    name = "jax"
    writable = False
    has_views = False

    def __init__(self, device: str) -> None:
        import jax

        self.jax = jax
        self.device = device
        self.array_type = jax.Array
        self.jax_device = jax.devices(device)[0]

    def from_numpy(self, values: NDArray) -> Any:
        return self.jax.device_put(np.array(values, order="C"), self.jax_device)

    def to_numpy(self, array: Any) -> NDArray:
        return np.array(array)

    def swap_axes(self, array: Any, a: int, b: int) -> Any:
        return array.swapaxes(a, b)


@functools.cache
def get_library(name: str, device: str) -> ArrayLibrary:
    """ImportError if the library is not installed."""
    if name == "numpy":
        return NumPy()
    if name == "cupy":
        return CuPy()
    return {"torch": Torch, "jax": Jax}[name](device)
