"""The times of ``linear`` in CUDA graphs of PyTorch."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import torch

import octavo
from octavo._linear_plan import LinearPlan
from octavo._tune_linear import Problem, Times, weights_of


def why_unusable() -> str:
    return "" if torch.cuda.is_available() else "torch.cuda is not available"


class Measure:
    """Weights stay from one problem to the next where they can."""

    def __init__(self, device: int) -> None:
        self._device = torch.device("cuda", device)
        self._stream = torch.cuda.Stream(self._device)
        self._weights: Any = torch.empty(0)
        # Results of all graphs have the same memory. It stays as long as one of the graphs is left.
        self._pool = torch.cuda.graph_pool_handle()
        self._graph: Any = None

    def __call__(self, problem: Problem, plans: Sequence[LinearPlan], rounds: int, /) -> list[Times]:
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream), torch.no_grad():
            dtype = getattr(torch, problem.dtype)
            l2_bytes = torch.cuda.get_device_properties(self._device).L2_cache_size
            shape = (weights_of(problem, l2_bytes), problem.N, problem.K)
            if tuple(self._weights.shape) != shape or self._weights.dtype != dtype:
                self._weights = None  # before there are others
                self._weights = torch.randn(shape, device=self._device, dtype=dtype)
            x = torch.randn(problem.M, problem.K, device=self._device, dtype=dtype)
            return [
                Times(*(self._time(x, plan, static_weight, rounds) for static_weight in (False, True)))
                for plan in plans
            ]

    def _time(self, x: Any, plan: LinearPlan, static_weight: bool, rounds: int) -> float:
        """Microseconds of a call."""

        def call(w: Any) -> None:
            octavo.linear(x, w, plan=plan, static_weight=static_weight)

        call(self._weights[0])  # what a kernel or library does once is not captured
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._pool)
        for w in self._weights:
            call(w)
        graph.capture_end()
        self._graph = graph
        times: list[float] = []
        for _ in range(rounds + 1):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e3 / len(self._weights))
        return statistics.median(times[1:])
