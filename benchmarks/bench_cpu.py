"""Octavo's CPU operators beside PyTorch's, in one run on the same threads.

    python benchmarks/bench_cpu.py [--threads 2] [--rounds 30] [--json rows.jsonl]

Decode: one token a sequence over a paged cache (pages of 16 tokens, shuffled), against
scaled_dot_product_attention on the same keys and values laid out contiguously, called in three ways: with
enable_gqa, with the KV heads repeated beforehand (not timed), and with the heads of a group passed as query
tokens of their KV head; the inputs rotate over more than the last-level cache, as the layers of a model do.
Beside them PyTorch adds up as many bytes, on the same threads: the rate of that read is in each row, and so
it is with linear layers.
Prefill: one causal sequence. Training: the same, forward and backward. Linear layers: a few rows times
weights that rotate likewise, against PyTorch and, in float32, NumPy. Every output is compared with the tests'
oracle, in float64, and so are the gradients of one KV head.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import _support_path  # noqa: F401
import numpy as np
import torch
from _check import Sample
from _command import Parser
from _inputs import Inputs, as_dense, make_inputs
from _report import write_rows
from torch.nn.functional import linear, scaled_dot_product_attention

import octavo
from octavo import _core
from support import oracle
from support.benchmark_cases import CPU_TABLE
from support.case import Case
from support.oracle_backward import Backward

ROTATED_BYTES = 256 << 20
LAYERS = ((4096, 4096), (576, 576), (1536, 576), (49152, 576))  # [N, K] of weights
ROWS_OF_LAYERS = (1, 4, 16)
FORWARD_AND_BACKWARD = 3.5  # seven products, to two of the forward

Call = Callable[[], torch.Tensor]


@dataclass
class Row:
    case: str
    dtype: str
    implementation: str
    best_ms: float
    median_ms: float
    rate: float  # of the best
    rate_unit: str  # GB/s of keys and values or of weights read, or GFLOP/s of visible scores
    max_error: float  # against float64; of gradients relative to the largest number of each
    threads: int
    isa: str
    # GB/s of a sum over as many bytes, in the same turns; decode and linear layers have it.
    read_rate: float | None = None


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


def octavo_call(case: Case, inputs: Inputs) -> Call:
    if case.page_size > 0:
        arrays = (inputs.q, inputs.k, inputs.v, inputs.page_table, inputs.seq_lens)
        return lambda: octavo.paged_attention(*arrays)
    dense = as_dense(case, inputs.q, inputs.k, inputs.v)
    return lambda: octavo.attention(*dense, causal=True).transpose(1, 2)


def heads_first(case: Case, inputs: Inputs) -> list[torch.Tensor]:
    """q, k and v as PyTorch takes them, contiguous: [batch, heads, seqlen, head_dim]."""
    keys_and_values = [inputs.keys_and_values(case, b) for b in range(case.batch)]
    k, v = (torch.stack(parts) for parts in zip(*keys_and_values, strict=True))
    (q,) = as_dense(case, inputs.q)
    return [x.transpose(1, 2).contiguous() for x in (q, k, v)]


def torch_gqa(case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Call:
    is_causal = not case.is_decode  # a mask of PyTorch's begins at the first key
    return lambda: scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True)


def torch_repeated(case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Call:
    k, v = (x.repeat_interleave(case.group_size, dim=1) for x in (k, v))
    return lambda: scaled_dot_product_attention(q, k, v)


def torch_group_as_tokens(case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Call:
    q = q.view(case.batch, case.num_kv_heads, case.group_size, case.head_dim)
    return lambda: scaled_dot_product_attention(q, k, v)


def read_call(*arrays: torch.Tensor) -> Call:
    """Adds up the bytes of keys and values, or of weights, as numbers of float32, whatever they are."""
    numbers = [array.view(torch.float32) for array in arrays]
    return lambda: sum(x.sum() for x in numbers)


def bench(case: Case, rounds: int) -> list[Row]:
    num_copies = max(2, ROTATED_BYTES // case.kv_bytes) if case.is_decode else 1
    copies = [make_inputs(case, "cpu") for _ in range(num_copies)]
    contiguous = [heads_first(case, inputs) for inputs in copies]
    calls = {
        "octavo paged" if case.page_size > 0 else "octavo": [octavo_call(case, inputs) for inputs in copies],
        "torch enable_gqa": [torch_gqa(case, *arrays) for arrays in contiguous],
    }
    if case.is_decode:
        calls["torch repeated heads"] = [torch_repeated(case, *arrays) for arrays in contiguous[:2]]
        calls["torch group as tokens"] = [torch_group_as_tokens(case, *arrays) for arrays in contiguous]
    sample = Sample(case, copies[0])
    reads = {"read": [read_call(k, v) for _, k, v in contiguous]} if case.is_decode else {}
    times = time_all({**reads, **calls}, rounds if case.is_decode else max(3, rounds // 3))
    read_rate = round(case.kv_bytes / 1e6 / min(times["read"]), 1) if reads else None
    rows = [make_row(case, name, times[name], error_of(case, sample, calls[name][0]())) for name in calls]
    return [replace(row, read_rate=read_rate) for row in rows]


def octavo_training(case: Case, inputs: Inputs, dout: torch.Tensor) -> Callable[[], tuple[torch.Tensor, ...]]:
    q, k, v, dout = as_dense(case, inputs.q, inputs.k, inputs.v, dout)

    def train() -> tuple[torch.Tensor, ...]:
        results = octavo.attention(q, k, v, causal=True, return_lse=True)
        return octavo.attention_backward(dout, q, k, v, *results, causal=True)

    return train


def torch_training(case: Case, inputs: Inputs, dout: torch.Tensor) -> Callable[[], tuple[torch.Tensor, ...]]:
    arrays = [x.requires_grad_() for x in heads_first(case, inputs)]
    (dout,) = (x.transpose(1, 2).contiguous() for x in as_dense(case, dout))

    def train() -> tuple[torch.Tensor, ...]:
        out = scaled_dot_product_attention(*arrays, is_causal=True, enable_gqa=True)
        return tuple(x.transpose(1, 2) for x in torch.autograd.grad(out, arrays, dout))

    return train


def bench_training(case: Case, rounds: int) -> list[Row]:
    with torch.inference_mode(False), torch.enable_grad():
        inputs = make_inputs(case, "cpu")
        dout = torch.randn(inputs.q.shape).to(inputs.q.dtype)
        calls = {
            "octavo": octavo_training(case, inputs, dout),
            "torch enable_gqa": torch_training(case, inputs, dout),
        }
        exact = exact_gradients(case, inputs, dout)
        times = time_all({name: [call] for name, call in calls.items()}, max(3, rounds // 3))
        case = replace(case, name=case.name.replace("prefill", "training"))
        work = FORWARD_AND_BACKWARD * case.flops / 1e6
        return [
            make_row(case, name, times[name], gradient_error(call(), exact), (work, "GFLOP/s"))
            for name, call in calls.items()
        ]


def exact_gradients(case: Case, inputs: Inputs, dout: torch.Tensor) -> list[np.ndarray]:
    """dq, dk and dv of the first KV head in float64."""
    of_queries, of_keys = slice(case.group_size), slice(1)
    q, dout = (x[:, of_queries].double().numpy() for x in (inputs.q, dout))
    k, v = (x[:, of_keys].double().numpy() for x in (inputs.k, inputs.v))
    (sequence,) = oracle.sequences(case.group_size, case.seqlens_q, case.seqlens_k, causal=True)
    scale, dlse = case.head_dim**-0.5, np.zeros(q.shape[:2])
    return list(Backward(q, k, v, dout, dlse, sequence, scale, 0.0).gradients())[:3]


def gradient_error(gradients: Sequence[torch.Tensor], exact: Sequence[np.ndarray]) -> float:
    return max(
        float(np.abs(found[0, :, : true.shape[1]].double().numpy() - true).max() / np.abs(true).max())
        for found, true in zip(gradients, exact, strict=True)
    )


def error_of(case: Case, sample: Sample, result: torch.Tensor) -> float:
    """The error of a result [batch, heads, seqlen, head_dim], however its axes are put together."""
    by_head = result.reshape(case.batch, case.num_q_heads, -1, case.head_dim)
    out = by_head.transpose(1, 2).flatten(0, 1)
    return float(np.abs(sample.of(out) - sample.reference.out).max())


def bench_layer(width: int, depth: int, num_rows: int, dtype: str, rounds: int) -> list[Row]:
    kind: torch.dtype = getattr(torch, dtype)
    num_bytes = width * depth * kind.itemsize
    weights = torch.randn(max(2, ROTATED_BYTES // num_bytes), width, depth, dtype=kind)
    x = torch.randn(num_rows, depth, dtype=kind)
    calls: dict[str, list[Call]] = {
        "octavo": [lambda w=w: octavo.linear(x, w) for w in weights],
        "torch": [lambda w=w: linear(x, w) for w in weights],
    }
    if dtype == "float32":
        calls["numpy"] = [lambda w=w: torch.from_numpy(x.numpy() @ w.numpy().T) for w in weights]
    exact = x.double() @ weights[0].double().T
    times = time_all({"read": [read_call(w) for w in weights], **calls}, rounds)
    read_rate = round(num_bytes / 1e6 / min(times["read"]), 1)
    return [
        Row(
            f"linear {width}x{depth}, {num_rows} rows",
            dtype,
            name,
            round(min(times[name]), 4),
            round(statistics.median(times[name]), 4),
            round(num_bytes / 1e6 / min(times[name]), 1),
            "GB/s",
            float((copies[0]().double() - exact).abs().max()),
            octavo.get_num_threads(),
            _core.cpu_info()["isa"],
            read_rate,
        )
        for name, copies in calls.items()
    ]


def make_row(
    case: Case, name: str, times: list[float], error: float, work_and_unit: tuple[float, str] | None = None
) -> Row:
    of_forward = (case.kv_bytes / 1e6, "GB/s") if case.is_decode else (case.flops / 1e6, "GFLOP/s")
    work, unit = work_and_unit or of_forward
    return Row(
        case.name,
        case.dtype,
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
        of_read = "" if r.read_rate is None else f"{r.rate / r.read_rate:.2f}"
        cells = (r.case, r.dtype, r.implementation, times, of_read, f"{r.max_error:.1e}")
        print(f"| {' | '.join(cells)} |", flush=True)
    return rows


def read_bandwidth() -> float:
    """GB/s of the fastest sum over an array that no cache holds."""
    x = torch.ones(ROTATED_BYTES // 4)
    times = time_all({"sum": [x.sum]}, 10)["sum"]
    return ROTATED_BYTES / min(times) / 1e6


def main() -> int:
    parser = Parser(__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=30, help="timed calls a case; prefill: a third")
    parser.add_argument("--json", type=Path, help="write one JSON object a line here")
    args = parser.parse_args()

    torch.manual_seed(0)
    torch.set_num_threads(args.threads)
    octavo.set_num_threads(args.threads)
    rows: list[Row] = []
    with torch.inference_mode():
        print(f"{args.threads} threads, {_core.cpu_info()['isa']}, torch {torch.__version__},", end=" ")
        print(f"reads {read_bandwidth():.1f} GB/s\n")
        print("| case | dtype | implementation | best ms | median ms | rate | to the read's | max error |")
        print("|---|---|---|---:|---:|---:|---:|---:|")
        for dtype in "float32", "bfloat16", "float16":
            for case in (replace(case, dtype=dtype) for case in CPU_TABLE):
                if dtype == "float16" and not case.is_decode:
                    continue  # PyTorch takes minutes
                rows += show(bench(case, args.rounds))
                if not case.is_decode:
                    rows += show(bench_training(case, args.rounds))
        for dtype in "float32", "bfloat16", "float16":
            for (width, depth), num_rows in itertools.product(LAYERS, ROWS_OF_LAYERS):
                rows += show(bench_layer(width, depth, num_rows, dtype, args.rounds))
    if args.json:
        write_rows(args.json, [asdict(row) for row in rows])
    return 0


if __name__ == "__main__":
    sys.exit(main())
