"""Makes the tables of README.md and of pages in docs from the rows in benchmarks/results.

    python benchmarks/results_table.py           # prints them
    python benchmarks/results_table.py --write   # puts them into the files, each after its mark

A GPU has columns as soon as it has a file of rows, such as `decode-h100.jsonl`; cells without a row stay
empty. Needs no GPU.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from _linear_report import MODES, RATIOS, TRITON, best_cublas, is_alone, number, summarise
from _report import OCTAVO, floor_us, geometric_mean, read_rows

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
GPUS = ("H100", "H200")
PEERS = {
    "cudnn": "cuDNN",
    "fa2": "FlashAttention-2",
    "fa3": "FlashAttention-3",
    "fa4": "FlashAttention-4",
    "flashinfer_cuda_cores": "FlashInfer",
    "flashinfer_tensor_cores": "FlashInfer",
    "flashinfer_xqa": "XQA",
}

Row = dict[str, Any]
# Octavo's cell and that of the best peer, from the folder of rows and the name of a GPU.
Cells = Callable[[Path, str], tuple[str, str]]


def file_name(benchmark: str, gpu: str) -> str:
    return f"{benchmark}-{gpu.lower()}.jsonl"


def load(results: Path, benchmark: str, gpu: str) -> list[Row]:
    """Read the rows of a file; there are none of a file that does not exist."""
    path = results / file_name(benchmark, gpu)
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def gpus_with(results: Path, *benchmarks: str) -> list[str]:
    return [gpu for gpu in GPUS if any(load(results, benchmark, gpu) for benchmark in benchmarks)]


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]], numbers: int) -> str:
    """Make a table whose last columns, this many, are numbers."""
    lines = [f"| {' | '.join(cells)} |" for cells in (header, *rows)]
    return "\n".join([lines[0], "|" + "---|" * (len(header) - numbers) + "--:|" * numbers, *lines[1:]])


# README.md: decode, prefill and the cost of a call, each beside the best peer


def best_peer(us: dict[str, float]) -> str | None:
    """Return the fastest of the peers that have a time."""
    return min(us.keys() & PEERS.keys(), key=us.__getitem__, default=None)


def link(text: str, benchmark: str, gpu: str, line: int | None = None) -> str:
    path = (RESULTS / file_name(benchmark, gpu)).relative_to(ROOT)
    return f"[{text}]({path}{f'#L{line}' if line else ''})"


def one_case(benchmark: str, case: str) -> Cells:
    """A row of a benchmark of attention or of gradients; where no peer was measured, its cell is empty."""
    unit, digits = ("tflops", 0) if benchmark in ("prefill", "backward") else ("us", 1)

    def cells(results: Path, gpu: str) -> tuple[str, str]:
        for line, row in enumerate(load(results, benchmark, gpu), start=1):
            if row["case"] == case and OCTAVO in row["us"]:
                peer = best_peer(row["us"])
                theirs = f"{row[unit][peer]:.{digits}f} {PEERS[peer]}" if peer else ""
                return link(f"{row[unit][OCTAVO]:.{digits}f}", benchmark, gpu, line), theirs
        return "", ""

    return cells


def all_cases(benchmark: str) -> Cells:
    """How many times as fast as the best peer Octavo is, in all rows where both have a time."""

    def cells(results: Path, gpu: str) -> tuple[str, str]:
        times = [row["us"] for row in load(results, benchmark, gpu)]
        speeds = [us[peer] / us[OCTAVO] for us in times if OCTAVO in us and (peer := best_peer(us))]
        if not speeds:
            return "", ""
        mean = link(f"{geometric_mean(speeds):.2f}", benchmark, gpu)
        return f"{mean} ({min(speeds):.2f} to {max(speeds):.2f} in {len(speeds)} rows)", "1"

    return cells


def product(case: str) -> Cells:
    """A row of a benchmark of products with weights, beside the best of cuBLAS."""

    def cells(results: Path, gpu: str) -> tuple[str, str]:
        for line, row in enumerate(load(results, "linear", gpu), start=1):
            if row["case"] == case:
                octavo, theirs = f"{row['us'][OCTAVO]:.1f}", f"{best_cublas(row['us']):.1f} cuBLAS"
                return link(octavo, "linear", gpu, line), theirs
        return "", ""

    return cells


def whole_step(case: str) -> Cells:
    """Tokens/s of a model's decode steps, beside the best compiled peer."""

    def cells(results: Path, gpu: str) -> tuple[str, str]:
        for line, row in enumerate(load(results, "generate", gpu), start=1):
            if row["case"] == case:
                speeds = row["tokens_per_s"]
                peer = max(speeds.keys() & COMPILED_PEERS.keys(), key=speeds.__getitem__)
                octavo = max(speeds[name] for name in OCTAVO_STEPS if name in speeds)
                return link(
                    f"{octavo:.0f}", "generate", gpu, line
                ), f"{speeds[peer]:.0f} {COMPILED_PEERS[peer]}, compiled"
        return "", ""

    return cells


