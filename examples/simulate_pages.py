"""Replays requests through octavo.PageAllocator and reports what became of the memory.

    python examples/simulate_pages.py                       # a made trace, and three tables
    python examples/simulate_pages.py --requests trace.jsonl --pages 2048 --trace pages.npz

Three questions of PagedAttention (Kwon et al. 2023, arXiv:2309.06180): how much memory is wasted, against
sequences that each get one contiguous piece of the maximum length; what a shared prefix saves; what parallel
samples and beams save by sharing pages.

Requests are JSON objects, one a line: arrival (step), prompt_len, output_len (tokens), prefix (a name;
requests of one name begin with the same tokens), prefix_len. Made ones have lengths like the ShareGPT
conversations of the paper (mean prompt 161, mean output 338 tokens; log-normal). No model runs: a step gives
every running sequence one token.
"""

from __future__ import annotations

import argparse
import json
from collections import deque
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

import octavo
from octavo.pages import Trace

MAX_BATCH = 256
WIDTHS = (2, 4, 6)
# Mean prompt and output of the paper's two sets of requests, in tokens. It saw 16.2 to 30.5 % saved
# by parallel samples and 44.3 to 66.3 % by beams on ShareGPT, 6.1 to 9.8 % and 37.6 to 55.2 % on Alpaca
# (section 6.3).
LENGTHS = (("ShareGPT", 161, 338), ("Alpaca", 19, 58))


@dataclass(frozen=True)
class Request:
    arrival: int
    prompt_len: int
    output_len: int
    prefix: str = ""
    prefix_len: int = 0

    def __post_init__(self) -> None:
        for name in ("prompt_len", "output_len"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} ({getattr(self, name)}) must be at least 1")
        if not 0 <= self.prefix_len <= self.prompt_len:
            raise ValueError(
                f"prefix_len ({self.prefix_len}) must be from 0 to prompt_len ({self.prompt_len})"
            )

    def prompt(self, number: int) -> np.ndarray:
        """Tokens that no other request has, after those of the prefix."""
        own = np.random.default_rng([1, number]).integers(0, 50000, self.prompt_len)
        name = np.frombuffer(self.prefix.encode(), np.uint8).tolist()
        shared = np.random.default_rng([2, *name]).integers(0, 50000, self.prefix_len)
        return np.concatenate([shared, own[self.prefix_len :]]).astype(np.int32)

    def answer(self, number: int) -> np.ndarray:
        """The tokens of its output, the same ones after a preemption."""
        return np.random.default_rng([3, number]).integers(0, 50000, self.output_len).astype(np.int32)


def log_normal(rng: np.random.Generator, mean: float, low: int, high: int, count: int) -> np.ndarray:
    sigma = 1.0
    lengths = rng.lognormal(np.log(mean) - sigma**2 / 2, sigma, count)
    return np.clip(lengths.round(), low, high).astype(int)


