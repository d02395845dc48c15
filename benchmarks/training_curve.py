"""The loss of a model that learns by octavo's attention and by eager attention, with two seeds each.

    python benchmarks/training_curve.py --json benchmarks/results/training-cpu.jsonl
    python benchmarks/training_curve.py --json benchmarks/results/training-h200.jsonl    # on a GPU
    python docs/pictures/draw.py                                                         # draws each file

It is the model of examples/train.py, in the size that fits the device. What the two seeds differ by is the
noise in which a difference between the attentions may hide.
"""

from __future__ import annotations

import importlib.metadata
import os
import statistics
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from _command import Parser
from _report import write_rows

# PyTorch's threads spin while they wait, for cores that octavo's threads or other programs could use.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))

try:
    import torch
    from gpt.data import Text, numpy_documentation
    from gpt.processes import Processes
    from gpt.training import Settings, Trainer, default_settings

    import octavo
except ModuleNotFoundError as missing:
    sys.exit(f'training_curve.py: {missing}; get it with pip install torch ".[examples]"')

SEEDS = (0, 1)
ATTENTIONS = ("octavo", "eager")


@dataclass(frozen=True)
class Row:
    device: str
    settings: dict[str, object]  # gpt.training.Settings, with attention and seed
    versions: dict[str, str]
    losses: list[float]  # of each step
    held_out_loss: float
    unigram_loss: float  # of a model that knows only how often each token occurs, on what is held out
    tokens_per_second: float  # the median of all steps


def measure(settings: Settings, text: Text, processes: Processes) -> Row:
    trainer = Trainer(settings, text, processes)
    reports = list(trainer.run())
    on_gpu = processes.device.type == "cuda"
    device = torch.cuda.get_device_name() if on_gpu else f"CPU, {torch.get_num_threads()} threads"
    versions = {name: importlib.metadata.version(name) for name in ("numpy", "tokenizers", "torch")}
    return Row(
        device,
        asdict(settings),
        {"octavo": octavo.__version__, **versions},
        [round(report.loss, 6) for report in reports],
        round(trainer.held_out_loss(), 6),
        round(text.unigram_loss, 6),
        round(statistics.median(report.tokens_per_second for report in reports)),
    )


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--json", metavar="PATH", type=Path, help="write the rows here")
    parser.add_argument("--steps", type=int, help="fewer than examples/train.py does")
    args = parser.parse_args()
    rows = []
    with Processes() as processes:
        settings = default_settings(processes.device.type)
        settings = replace(settings, steps=args.steps or settings.steps)
        text = Text(numpy_documentation(), settings.model.vocabulary)
        print("| attention | seed | last loss | held-out loss | tokens/s |\n|---|--:|--:|--:|--:|")
        for seed in SEEDS:
            for attention in ATTENTIONS:
                row = measure(replace(settings, attention=attention, seed=seed), text, processes)
                numbers = f"{row.losses[-1]:.4f} | {row.held_out_loss:.4f} | {row.tokens_per_second}"
                print(f"| {attention} | {seed} | {numbers} |", flush=True)
                rows.append(row)
    if args.json:
        write_rows(args.json, [asdict(row) for row in rows])


if __name__ == "__main__":
    main()
