"""Random programs over octavo.KVCache: what it attends to is what the sequences' tokens say."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from numpy.typing import NDArray

import octavo
from support import oracle
from support.libraries import get_library

NUM_Q_HEADS, NUM_KV_HEADS, HEAD_DIM = 4, 2, 8
WINDOWS = [None, 5, None, 2]  # of four layers, in three groups
MAX_BATCH = 4


# Mostly one token, so that prompts begin with what others have left in the prefix cache.
TOKENS = st.sampled_from([0, 0, 0, 1])


@functools.cache
def keys_and_values(tokens: tuple[int, ...]) -> NDArray[np.float32]:
    """[layers, 2, heads, head dim]: of the last token, which depend on all before it, as in a model."""
    seed = [len(tokens), *tokens]
    shape = (len(WINDOWS), 2, NUM_KV_HEADS, HEAD_DIM)
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def of_all(tokens: list[int], layer: int) -> NDArray[np.float32]:
    """[2, len(tokens), heads, head dim]."""
    rows = [keys_and_values(tuple(tokens[: i + 1]))[layer] for i in range(len(tokens))]
    return np.stack(rows, axis=1) if rows else np.empty((2, 0, NUM_KV_HEADS, HEAD_DIM), np.float32)


@dataclass
class Sequence:
    handle: int
    tokens: list[int] = field(default_factory=list)
    is_preempted: bool = False


class Programs(RuleBasedStateMachine):
    library_name = "numpy"

    @initialize(
        num_pages=st.integers(3, 24),
        page_size=st.integers(1, 4),
        dtype=st.sampled_from(["float32", "int8", "int4"]),
        prefix_cache=st.booleans(),
    )
    def make(self, num_pages: int, page_size: int, dtype: str, prefix_cache: bool) -> None:
        self.library = get_library(self.library_name, "cpu")
        self.dtype = dtype
        self.cache = octavo.KVCache(
            len(WINDOWS),
            NUM_KV_HEADS,
            HEAD_DIM,
            num_pages=num_pages,
            page_size=page_size,
            max_batch=MAX_BATCH,
            max_tokens=24,
            max_length=64,
            dtype=dtype,
            like=self.library.float32([]),
            windows=WINDOWS,
            prefix_cache=prefix_cache,
            num_host_pages=num_pages // 2,
        )
        self.sequences: list[Sequence] = []

    def pick(self, index: int) -> Sequence:
        return self.sequences[index % len(self.sequences)]

    @property
    def active(self) -> list[Sequence]:
        return [sequence for sequence in self.sequences if not sequence.is_preempted]

    @precondition(lambda self: len(self.sequences) < 5)
    @rule(tokens=st.lists(TOKENS, max_size=12))
    def create(self, tokens: list[int]) -> None:
        handle = self.cache.create(tokens)
        found = self.cache.length(handle)
        assert found <= max(0, len(tokens) - 1) and (self.cache.prefix_cache or found == 0)
        self.sequences.append(Sequence(handle, tokens[:found]))

    @precondition(lambda self: self.active)
    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        self.do_step(data)

    def do_step(self, data: st.DataObject) -> None:
        batch = data.draw(
            st.lists(st.sampled_from(self.active), min_size=1, max_size=MAX_BATCH, unique_by=id)
        )
        counts: Any = data.draw(
            st.one_of(st.just(1), st.lists(st.integers(0, 6), min_size=len(batch), max_size=len(batch)))
        )
        each = [counts] * len(batch) if counts == 1 else counts
        new = [data.draw(st.lists(TOKENS, min_size=n, max_size=n)) for n in each]
        packed = [token for tokens in new for token in tokens]
        handles = [sequence.handle for sequence in batch]
        told = packed if self.cache.prefix_cache else None
        free_pages = self.free_pages()
        if not self.cache.fits(handles, counts):
            with pytest.raises(octavo.OutOfPages) as refused:
                self.cache.step(handles, counts, told)
            assert refused.value.indices
            assert self.free_pages() == free_pages
            return
        step = self.cache.step(handles, counts, told)
        for sequence, tokens in zip(batch, new, strict=True):
            sequence.tokens += tokens
        self.check_arrays(step, batch, each)
        for layer in range(len(WINDOWS)):
            self.check_layer(step, layer, batch, each)

    @precondition(lambda self: self.active)
    @rule(data=st.data())
    def another_step(self, data: st.DataObject) -> None:
        self.do_step(data)  # half of the calls or so should be steps

    def free_pages(self) -> list[int]:
        return [self.cache.allocator.stats(group)["num_free_pages"] for group in range(3)]

    def check_arrays(self, step: octavo.KVCacheStep, batch: list[Sequence], counts: list[int]) -> None:
        read = self.library.to_numpy
        lengths = [len(sequence.tokens) for sequence in batch]
        ends = np.cumsum(counts)
        assert (step.batch, step.num_tokens, step.max_seqlen_q) == (len(batch), sum(counts), max(counts))
        assert read(step.seq_lens).tolist() == lengths
        assert read(step.cu_seqlens_q).tolist() == [0, *ends]
        positions = [np.arange(m - n, m) for m, n in zip(lengths, counts, strict=True)]
        assert read(step.positions).tolist() == np.concatenate(positions).tolist()
        rows = [end - 1 if n else 0 for end, n in zip(ends, counts, strict=True)]
        assert read(step.last_rows).tolist() == rows

    def check_layer(
        self, step: octavo.KVCacheStep, layer: int, batch: list[Sequence], counts: list[int]
    ) -> None:
        keys = [of_all(sequence.tokens, layer) for sequence in batch]
        new = [x[:, x.shape[1] - n :] for x, n in zip(keys, counts, strict=True)]
        k, v = np.concatenate(new, axis=1)
        q = np.random.default_rng(0).standard_normal((len(k), NUM_Q_HEADS, HEAD_DIM), np.float32)
        out = step.attend(layer, *(self.library.float32(x) for x in (q, k, v)))
        out = self.library.to_numpy(out)
        window_left = -1 if WINDOWS[layer] is None else WINDOWS[layer]
        begin = 0
        for x, n in zip(keys, counts, strict=True):
            rows = slice(begin, begin + n)
            if n == 0:
                continue
            np.testing.assert_array_equal(out[rows], self.bare(q[rows], x, window_left, step))
            begin += n
        if self.dtype == "float32":
            k, v = np.concatenate(keys, axis=1)
            lengths = [x.shape[1] for x in keys]
            oracle.attention(
                q, k, v, counts, lengths, dtype="float32", causal=True, window_left=window_left
            ).check_out(out)

    def bare(self, q: NDArray[Any], keys: NDArray[Any], window_left: int, step: Any) -> NDArray[Any]:
        """By the operators, over a cache that holds this sequence alone."""
        length = keys.shape[1]
        layer = octavo.empty_cache(1, length, NUM_KV_HEADS, HEAD_DIM, self.dtype)
        tables = {"page_table": np.zeros((1, 1), np.int32), "seq_lens": np.array([length], np.int32)}
        octavo.append_kv(*keys, cu_seqlens=np.array([0, length], np.int32), **tables, **layer.arguments)
        return octavo.paged_attention(
            q,
            cu_seqlens_q=np.array([0, len(q)], np.int32),
            max_seqlen_q=step.max_seqlen_q,
            window_left=window_left,
            **tables,
            **layer.arguments,
        )

    @precondition(lambda self: self.active and len(self.sequences) < 5)
    @rule(data=st.data(), n=st.integers(1, 2))
    def fork(self, data: st.DataObject, n: int) -> None:
        sequence = data.draw(st.sampled_from(self.active))
        self.sequences += [
            Sequence(handle, list(sequence.tokens)) for handle in self.cache.fork(sequence.handle, n)
        ]

    @precondition(lambda self: self.active)
    @rule(data=st.data())
    def reorder(self, data: st.DataObject) -> None:
        beams = self.active
        parents = data.draw(
            st.lists(st.integers(0, len(beams) - 1), min_size=len(beams), max_size=len(beams))
        )
        self.cache.reorder([beam.handle for beam in beams], parents)
        held = [list(beam.tokens) for beam in beams]
        for beam, parent in zip(beams, parents, strict=True):
            beam.tokens = held[parent].copy()

    @precondition(lambda self: self.active)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.active))
        length = data.draw(st.integers(0, len(sequence.tokens)))
        refused = ""
        try:
            self.cache.truncate(sequence.handle, length)
        except ValueError as error:
            refused = str(error)
        if refused:
            assert "the pages before its window were returned" in refused
        else:
            del sequence.tokens[length:]

    @precondition(lambda self: self.active)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        chosen = data.draw(st.lists(st.sampled_from(self.active), unique_by=id, max_size=3))
        try:
            self.cache.preempt([sequence.handle for sequence in chosen])
        except octavo.OutOfPages:
            return
        for sequence in chosen:
            sequence.is_preempted = True

    @precondition(lambda self: len(self.active) < len(self.sequences))
    @rule(data=st.data())
    def resume(self, data: st.DataObject) -> None:
        preempted = [sequence for sequence in self.sequences if sequence.is_preempted]
        chosen = data.draw(st.lists(st.sampled_from(preempted), unique_by=id, min_size=1))
        try:
            self.cache.resume([sequence.handle for sequence in chosen])
        except octavo.OutOfPages:
            return
        for sequence in chosen:
            sequence.is_preempted = False

    @precondition(lambda self: self.sequences)
    @rule(index=st.integers(0))
    def free(self, index: int) -> None:
        sequence = self.pick(index)
        self.sequences.remove(sequence)
        self.cache.free(sequence.handle)

    @invariant()
    def lengths_are_those_of_the_tokens(self) -> None:
        for sequence in getattr(self, "sequences", []):
            assert self.cache.length(sequence.handle) == len(sequence.tokens)


TestProgramsOfNumPy = Programs.TestCase
TestProgramsOfNumPy.settings = settings(
    max_examples=3 * settings.default.max_examples, stateful_step_count=60
)


class ProgramsOfTorch(Programs):
    library_name = "torch"


@pytest.mark.usefixtures("torch")
class TestProgramsOfTorch(ProgramsOfTorch.TestCase):
    settings = settings(stateful_step_count=60)
