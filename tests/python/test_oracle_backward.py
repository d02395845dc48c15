"""The oracle of the backward against central differences of the forward's."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from numpy.typing import NDArray

from support import cases, oracle, problems
from support.case import Case
from support.oracle import Dropout
from support.oracle_backward import Reference

DROPOUT = Dropout(0.4, 17, 3)
CASES = (
    Case("diff", (5, 9), (7, 4), num_q_heads=4, num_kv_heads=2, head_dim=8, causal=False),
    Case("diff_causal", (5, 9), (7, 4), num_q_heads=6, num_kv_heads=2, head_dim=8),
    Case("diff_window", (6, 3), (9, 11), window_left=2, window_right=1, causal=False, head_dim=8),
    Case("diff_prefix", (6, 3), (9, 11), window_left=1, prefix_lens=(4, 2), head_dim=8),
    Case("diff_softcap", (6, 3), (9, 11), softcap=1.5, q_gain=2.0, head_dim=8),
    Case("diff_alibi", (6, 3), (9, 11), alibi="head", num_kv_heads=1, head_dim=8),
    Case("diff_symmetric", (6, 9), (9, 4), alibi="head", alibi_symmetric=True, causal=False, head_dim=8),
    Case("diff_sinks", (6, 9), (9, 4), sinks="normal", window_left=3, num_kv_heads=2, head_dim=8),
    Case(
        "diff_all",
        (6, 3, 4),
        (9, 11, 0),
        softcap=2.0,
        alibi="batch",
        sinks="normal",
        num_kv_heads=2,
        softmax_scale=0.7,
        head_dim=8,
    ),
)


def loss(
    case: Case, inputs: problems.Inputs, gradients: problems.OutputGradients, dropout: Dropout | None
) -> float:
    """<out, dout> + <lse, dlse>, over the queries that see a key or have a sink."""
    reference = problems.make_reference(case, inputs, "float32", dropout=dropout)
    lse = np.where(np.isneginf(reference.lse), 0.0, reference.lse)
    return float((reference.out * gradients.dout).sum() + (lse * gradients.dlse).sum())


@pytest.mark.parametrize("dropout", [None, DROPOUT], ids=["", "dropout"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_central_differences(case: Case, dropout: Dropout | None) -> None:
    inputs = problems.make_inputs(case, "float32")
    if inputs.alibi_slopes is not None:  # float64, for differences; nothing here needs more
        inputs = dataclasses.replace(inputs, alibi_slopes=inputs.alibi_slopes.astype(np.float64))
    if inputs.sinks is not None:
        inputs = dataclasses.replace(inputs, sinks=inputs.sinks.astype(np.float64))
    gradients = problems.make_output_gradients(case, "float32")
    true = problems.make_backward_reference(case, inputs, gradients, "float32", dropout=dropout).true
    random = np.random.default_rng(0)
    found = {"q": true.dq, "k": true.dk, "v": true.dv, "alibi_slopes": true.dslopes, "sinks": true.dsinks}
    for name, gradient in found.items():
        array: NDArray | None = getattr(inputs, name)
        if array is None:
            continue
        for _ in range(3):
            direction = random.standard_normal(array.shape)
            step = 1e-5

            def moved(by: float, name: str = name, array: NDArray = array, way: NDArray = direction) -> float:
                there = dataclasses.replace(inputs, **{name: array + by * way})
                return loss(case, there, gradients, dropout)

            difference = (moved(step) - moved(-step)) / (2.0 * step)
            np.testing.assert_allclose((gradient * direction).sum(), difference, rtol=1e-7, atol=1e-8)


def reference_of(case: Case, dtype: str) -> Reference:
    inputs = problems.make_inputs(case, dtype)
    return problems.make_backward_reference(case, inputs, problems.make_output_gradients(case, dtype), dtype)


@pytest.mark.parametrize("dtype", oracle.NUMPY_DTYPES)
def test_plain_error_is_of_the_dtype(dtype: str) -> None:
    (case,) = cases.named("prefill_gqa_4")
    reference = reference_of(case, dtype)
    for plain, true in zip(list(reference.plain)[:3], reference.true, strict=False):
        error = np.abs(plain - true).max() / np.abs(true).max()
        assert 0.1 * oracle.SPACING[dtype] < error < 16 * oracle.SPACING[dtype]


@pytest.mark.parametrize("dtype", oracle.NUMPY_DTYPES)
def test_yardstick_rejects_wrong_results(dtype: str) -> None:
    """Each gradient by itself, and small faults too, such as one key more."""
    case = dataclasses.replace(cases.named("everything")[0], q_gain=4.0, sinks="normal")
    inputs, gradients = problems.make_inputs(case, dtype), problems.make_output_gradients(case, dtype)
    reference = problems.make_backward_reference(case, inputs, gradients, dtype)
    reference.check(*reference.plain)
    without_lse = dataclasses.replace(gradients, dlse=np.zeros_like(gradients.dlse))
    wrong = [
        (problems.make_backward_reference(case, inputs, without_lse, dtype), "dq dk dslopes dsinks"),
        *(
            (
                problems.make_backward_reference(
                    dataclasses.replace(case, **change), inputs, gradients, dtype
                ),
                f"dq dk dv dslopes{more}",
            )
            for change, more in (
                ({"window_left": 51}, ""),
                ({"prefix_lens": (34, 7)}, ""),
                ({"softcap": 0.0}, " dsinks"),
                ({"softmax_scale": 0.13}, " dsinks"),
            )
        ),
    ]
    for other, names in wrong:
        for name in names.split():
            one_wrong = dataclasses.replace(reference.true, **{name: getattr(other.true, name)})
            with pytest.raises(AssertionError, match=f"{name}: error"):
                reference.check(*one_wrong)
    dq = reference.true.dq.copy()
    dq[3, 1, 2] = np.nan
    with pytest.raises(AssertionError, match="dq has 1 NaNs"):
        reference.check(*dataclasses.replace(reference.true, dq=dq))
