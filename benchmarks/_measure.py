"""Measures cases on a GPU: every contestant in turn on the same inputs, checked against the tests' oracle."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import _support_path  # noqa: F401
import torch
from _check import Sample
from _contestants import Contestant, UnsupportedError
from _inputs import Inputs, make_inputs
from _timing import Captured, capture, copies_beyond, l2_cache_bytes, repeats_for, replay_times

from support.case import Case


@dataclass(frozen=True)
class Measured:
    """Contestants by name."""

    us: dict[str, float]  # median microseconds a call
    max_error: dict[str, float]  # against float64, relative to the row's largest element
    skipped: dict[str, str]  # why it has no time
    kernel: str = ""  # of Octavo, as octavo.explain names it


def compile_kernels(contestants: Sequence[Contestant], cases: Sequence[Case]) -> None:
    """Those that are compiled at run time, all at once. What fails here fails again when it is needed."""
    jobs = [job for contestant in contestants for job in contestant.compilations(cases)]
    with ThreadPoolExecutor(max_workers=max(1, len(jobs))) as pool:
        for job in jobs:
            pool.submit(job)


def first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200] if lines else ''}"


def _capture(contestant: Contestant, case: Case, copies: Sequence[Inputs], repeats: int) -> Captured:
    """Raises UnsupportedError; so does anything that a peer raises: what it takes is for itself to say."""
    try:
        return capture([contestant.prepare(case, inputs) for inputs in copies], repeats)
    except UnsupportedError:
        raise
    except Exception as error:
        if contestant.peer:
            raise UnsupportedError(first_line(error)) from error
        raise


def measure(
    case: Case, contestants: Sequence[Contestant], l2_bytes: int, call_us: float, rounds: int
) -> Measured:
    """What is wrong has no time. A call takes about `call_us`."""
    num_copies = copies_beyond(l2_bytes, case.num_bytes)
    copies = [make_inputs(case) for _ in range(num_copies)]
    first = copies[0]
    sample = Sample(case, first)
    repeats = repeats_for(num_copies, call_us)
    graphs: dict[str, Captured] = {}
    errors: dict[str, float] = {}
    skipped: dict[str, str] = {}
    for contestant in contestants:
        name = contestant.name
        first.out.fill_(torch.nan)
        try:
            graph = _capture(contestant, case, copies, repeats)
        except UnsupportedError as why:
            skipped[name] = str(why)
            continue
        if contestant.writes_out:
            first.out.fill_(torch.nan)
        graph.replay()
        errors[name] = sample.max_error(first.out)
        if errors[name] <= contestant.tolerance(case):
            graphs[name] = graph
        else:
            skipped[name] = f"WRONG: error {errors[name]:.2g}, tolerance {contestant.tolerance(case):.2g}"
    kernel = next((c.kernel(case, first) for c in contestants if not c.peer), "")
    calls = repeats * num_copies
    us = {name: time / calls for name, time in replay_times(graphs, rounds).items()}
    return Measured(us, errors, skipped, kernel)


def measure_all(
    cases: Sequence[Case], contestants: Sequence[Contestant], call_us: Callable[[Case], float], rounds: int
) -> Iterator[tuple[Case, Measured]]:
    """As they come. Nothing of one case is left on the GPU when the next begins."""
    torch.manual_seed(0)
    l2_bytes = l2_cache_bytes()
    for case in cases:
        measured = measure(case, contestants, l2_bytes, call_us(case), rounds)
        gc.collect()
        torch.cuda.empty_cache()
        yield case, measured
