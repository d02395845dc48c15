"""What the GPU can do: a kernel that only reads, a long read, a large product."""

from __future__ import annotations

import importlib.metadata
import subprocess
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import cupy
import numpy as np
import torch
from _report import Machine
from _timing import Call, l2_cache_bytes, time_calls

import octavo

PAGE_BYTES = 4096
POOL_BYTES = 2 << 30
PROBE_MIB = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
CTAS_PER_SM = (1, 2, 4, 7)  # of 32 KB

_SOURCE = r"""
// Reads pages of 4 KB and throws them away: what any kernel over a paged cache has to do at least.
// grid: any number of CTAs of 256 threads. CTA b owns the pages b, b + gridDim.x, ...; a thread has eight
// copies of 16 bytes in flight, each from another page into a slot of its own, which nobody reads. (Not loads
// into registers: the compiler saves registers and waits between them. Not one slot for all: copies that
// another one overwrites on the way seem never to be made; 20 TB/s were "measured" so.)
template <bool kScattered>
__device__ void read_pages(const uint4* pool, const int* page_table, long long num_pages) {
    constexpr int kBatch = 8;
    __shared__ uint4 slots[kBatch][256];
    const long long stride = gridDim.x;
    for (long long i = blockIdx.x; i < num_pages; i += kBatch * stride) {
        long long page[kBatch];
#pragma unroll
        for (int j = 0; j < kBatch; ++j) {
            const long long k = min(i + j * stride, num_pages - 1);
            page[j] = kScattered ? __ldg(page_table + k) : k;
        }
#pragma unroll
        for (int j = 0; j < kBatch; ++j) {
            const uint4* from = pool + page[j] * 256 + threadIdx.x;
            const int bytes = i + j * stride < num_pages ? 16 : 0;  // 0 reads nothing, and needs no branch
            const unsigned slot = __cvta_generic_to_shared(&slots[j][threadIdx.x]);
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(slot), "l"(from), "r"(bytes));
        }
        asm volatile("cp.async.wait_all;");
    }
}

extern "C" __global__ void __launch_bounds__(256)
scattered(const uint4* pool, const int* page_table, long long num_pages) {
    read_pages<true>(pool, page_table, num_pages);
}

extern "C" __global__ void __launch_bounds__(256)
contiguous(const uint4* pool, const int* page_table, long long num_pages) {
    read_pages<false>(pool, page_table, num_pages);
}
"""


class Probe:
    """Times the reading kernel, over pages that its last calls have not left in the L2 cache."""

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds
        self.num_sms = torch.cuda.get_device_properties().multi_processor_count
        self.l2_bytes = l2_cache_bytes()
        self.num_pages = POOL_BYTES // PAGE_BYTES
        self.pool = torch.empty(POOL_BYTES // 4, dtype=torch.int32, device="cuda").random_()
        self.page_table = torch.randperm(self.num_pages, device="cuda").to(torch.int32)
        self.module = cupy.RawModule(code=_SOURCE)

    def _call(self, kernel: str, first_page: int, num_pages: int, num_ctas: int) -> Call:
        function = self.module.get_function(kernel)
        offset = 0 if kernel == "scattered" else first_page * PAGE_BYTES
        arguments = (
            np.uint64(self.pool.data_ptr() + offset),
            np.uint64(self.page_table.data_ptr() + 4 * first_page),
            np.int64(num_pages),
        )

        def call() -> None:
            with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
                function((num_ctas,), (256,), arguments)

        return call

    def time(self, kernel: str, num_bytes: int) -> float:
        """Microseconds of one launch, with the number of CTAs that does best."""
        pages = num_bytes // PAGE_BYTES
        copies = min(self.num_pages // pages, 1 + -(-2 * self.l2_bytes // num_bytes))
        guess_us = 2.0 + num_bytes / 3e6
        return min(
            time_calls(
                [self._call(kernel, copy * pages, pages, per_sm * self.num_sms) for copy in range(copies)],
                guess_us,
                self.rounds,
            )
            for per_sm in CTAS_PER_SM
        )

    def read_bandwidth(self) -> float:
        """Bytes/s of one long contiguous read."""
        return POOL_BYTES / self.time("contiguous", POOL_BYTES) * 1e6


def matmul_flops(rounds: int, n: int = 8192) -> float:
    a, b = (torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for _ in "ab")
    out = torch.empty_like(a)
    us = time_calls([lambda: torch.matmul(a, b, out=out)] * 4, 2 * n**3 / 8e8, rounds)
    return 2 * n**3 / us * 1e6


def versions(distributions: Iterable[str]) -> dict[str, str]:
    found = {"octavo": octavo.__version__, "CUDA": str(torch.version.cuda)}
    for name in distributions:
        for distribution in (name, f"{name}-python", f"{name}-cuda13x", f"{name}-cuda12x"):
            try:
                found[name] = importlib.metadata.version(distribution)
                break
            except importlib.metadata.PackageNotFoundError:
                continue
    return found


def driver_version() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[0]


def describe_machine(rounds: int) -> Machine:
    flops = matmul_flops(rounds)  # first: it brings the clocks up
    probe = Probe(rounds)
    return Machine(
        device=torch.cuda.get_device_name(),
        driver=driver_version(),
        versions=versions(["torch", "cupy", "flashinfer", "vllm"]),
        l2_bytes=probe.l2_bytes,
        read_bandwidth=probe.read_bandwidth(),
        matmul_flops=flops,
        probe_us={
            kernel: {str(mib): probe.time(kernel, mib << 20) for mib in PROBE_MIB}
            for kernel in ("scattered", "contiguous")
        },
    )


AnyCase = TypeVar("AnyCase")


def with_machine(
    measure: Callable[[AnyCase, int, float], dict[str, Any]], rounds: int
) -> Callable[[AnyCase], dict[str, Any]]:
    """What measures a case, given the rounds and the read bandwidth; its rows say where they ran."""
    machine = describe_machine(min(rounds, 9))
    where = {
        "device": machine.device,
        "driver": machine.driver,
        "read_bandwidth": machine.read_bandwidth,
        "matmul_flops": machine.matmul_flops,
    }
    print(
        f"{machine.device}: reads {machine.read_bandwidth / 1e12:.2f} TB/s, "
        f"8192^3 product {machine.matmul_flops / 1e12:.0f} TFLOP/s\n"
    )
    return lambda case: {**measure(case, rounds, machine.read_bandwidth), **where}
