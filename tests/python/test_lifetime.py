"""Nothing is leaked, and the interpreter lock is not held."""

from __future__ import annotations

import gc
import sys
import threading
import time
import weakref
from pathlib import Path

import numpy as np
import pytest

import octavo
from support.array_calls import CPU_LIBRARIES, GPU_LIBRARIES, each_of, expected, installed, qkv, random
from support.producers import NamespacedProducer


@pytest.mark.parametrize(("name", "device"), each_of(CPU_LIBRARIES + GPU_LIBRARIES))
def test_no_reference_is_kept(name: str, device: str) -> None:
    library = installed(name, device)
    q, k, v = (library.array(x, "float16") for x in qkv())
    lens, wrong = library.int32([1, 2]), library.int32([1, 2, 3])
    dtype = q.dtype
    octavo.attention(q, k, v, prefix_lens=lens)
    gc.collect()  # arrays of earlier tests, which share the dtype
    before = [sys.getrefcount(x) for x in (q, k, v, lens, wrong, dtype)]
    for _ in range(50):
        octavo.attention(q, k, v, prefix_lens=lens, return_lse=True)
        with pytest.raises(ValueError, match="prefix_lens"):
            octavo.attention(q, k, v, prefix_lens=wrong)
        with pytest.raises(TypeError):
            octavo.attention(q, k, v, prefix_lens=q)
    gc.collect()
    after = [sys.getrefcount(x) for x in (q, k, v, lens, wrong, dtype)]
    assert max(abs(a - b) for a, b in zip(after, before, strict=True)) < 5
    out, lse = octavo.attention(q, k, v, return_lse=True)
    dead = [weakref.ref(out), weakref.ref(lse)]
    del out, lse
    gc.collect()
    assert all(reference() is None for reference in dead)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.parametrize("name", ["numpy", "torch", "jax", "other"])
def test_results_are_freed(name: str) -> None:
    q = np.zeros((1, 2**15, 1, 8), np.float32)  # 1 MiB
    k = np.zeros((1, 1, 1, 8), np.float32)
    mine = NamespacedProducer(q) if name == "other" else installed(name, "cpu").from_numpy(q)
    for _ in range(20):
        octavo.attention(mine, k, k, return_lse=True)
    before = resident_bytes()
    for _ in range(100):
        octavo.attention(mine, k, k, return_lse=True)
    gc.collect()
    assert resident_bytes() - before < 50 * 2**20


def test_the_interpreter_lock_is_released() -> None:
    q = random(1, 4096, 8, 64)
    ticks: list[float] = []
    stop = threading.Event()

    def tick() -> None:
        while not stop.is_set():
            ticks.append(time.perf_counter())
            time.sleep(0.001)

    thread = threading.Thread(target=tick)
    thread.start()
    try:
        start = time.perf_counter()
        octavo.attention(q, q, q)
        end = time.perf_counter()
    finally:
        stop.set()
        thread.join()
    during = sum(start < t < end for t in ticks)
    assert end - start > 0.02
    assert during >= 3, f"{during} ticks in {end - start:.3f} s"


def test_calls_from_several_threads() -> None:
    wanted = expected("float32", *qkv())
    failures: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(50):
                np.testing.assert_array_equal(octavo.attention(*qkv()), wanted)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
