"""A small GPT learns to write NumPy's documentation, through octavo.torch.attention and its gradients.

    pip install torch ".[examples]"
    python examples/train.py                             # a minute on two cores; a larger model on a GPU
    torchrun --nproc-per-node=2 examples/train.py        # several GPUs, or processes on the CPU

The text is what NumPy ships as docstrings. Documents are packed, and do not see each other. At the end the
model invents the documentation of functions, through the paged cache. A run with --checkpoint goes on where
its file was written last. `--attention eager` is standard attention in PyTorch, which learns the same.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

# PyTorch's threads spin while they wait, for cores that octavo's threads or other programs could use. On two
# busy cores a step took a fifth of the time so.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

try:
    from gpt.attention import ATTENTION
    from gpt.data import Text, numpy_documentation
    from gpt.generation import check_context, generate
    from gpt.processes import Processes
    from gpt.training import SIZES, Report, Settings, Trainer, default_settings
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from octavo.serving import Sampling
except ModuleNotFoundError as missing:
    sys.exit(
        f"train.py: {missing}; in octavo's repository, everything that this example needs comes with\n"
        '    pip install torch ".[examples]"'
    )

PROMPTS = ["numpy.cumulative_mean\n\n", "numpy.linalg.is_symmetric\n\n"]  # which NumPy does not have


def main(arguments: list[str] | None = None) -> None:
    args = parse_arguments(arguments)
    try:
        with Processes(args.device) as processes:
            train(args, processes)
    except ValueError as error:
        sys.exit(f"train.py: {error}")


def train(args: argparse.Namespace, processes: Processes) -> None:
    settings = settings_of(args, processes.device.type)
    log = Console(stderr=True, quiet=processes.index > 0, markup=False, soft_wrap=True)
    text = Text(numpy_documentation(), settings.model.vocabulary)
    trainer = Trainer(settings, text, processes)
    parameters = sum(p.numel() for p in trainer.model.parameters())
    log.print(
        f"{parameters / 1e6:.1f} M parameters, {sum(map(len, text.training))} tokens of text; "
        f"{settings.attention} attention, {settings.dtype}, {processes.count} x {processes.device.type}"
    )
    prompts = [text.encode(prompt).tolist() for prompt in args.prompt or PROMPTS]
    check_context(trainer.model, prompts, args.max_tokens)
    sampling = Sampling(args.temperature, top_p=0.95, seed=settings.seed)
    if args.checkpoint and args.checkpoint.exists():
        trainer.load(args.checkpoint)
        log.print(f"{args.checkpoint}: goes on after step {trainer.step}")
    saved = trainer.step
    with progress_bar(log, trainer) as progress:
        [task] = progress.task_ids
        for report in trainer.run(args.report_every):
            progress.update(task, completed=report.step, numbers=numbers(report))
            if not log.is_terminal:
                log.print(f"step {report.step}: {numbers(report)}")
            is_due = report.step >= saved + args.save_every or report.step == settings.steps
            if args.checkpoint and is_due:
                trainer.save(args.checkpoint)
                saved = report.step
    held_out = trainer.held_out_loss()
    if processes.index > 0:
        return
    print(f"loss on held-out text: {held_out:.3f} ({text.unigram_loss:.3f} by how often each token occurs)")
    new = generate(
        trainer.model,
        prompts,
        args.max_tokens,
        stop_token=text.end_of_text,
        sampling=sampling,
        dtype=settings.dtype,
    )
    for prompt, tokens in zip(prompts, new, strict=True):
        written = [token for token in (*prompt, *tokens) if token != text.end_of_text]
        print(f"\n{text.decode(written)}")


def settings_of(args: argparse.Namespace, device: str) -> Settings:
    settings = default_settings(device, args.size)
    model = replace(settings.model, alibi=args.alibi, **given(args, "dropout"))
    chosen = given(args, "attention", "dtype", "rows", "steps", "learning_rate", "seed")
    settings = replace(settings, model=model, **chosen)
    if device == "cuda" and settings.dtype == "float32":
        raise ValueError("octavo's CUDA kernels take float16 and bfloat16, not float32")
    return settings


def given(args: argparse.Namespace, *names: str) -> dict[str, Any]:
    return {name: getattr(args, name) for name in names if getattr(args, name) is not None}


def numbers(report: Report) -> str:
    return (
        f"loss {report.loss:.3f}, gradient {report.gradient_norm:.2f}, "
        f"{report.tokens_per_second:,.0f} tokens/s"
    )


def progress_bar(log: Console, trainer: Trainer) -> Progress:
    columns = MofNCompleteColumn(), BarColumn(), TextColumn("{task.fields[numbers]}"), TimeRemainingColumn()
    progress = Progress(*columns, console=log, disable=not log.is_terminal)
    progress.add_task("", total=trainer.settings.steps, completed=trainer.step, numbers="")
    return progress


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--size", choices=SIZES, help="of the model, and how long it learns (tiny; small on a GPU)")
    add("--attention", choices=ATTENTION, help="(octavo)")
    add("--alibi", action="store_true", help="ALiBi in place of learned positions")
    add("--dropout", type=float, help="(tiny: 0; others: 0.2)")
    add("--steps", type=positive, help="(tiny: 500; others: 400)")
    add(
        "--rows",
        type=positive,
        help="of the model's context in each step, in all processes (8; 32; gpt2: 16)",
    )
    add("--learning-rate", type=float, help="after the warm-up (3e-3; 1e-3; gpt2: 6e-4)")
    add("--dtype", choices=["float32", "bfloat16"], help="of products and attention (cuda: bfloat16)")
    add("--device", choices=["cpu", "cuda"], help="(cuda where each process has a GPU)")
    add("--seed", type=int, help="of weights, the order of the text, dropout and samples (0)")
    add(
        "--checkpoint",
        type=Path,
        metavar="FILE",
        help="written as the run goes; if it exists, the run goes on",
    )
    add("--save-every", type=positive, default=100, metavar="STEPS", help="(%(default)s)")
    add("--report-every", type=positive, default=10, metavar="STEPS", help="(%(default)s)")
    add("--prompt", action="append", help="the beginning of a text; repeat it for more than one")
    add("--max-tokens", type=positive, default=80, help="new tokens for each prompt (%(default)s)")
    add("--temperature", type=float, default=0.7, help="0: always the likeliest token (%(default)s)")
    return parser.parse_args(arguments)


def positive(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return int(text)


if __name__ == "__main__":
    main()
