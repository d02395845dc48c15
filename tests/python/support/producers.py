"""Arrays that lend themselves through hand-made DLPack: every variant that no real library offers."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

READ_ONLY, COPIED = 1, 2
_CODES = {"i": 0, "u": 1, "f": 2}


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _Managed(ctypes.Structure):
    _fields_ = [("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


class _ManagedVersioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    ]


class _Exchange(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("previous", ctypes.c_void_p),
        ("allocate", ctypes.c_void_p),
        ("managed_tensor_from_object", ctypes.c_void_p),
        ("managed_tensor_to_object", ctypes.c_void_p),
        ("tensor_from_object", ctypes.c_void_p),
        ("current_stream", ctypes.c_void_p),
    ]


_Lend = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(ctypes.c_void_p))
_SayStream = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int32, ctypes.c_int32, ctypes.POINTER(ctypes.c_void_p))
_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.restype = ctypes.c_void_p
_pointer_of.argtypes = [ctypes.py_object, ctypes.c_char_p]
_rename = ctypes.pythonapi.PyCapsule_SetName
_rename.argtypes = [ctypes.py_object, ctypes.c_char_p]
_USED = b"used_dltensor_versioned"


@dataclass
class Producer:
    """Lends `values`; whatever is set here overrules what they are."""

    values: NDArray
    versioned: bool = True
    version: tuple[int, int] = (1, 0)
    flags: int = 0
    device: tuple[int, int] = (1, 0)
    tensor_device: tuple[int, int] | None = None  # default: device
    code: int | None = None
    bits: int | None = None
    lanes: int = 1
    ndim: int | None = None
    with_strides: bool = True
    with_data: bool = True
    byte_offset: int = 0
    keywords: tuple[str, ...] = ("stream", "max_version", "dl_device", "copy")
    error: BaseException | None = None
    device_error: BaseException | None = None
    result: Any = None  # returned instead of a capsule

    requests: list[dict[str, Any]] = field(default_factory=list)
    lent: int = 0
    given_back: int = 0
    _kept: list[Any] = field(default_factory=list)

    def __dlpack_device__(self) -> tuple[int, int]:
        if self.device_error:
            raise self.device_error
        return self.device

    def __dlpack__(self, **keywords: Any) -> Any:
        self.requests.append(keywords)
        if unknown := set(keywords) - set(self.keywords):
            raise TypeError(f"__dlpack__() got an unexpected keyword argument {unknown.pop()!r}")
        if self.error:
            raise self.error
        if self.result is not None:
            return self.result
        managed = _ManagedVersioned() if self.versioned else _Managed()
        if self.versioned:
            managed.major, managed.minor = self.version
            managed.flags = self.flags
        tensor, values = managed.tensor, self.values
        tensor.data = values.ctypes.data - self.byte_offset if self.with_data else None
        tensor.device_type, tensor.device_id = self.tensor_device or self.device
        tensor.ndim = values.ndim if self.ndim is None else self.ndim
        tensor.code = _CODES[values.dtype.kind] if self.code is None else self.code
        tensor.bits = values.itemsize * 8 if self.bits is None else self.bits
        tensor.lanes = self.lanes
        shape = (ctypes.c_int64 * max(tensor.ndim, values.ndim))(*values.shape)
        strides = (ctypes.c_int64 * max(tensor.ndim, values.ndim))(
            *(s // values.itemsize for s in values.strides)
        )
        tensor.shape = shape
        if self.with_strides:
            tensor.strides = strides
        tensor.byte_offset = self.byte_offset
        deleter = _Deleter(self._give_back)
        managed.deleter = ctypes.cast(deleter, ctypes.c_void_p)
        self._kept += [managed, shape, strides, deleter]
        self.lent += 1
        name = b"dltensor_versioned" if self.versioned else b"dltensor"
        return _new_capsule(ctypes.addressof(managed), name, None)

    def _give_back(self, _: int) -> None:
        self.given_back += 1


class NamespacedProducer(Producer):
    """With a standard namespace, so that results of its kind can be made."""

    def __array_namespace__(self) -> Any:
        return np


class ExchangeTable:
    """DLPack's table of functions, of a library whose arrays have ``__dlpack__`` and whose stream is this.

    Its capsule is what the library's type has as ``__dlpack_c_exchange_api__``; the table has to outlive it.
    """

    def __init__(self, stream: int = 0) -> None:
        def lend(array: Any, tensor: Any) -> int:
            capsule = array.__dlpack__(max_version=(1, 3), stream=None)
            tensor[0] = _pointer_of(capsule, b"dltensor_versioned")
            _rename(capsule, _USED)
            return 0

        def say_stream(_: int, __: int, current: Any) -> int:
            current[0] = stream
            return 0

        self._functions = _Lend(lend), _SayStream(say_stream)
        lending, saying = (ctypes.cast(x, ctypes.c_void_p) for x in self._functions)
        # The functions that make arrays are not called for these types.
        self._table = _Exchange(1, 3, None, lending, lending, lending, None, saying)
        self.capsule = _new_capsule(ctypes.addressof(self._table), b"dlpack_exchange_api", None)
