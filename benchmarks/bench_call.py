"""What a call costs the host: time of operators on arrays so small that the kernel hardly counts.

    python benchmarks/bench_call.py [--device cpu|cuda] [--calls 400] [--rounds 50] [--json rows.jsonl]

paged_attention with `out=` on arrays of each library. On the CPU, one head: `empty` has no sequence, so that
its time is that of taking the arrays, checking them and returning; `tiny` has one of one token, which the
kernel computes on one thread. On a GPU, 32/8 heads of 128, one token: calls are asynchronous, and a round
fits the queue; beside them FlashAttention-3 and FlashInfer, where they can be imported (`plan` is what
FlashInfer does once a step), and functions of PyTorch. `octavo.torch` goes through PyTorch's dispatcher.
`KVCache` is `step.attend` of its step, of one sequence: append_kv and paged_attention; `both` is the two of
them on the same arrays, so that the difference is what a KVCache costs a layer. The best round is reported,
and the median.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import statistics
import timeit
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from _report import append_row

import octavo


@dataclass(frozen=True)
class Row:
    device: str
    case: str
    contestant: str
    version: str
    best_us: float
    median_us: float


@dataclass(frozen=True)
class Contestant:
    name: str
    version: str
    call: Callable[[], object]


def make_arrays(batch: int, heads: tuple[int, int], head_dim: int, dtype: str) -> list[np.ndarray]:
    """The five arrays of paged_attention, and `out`: all ones, one token a sequence."""
    q = np.ones((batch, heads[0], head_dim), dtype)
    pages = np.ones((1, 16, heads[1], head_dim), dtype)
    page_table, seq_lens = np.zeros((batch, 1), np.int32), np.ones(batch, np.int32)
    return [q, pages, pages.copy(), page_table, seq_lens, np.zeros_like(q)]


def on(
    arrays: list[Any], operator: Callable[..., Any], convert: Callable[[np.ndarray], Any]
) -> Callable[[], object]:
    q, k_pages, v_pages, page_table, seq_lens, out = map(convert, arrays)

    def call() -> object:
        return operator(q, k_pages, v_pages, page_table, seq_lens, out=out)

    call()
    assert (out == 1).all()
    return call


def with_a_cache(
    name: str,
    version: str,
    heads: tuple[int, int],
    head_dim: int,
    dtype: str,
    convert: Callable[[np.ndarray], Any],
) -> Iterator[Contestant]:
    """What `step.attend` takes, and what the two operators take that it calls."""
    q, _, _, _, _, out = (convert(x) for x in make_arrays(1, heads, head_dim, dtype))
    k, v = (convert(np.ones((1, heads[1], head_dim), dtype)) for _ in "kv")
    cache = octavo.KVCache(1, heads[1], head_dim, num_pages=1, max_batch=1, max_tokens=1, like=q)
    step = cache.step([cache.create()])
    pages = cache.layers[0].k_pages, cache.layers[0].v_pages
    tables = step.page_tables[0], step.seq_lens

    def both() -> object:
        octavo.append_kv(k, v, *pages, *tables)
        return octavo.paged_attention(q, *pages, *tables, out=out)

    def attend() -> object:
        return step.attend(0, q, k, v, out=out)

    for suffix, call in (("both", both), ("KVCache", attend)):
        out[:] = 0
        call()
        assert (out == 1).all()
        yield Contestant(f"{name} {suffix}", version, call)


def cpu_contestants(batch: int) -> Iterator[Contestant]:
    arrays = make_arrays(batch, (1, 1), 64, "float32")
    yield Contestant("numpy", np.__version__, on(arrays, octavo.paged_attention, np.asarray))
    if batch:
        yield from with_a_cache("numpy", np.__version__, (1, 1), 64, "float32", np.asarray)
    if importlib.util.find_spec("torch"):
        import torch

        from octavo.torch import paged_attention

        yield Contestant("torch", torch.__version__, on(arrays, octavo.paged_attention, torch.from_numpy))
        through = on(arrays, paged_attention, torch.from_numpy)
        yield Contestant("octavo.torch", torch.__version__, through)
        if batch:
            yield from with_a_cache("torch", torch.__version__, (1, 1), 64, "float32", torch.from_numpy)


def peers() -> Iterator[Contestant]:
    """FlashAttention-3 and FlashInfer."""
    import _support_path  # noqa: F401
    from _contestants import FlashInfer, Octavo, decode_contestants
    from _device import versions
    from _inputs import make_inputs

    from support.case import Case

    case = Case("tiny", (1,), (1,), num_q_heads=32, num_kv_heads=8, head_dim=128, dtype="float16")
    inputs = make_inputs(case)
    found = versions(["flashinfer", "vllm"])
    for peer in decode_contestants(flashinfer=True):
        if isinstance(peer, Octavo):
            continue
        version = found.get("flashinfer" if isinstance(peer, FlashInfer) else "vllm", "")
        yield Contestant(peer.name, version, peer.prepare(case, inputs))
        if isinstance(peer, FlashInfer):
            plan = functools.partial(peer.prepare, case, inputs)
            yield Contestant(f"{peer.name} plan", version, plan)


def cuda_contestants() -> Iterator[Contestant]:
    import torch

    from octavo.torch import paged_attention

    arrays = make_arrays(1, (32, 8), 128, "float16")

    def to_gpu(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).cuda()

    yield Contestant("torch", torch.__version__, on(arrays, octavo.paged_attention, to_gpu))
    yield Contestant("octavo.torch", torch.__version__, on(arrays, paged_attention, to_gpu))
    yield from with_a_cache("torch", torch.__version__, (32, 8), 128, "float16", to_gpu)
    if importlib.util.find_spec("cupy"):
        import cupy

        yield Contestant("cupy", cupy.__version__, on(arrays, octavo.paged_attention, cupy.asarray))
    yield from peers()
    q, k, v = (torch.ones(1, 8, 1, 128, device="cuda", dtype=torch.float16) for _ in "qkv")
    attention = torch.nn.functional.scaled_dot_product_attention
    yield Contestant("torch scaled_dot_product_attention", torch.__version__, lambda: attention(q, k, v))
    yield Contestant("torch add", torch.__version__, lambda: torch.add(q, k))


def measure(
    device: str, case: str, contestants: Iterator[Contestant], num_calls: int, rounds: int
) -> Iterator[Row]:
    def wait() -> None:
        if device == "cuda":
            import torch

            torch.cuda.synchronize()

    for contestant in contestants:
        times = []
        for _ in range(rounds):
            wait()
            times.append(timeit.timeit(contestant.call, number=num_calls) / num_calls * 1e6)
        best, median = min(times), statistics.median(times)
        yield Row(device, case, contestant.name, contestant.version, round(best, 3), round(median, 3))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--calls", type=int, default=400, help="calls in a round")
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--json", type=Path, help="append one row a case to this file")
    arguments = parser.parse_args()
    octavo.set_num_threads(1)
    cases = {"empty": cpu_contestants(0), "tiny": cpu_contestants(1)}
    if arguments.device == "cuda":
        cases = {"tiny": cuda_contestants()}
    for case, contestants in cases.items():
        for row in measure(arguments.device, case, contestants, arguments.calls, arguments.rounds):
            print(f"{case:6} {row.contestant:36} best {row.best_us:7.2f} us   median {row.median_us:7.2f} us")
            if arguments.json:
                append_row(arguments.json, asdict(row))


if __name__ == "__main__":
    main()
