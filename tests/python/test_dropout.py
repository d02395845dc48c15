"""Dropout of octavo.attention: which weights it leaves out, and what the rest becomes."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

import octavo
from support import calls, cases, oracle, problems
from support.calls import assert_same_bits
from support.case import Case
from support.oracle import Dropout
from support.targets import Target, every_target

CASES = [
    case
    for case in (*cases.DENSE, *cases.PACKED)
    if case.name
    in {
        "square",
        "prefill_gqa_4",
        "group_3",
        "group_7",
        "more_queries_than_keys",
        "no_keys",
        "head_dim_24",
        "head_dim_96",
        "head_dim_192",
        "head_dim_256",
        "window_both",
        "everything",
        "everything_sinks",
        "ragged",
        "chunked_prefill",
        "everything_packed",
    }
]


def arguments(dropout: Dropout) -> dict[str, float | int]:
    return {"dropout_p": dropout.p, "dropout_seed": dropout.seed, "dropout_offset": dropout.offset}


def found_mask(
    target: Target, dropout: Dropout, *, batch: int, heads: int, seqlen_q: int, seqlen_k: int
) -> NDArray[np.bool_]:
    """[batch, heads, seqlen_q, seqlen_k]: every weight is 1 / seqlen_k, and values are unit vectors, which
    keep the weights apart; 256 keys at a time have one."""
    head_dim = 256
    q = target.array(np.zeros((batch, seqlen_q, heads, head_dim)))
    k = target.array(np.zeros((batch, seqlen_k, 1, head_dim)))
    kept = np.zeros((batch, heads, seqlen_q, seqlen_k), bool)
    for begin in range(0, seqlen_k, head_dim):
        values = np.eye(seqlen_k, head_dim, -begin)
        v = target.array(np.broadcast_to(values[None, :, None], (batch, seqlen_k, 1, head_dim)))
        out = target.library.to_float64(octavo.attention(q, k, v, **arguments(dropout)))
        seen = out.transpose(0, 2, 1, 3)[..., : seqlen_k - begin]
        np.testing.assert_allclose(seen[seen != 0.0], 1.0 / seqlen_k / (1.0 - dropout.p), rtol=2.0**-7)
        kept[..., begin : begin + head_dim] = seen != 0.0
    return kept


def test_philox_gives_the_published_numbers() -> None:
    """The known answers that come with the authors' Random123 library."""
    for counter, key, expected in (
        ((0, 0, 0, 0), (0, 0), (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
        ((2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A),
        ),
    ):
        assert tuple(int(word) for word in oracle.philox(counter, key)) == expected


@every_target
@pytest.mark.parametrize(
    "dropout",
    [
        Dropout(0.1, 0),
        Dropout(0.5, 2**63 - 1, 5),
        Dropout(0.9, 12345, 2**32 - 3),
        Dropout(2.0**-16, 6, 2**63 - 1),
        Dropout(1.0 - 2.0**-15, 7),
    ],
    ids=str,
)
def test_mask_is_the_oracles(target: Target, dropout: Dropout) -> None:
    shape = {"batch": 2, "heads": 3, "seqlen_q": 150, "seqlen_k": 421}
    kept = found_mask(target, dropout, **shape)
    for b in range(2):
        np.testing.assert_array_equal(kept[b], dropout.keep(b, 3, 150, 421))


@every_target
@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_the_oracle(target: Target, case: Case) -> None:
    dropout = Dropout(0.3, 2**35 + 11, 2**32 - 5)
    inputs = problems.make_inputs(case, target.dtype)
    reference = problems.make_reference(case, inputs, target.dtype, dropout=dropout)
    reference.check(*calls.packed_attention(target, case, inputs, **arguments(dropout)))
    if case.is_dense:
        reference.check(*calls.attention(target, case, inputs, **arguments(dropout)))


@every_target
@pytest.mark.parametrize("case", [c for c in CASES if c.name in {"prefill_gqa_4", "everything"}], ids=str)
def test_none_is_none_bit_for_bit(target: Target, case: Case) -> None:
    inputs = problems.make_inputs(case, target.dtype)
    without = calls.attention(target, case, inputs)
    assert_same_bits(calls.attention(target, case, inputs, **arguments(Dropout(0.0, 3, 4))), without)


@every_target
@pytest.mark.parametrize("case", [c for c in CASES if c.name in {"prefill_gqa_4", "everything"}], ids=str)
def test_what_drops_nothing_multiplies_nothing(target: Target, case: Case) -> None:
    """Below 2**-17 the probability rounds to 0, in the forward pass and in the backward pass."""
    inputs = problems.make_inputs(case, target.dtype)
    gradients = problems.make_output_gradients(case, target.dtype)
    results = []
    for p in (0.0, 0.999 * 2.0**-17):
        dropout = arguments(Dropout(p, 3))
        forward = calls.attention(target, case, inputs, **dropout)
        backward = calls.attention_backward(target, case, inputs, gradients, deterministic=True, **dropout)
        results.append((*forward, *backward))
    for found, expected in zip(*results, strict=True):
        np.testing.assert_array_equal(found, expected)


@every_target
@pytest.mark.parametrize("case", [c for c in CASES if c.name in {"prefill_gqa_4", "everything"}], ids=str)
def test_lse_is_that_without(target: Target, case: Case) -> None:
    inputs = problems.make_inputs(case, target.dtype)
    reference = problems.make_reference(case, inputs, target.dtype)
    reference.check_lse(calls.attention(target, case, inputs, **arguments(Dropout(0.4, 3)))[1])


@every_target
def test_same_seed_same_bits(target: Target) -> None:
    case = next(case for case in CASES if case.name == "prefill_gqa_4")
    inputs = problems.make_inputs(case, target.dtype)
    first = calls.attention(target, case, inputs, **arguments(Dropout(0.2, 5)))
    assert_same_bits(calls.attention(target, case, inputs, **arguments(Dropout(0.2, 5))), first)
    for other in (Dropout(0.2, 6), Dropout(0.2, 5, 1), Dropout(0.2, 5 + 2**32), Dropout(0.2, 5, 2**32)):
        assert not np.array_equal(calls.attention(target, case, inputs, **arguments(other))[0], first[0])


@pytest.mark.parametrize("p", [0.05, 0.5, 0.8])
def test_statistics(p: float) -> None:
    """Dropped as often as p says: in all, by head, and by place in a tile; neighbours do not depend on each
    other."""
    kept = Dropout(p, 99).keep(0, 8, 256, 512)

    def standard_deviations(sample: NDArray, probability: float, count: int) -> float:
        deviation = np.sqrt(probability * (1.0 - probability) / count)
        return float(np.abs((sample - probability) / deviation).max())

    assert standard_deviations(kept.mean(), 1 - p, kept.size) < 4
    assert standard_deviations(kept.mean((1, 2)), 1 - p, kept[0].size) < 4.5
    places = kept.reshape(8, 32, 8, 16, 32).mean((0, 1, 3))
    assert standard_deviations(places, 1 - p, kept.size // places.size) < 5
    for axis in range(3):
        for distance in (1, 2, 8):
            n = kept.shape[axis]
            if distance < n:
                both = kept.take(range(n - distance), axis) & kept.take(range(distance, n), axis)
                assert standard_deviations(both.mean(), (1 - p) ** 2, both.size) < 6


@every_target
def test_mean_over_seeds_is_the_result_without(target: Target) -> None:
    case = Case("dropout_mean", (16,), (64,), num_q_heads=1, num_kv_heads=1, causal=False)
    inputs = problems.make_inputs(case, target.dtype)
    outs = [calls.attention(target, case, inputs, **arguments(Dropout(0.25, seed)))[0] for seed in range(300)]
    without = calls.attention(target, case, inputs)[0]
    deviation = np.std(outs, axis=0) / np.sqrt(len(outs))
    assert (np.abs(np.mean(outs, axis=0) - without) / deviation).mean() < 1.0
