"""What this build of Octavo holds, and what the machine offers it: ``python -m octavo.info``.

``python -m octavo.info --kernels`` lists the CUDA kernels that it holds, by the names of ``octavo.explain``.
"""

from __future__ import annotations

import argparse
import textwrap
from collections import Counter

from octavo import _core

_LABEL_WIDTH = 16
_WIDTH = 100


def _count_kernels(instances: list[str]) -> str:
    """Say how many instances there are of each kernel."""
    counts = Counter(name.split("<")[0] for name in instances)
    each = ", ".join(f"{count} {name}" for name, count in counts.items())
    return f"{len(instances)} (--kernels lists them): {each}"


def _rows() -> list[tuple[str, str]]:
    build, cpu = _core.build_info(), _core.cpu_info()
    gpus, why_none = _core.gpu_info()
    rows = [
        ("version", build["version"]),
        ("compiler", build["compiler"]),
        ("CUDA", build["cuda_version"] or f"none: {build['why_cpu_only']}"),
    ]
    if build["cuda_version"]:
        rows += [
            ("architectures", " ".join(build["architectures"])),
            ("kernels", _count_kernels(build["instances"])),
        ]
    rows += [
        ("CPU kernels", cpu["isa"]),
        ("CPU features", " ".join(cpu["features"]) or "none known"),
        ("CPU threads", str(cpu["num_threads"])),
    ]
    for gpu in gpus:
        capability = f"compute capability {gpu['compute_major']}.{gpu['compute_minor']}"
        size = f"{gpu['memory_bytes'] / 2**30:.0f} GiB"
        rows.append((f"GPU {gpu['index']}", f"{gpu['name']}, {capability}, {gpu['num_sms']} SMs, {size}"))
    if not gpus:
        why_none = why_none if build["cuda_version"] else "a build without CUDA looks for none"
        rows.append(("GPU", f"none: {why_none}"))
    return rows


def report() -> str:
    """Return the table that ``python -m octavo.info`` prints."""
    indent = " " * _LABEL_WIDTH
    lines = []
    for label, value in _rows():
        lines += textwrap.wrap(
            label.ljust(_LABEL_WIDTH) + value, _WIDTH, subsequent_indent=indent, break_on_hyphens=False
        )
    return "\n".join(lines)


def kernels() -> str:
    """Return what ``python -m octavo.info --kernels`` prints: a line for each instance of a CUDA kernel."""
    build = _core.build_info()
    return "\n".join(build["instances"]) or f"none: {build['why_cpu_only']}"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m octavo.info",
        description="What this build of Octavo holds, and what the machine offers it.",
    )
    parser.add_argument("--kernels", action="store_true", help="list the CUDA kernels that the build holds")
    print(kernels() if parser.parse_args(arguments).kernels else report())


if __name__ == "__main__":
    main()
