"""octavo.append_kv, octavo.copy_pages and octavo.check_page_table."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

import octavo
from support import oracle, problems
from support.case import Case
from support.targets import Target, cpu_target, every_target, writable_target

# How the memory of a cache lies behind [num_pages, page_size, num_kv_heads, head_dim].
LAYOUTS = ("contiguous", "head_major", "side_by_side", "padded")


@dataclasses.dataclass
class MutableCache:
    """k_pages and v_pages in some layout, filled with numbers that tell every slot apart."""

    target: Target
    k: NDArray
    v: NDArray
    k_pages: Any = None
    v_pages: Any = None
    wide: Any = None  # padded: the arrays around each

    @classmethod
    def make(cls, target: Target, case: Case, num_pages: int, layout: str) -> MutableCache:
        shape = (num_pages, case.page_size, case.num_kv_heads)
        random = np.random.default_rng(7)
        shapes = ((*shape, case.head_dim), (*shape, case.head_dim_v))
        cache = cls(target, *(oracle.round_to(random.standard_normal(x), target.dtype) for x in shapes))
        swap_axes = target.library.swap_axes
        if layout == "contiguous":
            cache.k_pages, cache.v_pages = target.array(cache.k), target.array(cache.v)
        elif layout == "head_major":
            cache.k_pages, cache.v_pages = (
                swap_axes(target.array(x.swapaxes(1, 2)), 1, 2) for x in (cache.k, cache.v)
            )
        elif layout == "side_by_side":
            if case.head_dim_v == case.head_dim:
                both = target.array(np.stack([cache.k, cache.v], axis=1))
                cache.k_pages, cache.v_pages = both[:, 0], both[:, 1]
            else:
                both = target.array(np.concatenate([cache.k, cache.v], axis=-1))
                cache.k_pages, cache.v_pages = both[..., : case.head_dim], both[..., case.head_dim :]
        else:
            cache.wide = []
            for x in (cache.k, cache.v):
                wide = np.full(
                    (num_pages + 1, case.page_size + 2, case.num_kv_heads + 1, x.shape[-1] + 3), -7.0
                )
                wide[1:, 1:-1, 1:, 1:-2] = x
                cache.wide.append(target.array(wide))
            cache.k_pages, cache.v_pages = (x[1:, 1:-1, 1:, 1:-2] for x in cache.wide)
        return cache

    def append(self, case: Case, table: NDArray, k: Any, v: Any, cu_seqlens: Any, **options: Any) -> Any:
        return octavo.append_kv(
            k,
            v,
            self.k_pages,
            self.v_pages,
            self.target.int32(table),
            self.target.int32(case.seqlens_k),
            cu_seqlens=None if cu_seqlens is None else self.target.int32(cu_seqlens),
            **options,
        )

    def check_append(self, case: Case, table: NDArray, k: NDArray, v: NDArray) -> None:
        expected = (
            oracle.append_kv(new, pages, table, case.seqlens_k, case.seqlens_q)
            for new, pages in ((k, self.k), (v, self.v))
        )
        self.check(*expected)

    def check(self, k: NDArray, v: NDArray) -> None:
        """Bit by bit, slots that must not change included."""
        for pages, expected in ((self.k_pages, k), (self.v_pages, v)):
            np.testing.assert_array_equal(self.target.library.to_float64(pages), expected)
        if self.wide is not None:
            for array in self.wide:
                wide = self.target.library.to_float64(array)
                wide[1:, 1:-1, 1:, 1:-2] = -7.0
                assert (wide == -7.0).all(), "written outside the cache"


def check_append(
    target: Target, case: Case, layout: str, *, packed: bool = True, static_tables: bool = False
) -> None:
    inputs = problems.make_inputs(case, target.dtype)
    table, num_pages = problems.make_page_table(case)
    cache = MutableCache.make(target, case, num_pages, layout)
    # The newest tokens of a sequence are as many as its queries; a sequence of length 0 may hand in padding.
    random = np.random.default_rng(3)
    k, v = (
        oracle.round_to(
            random.standard_normal((sum(case.seqlens_q), case.num_kv_heads, head_dim)), target.dtype
        )
        for head_dim in (case.head_dim, case.head_dim_v)
    )
    cu_seqlens = inputs.cu_seqlens_q if packed else None
    cache.append(case, table, target.array(k), target.array(v), cu_seqlens, static_tables=static_tables)
    cache.check_append(case, table, k, v)


APPENDS = (
    Case("append_decode", (1, 1, 1), (1, 16, 17)),
    Case("append_padding", (1, 1, 1, 1), (0, 5, 0, 40), num_kv_heads=2),
    Case("append_prompts", (33, 0, 1, 17), (33, 5, 1, 90), num_kv_heads=2),
    Case("append_packed_padding", (3, 5, 2), (0, 9, 0), num_kv_heads=2),
    Case("append_page_size_1", (5, 1, 3), (5, 9, 30), page_size=1, num_kv_heads=2),
    Case("append_page_size_17", (40, 1, 3), (57, 18, 30), page_size=17, num_kv_heads=3, head_dim=80),
    Case("append_page_size_256", (300, 1), (300, 257), page_size=256, num_kv_heads=1, head_dim=8),
    Case("append_head_dim_256", (4, 1), (19, 16), num_kv_heads=2, head_dim=256),
    Case("append_head_dim_512", (4, 1), (19, 16), num_kv_heads=2, head_dim=512),
    Case("append_192_128", (33, 0, 1), (33, 5, 17), num_kv_heads=2, head_dim=192, value_dim=128),
    Case("append_64_128", (1, 1, 1), (1, 16, 17), num_kv_heads=3, head_dim=64, value_dim=128),
    Case("append_8_512", (4, 1), (19, 16), num_kv_heads=2, head_dim=8, value_dim=512),
    Case("append_nothing", (0, 0), (0, 7)),
    Case("append_2000_pages", (5, 1), (31_990, 17), num_kv_heads=1, head_dim=8),
)


@writable_target
@pytest.mark.parametrize("static_tables", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", APPENDS, ids=str)
def test_append(target: Target, case: Case, layout: str, static_tables: bool) -> None:
    check_append(target, case, layout, static_tables=static_tables)
    if case.is_decode:
        check_append(target, case, layout, packed=False, static_tables=static_tables)


@st.composite
def append_cases(draw: st.DrawFn) -> Case:
    batch = draw(st.integers(0, 5))
    counts = draw(st.lists(st.integers(0, 40), min_size=batch, max_size=batch))
    return Case(
        f"append {draw(st.integers(0, 1000))}",
        tuple(counts),
        tuple(draw(st.one_of(st.just(0), st.integers(n, n + 60))) for n in counts),
        num_kv_heads=draw(st.integers(1, 5)),
        head_dim=8 * draw(st.integers(1, 32)),
        value_dim=draw(st.one_of(st.just(0), st.integers(1, 300))),
        page_size=draw(st.sampled_from((1, 2, 3, 8, 16, 17, 64))),
    )


@writable_target
@given(case=append_cases(), layout=st.sampled_from(LAYOUTS))
def test_append_of_any_shape(target: Target, case: Case, layout: str) -> None:
    check_append(target, case, layout)


@writable_target
@pytest.mark.parametrize(("heads", "head_dim"), [(0, 8), (2, 0)])
def test_append_of_no_elements(target: Target, heads: int, head_dim: int) -> None:
    pages, new = target.array(np.zeros((3, 4, heads, head_dim))), target.array(np.zeros((1, heads, head_dim)))
    octavo.append_kv(new, new, pages, pages, target.int32([[1]]), target.int32([2]))


@writable_target
@pytest.mark.parametrize("dims", [(0, 8), (8, 0)])
def test_append_of_keys_or_values_alone(target: Target, dims: tuple[int, int]) -> None:
    pages = [target.array(np.zeros((3, 4, 2, dim))) for dim in dims]
    new = [target.array(np.ones((1, 2, dim))) for dim in dims]
    octavo.append_kv(*new, *pages, target.int32([[1]]), target.int32([2]))
    for array, dim in zip(pages, dims, strict=True):
        expected = np.zeros((3, 4, 2, dim))
        expected[1, 1] = 1
        np.testing.assert_array_equal(target.library.to_float64(array), expected)


@writable_target
def test_append_strided_tokens(target: Target) -> None:
    """k and v as slices of one projection."""
    case = Case("append_strided", (5, 1, 3), (21, 9, 30), num_kv_heads=2)
    inputs = problems.make_inputs(case, target.dtype)
    table, num_pages = problems.make_page_table(case)
    cache = MutableCache.make(target, case, num_pages, "contiguous")
    k, v = inputs.q[:, :2], inputs.q[:, 2:]
    projection = target.array(inputs.q)
    cache.append(case, table, projection[:, :2], projection[:, 2:], inputs.cu_seqlens_q)
    cache.check_append(case, table, k, v)


@writable_target
def test_append_by_columns_of_a_wider_table(target: Target) -> None:
    """A view, whose rows lie further apart than it has columns."""
    case = Case("append_wider_table", (5, 1, 3), (21, 9, 30), num_kv_heads=2)
    inputs = problems.make_inputs(case, target.dtype)
    table, num_pages = problems.make_page_table(case)
    wider = np.full((len(table), table.shape[1] + 3), 2**30, np.int32)
    wider[:, : table.shape[1]] = table
    cache = MutableCache.make(target, case, num_pages, "contiguous")
    k, v = inputs.q[:, :2], inputs.q[:, 2:]
    octavo.append_kv(
        target.array(k),
        target.array(v),
        cache.k_pages,
        cache.v_pages,
        target.int32(wider)[:, : table.shape[1]],
        target.int32(case.seqlens_k),
        cu_seqlens=target.int32(inputs.cu_seqlens_q),
    )
    cache.check_append(case, table, k, v)


@writable_target
@pytest.mark.parametrize(("k_scale", "v_scale"), [(0.25, 4.0), (2.0, None), (None, 3.0), (0.3, 1.7)])
def test_append_divides_by_the_scales(target: Target, k_scale: float | None, v_scale: float | None) -> None:
    case = Case("append_scaled", (5, 1, 3), (21, 9, 30), num_kv_heads=2)
    inputs = problems.make_inputs(case, target.dtype)
    table, num_pages = problems.make_page_table(case)
    cache = MutableCache.make(target, case, num_pages, "contiguous")
    k, v = inputs.q[:, :2], inputs.q[:, 2:]
    new = target.array(k), target.array(v)
    cache.append(case, table, *new, inputs.cu_seqlens_q, k_scale=k_scale, v_scale=v_scale)
    for pages, before, new, scale in (
        (cache.k_pages, cache.k, k, np.float32(k_scale or 1.0)),
        (cache.v_pages, cache.v, v, np.float32(v_scale or 1.0)),
    ):
        expected = oracle.append_kv(new / scale, before, table, case.seqlens_k, case.seqlens_q)
        error = np.abs(target.library.to_float64(pages) - expected)
        exact = np.log2(abs(scale)).is_integer()
        # Half a spacing for the rounding, a little for a product with the inverse.
        tolerance = 0.0 if exact else 0.75 * oracle.SPACING[target.dtype] * np.abs(expected)
        assert (error <= tolerance).all()


@writable_target
def test_append_then_attend(target: Target) -> None:
    """Token by token, as in generation: each step sees what the steps before it stored."""
    case = Case("generation", (1, 1), (19, 40), num_q_heads=4, num_kv_heads=2, page_size=8)
    inputs = problems.make_inputs(case, target.dtype)
    table, num_pages = problems.make_page_table(case)
    k_pages, v_pages = (target.nan(num_pages, case.page_size, case.num_kv_heads, case.head_dim) for _ in "kv")
    on_device = target.int32(table)
    begins = inputs.cu_seqlens_k[:-1]
    for step in range(1, max(case.seqlens_k) + 1):
        lengths = np.minimum(step, case.seqlens_k).astype(np.int32)
        lengths[step > np.array(case.seqlens_k)] = 0  # finished: a padding row
        newest = begins + np.maximum(lengths, 1) - 1
        octavo.append_kv(
            target.array(inputs.k[newest]),
            target.array(inputs.v[newest]),
            k_pages,
            v_pages,
            on_device,
            target.int32(lengths),
        )
        if step % 7 == 0 or step == 19:
            result = octavo.paged_attention(
                target.array(inputs.q), k_pages, v_pages, on_device, target.int32(lengths), return_lse=True
            )
            out, lse = (target.library.to_float64(x) for x in result)
            keys = np.concatenate([np.arange(b, b + n) for b, n in zip(begins, lengths, strict=True)])
            reference = oracle.attention(
                inputs.q, inputs.k[keys], inputs.v[keys], (1, 1), lengths, dtype=target.dtype, causal=True
            )
            reference.check(out, lse)


@writable_target
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "case",
    [
        Case("copy", (), (), num_kv_heads=2),
        Case("copy_page_size_1", (), (), page_size=1, num_kv_heads=3, head_dim=80),
        Case("copy_page_size_17", (), (), page_size=17, num_kv_heads=1, head_dim=8),
        Case("copy_page_size_256", (), (), page_size=256, num_kv_heads=2, head_dim=128),
        Case("copy_192_128", (), (), num_kv_heads=2, head_dim=192, value_dim=128),
        Case("copy_7_130", (), (), num_kv_heads=2, head_dim=7, value_dim=130),
    ],
    ids=str,
)
def test_copy_pages(target: Target, case: Case, layout: str) -> None:
    for copies in ([], [(3, 0)], [(3, 0), (3, 9), (5, 1), (8, 4), (3, 2)]):
        cache = MutableCache.make(target, case, 10, layout)
        octavo.copy_pages(
            cache.k_pages, cache.v_pages, target.int32(np.array(copies, np.int32).reshape(-1, 2))
        )
        k, v = cache.k.copy(), cache.v.copy()
        for source, to in copies:
            k[to], v[to] = cache.k[source], cache.v[source]
        cache.check(k, v)


@writable_target
def test_copy_many_pages(target: Target) -> None:
    case = Case("copy_many", (), (), num_kv_heads=2, head_dim=16)
    cache = MutableCache.make(target, case, 2000, "contiguous")
    pages = np.random.default_rng(0).permutation(2000)
    copies = np.stack([pages[:900], pages[900:1800]], axis=1).astype(np.int32)
    octavo.copy_pages(cache.k_pages, cache.v_pages, target.int32(copies))
    k, v = cache.k.copy(), cache.v.copy()
    k[copies[:, 1]], v[copies[:, 1]] = cache.k[copies[:, 0]], cache.v[copies[:, 0]]
    cache.check(k, v)


def test_a_list_of_no_copies() -> None:
    pages = np.ones((3, 4, 2, 8), np.float32)
    for copies in ([], ()):
        octavo.copy_pages(pages, pages.copy(), copies)
        octavo.copy_pages(pages, pages, copies, to_k_pages=pages.copy(), to_v_pages=pages.copy())
    np.testing.assert_array_equal(pages, 1)


@pytest.mark.parametrize("values", [slice(None), slice(4), slice(4, 8)])
def test_copy_pages_of_latents(values: slice) -> None:
    """Values are the keys, or some of their numbers, and there is one array of both."""
    pages = np.arange(3 * 4 * 2 * 8, dtype=np.float32).reshape(3, 4, 2, 8)
    expected = pages.copy()
    expected[2] = expected[0]
    octavo.copy_pages(pages, pages[..., values], [[0, 2]])
    np.testing.assert_array_equal(pages, expected)


@writable_target
def test_copies_may_be_columns_of_a_wider_array(target: Target) -> None:
    cache = MutableCache.make(target, Case("copy_columns", (), (), num_kv_heads=2), 10, "contiguous")
    wide = target.int32([[7, 3, 0, 7], [7, 5, 1, 7], [7, 3, 9, 7]])
    octavo.copy_pages(cache.k_pages, cache.v_pages, wide[:, 1:3])
    k, v = cache.k.copy(), cache.v.copy()
    k[[0, 1, 9]], v[[0, 1, 9]] = cache.k[[3, 5, 3]], cache.v[[3, 5, 3]]
    cache.check(k, v)


@writable_target
@pytest.mark.parametrize(
    "layouts", [("contiguous", "contiguous"), ("head_major", "padded"), ("padded", "side_by_side")]
)
@pytest.mark.parametrize(
    "case",
    [
        Case("copy_between", (), (), num_kv_heads=2),
        Case("copy_between_page_size_1", (), (), page_size=1, num_kv_heads=3, head_dim=80),
        Case("copy_between_page_size_17", (), (), page_size=17, num_kv_heads=1, head_dim=7),
        Case("copy_between_64_128", (), (), num_kv_heads=2, head_dim=64, value_dim=128),
    ],
    ids=str,
)
def test_copy_pages_between_caches(target: Target, case: Case, layouts: tuple[str, str]) -> None:
    """The caches differ in size; the same numbers on both sides are different pages."""
    for copies in ([], [(9, 3)], [(9, 0), (9, 1), (3, 3), (0, 2)]):
        here = MutableCache.make(target, case, 10, layouts[0])
        there = MutableCache.make(target, case, 4, layouts[1])
        octavo.copy_pages(
            here.k_pages,
            here.v_pages,
            target.int32(np.array(copies, np.int32).reshape(-1, 2)),
            to_k_pages=there.k_pages,
            to_v_pages=there.v_pages,
        )
        k, v = there.k.copy(), there.v.copy()
        for source, to in copies:
            k[to], v[to] = here.k[source], here.v[source]
        there.check(k, v)
        here.check(here.k, here.v)


@cpu_target
def test_preempted_sequences_come_back_with_their_pages(target: Target) -> None:
    """preempt() and resume() name the pages, copy_pages moves them, while others use the pages left."""
    case = Case("preempt", (), (), page_size=4, num_kv_heads=1, head_dim=8)
    device, host = (MutableCache.make(target, case, n, "contiguous") for n in (6, 20))
    caches = {"k_pages": device.k_pages, "v_pages": device.v_pages}
    host_caches = {"k_pages": host.k_pages, "v_pages": host.v_pages}
    alloc = octavo.PageAllocator(6, 4, num_host_pages=20)
    random = np.random.default_rng(5)

    def append(seq: int, n: int) -> NDArray:
        alloc.extend(seq, n)
        table, seq_lens = alloc.page_table([seq])
        new = oracle.round_to(random.standard_normal((n, 1, 8)), target.dtype)
        octavo.append_kv(
            target.array(new),
            target.array(-new),
            **caches,
            page_table=table,
            seq_lens=seq_lens,
            cu_seqlens=np.array([0, n], np.int32),
        )
        return new

    seqs = [alloc.create() for _ in range(3)]
    written = [append(seqs[0], 13), np.zeros((0, 1, 8)), np.zeros((0, 1, 8))]
    for turn in range(12):
        leaves, comes = seqs[turn % 3], seqs[(turn + 1) % 3]
        transfer, copies = alloc.preempt([leaves])
        octavo.copy_pages(**caches, copies=copies, to_k_pages=host.k_pages, to_v_pages=host.v_pages)
        alloc.confirm(transfer)
        if turn >= 2:
            transfer, copies = alloc.resume([comes])
            octavo.copy_pages(
                **host_caches, copies=copies, to_k_pages=device.k_pages, to_v_pages=device.v_pages
            )
            alloc.confirm(transfer)
        number = (turn + 1) % 3
        written[number] = np.concatenate([written[number], append(comes, 1 + turn % 2)])
        pages = alloc.pages(comes)
        for cache, sign in ((device.k_pages, 1), (device.v_pages, -1)):
            slots = target.library.to_float64(cache)[pages].reshape(-1, 1, 8)
            np.testing.assert_array_equal(slots[: alloc.length(comes)], sign * written[number])
        alloc.check_invariants()


@every_target
def test_check_page_table(target: Target) -> None:
    case = Case("check_page_table", (1, 1, 1), (33, 0, 16))
    table, num_pages = problems.make_page_table(case)

    def check(table: NDArray, seq_lens: tuple[int, ...]) -> None:
        octavo.check_page_table(
            target.int32(table), target.int32(seq_lens), num_pages=num_pages, page_size=case.page_size
        )

    check(table, case.seqlens_k)
    for bad in (num_pages, -1, 2**31 - 1):
        broken = table.copy()
        broken[0, 2] = bad
        with pytest.raises(ValueError, match="page_table"):
            check(broken, case.seqlens_k)
    for bad_lens in ((case.page_size * table.shape[1] + 1, 0, 0), (-1, 0, 0)):
        with pytest.raises(ValueError, match="seq_lens"):
            check(table, bad_lens)
