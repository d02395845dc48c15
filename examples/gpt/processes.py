"""The processes that train together: one, or as many as torchrun started."""

from __future__ import annotations

import os
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class Processes:
    """This process and the others. GPUs and NCCL where each process has a GPU, otherwise the CPU and Gloo."""

    def __init__(self, device: str | None = None) -> None:
        """`device`: "cpu" or "cuda"; None: a GPU if there is one for each process."""
        self._launched = "LOCAL_RANK" in os.environ
        local_index = int(os.environ.get("LOCAL_RANK", 0))
        local_count = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        num_gpus = torch.cuda.device_count()
        enough = num_gpus >= local_count
        if device == "cuda" and not enough:
            raise ValueError(f"{local_count} processes need as many GPUs; PyTorch finds {num_gpus}")
        on_gpu = enough if device is None else device == "cuda"
        self.device = torch.device("cuda", local_index) if on_gpu else torch.device("cpu")
        if on_gpu:
            torch.cuda.set_device(self.device)
        self.index, self.count = 0, 1
        if self._launched:
            dist.init_process_group("nccl" if on_gpu else "gloo")
            self.index, self.count = dist.get_rank(), dist.get_world_size()

    def __enter__(self) -> Processes:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._launched:
            dist.destroy_process_group()

    def mean(self, value: Tensor) -> float:
        """The mean of the processes' values."""
        if self.count > 1:
            dist.all_reduce(value)
        return float(value) / self.count

    def gather(self, value: Any) -> list[Any]:
        """The values of all processes, in each of them."""
        values = [value]
        if self.count > 1:
            values = [None] * self.count
            dist.all_gather_object(values, value)
        return values
