"""What the page shows of the cache at one moment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo import KVCache
from octavo.serving import Scheduler

FREE, CACHED, SHARED, RESERVED = -1, -2, -3, -4  # as PageAllocator.page_map()


@dataclass(frozen=True)
class Snapshot:
    """One moment of the cache and the scheduler.

    groups: of each page group what `PageAllocator.stats()` says, and `runs`: pairs of an owner and how many
        pages in a row it holds. Owners are numbered from 0 as they come; those below 0 are as
        `PageAllocator.page_map()` has them.
    sequences: of each one that holds pages alone its number (`owner`), `tokens` and `pages`.
    """

    groups: tuple[dict[str, Any], ...]
    sequences: tuple[dict[str, int], ...]
    running: int
    waiting: int
    asked_tokens: int
    found_tokens: int
    num_preemptions: int
    tokens_per_second: float


class Snapshots:
    """Takes snapshots, in the thread that steps the scheduler."""

    def __init__(self, scheduler: Scheduler, cache: KVCache) -> None:
        self._scheduler = scheduler
        self._allocator = cache.allocator
        self._owners: dict[int, int] = {}  # numbers by handle
        self._num_owners = 0

    def take(self, tokens_per_second: float) -> Snapshot:
        """This moment; O(pages)."""
        maps = [self._allocator.page_map(group) for group in range(self._allocator.num_groups)]
        handles, counts = np.unique(np.concatenate(maps), return_counts=True)
        pages = {h: n for h, n in zip(handles.tolist(), counts.tolist(), strict=True) if h >= 0}
        self._number(sorted(pages))
        stats = self._scheduler.stats()
        return Snapshot(
            groups=tuple(
                {**self._allocator.stats(group), "runs": self._runs(page_map)}
                for group, page_map in enumerate(maps)
            ),
            sequences=tuple(
                {"owner": owner, "tokens": self._allocator.length(handle), "pages": pages[handle]}
                for handle, owner in self._owners.items()
            ),
            running=stats.num_running,
            waiting=stats.num_waiting,
            asked_tokens=stats.asked_tokens,
            found_tokens=stats.found_tokens,
            num_preemptions=stats.num_preemptions,
            tokens_per_second=tokens_per_second,
        )

    def _number(self, handles: list[int]) -> None:
        """Handles have 64 bits, of which a browser's numbers hold 53."""
        self._owners = {handle: self._owners[handle] for handle in self._owners if handle in handles}
        for handle in handles:
            if handle not in self._owners:
                self._owners[handle] = self._num_owners
                self._num_owners += 1

    def _runs(self, page_map: NDArray[np.int64]) -> list[list[int]]:
        begins = np.flatnonzero(np.diff(page_map, prepend=page_map[0] - 1))
        lengths = np.diff(begins, append=len(page_map))
        return [
            [owner if owner < 0 else self._owners[owner], length]
            for owner, length in zip(page_map[begins].tolist(), lengths.tolist(), strict=True)
        ]
