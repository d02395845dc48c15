"""The C++ tests (tests/cpp), built and run under sanitizers.

All of them under AddressSanitizer and UndefinedBehaviorSanitizer; those in which several threads call the
page allocator, or share the CPU operators' work, under ThreadSanitizer too, which has no race to find in the
others.

The CPU kernels are compiled for the instruction set that runs here alone, since each of the four takes 40
seconds under the first two sanitizers.
"""

import subprocess
from pathlib import Path

import pytest

from octavo import _core
from support.programs import find_program, run

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
@pytest.mark.parametrize(
    ("sanitizers", "targets", "tests"),
    [
        ("address,undefined", ["all"], "."),
        (
            "thread",
            ["page_allocator_threads_test", "thread_pool_test"],
            "^(PageAllocatorThreads|ThreadPool)[.]",
        ),
    ],
)
def test_cpp_under_sanitizers(tmp_path, sanitizers, targets, tests):
    if lacks := missing():
        pytest.skip(f"the C++ tests need {lacks}")
    generator = ["-G", "Ninja"] if find_program("ninja") else []
    options = [f"-DOCTAVO_SANITIZE={sanitizers}", f"-DOCTAVO_CPU_ISA={_core.cpu_info()['isa']}"]
    run("cmake", "-S", SOURCE, "-B", tmp_path, *generator, *options)
    run("cmake", "--build", tmp_path, "--parallel", "2", "--target", *targets)
    command = ["ctest", "--test-dir", tmp_path, "--output-on-failure", "--no-tests=error", "--parallel", "2"]
    run(*command, "--tests-regex", tests)
