"""Calls to be refused: a right call of each operator, what replaces what in it, and what stays as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import octavo

Arguments = dict[str, Any]
MAX_LENGTH = 2**30


def f32(*shape: int) -> NDArray[np.float32]:
    return np.ones(shape, np.float32)


def i32(values: Any) -> NDArray[np.int32]:
    return np.array(values, np.int32)


def broadcast(shape: tuple[int, ...], dtype: Any = np.float32) -> NDArray:
    """One element, over and over: for shapes that memory could not hold."""
    return np.broadcast_to(np.zeros((), dtype), shape)


def long(*shape: int) -> NDArray[np.float32]:
    """As broadcast(), with a unit last stride."""
    return np.broadcast_to(f32(shape[-1]), shape)


_MEMORY = np.ones(400, np.float32)


def memory(begin: int, *shape: int) -> NDArray[np.float32]:
    """Elements of one and the same memory, from `begin` on."""
    return _MEMORY[begin : begin + int(np.prod(shape))].reshape(shape)


def dense() -> Arguments:
    return {"q": f32(2, 3, 4, 8), "k": f32(2, 5, 2, 8), "v": f32(2, 5, 2, 8)}


def packed() -> Arguments:
    return {
        "q": f32(3, 4, 8),
        "k": f32(5, 2, 8),
        "v": f32(5, 2, 8),
        "cu_seqlens_q": i32([0, 1, 3]),
        "cu_seqlens_k": i32([0, 2, 5]),
    }


def paged() -> Arguments:
    return {
        "q": f32(2, 4, 8),
        "k_pages": f32(3, 4, 2, 8),
        "v_pages": f32(3, 4, 2, 8),
        "page_table": i32([[2, 1], [0, -1]]),
        "seq_lens": i32([5, 1]),
    }


def append() -> Arguments:
    return {
        "k": f32(2, 2, 8),
        "v": f32(2, 2, 8),
        "k_pages": np.zeros((3, 4, 2, 8), np.float32),
        "v_pages": np.zeros((3, 4, 2, 8), np.float32),
        "page_table": i32([[2, 1], [0, -1]]),
        "seq_lens": i32([5, 1]),
    }


def copy() -> Arguments:
    return {"k_pages": f32(3, 4, 2, 8), "v_pages": f32(3, 4, 2, 8), "copies": i32([[0, 1]])}


def between() -> Arguments:
    return {**copy(), "to_k_pages": f32(5, 4, 2, 8), "to_v_pages": f32(5, 4, 2, 8)}


def merge() -> Arguments:
    return {"out_a": f32(3, 4, 8), "lse_a": f32(3, 4), "out_b": f32(3, 4, 8), "lse_b": f32(3, 4)}


def dense_backward() -> Arguments:
    return {"dout": f32(2, 3, 4, 8), **dense(), "out": f32(2, 3, 4, 8), "lse": f32(2, 3, 4)}


def packed_backward() -> Arguments:
    return {"dout": f32(3, 4, 8), **packed(), "out": f32(3, 4, 8), "lse": f32(3, 4)}


def layer() -> Arguments:
    return {"x": f32(2, 3, 8), "w": f32(5, 8)}


def norm() -> Arguments:
    return {"x": f32(2, 3, 8), "weight": f32(8)}


def sum_and_norm() -> Arguments:
    return {**norm(), "residual": f32(2, 3, 8)}


def latent() -> Arguments:
    return {
        "q": f32(2, 3, 16),
        "kv_pages": f32(7, 4, 16),
        "page_table": i32([[2, 1], [0, 3]]),
        "seq_lens": i32([5, 1]),
        "v_dim": 8,
        "softmax_scale": 0.5,
    }


def table() -> Arguments:
    return {"page_table": i32([[2, 1], [0, -1]]), "seq_lens": i32([5, 1]), "num_pages": 3, "page_size": 4}


OPERATORS: dict[str, Callable[..., Any]] = {
    name: getattr(octavo, name)
    for name in (
        "attention",
        "paged_attention",
        "append_kv",
        "copy_pages",
        "merge_states",
        "attention_backward",
        "linear",
        "rms_norm",
        "latent_attention",
        "check_page_table",
    )
}


def case(
    op: str, make: Callable[[], Arguments], error: type[Exception], message: str, **overrides: Any
) -> Any:
    return pytest.param(op, make, overrides, error, message, id=f"{op}: {message}"[:100])


def read_only(array: NDArray) -> NDArray:
    array.flags.writeable = False
    return array


LATENT = ("latent_attention", latent)
A, P, K, C, B, M, D, L, N, S, T = (
    ("attention", dense),
    ("paged_attention", paged),
    ("append_kv", append),
    ("copy_pages", copy),
    ("copy_pages", between),
    ("merge_states", merge),
    ("attention_backward", dense_backward),
    ("linear", layer),
    ("rms_norm", norm),
    ("rms_norm", sum_and_norm),
    ("check_page_table", table),
)
PACKED = ("attention", packed)
PACKED_BACKWARD = ("attention_backward", packed_backward)
LENGTHS = f"must lie in [0, {MAX_LENGTH}]"
NO_ARRAY = "must be an array (an object with __dlpack__ and __dlpack_device__)"
FLOATS = "must be float32, float16 or bfloat16"
PAGES = "[num_pages, page_size, num_kv_heads, head_dim]"
BOTH = f32(7, 4, 2, 8)


def check_refused(
    op: str, make: Callable[[], Arguments], overrides: Arguments, error: type[Exception], message: str
) -> None:
    """The error is of that type, word for word, and nothing was written before it."""
    arguments = {**make(), **overrides}
    arrays = {
        name: (value, value.copy())
        for name, value in arguments.items()
        if isinstance(value, np.ndarray) and value.nbytes < 2**20
    }
    with pytest.raises(error) as caught:
        OPERATORS[op](**arguments)
    assert type(caught.value) is error
    assert str(caught.value) == f"{op}: {message}"
    for name, (array, before) in arrays.items():
        np.testing.assert_array_equal(array, before, err_msg=f"{name} was changed")


def refused(cases: list[Any]) -> Callable[..., None]:
    """A test of these cases, for a module to name: ``test_refused = refused(CASES)``."""

    @pytest.mark.parametrize(("op", "make", "overrides", "error", "message"), cases)
    def test_refused(
        op: str, make: Callable[[], Arguments], overrides: Arguments, error: type[Exception], message: str
    ) -> None:
        check_refused(op, make, overrides, error, message)

    return test_refused


def dump(alloc: octavo.PageAllocator, seqs: Iterable[int]) -> Any:
    """All that can be seen of an allocator without changing it."""
    return [(alloc.length(seq), alloc.pages(seq).tolist()) for seq in seqs], alloc.stats()
