"""Tables of whole models: tokens, requests, vLLM, transformers, predictions over caches of codes."""

from __future__ import annotations

import json
import math
from pathlib import Path

from _report import OCTAVO, read_rows
from _results_rows import Row, format_table, rows_of

OCTAVO_STEPS = (OCTAVO, "octavo_static_weight", "octavo_static")
COMPILED_PEERS = {
    "hf_static": "transformers",
    "compiled": "PyTorch",
    "compiled_flex": "FlexAttention",
    "compiled_whole": "PyTorch, whole step",
}


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
        *("model", "batch x context", "GPU", "Octavo", "static weights", "and past", "time / floor"),
        *("best compiled peer", "its time / Octavo's"),
        *("transformers, SDPA", "eager", "its time / Octavo's"),
    ]
    return format_table(header, rows, numbers=len(header) - 3)


CACHES = {
    "contiguous": "contiguous",
    "unshared": "pages, prompts not shared",
    "pages": "pages",
    "pages8": "pages of 8 tokens",
}
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
    "octavo_without_graphs": "the same with `cuda_graphs=False`",
    "transformers_octavo": "`model.generate_batch`, Octavo",
    "transformers_sdpa": "`model.generate_batch`, sdpa",
    "padded_sdpa": "`model.generate`, sdpa, padded",
}


def transformers(results: Path) -> str:
    """Tokens per second and memory of models of transformers."""
    header = [
        *("model", "way", "tokens/s", "to padded", "tokens per second of CPU time"),
        *("MiB besides the model", "texts as padded", "largest gap"),
    ]
    rows = []
    for path in sorted(results.glob("transformers-*.jsonl")):
        found = read_rows(path)
        base = {row["model"]: row for row in found if row["contestant"] == "padded_sdpa"}
        for row in found:
            ratio = row["tokens_per_s"] / base[row["model"]]["tokens_per_s"]
            rows.append(
                [
                    f"{row['model']}, {path.stem.removeprefix('transformers-').upper()}",
                    WAYS[row["contestant"]],
                    f"{row['tokens_per_s']:.1f}",
                    f"{ratio:.2f}",
                    f"{row['tokens_per_cpu_s']:.1f}" if row["device"] == "cpu" else "",
                    f"{row['peak_mib'] - row['loaded_mib']:.0f}",
                    f"{row['equal_texts']} of {row['num_requests']}",
                    f"{100 * row['largest_gap']:.1f} %" if row["largest_gap"] else "0",
                ]
            )
    return format_table(header, rows, numbers=len(header) - 2)


TEXTS = {
    "time_machine": "a story",
    "candle": "science",
    "earnest": "a play",
    "documentation": "documentation",
}


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