def layer_in_vllm(case: str) -> Cells:
    """The attention of one layer in vLLM, beside vLLM's FlashAttention-3."""

    def cells(results: Path, gpu: str) -> tuple[str, str]:
        for line, row in enumerate(load(results, "vllm", gpu), start=1):
            if row["case"] == case:
                octavo, stock = (f"{row['us'][name]['layer']:.1f}" for name in (OCTAVO, "FLASH_ATTN"))
                return link(octavo, "vllm", gpu, line), f"{stock} FlashAttention-3"
        return "", ""

    return cells


def cost_of_a_call(results: Path, gpu: str) -> tuple[str, str]:
    rows = load(results, "call", gpu)
    us = {row["contestant"]: row["best_us"] for row in rows if row["device"] == "cuda"}
    peer = best_peer(us)
    if "torch" not in us or peer is None:
        return "", ""
    line = 1 + [(row["device"], row["contestant"]) for row in rows].index(("cuda", "torch"))
    return link(f"{us['torch']:.1f}", "call", gpu, line), f"{us[peer]:.1f} {PEERS[peer]}"


SUMMARY: tuple[tuple[str, str, Cells], ...] = (
    ("Decode, 1 sequence of 8192 tokens", "microseconds", one_case("decode", "8b_b1_s8192")),
    ("Decode, 64 sequences of 4096 tokens", "microseconds", one_case("decode", "8b_b64_s4096")),
    ("Decode over fp8, 64 sequences of 4096 tokens", "microseconds", one_case("quantised", "fp8_b64_s4096")),
    ("Decode, speed in all rows (mean)", "best peer = 1", all_cases("decode")),
    ("Latent attention, 32 x 4096, 128 heads", "microseconds", one_case("latent", "mla_b32_s4096_h128")),
    ("Prefill, 8 x 2048 tokens", "TFLOP/s", one_case("prefill", "d128_causal_8x2048")),
    ("Prefill, 4 chunks of 512 and 60 decoding", "TFLOP/s", one_case("prefill", "mixed")),
    ("Prefill, speed in all rows (mean)", "best peer = 1", all_cases("prefill")),
    ("Gradients, 8 x 2048 tokens", "TFLOP/s", one_case("backward", "d128_causal_8x2048")),
    ("One row times weights [4096, 4096]", "microseconds", product("4096x4096_m1")),
    ("Llama-2-7B, 1 sequence at 1024 tokens", "tokens/s", whole_step("7b_b1_s1024")),
    ("A layer in vLLM, 32 sequences of 2048 tokens", "microseconds", layer_in_vllm("8b_b32_s2048")),
    ("Cost of a decode call on the host", "microseconds", cost_of_a_call),
)


def summary(results: Path) -> str:
    gpus = gpus_with(results, "decode", "prefill", "call")
    rows = [
        [label, unit, *(cell for gpu in gpus for cell in cells(results, gpu))]
        for label, unit, cells in SUMMARY
    ]
    header = ["", "unit", *(f"{who}, {gpu}" for gpu in gpus for who in ("Octavo", "best peer"))]
    return format_table(header, rows, numbers=2 * len(gpus))


# docs/results.md

