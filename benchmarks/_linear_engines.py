"""Octavo and its peers behind one face: each turns the products of a case into calls."""

from __future__ import annotations

import importlib.util
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch._inductor
from _contestants import UnsupportedError
from _cublaslt import Algorithm, CublasLt
from _linear_cases import Case, Product
from _linear_inputs import Inputs, Step
from _timing import capture, repeats_for, replay_times
from torch import Tensor
from torch.nn.functional import silu

import octavo

TUNING_US = 300.0  # of work in one graph, where only the order of candidates matters
TUNING_ROUNDS = 3

Call = Callable[[], Tensor]  # returns the result
Calls = Callable[[], list[Tensor]]


class Engine(ABC):
    name: str
    peer = True

    def takes_part(self, case: Case) -> bool:  # noqa: ARG002
        return True

    @abstractmethod
    def call(self, step: Step) -> Call:
        """One product, with everything done that need not be done each time."""

    def prepare(self, copies: Sequence[Inputs], call_us: float) -> list[Calls]:  # noqa: ARG002
        """The calls of each copy of the inputs, which take about `call_us`; raises UnsupportedError."""
        return [one_after_another([self.call(step) for step in inputs.steps()]) for inputs in copies]


def one_after_another(calls: Sequence[Call]) -> Calls:
    return lambda: [call() for call in calls]


class Octavo(Engine):
    name = "octavo"
    peer = False
    static_weight = False

    def call(self, step: Step) -> Call:
        return partial(
            octavo.linear,
            step.x,
            step.w,
            activation="silu_gate" if step.product.gated else None,
            residual=step.residual,
            out=step.out,
            static_weight=self.static_weight,
        )


class StaticWeightOctavo(Octavo):
    name = "octavo_static_weight"
    static_weight = True


def with_torch_ops(step: Step, product: Callable[[Tensor], Call]) -> Call:
    """What a peer's product, which writes to the tensor that it gets, leaves to PyTorch's operators."""
    sums = step.x.new_empty(len(step.x), step.product.w_rows) if step.product.gated else step.out
    multiply = product(sums)

    def call() -> Tensor:
        multiply()
        if step.product.gated:
            gate, up = sums.chunk(2, dim=-1)
            torch.mul(silu(gate), up, out=step.out)
        if step.residual is not None:
            step.out.add_(step.residual)
        return step.out

    return call


class Cublas(Engine):
    name = "cublas"

    def call(self, step: Step) -> Call:
        def product(sums: Tensor) -> Call:
            def multiply() -> Tensor:
                before = torch.backends.cuda.preferred_blas_library()
                torch.backends.cuda.preferred_blas_library(self.name)
                try:
                    return torch.mm(step.x, step.w.t(), out=sums)
                finally:
                    torch.backends.cuda.preferred_blas_library(before)

            return multiply

        return with_torch_ops(step, product)


class CublasLtFirst(Cublas):
    """The algorithm that its heuristic takes for the best one, as PyTorch runs it."""

    name = "cublaslt"


class CublasLtBest(Engine):
    """The fastest of the algorithms that its heuristic proposes, as measured among these very inputs."""

    name = "cublaslt_best"

    def __init__(self) -> None:
        self._library = CublasLt()
        self._chosen: dict[Product, Algorithm] = {}

    def _algorithms(self, step: Step) -> list[Algorithm]:
        sums = step.x.new_empty(len(step.x), step.product.w_rows)
        found = self._library.algorithms(step.x, step.w, sums)
        if not found:
            raise UnsupportedError("the heuristic of cublasLt proposes no algorithm")
        return found

    def call(self, step: Step) -> Call:
        algorithm = self._chosen[step.product]
        return with_torch_ops(step, lambda sums: self._library.product(step.x, step.w, sums, algorithm))

    def prepare(self, copies: Sequence[Inputs], call_us: float) -> list[Calls]:
        """Choose for one product after the other, while those before and after it run as well."""
        proposed = {step.product: self._algorithms(step) for step in copies[0].steps()}
        self._chosen = {product: algorithms[0] for product, algorithms in proposed.items()}
        repeats = repeats_for(len(copies), call_us, TUNING_US)
        for product, algorithms in proposed.items():
            graphs = {}
            for i, algorithm in enumerate(algorithms):
                self._chosen[product] = algorithm
                graphs[str(i)] = capture(super().prepare(copies, call_us), repeats)
            times = replay_times(graphs, TUNING_ROUNDS)
            self._chosen[product] = algorithms[int(min(times, key=times.__getitem__))]
        return super().prepare(copies, call_us)


class Triton(Engine):
    """torch.compile with tuned kernels of Triton alone. Its result is in memory of its own, so that it takes
    part in single products only."""

    name = "triton"

    def __init__(self, rows: re.Pattern[str]) -> None:
        if importlib.util.find_spec("triton") is None:
            raise ImportError("the package triton is not installed")
        self._rows = rows
        mode = torch._inductor.list_mode_options("max-autotune-no-cudagraphs")
        self._options = {**mode, "max_autotune_gemm_backends": "TRITON"}

    def takes_part(self, case: Case) -> bool:
        return len(case.products) == 1 and self._rows.search(case.name) is not None

    def prepare(self, copies: Sequence[Inputs], call_us: float) -> list[Calls]:
        torch.compiler.reset()  # otherwise PyTorch stops compiling after some shapes
        self._multiply = torch.compile(multiply, fullgraph=True, dynamic=False, options=self._options)
        return super().prepare(copies, call_us)

    def call(self, step: Step) -> Call:
        return partial(self._multiply, step.x, step.w)


def multiply(x: Tensor, w: Tensor) -> Tensor:
    return x @ w.t()
