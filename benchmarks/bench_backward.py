"""The gradients of attention on an NVIDIA GPU: Octavo beside cuDNN, FlashAttention-2, -3 and -4 in one run.

    python benchmarks/bench_backward.py --cases d128,d64 --peers FOLDER --json backward.jsonl

bfloat16. A time is that of the whole call, with what it prepares, zeroes and converts: the median over
replays of a CUDA graph of many calls, divided by their number. A graph takes some 25 ms, and its replays
follow one another without a pause, so that the GPU is at its power limit. The graphs of the contestants take
turns, in orders in which each follows each of the others about equally often, and the first replay of a turn
does not count, so that no contestant profits from a slower one that leaves it a cooler GPU; and the calls
rotate over copies of all inputs, more than twice the L2 cache in all. Every contestant's dq, dk and dv are compared with float64 in the first and the last KV
head: who has more than twice the error of a plain implementation in bfloat16 gets no time, and a wrong Octavo
fails the run.

cuDNN and FlashAttention-2 are PyTorch's operators, and go back from their own outputs; the others go back
from an output and a log-sum-exp that were computed in float32, or where the forward is part of the call from
their own. FlashAttention-3 and -4 come from a folder that build_backward_peers.py makes, and are left out
without it. FLOPs are 2.5 times those of the forward, and 3.5 times with it; a causal mask counts half.

--cases chooses among groups of rows: d64, d128, d256; other (grouped heads, head dims 96 and 192); options
(dropout, ALiBi, softcap, deterministic, each beside Octavo without it); forward (with the forward); standard
(beside PyTorch's matrix products and softmax, with the memory that both take).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from _backward_rows import GROUPS, Task
from _command import Parser, matching, run, show_rows
from _report import OCTAVO, best_ratio, list_with_flops

if TYPE_CHECKING:
    from _backward_contestants import Contestant

CONTESTANTS = ("octavo", "octavo_plain", "cudnn", "fa2", "fa3", "fa4", "eager")


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(__doc__)
    parser.add_argument("--cases", metavar="GROUPS", default=",".join(GROUPS), help="default: %(default)s")
    parser.add_shared("--rows")
    parser.add_argument("--peers", metavar="FOLDER", type=Path, help="FlashAttention-3 and -4")
    parser.add_shared("--list")
    parser.add_quick(11, 3)
    parser.add_shared("--json", "--from-json")
    args = parser.parse_args(argv)
    args.cases = parser.split_names("--cases", args.cases, GROUPS)
    return args


def groups_of_tasks(args: argparse.Namespace) -> dict[Task, str]:
    return {task: group for group in args.cases for task in GROUPS[group]}


def select(args: argparse.Namespace) -> list[Task]:
    return matching(groups_of_tasks(args), args.rows)


def describe(task: Task) -> dict[str, object]:
    """The shape of a task, as a row of the results has it."""
    case = task.case
    return {
        "lengths": f"{case.batch} x {case.seqlens_q[0]}",
        "heads": f"{case.num_q_heads}/{case.num_kv_heads}",
        "head_dim": case.head_dim,
        "causal": case.causal,
        "forward": task.forward,
    }


HEADER = (
    "| row | batch x length | heads | "
    + " | ".join(f"{name}, TFLOP/s" for name in CONTESTANTS)
    + " | octavo, us | fastest peer's time / octavo's | error | plain error | GB, octavo | GB, eager |"
    + "\n|---|---|---|"
    + "--:|" * (len(CONTESTANTS) + 6)
)


def format_row(row: dict[str, Any]) -> str:
    def number(value: float | None, spec: str) -> str:
        return "" if value is None else format(value, spec)

    def gigabytes(name: str) -> str:
        peak = row["peak_bytes"].get(name)
        return number(None if peak is None else peak / 1e9, ".2f")

    cells = [row["case"], row["shape"]["lengths"], row["shape"]["heads"]]
    cells += [number(row["tflops"].get(name), ".0f") for name in CONTESTANTS]
    cells += [number(row["us"].get(OCTAVO), ".1f"), number(best_ratio(row), ".2f")]
    cells += [number(row[error].get(OCTAVO), ".2g") for error in ("max_error", "plain_error")]
    cells += [gigabytes(OCTAVO), gigabytes("eager")]
    return f"| {' | '.join(cells)} |"


def contestants(peers: Path | None) -> list[Contestant]:
    """Octavo, and whichever peers can be had; says why of the others."""
    from _backward_contestants import CuDnn, Eager, FlashAttention2, Octavo, PlainOctavo
    from _backward_peers import FlashAttention3, FlashAttention4
    from _contestants import importable

    def from_folder(make: type[FlashAttention3] | type[FlashAttention4]) -> Contestant:
        if peers is None:
            raise ImportError("--peers names no folder")
        return make(peers)

    found = importable(
        {
            "FlashAttention-3": lambda: from_folder(FlashAttention3),
            "FlashAttention-4": lambda: from_folder(FlashAttention4),
        }
    )
    return [Octavo(), PlainOctavo(), CuDnn(), FlashAttention2(), *found, Eager()]


def expected_us(task: Task) -> float:
    """At 700 TFLOP/s, which nobody reaches: no graph is shorter than it should be."""
    return task.flops / 7e8


def measure(args: argparse.Namespace, tasks: Sequence[Task]) -> list[dict[str, Any]]:
    import torch
    from _backward_measure import measure_all
    from _device import Probe, driver_version, matmul_flops, versions

    groups, rounds = groups_of_tasks(args), args.rounds
    taking_part = contestants(args.peers)
    machine: dict[str, object] = {
        "device": torch.cuda.get_device_name(),
        "driver": driver_version(),
        "versions": versions(["torch"]) | {"cuDNN": str(torch.backends.cudnn.version())},
        "matmul_flops": matmul_flops(rounds),
        "read_bandwidth": Probe(rounds).read_bandwidth(),
    }
    print(f"{json.dumps(machine)}\n\n{HEADER}", flush=True)

    def measured() -> Iterator[dict[str, Any]]:
        for task, found in measure_all(tasks, taking_part, expected_us, rounds):
            yield {
                "case": task.name,
                "group": groups[task],
                "shape": describe(task),
                "flops": task.flops,
                "us": found.us,
                "tflops": {name: task.flops / us / 1e6 for name, us in found.us.items()},
                "max_error": found.error,
                "plain_error": found.plain_error,
                "peak_bytes": found.peak_bytes,
                "skipped": found.skipped,
                "machine": machine,
            }

    rows = show_rows(measured(), format_row, args.json)
    print(f"\n8192^3 bfloat16 product afterwards: {matmul_flops(rounds) / 1e12:.0f} TFLOP/s")
    return rows


def list_tasks(tasks: Sequence[Task]) -> None:
    list_with_flops("row", tasks, describe)


def format_rows(rows: Sequence[dict[str, Any]]) -> str:
    return "\n".join([HEADER, *map(format_row, rows)])


def main(argv: list[str] | None = None) -> int:
    return run(parse_args(argv), select, list_tasks, measure, format_rows)


if __name__ == "__main__":
    sys.exit(main())
