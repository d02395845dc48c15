"""The pool of threads behind the CPU operators, where a process does more than call them one by one.

Each test is a program of its own: it forks, or spends what the system has.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PRELUDE = """
import os, resource, threading
import numpy as np
import octavo

octavo.set_num_threads(4)
q, k, v = np.random.default_rng(0).standard_normal((3, 2, 400, 3, 64)).astype(np.float32)

def result():
    return octavo.attention(q, k, v, causal=True).tobytes()
"""

FORK = """
expected = result()  # the pool has its threads
stop = threading.Event()

def work():
    while not stop.is_set():
        result()

thread = threading.Thread(target=work)  # and they are at work when the process forks
thread.start()
for _ in range(10):
    child = os.fork()
    if child == 0:
        os._exit(0 if result() == expected else 1)
    assert os.waitpid(child, 0)[1] == 0
stop.set()
thread.join()
"""

CALLERS = """
expected = result()
results = []
threads = [threading.Thread(target=lambda: results.extend(result() for _ in range(5))) for _ in range(6)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert results == [expected] * 30
"""

NO_MORE_THREADS = """
octavo.set_num_threads(1)
expected = result()
octavo.set_num_threads(4)
if os.getuid() == 0:
    os.setuid(65534)  # the limit does not hold for root
resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
assert result() == expected
"""

MEMORY_OF_A_BIG_BATCH = """
batch, heads = 256, 32
q = np.ones((batch, 8 * heads, 64), np.float32)
pages = np.ones((1, 512, heads, 64), np.float32)
table, seq_lens = np.zeros((batch, 1), np.int32), np.full(batch, 512, np.int32)

def peak(rows):
    octavo.paged_attention(q[:rows], pages, pages, table[:rows], seq_lens[:rows], num_splits=8, out=q[:rows])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

few = peak(4)
more = peak(batch) - few
assert more < 30 << 10, f"{more} KiB"
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs fork and RLIMIT_NPROC")
@pytest.mark.parametrize(
    "program",
    [FORK, CALLERS, NO_MORE_THREADS, MEMORY_OF_A_BIG_BATCH],
    ids=["fork", "callers", "no_more", "memory"],
)
def test_threads(program: str) -> None:
    result = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", PRELUDE + program],
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
