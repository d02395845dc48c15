"""Measure linear's tiles beside cuBLAS, and write the table of src/cuda/linear/tables that follows.

    python benchmarks/linear_table.py sweep build/tiles-h100.jsonl
    python benchmarks/linear_table.py confirm build/tiles-h100.jsonl build/linear-h100.jsonl
    python benchmarks/linear_table.py table H100 build/tiles-h100.jsonl > src/cuda/linear/tables/h100.inc

The sweep needs a GPU and PyTorch. It writes the machine in the first line, and then a line for each product
of x [M, K] with w [N, K] in bfloat16: `library_us`, of torch.mm, and the `tiles`, each [kernel, w_rows,
splits, ctas_per_sm, us, us with static_weight]. All are microseconds of a call in a CUDA graph whose weights
rotate over more than twice the L2 cache, and those of the tiles that may be the fastest are of a second,
longer measurement. A sweep that was cut off goes on with the products that its file lacks. The weights of
HELD_OUT are measured as well, and in no table: with them, tests judge the estimate that stands in for one.

`confirm` adds to those lines what bench_linear.py measured later, beside each other: `benchmark`, [us, us
with static_weight, us of torch.mm]. Whether the library is the faster one follows from these times where
there are any, and otherwise from the sweep's. A benchmark in which the library computed the product says
nothing of the tile, so that what was confirmed before stays.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from octavo import LinearPlan, _core, _linear_cache
from octavo._tune_linear import (
    LIBRARY_LEAD,
    MANY_ROWS,
    Measure,
    Problem,
    Times,
    driver_version,
    fastest,
    library_is_faster,
)

DTYPE = "bfloat16"
# Layers of Llama-2-7B, Llama-3-8B and -70B on one GPU of eight, SmolLM2 and others: [N, K].
SHAPES = [
    *((576, 576), (576, 1536), (1280, 8192), (1536, 576), (4096, 4096), (4096, 11008), (4096, 14336)),
    *((5120, 5120), (6144, 4096), (7168, 8192), (8192, 1024), (8192, 3584), (11008, 4096), (12288, 4096)),
    *((22016, 4096), (28672, 4096), (128256, 4096)),
]
HELD_OUT = [(2048, 2048), (2560, 9728), (3584, 18944), (15360, 5120)]
ROWS = (1, 8, 16, 32, 64, 128, 256)
ROUNDS, FINAL_ROUNDS = 5, 25  # graphs of which the median counts
FINALISTS_WITHIN = 1.06  # times the fastest one, in either mode
MOST_OVER_ESTIMATE = 2.0  # tiles that are estimated to take longer than that times the least are left out


class Tile(NamedTuple):
    kernel: str
    w_rows: int
    splits: int
    ctas_per_sm: int


class Measured(NamedTuple):
    """The times of one product."""

    N: int
    K: int
    M: int
    library_us: float
    tiles: dict[Tile, Times]
    benchmark: tuple[float, float, float] | None = None

    @property
    def library_is_faster(self) -> bool:
        """Than the tile that the table names."""
        us, library_us = self.tiles[fastest(self.tiles)], self.library_us
        if self.benchmark:
            *of_both_modes, library_us = self.benchmark
            us = Times(*of_both_modes)
        return library_is_faster(us, library_us, self.M)


def estimates(n: int, k: int, m: int, device: str) -> dict[Tile, float]:
    """Microseconds of all tiles that there are on a GPU."""
    return {
        Tile(fields["kernel"].removeprefix("sm90_"), *(fields[x] for x in Tile._fields[1:])): us
        for fields, us in _core.linear_candidates(m, n, k, DTYPE, device)
    }


def measure_product(problem: Problem, device: str, measure: Measure) -> dict[str, Any]:
    """The line of a product."""
    candidates = _core.linear_candidates(problem.M, problem.N, problem.K, problem.dtype, device)
    most_us = MOST_OVER_ESTIMATE * candidates[0][1]
    plans = [LinearPlan(**fields) for fields, us in candidates if us <= most_us]
    times = dict(zip(plans, measure(problem, plans, ROUNDS), strict=True))
    plain, static_weight = (FINALISTS_WITHIN * min(us) for us in zip(*times.values(), strict=True))
    finalists = [p for p in plans if times[p].plain <= plain or times[p].static_weight <= static_weight]
    library = LinearPlan("library", problem.dtype)
    times |= zip((*finalists, library), measure(problem, (*finalists, library), FINAL_ROUNDS), strict=True)
    library_us = times.pop(library).plain
    tiles = sorted(
        [
            plan.kernel.removeprefix("sm90_"),
            plan.w_rows,
            plan.splits,
            plan.ctas_per_sm,
            *(round(us, 2) for us in times[plan]),
        ]
        for plan in plans
    )
    return {
        "N": problem.N,
        "K": problem.K,
        "M": problem.M,
        "library_us": round(library_us, 2),
        "tiles": tiles,
    }


def sweep(path: Path, problems: Iterable[Problem], device: str, measure: Measure) -> None:
    """Writes the lines that the file lacks, each as soon as it is measured; then they are in order."""
    if not path.exists():
        machine = {
            "gpu": _linear_cache.gpu_name(device),
            "driver": driver_version(),
            "date": time.strftime("%Y-%m-%d", time.gmtime()),
            "memory_gb_per_s": _core.memory_gb_per_s(device),
        }
        path.write_text(json.dumps(machine) + "\n")
    done = {(product.N, product.K, product.M) for product in read_sweep(path)[1]}
    with path.open("a") as file:
        for problem in problems:
            if problem[:3] not in done:
                line = json.dumps(measure_product(problem, device, measure), separators=(",", ":"))
                print(line, file=file, flush=True)
                print(problem, flush=True)
    machine_line, *lines = path.read_text().splitlines()
    lines.sort(key=lambda line: [json.loads(line)[key] for key in "NKM"])
    path.write_text("".join(f"{line}\n" for line in (machine_line, *lines)))


def read_sweep(path: Path) -> tuple[dict[str, Any], list[Measured]]:
    """The machine, and what was measured there."""
    machine, *rows = map(json.loads, path.read_text().splitlines())
    return machine, [
        Measured(
            *(row[key] for key in ("N", "K", "M", "library_us")),
            tiles={Tile(*tile[:4]): Times(*tile[4:]) for tile in row["tiles"]},
            benchmark=tuple(row["benchmark"]) if "benchmark" in row else None,
        )
        for row in rows
    ]


def confirm(path: Path, benchmark: Path) -> None:
    """Adds the times of the benchmark to the products of which it ran the tile that the table names."""
    times: dict[tuple[int, int, int], tuple[str, list[float]]] = {}
    for row in map(json.loads, benchmark.read_text().splitlines()):
        (product, *others), us = row["shape"]["products"], row["us"]
        if others or product["gated"] or product["residual"] or row["dtype"] != DTYPE:
            continue
        ours_and_library = [round(us[name], 2) for name in ("octavo", "octavo_static_weight", "cublas")]
        key = (product["w_rows"], product["depth"], row["shape"]["num_rows"])
        times[key] = (row["kernels"][0], ours_and_library)
    machine_line, *lines = path.read_text().splitlines()
    for i, product in enumerate(read_sweep(path)[1]):
        kernel, ours_and_library = times.get(product[:3], ("", []))
        best = fastest(product.tiles)
        is_the_tile = kernel.startswith(f"sm90_{best.kernel}<{DTYPE}, {best.w_rows}x")
        if is_the_tile:
            row = {**json.loads(lines[i]), "benchmark": ours_and_library}
            lines[i] = json.dumps(row, separators=(",", ":"))
    path.write_text("".join(f"{line}\n" for line in (machine_line, *lines)))


def write_table(name: str, machine: Mapping[str, Any], measured: Iterable[Measured]) -> str:
    """The file in C++."""
    rows, read = [], 0.0
    for product in measured:
        n, k, m, _, tiles, _ = product
        if (n, k) in HELD_OUT:
            continue
        best = fastest(tiles)
        library = "library" if product.library_is_faster else "!library"
        rows.append(f"    {{{', '.join(map(str, (n, k, m, *best)))}, {library}}},")
        read = max(read, *(n * k * 2 / min(us) / 1e3 for us in tiles.values()))
    gpu, driver, date = machine["gpu"], machine["driver"], machine["date"]
    lines = [
        f"// Measured in bfloat16 on an {gpu}, driver {driver}, on {date}: calls in CUDA",
        "// graphs whose weights rotate over more than twice the L2 cache (benchmarks/linear_table.py wrote",
        f"// this). The fastest of these products read its weights at {read:.0f} GB/s.",
        "// Rows of w, K, up to that many rows of x; kernel, rows of w in a tile, splits, CTAs per SM;",
        f"// library: whether cuBLAS is faster by more than {LIBRARY_LEAD - 1:.0%}, and with fewer than",
        f"// {MANY_ROWS} rows of x than static weights, too.",
        f"constexpr LinearTableRow k{name}Rows[] = {{",
        *rows,
        "};",
        f'constexpr LinearTable k{name}{{"{gpu}", "{driver}", "{date}",',
        f"    {machine['memory_gb_per_s']}, {read:.0f}, std::begin(k{name}Rows), std::end(k{name}Rows)}};",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, dest="command")
    to_sweep = commands.add_parser("sweep", help="measure on this machine")
    to_sweep.add_argument("measured", type=Path, help="the file to write, or to complete")
    to_confirm = commands.add_parser("confirm", help="add what bench_linear.py measured later")
    to_confirm.add_argument("measured", type=Path)
    to_confirm.add_argument("benchmark", type=Path, help="rows that bench_linear.py wrote")
    to_table = commands.add_parser("table", help="print the table in C++")
    to_table.add_argument("name", help="in C++, such as H100")
    to_table.add_argument("measured", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "sweep":
        from octavo import _tune_by_torch

        problems = (Problem(n, k, m, DTYPE) for (n, k), m in itertools.product((*SHAPES, *HELD_OUT), ROWS))
        sweep(arguments.measured, problems, "cuda:0", _tune_by_torch.Measure(0))
    elif arguments.command == "confirm":
        confirm(arguments.measured, arguments.benchmark)
    else:
        print(write_table(arguments.name, *read_sweep(arguments.measured)))


if __name__ == "__main__":
    main()
