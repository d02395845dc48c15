"""Where the operators' tests run: a library, a device and a dtype. The CUDA ones are marked `gpu`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from support.libraries import ArrayLibrary, get_library


@dataclass(frozen=True)
class Target:
    library_name: str
    device: str
    dtype: str

    @property
    def library(self) -> ArrayLibrary:
        return get_library(self.library_name, self.device)

    @property
    def on_cpu(self) -> bool:
        return self.device == "cpu"

    def array(self, values: NDArray) -> Any:
        """Numbers of this target's dtype."""
        return self.library.array(values, self.dtype)

    def int32(self, values: Any) -> Any:
        return self.library.int32(values)

    def nan(self, *shape: int) -> Any:
        return self.array(np.full(shape, np.nan))

    def __str__(self) -> str:
        return f"{self.library_name}_{self.device}_{self.dtype}"


def _parameters(targets: list[Target]) -> list[Any]:
    return [pytest.param(t, id=str(t), marks=() if t.on_cpu else pytest.mark.gpu) for t in targets]


_CPU = [Target("numpy", "cpu", dtype) for dtype in ("float32", "float16", "bfloat16")]
_CUDA = [
    Target(name, "cuda", dtype) for name in ("torch", "cupy", "jax") for dtype in ("float16", "bfloat16")
]

# Decorators: every library; those whose arrays may be written, and sliced without a copy; the CPU alone.
every_target = pytest.mark.parametrize("target", _parameters(_CPU + _CUDA))
writable_target = pytest.mark.parametrize(
    "target", _parameters(_CPU + [t for t in _CUDA if t.library_name != "jax"])
)
cpu_target = pytest.mark.parametrize("target", _parameters(_CPU))
