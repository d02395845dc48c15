"""Every Python and C++ snippet of the README and of docs/page_allocator.md runs.

`<!-- test: gpu -->` on the line before a fence, or `gpu` after its language: the snippet needs a GPU.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

import pytest

import octavo
from programs import find_program, run

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = (README, ROOT / "docs" / "page_allocator.md")

FENCE = re.compile(
    r"^(?:<!--[ ]*test:[ ]*(?P<comment>[\w ]+?)[ ]*-->\n+)?"
    r"^```(?P<language>\w+)[ ]*(?P<info>[^\n]*)\n"
    r"(?P<code>.*?)"
    r"^```[ ]*$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Snippet:
    language: str
    code: str
    line: int  # of its first line of code, from 1
    flags: frozenset[str]

    @property
    def needs_gpu(self) -> bool:
        return "gpu" in self.flags

    def __str__(self) -> str:
        return f"{self.language}_line_{self.line}"


def find_snippets(text: str) -> list[Snippet]:
    return [
        Snippet(
            language=match["language"],
            code=match["code"],
            line=text.count("\n", 0, match.start("code")) + 1,
            flags=frozenset((match["comment"] or "").split()) | frozenset(match["info"].split()),
        )
        for match in FENCE.finditer(text)
    ]


def modules_of(code: str) -> set[str]:
    """Top-level modules that the code imports."""
    modules = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            modules |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules.add(node.module.split(".")[0])
    return modules


def snippets_in(language: str) -> list:
    return [
        pytest.param(snippet, id=f"{page.stem}_{snippet}", marks=pytest.mark.gpu if snippet.needs_gpu else ())
        for page in PAGES
        for snippet in find_snippets(page.read_text(encoding="utf-8"))
        if snippet.language == language
    ]


@pytest.mark.parametrize("snippet", snippets_in("python"))
def test_python(snippet: Snippet, tmp_path: Path) -> None:
    missing = sorted(name for name in modules_of(snippet.code) if importlib.util.find_spec(name) is None)
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    file = tmp_path / "snippet.py"
    file.write_text(snippet.code, encoding="utf-8")
    run(sys.executable, file, cwd=tmp_path)


CMAKE_LISTS = """\
cmake_minimum_required(VERSION 3.25)
project(snippet CXX)
find_package(octavo CONFIG REQUIRED)
add_executable(snippet main.cpp)
target_link_libraries(snippet PRIVATE octavo::octavo)
"""


@pytest.mark.parametrize("snippet", snippets_in("cpp"))
def test_cpp(snippet: Snippet, tmp_path: Path) -> None:
    cmake_dir = Path(octavo.get_cmake_dir())
    if not (cmake_dir / "octavoConfig.cmake").exists():
        pytest.skip("octavo was built in place, not installed: there is no CMake package")
    if find_program("cmake") is None or find_program("c++") is None:
        pytest.skip("needs cmake and a C++ compiler")
    (tmp_path / "main.cpp").write_text(snippet.code, encoding="utf-8")
    (tmp_path / "CMakeLists.txt").write_text(CMAKE_LISTS, encoding="utf-8")
    generator = ["-G", "Ninja"] if find_program("ninja") else []
    run("cmake", "-S", ".", "-B", "build", *generator, f"-Doctavo_DIR={cmake_dir}", cwd=tmp_path)
    run("cmake", "--build", "build", cwd=tmp_path)
    run(tmp_path / "build" / "snippet", cwd=tmp_path)


def test_readme_has_a_snippet_for_every_kind_of_array() -> None:
    snippets = find_snippets(README.read_text(encoding="utf-8"))
    modules = set().union(*(modules_of(s.code) for s in snippets if s.language == "python"))
    assert {"numpy", "torch", "jax", "cupy"} <= modules
    assert any(s.language == "cpp" for s in snippets)


def test_find_snippets() -> None:
    text = textwrap.dedent(
        """\
        # Title

        ```python
        import numpy as np  # ``` inside a line
        ```

        Words. <!-- test: gpu --> is no mark inside a line.

        ```cpp
        int main() {}
        ```

        <!-- test: gpu -->
        ```python
        import torch.cuda
        from cupy import zeros
        ```

        ```python gpu
        x = 1
        ```

        ```
        plain text
        ```

        ```sh
        exit 1
        ```
        """
    )
    snippets = find_snippets(text)
    assert [(s.language, s.line, s.needs_gpu) for s in snippets] == [
        ("python", 4, False),
        ("cpp", 10, False),
        ("python", 15, True),
        ("python", 20, True),
        ("sh", 28, False),
    ]
    assert snippets[0].code == "import numpy as np  # ``` inside a line\n"
    assert snippets[1].code == "int main() {}\n"
    assert modules_of(snippets[0].code) == {"numpy"}
    assert modules_of(snippets[2].code) == {"torch", "cupy"}
