"""octavo.linear on an NVIDIA GPU beside cuBLAS, cublasLt and Triton in one run.

    python benchmarks/bench_linear.py --list
    python benchmarks/bench_linear.py --json benchmarks/results/linear-h100.jsonl
    python benchmarks/bench_linear.py --rows '_m(1|16)$' --engines octavo,cublas,triton

A time is the median over replays of a CUDA graph of many calls, divided by their number. The calls rotate
over copies of all inputs, whose weights are more than twice the L2 cache together; the graphs of the engines
take turns; values are random. Every engine's results are compared with float64: an engine whose error is more
than twice that of a plain implementation (float32 sums, rounded once) has no time, and a wrong Octavo fails
the run.

    octavo                octavo.linear(x, w, out=out)
    octavo_static_weight  the same with static_weight=True
    cublas                torch.mm with preferred_blas_library("cublas")
    cublaslt              torch.mm with preferred_blas_library("cublaslt"): what its heuristic takes
    cublaslt_best         the fastest of up to eight algorithms that the heuristic of cublasLt proposes, as
                          measured over the same inputs beforehand
    triton                torch.compile of x @ w.T with the options of max-autotune-no-cudagraphs and kernels
                          of Triton alone; runs only where --engines names it, and in the rows that
                          --triton-rows finds, since the tuning of each takes long

--cases chooses among groups of rows: shapes (matrices of Llama models), others (of other models), and layers:
the four products of a layer of Llama-2-7B (7b) or Llama-3-8B (8b), each of which takes the result of the one
before. In "products" they are alone; "layer" has the gate of SiLU and the last residual as well, which are
part of Octavo's products, and three of PyTorch's operators beside those of the peers. The number after "m" in
the name of a row is that of the rows of x.

floor = 3 us + bytes of the weights / read bandwidth, for each product; the bytes of x and of the result do
not count. The bandwidth is that of a kernel that only reads, measured in the same run; every row of the JSON
has it, and the rate of an 8192^3 product. "/ cuBLAS" is the ratio to the fastest of the three of cuBLAS.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from _command import Parser, matching, run, show_rows
from _linear_cases import GROUPS, TINY, Case
from _linear_report import ENGINES, HEADER, TRITON, Row, format_row, format_rows, format_summary, make_row
from _report import exit_status

if TYPE_CHECKING:
    from _linear_engines import Engine

DTYPES = ("bfloat16", "float16")
TRITON_ROWS = "^(12288x4096|4096x11008|1280x8192)_m(1|16)$"


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(__doc__)
    parser.add_argument("--cases", metavar="GROUPS", default=",".join(GROUPS), help="default: %(default)s")
    parser.add_shared("--rows")
    parser.add_argument("--tiny", action="store_true", help="tiny products instead, to see that it runs")
    parser.add_argument("--engines", metavar="NAMES", help=f"default: all but {TRITON}")
    parser.add_argument(
        "--triton-rows",
        metavar="REGEX",
        type=re.compile,
        default=TRITON_ROWS,
        help="in which Triton takes part, if --engines names it (%(default)s)",
    )
    parser.add_argument("--dtype", choices=DTYPES, default=DTYPES[0], help="default: %(default)s")
    parser.add_argument("--replays", metavar="N", type=int, default=7, help="of each graph (%(default)s)")
    parser.add_shared("--list", "--json", "--from-json")
    args = parser.parse_args(argv)
    args.cases = parser.split_names("--cases", args.cases, GROUPS)
    default = tuple(name for name in ENGINES if name != TRITON)
    args.engines = default if args.engines is None else parser.split_names("--engines", args.engines, ENGINES)
    if args.replays < 1:
        parser.error(f"--replays ({args.replays}) must be at least 1")
    return args


def select(args: argparse.Namespace) -> list[Case]:
    named = TINY if args.tiny else [case for group in args.cases for case in GROUPS[group]]
    return matching(dict.fromkeys(named), args.rows)


def list_cases(cases: list[Case]) -> None:
    print("| row | M | products | MB |\n|---|--:|---|--:|")
    for case in cases:
        products = ", ".join(f"{product.w_rows} x {product.depth}" for product in case.products)
        print(f"| {case.name} | {case.num_rows} | {products} | {case.num_bytes / 1e6:.1f} |")


def usable_engines(args: argparse.Namespace) -> list[Engine]:
    """Those that have what they need, in the order of ENGINES; says why of the others."""
    import _linear_engines as engines
    from _contestants import importable

    makers = {
        "octavo": engines.Octavo,
        "octavo_static_weight": engines.StaticWeightOctavo,
        "cublas": engines.Cublas,
        "cublaslt": engines.CublasLtFirst,
        "cublaslt_best": engines.CublasLtBest,
        "triton": partial(engines.Triton, args.triton_rows),
    }
    return importable({name: makers[name] for name in ENGINES if name in args.engines})


def describe_machine(replays: int) -> dict[str, Any]:
    import torch
    from _device import Probe, driver_version, matmul_flops, versions

    flops = matmul_flops(replays)  # first: it brings the clocks up
    return {
        "device": torch.cuda.get_device_name(),
        "driver": driver_version(),
        "versions": versions(["torch", "triton", "nvidia-cublas"]),
        "matmul_flops": flops,
        "read_bandwidth": Probe(replays).read_bandwidth(),
    }


def measure(args: argparse.Namespace, cases: Sequence[Case]) -> list[Row]:
    import torch
    from _linear_measure import measure_all

    start = time.monotonic()
    machine = describe_machine(args.replays)
    engines = usable_engines(args)
    print(f"{json.dumps(machine)}\n\n{HEADER}", flush=True)
    dtype, read_bandwidth = getattr(torch, args.dtype), machine["read_bandwidth"]

    def measured() -> Iterator[Row]:
        for case, found in measure_all(cases, engines, dtype, read_bandwidth, args.replays):
            yield make_row(case, args.dtype, found, machine)

    rows = show_rows(measured(), format_row, args.json)
    print(f"\n{len(rows)} rows in {time.monotonic() - start:.0f} s")
    return rows


def finish(rows: Sequence[Row]) -> int:
    print(f"\n{format_summary(rows)}")
    return exit_status(rows)


def main(argv: list[str] | None = None) -> int:
    return run(parse_args(argv), select, list_cases, measure, format_rows, finish=finish)


if __name__ == "__main__":
    sys.exit(main())
