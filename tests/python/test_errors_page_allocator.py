"""What octavo.PageAllocator refuses: each message, and that nothing has changed."""

import re
import subprocess
import sys

import numpy as np
import pytest

import octavo
from support.refusals import dump

INT32_MAX = 2**31 - 1


@pytest.fixture
def alloc():
    return octavo.PageAllocator(8, 4)


HANDLE_CALLS = {
    "extend": lambda alloc, seq: alloc.extend(seq, 1),
    "try_extend": lambda alloc, seq: alloc.try_extend(seq, 1),
    "fork": lambda alloc, seq: alloc.fork(seq),
    "reorder": lambda alloc, seq: alloc.reorder([seq], [0]),
    "truncate": lambda alloc, seq: alloc.truncate(seq, 0),
    "free": lambda alloc, seq: alloc.free(seq),
    "length": lambda alloc, seq: alloc.length(seq),
    "pages": lambda alloc, seq: alloc.pages(seq),
    "page_table": lambda alloc, seq: alloc.page_table([seq]),
    "shared_prefix_len": lambda alloc, seq: alloc.shared_prefix_len([seq]),
    "needed": lambda alloc, seq: alloc.needed([seq]),
    "step": lambda alloc, seq: alloc.step(
        [seq], 0, octavo.StepArrays(np.empty((1, 8), np.int32), np.empty(1, np.int32))
    ),
}


@pytest.mark.parametrize("name", HANDLE_CALLS)
def test_handles_that_are_not_live(alloc, name):
    call = HANDLE_CALLS[name]
    freed = alloc.create()
    alloc.free(freed)
    live = alloc.create()
    before = dump(alloc, [live])
    foreign = octavo.PageAllocator(8, 4).create()
    with pytest.raises(octavo.InvalidSequence, match=f"^{name}: sequence {freed} was freed$"):
        call(alloc, freed)
    for bad in (foreign, 0, 1, -1, live + 1, live - 1, 2**63 - 1, -(2**63)):
        message = f"^{name}: sequence {bad} is not one of this allocator's$"
        with pytest.raises(octavo.InvalidSequence, match=message):
            call(alloc, bad)
    for bad in (2**63, 2**64 - 1, -(2**70)):
        with pytest.raises(
            octavo.InvalidSequence, match=f"^{name}: seq must fit in 64 bits with a sign; got {bad}$"
        ):
            call(alloc, bad)
    for bad in (None, "1", 1.0, [live]):
        message = f"^{name}: seq must be an int; got {type(bad).__name__}$"
        with pytest.raises(TypeError, match=message):
            call(alloc, bad)
    assert dump(alloc, [live]) == before
    call(alloc, np.int64(live))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda a, s: a.extend(s, -1), ValueError, "extend: n (-1) must be at least 0"),
        (lambda a, s: a.try_extend(s, -1), ValueError, "try_extend: n (-1) must be at least 0"),
        (
            lambda a, s: a.extend(s, INT32_MAX),
            ValueError,
            "extend: n (2147483647) and the sequence's length (5) must add up to at most 2147483647",
        ),
        (
            lambda a, s: a.extend(s, 2**64),
            ValueError,
            "extend: n must fit in 64 bits with a sign; got 18446744073709551616",
        ),
        (lambda a, s: a.extend(s, 1.0), TypeError, "extend: n must be an int; got float"),
        (lambda a, s: a.extend(s, None), TypeError, "extend: n must be an int; got NoneType"),
        (lambda a, s: a.fork(s, -2), ValueError, "fork: n (-2) must be at least 0"),
        (lambda a, s: a.fork(s, "2"), TypeError, "fork: n must be an int; got str"),
        (
            lambda a, s: a.fork(s, 2**28),
            ValueError,
            "fork: n (268435456) and the number of sequences (1) must add up to at most 268435456",
        ),
        (
            lambda a, s: a.truncate(s, 6),
            ValueError,
            "truncate: length (6) must be between 0 and the sequence's length (5)",
        ),
        (
            lambda a, s: a.truncate(s, -1),
            ValueError,
            "truncate: length (-1) must be between 0 and the sequence's length (5)",
        ),
        (
            lambda a, s: a.fork(s, length=6),
            ValueError,
            "fork: length (6) must be between 0 and the sequence's length (5)",
        ),
        (
            lambda a, s: a.reorder([s], [1]),
            ValueError,
            "reorder: parents[0] (1) must be between 0 and 0",
        ),
        (lambda a, s: a.truncate(s, None), TypeError, "truncate: length must be an int; got NoneType"),
        (
            lambda a, s: a.page_table(s),
            TypeError,
            "page_table: seqs must be an iterable of handles; got int",
        ),
        (
            lambda a, s: a.page_table(None),
            TypeError,
            "page_table: seqs must be an iterable of handles; got NoneType",
        ),
        (
            lambda a, s: a.shared_prefix_len([s], -1),
            ValueError,
            "shared_prefix_len: num_queries (-1) must be at least 0",
        ),
        (
            lambda a, s: a.shared_prefix_len([s], None),
            TypeError,
            "shared_prefix_len: num_queries must be an int; got NoneType",
        ),
        (
            lambda a, s: octavo.PageAllocator(0, 4),
            ValueError,
            "PageAllocator: num_pages (0) must be between 1 and 2147483647",
        ),
        (
            lambda a, s: octavo.PageAllocator(2**31, 4),
            ValueError,
            "PageAllocator: num_pages (2147483648) must be between 1 and 2147483647",
        ),
        (
            lambda a, s: octavo.PageAllocator(4, page_size=-3),
            ValueError,
            "PageAllocator: page_size (-3) must be between 1 and 2147483647",
        ),
        (
            lambda a, s: octavo.PageAllocator(4, "x"),
            TypeError,
            "PageAllocator: page_size must be an int; got str",
        ),
    ],
)
def test_messages(alloc, call, error, message):
    seq = alloc.create()
    alloc.extend(seq, 5)
    before = dump(alloc, [seq])
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        call(alloc, seq)
    assert dump(alloc, [seq]) == before
    alloc.check_invariants()


