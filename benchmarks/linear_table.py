"""The times of linear's tiles and of cuBLAS, and the table of src/cuda/linear/tables that follows from them.

    python benchmarks/linear_table.py compact --gpu "NVIDIA H100 80GB HBM3" --driver 580.159.04 \
        --date 2026-11-23 --memory-gb-per-s 3352 --tiles sweep.jsonl --peers peers.jsonl \
        > benchmarks/results/tiles-h100.jsonl
    python benchmarks/linear_table.py table H100 benchmarks/results/tiles-h100.jsonl \
        > src/cuda/linear/tables/h100.inc

A row of the tiles is the time of one tile: N, K, M, kernel ("flat", "wide"), w_rows, splits, ctas_per_sm,
static (whether with static_weight) and us. A row of the peers is the same product by a library (lib): N, K,
M and us. All are microseconds of a call in a CUDA graph whose weights rotate over more than twice the L2
cache, in bfloat16.

The compact form has the machine in its first line, and then a line for each N, K and M: `library_us`, and the
`tiles`, each [kernel, w_rows, splits, ctas_per_sm, us, us with static_weight].
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from octavo import _core
from octavo._tune_linear import LIBRARY_LEAD, Times, fastest

LIBRARY = "cublas"  # torch.mm, to which octavo.linear hands over


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


def read_json_lines(paths: Iterable[Path]) -> list[dict[str, Any]]:
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


def estimates(n: int, k: int, m: int) -> dict[Tile, float]:
    """Microseconds of all tiles that there are on an H100."""
    return {
        Tile(fields["kernel"].removeprefix("sm90_"), *(fields[x] for x in Tile._fields[1:])): us
        for fields, us in _core.linear_candidates(m, n, k, "bfloat16", "h100")
    }


def compact(tiles: Iterable[Mapping[str, Any]], peers: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Its lines; of a tile that was measured twice the last times, and none of a tile without an instance."""
    modes: dict[tuple[int, int, int], dict[Tile, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    for row in tiles:
        tile = Tile(row["kernel"], row["w_rows"], row["splits"], row["ctas_per_sm"])
        modes[row["N"], row["K"], row["M"]][tile][int(row["static"])] = round(row["us"], 2)
    for (n, k, m), of_tiles in modes.items():
        for tile in set(of_tiles) - set(estimates(n, k, m)):
            del of_tiles[tile]
    library = {(row["N"], row["K"], row["M"]): round(row["us"], 2) for row in peers if row["lib"] == LIBRARY}
    return [
        {
            **dict(zip("NKM", problem, strict=True)),
            "library_us": library[problem],
            "tiles": [[*tile, us[0], us[1]] for tile, us in sorted(modes[problem].items())],
        }
        for problem in sorted(modes)
    ]


def read_compact(path: Path) -> tuple[dict[str, Any], list[Measured]]:
    """The machine, and what was measured there."""
    machine, *rows = read_json_lines([path])
    return machine, [
        Measured(
            *(row[key] for key in ("N", "K", "M", "library_us")),
            tiles={Tile(*tile[:4]): Times(*tile[4:]) for tile in row["tiles"]},
        )
        for row in rows
    ]


def write_table(name: str, machine: Mapping[str, Any], measured: Iterable[Measured]) -> str:
    """The file in C++."""
    rows, read = [], 0.0
    for n, k, m, library_us, tiles in measured:
        best = fastest(tiles)
        library = "library" if tiles[best].plain > LIBRARY_LEAD * library_us else "!library"
        rows.append(f"    {{{', '.join(map(str, (n, k, m, *best)))}, {library}}},")
        read = max(read, *(n * k * 2 / min(us) / 1e3 for us in tiles.values()))
    gpu, driver, date = machine["gpu"], machine["driver"], machine["date"]
    lines = [
        f"// Measured in bfloat16 on an {gpu}, driver {driver}, on {date}: calls in CUDA",
        "// graphs whose weights rotate over more than twice the L2 cache (benchmarks/linear_table.py wrote",
        f"// this). The fastest of these products read its weights at {read:.0f} GB/s.",
        "// Rows of w, K, up to that many rows of x; kernel, rows of w in a tile, splits, CTAs per SM;",
        f"// library: whether cuBLAS is faster by more than {LIBRARY_LEAD - 1:.0%}.",
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
    to_compact = commands.add_parser("compact")
    for option in ("gpu", "driver", "date"):
        to_compact.add_argument(f"--{option}", required=True)
    to_compact.add_argument("--memory-gb-per-s", type=int, required=True, help="by its clock and width")
    to_compact.add_argument("--tiles", type=Path, nargs="+", required=True)
    to_compact.add_argument("--peers", type=Path, nargs="+", required=True)
    to_table = commands.add_parser("table")
    to_table.add_argument("name", help="in C++, such as H100")
    to_table.add_argument("measured", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "compact":
        machine = ("gpu", "driver", "date", "memory_gb_per_s")
        print(json.dumps({key: getattr(arguments, key) for key in machine}))
        for row in compact(read_json_lines(arguments.tiles), read_json_lines(arguments.peers)):
            print(json.dumps(row, separators=(",", ":")))
    else:
        print(write_table(arguments.name, *read_compact(arguments.measured)))


if __name__ == "__main__":
    main()
