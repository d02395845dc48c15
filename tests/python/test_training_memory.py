"""benchmarks/training_memory.py: what it measures, and the rows that docs/tutorials/training.md shows."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import training_memory  # noqa: E402

ROWS = ROOT / "benchmarks" / "results" / "training-memory-cpu.jsonl"


@pytest.fixture(scope="module")
def peaks() -> dict[str, dict[int, float]]:
    rows = list(map(json.loads, ROWS.read_text(encoding="utf-8").splitlines()))
    found: dict[str, dict[int, float]] = {}
    for row in rows:
        found.setdefault(row["attention"], {})[row["length"]] = row["peak_mib"]
        assert row["inputs_mib"] == 4 * row["length"] * row["head_dim"] * 4 / 2**20
    return found


def test_rows(peaks: dict[str, dict[int, float]]) -> None:
    lengths = {attention: tuple(of_length) for attention, of_length in peaks.items()}
    assert lengths == training_memory.LENGTHS, f"run: python benchmarks/training_memory.py --json {ROWS}"


def test_octavo_is_linear_and_standard_attention_quadratic(peaks: dict[str, dict[int, float]]) -> None:
    octavo, eager = peaks["octavo"], peaks["eager"]
    assert 1.8 < octavo[65536] / octavo[32768] < 2.2
    assert 3.5 < eager[8192] / eager[4096] < 4.2


def test_numbers_of_the_page(peaks: dict[str, dict[int, float]]) -> None:
    page = (ROOT / "docs" / "tutorials" / "training.md").read_text(encoding="utf-8")
    section = page.split("\n## Memory\n")[1].split("\n## ")[0]
    octavo, eager = peaks["octavo"], peaks["eager"]
    numbers = re.search(r"(\d+) MiB for 4096 tokens, (\d+) for 8192 and (\d+) for 65,536", section)
    assert numbers and [int(n) for n in numbers.groups()] == [round(octavo[n]) for n in (4096, 8192, 65536)]
    numbers = re.search(r"standard attention (\d+)\s+and (\d+)", section)
    assert numbers and [int(n) for n in numbers.groups()] == [round(eager[n]) for n in (4096, 8192)]
    for gpu_row in (ROOT / "benchmarks" / "results" / "backward-h200.jsonl").read_text().splitlines():
        row: dict[str, Any] = json.loads(gpu_row)
        if row["case"] == "d128_causal_1x4096_forward_standard":
            peak = {name: round(size / 2**20) for name, size in row["peak_bytes"].items()}
            assert f"{peak['octavo']} MiB, and standard attention {peak['eager']:,}" in section
            return
    raise AssertionError("there is no such row")


def test_both_compute_the_same_gradients() -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 50, 1, 64, requires_grad=True) for _ in range(3))
    dout = torch.randn(1, 50, 1, 64)
    octavo, eager = (call(q, k, v, dout)() for call in training_memory.CALLS.values())
    for found, expected in zip(octavo, eager, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.skipif(sys.platform != "linux", reason="/proc has the peak")
def test_measure_alone() -> None:
    """Of 2048 tokens standard attention keeps three matrices of scores, of 16 MiB, at least."""
    pytest.importorskip("torch", reason="PyTorch is not installed")
    eager = training_memory.measure_alone("eager", 2048, threads=1)
    octavo = training_memory.measure_alone("octavo", 2048, threads=1)
    assert (eager["length"], octavo["attention"], octavo["inputs_mib"]) == (2048, "octavo", 2)
    assert eager["peak_mib"] > 48
    # The result and three gradients are 2 MiB.
    assert 1.5 < octavo["peak_mib"] < 0.25 * eager["peak_mib"]
