"""Where the time of a kernel goes: counters of one case of a benchmark, and counts of its instructions.

    python tools/profile.py counters decode 8b_b1_s8192     # on a machine with a GPU and Nsight Compute
    python tools/profile.py instructions build/release/python/octavo/_core.abi3.so 'split_kv.*bfloat16.*128'

``counters`` runs a case of bench_decode, bench_sparse_decode, bench_latent, bench_prefill, bench_backward or
bench_linear (their --list has the names) under ncu, and prints the counters of one launch of Octavo's kernel.
The clocks are the GPU's own, not locked; the launch is not the first. Its time is not that of the benchmark,
whose launches overlap.

``instructions`` needs no GPU: cuobjdump disassembles the kernels whose name, as C++ writes it, the regular
expression finds. It counts the instructions of the whole kernel and of its loops from 32 instructions on: the
innermost ones, and those in which tensor cores multiply.
"""

from __future__ import annotations

import argparse
import csv
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from _machine_code import demangle, read_instructions, read_usages

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
# As Nsight Compute names them, and what they are.
COUNTERS = {
    "gpu__time_duration.sum": "time",
    "dram__bytes_read.sum": "read from memory",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "of the memory's peak",
    "lts__t_bytes.sum": "through the L2 cache",
    "smsp__inst_executed.sum": "instructions of warps",
    "smsp__issue_active.avg.pct_of_peak_sustained_active": "of the cycles issue an instruction",
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active": "of the cycles use tensor cores",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "of the warps an SM has room for",
    "launch__registers_per_thread": "registers a thread",
    "launch__grid_size": "CTAs",
    **{
        STALL.format(reason): f"warps that wait, per instruction: {meaning}"
        for reason, meaning in {
            "long_scoreboard": "for global or local memory",
            "short_scoreboard": "for shared memory or special functions",
            "barrier": "at a barrier",
            "gmma": "for wgmma",
            "math_pipe_throttle": "for a busy pipe of arithmetic",
            "mio_throttle": "for a full queue of memory instructions",
            "wait": "for a fixed latency",
        }.items()
    },
}


class Benchmark(NamedTuple):
    script: str
    options: tuple[str, ...]
    kernels: str
    """A regular expression that finds the names of Octavo's kernels that do the work."""


PROFILED = {
    "decode": Benchmark(
        "bench_decode.py",
        ("--extra", "--shared", "--quantised", "--quick", "--no-flashinfer"),
        "split_kv_decode|stream_k_decode",
    ),
    "sparse": Benchmark("bench_sparse_decode.py", ("--quick",), "split_kv_decode"),
    "latent": Benchmark("bench_latent.py", ("--quick",), "latent_attention_kernel"),
    "prefill": Benchmark(
        "bench_prefill.py", ("--extra", "--quantised", "--quick"), "sm90_attention|sm80_attention"
    ),
    "backward": Benchmark("bench_backward.py", ("--quick",), "sm90_backward|key_gradients|query_gradients"),
    "linear": Benchmark("bench_linear.py", ("--engines", "octavo"), "sm90_flat|sm90_wide|sm80_linear"),
}
LAUNCHES_BEFORE = 20  # of the kernel; the caches are as in the benchmark then


def read_counters(output: str) -> list[dict[str, tuple[str, str]]]:
    """For each profiled launch "kernel", and every counter as (value, unit), from ncu's raw page in CSV."""
    rows = csv.reader(line for line in output.splitlines() if line.startswith('"'))
    names = next(rows, None)
    units = next(rows, None)
    if names is None or units is None:
        return []
    kernel = names.index("Kernel Name")
    return [
        {
            "kernel": (row[kernel], ""),
            **{name: (row[i], units[i]) for i, name in enumerate(names) if name in COUNTERS},
        }
        for row in rows
    ]


def profile(benchmark: Benchmark, case: str) -> int:
    ncu = [
        *("ncu", "--csv", "--page", "raw", "--clock-control", "none", "--metrics", ",".join(COUNTERS)),
        *("--kernel-name", f"regex:{benchmark.kernels}"),
        *("--launch-skip", str(LAUNCHES_BEFORE), "--launch-count", "1", "--kill", "yes"),
    ]
    command = [sys.executable, str(BENCHMARKS / benchmark.script), "--rows", f"^{re.escape(case)}$"]
    if shutil.which(ncu[0]) is None:
        sys.exit("ncu is not on the PATH: it is Nsight Compute, a part of the CUDA toolkit")
    run = subprocess.run([*ncu, *command, *benchmark.options], capture_output=True, text=True)
    launches = read_counters(run.stdout)
    if not launches:
        print(f"no kernel of {case} was profiled\n{run.stdout}{run.stderr}", file=sys.stderr)
        return 1
    for launch in launches:
        print(launch.pop("kernel")[0])
        for name, (value, unit) in launch.items():
            print(f"  {value:>16} {unit:12} {COUNTERS[name]}")
    return 0


