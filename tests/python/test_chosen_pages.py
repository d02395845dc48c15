"""Sparse decoding: paged_attention over the pages that a caller chooses."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import octavo
from support import calls, oracle, problems, quantised
from support.calls import assert_same_bits
from support.case import Case
from support.strategies import drawn_cases
from support.targets import Target, cpu_target, every_target

Lists = NDArray[np.int32]  # [batch, num_kv_heads or 1, num_chosen]
KINDS = ("random", "newest", "all", "few", "shared")


def num_pages_of(case: Case, b: int) -> int:
    return -(-case.seqlens_k[b] // case.page_size)


def make_lists(case: Case, kind: str, seed: int = 0) -> Lists:
    """One for each KV head, or for all of them. Sequences of length 0 have lists that nobody may look at."""
    random = np.random.default_rng(seed)
    max_pages = max(map(num_pages_of, [case] * case.batch, range(case.batch)), default=0)
    num_chosen = 3 if kind == "few" else max(max_pages, 1) + (2 if kind == "random" else 0)
    heads = 1 if kind == "shared" else case.num_kv_heads
    lists = np.full((case.batch, heads, num_chosen), -1, np.int32)
    for b in range(case.batch):
        pages = num_pages_of(case, b)
        for h in range(heads):
            count = pages if kind == "all" else int(random.integers(0, min(pages, num_chosen) + 1))
            chosen = np.sort(random.permutation(pages)[:count])
            if kind == "newest" and count:
                chosen[-1] = pages - 1
            lists[b, h, :count] = chosen
        if not pages:
            lists[b] = 2**30
    return lists


def given_as(lists: Lists) -> Lists:
    """As the operator takes it: [batch, num_chosen] where all heads have one list."""
    return lists[:, 0] if lists.shape[1] == 1 else lists


@functools.lru_cache(maxsize=4)
def make_inputs(case: Case, dtype: str) -> problems.Inputs:
    """Nobody writes into them."""
    return problems.make_inputs(case, dtype)


def poisoned(case: Case, inputs: problems.Inputs, lists: Lists) -> problems.Cache:
    """A cache with NaN in what no query of a head sees, and no page where no head has chosen one."""
    k, v, begin = inputs.k.copy(), inputs.v.copy(), 0
    for b, length in enumerate(case.seqlens_k):
        chosen = oracle.in_chosen_pages(lists[b], case.page_size, case.num_kv_heads, length)[:, 0].T
        k[begin : begin + length][~chosen] = v[begin : begin + length][~chosen] = np.nan
        begin += length
    cache = problems.make_cache(case, dataclasses.replace(inputs, k=k, v=v))
    table = cache.page_table.copy()
    for b, row in enumerate(table):
        unchosen = ~np.isin(np.arange(len(row)), lists[b])
        row[unchosen] = np.resize(problems.NO_SUCH_PAGE, len(row))[unchosen]
    return dataclasses.replace(cache, page_table=table)


def check(
    target: Target, case: Case, lists: Lists, cache: problems.Cache | None = None, **options: Any
) -> calls.Result:
    inputs = make_inputs(case, target.dtype)
    reference = problems.make_reference(
        case, inputs, target.dtype, paged=True, chosen_pages=lists, page_size=case.page_size
    )
    cache = cache or poisoned(case, inputs, lists)
    result = calls.paged_attention(
        target, case, inputs, cache, chosen_pages=target.int32(given_as(lists)), **options
    )
    # On a GPU chosen pages are read in fixed splits.
    reference.check(*result, 1.0 if target.device == "cpu" else oracle.EPSILONS_OF_UNIFIED_MAX)
    return result


CASES = [
    Case("chosen", (1, 1, 1, 1), (500, 40, 0, 4001), num_q_heads=8, num_kv_heads=2),
    Case("chosen_128", (1,) * 5, (16, 1700, 129, 64, 1), num_q_heads=32, num_kv_heads=8, head_dim=128),
    Case("chosen_one_head", (1, 1), (3000, 777), num_q_heads=1, num_kv_heads=1, head_dim=128, page_size=64),
    Case(
        "chosen_tokens", (1, 1, 1), (300, 2500, 33), num_q_heads=4, num_kv_heads=2, page_size=1, head_dim=128
    ),
    Case("chosen_256", (1, 1), (900, 320), num_q_heads=8, num_kv_heads=2, head_dim=256, page_size=64),
    Case("chosen_80", (1, 1), (1000, 65), num_q_heads=6, num_kv_heads=2, head_dim=80, page_size=64),
    Case("chosen_odd_pages", (1, 1), (1000, 290), num_q_heads=15, num_kv_heads=3, head_dim=96, page_size=7),
    Case("chosen_group_16", (1, 1), (1300, 90), num_q_heads=16, num_kv_heads=1, head_dim=128, page_size=32),
    Case("chosen_192_128", (1, 1), (900, 320), num_q_heads=8, num_kv_heads=2, head_dim=192, value_dim=128),
    Case("chosen_64_128", (1, 1), (900, 320), num_q_heads=16, num_kv_heads=1, value_dim=128, page_size=7),
    Case("chosen_window", (1, 1, 1), (700, 130, 41), window_left=200, num_q_heads=8, num_kv_heads=2),
    Case("chosen_alibi", (1, 1, 1), (700, 41, 2000), alibi="batch", num_q_heads=8, num_kv_heads=2),
    Case(
        "chosen_all_at_once", (1, 1), (900, 330), window_left=300, alibi="head", softcap=9.0, sinks="normal"
    ),
    Case("chosen_long", (1,), (20000,), num_q_heads=8, num_kv_heads=2, head_dim=128),
    Case("chosen_many", (1,) * 40, tuple(range(1, 601, 15)), num_q_heads=4, num_kv_heads=4, page_size=8),
]
DRAFTS = [
    Case("chosen_drafts", (4, 2, 0, 1, 3), (500, 2, 70, 18, 129), num_q_heads=8, num_kv_heads=2),
    Case("chosen_drafts_128", (8, 5), (900, 77), num_q_heads=4, num_kv_heads=2, head_dim=128, page_size=64),
    Case(
        "chosen_drafts_window", (6, 6), (400, 90), window_left=64, num_q_heads=4, num_kv_heads=2, page_size=1
    ),
    Case("chosen_drafts_alibi", (3, 8), (400, 90), alibi="head", num_q_heads=4, num_kv_heads=2, head_dim=80),
    Case("chosen_not_causal", (4, 4), (300, 50), causal=False, window_right=2, window_left=90, page_size=8),
    Case("chosen_drafts_256", (4, 3), (300, 50), num_q_heads=4, num_kv_heads=2, head_dim=256),
]


@every_target
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CASES + DRAFTS, ids=str)
def test_agrees_with_the_formula(target: Target, case: Case, kind: str) -> None:
    """With NaN in all that is not chosen, and pages that do not exist."""
    lists = make_lists(case, kind)
    inputs = make_inputs(case, target.dtype)
    cache = poisoned(case, inputs, lists)
    result = check(target, case, lists, cache, max_seqlen_q=max(case.seqlens_q))
    options = {"max_seqlen_q": max(case.seqlens_q), "chosen_pages": target.int32(given_as(lists))}
    invariant = calls.paged_attention(target, case, inputs, cache, batch_invariant=True, **options)
    assert_same_bits(invariant, result)


@every_target
@pytest.mark.parametrize("case", DRAFTS, ids=str)
def test_bits_do_not_depend_on_the_rest_of_the_batch(target: Target, case: Case) -> None:
    lists = make_lists(case, "random")
    inputs = problems.make_inputs(case, target.dtype)
    cache = problems.make_cache(case, inputs)
    options: dict[str, Any] = {"max_seqlen_q": max(case.seqlens_q)}
    chosen = given_as(lists)
    out, lse = calls.paged_attention(
        target, case, inputs, cache, chosen_pages=target.int32(chosen), **options
    )
    for b in range(case.batch):
        alone, alone_inputs, alone_cache = problems.sequence_of(case, inputs, cache, b)
        rows = slice(inputs.cu_seqlens_q[b], inputs.cu_seqlens_q[b + 1])
        own = target.int32(chosen[b : b + 1])
        result = calls.paged_attention(target, alone, alone_inputs, alone_cache, chosen_pages=own, **options)
        assert_same_bits(result, (out[rows], lse[rows]))


def explained(case: Case, device: str) -> Any:
    shapes = {
        "q": Shape((sum(case.seqlens_q), case.num_q_heads, case.head_dim), "bfloat16"),
        "k_pages": Shape((9, case.page_size, case.num_kv_heads, case.head_dim), "bfloat16"),
        "v_pages": Shape((9, case.page_size, case.num_kv_heads, case.head_dim_v), "bfloat16"),
        "page_table": Shape((case.batch, max(num_pages_of(case, b) for b in range(case.batch))), "int32"),
        "seq_lens": Shape((case.batch,), "int32"),
        "cu_seqlens_q": Shape((case.batch + 1,), "int32"),
        "chosen_pages": Shape((case.batch, case.num_kv_heads, 3), "int32"),
    }
    return octavo.explain("paged_attention", **shapes, max_seqlen_q=max(case.seqlens_q), device=device)


@dataclasses.dataclass
class Shape:
    """All that octavo.explain needs of an argument."""

    shape: tuple[int, ...]
    dtype: str


@cpu_target
@settings(deadline=None)
@given(drawn_cases(paged=True, value_dims=True), st.integers(0, 2**16), st.sampled_from(KINDS))
def test_drawn(target: Target, case: Case, seed: int, kind: str) -> None:
    case = dataclasses.replace(case, attention_chunk=0, prefix_lens=None)
    check(target, case, make_lists(case, kind, seed))


@pytest.mark.gpu
@settings(deadline=None, max_examples=60)
@given(
    drawn_cases(paged=True, value_dims=True, max_seqlen_q=2, max_seqlen_k=900),
    st.integers(0, 2**16),
    st.sampled_from(KINDS),
)
def test_drawn_on_a_gpu(case: Case, seed: int, kind: str) -> None:
    case = dataclasses.replace(case, attention_chunk=0, prefix_lens=None)
    if not case.causal and case.window_right != 0:
        case = dataclasses.replace(case, alibi_symmetric=False)  # which the kernel does not serve there
    if 2 * case.group_size > (16 if max(case.head_dim, case.head_dim_v) <= 128 else 8):
        case = dataclasses.replace(case, num_q_heads=case.num_kv_heads)
    check(Target("torch", "cuda", "bfloat16"), case, make_lists(case, kind, seed), max_seqlen_q=2)


@every_target
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_sequence_has_its_bits_in_every_batch(target: Target, case: Case) -> None:
    """Also without batch_invariant; and whatever room its list has."""
    lists = make_lists(case, "random", 5)
    inputs = make_inputs(case, target.dtype)
    cache = poisoned(case, inputs, lists)
    out, lse = check(target, case, lists, cache, max_seqlen_q=1)
    for b in range(0, case.batch, 9):
        if case.seqlens_k[b] == 0:
            continue
        wider = np.pad(lists[b : b + 1], ((0, 0), (0, 0), (0, 5)), constant_values=-1)
        alone = problems.sequence_of(case, inputs, cache, b)
        result = calls.paged_attention(target, *alone, packed=False, chosen_pages=target.int32(wider))
        assert_same_bits(result, (out[b : b + 1], lse[b : b + 1]))


@cpu_target
def test_all_pages_are_those_of_a_call_without(target: Target) -> None:
    case = Case("chosen_everything", (1, 1, 3), (500, 40, 77), num_q_heads=8, num_kv_heads=2, alibi="head")
    inputs = problems.make_inputs(case, target.dtype)
    cache = problems.make_cache(case, inputs)
    plain = calls.paged_attention(target, case, inputs, cache)
    assert_same_bits(check(target, case, make_lists(case, "all")), plain)


@every_target
def test_pages_off_the_newest_hide_the_query_s_own_token(target: Target) -> None:
    case = Case("chosen_old", (1, 1), (100, 100), page_size=16, num_q_heads=4, num_kv_heads=2)
    lists = np.array([[[0, 2, 5]], [[-1, -1, -1]]], np.int32)
    out, lse = check(target, case, lists)
    assert np.isneginf(lse[1]).all() and not out[1].any()


def test_every_kind_of_lists() -> None:
    case = Case("chosen_kinds", (1, 1), (90, 41), num_q_heads=4, num_kv_heads=2, head_dim=16)
    inputs = problems.make_inputs(case, "float32")
    cache = problems.make_cache(case, inputs)
    arrays = [x.astype(np.float32) for x in (inputs.q, cache.k_pages, cache.v_pages)]
    for lists in (make_lists(case, "random", 3), make_lists(case, "shared", 3)):
        lists = given_as(lists)
        expected = octavo.paged_attention(*arrays, cache.page_table, cache.seq_lens, chosen_pages=lists)
        apart = np.full([2 * n for n in lists.shape], 2**40)
        view = apart[(slice(None, None, 2),) * lists.ndim]
        view[...] = lists
        gaps = np.zeros((*lists.shape[:-1], lists.shape[-1] + 3), np.int32)
        gaps[..., :-3] = lists
        for kind in (lists.astype(np.int64), lists.tolist(), view, gaps[..., :-3]):
            out = octavo.paged_attention(*arrays, cache.page_table, cache.seq_lens, chosen_pages=kind)
            np.testing.assert_array_equal(out, expected)
        assert not np.array_equal(octavo.paged_attention(*arrays, cache.page_table, cache.seq_lens), expected)


def test_explain() -> None:
    """Hopper's decode kernel, or a sentence that says why not."""
    case = Case("chosen_explain", (1, 1), (900, 77), num_q_heads=8, num_kv_heads=2, head_dim=128)
    text = explained(case, "h100")
    assert text.kernel.startswith("split_kv_decode<")
    assert "of chosen pages" in text.summary and text.plan["chosen_pages"] is True
    assert "chosen_pages is given" in text.why_not["sm80_attention"]
    many = dataclasses.replace(case, num_q_heads=34)
    message = (
        r"^paged_attention: chosen_pages on a GPU are read by split_kv_decode, which cannot serve this call"
    )
    with pytest.raises(
        ValueError, match=message + ": it takes at most 16 rows per KV head .*, and these are 17"
    ):
        explained(many, "h100")
    with pytest.raises(ValueError, match=message + ": it takes up to 227 KB of shared memory"):
        explained(case, "a100")


@pytest.mark.parametrize("kind", quantised.KINDS)
@pytest.mark.parametrize("page_size", [1, 16, 48])
def test_caches_of_codes(kind: str, page_size: int) -> None:
    """As a call over pages of the codes' values. On GPUs tests/cpp/cuda_chosen_pages_test.cpp."""
    lengths, random = [5 * 48 + 7, 48 * 9], np.random.default_rng(page_size)
    cache, table, seq_lens = quantised.filled(kind, lengths, page_size=page_size)
    case = Case("chosen_codes", (1, 1), tuple(lengths), num_q_heads=8, num_kv_heads=2, page_size=page_size)
    lists = make_lists(case, "random")
    q = random.standard_normal((2, 8, 64)).astype(np.float32)
    k_pages, v_pages = (np.nan_to_num(x).astype(np.float32) for x in cache.values())
    out = octavo.paged_attention(
        q, page_table=table, seq_lens=seq_lens, chosen_pages=lists, **cache.arguments
    )
    expected = octavo.paged_attention(q, k_pages, v_pages, table, seq_lens, chosen_pages=lists)
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-5)
