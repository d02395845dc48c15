"""A Llama decodes a batch through Octavo: six operators a layer, and each step one CUDA graph.

    python examples/llama_decode.py                                                # tiny, on any machine
    python examples/llama_decode.py --model llama-3-8b --batch 8 --context 2048    # on a GPU

The weights are random, and so are the prompts: this shows how fast a model is, and how one is put together
that you can take over. llama/model.py is the decoder. `Weights.from_transformers` takes the weights of a
model that transformers has loaded:

    model = transformers.AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16, device_map="cuda")
    llama = Llama(Weights.from_transformers(model), max_positions=4096, static_weight=True, static_past=True)
    tokens = Generation(llama, [tokenizer(text)["input_ids"] for text in texts], num_new_tokens=100).run()
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from dataclasses import replace

try:
    import torch
    from llama.config import CONFIGS
    from llama.decoding import Generation
    from llama.model import Llama
    from llama.weights import Weights
except ModuleNotFoundError as missing:
    sys.exit(f"llama_decode.py: {missing}; get it with pip install torch")


def main() -> None:
    args = parse_arguments()
    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit("llama_decode.py: PyTorch finds no CUDA device")
    config = CONFIGS[args.model]
    config = replace(config, num_layers=args.layers or config.num_layers)
    draw = random.Random(args.seed)
    prompts = [[draw.randrange(config.vocabulary) for _ in range(args.context)] for _ in range(args.batch)]
    with torch.inference_mode():
        weights = Weights.random(config, args.seed, getattr(torch, args.dtype), args.device)
        llama = Llama(weights, args.context + args.steps, static_weight=True, static_past=True)
        start = now(args.device)
        generation = Generation(llama, prompts, args.steps)
        prefilled = now(args.device)
        tokens = generation.run()
        seconds = now(args.device) - prefilled
    print(f"{args.model}, {config.num_layers} layers, {args.dtype}, {args.device}, static weights")
    print(f"{args.batch} prompts of {args.context} tokens, and the first step: {prefilled - start:.2f} s")
    steps = max(1, args.steps - 1)
    print(f"{seconds / steps * 1e3:.3f} ms a step, {args.batch * steps / seconds:.0f} tokens/s")
    for row in tokens[:3].tolist():
        print(" ".join(map(str, row[:16])), "..." if len(row) > 16 else "")


def now(device: str) -> float:
    """Seconds, when the device has done what it was given."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A Llama with random weights decodes a batch.")
    add = parser.add_argument
    on_gpu = torch.cuda.is_available()
    add("--model", choices=CONFIGS, default="tiny", help="(%(default)s)")
    add("--layers", type=positive, help="fewer than the model has")
    add("--batch", type=positive, default=4, help="prompts (%(default)s)")
    add("--context", type=positive, default=100, help="tokens of a prompt (%(default)s)")
    add("--steps", type=positive, default=64, help="new tokens of each prompt (%(default)s)")
    add("--seed", type=int, default=0, help="of weights and prompts (%(default)s)")
    add("--device", choices=["cpu", "cuda"], default="cuda" if on_gpu else "cpu", help="(%(default)s)")
    add("--dtype", choices=["bfloat16", "float16"], default="bfloat16", help="(%(default)s)")
    return parser.parse_args()


def positive(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return int(text)


if __name__ == "__main__":
    main()
