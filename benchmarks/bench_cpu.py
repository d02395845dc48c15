"""Octavo's CPU attention beside PyTorch's, in one run on the same threads.

    python benchmarks/bench_cpu.py [--threads 2] [--rounds 30] [--json rows.jsonl]

Decode: one token a sequence over a paged cache (pages of 16 tokens, shuffled), against
scaled_dot_product_attention on the same keys and values laid out contiguously, called in three ways: with
enable_gqa, with the KV heads repeated beforehand (not timed), and with the heads of a group passed as query
tokens of their KV head. Prefill: one causal sequence. Inputs rotate over more than the last-level cache, as
the layers of a model do. Every output is compared with a float64 oracle.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch.nn.functional import scaled_dot_product_attention

import octavo
from octavo import _core

NUM_Q_HEADS, NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE = 32, 8, 128, 16
GROUP_SIZE = NUM_Q_HEADS // NUM_KV_HEADS
ROTATED_BYTES = 256 << 20


@dataclass
class Row:
    case: str
    dtype: str
    implementation: str
    best_ms: float
    median_ms: float
    rate: float  # of the best
    rate_unit: str  # GB/s of keys and values read, or GFLOP/s of visible scores
    max_error: float  # against float64
    threads: int
    isa: str


def time_all(calls: Mapping[str, Sequence[Callable[[], object]]], rounds: int) -> dict[str, list[float]]:
    """Milliseconds of every call, each on the next copy of the inputs.

    One implementation after the other, with a pause between them: PyTorch's OpenMP threads spin for a while
    after a call and would keep a core from whoever comes next.
    """
    times: dict[str, list[float]] = {}
    for name, copies in calls.items():
        time.sleep(0.5)
        times[name] = []
        for i in range(-2, rounds):  # the first two warm up
            start = time.perf_counter()
            copies[i % len(copies)]()
            if i >= 0:
                times[name].append((time.perf_counter() - start) * 1e3)
    return times


def oracle(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    """q [batch, num_q_heads, seqlen_q, head_dim], k and v [batch, num_kv_heads, seqlen_k, head_dim]."""
    out = torch.empty(q.shape, dtype=torch.float64)
    for b in range(q.shape[0]):
        for h in range(NUM_Q_HEADS):
            keys, values = k[b, h // GROUP_SIZE].double(), v[b, h // GROUP_SIZE].double()
            scores = q[b, h].double() @ keys.T / math.sqrt(HEAD_DIM)
            if causal:
                hidden = torch.ones_like(scores, dtype=torch.bool).triu(1 + k.shape[2] - q.shape[2])
                scores.masked_fill_(hidden, -math.inf)
            out[b, h] = torch.softmax(scores, dim=-1) @ values
    return out


@dataclass
class Decode:
    """q [batch, num_q_heads, head_dim]; k and v [batch, num_kv_heads, seqlen, head_dim]."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor

    @classmethod
    def random(cls, batch: int, seqlen: int, dtype: torch.dtype) -> Decode:
        kv_shape = batch, NUM_KV_HEADS, seqlen, HEAD_DIM
        return cls(
            torch.randn(batch, NUM_Q_HEADS, HEAD_DIM).to(dtype),
            torch.randn(kv_shape).to(dtype),
            torch.randn(kv_shape).to(dtype),
        )

    def octavo(self) -> Callable[[], torch.Tensor]:
        batch, _, seqlen, _ = self.k.shape
        pages_each = seqlen // PAGE_SIZE
        page_table = torch.randperm(batch * pages_each).to(torch.int32).view(batch, pages_each)
        seq_lens = torch.full((batch,), seqlen, dtype=torch.int32)
        shape = batch * pages_each, PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM
        k_pages, v_pages = (torch.empty(shape, dtype=self.q.dtype) for _ in "kv")
        for pages, x in (k_pages, self.k), (v_pages, self.v):
            pages[page_table.flatten().long()] = x.transpose(1, 2).reshape(shape)
        return lambda: octavo.paged_attention(self.q, k_pages, v_pages, page_table, seq_lens)

    def torch_gqa(self) -> Callable[[], torch.Tensor]:
        q = self.q.unsqueeze(2)
        return lambda: scaled_dot_product_attention(q, self.k, self.v, enable_gqa=True)

    def torch_repeated(self) -> Callable[[], torch.Tensor]:
        q = self.q.unsqueeze(2)
        k, v = (x.repeat_interleave(GROUP_SIZE, dim=1) for x in (self.k, self.v))
        return lambda: scaled_dot_product_attention(q, k, v)

    def torch_group_as_tokens(self) -> Callable[[], torch.Tensor]:
        q = self.q.view(-1, NUM_KV_HEADS, GROUP_SIZE, HEAD_DIM)
        return lambda: scaled_dot_product_attention(q, self.k, self.v)


