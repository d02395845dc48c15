"""The tables that ``linear`` chooses its kernels by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from octavo import _core, _linear_cache
from octavo._linear_plan import LinearPlan, device_name, linear_plan

_SHIPPED_DTYPES = ("bfloat16", "float16")  # between which times do not differ


@dataclass(frozen=True)
class LinearTableRow:
    """The plan of ``linear`` for ``w`` [N, K] and up to M rows of ``x``: more than in the row before."""

    N: int
    K: int
    M: int
    plan: LinearPlan


@dataclass(frozen=True)
class LinearTableSource:
    """Where rows of a table were measured."""

    gpu: str
    driver: str
    date: str
    read_gb_per_s: int
    """The most, in GB/s, at which one of the products read its weights."""


@dataclass(frozen=True)
class LinearTable:
    """What is in force on a device; ``print`` shows it."""

    device: str
    rows: tuple[LinearTableRow, ...]
    """By dtype, N, K and M. Up to the largest M that was tuned for an [N, K], that is what is in force."""
    sources: Mapping[str, LinearTableSource]
    """By ``LinearPlan.source``: "measured", which Octavo ships, and "tuned", if there are any."""
    most_rows: int
    """Products of more rows of ``x`` than that are the library's where no row of the table says otherwise."""

    def library_from(self, N: int, K: int, dtype: str = "bfloat16") -> int:  # noqa: N803
        """Look up the inflection point M2 of FlashDecoding++: the library is faster from that many rows on.

        Its M1, below which CUDA cores multiply in place of tensor cores, does not exist here: reading the
        weights takes the time at any M, and CUDA cores were not faster by enough to keep kernels for them.
        """
        rows = [row for row in self.rows if (N, K, dtype) == (row.N, row.K, row.plan.dtype)]
        if not rows or self.most_rows > rows[-1].M:
            return self.most_rows + 1
        of_octavo = [row.M for row in rows if row.plan.kernel != "library"]
        return max(of_octavo, default=0) + 1

    def __str__(self) -> str:
        lines = [f"linear on {self.device}"]
        for name, source in self.sources.items():
            where = f"{source.gpu}, driver {source.driver}, {source.date}"
            lines.append(f"  {name} on {where}, reads {source.read_gb_per_s} GB/s")
        lines += [f"  [{row.N}, {row.K}] x {row.M}: {row.plan}" for row in self.rows]
        lines.append(f"  others: the least estimated time; the library for more than {self.most_rows} rows")
        return "\n".join(lines)


def linear_table(device: str | None = None) -> LinearTable:
    """What ``linear`` chooses its kernels by on a GPU, and where that was measured.

    A table of FlashDecoding++'s heuristic dataflow: for each measured [N, K] and number of rows of ``x`` the
    fastest kernel, or the library of the arrays. Octavo ships those of an H100 and an H200; ``tune_linear``
    makes others.

    Args:
        device: as for ``linear_plan``. Default: the first GPU of this machine.

    Returns:
        The table. Its rows hold the plans; ``library_from(N, K)`` says from how many rows of ``x`` on the
        library multiplies.

    Raises:
        ValueError: an unknown device, or the CPU, where one kernel computes all.
        TypeError: a device that is not a str.
        RuntimeError: there is no GPU here, and none was named.
    """
    where = device_name("linear_table", device)
    shipped, tuned = _core.shipped_linear_table(where), _linear_cache.in_force(where)
    sources, keys = {}, set()
    if shipped:
        sources["measured"] = LinearTableSource(
            shipped["gpu"], shipped["driver"], shipped["date"], shipped["read_gb_per_s"]
        )
        keys |= {(dtype, *row[:3]) for row in shipped["rows"] for dtype in _SHIPPED_DTYPES}
    if tuned:
        sources["tuned"] = LinearTableSource(tuned.gpu, tuned.driver, tuned.date, tuned.read_gb_per_s)
        keys |= {(dtype, *row[:3]) for dtype, rows in tuned.rows.items() for row in rows}
    rows = tuple(
        LinearTableRow(n, k, m, linear_plan(m, n, k, dtype, where)) for dtype, n, k, m in sorted(keys)
    )
    return LinearTable(where, rows, sources, _core.linear_most_rows(where, "linear_table"))