CALLERS = {
    "torch": "Octavo, torch tensors",
    "cupy": "Octavo, CuPy arrays",
    "octavo.torch": "`octavo.torch`",
    "fa3": "FlashAttention-3",
    "flashinfer_cuda_cores": "FlashInfer",
    "flashinfer_cuda_cores plan": "FlashInfer's `plan`, once a step",
    "torch scaled_dot_product_attention": "`torch` `scaled_dot_product_attention`",
    "torch add": "`torch.add`",
}


def calls(results: Path) -> str:
    """What a call costs the host, with its launch."""
    gpus = gpus_with(results, "call")
    found = {
        (gpu, row["contestant"]): f"{row['best_us']:.1f}"
        for gpu in gpus
        for row in load(results, "call", gpu)
        if row["device"] == "cuda"
    }
    rows = [[label, *(found.get((gpu, name), "") for gpu in gpus)] for name, label in CALLERS.items()]
    return format_table(["", *gpus], rows, numbers=len(gpus))


def jax(results: Path) -> str:
    """Octavo beside Pallas with its best number of splits."""
    gpus = gpus_with(results, "jax")
    best: dict[tuple[str, str, str, str], float] = {}
    cases: dict[str, None] = {}  # in the order of the rows
    for gpu in gpus:
        for row in load(results, "jax", gpu):
            key = (gpu, row["case"], row["program"], row["contestant"].partition(",")[0])
            best[key] = min(row["us"], best.get(key, row["us"]))
            cases[row["case"]] = None
    columns = [
        (gpu, program, contestant)
        for gpu in gpus
        for program in ("attention", "decode loop")
        for contestant in ("octavo", "pallas")
    ]
    titles = {"attention": "", "decode loop": " with `append_kv`"}
    header = [
        "batch x length",
        *(f"{name.capitalize()}{titles[program]}, {gpu}" for gpu, program, name in columns),
    ]
    rows = []
    for case in cases:
        times = [best.get((gpu, case, program, contestant)) for gpu, program, contestant in columns]
        shape = re.sub(r"8b_b(\d+)_s(\d+)", r"\1 x \2", case)
        rows.append([shape, *("" if us is None else f"{us:.1f}" for us in times)])
    return format_table(header, rows, numbers=len(columns))


def quantised(results: Path) -> str:
    """Decode over caches of codes, beside the floor and the best peer."""
    gpus = gpus_with(results, "quantised")
    cells: dict[str, list[str]] = {}
    for gpu in gpus:
        for row in load(results, "quantised", gpu):
            us, peer = row["us"], best_peer(row["us"])
            floor = floor_us(row["num_bytes"], row["machine"]["read_bandwidth"])
            theirs = f"{us[peer]:.1f} {PEERS[peer]}" if peer else ""
            times = [f"{us[OCTAVO]:.1f}", f"{floor:.1f}", f"{us[OCTAVO] / floor:.2f}", theirs]
            cells.setdefault(row["case"], []).extend(times)
    header = ["case", *(name for gpu in gpus for name in (gpu, "floor", "ratio", "best peer"))]
    return format_table(header, [[case, *row] for case, row in cells.items()], numbers=4 * len(gpus))


def quantised_prefill(results: Path) -> str:
    """Batches of many queries over caches of codes, beside the same ones over bfloat16."""
    kinds = {"fp8": "fp8, one scale", "int8": "int8", "int8_int4": "int8 / int4", "int4": "int4"}
    rows = []
    for gpu in gpus_with(results, "quantised-prefill"):
        times = {row["case"]: row["us"] for row in load(results, "quantised-prefill", gpu)}
        for case in (name for name in times if f"fp8_{name}" in times):
            base, peer = times[case]["octavo"], times[f"fp8_{case}"].get("fa3")
            found = [times[f"{kind}_{case}"]["octavo"] for kind in kinds]
            cells = [f"{us:.0f} ({base / us:.2f})" for us in found]
            rows.append([case, gpu, f"{base:.0f}", *cells, f"{peer:.0f}" if peer else ""])
    header = ["case", "GPU", "bfloat16", *kinds.values(), "FlashAttention-3, fp8 queries"]
    return format_table(header, rows, numbers=len(header) - 2)


