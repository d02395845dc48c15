"""Packed arrays with more rows than tokens: the surplus is padding, on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

import octavo

NAN = np.float32(np.nan)
COUNTS = st.lists(st.integers(0, 7), max_size=4)


def padded(array: NDArray[Any], surplus: int, value: Any = NAN) -> NDArray[Any]:
    return np.concatenate([array, np.full((surplus, *array.shape[1:]), value, array.dtype)])


def offsets(counts: list[int]) -> NDArray[np.int32]:
    return np.cumsum([0, *counts], dtype=np.int32)


@given(COUNTS, st.integers(0, 9), st.integers(0, 9), st.booleans())
def test_attention_and_its_gradients(counts: list[int], of_q: int, of_k: int, causal: bool) -> None:
    random = np.random.default_rng(sum(counts))
    cu, total = offsets(counts), sum(counts)
    q, dout = random.standard_normal((2, total, 4, 8)).astype(np.float32)
    k, v = random.standard_normal((2, total, 2, 8)).astype(np.float32)
    options: dict[str, Any] = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "causal": causal}
    want, want_lse = octavo.attention(q, k, v, return_lse=True, **options)
    wide = padded(q, of_q), padded(k, of_k), padded(v, of_k)
    out, lse = octavo.attention(*wide, return_lse=True, **options)
    np.testing.assert_array_equal(out, padded(want, of_q, 0.0))
    np.testing.assert_array_equal(lse, padded(want_lse, of_q, -np.inf))
    given_out = np.full_like(out, 7.0)
    octavo.attention(*wide, out=given_out, **options)
    np.testing.assert_array_equal(given_out, padded(want, of_q, 7.0))

    gradients = octavo.attention_backward(padded(dout, of_q), *wide, out, lse, **options)
    wanted = octavo.attention_backward(dout, q, k, v, want, want_lse, **options)
    for gradient, exact, surplus in zip(gradients, wanted, (of_q, of_k, of_k), strict=True):
        np.testing.assert_array_equal(gradient, padded(exact, surplus, 0.0))


@given(COUNTS, st.integers(0, 9), st.integers(0, 1), st.booleans())
def test_a_step_over_pages(counts: list[int], surplus: int, num_shared: int, rotates: bool) -> None:
    """append_kv, then paged_attention, with a shared prefix of a page or none, and with queries to rotate."""
    random = np.random.default_rng(len(counts))
    page_size, cu, total = 4, offsets(counts), sum(counts)
    num_shared = num_shared if counts else 0  # the first row of the page table names the prefix
    alloc = octavo.PageAllocator(64, page_size)
    prefix = alloc.create()
    alloc.extend(prefix, num_shared * page_size)
    seqs = alloc.fork(prefix, len(counts))
    for seq, n in zip(seqs, counts, strict=True):
        alloc.extend(seq, n)
    table, lens = alloc.page_table(seqs)
    q = random.standard_normal((total, 4, 8)).astype(np.float32)
    k, v = random.standard_normal((2, total, 2, 8)).astype(np.float32)
    pages = random.standard_normal((2, 64, page_size, 2, 8)).astype(np.float32)
    angles = random.standard_normal((40, 4)).astype(np.float32)
    rotary = {"rotary_cos": np.cos(angles), "rotary_sin": np.sin(angles)} if rotates else {}

    def step(surplus: int, fill: Any) -> tuple[NDArray[Any], ...]:
        cache = pages.copy()
        queries = padded(q, surplus, fill)
        rotated = octavo.append_kv(
            padded(k, surplus),
            padded(v, surplus),
            *cache,
            table,
            lens,
            cu_seqlens=cu,
            **rotary,
            **({"q": queries} if rotates else {}),
        )
        options: dict[str, Any] = {"shared_prefix_len": num_shared * page_size, "return_lse": True}
        out, lse = octavo.paged_attention(
            queries if rotated is None else rotated, *cache, table, lens, cu_seqlens_q=cu, **options
        )
        return cache, rotated, out, lse

    wanted, found = step(0, 0.0), step(surplus, 5.0)
    np.testing.assert_array_equal(found[0], wanted[0])
    if rotates:
        np.testing.assert_array_equal(found[1], padded(wanted[1], surplus, 5.0))  # copied as they are
    np.testing.assert_array_equal(found[2], padded(wanted[2], surplus, 0.0))
    np.testing.assert_array_equal(found[3], padded(wanted[3], surplus, -np.inf))


def test_paged_attention_leaves_the_rows_of_out() -> None:
    q, pages = np.ones((5, 2, 8), np.float32), np.ones((2, 3, 4, 1, 8), np.float32)
    out = np.full_like(q, 7.0)
    octavo.paged_attention(
        q, *pages, np.array([[0], [2]], np.int32), np.array([2, 1], np.int32), cu_seqlens_q=[0, 2, 3], out=out
    )
    assert (out[:3] == 1.0).all() and (out[3:] == 7.0).all()


def test_torch_and_jax() -> None:
    torch, jax = pytest.importorskip("torch"), pytest.importorskip("jax")
    octavo_torch, octavo_jax = pytest.importorskip("octavo.torch"), pytest.importorskip("octavo.jax")
    random = np.random.default_rng(0)
    cu = np.array([0, 2, 5], np.int32)
    q, k, v = (padded(random.standard_normal((5, 2, 8)).astype(np.float32), 3) for _ in "qkv")
    options: dict[str, Any] = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "causal": True}
    want, want_lse = octavo.attention(q, k, v, return_lse=True, **options)

    tensors = [torch.from_numpy(x).requires_grad_() for x in (q, k, v)]
    offsets = torch.from_numpy(cu)
    out, lse = octavo_torch.attention(
        *tensors, cu_seqlens_q=offsets, cu_seqlens_k=offsets, causal=True, return_lse=True
    )
    np.testing.assert_array_equal(out.detach().numpy(), want)
    np.testing.assert_array_equal(lse.detach().numpy(), want_lse)
    out.sum().backward()
    for tensor in tensors:
        assert torch.isfinite(tensor.grad).all() and (tensor.grad[5:] == 0).all()

    def loss(q: Any, k: Any, v: Any) -> Any:
        return octavo_jax.attention(q, k, v, **options)[:5].sum()

    found = jax.jit(lambda *x: octavo_jax.attention(*x, **options, return_lse=True))(q, k, v)
    np.testing.assert_array_equal(found[0], want)
    np.testing.assert_array_equal(found[1], want_lse)
    for gradient, tensor in zip(jax.grad(loss, (0, 1, 2))(q, k, v), tensors, strict=True):
        np.testing.assert_array_equal(gradient, tensor.grad.numpy())
