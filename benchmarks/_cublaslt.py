"""Products by cublasLt's C interface, which can run every algorithm that its heuristic proposes.

PyTorch, whose library this is, runs the first one alone. The numbers are those of cublasLt.h.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import byref, c_float, c_int, c_int32, c_int64, c_size_t, c_uint64, c_void_p
from functools import partial

import torch
from torch import Tensor

MOST_ALGORITHMS = 8
WORKSPACE_BYTES = 64 << 20

_DATA_TYPES = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14}  # CUDA_R_...
_COMPUTE_32F = 68
_DESC_TRANSA = 3
_OP_T = 1
_PREF_MAX_WORKSPACE_BYTES = 1


class Algorithm(ctypes.Structure):
    """cublasLtMatmulAlgo_t"""

    _fields_ = (("data", c_uint64 * 8),)


class _HeuristicResult(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t"""

    _fields_ = (
        ("algorithm", Algorithm),
        ("workspace_size", c_size_t),
        ("state", c_int),
        ("waves_count", c_float),
        ("reserved", c_int * 4),
    )


_ARGUMENTS = {
    "cublasLtCreate": (c_void_p,),
    "cublasLtMatmulDescCreate": (c_void_p, c_int, c_int),
    "cublasLtMatmulDescSetAttribute": (c_void_p, c_int, c_void_p, c_size_t),
    "cublasLtMatrixLayoutCreate": (c_void_p, c_int, c_uint64, c_uint64, c_int64),
    "cublasLtMatmulPreferenceCreate": (c_void_p,),
    "cublasLtMatmulPreferenceSetAttribute": (c_void_p, c_int, c_void_p, c_size_t),
    # handle, operation, layouts of a, b, c and d, preference, number wanted, results, number found
    "cublasLtMatmulAlgoGetHeuristic": (*(c_void_p,) * 7, c_int, c_void_p, c_void_p),
    # handle, operation, alpha, a and its layout, b and its layout, beta, c and d with theirs, algorithm,
    # workspace and its size, stream
    "cublasLtMatmul": (*(c_void_p,) * 14, c_size_t, c_void_p),
}


class CublasLt:
    """The library that PyTorch has loaded; OSError where there is none. What it creates stays."""

    def __init__(self) -> None:
        major = str(torch.version.cuda).partition(".")[0]
        library = ctypes.CDLL(f"libcublasLt.so.{major}")
        self._functions = {}
        for name, arguments in _ARGUMENTS.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, c_int
            self._functions[name] = function
        self._handle, self._operation, self._preference = c_void_p(), c_void_p(), c_void_p()
        self._call("cublasLtCreate", byref(self._handle))
        self._call(
            "cublasLtMatmulDescCreate", byref(self._operation), _COMPUTE_32F, _DATA_TYPES[torch.float32]
        )
        transposed = c_int32(_OP_T)
        self._call("cublasLtMatmulDescSetAttribute", self._operation, _DESC_TRANSA, byref(transposed), 4)
        self._call("cublasLtMatmulPreferenceCreate", byref(self._preference))
        size = c_size_t(WORKSPACE_BYTES)
        self._call(
            "cublasLtMatmulPreferenceSetAttribute",
            self._preference,
            _PREF_MAX_WORKSPACE_BYTES,
            byref(size),
            ctypes.sizeof(size),
        )
        # Its products run one after the other on one stream, and share it.
        self._workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
        self._one, self._zero = c_float(1.0), c_float(0.0)

    def _call(self, name: str, *arguments: object) -> None:
        status = self._functions[name](*arguments)
        if status != 0:
            raise RuntimeError(f"{name} returned status {status}")

    def _layout(self, matrix: Tensor) -> c_void_p:
        """A matrix by rows is one by columns to cublasLt, transposed."""
        rows, columns = matrix.shape
        assert matrix.stride(1) == 1, matrix.stride()
        layout = c_void_p()
        data_type = _DATA_TYPES[matrix.dtype]
        self._call("cublasLtMatrixLayoutCreate", byref(layout), data_type, columns, rows, matrix.stride(0))
        return layout

    def algorithms(self, x: Tensor, w: Tensor, out: Tensor) -> list[Algorithm]:
        """What the heuristic proposes for out = x @ w.T, the best one first."""
        found, results = c_int(), (_HeuristicResult * MOST_ALGORITHMS)()
        w_layout, x_layout, out_layout = map(self._layout, (w, x, out))
        self._call(
            "cublasLtMatmulAlgoGetHeuristic",
            self._handle,
            self._operation,
            w_layout,
            x_layout,
            out_layout,
            out_layout,
            self._preference,
            MOST_ALGORITHMS,
            results,
            byref(found),
        )
        return [result.algorithm for result in results[: found.value] if result.state == 0]

    def product(self, x: Tensor, w: Tensor, out: Tensor, algorithm: Algorithm) -> Callable[[], Tensor]:
        """A call that computes out = x @ w.T: by columns, its transpose is that of w by columns, times x."""
        return partial(self._multiply, x, w, out, *map(self._layout, (x, w, out)), algorithm)

    def _multiply(
        self,
        x: Tensor,
        w: Tensor,
        out: Tensor,
        x_layout: c_void_p,
        w_layout: c_void_p,
        out_layout: c_void_p,
        algorithm: Algorithm,
    ) -> Tensor:
        to = (out.data_ptr(), out_layout)
        self._call(
            "cublasLtMatmul",
            self._handle,
            self._operation,
            byref(self._one),
            w.data_ptr(),
            w_layout,
            x.data_ptr(),
            x_layout,
            byref(self._zero),
            *to,
            *to,
            byref(algorithm),
            self._workspace.data_ptr(),
            WORKSPACE_BYTES,
            torch.cuda.current_stream().cuda_stream,
        )
        return out
