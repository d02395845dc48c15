"""The words of ``tree_mask``: which of a sequence's newest tokens each of them sees."""

from __future__ import annotations

import math
import sys
from typing import Any

from octavo._cache import library_of
from octavo._cuda_streams import on_stream

_MAX_TOKENS = 64  # the bits of a word


def _namespace(call: str, name: str, array: Any) -> tuple[str, Any]:
    """The library of an array, and the module that has its functions."""
    library = library_of(call, array, name, "a list")
    if library == "torch":
        import torch

        return library, torch
    if library == "jax":
        import jax.numpy

        return library, jax.numpy
    if library == "cupy":
        return library, sys.modules["cupy"]
    import numpy as np

    return library, np


def _as_array(call: str, name: str, given: Any, kind: str) -> Any:
    """An array as it is, and a list as an array of NumPy: an empty one of bool or int, as ``kind`` says."""
    if hasattr(given, "__dlpack__"):
        return given
    import numpy as np

    try:
        array = np.asarray(given)
    except ValueError as error:
        raise ValueError(
            f"{call}: {name} must be an array or a list of {kind}s, rows of one length: {error}"
        ) from None
    return array.astype(kind) if array.size == 0 else array


def _arange(library: str, xp: Any, length: int, like: Any, dtype: Any = None) -> Any:
    on_device = {"device": like.device} if library == "torch" else {}
    return xp.arange(length, dtype=dtype, **on_device)


def _check_axes(call: str, name: str, shape: tuple[int, ...]) -> None:
    if not shape:
        raise ValueError(f"{call}: {name} must have one axis or more; got shape []")
    if shape[-1] > _MAX_TOKENS:
        raise ValueError(
            f"{call}: {name} must speak of at most {_MAX_TOKENS} tokens of a sequence, the bits of a word; "
            f"got {shape[-1]}"
        )


def _check_parents(parents: Any, index: Any) -> None:
    wrong = (parents < -1) | (parents >= index)
    if wrong.any():
        row, token = (int(x[0]) for x in wrong.nonzero())
        raise ValueError(
            f"tree_mask: parents must be -1 or less than their child's index; got {int(parents[row, token])} "
            f"for token {token}"
        )


def pack_tree_mask(mask: Any) -> Any:
    """Pack a mask of bools into the words that ``paged_attention`` takes as ``tree_mask``.

    Args:
        mask: bool [..., n], n at most 64: mask[..., i, j] says whether the i-th of a sequence's newest tokens
            sees the j-th of them. An array of NumPy, PyTorch, JAX or CuPy, or a list. Packed sequences of
            several lengths have rows behind one another, [total_q, n].

    Returns:
        words: of the same library and device, one for each row of mask: int64 [rows]; of JAX uint32
            [rows, 2], lower halves first, since it has 64 bits only where asked to.

    Raises:
        ValueError: more than 64 columns, no axis at all, or lists of several lengths.
        TypeError: not bool, or of another library.
    """
    mask = _as_array("pack_tree_mask", "mask", mask, "bool")
    library, xp = _namespace("pack_tree_mask", "mask", mask)
    if "bool" not in str(mask.dtype):
        raise TypeError(f"pack_tree_mask: mask must be of bool; got {mask.dtype}")
    shape = tuple(mask.shape)
    _check_axes("pack_tree_mask", "mask", shape)
    columns = shape[-1]
    rows = mask.reshape(math.prod(shape[:-1]), columns)
    if library == "jax":
        padded = xp.pad(rows, ((0, 0), (0, _MAX_TOKENS - columns))).reshape(-1, 2, 32)
        bits = padded.astype(xp.uint32) << xp.arange(32, dtype=xp.uint32)[None, None]
        return bits.sum(axis=-1, dtype=xp.uint32)
    bits = rows.to(xp.int64) if library == "torch" else rows.astype(xp.int64)
    return (bits << _arange(library, xp, columns, mask, xp.int64)).sum(-1)


def check_bools(call: str, name: str, mask: Any) -> None:
    """Refuse the shape of a mask that is an argument of a call."""
    shape = list(mask.shape)
    if len(shape) != 2 or shape[1] > _MAX_TOKENS:
        raise ValueError(
            f"{call}: {name} of bool must have shape [total_q, n] with n at most {_MAX_TOKENS}, the bits of "
            f"a word; got {shape}"
        )


def words_of_bools(call: str, name: str, mask: Any, stream: int | None = None) -> Any:
    """What ``pack_tree_mask`` makes of a mask that is an argument of a call.

    It works on the CUDA stream at this address, or on the current one of the mask's library.
    """
    check_bools(call, name, mask)
    library = library_of(call, mask)
    is_on_gpu = library == "cupy" or (library == "torch" and mask.device.type == "cuda")
    with on_stream(library, mask, stream if is_on_gpu else None):
        return pack_tree_mask(mask)


def tree_mask(parents: Any) -> Any:
    """Make the ``tree_mask`` of draft tokens from their parents in the tree (EAGLE, Medusa).

    Each token sees itself and its ancestors. Li et al. 2024 (EAGLE, arXiv:2401.15077); Cai et al. 2024
    (Medusa, arXiv:2401.10774).

    Args:
        parents: int [n] or [..., n], n at most 64: of each of a sequence's newest tokens the index of the one
            that it follows, counted from the first of them and less than its own; -1 where it follows the
            sequence itself. An array of NumPy, PyTorch, JAX or CuPy, or a list.

    Returns:
        words: of the same library and device, one for each token, as ``pack_tree_mask`` returns them.

    Raises:
        ValueError: more than 64 tokens, no axis, lists of several lengths, or, where the values are in host
            memory of NumPy or PyTorch, a parent that is not before its child.
        TypeError: not of integers, or of another library.
    """
    parents = _as_array("tree_mask", "parents", parents, "int")
    library, xp = _namespace("tree_mask", "parents", parents)
    if "int" not in str(parents.dtype):
        raise TypeError(f"tree_mask: parents must be of integers; got {parents.dtype}")
    shape = tuple(parents.shape)
    _check_axes("tree_mask", "parents", shape)
    count, n = math.prod(shape[:-1]), shape[-1]
    rows = parents.reshape(count, n)
    if library == "torch":
        rows = rows.long()
        if rows.device.type == "cpu":
            _check_parents(rows.numpy(), range(n))
    elif library == "numpy":
        _check_parents(rows, range(n))
    index = _arange(library, xp, n, rows, rows.dtype)[None]
    sees = xp.broadcast_to(index[:, :, None] == index[:, None], (count, n, n))
    # In each round a token sees what its ancestor twice as far up sees.
    up, sequence = xp.where(rows < 0, index, rows), _arange(library, xp, count, rows)[:, None]
    for _ in range(max(n - 1, 1).bit_length()):
        sees = sees | sees[sequence, up]
        up = up[sequence, up]
    return pack_tree_mask(sees)
