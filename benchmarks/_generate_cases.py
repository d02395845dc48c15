"""What bench_generate.py times: decode steps of a model. Needs neither an array library nor a GPU."""

from __future__ import annotations

from dataclasses import dataclass, replace

import _examples_path  # noqa: F401
from llama.config import CONFIGS, Config

CHECKED_STEPS = 4  # whose logits are compared
WARM_UP_STEPS = 4
TIMED_STEPS = 64
BYTES = 2  # of an element: bfloat16
ROUNDED_TO = 16  # tokens: so that rows of masks are aligned, without which PyTorch takes slower kernels

MODELS = {"7b": "llama-2-7b", "8b": "llama-3-8b", "tiny": "tiny"}


@dataclass(frozen=True)
class Case:
    """Sequences with a context of equal length, each of which goes on from there."""

    model: str  # of MODELS
    batch: int
    context: int  # tokens of each sequence that the cache holds beforehand
    num_layers: int = 0  # 0: as many as the model has

    @property
    def name(self) -> str:
        fewer = f"_layers{self.num_layers}" if self.num_layers else ""
        return f"{self.model}_b{self.batch}_s{self.context}{fewer}"

    @property
    def config(self) -> Config:
        config = CONFIGS[MODELS[self.model]]
        return replace(config, num_layers=self.num_layers or config.num_layers)

    @property
    def capacity(self) -> int:
        """Tokens of a sequence that a cache has room for."""
        tokens = self.context + CHECKED_STEPS + WARM_UP_STEPS + TIMED_STEPS
        return -(-tokens // ROUNDED_TO) * ROUNDED_TO

    @property
    def num_bytes(self) -> int:
        """What the timed step in the middle has to read: weights, keys and values."""
        length = self.context + CHECKED_STEPS + WARM_UP_STEPS + TIMED_STEPS // 2
        config = self.config
        return BYTES * (config.elements_of_a_step + self.batch * length * config.elements_of_a_token)

    @property
    def weight_bytes(self) -> int:
        return BYTES * self.config.elements

    @property
    def cache_bytes(self) -> int:
        return BYTES * self.batch * self.capacity * self.config.elements_of_a_token


BATCHES = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (1024, 2048, 4096, 8192)

# What one call may choose from.
GROUPS: dict[str, list[Case]] = {
    "main": [Case("7b", 1, 1024), Case("7b", 16, 1024), Case("8b", 1, 8192), Case("8b", 64, 1024)],
    "batch": [Case(model, batch, 1024) for model in ("7b", "8b") for batch in BATCHES],
    "context": [
        Case(model, batch, context) for model in ("7b", "8b") for batch in (1, 8, 64) for context in CONTEXTS
    ],
}
TINY = [Case("tiny", 1, 20), Case("tiny", 3, 33)]
