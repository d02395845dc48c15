"""CUDA graphs of a model's decode steps, and logits that stay on the device."""

from __future__ import annotations

import bisect
import contextlib
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo._kv_cache import KVCache

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
    best: Tensor  # [2, rows]


# A capture, and the look for what waits for the GPU, change what all threads of the process share.
_capturing = threading.Lock()


class DecodeGraphs:
    """The graphs of a model's decode steps, one for each padded batch size, captured when it first comes.

    A step's arrays have the same addresses in every step of a cache, so that a graph that was captured in one
    serves all. All graphs read the same input_ids and write the same logits.

    Args:
        name: of the model, for a warning.
        device: of the model.
        required: whether it is an error if a step cannot be captured. Otherwise there is one warning, and
            steps run without graphs.
    """

    def __init__(self, name: str, device: torch.device, *, required: bool) -> None:
        self.num_replays = 0
        self._name = name
        self._device = device
        self._required = required
        self._refusal: str | None = None  # why steps cannot be captured
        self._graphs: dict[int, _DecodeGraph] = {}
        self._cache: weakref.ref[KVCache] | None = None  # whose arrays the graphs have
        self._stream: torch.cuda.Stream | None = None  # of all captures, on the model's device
        self._input_ids: Tensor | None = None  # [1, max_batch]
        self._logits: Tensor | None = None  # [max_batch, vocabulary]

    def forward(
        self, cache: KVCache, tokens: NDArray[np.int64], rows: int, run: Callable[[Tensor], Tensor]
    ) -> DeviceLogits | None:
        """Return the logits of a decode step, or None if it has to run without a graph.

        Args:
            cache: of the step.
            tokens: int64 [batch].
            rows: of the step's arrays: batch, or more with padding.
            run: the model's forward for this step, from input_ids, int64 [1, rows], to logits
                [rows, vocabulary].
        """
        if self._refusal is not None:
            if self._required:
                raise ValueError(self._refusal)
            return None
        if self._cache is None or self._cache() is not cache:
            self._graphs.clear()
            self._cache = weakref.ref(cache)
            with torch.inference_mode(False):  # which would make tensors that are not written elsewhere
                self._input_ids = torch.zeros(1, cache.max_batch, dtype=torch.int64, device=self._device)
            self._logits = None
        assert self._input_ids is not None
        self._input_ids[0, : len(tokens)].copy_(torch.from_numpy(tokens))
        if rows not in self._graphs:
            try:
                self._graphs[rows] = self._capture(self._input_ids[:, :rows], run)
            except RuntimeError as error:
                self._give_up(error)
                return None
        made = self._graphs[rows]
        made.graph.replay()
        self.num_replays += 1
        assert self._logits is not None
        return DeviceLogits(self._logits[: len(tokens)], made.best[:, : len(tokens)])

    def _capture(self, input_ids: Tensor, run: Callable[[Tensor], Tensor]) -> _DecodeGraph:
        with _capturing, torch.cuda.device(self._device), _without_autocast_cache():
            if self._stream is None:
                self._stream = torch.cuda.Stream()
            current = torch.cuda.current_stream()
            self._stream.wait_stream(current)
            try:
                with torch.cuda.stream(self._stream):
                    return self._capture_on_stream(input_ids, run)
            finally:
                current.wait_stream(self._stream)

    def _capture_on_stream(self, input_ids: Tensor, run: Callable[[Tensor], Tensor]) -> _DecodeGraph:
        """Run twice, see the second time that the host waits for nothing, then capture.

        The step writes the same keys and values again. To find out in the capture would cost the process its
        generator of random numbers on the GPU.
        """
        logits = run(input_ids)
        if self._logits is None:
            assert self._input_ids is not None
            with torch.inference_mode(False):
                self._logits = logits.new_empty(self._input_ids.shape[1], logits.shape[1])
        best_of(logits)
        with _no_synchronization():
            best_of(run(input_ids))
        del logits
        graph = torch.cuda.CUDAGraph()
        pool = next((other.graph.pool() for other in self._graphs.values()), None)
        with torch.cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"):
            kept = self._logits[: input_ids.shape[1]]
            kept.copy_(run(input_ids))
            best = best_of(kept)
        return _DecodeGraph(graph, best)

    def _give_up(self, error: RuntimeError) -> None:
        self._graphs.clear()
        self._logits = None
        waits = "synchronizing CUDA operation" in str(error)
        why = "the model waits for the GPU in a forward pass" if waits else str(error)
        what = f"octavo.transformers: decode steps of {self._name}"
        self._refusal = f"{what} cannot be captured, as cuda_graphs=True asks for: {why}"
        if self._required:
            raise ValueError(self._refusal) from error
        warnings.warn(
            f"{what} run without CUDA graphs, and slower: {why}. Pass cuda_graphs=False to silence this",
            RuntimeWarning,
            stacklevel=2,
        )


@contextlib.contextmanager
def _no_synchronization() -> Iterator[None]:
    """Let an operation that waits for the GPU raise RuntimeError."""
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)


@contextlib.contextmanager
def _without_autocast_cache() -> Iterator[None]:
    """Have autocast cast weights in each call: what it keeps is gone when a graph is replayed later."""
    was_enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(was_enabled)
