"""PageAllocator.shared_prefix_len: what the sequences of a batch begin with, as paged_attention takes it."""

from __future__ import annotations

import numpy as np
import pytest

import octavo


def test_shared_prefix_len():
    alloc = octavo.PageAllocator(64, 4)
    prompt = alloc.create()
    alloc.extend(prompt, 18)
    a, b = alloc.fork(prompt, 2)
    for seq in (a, b):
        alloc.extend(seq, 5)  # copies the fifth page, which is partly filled
    assert alloc.shared_prefix_len([a, b]) == alloc.shared_prefix_len(iter([a, b, a])) == 16
    assert alloc.shared_prefix_len([a, b], num_queries=7) == 16
    assert alloc.shared_prefix_len([a, b], num_queries=8) == 12
    assert alloc.shared_prefix_len([a, b], num_queries=2**62) == 0
    assert alloc.shared_prefix_len([a]) == 20
    assert alloc.shared_prefix_len([a], num_queries=3) == 20
    assert alloc.shared_prefix_len([prompt, a], num_queries=2) == 16
    assert alloc.shared_prefix_len([prompt, a], num_queries=3) == 12

    short = alloc.fork(prompt, length=9)[0]
    empty, other = alloc.create(), alloc.create()
    alloc.extend(other, 30)
    assert alloc.shared_prefix_len([a, short, b]) == 8
    assert alloc.shared_prefix_len([a, empty, b, empty]) == 16
    assert alloc.shared_prefix_len([empty, a, b]) == 0  # the first row of the page table names no page
    assert alloc.shared_prefix_len([a, other]) == 0
    assert alloc.shared_prefix_len([]) == alloc.shared_prefix_len([empty, empty]) == 0


@pytest.mark.parametrize("places", ["eab", "aeb", "aeeb", "ee"], ids=str)
def test_paged_attention_takes_shared_prefix_len(places):
    alloc = octavo.PageAllocator(64, 4)
    prompt, empty = alloc.create(), alloc.create()
    alloc.extend(prompt, 18)
    a, b = alloc.fork(prompt, 2)
    for seq in (a, b):
        alloc.extend(seq, 5)
    seqs = [{"a": a, "b": b, "e": empty}[place] for place in places]
    random = np.random.default_rng(0)
    k_pages, v_pages = random.standard_normal((2, 64, 4, 2, 16), dtype=np.float32)
    q = random.standard_normal((len(seqs), 4, 16), dtype=np.float32)
    arrays = (q, k_pages, v_pages, *alloc.page_table(seqs))
    out = octavo.paged_attention(*arrays, shared_prefix_len=alloc.shared_prefix_len(seqs))
    np.testing.assert_allclose(out, octavo.paged_attention(*arrays), rtol=2e-5, atol=2e-6)


def test_shared_prefix_len_behind_a_window():
    groups = [octavo.PageGroup(64, 4), octavo.PageGroup(64, 4, window_left=8)]
    alloc = octavo.PageAllocator.from_groups(groups)
    prompt = alloc.create()
    alloc.extend(prompt, 12)
    seqs = [prompt, *alloc.fork(prompt)]
    assert [alloc.shared_prefix_len(seqs, group=group) for group in (0, 1)] == [8, 8]
    alloc.extend(seqs[0], 20)
    for order in (seqs, seqs[::-1]):  # the window of one has left the first pages behind
        assert [alloc.shared_prefix_len(order, group=group) for group in (0, 1)] == [8, 0]
