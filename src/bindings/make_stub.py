"""Runs nanobind's stub generator where octavo cannot be imported.

The generator asks whether octavo._types, which signatures name, is a module. For the answer it would import
an octavo that is installed already, and with it another octavo._core than the one that the stub is made of; a
process cannot hold both.
"""

import runpy
import sys

sys.modules["octavo"] = None
runpy.run_module("nanobind.stubgen", run_name="__main__", alter_sys=True)
