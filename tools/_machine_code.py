"""The machine code of a library's kernels, as cuobjdump shows it."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple


class Function(NamedTuple):
    """A kernel for one architecture, by its mangled name."""

    architecture: str
    name: str


def demangle(names: list[str]) -> list[str]:
    text = subprocess.run(
        ["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True
    ).stdout
    return text.splitlines()


def _cuobjdump(library: Path, *options: str) -> list[str]:
    command = ["cuobjdump", *options, str(library)]
    if shutil.which(command[0]) is None:
        sys.exit("cuobjdump is not on the PATH: it is a part of the CUDA toolkit")
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def read_usages(library: Path) -> dict[Function, dict[str, int]]:
    """What each kernel takes: "reg", "stack" and "shared", the last two in bytes."""
    usages = {}
    architecture = name = ""
    for line in _cuobjdump(library, "--dump-resource-usage"):
        if match := re.search(r"arch = (\w+)", line):
            architecture = match[1]
        elif match := re.match(r"\s*Function (\S+):", line):
            name = match[1]
        elif "REG:" in line:
            numbers = {key.lower(): int(value) for key, value in re.findall(r"(\w+):(\d+)", line)}
            usages[Function(architecture, name)] = numbers
    return usages


def read_instructions(library: Path, *names: str) -> dict[Function, list[str]]:
    """The lines of each kernel's instructions; of these mangled names only, if there are some."""
    chosen = ("--function", ",".join(names)) if names else ()
    kernels: dict[Function, list[str]] = {}
    architecture, body = "", []
    for line in _cuobjdump(library, "--dump-sass", *chosen):
        if match := re.search(r"arch = (\w+)", line):
            architecture = match[1]
        elif match := re.match(r"\s*Function : (\S+)", line):
            kernels[Function(architecture, match[1])] = body = []
        elif "/*" in line:
            body.append(line)
    return kernels
