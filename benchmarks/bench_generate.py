"""Whole decode steps of Llama: Octavo beside Hugging Face transformers and compiled PyTorch in one run.

    python benchmarks/bench_generate.py --list
    python benchmarks/bench_generate.py --cases main --json benchmarks/results/generate-h100.jsonl
    python benchmarks/bench_generate.py --tiny                                # on the CPU too

bfloat16, the shapes of Llama-2-7B (7b) and Llama-3-8B (8b). A step takes each sequence of the batch one
token further: embedding, all layers, logits, and the likeliest token, which the next step starts from. A time
is the median of 64 steps that follow one another, from the end of one to the end of the next, while the
lengths grow.

All engines have the same weights, random ones (seeded, standard deviation 0.02), and a context of the same
random keys and values, in a cache of their own. The logits of four steps are compared with a float32 forward
of the same weights: whose largest error is more than twice that of a plain implementation in bfloat16 has no
time, and a wrong Octavo fails the run.

    hf_eager              transformers, eager attention, DynamicCache: what FlashDecoding++ was compared with
    hf_sdpa               the same with PyTorch's scaled_dot_product_attention, without cuDNN's kernel
    hf_static             transformers, StaticCache, torch.compile(mode="reduce-overhead")
    compiled              plain PyTorch as in gpt-fast: a static cache, layers that are compiled with tuned
                          kernels, and a step that is one CUDA graph
    compiled_flex         the same with FlexAttention, which compiles on GPUs only
    compiled_whole        compiled, the whole step at once; runs only where --engines names it, since that
                          takes minutes for 32 layers
    octavo                examples/llama: six operators a layer, and a step that is one CUDA graph
    octavo_static_weight  the same with static_weight=True
    octavo_static         and with static_past=True

transformers' models are called as they are, without what generate() does besides at each step.

floor = (weights + keys and values) / read bandwidth, which is measured in the same run. An engine whose
package is missing is left out, and so is a case that does not fit in memory; both say so. --layers N keeps N
layers of a model, and its head: nothing is extrapolated, and the rows have the number in their names.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import _examples_path  # noqa: F401
from _command import Parser, matching, run
from _generate_cases import GROUPS, MODELS, TIMED_STEPS, TINY, Case
from _report import OCTAVO, write_rows

if TYPE_CHECKING:
    import torch
    from _generate_engines import Engine
    from _generate_measure import Exact, Measured

PROMISING = ("octavo_static_weight", "octavo_static")
DEFAULT_ENGINES = ("hf_eager", "hf_sdpa", "hf_static", "compiled", "compiled_flex", OCTAVO, *PROMISING)
ENGINES = (*DEFAULT_ENGINES, "compiled_whole")
NOT_COMPILED = ("hf_eager", "hf_sdpa", OCTAVO, *PROMISING)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(__doc__)
    parser.add_argument("--cases", metavar="GROUPS", default="main", help=f"of {', '.join(GROUPS)} (main)")
    parser.add_shared("--rows")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, and engines that do not compile")
    parser.add_argument("--engines", metavar="NAMES", help="default: all but compiled_whole")
    parser.add_argument("--layers", metavar="N", type=int, default=0, help="fewer than the model has")
    parser.add_argument(
        "--limit", metavar="S", type=float, default=120.0, help="seconds an engine may take (%(default)s)"
    )
    parser.add_shared("--list", "--json", "--from-json")
    args = parser.parse_args(argv)
    args.cases = parser.split_names("--cases", args.cases, GROUPS)
    default = NOT_COMPILED if args.tiny else DEFAULT_ENGINES
    args.engines = default if args.engines is None else parser.split_names("--engines", args.engines, ENGINES)
    if args.layers < 0:
        parser.error(f"--layers ({args.layers}) must be at least 1, or 0 for all of them")
    if args.limit <= 0:
        parser.error(f"--limit ({args.limit:g}) must be greater than 0")
    return args


def select(args: argparse.Namespace) -> list[Case]:
    named = TINY if args.tiny else [case for group in args.cases for case in GROUPS[group]]
    cases = dict.fromkeys(Case(case.model, case.batch, case.context, args.layers) for case in named)
    return matching(cases, args.rows)


def describe(case: Case) -> dict[str, object]:
    """The shape of a case, as a row of the results has it."""
    return {
        "model": MODELS[case.model],
        "layers": case.config.num_layers,
        "batch": case.batch,
        "context": case.context,
    }


def list_cases(cases: list[Case]) -> None:
    print("| row | model | layers | batch x context | GB of weights | of cache | read a step |")
    print("|---|---|--:|--:|--:|--:|--:|")
    for case in cases:
        shape = describe(case)
        sizes = (case.weight_bytes, case.cache_bytes, case.num_bytes)
        gigabytes = " | ".join(f"{num_bytes / 1e9:.2f}" for num_bytes in sizes)
        lengths = f"{case.batch} x {case.context}"
        print(f"| {case.name} | {shape['model']} | {shape['layers']} | {lengths} | {gigabytes} |")


HEADER = (
    "| row | layers | floor, ms | engine | ms a step | tokens/s | / floor | largest error | of a plain one | "
    "top-1 | of a plain one |\n|---|--:|--:|---|--:|--:|--:|--:|--:|--:|--:|"
)


def format_line(row: dict[str, Any], engine: str) -> str:
    """What one engine did in a row."""
    us = row["us"].get(engine)
    cells = [row["case"], str(row["shape"]["layers"]), f"{row['floor_us'] / 1e3:.3f}", engine]
    if us is None:
        cells += [row["skipped"][engine], "", ""]
    else:
        cells += [f"{us / 1e3:.3f}", f"{row['tokens_per_s'][engine]:.0f}", f"{row['over_floor'][engine]:.2f}"]
    if engine in row["max_error"]:
        numbers = row["max_error"][engine], row["plain_error"], row["top1"][engine], row["plain_top1"]
        cells += [f"{number:.3g}" for number in numbers]
    else:
        cells += [""] * 4
    return f"| {' | '.join(cells)} |"


def format_rows(rows: list[dict[str, Any]]) -> str:
    lines = [format_line(row, engine) for row in rows for engine in ENGINES if _took_part(row, engine)]
    return "\n".join([HEADER, *lines])


def _took_part(row: dict[str, Any], engine: str) -> bool:
    return engine in row["us"] or engine in row["skipped"]


def make_row(case: Case, found: Measured, exact: Exact, machine: dict[str, Any]) -> dict[str, Any]:
    floor_us = case.num_bytes / machine["read_bandwidth"] * 1e6
    return {
        "case": case.name,
        "shape": describe(case),
        "dtype": "bfloat16",
        "steps": TIMED_STEPS,
        "num_bytes": case.num_bytes,
        "floor_us": floor_us,
        "us": dict(found.us),
        "tokens_per_s": {name: case.batch / us * 1e6 for name, us in found.us.items()},
        "over_floor": {name: us / floor_us for name, us in found.us.items()},
        "max_error": dict(found.max_error),
        "plain_error": exact.plain_error,
        "top1": dict(found.top1),
        "plain_top1": exact.plain_top1,
        "skipped": dict(found.skipped),
        "machine": machine,
    }


def describe_machine(device: torch.device) -> dict[str, Any]:
    import torch

    packages = ["torch", "transformers", "triton"]
    if device.type == "cuda":
        from _device import Probe, driver_version, matmul_flops, versions

        matmul_flops(9)  # which brings the clocks up
        return {
            "device": torch.cuda.get_device_name(),
            "driver": driver_version(),
            "versions": versions(packages),
            "read_bandwidth": Probe(9).read_bandwidth(),
        }
    from bench_cpu import read_bandwidth

    installed = [name for name in ("octavo", *packages) if importlib.util.find_spec(name)]
    return {
        "device": f"CPU, {torch.get_num_threads()} threads",
        "driver": "",
        "versions": {name: importlib.import_module(name).__version__ for name in installed},
        "read_bandwidth": 1e9 * read_bandwidth(),
    }


def usable_engines(names: Sequence[str], device: torch.device) -> list[type[Engine]]:
    """Those that have what they need, in the order of ENGINES; says why of the others."""
    import _generate_compiled as compiled
    import _generate_engines as engines
    from _contestants import importable

    kinds = (
        engines.TransformersEager,
        engines.TransformersSdpa,
        engines.TransformersStatic,
        compiled.Compiled,
        compiled.CompiledFlex,
        engines.Octavo,
        engines.StaticWeightOctavo,
        engines.StaticOctavo,
        compiled.CompiledWhole,
    )
    return importable({kind.name: partial(kind.usable, device) for kind in kinds if kind.name in names})


def fitting(cases: Sequence[Case], memory: int) -> list[Case]:
    """Those that memory suffices for; says why of the others."""
    from _generate_measure import why_too_large

    reasons = {case: why_too_large(case, memory) for case in cases}
    for case, why in reasons.items():
        if why:
            print(f"without {case.name}: {why}", file=sys.stderr)
    return [case for case, why in reasons.items() if not why]


def measure(args: argparse.Namespace, chosen: Sequence[Case]) -> list[dict[str, Any]]:
    import torch
    from _generate_measure import Exact, Measured, measure_engine, memory_of_device, problems

    start = time.monotonic()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    engines = usable_engines(args.engines, device)
    cases = fitting(chosen, memory_of_device(device))
    machine = describe_machine(device)
    print(f"{json.dumps(machine)}\n\n{HEADER}", flush=True)
    rows: list[dict[str, Any]] = []
    with torch.no_grad():
        for problem in problems(cases, device):
            exact, found = Exact(problem), Measured()
            rows.append({})
            for engine in engines:
                measure_engine(engine, problem, exact, args.limit, found)
                rows[-1] = make_row(problem.case, found, exact, machine)
                print(format_line(rows[-1], engine.name), flush=True)
                if args.json:
                    write_rows(args.json, rows)
    print(f"\n{len(rows)} rows in {time.monotonic() - start:.0f} s")
    return rows


def main(argv: list[str] | None = None) -> int:
    return run(parse_args(argv), select, list_cases, measure, format_rows)


if __name__ == "__main__":
    sys.exit(main())
