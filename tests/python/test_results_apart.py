"""What is written may not lie in the memory of an argument that the call reads, however small that is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import octavo

Arguments = dict[str, Any]


def f32(*shape: int) -> NDArray[np.float32]:
    return np.ones(shape, np.float32)


def i32(values: Any) -> NDArray[np.int32]:
    return np.array(values, np.int32)


DENSE = {
    "q": f32(2, 3, 4, 8),
    "k": f32(2, 5, 2, 8),
    "v": f32(2, 5, 2, 8),
    "causal": True,
    "prefix_lens": i32([0, 1]),
    "alibi_slopes": f32(2, 4),
    "sinks": f32(4),
    "softmax_phi": f32(4),
}
PACKED = {
    "q": f32(3, 4, 8),
    "k": f32(5, 2, 8),
    "v": f32(5, 2, 8),
    "cu_seqlens_q": i32([0, 1, 3]),
    "cu_seqlens_k": i32([0, 2, 5]),
    "block_mask": np.ones((4, 1, 1), bool),
}
RANGES = {**PACKED, "block_mask": None, "causal": True, "bidirectional_ranges": i32([[[0, 1]], [[0, 2]]])}
CODES = {
    "q": f32(3, 4, 8),
    "k_pages": np.zeros((3, 4, 2, 8), np.int8),
    "v_pages": np.zeros((3, 4, 2, 8), np.int8),
    "page_table": i32([[2, 1], [0, -1]]),
    "seq_lens": i32([5, 2]),
    "cu_seqlens_q": i32([0, 2, 3]),
    "k_scale": f32(2),
    "v_scale": f32(2),
    "k_channel_offset": f32(2, 8),
    "k_channel_scale": f32(2, 8),
    "alibi_slopes": f32(4),
    "sinks": f32(4),
    "softmax_phi": f32(4),
}
TREE = {**CODES, "prefix_lens": i32([1, 0]), "tree_mask": np.full(3, -1)}
CHOSEN = {**CODES, "chosen_pages": i32([[0, 1], [0, -1]])}
TOKEN_SCALES = {
    **CODES,
    "k_scale": None,
    "v_scale": None,
    "k_scales": f32(3, 4, 2),
    "v_scales": f32(3, 4, 2),
    "bidirectional_ranges": i32([[[0, 1]], [[0, 2]]]),
}
LATENT = {
    "q": f32(3, 4, 16),
    "kv_pages": f32(3, 4, 16),
    "page_table": i32([[2, 1], [0, -1]]),
    "seq_lens": i32([5, 2]),
    "cu_seqlens_q": i32([0, 2, 3]),
    "softmax_scale": 0.25,
    "v_dim": 8,
}
CALLS = [
    ("attention", DENSE),
    ("attention", PACKED),
    ("attention", RANGES),
    ("paged_attention", TREE),
    ("paged_attention", CHOSEN),
    ("paged_attention", TOKEN_SCALES),
    ("latent_attention", LATENT),
]
CASES = [
    pytest.param(operator, arguments, name, id=f"{operator}-{number}-{name}")
    for number, (operator, arguments) in enumerate(CALLS)
    for name, value in arguments.items()
    if isinstance(value, np.ndarray)
]


@pytest.mark.parametrize(("operator", "arguments", "name"), CASES)
def test_out_lies_apart_from_each_argument(operator: str, arguments: Arguments, name: str) -> None:
    call = getattr(octavo, operator)
    expected = call(**arguments)
    value = arguments[name]
    memory = np.zeros(expected.nbytes + value.nbytes, np.uint8)
    out = memory[: expected.nbytes].view(np.float32).reshape(expected.shape)
    for gap in (0, -8):  # bytes between the two; none is fine
        begin = expected.nbytes + gap
        moved = memory[begin : begin + value.nbytes].view(value.dtype).reshape(value.shape)
        moved[...] = value
        given = {**arguments, name: moved, "out": out}
        if gap == 0:
            np.testing.assert_array_equal(call(**given), expected)
            continue
        with pytest.raises(ValueError, match=f"^{operator}: out must not overlap {name} in memory$"):
            call(**given)


NEW = {"k": f32(3, 2, 8), "v": f32(3, 2, 8)}
CACHE = {"k_pages": np.zeros((3, 4, 2, 8), np.int8), "v_pages": np.zeros((3, 4, 2, 8), np.int8)}
TABLES = {"page_table": i32([[2, 1], [0, -1]]), "seq_lens": i32([5, 2]), "cu_seqlens": i32([0, 2, 3])}
SCALES = {"k_scales": f32(3, 4, 2), "v_scales": f32(3, 4, 2)}
TO = {f"to_{name}": value.copy() for name, value in {**CACHE, **SCALES}.items()}
STATIC_APPEND = {
    **NEW,
    **CACHE,
    **TABLES,
    "k_scale": f32(2),
    "v_scale": f32(2),
    "k_channel_offset": f32(2, 8),
    "k_channel_scale": f32(2, 8),
    "rotary_cos": f32(8, 4),
    "rotary_sin": f32(8, 4),
    "q": f32(3, 4, 8),
    "q_out": f32(3, 4, 8),
}
SLOTS = {"slot_mapping": np.array([3, -1, 7])}
COPIES = {"copies": np.array([[2, 0], [2, 1]])}
WRITES = [
    (
        "append_kv",
        STATIC_APPEND,
        ("page_table", "seq_lens", "cu_seqlens", "k_scale", "v_scale", "k_channel_offset", "k_channel_scale"),
        ("k_pages", "v_pages", "q_out"),
    ),
    ("append_kv", {**NEW, **CACHE, **TABLES, **SCALES}, ("page_table", "seq_lens", "cu_seqlens"), SCALES),
    ("append_kv", {**NEW, **CACHE, **SLOTS, **SCALES}, ("slot_mapping",), (*CACHE, *SCALES)),
    (
        "append_kv",
        {**NEW, **CACHE, **TABLES, **SCALES, "k_scales": None, "k_scale": f32(2)},
        ("k_scale",),
        ("v_scales",),
    ),
    ("copy_pages", {**CACHE, **SCALES, **COPIES}, ("copies",), (*CACHE, *SCALES)),
    ("copy_pages", {**CACHE, **SCALES, **TO, **COPIES}, ("copies",), TO),
]


@pytest.mark.parametrize(
    ("operator", "arguments", "name", "written"),
    [
        pytest.param(operator, arguments, name, written, id=f"{operator}-{number}-{name}-{written}")
        for number, (operator, arguments, names, all_written) in enumerate(WRITES)
        for name in names
        for written in all_written
    ],
)
def test_the_cache_lies_apart_from_what_is_only_read(
    operator: str, arguments: Arguments, name: str, written: str
) -> None:
    """Numbers that were checked would be overwritten before they are used."""
    value, target = arguments[name], arguments[written]
    memory = np.zeros(target.nbytes + value.nbytes, np.uint8)
    for gap in (0, -8):  # bytes between the two; none is fine
        begin = target.nbytes + gap
        moved = memory[begin : begin + value.nbytes].view(value.dtype).reshape(value.shape)
        moved[...] = value
        room = memory[: target.nbytes].view(target.dtype).reshape(target.shape)
        given = {**arguments, name: moved, written: room}
        if gap == 0:
            getattr(octavo, operator)(**given)
            continue
        with pytest.raises(ValueError, match=f"^{operator}: {name} must not overlap {written} in memory$"):
            getattr(octavo, operator)(**given)
