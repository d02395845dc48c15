"""Block-sparse attention on an NVIDIA GPU beside the same call without a mask, in one run.

    python benchmarks/bench_block_sparse.py --json block-sparse.jsonl

bfloat16, 16 heads of one sequence. Each row of blocks keeps the same share of those that the causal mask
leaves, at random, and a block at least. A time is the median over replays of a CUDA graph; the graphs take
turns. Some rows of the result are compared with float32: a wrong one gets no time, and fails the run.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import Any

import torch
from _report import write_rows
from _timing import capture, repeats_for, replay_times

import octavo

HEADS = 16


def select(pattern: re.Pattern[str] | None) -> list[dict[str, Any]]:
    cases = [
        {
            "name": f"d{head_dim}_{'causal' if causal else 'full'}_b{size}_{length}_{round(100 * kept)}%",
            "head_dim": head_dim,
            "causal": causal,
            "block_size": size,
            "length": length,
            "kept": kept,
        }
        for head_dim in (128, 64)
        for causal in (True, False)
        for size in (128, 64)
        for length, kept in ((16384, 0.25), (16384, 0.5), (16384, 1.0))
    ]
    return [case for case in cases if pattern is None or pattern.search(case["name"])]


def make_mask(case: dict[str, Any]) -> torch.Tensor:
    """[HEADS, blocks, blocks]: of each row's blocks, `kept` in all."""
    count = case["length"] // case["block_size"]
    random = torch.rand((HEADS, count, count), generator=torch.Generator().manual_seed(0))
    seen = torch.ones(count, count, dtype=torch.bool)
    if case["causal"]:
        seen = seen.tril()
    random = random.masked_fill(~seen, 2.0)
    wanted = (case["kept"] * seen.sum(1)).round().clamp(min=1).long()
    order = random.argsort(dim=2).argsort(dim=2)
    return ((order < wanted[:, None]) & seen).cuda()


def error_of(case: dict[str, Any], q: Any, k: Any, v: Any, mask: Any, out: Any) -> float:
    """The largest difference from float32 in some rows."""
    rows = torch.arange(7, case["length"], case["length"] // 50 + 1, device="cuda")
    scores = torch.einsum("nhd,mhd->hnm", q[0, rows].float(), k[0].float()) * case["head_dim"] ** -0.5
    size = case["block_size"]
    see = mask[:, rows // size].repeat_interleave(size, dim=2)
    if case["causal"]:
        see = see & (torch.arange(case["length"], device="cuda") <= rows[:, None])
    weights = torch.softmax(scores.masked_fill(~see, -torch.inf), -1).nan_to_num(0.0)
    wanted = torch.einsum("hnm,mhd->nhd", weights, v[0].float())
    return (out[0, rows].float() - wanted).abs().max().item()


def measure(case: dict[str, Any], rounds: int) -> dict[str, Any]:
    shape = (1, case["length"], HEADS, case["head_dim"])
    q, k, v, dout = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    mask = make_mask(case)
    options: dict[str, Any] = {"causal": case["causal"]}
    blocks = {**options, "block_mask": mask, "block_size": case["block_size"]}
    results = {
        "dense": octavo.attention(q, k, v, return_lse=True, **options),
        "sparse": octavo.attention(q, k, v, return_lse=True, **blocks),
    }
    row = {**case, "kernel": octavo.explain("attention", q, k, v, **blocks).kernel}
    row["error"] = error_of(case, q, k, v, mask, results["sparse"][0])
    if not row["error"] < 2e-2:
        return {**row, "wrong": True}
    calls = {
        "dense_us": lambda: octavo.attention(q, k, v, **options),
        "sparse_us": lambda: octavo.attention(q, k, v, **blocks),
        "dense_backward_us": lambda: octavo.attention_backward(dout, q, k, v, *results["dense"], **options),
        "sparse_backward_us": lambda: octavo.attention_backward(dout, q, k, v, *results["sparse"], **blocks),
    }
    repeats = repeats_for(1, 500.0)
    graphs = {name: capture([call], repeats) for name, call in calls.items()}
    row.update({name: time / repeats for name, time in replay_times(graphs, rounds).items()})
    row["ratio"] = row["sparse_us"] / row["dense_us"]
    row["backward_ratio"] = row["sparse_backward_us"] / row["dense_backward_us"]
    return row


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", metavar="REGEX", type=re.compile, help="only rows whose name it finds")
    parser.add_argument("--list", action="store_true", help="print the rows; needs no GPU")
    parser.add_argument("--quick", action="store_true", help="5 replays instead of 31")
    parser.add_argument("--json", metavar="PATH", type=Path, help="write one JSON object a row here")
    args = parser.parse_args(argv)
    cases = select(args.rows)
    if args.list:
        print(*(case["name"] for case in cases), sep="\n")
        return 0
    rows = []
    print("| case | without a mask, us | with it, us | ratio | gradients without, us | with, us | ratio |")
    print("|---|--:|--:|--:|--:|--:|--:|")
    for case in cases:
        row = measure(case, 5 if args.quick else 31)
        rows.append(row)
        if "wrong" in row:
            print(f"| {row['name']} | wrong: off by {row['error']:.3g} |")
            continue
        print(
            f"| {row['name']} | {row['dense_us']:.0f} | {row['sparse_us']:.0f} | {row['ratio']:.3f} | "
            f"{row['dense_backward_us']:.0f} | {row['sparse_backward_us']:.0f} | "
            f"{row['backward_ratio']:.3f} |",
            flush=True,
        )
    if args.json:
        write_rows(args.json, rows)
    return 1 if any("wrong" in row for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
