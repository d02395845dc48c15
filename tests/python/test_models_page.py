"""docs/models.md says yes where a test of transformers or vLLM runs the model, and nowhere else."""

import re
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

import test_transformers  # noqa: E402
import test_transformers_paged  # noqa: E402
import test_transformers_static  # noqa: E402
import test_transformers_training  # noqa: E402
from support import tiny_models  # noqa: E402

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
    rows = [line.strip("| ").split(" | ") for line in PAGE.read_text(encoding="utf-8").splitlines()]
    [header] = [row for row in rows if row[:2] == ["model", "`model_type`"]]
    cells = {row[1].strip("`"): row[2:] for row in rows if len(row) > 3 and re.fullmatch(r"`\w+`", row[1])}
    del cells["model_type"]
    assert cells.keys() == tiny_models.CONFIGS.keys()
    for i, column in enumerate(header[2:]):
        says = {name for name, row in cells.items() if i < len(row) and row[i] in ("yes", "with limits")}
        assert says == {name.removesuffix("_text") for name in proved.pop(column)}, column
    assert not proved
