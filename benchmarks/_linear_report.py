"""The rows of bench_linear.py: what is in them, and what they say together. Needs neither torch nor a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from _linear_cases import Case
from _report import OCTAVO, geometric_mean

if TYPE_CHECKING:
    from _linear_measure import Measured

STATIC_WEIGHT = "octavo_static_weight"
MODES = (OCTAVO, STATIC_WEIGHT)
CUBLAS = ("cublas", "cublaslt", "cublaslt_best")
TRITON = "triton"
ENGINES = (*MODES, *CUBLAS, TRITON)

Row = dict[str, Any]


def best_cublas(us: dict[str, float]) -> float | None:
    """Return the time of the fastest of cuBLAS and cublasLt, if any of them has one."""
    return min((us[name] for name in CUBLAS if name in us), default=None)


def make_row(case: Case, dtype: str, found: Measured, machine: dict[str, Any]) -> Row:
    floor_us, cublas_us = case.floor_us(machine["read_bandwidth"]), best_cublas(found.us)
    over_cublas = {name: found.us[name] / cublas_us for name in MODES if cublas_us and name in found.us}
    return {
        "case": case.name,
        "shape": {
            "label": case.label,
            "num_rows": case.num_rows,
            "products": [asdict(product) for product in case.products],
        },
        "dtype": dtype,
        "num_bytes": case.num_bytes,
        "floor_us": floor_us,
        "us": dict(found.us),
        "over_floor": {name: us / floor_us for name, us in found.us.items()},
        "over_cublas": over_cublas,
        "kernels": list(found.kernels),
        "max_error": dict(found.max_error),
        "plain_error": found.plain_error,
        "skipped": dict(found.skipped),
        "machine": machine,
    }


def number(value: float | None, spec: str) -> str:
    return "" if value is None else format(value, spec)


HEADER = (
    "| row | MB | floor | "
    + " | ".join(f"{name}, us" for name in ENGINES)
    + " | "
    + " | ".join(f"{name} / {to}" for to in ("floor", "cuBLAS") for name in ("octavo", "static"))
    + " | error | plain error | kernels of octavo |\n|---|"
    + "--:|" * (2 + len(ENGINES) + 6)
    + "---|"
)


def format_row(row: Row) -> str:
    cells = [row["case"], f"{row['num_bytes'] / 1e6:.1f}", f"{row['floor_us']:.1f}"]
    cells += [number(row["us"].get(name), ".1f") for name in ENGINES]
    for ratios in ("over_floor", "over_cublas"):
        cells += [number(row[ratios].get(name), ".2f") for name in MODES]
    worst = max((row["max_error"][name] for name in MODES if name in row["max_error"]), default=None)
    cells += [number(worst, ".2g"), f"{row['plain_error']:.2g}", ", ".join(row["kernels"])]
    return f"| {' | '.join(cells)} |"


def is_alone(row: Row) -> bool:
    return len(row["shape"]["products"]) == 1


def summarise(rows: Sequence[Row]) -> dict[int, list[str]]:
    """For each number of rows of x the geometric means of single products' ratios, and the largest of each.

    In the order of RATIOS.
    """
    alone = [row for row in rows if is_alone(row)]
    found = {}
    for num_rows in sorted({row["shape"]["num_rows"] for row in alone}):
        some = [row for row in alone if row["shape"]["num_rows"] == num_rows]
        ratios = [[row[of][name] for row in some if name in row[of]] for of, name in RATIOS]
        found[num_rows] = [f"{geometric_mean(each):.2f} ({max(each):.2f})" if each else "" for each in ratios]
    return found


RATIOS = {
    ("over_floor", OCTAVO): "Octavo / floor",
    ("over_floor", STATIC_WEIGHT): "static weights / floor",
    ("over_cublas", OCTAVO): "Octavo / cuBLAS",
    ("over_cublas", STATIC_WEIGHT): "static weights / cuBLAS",
}


def format_summary(rows: Sequence[Row]) -> str:
    lines = [f"| M | {' | '.join(RATIOS.values())} |", "|--:|" + "--:|" * len(RATIOS)]
    lines += [f"| {m} | {' | '.join(cells)} |" for m, cells in summarise(rows).items()]
    return "\n".join(["Geometric mean (and largest) of the ratios of single products:", "", *lines])


def format_rows(rows: Sequence[Row]) -> str:
    return "\n".join([HEADER, *map(format_row, rows)])
