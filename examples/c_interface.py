"""Octavo's C interface (include/octavo/octavo.h) through ctypes: what a Rust, Go or Zig binding would do.

    python examples/c_interface.py

Two samples share a prompt's pages; each gets a token of its own, and attends. No function of octavo's Python
package takes part: only the library inside it, found by its file's name. The structs are read from the
header, as by Rust's bindgen and Zig's @cImport.
"""

from __future__ import annotations

import ctypes
import re
from ctypes import (
    POINTER,
    Structure,
    byref,
    c_char_p,
    c_double,
    c_float,
    c_int32,
    c_int64,
    c_size_t,
    c_uint64,
    c_void_p,
)
from pathlib import Path
from typing import Any

import numpy as np

import octavo

DTYPES = {"float32": 0, "float16": 1, "int32": 3, "int8": 4, "uint8": 7, "int64": 9}
INT4 = 8  # what kv_dtype says of pages of uint8


def read_header() -> str:
    """octavo.h, which the installed package carries, or this checkout, without its comments."""
    for folder in (Path(octavo._core.__file__).parent, Path(__file__).resolve().parents[1]):
        header = folder / "include" / "octavo" / "octavo.h"
        if header.exists():
            return re.sub(r"/\*.*?\*/", "", header.read_text(), flags=re.DOTALL)
    raise FileNotFoundError("octavo.h is neither in the package nor beside this example")


HEADER = read_header()
C_TYPES: dict[str, Any] = {
    "double": c_double,
    "float": c_float,
    "int32_t": c_int32,
    "int64_t": c_int64,
    "int64_t*": POINTER(c_int64),
    "size_t": c_size_t,
    "void*": c_void_p,
}


def fields_of(struct: str) -> list[tuple[str, Any]]:
    """The fields of a struct as the header declares them."""
    body = re.search(rf"typedef struct {struct} {{(.*?)}}", HEADER, re.DOTALL)[1]
    declarations = re.findall(r"(?:const )?([\w*]+) ([\w,\s]+);", body)
    return [(name, C_TYPES[kind]) for kind, names in declarations for name in re.findall(r"\w+", names)]


