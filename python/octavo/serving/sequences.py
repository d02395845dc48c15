"""The scheduler's own sequences among those of the cache."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from itertools import chain, starmap

import numpy as np
from numpy.typing import NDArray

from octavo._core import InvalidSequence, OutOfPages
from octavo._kv_cache import KVCache, KVCacheStep


class Sequences:
    """What the scheduler has in the cache, so that it can be taken back wherever an exception comes.

    A sequence is noted in the call that makes it, and forgotten after it was freed. That call is to a list's
    extend, which has the allocator make the sequence: CPython handles no signal before both are done. The
    lengths of a step's sequences are noted before it begins, and forgotten when its keys and values are
    written.
    """

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._handles: list[int] = []
        self._before: list[tuple[int, int]] = []  # handles and lengths

    def create(self, tokens: list[int], namespace: str) -> int:
        """Begin a sequence, with what the prefix cache has of these tokens."""
        begin = self._cache.allocator.create
        if self._cache.prefix_cache:
            begin = functools.partial(begin, tokens, namespace=namespace)
        self._handles.extend(starmap(begin, [()]))
        return self._handles[-1]

    def fork(self, handle: int, number: int = 1) -> list[int]:
        """Begin sequences that share all pages of one."""
        self._handles.extend(chain.from_iterable(map(self._cache.allocator.fork, [handle], [number])))
        return self._handles[-number:] if number else []

    def free(self, handle: int) -> None:
        """End a sequence."""
        self._cache.free(handle)
        self._handles.remove(handle)

    def step(
        self,
        handles: Sequence[int],
        counts: int | list[int],
        tokens: NDArray[np.int64] | None = None,
        pad_batch: int | None = None,
    ) -> KVCacheStep:
        """Begin a step of the cache, which ``undo`` takes back until ``written`` is called."""
        self._before = [(handle, self._cache.length(handle)) for handle in handles]
        try:
            return self._cache.step(handles, counts, tokens, pad_batch=pad_batch)
        except OutOfPages:
            self._before = []  # the cache is as before
            raise

    def written(self) -> None:
        """Take note that every layer has written the keys and values of the step."""
        self._before = []

    def undo(self) -> None:
        """Drop the tokens of a step whose keys and values may not have been written."""
        for handle, length in self._before:
            self._cache.truncate(handle, length)
        self._before = []

    def clear(self) -> None:
        """End all sequences, of which the cache may have freed some."""
        self.undo()  # first of all, so that the prefix cache keeps no page that was not written
        for handle in self._handles:
            with contextlib.suppress(InvalidSequence):
                self._cache.free(handle)
        self._handles = []
