"""octavo.attention, dense and packed."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import pytest
from hypothesis import given

import octavo
from support import calls, cases, problems
from support.calls import GuardedArray, assert_same_bits, rows_of
from support.case import Case
from support.oracle import Reference
from support.problems import Inputs
from support.strategies import WIDE_HEAD_DIMS, drawn_cases
from support.targets import Target, cpu_target, every_target, writable_target


@functools.lru_cache(maxsize=8)
def problem(case: Case, dtype: str) -> tuple[Inputs, Reference]:
    inputs = problems.make_inputs(case, dtype)
    return inputs, problems.make_reference(case, inputs, dtype)


@every_target
@pytest.mark.parametrize("case", cases.DENSE, ids=str)
def test_dense(target: Target, case: Case) -> None:
    inputs, reference = problem(case, target.dtype)
    reference.check(*calls.attention(target, case, inputs))


@every_target
@pytest.mark.parametrize("case", [*cases.PACKED, *(c for c in cases.DENSE if c.batch > 1)], ids=str)
def test_packed(target: Target, case: Case) -> None:
    inputs, reference = problem(case, target.dtype)
    reference.check(*calls.packed_attention(target, case, inputs))
    tight = {"max_seqlen_q": max(case.seqlens_q), "max_seqlen_k": max(case.seqlens_k)}
    reference.check(*calls.packed_attention(target, case, inputs, **tight))


@every_target
@given(case=drawn_cases(dense=True, head_dims=WIDE_HEAD_DIMS, value_dims=True, with_ranges=True))
def test_dense_of_any_shape(target: Target, case: Case) -> None:
    inputs = problems.make_inputs(case, target.dtype)
    reference = problems.make_reference(case, inputs, target.dtype)
    reference.check(*calls.attention(target, case, inputs))


@every_target
@given(case=drawn_cases(head_dims=WIDE_HEAD_DIMS, value_dims=True, with_ranges=True))
def test_packed_of_any_shape(target: Target, case: Case) -> None:
    inputs = problems.make_inputs(case, target.dtype)
    reference = problems.make_reference(case, inputs, target.dtype)
    reference.check(*calls.packed_attention(target, case, inputs))


# A score near 0 that is a sum of large products, and a plain error near 0. A name gives the numbers.
ONE_KEY_BESIDE_A_SINK = (
    Case(
        name="drawn 61349",
        seqlens_q=(1,),
        seqlens_k=(1,),
        num_q_heads=1,
        num_kv_heads=1,
        head_dim=72,
        softcap=30.0,
        alibi="head",
        sinks="normal",
        softmax_scale=0.41897958428544785,
        q_gain=4.0,
    ),
    Case(
        name="drawn 61799",
        seqlens_q=(1, 1),
        seqlens_k=(1, 1),
        num_q_heads=1,
        num_kv_heads=1,
        head_dim=256,
        softcap=30.0,
        sinks="normal",
        softmax_scale=0.3682372480564175,
        q_gain=4.0,
    ),
)


@every_target
@pytest.mark.parametrize("case", ONE_KEY_BESIDE_A_SINK, ids=str)
def test_one_key_beside_a_sink(target: Target, case: Case) -> None:
    inputs, reference = problem(case, target.dtype)
    reference.check(*calls.packed_attention(target, case, inputs))


@every_target
def test_batch_of_none(target: Target) -> None:
    case = Case("batch_of_none", (), ())
    none = np.zeros((0, 7, case.num_q_heads, case.head_dim))
    out, lse = octavo.attention(*(target.array(none) for _ in range(3)), return_lse=True)
    assert tuple(out.shape) == none.shape
    assert tuple(lse.shape) == none.shape[:3]
    packed = target.array(none[:, 0])
    start = target.int32([0])
    out = octavo.attention(packed, packed, packed, cu_seqlens_q=start, cu_seqlens_k=start)
    assert tuple(out.shape) == none[:, 0].shape


@every_target
@pytest.mark.parametrize("case", cases.named("prefill_gqa_4", "everything", "no_keys"), ids=str)
def test_result_without_lse_is_the_same(target: Target, case: Case) -> None:
    inputs, _ = problem(case, target.dtype)
    out, _ = calls.attention(target, case, inputs)
    alone = octavo.attention(
        *(target.array(calls.dense(case, x)) for x in (inputs.q, *problems.poisoned(case, inputs))),
        **case.masks,
        **calls.optional_arrays(target, inputs),
    )
    assert target.library.to_float64(alone).tobytes() == out.tobytes()


OUTPUTS = cases.named(
    "square", "prefill_mqa_8", "more_queries_than_keys", "no_keys", "head_dim_24", "group_7"
)


@writable_target
@pytest.mark.parametrize("case", OUTPUTS, ids=str)
def test_out_is_written_and_nothing_around_it(target: Target, case: Case) -> None:
    inputs, reference = problem(case, target.dtype)
    guarded = GuardedArray(target, case.batch, case.seqlens_q[0], case.num_q_heads, case.head_dim)
    result = calls.attention(target, case, inputs, out=guarded.array)
    reference.check(*result)
    reference.check_out(target.library.to_float64(guarded.array))
    guarded.check_margins()


@writable_target
@pytest.mark.parametrize("case", OUTPUTS, ids=str)
def test_out_may_be_q_itself(target: Target, case: Case) -> None:
    inputs, _ = problem(case, target.dtype)
    arrays = [target.array(calls.dense(case, x)) for x in (inputs.q, *problems.poisoned(case, inputs))]
    arguments = {**case.masks, **calls.optional_arrays(target, inputs), "return_lse": True}
    apart = octavo.attention(*arrays, **arguments)
    in_place = octavo.attention(*arrays, **arguments, out=arrays[0])
    assert in_place[0] is arrays[0]
    assert_same_bits(calls.read(target, in_place), calls.read(target, apart))


@writable_target
def test_out_may_be_strided(target: Target) -> None:
    case = cases.named("group_7")[0]
    inputs, reference = problem(case, target.dtype)
    head_major = target.nan(case.batch, case.num_q_heads, case.seqlens_q[0], case.head_dim)
    calls.attention(target, case, inputs, out=target.library.swap_axes(head_major, 1, 2))
    written = target.library.to_float64(head_major).swapaxes(1, 2)
    reference.check_out(written.reshape(reference.out.shape))


@writable_target
@pytest.mark.parametrize("case", cases.named("group_3", "group_5", "head_dim_96"), ids=str)
def test_strided_equals_contiguous(target: Target, case: Case) -> None:
    inputs, _ = problem(case, target.dtype)
    q, k, v = (calls.dense(case, x) for x in (inputs.q, inputs.k, inputs.v))
    masks = {**case.masks, "return_lse": True}
    contiguous = octavo.attention(*map(target.array, (q, k, v)), **masks)

    library = target.library
    head_major = [library.swap_axes(target.array(x.swapaxes(1, 2)), 1, 2) for x in (q, k, v)]
    assert_same_bits(
        calls.read(target, octavo.attention(*head_major, **masks)), calls.read(target, contiguous)
    )

    # q and k as slices of one projection, v inside a wider array: NaN all around.
    tokens_and_heads = [(x.shape[1], x.shape[2]) for x in (q, k, v)]
    sliced = []
    for x, (tokens, heads) in zip((q, k, v), tokens_and_heads, strict=True):
        wide = np.full((case.batch, tokens + 3, heads + 2, case.head_dim + 8), np.nan)
        wide[:, 1 : tokens + 1, 1 : heads + 1, : case.head_dim] = x
        sliced.append(target.array(wide)[:, 1 : tokens + 1, 1 : heads + 1, : case.head_dim])
    assert_same_bits(calls.read(target, octavo.attention(*sliced, **masks)), calls.read(target, contiguous))


@writable_target
def test_rows_that_are_not_aligned(target: Target) -> None:
    """Views that begin at any element: vector loads may not assume more than the element's alignment."""
    case = cases.named("group_3")[0]
    inputs, reference = problem(case, target.dtype)
    arrays = [calls.dense(case, x) for x in (inputs.q, inputs.k, inputs.v)]
    masks = {**case.masks, "return_lse": True}
    aligned = calls.read(target, octavo.attention(*map(target.array, arrays), **masks))
    for offset in (1, 3):
        shifted = []
        for x in arrays:
            wide = np.full((*x.shape[:3], case.head_dim + 5), np.nan)
            wide[..., offset : offset + case.head_dim] = x
            shifted.append(target.array(wide)[..., offset : offset + case.head_dim])
        result = calls.read(target, octavo.attention(*shifted, **masks))
        reference.check(*result)
        if target.on_cpu:  # a GPU may have another kernel for them
            assert_same_bits(result, aligned)


