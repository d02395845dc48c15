"""Block-sparse attention: block_mask of attention and of attention_backward, dense and packed."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
import pytest

import octavo
from support import calls, problems
from support.calls import assert_same_bits
from support.case import Case
from support.oracle import Dropout
from support.targets import Target, cpu_target, every_target

DROPOUT = Dropout(0.3, 2**35 + 11, 2**32 - 5)
OF_DROPOUT = {"dropout_p": 0.3, "dropout_seed": 2**35 + 11, "dropout_offset": 2**32 - 5}

# Hopper's own kernel serves head dims up to 128 without ALiBi, sm80_attention the others.
BLOCKS = [
    Case("blocks", (300,), (300,), block_size=128),
    Case("blocks_full", (300, 300), (420, 420), causal=False, block_size=64, block_masks="batch"),
    Case("blocks_group", (200, 200), (333, 333), block_size=64, num_q_heads=6, num_kv_heads=2, head_dim=128),
    Case(
        "blocks_for_all_heads",
        (513,),
        (513,),
        block_size=128,
        block_masks="all",
        num_kv_heads=1,
        head_dim=128,
    ),
    Case("blocks_long", (700,), (1200,), block_size=128, num_q_heads=2, num_kv_heads=2, head_dim=128),
    Case("blocks_long_64", (700,), (1200,), block_size=64, num_q_heads=2, num_kv_heads=2, causal=False),
    Case("blocks_few", (513,), (1025,), block_size=64, blocks_kept=0.05, sinks="normal", head_dim=128),
    Case("blocks_window", (400,), (500,), block_size=64, window_left=100, head_dim=40),
    Case(
        "blocks_both_windows", (257,), (191,), block_size=128, window_left=90, window_right=20, causal=False
    ),
    Case("blocks_chunks", (300,), (420,), block_size=64, attention_chunk=100, num_kv_heads=2),
    Case("blocks_prefix", (260, 260), (260, 260), block_size=64, prefix_lens=(130, 0), num_kv_heads=2),
    Case("blocks_alibi_cap", (200,), (260,), block_size=64, alibi="head", softcap=20.0, num_kv_heads=2),
    Case("blocks_wide", (200,), (300,), block_size=64, head_dim=256, num_q_heads=4, num_kv_heads=2),
    Case("blocks_96", (200,), (300,), block_size=128, head_dim=96, num_q_heads=4, num_kv_heads=2),
    Case("blocks_one_query", (1, 1), (700, 700), block_size=64, block_masks="batch", num_kv_heads=2),
]
BLOCKS_PACKED = [
    Case("blocks_packed", (300, 1, 0, 129), (300, 260, 5, 129), block_size=128, head_dim=128),
    Case("blocks_packed_64", (65, 190, 7), (300, 190, 65), block_size=64, num_q_heads=8, num_kv_heads=2),
    Case(
        "blocks_packed_chunks",
        (300, 1, 129),
        (300, 260, 129),
        block_size=128,
        attention_chunk=70,
        head_dim=128,
    ),
    Case("blocks_packed_batch", (150, 260), (290, 70), block_size=64, block_masks="batch", sinks="extreme"),
]


@functools.lru_cache(maxsize=4)
def backward_problem(case: Case, dtype: str, dropout: Dropout | None = None) -> Any:
    inputs, gradients = problems.make_inputs(case, dtype), problems.make_output_gradients(case, dtype)
    reference = problems.make_backward_reference(case, inputs, gradients, dtype, dropout=dropout)
    return inputs, gradients, reference


def bounds(case: Case) -> dict[str, int]:
    return {"max_seqlen_q": max(case.seqlens_q), "max_seqlen_k": max(case.seqlens_k)}


@every_target
@pytest.mark.parametrize("case", BLOCKS, ids=str)
def test_dense(target: Target, case: Case) -> None:
    """With NaN in every key that no query of its heads sees."""
    inputs = problems.make_inputs(case, target.dtype)
    problems.make_reference(case, inputs, target.dtype).check(*calls.attention(target, case, inputs))


@every_target
@pytest.mark.parametrize("case", [*BLOCKS_PACKED, *(c for c in BLOCKS if c.batch > 1)], ids=str)
def test_packed(target: Target, case: Case) -> None:
    inputs = problems.make_inputs(case, target.dtype)
    found = calls.packed_attention(target, case, inputs, **bounds(case))
    problems.make_reference(case, inputs, target.dtype).check(*found)


@every_target
@pytest.mark.parametrize("case", [BLOCKS[0], BLOCKS[2]], ids=str)
def test_dropout(target: Target, case: Case) -> None:
    inputs = problems.make_inputs(case, target.dtype)
    reference = problems.make_reference(case, inputs, target.dtype, dropout=DROPOUT)
    reference.check(*calls.attention(target, case, inputs, **OF_DROPOUT))


@every_target
@pytest.mark.parametrize("case", BLOCKS, ids=str)
def test_gradients(target: Target, case: Case) -> None:
    inputs, gradients, reference = backward_problem(case, target.dtype)
    reference.check(*calls.attention_backward(target, case, inputs, gradients))


@every_target
@pytest.mark.parametrize("case", BLOCKS_PACKED, ids=str)
def test_gradients_packed(target: Target, case: Case) -> None:
    inputs, gradients, reference = backward_problem(case, target.dtype)
    reference.check(*calls.attention_backward(target, case, inputs, gradients, packed=True, **bounds(case)))


@every_target
@pytest.mark.parametrize("case", [BLOCKS[0], BLOCKS[2]], ids=str)
def test_gradients_with_dropout(target: Target, case: Case) -> None:
    inputs, gradients, reference = backward_problem(case, target.dtype, DROPOUT)
    reference.check(*calls.attention_backward(target, case, inputs, gradients, **OF_DROPOUT))


@every_target
@pytest.mark.parametrize("size", [64, 128])
def test_a_mask_of_ones_changes_nothing(target: Target, size: int) -> None:
    """On the CPU not a bit; a GPU takes other tiles."""
    case = Case("ones", (200, 200), (300, 300), num_kv_heads=2, head_dim=128)
    inputs, gradients, reference = backward_problem(case, target.dtype)
    ones = target.library.boolean(np.ones((1, -(-200 // size), -(-300 // size))))
    found = calls.attention(target, case, inputs, block_mask=ones, block_size=size)
    problems.make_reference(case, inputs, target.dtype).check(*found)
    backward = calls.attention_backward(target, case, inputs, gradients, block_mask=ones, block_size=size)
    reference.check(*backward)
    if target.on_cpu:
        assert_same_bits(found, calls.attention(target, case, inputs))
        for x, y in zip(backward, calls.attention_backward(target, case, inputs, gradients), strict=True):
            assert x.tobytes() == y.tobytes()


@every_target
def test_a_mask_of_zeros(target: Target) -> None:
    """Whatever the arrays hold: no query sees a key."""
    nan = target.array(np.full((2, 150, 4, 64), np.nan))
    none = target.library.boolean(np.zeros((4, 2, 2)))
    out, lse = octavo.attention(nan, nan, nan, block_mask=none, return_lse=True)
    found = calls.read(target, (out, lse))
    assert (found[0] == 0.0).all() and np.isneginf(found[1]).all()
    for gradient in octavo.attention_backward(nan, nan, nan, nan, out, lse, block_mask=none):
        assert (target.library.to_float64(gradient) == 0.0).all()


@cpu_target
def test_strides_and_bytes(target: Target) -> None:
    """A mask of uint8 in which every number but 0 keeps, as a view of a larger one."""
    case = BLOCKS[2]
    inputs = problems.make_inputs(case, target.dtype)
    assert inputs.block_mask is not None
    heads, rows, columns = inputs.block_mask.shape
    wide = np.zeros((heads, 3, rows, columns + 5), np.uint8)
    wide[:, 1, :, :columns] = np.where(inputs.block_mask, np.arange(1, columns + 1), 0)
    view = target.library.from_numpy(wide)[:, 1, :, :columns]
    expected = calls.attention(target, case, inputs)
    assert_same_bits(calls.attention(target, case, inputs, block_mask=view), expected)


@cpu_target
@pytest.mark.parametrize("num_threads", [1, 7])
def test_threads_change_no_bit(target: Target, num_threads: int) -> None:
    case = dataclasses.replace(BLOCKS[4], name="threads")
    inputs, gradients, _ = backward_problem(case, target.dtype)
    expected = calls.attention_backward(target, case, inputs, gradients)
    before = octavo.get_num_threads()
    octavo.set_num_threads(num_threads)
    try:
        found = calls.attention_backward(target, case, inputs, gradients)
    finally:
        octavo.set_num_threads(before)
    for x, y in zip(found, expected, strict=True):
        assert x.tobytes() == y.tobytes()


@cpu_target
@pytest.mark.parametrize("query_len", [1, 4])
def test_threads_change_no_bit_of_few_queries(target: Target, query_len: int) -> None:
    """A thread reads keys for as many heads as it has, of which a mask hides a tile from some."""
    case = Case("few", (query_len,), (700,), num_q_heads=16, num_kv_heads=8)
    mask = np.random.default_rng(0).random((16, 1, 11)) < 0.8
    inputs = problems.make_inputs(case, target.dtype)
    options = {"block_mask": target.library.boolean(mask), "block_size": 64}
    before = octavo.get_num_threads()
    results = []
    try:
        for num_threads in (1, 2, 7):
            octavo.set_num_threads(num_threads)
            results.append(calls.attention(target, case, inputs, **options))
    finally:
        octavo.set_num_threads(before)
    masked = dataclasses.replace(inputs, block_mask=mask)
    problems.make_reference(dataclasses.replace(case, block_size=64), masked, target.dtype).check(*results[0])
    for result in results[1:]:
        assert_same_bits(result, results[0])


Q = np.zeros((2, 200, 4, 16), np.float32)
K = np.zeros((2, 300, 2, 16), np.float32)


@pytest.mark.parametrize(
    ("mask", "size", "error", "message"),
    [
        (np.ones((1, 2, 3), bool), 32, ValueError, "block_size must be 64 or 128; got 32"),
        (np.ones((1, 2, 3), np.int32), 128, TypeError, "block_mask must be bool or uint8; got int32"),
        (
            np.ones((2, 3), bool),
            128,
            ValueError,
            "block_mask must have shape .heads, query blocks",
        ),
        (np.ones((2, 2, 3), bool), 128, ValueError, r"must have 1 or num_q_heads \(4\) heads; got 2"),
        (np.ones((3, 1, 2, 3), bool), 128, ValueError, "batch of block_mask"),
        (
            np.ones((1, 3, 3), bool),
            128,
            ValueError,
            r"must have 2 blocks of queries, seqlen_q \(200\) / block_size \(128\) rounded up; its shape is "
            r"\[1, 3, 3\]",
        ),
        (np.ones((1, 4, 3), bool), 64, ValueError, r"must have 5 blocks of keys, seqlen_k \(300\)"),
        (np.ones((1, 2, 6), bool)[:, :, ::2], 128, ValueError, "block_mask must have a unit stride"),
        ([[[1, 1, 1], [1, 1, 1]]], 128, TypeError, "block_mask"),
    ],
    ids=str,
)
def test_errors(mask: Any, size: int, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        octavo.attention(Q, K, K, block_mask=mask, block_size=size)
    lse = np.zeros(Q.shape[:3], np.float32)
    with pytest.raises(error, match=message):
        octavo.attention_backward(Q, Q, K, K, Q, lse, block_mask=mask, block_size=size)


def test_packed_errors() -> None:
    offsets = np.array([0, 200, 400], np.int32), np.array([0, 300, 600], np.int32)
    q, k = Q.reshape(400, 4, 16), K.reshape(600, 2, 16)
    with pytest.raises(ValueError, match=r"must have 2 blocks of queries, max_seqlen_q \(200\)"):
        octavo.attention(
            q, k, k, cu_seqlens_q=offsets[0], cu_seqlens_k=offsets[1], max_seqlen_q=200, max_seqlen_k=300,
            block_mask=np.ones((1, 4, 3), bool),
        )  # fmt: skip
    with pytest.raises(ValueError, match=r"must have 4 blocks of queries, max_seqlen_q \(400\)"):
        octavo.attention(
            q, k, k, cu_seqlens_q=offsets[0], cu_seqlens_k=offsets[1], block_mask=np.ones((1, 2, 3), bool)
        )


@dataclasses.dataclass
class Shape:
    """All that octavo.explain needs of an argument."""

    shape: tuple[int, ...]
    dtype: str = "bfloat16"


@pytest.mark.parametrize("dtype", ["bool", "uint8", "torch.bool"])
def test_explain_says_which_kernel(dtype: str) -> None:
    mask = Shape((1, 32, 32), dtype)
    for device, head_dim, options, kernel in [
        ("sm_80", 128, {}, "sm80_attention"),
        ("sm_90", 128, {}, "sm90_attention"),
        ("sm_90", 64, {}, "sm90_attention"),
        ("sm_90", 96, {}, "sm90_attention"),
        ("sm_90", 192, {}, "sm80_attention"),
        ("sm_90", 128, {"dropout_p": 0.1, "dropout_seed": 0}, "sm80_attention"),
    ]:
        q = Shape((1, 4096, 8, head_dim))
        explained = octavo.explain(
            "attention", q, q, q, causal=True, block_mask=mask, device=device, **options
        )
        assert explained.kernel.startswith(kernel)
        assert explained.plan["feature"] == "blocks"
    lse = Shape((1, 4096, 8), "float32")
    for device, options, kernel in [
        ("sm_80", {}, "sm80_backward"),
        ("sm_90", {}, "sm90_backward"),
        ("sm_90", {"deterministic": True}, "sm80_backward"),
        ("sm_90", {"softcap": 20.0}, "sm80_backward"),
    ]:
        backward = octavo.explain(
            *("attention_backward", q, q, q, q, q, lse), block_mask=mask, device=device, **options
        )
        assert backward.kernel.startswith(kernel)
