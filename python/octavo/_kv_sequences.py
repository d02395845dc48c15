"""What octavo.KVCache and octavo.jax.KVCache have in common: pages of all layers, and the sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from octavo._cache import PagedCache, bytes_per_token, empty_cache, int_argument
from octavo._core import PageAllocator, PageGroup, check_head_dim
from octavo._kv_layout import group_layers, most_pages_of_window, pages_within

if TYPE_CHECKING:
    from octavo._types import SupportsDLPack

_LONGEST = 8192  # tokens; each makes a row of the page table longer, which every step moves


class KVSequences:
    """Base class: the arrays of pages, the allocator, and the calls that move no keys or values."""

    def __init__(
        self,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        num_pages: int | None,
        memory: int | None,
        memory_fraction: float | None,
        page_size: int,
        max_batch: int,
        max_tokens: int,
        max_length: int | None,
        dtype: Any,
        like: Any,
        windows: Sequence[int | None] | None,
        prefix_cache: bool,
        num_host_pages: int,
        head_dim_v: int | None,
        free_bytes: Callable[[], int],
    ) -> None:
        numbers = {
            "num_layers": num_layers,
            "num_kv_heads": num_kv_heads,
            "head_dim": head_dim,
            "page_size": page_size,
            "max_batch": max_batch,
            "max_tokens": max_tokens,
            **({} if max_length is None else {"max_length": max_length}),
            **({} if head_dim_v is None else {"head_dim_v": head_dim_v}),
        }
        for name, given in numbers.items():
            # From here on Python's own, since products of NumPy's may overflow.
            number = numbers[name] = int_argument("KVCache", name, given)
            if number < 1:
                raise ValueError(f"KVCache: {name} ({number}) must be at least 1")
            if name.startswith("head_dim"):
                check_head_dim("KVCache", name, number)
        num_layers, num_kv_heads, head_dim = (numbers[x] for x in ("num_layers", "num_kv_heads", "head_dim"))
        page_size, max_batch, max_tokens = (numbers[x] for x in ("page_size", "max_batch", "max_tokens"))
        max_length, head_dim_v = numbers.get("max_length"), numbers.get("head_dim_v")
        self._groups = group_layers(num_layers, windows)
        if prefix_cache and self._groups[0].window_left >= 0:
            raise ValueError(
                "KVCache: prefix_cache needs a layer without a window; every entry of windows has one"
            )
        if dtype is None:
            dtype = "float32" if like is None else like.dtype
        head_dim_v = head_dim if head_dim_v is None else head_dim_v
        self.bytes_per_token = num_layers * bytes_per_token(
            "KVCache", num_kv_heads, head_dim, dtype, True, head_dim_v
        )
        """In all layers, scales counted."""
        most = [
            most_pages_of_window(group.window_left, page_size, max_batch, max_tokens, prefix_cache)
            for group in self._groups
        ]
        page_bytes = [self.bytes_per_token // num_layers * page_size * len(x.layers) for x in self._groups]
        num_pages = _num_pages(num_pages, memory, memory_fraction, free_bytes, page_bytes, most)
        pages = [num_pages if limit is None else min(num_pages, limit) for limit in most]
        self.page_groups: list[PageGroup] = [
            PageGroup(count, page_size, window_left=group.window_left, num_host_pages=num_host_pages)
            for group, count in zip(self._groups, pages, strict=True)
        ]
        """The layers that share a page table, those without a window first."""
        self.allocator: PageAllocator = PageAllocator.from_groups(self.page_groups, prefix_cache=prefix_cache)
        """Who holds which page. Use the cache's own calls where it has them, which move keys and values."""
        self.num_layers = num_layers
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.head_dim_v = head_dim_v
        """Of values."""
        self.page_size = page_size
        self.max_batch = max_batch
        """The most sequences in a step."""
        self.max_tokens = max_tokens
        """The most new tokens in a step, of all sequences together."""
        self.max_length = min(num_pages * page_size, _LONGEST) if max_length is None else max_length
        """The most tokens of a sequence."""
        self.prefix_cache = prefix_cache
        self._group_of_layer = [0] * num_layers
        for number, group in enumerate(self._groups):
            for layer in group.layers:
                self._group_of_layer[layer] = number
        self._shape = (page_size, num_kv_heads, head_dim, dtype)

    def _make_layers(self, like: Any) -> list[PagedCache]:
        return [
            empty_cache(
                self.page_groups[group].num_pages, *self._shape, like=like, head_dim_v=self.head_dim_v
            )
            for group in self._group_of_layer
        ]

    @property
    def num_pages(self) -> int:
        """The pages of each layer; a layer with a window may have fewer."""
        return self.allocator.num_pages

    @property
    def max_pages(self) -> int:
        """The most pages of a sequence, which is the number of columns of the page tables."""
        return -(-self.max_length // self.page_size)

    def create(
        self, tokens: Iterable[int] | SupportsDLPack | None = None, namespace: str | bytes = ""
    ) -> int:
        """Make a sequence: empty, or of as many of these tokens as the prefix cache has.

        The last token of a prompt is never found, since its query has still to be computed.

        Args:
            tokens: of a prompt: a list, or an int32 array in CPU memory. Default: none.
            namespace: tokens are found only where they were stored under the same one, and those that the
                sequence gets are stored under it. Default: "".

        Returns:
            seq: the handle. ``length(seq)`` says how many tokens were found; none without a prefix cache.

        Raises:
            TypeError, ValueError: tokens or a namespace of another kind.
        """
        if not self.prefix_cache or (tokens is None and not namespace):
            return self.allocator.create()
        return self.allocator.create([] if tokens is None else tokens, namespace=namespace)

    def length(self, seq: int) -> int:
        """The number of tokens of a sequence. Raises octavo.InvalidSequence."""
        return self.allocator.length(seq)

    def needed(
        self, seqs: Iterable[int], num_new_tokens: int | Iterable[int] | SupportsDLPack = 1, group: int = 0
    ) -> int:
        """How many free pages of a group of layers a step would take: ``PageAllocator.needed``."""
        return self.allocator.needed(seqs, listed(num_new_tokens), group)

    def fits(self, seqs: Iterable[int], num_new_tokens: int | Iterable[int] | SupportsDLPack = 1) -> bool:
        """Whether every group of layers has the pages that a step would take.

        It is about pages alone, which other sequences can leave: ``step`` refuses more sequences than
        max_batch, more new tokens than max_tokens, and a sequence longer than max_length, whatever is free.
        """
        seqs = handles("fits", seqs)
        num_new_tokens = listed(num_new_tokens)
        try:
            return all(
                self.allocator.needed(seqs, num_new_tokens, group) <= self._num_free_pages(group)
                for group in range(len(self._groups))
            )
        except (TypeError, ValueError) as error:
            message = str(error)
            if not message.startswith("needed: "):
                raise
            raise type(error)("fits: " + message.removeprefix("needed: ")) from error.__cause__

    def _num_free_pages(self, group: int) -> int:
        if group == 0:
            return self.allocator.num_free_pages
        return int(self.allocator.stats(group)["num_free_pages"])  # which counts more, and takes longer

    def fork(self, seq: int, n: int = 1, length: int | None = None) -> list[int]:
        """Make n sequences that share every page of this one, or those of its first tokens.

        ``PageAllocator.fork``. A page is copied when one of them is about to write to it, by ``step``.
        """
        return self.allocator.fork(seq, n, length)

    def reorder(self, seqs: Iterable[int], parents: Iterable[int] | SupportsDLPack) -> None:
        """A step of beam search, each sequence going on from another one: ``PageAllocator.reorder``."""
        self.allocator.reorder(seqs, parents)

    def truncate(self, seq: int, length: int) -> None:
        """Drop the tokens of a sequence past the first ``length``: ``PageAllocator.truncate``."""
        self.allocator.truncate(seq, length)

    def free(self, seq: int) -> None:
        """End a sequence: ``PageAllocator.free``.

        With a prefix cache its pages can still be found. Where keys and values of the last step were not
        written, since a layer failed, ``truncate`` the sequence first.
        """
        self.allocator.free(seq)

    def stats(self) -> dict[str, Any]:
        """Counts of pages and tokens: ``PageAllocator.stats`` of the layers of group 0.

        With a prefix cache also what ``PageAllocator.cache_stats`` counts.
        """
        counts = self.allocator.stats()
        return counts | self.allocator.cache_stats() if self.prefix_cache else counts


def handles(call: str, seqs: Iterable[int]) -> list[int]:
    """A list of handles, which may come from what can be read only once."""
    try:
        iterator = iter(seqs)
    except TypeError:
        raise TypeError(f"{call}: seqs must be an iterable of handles; got {type(seqs).__name__}") from None
    return list(iterator)


def listed(numbers: Any) -> Any:
    """A list of what can be read only once, such as a generator; anything else as it is."""
    if isinstance(numbers, (int, list, tuple)) or hasattr(numbers, "__dlpack__"):
        return numbers
    return list(numbers) if isinstance(numbers, Iterable) else numbers


def _num_pages(
    num_pages: int | None,
    memory: int | None,
    memory_fraction: float | None,
    free_bytes: Callable[[], int],
    page_bytes: Sequence[int],
    most: Sequence[int | None],
) -> int:
    given = {"num_pages": num_pages, "memory": memory, "memory_fraction": memory_fraction}
    names = [name for name, value in given.items() if value is not None]
    if len(names) != 1:
        raise ValueError(
            "KVCache: exactly one of num_pages, memory and memory_fraction must be given; got "
            + (" and ".join(names) or "none")
        )
    if num_pages is not None:
        return int_argument("KVCache", "num_pages", num_pages)
    if memory_fraction is not None:
        if not hasattr(memory_fraction, "__float__"):
            kind = type(memory_fraction).__name__
            raise TypeError(f"KVCache: memory_fraction must be a float; got {kind}")
        if not 0.0 < memory_fraction <= 1.0:
            raise ValueError(f"KVCache: memory_fraction ({memory_fraction}) must be above 0 and at most 1")
        memory = int(memory_fraction * free_bytes())
    assert memory is not None
    fitting = pages_within(int_argument("KVCache", "memory", memory), page_bytes, most)
    if fitting < 1:
        raise ValueError(
            f"KVCache: memory ({memory} bytes) must hold a page of every layer, {sum(page_bytes)} bytes"
        )
    return fitting
