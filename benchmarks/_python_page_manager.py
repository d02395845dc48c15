"""The yardstick: what a serving engine does for its KV pages in plain Python.

Deques, lists and dicts, as good as they get without extensions: a free queue, a page table a request,
reference counts, a chained hash a full page, trusted as it stands. No fork, no copy-on-write, no checks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class PythonPageManager:
    def __init__(self, num_pages: int, page_size: int) -> None:
        self.page_size = page_size
        self.free_pages = deque(range(num_pages))
        self.num_holders = [0] * num_pages
        self.key_of: list[int | None] = [None] * num_pages
        self.page_of: dict[int, int] = {}
        self.pages: dict[int, list[int]] = {}
        self.length: dict[int, int] = {}
        self.next_handle = 0

    def create(self, tokens: Sequence[int] = ()) -> int:
        handle, self.next_handle = self.next_handle, self.next_handle + 1
        found, key = [], 0
        for i in range(0, len(tokens) - self.page_size + 1, self.page_size):
            key = hash((key, *tokens[i : i + self.page_size]))
            page = self.page_of.get(key)
            if page is None:
                break
            found.append(page)
        for page in found:
            if self.num_holders[page] == 0:
                self.free_pages.remove(page)
            self.num_holders[page] += 1
        self.pages[handle], self.length[handle] = found, len(found) * self.page_size
        return handle

    def free(self, handle: int) -> None:
        for page in reversed(self.pages.pop(handle)):
            self.num_holders[page] -= 1
            if self.num_holders[page] == 0:
                self.free_pages.append(page)
        del self.length[handle]

    def take(self, count: int) -> list[int]:
        if count > len(self.free_pages):
            raise MemoryError
        taken = [self.free_pages.popleft() for _ in range(count)]
        for page in taken:
            self.num_holders[page] = 1
            key = self.key_of[page]
            if key is not None:
                del self.page_of[key]
                self.key_of[page] = None
        return taken

    def step(
        self,
        handles: Sequence[int],
        num_new_tokens: int,
        page_table: NDArray[np.int32],
        seq_lens: NDArray[np.int32],
        cu_seqlens_q: NDArray[np.int32],
    ) -> None:
        """Rows stay where they are: only what has changed is written."""
        page_size, pages_of, length_of = self.page_size, self.pages, self.length
        for row, handle in enumerate(handles):
            pages = pages_of[handle]
            length = length_of[handle] = length_of[handle] + num_new_tokens
            missing = -(-length // page_size) - len(pages)
            if missing > 0:
                taken = self.take(missing)
                page_table[row, len(pages) : len(pages) + missing] = taken
                pages += taken
        batch = len(handles)
        seq_lens[:batch] = [length_of[handle] for handle in handles]
        cu_seqlens_q[: batch + 1] = range(0, (batch + 1) * num_new_tokens, num_new_tokens)
        cu_seqlens_q[batch + 1 :] = batch * num_new_tokens

    def store(self, handle: int, tokens: Sequence[int]) -> None:
        key = 0
        for i, page in enumerate(self.pages[handle][: len(tokens) // self.page_size]):
            key = hash((key, *tokens[i * self.page_size : (i + 1) * self.page_size]))
            if self.page_of.setdefault(key, page) == page:
                self.key_of[page] = key