def latent(results: Path) -> str:
    """Latent attention beside the floor, and what its products come to."""
    gpus = gpus_with(results, "latent")
    cells: dict[str, list[str]] = {}
    for gpu in gpus:
        for row in load(results, "latent", gpu):
            us, floor = row["us"][OCTAVO], row["floor_us"]
            numbers = [f"{us:.1f}", f"{floor:.1f}", f"{us / floor:.2f}", f"{row['flops'] / us / 1e6:.0f}"]
            cells.setdefault(row["case"], []).extend(numbers)
    header = ["case", *(name for gpu in gpus for name in (gpu, "floor", "ratio", "TFLOP/s"))]
    return format_table(header, [[case, *row] for case, row in cells.items()], numbers=4 * len(gpus))


OCTAVO_STEPS = (OCTAVO, "octavo_static_weight")
COMPILED_PEERS = {
    "hf_static": "transformers",
    "compiled": "PyTorch",
    "compiled_flex": "FlexAttention",
    "compiled_whole": "PyTorch, whole step",
}


def rows_of(results: Path, benchmark: str) -> list[tuple[str, Row]]:
    """The rows of all GPUs, each with the GPU's name."""
    return [(gpu, row) for gpu in GPUS for row in load(results, benchmark, gpu)]


def _cells_of_step(row: Row) -> list[str]:
    """Tokens/s and ratios of one row."""
    us = row["us"]
    octavo = min((us[name] for name in OCTAVO_STEPS if name in us), default=None)
    compiled = min(us.keys() & COMPILED_PEERS.keys(), key=us.__getitem__, default=None)

    def speed(name: str | None) -> str:
        return f"{row['tokens_per_s'][name]:.0f}" if name in us else ""

    def ratio(of: float | None, to: float | None) -> str:
        return f"{of / to:.2f}" if of and to else ""

    return [
        *map(speed, OCTAVO_STEPS),
        ratio(octavo, row["floor_us"]),
        f"{speed(compiled)} {COMPILED_PEERS[compiled]}" if compiled else "",
        ratio(us.get(compiled), octavo),
        *map(speed, ("hf_sdpa", "hf_eager")),
        ratio(us.get("hf_eager"), octavo),
    ]


def generate(results: Path) -> str:
    """Tokens/s of whole decode steps, and how many times those of compiled and of eager peers."""
    rows = []
    for gpu, row in rows_of(results, "generate"):
        shape = row["shape"]
        model = f"{shape['model']}, {shape['layers']} layers"
        rows.append([model, f"{shape['batch']} x {shape['context']}", gpu, *_cells_of_step(row)])
    header = [
        *("model", "batch x context", "GPU", "Octavo", "static weights", "time / floor"),
        *("best compiled peer", "its time / Octavo's"),
        *("transformers, SDPA", "eager", "its time / Octavo's"),
    ]
    return format_table(header, rows, numbers=len(header) - 3)


LINEAR_ROWS = (1, 8, 16, 64, 128)  # of x, that the table of shapes has; the files have more


def linear(results: Path) -> str:
    """What all shapes together say, for each number of rows of x."""
    found = [(gpu, summarise(load(results, "linear", gpu))) for gpu in gpus_with(results, "linear")]
    rows = [[gpu, str(num_rows), *cells] for gpu, lines in found for num_rows, cells in lines.items()]
    return format_table(["GPU", "M", *RATIOS.values()], rows, numbers=1 + len(RATIOS))


def _times_of_linear(row: Row) -> str:
    """Octavo in both modes, the fastest of cuBLAS, and Triton where it ran."""
    us = row["us"]
    times = [number(time, ".1f") or "-" for time in (*map(us.get, MODES), best_cublas(us))]
    return " / ".join([*times, f"{us[TRITON]:.1f}"] if TRITON in us else times)


