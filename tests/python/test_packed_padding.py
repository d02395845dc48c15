"""Packed arrays with more rows than tokens: the surplus is padding."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

import octavo
from support.targets import Target, every_target, writable_target

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
    # So do the passes over a shared prefix and behind it.
    table, lens = np.array([[0, 1], [0, 2]], np.int32), np.array([6, 5], np.int32)
    for shared_prefix_len in (0, 4):
        out = np.full_like(q, 7.0)
        octavo.paged_attention(
            q, *pages, table, lens, cu_seqlens_q=[0, 2, 3], shared_prefix_len=shared_prefix_len, out=out
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


def leave_nan_in_free_memory(target: Target, *shape: int) -> None:
    """So that what the library's allocator gives next is not zero by chance."""
    held = [target.nan(*shape) for _ in range(8)]
    del held


@every_target
@pytest.mark.parametrize("surplus", [1, 37, 3000])
@pytest.mark.parametrize("counts", [[], [0, 0], [1] * 9, [3, 0, 1], [130, 0, 70]])
def test_new_results_are_cleared(target: Target, counts: list[int], surplus: int) -> None:
    """The arrays are packed and paged; NaN in the surplus of what is read spoils nothing."""
    library, random = target.library, np.random.default_rng(surplus)
    total, head_dim, page_size = sum(counts), 64, 16
    cu, lens = offsets(counts), np.array(counts, np.int32)
    q, k, v = (padded(random.standard_normal((total, n, head_dim)), surplus) for n in (4, 2, 2))
    packed = {"cu_seqlens_q": library.int32(cu), "cu_seqlens_k": library.int32(cu), "causal": True}
    exact = [target.array(x[:total]) for x in (q, k, v)]
    wide = [target.array(x) for x in (q, k, v)]

    alloc = octavo.PageAllocator(40, page_size)
    seqs = [alloc.create() for _ in counts]
    for seq, n in zip(seqs, counts, strict=True):
        alloc.extend(seq, n + 40 if n else 0)
    table = np.maximum(alloc.page_table(seqs)[0], 0) if seqs else np.zeros((0, 1), np.int32)
    pages = [target.array(random.standard_normal((40, page_size, 2, head_dim))) for _ in "kv"]
    tables = [library.int32(table), library.int32(lens + 40 * (lens > 0))]

    def both(rows: list[Any]) -> list[NDArray[Any]]:
        paged = {"cu_seqlens_q": packed["cu_seqlens_q"], "max_seqlen_q": max(counts, default=0)}
        leave_nan_in_free_memory(target, *rows[0].shape)
        results = [
            *octavo.attention(*rows, **packed, return_lse=True),
            *octavo.paged_attention(rows[0], *pages, *tables, **paged, return_lse=True),
            octavo.paged_attention(rows[0], *pages, *tables, **paged),
        ]
        return [library.to_float64(x) for x in results]

    tolerance = 0.0 if target.on_cpu else 0.02  # more rows may be cut into tiles in another way
    for found, want, fill in zip(both(wide), both(exact), (0, -np.inf, 0, -np.inf, 0), strict=True):
        np.testing.assert_allclose(found[:total], want, rtol=tolerance, atol=tolerance)
        np.testing.assert_array_equal(found[total:], np.full((surplus, *want.shape[1:]), fill))


@writable_target
def test_results_of_the_caller_stay(target: Target) -> None:
    random, library = np.random.default_rng(1), target.library
    q, k = target.array(random.standard_normal((9, 4, 64))), target.array(random.standard_normal((9, 2, 64)))
    cu = library.int32([0, 2, 5])
    out = target.array(np.full((9, 4, 64), 7.0))
    leave_nan_in_free_memory(target, 9, 4, 64)
    lse = octavo.attention(q, k, k, cu_seqlens_q=cu, cu_seqlens_k=cu, out=out, return_lse=True)[1]
    assert (library.to_float64(out)[5:] == 7.0).all() and not (library.to_float64(out)[:5] == 7.0).any()
    assert (library.to_float64(lse)[5:] == -np.inf).all()