@every_target
@pytest.mark.parametrize("case", cases.named("group_3", "group_5", "group_7", "group_64"), ids=str)
def test_gqa_equals_repeated_heads(target: Target, case: Case) -> None:
    inputs, reference = problem(case, target.dtype)
    group_size = case.num_q_heads // case.num_kv_heads
    repeated = dataclasses.replace(
        inputs, k=np.repeat(inputs.k, group_size, axis=1), v=np.repeat(inputs.v, group_size, axis=1)
    )
    as_mha = dataclasses.replace(case, num_kv_heads=case.num_q_heads)
    reference.check(*calls.attention(target, as_mha, repeated))


@every_target
@pytest.mark.parametrize("case", cases.named("chunked_prefill", "ragged", "everything_packed"), ids=str)
def test_packed_equals_dense(target: Target, case: Case) -> None:
    inputs, reference = problem(case, target.dtype)
    outs, lses = [], []
    for b in range(case.batch):
        one, its_inputs = sequence_of(case, inputs, b)
        out, lse = calls.attention(target, one, its_inputs)
        outs.append(out.reshape(-1, *out.shape[2:]))
        lses.append(lse.reshape(-1, lse.shape[2]))
    reference.check(np.concatenate(outs), np.concatenate(lses))


def sequence_of(case: Case, inputs: Inputs, b: int) -> tuple[Case, Inputs]:
    """The case that holds only sequence b, and its arrays."""
    queries = slice(inputs.cu_seqlens_q[b], inputs.cu_seqlens_q[b + 1])
    keys = slice(inputs.cu_seqlens_k[b], inputs.cu_seqlens_k[b + 1])
    one = dataclasses.replace(
        case,
        name=f"{case.name}[{b}]",
        seqlens_q=case.seqlens_q[b : b + 1],
        seqlens_k=case.seqlens_k[b : b + 1],
        prefix_lens=case.prefix_lens[b : b + 1] if case.prefix_lens else None,
    )
    slopes, prefix_lens = inputs.alibi_slopes, inputs.prefix_lens
    return one, Inputs(
        inputs.q[queries],
        inputs.k[keys],
        inputs.v[keys],
        slopes[b : b + 1] if slopes is not None and slopes.ndim == 2 else slopes,
        problems.cumulative(one.seqlens_q),
        problems.cumulative(one.seqlens_k),
        prefix_lens[b : b + 1] if prefix_lens is not None else None,
        inputs.sinks,
    )


