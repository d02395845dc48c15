"""Makes the tables of README.md and of pages in docs from the rows in benchmarks/results.

    python benchmarks/results_table.py           # prints them
    python benchmarks/results_table.py --write   # puts them into the files, each after its mark

A GPU has columns as soon as it has a file of rows, such as `decode-h100.jsonl`; cells without a row stay
empty. Needs no GPU.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path

from _linear_report import best_cublas
from _report import OCTAVO, geometric_mean
from _results_of_models import (
    COMPILED_PEERS,
    OCTAVO_STEPS,
    generate,
    kv_accuracy,
    serving,
    transformers,
    vllm,
)
from _results_of_operators import (
    backward,
    backward_options,
    backward_with_forward,
    block_sparse,
    calls,
    decode,
    jax,
    latent,
    linear,
    linear_shapes,
    options,
    paged_prefill,
    prefill,
    quantised,
    quantised_cache,
    quantised_prefill,
    sparse_decode,
)
from _results_rows import PEERS, RESULTS, ROOT, best_peer, file_name, format_table, gpus_with, load

# Octavo's cell and that of the best peer, from the folder of rows and the name of a GPU.
Cells = Callable[[Path, str], tuple[str, str]]


# README.md: decode, prefill and the cost of a call, each beside the best peer


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


# The files

TABLES = {
    ROOT / "README.md": {"summary": summary},
    ROOT / "docs" / "results.md": {
        "generate": generate,
        "linear": linear,
        "linear-shapes": linear_shapes,
        "decode": decode,
        "quantised": quantised,
        "quantised-prefill": quantised_prefill,
        "latent": latent,
        "options": options,
        "prefill": prefill,
        "paged-prefill": paged_prefill,
        "backward": backward,
        "backward-options": backward_options,
        "backward-with-forward": backward_with_forward,
        "calls": calls,
        "jax": jax,
        "serving": serving,
        "transformers": transformers,
    },
    ROOT / "docs" / "block_sparse.md": {"block-sparse": block_sparse},
    ROOT / "docs" / "sparse_decode.md": {"sparse-decode": sparse_decode},
    ROOT / "docs" / "tutorials" / "vllm.md": {"vllm": vllm},
    ROOT / "docs" / "quantised_cache.md": {"quantised-cache": quantised_cache, "kv-accuracy": kv_accuracy},
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
