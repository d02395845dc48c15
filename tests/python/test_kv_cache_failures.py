"""octavo.KVCache after exceptions in the midst of a call: of memory that is short, or KeyboardInterrupt."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import octavo
from octavo import _kv_cache, _kv_memory, _kv_steps

NUM_LAYERS = 3
ERRORS = [MemoryError, KeyboardInterrupt]


def make_cache(**options: Any) -> octavo.KVCache:
    arguments: dict[str, Any] = {"num_pages": 32, "page_size": 4, "max_batch": 4, "max_tokens": 64}
    return octavo.KVCache(NUM_LAYERS, 2, 8, **{**arguments, **options})


def attend(cache: octavo.KVCache, step: octavo.KVCacheStep) -> np.ndarray:
    rng = np.random.default_rng(step.num_tokens)
    rows = [rng.standard_normal((step.num_tokens, heads, 8), np.float32) for heads in (4, 2, 2)]
    return np.stack([step.attend(layer, *rows) for layer in range(NUM_LAYERS)])


def fail_at(
    monkeypatch: pytest.MonkeyPatch,
    owner: Any,
    name: str,
    call: int,
    error: type[BaseException],
    after: bool = False,
) -> None:
    """Have a function raise at one of its calls, from 0, before or after its work; it works at all others."""
    function: Callable[..., Any] = getattr(owner, name)
    num_calls = 0

    def wrapper(*args: Any, **options: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        raises = num_calls == call + 1
        if raises and not after:
            raise error
        result = function(*args, **options)
        if raises:
            raise error
        return result

    monkeypatch.setattr(owner, name, wrapper)


def fail_after_the_allocator(
    monkeypatch: pytest.MonkeyPatch, name: str, error: type[BaseException] = KeyboardInterrupt
) -> None:
    """As a signal does that comes during a call of the allocator: what that returns is lost."""
    function: Callable[..., Any] = getattr(octavo.PageAllocator, name)

    def wrapper(self: octavo.PageAllocator, seqs: Any, *args: Any) -> Any:
        result = function(self, seqs, *args)
        if seqs:
            monkeypatch.setattr(octavo.PageAllocator, name, function)
            raise error
        return result

    monkeypatch.setattr(octavo.PageAllocator, name, wrapper)


def forked(**options: Any) -> tuple[octavo.KVCache, list[int]]:
    cache = make_cache(**options)
    seq = cache.create()
    attend(cache, cache.step([seq], 6))
    return cache, [seq, *cache.fork(seq)]


FAILURES = [
    (_kv_cache, "copy_pages", 0, False),
    (_kv_cache, "copy_pages", 2, True),
    (_kv_memory.Staging, "send", 0, False),
    (octavo.PageAllocator, "step", 0, True),
    (_kv_steps.HostStep, "write", 0, True),
    (_kv_cache, "KVCacheStep", 0, True),
]


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize(("owner", "name", "call", "after"), FAILURES)
@pytest.mark.parametrize("options", [{}, {"windows": [None, 2, 2]}, {"prefix_cache": True}])
@pytest.mark.parametrize("retries", ["as before", "parent freed", "preempted"])
def test_a_step_that_raises_is_taken_back(
    monkeypatch: pytest.MonkeyPatch,
    error: type[BaseException],
    owner: Any,
    name: str,
    call: int,
    after: bool,
    options: dict[str, Any],
    retries: str,
) -> None:
    options = {**options, "num_host_pages": 8}
    cache, seqs = forked(**options)
    other, others = forked(**options)
    last = cache.step(seqs, 0)
    fail_at(monkeypatch, owner, name, call, error, after)
    with pytest.raises(error):
        cache.step(seqs, [5, 6], range(11))
    assert [cache.length(seq) for seq in seqs] == [6, 6]
    with pytest.raises(RuntimeError, match="this step is over"):
        attend(cache, last)
    if retries == "parent freed":
        for each, those in ((cache, seqs), (other, others)):
            each.free(those.pop(0))
            those.append(each.create())
    elif retries == "preempted":
        cache.preempt(seqs)
        cache.resume(seqs)
    for counts in ([5, 6], [1, 1]):
        out = attend(cache, cache.step(seqs, counts))
        np.testing.assert_array_equal(out, attend(other, other.step(others, counts)))


@pytest.mark.parametrize(("owner", "name"), [(octavo.PageAllocator, "step"), (_kv_steps.HostStep, "write")])
def test_an_interrupt_before_a_step_is_made_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str
) -> None:
    cache, seqs = forked(num_pages=8)
    other, others = forked(num_pages=8)
    step, expected = cache.step(seqs, [5, 6]), other.step(others, [5, 6])
    fail_at(monkeypatch, owner, name, 0, KeyboardInterrupt)
    for _ in range(2):
        with pytest.raises((KeyboardInterrupt, octavo.OutOfPages)):
            cache.step(seqs, [5, 50])
    assert [cache.length(seq) for seq in seqs] == [11, 12]
    assert step.cu_seqlens_q.tolist() == [0, 5, 11]
    np.testing.assert_array_equal(attend(cache, step), attend(other, expected))


def num_free(cache: octavo.KVCache) -> tuple[int, int]:
    return cache.allocator.num_free_pages, cache.allocator.num_free_host_pages


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("call", ["of the allocator", 0, 2])
@pytest.mark.parametrize("which", ["preempt", "resume"])
def test_sequences_whose_transfer_raises_are_freed(
    monkeypatch: pytest.MonkeyPatch, error: type[BaseException], call: str | int, which: str
) -> None:
    cache = make_cache(num_host_pages=8, prefix_cache=True)
    before = num_free(cache)
    prompt = list(range(11))
    seq = cache.create(prompt)
    attend(cache, cache.step([seq], 11, prompt))
    if which == "resume":
        cache.preempt([seq])
        filler = cache.create()
        cache.step([filler], 32 * 4 - 64)
        cache.step([filler], 64)  # takes the pages that the prefix cache still had
        cache.free(filler)
    if isinstance(call, str):
        fail_after_the_allocator(monkeypatch, which, error)
    else:
        fail_at(monkeypatch, _kv_cache, "copy_pages", call, error, after=call == 2)
    with pytest.raises(error):
        getattr(cache, which)(iter([seq]))
    with pytest.raises(octavo.InvalidSequence):
        cache.length(seq)
    assert num_free(cache) == before
    # What was written before preempt() is right; what resume() did not copy must not be found.
    assert cache.length(cache.create(prompt)) == (8 if which == "preempt" else 0)
    other = cache.create()
    cache.step([other], 5)
    cache.preempt([other])
    cache.resume([other])
    assert cache.length(other) == 5


@pytest.mark.parametrize("which", ["preempt", "resume"])
def test_an_interrupt_before_or_after_a_transfer_leaves_the_sequences(
    monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    cache, seqs = forked(num_host_pages=8)
    other, others = forked(num_host_pages=8)
    if which == "resume":
        cache.preempt(seqs)
    before = num_free(cache)
    with monkeypatch.context() as patch:
        fail_at(patch, octavo.PageAllocator, "confirm", 0, KeyboardInterrupt, after=True)
        with pytest.raises(KeyboardInterrupt):
            getattr(cache, which)(seqs)
    assert num_free(cache) == before
    with monkeypatch.context() as patch:
        fail_at(patch, octavo.PageAllocator, "confirm", 1, KeyboardInterrupt, after=True)
        with pytest.raises(KeyboardInterrupt):
            getattr(cache, which)(seqs)
    assert num_free(cache) != before
    with pytest.raises(ValueError, match="preempted"):
        getattr(cache, which)(seqs)
    if which == "preempt":
        cache.resume(seqs)
    for counts in ([5, 6], [1, 1]):
        out = attend(cache, cache.step(seqs, counts))
        np.testing.assert_array_equal(out, attend(other, other.step(others, counts)))
    cache.allocator.check_invariants()
