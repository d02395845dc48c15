"""Runs the programs that some tests need: cmake, a compiler, scripts of Python."""

from __future__ import annotations

import multiprocessing
import os
import runpy
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


# They take a process ten seconds to import.
HEAVY_MODULES = ["torch", "transformers.models.llama.modeling_llama"]


def run_script(file: Path, cwd: Path) -> str:
    """Return what a script prints, which must succeed.

    Its process is a fork of one that has imported HEAVY_MODULES and nothing else: octavo is not there yet.
    """
    if sys.platform != "linux":
        return run(sys.executable, file, cwd=cwd)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(HEAVY_MODULES)
    log = cwd / f"{file.stem}.log"
    process = context.Process(target=_run_script, args=(str(file), str(cwd), str(log), os.environ.copy()))
    process.start()
    process.join()
    shown = log.read_text(encoding="utf-8")
    assert process.exitcode == 0, shown[-10_000:]
    return shown


def _run_script(file: str, cwd: str, log: str, environment: dict[str, str]) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv[:] = [file]
    sys.path[0] = str(Path(file).parent)
    runpy.run_path(file, run_name="__main__")
