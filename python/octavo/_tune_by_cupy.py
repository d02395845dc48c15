"""The times of ``linear`` in CUDA graphs of CuPy.

CuPy captures no product of its own. Those are launched one by one, so that of small ones the host's time is
measured, and Octavo's kernels are preferred.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import octavo
from octavo._linear_plan import LinearPlan
from octavo._tune_linear import Problem, Times, weights_of

cupy = import_module("cupy")


def why_unusable() -> str:
    return "" if cupy.cuda.is_available() else "CuPy finds no GPU"


class Measure:
    """Weights stay from one problem to the next where they can."""

    def __init__(self, device: int) -> None:
        self._device = cupy.cuda.Device(device)
        self._stream: Any = None
        self._weights: Any = cupy.empty(0)

    def __call__(self, problem: Problem, plans: Sequence[LinearPlan], rounds: int, /) -> list[Times]:
        with self._device:
            self._stream = self._stream or cupy.cuda.Stream(non_blocking=True)
            with self._stream:
                return self._measure(problem, plans, rounds)

    def _measure(self, problem: Problem, plans: Sequence[LinearPlan], rounds: int) -> list[Times]:
        is_half = problem.dtype == "float16"
        dtype = cupy.dtype("float16" if is_half else import_module("ml_dtypes").bfloat16)
        shape = (weights_of(problem, self._device.attributes["L2CacheSize"]), problem.N, problem.K)
        if self._weights.shape != shape or self._weights.dtype != dtype:
            self._weights = None  # before there are others
            self._weights = cupy.empty(shape, dtype)
            for w in self._weights:
                w[...] = cupy.random.standard_normal(shape[1:], cupy.float32).astype(dtype)
        x = cupy.random.standard_normal((problem.M, problem.K), cupy.float32).astype(dtype)
        out = cupy.empty((problem.M, problem.N), dtype)
        return [
            Times(*(self._time(x, out, plan, static_weight, rounds) for static_weight in (False, True)))
            for plan in plans
        ]

    def _time(self, x: Any, out: Any, plan: LinearPlan, static_weight: bool, rounds: int) -> float:
        """Microseconds of a call."""
        # A new result where the library multiplies, which would copy to `out`.
        result = None if plan.kernel == "library" else out

        def call(w: Any) -> None:
            octavo.linear(x, w, plan=plan, static_weight=static_weight, out=result)

        def call_with_each() -> None:
            for w in self._weights:
                call(w)

        for _ in range(2):  # what is done once, and the memory for it, is not captured
            call(self._weights[0])
        run = call_with_each
        if plan.kernel != "library":
            self._stream.begin_capture()
            call_with_each()
            graph = self._stream.end_capture()
            run = functools.partial(graph.launch, self._stream)
        times: list[float] = []
        for _ in range(rounds + 1):
            begin, end = cupy.cuda.Event(), cupy.cuda.Event()
            begin.record()
            run()
            end.record()
            end.synchronize()
            times.append(cupy.cuda.get_elapsed_time(begin, end) * 1e3 / len(self._weights))
        return statistics.median(times[1:])
