"""PEP 517 build backend: scikit-build-core, plus the choice of a CUDA compiler and of nanobind's core.

OCTAVO_CUDA in the environment (or `-C cmake.define.OCTAVO_CUDA=...`) decides:

* AUTO (default): CUDA is built, with the first working nvcc >= 12.8 of CUDACXX, CUDA_HOME, CUDA_PATH, PATH
  and /usr/local/cuda; where there is none, with the pinned compiler packages from PyPI. Platforms for which
  PyPI has none get a CPU build, and the build says so.
* ON: the same, but an error where AUTO would give up.
* OFF: CPU only.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from octavo_dependencies import NANOBIND_CORE
from scikit_build_core import build as scikit_build
from scikit_build_core.build import *  # noqa: F403  the hooks that need no change

# One release of the toolkit. NVIDIA's packages do not pin each other, so all that take part are listed.
# 13.0 rather than a newer one: the PTX it makes is understood by every driver that CUDA 13 runs on.
PYPI_COMPILER = [
    "nvidia-cuda-nvcc==13.0.88",
    "nvidia-cuda-crt==13.0.88",
    "nvidia-nvvm==13.0.88",
    "nvidia-cuda-runtime==13.0.96",
    "nvidia-cuda-cccl==13.0.85",
]
MIN_NVCC = (12, 8)  # --compress-mode
DEFAULT_CUDA_HOME = "/usr/local/cuda"
PROBE = """
#include <cuda_bf16.h>
#include <cuda_runtime.h>
__global__ void kernel(__nv_bfloat16* x) { *x = __float2bfloat16(1.0f); }
int main() { kernel<<<1, 1>>>(nullptr); return cudaGetLastError(); }
"""

Settings = dict[str, Any]


class Compiler(NamedTuple):
    nvcc: str | None
    reason: str  # why this one, or why none


def cuda_mode(settings: Settings | None) -> str:
    mode = (settings or {}).get("cmake.define.OCTAVO_CUDA") or os.environ.get("OCTAVO_CUDA") or "AUTO"
    if mode.upper() not in ("ON", "OFF", "AUTO"):
        raise SystemExit(f"Octavo: OCTAVO_CUDA must be ON, OFF or AUTO, not {mode!r}")
    return mode.upper()


def why_not(nvcc: str) -> str | None:
    """Return what keeps this nvcc from being used, or None if it compiles and links a program."""
    try:
        version_text = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    except OSError as error:
        return f"{nvcc} cannot be run ({error.strerror})"
    except subprocess.CalledProcessError:
        return f"{nvcc} --version failed"
    match = re.search(r"V(\d+)\.(\d+)\.(\d+)", version_text)
    if match is None:
        return f"{nvcc} --version names no version"
    version = tuple(map(int, match.groups()))
    if version < MIN_NVCC:
        return f"{nvcc} is version {'.'.join(match.groups())}, and {'.'.join(map(str, MIN_NVCC))} is needed"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "probe.cu")
        source.write_text(PROBE)
        command = [nvcc, "-arch=sm_80", "-o", f"{folder}/probe", str(source)]
        probe = subprocess.run(command, capture_output=True, text=True, check=False)
        if probe.returncode != 0:
            output = (probe.stderr + probe.stdout).strip().splitlines()
            return f"{nvcc} cannot compile and link a program ({output[0] if output else 'no message'})"
    return None


def find_installed() -> Compiler:
    """Find an nvcc that was here before the build."""
    if chosen := os.environ.get("CUDACXX"):
        problem = why_not(chosen)
        if problem is not None:
            raise SystemExit(f"Octavo: CUDACXX is set, but {problem}")
        return Compiler(chosen, "CUDACXX")

    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")]
    folders = [*(f"{home}/bin" for home in homes if home), None, f"{DEFAULT_CUDA_HOME}/bin"]  # None: PATH
    candidates = [shutil.which("nvcc", path=folder) for folder in folders]
    problems = []
    for nvcc in dict.fromkeys(filter(None, candidates)):
        problem = why_not(nvcc)
        if problem is None:
            return Compiler(nvcc, f"found at {nvcc}")
        problems.append(problem)
    return Compiler(None, "; ".join(problems) or "no nvcc found")


def find_pypi() -> str | None:
    """Find the nvcc of NVIDIA's PyPI packages in the environment that runs the build."""
    spec = importlib.util.find_spec("nvidia")
    folders = spec.submodule_search_locations if spec and spec.submodule_search_locations else []
    found = [str(nvcc) for folder in folders for nvcc in sorted(Path(folder).glob("cu*/bin/nvcc"))]
    return found[-1] if found else None


def pypi_has_compiler() -> bool:
    on_glibc = sys.platform == "linux" and platform.libc_ver()[0] == "glibc"
    return on_glibc and platform.machine() in ("x86_64", "aarch64")


def compiler_requirements(settings: Settings | None) -> list[str]:
    """Return the packages to install before the build."""
    if cuda_mode(settings) == "OFF" or find_installed().nvcc or not pypi_has_compiler():
        return []
    return PYPI_COMPILER


def with_cuda_choice(settings: Settings | None) -> Settings:
    """Return the settings with what CMake is told about CUDA."""
    mode = cuda_mode(settings)
    if mode == "OFF":
        return {**(settings or {}), "cmake.define.OCTAVO_CUDA": "OFF"}
    nvcc, reason = find_installed()
    if nvcc is None and (nvcc := find_pypi()):
        reason = f"from PyPI: {reason}"
    if nvcc is not None:
        choice = {"OCTAVO_CUDA": "ON", "CMAKE_CUDA_COMPILER": nvcc}
    elif mode == "AUTO" and not pypi_has_compiler():
        choice = {"OCTAVO_CUDA": "OFF"}
        reason = f"{reason}, and PyPI has none for this platform"
    else:
        raise SystemExit(
            f"Octavo: OCTAVO_CUDA={mode}, but {reason}. Install a CUDA toolkit or {' '.join(PYPI_COMPILER)}, "
            "or set OCTAVO_CUDA=OFF for a CPU build."
        )
    choice["OCTAVO_CUDA_REASON"] = reason
    return {**(settings or {}), **{f"cmake.define.{name}": value for name, value in choice.items()}}


def get_requires_for_build_wheel(config_settings: Settings | None = None) -> list[str]:
    requirements = scikit_build.get_requires_for_build_wheel(config_settings)
    return [*requirements, *NANOBIND_CORE, *compiler_requirements(config_settings)]


def get_requires_for_build_editable(config_settings: Settings | None = None) -> list[str]:
    requirements = scikit_build.get_requires_for_build_editable(config_settings)
    return [*requirements, *NANOBIND_CORE, *compiler_requirements(config_settings)]


def build_wheel(
    wheel_directory: str, config_settings: Settings | None = None, metadata_directory: str | None = None
) -> str:
    return scikit_build.build_wheel(wheel_directory, with_cuda_choice(config_settings), metadata_directory)


def build_editable(
    wheel_directory: str, config_settings: Settings | None = None, metadata_directory: str | None = None
) -> str:
    return scikit_build.build_editable(wheel_directory, with_cuda_choice(config_settings), metadata_directory)
