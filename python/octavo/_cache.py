"""A KV cache for one layer, in the layout that the kernels read fastest."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple

_FLOATS = ("float32", "float16", "bfloat16")
_FLOAT8 = ("float8_e4m3fn", "float8_e5m2")
# What keys and values hold, by the name of the cache's dtype.
_KINDS = {**{x: (x, x) for x in (*_FLOATS, "int8", *_FLOAT8, "int4")}, "int8_int4": ("int8", "int4")}


# Bytes of a number, and of the scales of a token and KV head.
_NUMBER_BYTES = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int8": 1,
    **dict.fromkeys(_FLOAT8, 1),
    "int4": 0.5,
}
_SCALE_BYTES = 4

_ARRAYS_OF_PAGES = ("k_pages", "v_pages", "k_scales", "v_scales")


class PagedCache(NamedTuple):
    """What ``empty_cache`` returns: the arrays of one layer's cache, by their names in the operators.

    ``append_kv(k, v, page_table=..., seq_lens=..., **cache.arguments)`` and ``paged_attention`` take all
    of it, as ``copy_pages(copies=..., **cache.arrays)`` does. ``**a.arrays, **b.to_arrays`` copies from one
    cache to another. In JAX programs, where arrays are values, ``cache._replace(...)`` makes the next one;
    such a program takes and returns the whole cache once ``octavo.jax`` is imported.
    """

    k_pages: Any
    """The keys: [num_pages, page_size, num_kv_heads, head_dim]; for int4 the last axis is head_dim / 2."""
    v_pages: Any
    """The values: likewise, with a head_dim of their own."""
    k_scales: Any = None
    """The scales of each token and KV head, in the shape of the pages without the last axis; int4 has two."""
    v_scales: Any = None
    """The same for v_pages."""
    kv_dtype: str | None = None
    """What pages of uint8 hold. None for other pages."""
    k_channel_offset: Any = None
    """What is subtracted from keys before they become codes: float32 [num_kv_heads, head_dim], or None."""
    k_channel_scale: Any = None
    """What they are divided by next, of the same dtype and shape, or None."""
    rotate_keys: bool = False
    """Whether they are rotated last."""

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of ``append_kv`` and ``paged_attention`` that the cache has."""
        return {name: x for name, x in self._asdict().items() if x is not None and x is not False}

    @property
    def arrays(self) -> dict[str, Any]:
        """The arguments of ``copy_pages`` that the cache has."""
        return {name: x for name, x in self.arguments.items() if name in _ARRAYS_OF_PAGES}

    @property
    def to_arrays(self) -> dict[str, Any]:
        """The arguments of ``copy_pages`` that the cache has as the one to which pages are copied."""
        return {f"to_{name}": value for name, value in self.arrays.items()}

    @property
    def bytes_per_token(self) -> int:
        """Bytes of memory that a token takes: its keys and values, and their scales."""
        return sum(prod(x.shape[2:]) * x.dtype.itemsize for x in self.arrays.values())


def _numpy_dtype(name: str) -> Any:
    import numpy as np

    if name in ("bfloat16", *_FLOAT8):
        import ml_dtypes  # which adds them to NumPy

        return np.dtype(getattr(ml_dtypes, name))
    return np.dtype(name)


def _maker(
    call: str, like: Any, name: str = "like", or_else: str = "None"
) -> tuple[str, Callable[[tuple[int, ...], str], Any]]:
    """The library of an array, and what makes its arrays, in C order, on the same device.

    Messages have the name of the argument, and what else than an array it may be.
    """

    def is_of(module: str, name: str) -> bool:
        loaded = sys.modules.get(module)
        return loaded is not None and isinstance(like, getattr(loaded, name))

    if like is None or is_of("numpy", "ndarray"):
        import numpy as np

        return "numpy", lambda shape, dtype: np.empty(shape, _numpy_dtype(dtype))
    if is_of("torch", "Tensor"):
        import torch

        return "torch", lambda shape, dtype: torch.empty(
            shape, dtype=getattr(torch, dtype), device=like.device
        )
    if is_of("cupy", "ndarray"):
        cupy = sys.modules["cupy"]

        def make(shape: tuple[int, ...], dtype: str) -> Any:
            with like.device:
                return cupy.empty(shape, _numpy_dtype(dtype))

        return "cupy", make
    if is_of("jax", "Array"):
        import jax

        def zeros(shape: tuple[int, ...], dtype: str) -> Any:
            is_traced = isinstance(like, jax.core.Tracer)
            return jax.numpy.zeros(shape, dtype, device=None if is_traced else like.sharding)

        return "jax", zeros
    raise TypeError(
        f"{call}: {name} must be an array of NumPy, PyTorch, CuPy or JAX, or {or_else}; "
        f"got {type(like).__name__}"
    )


