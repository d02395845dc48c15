"""Host memory, windows and groups of PageAllocator: what Python adds to the C++ tests of the same."""

import copy
import pickle
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import octavo


def test_a_sequence_is_preempted_and_resumed():
    alloc = octavo.PageAllocator(4, 4, num_host_pages=3)
    assert (alloc.num_host_pages, alloc.num_free_host_pages, alloc.num_groups) == (3, 3, 1)
    device, host = np.zeros((4, 4), int), np.zeros((3, 4), int)
    seq = alloc.create()
    alloc.extend(seq, 10)
    tokens = np.arange(12).reshape(3, 4)
    device[alloc.pages(seq)] = tokens
    transfer, copies = alloc.preempt([seq])
    assert copies.dtype == np.int32 and copies.shape == (3, 2)
    assert alloc.num_free_pages == 1
    host[copies[:, 1]] = device[copies[:, 0]]
    alloc.confirm(transfer)
    assert (alloc.num_free_pages, alloc.num_free_host_pages) == (4, 0)
    with pytest.raises(ValueError, match=f"^step: sequence {seq} is preempted: resume\\(\\) it first$"):
        alloc.step([seq], 1, octavo.StepArrays(np.empty((1, 4), np.int32), np.empty(1, np.int32)))
    device[:] = -1
    transfer, copies = alloc.resume([seq])
    device[copies[:, 1]] = host[copies[:, 0]]
    alloc.confirm(transfer)
    assert (device[alloc.pages(seq)] == tokens).all()
    with pytest.raises(ValueError, match=r"^confirm: transfer \(\d+\) must be one in flight$"):
        alloc.confirm(transfer)
    alloc.check_invariants()


def test_a_window_returns_pages():
    alloc = octavo.PageAllocator(3, 4, window_left=6)
    seq = alloc.create()
    for _ in range(100):
        alloc.extend(seq, 1)
    pages = alloc.pages(seq)
    assert (pages[:23] == -1).all() and (pages[23:] >= 0).all()
    page_table, seq_lens = alloc.page_table([seq])
    assert (page_table >= 0).all()
    assert seq_lens.tolist() == [100]
    alloc.truncate(seq, 98)
    for call in (alloc.truncate, lambda seq, length: alloc.fork(seq, length=length)):
        with pytest.raises(ValueError, match=r"length \(97\) must be 0 or at least 98: the pages before its"):
            call(seq, 97)
    alloc.truncate(seq, 0)
    alloc.extend(seq, 12)
    assert (alloc.pages(seq) >= 0).all()
    alloc.extend(seq, 0)  # the next query sees tokens from 6 on
    assert (alloc.pages(seq) >= 0).tolist() == [False, True, True]


