"""Measures products with weights on a GPU: all engines in turn on the same inputs, against float64."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from _contestants import UnsupportedError
from _linear_cases import Case
from _linear_engines import Calls, Engine
from _linear_inputs import Exact, Inputs, draw_weights
from _measure import first_line
from _timing import Captured, capture, copies_beyond, l2_cache_bytes, repeats_for, replay_times
from torch import Tensor

import octavo

TOLERANCE = 2.0  # errors of a plain implementation


@dataclass(frozen=True)
class Measured:
    """Engines by name."""

    plain_error: float
    kernels: list[str]  # of Octavo, for each product
    us: dict[str, float] = field(default_factory=dict)  # median microseconds of all products
    max_error: dict[str, float] = field(default_factory=dict)  # Exact.error()
    skipped: dict[str, str] = field(default_factory=dict)  # why it has no time


class Recorded:
    """Calls whose last results stay: when a graph has captured them, they are what replays write."""

    def __init__(self, calls: Calls) -> None:
        self.calls = calls
        self.results: list[Tensor] = []

    def __call__(self) -> None:
        self.results = self.calls()


def _kernels(inputs: Inputs) -> list[str]:
    found = []
    for step in inputs.steps():
        activation = "silu_gate" if step.product.gated else None
        found.append(octavo.explain("linear", step.x, step.w, activation=activation).kernel)
    return found


def _capture(engine: Engine, copies: Sequence[Inputs], call_us: float, repeats: int) -> Captured:
    """Raises UnsupportedError; so does anything that a peer raises: what it takes is for itself to say."""
    try:
        return capture([Recorded(calls) for calls in engine.prepare(copies, call_us)], repeats)
    except UnsupportedError:
        raise
    except Exception as error:
        if engine.peer:
            raise UnsupportedError(first_line(error)) from error
        raise


def _error(graph: Captured, exact: Exact) -> float:
    """The error of the first copy's results."""
    first = graph.calls[0]
    assert isinstance(first, Recorded)
    for result in first.results:
        result.fill_(math.nan)
    graph.replay()
    return exact.error(first.results)


def measure(copies: Sequence[Inputs], engines: Sequence[Engine], call_us: float, rounds: int) -> Measured:
    """What is wrong has no time. All products of a copy take about `call_us`."""
    exact = Exact(copies[0])
    repeats = repeats_for(len(copies), call_us)
    found = Measured(exact.plain_error, _kernels(copies[0]))
    graphs: dict[str, Captured] = {}
    for engine in engines:
        name = engine.name
        try:
            graph = _capture(engine, copies, call_us, repeats)
        except UnsupportedError as why:
            found.skipped[name] = str(why)
            continue
        found.max_error[name] = _error(graph, exact)
        tolerance = TOLERANCE * exact.plain_error
        if found.max_error[name] <= tolerance:
            graphs[name] = graph
        else:
            found.skipped[name] = f"WRONG: error {found.max_error[name]:.2g}, tolerance {tolerance:.2g}"
    calls = repeats * len(copies)
    found.us.update({name: us / calls for name, us in replay_times(graphs, rounds).items()})
    return found


def copies_of(cases: Sequence[Case], l2_bytes: int, dtype: torch.dtype) -> Iterator[list[Inputs]]:
    """Inputs of each case, whose weights are more than twice the L2 cache together.

    Cases of the same products, one after another, share the weights.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    weights: list[list[Tensor]] = []
    products = None
    for case in cases:
        if case.products != products:
            products, weights = case.products, []
            gc.collect()  # what errors and compiled calls refer to
            num_copies = copies_beyond(l2_bytes, case.num_bytes)
            weights = [draw_weights(case, dtype, device) for _ in range(num_copies)]
        yield [Inputs.drawn(case, each) for each in weights]


def measure_all(
    cases: Sequence[Case],
    engines: Sequence[Engine],
    dtype: torch.dtype,
    read_bandwidth: float,
    rounds: int,
) -> Iterator[tuple[Case, Measured]]:
    """As they come."""
    torch.manual_seed(0)
    l2_bytes = l2_cache_bytes()
    for case, copies in zip(cases, copies_of(cases, l2_bytes, dtype), strict=True):
        taking_part = [engine for engine in engines if engine.takes_part(case)]
        yield case, measure(copies, taking_part, case.floor_us(read_bandwidth), rounds)
