"""The site of the documentation, built strictly: with the extra `docs` alone, whatever else is installed."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

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


@pytest.mark.parametrize(
    ("remote", "address"),
    [
        ("https://example.org/owner/octavo.git", "https://example.org/owner/octavo"),
        ("https://name:secret@example.org/owner/octavo", "https://example.org/owner/octavo"),
        ("git@example.org:owner/octavo.git", "https://example.org/owner/octavo"),
        ("ssh://git@example.org/group/owner/octavo.git/", "https://example.org/group/owner/octavo"),
        ("/srv/octavo", None),
        ("../octavo.git", None),
        ("file:///srv/octavo.git", None),
        ("", None),
    ],
)
def test_the_link_is_where_the_checkout_came_from(tmp_path: Path, remote: str, address: str | None) -> None:
    spec = importlib.util.spec_from_file_location("octavo_site_repository", ROOT / "docs" / "repository.py")
    assert spec and spec.loader
    hook = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hook)
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True)
    if remote:
        subprocess.run(["git", "-C", tmp_path, "remote", "add", "origin", remote], check=True)
    for given in ("", ADDRESS):
        config = SimpleNamespace(
            repo_url=given, repo_name=None, config_file_path=str(tmp_path / "mkdocs.yml")
        )
        assert hook.on_config(config) is config
        assert config.repo_url == (given or address or "")
        if not given and address:
            assert config.repo_name == address.removeprefix("https://example.org/")
