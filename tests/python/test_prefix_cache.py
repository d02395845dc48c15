"""The prefix cache of PageAllocator: what Python adds to the C++ tests of the same."""

import re

import numpy as np
import pytest

import octavo

PROMPT = list(range(100, 110))


@pytest.fixture
def alloc():
    return octavo.PageAllocator(16, 4, prefix_cache=True, hash_key=bytes(16), event_capacity=8)


@pytest.fixture
def step_arrays():
    return octavo.StepArrays(np.empty((4, 8), np.int32), np.empty(4, np.int32))


def test_a_second_prompt_shares_the_first_ones_pages(alloc, step_arrays):
    first = alloc.create(PROMPT)
    assert alloc.length(first) == 0
    alloc.step([first], len(PROMPT), step_arrays, tokens=PROMPT)
    second = alloc.create(np.array(PROMPT, np.int32))
    assert alloc.length(second) == 8
    assert alloc.pages(second).tolist() == alloc.pages(first)[:2].tolist()
    alloc.step([second, first], [2, 1], step_arrays, np.array([*PROMPT[8:], 7]))
    assert alloc.pages(second).tolist() == [0, 1, 3]
    assert alloc.cache_stats() == {
        "num_stored_pages": 2,
        "num_idle_pages": 0,
        "num_evicted_pages": 0,
        "num_queried_tokens": 20,
        "num_hit_tokens": 8,
    }
    alloc.free(first)
    alloc.free(second)
    assert alloc.num_free_pages == 16
    assert alloc.cache_stats()["num_idle_pages"] == 2
    assert alloc.num_cached_tokens(PROMPT) == 8
    assert alloc.num_cached_tokens(PROMPT[:6]) == 6
    alloc.check_invariants()


