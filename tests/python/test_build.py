"""The build: what it chose, what the package carries, and that C++ programs can use it."""

import ast
import importlib.metadata
import importlib.util
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import octavo

ROOT = Path(__file__).parents[2]


def run(*command, **options):
    return subprocess.run(command, capture_output=True, text=True, timeout=280, **options)


def python(*arguments, **options):
    return run(sys.executable, *arguments, **options)


# What the package says and carries


def test_version_is_the_one_of_pyproject():
    text = (ROOT / "pyproject.toml").read_text()
    version = re.search(r'^version = "(.+)"$', text, re.MULTILINE).group(1)
    assert octavo.__version__ == octavo.build_info()["version"] == version


def test_build_info():
    info = octavo.build_info()
    assert info["compiler"]
    if info["cuda_version"]:
        assert re.fullmatch(r"\d+\.\d+", info["cuda_version"])
        assert info["architectures"]
        assert all(re.fullmatch(r"(sm|compute)_\d+[af]?", name) for name in info["architectures"])
        assert len(set(info["instances"])) == len(info["instances"]) > 0
    else:
        assert info["architectures"] == info["instances"] == []


def test_info_command():
    result = python("-W", "error", "-m", "octavo.info")
    assert result.returncode == 0, result.stderr
    rows = dict(re.findall(r"^(\S.*?)  +(.*)$", result.stdout, re.MULTILINE))
    assert rows["version"] == octavo.__version__
    assert rows["compiler"] == octavo.build_info()["compiler"]
    assert {"CUDA", "CPU kernels", "CPU features", "CPU threads"} <= rows.keys()
    assert rows.get("GPU", "").startswith("none: ") or "GPU 0" in rows
    assert all(len(line) <= 100 for line in result.stdout.splitlines())


def test_package_is_typed():
    folder = Path(octavo._core.__file__).parent
    assert (folder / "py.typed").is_file()
    stub = ast.parse((folder / "_core.pyi").read_text())
    assert "build_info" in {node.name for node in stub.body if isinstance(node, ast.FunctionDef)}


IMPORT = """
import sys, time
before, begin = set(sys.modules), time.process_time()
import octavo
seconds = time.process_time() - begin
modules = {name.split(".")[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names)
print(seconds, *modules)
"""


def test_import_is_quick_and_brings_nothing_else():
    times = []
    for _ in range(5):  # of the CPU, so that a busy machine does not count
        seconds, *modules = python("-c", IMPORT).stdout.split()
        times.append(float(seconds))
        assert set(modules) <= {"octavo", "nanobind_backend"}  # not even NumPy
    assert min(times) < 0.05


# C++ programs

CONSUMER = {
    "CMakeLists.txt": """
cmake_minimum_required(VERSION 3.25)
project(consumer LANGUAGES CXX)
find_package(octavo 0.1 REQUIRED)
add_executable(consumer main.cpp)
target_link_libraries(consumer PRIVATE octavo::octavo)
""",
    "main.cpp": """
#include <octavo/attention.h>
#include <octavo/build_info.h>
#include <octavo/page_allocator.h>
#include <octavo/version.h>

#include <cstdio>
#include <vector>

int main() {
    octavo::PageAllocator allocator(8, 16);
    octavo::Sequence sequence = allocator.create();
    allocator.extend(sequence, 20);

    // One query that sees two equal keys: the mean of their values.
    std::vector<float> q(8, 1.0f), k(16, 0.5f), v(16), out(8);
    for (int i = 0; i < 16; ++i) v[i] = i < 8 ? 1.0f : 3.0f;
    octavo::AttentionArgs args;
    args.q = {q.data(), octavo::DType::float32, {1, 1, 1, 8}};
    args.k = {k.data(), octavo::DType::float32, {1, 2, 1, 8}};
    args.v = {v.data(), octavo::DType::float32, {1, 2, 1, 8}};
    args.out = {out.data(), octavo::DType::float32, {1, 1, 1, 8}};
    octavo::attention(args);

    std::string why_none;
    octavo::gpu_info(&why_none);
    std::printf("%s %d %.3f\\n", octavo::build_info().version.c_str(),
                static_cast<int>(allocator.pages(sequence).size()), out[7]);
}
""",
}


@pytest.fixture
def cmake(tmp_path):
    def configure(source, *options, **run_options):
        ninja = pytest.importorskip("ninja")
        settings = ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={Path(ninja.BIN_DIR, 'ninja')}"]
        build = str(tmp_path / "build")
        return python("-m", "cmake", "-S", str(source), "-B", build, *settings, *options, **run_options)

    return configure


