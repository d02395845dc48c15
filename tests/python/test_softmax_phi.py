"""softmax_phi, the unified maximum: scores just inside of its window, just outside and far outside.

Of eight rows that share each key, one has the scores that a case names; so rows that keep phi and rows that
fall back lie side by side. Random scores alone would never leave the window.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

import octavo
from support import calls, oracle, problems
from support.calls import assert_same_bits
from support.case import Case
from support.oracle import EPSILONS_OF_UNIFIED_MAX, Reference
from support.problems import Cache, Inputs
from support.targets import Target, cpu_target, every_target

GROUP = 8
ODD_HEAD = GROUP + 3  # of the second KV head; its scores are those of a case
ODD_IN_GROUP = ODD_HEAD % GROUP
Q_SIZE = 8.0  # with head_dim 64: a score is the key's number at the head's place in its group
LOG2 = np.log(2.0)
FAR = 1e4

LENGTHS = (600, 33, 0, 1, 257)
BASE = Case("softmax_phi", (1,) * len(LENGTHS), LENGTHS, num_q_heads=2 * GROUP, num_kv_heads=2, head_dim=64)


def one_key(offset: float, place: float) -> Any:
    def offsets(length: int) -> NDArray[np.float64]:
        result = np.zeros(length)
        if length:
            result[round(place * (length - 1))] = offset
        return result

    return offsets


def all_keys(offset: float) -> Any:
    return lambda length: np.full(length, offset)


def steps(*levels: float) -> Any:
    """Runs of keys, each with an offset of its own."""
    return lambda length: np.array([levels[i * len(levels) // max(1, length)] for i in range(length)])


# The scores of the odd row, less phi, in units of log2(e). All other rows have phi itself, nearly.
PROFILES = {
    **{
        f"{offset:g}_at_{place:g}": one_key(offset, place)
        for offset in (7.9, 8.1, 59.9, 60.1, FAR)
        for place in (0.0, 0.5, 1.0)
    },
    **{f"all_{offset:g}": all_keys(offset) for offset in (-1.9, -2.1, -50.0, -59.9, -60.1, -FAR, FAR)},
    "rising": steps(-FAR, -100.0, -50.0, -5.0, 0.0, 9.0, 30.0, 61.0, 70.0, 300.0),
    "falling": steps(300.0, 61.0, 9.0, 0.0, -5.0, -100.0),
    "in_and_out": steps(-100.0, 5.0, -100.0, 20.0, 0.0),
}

VARIANTS: dict[str, tuple[Case, dict[str, Any]]] = {
    "plain": (BASE, {}),
    "splits": (BASE, {"num_splits": 5}),
    "one_split": (BASE, {"num_splits": 1}),
    "batch_invariant": (BASE, {"batch_invariant": True}),
    "softcap": (dataclasses.replace(BASE, softcap=30.0), {}),
    "alibi": (dataclasses.replace(BASE, alibi="head"), {}),
    "window": (dataclasses.replace(BASE, window_left=70), {}),
    "prefix": (dataclasses.replace(BASE, window_left=70, prefix_lens=(20, 0, 0, 1, 300)), {}),
    "single_row_groups": (dataclasses.replace(BASE, num_kv_heads=2 * GROUP), {}),
}


@functools.lru_cache(maxsize=4)
def problem(case: Case, profile: str, phi: float, dtype: str) -> tuple[Inputs, Cache, Reference]:
    """Every score is near phi, but for those of the odd row."""
    inputs = problems.make_inputs(case, dtype)
    heads = np.arange(case.num_q_heads)
    q, k = 0.02 * inputs.q, inputs.k.copy()
    q[:, :, :GROUP] = 0.0
    q[:, heads, heads % GROUP] = Q_SIZE
    k[:, :, :GROUP] = phi
    odd_kv_head = ODD_HEAD // case.group_size
    for begin, length in zip(inputs.cu_seqlens_k, case.seqlens_k, strict=False):
        k[begin : begin + length, odd_kv_head, ODD_IN_GROUP] += LOG2 * PROFILES[profile](length)
    inputs = dataclasses.replace(inputs, q=oracle.round_to(q, dtype), k=oracle.round_to(k, dtype))
    cache = problems.make_cache(case, inputs)
    return inputs, cache, problems.make_reference(case, inputs, dtype, paged=True)


def call(target: Target, case: Case, inputs: Inputs, cache: Cache, phi: Any, **options: Any) -> calls.Result:
    return calls.paged_attention(target, case, inputs, cache, packed=False, softmax_phi=phi, **options)


@every_target
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("profile", PROFILES)
def test_one_row_of_eight(target: Target, profile: str, variant: str) -> None:
    case, options = VARIANTS[variant]
    for phi in (0.0, 4.5):
        inputs, cache, reference = problem(case, profile, phi, target.dtype)
        reference.check(*call(target, case, inputs, cache, phi, **options), EPSILONS_OF_UNIFIED_MAX)


@every_target
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    "phi", [-FAR, -61.0 * LOG2, -9.0 * LOG2, 3.0 * LOG2, 61.0 * LOG2, FAR, 3e38], ids=str
)
def test_every_row_falls_back(target: Target, phi: float, variant: str) -> None:
    case, options = VARIANTS[variant]
    inputs, cache, reference = problem(case, "rising", 0.0, target.dtype)
    reference.check(*call(target, case, inputs, cache, phi, **options), EPSILONS_OF_UNIFIED_MAX)


@every_target
@pytest.mark.parametrize("variant", VARIANTS)
def test_one_bad_head(target: Target, variant: str) -> None:
    """An array, in which a head's phi is far from its scores."""
    case, options = VARIANTS[variant]
    inputs, cache, reference = problem(case, "8.1_at_0.5", 2.0, target.dtype)
    for bad in (FAR, -FAR, 3e38):
        phi = np.full(case.num_q_heads, 2.0, np.float32)
        phi[ODD_HEAD - 1] = bad
        reference.check(
            *call(target, case, inputs, cache, target.library.float32(phi), **options),
            EPSILONS_OF_UNIFIED_MAX,
        )


