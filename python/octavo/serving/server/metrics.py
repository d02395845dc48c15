"""What the server counts, as text for Prometheus."""

from __future__ import annotations

import bisect
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence

from octavo.serving.server.snapshot import Snapshot

PREFIX = "octavo_"
RATE_SECONDS = 5.0  # over which tokens per second are counted

_TIMES = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_TOKEN_TIMES = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


class Histogram:
    """Counts of values below limits.

    Args:
        limits: upper ones, ascending; values above the last are counted too.
    """

    def __init__(self, limits: Sequence[float]) -> None:
        self._limits = tuple(limits)
        self._counts = [0] * (len(limits) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Counts a value."""
        self._counts[bisect.bisect_left(self._limits, value)] += 1
        self._sum += value

    def lines(self, name: str) -> Iterable[str]:
        """Prometheus's lines of it."""
        total = 0
        for limit, count in zip((*self._limits, "+Inf"), self._counts, strict=True):
            total += count
            yield f'{name}_bucket{{le="{limit}"}} {total}'
        yield f"{name}_sum {self._sum}"
        yield f"{name}_count {total}"


class Metrics:
    """Counts since the start. The engine's thread writes all but `http`, which the event loop writes."""

    def __init__(self) -> None:
        self.http: Counter[tuple[str, int]] = Counter()  # requests by path and status
        self.prompt_tokens = 0
        self.generated_tokens = 0
        self.answers = 0
        self.finished: Counter[str] = Counter()  # answers by the reason
        self.cancelled = 0  # answers
        self.first_token = Histogram(_TIMES)
        self.next_token = Histogram(_TOKEN_TIMES)
        self.duration = Histogram(_TIMES)
        self._steps: deque[tuple[float, int]] = deque()  # of late: when, and how many tokens

    def accept(self, prompts: Iterable[Sequence[int]], num_answers: int) -> None:
        """Counts a job."""
        self.prompt_tokens += sum(map(len, prompts))
        self.answers += num_answers

    def step(self, now: float, num_tokens: int) -> None:
        """Counts a step that brought new tokens."""
        self.generated_tokens += num_tokens
        self._steps.append((now, num_tokens))
        self._forget(now)

    def finish(self, reason: str, seconds: float) -> None:
        """Counts an answer that came to its end, and the time since its job came."""
        self.finished[reason] += 1
        self.duration.observe(seconds)

    def tokens_per_second(self, now: float) -> float:
        """Generated, over the last RATE_SECONDS."""
        self._forget(now)
        return sum(num_tokens for _, num_tokens in self._steps) / RATE_SECONDS

    def _forget(self, now: float) -> None:
        while self._steps and self._steps[0][0] < now - RATE_SECONDS:
            self._steps.popleft()


def render(metrics: Metrics, snapshot: Snapshot, in_flight: int) -> str:
    """All of it in Prometheus's text format, version 0.0.4."""
    lines: list[str] = []

    def add(name: str, kind: str, what: str, values: Mapping[str, float] | float) -> None:
        lines.append(f"# HELP {PREFIX}{name} {what}")
        lines.append(f"# TYPE {PREFIX}{name} {kind}")
        by_label = values if isinstance(values, Mapping) else {"": values}
        lines.extend(f"{PREFIX}{name}{label} {value}" for label, value in by_label.items())

    http = {f'{{path="{path}",status="{status}"}}': n for (path, status), n in sorted(metrics.http.items())}
    add("http_requests_total", "counter", "Requests of HTTP answered.", http)
    add("prompt_tokens_total", "counter", "Tokens of the prompts accepted.", metrics.prompt_tokens)
    add("generated_tokens_total", "counter", "Tokens generated.", metrics.generated_tokens)
    add("answers_total", "counter", "Answers begun or queued.", metrics.answers)
    finished = {f'{{reason="{reason}"}}': n for reason, n in sorted(metrics.finished.items())}
    add("answers_finished_total", "counter", "Answers that came to their end.", finished)
    add(
        "answers_cancelled_total",
        "counter",
        "Answers given up, mostly as the client left.",
        metrics.cancelled,
    )
    add(
        "preemptions_total", "counter", "Times that a sequence gave its pages away.", snapshot.num_preemptions
    )
    add(
        "prefix_asked_tokens_total",
        "counter",
        "Tokens looked for in the prefix cache.",
        snapshot.asked_tokens,
    )
    add("prefix_found_tokens_total", "counter", "Tokens found there.", snapshot.found_tokens)
    add("in_flight_answers", "gauge", "Answers that run or wait.", in_flight)
    add("running_sequences", "gauge", "Sequences in the batch.", snapshot.running)
    add("waiting_sequences", "gauge", "Sequences that wait.", snapshot.waiting)
    add("tokens_per_second", "gauge", f"Over the last {RATE_SECONDS:g} seconds.", snapshot.tokens_per_second)
    of_groups = {f'{{group="{i}"}}': group for i, group in enumerate(snapshot.groups)}
    for state in ("used", "shared", "free"):
        pages = {label: group[f"num_{state}_pages"] for label, group in of_groups.items()}
        add(f"{state}_pages", "gauge", f"Pages that are {state}.", pages)
    waste = {label: group["waste_percent"] for label, group in of_groups.items()}
    add("waste_percent", "gauge", "Slots of used pages without a token.", waste)
    for name, what, histogram in (
        ("first_token_seconds", "From a request to its first token.", metrics.first_token),
        ("next_token_seconds", "Between two tokens of an answer.", metrics.next_token),
        ("answer_seconds", "From a request to an answer's last token.", metrics.duration),
    ):
        lines += [f"# HELP {PREFIX}{name} {what}", f"# TYPE {PREFIX}{name} histogram"]
        lines += histogram.lines(PREFIX + name)
    return "\n".join(lines) + "\n"
