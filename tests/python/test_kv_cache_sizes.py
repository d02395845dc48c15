"""How many pages octavo.KVCache has: for windows, in memory that is given, and in a share of what is free."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

import octavo
from octavo._kv_memory import free_host_bytes
from support.kv_caches import HEAD_DIM, NUM_KV_HEADS, NUM_LAYERS, make_cache


def test_layers_with_a_window_have_pages_of_their_own() -> None:
    cache = make_cache(num_pages=1000, windows=[7, None], max_tokens=16)
    # Room for the windows of four sequences, which begin and end inside of a page, and for 16 tokens.
    assert [layer.k_pages.shape[0] for layer in cache.layers] == [4 * 4 + 4, 1000]
    seqs = [cache.create() for _ in range(4)]
    for _ in range(40):
        cache.step(seqs, 4)
    assert cache.stats()["num_used_pages"] == 160
    assert cache.allocator.stats(1)["num_used_pages"] <= 16


@pytest.mark.parametrize("page_size", [1, 3, 4])
@pytest.mark.parametrize("window", [0, 1, 7, 8])
def test_a_window_has_the_pages_that_a_full_batch_needs(window: int, page_size: int) -> None:
    cache = make_cache(num_pages=2000, windows=[None, window], max_tokens=24, page_size=page_size)
    seqs = [cache.create() for _ in range(4)]
    rng = np.random.default_rng(window)
    for i in range(60):
        counts = [21 if j == i % 4 else 1 for j in range(4)] if i % 2 else rng.multinomial(24, [0.25] * 4)
        cache.step(seqs, list(map(int, counts)))


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("window", [0, 1, 7, 8, 16])
def test_a_window_has_the_pages_that_a_batch_of_found_prompts_needs(window: int, page_size: int) -> None:
    """Each writes to a page that the prefix cache has, which is kept until it is copied."""
    length = (-(-window // page_size) + 2) * page_size
    prompts = [[10 * i + j % 10 for j in range(length)] for i in range(4)]
    for found in range(length - page_size, length):
        for counts in ([1] * 4, [2] * 4, [5, 1, 1, 1]):
            options = {"num_pages": 2000, "windows": [None, window], "max_tokens": 8, "page_size": page_size}
            cache = make_cache(prefix_cache=True, **options)
            for prompt in prompts:
                seq = cache.create()
                for begin in range(0, length, 8):
                    part = prompt[begin : begin + 8]
                    cache.step([seq], len(part), part)
                cache.free(seq)
            seqs = [cache.create([*prompt[:found], 99]) for prompt in prompts]
            assert [cache.length(seq) for seq in seqs] == [found] * 4
            cache.step(seqs, counts)


@pytest.mark.parametrize("integer", [np.int8, np.uint8])
def test_sizes_may_be_integers_of_numpy(integer: type[np.integer]) -> None:
    """Their products do not overflow."""
    sizes = {"page_size": 16, "max_batch": 100, "max_tokens": 127, "max_length": 120}
    cache = make_cache(memory=2**26, **{name: integer(size) for name, size in sizes.items()})
    other = make_cache(memory=2**26, **sizes)
    assert cache.num_pages == other.num_pages
    assert cache.max_pages == other.max_pages
    step = cache.step([cache.create() for _ in range(100)], pad_tokens=120)
    assert [len(x) for x in (step.seq_lens, step.positions, step.page_tables[0])] == [100, 120, 100]
    size = octavo.KVCache(integer(2), integer(3), integer(64), memory=2**26).num_pages
    assert size == octavo.KVCache(2, 3, 64, memory=2**26).num_pages


def test_memory_is_used_up_to_a_page() -> None:
    page_bytes = NUM_LAYERS * 4 * NUM_KV_HEADS * HEAD_DIM * 4 * 2
    assert make_cache(memory=10 * page_bytes).num_pages == 10
    assert make_cache(memory=11 * page_bytes - 1).num_pages == 10
    cache = make_cache(memory=200 * page_bytes, windows=[3, None], max_tokens=4)
    window_pages = cache.layers[0].k_pages.shape[0]
    assert window_pages == 4 * 3 + 1
    assert cache.num_pages == 2 * 200 - window_pages
    for cache in (make_cache(), make_cache(dtype="int4")):
        held = sum(x.nbytes for layer in cache.layers for x in layer.arrays.values())
        assert held == cache.bytes_per_token * cache.num_pages * cache.page_size


def test_a_share_of_the_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo._kv_memory.free_host_bytes", lambda: 1000 * 4096)
    cache = make_cache(memory_fraction=0.5)
    assert cache.num_pages == 500 * 4096 // (cache.bytes_per_token * cache.page_size)


def test_free_memory_of_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what the page cache would give back, where the system says so."""
    monkeypatch.setattr(os, "sysconf", {"SC_AVPHYS_PAGES": 10, "SC_PAGE_SIZE": 4096}.__getitem__)
    meminfo = tmp_path / "meminfo"
    assert free_host_bytes(meminfo) == 10 * 4096
    meminfo.write_text("MemTotal: 4000 kB\nMemFree: 40 kB\nMemAvailable: 3000 kB\nCached: 2960 kB\n")
    assert free_host_bytes(meminfo) == 3000 * 1024
    meminfo.write_text("MemTotal:       4000 kB\n")  # before Linux 3.14
    assert free_host_bytes(meminfo) == 10 * 4096
