"""How many pages sequences need."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from octavo._kv_cache import KVCache
from octavo.serving.group import Group


class PageGroup(NamedTuple):
    """Layers with page tables of their own."""

    num_pages: int
    page_size: int
    window_left: int
    max_new_tokens: int

    def pages(self, num_tokens: int) -> int:
        """The most pages that a sequence of this many tokens holds in a step."""
        pages = -(-num_tokens // self.page_size)
        if self.window_left >= 0:
            seen = self.window_left + self.max_new_tokens
            pages = min(pages, -(-seen // self.page_size) + 1)
        return pages


class Room:
    """The pages of a cache."""

    def __init__(self, cache: KVCache, token_budget: int) -> None:
        self._cache = cache
        self._groups = [
            PageGroup(group.num_pages, group.page_size, group.window_left, token_budget)
            for group in cache.page_groups
        ]

    def free_pages(self) -> list[int]:
        """Return how many are free in each group of layers."""
        allocator = self._cache.allocator
        return [int(allocator.stats(index)["num_free_pages"]) for index in range(len(self._groups))]

    def pages(self, num_tokens: int) -> int:
        """Return what a sequence that shares nothing holds, in the first group of layers."""
        return self._groups[0].pages(num_tokens)

    def suffices(self, groups: Iterable[Group]) -> bool:
        """Return whether these can compute all their tokens and one more, as far as one can tell.

        Pages that they share are counted where they are copied, once for each sequence.
        """
        needed = [0] * len(self._groups)
        for group in groups:
            length = self._cache.length(group.handles[0])
            goal = group.wanted_length + 1
            for index, layers in enumerate(self._groups):
                grown = max(layers.pages(goal) - layers.pages(length), 0)
                needed[index] += grown * len(group.handles) + group.num_rows - 1
                needed[index] += group.host_pages[index] if group.host_pages else 0
        return all(need <= free for need, free in zip(needed, self.free_pages(), strict=True))

    def needed(self, num_prompt: int, length: int, num_beams: int) -> tuple[int, PageGroup]:
        """Return what beams of this length need that share a prompt, in the group that lacks most."""
        needed = []
        for layers in self._groups:
            one_at_a_time = layers._replace(max_new_tokens=1)
            common = 0 if layers.window_left >= 0 else num_prompt // layers.page_size
            needed.append((common + num_beams * (one_at_a_time.pages(length) - common), layers))
        return max(needed, key=lambda item: item[0] - item[1].num_pages)
