"""Latent attention (MLA) decode on an NVIDIA GPU: Octavo beside FlashInfer and FlashMLA in one run.

    python benchmarks/bench_latent.py --json latent.jsonl

One query a sequence, pages of 64 tokens shuffled over the cache, rows of 576 numbers of which 512 are values.
In a case whose name has "upto", lengths are spread evenly up to the one that is given, in random order.
Times, and the check of every contestant's output against float64, are as in bench_decode.py. A peer that
cannot be imported is left out: FlashInfer is the package flashinfer, FlashMLA the package flash_mla
(build_flashmla.py makes it).

floor = 3 us + bytes / read bandwidth measured in the same run. With many heads a case is bound by products:
for those the column TFLOP/s counts.
"""

from __future__ import annotations

import importlib
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from _command import Table
from _report import OCTAVO, floor_us

if TYPE_CHECKING:
    from torch import Tensor

QK_DIM, V_DIM, PAGE_SIZE = 576, 512, 64
SCALE = 192**-0.5
TOLERANCE = 0.02  # of the row's largest element, in bfloat16; fp8 caches have the same numbers for all


@dataclass(frozen=True)
class LatentCase:
    batch: int
    length: int
    num_q_heads: int
    kv_dtype: str = "bfloat16"
    is_spread: bool = False  # lengths are spread up to `length`

    @property
    def name(self) -> str:
        kind = "" if self.kv_dtype == "bfloat16" else "_fp8"
        upto = "upto" if self.is_spread else ""
        return f"mla_b{self.batch}_s{upto}{self.length}_h{self.num_q_heads}{kind}"

    @property
    def lengths(self) -> list[int]:
        if not self.is_spread:
            return [self.length] * self.batch
        lengths = [self.length * (b + 1) // self.batch for b in range(self.batch)]
        random.Random(0).shuffle(lengths)
        return lengths

    @property
    def num_bytes(self) -> int:
        """The bytes of the cache, queries and results."""
        element = 2 if self.kv_dtype == "bfloat16" else 1
        rows = self.batch * self.num_q_heads
        return sum(self.lengths) * QK_DIM * element + rows * 2 * (QK_DIM + V_DIM)

    @property
    def flops(self) -> int:
        return 2 * self.num_q_heads * sum(self.lengths) * (QK_DIM + V_DIM)


KV_DTYPES = "bfloat16", "float8_e4m3fn"
CASES = [
    LatentCase(batch, 4096, num_q_heads, kv_dtype)
    for kv_dtype in KV_DTYPES
    for num_q_heads in (16, 128)
    for batch in (1, 32, 128)
] + [
    LatentCase(batch, 8192, num_q_heads, kv_dtype, is_spread=True)
    for kv_dtype in KV_DTYPES
    for num_q_heads in (16, 128)
    for batch in (32, 128)
]


@dataclass(frozen=True)
class LatentInputs:
    q: Tensor
    kv_pages: Tensor
    page_table: Tensor
    seq_lens: Tensor
    out: Tensor


def make_inputs(case: LatentCase) -> LatentInputs:
    import torch

    pages_of = [-(-length // PAGE_SIZE) for length in case.lengths]
    num_pages = sum(pages_of)
    values = torch.randn(num_pages, PAGE_SIZE, QK_DIM, dtype=torch.bfloat16, device="cuda")
    table = torch.zeros(case.batch, case.length // PAGE_SIZE, dtype=torch.int32, device="cuda")
    pages = torch.randperm(num_pages, device="cuda").to(torch.int32)
    for row, own in zip(table, pages.split(pages_of), strict=True):
        row[: len(own)] = own
    q = torch.randn(case.batch, case.num_q_heads, QK_DIM, dtype=torch.bfloat16, device="cuda")
    lengths = torch.tensor(case.lengths, dtype=torch.int32, device="cuda")
    out = torch.empty(case.batch, case.num_q_heads, V_DIM, dtype=torch.bfloat16, device="cuda")
    return LatentInputs(q, values.to(getattr(torch, case.kv_dtype)), table, lengths, out)


def max_error(case: LatentCase, inputs: LatentInputs, out: Tensor) -> float:
    """The error in the first, a middle and the last sequence, relative to a row's largest element."""
    worst = 0.0
    for b in {0, case.batch // 2, case.batch - 1}:
        keys = inputs.kv_pages[inputs.page_table[b].long()].flatten(0, 1)[: case.lengths[b]].double()
        weights = (inputs.q[b].double() @ keys.T * SCALE).softmax(-1)
        expected = weights @ keys[:, :V_DIM]
        error = (out[b].double() - expected).abs() / expected.abs().amax(-1, keepdim=True)
        worst = max(worst, float(error.nan_to_num(float("inf")).max()))
    return worst


Prepare = Callable[[LatentCase, LatentInputs], Callable[[], "Tensor"]]


def octavo_call(_: LatentCase, inputs: LatentInputs) -> Callable[[], Tensor]:
    import octavo

    arrays = inputs.q, inputs.kv_pages, inputs.page_table, inputs.seq_lens
    return lambda: octavo.latent_attention(*arrays, softmax_scale=SCALE, out=inputs.out)


def flashinfer_call(backend: str, case: LatentCase, inputs: LatentInputs) -> Callable[[], Tensor]:
    import torch

    mla: Any = importlib.import_module("flashinfer.mla")
    workspace = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    wrapper = mla.BatchMLAPagedAttentionWrapper(workspace, backend=backend)
    pages = (inputs.seq_lens + PAGE_SIZE - 1) // PAGE_SIZE
    is_used = torch.arange(inputs.page_table.shape[1], device="cuda") < pages[:, None]
    wrapper.plan(
        qo_indptr=torch.arange(case.batch + 1, dtype=torch.int32, device="cuda"),
        kv_indptr=torch.nn.functional.pad(pages.cumsum(0, dtype=torch.int32), (1, 0)),
        kv_indices=inputs.page_table[is_used],
        kv_len_arr=inputs.seq_lens,
        num_heads=case.num_q_heads,
        head_dim_ckv=V_DIM,
        head_dim_kpe=QK_DIM - V_DIM,
        page_size=PAGE_SIZE,
        causal=True,
        sm_scale=SCALE,
        q_data_type=inputs.q.dtype,
        kv_data_type=inputs.kv_pages.dtype,
    )
    q, kv = inputs.q.split([V_DIM, QK_DIM - V_DIM], -1), inputs.kv_pages.split([V_DIM, QK_DIM - V_DIM], -1)
    scales = {} if inputs.kv_pages.dtype == inputs.q.dtype else {"ckv_scale": 1.0, "kpe_scale": 1.0}
    return lambda: wrapper.run(*q, *kv, out=inputs.out, **scales)


def flashmla_call(case: LatentCase, inputs: LatentInputs) -> Callable[[], Tensor]:
    flash_mla: Any = importlib.import_module("flash_mla")
    schedule = flash_mla.get_mla_metadata(inputs.seq_lens, case.num_q_heads, 1)
    arrays = inputs.q[:, None], inputs.kv_pages[:, :, None], inputs.page_table, inputs.seq_lens

    def call() -> Tensor:
        out: Tensor
        out, _ = flash_mla.flash_mla_with_kvcache(*arrays, V_DIM, *schedule, softmax_scale=SCALE, causal=True)
        return out[:, 0]

    return call


CONTESTANTS: dict[str, Prepare] = {
    OCTAVO: octavo_call,
    "flashinfer fa2": partial(flashinfer_call, "fa2"),
    "flashinfer fa3": partial(flashinfer_call, "fa3"),
    "flashmla": flashmla_call,
}


def measure_case(case: LatentCase, rounds: int, read_bandwidth: float) -> dict[str, Any]:
    import torch
    from _timing import copies_beyond, l2_cache_bytes, time_in_turns

    floor = floor_us(case.num_bytes, read_bandwidth)
    copies = [make_inputs(case) for _ in range(copies_beyond(l2_cache_bytes(), case.num_bytes))]
    right: dict[str, list[Callable[[], Any]]] = {}
    errors: dict[str, float] = {}
    skipped: dict[str, str] = {}
    for name, prepare in CONTESTANTS.items():
        try:
            calls = [prepare(case, inputs) for inputs in copies]
            copies[0].out.fill_(float("nan"))
            result = calls[0]().clone()
            torch.cuda.synchronize()
        except Exception as error:
            if name == OCTAVO:
                raise
            skipped[name] = f"{type(error).__name__}: {error}".partition("\n")[0][:120]
            continue
        errors[name] = max_error(case, copies[0], result)
        if errors[name] > TOLERANCE:
            skipped[name] = f"WRONG: error {errors[name]:.3g}"
            continue
        right[name] = calls
    return {
        "case": case.name,
        "num_bytes": case.num_bytes,
        "flops": case.flops,
        "floor_us": floor,
        "us": time_in_turns(right, max(floor, case.flops / 6e8), rounds),
        "max_error": errors,
        "skipped": skipped,
        "device": torch.cuda.get_device_name(),
    }


def start(rounds: int) -> Callable[[LatentCase], dict[str, Any]]:
    from _device import Probe

    read_bandwidth = Probe(min(rounds, 9)).read_bandwidth()
    print(f"read bandwidth {read_bandwidth / 1e12:.2f} TB/s; microseconds:\n")
    return partial(measure_case, rounds=rounds, read_bandwidth=read_bandwidth)


def time_of(name: str, row: dict[str, Any]) -> str:
    return f"{row['us'][name]:.1f}" if name in row["us"] else str(row["skipped"][name][:40])


def own_us(row: dict[str, Any]) -> float:
    return float(row["us"].get(OCTAVO, "nan"))


TABLE = Table(
    __doc__,
    CASES,
    start,
    {
        "case": lambda row: row["case"],
        "floor": lambda row: f"{row['floor_us']:.1f}",
        **{name: partial(time_of, name) for name in CONTESTANTS},
        "/ floor": lambda row: f"{own_us(row) / row['floor_us']:.2f}",
        "TFLOP/s": lambda row: f"{row['flops'] / own_us(row) / 1e6:.0f}",
    },
    lambda case: f"{case.name}: {case.num_bytes / 1e6:.1f} MB",
)

if __name__ == "__main__":
    sys.exit(TABLE.main())