def test_find_package_from_the_installed_package(tmp_path, cmake):
    try:
        importlib.metadata.distribution("octavo")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("octavo is not installed, but imported from a build folder")
    for name, text in CONSUMER.items():
        (tmp_path / name).write_text(text)

    result = cmake(tmp_path, f"-Doctavo_DIR={octavo.get_cmake_dir()}")
    assert result.returncode == 0, result.stderr
    result = python("-m", "cmake", "--build", str(tmp_path / "build"))
    assert result.returncode == 0, result.stdout + result.stderr
    result = run(str(tmp_path / "build" / "consumer"))
    assert result.stdout == f"{octavo.__version__} 2 2.000\n", result.stderr


# What is chosen: fake compilers stand for the real ones

NO_NVCC_ON_PYPI = "and PyPI has none for this platform"


@pytest.fixture
def backend(monkeypatch, tmp_path):
    """Return the build backend, as on a machine without any CUDA."""
    pytest.importorskip("scikit_build_core")
    monkeypatch.syspath_prepend(ROOT / "build_backend")
    spec = importlib.util.spec_from_file_location("octavo_build", ROOT / "build_backend" / "octavo_build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name in ("OCTAVO_CUDA", "CUDACXX", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(module, "DEFAULT_CUDA_HOME", str(tmp_path / "default"))
    monkeypatch.setattr(module, "find_pypi", lambda: None)
    monkeypatch.setattr(module, "pypi_has_compiler", lambda: True)
    return module


def make_nvcc(folder, version="13.0.88", status=0, message=""):
    folder.mkdir(parents=True, exist_ok=True)
    nvcc = folder / "nvcc"
    nvcc.write_text(
        "#!/bin/sh\n"
        f'[ "$1" = --version ] && {{ echo "Cuda compilation tools, V{version}"; exit 0; }}\n'
        f"echo '{message}' >&2\nexit {status}\n"
    )
    nvcc.chmod(0o755)
    return str(nvcc)


def chosen(backend, settings=None):
    defines = backend.with_cuda_choice(settings)
    return {name.removeprefix("cmake.define."): value for name, value in defines.items()}


def test_no_nvcc_takes_the_pinned_packages(backend, monkeypatch):
    assert backend.compiler_requirements(None) == backend.PYPI_COMPILER
    assert all(re.fullmatch(r"nvidia-[a-z-]+==13\.0\.\d+", pin) for pin in backend.PYPI_COMPILER)
    assert set(backend.PYPI_COMPILER) <= set(backend.get_requires_for_build_wheel())
    assert set(backend.PYPI_COMPILER) <= set(backend.get_requires_for_build_editable())

    monkeypatch.setattr(backend, "find_pypi", lambda: "/site-packages/nvidia/cu13/bin/nvcc")
    assert chosen(backend) == {
        "OCTAVO_CUDA": "ON",
        "CMAKE_CUDA_COMPILER": "/site-packages/nvidia/cu13/bin/nvcc",
        "OCTAVO_CUDA_REASON": "from PyPI: no nvcc found",
    }


@pytest.mark.parametrize(
    ("free_threaded", "version", "linked_in"),
    [
        (0, (3, 10), False),
        (None, (3, 15), False),
        (1, (3, 13), True),
        (1, (3, 14), True),
        (1, (3, 15), False),
    ],
)
def test_dependencies(monkeypatch, free_threaded, version, linked_in):
    monkeypatch.setattr("sysconfig.get_config_var", {"Py_GIL_DISABLED": free_threaded}.get)
    monkeypatch.setattr(sys, "version_info", version)
    module = runpy.run_path(str(ROOT / "build_backend" / "octavo_dependencies.py"))
    core = [] if linked_in else ["nanobind-backend>=1.0,<2"]
    assert module["dynamic_metadata"]({}, {}) == {"dependencies": ["numpy>=2.1", *core]}
    assert module["NANOBIND_CORE"] == core


@pytest.mark.parametrize("version", ["12.8.61", "13.0.88", "14.1.0"])
def test_nvcc_on_path_is_taken(backend, tmp_path, version):
    nvcc = make_nvcc(tmp_path / "bin", version)
    assert backend.compiler_requirements(None) == []
    assert chosen(backend)["CMAKE_CUDA_COMPILER"] == nvcc
    assert chosen(backend)["OCTAVO_CUDA"] == "ON"


def test_default_toolkit_is_taken(backend, tmp_path):
    nvcc = make_nvcc(tmp_path / "default" / "bin")
    assert chosen(backend)["CMAKE_CUDA_COMPILER"] == nvcc


def test_cuda_home_comes_before_path(backend, tmp_path, monkeypatch):
    make_nvcc(tmp_path / "bin")
    nvcc = make_nvcc(tmp_path / "home" / "bin")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
    assert chosen(backend)["CMAKE_CUDA_COMPILER"] == nvcc


@pytest.mark.parametrize(
    ("nvcc", "reason"),
    [
        ({"version": "12.6.85"}, "is version 12.6.85, and 12.8 is needed"),
        ({"version": "unknown"}, "--version names no version"),
        ({"status": 1, "message": "cannot find -lcudart_static"}, "(cannot find -lcudart_static)"),
    ],
)
def test_unusable_nvcc_is_passed_over(backend, tmp_path, monkeypatch, nvcc, reason):
    make_nvcc(tmp_path / "bin", **nvcc)
    assert backend.compiler_requirements(None) == backend.PYPI_COMPILER
    monkeypatch.setattr(backend, "find_pypi", lambda: "pypi-nvcc")
    assert chosen(backend)["CMAKE_CUDA_COMPILER"] == "pypi-nvcc"
    assert reason in chosen(backend)["OCTAVO_CUDA_REASON"]

    good = make_nvcc(tmp_path / "default" / "bin")
    assert chosen(backend)["CMAKE_CUDA_COMPILER"] == good


def test_unusable_cudacxx_is_an_error(backend, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDACXX", make_nvcc(tmp_path / "old", "11.8.89"))
    make_nvcc(tmp_path / "bin")
    with pytest.raises(SystemExit, match=r"CUDACXX is set, but .*/old/nvcc is version 11\.8\.89"):
        backend.compiler_requirements(None)


def test_off_looks_for_nothing(backend, tmp_path, monkeypatch):
    make_nvcc(tmp_path / "bin")
    monkeypatch.setenv("OCTAVO_CUDA", "off")
    assert backend.compiler_requirements(None) == []
    assert chosen(backend) == {"OCTAVO_CUDA": "OFF"}


def test_setting_goes_before_environment(backend, monkeypatch):
    monkeypatch.setenv("OCTAVO_CUDA", "ON")
    settings = {"cmake.define.OCTAVO_CUDA": "OFF", "build-dir": "build"}
    assert backend.compiler_requirements(settings) == []
    assert chosen(backend, settings) == {"OCTAVO_CUDA": "OFF", "build-dir": "build"}


@pytest.mark.parametrize("mode", ["AUTO", "ON"])
def test_missing_packages_are_an_error(backend, monkeypatch, mode):
    # As under pip's --no-build-isolation, where nobody has installed the requirements.
    monkeypatch.setenv("OCTAVO_CUDA", mode)
    with pytest.raises(SystemExit, match=f"OCTAVO_CUDA={mode}, but no nvcc found.*nvidia-cuda-nvcc=="):
        backend.with_cuda_choice(None)


def test_platform_without_packages(backend, monkeypatch):
    monkeypatch.setattr(backend, "pypi_has_compiler", lambda: False)
    assert backend.compiler_requirements(None) == []
    assert chosen(backend)["OCTAVO_CUDA"] == "OFF"
    assert NO_NVCC_ON_PYPI in chosen(backend)["OCTAVO_CUDA_REASON"]
    monkeypatch.setenv("OCTAVO_CUDA", "ON")
    with pytest.raises(SystemExit, match="OCTAVO_CUDA=ON, but no nvcc found"):
        backend.with_cuda_choice(None)


def test_unknown_mode_is_an_error(backend, monkeypatch):
    monkeypatch.setenv("OCTAVO_CUDA", "maybe")
    with pytest.raises(SystemExit, match="must be ON, OFF or AUTO, not 'maybe'"):
        backend.compiler_requirements(None)


@pytest.mark.parametrize(
    ("mode", "status", "message"),
    [
        ("OFF", 0, "Octavo: CUDA OFF (asked for by OCTAVO_CUDA=OFF)"),
        ("AUTO", 0, "is version 12.6.85, and 12.8 is needed. This build serves the CPU only."),
        ("ON", 1, "Octavo: OCTAVO_CUDA=ON, but "),
        ("YES", 1, "Octavo: OCTAVO_CUDA must be ON, OFF or AUTO, not YES"),
    ],
)
def test_plain_cmake_says_what_it_chose(cmake, tmp_path, mode, status, message):
    old = make_nvcc(tmp_path / "old", "12.6.85")
    result = cmake(ROOT, f"-DOCTAVO_CUDA={mode}", env={**os.environ, "CUDACXX": old})
    assert result.returncode == status
    assert message in re.sub(r"\s+", " ", result.stdout + result.stderr)
