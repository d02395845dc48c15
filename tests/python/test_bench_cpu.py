"""benchmarks/bench_cpu.py: a row of a linear layer, with the rate of a read of as many bytes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import bench_cpu  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_torch_thread")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_linear_layers_have_the_rate_of_a_read(
    dtype: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of every weight in turn, as the contestants read them; the times are made up."""
    read: list[int] = []

    def read_call(*arrays: torch.Tensor) -> bench_cpu.Call:
        read.append(sum(x.nbytes for x in arrays))
        return actual(*arrays)

    def time_all(calls: dict[str, list[bench_cpu.Call]], rounds: int) -> dict[str, list[float]]:
        assert {len(copies) for copies in calls.values()} == {2} and rounds == 7
        assert calls["read"][0]().isfinite() or dtype != "float32"
        return {name: [3e-4, 1e-4 if name == "read" else 2e-4] for name in calls}

    actual = bench_cpu.read_call
    monkeypatch.setattr(bench_cpu, "read_call", read_call)
    monkeypatch.setattr(bench_cpu, "time_all", time_all)
    monkeypatch.setattr(bench_cpu, "ROTATED_BYTES", 1)
    rows = bench_cpu.show(bench_cpu.bench_layer(64, 32, 3, dtype, 7))
    num_bytes = 64 * 32 * (4 if dtype == "float32" else 2)
    assert read == [num_bytes, num_bytes]
    names = ["octavo", "torch", "numpy"] if dtype == "float32" else ["octavo", "torch"]
    assert [row.implementation for row in rows] == names
    for row in rows:
        assert row.case == "linear 64x32, 3 rows" and row.max_error < 0.2
        assert row.read_rate == round(num_bytes / 1e6 / 1e-4, 1)
        assert row.rate == round(num_bytes / 1e6 / 2e-4, 1)
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) == len(names) and all("GB/s | 0.50 |" in line for line in shown)


def test_a_read_adds_up_all_bytes() -> None:
    one, two = torch.ones(6, 4), torch.full((2, 8), 2.0)
    assert bench_cpu.read_call(one, two)() == 24 + 32
    assert bench_cpu.read_call(one.view(torch.bfloat16))() == 24
