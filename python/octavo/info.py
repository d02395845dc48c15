"""What this build of Octavo holds, and what the machine offers it: ``python -m octavo.info``."""

from __future__ import annotations

import textwrap

from octavo import _core

_LABEL_WIDTH = 16
_WIDTH = 100


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
            ("kernels", " ".join(name.replace(" ", "") for name in build["instances"])),
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


if __name__ == "__main__":
    print(report())
