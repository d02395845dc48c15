"""Inputs of a decode case, and its true result in float64, both as torch tensors."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import torch
from _decode_cases import Case
from torch import Tensor

ROWS_CHECKED = 24  # (sequence, KV head) pairs of a case that are compared with the oracle


@dataclass(frozen=True)
class Inputs:
    q: Tensor  # [batch * query_len, num_q_heads, head_dim]
    k_pages: Tensor  # [num_pages, page_size, num_kv_heads, head_dim]; a transposed view if the case says so
    v_pages: Tensor  # like k_pages
    page_table: Tensor  # int32 [batch, max_pages]; 0 past a sequence's last page
    seq_lens: Tensor  # int32 [batch]
    cu_seqlens_q: Tensor  # int32 [batch + 1]
    alibi_slopes: Tensor | None  # float32 [num_q_heads]
    out: Tensor  # like q


def _random(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    if dtype.itemsize == 1:
        return torch.randn(shape, dtype=torch.bfloat16, device=device).to(dtype)
    return torch.randn(shape, dtype=dtype, device=device)


def alibi_slopes(num_heads: int) -> list[float]:
    """As in the paper (Press et al. 2021, arXiv:2108.12409), for any number of heads."""
    power = 2 ** math.floor(math.log2(num_heads))
    first = [2.0 ** (-8.0 * (i + 1) / power) for i in range(power)]
    return first + [2.0 ** (-4.0 * (2 * i + 1) / power) for i in range(num_heads - power)]


def make_inputs(case: Case, device: str = "cuda") -> Inputs:
    """Random values, each sequence's pages anywhere in the cache."""
    pages_of = [-(-length // case.page_size) for length in case.seq_lens]
    pages = torch.randperm(sum(pages_of), device=device).to(torch.int32)
    page_table = torch.zeros(case.batch, max(pages_of), dtype=torch.int32, device=device)
    for row, ids in zip(page_table, pages.split(pages_of), strict=True):
        row[: len(ids)] = ids
    num_shared = case.shared_prefix // case.page_size
    page_table[:, :num_shared] = page_table[0, :num_shared].clone()
    cache_shape = (len(pages), case.page_size, case.num_kv_heads, case.head_dim)
    if case.head_major:
        cache_shape = (len(pages), case.num_kv_heads, case.page_size, case.head_dim)
    k_pages, v_pages = (_random(cache_shape, getattr(torch, case.cache_dtype), device) for _ in "kv")
    if case.head_major:
        k_pages, v_pages = k_pages.transpose(1, 2), v_pages.transpose(1, 2)
    q_shape = (case.batch * case.query_len, case.num_q_heads, case.head_dim)
    q = _random(q_shape, getattr(torch, case.dtype), device)
    slopes = torch.tensor(alibi_slopes(case.num_q_heads), device=device) if case.alibi else None
    return Inputs(
        q,
        k_pages,
        v_pages,
        page_table,
        torch.tensor(case.seq_lens, dtype=torch.int32, device=device),
        torch.arange(case.batch + 1, dtype=torch.int32, device=device) * case.query_len,
        slopes,
        torch.empty_like(q),
    )


def _attend(case: Case, inputs: Inputs, b: int, kv_head: int) -> Tensor:
    """Float64 result of one sequence's queries in the heads of one KV head: [query_len, group_size, dim]."""
    length, device = case.seq_lens[b], inputs.q.device
    group_size = case.num_q_heads // case.num_kv_heads
    heads = slice(kv_head * group_size, (kv_head + 1) * group_size)
    pages = inputs.page_table[b, : -(-length // case.page_size)].long()
    k, v = (
        cache[pages, :, kv_head].reshape(-1, case.head_dim)[:length].double()
        for cache in (inputs.k_pages, inputs.v_pages)
    )
    q = inputs.q[b * case.query_len : (b + 1) * case.query_len, heads].double()
    scores = torch.einsum("ihd,jd->ihj", q, k) / math.sqrt(case.head_dim)
    if case.softcap > 0:
        scores = case.softcap * torch.tanh(scores / case.softcap)
    q_pos = length - case.query_len + torch.arange(case.query_len, device=device)
    distance = q_pos[:, None, None] - torch.arange(length, device=device)  # [query_len, 1, length]
    if inputs.alibi_slopes is not None:
        scores -= inputs.alibi_slopes[heads].double()[:, None] * distance
    hidden = distance < 0
    if case.window_left >= 0:
        hidden |= distance > case.window_left
    return torch.softmax(scores.masked_fill(hidden, -math.inf), dim=-1) @ v


class Oracle:
    """The true result in some of a case's (sequence, KV head) pairs: all of them where there are few."""

    def __init__(self, case: Case, inputs: Inputs) -> None:
        self.case = case
        pairs = [(b, h) for b in range(case.batch) for h in range(case.num_kv_heads)]
        if len(pairs) > ROWS_CHECKED:
            longest = max(range(case.batch), key=case.seq_lens.__getitem__)
            shortest = min(range(case.batch), key=case.seq_lens.__getitem__)
            ends = {pairs[0], pairs[-1], (longest, 0), (shortest, case.num_kv_heads - 1)}
            chosen = random.Random(0).sample(sorted(set(pairs) - ends), ROWS_CHECKED - len(ends))
            pairs = sorted(ends) + chosen
        self.want = {pair: _attend(case, inputs, *pair) for pair in pairs}

    def max_error(self, out: Tensor) -> float:
        """The largest error, relative to the largest element of its query and head; NaN where out has one."""
        group_size = self.case.num_q_heads // self.case.num_kv_heads
        errors = []
        for (b, h), want in self.want.items():
            rows = slice(b * self.case.query_len, (b + 1) * self.case.query_len)
            got = out[rows, h * group_size : (h + 1) * group_size].double()
            errors.append(((got - want).abs().amax(-1) / want.abs().amax(-1)).max())
        return torch.stack(errors).max().item()
