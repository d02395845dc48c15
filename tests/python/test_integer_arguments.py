"""Page tables, lengths and offsets of int64; on the CPU also as lists."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import numpy as np
import pytest

import octavo
from support.targets import Target, every_target, writable_target

HUGE = 2**40

# Calls of paged_attention for which a GPU has different kernels: split-KV decode in its forms, stream-K
# decode, and prefill on Hopper and on any GPU.
SHAPES: list[dict[str, Any]] = [
    {"head_dim": 64, "counts": [1, 1], "cached": 900, "page_size": 16, "packed": False},
    {"head_dim": 64, "counts": [1, 1], "cached": 900, "page_size": 16, "has_prefix": True},
    {"head_dim": 128, "counts": [1] * 40, "cached": 300, "page_size": 8, "packed": False},
    {"head_dim": 128, "counts": [1] * 20 + [0, 2], "cached": 2000, "page_size": 5},
    {"head_dim": 64, "counts": [1, 1], "cached": 700, "page_size": 16, "options": {"batch_invariant": True}},
    {"head_dim": 64, "counts": [1, 3], "cached": 700, "page_size": 16, "options": {"window_left": 40}},
    {"head_dim": 128, "counts": [200, 1, 0, 65], "cached": 400, "page_size": 16},
    {"head_dim": 64, "counts": [130, 7], "cached": 100, "page_size": 3, "num_q_heads": 14},
    {"head_dim": 96, "counts": [33, 1, 90], "cached": 500, "page_size": 32, "has_prefix": True},
]


def int64_of(target: Target) -> contextlib.AbstractContextManager[Any]:
    """JAX has arrays of int64 only where it is told so."""
    if target.library_name != "jax":
        return contextlib.nullcontext()
    import jax

    return jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64()  # type: ignore[no-any-return]


def as_int64(values: list[Any]) -> Any:
    return np.array(values, np.int64)


def apart(values: list[Any]) -> Any:
    """Rows and columns at strides of their own."""
    array = np.array(values, np.int64)
    wide = np.full([2 * length for length in array.shape], HUGE)
    view = wide[(slice(None, None, 2),) * array.ndim]
    view[...] = array
    return view


def tensor(values: list[Any]) -> Any:
    return pytest.importorskip("torch").tensor(values)


KINDS = (as_int64, apart, tensor, list, lambda values: tuple(values))


@pytest.mark.parametrize("kind", KINDS)
def test_every_operator(kind: Any) -> None:
    """HUGE stands where nothing is read."""
    random = np.random.default_rng(0)
    table, lens, cu = [[2, HUGE], [0, 3]], [3, 6], [0, 1, 4]
    exact = [np.clip(x, -1, 9).astype(np.int32) for x in (table, lens, cu)]
    given = [kind(x) for x in (table, lens, cu)]
    k, v, q = random.standard_normal((3, 4, 1, 8)).astype(np.float32)
    results = []
    for page_table, seq_lens, cu_seqlens in (exact, given):
        pages = np.zeros((2, 5, 4, 1, 8), np.float32)
        octavo.append_kv(k, v, *pages, page_table, seq_lens, cu_seqlens=cu_seqlens)
        results.append(
            (pages, octavo.paged_attention(q, *pages, page_table, seq_lens, cu_seqlens_q=cu_seqlens))
        )
        octavo.check_page_table(page_table, seq_lens, num_pages=5, page_size=4)
        prefix_lens = np.array([1, 0], np.int32) if page_table is exact[0] else kind([1, 0])
        packed = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens}
        out, lse = octavo.attention(q, k, v, **packed, prefix_lens=prefix_lens, causal=True, return_lse=True)
        backward = {**packed, "prefix_lens": prefix_lens, "causal": True}
        results[-1] += (out, *octavo.attention_backward(q, q, k, v, out, lse, **backward))
        octavo.copy_pages(
            *pages, kind([[0, 1], [3, 4]]) if page_table is not exact[0] else np.int32([[0, 1], [3, 4]])
        )
        results[-1] += (pages.copy(),)
    for found, wanted in zip(results[1], results[0], strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_what_is_used_is_checked() -> None:
    q, pages = np.ones((2, 1, 8), np.float32), np.ones((2, 3, 4, 1, 8), np.float32)
    table = np.array([[0], [1]])
    for change, message in (
        ({"page_table": [[0], [HUGE]]}, r"page_table\[1, 0\] must lie in \[0, num_pages = 3\)"),
        ({"page_table": [[0], [-HUGE]]}, r"page_table\[1, 0\] must lie in \[0, num_pages = 3\)"),
        ({"seq_lens": [HUGE, 1]}, r"seq_lens\[0\] must lie in \[0, max_pages \* page_size = 4\]"),
        ({"seq_lens": [1, -HUGE]}, r"seq_lens\[1\] must lie in"),
        (
            {"cu_seqlens_q": [0, 1, HUGE]},
            r"cu_seqlens_q\[2\] must be at most the number of packed rows \(2\)",
        ),
        ({"page_table": [[[0]], [[1]]]}, r"page_table must have shape \[batch, max_pages\]; got \[2, 1, 1\]"),
        ({"page_table": [[[[0]]]]}, r"page_table must have shape \[batch, max_pages\]; got \[1, 1, 1, 1\]"),
        ({"seq_lens": np.ones((), np.int64)}, r"seq_lens must have shape \[batch\]; got \[\]"),
        ({"page_table": [0, 1]}, r"page_table must have shape \[batch, max_pages\]; got \[2\]"),
    ):
        with pytest.raises(ValueError, match=f"^paged_attention: {message}"):
            octavo.paged_attention(q, *pages, **{"page_table": table, "seq_lens": [1, 1], **change})
    for bad, message in (
        (["a"], "seq_lens .* cannot be taken through DLPack|seq_lens must be int32 or int64; got"),
        ([1.0, 2.0], "seq_lens must be int32 or int64; got float64"),
        ([True, False], "seq_lens must be int32 or int64; got bool"),
    ):
        with pytest.raises(TypeError, match=message):
            octavo.paged_attention(q, *pages, table, bad)


def test_an_empty_batch() -> None:
    q, pages = np.ones((0, 1, 8), np.float32), np.ones((2, 3, 4, 1, 8), np.float32)
    out = octavo.paged_attention(q, *pages, np.empty((0, 1), np.int64), [])
    assert out.shape == (0, 1, 8)


def test_an_array_that_is_written_stays_int32() -> None:
    with pytest.raises(TypeError, match=r"^StepArrays: seq_lens must be int32; got int64$"):
        octavo.StepArrays(np.empty((1, 1), np.int32), np.empty(1, np.int64))


@every_target
@pytest.mark.parametrize("shape", SHAPES, ids=range(len(SHAPES)))
def test_every_library_and_kernel(target: Target, shape: dict[str, Any]) -> None:
    """Each array by itself of int64, and all of them: the same bits."""
    random = np.random.default_rng(shape["head_dim"])
    counts, head_dim = np.array(shape["counts"]), shape["head_dim"]
    lens = counts + random.integers(0, shape["cached"] + 1, len(counts))
    page_size, num_heads = shape["page_size"], shape.get("num_q_heads", 4)
    alloc = octavo.PageAllocator(int(np.sum(-(-lens // page_size))) + 1, page_size)
    seqs = [alloc.create() for _ in lens]
    for seq, n in zip(seqs, lens, strict=True):
        alloc.extend(seq, int(n))
    numbers = {
        "page_table": np.where((table := alloc.page_table(seqs)[0]) < 0, 2**31 - 1, table),
        "seq_lens": lens,
        "cu_seqlens_q": np.cumsum([0, *counts]),
        "prefix_lens": np.minimum(lens, 3),
    }
    if not shape.get("has_prefix"):
        del numbers["prefix_lens"]
    if not shape.get("packed", True):
        del numbers["cu_seqlens_q"]
    kv = [random.standard_normal((alloc.num_pages, page_size, 2, head_dim)) for _ in "kv"]
    arrays = [
        target.array(random.standard_normal((counts.sum(), num_heads, head_dim))),
        *map(target.array, kv),
    ]
    options = {"return_lse": True, **shape.get("options", {})}
    if "cu_seqlens_q" in numbers:
        options["max_seqlen_q"] = int(counts.max())
    results = []
    with int64_of(target):
        for wide in ((), *((name,) for name in numbers), tuple(numbers)):
            given = {
                name: target.library.from_numpy(x.astype(np.int64 if name in wide else np.int32))
                for name, x in numbers.items()
            }
            for name in wide:
                assert str(given[name].dtype).endswith("int64")
            octavo.check_page_table(
                given["page_table"], given["seq_lens"], num_pages=alloc.num_pages, page_size=page_size
            )
            results.append(octavo.paged_attention(*arrays, **given, **options))
    for found in results[1:]:
        for x, want in zip(found, results[0], strict=True):
            np.testing.assert_array_equal(target.library.to_float64(x), target.library.to_float64(want))


@every_target
def test_packed_attention_and_its_gradients(target: Target) -> None:
    random = np.random.default_rng(0)
    lengths, array = {"q": [70, 0, 40, 1], "k": [90, 3, 300, 1]}, target.library.from_numpy
    q, dout = (target.array(random.standard_normal((sum(lengths["q"]), 4, 64))) for _ in range(2))
    k, v = (target.array(random.standard_normal((sum(lengths["k"]), 2, 64))) for _ in range(2))
    results = []
    with int64_of(target):
        for kinds in itertools.product((np.int32, np.int64), repeat=3):
            options = {
                **{
                    f"cu_seqlens_{of}": array(np.cumsum([0, *lengths[of]]).astype(kind))
                    for of, kind in zip("qk", kinds, strict=False)
                },
                "prefix_lens": array(np.array([5, 1, 200, 0]).astype(kinds[2])),
                "causal": True,
            }
            out, lse = octavo.attention(q, k, v, **options, return_lse=True)
            gradients = octavo.attention_backward(dout, q, k, v, out, lse, **options, deterministic=True)
            results.append([target.library.to_float64(x) for x in (out, lse, *gradients)])
    for found in results[1:]:
        for x, want in zip(found, results[0], strict=True):
            np.testing.assert_array_equal(x, want)


@writable_target
@pytest.mark.parametrize("packed", [False, True])
def test_what_writes_the_cache(target: Target, packed: bool) -> None:
    random, array = np.random.default_rng(1), target.library.from_numpy
    tables = [[[2, 2**31 - 1], [0, 3]], [3, 6], [0, 1, 4]]
    total = 4 if packed else 2
    new = [random.standard_normal((total, 2, 16)) for _ in "kv"]
    results = []
    for kinds in itertools.product((np.int32, np.int64), repeat=4):
        table, lens, cu, copies = (
            array(np.array(x, kind)) for x, kind in zip([*tables, [[0, 1], [3, 4]]], kinds, strict=True)
        )
        pages = [target.array(np.zeros((5, 4, 2, 16))) for _ in "kv"]
        options = {"cu_seqlens": cu} if packed else {}
        octavo.append_kv(*map(target.array, new), *pages, table, lens, **options)
        octavo.copy_pages(*pages, copies)
        results.append([target.library.to_float64(x) for x in pages])
    for found in results[1:]:
        np.testing.assert_array_equal(found, results[0])
    assert np.any(results[0][0][4])


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_in_programs_of_jax(device: str) -> None:
    jax = pytest.importorskip("jax")
    octavo_jax = pytest.importorskip("octavo.jax")
    random = np.random.default_rng(2)
    q, k, v = random.standard_normal((3, 4, 2, 16)).astype(np.float16)
    pages = np.zeros((2, 5, 4, 2, 16), np.float16)
    numbers = [np.array([[2, 0], [0, 3]]), np.array([3, 6]), np.array([0, 1, 4])]

    def step(table: Any, lens: Any, cu: Any, q: Any, k: Any, v: Any, *pages: Any) -> Any:
        assert str(table.dtype) == wanted
        cache = octavo_jax.append_kv(k, v, *pages, table, lens, cu_seqlens=cu)
        attended = octavo_jax.paged_attention(q, *cache, table, lens, cu_seqlens_q=cu, max_seqlen_q=3)
        return attended, octavo_jax.attention(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu), *cache

    results = []
    with jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64():
        for wanted in ("int32", "int64"):
            inputs = jax.device_put([x.astype(wanted) for x in numbers], jax.devices(device)[0])
            arrays = jax.device_put([q, k, v, *pages], jax.devices(device)[0])
            results.append([np.asarray(x) for x in jax.jit(step)(*inputs, *arrays)])
    for found, want in zip(results[1], results[0], strict=True):
        np.testing.assert_array_equal(found, want)


def test_programs_of_jax_without_64_bits_refuse_numbers_beyond_32() -> None:
    octavo_jax = pytest.importorskip("octavo.jax")
    q, pages = np.ones((2, 1, 8), np.float32), np.ones((2, 3, 4, 1, 8), np.float32)
    table, lens = [[2], [0]], [1, 4]
    wanted = octavo_jax.paged_attention(q, *pages, np.array(table, np.int32), np.array(lens, np.int32))
    for kind in (as_int64, apart, list, tuple):
        out = octavo_jax.paged_attention(q, *pages, kind(table), kind(lens))
        np.testing.assert_array_equal(out, wanted)
        for change in (
            {"page_table": kind([[2], [2**32]])},
            {"page_table": kind([[-HUGE], [0]])},
            {"seq_lens": kind([1, HUGE + 4])},
        ):
            number = next(x for x in np.asarray(next(iter(change.values()))).flat if abs(x) > 2)
            message = f"{next(iter(change))} must fit in int32 outside of JAX's x64 mode; got {number}$"
            with pytest.raises(ValueError, match=f"^paged_attention: {message}"):
                octavo_jax.paged_attention(q, *pages, **{"page_table": table, "seq_lens": lens, **change})
    with pytest.raises(ValueError, match=f"^append_kv: slot_mapping must fit in int32 .* got {2**31}$"):
        octavo_jax.append_kv(q, q, *pages, slot_mapping=[2**31, 0])
    refused = pytest.raises(Exception, match=r"page_table\[1, 0\] must lie in .* got 4294967296")
    with int64_of(Target("jax", "cpu", "float32")), refused:
        octavo_jax.paged_attention(q, *pages, as_int64([[2], [2**32]]), lens).block_until_ready()


@pytest.mark.parametrize("gpu", ["a100", "h100"])
def test_plans_are_those_of_int32(gpu: str) -> None:
    q, pages = np.ones((6, 8, 128), np.float16), np.ones((2, 9, 16, 2, 128), np.float16)
    texts = []
    for kind in (np.int32, np.int64):
        tables = np.zeros((2, 40), kind), np.zeros(2, kind)
        packed = {"cu_seqlens_q": np.zeros(3, kind), "max_seqlen_q": 5}
        texts.append(
            [
                str(octavo.explain("paged_attention", q, *pages, *tables, **packed, device=gpu)),
                str(octavo.explain("paged_attention", q[:2], *pages, *tables, device=gpu)),
                str(octavo.explain("append_kv", q[:2, :2], q[:2, :2], *pages, *tables, device=gpu)),
            ]
        )
    assert texts[0] == texts[1]


@pytest.mark.gpu
def test_on_a_gpu_lists_are_refused() -> None:
    torch = pytest.importorskip("torch")
    q, k_pages, v_pages = (
        torch.ones(*shape, dtype=torch.float16, device="cuda") for shape in ((1, 1, 8), *[(3, 4, 1, 8)] * 2)
    )
    table = torch.zeros(1, 1, dtype=torch.int64, device="cuda")
    with pytest.raises(TypeError, match="seq_lens must be an array"):
        octavo.paged_attention(q, k_pages, v_pages, table, [1])


@pytest.mark.gpu
def test_on_a_gpu_the_check_finds_numbers_beyond_32_bits() -> None:
    """The operators read the lower halves, and nothing is read back."""
    torch = pytest.importorskip("torch")
    lens = torch.tensor([5], device="cuda")
    with pytest.raises(
        ValueError, match=rf"page_table\[0, 1\] must lie in \[0, num_pages = 3\); got {2**32}"
    ):
        octavo.check_page_table(torch.tensor([[0, 2**32]], device="cuda"), lens, num_pages=3, page_size=4)
    table = torch.zeros(1, 2, dtype=torch.int32, device="cuda")
    with pytest.raises(ValueError, match=rf"seq_lens\[0\] must lie in \[0, .*; got {2**32 + 5}"):
        octavo.check_page_table(table, lens + 2**32, num_pages=3, page_size=4)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["int32", "int64"])
def test_on_a_gpu_the_check_reads_rows_that_overlap(kind: str) -> None:
    """Rows expanded from one, and windows of one array."""
    torch = pytest.importorskip("torch")
    pages = torch.tensor([0, 1, 2, 3, 4], dtype=getattr(torch, kind), device="cuda")
    lens = torch.tensor([8, 8, 8], dtype=torch.int32, device="cuda")
    windows = pages.as_strided((3, 2), (1, 1), 1)
    for table, wrong in ((pages[3:].expand(3, 2), "0, 1"), (windows, "2, 1")):
        octavo.check_page_table(table, lens, num_pages=5, page_size=4)
        with pytest.raises(ValueError, match=rf"page_table\[{wrong}\] must lie in .* = 4\); got 4"):
            octavo.check_page_table(table, lens, num_pages=4, page_size=4)
