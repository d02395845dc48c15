"""Who is in the next batch, and who has pages."""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from octavo._core import OutOfPages
from octavo._kv_cache import KVCache, KVCacheStep
from octavo.serving.group import Group, common_prefix
from octavo.serving.limits import Limits
from octavo.serving.request import Request
from octavo.serving.room import Room
from octavo.serving.sequences import Sequences
from octavo.serving.statistics import Statistics


class Share(NamedTuple):
    """A group's part of a batch."""

    group: Group
    num_tokens: int  # of each of its sequences
    is_prefill: bool
    num_rows: int  # of the batch: its sequences


class Batch(NamedTuple):
    """What goes through the model at once."""

    shares: list[Share]
    step: KVCacheStep
    tokens: NDArray[np.int64]  # [T]


class Batcher:
    """The groups that wait, and those that run, both in the order of their rank.

    Of the running ones the cache has handles. A waiting one has some if it was put aside in host memory.
    """

    def __init__(
        self,
        cache: KVCache,
        limits: Limits,
        statistics: Statistics,
    ) -> None:
        self.cache = cache
        self.sequences = Sequences(cache)
        self.room = Room(cache, limits.token_budget)
        self.waiting: list[Group] = []
        self.running: list[Group] = []
        self._max_batch = limits.max_batch
        self._token_budget = limits.token_budget
        self._decode_batches = limits.decode_batches
        self._statistics = statistics

    # Coming and going

    def start_over(self, groups: Iterable[Group]) -> None:
        """End all sequences, and let these groups wait, which have no handles: all is computed again."""
        self.sequences.clear()
        self.running = []
        self.waiting = sorted(groups, key=lambda group: group.rank)

    def wait(self, group: Group) -> None:
        """Queue a group."""
        bisect.insort(self.waiting, group, key=lambda other: other.rank)

    def run(self, group: Group) -> None:
        """Count a group that has handles among those that run."""
        bisect.insort(self.running, group, key=lambda other: other.rank)

    def finish(self, group: Group) -> None:
        """Let a running group go, and its pages."""
        self.running.remove(group)
        self._release(group)

    def fork_samples(self, group: Group) -> list[Group]:
        """Let the other samples run whose prompt this one has computed; return them."""
        if group.num_samples == 1:
            return []
        samples = [Group(group.request, index, 1) for index in range(1, group.num_samples)]
        handles = self.sequences.fork(group.handles[0], len(samples))
        group.num_samples = 1
        for member, handle in zip(samples, handles, strict=True):
            member.handles = [handle]
            self.run(member)
        return samples

    def follow(self, group: Group, parents: list[int]) -> None:
        """Let a group's handles continue the beams of these ones."""
        num_handles = len(group.handles)
        for parent in parents[num_handles:]:
            group.handles += self.sequences.fork(group.handles[parent])
        stay = parents[:num_handles]
        order = [*stay, *range(len(stay), num_handles)]
        self.cache.reorder(group.handles[:num_handles], order)
        while len(group.handles) > len(parents):
            self.sequences.free(group.handles.pop())

    def drop(self, requests: set[Request]) -> None:
        """Let the groups of these requests go that nobody waits for."""
        for groups in (self.waiting, self.running):
            for group in [group for group in groups if group.request in requests and group.is_over]:
                groups.remove(group)
                self._release(group)

    def _release(self, group: Group) -> None:
        while group.handles:
            self.sequences.free(group.handles.pop())
        group.host_pages = []

    # Counting

    def num_missing(self, group: Group) -> int:
        """Return the tokens of each of its handles that are not in the cache."""
        return group.wanted_length - self.cache.length(group.handles[0])

    def is_prefilling(self, group: Group) -> bool:
        """Return whether a running group has more to compute than the token that was generated last."""
        return self.num_missing(group) > 1 or not group.generated[0]

    def prefill_remaining(self) -> int:
        """Return the tokens that are to be computed before all groups decode."""
        running = [group for group in self.running if not group.is_over and self.is_prefilling(group)]
        waiting = [group for group in self.waiting if not group.is_over]
        return sum(map(self.num_missing, running)) + sum(
            self.num_missing(group) if group.handles else group.num_tokens for group in waiting
        )

    # Joining

    def admit(self) -> None:
        """Let groups join, the first in the order first: none overtakes another.

        The first also waits while another one is computing a prefix that it will find in the cache.
        """
        while self.waiting:
            group = self.waiting[0]
            if self._shares_with_prefill(group):
                return
            while not self._place(group):
                last = self.running[-1]
                if last.rank < group.rank:
                    return
                self._preempt(last)
            self.waiting.remove(group)
            self.run(group)

    def _shares_with_prefill(self, group: Group) -> bool:
        if not self.cache.prefix_cache or group.handles:
            return False
        for other in self.running:
            length = self.cache.length(other.handles[0])
            if length < len(other.request.prompt) and group.request.namespace == other.request.namespace:
                common = common_prefix([group.request.prompt, other.request.prompt])
                common = min(common, len(group.request.prompt) - 1)
                if length < common - common % self.cache.page_size:
                    return True
        return False

    def _place(self, group: Group) -> bool:
        """Give a group handles, if there is room for it. There is where nothing else runs."""
        num_rows = sum(other.num_rows for other in self.running)
        if self.running and num_rows + group.num_rows > self._max_batch:
            return False
        if group.handles:
            return self._bring_back(group)
        request = group.request
        num_common = len(request.prompt) + common_prefix(group.generated)
        handle = self.sequences.create(group.tokens(0, 0, num_common), request.namespace)
        group.begin(handle, self.cache.length(handle))
        if self.running and not self.room.suffices([*self.running, group]):
            self._release(group)
            return False
        self._statistics.asked_tokens += num_common
        self._statistics.found_tokens += group.num_found
        return True

    def _bring_back(self, group: Group) -> bool:
        if self.running and not self.room.suffices([*self.running, group]):
            return False
        try:
            self.cache.resume(group.handles)
        except OutOfPages:
            if self.running:
                return False
            # What it shares keeps others that were put aside from leaving pages to it.
            self._release(group)
            return self._place(group)
        group.host_pages = []
        return True

    # A batch

    def begin_batch(self) -> Batch | None:
        """Take pages for the next batch; None if there is nothing to run."""
        chunk = self._token_budget
        has_windows = any(group.window_left >= 0 for group in self.cache.page_groups)
        while self.running:
            shares = self._plan(chunk)
            if not shares:
                return None
            handles = [handle for share in shares for handle in share.group.handles]
            counts = [share.num_tokens for share in shares for _ in share.group.handles]
            tokens = self._new_tokens(shares)
            try:
                step = self.sequences.step(handles, counts, tokens, self._padded_batch(counts))
            except OutOfPages as error:
                resting = [handle for group in self.running for handle in group.handles]
                resting = [handle for handle in resting if handle not in handles]
                if has_windows and resting:  # what these hold behind a window a step of no tokens returns
                    self.sequences.step(resting, 0)
                    self.sequences.written()
                    has_windows = False
                elif not self._make_room():
                    chunk = max(counts) // 2
                    if chunk == 0:
                        raise OutOfPages(
                            "Scheduler.step: the cache has too few pages for the request that comes first, "
                            "alone; are there sequences in it that are not the scheduler's?"
                        ) from error
                continue
            return Batch(shares, step, tokens)
        return None

    def _padded_batch(self, counts: list[int]) -> int | None:
        """Return the rows of a batch with so many tokens of each sequence, or None if it is not padded."""
        if max(counts) > 1:
            return None
        place = bisect.bisect_left(self._decode_batches, len(counts))
        return self._decode_batches[place] if place < len(self._decode_batches) else None

    def _plan(self, chunk: int) -> list[Share]:
        """Give every decoding sequence a token, and the rest of the budget to prefill."""
        shares = []
        budget = self._token_budget
        for of_prefill in (False, True):
            for group in self.running:
                if self.is_prefilling(group) is of_prefill:
                    num_sequences = len(group.handles)
                    num_tokens = min(self.num_missing(group), chunk, budget // num_sequences)
                    if num_tokens:
                        shares.append(Share(group, num_tokens, of_prefill, num_sequences))
                        budget -= num_tokens * num_sequences
        return shares

    def _new_tokens(self, shares: list[Share]) -> NDArray[np.int64]:
        tokens: list[int] = []
        for group, num_tokens, *_ in shares:
            for index, handle in enumerate(group.handles):
                begin = self.cache.length(handle)
                tokens += group.tokens(index, begin, begin + num_tokens)
        return np.array(tokens, np.int64)

    # Giving way

    def _make_room(self) -> bool:
        """Free pages for those that run, at the cost of the last of them; return whether any could be."""
        if len(self.running) > 1:
            self._preempt(self.running[-1])
            return True
        put_aside = [group for group in self.waiting if group.handles]
        if put_aside:  # what they share is still on the device
            self._release(put_aside[-1])
            return True
        (group,) = self.running
        if 0 < group.num_found == self.cache.length(group.handles[0]):
            # A page found in part is held until it has been copied, which takes one page more.
            self._release(group)
            group.begin(self.sequences.create([], group.request.namespace), 0)
            return True
        return False

    def _preempt(self, group: Group) -> None:
        moved = self._moves_to_host(group)
        self._statistics.num_preemptions += 1
        self._statistics.num_moves_to_host += moved
        if not moved:
            self._release(group)
        self.running.remove(group)
        self.wait(group)

    def _moves_to_host(self, group: Group) -> bool:
        if not self.cache.allocator.num_host_pages or self.cache.length(group.handles[0]) == 0:
            return False
        before = self.room.free_pages()
        try:
            self.cache.preempt(group.handles)
        except OutOfPages:
            return False
        after = self.room.free_pages()
        group.host_pages = [new - old for new, old in zip(after, before, strict=True)]
        return True

    # Statistics

    def count_pages(self) -> None:
        """Keep what is used now, if it is the most so far."""
        statistics = self._statistics
        pages = self.cache.allocator.stats()
        unshared = sum(
            self.room.pages(self.cache.length(handle)) for group in self.running for handle in group.handles
        )
        used = int(pages["num_used_pages"])
        if (used, unshared) > (statistics.peak_used_pages, statistics.peak_unshared_pages):
            statistics.peak_used_pages = used
            statistics.peak_unshared_pages = unshared
            statistics.peak_waste_percent = float(pages["waste_percent"])

    def count_time(self, batch: Batch, seconds: float) -> None:
        """Count a step."""
        statistics = self._statistics
        statistics.num_steps += 1
        prefill = sum(share.num_tokens for share in batch.shares if share.is_prefill)
        if prefill:
            statistics.prefill_tokens += prefill
            statistics.prefill_seconds += seconds
        else:
            statistics.decode_tokens += len(batch.tokens)
            statistics.decode_seconds += seconds
