"""benchmarks/bench_serving.py, with a tiny model whose text tells what its cache holds."""

import sys
from pathlib import Path

import pytest

import octavo
from octavo.serving import Scheduler
from support.exact_model import HEAD_DIM, ExactModel

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import bench_serving
from _report import read_rows
from results_table import serving as serving_table


@pytest.fixture
def tiny(monkeypatch):
    """The model, and cases of a few short texts."""
    model = ExactModel()

    def make_scheduler(**sizes):
        cache = octavo.KVCache(len(model.windows), 1, HEAD_DIM, **sizes)
        return Scheduler(cache, model.forward)

    monkeypatch.setattr(bench_serving, "MAX_LENGTH", 64)
    monkeypatch.setitem(
        bench_serving.MODELS,
        "smollm2",
        lambda device: bench_serving.Model(make_scheduler, model.vocabulary, device),
    )
    monkeypatch.setattr(
        bench_serving,
        "CASES",
        {
            "one": bench_serving.Workload(40, 20, 9, ("contiguous", "pages")),
            "samples4": bench_serving.Workload(3, 20, 9, ("contiguous", "unshared", "pages"), num_samples=4),
            "beams2": bench_serving.Workload(3, 20, 9, ("contiguous", "pages"), num_beams=2),
        },
    )
    return model


def test_rows_and_their_table(tiny, tmp_path, capsys):
    path = tmp_path / "serving-cpu.jsonl"
    assert bench_serving.main(["--slots", "320", "--json", str(path)]) == 0
    assert "texts are others" not in capsys.readouterr().out
    rows = {(row["case"], row["way"]): row for row in read_rows(path)}
    assert len(rows) == 7
    one, pages = rows["one", "contiguous"], rows["one", "pages"]
    assert one["sequences_at_once"] <= 5 < pages["sequences_at_once"]
    assert one["waste_percent"] > 40 > pages["waste_percent"]
    for case in "one", "samples4":
        of_case = [row["generated_tokens"] for row in rows.values() if row["case"] == case]
        assert len(set(of_case)) == 1
    for row in rows.values():
        assert row["requests_per_s"] == pytest.approx(row["num_requests"] / row["seconds"], rel=0.05)
    table = serving_table(tmp_path)
    assert "| smollm2, CPU | 4 samples | pages, prompts not shared |" in table
    ratio = pages["requests_per_s"] / one["requests_per_s"]
    assert f"| smollm2, CPU | one text each | pages | {pages['requests_per_s']:.2f} | {ratio:.2f} |" in table


def test_other_text_is_noticed(tiny, monkeypatch, capsys):
    forward = tiny.forward
    monkeypatch.setattr(tiny, "forward", lambda step, tokens: forward(step, tokens) * len(step.seq_lens) % 7)
    assert bench_serving.main(["--slots", "320", "--cases", "one"]) == 1
    assert "texts are others than with contiguous" in capsys.readouterr().out


def test_list(capsys):
    assert bench_serving.main(["--list", "--cases", "beams"]) == 0
    assert capsys.readouterr().out.startswith("beams2: 8 requests; contiguous, pages\n")
