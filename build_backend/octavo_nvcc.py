"""The CUDA compilers that a build can use: those of the machine, and NVIDIA's packages on PyPI."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

# One release of the toolkit. NVIDIA's packages do not pin each other, so all that take part are listed.
# 13.0 rather than a newer one: the PTX it makes is understood by every driver that CUDA 13 runs on.
PYPI_VERSIONS = {
    "nvidia-cuda-nvcc": "13.0.88",
    "nvidia-cuda-crt": "13.0.88",
    "nvidia-nvvm": "13.0.88",
    "nvidia-cuda-runtime": "13.0.96",
    "nvidia-cuda-cccl": "13.0.85",
}
PYPI_PACKAGES = [f"{name}=={version}" for name, version in PYPI_VERSIONS.items()]
MIN_NVCC = (12, 8)  # --compress-mode
MANIFEST = "manifest.json"
DEFAULT_CUDA_HOME = "/usr/local/cuda"
PROBE = """
#include <cuda_bf16.h>
#include <cuda_runtime.h>
__global__ void kernel(__nv_bfloat16* x) { *x = __float2bfloat16(1.0f); }
int main() { kernel<<<1, 1>>>(nullptr); return cudaGetLastError(); }
"""


# The machine's own


class Installed(NamedTuple):
    nvcc: str | None  # the first that works
    reason: str  # why this one, or why none
    any_nvcc: bool  # working or not


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


def find_installed() -> Installed:
    """Find an nvcc that was here before the build."""
    if chosen := os.environ.get("CUDACXX"):
        problem = why_not(chosen)
        if problem is not None:
            raise SystemExit(f"Octavo: CUDACXX is set, but {problem}")
        return Installed(chosen, "CUDACXX", any_nvcc=True)

    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")]
    folders = [*(f"{home}/bin" for home in homes if home), None, f"{DEFAULT_CUDA_HOME}/bin"]  # None: PATH
    candidates = [shutil.which("nvcc", path=folder) for folder in folders]
    problems = []
    for nvcc in dict.fromkeys(filter(None, candidates)):
        problem = why_not(nvcc)
        if problem is None:
            return Installed(nvcc, f"found at {nvcc}", any_nvcc=True)
        problems.append(problem)
    return Installed(None, "; ".join(problems) or "no nvcc found", any_nvcc=bool(problems))


def has_driver() -> bool:
    """Say whether this machine has an NVIDIA driver.

    A program that uses CUDA loads libcuda.so.1 by this name, wherever the dynamic linker finds it. A
    container that is built without the GPUs lacks the library, but shows the driver of the machine's kernel.
    """
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return Path("/proc/driver/nvidia/version").exists()
    return True


# NVIDIA's packages on PyPI


def pypi_has_compiler() -> bool:
    on_glibc = sys.platform == "linux" and platform.libc_ver()[0] == "glibc"
    return on_glibc and platform.machine() in ("x86_64", "aarch64")


def find_pypi() -> str | None:
    """Find the nvcc of NVIDIA's PyPI packages in the environment that runs the build."""
    spec = importlib.util.find_spec("nvidia")
    folders = spec.submodule_search_locations if spec and spec.submodule_search_locations else []
    found = [str(nvcc) for folder in folders for nvcc in sorted(Path(folder).glob("cu*/bin/nvcc"))]
    return found[-1] if found else None


class KeptNvcc:
    """A copy of the PyPI packages that outlives the environment of one build.

    pip unpacks what a build requires into a folder that is new each time. If nvcc ran from there, the next
    build would fetch it again, and compile everything again because the path of the compiler has changed.
    """

    def __init__(self, parent: Path) -> None:
        self._folder = parent / f"nvcc-{PYPI_VERSIONS['nvidia-cuda-nvcc']}"

    def nvcc(self) -> str | None:
        """Return the copy's nvcc, if the copy is that of the pinned packages, whole and unchanged."""
        try:
            manifest = json.loads((self._folder / MANIFEST).read_text())
            current = manifest["packages"] == PYPI_PACKAGES
            whole = all(sha256(self._folder / name) == digest for name, digest in manifest["files"].items())
        except (OSError, ValueError, KeyError):  # something is missing, or the manifest is cut short
            return None
        return str(self._folder / manifest["nvcc"]) if current and whole else None

    def copy(self) -> str | None:
        """Copy the packages from the environment that runs the build; return the copy's nvcc, or None if the
        environment lacks them.
        """
        try:
            if any(importlib.metadata.version(name) != version for name, version in PYPI_VERSIONS.items()):
                return None
        except importlib.metadata.PackageNotFoundError:
            return None
        # The copy gets its name once it is whole, so that an interrupted one is never taken for it.
        partial = self._folder.with_name(f"{self._folder.name}.partial")
        for stale in (partial, self._folder):
            if stale.exists():
                shutil.rmtree(stale)
        manifest: dict[str, Any] = {"packages": PYPI_PACKAGES, "files": {}}
        for package in PYPI_VERSIONS:
            for file in importlib.metadata.files(package) or ():
                if file.parts[0] == "nvidia" and file.suffix != ".pyc":
                    target = partial / file
                    target.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy2(file.locate(), target)
                    manifest["files"][str(file)] = sha256(target)
                    if file.match("bin/nvcc"):
                        manifest["nvcc"] = str(file)
        (partial / MANIFEST).write_text(json.dumps(manifest, indent=1))
        partial.rename(self._folder)
        return self.nvcc()


def sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
