"""Measures decode cases: every contestant in turn on the same inputs, checked against float64."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from _decode_cases import Case
from _decode_contestants import Contestant, UnsupportedError, find_contestants
from _decode_inputs import Inputs, Oracle, make_inputs
from _device import describe_machine
from _report import Machine, Row, floor_us
from _timing import Captured, capture, repeats_for, replay_times


def _first_line(error: Exception) -> str:
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
            raise UnsupportedError(_first_line(error)) from error
        raise


def measure(case: Case, contestants: Sequence[Contestant], machine: Machine, rounds: int) -> Row:
    """One row. What is wrong has no time."""
    # More than twice the L2 cache between two calls on the same inputs.
    num_copies = max(2, 1 + 2 * machine.l2_bytes // case.num_bytes)
    copies = [make_inputs(case) for _ in range(num_copies)]
    oracle = Oracle(case, copies[0])
    repeats = repeats_for(num_copies, floor_us(case.num_bytes, machine.read_bandwidth))
    graphs, errors, skipped = {}, {}, {}
    for contestant in contestants:
        name = contestant.name
        try:
            graph = _capture(contestant, case, copies, repeats)
        except UnsupportedError as why:
            skipped[name] = str(why)
            continue
        copies[0].out.fill_(torch.nan)
        graph.replay()
        errors[name] = oracle.max_error(copies[0].out)
        if errors[name] <= contestant.tolerance(case):
            graphs[name] = graph
        else:
            skipped[name] = f"WRONG: error {errors[name]:.2g}, tolerance {contestant.tolerance(case):.2g}"
    calls = repeats * num_copies
    us = {name: time / calls for name, time in replay_times(graphs, rounds).items()}
    return Row(case.name, case.shape, case.num_bytes, us, errors, skipped, machine)


def measure_all(cases: Sequence[Case], flashinfer: bool, rounds: int) -> Iterator[Row]:
    """Rows as they come. Nothing of one row is left on the GPU when the next begins."""
    torch.manual_seed(0)
    contestants = find_contestants(flashinfer)
    jobs = [job for contestant in contestants for job in contestant.compilations(cases)]
    with ThreadPoolExecutor(max_workers=max(1, len(jobs))) as pool:
        for job in jobs:
            pool.submit(job)  # what fails here fails again when it is needed, and is reported there
    machine = describe_machine(min(rounds, 9))
    for case in cases:
        row = measure(case, contestants, machine, rounds)
        gc.collect()
        torch.cuda.empty_cache()
        yield row
