"""Caches of 8-bit codes with one scale for all keys and one for all values."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

import octavo
from support import oracle

CODES: dict[str, np.dtype[Any]] = {
    "int8": np.dtype(np.int8),
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
    "float8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
}
LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}
NEW = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}


def encode(values: NDArray[Any], scale: float, codes: str) -> NDArray[Any]:
    """What a cache of these codes holds of the values: saturated, rounded to nearest even."""
    with np.errstate(invalid="ignore", over="ignore"):
        scaled = values.astype(np.float32) * (np.float32(1.0) / np.float32(scale))
        bounded = np.clip(scaled, -LARGEST[codes], LARGEST[codes])
    return np.rint(bounded).astype(np.int8) if codes == "int8" else bounded.astype(CODES[codes])


def append(rows: NDArray[Any], codes: str, scale: float) -> NDArray[Any]:
    """The codes of [tokens, head_dim], as append_kv writes them."""
    pages = np.zeros((1, len(rows), 2, rows.shape[1]), CODES[codes])
    octavo.append_kv(
        np.stack([rows, -rows], 1),
        np.stack([rows, rows], 1),
        pages,
        other := np.zeros_like(pages),
        np.zeros((1, 1), np.int32),
        np.array([len(rows)], np.int32),
        cu_seqlens=np.array([0, len(rows)], np.int32),
        k_scale=scale,
        v_scale=scale,
    )
    assert np.array_equal(pages[0, :, 0].view(np.uint8), other[0, :, 1].view(np.uint8))
    return pages[0, :, 0]


@pytest.mark.parametrize("new", NEW)
@pytest.mark.parametrize("codes", CODES)
@pytest.mark.parametrize("scale", [1.0, 0.37, 2.0**-6])
def test_codes_of_all_numbers(codes: str, new: str, scale: float) -> None:
    if new == "float32":  # those next to the middle of two codes too
        rng = np.random.default_rng(5)
        bits = rng.integers(0, 2**32, 1 << 15, dtype=np.uint32)
        every = np.concatenate([bits, (bits & np.uint32(0xFFF80000)) | np.uint32(0x00080000)]).view(
            np.float32
        )
    else:
        every = np.arange(1 << 16, dtype=np.uint16).view(NEW[new])
    rows = every[np.isfinite(every.astype(np.float32))]
    rows = np.resize(rows, (-(-len(rows) // 64), 64))
    written, wanted = append(rows, codes, scale), encode(rows, scale, codes)
    different = written.view(np.uint8) != wanted.view(np.uint8)
    assert not different.any(), (rows[different][:5], written[different][:5], wanted[different][:5])


@pytest.mark.parametrize("codes", CODES)
def test_codes_of_no_numbers(codes: str) -> None:
    rows = np.resize(np.array([np.nan, np.inf, -np.inf, 0.0, -0.0], np.float32), (5, 8))
    written = append(rows, codes, 1.0).astype(np.float32)
    infinite = np.isinf(rows)
    assert np.array_equal(written[infinite], np.copysign(LARGEST[codes], rows[infinite]))
    of_nan = written[np.isnan(rows)]
    assert (of_nan == 0).all() if codes == "int8" else np.isnan(of_nan).all()


def every_code(codes: str) -> Iterator[int]:
    finite = np.isfinite(np.arange(256, dtype=np.uint8).view(CODES[codes]).astype(np.float32))
    return itertools.cycle(np.flatnonzero(finite).tolist())


@pytest.mark.parametrize("head_dim", [8, 40, 64, 128, 256])
@pytest.mark.parametrize("codes", CODES)
def test_attention_reads_every_code(codes: str, head_dim: int) -> None:
    rng = np.random.default_rng(head_dim)
    shape = (6, 16, 2, head_dim)
    numbers = every_code(codes)
    k_pages = np.fromiter(numbers, np.uint8, int(np.prod(shape))).reshape(shape).view(CODES[codes])
    v_pages = k_pages[::-1].copy()
    table, lengths = np.array([[4, 1, 0], [2, 5, 3]], np.int32), np.array([48, 35], np.int32)
    k_scale, v_scale = 1.5 / LARGEST[codes], 2.5 / LARGEST[codes]
    q = rng.standard_normal((2, 4, head_dim)).astype(np.float32)
    out = octavo.paged_attention(q, k_pages, v_pages, table, lengths, k_scale=k_scale, v_scale=v_scale)
    k, v = (
        oracle.gather_pages(pages.astype(np.float64), table, lengths.tolist()) for pages in (k_pages, v_pages)
    )
    reference = oracle.attention(
        q, k, v, [1, 1], lengths.tolist(), dtype="float32", k_scale=k_scale, v_scale=v_scale
    )
    reference.check_out(out)


@pytest.mark.parametrize(
    "options",
    [
        {"shared_prefix_len": 128},
        {"num_splits": 7},
        {"batch_invariant": True},
        {"window_left": 33},
        {"softcap": 5.0, "alibi_slopes": np.linspace(0.1, 0.8, 8, dtype=np.float32)},
        {"window_left": 5, "prefix_lens": np.array([3, 9, 20, 0], np.int32)},
        {"cu_seqlens_q": np.array([0, 1, 1, 3, 4], np.int32)},
    ],
    ids=lambda options: "+".join(options),
)
@pytest.mark.parametrize("codes", CODES)
def test_codes_are_the_numbers_that_they_stand_for(codes: str, options: dict[str, Any]) -> None:
    rng = np.random.default_rng(3)
    k_scale, v_scale = 2.0 / LARGEST[codes], 3.0 / LARGEST[codes]
    k, v = rng.standard_normal((2, 40, 16, 2, 72))
    k_pages, v_pages = encode(k, k_scale, codes), encode(v, v_scale, codes)
    table = np.stack([np.r_[0:8, 8 + 4 * b : 12 + 4 * b] for b in range(4)]).astype(np.int32)
    lengths = np.array([190, 140, 150, 129], np.int32)
    q = rng.standard_normal((4, 8, 72)).astype(np.float32)
    of_codes = octavo.paged_attention(
        q, k_pages, v_pages, table, lengths, k_scale=k_scale, v_scale=v_scale, **options
    )
    pages = [x.astype(np.float32) * np.float32(s) for x, s in ((k_pages, k_scale), (v_pages, v_scale))]
    of_numbers = octavo.paged_attention(q, *pages, table, lengths, **options)
    np.testing.assert_allclose(of_codes, of_numbers, rtol=0, atol=2e-5)


@pytest.mark.parametrize("codes", CODES)
def test_what_is_appended_is_attended(codes: str) -> None:
    rng = np.random.default_rng(1)
    k, v = rng.standard_normal((2, 40, 2, 64)).astype(np.float16)
    k_pages, v_pages = (np.zeros((3, 16, 2, 64), CODES[codes]) for _ in range(2))
    table, lengths = np.arange(3, dtype=np.int32)[None], np.array([40], np.int32)
    k_scale, v_scale = (float(np.abs(x).max()) / LARGEST[codes] for x in (k, v))
    scales = {"k_scale": k_scale, "v_scale": v_scale}
    octavo.append_kv(k, v, k_pages, v_pages, table, lengths, cu_seqlens=np.array([0, 40], np.int32), **scales)
    copied = [np.zeros((5, 16, 2, 64), CODES[codes]) for _ in range(2)]
    copies = np.array([[0, 4], [1, 0], [2, 2]], np.int32)
    octavo.copy_pages(k_pages, v_pages, copies, to_k_pages=copied[0], to_v_pages=copied[1])
    q = rng.standard_normal((1, 4, 64)).astype(np.float16)
    out = octavo.paged_attention(q, k_pages, v_pages, table, lengths, **scales)
    again = octavo.paged_attention(q, *copied, np.array([[4, 0, 2]], np.int32), lengths, **scales)
    assert np.array_equal(out, again)
    exact = oracle.attention(q, k, v, [1], [40], dtype="float16").out
    error = np.abs(out - exact).max() / np.abs(exact).max()
    assert error < {"int8": 0.02, "float8_e4m3fn": 0.05, "float8_e5m2": 0.2}[codes]


@pytest.mark.parametrize("code", [0x7F, 0xFF])
@pytest.mark.parametrize("page_size", [1, 5, 16, 256])
@pytest.mark.parametrize("codes", CODES)
def test_unused_slots_may_hold_any_code(codes: str, page_size: int, code: int) -> None:
    """Those of NaN, 0x7f and 0xff in float8_e4m3fn, too."""
    rng = np.random.default_rng(page_size)
    k, v = rng.standard_normal((2, 41, 2, 64)).astype(np.float32)
    q = rng.standard_normal((1, 4, 64)).astype(np.float32)
    num_pages = -(-41 // page_size)
    table, lengths = np.arange(1, num_pages + 1, dtype=np.int32)[None, ::-1].copy(), np.array([41], np.int32)
    scales = {"k_scale": 4.0 / LARGEST[codes], "v_scale": 4.0 / LARGEST[codes]}
    results = []
    for filling in (0, code):
        shape = (num_pages + 2, page_size, 2, 64)
        pages = [np.full(shape, filling, np.uint8).view(CODES[codes]) for _ in range(2)]
        cu_seqlens = np.array([0, 41], np.int32)
        octavo.append_kv(k, v, *pages, table, lengths, cu_seqlens=cu_seqlens, **scales)
        for count in (1, 41):
            queries = {"cu_seqlens_q": np.array([0, count], np.int32)}
            rows = np.repeat(q, count, 0)
            results.append(octavo.paged_attention(rows, *pages, table, lengths, **scales, **queries))
    for of_zeros, spoilt in zip(results[:2], results[2:], strict=True):
        assert np.isfinite(of_zeros).all() and of_zeros.tobytes() == spoilt.tobytes()


@pytest.mark.parametrize("codes", CODES)
def test_torch_and_jax_arrays(codes: str) -> None:
    torch, jax = pytest.importorskip("torch"), pytest.importorskip("jax")
    octavo_torch = importlib.import_module("octavo.torch")
    octavo_jax = importlib.import_module("octavo.jax")
    rng = np.random.default_rng(2)
    rows = rng.standard_normal((12, 8)).astype(np.float32)
    pages = [torch.zeros(1, 12, 1, 8, dtype=getattr(torch, codes)) for _ in range(2)]
    new = torch.from_numpy(rows)[:, None]
    lengths = torch.tensor([12], dtype=torch.int32)
    table, cu_seqlens = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([0, 12], dtype=torch.int32)
    scales = {"k_scale": 0.02, "v_scale": 0.02}
    octavo.append_kv(new, new, *pages, table, lengths, cu_seqlens=cu_seqlens, **scales)
    wanted = encode(rows, 0.02, codes).view(np.uint8)
    assert np.array_equal(pages[0].view(torch.uint8).numpy()[0, :, 0], wanted)
    q = torch.from_numpy(rng.standard_normal((1, 1, 8)).astype(np.float32))
    out = octavo.paged_attention(q, *pages, table, lengths, **scales)
    arrays = [jax.numpy.asarray(wanted.view(CODES[codes])[None, :, None]) for _ in range(2)]
    by_jax = jax.jit(lambda *x: octavo_jax.paged_attention(*x, **scales))(
        jax.numpy.asarray(q.numpy()),
        *arrays,
        jax.numpy.asarray(table.numpy()),
        jax.numpy.asarray(lengths.numpy()),
    )
    assert np.array_equal(out.numpy(), np.asarray(by_jax))
    compiled = torch.compile(
        lambda *x: octavo_torch.paged_attention(*x, **scales), backend="eager", fullgraph=True
    )
    assert torch.equal(out, compiled(q, *pages, table, lengths))


def test_errors() -> None:
    q = np.zeros((1, 2, 64), np.float16)
    pages = np.zeros((2, 16, 2, 64), np.int8)
    table, lengths = np.zeros((1, 1), np.int32), np.array([3], np.int32)
    new = np.zeros((1, 2, 64), np.float16)
    with pytest.raises(ValueError, match=r"paged_attention: k_pages \(int8\) need k_scales or k_scale"):
        octavo.paged_attention(q, pages, pages.copy(), table, lengths)
    with pytest.raises(ValueError, match=r"append_kv: v_pages \(int8\) need v_scales or v_scale"):
        octavo.append_kv(new, new, pages, pages.copy(), table, lengths, k_scale=0.1)
    with pytest.raises(TypeError, match="v_pages must be int8 like k_pages; got float16"):
        octavo.paged_attention(q, pages, pages.astype(np.float16), table, lengths, k_scale=1, v_scale=1)
    with pytest.raises(
        TypeError,
        match="k_pages must be float16 like q, or int8, float8_e4m3fn, float8_e5m2 or uint8; got float32",
    ):
        octavo.paged_attention(q, pages.astype(np.float32), pages, table, lengths)
    with pytest.raises(TypeError, match="q must be float32, float16 or bfloat16; got int8"):
        octavo.paged_attention(q.astype(np.int8), pages, pages.copy(), table, lengths, k_scale=1, v_scale=1)
    codes = pages.view(ml_dtypes.float8_e4m3fn)
    with pytest.raises(TypeError, match="k must be float32, float16 or bfloat16; got float8_e4m3fn"):
        octavo.append_kv(codes[0, :1], codes[0, :1], codes, codes.copy(), table, lengths)


@pytest.mark.parametrize("codes", CODES)
def test_cuda_kernels(codes: str) -> None:
    torch = pytest.importorskip("torch")
    pages = torch.zeros(2, 16, 2, 64, dtype=getattr(torch, codes), device="meta")
    lengths = torch.zeros(1, dtype=torch.int32, device="meta")
    table = lengths[:, None]
    q = torch.zeros(1, 2, 64, dtype=torch.float16, device="meta")
    scales = {"k_scale": 1.0, "v_scale": 1.0}
    copies = torch.zeros(1, 2, dtype=torch.int32, device="meta")
    for operator, arrays, options, kernel in (
        (
            "paged_attention",
            (q, pages, pages, table, lengths),
            scales,
            f"split_kv_decode<{codes}, head_dim 64",
        ),
        ("append_kv", (q, q, pages, pages, table, lengths), scales, "append_codes_kernel"),
        ("copy_pages", (pages, pages, copies), {}, "copy_pages_kernel"),
    ):
        assert octavo.explain(operator, *arrays, device="h100", **options).kernel.startswith(kernel)
