"""What the files around the sources say of each other: links, versions, presets."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.programs import find_program, run

ROOT = Path(__file__).resolve().parents[2]
# The pages of docs are checked by `mkdocs build --strict`.
PAGES = [*ROOT.glob("*.md"), *(ROOT / ".github").rglob("*.md")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page: Path) -> None:
    for link in re.findall(r"\]\(([^)#:]+(?:#L\d+)?)\)", page.read_text(encoding="utf-8")):
        path, _, line = link.partition("#L")
        target = page.parent / path
        assert target.exists(), link
        assert int(line or 0) <= (len(target.read_text(encoding="utf-8").splitlines()) if line else 0), link


def test_hooks_have_the_versions_of_the_lint_extra() -> None:
    hooks = (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8")
    pinned = re.findall(r'additional_dependencies: \["(.+)"\]', hooks)
    assert len(pinned) == hooks.count("- id:")
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 reads no TOML")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert set(pinned) <= set(project["optional-dependencies"]["lint"])


def test_cmake_reads_the_presets_that_are_documented() -> None:
    presets = json.loads((ROOT / "CMakePresets.json").read_text(encoding="utf-8"))["configurePresets"]
    names = {preset["name"] for preset in presets if not preset.get("hidden")}
    guide = (ROOT / "docs" / "developing.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `([\w-]+)` \|", guide, re.MULTILINE)) == names
    if find_program("cmake") is None:
        pytest.skip("needs cmake")
    for kind in ("configure", "build", "test"):
        listed = run("cmake", f"--list-presets={kind}", cwd=ROOT)
        assert set(re.findall(r'^  "([\w-]+)"', listed, re.MULTILINE)) == names


COMPLETE = {"Place": 4, "Range": 2, "DsSlot": 2}
"""Aggregates that are operands of conditional operators in code for GPUs, and their numbers of members."""


def test_operands_of_conditional_operators_have_all_initializers() -> None:
    """nvcc 13.0 leaves the other members of such an operand without a value, where they are to be zero."""
    files = [x for name in ("cuda", "common", "params") for x in (ROOT / "src" / name).rglob("*.*h")]
    found = []
    for file in [*files, *(ROOT / "src" / "cuda").rglob("*.cu")]:
        code = re.sub("//.*", "", file.read_text(encoding="utf-8"))
        for statement in re.split("[;{}](?=\\s)", code):
            if "?" in statement:
                found += re.findall(r"[?:](?<!::)\s*([A-Z]\w*)\{([^{}]+)\}", statement + "}")
    assert {name for name, _ in found} == set(COMPLETE)
    for name, initializers in found:
        assert initializers.count(",") + 1 == COMPLETE[name], f"{name}{{{initializers}}}"


SKIPPING = {
    "test_module.py": """
import pytest
pytest.importorskip("no_such_module")
""",
    "test_one.py": """
import pytest
@pytest.mark.skip(reason="no reason")
def test_skipped():
    pass
""",
    "test_gpu.py": """
import pytest
@pytest.mark.gpu
def test_gpu():
    pass
""",
}


@pytest.mark.parametrize("name", SKIPPING)
def test_no_skips(name: str, tmp_path: Path) -> None:
    """Tests the option with which .ci/vllm cannot pass without having run its tests."""
    (tmp_path / "conftest.py").write_text(
        (ROOT / "tests" / "python" / "conftest.py").read_text(encoding="utf-8"), encoding="utf-8"
    )
    (tmp_path / name).write_text(SKIPPING[name], encoding="utf-8")
    shown = [
        subprocess.run(
            [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options, name],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
        for options in ([], ["--no-skips"])
    ]
    of_gpu = name == "test_gpu.py"
    outcomes = ("1 deselected", "1 passed") if of_gpu else ("1 skipped",)
    assert any(outcome in shown[0].stdout for outcome in outcomes)
    refused = "skipped under --no-skips" in shown[1].stdout
    failed = shown[1].returncode not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
    assert refused == failed == (not of_gpu)
