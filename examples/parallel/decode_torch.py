"""One step of decoding over several devices with torch.distributed, checked against one device.

    torchrun --nproc-per-node=2 examples/parallel/decode_torch.py

Tensor parallel: each rank has some heads of every token. Context parallel: each rank has some tokens of every
sequence, for contexts that do not fit one device. GPUs and NCCL where each process has one, otherwise the CPU
and Gloo.
"""

from __future__ import annotations

import functools
import os
import sys

from numpy.typing import NDArray
from problem import Step, make_step

import octavo

try:
    import torch
    import torch.distributed as dist
    from torch import Tensor
except ModuleNotFoundError:
    sys.exit("decode_torch.py: PyTorch is not installed; get it with pip install torch")


class Rank:
    """This process: what it computes on, and with whom."""

    def __init__(self) -> None:
        local_rank = int(os.environ["LOCAL_RANK"])
        on_gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
        self.device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
        self.dtype = torch.float16 if on_gpu else torch.float32
        dist.init_process_group("nccl" if on_gpu else "gloo")
        self.index, self.count = dist.get_rank(), dist.get_world_size()

    def array(self, values: NDArray) -> Tensor:
        return torch.from_numpy(values).to(self.device, self.dtype).contiguous()

    def int32(self, values: NDArray) -> Tensor:
        return torch.from_numpy(values).to(self.device)

    def gather(self, part: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(part) for _ in range(self.count)]
        dist.all_gather(parts, part)
        return parts


def tensor_parallel(step: Step, rank: Rank) -> Tensor:
    mine = step.heads_of(rank.index, rank.count)
    cache = rank.array(mine.k_pages), rank.array(mine.v_pages)
    where = rank.int32(mine.page_table), rank.int32(mine.seq_lens)
    octavo.append_kv(rank.array(mine.k), rank.array(mine.v), *cache, *where)
    out = octavo.paged_attention(rank.array(mine.q), *cache, *where)
    projected = torch.einsum("bhd,hdn->bn", out, rank.array(mine.w_out))  # what these heads add to it
    dist.all_reduce(projected)
    return projected


def context_parallel(step: Step, rank: Rank) -> Tensor:
    mine = step.pages_of(rank.index, rank.count)
    cache = rank.array(mine.k_pages), rank.array(mine.v_pages)
    page_table, seq_lens = rank.int32(mine.page_table), rank.int32(mine.seq_lens)
    octavo.append_kv(
        rank.array(mine.k), rank.array(mine.v), *cache, page_table, rank.int32(mine.lens_to_append)
    )
    out, lse = octavo.paged_attention(rank.array(mine.q), *cache, page_table, seq_lens, return_lse=True)
    states = zip(rank.gather(out), rank.gather(lse), strict=True)
    out, _ = functools.reduce(lambda a, b: octavo.merge_states(*a, *b), states)
    return torch.einsum("bhd,hdn->bn", out, rank.array(mine.w_out))


def main() -> None:
    if "LOCAL_RANK" not in os.environ:
        sys.exit(
            "decode_torch.py: start me with torchrun, which starts a process for each device:\n"
            "    torchrun --nproc-per-node=2 examples/parallel/decode_torch.py"
        )
    rank = Rank()
    step = make_step(rank.count)
    expected = torch.from_numpy(step.on_one_device())
    tolerance = 1e-5 if rank.dtype == torch.float32 else 1e-2
    for decode in (tensor_parallel, context_parallel):
        result = decode(step, rank).float().cpu()
        torch.testing.assert_close(result, expected, rtol=tolerance, atol=tolerance)
        if rank.index == 0:
            error = float((result - expected).abs().max())
            print(f"{decode.__name__}: {rank.count} x {rank.device.type}, differs by {error:.1e} at most")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
