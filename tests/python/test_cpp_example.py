"""examples/cpp: built against the installed package, as a user would, and run."""

import subprocess
from pathlib import Path

import pytest

import octavo
from support.programs import find_program, run

SOURCE = Path(__file__).resolve().parents[2] / "examples" / "cpp"


def run_example(folder, *arguments):
    cmake_dir = Path(octavo.get_cmake_dir())
    if not (cmake_dir / "octavoConfig.cmake").exists():
        pytest.skip("octavo was built in place, not installed: there is no CMake package")
    if find_program("cmake") is None or find_program("c++") is None:
        pytest.skip("needs cmake and a C++ compiler")
    generator = ["-G", "Ninja"] if find_program("ninja") else []
    run("cmake", "-S", SOURCE, "-B", folder, *generator, f"-Doctavo_DIR={cmake_dir}")
    run("cmake", "--build", folder)
    done = subprocess.run([folder / "decode", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_example(tmp_path):
    assert run_example(tmp_path).startswith("CPU: 1.")


@pytest.mark.gpu
def test_example_on_a_gpu(tmp_path):
    assert "\nGPU: differs by 0.0" in run_example(tmp_path, "--gpu")
