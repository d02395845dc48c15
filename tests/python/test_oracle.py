"""The oracle against the formula one score at a time, and against PyTorch."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest

from support import cases, oracle, problems
from support.case import Case

BRUTE_FORCE = (
    Case("small", (3, 5), (4, 2), num_q_heads=4, num_kv_heads=2, head_dim=8),
    Case("small_window", (4, 6), (9, 3), window_left=2, window_right=1, causal=False, head_dim=8),
    Case("small_prefix", (4, 3), (9, 0), window_left=1, prefix_lens=(3, 1), head_dim=8),
    Case("small_biases", (4, 6), (9, 3), softcap=2.0, alibi="batch", softmax_scale=0.7, head_dim=8),
    Case("small_alibi", (4,), (9,), alibi="head", causal=False, head_dim=8),
    Case("small_symmetric", (4, 6), (9, 3), alibi="batch", alibi_symmetric=True, causal=False, head_dim=8),
    Case("small_sinks", (4, 6), (9, 3), sinks="normal", softcap=2.0, head_dim=8),
    Case("small_extreme_sinks", (4, 6), (9, 3), sinks="extreme", num_q_heads=5, num_kv_heads=1, head_dim=8),
    Case("small_scales", (4,), (9,), k_scale=0.5, v_scale=3.0, head_dim=8),
)


def brute_force(case: Case, inputs: problems.Inputs, b: int, i: int, h: int) -> tuple[np.ndarray, float]:
    """One query of one head, without an array operation in the scores."""
    n, m = case.seqlens_q[b], case.seqlens_k[b]
    q = inputs.q[inputs.cu_seqlens_q[b] + i, h]
    q_pos = m - n + i
    kv_head = h // (case.num_q_heads // case.num_kv_heads)
    scale = case.softmax_scale if case.softmax_scale is not None else 1 / math.sqrt(case.head_dim)
    scores: list[float] = []
    values: list[np.ndarray] = []
    for j in range(m):
        in_window = case.window_left < 0 or j >= q_pos - case.window_left
        if case.causal:
            in_window = in_window and j <= q_pos
        elif case.window_right >= 0:
            in_window = in_window and j <= q_pos + case.window_right
        if not in_window and not (case.prefix_lens is not None and j < case.prefix_lens[b]):
            continue
        k = inputs.k[inputs.cu_seqlens_k[b] + j, kv_head] * (case.k_scale or 1.0)
        score = scale * sum(float(x) * float(y) for x, y in zip(q, k, strict=True))
        if case.softcap:
            score = case.softcap * math.tanh(score / case.softcap)
        if inputs.alibi_slopes is not None:
            slope = inputs.alibi_slopes[b, h] if case.alibi == "batch" else inputs.alibi_slopes[h]
            score -= float(slope) * (max(q_pos - j, j - q_pos) if case.alibi_symmetric else q_pos - j)
        scores.append(score)
        values.append(inputs.v[inputs.cu_seqlens_k[b] + j, kv_head] * (case.v_scale or 1.0))
    if inputs.sinks is not None and inputs.sinks[h] > -math.inf:
        scores.append(float(inputs.sinks[h]))
        values.append(np.zeros(case.head_dim))
    if not scores:
        return np.zeros(case.head_dim), -math.inf
    lse = math.log(math.fsum(math.exp(s) for s in scores))
    return sum(math.exp(s - lse) * v for s, v in zip(scores, values, strict=True)), lse


@pytest.mark.parametrize("case", BRUTE_FORCE, ids=str)
def test_equals_brute_force(case: Case) -> None:
    inputs = problems.make_inputs(case, "float32")
    reference = problems.make_reference(case, inputs, "float32", paged=True)
    for b in range(case.batch):
        for i in range(case.seqlens_q[b]):
            for h in range(case.num_q_heads):
                out, lse = brute_force(case, inputs, b, i, h)
                row = inputs.cu_seqlens_q[b] + i
                np.testing.assert_allclose(reference.out[row, h], out, rtol=1e-12, atol=1e-12)
                np.testing.assert_allclose(reference.lse[row, h], lse, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(reference.plain_out, reference.out, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(reference.plain_lse, reference.lse, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "case",
    (
        Case("torch_causal", (40, 40), (40, 40), num_q_heads=6, num_kv_heads=2),
        Case("torch_window", (40,), (90,), window_left=20, window_right=9, causal=False, num_kv_heads=1),
        Case("torch_bias", (40,), (90,), alibi="head"),
    ),
    ids=str,
)
def test_equals_torch(case: Case) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    inputs = problems.make_inputs(case, "float32")
    bias = np.where(problems.visible(case, 0), 0.0, -np.inf)
    if inputs.alibi_slopes is not None:
        n, m = bias.shape
        distance = (m - n + np.arange(n))[:, None] - np.arange(m)[None, :]
        bias = bias - inputs.alibi_slopes[:, None, None] * distance
    q, k, v = (
        torch.from_numpy(x.reshape(case.batch, -1, *x.shape[1:]).swapaxes(1, 2).copy())
        for x in (inputs.q, inputs.k, inputs.v)
    )
    out = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=torch.from_numpy(bias), enable_gqa=True
    )
    reference = problems.make_reference(case, inputs, "float32")
    np.testing.assert_allclose(
        out.swapaxes(1, 2).numpy().reshape(reference.out.shape), reference.out, rtol=1e-10, atol=1e-12
    )


@pytest.mark.parametrize("dtype", oracle.NUMPY_DTYPES)
def test_plain_error_is_of_the_dtype(dtype: str) -> None:
    (case,) = cases.named("prefill_gqa_4")
    reference = problems.make_reference(case, problems.make_inputs(case, dtype), dtype)
    error = np.abs(reference.plain_out - reference.out).max()
    assert 0.1 * oracle.SPACING[dtype] < error < 16 * oracle.SPACING[dtype]


@pytest.mark.parametrize("dtype", oracle.NUMPY_DTYPES)
def test_yardstick_rejects_wrong_results(dtype: str) -> None:
    (case,) = cases.named("prefill_gqa_4")
    inputs = problems.make_inputs(case, dtype)
    reference = problems.make_reference(case, inputs, dtype)
    reference.check(reference.plain_out, reference.plain_lse)
    for wrong in (
        {"causal": False},
        {"softmax_scale": 0.1},
        {"softcap": 5.0},
        {"window_left": 200},
        {"prefix_lens": (2,)},
        {"alibi_slopes": np.full(case.num_q_heads, 0.01)},
        {"sinks": np.full(case.num_q_heads, 3.0)},
    ):
        arguments = {**case.masks, **wrong}
        other = oracle.attention(
            inputs.q, inputs.k, inputs.v, case.seqlens_q, case.seqlens_k, dtype=dtype, **arguments
        )
        with pytest.raises(AssertionError):
            reference.check_out(other.out)
        with pytest.raises(AssertionError):
            reference.check_lse(other.lse)


def test_yardstick_rejects_wrong_empty_rows() -> None:
    (case,) = cases.named("more_queries_than_keys")
    reference = problems.make_reference(case, problems.make_inputs(case, "float32"), "float32")
    assert np.isneginf(reference.lse[0]).all() and not reference.out[0].any()
    out, lse = reference.out.copy(), reference.lse.copy()
    out[0] = 1e-30
    lse[0] = -1e30
    with pytest.raises(AssertionError):
        reference.check_out(out)
    with pytest.raises(AssertionError):
        reference.check_lse(lse)
    out[0] = np.nan
    with pytest.raises(AssertionError):
        reference.check_out(out)


@pytest.mark.parametrize(
    "case", (*cases.PACKED, *cases.PAGED, *cases.PAGED_VALUE_DIMS, *cases.DECODE), ids=str
)
def test_pages_hold_the_keys(case: Case) -> None:
    inputs = problems.make_inputs(case, "float16")
    cache = problems.make_cache(case, inputs)
    k, v = problems.poisoned(case, inputs)
    np.testing.assert_array_equal(oracle.gather_pages(cache.k_pages, cache.page_table, cache.seq_lens), k)
    np.testing.assert_array_equal(oracle.gather_pages(cache.v_pages, cache.page_table, cache.seq_lens), v)
    num_slots = cache.k_pages.shape[0] * case.page_size
    assert np.count_nonzero(np.isfinite(cache.k_pages[:, :, 0, 0])) <= sum(case.seqlens_k) < num_slots


def test_merge_of_halves_is_the_whole() -> None:
    random = np.random.default_rng(0)
    q, k, v = (random.standard_normal((n, 2, 8)) for n in (3, 10, 10))

    def over(begin: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        see = np.ones((3, end - begin), bool)
        return oracle.attend(q, k[begin:end], v[begin:end], see, 0.3, 0.0, None)[:2]

    for middle in (0, 4, 10):
        out, lse = oracle.merge_states(*over(0, middle), *over(middle, 10))
        np.testing.assert_allclose(out, over(0, 10)[0], rtol=1e-12)
        np.testing.assert_allclose(lse, over(0, 10)[1], rtol=1e-12)
    out, lse = oracle.merge_states(*over(0, 0), *over(0, 0))
    assert not out.any() and np.isneginf(lse).all()


@pytest.mark.parametrize("case", BRUTE_FORCE[:-1], ids=str)
def test_some_queries_alone(case: Case) -> None:
    """Every second query of each sequence, by its position."""
    inputs = problems.make_inputs(case, "float32")
    whole = problems.make_reference(case, inputs, "float32")
    q_pos = [oracle.positions(n, m)[::2] for n, m in zip(case.seqlens_q, case.seqlens_k, strict=True)]
    bounds = inputs.cu_seqlens_q.tolist()
    rows = np.concatenate([np.arange(*each, 2) for each in itertools.pairwise(bounds)])
    some = oracle.attention(
        inputs.q[rows],
        inputs.k,
        inputs.v,
        [len(positions) for positions in q_pos],
        case.seqlens_k,
        dtype="float32",
        prefix_lens=case.prefix_lens,
        alibi_slopes=inputs.alibi_slopes,
        sinks=inputs.sinks,
        q_pos=q_pos,
        **case.masks,
    )
    np.testing.assert_allclose(some.out, whole.out[rows], rtol=1e-12, atol=1e-15)
    np.testing.assert_allclose(some.lse, whole.lse[rows], rtol=1e-12)
    assert some.max_relative_error(some.out) == 0.0
    wrong = some.out.copy()
    wrong[0, -1, 0] += 0.1 * np.abs(wrong[0, -1]).max()
    assert some.max_relative_error(wrong) == pytest.approx(0.1)
    wrong[0, -1, 0] = np.nan
    assert np.isnan(some.max_relative_error(wrong))


def test_case_names_are_unique() -> None:
    assert len({case.name for case in cases.ALL}) == len(cases.ALL)


@pytest.mark.parametrize("case", (*cases.DENSE, *cases.PACKED, *cases.DECODE), ids=str)
def test_work_of_a_case(case: Case) -> None:
    """What a case counts is what the oracle's masks say."""
    masks = [problems.visible(case, b) for b in range(case.batch)]
    for b, mask in enumerate(masks):
        assert case.num_visible(b) == np.count_nonzero(mask)
        assert case.num_seen_keys(b) == np.count_nonzero(mask.any(axis=0))
    unseen = problems.unseen_keys(case)
    dims = case.head_dim + case.head_dim_v
    assert case.kv_bytes == np.count_nonzero(~unseen) * case.num_kv_heads * dims * 2
    if case.window_left >= 0 or not case.causal:
        flops = 2 * sum(map(np.count_nonzero, masks)) * case.num_q_heads * dims
        assert case.flops == flops


def test_flops_of_a_causal_square() -> None:
    square = Case("", (6,), (6,), num_q_heads=2, num_kv_heads=1, head_dim=8)
    assert square.flops == 4 * (6 * 6 // 2) * 2 * 8
    after_others = dataclasses.replace(square, seqlens_k=(10,))
    assert after_others.flops == 4 * (6 * 4 + 6 * 6 // 2) * 2 * 8
