"""Every instruction set that the CPU kernels are compiled for meets the same reference.

The choice is made once a process, so each gets a process of its own, which runs this file.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest

import octavo
import test_linear
import test_merge_states
import test_rms_norm
from support import calls, cases, problems
from support.case import Case
from support.linear import ACTIVATIONS, Problem
from support.oracle import Dropout
from support.targets import Target

ISAS = ("baseline", "avx2", "avx512", "avx512_bf16")

# Sizes off the vector width, all masks and biases, and every way to address keys.
DENSE = (
    "prefill_gqa_4",
    "everything",
    "group_7",
    "head_dim_8",
    "head_dim_24",
    "head_dim_256",
    "softcap",
    "peaked",
)
PACKED = ("everything_packed", "ragged")
PAGED = ("speculative", "page_size_1", "page_size_17", "decode", "decode_everything", "decode_group_5")


def check_every_operator() -> None:
    for dtype in ("float32", "float16", "bfloat16"):
        target = Target("numpy", "cpu", dtype)

        def check(
            run: Callable[..., calls.Result], case: Case, target: Target = target, **paged: bool
        ) -> None:
            inputs = problems.make_inputs(case, target.dtype)
            cache = (problems.make_cache(case, inputs),) if paged else ()
            problems.make_reference(case, inputs, target.dtype, **paged).check(
                *run(target, case, inputs, *cache)
            )

        for case in cases.named(*DENSE):
            check(calls.attention, case)
            check_backward(target, case)
        for case in cases.named(*PACKED):
            check(calls.packed_attention, case)
            check_backward(target, case, packed=True)
        for case in cases.named(*PAGED):
            check(calls.paged_attention, case, paged=True)
        for shape in ((3, 5, 8), (17, 3, 80), (2, 7, 2, 128)):
            states = test_merge_states.drawn_states(dtype, shape, seed=0)
            test_merge_states.check_merge(target, states, test_merge_states.merge(target, states))
        check_linear(target)
        for dim in (8, 63, 576, 1001):
            for weight_dtype in (dtype, "float32"):
                test_rms_norm.check(target, (3, dim), weight_dtype, with_residual=True)
    check_conversions()


def check_linear(target: Target) -> None:
    """The results, and that the bits of a row do not depend on what it is computed with."""
    for activation in ACTIVATIONS:
        for w_dtype in {target.dtype, *(("float16", "bfloat16") if target.dtype == "float32" else ())}:
            problem = Problem.drawn(target.dtype, (15,), 37, 1234, activation, w_dtype=w_dtype)
            together = test_linear.run(target, problem)
            problem.check(together)
            for rows in (1, 2, 3, 4, 7):
                some = test_linear.run(target, problem.with_row(slice(rows)))
                np.testing.assert_array_equal(some, together[:rows])


def check_backward(target: Target, case: Case, **packed: bool) -> None:
    inputs = problems.make_inputs(case, target.dtype)
    gradients = problems.make_output_gradients(case, target.dtype)
    dropout = Dropout(0.3, 5)
    reference = problems.make_backward_reference(case, inputs, gradients, target.dtype, dropout=dropout)
    options = {"dropout_p": dropout.p, "dropout_seed": dropout.seed}
    reference.check(*calls.attention_backward(target, case, inputs, gradients, **packed, **options))


def check_conversions() -> None:
    """Every 16-bit number survives being the only value seen, and NaN and infinities stay what they are."""
    bits = np.arange(2**16, dtype=np.uint16)
    for dtype in ("float16", "bfloat16"):
        target = Target("numpy", "cpu", dtype)
        zeros = target.array(np.zeros((2**16 // 64, 1, 1, 64)))
        values = bits.view(zeros.dtype).reshape(zeros.shape)
        out = octavo.attention(zeros, zeros, values)
        np.testing.assert_array_equal(out.astype(np.float32), values.astype(np.float32))


def run(isa: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "OCTAVO_CPU_ISA": isa},
        capture_output=True,
        text=True,
        check=False,
    )


def isa_in_use(asked: str) -> str | None:
    """None where the machine lacks it."""
    result = run(asked, "-c", "from octavo import _core; print(_core.cpu_info()['isa'])")
    if f"OCTAVO_CPU_ISA ({asked}) must not exceed what this machine has" in result.stderr:
        return None
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


@pytest.mark.parametrize("isa", ISAS)
def test_operators(isa: str) -> None:
    widest = isa_in_use("")
    assert widest in ISAS
    in_use = isa_in_use(isa)
    if ISAS.index(isa) > ISAS.index(widest):
        assert in_use is None
        pytest.skip(f"this machine has only {widest}")
    assert in_use == isa
    result = run(isa, __file__)
    assert result.returncode == 0, result.stderr


def print_bits() -> None:
    """A digest of results that come from products of pairs of bfloat16, where there are such instructions."""
    target = Target("numpy", "cpu", "bfloat16")
    digest = hashlib.sha256()
    for case in cases.named("decode", "decode_everything", "decode_group_5", "speculative"):
        inputs = problems.make_inputs(case, target.dtype)
        for array in calls.paged_attention(target, case, inputs, problems.make_cache(case, inputs)):
            digest.update(np.asarray(array).tobytes())
    rng = np.random.default_rng(0)
    for rows, depth in ((1, 64), (4, 4100), (7, 513), (40, 2048)):
        x, w = (target.array(rng.standard_normal((n, depth))) for n in (rows, 37))
        digest.update(np.asarray(octavo.linear(x, w)).tobytes())
    print(digest.hexdigest())


def test_products_of_pairs_have_the_bits_of_multiply_adds() -> None:
    if isa_in_use("avx512_bf16") is None:
        pytest.skip("this machine has no products of pairs of bfloat16")
    digests = [run(isa, __file__, "bits") for isa in ("avx512", "avx512_bf16")]
    assert digests[0].returncode == digests[1].returncode == 0, [result.stderr for result in digests]
    assert digests[0].stdout == digests[1].stdout != ""


def test_unknown_isa_is_refused() -> None:
    result = run("sse9", "-c", "from octavo import _core; _core.cpu_info()")
    assert result.returncode != 0
    assert "OCTAVO_CPU_ISA (sse9) must be baseline, avx2, avx512 or avx512_bf16" in result.stderr


if __name__ == "__main__":
    print_bits() if "bits" in sys.argv else check_every_operator()
