"""Every Python, C++ and C snippet of the README and the documentation runs; its pictures are those drawn.

On the line before a fence:
`<!-- test: gpu -->`: the snippet needs a GPU;
`<!-- test: prints -->`: the snippet prints what the next fence, of the language `text`, holds;
`<!-- test: raises -->`: the snippet raises the message of the heading above it;
`<!-- test: raises gpu -->`: both;
`<!-- test: server -->` and `<!-- test: model -->`: test_docs_server.py runs the snippet.
"""

from __future__ import annotations

import ast
import importlib.util
import itertools
import re
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

import octavo
from conftest import gpu_count
from support.producers import Producer
from support.programs import find_program, run, run_script

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
DOCS = ROOT / "docs"
PAGES = (README, *sorted(DOCS.rglob("*.md")))

FENCE = re.compile(
    r"^(?:<!--[ ]*test:[ ]*(?P<comment>[\w ]+?)[ ]*-->\n+)?"
    r"^```(?P<language>\w+)[ ]*\n"
    r"(?P<code>.*?)"
    r"^```[ ]*$",
    re.MULTILINE | re.DOTALL,
)
SECTION = re.compile(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
HEADING_WITH_MESSAGE = re.compile(r"^### `(.+)`$", re.MULTILINE)


@dataclass(frozen=True)
class Snippet:
    language: str
    code: str
    line: int  # of its first line of code, from 1
    flags: frozenset[str]  # of "gpu", "prints" and "raises"
    message: str  # of the last heading that has one
    printed: str  # the text in the next fence, if it is of the language "text"

    def __str__(self) -> str:
        return f"{self.language}_line_{self.line}"


def find_snippets(text: str) -> list[Snippet]:
    fences = list(FENCE.finditer(text))
    return [
        Snippet(
            language=match["language"],
            code=match["code"],
            line=text.count("\n", 0, match.start("code")) + 1,
            flags=frozenset((match["comment"] or "").split()),
            message=["", *HEADING_WITH_MESSAGE.findall(text, 0, match.start())][-1],
            printed=following["code"] if following and following["language"] == "text" else "",
        )
        for match, following in itertools.zip_longest(fences, fences[1:])
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


def snippets_in(language: str, *, raises: bool = False) -> list:
    return [
        pytest.param(
            snippet, id=f"{page.stem}_{snippet}", marks=pytest.mark.gpu if "gpu" in snippet.flags else ()
        )
        for page in PAGES
        for snippet in find_snippets(page.read_text(encoding="utf-8"))
        if snippet.language == language
        and ("raises" in snippet.flags) == raises
        and not snippet.flags & {"server", "model"}
    ]


def skip_if_a_module_is_missing(code: str) -> None:
    missing = sorted(name for name in modules_of(code) if importlib.util.find_spec(name) is None)
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")


@pytest.mark.parametrize("snippet", snippets_in("python"))
def test_python(snippet: Snippet, tmp_path: Path) -> None:
    skip_if_a_module_is_missing(snippet.code)
    file = tmp_path / "snippet.py"
    file.write_text(snippet.code, encoding="utf-8")
    if "vllm" in modules_of(snippet.code):  # whose engine starts processes of its own
        printed = run(sys.executable, file, cwd=tmp_path)
    else:
        printed = run_script(file, tmp_path)
    if "prints" in snippet.flags:
        assert printed == snippet.printed != ""


@pytest.mark.parametrize("snippet", snippets_in("python", raises=True))
def test_message(snippet: Snippet) -> None:
    skip_if_a_module_is_missing(snippet.code)
    *before, last = ast.parse(snippet.code).body
    names: dict[str, object] = {}
    exec(compile(ast.Module(before, []), "<snippet>", "exec"), names)
    with pytest.raises((ValueError, TypeError, RuntimeError)) as caught:
        exec(compile(ast.Module([last], []), "<snippet>", "exec"), names)
    assert str(caught.value) == snippet.message


@pytest.mark.skipif(gpu_count() > 0, reason="there is a GPU")
def test_message_without_a_gpu() -> None:
    with pytest.raises(RuntimeError) as caught:
        octavo.attention(*(Producer(np.ones((1, 1, 1, 8), np.float32), device=(2, 0)),) * 3)
    message = str(caught.value).removeprefix("attention: ")
    headings = HEADING_WITH_MESSAGE.findall((DOCS / "troubleshooting.md").read_text(encoding="utf-8"))
    # A build without CUDA was made for one of several reasons, by pip or by CMake.
    assert message.split(" (")[0] in [heading.split(" (")[0] for heading in headings]


CMAKE_LISTS = """\
cmake_minimum_required(VERSION 3.25)
project(snippet {language})
find_package(octavo CONFIG REQUIRED)
add_executable(snippet {file})
target_link_libraries(snippet PRIVATE octavo::octavo)
"""


@pytest.mark.parametrize("snippet", snippets_in("cpp") + snippets_in("c"))
def test_compiled(snippet: Snippet, tmp_path: Path) -> None:
    cmake_dir = Path(octavo.get_cmake_dir())
    if not (cmake_dir / "octavoConfig.cmake").exists():
        pytest.skip("octavo was built in place, not installed: there is no CMake package")
    if find_program("cmake") is None or find_program("c++") is None:
        pytest.skip("needs cmake and a C++ compiler")
    file = f"main.{snippet.language}"
    (tmp_path / file).write_text(snippet.code, encoding="utf-8")
    language = {"c": "C", "cpp": "CXX"}[snippet.language]
    lists = CMAKE_LISTS.format(file=file, language=language)
    (tmp_path / "CMakeLists.txt").write_text(lists, encoding="utf-8")
    generator = ["-G", "Ninja"] if find_program("ninja") else []
    run("cmake", "-S", ".", "-B", "build", *generator, f"-Doctavo_DIR={cmake_dir}", cwd=tmp_path)
    run("cmake", "--build", "build", cwd=tmp_path)
    run(tmp_path / "build" / "snippet", cwd=tmp_path)


def test_pictures(tmp_path: Path) -> None:
    run(sys.executable, DOCS / "pictures" / "draw.py", tmp_path)
    drawn = {path.name: path.read_text(encoding="utf-8") for path in tmp_path.iterdir()}
    kept = {path.name: path.read_text(encoding="utf-8") for path in (DOCS / "pictures").glob("*.svg")}
    assert drawn == kept != {}


CUDA_KERNEL = re.compile(r"__global__[^;{]*?(\w+_kernel)\(")


def test_find_cuda_kernels() -> None:
    text = """\
        __global__ void first_kernel(int x) {
        __global__ void __launch_bounds__(128 * (1 + kGroups), 2)
            second_kernel(int x) {
        __global__ void __maxnreg__(kRegisters) third_kernel() {
        void launch_no_kernel() {
        """
    assert CUDA_KERNEL.findall(text) == ["first_kernel", "second_kernel", "third_kernel"]


def test_the_table_of_kernels_names_those_that_exist() -> None:
    sources = [path for path in (ROOT / "src" / "cuda").rglob("*.cu*") if path.is_file()]
    folder_of = {}
    for path in sources:
        text = path.read_text(encoding="utf-8")
        kernels = CUDA_KERNEL.findall(text)
        assert len(kernels) == len(re.findall(r"__global__", text)), path
        for kernel in kernels:
            assert folder_of.setdefault(kernel, path.parent.name) == path.parent.name
    text = (DOCS / "how_a_call_runs.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| \[?`(\w+)`", text, re.MULTILINE)
    assert len(rows) == len(dict(rows))
    assert dict(rows) == folder_of != {}


def test_environment_variables_are_listed() -> None:
    """Those that the library reads when it runs; builds read two more."""
    paths = [path for pattern in ("*.cpp", "*.h") for path in (ROOT / "src").rglob(pattern)]
    paths += (ROOT / "python" / "octavo").rglob("*.py")
    text = "".join(path.read_text(encoding="utf-8") for path in paths)
    read = set(re.findall(r'(?:getenv\(|environ\.get\(|_ON_CPU = )"(OCTAVO_\w+)"', text))
    table = (DOCS / "install.md").read_text(encoding="utf-8").split("## Environment variables\n")[1]
    listed = set(re.findall(r"`(OCTAVO_\w+)`", table))
    assert listed - {"OCTAVO_CUDA", "OCTAVO_CUDA_ARCHITECTURES"} == read != set()


HEADINGS = (
    "What it must do",
    "The schedule",
    "What a CTA and a warp do",
    "How partial results are combined",
    "Results beside the peers",
    "Known limits",
)


@pytest.mark.parametrize("page", sorted((DOCS / "kernels").iterdir()), ids=lambda page: page.stem)
def test_pages_of_kernels_have_one_order(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 100
    assert tuple(re.findall(r"^## (.*)$", text, re.MULTILINE)) == HEADINGS
    schedule = text.split("## The schedule")[1].split("## ")[0]
    assert f"](../pictures/{page.stem}.svg)" in schedule


def test_readme_is_short_and_shows_what_its_example_prints() -> None:
    text = README.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 120
    [example] = [s for s in find_snippets(text) if s.language == "python"]
    assert "prints" in example.flags


def test_every_library_has_a_tutorial_with_a_snippet() -> None:
    linked = re.findall(r"\((docs/tutorials/\w+\.md)\)", README.read_text(encoding="utf-8"))
    assert {ROOT / path for path in linked} == set((DOCS / "tutorials").iterdir())
    for path in linked:
        snippets = find_snippets((ROOT / path).read_text(encoding="utf-8"))
        languages = {snippet.language for snippet in snippets}
        modules = set().union(*(modules_of(s.code) for s in snippets if s.language == "python"))
        library = Path(path).stem
        module = dict.fromkeys(("pytorch", "training", "flash_attn"), "torch")
        module |= dict.fromkeys(("serving", "server"), "octavo")
        assert module.get(library, library) in languages | modules


def test_snippets_are_as_short_as_their_headings_say() -> None:
    """Without empty lines."""
    found = 0
    for page in PAGES:
        for heading, section in SECTION.findall(page.read_text(encoding="utf-8")):
            if said := re.search(r"\bin (\d+) lines$", heading):
                [snippet] = find_snippets(section)
                assert sum(map(bool, map(str.strip, snippet.code.splitlines()))) <= int(said[1]), heading
                found += 1
    assert found == 2


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

        <!-- test: gpu prints -->
        ```python
        import torch.cuda
        from cupy import zeros
        ```

        ```text
        3
        ```

        ### `attention: no`

        <!-- test: raises -->
        ```python
        x = 1
        ```

        <!-- test: raises gpu -->
        ```python
        x = 2
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
    assert [(s.language, s.line, {*s.flags}, s.message, s.printed) for s in snippets] == [
        ("python", 4, set(), "", ""),
        ("cpp", 10, set(), "", ""),
        ("python", 15, {"gpu", "prints"}, "", "3\n"),
        ("text", 20, set(), "", ""),
        ("python", 27, {"raises"}, "attention: no", ""),
        ("python", 32, {"raises", "gpu"}, "attention: no", ""),
        ("sh", 40, set(), "attention: no", ""),
    ]
    assert snippets[0].code == "import numpy as np  # ``` inside a line\n"
    assert snippets[1].code == "int main() {}\n"
    assert modules_of(snippets[0].code) == {"numpy"}
    assert modules_of(snippets[2].code) == {"torch", "cupy"}
