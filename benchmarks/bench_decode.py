"""Paged decode on an NVIDIA GPU: Octavo beside FlashAttention-3 and FlashInfer in one run.

    python benchmarks/bench_decode.py --json decode.jsonl --plot decode.svg

A time is the median over replays of a CUDA graph of many calls, divided by their number. The calls rotate
over copies of all inputs, more than twice the L2 cache in all; pages are shuffled over the whole cache. Every
contestant's output is compared with float64: who is wrong gets no time, and a wrong Octavo fails the run. A
peer that cannot be imported is left out: FlashAttention-3 is vLLM's _vllm_fa3_C.abi3.so, somewhere on
PYTHONPATH; FlashInfer is the package flashinfer, which compiles its kernels on first use.

floor = 3 us + bytes / read bandwidth measured in the same run, goal = min(1.15 * floor, best peer).
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from _command import Parser, matching, run, show_rows
from _report import (
    HEADER,
    OCTAVO,
    Row,
    describe,
    floor_us,
    format_machine,
    format_row,
    format_summary,
    plot,
    read_json,
    write_json,
)

from support.benchmark_cases import (
    DECODE_EXTRA,
    DECODE_QUANTISED,
    DECODE_SHARED,
    DECODE_SHARED_QUANTISED,
    DECODE_SWEEP,
    DECODE_TABLE,
)
from support.case import Case


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(__doc__)
    parser.add_argument(
        "--extra", action="store_true", help="also other groups, dims, page sizes, options, ..."
    )
    parser.add_argument("--shared", action="store_true", help="also sequences that share a prefix")
    parser.add_argument("--quantised", action="store_true", help="also caches of fp8, int8 and int4")
    parser.add_argument("--sweep", action="store_true", help="also more lengths and batches, for the plot")
    parser.add_argument("--int64", action="store_true", help="also with tables and lengths of int64")
    parser.add_shared("--rows", "--list")
    parser.add_quick()
    parser.add_argument("--no-flashinfer", action="store_true", help="do not wait for it to compile")
    parser.add_shared("--json")
    parser.add_argument("--plot", metavar="PATH", type=Path, help="draw the rows: .svg, .png, .pdf")
    parser.add_shared("--from-json")
    args = parser.parse_args(argv)
    if args.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error(
            "--plot needs matplotlib; without it, use --json now and --from-json with --plot elsewhere"
        )
    return args


def select(args: argparse.Namespace) -> list[Case]:
    cases = [
        *DECODE_TABLE,
        *(DECODE_EXTRA if args.extra else ()),
        *(DECODE_SHARED if args.shared else ()),
        *((*DECODE_QUANTISED, *DECODE_SHARED_QUANTISED) if args.quantised else ()),
        *(DECODE_SWEEP if args.sweep else ()),
    ]
    return matching(cases, args.rows)


def list_cases(cases: list[Case]) -> None:
    print("| case | batch x kv length | heads | head dim, dtype | MB |\n|---|---|---|---|--:|")
    for case in cases:
        shape = describe(case)
        heads = f"{case.num_q_heads}/{case.num_kv_heads}"
        megabytes = f"{case.num_bytes / 1e6:.1f}"
        print(f"| {case.name} | {shape['lengths']} | {heads} | {shape['kind']} | {megabytes} |")


def measure(args: argparse.Namespace, cases: Sequence[Case]) -> list[Row]:
    from _contestants import Int64Octavo, decode_contestants
    from _device import describe_machine
    from _measure import compile_kernels, measure_all

    start = time.monotonic()
    contestants = decode_contestants(flashinfer=not args.no_flashinfer)
    if args.int64:
        contestants.insert(1, Int64Octavo())
    compile_kernels(contestants, cases)
    machine = describe_machine(min(args.rounds, 9))
    print(f"{format_machine(machine)}\n\nMicroseconds:\n\n{HEADER}")

    def at_the_floor(case: Case) -> float:
        return floor_us(case.num_bytes, machine.read_bandwidth)

    def measured() -> Iterator[Row]:
        for case, found in measure_all(cases, contestants, at_the_floor, args.rounds):
            shape, num_bytes = describe(case), case.num_bytes
            yield Row(case.name, shape, num_bytes, found.us, found.max_error, found.skipped, machine)

    rows = show_rows(measured(), format_row, args.json, write_json)
    print(f"\n{len(rows)} rows in {time.monotonic() - start:.0f} s")
    return rows


def format_rows(rows: Sequence[Row]) -> str:
    return "\n".join([format_machine(rows[0].machine), "", HEADER, *map(format_row, rows)])


def finish(picture: Path | None, rows: Sequence[Row]) -> int:
    print(f"\n{format_summary(rows)}")
    if picture:
        plot(picture, rows)
    return 1 if any(row.skipped.get(OCTAVO, "").startswith("WRONG") for row in rows) else 0


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    return run(
        args, select, list_cases, measure, format_rows, read=read_json, finish=partial(finish, args.plot)
    )


if __name__ == "__main__":
    sys.exit(main())
