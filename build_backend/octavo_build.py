"""PEP 517 build backend: scikit-build-core, plus the choice of a CUDA compiler and of nanobind's core.

OCTAVO_CUDA in the environment (or `-C cmake.define.OCTAVO_CUDA=...`) decides:

* AUTO (default): CUDA is built with the first working nvcc >= 12.8 of CUDACXX, CUDA_HOME, CUDA_PATH, PATH
  and /usr/local/cuda. Where none works, but there is an nvcc or an NVIDIA driver, it is built with the pinned
  compiler packages from PyPI. Machines with neither get a CPU build, and so do platforms for which PyPI has
  no compiler.
* ON: CUDA is built, with the packages from PyPI where no nvcc works; an error where AUTO would give up.
* OFF: CPU only.

A CPU build says that it is one: in its last line, in the wheel's name, and in the library itself.

What the next build of the same sources can use again is kept in build/pip: a CMake build folder for each
Python, with CUDA and without, and a compiler that came from PyPI. CMake configures anew each time, so that no
path into a build environment that is gone is believed; ninja compiles what has changed. `-C build-dir=` keeps
no build folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import octavo_nvcc
from octavo_dependencies import NANOBIND_CORE
from scikit_build_core import build as scikit_build
from scikit_build_core.build import build_sdist, get_requires_for_build_sdist

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

ROOT = Path(__file__).resolve().parents[1]
KEPT = Path("build", "pip")  # below ROOT, where a build backend is run

Settings = dict[str, Any]


class Choice(NamedTuple):
    """What is built, and with which nvcc; `from_pypi` asks for that of the packages."""

    cuda: bool
    reason: str
    nvcc: str | None = None
    from_pypi: bool = False


# The choice


def cuda_mode(settings: Settings | None) -> str:
    mode = (settings or {}).get("cmake.define.OCTAVO_CUDA") or os.environ.get("OCTAVO_CUDA") or "AUTO"
    if mode.upper() not in ("ON", "OFF", "AUTO"):
        raise SystemExit(f"Octavo: OCTAVO_CUDA must be ON, OFF or AUTO, not {mode!r}")
    return mode.upper()


def choose(mode: str) -> Choice:
    if mode == "OFF":
        return Choice(False, "asked for by OCTAVO_CUDA=OFF")
    installed = octavo_nvcc.find_installed()
    if installed.nvcc:
        return Choice(True, installed.reason, installed.nvcc)
    if mode == "AUTO" and not installed.any_nvcc and not octavo_nvcc.has_driver():
        return Choice(False, "neither nvcc nor an NVIDIA driver was found")
    if octavo_nvcc.pypi_has_compiler():
        return Choice(True, installed.reason, from_pypi=True)
    reason = f"{installed.reason}, and PyPI has none for this platform: install a CUDA toolkit"
    if mode == "ON":
        raise SystemExit(f"Octavo: OCTAVO_CUDA=ON, but {reason}, or set OCTAVO_CUDA=OFF for a CPU build")
    return Choice(False, reason)


def kept_nvcc() -> octavo_nvcc.KeptNvcc | None:
    return octavo_nvcc.KeptNvcc(ROOT / KEPT) if can_keep() else None


def can_keep() -> bool:
    return os.access(ROOT, os.W_OK)  # sources may lie on a read-only file system


def compiler_requirements(settings: Settings | None) -> list[str]:
    """Return the packages to install before the build."""
    if not choose(cuda_mode(settings)).from_pypi:
        return []
    kept = kept_nvcc()
    return [] if kept and kept.nvcc() else octavo_nvcc.PYPI_PACKAGES


def pypi_nvcc(reason: str) -> str:
    kept = kept_nvcc()
    nvcc = (kept and (kept.nvcc() or kept.copy())) or octavo_nvcc.find_pypi()
    if nvcc is None:
        raise SystemExit(
            f"Octavo: CUDA cannot be built: {reason}, and this environment lacks the packages of PyPI. "
            f"Install a CUDA toolkit or {' '.join(octavo_nvcc.PYPI_PACKAGES)}, "
            "or set OCTAVO_CUDA=OFF for a CPU build."
        )
    return nvcc


# What scikit-build-core is told


def name_settings(settings: Settings | None, choice: Choice) -> Settings:
    """Return the settings with the name of a CPU build: pip shows it, and hides what a build prints."""
    return dict(settings or {}) if choice.cuda else {"wheel.build-tag": "0cpu_only", **(settings or {})}


def build_settings(settings: Settings | None, choice: Choice) -> Settings:
    """Return the settings with the build folder, and with what CMake is told about CUDA."""
    defines = {"OCTAVO_CUDA": "ON" if choice.cuda else "OFF", "OCTAVO_CUDA_REASON": choice.reason}
    if choice.from_pypi:
        defines["OCTAVO_CUDA_REASON"] = f"from PyPI: {choice.reason}"
        defines["CMAKE_CUDA_COMPILER"] = pypi_nvcc(choice.reason)
    elif choice.nvcc:
        defines["CMAKE_CUDA_COMPILER"] = choice.nvcc
    folder = KEPT / f"{sysconfig.get_config_var('SOABI')}-{'cuda' if choice.cuda else 'cpu'}"
    return {
        **({"build-dir": str(folder)} if can_keep() else {}),
        **name_settings(settings, choice),
        **{f"cmake.define.{name}": value for name, value in defines.items()},
    }


@contextlib.contextmanager
def one_build_at_a_time() -> Iterator[None]:
    if not can_keep():
        yield
        return
    (ROOT / KEPT).mkdir(parents=True, exist_ok=True)
    with (ROOT / KEPT / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def report(choice: Choice) -> None:
    """Say what a CPU build lacks: to whoever reads the build's output, and to whoever sits at a terminal.

    pip and its like swallow the output of a build that succeeds, unless asked (`pip install -v`).
    """
    if choice.cuda:
        return
    line = (
        f"Octavo: CUDA OFF ({choice.reason}): this build is for the CPU only. "
        "To build with CUDA, run: OCTAVO_CUDA=ON pip install ."
    )
    print(line, flush=True)
    with contextlib.suppress(OSError):  # there is no terminal
        terminal = os.open("/dev/tty", os.O_WRONLY)
        os.write(terminal, f"\n{line}\n".encode())
        os.close(terminal)


# The hooks


def get_requires_for_build_wheel(config_settings: Settings | None = None) -> list[str]:
    requirements = scikit_build.get_requires_for_build_wheel(config_settings)
    return [*requirements, *NANOBIND_CORE, *compiler_requirements(config_settings)]


def get_requires_for_build_editable(config_settings: Settings | None = None) -> list[str]:
    requirements = scikit_build.get_requires_for_build_editable(config_settings)
    return [*requirements, *NANOBIND_CORE, *compiler_requirements(config_settings)]


def prepare_metadata_for_build_wheel(metadata_directory: str, config_settings: Settings | None = None) -> str:
    settings = name_settings(config_settings, choose(cuda_mode(config_settings)))
    return scikit_build.prepare_metadata_for_build_wheel(metadata_directory, settings)


def prepare_metadata_for_build_editable(
    metadata_directory: str, config_settings: Settings | None = None
) -> str:
    settings = name_settings(config_settings, choose(cuda_mode(config_settings)))
    return scikit_build.prepare_metadata_for_build_editable(metadata_directory, settings)


def build_wheel(
    wheel_directory: str, config_settings: Settings | None = None, metadata_directory: str | None = None
) -> str:
    return build(scikit_build.build_wheel, wheel_directory, config_settings, metadata_directory)


def build_editable(
    wheel_directory: str, config_settings: Settings | None = None, metadata_directory: str | None = None
) -> str:
    return build(scikit_build.build_editable, wheel_directory, config_settings, metadata_directory)


def build(
    hook: Callable[..., str], wheel_directory: str, settings: Settings | None, metadata_directory: str | None
) -> str:
    choice = choose(cuda_mode(settings))
    with one_build_at_a_time():
        wheel = hook(wheel_directory, build_settings(settings, choice), metadata_directory)
    report(choice)
    return wheel
