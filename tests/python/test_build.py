"""The build: what the package says and carries, and that C++ programs can use it."""

import ast
import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import octavo
from octavo import info
from support.programs import find_program

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
        assert info["why_cpu_only"] == ""
    else:
        assert info["architectures"] == info["instances"] == []
        assert re.fullmatch(r"octavo was built for the CPU only \(.+\); .+", info["why_cpu_only"])


def test_info_command():
    result = python("-W", "error", "-m", "octavo.info")
    assert result.returncode == 0, result.stderr
    rows = dict(re.findall(r"^(\S.*?)  +(.*)$", result.stdout, re.MULTILINE))
    assert rows["version"] == octavo.__version__
    assert rows["compiler"] == octavo.build_info()["compiler"]
    assert {"CUDA", "CPU kernels", "CPU features", "CPU threads"} <= rows.keys()
    assert rows.get("GPU", "").startswith("none: ") or "GPU 0" in rows
    assert all(len(line) <= 100 for line in result.stdout.splitlines())


def test_info_lists_kernels_when_asked(monkeypatch, capsys):
    instances = ["one<float16, 1 row>", "one<float16, 2 rows>", "other<bfloat16>"]
    build = octavo.build_info() | {"cuda_version": "13.0", "architectures": ["sm_80"], "instances": instances}
    monkeypatch.setattr(info._core, "build_info", lambda: build)
    info.main([])
    report = capsys.readouterr().out
    assert re.search(r"^kernels +3 \(--kernels lists them\): 2 one, 1 other$", report, re.MULTILINE)
    assert "float16" not in report
    info.main(["--kernels"])
    assert capsys.readouterr().out.splitlines() == instances


def test_info_lists_the_kernels_of_this_build():
    result = python("-m", "octavo.info", "--kernels")
    assert result.returncode == 0, result.stderr
    build = octavo.build_info()
    assert result.stdout.splitlines() == (build["instances"] or [f"none: {build['why_cpu_only']}"])


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
    assert min(times) < 0.1  # 0.03 to 0.05 s, as the machine is


# C++ programs

CONSUMER = {
    "CMakeLists.txt": """
cmake_minimum_required(VERSION 3.25)
project(consumer LANGUAGES CXX)
find_package(octavo 0.2 REQUIRED)
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


# Another library in the process

# What another version may hold by the names of this one: a function that the extension calls, and tables.
OTHER_LIBRARY = """
#include <octavo/attention.h>

namespace octavo {
void attention(const AttentionArgs&) { throw Error("of the other library"); }
namespace schema {
struct Attention {
    static constexpr char kArguments[1 << 16] = {};
};
}  // namespace schema
namespace cpu {
namespace baseline { extern const char kKernels[4096] = {}; }
namespace avx2 { extern const char kKernels[4096] = {}; }
namespace avx512 { extern const char kKernels[4096] = {}; }
namespace avx512_bf16 { extern const char kKernels[4096] = {}; }
}  // namespace cpu
}  // namespace octavo

extern "C" const char* arguments() { return octavo::schema::Attention::kArguments; }
"""

USE_OCTAVO_BESIDE_IT = """
import ctypes, sys

other = ctypes.CDLL(sys.argv[1], mode=getattr(ctypes, sys.argv[2]))
other.arguments()
sys.path.insert(0, sys.argv[3])
import c_interface, numpy as np, octavo
q, out = np.ones((1, 1, 1, 8), np.float32), np.zeros((1, 1, 1, 8), np.float32)
c_interface.Library().attention(q=q, k=q, v=q, out=out)
print(out.sum(), octavo.attention(q, q, q).sum())
"""


@pytest.mark.parametrize("mode", ["RTLD_LOCAL", "RTLD_GLOBAL"])
def test_another_library_in_the_process(tmp_path, mode):
    """An engine's own Octavo, of another version, beside the package: each uses what is its own."""
    if find_program("g++") is None:
        pytest.skip("needs g++")
    source, library = tmp_path / "other.cpp", tmp_path / "other.so"
    source.write_text(OTHER_LIBRARY)
    linked = ["-shared", "-fPIC", "-Wl,-soname,liboctavo.so.0.1", "-Wl,--default-symver"]
    result = run("g++", "-std=c++17", *linked, f"-I{ROOT / 'include'}", str(source), "-o", str(library))
    assert result.returncode == 0, result.stderr
    result = python("-c", USE_OCTAVO_BESIDE_IT, str(library), mode, str(ROOT / "examples"))
    assert result.stdout == "8.0 8.0\n", result.stderr or result.returncode


def test_no_symbol_is_unique_in_the_process():
    """Of a GNU_UNIQUE symbol a process has but one, however many libraries define it: kernels would be looked
    up in another's table."""
    if find_program("readelf") is None:
        pytest.skip("needs readelf")
    libraries = [str(path) for path in Path(octavo.__file__).parent.rglob("liboctavo.so*")]
    if not libraries:
        pytest.skip("octavo was built in place, with the library inside the extension")
    result = run("readelf", "--wide", "--dyn-syms", *libraries)
    symbols = result.stdout.splitlines()
    assert result.returncode == 0 and any(" octavo_attention" in symbol for symbol in symbols), result.stderr
    assert [symbol for symbol in symbols if " UNIQUE " in symbol] == []


# Plain CMake, which fetches nothing

NVCC_12_6 = "#!/bin/sh\necho Cuda compilation tools, V12.6.85\n"


def test_plain_cmake_lists_the_instruction_sets(cmake):
    result = cmake(ROOT, "-DOCTAVO_CUDA=OFF", "-DOCTAVO_CPU_ISA=sse9")
    message = (
        "OCTAVO_CPU_ISA (sse9) must be one of baseline, avx2, avx512, avx512_bf16, or empty for all of them"
    )
    assert result.returncode != 0 and message in " ".join(result.stderr.split())


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
    old = tmp_path / "nvcc"
    old.write_text(NVCC_12_6)
    old.chmod(0o755)
    result = cmake(ROOT, f"-DOCTAVO_CUDA={mode}", env={**os.environ, "CUDACXX": str(old)})
    assert result.returncode == status
    assert message in re.sub(r"\s+", " ", result.stdout + result.stderr)
