"""What a call costs the host: time of octavo's operators on arrays so small that the kernel hardly counts.

    python benchmarks/bench_call.py [--calls 5000] [--rounds 9] [--json rows.jsonl]

paged_attention with `out=` on CPU arrays of each library, one head. `empty` has no sequence, so that its
time is that of taking the arrays, checking them and returning; `tiny` has one of one token, which the kernel
computes on one thread. `octavo.torch` goes through PyTorch's dispatcher. The best round is reported, and the
median.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import timeit
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

import octavo

HEAD_DIM, PAGE_SIZE = 64, 16


@dataclass
class Row:
    case: str
    library: str
    version: str
    best_us: float
    median_us: float


def make_arrays(batch: int) -> tuple[list[np.ndarray], np.ndarray]:
    """The five arrays of paged_attention, and `out`."""
    q = np.ones((batch, 1, HEAD_DIM), np.float32)
    pages = np.ones((1, PAGE_SIZE, 1, HEAD_DIM), np.float32)
    page_table, seq_lens = np.zeros((batch, 1), np.int32), np.ones(batch, np.int32)
    return [q, pages, pages.copy(), page_table, seq_lens], np.empty_like(q)


def contestants() -> Iterator[tuple[str, str, Callable[..., Any], Callable[[np.ndarray], Any]]]:
    """Name, version, operator and how its arrays are made."""
    yield "numpy", np.__version__, octavo.paged_attention, np.asarray
    if importlib.util.find_spec("torch"):
        import torch

        from octavo.torch import paged_attention

        yield "torch", torch.__version__, octavo.paged_attention, torch.from_numpy
        yield "octavo.torch", torch.__version__, paged_attention, torch.from_numpy


def measure(num_calls: int, rounds: int) -> Iterator[Row]:
    for case, batch in (("empty", 0), ("tiny", 1)):
        for library, version, operator, convert in contestants():
            arrays, out = make_arrays(batch)
            q, k_pages, v_pages, page_table, seq_lens = map(convert, arrays)
            result = convert(out)

            def call(op=operator, q=q, k=k_pages, v=v_pages, table=page_table, lens=seq_lens, out=result):
                op(q, k, v, table, lens, out=out)

            call()
            times = [
                seconds / num_calls * 1e6 for seconds in timeit.repeat(call, number=num_calls, repeat=rounds)
            ]
            assert (out == 1).all()
            yield Row(case, library, version, min(times), statistics.median(times))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--calls", type=int, default=5000, help="calls in a round")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path, help="append one row a case to this file")
    arguments = parser.parse_args()
    octavo.set_num_threads(1)
    for row in measure(arguments.calls, arguments.rounds):
        print(f"{row.case:6} {row.library:13} best {row.best_us:6.2f} us   median {row.median_us:6.2f} us")
        if arguments.json:
            with arguments.json.open("a") as file:
                file.write(json.dumps(asdict(row)) + "\n")


if __name__ == "__main__":
    main()