@every_target
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("surplus", [(1, 0), (0, 5), (300, 700)])
def test_gradients(target: Target, surplus: tuple[int, int], deterministic: bool) -> None:
    library, random = target.library, np.random.default_rng(2)
    cu_q, cu_k = offsets([70, 0, 33]), offsets([130, 5, 40])
    q, dout = (random.standard_normal((103, 4, 64)) for _ in "qd")
    k, v = (random.standard_normal((175, 2, 64)) for _ in "kv")
    options: dict[str, Any] = {"cu_seqlens_q": library.int32(cu_q), "cu_seqlens_k": library.int32(cu_k)}
    results = []
    for of_q, of_k in ((0, 0), surplus):
        rows = [target.array(padded(x, n)) for x, n in zip((q, k, v), (of_q, of_k, of_k), strict=True)]
        out, lse = octavo.attention(*rows, **options, causal=True, return_lse=True)
        leave_nan_in_free_memory(target, *rows[1].shape)
        leave_nan_in_free_memory(target, *rows[0].shape)
        gradients = octavo.attention_backward(
            target.array(padded(dout, of_q)),
            *rows,
            out,
            lse,
            **options,
            causal=True,
            deterministic=deterministic,
        )
        results.append([library.to_float64(x) for x in gradients])
    for found, want, n in zip(results[1], results[0], (surplus[0], surplus[1], surplus[1]), strict=True):
        np.testing.assert_array_equal(found[len(want) :], 0.0)
        assert len(found) == len(want) + n
        # On a GPU sums are of other parts where there is more room, and without deterministic in any order.
        tolerance = 0.0 if target.on_cpu else 0.02 * np.abs(want).max()
        np.testing.assert_allclose(found[: len(want)], want, rtol=0, atol=tolerance)


@pytest.mark.gpu
def test_a_captured_graph_follows_the_number_of_tokens() -> None:
    torch = pytest.importorskip("torch")
    q, k, v = (torch.randn(64, n, 64, dtype=torch.float16, device="cuda") for n in (4, 2, 2))
    cu = torch.tensor([0, 30, 50], device="cuda")  # int64

    def call() -> Any:
        return octavo.attention(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, causal=True, return_lse=True)

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = call()
    for lengths in ([0, 30, 50], [0, 64, 64], [0, 0, 0], [0, 1, 7]):
        cu.copy_(torch.tensor(lengths))
        out.fill_(torch.nan)
        graph.replay()
        want, want_lse = call()
        assert torch.equal(out, want) and torch.equal(lse, want_lse)
        assert (out[lengths[-1] :] == 0).all() and (lse[lengths[-1] :] == -torch.inf).all()


@pytest.mark.gpu
def test_other_ways_to_a_result_on_a_gpu() -> None:
    """Splits of the keys, a shared prefix, codes with transformed keys."""
    torch = pytest.importorskip("torch")
    q = torch.randn(40, 8, 128, dtype=torch.bfloat16, device="cuda")
    cache = octavo.empty_cache(300, 16, 2, 128, "int8", like=q)
    own = torch.arange(300, dtype=torch.int32, device="cuda").view(3, 100)
    shared = own.clone()
    shared[:, :32] = own[0, :32]
    lens = torch.tensor([1600, 900, 700], dtype=torch.int32, device="cuda")
    k, v = torch.randn(2, 3200, 2, 128, dtype=torch.bfloat16, device="cuda").unbind()
    all_tokens = torch.tensor([0, 1600, 2500, 3200], dtype=torch.int32, device="cuda")
    octavo.append_kv(
        k, v, page_table=own, seq_lens=lens, cu_seqlens=all_tokens, **cache.arguments, rotate_keys=True
    )
    pages = torch.randn(2, 300, 16, 2, 128, dtype=torch.bfloat16, device="cuda")
    for counts in ([1, 1, 1], [20, 1, 0]):
        total = sum(counts)
        cu = torch.tensor(offsets(counts), device="cuda")
        options = {"cu_seqlens_q": cu, "max_seqlen_q": max(counts), "return_lse": True}
        for arguments in (
            {"k_pages": pages[0], "v_pages": pages[1], "page_table": own, "num_splits": 7},
            {"k_pages": pages[0], "v_pages": pages[1], "page_table": shared, "shared_prefix_len": 512},
            {"k_pages": pages[0], "v_pages": pages[1], "page_table": own, "batch_invariant": True},
            {**cache.arguments, "page_table": own, "rotate_keys": True},
        ):
            held = [torch.full_like(q, torch.nan) for _ in range(8)]
            del held
            out, lse = octavo.paged_attention(q, seq_lens=lens, **arguments, **options)
            want = octavo.paged_attention(q[:total], seq_lens=lens, **arguments, **options)
            torch.testing.assert_close(out[:total], want[0])
            torch.testing.assert_close(lse[:total], want[1])
            assert (out[total:] == 0).all() and (lse[total:] == -torch.inf).all()
