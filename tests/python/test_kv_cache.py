"""octavo.KVCache: a step equals the bare operators, on NumPy's and PyTorch's arrays on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import octavo
from support.libraries import ArrayLibrary, get_library


@pytest.fixture(params=["numpy", "torch"])
def on_cpu(request: pytest.FixtureRequest) -> ArrayLibrary:
    pytest.importorskip(request.param)
    return get_library(request.param, "cpu")


def make_cache(library: ArrayLibrary, **options: Any) -> octavo.KVCache:
    arguments: dict[str, Any] = {"num_pages": 32, "page_size": 4, "max_batch": 4, "max_tokens": 64}
    return octavo.KVCache(2, 2, 16, like=library.float32([]), **{**arguments, **options})


def random_tokens(library: ArrayLibrary, total: int, seed: int = 0) -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(seed)
    return tuple(library.float32(rng.standard_normal((total, heads, 16), np.float32)) for heads in (4, 2, 2))


def test_a_step_is_that_of_the_operators(on_cpu: ArrayLibrary) -> None:
    cache = make_cache(on_cpu)
    other = [octavo.empty_cache(32, 4, 2, 16, "float32", like=on_cpu.float32([])) for _ in range(2)]
    a, b = cache.create(), cache.create()
    for counts in ([5, 9], [1, 1], [3, 0], [0, 2]):
        step = cache.step([a, b], counts)
        page_table, seq_lens = (on_cpu.int32(x) for x in cache.allocator.page_table([a, b]))
        cu_seqlens = on_cpu.int32([0, counts[0], sum(counts)])
        q, k, v = random_tokens(on_cpu, sum(counts))
        for layer in range(2):
            out = step.attend(layer, q, k, v, softcap=2.0)
            of_batch = {"page_table": page_table, "seq_lens": seq_lens, **other[layer].arguments}
            octavo.append_kv(k, v, cu_seqlens=cu_seqlens, **of_batch)
            expected = octavo.paged_attention(q, cu_seqlens_q=cu_seqlens, softcap=2.0, **of_batch)
            assert type(out) is on_cpu.array_type
            np.testing.assert_array_equal(on_cpu.to_numpy(out), on_cpu.to_numpy(expected))
    assert cache.length(a) == 9 and cache.length(b) == 12
    cache.free(a)
    with pytest.raises(octavo.InvalidSequence):
        cache.step([a])
