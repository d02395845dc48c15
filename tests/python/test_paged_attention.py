"""octavo.paged_attention: decode, and packed queries of any number."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import octavo
from support import calls, cases, oracle, problems
from support.calls import GuardedArray, assert_same_bits, rows_of
from support.case import Case
from support.oracle import Reference
from support.problems import Cache, Inputs
from support.strategies import WIDE_HEAD_DIMS, drawn_cases
from support.targets import Target, cpu_target, every_target, writable_target

ALL = (*cases.DECODE, *cases.PACKED, *cases.PAGED, *cases.PAGED_VALUE_DIMS)
ANY_DIMS: dict[str, Any] = {"head_dims": WIDE_HEAD_DIMS, "value_dims": True}


@functools.lru_cache(maxsize=8)
def problem(case: Case, dtype: str) -> tuple[Inputs, Cache, Reference]:
    inputs = problems.make_inputs(case, dtype)
    return inputs, problems.make_cache(case, inputs), problems.make_reference(case, inputs, dtype, paged=True)


@every_target
@pytest.mark.parametrize("case", cases.DECODE, ids=str)
def test_decode(target: Target, case: Case) -> None:
    inputs, cache, reference = problem(case, target.dtype)
    reference.check(*calls.paged_attention(target, case, inputs, cache, packed=False))


@every_target
@pytest.mark.parametrize("case", ALL, ids=str)
def test_packed_queries(target: Target, case: Case) -> None:
    inputs, cache, reference = problem(case, target.dtype)
    if target.on_cpu and not (case.is_cacheable or case.sees_all):
        with pytest.raises(ValueError, match="counts the new tokens and must be 0"):
            calls.paged_attention(target, case, inputs, cache)
        return
    reference.check(*calls.paged_attention(target, case, inputs, cache))
    reference.check(*calls.paged_attention(target, case, inputs, cache, max_seqlen_q=max(case.seqlens_q)))


@every_target
@given(case=drawn_cases(decode=True, paged=True, max_seqlen_k=600, with_ranges=True, **ANY_DIMS))
def test_decode_of_any_shape(target: Target, case: Case) -> None:
    inputs = problems.make_inputs(case, target.dtype)
    reference = problems.make_reference(case, inputs, target.dtype, paged=True)
    cache = problems.make_cache(case, inputs)
    reference.check(*calls.paged_attention(target, case, inputs, cache, packed=False))


@every_target
@given(
    case=drawn_cases(paged=True, with_ranges=True, **ANY_DIMS),
    num_splits=st.one_of(st.none(), st.integers(1, 20)),
)
def test_packed_queries_of_any_shape(target: Target, case: Case, num_splits: int | None) -> None:
    inputs = problems.make_inputs(case, target.dtype)
    reference = problems.make_reference(case, inputs, target.dtype, paged=True)
    cache = problems.make_cache(case, inputs)
    reference.check(*calls.paged_attention(target, case, inputs, cache, num_splits=num_splits))


@every_target
def test_batch_of_none(target: Target) -> None:
    pages = target.nan(3, 16, 2, 64)
    table, seq_lens = target.int32(np.zeros((0, 4))), target.int32([])
    q = target.nan(0, 4, 64)
    out, lse = octavo.paged_attention(q, pages, pages, table, seq_lens, return_lse=True)
    assert tuple(out.shape) == (0, 4, 64)
    assert tuple(lse.shape) == (0, 4)
    out = octavo.paged_attention(q, pages, pages, table, seq_lens, cu_seqlens_q=target.int32([0]))
    assert tuple(out.shape) == (0, 4, 64)


@every_target
def test_cache_without_pages(target: Target) -> None:
    """No sequence holds a page, so the cache and the table may be empty."""
    pages = target.nan(0, 16, 2, 64)
    q = target.array(np.ones((2, 4, 64)))
    result = octavo.paged_attention(
        q, pages, pages, target.int32(np.zeros((2, 0))), target.int32([0, 0]), return_lse=True
    )
    out, lse = calls.read(target, result)
    assert not out.any()
    assert np.isneginf(lse).all()


@every_target
@pytest.mark.parametrize(
    "case",
    cases.named(
        "decode", "decode_group_7", "decode_window_prefix", "decode_empty", "speculative", "everything_packed"
    ),
    ids=str,
)
def test_any_number_of_splits_agrees(target: Target, case: Case) -> None:
    inputs, cache, reference = problem(case, target.dtype)
    for num_splits in (1, 2, 3, 7, 16, 128, 1024):
        reference.check(*calls.paged_attention(target, case, inputs, cache, num_splits=num_splits))


@every_target
@pytest.mark.parametrize("num_splits", [1, 4])
@pytest.mark.parametrize(
    "case", cases.named("decode", "decode_page_size_17", "chunked_prefill", "page_size_1"), ids=str
)
def test_permuting_pages_changes_no_bit(target: Target, case: Case, num_splits: int) -> None:
    inputs, cache, _ = problem(case, target.dtype)
    other = problems.make_cache(case, inputs, shuffle=1)
    assert not np.array_equal(other.page_table, cache.page_table)
    assert_same_bits(
        calls.paged_attention(target, case, inputs, cache, num_splits=num_splits),
        calls.paged_attention(target, case, inputs, other, num_splits=num_splits),
    )


@cpu_target
@pytest.mark.parametrize("case", cases.named("decode", "everything_packed"), ids=str)
def test_page_size_changes_no_bit(target: Target, case: Case) -> None:
    inputs, cache, _ = problem(case, target.dtype)
    as_given = calls.paged_attention(target, case, inputs, cache, num_splits=2)
    for page_size in (1, 5, 128):
        other = dataclasses.replace(case, page_size=page_size)
        other_cache = problems.make_cache(other, inputs)
        assert_same_bits(calls.paged_attention(target, other, inputs, other_cache, num_splits=2), as_given)


def check_independence(target: Target, case: Case, **options: Any) -> None:
    inputs, cache, _ = problem(case, target.dtype)
    options["max_seqlen_q"] = max(case.seqlens_q)
    out, lse = calls.paged_attention(target, case, inputs, cache, **options)
    for b in range(case.batch):
        rows = slice(inputs.cu_seqlens_q[b], inputs.cu_seqlens_q[b + 1])
        alone = calls.paged_attention(target, *problems.sequence_of(case, inputs, cache, b), **options)
        assert_same_bits(alone, (out[rows], lse[rows]))


@every_target
@pytest.mark.parametrize("case", [x for x in ALL if x.is_cacheable or x.sees_all], ids=str)
def test_a_static_past_changes_no_bit(target: Target, case: Case) -> None:
    """Where nothing is under way, the promise that nothing writes to earlier tokens is kept."""
    inputs, cache, _ = problem(case, target.dtype)
    for options in ({}, {"max_seqlen_q": max(case.seqlens_q)}):
        plain = calls.paged_attention(target, case, inputs, cache, **options)
        assert_same_bits(
            calls.paged_attention(target, case, inputs, cache, static_past=True, **options), plain
        )


INDEPENDENT = cases.named("decode", "decode_everything", "decode_pages_2000", "chunked_prefill", "ragged")


@every_target
@pytest.mark.parametrize(
    "options", [{"num_splits": 1}, {"num_splits": 5}, {"batch_invariant": True}], ids=str
)
@pytest.mark.parametrize("case", INDEPENDENT, ids=str)
def test_result_does_not_depend_on_the_rest_of_the_batch(
    target: Target, case: Case, options: dict[str, Any]
) -> None:
    check_independence(target, case, **options)


@cpu_target
@pytest.mark.parametrize("case", INDEPENDENT, ids=str)
def test_nor_do_splits_chosen_on_the_cpu(target: Target, case: Case) -> None:
    check_independence(target, case)


@cpu_target
@pytest.mark.parametrize("case", cases.named("decode", "decode_pages_2000", "everything_packed"), ids=str)
def test_any_number_of_threads_gives_the_same_bits(target: Target, case: Case) -> None:
    inputs, cache, _ = problem(case, target.dtype)
    before = octavo.get_num_threads()
    try:
        results = []
        for num_threads in (1, 2, 3, 8):
            octavo.set_num_threads(num_threads)
            results.append(calls.paged_attention(target, case, inputs, cache))
    finally:
        octavo.set_num_threads(before)
    for result in results[1:]:
        assert_same_bits(result, results[0])


# On the CPU a thread reads several KV heads together, as many as one tile of rows holds. Few rows of a head
# read keys in place where head_dim fills whole lines of the cache; the others copy them.
HEADS_TOGETHER = (
    Case("two_runs_of_heads", (1,) * 2, (70, 1300), num_q_heads=120, num_kv_heads=40, head_dim=32),
    Case("head_dim_80", (1,) * 2, (70, 900), num_q_heads=12, num_kv_heads=4, head_dim=80, window_left=99),
    Case("group_13", (1,) * 2, (70, 900), num_q_heads=39, num_kv_heads=3, head_dim=64, softcap=20.0),
    Case("drafts", (3, 2), (90, 1100), num_q_heads=8, num_kv_heads=4, head_dim=64, prefix_lens=(5, 200)),
    Case(
        "biased",
        (1,) * 2,
        (70, 1100),
        num_q_heads=8,
        num_kv_heads=4,
        alibi="head",
        window_left=500,
        sinks="normal",
    ),
)


@cpu_target
@pytest.mark.parametrize("case", HEADS_TOGETHER, ids=str)
def test_a_head_does_not_depend_on_its_neighbours(target: Target, case: Case) -> None:
    """Nor does it matter how many heads a thread takes, which follows from the number of threads."""
    inputs, cache, reference = problem(case, target.dtype)
    before = octavo.get_num_threads()
    try:
        octavo.set_num_threads(1)
        together = calls.paged_attention(target, case, inputs, cache)
        reference.check(*together)
        for num_threads in (2, 5, 40):
            octavo.set_num_threads(num_threads)
            assert_same_bits(calls.paged_attention(target, case, inputs, cache), together)
    finally:
        octavo.set_num_threads(before)
    for h in range(case.num_kv_heads):
        heads = slice(h * case.group_size, (h + 1) * case.group_size)
        slopes, sinks = inputs.alibi_slopes, inputs.sinks
        alone = calls.paged_attention(
            target,
            dataclasses.replace(case, num_q_heads=case.group_size, num_kv_heads=1),
            dataclasses.replace(
                inputs,
                q=inputs.q[:, heads],
                alibi_slopes=slopes if slopes is None else slopes[..., heads],
                sinks=sinks if sinks is None else sinks[heads],
            ),
            dataclasses.replace(
                cache, k_pages=cache.k_pages[:, :, h : h + 1], v_pages=cache.v_pages[:, :, h : h + 1]
            ),
        )
        assert_same_bits(alone, (together[0][:, heads], together[1][:, heads]))


@cpu_target
def test_what_a_window_leaves_out_may_be_nan(target: Target) -> None:
    """Keys that a tile of the window holds as well."""
    case = Case("window_nan", (1,), (200,), num_q_heads=8, num_kv_heads=4, head_dim=64, window_left=99)
    inputs, _, reference = problem(case, target.dtype)
    k, v = inputs.k.copy(), inputs.v.copy()
    k[:100] = v[:100] = np.nan
    cache = problems.make_cache(case, dataclasses.replace(inputs, k=k, v=v))
    reference.check(*calls.paged_attention(target, case, inputs, cache))


@every_target
@pytest.mark.parametrize("with_trees", [False, True])
def test_prefix_lens_are_a_causal_flag_of_each_sequence(target: Target, with_trees: bool) -> None:
    """Bit for bit on the CPU, and by the formula on GPUs, whose kernels may split otherwise.

    A tree hides keys of the sequences that are causal alone.
    """
    case = Case("flags", (40, 1, 30, 33), (600, 100, 30, 33), num_q_heads=4, num_kv_heads=2)
    flags = np.array([False, False, True, False])
    flagged = dataclasses.replace(case, prefix_lens=tuple(int(n) for n in np.where(flags, 0, case.seqlens_k)))
    words = np.random.default_rng(0).integers(0, 2**63, sum(case.seqlens_q)) if with_trees else None
    inputs = problems.make_inputs(flagged, target.dtype)
    tree = None if words is None else words.tolist()
    reference = problems.make_reference(flagged, inputs, target.dtype, paged=True, tree_mask=tree)
    cache = problems.make_cache(flagged, inputs)
    mask = None if words is None else target.int32(words.view(np.int32).reshape(-1, 2))
    found = calls.paged_attention(target, flagged, inputs, cache, tree_mask=mask)
    reference.check(*found)
    if target.on_cpu:
        causal = calls.paged_attention(target, case, inputs, cache, tree_mask=mask, prefix_lens=None)
        full = calls.paged_attention(target, case, inputs, cache, causal=False, prefix_lens=None)
        rows = np.repeat(flags, case.seqlens_q)
        assert_same_bits(rows_of(found, rows), rows_of(causal, rows))
        assert_same_bits(rows_of(found, ~rows), rows_of(full, ~rows))


@every_target
@pytest.mark.parametrize(
    "case", cases.named("decode_group_3", "decode_group_5", "decode_group_7", "decode_group_64"), ids=str
)
def test_gqa_equals_repeated_heads(target: Target, case: Case) -> None:
    inputs, cache, reference = problem(case, target.dtype)
    group_size = case.num_q_heads // case.num_kv_heads
    repeated = dataclasses.replace(
        cache,
        k_pages=np.repeat(cache.k_pages, group_size, axis=2),
        v_pages=np.repeat(cache.v_pages, group_size, axis=2),
    )
    reference.check(*calls.paged_attention(target, case, inputs, repeated))


@every_target
@pytest.mark.parametrize("case", cases.named("chunked_prefill", "window_packed", "decode_softcap"), ids=str)
def test_paged_equals_packed(target: Target, case: Case) -> None:
    """octavo.attention over the gathered pages meets the same reference."""
    inputs, cache, reference = problem(case, target.dtype)
    gathered = dataclasses.replace(
        inputs,
        k=oracle.gather_pages(cache.k_pages, cache.page_table, cache.seq_lens),
        v=oracle.gather_pages(cache.v_pages, cache.page_table, cache.seq_lens),
    )
    reference.check(*calls.packed_attention(target, case, gathered))
    reference.check(*calls.paged_attention(target, case, inputs, cache))


@every_target
@pytest.mark.parametrize("case", cases.named("decode", "decode_everything"), ids=str)
def test_decode_equals_packed_queries(target: Target, case: Case) -> None:
    inputs, cache, reference = problem(case, target.dtype)
    for num_splits in (1, 3):
        decode = calls.paged_attention(target, case, inputs, cache, packed=False, num_splits=num_splits)
        packed = calls.paged_attention(target, case, inputs, cache, max_seqlen_q=1, num_splits=num_splits)
        reference.check(*decode)
        reference.check(*packed)
        if target.on_cpu:
            assert_same_bits(decode, packed)


@writable_target
@pytest.mark.parametrize(
    "case", cases.named("decode", "decode_page_size_17", "decode_group_5", "chunked_prefill"), ids=str
)
def test_strided_equals_contiguous(target: Target, case: Case) -> None:
    inputs, cache, _ = problem(case, target.dtype)
    table, seq_lens = target.int32(cache.page_table), target.int32(cache.seq_lens)
    arguments = {
        **case.masks,
        "cu_seqlens_q": target.int32(inputs.cu_seqlens_q),
        "num_splits": 2,
        "return_lse": True,
    }
    q, k, v = inputs.q, cache.k_pages, cache.v_pages
    contiguous = octavo.paged_attention(*map(target.array, (q, k, v)), table, seq_lens, **arguments)

    # Pages whose heads come first, k and v pages side by side in one array, q a slice of one projection.
    swap_axes = target.library.swap_axes
    head_major = [swap_axes(target.array(x.swapaxes(1, 2)), 1, 2) for x in (k, v)]
    both = target.array(np.stack([k, v], axis=1))
    wide = np.full((len(q), case.num_q_heads + 3, case.head_dim + 8), np.nan)
    wide[:, 2 : case.num_q_heads + 2, : case.head_dim] = q
    sliced_q = target.array(wide)[:, 2 : case.num_q_heads + 2, : case.head_dim]
    wide_table = np.full((case.batch, cache.page_table.shape[1] + 5), -1)
    wide_table[:, : cache.page_table.shape[1]] = cache.page_table
    sliced_table = target.int32(wide_table)[:, : cache.page_table.shape[1]]
    for result in (
        octavo.paged_attention(target.array(q), *head_major, table, seq_lens, **arguments),
        octavo.paged_attention(target.array(q), both[:, 0], both[:, 1], table, seq_lens, **arguments),
        octavo.paged_attention(sliced_q, *head_major, sliced_table, seq_lens, **arguments),
    ):
        assert_same_bits(calls.read(target, result), calls.read(target, contiguous))


@writable_target
@pytest.mark.parametrize(
    "case", cases.named("decode", "decode_empty", "decode_group_7", "ragged", "decode_group_5"), ids=str
)
def test_out_is_written_and_nothing_around_it(target: Target, case: Case) -> None:
    inputs, cache, reference = problem(case, target.dtype)
    for num_splits in (None, 1, 6):
        guarded = GuardedArray(target, *inputs.q.shape)
        result = calls.paged_attention(target, case, inputs, cache, out=guarded.array, num_splits=num_splits)
        reference.check(*result)
        reference.check_out(target.library.to_float64(guarded.array))
        guarded.check_margins()


@writable_target
@pytest.mark.parametrize("case", cases.named("decode", "decode_group_7", "ragged"), ids=str)
def test_out_may_be_q_itself(target: Target, case: Case) -> None:
    inputs, cache, _ = problem(case, target.dtype)
    pages = [target.array(cache.k_pages), target.array(cache.v_pages)]
    tables = [target.int32(cache.page_table), target.int32(cache.seq_lens)]
    arguments = {**case.masks, "cu_seqlens_q": target.int32(inputs.cu_seqlens_q), "return_lse": True}
    for num_splits in (None, 1, 6):
        q = target.array(inputs.q)
        apart = octavo.paged_attention(q, *pages, *tables, **arguments, num_splits=num_splits)
        in_place = octavo.paged_attention(q, *pages, *tables, **arguments, num_splits=num_splits, out=q)
        assert in_place[0] is q
        assert_same_bits(calls.read(target, in_place), calls.read(target, apart))


@every_target
def test_a_wide_window_is_no_window(target: Target) -> None:
    case = cases.named("decode")[0]
    inputs, cache, _ = problem(case, target.dtype)
    unbounded = calls.paged_attention(target, case, inputs, cache, num_splits=3)
    for width in (max(case.seqlens_k), 2**31 - 1, 2**40):
        assert_same_bits(
            calls.paged_attention(target, case, inputs, cache, num_splits=3, window_left=width), unbounded
        )


@every_target
def test_pages_may_be_shared(target: Target) -> None:
    """Forked sequences: the same pages in several rows of the table, of different lengths."""
    case = Case("shared_pages", (1, 1, 1), (61, 61, 61), num_kv_heads=2)
    inputs, cache, _ = problem(case, target.dtype)
    lengths = (61, 40, 17)
    shared = dataclasses.replace(
        cache,
        page_table=np.repeat(cache.page_table[:1], 3, axis=0),
        seq_lens=np.array(lengths, np.int32),
    )
    k, v = (oracle.gather_pages(x, shared.page_table, lengths) for x in (cache.k_pages, cache.v_pages))
    reference = oracle.attention(inputs.q, k, v, case.seqlens_q, lengths, dtype=target.dtype, causal=True)
    reference.check(*calls.paged_attention(target, case, inputs, shared))


@cpu_target
def test_causal_nan(target: Target) -> None:
    """On the CPU no query meets a key that it does not see, even one that its neighbours see."""
    case = Case("paged_causal_nan", (70,), (170,), num_kv_heads=2)
    inputs, cache, _ = problem(case, target.dtype)
    clean = calls.paged_attention(target, case, inputs, cache)
    for first_nan in (101, 130, 169):
        k, v = inputs.k.copy(), inputs.v.copy()
        k[first_nan:] = np.nan
        v[first_nan:] = np.nan
        poisoned = problems.make_cache(case, dataclasses.replace(inputs, k=k, v=v))
        out, lse = calls.paged_attention(target, case, inputs, poisoned)
        rows = first_nan - 100
        assert_same_bits((out[:rows], lse[:rows]), (clean[0][:rows], clean[1][:rows]))
        assert np.isnan(out[rows:]).all()
