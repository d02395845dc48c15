"""Attention over many queries on an NVIDIA GPU: Octavo beside cuDNN, FlashAttention-2 and -3 in one run.

    python benchmarks/bench_prefill.py --json prefill.jsonl

bfloat16. A time is the median over replays of a CUDA graph of many calls, divided by their number; the graphs
of the contestants take turns, and the calls rotate over copies of all inputs, more than twice the L2 cache in
all. Every contestant's output is compared with float64 in some rows: who is wrong gets no time, and a wrong
Octavo fails the run. cuDNN and FlashAttention-2 are PyTorch's; FlashAttention-3 is vLLM's
_vllm_fa3_C.abi3.so, left out unless it lies on PYTHONPATH.

A causal mask counts half of a square's operations.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from _command import Parser, matching, run, show_rows
from _report import best_ratio, int64_summary, list_with_flops

from support.benchmark_cases import PREFILL_EXTRA, PREFILL_QUANTISED, PREFILL_TABLE
from support.case import Case

CONTESTANTS = ("octavo", "cudnn", "fa3", "fa2")


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(__doc__)
    parser.add_argument("--extra", action="store_true", help="also other dims, lengths, masks, biases, pages")
    parser.add_argument("--quantised", action="store_true", help="also caches of fp8, int8 and int4")
    parser.add_argument("--int64", action="store_true", help="also with tables, lengths and offsets of int64")
    parser.add_shared("--rows", "--list")
    parser.add_quick()
    parser.add_shared("--json", "--from-json")
    return parser.parse_args(argv)


def select(args: argparse.Namespace) -> list[Case]:
    cases = [
        *PREFILL_TABLE,
        *(PREFILL_EXTRA if args.extra else ()),
        *(PREFILL_QUANTISED if args.quantised else ()),
    ]
    return matching(cases, args.rows)


HEADER = (
    "| case | batch x length | heads | "
    + " | ".join(f"{name}, TFLOP/s" for name in CONTESTANTS)
    + " | octavo, us | fastest peer's time / octavo's |\n|---|---|---|"
    + "--:|" * (len(CONTESTANTS) + 2)
)


def format_row(row: dict[str, Any]) -> str:
    def number(value: float | None, digits: int) -> str:
        return "" if value is None else f"{value:.{digits}f}"

    cells = [row["case"], row["shape"]["lengths"], row["shape"]["heads"]]
    cells += [number(row["tflops"].get(name), 0) for name in CONTESTANTS]
    cells += [number(row["us"].get("octavo"), 1), number(best_ratio(row), 2)]
    return f"| {' | '.join(cells)} |"


def describe(case: Case) -> dict[str, object]:
    """The shape of a case, as a row of the results has it."""
    lengths = case.seqlens_q
    is_ragged = len(set(lengths)) > 1
    return {
        "lengths": f"{case.batch}, {sum(lengths)} in all" if is_ragged else f"{case.batch} x {lengths[0]}",
        "heads": f"{case.num_q_heads}/{case.num_kv_heads}",
        "head_dim": case.head_dim,
        "page_size": case.page_size,
        "kv_dtype": case.cache_dtype,
    }


def expected_us(case: Case) -> float:
    """At 600 TFLOP/s, or 3 TB/s."""
    return max(case.flops / 6e8, case.num_bytes / 3e6)


def measure(args: argparse.Namespace, cases: Sequence[Case]) -> list[dict[str, Any]]:
    import torch
    from _contestants import Int64Octavo, prefill_contestants
    from _device import driver_version, matmul_flops, versions
    from _measure import measure_all

    machine: dict[str, object] = {
        "device": torch.cuda.get_device_name(),
        "driver": driver_version(),
        "versions": versions(["torch", "vllm"]) | {"cuDNN": str(torch.backends.cudnn.version())},
        "matmul_flops": matmul_flops(min(args.rounds, 9)),
    }
    print(f"{json.dumps(machine)}\n\n{HEADER}")
    contestants = prefill_contestants()
    if args.int64:
        contestants.insert(1, Int64Octavo())

    def measured() -> Iterator[dict[str, Any]]:
        for case, found in measure_all(cases, contestants, expected_us, args.rounds):
            yield {
                "case": case.name,
                "shape": describe(case),
                "kernel": found.kernel,
                "flops": case.flops,
                "us": found.us,
                "tflops": {name: case.flops / us / 1e6 for name, us in found.us.items()},
                "max_error": found.max_error,
                "skipped": found.skipped,
                "machine": machine,
            }

    rows = show_rows(measured(), format_row, args.json)
    for line in int64_summary([row["us"] for row in rows]):
        print(line)
    return rows


def list_cases(cases: Sequence[Case]) -> None:
    list_with_flops("case", cases, describe)


def format_rows(rows: Sequence[dict[str, Any]]) -> str:
    return "\n".join([HEADER, *map(format_row, rows)])


def main(argv: list[str] | None = None) -> int:
    return run(parse_args(argv), select, list_cases, measure, format_rows)


if __name__ == "__main__":
    sys.exit(main())
