"""Decoding over chosen pages on an NVIDIA GPU beside the same call over all pages, in one run.

    python benchmarks/bench_sparse_decode.py --json sparse-decode.jsonl

bfloat16, 32 query heads, 8 KV heads of dim 128. Each KV head has a random choice of its own, the newest page
among it. A time is the median over replays of a CUDA graph, divided by its calls, which rotate over copies of
all inputs, more than twice the L2 cache in what they read; the graphs take turns. The result of some
sequences is compared with float32: a wrong one gets no time, and fails the run.

floor = 3 us + bytes that the choice leaves to read / read bandwidth measured in the same run.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import Any

import _support_path  # noqa: F401
import torch
from _report import floor_us, write_rows
from _timing import capture, repeats_for, replay_times

import octavo

NUM_Q_HEADS, NUM_KV_HEADS, HEAD_DIM = 32, 8, 128
GROUP_SIZE = NUM_Q_HEADS // NUM_KV_HEADS


def select(pattern: re.Pattern[str] | None) -> list[dict[str, Any]]:
    cases = [
        {
            "name": f"b{batch}_s{length}_p{page_size}_{100 * kept:g}%{'_alibi' if alibi else ''}",
            "batch": batch,
            "length": length,
            "page_size": page_size,
            "kept": kept,
            "alibi": alibi,
        }
        for batch, length, page_size, kept, alibi in (
            (32, 8192, 16, 0.25, False),
            (32, 8192, 64, 0.25, False),
            (32, 8192, 16, 0.0625, False),
            (32, 8192, 16, 1.0, False),
            (32, 8192, 16, 0.25, True),
            (32, 8192, 1, 0.25, False),
            (1, 131072, 16, 0.03125, False),
            (1, 32768, 16, 0.25, False),
            (8, 32768, 64, 0.0625, False),
        )
    ]
    return [case for case in cases if pattern is None or pattern.search(case["name"])]


def make_inputs(case: dict[str, Any]) -> dict[str, Any]:
    batch, length, page_size = case["batch"], case["length"], case["page_size"]
    columns, seq_len = length // page_size, length - page_size // 2  # the newest page is partly filled
    num_chosen = round(case["kept"] * columns)
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
        **({"alibi_slopes": slopes} if case["alibi"] else {}),
    }


def error_of(case: dict[str, Any], inputs: dict[str, Any], out: Any) -> float:
    """The largest difference from float32, relative to the largest result, in two sequences."""
    page_size, errors = case["page_size"], []
    for b in {0, case["batch"] - 1}:
        for h in range(NUM_KV_HEADS):
            chosen = inputs["chosen_pages"][b, h].long()
            positions = (chosen[:, None] * page_size + torch.arange(page_size, device="cuda")).flatten()
            ids = inputs["page_table"][b, chosen].long()
            k, v = (inputs[name][ids, :, h].float().flatten(0, 1) for name in ("k_pages", "v_pages"))
            heads = slice(h * GROUP_SIZE, (h + 1) * GROUP_SIZE)
            scores = inputs["q"][b, heads].float() @ k.T * HEAD_DIM**-0.5
            length = int(inputs["seq_lens"][b])
            if case["alibi"]:
                scores -= inputs["alibi_slopes"][heads, None] * (length - 1 - positions)
            scores = scores.masked_fill(positions >= length, -torch.inf)
            wanted = torch.softmax(scores, -1) @ v
            errors.append(((out[b, heads].float() - wanted).abs().max() / wanted.abs().max()).item())
    return max(errors)


def measure(case: dict[str, Any], rounds: int, read_bandwidth: float) -> dict[str, Any]:
    tokens = round(case["kept"] * case["length"]) * case["batch"]
    num_bytes = tokens * NUM_KV_HEADS * HEAD_DIM * 2 * 2
    l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size
    copies = [make_inputs(case) for _ in range(2 * l2_bytes // num_bytes + 1)]
    out = octavo.paged_attention(**copies[0])
    row = {**case, "num_bytes": num_bytes, "error": error_of(case, copies[0], out)}
    row["kernel"] = octavo.explain("paged_attention", **copies[0]).kernel
    if not row["error"] < 2e-2:
        return {**row, "wrong": True}
    dense = [{name: x for name, x in inputs.items() if name != "chosen_pages"} for inputs in copies]
    repeats = repeats_for(len(copies), 100.0)
    graphs = {
        "dense_us": capture([lambda x=x: octavo.paged_attention(**x) for x in dense], repeats),
        "sparse_us": capture([lambda x=x: octavo.paged_attention(**x) for x in copies], repeats),
    }
    times = replay_times(graphs, rounds)
    row.update({name: time / repeats / len(copies) for name, time in times.items()})
    row["floor_us"] = floor_us(num_bytes, read_bandwidth)
    row["ratio"] = row["sparse_us"] / row["dense_us"]
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
    from _device import describe_machine

    rounds = 5 if args.quick else 31
    machine = describe_machine(min(rounds, 9))
    rows = []
    print("| case | all pages, us | chosen ones, us | ratio | floor, us | of the floor |")
    print("|---|--:|--:|--:|--:|--:|")
    for case in cases:
        row = measure(case, rounds, machine.read_bandwidth)
        rows.append(row)
        if "wrong" in row:
            print(f"| {row['name']} | wrong: off by {row['error']:.3g} |")
            continue
        print(
            f"| {row['name']} | {row['dense_us']:.1f} | {row['sparse_us']:.1f} | {row['ratio']:.3f} | "
            f"{row['floor_us']:.1f} | {row['sparse_us'] / row['floor_us']:.2f} |",
            flush=True,
        )
    if args.json:
        write_rows(args.json, rows)
    return 1 if any("wrong" in row for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
