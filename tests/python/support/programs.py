"""Runs the programs that some tests need: cmake, a compiler."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

# Beside this Python, as pip installs programs, then the PATH.
SEARCH_PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])


def find_program(name: str) -> str | None:
    return shutil.which(name, path=SEARCH_PATH)


def run(program: str | Path, *arguments: str | Path, cwd: Path | None = None) -> str:
    """Return what the program prints, which must succeed."""
    result = subprocess.run(
        [find_program(str(program)) or program, *arguments],
        cwd=cwd,
        env={**os.environ, "PATH": SEARCH_PATH},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-10_000:]
    return result.stdout
