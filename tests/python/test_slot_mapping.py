"""append_kv by slots (slot_mapping) writes what it writes by page tables."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import octavo
from support import oracle
from support.targets import Target, writable_target

NUM_PAGES, PAGE_SIZE, HEADS = 12, 5, 3


def random_slots(random: np.random.Generator, total: int) -> NDArray[np.int64]:
    """Different ones, and a third of the rows without any."""
    slots = random.permutation(NUM_PAGES * PAGE_SIZE)[:total]
    return np.where(random.random(total) < 1 / 3, random.integers(-9, 0, total), slots)


@writable_target
@pytest.mark.parametrize("kind", [np.int32, np.int64])
@pytest.mark.parametrize("head_dim", [8, 20, 64])
def test_each_row_goes_to_its_slot(target: Target, kind: type, head_dim: int) -> None:
    random = np.random.default_rng(head_dim)
    shape = (NUM_PAGES, PAGE_SIZE, HEADS, head_dim)
    for total in (0, 1, 7, 40):
        slots = random_slots(random, total)
        caches = [oracle.round_to(random.standard_normal(shape), target.dtype) for _ in "kv"]
        new = [oracle.round_to(random.standard_normal((total, *shape[2:])), target.dtype) for _ in "kv"]
        pages = [target.array(x) for x in caches]
        mapping = target.library.from_numpy(slots.astype(kind))
        octavo.append_kv(*(target.array(x) for x in new), *pages, slot_mapping=mapping)
        for cache, rows, written in zip(caches, new, pages, strict=True):
            want = cache.copy()
            for slot, row in zip(slots, rows, strict=True):
                if slot >= 0:
                    want[slot // PAGE_SIZE, slot % PAGE_SIZE] = row
            np.testing.assert_array_equal(target.library.to_float64(written), want)


def append_both_ways(cache: Any, other: Any, kind: type, options: dict[str, Any]) -> None:
    """By the tables that an allocator writes, and by its slots."""
    random = np.random.default_rng(1)
    alloc = octavo.PageAllocator(NUM_PAGES, PAGE_SIZE)
    table, lens, cu = np.empty((4, 9), np.int32), np.empty(4, np.int32), np.empty(5, np.int32)
    slots = np.empty(30, kind)
    arrays = octavo.StepArrays(table, lens, cu, slot_mapping=slots)
    seqs = [alloc.create() for _ in range(3)]
    for counts in ([7, 0, 4], [1, 12, 1], [0, 1, 1]):
        alloc.step(seqs, counts, arrays)
        k, v = random.standard_normal((2, len(slots), HEADS, 16)).astype(np.float32)
        octavo.append_kv(k, v, page_table=table, seq_lens=lens, cu_seqlens=cu, **cache, **options)
        octavo.append_kv(k, v, slot_mapping=slots, **other, **options)
    for name, array in cache.items():
        np.testing.assert_array_equal(array, other[name])
    assert alloc.length(seqs[1]) == 13


@pytest.mark.parametrize("dtype", ["float32", "int8", "int4"])
@pytest.mark.parametrize("kind", [np.int32, np.int64])
def test_codes_and_their_scales(dtype: str, kind: type) -> None:
    caches = [octavo.empty_cache(NUM_PAGES, PAGE_SIZE, HEADS, 16, dtype) for _ in range(2)]
    for cache in caches:
        for array in cache.arrays.values():
            array[:] = 0
    kv_dtype = {} if caches[0].kv_dtype is None else {"kv_dtype": caches[0].kv_dtype}
    append_both_ways(caches[0].arrays, caches[1].arrays, kind, kv_dtype)


@pytest.mark.parametrize("kind", ["int32", "int64"])
def test_torch_and_its_operator(kind: str) -> None:
    torch = pytest.importorskip("torch")
    octavo_torch = pytest.importorskip("octavo.torch")
    k, v = torch.randn(2, 4, HEADS, 8)
    slots = torch.tensor([3, -1, 59, 6], dtype=getattr(torch, kind))
    pages = [torch.zeros(NUM_PAGES, PAGE_SIZE, HEADS, 8) for _ in range(6)]
    octavo.append_kv(k, v, *pages[:2], slot_mapping=slots)
    octavo_torch.append_kv(k, v, *pages[2:4], slot_mapping=slots)
    torch.compile(octavo_torch.append_kv, fullgraph=True, backend="eager")(
        k, v, *pages[4:], slot_mapping=slots
    )
    for i, new in enumerate((k, v)):
        want = torch.zeros(NUM_PAGES * PAGE_SIZE, HEADS, 8)
        want[[3, 59, 6]] = new[[0, 2, 3]]
        for pair in (pages[:2], pages[2:4], pages[4:]):
            assert torch.equal(pair[i].view_as(want), want)


def test_jax_and_its_vmap() -> None:
    jax = pytest.importorskip("jax")
    octavo_jax = pytest.importorskip("octavo.jax")
    random = np.random.default_rng(0)
    n, total = 3, 4
    k, v = random.standard_normal((2, n, total, HEADS, 8)).astype(np.float32)
    pages = random.standard_normal((2, n, NUM_PAGES, PAGE_SIZE, HEADS, 8)).astype(np.float32)
    slots = np.array([[0, 7, -1, 59], [-3, 60, 5, 6], [1, 2, 3, 4]], np.int32)  # 60: of no cache

    def append(k: Any, v: Any, k_pages: Any, v_pages: Any, slots: Any) -> Any:
        return octavo_jax.append_kv(k, v, k_pages, v_pages, slot_mapping=slots)

    found = jax.vmap(append)(k, v, *pages, slots)
    slots[1, 1] = -1
    for i in range(n):
        want = [pages[side, i].copy() for side in range(2)]
        octavo.append_kv(k[i], v[i], *want, slot_mapping=slots[i])
        for side in range(2):
            np.testing.assert_array_equal(found[side][i], want[side])
    one = jax.jit(append)(k[0], v[0], *pages[:, 0], slots[0])
    np.testing.assert_array_equal(one[0], found[0][0])


ROWS = np.zeros((2, 1, 8), np.float32)
TABLE, LENS = np.zeros((2, 1), np.int32), np.ones(2, np.int32)
SLOTS = {"slot_mapping": np.array([0, 1], np.int32)}


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({}, TypeError, "page_table must be given, or slot_mapping instead of page_table and seq_lens"),
        (
            {"page_table": TABLE},
            TypeError,
            "seq_lens must be given, or slot_mapping instead of page_table and ",
        ),
        (
            {**SLOTS, "page_table": TABLE},
            ValueError,
            "slot_mapping says where tokens go instead of page_table, ",
        ),
        (
            {**SLOTS, "cu_seqlens": TABLE[0]},
            ValueError,
            "slot_mapping says where tokens go instead of page_ta",
        ),
        (
            {**SLOTS, "rotary_cos": np.ones((4, 2), np.float32), "rotary_sin": np.ones((4, 2), np.float32)},
            ValueError,
            "slot_mapping cannot go with rotary_cos and rotary_sin, as it does not say positions",
        ),
        (
            {"slot_mapping": [0, 8]},
            ValueError,
            "slot_mapping[1] must be below num_pages * page_size (8); got 8",
        ),
        (
            {"slot_mapping": [2**40, 1]},
            ValueError,
            "slot_mapping[0] must be below num_pages * page_size (8); go",
        ),
        ({"slot_mapping": [1]}, ValueError, "total of slot_mapping (1) must equal that of k (2)"),
        ({"slot_mapping": [[1], [2]]}, ValueError, "slot_mapping must have shape [total]; got [2, 1]"),
        ({"slot_mapping": [1.0, 2.0]}, TypeError, "slot_mapping must be int32 or int64; got float64"),
        (
            {"slot_mapping": [[1], [2, 3]]},
            ValueError,
            "slot_mapping must be an array or a list of ints, rows of",
        ),
    ],
)
def test_refused(given: dict[str, Any], error: type[Exception], message: str) -> None:
    pages = np.full((2, 2, 4, 1, 8), 7.0, np.float32)
    with pytest.raises(error, match=f"^append_kv: {re.escape(message)}"):
        octavo.append_kv(ROWS, ROWS, *pages, **given)
    assert (pages == 7.0).all()