class Instruction(NamedTuple):
    address: int
    opcode: str
    target: int | None
    """Where a branch leads."""


def read_instruction(line: str) -> Instruction | None:
    """Read a line such as "/*0a50*/ @!P0 BRA 0x8f0 ;"; None for one that holds an encoding alone."""
    match = re.match(r"\s*/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+ +)?([A-Z][\w.]*)([^;]*);", line)
    if not match:
        return None
    target = re.search(r"\b0x([0-9a-f]+)\s*$", match[3]) if match[2].split(".")[0] == "BRA" else None
    return Instruction(int(match[1], 16), match[2], int(target[1], 16) if target else None)


def is_of_tensor_cores(instruction: Instruction) -> bool:
    return instruction.opcode.split(".")[0].endswith("MMA")


def loops(instructions: list[Instruction]) -> list[list[Instruction]]:
    """The loops that have no other inside of them, and the smallest one around each product of tensor cores.

    A loop is what lies between a branch backward and its target.
    """
    branches = {(x.target, x.address) for x in instructions if x.target is not None and x.target < x.address}
    spans = sorted(branches, key=lambda span: span[1] - span[0])
    chosen = {
        (begin, end)
        for begin, end in spans
        if not any(begin <= b and e <= end for b, e in spans if (b, e) != (begin, end))
    }
    for x in filter(is_of_tensor_cores, instructions):
        chosen.update([s for s in spans if s[0] <= x.address <= s[1]][:1])
    return [[x for x in instructions if begin <= x.address <= end] for begin, end in sorted(chosen)]


def format_counts(instructions: list[Instruction], most: int = 20) -> str:
    """Those of tensor cores first, then those that there are most of."""
    counts = Counter(x.opcode.split(".")[0] for x in instructions)
    products = sorted({x.opcode.split(".")[0] for x in instructions if is_of_tensor_cores(x)})
    others = [opcode for opcode, _ in counts.most_common() if opcode not in products]
    opcodes = [*products, *others]
    shown = ", ".join(f"{counts[opcode]} {opcode}" for opcode in opcodes[:most])
    return f"{len(instructions)} instructions: {shown}{', ...' if len(opcodes) > most else ''}"


def count_instructions(library: Path, pattern: re.Pattern[str], least: int = 32) -> int:
    usages = read_usages(library)
    readable = demangle([function.name for function in usages])
    found = {function: name for function, name in zip(usages, readable, strict=True) if pattern.search(name)}
    if not found:
        print(f"{library} has no kernel whose name {pattern.pattern!r} finds", file=sys.stderr)
        return 1
    bodies = read_instructions(library, *{function.name for function in found})
    for function, name in found.items():
        read = (read_instruction(line) for line in bodies[function])
        instructions = [x for x in read if x is not None]
        usage = usages[function]
        print(f"{name} ({function.architecture}): {usage['reg']} registers, {usage['stack']} bytes of stack")
        print(f"  {format_counts(instructions)}")
        for loop in loops(instructions):
            if len(loop) >= least:
                print(f"  loop from {loop[0].address:#x} to {loop[-1].address:#x}, {format_counts(loop)}")
    return 0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    counters = commands.add_parser("counters", help="one case of a benchmark under Nsight Compute")
    counters.add_argument("benchmark", choices=PROFILED)
    counters.add_argument("case", help="the name of a row, as the benchmark's --list has it")
    instructions = commands.add_parser("instructions", help="the machine code of a library's kernels")
    instructions.add_argument("library", type=Path)
    instructions.add_argument("kernel", type=re.compile, help="a regular expression")
    arguments = parser.parse_args(argv)
    if arguments.command == "counters":
        return profile(PROFILED[arguments.benchmark], arguments.case)
    return count_instructions(arguments.library, arguments.kernel)


if __name__ == "__main__":
    sys.exit(main())
