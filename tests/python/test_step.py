"""PageAllocator.step and octavo.StepArrays: what Python adds to the C++ tests of the same."""

import re
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import octavo

MAX_BATCH, MAX_PAGES, MAX_COPIES = 4, 6, 4


def make_arrays():
    shapes = ((MAX_BATCH, MAX_PAGES), (MAX_BATCH,), (MAX_BATCH + 1,), (MAX_COPIES, 2))
    return [np.full(shape, 77, np.int32) for shape in shapes]


@pytest.fixture
def alloc():
    return octavo.PageAllocator(16, 4)


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_a_few_steps(alloc, library):
    arrays = make_arrays()
    if library == "torch":
        torch = pytest.importorskip("torch")
        lent = [torch.from_numpy(array) for array in arrays]
    else:
        lent = arrays
    step_arrays = octavo.StepArrays(*lent)
    page_table, seq_lens, cu_seqlens_q, copies = arrays
    assert step_arrays.max_batch == MAX_BATCH
    seqs = [alloc.create() for _ in range(2)]
    assert alloc.step(seqs, np.array([6, 1], np.int32), step_arrays) == 0
    assert page_table.tolist() == [[0, 1, -1, -1, -1, -1], [2, -1, -1, -1, -1, -1], [-1] * 6, [-1] * 6]
    assert seq_lens.tolist() == [6, 1, 0, 0]
    assert cu_seqlens_q.tolist() == [0, 6, 7, 7, 7]
    seqs += alloc.fork(seqs[0])
    assert alloc.step(seqs, 1, step_arrays) == step_arrays.num_copies == 1
    assert copies[:1].tolist() == [[1, 3]]
    want_table, want_lens = alloc.page_table(seqs)
    assert page_table[:3, :2].tolist() == want_table.tolist()
    assert seq_lens[:3].tolist() == want_lens.tolist() == [7, 2, 7]
    assert cu_seqlens_q.tolist() == [0, 1, 2, 3, 3]