def library_of(call: str, like: Any, name: str = "like", or_else: str = "None") -> str:
    """Return "numpy", also for None, "torch", "cupy" or "jax"."""
    return _maker(call, like, name, or_else)[0]


def int_argument(call: str, name: str, number: object) -> int:
    """What a call of Python's own makes of an argument that has to be an int."""
    try:
        return int(operator.index(number))  # type: ignore[arg-type]  # of True, too, it makes a plain int
    except TypeError:
        raise TypeError(f"{call}: {name} must be an int; got {type(number).__name__}") from None


def _bool_argument(call: str, name: str, value: object) -> bool:
    """True or False, which may be NumPy's."""
    kind = type(value)
    if kind is bool or (kind.__module__ == "numpy" and kind.__name__ in ("bool", "bool_")):
        return bool(value)
    raise TypeError(f"{call}: {name} must be a bool; got {kind.__name__}")


def _name_of(dtype: Any) -> str:
    name = dtype if isinstance(dtype, str) else getattr(dtype, "name", getattr(dtype, "__name__", str(dtype)))
    return str(name).removeprefix("torch.")


def _kind_of(call: str, dtype: Any, head_dims: tuple[int, int], token_scales: bool) -> str:
    """The name of a cache's dtype; refuses what there is no cache of."""
    kind = _name_of(dtype)
    if kind not in _KINDS:
        raise ValueError(f"{call}: dtype must be one of {', '.join(_KINDS)}; got {kind}")
    has_int4 = "int4" in _KINDS[kind]
    for name, head_dim, stored in zip(("head_dim", "head_dim_v"), head_dims, _KINDS[kind], strict=True):
        if stored == "int4" and head_dim % 2 != 0:
            if head_dims[0] == head_dims[1]:
                name = "head_dim"
            raise ValueError(f"{call}: {name} ({head_dim}) must be even for int4, two numbers in a byte")
    if has_int4 and not token_scales:
        raise ValueError(f"{call}: token_scales must be True for int4, whose scales are those of tokens")
    return kind


def bytes_per_token(
    call: str, num_kv_heads: int, head_dim: int, dtype: Any, token_scales: bool, head_dim_v: int | None = None
) -> int:
    """What a token takes in a cache of empty_cache (PagedCache.bytes_per_token), without making one."""
    head_dims = head_dim, head_dim if head_dim_v is None else head_dim_v
    kind = _kind_of(call, dtype, head_dims, token_scales)
    scale_bytes = _SCALE_BYTES if token_scales and kind not in _FLOATS else 0
    rows = zip(head_dims, _KINDS[kind], strict=True)
    return sum(num_kv_heads * (int(length * _NUMBER_BYTES[stored]) + scale_bytes) for length, stored in rows)


