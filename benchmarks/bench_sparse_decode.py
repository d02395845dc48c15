"""Decoding over chosen pages on an NVIDIA GPU beside the same call over all pages, in one run.

    python benchmarks/bench_sparse_decode.py --json sparse-decode.jsonl

bfloat16, 32 query heads, 8 KV heads of dim 128. Each KV head has a random choice of its own, the newest page
among it. A time is the median over replays of a CUDA graph, divided by its calls, which rotate over copies of
all inputs, more than twice the L2 cache in what they read; the graphs take turns. The result of some
sequences is compared with float32: a wrong one gets no time, and fails the run.

floor = 3 us + bytes that the choice leaves to read / read bandwidth measured in the same run.
"""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from typing import Any

import torch
from _command import Table, on_machine
from _report import floor_us
from _timing import copies_beyond, l2_cache_bytes, time_in_turns

import octavo

NUM_Q_HEADS, NUM_KV_HEADS, HEAD_DIM = 32, 8, 128
GROUP_SIZE = NUM_Q_HEADS // NUM_KV_HEADS


@dataclass(frozen=True)
class SparseCase:
    batch: int
    length: int
    page_size: int
    kept: float  # of the pages
    alibi: bool = False

    @property
    def name(self) -> str:
        options = "_alibi" if self.alibi else ""
        return f"b{self.batch}_s{self.length}_p{self.page_size}_{100 * self.kept:g}%{options}"

    @property
    def num_bytes(self) -> int:
        """The bytes of the keys and values that the choice leaves to read."""
        return round(self.kept * self.length) * self.batch * NUM_KV_HEADS * HEAD_DIM * 2 * 2


CASES = (
    SparseCase(32, 8192, 16, 0.25),
    SparseCase(32, 8192, 64, 0.25),
    SparseCase(32, 8192, 16, 0.0625),
    SparseCase(32, 8192, 16, 1.0),
    SparseCase(32, 8192, 16, 0.25, alibi=True),
    SparseCase(32, 8192, 1, 0.25),
    SparseCase(1, 131072, 16, 0.03125),
    SparseCase(1, 32768, 16, 0.25),
    SparseCase(8, 32768, 64, 0.0625),
)


def make_inputs(case: SparseCase) -> dict[str, Any]:
    batch, length, page_size = case.batch, case.length, case.page_size
    columns, seq_len = length // page_size, length - page_size // 2  # the newest page is partly filled
    num_chosen = round(case.kept * columns)
    pages = torch.empty(
        (2, batch * columns, page_size, NUM_KV_HEADS, HEAD_DIM), device="cuda", dtype=torch.bfloat16
    ).normal_()
    random = torch.rand((batch, NUM_KV_HEADS, columns), device="cuda")
    random[:, :, -1] = 2.0  # the newest page
    slopes = 2.0 ** -torch.linspace(0.25, 8.0, NUM_Q_HEADS, device="cuda")
    return {
        "q": torch.randn((batch, NUM_Q_HEADS, HEAD_DIM), device="cuda", dtype=torch.bfloat16),
        "k_pages": pages[0],
        "v_pages": pages[1],
        "page_table": torch.randperm(batch * columns, device="cuda").int().reshape(batch, columns),
        "seq_lens": torch.full((batch,), seq_len, device="cuda", dtype=torch.int32),
        "chosen_pages": random.topk(num_chosen, dim=2).indices.sort(dim=2).values.int(),
        **({"alibi_slopes": slopes} if case.alibi else {}),
    }


def error_of(case: SparseCase, inputs: dict[str, Any], out: Any) -> float:
    """The largest difference from float32, relative to the largest result, in two sequences."""
    page_size, errors = case.page_size, []
    for b in {0, case.batch - 1}:
        for h in range(NUM_KV_HEADS):
            chosen = inputs["chosen_pages"][b, h].long()
            positions = (chosen[:, None] * page_size + torch.arange(page_size, device="cuda")).flatten()
            ids = inputs["page_table"][b, chosen].long()
            k, v = (inputs[name][ids, :, h].float().flatten(0, 1) for name in ("k_pages", "v_pages"))
            heads = slice(h * GROUP_SIZE, (h + 1) * GROUP_SIZE)
            scores = inputs["q"][b, heads].float() @ k.T * HEAD_DIM**-0.5
            length = int(inputs["seq_lens"][b])
            if case.alibi:
                scores -= inputs["alibi_slopes"][heads, None] * (length - 1 - positions)
            scores = scores.masked_fill(positions >= length, -torch.inf)
            wanted = torch.softmax(scores, -1) @ v
            errors.append(((out[b, heads].float() - wanted).abs().max() / wanted.abs().max()).item())
    return max(errors)


def measure(case: SparseCase, rounds: int, read_bandwidth: float) -> dict[str, Any]:
    copies = [make_inputs(case) for _ in range(copies_beyond(l2_cache_bytes(), case.num_bytes))]
    out = octavo.paged_attention(**copies[0])
    row = {"name": case.name, **asdict(case), "num_bytes": case.num_bytes}
    row["error"] = error_of(case, copies[0], out)
    row["kernel"] = octavo.explain("paged_attention", **copies[0]).kernel
    if not row["error"] < 2e-2:
        return {**row, "wrong": True}
    dense = [{name: x for name, x in inputs.items() if name != "chosen_pages"} for inputs in copies]
    calls = {
        "dense_us": [lambda x=x: octavo.paged_attention(**x) for x in dense],
        "sparse_us": [lambda x=x: octavo.paged_attention(**x) for x in copies],
    }
    row.update(time_in_turns(calls, 100.0, rounds))
    row["floor_us"] = floor_us(case.num_bytes, read_bandwidth)
    row["ratio"] = row["sparse_us"] / row["dense_us"]
    return row


TABLE = Table(
    __doc__,
    CASES,
    on_machine(measure),
    {
        "case": lambda row: row["name"],
        "all pages, us": lambda row: f"{row['dense_us']:.1f}",
        "chosen ones, us": lambda row: f"{row['sparse_us']:.1f}",
        "ratio": lambda row: f"{row['ratio']:.3f}",
        "floor, us": lambda row: f"{row['floor_us']:.1f}",
        "of the floor": lambda row: f"{row['sparse_us'] / row['floor_us']:.2f}",
    },
)

if __name__ == "__main__":
    sys.exit(TABLE.main())