BATCHES = st.lists(
    st.lists(st.integers(0, 9) | st.none(), min_size=MAX_BATCH, max_size=MAX_BATCH), min_size=1, max_size=6
)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@given(BATCHES, st.lists(st.tuples(st.integers(1, 5), st.none() | st.integers(0, 7)), min_size=1, max_size=3))
def test_positions_slots_and_last_rows(dtype, steps, sizes):
    """Against NumPy, for batches with sequences left out (None) and without new tokens (0)."""
    max_tokens, num_pages = 9 * MAX_BATCH, 300
    groups = [
        octavo.PageGroup(num_pages, size, window_left=-1 if window is None else window)
        for size, window in sizes
    ]
    alloc = octavo.PageAllocator.from_groups(groups)
    tables = [np.empty((MAX_BATCH, 60), np.int32) for _ in groups]
    seq_lens, cu_seqlens_q = np.empty(MAX_BATCH, np.int32), np.empty(MAX_BATCH + 1, np.int32)
    positions, last_rows = np.full(max_tokens, 77, dtype), np.full(MAX_BATCH, 77, dtype)
    slots = [np.full(max_tokens, 77, dtype) for _ in groups]
    arrays = octavo.StepArrays(
        tables, seq_lens, cu_seqlens_q, positions=positions, last_rows=last_rows, slot_mapping=slots
    )
    assert (positions == 0).all() and (last_rows == 0).all() and all((slot == -1).all() for slot in slots)
    seqs = [alloc.create() for _ in range(MAX_BATCH)]
    for counts in steps:
        batch = [seq for seq, n in zip(seqs, counts, strict=True) if n is not None]
        n = np.array([n for n in counts if n is not None], np.int32)
        alloc.step(batch, n, arrays)
        total = n.sum()
        assert cu_seqlens_q[-1] == total
        ends = np.array([alloc.length(seq) for seq in batch], int)
        rows = np.repeat(np.arange(len(batch)), n)
        want = np.arange(total) - np.repeat(np.cumsum(n) - n, n) + np.repeat(ends - n, n)
        assert positions[:total].tolist() == want.tolist()
        assert (positions[total:] == 0).all()
        last = np.where(n > 0, np.cumsum(n) - 1, 0)
        assert last_rows.tolist() == last.tolist() + [0] * (MAX_BATCH - len(batch))
        for group, (table, slot, (size, _)) in enumerate(zip(tables, slots, sizes, strict=True)):
            assert slot[:total].tolist() == (table[rows, want // size] * size + want % size).tolist()
            assert (slot[total:] == -1).all()
            held = [set(alloc.pages(seq, group).tolist()) for seq in batch]
            assert all(page in held[row] for row, page in zip(rows, slot[:total] // size, strict=True))


def test_token_arrays_that_do_not_fit(alloc):
    page_table, seq_lens, _, _ = make_arrays()
    fitting = {"positions": np.empty(5, np.int64), "slot_mapping": np.empty(5, np.int32)}
    for change, error, message in (
        ({"positions": np.empty(5, np.float32)}, TypeError, "positions must be int32 or int64; got float32"),
        (
            {"last_rows": np.empty(5, np.int32)},
            ValueError,
            "last_rows must have max_batch (4) entries, as seq_lens",
        ),
        (
            {"slot_mapping": np.empty(6, np.int32)},
            ValueError,
            "slot_mapping must have max_tokens (5) entries, as positions; got [6]",
        ),
        (
            {"slot_mapping": [np.empty(5, np.int32)]},
            ValueError,
            "slot_mapping must be as page_table, one array or",
        ),
        (
            {"positions": fitting["slot_mapping"]},
            ValueError,
            "slot_mapping must not overlap positions in memory",
        ),
        (
            {"positions": np.empty(10, np.int32)[::2]},
            ValueError,
            "positions must have a unit stride along its last",
        ),
    ):
        with pytest.raises(error, match=f"^StepArrays: {re.escape(message)}"):
            octavo.StepArrays(page_table, seq_lens, **{**fitting, **change})
    arrays = octavo.StepArrays(page_table, seq_lens, **fitting)
    seq = alloc.create()
    with pytest.raises(
        ValueError, match=r"^step: there are 6 new tokens, but the arrays have max_tokens \(5\) rows"
    ):
        alloc.step([seq], 6, arrays)
    assert alloc.length(seq) == 0
    alloc.step([seq], 5, arrays)
    assert fitting["positions"].tolist() == fitting["slot_mapping"].tolist() == list(range(5))


def test_empty_arrays_have_no_room(alloc):
    """They are not taken for arrays that were not given."""
    arrays = octavo.StepArrays(*make_arrays()[:2], copies=np.empty((0, 2), np.int32))
    seqs = [alloc.create()]
    assert alloc.step(seqs, 3, arrays) == 0
    seqs += alloc.fork(seqs[0])
    with pytest.raises(ValueError, match=r"^step: copies' max_copies \(0\) must be at least 1$"):
        alloc.step(seqs, 1, arrays)
    assert alloc.take_copies().size == 0
    for name in ("positions", "slot_mapping"):
        arrays = octavo.StepArrays(*make_arrays()[:2], **{name: np.empty(0, np.int64)})
        alloc.step(seqs, 0, arrays)
        with pytest.raises(
            ValueError, match=r"^step: there are 2 new tokens, but the arrays have max_tokens \(0\) rows"
        ):
            alloc.step(seqs, 1, arrays)
    assert [alloc.length(seq) for seq in seqs] == [3, 3]


HANDLES = (list, tuple, iter, np.array, lambda seqs: [np.int64(seq) for seq in seqs])
NUMBERS = (
    list,
    tuple,
    iter,
    np.array,
    lambda n: np.array(n, np.int32),
    lambda n: np.repeat(np.array(n, np.int32), 2)[::2],
)


@pytest.mark.parametrize("to_handles", HANDLES)
@pytest.mark.parametrize("to_numbers", NUMBERS)
def test_batches_of_any_kind(alloc, to_handles, to_numbers):
    arrays = make_arrays()
    step_arrays = octavo.StepArrays(*arrays)
    seqs = [alloc.create() for _ in range(3)]
    alloc.step(to_handles(seqs), to_numbers([1, 2, 0]), step_arrays)
    assert arrays[1].tolist() == [1, 2, 0, 0]


def test_rows_of_a_larger_array_and_no_optional_arrays(alloc):
    whole = np.full((MAX_BATCH, 10), 5, np.int32)
    seq_lens = np.empty(MAX_BATCH, np.int32)
    step_arrays = octavo.StepArrays(whole[:, 2:8], seq_lens)
    parent = alloc.create()
    alloc.step([parent], 3, step_arrays)
    seqs = [parent, *alloc.fork(parent)]
    assert alloc.step(seqs, 1, step_arrays) == 0
    assert (whole[:, :2] == 5).all() and (whole[:, 8:] == 5).all()
    assert whole[:2, 2].tolist() == [1, 0]
    assert alloc.take_copies().tolist() == [[0, 1]]


def test_out_of_pages_says_which(alloc):
    arrays = make_arrays()
    step_arrays = octavo.StepArrays(*arrays)
    seqs = [alloc.create() for _ in range(4)]
    before = [array.tolist() for array in arrays]
    found = "step: 2 of 4 sequences need pages that are not free: seqs[1, 3] need "
    with pytest.raises(octavo.OutOfPages, match=re.escape(found)) as e:
        alloc.step(seqs, [40, 30, 16, 9], step_arrays)
    assert e.value.indices == (1, 3)
    assert [array.tolist() for array in arrays] == before
    assert alloc.num_free_pages == 16
    alloc.step([seqs[0], seqs[2]], [16, 16], step_arrays)
    with pytest.raises(octavo.OutOfPages) as e:
        alloc.extend(seqs[1], 100)
    assert e.value.indices == ()


def test_reset(alloc):
    arrays = make_arrays()
    step_arrays = octavo.StepArrays(*arrays)
    seq = alloc.create()
    alloc.step([seq], 1, step_arrays)
    arrays[0][:] = 9
    step_arrays.reset()
    assert (arrays[0] == -1).all()
    alloc.step([seq], 1, step_arrays)
    assert arrays[0][0, 0] == 0


def test_the_arrays_are_kept_alive(alloc):
    step_arrays = octavo.StepArrays(*make_arrays())
    seq = alloc.create()
    junk = [make_arrays() for _ in range(10)]
    for _ in range(20):
        alloc.step([seq], 1, step_arrays)
    assert all((array == 77).all() for arrays in junk for array in arrays)


BAD_ARRAYS = {
    "page_table must be int32": (0, lambda a: a.astype(np.float32), TypeError),
    "page_table must have shape [max_batch, max_pages]; got [4]": (0, lambda a: a[:, 0].copy(), ValueError),
    "page_table must have a unit stride along its last axis; got stride 2": (
        0,
        lambda a: a[:, ::2],
        ValueError,
    ),
    "page_table must have max_batch (4) rows, as seq_lens; got [3, 6]": (0, lambda a: a[:3], ValueError),
    "cu_seqlens_q must have shape [5], one more than seq_lens; got [4]": (2, lambda a: a[:4], ValueError),
    "copies must have shape [max_copies, 2]; got [2, 4]": (3, lambda a: a.reshape(2, 4), ValueError),
    "copies must be in C order; its rows are 4 elements apart": (
        3,
        lambda a: a.reshape(2, 4)[:, :2],
        ValueError,
    ),
    "seq_lens must be an array": (1, lambda a: a.tolist(), TypeError),
}


@pytest.mark.parametrize("message", BAD_ARRAYS)
def test_bad_arrays(message):
    index, change, error = BAD_ARRAYS[message]
    arrays = make_arrays()
    arrays[index] = change(arrays[index])
    with pytest.raises(error, match=f"^StepArrays: {re.escape(message)}"):
        octavo.StepArrays(*arrays)


def test_arrays_that_cannot_be_written_or_overlap():
    page_table, seq_lens, cu_seqlens_q, copies = make_arrays()
    page_table.flags.writeable = False
    with pytest.raises(ValueError, match="page_table must be writable"):
        octavo.StepArrays(page_table, seq_lens, cu_seqlens_q, copies)
    memory = np.empty(2 * MAX_BATCH, np.int32)
    with pytest.raises(ValueError, match="seq_lens"):
        octavo.StepArrays(np.empty((4, 6), np.int32), memory[:4], memory[3:])
    with pytest.raises(
        ValueError, match="copies must be as page_table, one array or a list of 1; got one array"
    ):
        octavo.StepArrays([np.empty((4, 6), np.int32)], seq_lens, None, copies)


@pytest.mark.parametrize(
    ("n", "error", "message"),
    [
        ([1], ValueError, "step: num_new_tokens must have one number for each of the 2 sequences; got 1"),
        (-1, ValueError, "step: num_new_tokens (-1) must be between 0 and 2147483647"),
        ([1, -1], ValueError, "step: num_new_tokens[1] (-1) must be at least 0"),
        ([1, 2**31], ValueError, "step: num_new_tokens must fit in 32 bits; got 2147483648"),
        ([1, "2"], TypeError, "step: num_new_tokens must be an int; got str"),
        (None, TypeError, "step: num_new_tokens must be an iterable of ints; got NoneType"),
    ],
)
def test_bad_numbers(alloc, n, error, message):
    step_arrays = octavo.StepArrays(*make_arrays())
    seqs = [alloc.create() for _ in range(2)]
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        alloc.step(seqs, n, step_arrays)
    assert [alloc.length(seq) for seq in seqs] == [0, 0]


def test_several_threads_share_an_allocator():
    alloc = octavo.PageAllocator(4096, 4)
    num_threads, rounds = 4, 300
    failures = []

    def serve(seed):
        try:
            rng = np.random.default_rng(seed)
            arrays = make_arrays()
            step_arrays = octavo.StepArrays(*arrays)
            for _ in range(rounds):
                seqs = [alloc.create() for _ in range(2)]
                alloc.step(seqs, rng.integers(1, 20, 2).astype(np.int32), step_arrays)
                seqs += alloc.fork(seqs[0], 2)
                alloc.step(seqs, 1, step_arrays)
                table, lens = alloc.page_table(seqs)
                assert (arrays[0][:, : table.shape[1]] == table).all() and (arrays[1] == lens).all()
                for seq in seqs:
                    alloc.free(seq)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=serve, args=(seed,)) for seed in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert alloc.num_free_pages == 4096
    alloc.check_invariants()
