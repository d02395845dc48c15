"""Several threads of Python at once in one extension module.

Without the interpreter lock (free-threaded Python) these find what it would have hidden.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import ml_dtypes
import numpy as np

import octavo

NUM_THREADS = 6


def run_in_threads(*work: Callable[[], None]) -> None:
    failures: list[BaseException] = []
    start = threading.Barrier(len(work))

    def run(function: Callable[[], None]) -> None:
        start.wait()
        try:
            function()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(function,)) for function in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


@contextlib.contextmanager
def changing(change: Callable[[], None]) -> Iterator[None]:
    """A thread of its own changes something again and again."""
    done = threading.Event()

    def repeat() -> None:
        while not done.is_set():
            change()

    changer = threading.Thread(target=repeat)
    changer.start()
    try:
        yield
    finally:
        done.set()
        changer.join()


def test_array_types_that_nobody_has_seen() -> None:
    """More than are remembered, so that the memory of them turns over all the time."""

    def work() -> None:
        for number in range(60):
            own = type(f"Array{number}", (np.ndarray,), {})
            dtype = (np.float32, np.float16, ml_dtypes.bfloat16)[number % 3]
            k, v = (np.full((4, 2, 1, 8), x).astype(dtype).view(own) for x in (1, 2))
            k[3], v[3] = 7, 8
            octavo.copy_pages(k, v, np.array([[3, 0]], np.int32))
            assert (np.asarray(k)[0] == dtype(7)).all() and (np.asarray(v)[0] == dtype(8)).all()
            assert (np.asarray(k)[1] == dtype(1)).all()

    run_in_threads(*[work] * NUM_THREADS)


def test_lists_that_change_while_they_are_read() -> None:
    alloc = octavo.PageAllocator(100, 4)
    handles = [alloc.create() for _ in range(20)]
    for seq in handles:
        alloc.extend(seq, 5)
    shared = list(handles)
    rng = np.random.default_rng(0)

    def change() -> None:
        shared[:] = rng.permutation(handles)[: rng.integers(0, 20)].tolist()
        shared.extend(handles[:3])
        shared.clear()

    def read() -> None:
        for _ in range(2000):
            page_table, seq_lens = alloc.page_table(shared)
            assert (seq_lens == 5).all() and len(page_table) == len(seq_lens)
            with contextlib.suppress(ValueError):  # a handle twice
                alloc.reorder(shared, [])

    with changing(change):
        run_in_threads(*[read] * (NUM_THREADS - 1))
    alloc.check_invariants()


def test_a_page_table_of_a_sequence_that_grows() -> None:
    alloc = octavo.PageAllocator(64, 1)
    seq = alloc.create()

    def grow() -> None:
        while alloc.try_extend(seq, 1):
            pass
        alloc.truncate(seq, 0)

    def read() -> None:
        for _ in range(2000):
            page_table, seq_lens = alloc.page_table([seq])
            assert page_table.shape == (1, seq_lens[0])

    with changing(grow):
        run_in_threads(*[read] * (NUM_THREADS - 1))


def test_engines_share_an_allocator_and_its_arrays() -> None:
    """Prefix cache, host memory and one StepArrays for all."""
    groups = [
        octavo.PageGroup(200, 4, num_host_pages=50),
        octavo.PageGroup(200, 4, window_left=5, num_host_pages=50),
    ]
    alloc = octavo.PageAllocator.from_groups(groups, prefix_cache=True, event_capacity=8)
    tables = [np.empty((4, 64), np.int32) for _ in groups]
    arrays = octavo.StepArrays(tables, np.empty(4, np.int32))
    prompt = np.arange(30, dtype=np.int32) % 3

    def serve() -> None:
        for _ in range(100):
            seqs = [alloc.create(prompt) for _ in range(2)]
            alloc.free(seqs.pop())
            with contextlib.suppress(octavo.OutOfPages):
                alloc.step(seqs, 7, arrays, tokens=range(7))
                seqs += alloc.fork(seqs[0], 2)
                alloc.step(seqs, 1, arrays, tokens=[1, 2, 3])
                with contextlib.suppress(ValueError):  # copies are pending: another engine's
                    for group in range(2):
                        alloc.take_copies(group)
                    transfer, _ = alloc.preempt(seqs)
                    alloc.confirm(transfer)
                    transfer, _ = alloc.resume(seqs)
                    alloc.confirm(transfer)
            alloc.take_events()
            alloc.stats(), alloc.cache_stats(), alloc.page_map(1)
            for seq in seqs:
                alloc.free(seq)

    run_in_threads(*[serve] * NUM_THREADS)
    for group in range(2):
        alloc.take_copies(group)
        assert alloc.stats(group)["num_free_pages"] == 200
    assert alloc.stats()["num_sequences"] == 0
    assert alloc.num_free_host_pages == 50
    alloc.check_invariants()
