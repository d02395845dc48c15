"""Caches of codes on a GPU, and their attention against the CPU."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

import octavo
from support import oracle
from support.quantised import Cache

ARRAYS = ("k_pages", "v_pages", "k_scales", "v_scales")
TOLERANCE = {"float16": 2e-3, "bfloat16": 1.6e-2}
PREFILL = {"cu_seqlens_q": np.array([0, 300, 301, 601], np.int32)}
"""Many queries of the first and the last of three sequences."""


def to_gpu(torch: ModuleType, array: NDArray[Any]) -> Any:
    if array.dtype.name in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):
        kind = np.uint16 if array.itemsize == 2 else np.uint8
        tensor = torch.from_numpy(array.view(kind).copy()).cuda()
        return tensor.view(getattr(torch, array.dtype.name))
    return torch.from_numpy(np.ascontiguousarray(array)).cuda()


def to_cpu(torch: ModuleType, tensor: Any) -> bytes:
    return bytes(tensor.contiguous().view(torch.uint8).cpu().numpy().tobytes())


def head_major(tensor: Any) -> Any:
    """The same array in memory that has the heads before the slots of a page."""
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


def on_gpu(torch: ModuleType, cache: Cache, *, is_head_major: bool = False) -> dict[str, Any]:
    arrays = {name: to_gpu(torch, getattr(cache, name)) for name in ARRAYS}
    if is_head_major:
        arrays = {name: head_major(x) for name, x in arrays.items()}
    return arrays | ({"kv_dtype": "int4"} if cache.kind.endswith("int4") else {})


def check_attention(
    torch: Any, cache: Cache, q: NDArray[Any], table: NDArray[Any], lengths: NDArray[Any], **options: Any
) -> None:
    """Against the CPU, in both layouts and twice with the same bits."""
    given = {"page_table": table, "seq_lens": lengths}
    expected, lse = octavo.paged_attention(
        q.astype(np.float32), return_lse=True, **given, **cache.arguments, **options
    )
    arrays = {n: to_gpu(torch, x) if isinstance(x, np.ndarray) else x for n, x in (given | options).items()}
    if "cu_seqlens_q" in options:
        arrays["max_seqlen_q"] = int(np.diff(options["cu_seqlens_q"]).max())
    for is_head_major in (False, True):
        gpu = on_gpu(torch, cache, is_head_major=is_head_major)
        results = [
            octavo.paged_attention(to_gpu(torch, q), return_lse=True, **arrays, **gpu) for _ in range(2)
        ]
        for x, y in zip(*results, strict=True):
            assert to_cpu(torch, x) == to_cpu(torch, y)
        out, out_lse = (x.float().cpu().numpy() for x in results[0])
        size = np.abs(expected).max() if expected.size else 0.0
        tolerance = TOLERANCE[q.dtype.name]
        np.testing.assert_allclose(out, expected, rtol=tolerance, atol=tolerance * max(size, 1e-30))
        # sm80_attention rounds keys to the dtype of the queries.
        np.testing.assert_allclose(out_lse, lse, rtol=tolerance, atol=tolerance)


def queries(num: int, num_heads: int, head_dim: int, dtype: str) -> NDArray[Any]:
    q = np.random.default_rng(num).standard_normal((num, num_heads, head_dim))
    return q.astype(oracle.NUMPY_DTYPES[dtype])


def is_hopper(torch: Any) -> bool:
    return bool(torch.cuda.get_device_capability() == (9, 0))


def kernel_of(q: Any, **arguments: Any) -> str:
    return octavo.explain("paged_attention", q, **arguments).kernel


def explanation(
    torch: Any, cache: Cache, q: NDArray[Any], table: NDArray[Any], lengths: NDArray[Any], **options: Any
) -> octavo.Explanation:
    """How check_attention's calls of packed queries run."""
    given = {"page_table": table, "seq_lens": lengths, **options}
    arrays = {n: to_gpu(torch, x) if isinstance(x, np.ndarray) else x for n, x in given.items()}
    max_seqlen_q = int(np.diff(options["cu_seqlens_q"]).max())
    return octavo.explain(
        "paged_attention", to_gpu(torch, q), max_seqlen_q=max_seqlen_q, **arrays, **on_gpu(torch, cache)
    )
