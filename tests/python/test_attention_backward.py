"""octavo.attention_backward, dense and packed."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

import octavo
from support import calls, cases, problems
from support.calls import GuardedArray, assert_same_bits
from support.case import Case
from support.oracle import Dropout
from support.oracle_backward import Reference
from support.problems import Inputs, OutputGradients
from support.strategies import drawn_cases
from support.targets import Target, cpu_target, every_target, writable_target
from test_attention import sequence_of

DROPOUT = Dropout(0.3, 2**35 + 11, 2**32 - 5)


def arguments(dropout: Dropout | None) -> dict[str, float | int]:
    if dropout is None:
        return {}
    return {"dropout_p": dropout.p, "dropout_seed": dropout.seed, "dropout_offset": dropout.offset}


@functools.lru_cache(maxsize=8)
def problem(
    case: Case, dtype: str, dropout: Dropout | None = None
) -> tuple[Inputs, OutputGradients, Reference]:
    inputs, gradients = problems.make_inputs(case, dtype), problems.make_output_gradients(case, dtype)
    reference = problems.make_backward_reference(case, inputs, gradients, dtype, dropout=dropout)
    return inputs, gradients, reference


@every_target
@pytest.mark.parametrize("case", [*cases.DENSE, *cases.BACKWARD], ids=str)
def test_dense(target: Target, case: Case) -> None:
    inputs, gradients, reference = problem(case, target.dtype)
    reference.check(*calls.attention_backward(target, case, inputs, gradients))


@every_target
@pytest.mark.parametrize("case", [*cases.PACKED, *(c for c in cases.DENSE if c.batch > 1)], ids=str)
def test_packed(target: Target, case: Case) -> None:
    inputs, gradients, reference = problem(case, target.dtype)
    reference.check(*calls.attention_backward(target, case, inputs, gradients, packed=True))
    tight = {"max_seqlen_q": max(case.seqlens_q), "max_seqlen_k": max(case.seqlens_k)}
    reference.check(*calls.attention_backward(target, case, inputs, gradients, packed=True, **tight))


@every_target
@given(
    case=drawn_cases(dense=True, value_dims=True, with_ranges=True),
    dropout=st.sampled_from((None, None, DROPOUT)),
)
def test_dense_of_any_shape(target: Target, case: Case, dropout: Dropout | None) -> None:
    inputs, gradients, reference = problem(case, target.dtype, dropout)
    reference.check(*calls.attention_backward(target, case, inputs, gradients, **arguments(dropout)))


@every_target
@given(case=drawn_cases(value_dims=True, with_ranges=True), dropout=st.sampled_from((None, None, DROPOUT)))
def test_packed_of_any_shape(target: Target, case: Case, dropout: Dropout | None) -> None:
    inputs, gradients, reference = problem(case, target.dtype, dropout)
    reference.check(
        *calls.attention_backward(target, case, inputs, gradients, packed=True, **arguments(dropout))
    )


# Scores near 0 that are sums of large products, and a plain error near 0 by chance. A name gives the numbers.
FEW_KEYS = (
    Case(
        name="drawn 20966",
        seqlens_q=(1,),
        seqlens_k=(2,),
        num_q_heads=2,
        num_kv_heads=1,
        head_dim=256,
        window_left=0,
        softcap=3.0,
        alibi="batch",
        sinks="normal",
        q_gain=4.0,
    ),
    Case(
        name="drawn 26566",
        seqlens_q=(1, 1),
        seqlens_k=(1, 0),
        num_q_heads=2,
        num_kv_heads=1,
        head_dim=96,
        causal=False,
        window_left=1,
        alibi="head",
        softmax_scale=0.2091719191453071,
        q_gain=4.0,
    ),
    Case(
        name="drawn 23662",
        seqlens_q=(1,),
        seqlens_k=(2,),
        num_q_heads=1,
        num_kv_heads=1,
        head_dim=96,
        window_left=1,
        prefix_lens=(6,),
        alibi="batch",
    ),
)


@every_target
@pytest.mark.parametrize("dropout", [None, DROPOUT])
@pytest.mark.parametrize("case", FEW_KEYS, ids=str)
def test_few_keys(target: Target, case: Case, dropout: Dropout | None) -> None:
    inputs, gradients, reference = problem(case, target.dtype, dropout)
    reference.check(
        *calls.attention_backward(target, case, inputs, gradients, packed=True, **arguments(dropout))
    )


@every_target
def test_batch_of_none(target: Target) -> None:
    none, rows = target.array(np.zeros((0, 7, 4, 64))), target.library.float32(np.zeros((0, 7, 4)))
    slopes = target.library.float32(np.ones(4))
    *gradients, of_slopes = octavo.attention_backward(
        *[none] * 5, rows, alibi_slopes=slopes, return_dalibi=True
    )
    assert [tuple(x.shape) for x in gradients] == [(0, 7, 4, 64)] * 3
    assert target.library.to_float64(of_slopes).tolist() == [0.0] * 4
    packed, rows = target.array(np.zeros((0, 4, 64))), target.library.float32(np.zeros((0, 4)))
    start = target.int32([0])
    gradients = octavo.attention_backward(*[packed] * 5, rows, cu_seqlens_q=start, cu_seqlens_k=start)
    assert [tuple(x.shape) for x in gradients] == [(0, 4, 64)] * 3


@every_target
def test_who_sees_nothing_and_is_seen_by_none_gets_zeros(target: Target) -> None:
    case = Case("alone", (9, 4, 0, 3), (5, 0, 7, 90), num_kv_heads=2, window_left=10, alibi="head")
    inputs, gradients, reference = problem(case, target.dtype)
    dq, dk, dv, *_ = found = calls.attention_backward(target, case, inputs, gradients, packed=True)
    reference.check(*found)
    blind = np.concatenate([~problems.visible(case, b).any(axis=1) for b in range(case.batch)])
    unseen = problems.unseen_keys(case)
    assert blind.sum() == 4 + 4 and unseen.sum() == 7 + 77
    assert not dq[blind].any() and not dk[unseen].any() and not dv[unseen].any()


SOME = cases.named(
    *("prefill_gqa_4", "everything", "everything_sinks", "window_both"),
    "more_queries_than_keys_alibi_prefix",
)


@every_target
@pytest.mark.parametrize("case", SOME, ids=str)
def test_without_dlse_it_is_zeros(target: Target, case: Case) -> None:
    inputs, gradients, _ = problem(case, target.dtype)
    zeros = dataclasses.replace(gradients, dlse=np.zeros_like(gradients.dlse))
    without = calls.attention_backward(target, case, inputs, gradients, dlse=None)
    assert_same_bits(without, calls.attention_backward(target, case, inputs, zeros))


@every_target
@pytest.mark.parametrize("case", SOME, ids=str)
def test_through_the_lse_alone(target: Target, case: Case) -> None:
    inputs, gradients, _ = problem(case, target.dtype)
    of_lse = dataclasses.replace(gradients, dout=np.zeros_like(gradients.dout))
    reference = problems.make_backward_reference(case, inputs, of_lse, target.dtype)
    _, _, dv, *_ = found = calls.attention_backward(target, case, inputs, of_lse)
    reference.check(*found)
    assert not dv.any()


@every_target
@pytest.mark.parametrize("case", SOME, ids=str)
def test_deterministic(target: Target, case: Case) -> None:
    inputs, gradients, reference = problem(case, target.dtype, DROPOUT)
    call = functools.partial(
        calls.attention_backward, target, case, inputs, gradients, deterministic=True, **arguments(DROPOUT)
    )
    first = call()
    reference.check(*first)
    for _ in range(3):
        assert_same_bits(call(), first)


@writable_target
@pytest.mark.parametrize("case", cases.named("group_7", "more_queries_than_keys", "head_dim_24"), ids=str)
def test_gradients_are_written_and_nothing_around_them(target: Target, case: Case) -> None:
    inputs, gradients, reference = problem(case, target.dtype)
    shapes = [calls.dense(case, x).shape for x in (inputs.q, inputs.k, inputs.v)]
    guarded = [GuardedArray(target, *shape) for shape in shapes]
    given_arrays = dict(zip(("dq", "dk", "dv"), (g.array for g in guarded), strict=True))
    found = calls.attention_backward(target, case, inputs, gradients, **given_arrays)
    reference.check(*found)
    for array, result in zip(guarded, found, strict=False):
        assert target.library.to_float64(array.array).tobytes() == result.tobytes()
        array.check_margins()


@writable_target
@pytest.mark.parametrize(("head_dim", "value_dim"), [(64, 8), (8, 64), (40, 40)])
def test_gradients_of_padding_are_zeros(target: Target, head_dim: int, value_dim: int) -> None:
    """Rows past the last sequence, whatever the arrays held; nothing is written beside them."""
    num_tokens, num_rows, num_q_heads, num_kv_heads = 3, 5, 4, 2
    q, k, v, dout = (
        target.array(np.ones((num_rows, num_heads, dim)))
        for num_heads, dim in (
            (num_q_heads, head_dim),
            (num_kv_heads, head_dim),
            (num_kv_heads, value_dim),
            (num_q_heads, value_dim),
        )
    )
    packed = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), target.int32([0, num_tokens]))
    packed |= dict.fromkeys(("max_seqlen_q", "max_seqlen_k"), num_tokens)
    out, lse = octavo.attention(q, k, v, return_lse=True, **packed)
    shapes = {"dq": q.shape, "dk": k.shape, "dv": v.shape}
    guarded = {name: GuardedArray(target, *shape) for name, shape in shapes.items()}
    octavo.attention_backward(
        dout, q, k, v, out, lse, **packed, **{name: array.array for name, array in guarded.items()}
    )
    for array in guarded.values():
        gradient = target.library.to_float64(array.array)
        assert np.isfinite(gradient).all() and (gradient[num_tokens:] == 0).all()
        array.check_margins()


@writable_target
def test_gradients_may_be_views_of_one_array(target: Target) -> None:
    """As of one projection to q, k and v: [batch, seqlen, heads of all three, head_dim]."""
    case = Case("one_projection", (70, 70), (70, 70), num_q_heads=6, num_kv_heads=2, head_dim=40)
    inputs, gradients, reference = problem(case, target.dtype)
    whole = target.nan(2, 70, 6 + 2 + 2 + 1, case.head_dim)
    views = {"dq": whole[:, :, :6], "dk": whole[:, :, 6:8], "dv": whole[:, :, 8:10]}
    found = calls.attention_backward(target, case, inputs, gradients, **views)
    reference.check(*found)
    assert_same_bits(found, calls.attention_backward(target, case, inputs, gradients))
    assert np.isnan(target.library.to_float64(whole[:, :, 10:])).all()
    head_major = target.nan(2, 6, 70, case.head_dim)
    dq = target.library.swap_axes(head_major, 1, 2)
    assert_same_bits(calls.attention_backward(target, case, inputs, gradients, dq=dq), found)


@writable_target
@pytest.mark.parametrize("case", cases.named("group_3", "group_5", "head_dim_96"), ids=str)
def test_strided_equals_contiguous(target: Target, case: Case) -> None:
    inputs, gradients, _ = problem(case, target.dtype)
    arrays = [calls.dense(case, x) for x in (gradients.dout, inputs.q, inputs.k, inputs.v)]
    dout, q, k, v = map(target.array, arrays)
    out, lse = octavo.attention(q, k, v, return_lse=True, **case.masks)
    dlse = target.library.float32(calls.dense(case, gradients.dlse))
    library = target.library

    def read(result: tuple[Any, ...]) -> tuple[NDArray[np.float64], ...]:
        return tuple(map(library.to_float64, result))

    expected = read(octavo.attention_backward(dout, q, k, v, out, lse, dlse=dlse, **case.masks))

    def head_major(x: Any) -> Any:
        """The same array, but its heads lie apart in memory."""
        copy = library.from_numpy(np.ascontiguousarray(library.to_numpy(x).swapaxes(1, 2)))
        return library.swap_axes(copy, 1, 2)

    strided = [head_major(x) for x in (dout, q, k, v, out, lse)]
    found = octavo.attention_backward(*strided, dlse=head_major(dlse), **case.masks)
    assert_same_bits(read(found), expected)

    # Inside wider arrays, with NaN all around, at any element.
    sliced = []
    for x in map(library.to_numpy, (dout, q, k, v, out)):
        batch, tokens, heads, head_dim = x.shape
        wide = np.full((batch, tokens + 3, heads + 2, head_dim + 5), np.nan, x.dtype)
        wide[:, 1 : tokens + 1, 1 : heads + 1, 3 : head_dim + 3] = x
        sliced.append(library.from_numpy(wide)[:, 1 : tokens + 1, 1 : heads + 1, 3 : head_dim + 3])
    found = read(octavo.attention_backward(*sliced, lse, dlse=dlse, **case.masks))
    if target.on_cpu:  # a GPU may have another kernel for them
        assert_same_bits(found, expected)


@cpu_target
@pytest.mark.parametrize("axes", [(0,), (1,), (2,), (0, 1, 2)], ids=str)
def test_dout_may_have_strides_of_0(target: Target, axes: tuple[int, ...]) -> None:
    """As autograd expands the gradient of a sum."""
    case = cases.named("group_3")[0]
    inputs, gradients, _ = problem(case, target.dtype)
    dense = calls.dense(case, gradients.dout)
    one = target.array(dense[tuple(slice(0, 1) if i in axes else slice(None) for i in range(4))])
    expanded = np.broadcast_to(one, dense.shape)
    assert any(stride == 0 for stride in expanded.strides[:3])
    q, k, v = (target.array(calls.dense(case, x)) for x in (inputs.q, inputs.k, inputs.v))
    forward = octavo.attention(q, k, v, return_lse=True, **case.masks)
    found = octavo.attention_backward(expanded, q, k, v, *forward, **case.masks)
    expected = octavo.attention_backward(expanded.copy(), q, k, v, *forward, **case.masks)
    assert_same_bits(found, expected)


@every_target
@pytest.mark.parametrize("case", cases.named("group_3", "group_5", "group_7", "group_64"), ids=str)
def test_gqa_equals_repeated_heads_summed(target: Target, case: Case) -> None:
    inputs, gradients, reference = problem(case, target.dtype)
    group_size = case.num_q_heads // case.num_kv_heads
    k, v = (np.repeat(x, group_size, axis=1) for x in (inputs.k, inputs.v))
    as_mha = dataclasses.replace(case, num_kv_heads=case.num_q_heads)
    one_each = dataclasses.replace(inputs, k=k, v=v)
    dq, *of_heads = calls.attention_backward(target, as_mha, one_each, gradients)
    sums = [
        x.reshape(*x.shape[:2], case.num_kv_heads, group_size, case.head_dim).sum(axis=3) for x in of_heads
    ]
    if target.dtype == "float32" or group_size < 8:  # each head's gradient is rounded
        reference.check(dq, *sums)


@every_target
@pytest.mark.parametrize("dropout", [None, DROPOUT], ids=["", "dropout"])
@pytest.mark.parametrize("case", cases.named("alibi_batch", "window_left", "everything"), ids=str)
def test_packed_equals_dense(target: Target, case: Case, dropout: Dropout | None) -> None:
    inputs, gradients, reference = problem(case, target.dtype, dropout)
    found = [
        calls.attention_backward(target, case, inputs, gradients, packed=packed, **arguments(dropout))
        for packed in (False, True)
    ]
    for result in found:
        reference.check(*result)
    if target.on_cpu:
        assert_same_bits(*([x.reshape(-1, *x.shape[-2:]) for x in result] for result in found))


@cpu_target
@pytest.mark.parametrize("case", cases.named("chunked_prefill", "ragged", "everything_packed"), ids=str)
def test_result_does_not_depend_on_the_rest_of_the_batch(target: Target, case: Case) -> None:
    inputs, gradients, _ = problem(case, target.dtype)
    dq, dk, dv, *dslopes = calls.attention_backward(target, case, inputs, gradients, packed=True)
    for b in range(case.batch):
        one, its_inputs = sequence_of(case, inputs, b)
        rows = slice(inputs.cu_seqlens_q[b], inputs.cu_seqlens_q[b + 1])
        keys = slice(inputs.cu_seqlens_k[b], inputs.cu_seqlens_k[b + 1])
        its_gradients = OutputGradients(gradients.dout[rows], gradients.dlse[rows])
        alone = calls.attention_backward(target, one, its_inputs, its_gradients, packed=True)
        assert_same_bits(alone, (dq[rows], dk[keys], dv[keys], *(x[b : b + 1] for x in dslopes)))


@cpu_target
@pytest.mark.parametrize(
    "case",
    cases.named("prefill_gqa_4", "everything", "alibi_long", "backward_d128_causal", "ragged"),
    ids=str,
)
def test_any_number_of_threads_gives_the_same_bits(target: Target, case: Case) -> None:
    """Threads take whole KV heads, or parts of them."""
    inputs, gradients, reference = problem(case, target.dtype)
    before = octavo.get_num_threads()
    try:
        results = []
        for num_threads in (1, 2, 3, 8, 40):
            octavo.set_num_threads(num_threads)
            results.append(calls.attention_backward(target, case, inputs, gradients, packed=True))
    finally:
        octavo.set_num_threads(before)
    reference.check(*results[0])
    for result in results[1:]:
        assert_same_bits(result, results[0])


@cpu_target
@pytest.mark.parametrize("num_threads", [1, 16])
@pytest.mark.parametrize("dropout", [None, DROPOUT], ids=["", "dropout"])
@pytest.mark.parametrize("sinks", ["", "normal"], ids=["", "sinks"])
def test_nan_stays_with_those_who_see_it(
    target: Target, sinks: str, dropout: Dropout | None, num_threads: int
) -> None:
    """On the CPU no query meets a key that it does not see, even one that its neighbours see; nor does a
    query that sees no key spoil what others add, whatever its own gradients are."""
    case = Case("backward_nan", (100,), (90,), window_left=10, window_right=5, causal=False, num_kv_heads=2)
    case = dataclasses.replace(case, sinks=sinks)
    inputs, gradients, _ = problem(case, target.dtype)
    run = functools.partial(calls.attention_backward, target, case, **arguments(dropout))
    before = octavo.get_num_threads()
    octavo.set_num_threads(num_threads)
    try:
        clean = run(inputs, gradients)
        for position in (0, 31, 50, 89):
            k, v = inputs.k.copy(), inputs.v.copy()
            k[position] = np.inf
            v[position] = np.nan
            dq, *_ = run(dataclasses.replace(inputs, k=k, v=v), gradients)
            blind = ~problems.visible(case, 0)[:, position]
            assert_same_bits([dq[:, blind]], [clean[0][:, blind]])
            assert np.isnan(dq[:, ~blind]).all()
        dout, dlse = gradients.dout.copy(), gradients.dlse.copy()
        blind = ~problems.visible(case, 0).any(axis=1)
        assert blind.sum() == 5
        dout[blind] = np.nan
        if not sinks:  # whose gradients follow dlse
            dlse[blind] = np.nan
        assert_same_bits(run(inputs, OutputGradients(dout, dlse)), clean)
    finally:
        octavo.set_num_threads(before)


@every_target
def test_scores_far_from_zero(target: Target) -> None:
    """Scores of +-thousands, and so the LSE: the weights are found again all the same."""
    case = Case("far_from_zero", (9,), (75,), num_q_heads=2, num_kv_heads=1, head_dim=16, softmax_scale=16.0)
    inputs, gradients, _ = problem(case, target.dtype)
    for sign in (1.0, -1.0):
        shifted = dataclasses.replace(
            inputs, q=np.full_like(inputs.q, 8.0), k=np.full_like(inputs.k, sign * 8.0)
        )
        reference = problems.make_backward_reference(case, shifted, gradients, target.dtype)
        reference.check(*calls.attention_backward(target, case, shifted, gradients))


# Dropout


@every_target
@pytest.mark.parametrize("case", SOME, ids=str)
def test_dropout_equals_the_oracle(target: Target, case: Case) -> None:
    inputs, gradients, reference = problem(case, target.dtype, DROPOUT)
    for packed in (False, True):
        reference.check(
            *calls.attention_backward(target, case, inputs, gradients, packed=packed, **arguments(DROPOUT))
        )


@every_target
def test_dropout_of_none_is_none(target: Target) -> None:
    case = cases.named("everything")[0]
    inputs, gradients, reference = problem(case, target.dtype)
    without = calls.attention_backward(target, case, inputs, gradients)
    found = calls.attention_backward(target, case, inputs, gradients, **arguments(Dropout(0.0, 3, 4)))
    assert_same_bits(found, without)
    # What rounds to no threshold drops nothing, and is hardly a factor.
    hardly = Dropout(2.0**-30, 3, 4)
    reference.check(*calls.attention_backward(target, case, inputs, gradients, **arguments(hardly)))


@every_target
def test_dropout_leaves_out_what_the_forward_does(target: Target) -> None:
    """Every weight is 1 / seqlen_k. Where dout is a unit vector for each query, dv holds the weights."""
    seqlen_q, seqlen_k, head_dim = 150, 421, 256
    q, k, v = (target.array(np.zeros((2, n, 1, head_dim))) for n in (seqlen_q, seqlen_k, seqlen_k))
    dout = target.array(
        np.broadcast_to(np.eye(seqlen_q, head_dim)[None, :, None], (2, seqlen_q, 1, head_dim))
    )
    forward = octavo.attention(q, k, v, return_lse=True, **arguments(DROPOUT))
    _, _, dv = octavo.attention_backward(dout, q, k, v, *forward, **arguments(DROPOUT))
    weights = target.library.to_float64(dv)[:, :, 0, :seqlen_q].swapaxes(1, 2)
    for b in range(2):
        kept = DROPOUT.keep(b, 1, seqlen_q, seqlen_k)[0]
        np.testing.assert_array_equal(weights[b] != 0.0, kept)
        np.testing.assert_allclose(weights[b][kept], 1.0 / seqlen_k / (1.0 - DROPOUT.p), rtol=2.0**-7)
