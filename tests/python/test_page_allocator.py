"""octavo.PageAllocator: random steps against a cache of tokens, and each documented behaviour."""

import gc
import re

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import octavo
from support.refusals import dump

INT32_MAX = 2**31 - 1


class Tokens:
    """What one sequence holds, as whoever generated it remembers it."""

    def __init__(self, tokens=(), num_written=0):
        self.tokens = list(tokens)
        self.num_written = num_written  # the later ones have room, but are not in the cache yet


class CacheOfTokens(RuleBasedStateMachine):
    """A KV cache with numbered tokens for keys, used as a serving loop does.

    Sequences grow, fork, shrink and end in any order. Now and then `step` makes the pending copies and writes
    the new tokens. From then on every sequence has to read its own tokens through its pages.
    """

    @initialize(num_pages=st.integers(1, 12), page_size=st.integers(1, 5))
    def start(self, num_pages, page_size):
        self.alloc = octavo.PageAllocator(num_pages, page_size)
        self.cache = np.full((num_pages, page_size), -1)
        self.sequences = {}  # handle -> Tokens
        self.freed = []
        self.pending = {}  # page to write -> page to read
        self.next_token = 0

    def pick(self, index):
        return list(self.sequences)[index % len(self.sequences)]

    def held(self):
        return [page for seq in self.sequences for page in self.alloc.pages(seq).tolist()]

    def drop_copies_to_pages_let_go(self):
        held = self.held()
        self.pending = {to: source for to, source in self.pending.items() if to in held}

    @rule()
    def create(self):
        self.sequences[self.alloc.create()] = Tokens()

    @precondition(lambda self: self.sequences)
    @rule(index=st.integers(0), n=st.integers(0, 12), try_it=st.booleans())
    def extend(self, index, n, try_it):
        seq = self.pick(index)
        length, pages = self.alloc.length(seq), self.alloc.pages(seq).tolist()
        copies_tail = n > 0 and length % self.alloc.page_size != 0 and self.held().count(pages[-1]) > 1
        num_new = -(-(length + n) // self.alloc.page_size) - len(pages)
        num_free = self.alloc.num_free_pages
        fits = num_new + copies_tail <= num_free
        assert self.alloc.needed([seq], n) == num_new + copies_tail
        before = dump(self.alloc, self.sequences)
        if try_it:
            assert self.alloc.try_extend(seq, n) is fits
        elif fits:
            assert self.alloc.extend(seq, n) is None
        else:
            needs = f"needs {num_new + copies_tail} pages ({num_new} new, {copies_tail:d} copy-on-write)"
            with pytest.raises(octavo.OutOfPages, match=f"^extend: {re.escape(needs)}, {num_free} free$"):
                self.alloc.extend(seq, n)
        if not fits:
            assert dump(self.alloc, self.sequences) == before
            return
        new_pages = self.alloc.pages(seq).tolist()
        if copies_tail:
            source = pages.pop()
            self.pending[new_pages[len(pages)]] = self.pending.get(source, source)
        assert new_pages[: len(pages)] == pages
        self.sequences[seq].tokens += range(self.next_token, self.next_token + n)
        self.next_token += n

    @precondition(lambda self: self.sequences)
    @rule(index=st.integers(0), n=st.integers(0, 3))
    def fork(self, index, n):
        seq = self.pick(index)
        original = self.sequences[seq]
        num_free = self.alloc.num_free_pages
        for child in self.alloc.fork(seq, n):
            assert child not in self.sequences
            assert child not in self.freed
            assert self.alloc.pages(child).tolist() == self.alloc.pages(seq).tolist()
            self.sequences[child] = Tokens(original.tokens, original.num_written)
        assert self.alloc.num_free_pages == num_free

    @precondition(lambda self: self.sequences)
    @rule(index=st.integers(0), share=st.floats(0, 1))
    def truncate(self, index, share):
        seq = self.pick(index)
        tokens = self.sequences[seq]
        length = round(share * len(tokens.tokens))
        self.alloc.truncate(seq, length)
        del tokens.tokens[length:]
        tokens.num_written = min(tokens.num_written, length)
        self.drop_copies_to_pages_let_go()

    @precondition(lambda self: self.sequences)
    @rule(index=st.integers(0))
    def free(self, index):
        seq = self.pick(index)
        self.alloc.free(seq)
        del self.sequences[seq]
        self.freed.append(seq)
        self.drop_copies_to_pages_let_go()

    @precondition(lambda self: self.freed)
    @rule(index=st.integers(0))
    def use_after_free(self, index):
        seq = self.freed[index % len(self.freed)]
        for call in (self.alloc.free, self.alloc.length, lambda seq: self.alloc.extend(seq, 1)):
            with pytest.raises(octavo.InvalidSequence, match="was freed"):
                call(seq)

    @rule(random=st.randoms(use_true_random=False))
    def step(self, random):
        copies = self.alloc.take_copies().tolist()
        assert {to: source for source, to in copies} == self.pending
        assert len(copies) == len(self.pending)
        assert not {source for source, _ in copies} & {to for _, to in copies}
        self.pending = {}
        random.shuffle(copies)
        for source, to in copies:
            self.cache[to] = self.cache[source]
        page_size = self.alloc.page_size
        page_table, seq_lens = self.alloc.page_table(self.sequences)
        for row, seq_len, tokens in zip(page_table, seq_lens, self.sequences.values(), strict=True):
            for i in range(tokens.num_written, seq_len):
                self.cache[row[i // page_size], i % page_size] = tokens.tokens[i]
            tokens.num_written = seq_len
        for row, seq_len, tokens in zip(page_table, seq_lens, self.sequences.values(), strict=True):
            num_pages = -(-seq_len // page_size)
            assert (row[num_pages:] == -1).all()
            assert self.cache[row[:num_pages]].ravel()[:seq_len].tolist() == tokens.tokens

    @invariant()
    def counts_agree(self):
        self.alloc.check_invariants()
        held = self.held()
        stats = self.alloc.stats()
        used = {*held, *self.pending.values()}
        assert stats["num_used_pages"] == len(used)
        assert stats["num_free_pages"] == self.alloc.num_free_pages == self.alloc.num_pages - len(used)
        assert stats["num_shared_pages"] == sum(held.count(page) > 1 for page in set(held))
        assert stats["num_sequences"] == len(self.sequences)
        for seq, tokens in self.sequences.items():
            assert self.alloc.length(seq) == len(tokens.tokens)


TestCacheOfTokens = CacheOfTokens.TestCase
TestCacheOfTokens.settings = settings(max_examples=4 * settings.default.max_examples, stateful_step_count=80)


@pytest.fixture
def alloc():
    return octavo.PageAllocator(8, 4)


def test_a_sequence_grows_by_whole_pages(alloc):
    seq = alloc.create()
    assert alloc.length(seq) == 0
    assert alloc.pages(seq).shape == (0,)
    for n, pages in [(4, [0]), (1, [0, 1]), (3, [0, 1]), (0, [0, 1]), (5, [0, 1, 2, 3])]:
        alloc.extend(seq, n)
        assert alloc.pages(seq).tolist() == pages
    assert alloc.length(seq) == 13
    assert alloc.num_free_pages == 4


def test_properties(alloc):
    assert (alloc.num_pages, alloc.page_size, alloc.num_free_pages) == (8, 4, 8)
    assert repr(alloc) == "PageAllocator(num_pages=8, page_size=4, num_free_pages=8)"
    with pytest.raises(AttributeError):
        alloc.num_pages = 9


def test_equal_calls_hand_out_equal_pages():
    def calls(alloc):
        seqs = [alloc.create() for _ in range(3)]
        for n in (5, 1, 7):
            for seq in seqs:
                alloc.try_extend(seq, n)
        alloc.free(seqs.pop(1))
        seqs += alloc.fork(seqs[0], 2)
        alloc.extend(seqs[-1], 3)
        return dump(alloc, seqs), alloc.take_copies().tolist()

    assert calls(octavo.PageAllocator(20, 4)) == calls(octavo.PageAllocator(20, 4))


def test_fork_shares_and_the_last_to_grow_keeps_the_page(alloc):
    parent = alloc.create()
    alloc.extend(parent, 6)
    children = alloc.fork(parent, 2)
    assert isinstance(children, list)
    assert alloc.num_free_pages == 6
    for seq in (*children, parent):
        alloc.extend(seq, 1)
    assert [alloc.pages(seq).tolist() for seq in (*children, parent)] == [[0, 2], [0, 3], [0, 1]]
    copies = alloc.take_copies()
    assert copies.dtype == np.int32
    assert copies.tolist() == [[1, 2], [1, 3]]
    assert alloc.take_copies().shape == (0, 2)


def test_fork_defaults_to_one_and_takes_none(alloc):
    seq = alloc.create()
    assert len(alloc.fork(seq)) == 1
    assert alloc.fork(seq, 0) == []
    assert len(alloc.fork(seq=seq, n=2)) == 2


def test_a_tree_of_drafts(alloc):
    root = alloc.create()
    alloc.extend(root, 6)
    left, right = alloc.fork(root, 2)
    for draft in (left, right):
        alloc.extend(draft, 2)
    (leaf,) = alloc.fork(left, length=7)
    alloc.extend(leaf, 3)
    assert [alloc.length(seq) for seq in (root, left, right, leaf)] == [6, 8, 8, 10]
    assert alloc.pages(leaf).tolist()[0] == alloc.pages(root).tolist()[0]
    for draft in (left, right, leaf):
        alloc.free(draft)
    alloc.extend(root, 1)
    assert alloc.pages(root).tolist() == [0, 1]
    assert len(alloc.take_copies()) == 0


def test_a_beam_is_reordered(alloc):
    beam = [alloc.create()]
    alloc.extend(beam[0], 5)
    beam += alloc.fork(beam[0], 2)
    for seq in beam:
        alloc.extend(seq, 1)
    before = [alloc.pages(seq).tolist() for seq in beam]
    alloc.reorder(beam, np.array([2, 0, 2], np.int32))
    assert [alloc.pages(seq).tolist() for seq in beam] == [before[2], before[0], before[2]]
    alloc.reorder(beam, [0, 1, 2])
    with pytest.raises(ValueError, match=r"^reorder: parents must have one position for each of the 3 seq"):
        alloc.reorder(beam, [0, 1])


def test_a_full_shared_page_is_not_copied(alloc):
    seq = alloc.create()
    alloc.extend(seq, 8)
    (child,) = alloc.fork(seq)
    alloc.extend(child, 1)
    assert alloc.pages(child).tolist() == [0, 1, 2]
    assert len(alloc.take_copies()) == 0


def test_truncation_may_leave_a_shared_partly_used_page(alloc):
    seq = alloc.create()
    alloc.extend(seq, 8)
    (child,) = alloc.fork(seq)
    alloc.truncate(child, 5)
    alloc.truncate(child, 5)
    assert alloc.pages(child).tolist() == [0, 1]
    alloc.extend(child, 1)
    assert alloc.pages(child).tolist() == [0, 2]
    assert alloc.take_copies().tolist() == [[1, 2]]
    alloc.truncate(child, 0)
    assert alloc.pages(child).tolist() == []
    assert alloc.num_free_pages == 6


def test_the_source_of_a_copy_is_kept_until_taken():
    alloc = octavo.PageAllocator(2, 4)
    seq = alloc.create()
    alloc.extend(seq, 3)
    (child,) = alloc.fork(seq)
    alloc.extend(child, 1)
    alloc.free(seq)
    assert alloc.num_free_pages == 0
    assert not alloc.try_extend(child, 1)
    assert alloc.take_copies().tolist() == [[0, 1]]
    assert alloc.try_extend(child, 1)
    assert alloc.pages(child).tolist() == [1, 0]


def test_a_copy_to_a_page_let_go_is_dropped(alloc):
    seq = alloc.create()
    alloc.extend(seq, 3)
    first, second = alloc.fork(seq, 2)
    alloc.extend(first, 1)
    alloc.extend(second, 1)
    alloc.free(first)
    assert alloc.take_copies().tolist() == [[0, 2]]


def test_a_copy_of_a_page_still_to_be_written_reads_its_source(alloc):
    seq = alloc.create()
    alloc.extend(seq, 1)
    (child,) = alloc.fork(seq)
    alloc.extend(child, 1)
    (grandchild,) = alloc.fork(child)
    alloc.extend(grandchild, 1)
    assert alloc.take_copies().tolist() == [[0, 1], [0, 2]]


def test_page_table(alloc):
    long, empty, short = (alloc.create() for _ in range(3))
    alloc.extend(long, 9)
    alloc.extend(short, 2)
    page_table, seq_lens = alloc.page_table([short, empty, long, short])
    assert page_table.dtype == seq_lens.dtype == np.int32
    assert page_table.tolist() == [[3, -1, -1], [-1, -1, -1], [0, 1, 2], [3, -1, -1]]
    assert seq_lens.tolist() == [2, 0, 9, 2]
    for seqs in ((long,), iter([long]), np.array([long]), {long: None}):
        assert alloc.page_table(seqs)[0].tolist() == [[0, 1, 2]]
    page_table, seq_lens = alloc.page_table([])
    assert page_table.shape == (0, 0)
    assert seq_lens.shape == (0,)
    assert alloc.page_table([empty])[0].shape == (1, 0)


def test_arrays_outlive_the_allocator_and_are_the_callers_own(alloc):
    seq = alloc.create()
    alloc.extend(seq, 7)
    (child,) = alloc.fork(seq)
    alloc.extend(child, 1)
    pages, (page_table, seq_lens), copies = alloc.pages(seq), alloc.page_table([seq]), alloc.take_copies()
    pages[0] = 77
    page_table[0, 0] = 77
    assert alloc.pages(seq).tolist() == [0, 1]
    del alloc
    gc.collect()
    octavo.PageAllocator(8, 4).create()
    assert pages.tolist() == [77, 1]
    assert page_table.tolist() == [[77, 1]]
    assert seq_lens.tolist() == [7]
    assert copies.tolist() == [[1, 2]]


def test_stats_and_waste(alloc):
    assert alloc.stats()["waste_percent"] == 0.0
    seq = alloc.create()
    alloc.extend(seq, 7)
    (child,) = alloc.fork(seq)
    alloc.truncate(child, 5)
    assert alloc.stats() == {
        "num_pages": 8,
        "page_size": 4,
        "num_sequences": 2,
        "num_used_pages": 2,
        "num_shared_pages": 2,
        "num_free_pages": 6,
        "num_tokens": 12,
        "num_stored_tokens": 7,
        "waste_percent": 12.5,
    }
    alloc.free(seq)
    assert alloc.stats()["waste_percent"] == 37.5
    assert alloc.stats()["num_shared_pages"] == 0


def test_only_last_pages_waste():
    alloc = octavo.PageAllocator(1000, 16)
    for length in range(1, 60):
        alloc.extend(alloc.create(), length)
    stats = alloc.stats()
    slots = stats["num_used_pages"] * 16
    assert stats["num_tokens"] == stats["num_stored_tokens"] == sum(range(1, 60))
    assert slots - stats["num_stored_tokens"] <= 59 * 15
    assert stats["waste_percent"] == pytest.approx(100 * (slots - stats["num_stored_tokens"]) / slots)


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8", "float8_e4m3fn", "int4", "int8_int4"])
@pytest.mark.parametrize("token_scales", [True, False])
def test_as_many_pages_as_some_memory_holds(kind, token_scales):
    if "int4" in kind and not token_scales:
        pytest.skip("int4 always has them")
    if kind in ("bfloat16", "float8_e4m3fn"):
        pytest.importorskip("ml_dtypes")
    model = {"num_kv_heads": 3, "head_dim": 40, "dtype": kind, "token_scales": token_scales}
    cache = octavo.empty_cache(7, 16, **model)
    page_bytes = sum(array.nbytes for array in cache.arrays.values()) // 7 * 5  # in five layers
    for num_bytes, num_pages in ((page_bytes, 1), (7 * page_bytes - 1, 6), (7 * page_bytes, 7)):
        alloc = octavo.PageAllocator.from_memory(num_bytes, page_size=16, num_layers=5, **model)
        assert (alloc.num_pages, alloc.page_size) == (num_pages, 16)
    with pytest.raises(
        ValueError, match=rf"^from_memory: num_bytes \({page_bytes - 1}\) hold no page: one of 16 "
    ):
        octavo.PageAllocator.from_memory(page_bytes - 1, page_size=16, num_layers=5, **model)


def test_options_of_an_allocator_from_memory():
    model = {"page_size": 4, "num_layers": 2, "num_kv_heads": 1, "head_dim": 8, "dtype": np.float16}
    alloc = octavo.PageAllocator.from_memory(2**16, **model, prefix_cache=True, num_host_pages=3)
    assert (alloc.num_pages, alloc.num_host_pages) == (2**16 // (4 * 2 * 2 * 8 * 2), 3)
    assert alloc.cache_stats()["num_stored_pages"] == 0
    for change, error, message in (
        ({"num_layers": 0}, ValueError, "num_layers (0) must be at least 1"),
        (
            {"head_dim": 7, "dtype": "int4"},
            ValueError,
            "head_dim (7) must be even for int4, two numbers in a byte",
        ),
        ({"dtype": "float64"}, ValueError, "dtype must be one of "),
        ({"page_size": 4.0}, TypeError, "page_size must be an int; got float"),
        (
            {"num_kv_heads": 2**62, "head_dim": 2**62},
            ValueError,
            f"num_bytes (65536) hold no page: one of 4 tokens takes {2**126} bytes for each token and layer, "
            "of which there are 2",
        ),
        (
            {"page_size": 2**62},
            ValueError,
            f"num_bytes (65536) hold no page: one of {2**62} tokens takes 32 bytes for each token and layer, "
            "of which there are 2",
        ),
    ):
        with pytest.raises(error, match=f"^from_memory: {re.escape(message)}"):
            octavo.PageAllocator.from_memory(2**16, **{**model, **change})


def test_what_a_step_of_forks_needs(alloc):
    seq = alloc.create()
    alloc.extend(seq, 6)
    seqs = [*alloc.fork(seq, 2), seq]
    assert alloc.needed(seqs) == 2
    assert alloc.needed(seqs, [0, 0, 3]) == 2
    assert alloc.needed(seqs, np.array([1, 1, 100], np.int32)) == 2 + 25
    assert alloc.needed([], 5) == 0
    groups = octavo.PageAllocator.from_groups([octavo.PageGroup(9, 4), octavo.PageGroup(9, 2)])
    seq = groups.create()
    assert (groups.needed([seq], 7), groups.needed([seq], 7, group=1)) == (2, 4)
    with pytest.raises(
        ValueError, match=r"^needed: num_new_tokens must have one number for each of the 3 sequ"
    ):
        alloc.needed(seqs, [1])


def test_out_of_pages_leaves_everything_as_it_was():
    alloc = octavo.PageAllocator(4, 4)
    seq = alloc.create()
    alloc.extend(seq, 10)
    (child,) = alloc.fork(seq)
    before = dump(alloc, [seq, child])
    message = "^extend: needs 3 pages \\(2 new, 1 copy-on-write\\), 1 free$"
    with pytest.raises(octavo.OutOfPages, match=message):
        alloc.extend(child, 7)
    assert alloc.try_extend(child, 7) is False
    assert dump(alloc, [seq, child]) == before
    assert len(alloc.take_copies()) == 0
    assert alloc.try_extend(child, 2) is True
    assert alloc.take_copies().tolist() == [[2, 3]]


def test_sizes_up_to_int32():
    alloc = octavo.PageAllocator(2, INT32_MAX)
    seq = alloc.create()
    alloc.extend(seq, INT32_MAX)
    assert alloc.length(seq) == INT32_MAX
    assert alloc.page_table([seq])[1].tolist() == [INT32_MAX]
    assert octavo.PageAllocator(10_000_000, 16).num_free_pages == 10_000_000


def test_everything_public_is_documented():
    for name in dir(octavo.PageAllocator):
        if not name.startswith("_"):
            assert getattr(octavo.PageAllocator, name).__doc__
    assert "arXiv:2309.06180" in octavo.PageAllocator.__doc__
