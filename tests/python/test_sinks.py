"""Attention sinks beyond the cases that all tests share: what joins where, infinities, and who pays."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import octavo
from support import calls, cases, problems
from support.calls import assert_same_bits
from support.case import Case
from support.targets import Target, every_target

SINKS = [2.0, -1.0, 5.0, 0.5]
LONG = Case("sinks_long", (1, 1, 1), (1500, 3000, 0), num_q_heads=8, num_kv_heads=1, sinks="normal")
CHUNKS = Case("sinks_chunks", (64, 1, 3), (1100, 900, 70), num_q_heads=8, num_kv_heads=2, sinks="extreme")


@dataclass
class Shape:
    """All that octavo.explain needs of an argument."""

    shape: tuple[int, ...]
    dtype: str = "bfloat16"


def paged(target: Target, case: Case, **options: Any) -> tuple[Any, Any]:
    inputs = problems.make_inputs(case, target.dtype)
    reference = problems.make_reference(case, inputs, target.dtype, paged=True)
    result = calls.paged_attention(target, case, inputs, problems.make_cache(case, inputs), **options)
    reference.check(*result)
    return result


@every_target
@pytest.mark.parametrize("case", [LONG, CHUNKS], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_joins_once_however_keys_are_cut(target: Target, case: Case, head_dim: int) -> None:
    case = dataclasses.replace(case, head_dim=head_dim)
    for num_splits in (1, 2, 7, None):
        paged(target, case, num_splits=num_splits)
    paged(target, case, batch_invariant=True, max_seqlen_q=max(case.seqlens_q))


@every_target
@pytest.mark.parametrize("shape", [(1, 1), (1, 700), (5, 300), (200, 300)], ids=str)
def test_no_sink_is_minus_infinity(target: Target, shape: tuple[int, int]) -> None:
    """On the CPU it changes no bit; GPUs divide in another way where there are sinks."""
    case = Case("minus_infinity", shape[:1], shape[1:])
    inputs = problems.make_inputs(case, target.dtype)
    reference = problems.make_reference(case, inputs, target.dtype)
    none = target.library.float32(np.full(4, -np.inf))
    cache = problems.make_cache(case, inputs)
    found = [
        calls.attention(target, case, inputs, sinks=none),
        calls.paged_attention(target, case, inputs, cache, sinks=none),
    ]
    for result in found:
        reference.check(*result)
    if target.on_cpu:
        assert_same_bits(found[0], calls.attention(target, case, inputs))
        assert_same_bits(found[1], calls.paged_attention(target, case, inputs, cache))


@every_target
@pytest.mark.parametrize("shape", [(1, 700), (200, 300)], ids=str)
def test_nan_and_infinity_spoil_their_own_head(target: Target, shape: tuple[int, int]) -> None:
    case = Case("spoilt", shape[:1], shape[1:], num_kv_heads=1)
    inputs = problems.make_inputs(case, target.dtype)
    fine = target.library.float32(np.array(SINKS))
    spoilt = target.library.float32(np.array([SINKS[0], np.nan, np.inf, SINKS[3]]))
    expected = calls.attention(target, case, inputs, sinks=fine)
    found = calls.attention(target, case, inputs, sinks=spoilt)
    for x, y in zip(found, expected, strict=True):
        assert np.isnan(x[:, :, 1:3]).all()
        assert x[:, :, [0, 3]].tobytes() == y[:, :, [0, 3]].tobytes()


@every_target
def test_merged_parts_of_which_one_has_the_sinks(target: Target) -> None:
    """As docs/conventions.md says, and with none of them: then the sink is a part of its own."""
    (case,) = cases.named("one_query_many_keys")
    case = dataclasses.replace(case, sinks="normal")
    inputs = problems.make_inputs(case, target.dtype)
    reference = problems.make_reference(case, inputs, target.dtype)
    sinks = target.library.float32(inputs.sinks)
    q, k, v = (target.array(calls.dense(case, x)) for x in (inputs.q, inputs.k, inputs.v))
    a = octavo.attention(q, k[:, :1000], v[:, :1000], return_lse=True, sinks=sinks)
    b = octavo.attention(q, k[:, 1000:], v[:, 1000:], return_lse=True)
    reference.check_lse(calls.read(target, octavo.merge_states(*a, *b))[1])
    a = octavo.attention(q, k[:, :1000], v[:, :1000], return_lse=True)
    nothing = target.array(np.zeros((1, 1, case.num_q_heads, case.head_dim)))
    one = target.library.float32(inputs.sinks.reshape(1, 1, -1))
    merged = octavo.merge_states(*octavo.merge_states(*a, *b), nothing, one)
    reference.check_lse(calls.read(target, merged)[1])


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_far_sinks_neither_overflow_nor_vanish(dtype: str) -> None:
    """Sinks of +-1e30, beside scores of +-thousands."""
    q, k = np.full((1, 1, 4, 16), 16.0, dtype), np.full((1, 3, 4, 16), 16.0, dtype)
    v = np.arange(3.0).astype(dtype).reshape(1, 3, 1, 1) * np.ones_like(k)
    sinks = np.array([1e30, -1e30, 1024.0, -1024.0], np.float32)
    for sign in (1, -1):
        out, lse = octavo.attention(q, sign * k, v, sinks=sinks, return_lse=True)
        score = sign * 1024.0
        expected = np.logaddexp(score + np.log(3.0), sinks.astype(np.float64))
        np.testing.assert_allclose(lse[0, 0], expected, rtol=1e-6)
        weights = np.exp(score + np.log(3.0) - expected)
        np.testing.assert_allclose(out[0, 0, :, 0].astype(np.float64), weights, rtol=2e-3, atol=1e-6)


def test_shapes_choose_the_same_kernels() -> None:
    """A sink is read where a row ends, which rules out no kernel; one of sm90_attention's looks for it."""
    q, lse, sinks = Shape((1, 4096, 8, 64)), Shape((1, 4096, 8), "float32"), Shape((8,), "float32")
    for device in ("sm_80", "sm_90"):
        explained = [
            octavo.explain("attention", q, q, q, causal=True, device=device, **options)
            for options in ({}, {"sinks": sinks})
        ]
        feature = {"sm_80": "none", "sm_90": "sinks"}[device]
        assert explained[0].kernel == explained[1].kernel and explained[0].plan["feature"] == "none"
        assert explained[0].plan | {"feature": feature} == explained[1].plan
        backward = octavo.explain(
            *("attention_backward", q, q, q, q, q, lse),
            causal=True,
            sinks=sinks,
            return_dsinks=True,
            device=device,
        )
        assert "sink_gradients_kernel" in backward.summary
