"""octavo.KVCache: what it refuses, in which words."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import octavo


def kv_cache(**changes: Any) -> octavo.KVCache:
    arguments: dict[str, Any] = {"num_layers": 2, "num_kv_heads": 2, "head_dim": 8, "num_pages": 4}
    arguments |= changes
    return octavo.KVCache(**arguments)


def of_a_step(**changes: Any) -> octavo.KVCacheStep:
    cache = kv_cache(max_batch=2, max_tokens=8, max_length=16)
    seqs = [cache.create() for _ in range(changes.pop("num_seqs", 1))]
    return cache.step(seqs, **changes)


REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "no size": (
        lambda: kv_cache(num_pages=None),
        ValueError,
        "KVCache: exactly one of num_pages, memory and memory_fraction must be given; got none",
    ),
    "two sizes": (
        lambda: kv_cache(memory=5, memory_fraction=0.5),
        ValueError,
        "KVCache: exactly one of num_pages, memory and memory_fraction must be given; "
        "got num_pages and memory and memory_fraction",
    ),
    "no page": (
        lambda: kv_cache(num_pages=None, memory=4095),
        ValueError,
        "KVCache: memory (4095 bytes) must hold a page of every layer, 4096 bytes",
    ),
    "fraction": (
        lambda: kv_cache(num_pages=None, memory_fraction=1.5),
        ValueError,
        "KVCache: memory_fraction (1.5) must be above 0 and at most 1",
    ),
    "a fraction of text": (
        lambda: kv_cache(num_pages=None, memory_fraction="0.5"),
        TypeError,
        "KVCache: memory_fraction must be a float; got str",
    ),
    "pages": (lambda: kv_cache(num_pages=16.0), TypeError, "KVCache: num_pages must be an int; got float"),
    "heads of a float": (
        lambda: kv_cache(num_kv_heads=2.0),
        TypeError,
        "KVCache: num_kv_heads must be an int; got float",
    ),
    "a layer of text": (
        lambda: of_a_step().attend("0", *[np.zeros((1, 2, 8), np.float32)] * 3),
        TypeError,
        "attend: layer must be an int; got str",
    ),
    "a layer of a float": (
        lambda: of_a_step().attend(1.0, *[np.zeros((1, 2, 8), np.float32)] * 3),
        TypeError,
        "attend: layer must be an int; got float",
    ),
    "handles": (
        lambda: kv_cache().step(x for x in [0]),
        TypeError,
        "step: seqs must be a sequence of handles, such as a list; got generator",
    ),
    "layers": (lambda: kv_cache(num_layers=0), ValueError, "KVCache: num_layers (0) must be at least 1"),
    "heads": (lambda: kv_cache(num_kv_heads=0), ValueError, "KVCache: num_kv_heads (0) must be at least 1"),
    **{
        f"head_dim {head_dim}": (
            lambda head_dim=head_dim: kv_cache(head_dim=head_dim),
            ValueError,
            f"KVCache: head_dim ({head_dim}) must be a multiple of 8 from 8 to 512",
        )
        for head_dim in (7, 60, 520)
    },
    "head_dim_v": (
        lambda: kv_cache(head_dim_v=12),
        ValueError,
        "KVCache: head_dim_v (12) must be a multiple of 8 from 8 to 512",
    ),
    "batch": (lambda: kv_cache(max_batch=0), ValueError, "KVCache: max_batch (0) must be at least 1"),
    "length": (lambda: kv_cache(max_length=0), ValueError, "KVCache: max_length (0) must be at least 1"),
    "dtype": (
        lambda: kv_cache(dtype="float64"),
        ValueError,
        "KVCache: dtype must be one of float32, float16, bfloat16, int8, float8_e4m3fn, float8_e5m2, int4, "
        "int8_int4; got float64",
    ),
    "windows": (
        lambda: kv_cache(windows=[3]),
        ValueError,
        "KVCache: windows must have an entry for each of the 2 layers; got 1",
    ),
    "windows of an int": (
        lambda: kv_cache(windows=127),
        TypeError,
        "KVCache: windows must be a sequence of an int or None for each layer, such as a list; got int",
    ),
    "a window of text": (
        lambda: kv_cache(windows=[None, "3"]),
        TypeError,
        "KVCache: windows[1] must be an int; got str",
    ),
    "new tokens of text": (
        lambda: of_a_step(num_new_tokens="1"),
        TypeError,
        "step: num_new_tokens must be an int; got str",
    ),
    "new tokens of floats": (
        lambda: of_a_step(num_new_tokens=[1.5]),
        TypeError,
        "step: num_new_tokens must be an int; got float",
    ),
    "a handle to preempt": (
        lambda: kv_cache(num_host_pages=4).preempt(5),
        TypeError,
        "preempt: seqs must be an iterable of handles; got int",
    ),
    "a handle to resume": (
        lambda: kv_cache(num_host_pages=4).resume(5),
        TypeError,
        "resume: seqs must be an iterable of handles; got int",
    ),
    "a handle that is to fit": (
        lambda: kv_cache().fits(5),
        TypeError,
        "fits: seqs must be an iterable of handles; got int",
    ),
    "tokens of text that are to fit": (
        lambda: kv_cache().fits([], "1"),
        TypeError,
        "fits: num_new_tokens must be an int; got str",
    ),
    "no sequence that is to fit": (
        lambda: kv_cache().fits([7]),
        octavo.InvalidSequence,
        "fits: sequence 7 is not one of this allocator's",
    ),
    "window": (
        lambda: kv_cache(windows=[None, -1]),
        ValueError,
        "KVCache: windows[1] (-1) must be at least 0, or None",
    ),
    "prefix cache": (
        lambda: kv_cache(windows=[3, 4], prefix_cache=True),
        ValueError,
        "KVCache: prefix_cache needs a layer without a window; every entry of windows has one",
    ),
    "like": (
        lambda: kv_cache(like=[1.0]),
        TypeError,
        "KVCache: like must be an array of NumPy, PyTorch, CuPy or JAX, or None; got list",
    ),
    "layer": (
        lambda: of_a_step().attend(-1, *[np.zeros((1, 2, 8), np.float32)] * 3),
        ValueError,
        "attend: layer (-1) must be from 0 to 1",
    ),
    "too many tokens": (
        lambda: of_a_step(num_new_tokens=9),
        ValueError,
        "step: there are 9 new tokens, but the arrays have max_tokens (8) rows for them",
    ),
    "pad_batch": (
        lambda: of_a_step(num_seqs=2, pad_batch=1),
        ValueError,
        "step: pad_batch (1) must be at least the 2 of the step and at most 2",
    ),
    "pad_batch of float": (
        lambda: of_a_step(pad_batch=1.0),
        TypeError,
        "step: pad_batch must be an int; got float",
    ),
    "pad_tokens": (
        lambda: of_a_step(num_new_tokens=3, pad_tokens=9),
        ValueError,
        "step: pad_tokens (9) must be at least the 3 of the step and at most 8",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    call, error, message = REFUSED[name]
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        call()


def test_sequences_longer_than_the_tables_are_refused() -> None:
    cache = kv_cache(max_length=16, page_size=4, num_pages=64)
    seq = cache.create()
    message = f"step: sequence {seq} would have 17 tokens; max_length of the KVCache, in whole pages, is 16"
    for seqs, counts in (([seq], 17), ([cache.create(), seq, cache.create()], [1, 17, 0])):
        with pytest.raises(ValueError, match=f"^{message}$"):
            cache.step(seqs, counts)
        assert cache.fits(seqs, counts)  # for which there are pages enough
    assert cache.length(seq) == 0


def test_other_devices_are_refused(torch: Any) -> None:
    message = r"^KVCache: like must be on the CPU or on a CUDA device; it is on meta$"
    with pytest.raises(RuntimeError, match=message):
        kv_cache(like=torch.zeros(1, device="meta"))


def test_a_jax_array_is_for_the_cache_of_octavo_jax() -> None:
    jax = pytest.importorskip("jax")
    with pytest.raises(TypeError, match=r"use octavo\.jax\.KVCache$"):
        kv_cache(like=jax.numpy.zeros(1))
