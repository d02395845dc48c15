"""Daemon threads at work when the interpreter exits: the process ends as it would without them.

Up to CPython 3.13 a thread that then wants the interpreter lock is unwound, which no C++ code survives; how
Octavo's threads get out of its way is in src/bindings/interpreter_lock.h. A thread inside of torch or JAX
meets the same end there, which Octavo cannot prevent.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

PRELUDE = """
import threading
import numpy as np
import octavo

def slowly(value):
    for _ in range(200):  # Python code, so that threads take turns in it
        pass
    return value
"""

OPERATOR = """
q, k, v = np.random.default_rng(0).standard_normal((3, 1, 64, 2, 64)).astype(np.float32)

def call():
    octavo.attention(q, k, v)
"""

ARRAYS_OF_PYTHON = """
class Array:
    def __init__(self, array):
        self.array = array

    def __dlpack_device__(self):
        return slowly((1, 0))

    def __dlpack__(self, **options):
        return slowly(self.array.__dlpack__(**options))

    def __array_namespace__(self):
        return np

q, k, v = (Array(np.ones((1, 8, 2, 64), np.float32)) for _ in range(3))

def call():
    octavo.attention(q, k, v)
"""

ALLOCATOR = """
alloc = octavo.PageAllocator(10_000, 4, prefix_cache=True)

def call():
    seq = alloc.create(range(100))
    alloc.fork(seq)
    alloc.page_table([seq])
"""

GENERATOR = """
alloc = octavo.PageAllocator(10_000, 4, prefix_cache=True)

def call():
    alloc.free(alloc.create(slowly(token) for token in range(100)))
"""

INTEGERS_OF_PYTHON = """
alloc = octavo.PageAllocator(10_000, 4, prefix_cache=True)

class Integer:
    def __index__(self):
        return slowly(3)

    def __float__(self):
        return slowly(0.5)

q = np.ones((1, 8, 2, 64), np.float32)

def call():
    alloc.free(alloc.create([Integer()] * 100))
    octavo.attention(q, q, q, softmax_scale=Integer(), window_left=Integer())
"""

RUN = """
calls = threading.Semaphore(0)

def work():
    while True:
        call()
        calls.release()

for _ in range(5):
    threading.Thread(target=work, daemon=True).start()
for _ in range(20):
    assert calls.acquire(timeout=60)
"""


@pytest.mark.parametrize(
    "program",
    [OPERATOR, ARRAYS_OF_PYTHON, ALLOCATOR, GENERATOR, INTEGERS_OF_PYTHON],
    ids=["operator", "arrays_of_python", "allocator", "generator", "integers_of_python"],
)
def test_daemon_threads_at_exit(program: str) -> None:
    for _ in range(4):
        result = subprocess.run(
            [sys.executable, "-c", PRELUDE + program + RUN],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert (result.returncode, result.stderr) == (0, "")