def linear_shapes(results: Path) -> str:
    """Microseconds of each shape, and of the four products of layers."""
    lines: dict[tuple[str, str], list[Row]] = {}
    for gpu, row in rows_of(results, "linear"):
        lines.setdefault((gpu, row["shape"]["label"]), []).append(row)
    table = []
    for (gpu, label), rows in lines.items():
        times = {row["shape"]["num_rows"]: _times_of_linear(row) for row in rows}
        shape = label.replace("x", " x ") if is_alone(rows[0]) else label.replace("_", ", ")
        floor = f"{rows[0]['floor_us']:.1f}"
        table.append([shape, gpu, floor, *(times.get(num_rows, "") for num_rows in LINEAR_ROWS)])
    header = ["N x K", "GPU", "floor", *(f"M = {num_rows}" for num_rows in LINEAR_ROWS)]
    return format_table(header, table, numbers=1 + len(LINEAR_ROWS))


# Gradients

BACKWARD_PEERS = ("cudnn", "fa2", "fa3", "fa4")


def _backward_rows(results: Path, *groups: str) -> list[tuple[str, Row]]:
    """The GPU of each row of these groups, and the row."""
    return [(gpu, row) for gpu, row in rows_of(results, "backward") if row["group"] in groups]


def backward(results: Path) -> str:
    """TFLOP/s of all, and how many times as fast as the best peer Octavo is."""
    rows = []
    for gpu, row in _backward_rows(results, "d64", "d128", "d256", "other"):
        us, peer = row["us"], best_peer(row["us"])
        speeds = [row["tflops"].get(name) for name in (OCTAVO, *BACKWARD_PEERS)]
        ratio = f"{us[peer] / us[OCTAVO]:.2f}" if peer and OCTAVO in us else ""
        rows.append([row["case"], gpu, *("" if x is None else f"{x:.0f}" for x in speeds), ratio])
    header = ["case", "GPU", "Octavo", *(PEERS[name] for name in BACKWARD_PEERS), "ratio to the best peer"]
    return format_table(header, rows, numbers=len(header) - 2)


def backward_options(results: Path) -> str:
    """Microseconds with an option, and what it costs."""
    rows = []
    for gpu, row in _backward_rows(results, "options"):
        us, peer = row["us"], best_peer(row["us"])
        with_it, without = us.get(OCTAVO), us.get("octavo_plain")
        cost = with_it / without if with_it and without else None
        cells = [*(f"{x:.0f}" if x else "" for x in (with_it, without)), f"{cost:.2f}" if cost else ""]
        rows.append([row["case"], gpu, *cells, f"{us[peer]:.0f} {PEERS[peer]}" if peer else ""])
    header = ["case", "GPU", "Octavo", "without it", "ratio", "best peer"]
    return format_table(header, rows, numbers=4)


# docs/quantised_cache.md

TEXTS = {
    "time_machine": "a story",
    "candle": "science",
    "earnest": "a play",
    "documentation": "documentation",
}


CACHES = {"contiguous": "contiguous", "unshared": "pages, prompts not shared", "pages": "pages"}
REQUESTS = {
    "one": "one text each",
    "samples2": "2 samples",
    "samples4": "4 samples",
    "beams2": "2 beams",
    "beams4": "4 beams",
}


def serving(results: Path) -> str:
    """Requests per second with pages, and in contiguous memory."""
    header = [
        *("model", "requests", "cache", "requests/s", "to contiguous", "texts at once"),
        *("waste, mean", "most, half full"),
    ]
    rows = []
    for path in sorted(results.glob("serving-*.jsonl")):
        contiguous: dict[str, float] = {}
        for row in read_rows(path):
            base = contiguous.setdefault(row["case"], row["requests_per_s"])
            rows.append(
                [
                    f"{row['model']}, {path.stem.removeprefix('serving-').upper()}",
                    REQUESTS[row["case"]],
                    CACHES[row["way"]],
                    f"{row['requests_per_s']:.2f}",
                    f"{row['requests_per_s'] / base:.2f}",
                    f"{row['sequences_at_once']:.1f}",
                    f"{row['waste_percent']:.1f} %",
                    f"{row['most_waste_percent']:.1f} %" if row["most_waste_percent"] else "",
                ]
            )
    return format_table(header, rows, numbers=len(header) - 3)