@pytest.mark.parametrize("bad", [None, [1], np.zeros((1, 8), np.int32), octavo.PageAllocator(1, 1)], ids=type)
def test_arrays_of_a_step_that_are_none(alloc, bad):
    seq = alloc.create()
    kind = "numpy.ndarray" if isinstance(bad, np.ndarray) else type(bad).__name__
    kind = "octavo._core.PageAllocator" if isinstance(bad, octavo.PageAllocator) else kind
    with pytest.raises(TypeError) as caught:
        alloc.step([seq], 1, bad)
    assert str(caught.value) == f"step: arrays must be an octavo.StepArrays; got {kind}"
    assert alloc.length(seq) == 0


TOO_LITTLE_MEMORY = """
import resource
import octavo

alloc = octavo.PageAllocator(4, 16)
seq = alloc.create()
before = alloc.stats()
resource.setrlimit(resource.RLIMIT_AS, (2**31, 2**31))
for make, message in (
    (
        lambda: octavo.PageAllocator(2**31 - 1, 16),
        "PageAllocator: there is too little memory for num_pages (2147483647), num_host_pages (0) and "
        "event_capacity (0)",
    ),
    (
        lambda: octavo.PageAllocator(8, 16, num_host_pages=2**31 - 1),
        "PageAllocator: there is too little memory for num_pages (8), num_host_pages (2147483647) and "
        "event_capacity (0)",
    ),
    (
        lambda: octavo.PageAllocator(8, 16, prefix_cache=True, event_capacity=2**31 - 1),
        "PageAllocator: there is too little memory for num_pages (8), num_host_pages (0) and "
        "event_capacity (2147483647)",
    ),
    (
        lambda: alloc.fork(seq, 2**28 - 1),
        "fork: there is too little memory for n (268435455) more sequences",
    ),
):
    try:
        make()
    except MemoryError as error:
        assert str(error) == message, error
    else:
        raise AssertionError(f"no error: {message}")
assert alloc.stats() == before
alloc.check_invariants()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs RLIMIT_AS")
def test_too_little_memory():
    result = subprocess.run(
        [sys.executable, "-c", TOO_LITTLE_MEMORY], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0, result.stderr


def test_an_error_while_handles_are_listed_is_the_callers(alloc):
    def handles():
        yield alloc.create()
        raise KeyError("lost")

    with pytest.raises(KeyError, match="lost"):
        alloc.page_table(handles())