class Tensor(Structure):
    _fields_ = fields_of("octavo_tensor")

    @classmethod
    def of(cls, array: np.ndarray) -> Tensor:
        """Borrow an array. The struct keeps its shape and strides alive, not the array."""
        shape = (c_int64 * array.ndim)(*array.shape)
        strides = (c_int64 * array.ndim)(*(stride // array.itemsize for stride in array.strides))
        return cls(array.ctypes.data, shape, strides, array.ndim, DTYPES[array.dtype.name], 0, 0)


C_TYPES["octavo_tensor"] = Tensor


class AttentionArgs(Structure):
    _fields_ = fields_of("octavo_attention_args")


class PagedAttentionArgs(Structure):
    _fields_ = fields_of("octavo_paged_attention_args")


class AppendKvArgs(Structure):
    _fields_ = fields_of("octavo_append_kv_args")


class CopyPagesArgs(Structure):
    _fields_ = fields_of("octavo_copy_pages_args")


class AttentionBackwardArgs(Structure):
    _fields_ = fields_of("octavo_attention_backward_args")


class LinearArgs(Structure):
    _fields_ = fields_of("octavo_linear_args")


class RmsNormArgs(Structure):
    _fields_ = fields_of("octavo_rms_norm_args")


class LatentAttentionArgs(Structure):
    _fields_ = fields_of("octavo_latent_attention_args")


class OctavoError(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Library:
    """The functions of the header that give a status, which raise what it says."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(octavo._core.__file__)
        self._library.octavo_last_error.restype = c_char_p
        self._library.octavo_version.restype = c_char_p
        self._library.octavo_page_allocator_num_free_pages.restype = c_int64
        self.version = self._library.octavo_version().decode()

    def call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, f"octavo_{name}")(*arguments)
        if status:
            raise OctavoError(status, self._library.octavo_last_error().decode())

    def run(self, name: str, args_type: type[Structure], **arguments: Any) -> None:
        """Call an operator that takes a struct; arrays become tensors."""
        args = args_type()
        self.call(f"{name}_args_init", byref(args))
        for key, value in arguments.items():
            setattr(args, key, Tensor.of(value) if isinstance(value, np.ndarray) else value)
        self.call(name, byref(args))

    def attention(self, **arguments: Any) -> None:
        self.run("attention", AttentionArgs, **arguments)

    def attention_backward(self, **arguments: Any) -> None:
        self.run("attention_backward", AttentionBackwardArgs, **arguments)

    def paged_attention(self, **arguments: Any) -> None:
        self.run("paged_attention", PagedAttentionArgs, **arguments)

    def append_kv(self, **arguments: Any) -> None:
        self.run("append_kv", AppendKvArgs, **arguments)

    def copy_pages(self, **arguments: Any) -> None:
        self.run("copy_pages", CopyPagesArgs, **arguments)

    def linear(self, **arguments: Any) -> None:
        self.run("linear", LinearArgs, **arguments)

    def rms_norm(self, **arguments: Any) -> None:
        self.run("rms_norm", RmsNormArgs, **arguments)

    def latent_attention(self, **arguments: Any) -> None:
        self.run("latent_attention", LatentAttentionArgs, **arguments)


class PageAllocator:
    def __init__(self, library: Library, num_pages: int, page_size: int) -> None:
        self._library = library
        self._self = c_void_p()
        library.call("page_allocator_new", c_int64(num_pages), c_int64(page_size), byref(self._self))

    def _call(self, name: str, *arguments: Any) -> None:
        self._library.call(f"page_allocator_{name}", self._self, *arguments)

    def delete(self) -> None:
        self._library._library.octavo_page_allocator_delete(self._self)
        self._self = c_void_p()

    def create(self) -> int:
        sequence = c_uint64()
        self._call("create", byref(sequence))
        return sequence.value

    def extend(self, sequence: int, n: int) -> None:
        self._call("extend", c_uint64(sequence), c_int64(n))

    def fork(self, sequence: int, n: int) -> list[int]:
        forks = (c_uint64 * n)()
        self._call("fork", c_uint64(sequence), c_int64(n), forks)
        return list(forks)

    def truncate(self, sequence: int, length: int) -> None:
        self._call("truncate", c_uint64(sequence), c_int64(length))

    def free(self, sequence: int) -> None:
        self._call("free", c_uint64(sequence))

    def length(self, sequence: int) -> int:
        length = c_int64()
        self._call("length", c_uint64(sequence), byref(length))
        return length.value

    def page_table(self, sequences: list[int]) -> tuple[np.ndarray, np.ndarray]:
        handles, count = (c_uint64 * len(sequences))(*sequences), c_int64(len(sequences))
        columns = c_int64()
        self._call("max_pages", handles, count, byref(columns))
        table = np.empty((len(sequences), columns.value), np.int32)
        lengths = np.empty(len(sequences), np.int32)
        data = c_void_p(table.ctypes.data), columns, c_void_p(lengths.ctypes.data)
        self._call("page_table", handles, count, *data)
        return table, lengths

    def shared_prefix_len(self, sequences: list[int], num_queries: int = 1) -> int:
        handles, length = (c_uint64 * len(sequences))(*sequences), c_int64()
        self._call("shared_prefix_len", handles, c_int64(len(sequences)), c_int64(num_queries), byref(length))
        return length.value

    def take_copies(self) -> np.ndarray:
        copies, count = POINTER(c_int32)(), c_int64()
        self._call("take_copies", byref(copies), byref(count))
        return np.array(copies[: 2 * count.value], np.int32).reshape(-1, 2)

    def num_free_pages(self) -> int:
        return self._library._library.octavo_page_allocator_num_free_pages(self._self)


def decode(library: Library, k: np.ndarray, v: np.ndarray, q: np.ndarray, page_size: int = 16) -> np.ndarray:
    """Two samples of one prompt. k and v: the prompt's tokens, then one for each sample; q: one a sample."""
    num_pages, prompt_len = 8, len(k) - 2
    allocator = PageAllocator(library, num_pages, page_size)
    k_pages, v_pages = np.zeros((2, num_pages, page_size, *k.shape[1:]), k.dtype)
    cache = {"k_pages": k_pages, "v_pages": v_pages}

    prompt = allocator.create()
    allocator.extend(prompt, prompt_len)
    page_table, seq_lens = allocator.page_table([prompt])
    rows = {"page_table": page_table, "seq_lens": seq_lens}
    cu_seqlens = np.array([0, prompt_len], np.int32)
    library.append_kv(k=k[:prompt_len], v=v[:prompt_len], cu_seqlens=cu_seqlens, **cache, **rows)

    samples = [prompt, *allocator.fork(prompt, 1)]
    for sample in samples:
        allocator.extend(sample, 1)
    copies = allocator.take_copies()  # the last page, which both would write to
    library.copy_pages(copies=copies, **cache)
    page_table, seq_lens = allocator.page_table(samples)
    rows = {"page_table": page_table, "seq_lens": seq_lens}
    library.append_kv(k=k[prompt_len:], v=v[prompt_len:], **cache, **rows)
    out = np.empty_like(q)
    library.paged_attention(q=q, out=out, **cache, **rows)
    allocator.delete()
    return out


def main() -> None:
    library = Library()
    rng = np.random.default_rng(0)
    k, v = rng.standard_normal((2, 22, 2, 64), np.float32)
    out = decode(library, k, v, rng.standard_normal((2, 8, 64), np.float32))
    print(f"octavo {library.version}: {out.shape[0]} samples, out[0, 0, :4] = {out[0, 0, :4]}")


if __name__ == "__main__":
    main()
