"""Sequences that the scheduler runs, waits with and puts aside together."""

from __future__ import annotations

from dataclasses import dataclass, field

from octavo.serving.beams import BeamSearch
from octavo.serving.request import Request


@dataclass(eq=False)
class Group:
    """One sample of a request, or all its beams, which go step by step together.

    Its tokens are the prompt and what was generated; the cache knows how many of them it has. One missing
    token is a decode step, more are (a part of) a prefill, and when none is missing the next one is due.
    A group without handles holds no pages. Beams begin with one handle, for what they have in common, and
    have one each when that is in the cache.
    """

    request: Request
    sample: int
    num_samples: int
    """This one, and those still to be forked from its prompt."""
    search: BeamSearch | None = None
    generated: list[list[int]] = field(init=False)
    """The tokens of a sample, which are its answer's own list, or those of each beam."""
    handles: list[int] = field(default_factory=list)
    num_common: int = 0
    """Tokens that all beams have in common, while one handle stands for them."""
    num_found: int = 0
    """Tokens that the prefix cache had when the handle was made."""
    host_pages: list[int] = field(default_factory=list)
    """The pages that were moved to host memory, if the group was put aside there, in each group of layers."""

    def __post_init__(self) -> None:
        self.follow_search()

    def follow_search(self) -> None:
        """Take over the beams of the search, if there is one."""
        if self.search is None:
            self.generated = [self.request.answers[self.sample].tokens]
        else:
            self.generated = [list(beam.tokens) for beam in self.search.beams]

    @property
    def rank(self) -> tuple[int, int, int]:
        return *self.request.rank, self.sample

    @property
    def num_rows(self) -> int:
        """What it may take of a batch."""
        return self.request.num_beams if self.search else self.num_samples

    @property
    def is_over(self) -> bool:
        """Whether nobody waits any more for what it stands for."""
        if self.search is None and self.num_samples == 1:
            return self.request.finish_reason(self.sample) is not None
        return self.request.finished

    @property
    def num_tokens(self) -> int:
        """The tokens of each of its sequences."""
        return len(self.request.prompt) + len(self.generated[0])

    @property
    def is_forked(self) -> bool:
        return len(self.handles) == len(self.generated)

    @property
    def wanted_length(self) -> int:
        """The tokens that are to be in the cache of each handle."""
        return self.num_tokens if self.is_forked else self.num_common

    def begin(self, handle: int, num_found: int) -> None:
        """Start to compute what its sequences have in common."""
        self.handles = [handle]
        self.num_found = num_found
        self.num_common = len(self.request.prompt) + common_prefix(self.generated)

    def tokens(self, index: int, begin: int, end: int) -> list[int]:
        """Tokens of one of its sequences, from one position to another."""
        prompt = self.request.prompt
        num_prompt = len(prompt)
        after = self.generated[index][max(begin - num_prompt, 0) : max(end - num_prompt, 0)]
        return prompt[begin:end] + after


def groups_of(request: Request, search: BeamSearch | None) -> list[Group]:
    """Return what an unfinished request needs: its search, or its samples, as one if none has begun."""
    if search is not None or not any(answer.tokens for answer in request.answers):
        return [Group(request, 0, 1 if search else request.num_samples, search)]
    unfinished = [i for i, answer in enumerate(request.answers) if answer.finish_reason is None]
    return [Group(request, index, 1) for index in unfinished]


def common_prefix(sequences: list[list[int]]) -> int:
    """Return how many tokens all of these begin with."""
    first, *others = sequences
    length = len(first)
    for other in others:
        low, high = 0, min(length, len(other))
        while low < high:  # slices are compared at the speed of C
            middle = (low + high + 1) // 2
            if first[low:middle] == other[low:middle]:
                low = middle
            else:
                high = middle - 1
        length = low
    return length