@every_target
def test_a_number_and_an_array_are_the_same(target: Target) -> None:
    inputs, cache, _ = problem(BASE, "in_and_out", 4.5, target.dtype)
    array = target.library.float32(np.full(BASE.num_q_heads, 4.5, np.float32))
    for options in ({}, {"batch_invariant": True}, {"num_splits": 3}):
        number = call(target, BASE, inputs, cache, 4.5, **options)
        assert_same_bits(call(target, BASE, inputs, cache, array, **options), number)
        assert_same_bits(call(target, BASE, inputs, cache, 4.5, **options), number)


@every_target
def test_phi_far_from_all_scores_changes_no_bit(target: Target) -> None:
    inputs, cache, _ = problem(BASE, "rising", 0.0, target.dtype)
    plain = call(target, BASE, inputs, cache, None)
    for phi in (FAR, -2 * FAR):
        assert_same_bits(call(target, BASE, inputs, cache, phi), plain)


@cpu_target
def test_rows_that_fall_back_have_the_bits_of_ordinary_ones(target: Target) -> None:
    """And those that do not have others, here and there: their weights are relative to phi."""
    case = dataclasses.replace(BASE, seqlens_q=(1,), seqlens_k=(600,))
    inputs, cache, _ = problem(case, "all_-60.1", 4.5, target.dtype)
    plain, lse = call(target, case, inputs, cache, None)
    phi = np.full(case.num_q_heads, 4.5 + LOG2 / 3, np.float32)
    out, lse_of_phi = call(target, case, inputs, cache, phi)
    assert out[:, ODD_HEAD].tobytes() == plain[:, ODD_HEAD].tobytes()
    assert lse_of_phi[:, ODD_HEAD].tobytes() == lse[:, ODD_HEAD].tobytes()
    if target.dtype == "float32":
        assert (np.delete(out, ODD_HEAD, axis=1) != np.delete(plain, ODD_HEAD, axis=1)).any()


@every_target
def test_batch_invariant_bits(target: Target) -> None:
    """A sequence has the same bits alone and in a batch, with the same phi."""
    inputs, cache, _ = problem(BASE, "rising", 4.5, target.dtype)
    out, lse = call(target, BASE, inputs, cache, 4.5, batch_invariant=True)
    for b in range(BASE.batch):
        alone = problems.sequence_of(BASE, inputs, cache, b)
        result = call(target, *alone, 4.5, batch_invariant=True)
        assert_same_bits(result, (out[b : b + 1], lse[b : b + 1]))


@every_target
def test_empty_rows(target: Target) -> None:
    """Rows of padding are 0, with a log-sum-exp of -inf, whatever phi is."""
    inputs, cache, _ = problem(BASE, "all_-2.1", 0.0, target.dtype)
    padding = LENGTHS.index(0)
    for phi in (0.0, 5.0, -FAR, FAR):
        out, lse = call(target, BASE, inputs, cache, phi)
        assert (out[padding] == 0.0).all() and np.isneginf(lse[padding]).all()


@every_target
@pytest.mark.parametrize(
    "profile", ["8.1_at_0", "60.1_at_0.5", "all_-2.1", "all_-60.1", "rising", "in_and_out"]
)
def test_packed_queries(target: Target, profile: str) -> None:
    """Chunks of a prompt, a draft and single tokens in one call."""
    lengths = (150, 70, 33, 0, 290)
    case = dataclasses.replace(BASE, seqlens_q=(100, 4, 1, 0, 2), seqlens_k=lengths)
    for phi in (0.0, -FAR, FAR):
        inputs, cache, reference = problem(case, profile, 0.0, target.dtype)
        reference.check(
            *calls.paged_attention(target, case, inputs, cache, softmax_phi=phi), EPSILONS_OF_UNIFIED_MAX
        )