@given(
    st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=40),
    st.integers(1, 5),
    st.integers(0, 9),
    st.integers(1, 8),
)
def test_a_step_takes_what_it_returned(
    steps: list[tuple[int, bool]], page_size: int, window_left: int, num_pages: int
) -> None:
    """It fits if the pages that its queries see do, those of its new tokens among them."""
    alloc = octavo.PageAllocator(num_pages, page_size, window_left=window_left)
    arrays = octavo.StepArrays(np.empty((1, 400), np.int32), np.empty(1, np.int32))
    seq, length = alloc.create(), 0
    for n, by_step in steps:
        pages = -(-(length + n) // page_size)
        behind = max(min((length - window_left) // page_size, pages - 1), 0)
        fits = pages - behind <= num_pages
        free = alloc.num_free_pages
        assert (alloc.needed([seq], n) <= free) is fits
        needed = alloc.needed([seq], n)
        try:
            if by_step:
                alloc.step([seq], n, arrays)
            else:
                alloc.extend(seq, n)
        except octavo.OutOfPages:
            assert not fits and alloc.num_free_pages == free
        else:
            assert fits and needed == max(free - alloc.num_free_pages, 0)
            assert alloc.num_free_pages == num_pages - (pages - behind)
            length += n
        assert alloc.length(seq) == length
        alloc.check_invariants()


@pytest.mark.parametrize("window_left", [0, 3, 6, 50])
def test_attention_agrees_with_pages_returned_and_kept(window_left):
    rng = np.random.default_rng(0)
    alloc, all_pages = octavo.PageAllocator(40, 4, window_left=window_left), octavo.PageAllocator(40, 4)
    caches = [np.full((2, 40, 4, 1, 8), np.nan, np.float32) for _ in range(2)]
    seqs = [alloc.create(), all_pages.create()]
    for n in (1, 17, 1, 1, 9, 1, 30, 1):
        q, k, v = rng.standard_normal((3, n, 1, 8), dtype=np.float32)
        outs = []
        for allocator, seq, (k_pages, v_pages) in zip((alloc, all_pages), seqs, caches, strict=True):
            allocator.extend(seq, n)
            page_table, seq_lens = allocator.page_table([seq])
            cu_seqlens = np.array([0, n], np.int32)
            octavo.append_kv(k, v, k_pages, v_pages, page_table, seq_lens, cu_seqlens=cu_seqlens)
            options = {"cu_seqlens_q": cu_seqlens, "window_left": window_left}
            outs.append(octavo.paged_attention(q, k_pages, v_pages, page_table, seq_lens, **options))
        assert np.isfinite(outs[0]).all()
        np.testing.assert_array_equal(*outs)
    assert alloc.num_free_pages >= all_pages.num_free_pages


def test_groups():
    groups = [octavo.PageGroup(16, 4), octavo.PageGroup(8, 2, window_left=3, num_host_pages=5)]
    assert (groups[1].num_pages, groups[1].page_size, groups[1].window_left) == (8, 2, 3)
    alloc = octavo.PageAllocator.from_groups(groups)
    assert alloc.num_groups == 2
    arrays = [np.empty((2, 8), np.int32), np.empty((2, 8), np.int32)]
    copies = [np.empty((2, 2), np.int32), np.empty((2, 2), np.int32)]
    step_arrays = octavo.StepArrays(arrays, np.empty(2, np.int32), None, copies)
    seq = alloc.create()
    assert alloc.step([seq], 5, step_arrays) == (0, 0)
    both = [seq, *alloc.fork(seq)]
    assert alloc.step(both, 1, step_arrays) == step_arrays.num_copies == (1, 1)
    assert [table[0, :3].tolist() for table in arrays] == [
        [0, 2, -1],
        [1, 1, 0],
    ]  # returned by both, and taken again
    for group in range(2):
        table, _ = alloc.page_table(both, group)
        assert (arrays[group][:, : table.shape[1]] == table).all()
        assert alloc.take_copies(group).shape == (0, 2)
    assert alloc.pages(seq, group=1).tolist() == [-1, 1, 0]
    assert alloc.stats(group=1)["page_size"] == 2
    with pytest.raises(octavo.OutOfPages, match=re.escape("preempt: needs 1 host pages, 0 free in group 0")):
        alloc.preempt([seq])
    with pytest.raises(ValueError, match=re.escape("pages: group (2) must be one of the 2 groups")):
        alloc.pages(seq, 2)
    alloc.check_invariants()


def test_groups_to_the_host():
    alloc = octavo.PageAllocator.from_groups([octavo.PageGroup(4, 4, num_host_pages=4)] * 2)
    seq = alloc.create()
    alloc.extend(seq, 5)
    transfer, copies = alloc.preempt([seq])
    assert [array.tolist() for array in copies] == [[[0, 0], [1, 1]]] * 2
    alloc.confirm(transfer)


@pytest.mark.parametrize("groups", [None, "ab", [1, 2], 5])
def test_bad_groups(groups):
    with pytest.raises(TypeError, match=r"^from_groups: groups must be a list of octavo\.PageGroup; got "):
        octavo.PageAllocator.from_groups(groups)


def test_bad_groups_name_what_is_no_group():
    message = "from_groups: groups must be a list of octavo.PageGroup; got list with groups[1] of type tuple"
    with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
        octavo.PageAllocator.from_groups([octavo.PageGroup(4, 16), (4, 16)])


def test_groups_are_values():
    group = octavo.PageGroup(4, 16, window_left=7)
    assert repr(group) == "PageGroup(num_pages=4, page_size=16, window_left=7, num_host_pages=0)"
    for same in (copy.copy(group), copy.deepcopy(group), pickle.loads(pickle.dumps(group))):
        assert same == group and hash(same) == hash(group) and repr(same) == repr(group)
    for other in (octavo.PageGroup(4, 16), octavo.PageGroup(4, 16, window_left=7, num_host_pages=1), (4, 16)):
        assert other != group
    assert octavo.PageAllocator.from_groups((group, same)).num_groups == 2


def test_bad_sizes():
    with pytest.raises(ValueError, match=r"^PageAllocator: groups must not be empty$"):
        octavo.PageAllocator.from_groups([])
    with pytest.raises(
        ValueError, match=r"^PageAllocator: window_left \(-2\) must be -1 \(unbounded\) or at"
    ):
        octavo.PageAllocator(4, 4, window_left=-2)
    with pytest.raises(TypeError, match=r"^PageGroup: page_size must be an int; got float$"):
        octavo.PageGroup(4, 4.0)


def test_page_map():
    alloc = octavo.PageAllocator(8, 4, prefix_cache=True)
    step_arrays = octavo.StepArrays(np.empty((2, 8), np.int32), np.empty(2, np.int32))
    a = alloc.create()
    alloc.step([a], 10, step_arrays, tokens=list(range(10)))
    (b,) = alloc.fork(a)
    alloc.extend(b, 3)
    assert alloc.page_map().dtype == np.int64
    assert alloc.page_map().tolist() == [-3, -3, a, b, b, -1, -1, -1]
    alloc.free(a)
    assert alloc.page_map().tolist() == [b, b, -4, b, b, -1, -1, -1]
    alloc.take_copies()
    alloc.free(b)
    assert alloc.page_map().tolist() == [-2, -2, -1, -1, -1, -1, -1, -1]


def test_prefixes_are_found_in_layers_that_differ():
    """In a group with a window, the last window's pages are enough; without them, less is found."""
    groups = [octavo.PageGroup(100, 4), octavo.PageGroup(8, 4, window_left=9), octavo.PageGroup(100, 4)]
    alloc = octavo.PageAllocator.from_groups(groups, prefix_cache=True, event_capacity=100)
    tables = [np.empty((2, 32), np.int32) for _ in groups]
    arrays = octavo.StepArrays(tables, np.empty(2, np.int32))
    prompt = np.arange(50, dtype=np.int32)

    def run(tokens):
        seq = alloc.create(tokens)
        while (length := alloc.length(seq)) < len(tokens):
            new = tokens[length : length + 4]
            alloc.step([seq], len(new), arrays, tokens=new)
        return seq

    seq = run(prompt)
    alloc.free(seq)
    assert alloc.num_cached_tokens(prompt) == 48
    found = alloc.create(prompt)
    assert alloc.length(found) == 48
    assert (alloc.pages(found, group=0) >= 0).all() and (alloc.pages(found, group=2) >= 0).all()
    assert (alloc.pages(found, group=1) >= 0).tolist() == [False] * 9 + [True] * 3
    alloc.free(found)
    # Shorter prefixes: their windows' pages were needed for something else, up to the eight that there are.
    assert [alloc.num_cached_tokens(prompt[:length]) for length in (16, 36, 40, 44)] == [0, 36, 40, 44]
    events, num_lost = alloc.take_events()
    assert ([event["kind"] for event in events], num_lost) == (["stored"] * 12, 0)
    # A page of the window's group alone is needed: the prefixes that see it are not found any more.
    other = run(np.arange(1000, 1024, dtype=np.int32))
    assert alloc.num_cached_tokens(prompt) == 0
    alloc.free(other)
    alloc.check_invariants()


def test_a_prompt_parts_inside_a_page_of_every_group():
    alloc = octavo.PageAllocator.from_groups(
        [octavo.PageGroup(20, 4), octavo.PageGroup(20, 4, window_left=3)], prefix_cache=True
    )
    tables, copies = ([np.empty(shape, np.int32) for _ in "ab"] for shape in ((2, 8), (4, 2)))
    arrays = octavo.StepArrays(tables, np.empty(2, np.int32), copies=copies)
    first = alloc.create()
    alloc.step([first], 10, arrays, tokens=range(10))
    second = alloc.create([0, 1, 2, 3, 4, 5, 99])
    assert alloc.length(second) == 6
    assert alloc.step([second], 1, arrays, tokens=[99]) == (1, 1)
    for group in range(2):
        pages = alloc.pages(second, group=group)
        assert copies[group][0].tolist() == [alloc.pages(first, group=group)[1], pages[1]]
    alloc.check_invariants()


def test_prefix_caches_that_groups_cannot_have():
    for groups, message in (
        (
            [octavo.PageGroup(8, 4, window_left=3), octavo.PageGroup(8, 4)],
            "a window in group 0; window_left is 3",
        ),
        (
            [octavo.PageGroup(8, 4), octavo.PageGroup(8, 2)],
            "groups of several page sizes; that of group 1 is 2, that of group 0 4",
        ),
    ):
        with pytest.raises(ValueError, match=f"^PageAllocator: prefix_cache must be off with {message}$"):
            octavo.PageAllocator.from_groups(groups, prefix_cache=True)
