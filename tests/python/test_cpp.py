"""The C++ tests (tests/cpp), built and run under AddressSanitizer and UndefinedBehaviorSanitizer."""

import subprocess
from pathlib import Path

import pytest

from programs import find_program, run

SOURCE = Path(__file__).parents[1] / "cpp"

HAS_GTEST = "#include <gtest/gtest.h>\nTEST(A, B) {}\n"


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


@pytest.mark.timeout(1200)
def test_cpp_under_sanitizers(tmp_path):
    if lacks := missing():
        pytest.skip(f"the C++ tests need {lacks}")
    generator = ["-G", "Ninja"] if find_program("ninja") else []
    run("cmake", "-S", SOURCE, "-B", tmp_path, *generator, "-DOCTAVO_SANITIZE=address,undefined")
    run("cmake", "--build", tmp_path, "--parallel", "2")
    run("ctest", "--test-dir", tmp_path, "--output-on-failure", "--no-tests=error", "--parallel", "2")
