"""Which layers of a KVCache share a page table, and how many pages its memory holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from octavo._cache import int_argument


class LayerGroup(NamedTuple):
    """Layers with one window, which have one page table."""

    window_left: int
    """-1: none."""
    layers: tuple[int, ...]


def group_layers(num_layers: int, windows: Sequence[int | None] | None) -> list[LayerGroup]:
    """Those without a window first, since prefixes are found by the pages of group 0."""
    lefts = [-1] * num_layers
    if windows is not None:
        try:
            count = len(windows)
        except TypeError:
            raise TypeError(
                "KVCache: windows must be a sequence of an int or None for each layer, such as a list; "
                f"got {type(windows).__name__}"
            ) from None
        if count != num_layers:
            raise ValueError(
                f"KVCache: windows must have an entry for each of the {num_layers} layers; got {count}"
            )
        for layer, window in enumerate(windows):
            if window is None:
                continue
            lefts[layer] = int_argument("KVCache", f"windows[{layer}]", window)
            if lefts[layer] < 0:
                raise ValueError(f"KVCache: windows[{layer}] ({window}) must be at least 0, or None")
    return [
        LayerGroup(left, tuple(layer for layer, x in enumerate(lefts) if x == left))
        for left in sorted(set(lefts))
    ]


def most_pages_of_window(
    window_left: int, page_size: int, max_batch: int, max_tokens: int, prefix_cache: bool
) -> int | None:
    """What max_batch sequences need at most in layers with that window, all in every step; None without one.

    A sequence holds the window before its newest tokens, and these: when it grows, pages behind the window
    are returned before new ones are taken. All that begins and ends anywhere in a page, which makes two pages
    more for each sequence. With a prefix cache, the page that it fills may be one that the cache has: then it
    takes a copy, and the page itself is kept until the copy is made.
    """
    if window_left < 0:
        return None
    of_sequence = -(-window_left // page_size) + (3 if prefix_cache else 2)
    return max_batch * of_sequence + -(-max_tokens // page_size)


def pages_within(memory: int, page_bytes: Sequence[int], most: Sequence[int | None]) -> int:
    """The most pages that a group without a limit may have, all groups together taking ``memory`` bytes.

    Args:
        memory: in bytes.
        page_bytes: of a page of each group, in all its layers.
        most: of each group, how many pages it has at most; None: as many as there are.
    """

    def size(num_pages: int) -> int:
        return sum(
            each * (num_pages if limit is None else min(num_pages, limit))
            for each, limit in zip(page_bytes, most, strict=True)
        )

    low, high = 0, memory // min(page_bytes) + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if size(middle) <= memory else (low, middle)
    return low


def check_rows(q: Any, k: Any, v: Any, num_tokens: int | None, num_rows: int) -> None:
    """The operators take more rows than there are new tokens for padding, with results of no meaning.

    On a GPU they cannot see that there are fewer.

    Args:
        q: of the new tokens, as are k and v.
        k: likewise.
        v: likewise.
        num_tokens: new tokens in the step; None where that is not known.
        num_rows: the same with padding.
    """
    shape = getattr(q, "shape", None)
    if shape and shape[0] > num_rows:
        raise ValueError(f"attend: q must have the {num_rows} rows of the step at most; got {shape[0]}")
    if num_tokens is None:
        return
    for name, rows in (("q", q), ("k", k), ("v", v)):
        shape = getattr(rows, "shape", None)
        if shape and shape[0] < num_tokens:
            raise ValueError(
                f"attend: {name} must have a row for each of the {num_tokens} new tokens; got {shape[0]}"
            )
