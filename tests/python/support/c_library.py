"""examples/c_interface.py, which calls include/octavo/octavo.h by ctypes, for tests of the C interface."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples"))

import c_interface
from c_interface import AttentionArgs, Library, OctavoError, PageAllocator, Tensor

__all__ = ["AttentionArgs", "Library", "OctavoError", "PageAllocator", "Tensor", "c_interface"]
