"""The C++ tests (tests/cpp), built and run under AddressSanitizer and UndefinedBehaviorSanitizer."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "cpp"

HAS_GTEST = "#include <gtest/gtest.h>\nTEST(A, B) {}\n"


# Programs beside this Python, as pip installs them, or on the PATH.
SEARCH_PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])


def find_program(name):
    return shutil.which(name, path=SEARCH_PATH)


def missing():
    """What the C++ tests need and this machine lacks; empty if nothing."""
    programs = [name for name in ("cmake", "ctest", "g++") if find_program(name) is None]
    if programs:
        return ", ".join(programs)
    compiles = subprocess.run(
        ["g++", "-std=c++17", "-fsyntax-only", "-x", "c++", "-"],
        input=HAS_GTEST,
        text=True,
        capture_output=True,
    )
    return "" if compiles.returncode == 0 else "GoogleTest (Debian: libgtest-dev)"


def run(*command):
    result = subprocess.run(
        [find_program(command[0]), *command[1:]],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PATH": SEARCH_PATH},
    )
    assert result.returncode == 0, result.stdout[-10000:]


@pytest.mark.timeout(1200)
def test_cpp_under_sanitizers(tmp_path):
    if lacks := missing():
        pytest.skip(f"the C++ tests need {lacks}")
    generator = ["-G", "Ninja"] if find_program("ninja") else []
    run("cmake", "-S", SOURCE, "-B", tmp_path, *generator, "-DOCTAVO_SANITIZE=address,undefined")
    run("cmake", "--build", tmp_path, "--parallel", "2")
    run("ctest", "--test-dir", tmp_path, "--output-on-failure", "--no-tests=error", "--parallel", "2")
