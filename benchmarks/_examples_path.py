"""Imported for its effect: puts examples on the path, whose package `llama` has the model."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))
