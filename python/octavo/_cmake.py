"""Where CMake finds the C++ library that the package carries."""

from __future__ import annotations

from pathlib import Path

from octavo import _core


def get_cmake_dir() -> str:
    """Return the folder of octavoConfig.cmake, for ``find_package(octavo)``.

    In a shell: ``cmake -Doctavo_DIR=$(python -c "import octavo; print(octavo.get_cmake_dir())") ...``.
    """
    return str(Path(_core.__file__).parent / "lib" / "cmake" / "octavo")