@cpu_target
@pytest.mark.parametrize("case", cases.named("chunked_prefill", "ragged", "everything_packed"), ids=str)
def test_result_does_not_depend_on_the_rest_of_the_batch(target: Target, case: Case) -> None:
    inputs, _ = problem(case, target.dtype)
    bounds = {"max_seqlen_q": max(case.seqlens_q), "max_seqlen_k": max(case.seqlens_k)}
    out, lse = calls.packed_attention(target, case, inputs, **bounds)
    for b in range(case.batch):
        one, its_inputs = sequence_of(case, inputs, b)
        rows = slice(inputs.cu_seqlens_q[b], inputs.cu_seqlens_q[b + 1])
        alone = calls.packed_attention(target, one, its_inputs)
        assert_same_bits(alone, (out[rows], lse[rows]))


@every_target
@pytest.mark.parametrize(
    "case", cases.named("square_not_causal", "alibi_not_causal", "last_queries_of_many_keys"), ids=str
)
def test_a_wide_window_is_no_window(target: Target, case: Case) -> None:
    inputs, reference = problem(case, target.dtype)
    unbounded = calls.attention(target, case, inputs)
    reference.check(*unbounded)
    for width in (max(case.seqlens_k), 2**31 - 1, 2**40):
        windowed = calls.attention(target, case, inputs, window_left=width, window_right=width)
        reference.check(*windowed)
        if target.on_cpu:
            assert_same_bits(windowed, unbounded)


@every_target
def test_prefix_of_everything_is_not_causal(target: Target) -> None:
    case = cases.named("square")[0]
    inputs, _ = problem(case, target.dtype)
    not_causal = dataclasses.replace(case, causal=False)
    reference = problems.make_reference(not_causal, inputs, target.dtype)
    prefix_lens = target.int32([max(case.seqlens_k)] * case.batch)
    reference.check(*calls.attention(target, case, inputs, prefix_lens=prefix_lens))
    reference.check(*calls.attention(target, case, inputs, prefix_lens=prefix_lens, window_left=3))