CALLS = {  # whether they store what the last step filled
    "step": (lambda alloc, seq, other, arrays: alloc.step([other], 0, arrays), True),
    "extend": (lambda alloc, seq, other, arrays: alloc.extend(other, 0), True),
    "try_extend": (lambda alloc, seq, other, arrays: alloc.try_extend(other, 1), True),
    "create(tokens)": (lambda alloc, seq, other, arrays: alloc.create([1]), True),
    "pin": (lambda alloc, seq, other, arrays: alloc.pin([1]), True),
    "num_cached_tokens": (lambda alloc, seq, other, arrays: alloc.num_cached_tokens([1]), True),
    "fork": (lambda alloc, seq, other, arrays: alloc.fork(seq), True),
    "reorder": (lambda alloc, seq, other, arrays: alloc.reorder([other, seq], [0, 1]), True),
    "preempt": (lambda alloc, seq, other, arrays: alloc.preempt([seq]), True),
    "free": (lambda alloc, seq, other, arrays: alloc.free(seq), True),
    "fork of another": (lambda alloc, seq, other, arrays: alloc.fork(other), False),
    "reorder of others": (lambda alloc, seq, other, arrays: alloc.reorder([other], [0]), False),
    "preempt of another": (lambda alloc, seq, other, arrays: alloc.preempt([other]), False),
    "free of another": (lambda alloc, seq, other, arrays: alloc.free(other), False),
    "create": (lambda alloc, seq, other, arrays: alloc.create(), False),
    "truncate": (lambda alloc, seq, other, arrays: alloc.truncate(seq, 0), False),
    "resume": (lambda alloc, seq, other, arrays: alloc.resume([]), False),
    "needed": (lambda alloc, seq, other, arrays: alloc.needed([seq, other]), False),
    "stats": (lambda alloc, seq, other, arrays: alloc.stats(), False),
    "take_events": (lambda alloc, seq, other, arrays: alloc.take_events(), False),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_calls_that_store_what_a_step_filled(step_arrays, name):
    """Those before which keys and values have to be written, or truncated."""
    alloc = octavo.PageAllocator(16, 4, prefix_cache=True, num_host_pages=4)
    other, seq = alloc.create(), alloc.create()
    alloc.step([seq], 10, step_arrays, tokens=PROMPT)
    call, stores = CALLS[name]
    call(alloc, seq, other, step_arrays)
    assert alloc.cache_stats()["num_stored_pages"] == (2 if stores else 0)


@pytest.mark.parametrize("count", range(9))
def test_the_last_token_is_always_left_to_be_computed(alloc, step_arrays, count):
    first = alloc.create()
    alloc.step([first], 10, step_arrays, tokens=PROMPT)
    alloc.free(first)
    assert alloc.num_cached_tokens(PROMPT[:count]) == count
    seq = alloc.create(PROMPT[:count])
    found = alloc.length(seq)
    assert found == max(count - 1, 0)
    free = alloc.num_free_pages
    if count:
        needed = alloc.needed([seq])
        alloc.step([seq], 1, step_arrays, tokens=PROMPT[found:count])
        # A page found in part is copied; the whole page, once known, is exchanged for the one that is there.
        assert (needed, alloc.num_free_pages) == (1, free - 1)
        alloc.take_copies()
    assert alloc.num_cached_tokens(PROMPT) == 8
    alloc.check_invariants()


def test_namespaces(alloc, step_arrays):
    seq = alloc.create(PROMPT, namespace="alice")
    alloc.step([seq], 10, step_arrays, tokens=PROMPT)
    assert alloc.num_cached_tokens(PROMPT, namespace=b"alice") == 8
    assert alloc.num_cached_tokens(PROMPT, namespace="bob") == 0
    assert alloc.num_cached_tokens(PROMPT) == 0


def test_pins(alloc, step_arrays):
    seq = alloc.create()
    alloc.step([seq], 10, step_arrays, tokens=PROMPT)
    alloc.free(seq)
    pin = alloc.pin(PROMPT)
    assert alloc.num_free_pages == 14
    alloc.unpin(pin)
    assert alloc.num_free_pages == 16
    with pytest.raises(octavo.InvalidSequence, match=f"^unpin: sequence {pin} was freed$"):
        alloc.unpin(pin)
    seq = alloc.create(PROMPT)
    with pytest.raises(ValueError, match=f"^unpin: sequence {seq} is not a pin; free\\(\\) ends sequences$"):
        alloc.unpin(seq)
    assert alloc.length(seq) == 8
    pin = alloc.pin(PROMPT)
    with pytest.raises(ValueError, match=f"^step: sequence {pin} is a pin, which cannot grow; fork it$"):
        alloc.step([pin], 1, step_arrays)
    message = f"^reorder: sequence {pin} is a pin, which cannot go on from another; fork it$"
    with pytest.raises(ValueError, match=message):
        alloc.reorder([seq, pin], [0, 0])
    message = f"^preempt: sequence {pin} is a pin, whose pages stay on the device$"
    with pytest.raises(ValueError, match=message):
        alloc.preempt([seq, pin])
    alloc.reorder([seq, pin], [1, 1])
    assert alloc.pages(seq).tolist() == alloc.pages(pin).tolist()
    alloc.check_invariants()


def test_events(alloc, step_arrays):
    seq = alloc.create()
    alloc.step([seq], 10, step_arrays, tokens=PROMPT)
    assert alloc.take_events() == ([], 0)  # it may still be computed, and fail
    assert alloc.cache_stats()["num_stored_pages"] == 0
    alloc.step([], 1, step_arrays)  # a later one
    events, num_lost = alloc.take_events()
    assert num_lost == 0
    assert [(event["kind"], event["page"], event["tokens"].tolist()) for event in events] == [
        ("stored", 0, PROMPT[:4]),
        ("stored", 1, PROMPT[4:8]),
    ]
    assert events[1]["parent_key"] == events[0]["key"] < 2**128
    alloc.free(seq)
    alloc.extend(alloc.create(), 64)
    events, num_lost = alloc.take_events()
    assert [(event["kind"], event["page"]) for event in events] == [("evicted", 1), ("evicted", 0)]
    assert alloc.take_events() == ([], 0)


def test_an_allocator_with_the_same_key_logs_the_same(step_arrays):
    keys = []
    for _ in range(2):
        alloc = octavo.PageAllocator(16, 4, prefix_cache=True, hash_key=b"0123456789abcdef", event_capacity=8)
        alloc.step([alloc.create()], 10, step_arrays, tokens=PROMPT)
        keys.append([event["key"] for event in alloc.take_events()[0]])
    assert keys[0] == keys[1]


def siphash128(key, message, c, d):
    """SipHash-c-d of 128 bits (Aumasson and Bernstein 2012), written from its definition."""
    mask = 2**64 - 1
    k0, k1 = (int.from_bytes(key[i : i + 8], "little") for i in (0, 8))
    v = [
        k0 ^ 0x736F6D6570736575,
        k1 ^ 0x646F72616E646F6D ^ 0xEE,
        k0 ^ 0x6C7967656E657261,
        k1 ^ 0x7465646279746573,
    ]

    def rounds(count):
        for _ in range(count):
            for a, b, bits, other in (
                (0, 1, 13, True),
                (2, 3, 16, False),
                (2, 1, 17, True),
                (0, 3, 21, False),
            ):
                v[a] = (v[a] + v[b]) & mask
                v[b] = ((v[b] << bits | v[b] >> (64 - bits)) & mask) ^ v[a]
                if other:
                    v[a] = (v[a] << 32 | v[a] >> 32) & mask

    whole = len(message) // 8 * 8
    words = [message[i : i + 8] for i in range(0, whole, 8)]
    words.append(message[whole:].ljust(7, b"\0") + bytes([len(message) % 256]))
    for word in words:
        v[3] ^= int.from_bytes(word, "little")
        rounds(c)
        v[0] ^= int.from_bytes(word, "little")
    v[2] ^= 0xEE
    rounds(d)
    low = v[0] ^ v[1] ^ v[2] ^ v[3]
    v[1] ^= 0xDD
    rounds(d)
    return low.to_bytes(8, "little") + (v[0] ^ v[1] ^ v[2] ^ v[3]).to_bytes(8, "little")


def test_keys_are_chained_siphashes(step_arrays):
    # The first of the vectors that come with the reference implementation.
    key = bytes(range(16))
    assert siphash128(key, b"", 2, 4).hex() == "a3817f04ba25a8e66df67214c7550293"
    alloc = octavo.PageAllocator(16, 4, prefix_cache=True, hash_key=key, event_capacity=8)
    seq = alloc.create([], namespace="näme")
    alloc.step([seq], 10, step_arrays, tokens=PROMPT)
    parent = siphash128(key, bytes(16) + "näme".encode(), 1, 3)
    for event in alloc.take_events()[0]:
        assert event["parent_key"] == int.from_bytes(parent, "little")
        parent = siphash128(key, parent + event["tokens"].tobytes(), 1, 3)
        assert event["key"] == int.from_bytes(parent, "little")


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda a, s: a.create("abc"), TypeError, "create: tokens must be an int; got str"),
        (lambda a, s: a.create(5), TypeError, "create: tokens must be an iterable of ints; got int"),
        (lambda a, s: a.create([2**31]), ValueError, "create: tokens must fit in 32 bits; got 2147483648"),
        (
            lambda a, s: a.create([1], namespace=3),
            TypeError,
            "create: namespace must be a str or bytes; got int",
        ),
        (
            lambda a, s: a.create(namespace="x"),
            ValueError,
            "create: namespace must come with tokens; an empty list will do",
        ),
        (
            lambda a, s: a.step([a.create()], 2, s, tokens=[1]),
            ValueError,
            "step: tokens must have one token for each of the 2 new ones; got 1",
        ),
        (
            lambda a, s: octavo.PageAllocator(4, 4, prefix_cache=True, hash_key=b"short"),
            ValueError,
            "PageAllocator: hash_key must be 16 bytes",
        ),
        (
            lambda a, s: octavo.PageAllocator(4, 4, prefix_cache=True, hash_bits=200),
            ValueError,
            "PageAllocator: hash_bits (200) must be between 0 and 128",
        ),
        (
            lambda a, s: octavo.PageAllocator(4, 4, hash_key=bytes(16)),
            ValueError,
            "PageAllocator: hash_key needs prefix_cache=True",
        ),
        (
            lambda a, s: octavo.PageAllocator(4, 4, hash_bits=999),
            ValueError,
            "PageAllocator: hash_bits needs prefix_cache=True",
        ),
        (
            lambda a, s: octavo.PageAllocator.from_groups([octavo.PageGroup(4, 4)], event_capacity=1000),
            ValueError,
            "PageAllocator: event_capacity needs prefix_cache=True",
        ),
        (
            lambda a, s: octavo.PageAllocator(4, 4).create([1]),
            ValueError,
            "create: the allocator was made without a prefix cache",
        ),
    ],
)
def test_messages(alloc, step_arrays, call, error, message):
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        call(alloc, step_arrays)
    alloc.check_invariants()
