"""How the numbers of a step reach a device: here one whose transfers run as late as they may."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import octavo
from octavo import _kv_memory, _kv_steps


class LateMemory(_kv_memory.NumPyMemory):
    """As on a GPU, there are two sets of numbers on the host; a transfer reads one when it runs."""

    def __init__(self) -> None:
        self.pending: deque[tuple[int, Callable[[], None]]] = deque()
        self.num_sent: list[int] = []

    def staging(self, size: int) -> list[_kv_memory.Staging]:
        self.device = np.zeros(size, np.int32)

        def make(turn: int) -> _kv_memory.Staging:
            host = np.zeros(size, np.int32)

            def upload(used: int) -> None:
                def transfer() -> None:
                    self.device[:used] = host[:used]

                self.num_sent.append(used)
                self.pending.append((turn, transfer))

            return _kv_memory.Staging(host, self.device, upload)

        return [make(0), make(1)]

    def wait(self, turn: int) -> None:
        while any(each == turn for each, _ in self.pending):
            self.run_one()

    def run_one(self) -> None:
        _, transfer = self.pending.popleft()
        transfer()


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> LateMemory:
    memory = LateMemory()
    monkeypatch.setattr(_kv_memory, "memory_of", lambda library, like: memory)
    return memory


def make_cache(**options: Any) -> octavo.KVCache:
    return octavo.KVCache(1, 1, 8, num_pages=64, page_size=2, max_batch=8, max_tokens=32, **options)


def test_a_step_waits_for_the_transfer_from_the_memory_that_it_writes(memory: LateMemory) -> None:
    cache = make_cache()
    seqs = [cache.create() for _ in range(3)]
    steps = []
    for i in range(20):
        steps.append(cache.step(seqs, [i % 3, 1, 2]))
        assert len(memory.pending) == min(i + 1, 2)
        assert len(memory.num_sent) == i + 1  # one transfer each
    memory.run_one()  # of the last step but one, on whose numbers the last one was not written
    lengths = [sum(i % 3 for i in range(19)), 19, 38]
    np.testing.assert_array_equal(steps[0].seq_lens, lengths)
    memory.run_one()
    np.testing.assert_array_equal(steps[0].seq_lens, [lengths[0] + 1, 20, 40])
    np.testing.assert_array_equal(steps[-1].positions, [lengths[0], 19, 38, 39])
    np.testing.assert_array_equal(steps[-1].page_tables[0], expected_table(cache, seqs))


@pytest.mark.parametrize("windows", [None, [3]])
def test_a_small_batch_moves_its_own_rows(memory: LateMemory, windows: Any) -> None:
    cache = make_cache(windows=windows)
    seqs = [cache.create() for _ in range(8)]
    cache.step(seqs[:1])
    cache.step(seqs)
    assert memory.num_sent[1] - memory.num_sent[0] == 7 * cache.max_pages
    cache.step(seqs[:1], pad_batch=8)
    assert memory.num_sent[2] == memory.num_sent[1]


def test_a_step_that_does_not_fit_moves_nothing(memory: LateMemory) -> None:
    cache = make_cache()
    seqs = [cache.create(), cache.create()]
    step = cache.step(seqs, [30, 2])
    cache.step(seqs, [32, 0])
    cache.step(seqs, [32, 0])
    for _ in range(3):  # more often than there are sets of numbers
        with pytest.raises(octavo.OutOfPages):
            cache.step(seqs, [31, 1])
    assert len(memory.num_sent) == 3
    while memory.pending:
        memory.run_one()
    assert step.seq_lens.tolist() == [94, 2]
    cache.step(seqs, [1, 1])
    memory.wait(0)
    memory.wait(1)
    assert step.seq_lens.tolist() == [95, 3]


@pytest.mark.parametrize("owner", [octavo.PageAllocator, _kv_steps.HostStep, _kv_memory.Staging])
def test_steps_after_an_interrupted_one(
    memory: LateMemory, monkeypatch: pytest.MonkeyPatch, owner: Any
) -> None:
    cache = make_cache()
    seqs = [cache.create() for _ in range(3)]
    name = {octavo.PageAllocator: "step", _kv_steps.HostStep: "write", _kv_memory.Staging: "send"}[owner]
    function = getattr(owner, name)

    def interrupted(*args: Any) -> None:
        function(*args)
        raise KeyboardInterrupt

    for i in range(8):
        cache.step(seqs, [2, 1, 3])
        if i % 3:
            with monkeypatch.context() as patch:
                patch.setattr(owner, name, interrupted)
                for _ in range(i % 3):
                    with pytest.raises(KeyboardInterrupt):
                        cache.step(seqs, [1, 4, 0])
    step = cache.step(seqs, [2, 1, 0])
    while memory.pending:
        memory.run_one()
    assert step.seq_lens.tolist() == [18, 9, 24]
    assert step.cu_seqlens_q.tolist() == [0, 2, 3, 3]
    assert step.positions.tolist() == [16, 17, 8]
    np.testing.assert_array_equal(step.page_tables[0], expected_table(cache, seqs))


def expected_table(cache: octavo.KVCache, seqs: list[int]) -> np.ndarray:
    table = np.full((len(seqs), cache.max_pages), -1)
    pages, _ = cache.allocator.page_table(seqs)
    table[:, : pages.shape[1]] = pages
    return table
