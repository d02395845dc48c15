"""Tokens/s of examples/generate.py on the CPU: alone, and beside a busy process for each core.

    python benchmarks/bench_busy.py [--rounds 3] [--json rows.jsonl]

A program whose threads spin while they wait collapses there. The goals are of two cores: more than 80
tokens/s alone, and at least 20 beside busy processes. Both ways take turns, and a speed is the median of the
rounds: that of decoding, as the example's table has it. The texts of all runs have to be equal; otherwise the
exit status is 1. Needs what examples/generate.py needs.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from _command import Parser
from _report import write_rows

import octavo

PROGRAM = Path(__file__).resolve().parents[1] / "examples" / "generate.py"
GOALS = {"alone": 80.0, "busy": 20.0}  # tokens/s on two cores
SPEED = re.compile(r"^\W*decode\W+(\d+) tokens/s \((\d+) tokens\)", re.MULTILINE)
TABLE = re.compile(r"^\W*prefill\W+\d+ tokens/s", re.MULTILINE)


@dataclass(frozen=True)
class Row:
    case: str  # alone or busy
    tokens_per_s: float  # the median
    rounds: list[float]
    tokens: int  # that a run decodes
    busy_processes: int
    cores: int
    load: float  # of the minute before the first run
    goal: float
    versions: dict[str, str]


def num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextlib.contextmanager
def busy(num_processes: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Keeps as many cores busy."""
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(num_processes):
            processes.append(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def run(arguments: Sequence[str]) -> tuple[float, int, str]:
    """Tokens/s of decoding, how many tokens that were, and the texts."""
    command = [sys.executable, str(PROGRAM), *arguments]
    shown = subprocess.run(
        command, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, encoding="utf-8"
    ).stdout
    speed, table = SPEED.search(shown), TABLE.search(shown)
    if speed is None or table is None:
        raise ValueError(
            f"{PROGRAM.name}: its table must have the speeds of prefill and decode; got {shown!r}"
        )
    return float(speed[1]), int(speed[2]), shown[: table.start()]


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=128, help="new tokens of each of the three texts")
    parser.add_argument("--processes", type=int, default=num_cores(), help="busy ones (one a core)")
    parser.add_shared("--json")
    args = parser.parse_args(argv)

    load = os.getloadavg()[0]
    options = ["--device", "cpu", "--temperature", "0", "--max-tokens", str(args.max_tokens)]
    processes = {"alone": 0, "busy": args.processes}
    speeds: dict[str, list[float]] = {case: [] for case in processes}
    texts = set()
    tokens = 0
    for _ in range(args.rounds):
        for case, num_processes in processes.items():
            with busy(num_processes):
                speed, tokens, text = run(options)
            speeds[case].append(speed)
            texts.add(text)
    versions = {"octavo": octavo.__version__, "numpy": importlib.metadata.version("numpy")}
    print(f"{num_cores()} cores, a load of {load:.1f} before\n")
    print("| case | busy processes | tokens/s | of the rounds | goal |\n|---|--:|--:|---|--:|")
    rows = []
    for case, found in speeds.items():
        row = Row(
            case,
            statistics.median(found),
            found,
            tokens,
            processes[case],
            num_cores(),
            round(load, 2),
            GOALS[case],
            versions,
        )
        rounds = ", ".join(f"{speed:.0f}" for speed in found)
        print(f"| {case} | {row.busy_processes} | {row.tokens_per_s:.0f} | {rounds} | {row.goal:.0f} |")
        rows.append(asdict(row))
    if args.json:
        write_rows(args.json, rows)
    if len(texts) != 1:
        print(f"bench_busy.py: the texts of all runs must be equal; there are {len(texts)}", file=sys.stderr)
    return int(len(texts) != 1)


if __name__ == "__main__":
    sys.exit(main())
