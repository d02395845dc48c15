"""Measures cases of decoding: every engine in turn on the same weights, checked against float32."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from _generate_cases import CHECKED_STEPS, TIMED_STEPS, WARM_UP_STEPS, Case
from _generate_engines import Engine
from _generate_reference import WEIGHT_STD, Problem, reference_logits
from _measure import first_line
from llama.weights import Weights
from torch import Tensor

TOLERANCE = 2.0  # largest errors of a plain implementation in bfloat16
SEED = 0
ROOM_BYTES = 3 << 30  # for activations, and what libraries keep for themselves


class TimeLimitError(Exception):
    """An engine took longer than it may."""


@dataclass(frozen=True)
class Measured:
    """Engines by name."""

    us: dict[str, float] = field(default_factory=dict)  # median microseconds a step
    max_error: dict[str, float] = field(default_factory=dict)  # of a logit, against float32
    top1: dict[str, float] = field(default_factory=dict)  # share of steps whose likeliest token is the same
    skipped: dict[str, str] = field(default_factory=dict)  # why it has no time


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeLimitError when that is over, between two bytecodes of Python."""
    expired = False

    def expire(*_: object) -> None:
        nonlocal expired
        expired = True
        raise TimeLimitError(message)

    message = f"took longer than {seconds:g} s"
    before = signal.signal(signal.SIGALRM, expire)
    # Every 5 seconds once more, where a compiler has gone on regardless.
    timer_before = signal.setitimer(signal.ITIMER_REAL, seconds, 5.0)
    try:
        yield
    except Exception as error:
        if expired:
            raise TimeLimitError(message) from error  # which a compiler may have wrapped up
        raise
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, *timer_before)


def memory_of_device(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def why_too_large(case: Case, memory: int) -> str:
    """Empty where the case fits."""
    if case.weight_bytes + case.cache_bytes + ROOM_BYTES <= memory:
        return ""
    parts = (case.weight_bytes, case.cache_bytes, ROOM_BYTES, memory)
    weights, cache, room, total = (f"{num_bytes / 1e9:.1f} GB" for num_bytes in parts)
    return f"{weights} of weights, {cache} of keys and values and {room} for the rest do not fit in {total}"


def give_back_memory(device: torch.device) -> None:
    torch.compiler.reset()  # with the graphs that compiled functions have captured
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


class Exact:
    """The logits in float32, and the errors of plain ones."""

    def __init__(self, problem: Problem) -> None:
        self._logits = reference_logits(problem, torch.float32)
        plain = reference_logits(problem, torch.bfloat16)
        self.plain_error, self.plain_top1 = self.compare(plain)
        give_back_memory(problem.device)

    def compare(self, logits: Tensor) -> tuple[float, float]:
        """The largest error, NaN if there is one in them; and how often the likeliest token is the same."""
        error = (logits.float() - self._logits).abs().max()
        same = logits.argmax(-1) == self._logits.argmax(-1)
        return error.item(), same.float().mean().item()


def _marks(device: torch.device) -> tuple[Callable[[], None], Callable[[], list[float]]]:
    """What marks a moment on the device, and what says the microseconds between each two of them."""
    if device.type == "cpu":
        moments: list[float] = []
        return (
            lambda: moments.append(time.perf_counter()),
            lambda: [1e6 * (end - start) for start, end in itertools.pairwise(moments)],
        )
    events: list[torch.cuda.Event] = []

    def mark() -> None:
        events.append(torch.cuda.Event(enable_timing=True))
        events[-1].record()

    def read() -> list[float]:
        torch.cuda.synchronize()
        return [1e3 * start.elapsed_time(end) for start, end in itertools.pairwise(events)]

    return mark, read


def step_us(engine: Engine, device: torch.device) -> float:
    """The median of steps that follow one another, so that time that the host loses counts too."""
    for _ in range(WARM_UP_STEPS):
        engine.step()
    mark, read = _marks(device)
    mark()
    for _ in range(TIMED_STEPS):
        engine.step()
        mark()
    return statistics.median(read())


def checked_logits(engine: Engine, problem: Problem) -> Tensor:
    """The logits of the steps from the problem's own tokens: [batch, CHECKED_STEPS, vocabulary]."""
    logits = []
    for i in range(CHECKED_STEPS):
        engine.tokens.copy_(problem.tokens[:, i])
        engine.step()
        logits.append(engine.logits.clone())
    return torch.stack(logits, dim=1)


def measure_engine(
    kind: type[Engine], problem: Problem, exact: Exact, seconds: float, found: Measured
) -> None:
    """Add what it does to the findings. What a peer raises is the reason why it has no time; too little
    memory or time is one for Octavo too."""
    try:
        with time_limit(seconds):
            _measure(kind, problem, exact, found)
    except (TimeLimitError, torch.OutOfMemoryError) as error:
        found.skipped[kind.name] = first_line(error)
    except Exception as error:
        if not kind.peer:
            raise
        found.skipped[kind.name] = first_line(error)
    give_back_memory(problem.device)


def _measure(kind: type[Engine], problem: Problem, exact: Exact, found: Measured) -> None:
    name, engine = kind.name, kind(problem)
    found.max_error[name], found.top1[name] = exact.compare(checked_logits(engine, problem))
    tolerance = TOLERANCE * exact.plain_error
    if found.max_error[name] <= tolerance:
        found.us[name] = step_us(engine, problem.device)
    else:
        found.skipped[name] = f"WRONG: error {found.max_error[name]:.2g}, tolerance {tolerance:.2g}"


def problems(cases: Sequence[Case], device: torch.device) -> Iterator[Problem]:
    """Cases of one model one after another share its weights."""
    weights: Weights | None = None
    for case in cases:
        if weights is None or weights.config != case.config:
            weights = Weights.random(case.config, SEED, torch.bfloat16, device.type, WEIGHT_STD)
        yield Problem.drawn(case, weights, SEED)
