"""Times of GPU work in CUDA graphs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

Call = Callable[[], object]

GRAPH_US = 1500.0  # of work in one graph, beside which its launch and the events do not count


def repeats_for(num_calls: int, call_us: float, graph_us: float = GRAPH_US) -> int:
    """How often a graph goes through its calls, to take that long."""
    return max(1, math.ceil(graph_us / (num_calls * call_us)))


def l2_cache_bytes() -> int:
    return torch.cuda.get_device_properties().L2_cache_size


def copies_beyond(l2_bytes: int, num_bytes: int) -> int:
    """Copies of inputs for calls to rotate over, which read more than twice the L2 cache before one again."""
    return max(2, 1 + 2 * l2_bytes // num_bytes)


@dataclass(frozen=True)
class Captured:
    """A graph, and the calls that own the memory which it uses."""

    graph: torch.cuda.CUDAGraph
    calls: Sequence[Call]

    def replay(self) -> None:
        self.graph.replay()


def capture(calls: Sequence[Call], repeats: int) -> Captured:
    """A graph that runs the calls one after the other, `repeats` times.

    They run once beforehand on the same stream: what a library compiles or allocates at its first call stays
    out of the graph.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(repeats):
            for call in calls:
                call()
    return Captured(graph, calls)


def turns(count: int, rounds: int) -> list[list[int]]:
    """The order of so many contestants in each round, as numbers.

    Each follows each of the others about equally often (the rows of a Williams square): at the power limit the
    clocks that a contestant finds depend on what the one before it has drawn.
    """
    zigzag = [(i + 1) // 2 if i % 2 else (count - i // 2) % count for i in range(count)]
    orders = [[(i + first) % count for i in zigzag] for first in range(count)]
    if count % 2:  # then the reverse of each belongs to the square
        orders = [order for pair in zip(orders, (x[::-1] for x in orders), strict=True) for order in pair]
    return [orders[i % len(orders)] for i in range(rounds)]


def replay_times(
    graphs: Mapping[str, Captured], rounds: int, warm_up: int = 1, lead_in: int = 0
) -> dict[str, float]:
    """Median microseconds of one replay of each graph.

    The graphs take turns, so that a drift of the clocks meets them all, and none always comes behind the same
    other. The first rounds warm up, as many as `warm_up`, and do not count; nor do the first `lead_in` replays
    of each turn.
    """
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in graphs}
    names = list(graphs)
    for order in turns(len(names), warm_up + rounds):
        for name in (names[i] for i in order):
            graph = graphs[name]
            for _ in range(lead_in):
                graph.replay()
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            events[name].append((start, end))
    torch.cuda.synchronize()
    return {
        name: 1e3 * statistics.median(start.elapsed_time(end) for start, end in pairs[warm_up:])
        for name, pairs in events.items()
    }


def time_in_turns(contestants: Mapping[str, Sequence[Call]], call_us: float, rounds: int) -> dict[str, float]:
    """Microseconds of one call of each contestant, when each takes about `call_us`."""
    num_calls = {name: repeats_for(len(calls), call_us) * len(calls) for name, calls in contestants.items()}
    graphs = {name: capture(calls, num_calls[name] // len(calls)) for name, calls in contestants.items()}
    return {name: us / num_calls[name] for name, us in replay_times(graphs, rounds).items()}


def time_calls(calls: Sequence[Call], call_us: float, rounds: int) -> float:
    """Microseconds of one call, when each takes about `call_us`."""
    return time_in_turns({"": calls}, call_us, rounds)[""]
