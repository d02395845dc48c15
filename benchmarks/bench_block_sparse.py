"""Block-sparse attention on an NVIDIA GPU beside the same call without a mask, in one run.

    python benchmarks/bench_block_sparse.py --json block-sparse.jsonl

bfloat16, 16 heads of one sequence. Each row of blocks keeps the same share of those that the causal mask
leaves, at random, and a block at least. A time is the median over replays of a CUDA graph; the graphs take
turns. Some rows of the result are compared with float32: a wrong one gets no time, and fails the run.
"""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from typing import Any

import torch
from _command import Table, on_machine
from _timing import time_in_turns

import octavo

HEADS = 16


@dataclass(frozen=True)
class BlockSparseCase:
    head_dim: int
    causal: bool
    block_size: int
    length: int
    kept: float  # of the blocks that the causal mask leaves

    @property
    def name(self) -> str:
        mask = "causal" if self.causal else "full"
        return f"d{self.head_dim}_{mask}_b{self.block_size}_{self.length}_{round(100 * self.kept)}%"


CASES = [
    BlockSparseCase(head_dim, causal, size, 16384, kept)
    for head_dim in (128, 64)
    for causal in (True, False)
    for size in (128, 64)
    for kept in (0.25, 0.5, 1.0)
]


def make_mask(case: BlockSparseCase) -> torch.Tensor:
    """[HEADS, blocks, blocks]: of each row's blocks, `kept` in all."""
    count = case.length // case.block_size
    random = torch.rand((HEADS, count, count), generator=torch.Generator().manual_seed(0))
    seen = torch.ones(count, count, dtype=torch.bool)
    if case.causal:
        seen = seen.tril()
    random = random.masked_fill(~seen, 2.0)
    wanted = (case.kept * seen.sum(1)).round().clamp(min=1).long()
    order = random.argsort(dim=2).argsort(dim=2)
    return ((order < wanted[:, None]) & seen).cuda()


def error_of(case: BlockSparseCase, q: Any, k: Any, v: Any, mask: Any, out: Any) -> float:
    """The largest difference from float32 in some rows."""
    rows = torch.arange(7, case.length, case.length // 50 + 1, device="cuda")
    scores = torch.einsum("nhd,mhd->hnm", q[0, rows].float(), k[0].float()) * case.head_dim**-0.5
    size = case.block_size
    see = mask[:, rows // size].repeat_interleave(size, dim=2)
    if case.causal:
        see = see & (torch.arange(case.length, device="cuda") <= rows[:, None])
    weights = torch.softmax(scores.masked_fill(~see, -torch.inf), -1).nan_to_num(0.0)
    wanted = torch.einsum("hnm,mhd->nhd", weights, v[0].float())
    return (out[0, rows].float() - wanted).abs().max().item()


def measure(case: BlockSparseCase, rounds: int, _: float) -> dict[str, Any]:
    shape = (1, case.length, HEADS, case.head_dim)
    q, k, v, dout = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    mask = make_mask(case)
    options: dict[str, Any] = {"causal": case.causal}
    blocks = {**options, "block_mask": mask, "block_size": case.block_size}
    results = {
        "dense": octavo.attention(q, k, v, return_lse=True, **options),
        "sparse": octavo.attention(q, k, v, return_lse=True, **blocks),
    }
    row = {"name": case.name, **asdict(case), "kernel": octavo.explain("attention", q, k, v, **blocks).kernel}
    row["error"] = error_of(case, q, k, v, mask, results["sparse"][0])
    if not row["error"] < 2e-2:
        return {**row, "wrong": True}
    calls = {
        "dense_us": lambda: octavo.attention(q, k, v, **options),
        "sparse_us": lambda: octavo.attention(q, k, v, **blocks),
        "dense_backward_us": lambda: octavo.attention_backward(dout, q, k, v, *results["dense"], **options),
        "sparse_backward_us": lambda: octavo.attention_backward(dout, q, k, v, *results["sparse"], **blocks),
    }
    row.update(time_in_turns({name: [call] for name, call in calls.items()}, 500.0, rounds))
    row["ratio"] = row["sparse_us"] / row["dense_us"]
    row["backward_ratio"] = row["sparse_backward_us"] / row["dense_backward_us"]
    return row


TABLE = Table(
    __doc__,
    CASES,
    on_machine(measure),
    {
        "case": lambda row: row["name"],
        "without a mask, us": lambda row: f"{row['dense_us']:.0f}",
        "with it, us": lambda row: f"{row['sparse_us']:.0f}",
        "ratio": lambda row: f"{row['ratio']:.3f}",
        "gradients without, us": lambda row: f"{row['dense_backward_us']:.0f}",
        "gradients with, us": lambda row: f"{row['sparse_backward_us']:.0f}",
        "ratio of gradients": lambda row: f"{row['backward_ratio']:.3f}",
    },
)

if __name__ == "__main__":
    sys.exit(TABLE.main())