def vllm(results: Path) -> str:
    """The attention of one layer in vLLM, and of a step as the host sees it."""
    header = ["batch", "GPU", "Octavo, us a layer", "FLASH_ATTN", "ratio", "Octavo, us a step", "FLASH_ATTN"]
    rows = []
    for gpu, row in rows_of(results, "vllm"):
        octavo, stock = row["us"][OCTAVO], row["us"]["FLASH_ATTN"]
        rows.append(
            [
                row["case"],
                gpu,
                f"{octavo['layer']:.1f}",
                f"{stock['layer']:.1f}",
                f"{stock['layer'] / octavo['layer']:.2f}",
                f"{octavo['step']:.0f}",
                f"{stock['step']:.0f}",
            ]
        )
    return format_table(header, rows, numbers=len(header) - 2)


WAYS = {
    "octavo": "`octavo.transformers.generate_batch`",
    "transformers_octavo": "`model.generate_batch`, Octavo",
    "transformers_sdpa": "`model.generate_batch`, sdpa",
    "padded_sdpa": "`model.generate`, sdpa, padded",
}


def transformers(results: Path) -> str:
    """Tokens per second and memory of models of transformers."""
    header = [
        *("model", "way", "tokens/s", "to padded", "tokens per second of CPU time"),
        *("MiB besides the model", "texts as padded"),
    ]
    rows = []
    for path in sorted(results.glob("transformers-*.jsonl")):
        found = read_rows(path)
        base = {row["model"]: row for row in found if row["contestant"] == "padded_sdpa"}
        for row in found:
            ratio = row["tokens_per_s"] / base[row["model"]]["tokens_per_s"]
            rows.append(
                [
                    f"{row['model']}, {row['device']}",
                    WAYS[row["contestant"]],
                    f"{row['tokens_per_s']:.1f}",
                    f"{ratio:.2f}",
                    f"{row['tokens_per_cpu_s']:.1f}" if row["device"] == "cpu" else "",
                    f"{row['peak_mib'] - row['loaded_mib']:.0f}",
                    f"{row['equal_texts']} of {row['num_requests']}",
                ]
            )
    return format_table(header, rows, numbers=len(header) - 2)


def two_digits(x: float) -> str:
    """Write a number below 1 with two digits that count, and no exponent."""
    return f"{x:.{1 - math.floor(math.log10(x))}f}"


def kv_accuracy(results: Path) -> str:
    """What caches of codes change in the predictions of a model."""
    rows = json.loads((results / "kv-accuracy.json").read_text())["rows"]
    cells = [
        [
            row["kind"],
            row["variant"],
            str(row["bytes_per_token"]),
            *map(two_digits, (row["mean_kl"], *(row["kl"][text] for text in TEXTS))),
        ]
        for row in rows
    ]
    header = ["type", "besides", "bytes a token", "mean", *TEXTS.values()]
    return format_table(header, cells, numbers=len(header) - 2)


# The files

TABLES = {
    ROOT / "README.md": {"summary": summary},
    ROOT / "docs" / "results.md": {
        "generate": generate,
        "linear": linear,
        "linear-shapes": linear_shapes,
        "quantised": quantised,
        "quantised-prefill": quantised_prefill,
        "latent": latent,
        "backward": backward,
        "backward-options": backward_options,
        "calls": calls,
        "jax": jax,
        "serving": serving,
        "transformers": transformers,
    },
    ROOT / "docs" / "tutorials" / "vllm.md": {"vllm": vllm},
    ROOT / "docs" / "quantised_cache.md": {"kv-accuracy": kv_accuracy},
}


def fill_in(text: str, tables: dict[str, Callable[[Path], str]], results: Path = RESULTS) -> str:
    """Return the text with each of the tables after its mark, instead of the one that is there."""
    for name, make in tables.items():
        mark = f"<!-- table: {name} -->\n\n"
        before, *after = text.split(mark)
        if len(after) != 1:
            raise ValueError(f"there must be one {mark!r} in the text, not {len(after)}")
        text = before + mark + make(results) + "\n" + re.sub(r"^([|].*\n)*", "", after[0])
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--write", action="store_true", help="into the files")
    arguments = parser.parse_args()
    for file, tables in TABLES.items():
        if arguments.write:
            file.write_text(fill_in(file.read_text(), tables))
        else:
            print("\n\n".join(make(RESULTS) for make in tables.values()), end="\n\n")


if __name__ == "__main__":
    main()
