"""The site of the documentation, built strictly: with the extra `docs` alone, whatever else is installed."""

import json
import sys
from pathlib import Path

import pytest

for module in ("mkdocs", "material", "mkdocstrings_handlers.python", "jax"):
    pytest.importorskip(module, reason="the extra docs is not installed")

import octavo  # noqa: E402
from support.programs import run  # noqa: E402

ROOT = Path(__file__).parents[2]
ADDRESS = "https://example.org/octavo"
OTHERS = ("cupy", "gguf", "starlette", "tokenizers", "torch", "transformers", "uvicorn", "vllm")
BUILD = f"""
import importlib.abc, sys

class Others(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {OTHERS}:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Others())
from mkdocs.__main__ import cli
cli(["build", "--strict", "--quiet", "--config-file", sys.argv[1], "--site-dir", sys.argv[2]])
"""


def test_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_MKDOCS_2_WARNING", "1")
    monkeypatch.setenv("OCTAVO_REPO_URL", ADDRESS)
    monkeypatch.setenv("PYTHONPATH", str(Path(octavo.__file__).parents[1]), prepend=":")
    run(sys.executable, "-c", BUILD, ROOT / "mkdocs.yml", tmp_path / "site", cwd=ROOT)
    first_page = (tmp_path / "site" / "index.html").read_text(encoding="utf-8")
    assert f'href="{ADDRESS}"' in first_page and "pictures/speeds.svg" in first_page
    index = json.loads((tmp_path / "site" / "search" / "search_index.json").read_text(encoding="utf-8"))
    found = {entry["location"].split("#")[0] for entry in index["docs"]}
    for page in (ROOT / "docs").rglob("*.md"):
        place = page.relative_to(ROOT / "docs").with_suffix("").as_posix()
        assert (f"{place}/" if place != "index" else "") in found
