"""CUDA graphs of a model's decode steps, and logits that stay on the device."""

from __future__ import annotations

import bisect
import warnings
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_SIZES = (1, 2, 4, *range(8, 64, 8), *range(64, 256, 16))  # and multiples of 32


def decode_batches(max_batch: int) -> list[int]:
    """Return the batch sizes that have a graph each, up to max_batch."""
    sizes = [*_SIZES, *range(256, max_batch, 32)]
    return [*sizes[: bisect.bisect_left(sizes, max_batch)], max_batch]


class DeviceLogits:
    """octavo.serving.Logits of a tensor."""

    def __init__(self, logits: Tensor, best: Tensor | None = None) -> None:
        self._logits = logits
        self._best = best

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self._logits.shape)

    def best(self) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        found = best_of(self._logits) if self._best is None else self._best
        tokens, largest = found.cpu().numpy()
        return tokens.astype(np.int64), largest.astype(np.float32)

    def rows(self, rows: Sequence[int]) -> NDArray[np.float32]:
        result: NDArray[np.float32] = self._logits[list(rows)].float().cpu().numpy()
        return result


def best_of(logits: Tensor) -> Tensor:
    """Return the likeliest token of each row and its logit, float64 [2, batch], for one transfer."""
    largest, tokens = logits.max(dim=1)  # the first of equal ones; NaN counts as the largest
    return torch.stack((tokens.double(), largest.double()))


class _DecodeGraph(NamedTuple):
    graph: torch.cuda.CUDAGraph
    input_ids: Tensor  # [1, rows]
    logits: Tensor  # [rows, vocabulary]
    best: Tensor  # [2, rows]


class DecodeGraphs:
    """The graphs of a model's decode steps, one for each padded batch size, captured when it first comes.

    A step's arrays have the same addresses in every step of a cache, so that a graph that was captured in one
    serves all.

    Args:
        device: of the model.
        required: whether it is an error if a step cannot be captured. Otherwise there is one warning, and
            steps run without graphs.
    """

    def __init__(self, device: torch.device, *, required: bool) -> None:
        self.num_replays = 0
        self.is_possible = True
        self._device = device
        self._required = required
        self._graphs: dict[int, _DecodeGraph] = {}

    def forward(
        self, tokens: NDArray[np.int64], rows: int, run: Callable[[Tensor], Tensor]
    ) -> DeviceLogits | None:
        """Return the logits of a decode step, or None if it has to run without a graph.

        Args:
            tokens: int64 [batch].
            rows: of the step's arrays: batch, or more with padding.
            run: the model's forward for this step, from input_ids, int64 [1, rows], to logits
                [rows, vocabulary].
        """
        if not self.is_possible:
            return None
        made = self._graphs.get(rows)
        if made is None:
            made = self._capture(tokens, rows, run)
            if made is None:
                return None
            self._graphs[rows] = made
        else:
            made.input_ids[0, : len(tokens)].copy_(torch.from_numpy(tokens))
        made.graph.replay()
        self.num_replays += 1
        return DeviceLogits(made.logits[: len(tokens)], made.best[:, : len(tokens)])

    def _capture(
        self, tokens: NDArray[np.int64], rows: int, run: Callable[[Tensor], Tensor]
    ) -> _DecodeGraph | None:
        input_ids = torch.zeros(1, rows, dtype=torch.int64, device=self._device)
        input_ids[0, : len(tokens)] = torch.from_numpy(tokens)
        with torch.cuda.device(self._device):
            try:
                self._warm_up(lambda: best_of(run(input_ids)))
            except RuntimeError as error:
                if "synchronizing CUDA operation" not in str(error):
                    raise
                self._give_up("the model waits for the GPU in a forward pass")
                return None
            graph = torch.cuda.CUDAGraph()
            pool = next((other.graph.pool() for other in self._graphs.values()), None)
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                logits = run(input_ids)
                best = best_of(logits)
        return _DecodeGraph(graph, input_ids, logits, best)

    def _warm_up(self, run: Callable[[], object]) -> None:
        """Run twice beside the current stream, and see the second time that the host waits for nothing.

        The step writes the same keys and values again. To find out in a capture would cost the process its
        generator of random numbers on the GPU.
        """
        current, side = torch.cuda.current_stream(), torch.cuda.Stream()
        side.wait_stream(current)
        with torch.cuda.stream(side):
            run()
            mode = torch.cuda.get_sync_debug_mode()
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
                torch.cuda.set_sync_debug_mode("error")
            try:
                run()
            finally:
                torch.cuda.set_sync_debug_mode(mode)
        current.wait_stream(side)

    def _give_up(self, why: str) -> None:
        self.is_possible = False
        self._graphs.clear()
        if self._required:
            raise ValueError(f"octavo.transformers: cuda_graphs=True cannot be had: {why}")
        warnings.warn(
            f"octavo.transformers: decode steps run without CUDA graphs, and slower: {why}. "
            "cuda_graphs=False says that this is known",
            RuntimeWarning,
            stacklevel=2,
        )
