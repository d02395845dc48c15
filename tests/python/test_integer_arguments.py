"""Page tables, lengths and offsets of int64, and as lists, where the arrays are on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import octavo

HUGE = 2**40


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
        ({"page_table": [[[0]], [[1]]]}, r"page_table must have one axis or two; got \[2, 1, 1\]"),
        ({"page_table": [0, 1]}, r"page_table must have shape \[batch, max_pages\]; got \[2\]"),
    ):
        with pytest.raises(ValueError, match=f"^paged_attention: {message}"):
            octavo.paged_attention(q, *pages, **{"page_table": table, "seq_lens": [1, 1], **change})
    for bad, message in (
        (["a"], "seq_lens .* cannot be taken through DLPack|seq_lens must be int32; got"),
        ([1.0, 2.0], "seq_lens must be int32; got float64"),
        ([True, False], "seq_lens must be int32; got bool"),
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


@pytest.mark.gpu
def test_on_a_gpu_int64_and_lists_are_refused() -> None:
    torch = pytest.importorskip("torch")
    q, k_pages, v_pages = (
        torch.ones(*shape, dtype=torch.float16, device="cuda") for shape in ((1, 1, 8), *[(3, 4, 1, 8)] * 2)
    )
    table = torch.zeros(1, 1, dtype=torch.int32, device="cuda")
    with pytest.raises(TypeError, match="seq_lens must be int32; got int64"):
        octavo.paged_attention(q, k_pages, v_pages, table, torch.ones(1, dtype=torch.int64, device="cuda"))
    with pytest.raises(TypeError, match="seq_lens must be an array"):
        octavo.paged_attention(q, k_pages, v_pages, table, [1])