def make_requests(args: argparse.Namespace) -> list[Request]:
    rng = np.random.default_rng(args.seed)
    count = args.num_requests
    arrivals = np.cumsum(rng.exponential(1 / args.rate, count)).astype(int)
    prompts = log_normal(rng, args.mean_prompt, 4, args.max_length // 2, count)
    outputs = log_normal(rng, args.mean_output, 1, args.max_length // 2 - 1, count)
    requests = []
    for arrival, prompt, output in zip(arrivals, prompts, outputs, strict=True):
        if rng.random() < args.prefix_share:
            name, length = f"system prompt {rng.integers(args.num_prefixes)}", args.prefix_len
            prompt = min(prompt + length, args.max_length // 2)
        else:
            name, length = "", 0
        requests.append(Request(int(arrival), int(prompt), int(output), name, int(min(length, prompt))))
    return requests


@dataclass
class Report:
    """Means are over the steps in which a request was running."""

    steps: int = 0
    running: list[int] = field(default_factory=list)
    used: list[float] = field(default_factory=list)  # share of the memory
    waste: list[float] = field(default_factory=list)  # per cent of the slots in use that hold no token
    preemptions: int = 0
    hit_rate: float = 0.0

    def cells(self) -> list[str]:
        return [
            str(self.steps),
            f"{np.mean(self.running):.1f}",
            f"{100 * np.mean(self.used):.1f} %",
            f"{100 * np.max(self.used):.1f} %",
            f"{np.mean(self.waste):.2f} %",
            f"{100 * self.hit_rate:.1f} %",
            str(self.preemptions),
        ]


@dataclass
class Running:
    number: int
    seq: int
    left: int  # tokens still to generate


def replay_paged(
    requests: list[Request], args: argparse.Namespace, prefix_cache: bool, trace: bool
) -> Report:
    """First come, first served; when pages run out, the latest is preempted and computed anew later."""
    alloc = octavo.PageAllocator(args.pages, args.page_size, prefix_cache=prefix_cache)
    max_pages = -(-args.max_length // args.page_size)
    shapes = ((MAX_BATCH, max_pages), (MAX_BATCH,), (MAX_BATCH + 1,), (MAX_BATCH, 2))
    arrays = octavo.StepArrays(*(np.empty(shape, np.int32) for shape in shapes))
    recorder = Trace(alloc) if trace else None
    report = Report()
    waiting = deque(sorted(range(len(requests)), key=lambda number: requests[number].arrival))
    running: list[Running] = []
    generated = [0] * len(requests)
    answers = [request.answer(number) for number, request in enumerate(requests)]
    while waiting or running:
        while waiting and requests[waiting[0]].arrival <= report.steps and len(running) < MAX_BATCH:
            number = waiting[0]
            request = requests[number]
            tokens = np.concatenate([request.prompt(number), answers[number][: generated[number]]])
            seq = alloc.create(tokens) if prefix_cache else alloc.create()
            new = tokens[alloc.length(seq) :]
            try:
                alloc.step([seq], len(new), arrays, new if prefix_cache else None)
            except octavo.OutOfPages:
                alloc.free(seq)
                if not running:
                    raise
                break
            waiting.popleft()
            running.append(Running(number, seq, request.output_len - generated[number]))
        while running:
            tokens = np.array([answers[one.number][generated[one.number]] for one in running], np.int32)
            try:
                alloc.step([one.seq for one in running], 1, arrays, tokens if prefix_cache else None)
                break
            except octavo.OutOfPages:
                if len(running) == 1:
                    raise
                preempted = running.pop()
                alloc.free(preempted.seq)
                waiting.appendleft(preempted.number)
                report.preemptions += 1
        if running:
            stats = alloc.stats()
            report.running.append(len(running))
            report.used.append(stats["num_used_pages"] / stats["num_pages"])
            report.waste.append(stats["waste_percent"])
        if recorder:
            recorder.record()
        for one in running:
            one.left -= 1
            generated[one.number] += 1
            if one.left == 0:
                alloc.free(one.seq)
        running = [one for one in running if one.left > 0]
        report.steps += 1
    if prefix_cache:
        stats = alloc.cache_stats()
        report.hit_rate = stats["num_hit_tokens"] / stats["num_queried_tokens"]
    if recorder:
        recorder.save(args.trace)
    return report


def replay_contiguous(requests: list[Request], args: argparse.Namespace) -> Report:
    """Each running request owns max_length slots from its first token to its last."""
    capacity = args.pages * args.page_size
    report = Report()
    waiting = deque(sorted(requests, key=lambda request: request.arrival))
    running: list[list[int]] = []  # [tokens so far, tokens at the end]
    while waiting or running:
        while waiting and waiting[0].arrival <= report.steps and len(running) < MAX_BATCH:
            if (len(running) + 1) * args.max_length > capacity:
                break
            request = waiting.popleft()
            running.append([request.prompt_len, request.prompt_len + request.output_len])
        for one in running:
            one[0] += 1
        if running:
            slots = len(running) * args.max_length
            report.running.append(len(running))
            report.used.append(slots / capacity)
            report.waste.append(100 * (1 - sum(one[0] for one in running) / slots))
        running = [one for one in running if one[0] < one[1]]
        report.steps += 1
    return report


def saved_by_sharing(requests: list[Request], width: int, page_size: int, turnover: float | None) -> float:
    """Per cent of pages that `width` sequences of a prompt save, on average over their steps.

    Parallel samples go on independently (`turnover` None). Of a beam, each sequence goes on from another one
    with this probability at a step.
    """
    rng = np.random.default_rng(0)
    held = unshared = 0
    for request in requests:
        num_pages = width * -(-(request.prompt_len + request.output_len) // page_size)
        alloc = octavo.PageAllocator(num_pages + width, page_size)
        beam = [alloc.create()]
        alloc.extend(beam[0], request.prompt_len)
        beam += alloc.fork(beam[0], width - 1)
        for _ in range(request.output_len):
            if turnover is not None:
                moves = rng.random(width) < turnover
                alloc.reorder(beam, np.where(moves, rng.integers(0, width, width), np.arange(width)).tolist())
            for seq in beam:
                alloc.extend(seq, 1)
            alloc.take_copies()
            held += alloc.num_pages - alloc.num_free_pages
            unshared += width * -(-alloc.length(beam[0]) // page_size)
    return 100 * (1 - held / unshared)


def show(title: str, header: list[str], rows: list[list[str]]) -> None:
    print(f"\n{title}\n\n| {' | '.join(header)} |\n|---|{'--:|' * (len(header) - 1)}")
    for row in rows:
        print(f"| {' | '.join(row)} |")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=Path, help="replay this file instead of a made trace")
    parser.add_argument("--save-requests", type=Path, help="write the trace that was made")
    parser.add_argument("--trace", type=Path, help="record pages here, for python -m octavo.pages")
    parser.add_argument("--pages", type=int, default=1024)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--max-length", type=int, default=2048, help="of a contiguous sequence, in tokens")
    made = parser.add_argument_group("made requests")
    made.add_argument("--num-requests", type=int, default=200)
    made.add_argument("--rate", type=float, default=0.1, help="arrivals a step")
    made.add_argument("--mean-prompt", type=float, default=161)
    made.add_argument("--mean-output", type=float, default=338)
    made.add_argument("--prefix-share", type=float, default=0.5, help="of the requests")
    made.add_argument("--num-prefixes", type=int, default=2)
    made.add_argument("--prefix-len", type=int, default=200)
    made.add_argument("--seed", type=int, default=0)
    parser.add_argument("--turnover", type=float, default=0.02, help="of a beam; see saved_by_sharing")
    args = parser.parse_args()
    if args.pages * args.page_size < args.max_length:
        parser.error(
            f"--pages ({args.pages}) of --page-size ({args.page_size}) must hold --max-length "
            f"({args.max_length})"
        )
    if args.rate <= 0:
        parser.error(f"--rate ({args.rate}) must be greater than 0")
    if args.prefix_len < 0:
        parser.error(f"--prefix-len ({args.prefix_len}) must be at least 0")
    if args.requests:
        lines = args.requests.read_text().splitlines()
        try:
            requests = [Request(**json.loads(line)) for line in lines]
        except (TypeError, ValueError) as error:
            parser.error(f"--requests must have an object with the fields of a request in each line: {error}")
        longest = max((request.prompt_len + request.output_len for request in requests), default=0)
        if longest > args.max_length:
            parser.error(
                f"--requests must have none of more tokens than --max-length ({args.max_length}); "
                f"got {longest}"
            )
    else:
        requests = make_requests(args)
    if not requests:
        parser.error("there must be at least one request")
    if args.save_requests:
        args.save_requests.write_text("".join(json.dumps(asdict(request)) + "\n" for request in requests))

    reports = {
        "contiguous, maximum length": replay_contiguous(requests, args),
        "pages": replay_paged(requests, args, prefix_cache=False, trace=False),
        "pages, prefix cache": replay_paged(requests, args, prefix_cache=True, trace=args.trace is not None),
    }
    header = ["memory", "steps", "running", "used", "peak", "waste", "prompt tokens found", "preemptions"]
    show(
        f"{len(requests)} requests, {args.pages} pages of {args.page_size}",
        header,
        [[name, *report.cells()] for name, report in reports.items()],
    )
    rng = np.random.default_rng(args.seed)
    columns = ["sequences a request"]
    rows = [[str(width)] for width in WIDTHS]
    for name, mean_prompt, mean_output in LENGTHS:
        lengths = zip(
            log_normal(rng, mean_prompt, 4, args.max_length // 2, 50),
            log_normal(rng, mean_output, 1, args.max_length // 2, 50),
            strict=True,
        )
        few = [Request(0, int(prompt), int(output)) for prompt, output in lengths]
        columns += [f"{name}: parallel samples", f"{name}: beam search"]
        for row, width in zip(rows, WIDTHS, strict=True):
            for turnover in (None, args.turnover):
                row.append(f"{saved_by_sharing(few, width, args.page_size, turnover):.1f} %")
    show(f"Pages saved by sharing; beams with a turnover of {args.turnover:g}", columns, rows)


if __name__ == "__main__":
    main()