@every_target
def test_prefix_lens_are_a_causal_flag_of_each_sequence(target: Target) -> None:
    """Bit for bit on the CPU, and by the formula on GPUs, whose kernels may split otherwise."""
    case = Case("flags", (70, 70, 70), (113, 113, 113), num_q_heads=4, num_kv_heads=2)
    flags = np.array([False, True, False])
    flagged = dataclasses.replace(case, prefix_lens=tuple(int(n) for n in np.where(flags, 0, 113)))
    inputs, reference = problem(flagged, target.dtype)
    for call in (calls.attention, calls.packed_attention):
        found = call(target, flagged, inputs)
        reference.check(*found)
        if target.on_cpu:
            causal, full = (call(target, case, inputs, causal=c, prefix_lens=None) for c in (True, False))
            rows = flags if call is calls.attention else np.repeat(flags, 70)
            assert_same_bits(rows_of(found, rows), rows_of(causal, rows))
            assert_same_bits(rows_of(found, ~rows), rows_of(full, ~rows))


@every_target
def test_causal_is_window_right_0(target: Target) -> None:
    case = cases.named("last_queries_of_many_keys")[0]
    inputs, _ = problem(case, target.dtype)
    assert_same_bits(
        calls.attention(target, case, inputs, causal=False, window_right=0),
        calls.attention(target, case, inputs),
    )


@cpu_target
@pytest.mark.parametrize("first_nan", [0, 1, 30, 63, 64, 120])
def test_causal_nan(target: Target, first_nan: int) -> None:
    """On the CPU no query meets a key that it does not see, even one that its neighbours see."""
    case = Case("causal_nan", (129,), (129,), num_q_heads=4, num_kv_heads=2)
    inputs, _ = problem(case, target.dtype)
    clean = calls.attention(target, case, inputs)
    k, v = inputs.k.copy(), inputs.v.copy()
    k[first_nan:] = np.nan
    v[first_nan:] = np.nan
    out, lse = calls.attention(target, case, dataclasses.replace(inputs, k=k, v=v))
    assert_same_bits(
        (out[:, :first_nan], lse[:, :first_nan]), (clean[0][:, :first_nan], clean[1][:, :first_nan])
    )
    assert np.isnan(out[:, first_nan:]).all()


@cpu_target
def test_window_nan(target: Target) -> None:
    case = Case("window_nan", (100,), (100,), window_left=10, window_right=5, causal=False, num_kv_heads=2)
    inputs, _ = problem(case, target.dtype)
    clean = calls.attention(target, case, inputs)
    for position in (0, 31, 50, 99):
        k, v = inputs.k.copy(), inputs.v.copy()
        k[position] = np.inf
        v[position] = np.nan
        out, lse = calls.attention(target, case, dataclasses.replace(inputs, k=k, v=v))
        blind = ~problems.visible(case, 0)[:, position]
        assert_same_bits((out[:, blind], lse[:, blind]), (clean[0][:, blind], clean[1][:, blind]))
        assert np.isnan(out[:, ~blind]).all()


@cpu_target
@pytest.mark.parametrize("case", cases.named("prefill_gqa_4", "everything", "one_query_many_keys"), ids=str)
def test_any_number_of_threads_gives_the_same_bits(target: Target, case: Case) -> None:
    inputs, _ = problem(case, target.dtype)
    before = octavo.get_num_threads()
    try:
        results = []
        for num_threads in (1, 2, 3, 8):
            octavo.set_num_threads(num_threads)
            assert octavo.get_num_threads() == num_threads
            results.append(calls.attention(target, case, inputs))
    finally:
        octavo.set_num_threads(before)
    for result in results[1:]:
        assert_same_bits(result, results[0])


@every_target
def test_scores_far_from_zero(target: Target) -> None:
    """Scores of +-thousands: their maximum must be subtracted before any exponential is taken."""
    case = Case("far_from_zero", (9,), (75,), num_q_heads=2, num_kv_heads=1, head_dim=16, softmax_scale=16.0)
    inputs, _ = problem(case, target.dtype)
    for sign in (1.0, -1.0):
        shifted = dataclasses.replace(
            inputs, q=np.full_like(inputs.q, 8.0), k=np.full_like(inputs.k, sign * 8.0)
        )
        out, lse = calls.attention(target, case, shifted)
        reference = problems.make_reference(case, shifted, target.dtype)
        reference.check(out.reshape(reference.out.shape), lse)
