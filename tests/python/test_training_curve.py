"""benchmarks/training_curve.py: what it measures, and the rows that docs/tutorials/training.md shows."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / "examples"), str(ROOT / "benchmarks")]

for package in ("rich", "tokenizers", "torch"):
    pytest.importorskip(package, reason=f"examples/train.py needs {package}")

import training_curve  # noqa: E402
from gpt.training import default_settings  # noqa: E402

from support.small_gpt import SHORT, Processes, get_text, trained  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_torch_thread")

FILES = sorted((ROOT / "benchmarks" / "results").glob("training-[!m]*.jsonl"))
RUNS = [(attention, seed) for seed in training_curve.SEEDS for attention in training_curve.ATTENTIONS]


def rows_of(path: Path) -> dict[tuple[str, int], dict[str, Any]]:
    rows = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return {(row["settings"]["attention"], row["settings"]["seed"]): row for row in rows}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_rows(path: Path) -> None:
    rows = rows_of(path)
    assert list(rows) == RUNS
    for (attention, seed), row in rows.items():
        device = "cpu" if row["device"].startswith("CPU") else "cuda"
        expected = replace(default_settings(device), attention=attention, seed=seed)
        assert row["settings"] == asdict(expected), f"run: python benchmarks/training_curve.py --json {path}"
        assert len(row["losses"]) == expected.steps
        assert row["held_out_loss"] < row["unigram_loss"] - 1


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_both_attentions_reach_the_same_loss(path: Path) -> None:
    rows = rows_of(path)
    for seed in training_curve.SEEDS:
        octavo, eager = (rows[attention, seed] for attention in training_curve.ATTENTIONS)
        assert octavo["held_out_loss"] == pytest.approx(eager["held_out_loss"], abs=0.03)
        last = np.subtract(octavo["losses"], eager["losses"])[-len(octavo["losses"]) // 5 :]
        assert abs(last.mean()) < 0.03


def test_numbers_of_the_page() -> None:
    rows = rows_of(ROOT / "benchmarks" / "results" / "training-cpu.jsonl")
    page = (ROOT / "docs" / "tutorials" / "training.md").read_text(encoding="utf-8")
    for attention in training_curve.ATTENTIONS:
        first, other = (rows[attention, seed] for seed in training_curve.SEEDS)
        assert f"After {first['settings']['steps']} steps" in page
        for loss in (first["held_out_loss"], other["held_out_loss"], first["unigram_loss"]):
            assert f" {loss:.3f} " in page or f" {loss:.3f}." in page


def test_measure() -> None:
    row = training_curve.measure(SHORT, get_text(), Processes("cpu"))
    trainer, losses = trained(SHORT)
    assert row.losses == pytest.approx(losses, abs=1e-5)
    assert row.held_out_loss == pytest.approx(trainer.held_out_loss(), abs=1e-5)
    assert row.settings["seed"] == 0 and row.settings["attention"] == "octavo"
    assert row.device.startswith("CPU, ") and row.tokens_per_second > 0
