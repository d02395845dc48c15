"""octavo.KVCache on a GPU: as on the CPU, in captured graphs, and moved to host memory and back."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

import octavo
from support.libraries import ArrayLibrary, get_library

pytestmark = pytest.mark.gpu

NUM_LAYERS, NUM_Q_HEADS, NUM_KV_HEADS, HEAD_DIM = 2, 8, 2, 64
WINDOWS = [None, 15]


@functools.cache
def on_gpu(name: str) -> ArrayLibrary:
    pytest.importorskip(name)
    return get_library(name, "cuda")


@pytest.fixture(params=["torch", "cupy"])
def gpu(request: pytest.FixtureRequest) -> ArrayLibrary:
    return on_gpu(request.param)


def make_cache(library: ArrayLibrary, **options: Any) -> octavo.KVCache:
    arguments = {"num_pages": 64, "page_size": 16, "max_batch": 4, "max_length": 512, "windows": WINDOWS}
    return octavo.KVCache(
        NUM_LAYERS,
        NUM_KV_HEADS,
        HEAD_DIM,
        dtype="float16",
        like=library.array(np.zeros(1), "float16"),
        **{**arguments, **options},
    )


def random_tokens(total: int, seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [
        rng.standard_normal((total, heads, HEAD_DIM)).astype(np.float16)
        for heads in (NUM_Q_HEADS, NUM_KV_HEADS, NUM_KV_HEADS)
    ]


class Both:
    """The same calls of a cache on the GPU and of one of NumPy's."""

    def __init__(self, library: ArrayLibrary, **options: Any) -> None:
        self.library = library
        self.caches = (make_cache(library, **options), make_cache(get_library("numpy", "cpu"), **options))
        self.seqs: list[list[int]] = [[], []]

    def call(self, name: str, *arguments: Any) -> list[Any]:
        return [getattr(cache, name)(*arguments) for cache in self.caches]

    def step(self, counts: Any, seed: int, which: slice = slice(None)) -> None:
        seqs = [x[which] for x in self.seqs]
        steps = [cache.step(x, counts) for cache, x in zip(self.caches, seqs, strict=True)]
        tokens = random_tokens(steps[0].num_tokens, seed)
        for layer in range(NUM_LAYERS):
            out = steps[0].attend(layer, *(self.library.from_numpy(x) for x in tokens))
            expected = steps[1].attend(layer, *tokens)
            np.testing.assert_allclose(
                self.library.to_float64(out), expected.astype(np.float64), rtol=2e-2, atol=5e-3
            )
        for name in ("positions", "last_rows", "seq_lens", "cu_seqlens_q"):
            np.testing.assert_array_equal(
                self.library.to_numpy(getattr(steps[0], name)), getattr(steps[1], name)
            )


def test_steps_are_those_of_the_cpu(gpu: ArrayLibrary) -> None:
    both = Both(gpu)
    both.seqs = [list(x) for x in zip(both.call("create"), both.call("create"), strict=True)]
    both.step([40, 7], 0)
    for seed in range(1, 20):  # more steps than sets of host memory
        both.step(1, seed)
    for cache, seqs in zip(both.caches, both.seqs, strict=True):
        seqs += cache.fork(seqs[1], 2)
    for seed in range(20, 24):
        both.step([1, 3, 1, 2], seed)


def test_sequences_come_back_from_host_memory(gpu: ArrayLibrary) -> None:
    both = Both(gpu, num_host_pages=16)
    both.seqs = [list(x) for x in zip(both.call("create"), both.call("create"), strict=True)]
    both.step([40, 33], 0)
    free_pages = both.caches[0].allocator.num_free_pages
    for cache, seqs in zip(both.caches, both.seqs, strict=True):
        cache.preempt(seqs[:1])
    assert both.caches[0].allocator.num_free_pages > free_pages
    for seed in range(1, 20):
        both.step(10, seed, slice(1, 2))  # writes to the pages that were let go
    for cache, seqs in zip(both.caches, both.seqs, strict=True):
        cache.resume(seqs[:1])
    both.step(1, 20)


def test_a_captured_graph_follows_the_steps() -> None:
    library = on_gpu("torch")
    import torch

    cache, other = make_cache(library), make_cache(get_library("numpy", "cpu"))
    first = random_tokens(4, 0)
    q, k, v = (library.from_numpy(x) for x in first)
    out = [torch.empty_like(q) for _ in range(NUM_LAYERS)]
    seqs, others = ([x.create() for _ in range(4)] for x in (cache, other))

    def run(step: octavo.KVCacheStep) -> None:
        for layer in range(NUM_LAYERS):
            step.attend(layer, q, k, v, out=out[layer])

    step = cache.step(seqs[:3], pad_batch=4)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run(step)  # loads what is loaded at the first call
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(step)
    graph.replay()  # the same tokens into the same slots
    expected = other.step(others[:3])
    for layer in range(NUM_LAYERS):
        expected.attend(layer, *(x[:3] for x in first))
    for seed, batch in enumerate([3, 4, 1, *[4] * 30], 1):
        tokens = random_tokens(4, seed)
        cache.step(seqs[:batch], pad_batch=4)
        for array, values in zip((q, k, v), tokens, strict=True):
            array.copy_(torch.from_numpy(values))
        graph.replay()
        expected = other.step(others[:batch])
        for layer in range(NUM_LAYERS):
            result = expected.attend(layer, *(x[:batch] for x in tokens))
            np.testing.assert_allclose(
                library.to_float64(out[layer])[:batch], result.astype(np.float64), rtol=2e-2, atol=5e-3
            )
    assert cache.length(seqs[0]) == 34


def test_a_share_of_the_free_memory(gpu: ArrayLibrary) -> None:
    cache = make_cache(gpu, num_pages=None, memory_fraction=0.01, windows=None)
    num_bytes = cache.num_pages * cache.page_size * cache.bytes_per_token
    assert 2**24 < num_bytes < 2**32
