"""Bidirectional ranges inside a causal sequence: of attention, attention_backward and paged_attention."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import replace
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

IMAGES = ((10, 74), (74, 80), (200, 210))
DENSE = [
    Case("ranges", (257,), (257,), ranges=(IMAGES,), num_kv_heads=2),
    Case("ranges_whole", (150,), (150,), ranges=(((0, 150),),), num_kv_heads=1),
    Case("ranges_past_the_end", (131,), (131,), ranges=(((5, 9), (100, 1000)),)),
    Case("ranges_before_the_queries", (40,), (257,), ranges=(IMAGES,), num_kv_heads=2),
    Case("ranges_of_one_key", (70,), (70,), ranges=(((0, 1), (1, 2), (69, 70)),)),
    Case("ranges_of_no_key", (70, 70), (90, 90), ranges=(((5, 5), (9, 30), (7, 7)), ()), num_kv_heads=2),
    Case("ranges_no_range_at_all", (70,), (70,), ranges=((),)),
    Case("ranges_queries_outnumber", (211,), (97,), ranges=(((3, 60), (90, 97)),), num_kv_heads=2),
    Case("ranges_one_query", (1, 1), (197, 197), ranges=(((100, 197),), ((0, 300),)), window_left=20),
    Case("ranges_long", (700,), (1200,), ranges=(((100, 612), (650, 900), (1100, 1190)),), num_q_heads=2,
         num_kv_heads=1, head_dim=128),
    Case("ranges_window", (257,), (300,), ranges=(IMAGES,), window_left=17, num_kv_heads=2),
    Case("ranges_keep_window", (257,), (300,), ranges=(IMAGES,), window_left=17, keep_window_left=True),
    Case("ranges_wide_window", (300,), (300,), ranges=(IMAGES,), window_left=70, keep_window_left=True,
         num_kv_heads=1, head_dim=256),
    Case("ranges_window_0", (90,), (150,), ranges=(((50, 90),),), window_left=0),
    Case("ranges_window_both", (150,), (191,), ranges=(((50, 120), (150, 170)),), window_left=9,
         window_right=4, causal=False, num_kv_heads=2),
    Case("ranges_window_right", (150,), (191,), ranges=(((50, 120),),), window_right=3, causal=False),
    Case("ranges_left_alone", (150,), (191,), ranges=(((50, 120),),), window_left=12, causal=False),
    Case("ranges_chunks", (211,), (257,), ranges=(((40, 140), (190, 200)),), attention_chunk=64,
         num_kv_heads=2),
    Case("ranges_chunks_keep", (211,), (257,), ranges=(((40, 140),),), attention_chunk=64,
         keep_window_left=True),
    Case("ranges_prefix", (150, 150), (170, 170), ranges=(((20, 60),), ((90, 140),)), prefix_lens=(40, 0),
         num_kv_heads=2),
    Case("ranges_prefix_window", (150,), (170,), ranges=(((60, 110),),), prefix_lens=(30,), window_left=11,
         keep_window_left=True, num_kv_heads=2),
    Case("ranges_alibi_cap", (131,), (150,), ranges=(((20, 70),),), alibi="head", softcap=20.0,
         num_kv_heads=2),
    Case("ranges_symmetric", (131,), (150,), ranges=(((20, 70),),), alibi="head", alibi_symmetric=True,
         num_kv_heads=2),
    Case("ranges_sinks", (131,), (150,), ranges=(((20, 70),),), sinks="normal", num_q_heads=8,
         num_kv_heads=2),
    Case("ranges_d96", (131,), (150,), ranges=(((20, 70),),), head_dim=96, num_q_heads=6, num_kv_heads=2),
    Case("ranges_d512", (70,), (90,), ranges=(((20, 70),),), head_dim=512, num_q_heads=4, num_kv_heads=2),
]  # fmt: skip
PACKED = [
    Case("ranges_packed", (50, 1, 0, 130, 33), (250, 90, 5, 130, 33),
         ranges=(((190, 240),), ((80, 90),), ((0, 3),), IMAGES, ()), num_kv_heads=2),
    Case("ranges_packed_window", (50, 1, 33, 130), (250, 90, 64, 130),
         ranges=(((190, 240),), ((40, 90),), ((0, 64),), IMAGES), window_left=30, num_q_heads=8,
         num_kv_heads=2, head_dim=128),
    Case("ranges_packed_keep_window", (50, 1, 33, 130), (250, 90, 64, 130),
         ranges=(((190, 240),), ((40, 90),), ((0, 64),), IMAGES), window_left=30, keep_window_left=True),
]  # fmt: skip
DECODE = [
    Case("ranges_decode", (1,) * 3, (20, 211, 700), ranges=(((0, 20),), ((100, 211),), ((1, 2),))),
    Case("ranges_decode_window", (1,) * 3, (20, 211, 700), window_left=50, num_kv_heads=2,
         ranges=(((0, 20),), ((100, 211),), ((1, 2), (600, 900)))),
    Case("ranges_decode_keep_window", (1,) * 3, (20, 211, 700), window_left=50, num_kv_heads=2,
         ranges=(((0, 20),), ((100, 211),), ((1, 2), (600, 900))), keep_window_left=True),
]  # fmt: skip
WITH_GRADIENTS = [case for case in DENSE if case.head_dim <= 256]


@functools.lru_cache(maxsize=4)
def backward_problem(case: Case, dtype: str, dropout: Dropout | None = None) -> Any:
    inputs, gradients = problems.make_inputs(case, dtype), problems.make_output_gradients(case, dtype)
    return (
        inputs,
        gradients,
        problems.make_backward_reference(case, inputs, gradients, dtype, dropout=dropout),
    )


@every_target
@pytest.mark.parametrize("case", DENSE, ids=str)
def test_dense(target: Target, case: Case) -> None:
    """With NaN in every key that no query sees."""
    inputs = problems.make_inputs(case, target.dtype)
    problems.make_reference(case, inputs, target.dtype).check(*calls.attention(target, case, inputs))


@every_target
@pytest.mark.parametrize("case", [*PACKED, *(c for c in DENSE if c.batch > 1)], ids=str)
def test_packed(target: Target, case: Case) -> None:
    inputs = problems.make_inputs(case, target.dtype)
    found = calls.packed_attention(target, case, inputs)
    problems.make_reference(case, inputs, target.dtype).check(*found)


@every_target
@pytest.mark.parametrize("case", [*PACKED, *DECODE, *(c for c in DENSE if c.is_cacheable)], ids=str)
def test_paged(target: Target, case: Case) -> None:
    """With NaN in every slot that no query sees."""
    inputs = problems.make_inputs(case, target.dtype)
    cache = problems.make_cache(case, inputs)
    found = calls.paged_attention(target, case, inputs, cache)
    reference = problems.make_reference(case, inputs, target.dtype, paged=True)
    reference.check(*found)
    if case.is_decode:  # a range shows a single query nothing more, and another kernel may serve that
        alone = calls.paged_attention(target, case, inputs, cache, packed=False)
        reference.check(*alone)
        assert_same_bits(calls.paged_attention(target, case, inputs, cache, max_seqlen_q=1), alone)


@every_target
@pytest.mark.parametrize("case", [DENSE[0], DENSE[10]], ids=str)
def test_dropout(target: Target, case: Case) -> None:
    inputs = problems.make_inputs(case, target.dtype)
    reference = problems.make_reference(case, inputs, target.dtype, dropout=DROPOUT)
    reference.check(*calls.attention(target, case, inputs, **OF_DROPOUT))


@every_target
@pytest.mark.parametrize("case", WITH_GRADIENTS, ids=str)
def test_gradients(target: Target, case: Case) -> None:
    inputs, gradients, reference = backward_problem(case, target.dtype)
    reference.check(*calls.attention_backward(target, case, inputs, gradients))


@every_target
@pytest.mark.parametrize("case", PACKED, ids=str)
def test_gradients_packed(target: Target, case: Case) -> None:
    inputs, gradients, reference = backward_problem(case, target.dtype)
    reference.check(*calls.attention_backward(target, case, inputs, gradients, packed=True))


@every_target
@pytest.mark.parametrize("case", [DENSE[0], DENSE[10]], ids=str)
def test_gradients_with_dropout(target: Target, case: Case) -> None:
    inputs, gradients, reference = backward_problem(case, target.dtype, DROPOUT)
    reference.check(*calls.attention_backward(target, case, inputs, gradients, **OF_DROPOUT))


@every_target
@pytest.mark.parametrize("kv_dtype", ["int8", "float8_e4m3fn"])
def test_over_codes(target: Target, kv_dtype: str) -> None:
    """Numbers that are codes without a rounding, so that the result is that over plain pages."""
    case = replace(PACKED[1], name="ranges_codes", head_dim=64)
    inputs = problems.make_inputs(case, "float16")
    whole = replace(inputs, k=np.rint(2 * inputs.k).clip(-8, 8), v=np.rint(2 * inputs.v).clip(-8, 8))
    unpoisoned = replace(case, window_left=-1, ranges=tuple(((0, n),) for n in case.seqlens_k))
    cache = problems.make_cache(unpoisoned, whole)
    pages = [np.nan_to_num(pages) for pages in (cache.k_pages, cache.v_pages)]
    if kv_dtype == "int8":
        codes = [target.library.from_numpy(x.astype(np.int8)) for x in pages]
        options = {"k_scale": 1.0, "v_scale": 1.0}
    else:
        ml_dtypes = pytest.importorskip("ml_dtypes")
        bytes_of = [x.astype(ml_dtypes.float8_e4m3fn).view(np.uint8) for x in pages]
        codes = [target.library.from_numpy(x) for x in bytes_of]
        options = {"kv_dtype": kv_dtype}
    found = octavo.paged_attention(
        target.array(whole.q),
        *codes,
        target.int32(cache.page_table),
        target.int32(cache.seq_lens),
        cu_seqlens_q=target.int32(inputs.cu_seqlens_q),
        return_lse=True,
        **options,
        **case.masks,
        **calls.optional_arrays(target, inputs),
    )
    problems.make_reference(case, whole, target.dtype).check(*calls.read(target, found))


@every_target
def test_ranges_that_show_nothing_change_no_bit(target: Target) -> None:
    """Of one key each, and in calls that hide nothing: on a GPU those run by other kernels, or the same."""
    case = Case("nothing", (150, 150), (150, 150), num_kv_heads=2)
    inputs = problems.make_inputs(case, target.dtype)
    ones = np.stack([np.arange(150), np.arange(1, 151)], 1)[None].repeat(2, 0).astype(np.int32)
    full = replace(case, causal=False)
    everywhere = np.array([[[0, 150]], [[3, 90]]], np.int32)
    for some, ranges, is_exact in ((case, ones, target.on_cpu), (full, everywhere, True)):
        found = calls.attention(target, some, inputs, bidirectional_ranges=target.int32(ranges))
        problems.make_reference(some, inputs, target.dtype).check(*found)
        if is_exact:
            assert_same_bits(found, calls.attention(target, some, inputs))


@every_target
def test_a_prefix_is_a_range_at_the_beginning(target: Target) -> None:
    """Where all queries that are not in it see it anyway: under causal without a window."""
    case = Case("prefix", (200, 200), (230, 230), prefix_lens=(70, 230), num_kv_heads=2)
    inputs = problems.make_inputs(case, target.dtype)
    reference = problems.make_reference(case, inputs, target.dtype)
    without = replace(case, prefix_lens=None, ranges=(((0, 70),), ((0, 230),)))
    reference.check(*calls.attention(target, without, problems.make_inputs(without, target.dtype)))


@every_target
def test_numbers_of_64_bits(target: Target) -> None:
    case = DENSE[10]
    inputs = problems.make_inputs(case, target.dtype)
    assert inputs.bidirectional_ranges is not None
    wide = target.library.from_numpy(inputs.bidirectional_ranges.astype(np.int64))
    expected = calls.attention(target, case, inputs)
    assert_same_bits(calls.attention(target, case, inputs, bidirectional_ranges=wide), expected)


@cpu_target
def test_lists(target: Target) -> None:
    case = DENSE[10]
    inputs = problems.make_inputs(case, target.dtype)
    expected = calls.attention(target, case, inputs)
    ranges = [[list(bounds) for bounds in IMAGES]]
    assert_same_bits(calls.attention(target, case, inputs, bidirectional_ranges=ranges), expected)


def test_jax_gradients_and_vmap() -> None:
    jax = pytest.importorskip("jax")
    import octavo.jax

    q, k, v, dout = np.random.default_rng(0).standard_normal((4, 2, 3, 20, 2, 16), dtype=np.float32)
    ranges = np.array([[[[3, 9]], [[0, 20]], [[5, 5]]], [[[1, 2]], [[4, 15]], [[18, 20]]]], np.int32)
    options = {"causal": True, "window_left": 2}

    def loss(q: Any, k: Any, v: Any, dout: Any, ranges: Any) -> Any:
        return (octavo.jax.attention(q, k, v, bidirectional_ranges=ranges, **options) * dout).sum()

    found = jax.jit(jax.vmap(jax.grad(loss, (0, 1, 2))))(q, k, v, dout, ranges)
    for i in range(2):
        out, lse = octavo.attention(
            q[i], k[i], v[i], bidirectional_ranges=ranges[i], return_lse=True, **options
        )
        expected = octavo.attention_backward(
            dout[i], q[i], k[i], v[i], out, lse, bidirectional_ranges=ranges[i], **options
        )
        for x, y in zip(found, expected, strict=True):
            np.testing.assert_array_equal(x[i], y)
    shared = jax.vmap(loss, (0, 0, 0, 0, None))(q, k, v, dout, ranges[0])
    np.testing.assert_allclose(shared[0], loss(q[0], k[0], v[0], dout[0], ranges[0]), rtol=1e-5)


@cpu_target
@pytest.mark.parametrize("num_threads", [1, 7])
def test_threads_change_no_bit(target: Target, num_threads: int) -> None:
    case = dataclasses.replace(DENSE[9], name="threads")
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


Q = np.zeros((2, 20, 4, 16), np.float32)
K = np.zeros((2, 30, 2, 16), np.float32)
PAGED = Q[:, 0], K, K, np.array([[0], [1]], np.int32), np.array([30, 30], np.int32)


@pytest.mark.parametrize(
    ("ranges", "error", "message"),
    [
        (np.zeros((2, 1, 2), np.float32), TypeError, "_ranges must be int32 or int64; got float32"),
        (
            np.zeros((2, 2), np.int32),
            ValueError,
            r"bidirectional_ranges must have shape \[batch, num_ranges, 2\]; got \[2, 2\]",
        ),
        (
            np.zeros((2, 2, 3), np.int32),
            ValueError,
            r"bidirectional_ranges must have shape \[batch, num_ranges, 2\]; got \[2, 2, 3\]",
        ),
        (np.zeros((3, 1, 2), np.int32), ValueError, "batch of bidirectional_ranges"),
        (
            np.broadcast_to(np.zeros(2, np.int32), (2, 2**29 + 1, 2)),
            ValueError,
            r"num_ranges must lie in \[0, 536870912\]; got 536870913",
        ),
        (
            np.zeros((2, 6, 2), np.int32)[:, ::2],
            ValueError,
            r"bidirectional_ranges must be in C order; got strides \[12, 4, 1\]",
        ),
        (  # between sequences alone
            np.zeros((2, 6, 2), np.int32)[:, :3],
            ValueError,
            r"bidirectional_ranges must be in C order; got strides \[12, 2, 1\]",
        ),
        (  # between ranges alone
            np.lib.stride_tricks.as_strided(np.zeros(16, np.int32), (2, 3, 2), (24, 16, 4)),
            ValueError,
            r"bidirectional_ranges must be in C order; got strides \[6, 4, 1\]",
        ),
        (
            np.array([[[3, 9]], [[-1, 4]]], np.int32),
            ValueError,
            r"bidirectional_ranges\[1, 0\], \[-1, 4\), must not begin before 0",
        ),
        (
            np.array([[[3, 9], [8, 12]], [[0, 0], [0, 0]]], np.int64),
            ValueError,
            r"_ranges\[0, 1\], \[8, 12\), must begin at or behind the end of the range before it, 9",
        ),
        (
            np.array([[[9, 12], [3, 5]], [[0, 0], [0, 0]]], np.int32),
            ValueError,
            r"bidirectional_ranges\[0, 1\], \[3, 5\), must begin at or behind",
        ),
        (
            np.array([[[3, 2**31]], [[0, 0]]], np.int64),
            ValueError,
            r"bidirectional_ranges\[0, 0\], \[3, 2147483648\), must end below 2\^31",
        ),
        (
            np.array([[[2**32, 5]], [[0, 0]]], np.int64),
            ValueError,
            r"_ranges\[0, 0\], \[4294967296, 5\), must not end before it begins",
        ),
        (
            np.array([[[0, 0]], [[5 - 2**32, 5 - 2**32]]], np.int64),
            ValueError,
            r"_ranges\[1, 0\], \[-4294967291, -4294967291\), must have bounds that fit into int32",
        ),
        (  # its beginning and its length
            np.array([[[0, 5]], [[12, 6]]], np.int32),
            ValueError,
            r"_ranges\[1, 0\], \[12, 6\), must not end before it begins; a range is its first position, and "
            "the one behind its last$",
        ),
    ],
    ids=str,
)  # fmt: skip
def test_errors(ranges: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^attention: .*{message}"):
        octavo.attention(Q, K, K, causal=True, bidirectional_ranges=ranges)
    lse = np.zeros(Q.shape[:3], np.float32)
    with pytest.raises(error, match=f"^attention_backward: .*{message}"):
        octavo.attention_backward(Q, Q, K, K, Q, lse, causal=True, bidirectional_ranges=ranges)
    with pytest.raises(error, match=f"^paged_attention: .*{message}"):
        octavo.paged_attention(*PAGED, bidirectional_ranges=ranges)


@pytest.mark.parametrize("count", [0, 1, 2, 3])
@pytest.mark.parametrize("batch", [0, 2])
def test_ranges_of_nothing(batch: int, count: int) -> None:
    """An empty array of NumPy has strides of 0."""
    ranges = np.zeros((batch, count, 2), np.int32)
    options: dict[str, Any] = {"causal": True, "bidirectional_ranges": ranges}
    q, k = Q[:batch], K[:batch]
    out, lse = octavo.attention(q, k, k, return_lse=True, **options)
    assert out.shape == q.shape
    gradients = octavo.attention_backward(q, q, k, k, out, lse, **options)
    assert [x.shape for x in gradients] == [q.shape, k.shape, k.shape]
    paged = (q[:, 0], K, K, *(x[:batch] for x in PAGED[3:]))
    assert octavo.paged_attention(*paged, bidirectional_ranges=ranges).shape == q[:, 0].shape


def test_what_does_not_go_together() -> None:
    ranges = np.zeros((2, 1, 2), np.int32)
    with pytest.raises(ValueError, match="ranges_keep_window_left needs bidirectional_ranges; got none"):
        octavo.attention(Q, K, K, ranges_keep_window_left=True)
    with pytest.raises(ValueError, match="block_mask cannot go with bidirectional_ranges"):
        octavo.attention(Q, K, K, bidirectional_ranges=ranges, block_mask=np.ones((1, 1, 1), bool))
    for option, value, message in [
        ("tree_mask", np.full(2, -1, np.int64), "tree_mask cannot go with bidirectional_ranges"),
        ("chosen_pages", np.zeros((2, 1), np.int32), "chosen_pages cannot go with bidirectional_ranges"),
        ("shared_prefix_len", 30, r"shared_prefix_len \(30\) cannot go with bidirectional_ranges"),
    ]:
        with pytest.raises(ValueError, match=message):
            octavo.paged_attention(*PAGED, bidirectional_ranges=ranges, **{option: value})


@dataclasses.dataclass
class Shape:
    """All that octavo.explain needs of an argument."""

    shape: tuple[int, ...]
    dtype: str = "bfloat16"


def test_explain_says_which_kernel() -> None:
    q, ranges = Shape((2, 512, 8, 128)), Shape((2, 3, 2), "int32")
    for device in ("sm_80", "sm_90"):
        explained = octavo.explain(
            "attention", q, q, q, causal=True, bidirectional_ranges=ranges, device=device
        )
        assert explained.kernel.startswith(f"{device.replace('_', '')}_attention")
        assert explained.plan["feature"] == "ranges"
        full = octavo.explain("attention", q, q, q, bidirectional_ranges=ranges, device=device)
        assert full.plan.get("feature") != "ranges"  # there is nothing that they would show
        lse = Shape((2, 512, 8), "float32")
        backward = octavo.explain(
            *("attention_backward", q, q, q, q, q, lse),
            causal=True,
            bidirectional_ranges=ranges,
            device=device,
        )
        assert backward.kernel.startswith("sm80_backward") and backward.plan["has_ranges"]
        if device == "sm_90":
            assert "bidirectional_ranges" in backward.why_not["sm90_backward"]


def test_explain_of_steps_of_one_token() -> None:
    """A token's range ends with it, so that any kernel serves, unless a window hides some of the range."""
    q, pages, table = Shape((2, 8, 128)), Shape((64, 16, 2, 128)), Shape((2, 32), "int32")
    lengths, ranges = Shape((2,), "int32"), Shape((2, 3, 2), "int32")
    for options, kernel in [
        ({}, "split_kv_decode"),
        ({"window_left": 100, "ranges_keep_window_left": True}, "split_kv_decode"),
        ({"window_left": 100}, "sm80_attention"),
    ]:
        explained = octavo.explain(
            *("paged_attention", q, pages, pages, table, lengths),
            bidirectional_ranges=ranges,
            device="sm_90",
            **options,
        )
        assert explained.kernel.startswith(kernel)
        if kernel == "sm80_attention":
            assert "bidirectional_ranges" in explained.why_not["split_kv_decode"]
