"""Training: steps, checkpoints, and the loss on what is held out."""

from __future__ import annotations

import math
import os
import pickle
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .attention import ATTENTION
from .data import Batch, Batches, Text
from .model import GPT, GPTConfig
from .processes import Processes

HELD_OUT_STEPS = 64  # at most this many batches of what is held out, the same ones whatever the seed


@dataclass(frozen=True)
class Settings:
    """What a run's numbers follow from, besides the text, the kind of device and the number of processes."""

    model: GPTConfig
    rows: int  # of `context` tokens, in each step and all processes together
    steps: int
    learning_rate: float  # after the warm-up; a cosine takes it down to a tenth
    attention: str = "octavo"
    dtype: str = "float32"  # of matrix products and attention; weights are float32
    warmup_steps: int = 60
    weight_decay: float = 0.1  # of matrices
    max_norm: float = 1.0  # of the gradient of all weights, which is scaled down to it
    seed: int = 0

    def learning_rate_at(self, step: int) -> float:
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        done = (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps)
        return self.learning_rate * (0.55 + 0.45 * math.cos(math.pi * done))


SIZES = {
    "tiny": Settings(
        GPTConfig(4, 4, 128, context=128, vocabulary=1024), rows=8, steps=500, learning_rate=3e-3
    ),
    "small": Settings(
        GPTConfig(6, 6, 384, context=512, vocabulary=4096, dropout=0.2),
        rows=32,
        steps=400,
        learning_rate=1e-3,
    ),
    "gpt2": Settings(
        GPTConfig(12, 12, 768, context=1024, vocabulary=4096, dropout=0.2),
        rows=16,
        steps=400,
        learning_rate=6e-4,
    ),
}


def default_settings(device: str, size: str | None = None) -> Settings:
    """What fits the device: "cpu" or "cuda"."""
    settings = SIZES[size or ("small" if device == "cuda" else "tiny")]
    return replace(settings, dtype="bfloat16") if device == "cuda" else settings


@dataclass(frozen=True)
class Report:
    step: int  # that has been done, from 1
    loss: float  # the mean of all processes and of the steps since the last report
    gradient_norm: float  # of the last step, before it was scaled down
    tokens_per_second: float  # since the last report


class Trainer:
    """A model in training. It seeds torch's generators, and leaves its place in them to a checkpoint."""

    def __init__(self, settings: Settings, text: Text, processes: Processes) -> None:
        self.settings = settings
        self.step = 0  # steps that have been done
        self._text = text
        self._processes = processes
        torch.manual_seed(settings.seed)  # the same weights in each process,
        self.model = GPT(settings.model).to(processes.device)
        torch.manual_seed(settings.seed + 1 + processes.index)  # but dropout of its own
        self._parallel = DistributedDataParallel(self.model) if processes.count > 1 else self.model
        self._optimizer = torch.optim.AdamW(self._groups(), betas=(0.9, 0.95), lr=settings.learning_rate)
        self._batches = self._batches_of(text.training, settings.seed)

    def run(self, report_every: int = 1) -> Iterator[Report]:
        """The steps that remain. To read a loss waits for the GPU, so not every step has to be reported."""
        settings = self.settings
        losses: list[Tensor] = []
        start = time.perf_counter()
        while self.step < settings.steps:
            loss, norm = self._train_step()
            losses.append(loss)
            if self.step % report_every == 0 or self.step == settings.steps:
                mean = self._processes.mean(torch.stack(losses).mean())
                seconds = time.perf_counter() - start
                tokens = len(losses) * settings.rows * settings.model.context
                yield Report(self.step, mean, float(norm), tokens / seconds)
                losses = []
                start = time.perf_counter()

    def held_out_loss(self) -> float:
        batches = self._batches_of(self._text.held_out, seed=0)
        self.model.eval()
        with torch.no_grad():
            steps = range(min(batches.steps_of_epoch, HELD_OUT_STEPS))
            losses = [self._loss(self.model, batches[step]) for step in steps]
        self.model.train()
        return self._processes.mean(torch.stack(losses).mean())

    def save(self, path: Path) -> None:
        """Write a checkpoint, at once or not at all. All processes call this; the first one writes."""
        generators = self._processes.gather(_generator_states(self._processes.device))
        if self._processes.index == 0:
            state = {
                "settings": self._described(),
                "step": self.step,  # from which the place in the text follows
                "model": self.model.state_dict(),
                "optimizer": self._optimizer.state_dict(),
                "generators": generators,
            }
            partial = path.with_name(f"{path.name}.partial")
            with partial.open("wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)

    def load(self, path: Path) -> None:
        """Go on where a checkpoint was written. ValueError where it is of other settings or another text."""
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
        except (EOFError, LookupError, RuntimeError, ValueError, pickle.UnpicklingError):
            raise ValueError(f"{path}: torch.load cannot read it; a checkpoint is expected") from None
        if not isinstance(state, dict) or "settings" not in state:
            raise ValueError(f"{path}: a checkpoint of this program is expected, and this is something else")
        for name, here in self._described().items():
            if (there := state["settings"].get(name)) != here:
                raise ValueError(f"{path}: the checkpoint has {name} {there!r}, and this run {here!r}")
        self.step = state["step"]
        self.model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        _set_generators(state["generators"][self._processes.index], self._processes.device)

    def _train_step(self) -> tuple[Tensor, Tensor]:
        """The loss, and the norm of its gradient."""
        for group in self._optimizer.param_groups:
            group["lr"] = self.settings.learning_rate_at(self.step)
        loss = self._loss(self._parallel, self._batches[self.step])
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.max_norm)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.step += 1
        return loss.detach(), norm

    def _loss(self, model: nn.Module, batch: Batch) -> Tensor:
        batch = batch.to(self._processes.device)
        attend = ATTENTION[self.settings.attention](batch)
        with autocast(self._processes.device, self.settings.dtype):
            logits = model(batch.tokens, batch.positions, attend)
            return nn.functional.cross_entropy(logits.float(), batch.targets)

    def _batches_of(self, documents: Sequence[NDArray[np.int64]], seed: int) -> Batches:
        return Batches(
            documents,
            context=self.settings.model.context,
            rows=self.settings.rows,
            seed=seed,
            process=self._processes.index,
            num_processes=self._processes.count,
        )

    def _groups(self) -> list[dict[str, Any]]:
        parameters = list(self.model.parameters())
        return [
            {"params": [p for p in parameters if p.dim() > 1], "weight_decay": self.settings.weight_decay},
            {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
        ]

    def _described(self) -> dict[str, Any]:
        """What a run has to have in common with the one that it goes on with."""
        flat = asdict(self.settings)
        flat |= flat.pop("model")
        return flat | {
            "processes": self._processes.count,
            "device": self._processes.device.type,
            "text": self._text.fingerprint,
        }


def autocast(device: torch.device, dtype: str) -> torch.autocast:
    return torch.autocast(device.type, torch.bfloat16, enabled=dtype == "bfloat16")


def _generator_states(device: torch.device) -> list[Tensor]:
    """The states of the CPU's generator, which draws the seeds of octavo's dropout, and of the GPU's."""
    states = [torch.get_rng_state()]
    return [*states, torch.cuda.get_rng_state(device)] if device.type == "cuda" else states


def _set_generators(states: list[Tensor], device: torch.device) -> None:
    torch.set_rng_state(states[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states[1], device)
