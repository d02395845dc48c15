"""Inputs of a case as torch tensors, drawn on the device that computes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import _support_path  # noqa: F401
import torch
from torch import Tensor

from support.case import TOKEN_SCALES, Case


@dataclass(frozen=True)
class Inputs:
    """Queries are packed: [tokens, heads, head_dim]. So are keys and values, unless they lie in pages."""

    q: Tensor
    k: Tensor  # or [num_pages, page_size, num_kv_heads, head_dim]; a transposed view if the case says so
    v: Tensor  # like k
    page_table: Tensor | None  # int32 [batch, max_pages]; 0 past a sequence's last page
    seq_lens: Tensor  # int32 [batch]
    cu_seqlens_q: Tensor  # int32 [batch + 1]
    cu_seqlens_k: Tensor
    alibi_slopes: Tensor | None  # float32 [num_q_heads]
    out: Tensor  # like q
    scales: dict[str, Any] = field(default_factory=dict)  # of codes: k_scales, v_scales, kv_dtype

    def keys_and_values(self, case: Case, b: int, heads: slice = slice(None)) -> tuple[Tensor, Tensor]:
        """Those of one sequence, in some of its heads: [seqlen_k, heads, head_dim]."""
        length = case.seqlens_k[b]
        if self.scales:
            assert self.page_table is not None
            pages = self.page_table[b, : -(-length // case.page_size)].long()
            values = [
                _dequantise(cache[:, :, heads][pages], self.scales[name][:, :, heads][pages])
                for cache, name in ((self.k, "k_scales"), (self.v, "v_scales"))
            ]
            k, v = (x.flatten(0, 1)[:length] for x in values)
            return k, v
        if self.page_table is None:
            begin = int(self.cu_seqlens_k[b])
            return self.k[begin : begin + length, heads], self.v[begin : begin + length, heads]
        pages = self.page_table[b, : -(-length // case.page_size)].long()
        k, v = (cache[:, :, heads][pages].flatten(0, 1)[:length] for cache in (self.k, self.v))
        return k, v


def _dequantise(codes: Tensor, scales: Tensor) -> Tensor:
    """int8 with a scale, or two numbers in a byte with a scale and a minimum, exactly."""
    if codes.dtype == torch.int8:
        return codes.double() * scales.double().unsqueeze(-1)
    numbers = torch.stack([codes & 15, codes >> 4], -1).flatten(-2)
    scale, minimum = scales.double().unsqueeze(-2).unbind(-1)
    return numbers * scale + minimum


def _random_codes(shape: tuple[int, ...], kind: str, device: str) -> tuple[Tensor, Tensor]:
    """The codes of normal values, by the formulas of `append_kv`, and their scales. Products take as much
    power as their operands change: codes and numbers can be compared only where both hold like values.
    """
    values = torch.randn(shape, device=device)
    if kind == "int8":
        scales = values.abs().amax(-1) / 127
        return values.div_(scales.unsqueeze(-1)).round_().to(torch.int8), scales
    least, most = values.aminmax(dim=-1)
    scales = torch.stack([(most - least) / 15, least], -1).to(torch.float16)
    scale, minimum = scales.float().unsqueeze(-2).unbind(-1)
    codes = values.sub_(minimum).div_(scale).round_().clamp_(0, 15).to(torch.uint8)
    even, odd = codes.unflatten(-1, (-1, 2)).unbind(-1)
    return even | odd << 4, scales


def _random(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    if dtype.itemsize == 1:
        return torch.randn(shape, dtype=torch.bfloat16, device=device).to(dtype)
    return torch.randn(shape, dtype=dtype, device=device)


def _cumulative(lengths: Sequence[int], device: str) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32).to(device)


def alibi_slopes(num_heads: int) -> list[float]:
    """As in the paper (Press et al. 2021, arXiv:2108.12409), for any number of heads."""
    power = 2 ** math.floor(math.log2(num_heads))
    first = [2.0 ** (-8.0 * (i + 1) / power) for i in range(power)]
    return first + [2.0 ** (-4.0 * (2 * i + 1) / power) for i in range(num_heads - power)]


def _make_page_table(case: Case, device: str) -> tuple[Tensor, int]:
    """Each sequence's pages lie anywhere in the cache. Returns the table and the number of pages."""
    pages_of = [-(-length // case.page_size) for length in case.seqlens_k]
    pages = torch.randperm(sum(pages_of), device=device).to(torch.int32)
    columns = max(*pages_of, case.room // case.page_size)
    table = torch.zeros(case.batch, columns, dtype=torch.int32, device=device)
    for row, ids in zip(table, pages.split(pages_of), strict=True):
        row[: len(ids)] = ids
    num_shared = case.shared_prefix // case.page_size
    table[:, :num_shared] = table[0, :num_shared].clone()
    return table, len(pages)


def make_inputs(case: Case, device: str = "cuda") -> Inputs:
    """Random values. Of masks and biases it takes those that the rows of the benchmarks have."""
    assert case.prefix_lens is None and case.alibi in ("", "head"), case
    table, kv_shape = None, (sum(case.seqlens_k), case.num_kv_heads, case.head_dim)
    if case.page_size > 0:
        table, num_pages = _make_page_table(case, device)
        page = (case.page_size, case.num_kv_heads)
        kv_shape = (num_pages, *(reversed(page) if case.head_major else page), case.head_dim)
    scales: dict[str, Any] = {}
    if case.kv_dtype in TOKEN_SCALES:
        k_kind = case.kv_dtype.removesuffix("_int4")
        v_kind = "int4" if k_kind != case.kv_dtype else k_kind
        k, k_scales = _random_codes(kv_shape, k_kind, device)
        v, v_scales = _random_codes(kv_shape, v_kind, device)
        if case.head_major:
            k_scales, v_scales = k_scales.transpose(1, 2), v_scales.transpose(1, 2)
        scales = {"k_scales": k_scales, "v_scales": v_scales}
        if v_kind == "int4":
            scales["kv_dtype"] = "int4"
    else:
        v_shape = (*kv_shape[:-1], case.head_dim_v)
        k, v = (_random(x, getattr(torch, case.cache_dtype), device) for x in (kv_shape, v_shape))
    if case.head_major:
        k, v = k.transpose(1, 2), v.transpose(1, 2)
    q_shape = (sum(case.seqlens_q), case.num_q_heads, case.head_dim)
    q = _random(q_shape, getattr(torch, case.dtype), device)
    return Inputs(
        q,
        k,
        v,
        table,
        torch.tensor(case.seqlens_k, dtype=torch.int32, device=device),
        _cumulative(case.seqlens_q, device),
        _cumulative(case.seqlens_k, device),
        torch.tensor(alibi_slopes(case.num_q_heads), device=device) if case.alibi else None,
        q.new_empty((*q_shape[:-1], case.head_dim_v)),
        scales,
    )


def as_dense(case: Case, *arrays: Tensor) -> list[Tensor]:
    """[tokens, heads, head_dim] -> [batch, seqlen, heads, head_dim]."""
    return [x.unflatten(0, (case.batch, -1)) for x in arrays]
