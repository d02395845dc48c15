"""The rows of the benchmarks as tests, with the benchmarks' inputs and calls.

All rows run on a GPU, except those of the CPU's benchmark; on the CPU run those that are small.
"""

from __future__ import annotations

import dataclasses
import gc
import sys
from pathlib import Path
from typing import Any

import pytest

from support.benchmark_cases import CPU_TABLE, DECODE_SWEEP, DECODE_TABLE, ROWS
from support.case import Case

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from _check import Sample  # noqa: E402
from _contestants import BatchInvariantOctavo, Int64Octavo, Octavo  # noqa: E402
from _inputs import make_inputs  # noqa: E402


def is_small(case: Case) -> bool:
    """A second's work for two cores, drawing the inputs included."""
    everything = dataclasses.replace(case, shared_prefix=0, window_left=-1)
    return everything.num_bytes <= 90e6 and case.flops <= 40e9


def parameters(rows: list[Case]) -> list[Any]:
    return [pytest.param(case, id=case.name) for case in rows]


def check(case: Case, device: str, with_int64: bool = False) -> None:
    torch.manual_seed(0)
    inputs = make_inputs(case, device)
    sample = Sample(case, inputs)
    for contestant in (Octavo(), BatchInvariantOctavo(), *([Int64Octavo()] if with_int64 else [])):
        if contestant.batch_invariant and (case.page_size == 0 or case.cascade):
            continue  # no such call
        inputs.out.fill_(torch.nan)
        contestant.prepare(case, inputs)()
        assert not inputs.out.isnan().any(), contestant.name
        sample.reference.check_out(sample.of(inputs.out))
        if device == "cuda":
            assert sample.max_error(inputs.out) <= contestant.tolerance(case), contestant.name


SMALL = [case for case in ROWS if is_small(case)]


@pytest.mark.parametrize("case", parameters(SMALL))
def test_row_on_the_cpu(case: Case) -> None:
    check(case, "cpu", with_int64=case in SMALL[::5])


def test_small_rows_are_of_all_kinds() -> None:
    assert {DECODE_TABLE[0], DECODE_SWEEP[0], *CPU_TABLE} <= set(SMALL)
    assert any(case.alibi for case in SMALL) and any(case.kv_dtype for case in SMALL)
    assert any(case.cascade for case in SMALL) and any(case.shared_prefix for case in SMALL)


@pytest.mark.gpu
@pytest.mark.xdist_group("memory")  # one process after the other: a row's arrays take up to 9 GB
@pytest.mark.parametrize("case", parameters([case for case in ROWS if case not in CPU_TABLE]))
def test_row_on_a_gpu(case: Case) -> None:
    check(case, "cuda")
    gc.collect()
    torch.cuda.empty_cache()
