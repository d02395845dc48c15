"""Measures tasks on a GPU: every contestant in turn on the same inputs, checked against exact gradients."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace

import torch
from _backward_check import Sample
from _backward_contestants import Call, Contestant
from _backward_inputs import Inputs, make_inputs
from _backward_rows import Task
from _contestants import UnsupportedError
from _measure import first_line
from _timing import Captured, capture, copies_beyond, l2_cache_bytes, repeats_for, replay_times
from torch import Tensor

GRAPH_US = 25e3  # long enough for the clocks to settle where a contestant's power leaves them
WARM_UP = 4  # rounds; with five contestants a second
LEAD_IN = 1  # replays of each turn that do not count: the clocks still are what the contestant before has left
TOLERANCE = 2.0  # errors of a plain implementation
DETERMINISTIC_REPLAYS = 4


@dataclass(frozen=True)
class Measured:
    """Contestants by name."""

    us: dict[str, float] = field(default_factory=dict)  # median microseconds a call
    error: dict[str, float] = field(default_factory=dict)  # ||x - exact|| / ||exact|| of dq, dk or dv
    plain_error: dict[str, float] = field(default_factory=dict)  # that of a plain implementation
    skipped: dict[str, str] = field(default_factory=dict)  # why it has no time
    peak_bytes: dict[str, int] = field(default_factory=dict)  # besides the inputs, beside standard attention


class Recorded:
    """A call whose last results stay: when a graph has captured it, they are what replays write."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.results: Sequence[Tensor] = ()

    def __call__(self) -> None:
        self.results = tuple(self.call())


def _why_not(contestant: Contestant, error: Exception) -> str:
    """Whatever a peer raises says what it does not take; raises what Octavo has raised."""
    if isinstance(error, UnsupportedError):
        return str(error)
    if not contestant.peer:
        raise error
    return first_line(error)


def _replay(graph: Captured, results: Sequence[Tensor]) -> None:
    for x in results:
        x.fill_(math.nan)
    graph.replay()


def _why_wrong(
    contestant: Contestant, task: Task, graph: Captured, inputs: Inputs, sample: Sample, found: Measured
) -> str | None:
    """Compare the first copy's gradients with exact ones, and with themselves where that is asked for."""
    name, (first, *_) = contestant.name, graph.calls
    assert isinstance(first, Recorded)
    _replay(graph, first.results)
    kept = contestant.kept(task, inputs, sample.pairs) if task.dropout_p > 0.0 else None
    found.error[name], found.plain_error[name] = sample.errors(first.results, kept)
    tolerance = TOLERANCE * found.plain_error[name]
    if not found.error[name] <= tolerance:
        return f"WRONG: error {found.error[name]:.2g}, tolerance {tolerance:.2g}"
    if task.deterministic:
        expected = [x.clone() for x in first.results]
        for _ in range(DETERMINISTIC_REPLAYS):
            _replay(graph, first.results)
            if not all(torch.equal(x, y) for x, y in zip(first.results, expected, strict=True)):
                return "WRONG: deterministic calls differ"
    return None


def measure(
    task: Task, contestants: Sequence[Contestant], l2_bytes: int, call_us: float, rounds: int
) -> Measured:
    """What is wrong has no time. A call takes about `call_us`."""
    first = make_inputs(task)
    arrays = (getattr(first, each.name) for each in fields(first))
    num_bytes = sum(x.nbytes for x in arrays if x is not None)
    copies = [first, *(make_inputs(task) for _ in range(copies_beyond(l2_bytes, num_bytes) - 1))]
    sample = Sample(task, first)
    repeats = repeats_for(len(copies), call_us, GRAPH_US)
    graphs: dict[str, Captured] = {}
    found = Measured()
    for contestant in contestants:
        name = contestant.name
        try:
            graph = capture([Recorded(contestant.prepare(task, inputs)) for inputs in copies], repeats)
            why_wrong = None
            if contestant.checked:
                why_wrong = _why_wrong(contestant, task, graph, first, sample, found)
        except Exception as error:
            found.skipped[name] = _why_not(contestant, error)
            torch.cuda.empty_cache()
            continue
        if why_wrong is None:
            graphs[name] = graph
        else:
            found.skipped[name] = why_wrong
    calls = repeats * len(copies)
    found.us.update({name: us / calls for name, us in replay_times(graphs, rounds, WARM_UP, LEAD_IN).items()})
    return found


class DeviceMemory:
    """How much memory calls take from the device, with what libraries reserve for themselves.

    PyTorch's own statistics do not have the latter. Kernels take memory when they are loaded: small calls do
    that first.
    """

    def __init__(self, small_calls: Sequence[Callable[[], object]]) -> None:
        for call in small_calls:
            call()
        torch.cuda.synchronize()
        self.libraries_before = self._used() - torch.cuda.memory_reserved()

    @staticmethod
    def _used() -> int:
        free, total = torch.cuda.mem_get_info()
        return total - free

    def of(self, call: Call) -> int:
        """Bytes, at most at any time."""
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.synchronize()
        inputs = torch.cuda.memory_reserved()
        results = call()
        # Before the host waits: then libraries would give memory back. PyTorch keeps what it has reserved.
        used = self._used()
        torch.cuda.synchronize()
        del results
        return used - inputs - self.libraries_before


def _size(task: Task) -> int:
    """Elements of q."""
    return sum(task.case.seqlens_q) * task.case.num_q_heads * task.case.head_dim


def measure_memory(tasks: Sequence[Task], contestants: Sequence[Contestant]) -> dict[str, dict[str, int]]:
    """Peak bytes by task and contestant. Who does not get enough has none.

    It comes before all other calls, and large tasks come last: a library that has kept memory of a larger
    call would take nothing from the device.
    """
    if not tasks:
        return {}
    tasks = sorted(tasks, key=_size)
    case = replace(tasks[0].case, seqlens_q=(256,), seqlens_k=(256,))
    small = replace(tasks[0], case=case)
    memory = DeviceMemory([contestant.prepare(small, make_inputs(small)) for contestant in contestants])
    found: dict[str, dict[str, int]] = {}
    for task in tasks:
        inputs = make_inputs(task)
        found[task.name] = {}
        for contestant in contestants:
            try:
                found[task.name][contestant.name] = memory.of(contestant.prepare(task, inputs))
            except Exception as error:
                _why_not(contestant, error)  # measure() says it
        del inputs
    torch.cuda.empty_cache()
    return found


def measure_all(
    tasks: Sequence[Task], contestants: Sequence[Contestant], call_us: Callable[[Task], float], rounds: int
) -> Iterator[tuple[Task, Measured]]:
    """As they come. Nothing of one task is left on the GPU when the next begins."""
    torch.manual_seed(0)
    l2_bytes = l2_cache_bytes()
    standard = [task for task in tasks if task.standard]
    with_memory = [contestant for contestant in contestants if all(map(contestant.takes_part, standard))]
    peak_bytes = measure_memory(standard, with_memory)
    for task in tasks:
        taking_part = [contestant for contestant in contestants if contestant.takes_part(task)]
        measured = measure(task, taking_part, l2_bytes, call_us(task), rounds)
        gc.collect()
        torch.cuda.empty_cache()
        yield task, replace(measured, peak_bytes=peak_bytes.get(task.name, {}))
