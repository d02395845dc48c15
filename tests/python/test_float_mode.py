"""The CPU operators' bits do not depend on the mode of floats that another library sets or leaves.

Threads of Octavo begin with the first call that needs them, and once kept the mode of the thread that called.
So each test is a program of its own, whose first call of several threads comes from one that has subnormal
numbers count as zero.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from support.server_process import environment_with_tests

PRELUDE = """
import numpy as np
import octavo
from support.quantised import Cache, append_packed

rng = np.random.default_rng(0)
q, k, v, tiny_v, rows = rng.standard_normal((5, 2, 400, 3, 64)).astype(np.float32)
lse = rng.standard_normal((2, 400, 3)).astype(np.float32)
x, w, tiny_x = rng.standard_normal((3, 300, 512)).astype(np.float32)
tiny_weight = rng.standard_normal(512).astype(np.float32)
for array in (tiny_v, tiny_x, tiny_weight):
    array *= np.float32(1e-39)  # subnormal: those below 1.2e-38
rows *= np.float32(1e-36)  # some are subnormal, and have the codes -1 and 1 of int8

def append_kv():
    cache = Cache.empty("int8", 1, 400, 3, 64)
    append_packed(cache, rows[0], rows[1], np.zeros((1, 1), np.int32), 400)
    return [cache.k_pages, cache.v_pages, cache.k_scales, cache.v_scales]

def results():
    return {
        "append_kv": append_kv(),
        "attention": [octavo.attention(q, k, tiny_v, causal=True)],
        "attention_backward": octavo.attention_backward(tiny_v, q, k, v, v, lse),
        "linear": [octavo.linear(tiny_x, w)],
        "merge_states": octavo.merge_states(tiny_v, lse, tiny_v, lse),
        "rms_norm": [octavo.rms_norm(x, tiny_weight)],
    }

def check(results):
    wrong = [
        name
        for name, arrays in results.items()
        if any(np.asarray(x).tobytes() != y.tobytes() for x, y in zip(arrays, expected[name]))
    ]
    assert not wrong, wrong

octavo.set_num_threads(1)
expected = results()
octavo.set_num_threads(4)
"""

TORCH = """
import torch

def is_flushed():
    return (tiny_v + tiny_v == 0).all()

assert not is_flushed()
torch.set_flush_denormal(True)
for _ in range(5):
    assert is_flushed()
    check(results())
assert is_flushed()
torch.set_flush_denormal(False)
check(results())
"""

# XLA flushes them while it calls an operator, in the main thread or in one of its own.
JAX = """
import jax
import octavo.jax

for _ in range(5):
    attention = jax.jit(lambda *arrays: octavo.jax.attention(*arrays, causal=True))(q, k, tiny_v)
    linear = jax.jit(octavo.jax.linear)(tiny_x, w)
    rms_norm = jax.jit(octavo.jax.rms_norm)(x, tiny_weight)
    check({"attention": [attention], "linear": [linear], "rms_norm": [rms_norm]})
"""

JAX_THEN_NUMPY = """
import jax
import octavo.jax

jax.block_until_ready(jax.jit(octavo.jax.attention)(q, k, v))  # starts the threads
for _ in range(5):
    check(results())
"""


def run(program: str) -> None:
    result = subprocess.run(
        [sys.executable, "-c", PRELUDE + program],
        env=environment_with_tests(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr


def test_torch_flushes_subnormals(torch: Any) -> None:
    if not torch.set_flush_denormal(False):
        pytest.skip("PyTorch does not know this processor's mode")
    run(TORCH)


@pytest.mark.parametrize("program", [JAX, JAX_THEN_NUMPY], ids=["within", "afterwards"])
def test_jax_flushes_subnormals(program: str) -> None:
    pytest.importorskip("jax", reason="JAX is not installed")
    run(program)