def bench_decode(batch: int, seqlen: int, dtype: torch.dtype, rounds: int) -> list[Row]:
    kv_bytes = 2 * batch * seqlen * NUM_KV_HEADS * HEAD_DIM * dtype.itemsize
    copies = [Decode.random(batch, seqlen, dtype) for _ in range(max(2, ROTATED_BYTES // kv_bytes))]
    calls: dict[str, list[Callable[[], torch.Tensor]]] = {
        "octavo paged": [c.octavo() for c in copies],
        "torch enable_gqa": [c.torch_gqa() for c in copies],
        "torch repeated heads": [c.torch_repeated() for c in copies[:2]],
        "torch group as tokens": [c.torch_group_as_tokens() for c in copies],
    }
    want = oracle(copies[0].q.unsqueeze(2), copies[0].k, copies[0].v, causal=False)
    times = time_all(calls, rounds)
    return [
        make_row(
            f"decode {batch} x {seqlen}",
            dtype,
            name,
            times[name],
            kv_bytes / 1e6,
            "GB/s",
            error_of(calls[name][0]().reshape(want.shape), want),
        )
        for name in calls
    ]


def bench_prefill(seqlen: int, dtype: torch.dtype, rounds: int) -> list[Row]:
    q = torch.randn(1, NUM_Q_HEADS, seqlen, HEAD_DIM).to(dtype)
    k, v = (torch.randn(1, NUM_KV_HEADS, seqlen, HEAD_DIM).to(dtype) for _ in "kv")
    tokens_first = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
    calls: dict[str, list[Callable[[], torch.Tensor]]] = {
        "octavo": [lambda: octavo.attention(*tokens_first, causal=True).transpose(1, 2)],
        "torch enable_gqa": [lambda: scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)],
    }
    want = oracle(q, k, v, causal=True)
    times = time_all(calls, rounds)
    flops = 4 * HEAD_DIM * NUM_Q_HEADS * seqlen * (seqlen + 1) / 2
    return [
        make_row(
            f"prefill 1 x {seqlen} causal",
            dtype,
            name,
            times[name],
            flops / 1e6,
            "GFLOP/s",
            error_of(calls[name][0](), want),
        )
        for name in calls
    ]


def error_of(got: torch.Tensor, want: torch.Tensor) -> float:
    return (got.double() - want).abs().max().item()


def make_row(
    case: str, dtype: torch.dtype, name: str, times: list[float], work: float, unit: str, error: float
) -> Row:
    return Row(
        case,
        str(dtype).removeprefix("torch."),
        name,
        round(min(times), 4),
        round(statistics.median(times), 4),
        round(work / min(times), 1),
        unit,
        error,
        octavo.get_num_threads(),
        _core.cpu_info()["isa"],
    )


def show(rows: list[Row]) -> list[Row]:
    for r in rows:
        times = f"{r.best_ms:.3f} | {r.median_ms:.3f} | {r.rate:.1f} {r.rate_unit}"
        print(f"| {r.case} | {r.dtype} | {r.implementation} | {times} | {r.max_error:.1e} |", flush=True)
    return rows


def read_bandwidth() -> float:
    """GB/s of the fastest sum over an array that no cache holds."""
    x = torch.ones(ROTATED_BYTES // 4)
    times = time_all({"sum": [x.sum]}, 10)["sum"]
    return ROTATED_BYTES / min(times) / 1e6


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=30, help="timed calls a decode case; prefill: a third")
    parser.add_argument("--json", type=Path, help="write one JSON object a line here")
    args = parser.parse_args()

    torch.manual_seed(0)
    torch.set_num_threads(args.threads)
    octavo.set_num_threads(args.threads)
    rows: list[Row] = []
    with torch.inference_mode():
        print(f"{args.threads} threads, {_core.cpu_info()['isa']}, torch {torch.__version__},", end=" ")
        print(f"reads {read_bandwidth():.1f} GB/s\n")
        print("| case | dtype | implementation | best ms | median ms | rate | max error |")
        print("|---|---|---|---:|---:|---:|---:|")
        for dtype in torch.float32, torch.bfloat16:
            for batch, seqlen in (1, 4096), (16, 1024):
                rows += show(bench_decode(batch, seqlen, dtype, args.rounds))
            rows += show(bench_prefill(2048, dtype, max(3, args.rounds // 3)))
    if args.json:
        args.json.write_text("".join(json.dumps(asdict(row)) + "\n" for row in rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
