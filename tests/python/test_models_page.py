"""docs/models.md says yes where a test of transformers or vLLM runs the model, and nowhere else."""

import re
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

import test_transformers
import test_transformers_paged
import test_transformers_static
import test_transformers_training
from support import tiny_models

TESTS = Path(__file__).parent
PAGE = TESTS.parents[1] / "docs" / "models.md"


def test_what_runs():
    vllm_engine = (TESTS / "support" / "vllm_engine.py").read_text(encoding="utf-8")
    proved = {
        "`generate`": [*test_transformers.CONFIGS, *test_transformers.MORE],
        "static cache": test_transformers_static.SERVED,
        "`generate_batch`": tiny_models.CONFIGS,
        "transformers' batching": test_transformers_paged.SERVED,
        "training": test_transformers_training.CONFIGS,
        "vLLM": re.findall(r'^    "(\w+)": lambda', vllm_engine, re.MULTILINE),
    }
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    rows = [re.split(r" *\| *", line)[1:-1] for line in lines if line.startswith("|")]
    header, *rows = [row for row in rows if len(row) == 2 + len(proved) and row[1].startswith("`")]
    cells = {row[1].strip("`"): row[2:] for row in rows}
    assert cells.keys() == {name.removesuffix("_text") for names in proved.values() for name in names}
    for i, column in enumerate(header[2:]):
        says = {name for name, row in cells.items() if row[i] in ("yes", "with limits")}
        assert says == {name.removesuffix("_text") for name in proved.pop(column)}, column
    assert not proved
