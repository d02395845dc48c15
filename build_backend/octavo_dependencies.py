"""What an octavo that is built here needs: NumPy, and nanobind's compiled core where it is not linked in.

src/bindings/CMakeLists.txt links it in for free-threaded Python before 3.15, which has no stable ABI.
"""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Mapping
from typing import Any

_LINKED_IN = sysconfig.get_config_var("Py_GIL_DISABLED") and sys.version_info < (3, 15)
NANOBIND_CORE = [] if _LINKED_IN else ["nanobind-backend>=1.0,<2"]


def dynamic_metadata(settings: Mapping[str, Any], project: Mapping[str, Any]) -> dict[str, Any]:  # noqa: ARG001
    """Give scikit-build-core the project's dependencies."""
    return {"dependencies": ["numpy>=2.1", *NANOBIND_CORE]}


def dynamic_wheel(settings: Mapping[str, Any]) -> dict[str, bool]:  # noqa: ARG001
    """Say that the wheels of one source package differ in them."""
    return {"dependencies": True}
