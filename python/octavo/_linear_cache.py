"""The file in which ``tune_linear`` keeps what it measured, one for each kind of GPU.

A row of a table is (N, K, M, kernel, w_rows, splits, ctas_per_sm, library_is_faster), as ``_core`` has it.
"""

from __future__ import annotations

import json
import os
import re
import threading
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from octavo import _core

Row: TypeAlias = tuple[int, int, int, str, int, int, int, bool]

_ROW_KEYS = ("N", "K", "M", "kernel", "w_rows", "splits", "ctas_per_sm", "library_is_faster")
_TUNE_AGAIN = "octavo.tune_linear(...) measures again and replaces it"


@dataclass(frozen=True)
class Tuned:
    """The tables of one GPU by dtype, and where they were measured."""

    gpu: str
    driver: str
    date: str
    read_gb_per_s: int
    rows: dict[str, tuple[Row, ...]]

    def with_rows(self, dtype: str, rows: Iterable[Row]) -> Tuned:
        """With these rows in place of those of the same [N, K]."""
        new = tuple(rows)
        tuned = {row[:2] for row in new}
        kept = tuple(row for row in self.rows.get(dtype, ()) if row[:2] not in tuned)
        return replace(self, rows={**self.rows, dtype: tuple(sorted(kept + new))})


_in_force: dict[str, Tuned] = {}  # by device


def in_force(device: str) -> Tuned | None:
    """What was tuned for this device, or read from its file."""
    return _in_force.get(device)


def put_in_force(device: str, tuned: Tuned) -> None:
    """Let ``linear`` use the tables from now on."""
    for dtype, rows in tuned.rows.items():
        _core.set_tuned_linear(device, dtype, list(rows))
    _in_force[device] = tuned


def gpu_name(device: str) -> str:
    """The product name of "cuda:0"; a name such as "h100" as it is."""
    if not device.startswith("cuda:"):
        return device
    return _core.gpu_info()[0][int(device.removeprefix("cuda:"))]["name"]


def path_of(gpu: str) -> Path:
    """Where the file of a GPU is. Raises RuntimeError where that is a home folder that there is not."""
    folder = os.environ.get("OCTAVO_CACHE")
    name = re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")
    return (Path(folder) if folder else Path.home() / ".cache" / "octavo") / f"linear-{name}.json"


def read(path: Path, device: str) -> Tuned | None:
    """What the file holds for a device; nothing, with a warning, if it is of other kernels or broken."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["kernels"] != _core.LINEAR_KERNELS:
            _warn(
                f"{path} was measured with kernels of version {content['kernels']}; these are version "
                f"{_core.LINEAR_KERNELS}, which do not use it: {_TUNE_AGAIN}"
            )
            return None
        rows = {
            dtype: tuple(sorted(tuple(row[key] for key in _ROW_KEYS) for row in rows))
            for dtype, rows in content["rows"].items()
        }
        others = sorted(set(rows) - {"float16", "bfloat16"})
        if others:
            raise ValueError(f"rows of {others[0]}")
        header = {name: content[name] for name in ("gpu", "driver", "date", "read_gb_per_s")}
        for name, value in header.items():
            kind = int if name == "read_gb_per_s" else str
            if type(value) is not kind:
                raise TypeError(f"{name} must be {kind.__name__}; got {value!r}")
        for dtype, of_dtype in rows.items():
            _core.check_tuned_linear(device, dtype, list(of_dtype))
        return Tuned(**header, rows=rows)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        _warn(f"{path} cannot be used ({type(error).__name__}: {error}): {_TUNE_AGAIN}")
        return None


def write(path: Path, tuned: Tuned) -> None:
    """Write the file at once: who reads it meanwhile finds the one before, or this one."""
    content: dict[str, Any] = {
        "kernels": _core.LINEAR_KERNELS,
        "octavo": _core.__version__,
        "gpu": tuned.gpu,
        "driver": tuned.driver,
        "date": tuned.date,
        "read_gb_per_s": tuned.read_gb_per_s,
        "rows": {dtype: [_named(row) for row in rows] for dtype, rows in tuned.rows.items()},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(f".{os.getpid()}-{threading.get_ident()}.tmp")
    try:
        unfinished.write_text(json.dumps(content, indent=1), encoding="utf-8")
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def load(device: str) -> None:
    """Put in force what the file of this GPU holds. ``_core`` calls this at the first ``linear`` there."""
    try:
        path = path_of(gpu_name(device))
    except RuntimeError:  # there is no home folder
        return
    tuned = read(path, device)
    if tuned is not None:
        put_in_force(device, tuned)


def _named(row: Sequence[object]) -> dict[str, object]:
    return dict(zip(_ROW_KEYS, row, strict=True))


def _warn(message: str) -> None:
    warnings.warn(f"linear: {message}", RuntimeWarning, stacklevel=2)