def empty_cache(
    num_pages: int,
    page_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: Any,
    *,
    like: Any = None,
    token_scales: bool = True,
    k_channel_offset: Any = None,
    k_channel_scale: Any = None,
    rotate_keys: bool = False,
    head_dim_v: int | None = None,
) -> PagedCache:
    """Make the arrays of a KV cache for one layer, with no tokens in it.

    In memory the heads come before the slots of a page, which is what the kernels read fastest, most so where
    a row of a head is short: int4, or 8 bits and a small head_dim. The arrays are views of that memory in the
    shapes that the operators take. Floats on the CPU, which reads those of all heads of a token in a row, lie
    as their shapes say, and so do JAX's arrays, which have no such views.

    Args:
        num_pages: pages in the cache.
        page_size: tokens in a page.
        num_kv_heads: heads of keys and values.
        head_dim: of a head; even for int4.
        dtype: "float32", "float16", "bfloat16", "int8", "float8_e4m3fn", "float8_e5m2" or "int4", or
            "int8_int4": keys of int8 and values of int4, which keeps nearly the accuracy of int8. The dtypes
            of array libraries are taken as well.
        like: an array whose library and device the cache is to have, of NumPy, PyTorch, CuPy or JAX, such as
            the keys that will be appended. Default: NumPy.
        token_scales: whether codes of 8 bits get scales of each token and KV head, which ``append_kv``
            computes. Without them, pass k_scale and v_scale to the operators. int4 always has them, and
            caches of floats never. Default: True.
        k_channel_offset: for codes: float32 [num_kv_heads, head_dim], subtracted from keys, as ``append_kv``
            says; the cache passes it on to the operators. Default: none.
        k_channel_scale: for codes: what keys are divided by, of the same dtype and shape; at least 2^-126.
            Queries are multiplied by it, and those of float16 must be at most 65504 in magnitude then,
            as ``paged_attention`` says. Default: none.
        rotate_keys: for codes: whether keys are rotated. Default: False.
        head_dim_v: the head_dim of values, where it is another. Default: head_dim.

    Returns:
        cache: with pages that hold anything (JAX: zeros).

    Raises:
        ValueError: a number below what makes sense, an odd head_dim for int4, an unknown dtype, an offset,
            scale or rotation of keys for floats.
        TypeError: a number that is no int, a flag that is no bool, `like` is not an array of these libraries.
    """
    numbers = {
        "num_pages": num_pages,
        "page_size": page_size,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "head_dim_v": head_dim if head_dim_v is None else head_dim_v,
    }
    for name, given in numbers.items():
        numbers[name] = int_argument("empty_cache", name, given)
        least = 0 if name == "num_pages" else 1
        if numbers[name] < least:
            raise ValueError(f"empty_cache: {name} ({given}) must be at least {least}")
    num_pages, page_size, num_kv_heads, *_ = numbers.values()
    head_dims = numbers["head_dim"], numbers["head_dim_v"]
    token_scales = _bool_argument("empty_cache", "token_scales", token_scales)
    kind = _kind_of("empty_cache", dtype, head_dims, token_scales)
    transform: dict[str, Any] = {
        "k_channel_offset": k_channel_offset,
        "k_channel_scale": k_channel_scale,
        "rotate_keys": _bool_argument("empty_cache", "rotate_keys", rotate_keys),
    }
    for name, value in transform.items():
        if kind in _FLOATS and value is not None and value is not False:
            raise ValueError(f"empty_cache: {name} belongs to codes of 8 or 4 bits; dtype is {kind}")
    library, make = _maker("empty_cache", like)
    is_on_cpu = library == "numpy" or (library == "torch" and like.device.type == "cpu")
    has_tokens_first = library == "jax" or (kind in _FLOATS and is_on_cpu)

    def make_views(row: tuple[int, ...], dtype: str) -> Any:
        if has_tokens_first:
            return make((num_pages, page_size, num_kv_heads, *row), dtype)
        array = make((num_pages, num_kv_heads, page_size, *row), dtype)
        return array.transpose(1, 2) if library == "torch" else array.swapaxes(1, 2)

    kv_dtype = "int4" if "int4" in _KINDS[kind] else None
    pages = []
    for length, stored in zip(head_dims, _KINDS[kind], strict=True):
        element = "uint8" if stored == "int4" else stored
        if library == "cupy" and stored in _FLOAT8:  # which CuPy lacks
            element, kv_dtype = "uint8", stored
        pages.append(make_views((length // 2 if stored == "int4" else length,), element))
    k_pages, v_pages = pages
    if kind in _FLOATS or not token_scales:
        return PagedCache(k_pages, v_pages, kv_dtype=kv_dtype, **transform)
    k_scales, v_scales = [
        make_views((2,), "float16") if stored == "int4" else make_views((), "float32")
        for stored in _KINDS[kind]
    ]
    return PagedCache(k_pages, v_pages, k_scales, v_scales, kv_dtype, **transform)
