"""Seeded calls over all operators, for tools/fingerprint.py: hashes of their results, and their kernels."""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import octavo

Call = tuple[str, Callable[[], tuple[Tensor, ...]]]
DTYPES = (torch.float16, torch.bfloat16)
# A multiple of every tile's head dim, and some between.
HEAD_DIMS = (64, 64, 128, 128, 128, 96, 192, 256, 40, 80, 112, 160)
GROUPS = (1, 1, 2, 4, 4, 5, 7, 8, 8, 16)


class Drawn:
    """Inputs that depend on a seed alone, whatever the machine."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(dtype).cuda()

    def slopes(self, *shape: int) -> Tensor:
        return (torch.rand(shape, generator=self.generator) * 0.1 + 0.01).cuda()

    def lengths(self, count: int, longest: int) -> list[int]:
        kind = self.random.choice(("equal", "ragged", "heavy tail", "with empty ones"))
        if kind == "equal":
            return [longest] * count
        lengths = [self.random.randint(1, longest) for _ in range(count)]
        if kind == "heavy tail":
            lengths = [max(1, length // 16) for length in lengths]
            lengths[self.random.randrange(count)] = longest
        if kind == "with empty ones" and count > 1:
            lengths[self.random.randrange(count)] = 0
        return lengths


def int32(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def cumulative(lengths: list[int]) -> Tensor:
    return int32([sum(lengths[:i]) for i in range(len(lengths) + 1)])


def masks(draw: Drawn, options: dict[str, Any], num_q_heads: int, batch: int, longest: int) -> None:
    """A mask or a bias, in some calls."""
    kind = draw.random.choice(
        ("none",) * 4 + ("window", "softcap", "alibi", "alibi by batch", "prefix", "full")
    )
    if kind == "window":
        options["window_left"] = draw.random.randint(0, longest)
    elif kind == "softcap":
        options["softcap"] = 5.0
    elif kind == "alibi":
        options["alibi_slopes"] = draw.slopes(num_q_heads)
    elif kind == "alibi by batch":
        options["alibi_slopes"] = draw.slopes(batch, num_q_heads)
    elif kind == "prefix":
        options["prefix_lens"] = int32([draw.random.randint(0, longest) for _ in range(batch)])
    options["causal"] = kind != "full"


def paged_attention(seed: int) -> Call:
    draw = Drawn(seed)
    pick = draw.random.choice
    dtype, head_dim, group = pick(DTYPES), pick(HEAD_DIMS), pick(GROUPS)
    num_kv_heads = pick((1, 2, 4, 8))
    page_size = pick((16, 16, 16, 8, 32, 64, 1, 5))
    rows = pick(("decode",) * 5 + ("a few", "a few", "mixed", "mixed", "prefill"))
    batch = pick((1, 1, 2, 3, 5, 8, 20, 33, 64, 150) if rows == "decode" else (1, 2, 5, 17))
    longest = pick((16, 100, 500, 1024, 3000, 9000) if batch < 9 else (16, 100, 500, 1024))
    lengths = draw.lengths(batch, longest)
    if rows == "decode":
        counts = [1] * batch
    elif rows == "a few":
        counts = [min(length, draw.random.randint(1, 4)) for length in lengths]
    elif rows == "mixed":
        counts = [min(length, pick((1, 1, 1, 100, 400))) for length in lengths]
    else:
        counts = [min(length, 700) for length in lengths]
    num_q_heads = num_kv_heads * group
    pages_of = [-(-length // page_size) for length in lengths]
    num_pages, max_pages = sum(pages_of) + 1, max(pages_of) + pick((0, 0, 3, 500))
    ids = torch.randperm(num_pages, generator=draw.generator).to(torch.int32).cuda()
    page_table = torch.zeros(batch, max_pages, dtype=torch.int32, device="cuda")
    used = 0
    for b, count in enumerate(pages_of):
        page_table[b, :count] = ids[used : used + count]
        used += count
    if pick((True, False)):
        shape = (num_pages, num_kv_heads, page_size, head_dim)
        k_pages, v_pages = (draw.normal(*shape, dtype=dtype).transpose(1, 2) for _ in "kv")
    else:
        shape = (num_pages, page_size, num_kv_heads, head_dim)
        k_pages, v_pages = (draw.normal(*shape, dtype=dtype) for _ in "kv")
    q = draw.normal(sum(counts) if rows != "decode" else batch, num_q_heads, head_dim, dtype=dtype)
    options: dict[str, Any] = {}
    masks(draw, options, num_q_heads, batch, longest)
    if rows != "decode":
        options |= {"cu_seqlens_q": cumulative(counts), "max_seqlen_q": max(max(counts), 1)}
    kind = pick(("default",) * 6 + ("batch_invariant",) * 3 + ("num_splits",))
    if kind == "batch_invariant":
        options["batch_invariant"] = True
    elif kind == "num_splits":
        options["num_splits"] = pick((1, 3, 8))
    name = (
        f"paged_attention {seed}: {rows}, {batch} x {longest}, {num_q_heads}/{num_kv_heads} heads, dim "
        f"{head_dim}, page {page_size}, {dtype}, {kind}, {sorted(options)}"
    )
    arrays = (q, k_pages, v_pages, page_table, int32(lengths))
    return name, lambda: octavo.paged_attention(*arrays, return_lse=True, **options)


def shared_prefix(seed: int) -> Call:
    draw = Drawn(seed)
    pick = draw.random.choice
    dtype, head_dim, group, num_kv_heads = (
        pick(DTYPES),
        pick((64, 128, 256)),
        pick((1, 4, 7)),
        pick((1, 2, 8)),
    )
    batch, page_size = pick((2, 16, 64)), 16
    shared, own = 16 * pick((4, 64, 256)), 16 * pick((1, 8))
    shared_pages, own_pages = shared // page_size, own // page_size
    num_pages = shared_pages + batch * own_pages
    ids = torch.randperm(num_pages, generator=draw.generator).to(torch.int32).cuda()
    page_table = torch.stack(
        [
            torch.cat([ids[:shared_pages], ids[shared_pages + b * own_pages :][:own_pages]])
            for b in range(batch)
        ]
    )
    shape = (num_pages, page_size, num_kv_heads, head_dim)
    k_pages, v_pages = (draw.normal(*shape, dtype=dtype) for _ in "kv")
    q = draw.normal(batch, num_kv_heads * group, head_dim, dtype=dtype)
    lengths = int32([shared + draw.random.randint(1, own) for _ in range(batch)])
    name = f"shared_prefix {seed}: {batch} x ({shared} + {own}), group {group}, dim {head_dim}, {dtype}"
    return name, lambda: octavo.paged_attention(
        q, k_pages, v_pages, page_table, lengths, shared_prefix_len=shared, return_lse=True
    )


def attention(seed: int) -> Call:
    draw = Drawn(seed)
    pick = draw.random.choice
    dtype, head_dim, group, num_kv_heads = pick(DTYPES), pick(HEAD_DIMS), pick(GROUPS), pick((1, 2, 4))
    num_q_heads, batch = num_kv_heads * group, pick((1, 2, 4))
    layout = pick(("dense", "dense", "packed", "strided", "odd"))
    options: dict[str, Any] = {}
    if layout == "packed":
        q_lens = [draw.random.randint(0, 600) for _ in range(batch)]
        k_lens = [draw.random.randint(0, 600) for _ in range(batch)]
        q = draw.normal(sum(q_lens), num_q_heads, head_dim, dtype=dtype)
        k, v = (draw.normal(sum(k_lens), num_kv_heads, head_dim, dtype=dtype) for _ in "kv")
        options |= {"cu_seqlens_q": cumulative(q_lens), "cu_seqlens_k": cumulative(k_lens)}
        options |= {"max_seqlen_q": max(*q_lens, 1), "max_seqlen_k": max(*k_lens, 1)}
        longest = 600
    else:
        seqlen_q, longest = pick((1, 17, 128, 512, 900)), pick((1, 130, 512, 1500))
        shape = [(batch, seqlen_q, num_q_heads, head_dim)] + 2 * [(batch, longest, num_kv_heads, head_dim)]
        if layout == "odd":  # rows that do not begin on 16 bytes
            q, k, v = (draw.normal(*s[:-1], s[-1] + 1, dtype=dtype)[..., 1:] for s in shape)
        elif layout == "strided":
            q, k, v = (draw.normal(s[0], s[2], s[1], s[3], dtype=dtype).transpose(1, 2) for s in shape)
        else:
            q, k, v = (draw.normal(*s, dtype=dtype) for s in shape)
    masks(draw, options, num_q_heads, batch, longest)
    if pick((True, False, False, False)):
        options |= {"dropout_p": 0.2, "dropout_seed": seed, "dropout_offset": 3}
    name = f"attention {seed}: {layout}, {tuple(q.shape)} x {tuple(k.shape)}, {dtype}, {sorted(options)}"
    return name, lambda: octavo.attention(q, k, v, return_lse=True, **options)


def append_kv(seed: int) -> Call:
    draw = Drawn(seed)
    pick = draw.random.choice
    dtype, head_dim, heads, page_size = (
        pick((*DTYPES, torch.float32)),
        pick(HEAD_DIMS),
        pick((1, 3, 8)),
        pick((16, 5)),
    )
    batch = pick((1, 9, 40))
    lengths = [draw.random.randint(1, 300) for _ in range(batch)]
    counts = [1] * batch if pick((True, False)) else [draw.random.randint(0, n) for n in lengths]
    pages_of = [-(-length // page_size) for length in lengths]
    page_table = torch.zeros(batch, max(pages_of), dtype=torch.int32, device="cuda")
    used = 0
    for b, count in enumerate(pages_of):
        page_table[b, :count] = torch.arange(used, used + count)
        used += count
    k, v = (draw.normal(sum(counts), heads, head_dim, dtype=dtype) for _ in "kv")
    caches = [draw.normal(used, page_size, heads, head_dim, dtype=dtype) for _ in "kv"]
    options: dict[str, Any] = {} if counts == [1] * batch else {"cu_seqlens": cumulative(counts)}
    if pick((True, False)):
        options |= {"k_scale": 0.5, "v_scale": 3.0}

    def call() -> tuple[Tensor, ...]:
        k_pages, v_pages = (cache.clone() for cache in caches)
        octavo.append_kv(k, v, k_pages, v_pages, page_table, int32(lengths), **options)
        return k_pages, v_pages

    return f"append_kv {seed}: {batch} sequences, dim {head_dim}, {dtype}, {sorted(options)}", call


def copy_pages(seed: int) -> Call:
    draw = Drawn(seed)
    pick = draw.random.choice
    dtype, head_dim, page_size = pick((*DTYPES, torch.float32)), pick(HEAD_DIMS), pick((16, 5))
    caches = [draw.normal(40, page_size, 2, head_dim, dtype=dtype) for _ in "kv"]
    ids = torch.randperm(40, generator=draw.generator)[: 2 * pick((1, 7, 20))]
    copies = ids.view(-1, 2).to(torch.int32).cuda()

    def call() -> tuple[Tensor, ...]:
        k_pages, v_pages = (cache.clone() for cache in caches)
        octavo.copy_pages(k_pages, v_pages, copies)
        return k_pages, v_pages

    return f"copy_pages {seed}: {len(copies)} pages of {page_size}, dim {head_dim}, {dtype}", call


def merge_states(seed: int) -> Call:
    draw = Drawn(seed)
    pick = draw.random.choice
    dtype, head_dim, tokens, heads = pick(DTYPES), pick(HEAD_DIMS), pick((1, 77)), pick((1, 6))
    outs = [draw.normal(tokens, heads, head_dim, dtype=dtype) for _ in "ab"]
    lses = [draw.normal(tokens, heads, dtype=torch.float32) for _ in "ab"]
    lses[0][0] = float("-inf")
    return (
        f"merge_states {seed}: {tokens} x {heads} x {head_dim}, {dtype}",
        lambda: octavo.merge_states(outs[0], lses[0], outs[1], lses[1]),
    )


def draw_calls(count: int) -> Iterator[Call]:
    """Twelve of every twenty calls are of paged_attention, four of attention and one of each other kind."""
    kinds = (*(paged_attention,) * 12, *(attention,) * 4, shared_prefix, append_kv, copy_pages, merge_states)
    for seed in range(count):
        yield kinds[seed % len(kinds)](seed)


def plain_name(kernel: str) -> str:
    """The kernel's name with its template's arguments, without namespaces and parameters."""
    name = re.sub(r"\(anonymous namespace\)::|octavo::cuda::|octavo::|^void ", "", kernel)
    return re.sub(r">?\((?:\w|const|\*|&|,|\s|<|>|::)*\)$", lambda m: ">" if m[0][0] == ">" else "", name)


def kernels_of(call: Callable[[], object]) -> list[str]:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        call()
        torch.cuda.synchronize()
    events = sorted(
        (event for event in profiler.events() or [] if "octavo" in event.name),
        key=lambda event: event.time_range.start,
    )
    return [plain_name(event.name) for event in events]


def digest(results: tuple[Tensor, ...]) -> str:
    sha256 = hashlib.sha256()
    for result in results:
        sha256.update(result.contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return sha256.hexdigest()


def run_calls(count: int) -> dict[str, Any]:
    rows = []
    for name, call in draw_calls(count):
        results = digest(call())
        if digest(call()) != results:
            raise SystemExit(f"two results of one call differ: {name}")
        rows.append({"call": name, "sha256": results, "kernels": kernels_of(call)})
    return {"kind": "calls", "device": torch.cuda.get_device_name(), "calls": rows}
