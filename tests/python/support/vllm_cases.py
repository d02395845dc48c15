"""What the tests of octavo.vllm share: devices, options of a layer, steps, and what is right by a mask."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from octavo import _vllm_backend
from support import oracle, vllm_layer
from support.vllm_layer import Batch, Layer

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
on_devices = pytest.mark.parametrize("device", DEVICES)
# Sequences and their new tokens, step by step: prompts, chunks beside single tokens, single tokens alone.
STEPS = [((0, 1, 2), (7, 1, 40)), ((0, 2, 3, 1), (1, 9, 20, 1)), ((3, 0, 1), (1, 1, 1)), ((1, 4), (30, 3))]
OPTIONS: dict[str, dict[str, Any]] = {
    "window": {"sliding_window": 5},
    "softcap": {"logits_soft_cap": 2.0},
    "alibi": {"alibi_slopes": [0.5, 0.25, 0.125, 0.0625]},
    "sinks": {"sinks": torch.tensor([2.0, -1.0, 0.5, 4.0])},
    "window and sinks": {
        "sliding_window": 5,
        "sinks": torch.tensor([2.0, -1.0, 0.5, 4.0], dtype=torch.bfloat16),
    },
    "window and softcap": {"sliding_window": 12, "logits_soft_cap": 3.0},
}


def dtype_on(device: str) -> str:
    return "float32" if device == "cpu" else "bfloat16"


def run_steps(layer: Layer, **masks: Any) -> None:
    for sequences, counts in STEPS:
        batch = layer.batch(sequences, counts)
        layer.run(batch)
        layer.check(sequences, counts, batch, **masks)


def random_step(layer: Layer) -> tuple[list[int], list[int]]:
    """Sequences and their new tokens; eight such steps have room in every cache."""
    size = int(layer.random.integers(1, vllm_layer.MAX_BATCH))
    sequences = layer.random.permutation(vllm_layer.MAX_BATCH)[:size].tolist()
    return sequences, [int(layer.random.choice([1, 1, 3, 11])) for _ in sequences]


def check_masks(
    layer: Layer,
    sequences: Sequence[int],
    counts: Sequence[int],
    batch: Batch,
    sees: Callable[[int, NDArray[np.int64], NDArray[np.int64]], NDArray[np.bool_]],
) -> None:
    """`sees` gives the mask of a sequence from its number, its queries' positions and those of its keys."""
    found, queries = [], batch.query[: sum(counts)].double().cpu().numpy()
    for sequence, q in zip(sequences, np.split(queries, np.cumsum(counts)[:-1]), strict=True):
        k, v = layer.stored[sequence]
        see = sees(sequence, np.arange(len(k) - len(q), len(k))[:, None], np.arange(len(k)))
        arguments = (q, k, v, see, layer.head_size**-0.5, 0.0, None, None, None)
        found.append((*oracle.attend(*arguments), *oracle.plain(*arguments, layer.dtype)))
    out, lse, errors, plain_out, plain_lse = map(np.concatenate, zip(*found, strict=True))
    plain_out = oracle.round_to(plain_out, layer.dtype)
    reference = oracle.Reference(layer.dtype, tuple(counts), out, lse, plain_out, plain_lse, errors)
    reference.check_out(batch.output[: sum(counts)].double().cpu().numpy())


def calls_of(monkeypatch: pytest.MonkeyPatch, name: str) -> list[dict[str, Any]]:
    """The keywords of calls of an operator by the backend."""
    made: list[dict[str, Any]] = []
    operator = getattr(_vllm_backend, name)

    def count(*args: Any, **keywords: Any) -> Any:
        made.append(keywords)
        return operator(*args, **keywords)

    monkeypatch.setattr(_vllm_backend, name, count)
    return made
