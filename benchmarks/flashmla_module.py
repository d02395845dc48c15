"""FlashMLA's dense decoding over pages of 64 tokens, one query a sequence, by the interface of its package.

build_flashmla.py makes the package flash_mla of this and a library.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_library = ctypes.CDLL(str(Path(__file__).with_name("libflashmla.so")))
_PART_INTEGERS = 8  # of a CTA's share


@dataclass
class _Schedule:
    parts: Tensor | None = None
    num_splits: Tensor | None = None


def get_mla_metadata(*_: Any) -> tuple[_Schedule, None]:
    """The schedule, which the first call fills."""
    return _Schedule(), None


def _call(function: Any, *arguments: Any) -> None:
    def value(x: Any) -> Any:
        if isinstance(x, Tensor):
            return ctypes.c_void_p(x.data_ptr())
        return ctypes.c_float(x) if isinstance(x, float) else x

    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    if error := function(*map(value, arguments), stream):
        raise RuntimeError(f"FlashMLA: CUDA error {error}")


def flash_mla_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    block_table: Tensor,
    cache_seqlens: Tensor,
    head_dim_v: int,
    tile_scheduler_metadata: _Schedule,
    _num_splits: None = None,
    *,
    softmax_scale: float,
    **_options: Any,
) -> tuple[Tensor, Tensor]:
    batch, _, heads, _ = q.shape
    arrays = q, k_cache, block_table, cache_seqlens
    if (
        q.shape[1] != 1
        or any(x.dtype != torch.bfloat16 for x in arrays[:2])
        or not all(x.is_contiguous() for x in arrays)
    ):
        raise NotImplementedError("this build takes bfloat16, contiguous arrays and one query a sequence")
    schedule = tile_scheduler_metadata
    num_sms = torch.cuda.get_device_properties(q.device).multi_processor_count
    num_parts = max(num_sms // -(-heads // 64), 1)

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=q.device)

    if schedule.parts is None:
        schedule.parts = empty(num_parts, _PART_INTEGERS, dtype=torch.int32)
        schedule.num_splits = empty(batch + 1, dtype=torch.int32)
        _call(_library.flashmla_plan, batch, cache_seqlens, num_parts, schedule.parts, schedule.num_splits)
    out, lse = empty(batch, 1, heads, head_dim_v, dtype=q.dtype), empty(batch, heads, 1)
    partial_out = empty(batch + num_parts, heads, head_dim_v)
    partial_lse = empty(batch + num_parts, heads)
    table_stride = ctypes.c_int64(block_table.stride(0))
    sizes = batch, heads, k_cache.shape[0], table_stride
    plan = num_parts, schedule.parts, schedule.num_splits
    results = out, lse, partial_out, partial_lse
    _call(_library.flashmla_decode, *sizes, *arrays, softmax_scale, *plan, *results)
    return out, lse
