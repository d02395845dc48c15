"""The committed rows of the benchmarks, and what all tables of them share. Needs no GPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from _report import read_rows

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
    "flashinfer fa2": "FlashInfer",  # its backends of latent attention
    "flashinfer fa3": "FlashInfer",
    "flashmla": "FlashMLA",
}

Row = dict[str, Any]


def file_name(benchmark: str, gpu: str) -> str:
    return f"{benchmark}-{gpu.lower()}.jsonl"


def load(results: Path, benchmark: str, gpu: str) -> list[Row]:
    """Read the rows of a file; there are none of a file that does not exist."""
    path = results / file_name(benchmark, gpu)
    return read_rows(path) if path.exists() else []


def gpus_with(results: Path, *benchmarks: str) -> list[str]:
    return [gpu for gpu in GPUS if any(load(results, benchmark, gpu) for benchmark in benchmarks)]


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]], numbers: int) -> str:
    """Make a table whose last columns, this many, are numbers."""
    lines = [f"| {' | '.join(cells)} |" for cells in (header, *rows)]
    return "\n".join([lines[0], "|" + "---|" * (len(header) - numbers) + "--:|" * numbers, *lines[1:]])


def rows_of(results: Path, benchmark: str) -> list[tuple[str, Row]]:
    """The rows of all GPUs, each with the GPU's name."""
    return [(gpu, row) for gpu in GPUS for row in load(results, benchmark, gpu)]


def best_peer(us: dict[str, float]) -> str | None:
    """Return the fastest of the peers that have a time."""
    return min(us.keys() & PEERS.keys(), key=us.__getitem__, default=None)
