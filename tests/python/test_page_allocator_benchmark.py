"""benchmarks/bench_page_allocator.py: that the yardstick does the same work, and that all of it runs."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import octavo
from support.programs import find_program

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

from _python_page_manager import PythonPageManager  # noqa: E402


def test_the_yardstick_does_the_same():
    alloc, manager = octavo.PageAllocator(64, 4, prefix_cache=True), PythonPageManager(64, 4)
    arrays = [np.full((3, 8), -1, np.int32), np.zeros(3, np.int32), np.zeros(4, np.int32)]
    expected = [np.empty_like(array) for array in arrays]
    step_arrays = octavo.StepArrays(*expected)
    prompt = list(range(13))
    for _ in range(2):
        seq, handle = alloc.create(prompt), manager.create(prompt)
        assert alloc.length(seq) == manager.length[handle]
        missing = len(prompt) - alloc.length(seq)
        alloc.step([seq], missing, step_arrays, prompt[alloc.length(seq) :])
        manager.step([handle], missing, *arrays)
        manager.store(handle, prompt)
        for _ in range(9):
            alloc.step([seq], 1, step_arrays)
            manager.step([handle], 1, *arrays)
        # Which page is free first is up to each.
        assert alloc.pages(seq).tolist()[:3] == manager.pages[handle][:3] == [0, 1, 2]
        assert alloc.pages(seq).tolist() == expected[0][0, :6].tolist()
        assert len(set(manager.pages[handle])) == 6
        assert manager.pages[handle][-1] == arrays[0][0, 5]
        assert [array.tolist() for array in arrays[1:]] == [array.tolist() for array in expected[1:]]
        alloc.free(seq)
        manager.free(handle)
        arrays[0][:] = -1
    assert alloc.num_free_pages == len(manager.free_pages) == 64


def test_it_runs(tmp_path):
    if find_program("c++") is None:
        pytest.skip("needs a C++ compiler")
    rows = tmp_path / "rows.jsonl"
    command = [
        sys.executable,
        str(BENCHMARKS / "bench_page_allocator.py"),
        "--rounds",
        "2",
        "--json",
        str(rows),
    ]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    shown = [json.loads(line) for line in rows.read_text().splitlines()]
    assert {"C++", "Python", "plain Python"} == {row["implementation"] for row in shown}
    assert sum(row["goal"] is not None for row in shown) == 6
    (memory,) = (row["best"] for row in shown if row["case"] == "memory")
    assert memory == pytest.approx(8, abs=0.5)
