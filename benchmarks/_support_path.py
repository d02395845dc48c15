"""Imported for its effect: puts tests/python on the path, whose package `support` has cases and oracle."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "python"))