@every_target
@pytest.mark.parametrize(
    "profile", ["8.1_at_0", "60.1_at_0.5", "all_-2.1", "all_-60.1", "rising", "in_and_out"]
)
def test_attention(target: Target, profile: str) -> None:
    dense = dataclasses.replace(BASE, seqlens_q=(40, 40), seqlens_k=(200, 200), page_size=0)
    packed = dataclasses.replace(BASE, seqlens_q=(40, 1), seqlens_k=(200, 31), page_size=0)
    for phi in (0.0, 4.5 - LOG2, -FAR, FAR):
        for case, run in ((dense, calls.attention), (packed, calls.packed_attention)):
            inputs = attention_inputs(case, profile, target.dtype)
            reference = problems.make_reference(case, inputs, target.dtype)
            reference.check(*run(target, case, inputs, softmax_phi=phi), EPSILONS_OF_UNIFIED_MAX)
            array = target.library.float32(np.linspace(phi, phi + 9.0, case.num_q_heads))
            reference.check(*run(target, case, inputs, softmax_phi=array), EPSILONS_OF_UNIFIED_MAX)


@functools.lru_cache(maxsize=4)
def attention_inputs(case: Case, profile: str, dtype: str) -> Inputs:
    return problem(dataclasses.replace(case, page_size=16), profile, 4.5, dtype)[0]


@every_target
def test_dropout(target: Target) -> None:
    """The mask drops the same weights; phi changes none but for rounding."""
    case = dataclasses.replace(BASE, seqlens_q=(40, 40), seqlens_k=(200, 200), page_size=0)
    inputs = attention_inputs(case, "rising", target.dtype)
    dropout = oracle.Dropout(0.25, 7)
    reference = problems.make_reference(case, inputs, target.dtype, dropout=dropout)
    for phi in (4.5, FAR):
        reference.check(
            *calls.attention(target, case, inputs, dropout_p=0.25, dropout_seed=7, softmax_phi=phi),
            EPSILONS_OF_UNIFIED_MAX,
        )


@every_target
@pytest.mark.parametrize("codes", ["int8", "float8_e4m3fn"])
def test_caches_of_codes(target: Target, codes: str) -> None:
    """Near phi and far from it: what the cache gives without phi, but for rounding."""
    random = np.random.default_rng(3)
    stored = random.integers(-60, 61, (40, 16, 2, 64))
    options: dict[str, Any] = {"k_scale": 0.05, "v_scale": 0.02, "return_lse": True}
    if codes == "int8":
        k_pages = v_pages = target.library.from_numpy(stored.astype(np.int8))
    else:
        bits = stored.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
        k_pages = v_pages = target.library.from_numpy(bits)
        options["kv_dtype"] = codes
    q = target.array(random.standard_normal((2, 2 * GROUP, 64)) * 2.0)
    table = target.int32(np.arange(2 * 20).reshape(2, 20))
    arrays = (q, k_pages, v_pages, table, target.int32([320, 77]))
    plain = calls.read(target, octavo.paged_attention(*arrays, **options))
    for phi in (float(np.median(plain[1])) - 4.0, float(plain[1].max()), FAR, -FAR):
        out, lse = calls.read(target, octavo.paged_attention(*arrays, softmax_phi=phi, **options))
        largest = np.abs(plain[0]).max()
        np.testing.assert_allclose(out, plain[0], atol=4 * oracle.EPSILON_OUT[target.dtype] * largest)
        np.testing.assert_allclose(lse, plain[1], rtol=2e-6, atol=2e-6)


@every_target
def test_shared_prefix(target: Target) -> None:
    """Whose partial results are merged."""
    case = dataclasses.replace(BASE, seqlens_q=(1, 1, 1), seqlens_k=(200, 180, 165))
    inputs, cache, _ = problem(case, "rising", 4.5, target.dtype)
    table = cache.page_table.copy()
    table[:, :10] = table[0, :10]
    cache = dataclasses.replace(cache, page_table=table)
    k, v = (oracle.gather_pages(x, cache.page_table, case.seqlens_k) for x in (cache.k_pages, cache.v_pages))
    own = dataclasses.replace(inputs, k=k, v=v)
    reference = problems.make_reference(case, own, target.dtype, paged=True)
    for phi in (4.5, FAR, -FAR):
        reference.check(*call(target, case, own, cache, phi, shared_prefix_len=160), EPSILONS_OF_UNIFIED_MAX)
