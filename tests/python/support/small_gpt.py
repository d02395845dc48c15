"""A GPT of examples/gpt that is small enough for tests, and how tests train it."""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
sys.path.insert(0, str(EXAMPLES))

import torch  # noqa: E402
from gpt.attention import ATTENTION  # noqa: E402
from gpt.data import Batch, Batches, Document, Text, numpy_documentation  # noqa: E402
from gpt.model import GPT, GPTConfig  # noqa: E402
from gpt.processes import Processes  # noqa: E402
from gpt.training import Settings, Trainer  # noqa: E402

MODEL = GPTConfig(num_layers=2, num_heads=2, hidden_size=64, context=64, vocabulary=512)
# With ALiBi it learns in fewer steps.
SETTINGS = Settings(replace(MODEL, alibi=True), rows=8, steps=80, learning_rate=4e-3, warmup_steps=10)
SHORT = replace(SETTINGS, model=MODEL, rows=4, steps=6)


@functools.cache
def get_documents() -> list[Document]:
    return numpy_documentation()


@functools.cache
def get_text() -> Text:
    return Text(get_documents(), MODEL.vocabulary)


def batches(**options: Any) -> Batches:
    return Batches(get_text().training, **{"context": 64, "rows": 4, "seed": 0, **options})


def mixed_batch() -> Batch:
    """One whose rows hold several documents."""
    found = batches()
    steps = map(found.__getitem__, range(found.steps_of_epoch))
    return next(batch for batch in steps if len(batch.cu_seqlens) > 7)


def make_model(**changes: Any) -> GPT:
    """With weights so large that attention matters."""
    torch.manual_seed(0)
    model = GPT(replace(MODEL, **changes)).eval()
    with torch.no_grad():
        for parameter in model.blocks.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def logits(model: GPT, batch: Batch, attention: str = "octavo") -> torch.Tensor:
    return model(batch.tokens, batch.positions, ATTENTION[attention](batch))


def recompute(model: GPT, prompt: Sequence[int], number: int) -> list[int]:
    """The likeliest tokens, each from the whole sequence before it."""
    tokens = list(prompt)
    for _ in range(number):
        length = len(tokens)
        whole = torch.tensor(tokens)
        cu_seqlens = torch.tensor([0, length], dtype=torch.int32)
        batch = Batch(whole, whole, torch.arange(length), cu_seqlens, context=length)
        with torch.no_grad():
            tokens.append(int(logits(model, batch, "octavo")[-1].argmax()))
    return tokens[len(prompt) :]


def trained(settings: Settings, processes: Processes | None = None) -> tuple[Trainer, list[float]]:
    """After all steps, with the loss of each."""
    trainer = Trainer(settings, get_text(), processes or Processes("cpu"))
    return trainer, [report.loss for report in trainer.run()]


def interrupted(
    settings: Settings, path: Path, processes: Processes | None = None
) -> tuple[Trainer, list[float]]:
    """The same, but half of the steps in one trainer and the others in another, which reads a checkpoint."""
    processes = processes or Processes("cpu")
    trainer = Trainer(settings, get_text(), processes)
    steps = trainer.run()
    losses = [next(steps).loss for _ in range(settings.steps // 2)]
    trainer.save(path)
    trainer = Trainer(settings, get_text(), processes)
    trainer.load(path)
    return trainer, losses + [report.loss for report in trainer.run()]
