"""octavo.paged_attention with static_past on a GPU, right behind what writes its queries and newest tokens.

In each graph a kernel of many CTAs comes first, so that attention starts while append_kv still waits for it.
Before a replay, the slots of the newest tokens and the queries hold NaN: read too early, they spoil the
result.
"""

from __future__ import annotations

from typing import Any

import pytest

import octavo

pytestmark = pytest.mark.gpu

NUM_KV_HEADS, GROUP_SIZE, PAGE_SIZE = 4, 4, 32
BLOCK_KEYS = 32  # keys of codes that decode kernels read at a time: those before the new ones are read early
# The lengths of sequences, their queries, and options: plans of split-KV and stream-K.
PROBLEMS: dict[str, tuple[list[int], int, dict[str, Any]]] = {
    "one": ([2021], 1, {}),
    "one, short": ([17], 1, {}),
    "one, long": ([30011], 1, {}),
    "few": ([1, 70, 1031, 500], 1, {}),
    "drafts": ([900, 4, 333], 4, {}),
    "many drafts": ([900, 8, 333], 8, {}),
    "many short": ([40 + i for i in range(200)], 1, {}),
    "ragged": ([1 + i * i for i in range(70)], 1, {}),
    "padding": ([0, 0, 900, 0, 33, 0] + [i * i for i in range(60)], 1, {}),
    "splits": ([2021, 77], 1, {"num_splits": 5}),
    "invariant": ([2021, 1, 800], 1, {"batch_invariant": True}),
    "window": ([2021, 1, 800], 1, {"window_left": 100}),
    "window of many": ([1 + i * i for i in range(70)], 1, {"window_left": 100}),
    "ALiBi": ([2021, 1, 800], 1, {"alibi": True}),
}


def page_table(torch: Any, lengths: list[int], page_size: int, in_order: bool) -> tuple[Any, int]:
    """Pages anywhere in a cache or in order, behind one that is not used, and how many there are."""
    columns = -(-max(lengths) // page_size)
    num_pages = 1 + len(lengths) * columns
    order = torch.randperm(num_pages - 1, generator=torch.Generator().manual_seed(1))
    order = 1 + (order.sort().values if in_order else order)
    return order.to("cuda", torch.int32).view(len(lengths), columns), num_pages


@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8", "int4"])
def test_newest_tokens_and_queries_are_waited_for(
    torch: Any, kv_dtype: str, head_dim: int, problem: str
) -> None:
    check_waits(torch, kv_dtype, head_dim, *PROBLEMS[problem])


# Behind whole blocks of older keys, which a CTA reads early, each sequence has one new key.
FIRST_OF_BLOCKS: dict[str, list[int]] = {
    "few": [1 + BLOCK_KEYS * (1 + i) for i in range(3)],
    "few, long": [1 + BLOCK_KEYS * (40 + i) for i in range(3)],
    "many": [1 + BLOCK_KEYS * (1 + i % 12) for i in range(96)],
    "ragged": [1 + BLOCK_KEYS * (1 + i * i // 64) for i in range(70)],
}


@pytest.mark.parametrize("lengths", FIRST_OF_BLOCKS)
@pytest.mark.parametrize("page_size", [1, 4, 20, 24])
@pytest.mark.parametrize("kv_dtype", ["int8", "int4"])
def test_new_scales_share_lines_with_old_ones(
    torch: Any, kv_dtype: str, page_size: int, lengths: str
) -> None:
    """Scales are read through the L1 cache, which must not keep what it had of a line before the wait."""
    check_waits(torch, kv_dtype, 128, FIRST_OF_BLOCKS[lengths], 1, {}, page_size, in_order=True)


def num_shared_lines(cache: Any, table: Any, lengths: list[int], page_size: int) -> int:
    """How many new scales lie in 128 bytes with a scale of the block of keys before."""
    scales, columns = cache.k_scales, table.tolist()
    strides = [stride * scales.element_size() for stride in scales.stride()]

    def line(b: int, head: int, key: int) -> int:
        page = columns[b][key // page_size]
        place = page * strides[0] + key % page_size * strides[1] + head * strides[2]
        return (scales.data_ptr() + place) // 128

    return sum(
        line(b, head, length - 1) in {line(b, head, length - 1 - i) for i in range(1, 1 + BLOCK_KEYS)}
        for b, length in enumerate(lengths)
        for head in range(scales.shape[2])
    )


def check_waits(
    torch: Any,
    kv_dtype: str,
    head_dim: int,
    lengths: list[int],
    num_new: int,
    options: dict[str, Any],
    page_size: int = PAGE_SIZE,
    in_order: bool = False,
) -> None:
    options = dict(options)
    if options.pop("alibi", False):
        options["alibi_slopes"] = torch.linspace(0.01, 0.3, NUM_KV_HEADS * GROUP_SIZE, device="cuda")
    torch.manual_seed(0)
    bf16 = {"device": "cuda", "dtype": torch.bfloat16}
    table, num_pages = page_table(torch, lengths, page_size, in_order)
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    cache = octavo.empty_cache(
        num_pages, page_size, NUM_KV_HEADS, head_dim, kv_dtype, like=torch.empty(1, **bf16)
    )
    assert not in_order or num_shared_lines(cache, table, lengths, page_size) > 0
    tables = {"page_table": table, "seq_lens": seq_lens}
    starts = torch.arange(len(lengths) + 1, dtype=torch.int32, device="cuda")
    new = tables | {"cu_seqlens": starts * num_new}
    past = torch.tensor([0, *lengths], device="cuda").cumsum(0, dtype=torch.int32)
    k, v = torch.randn(2, sum(lengths), NUM_KV_HEADS, head_dim, **bf16)
    octavo.append_kv(k, v, **tables, cu_seqlens=past, **cache.arguments)

    def turn() -> None:
        """Sequences take each other's places."""
        for x in (table, seq_lens):
            x.copy_(x.flip(0))

    total = num_new * len(lengths)
    q = torch.empty(total, NUM_KV_HEADS * GROUP_SIZE, head_dim, **bf16)
    k, v = torch.empty(2, total, NUM_KV_HEADS, head_dim, **bf16)
    given = [torch.empty_like(x) for x in (q, k, v)]
    wide = torch.randn(1024, 32768, **bf16)
    weight, normalised = torch.ones(32768, **bf16), torch.empty_like(wide)
    angles = torch.rand(max(lengths), head_dim // 2, device="cuda")
    rotary = {"rotary_cos": angles.cos(), "rotary_sin": angles.sin()}
    to_attend = tables | {"cu_seqlens_q": starts * num_new, "max_seqlen_q": num_new} | options

    def attended(out: Any, static: bool) -> None:
        octavo.rms_norm(wide, weight, 1e-6, out=normalised)
        to_append = rotary | new | cache.arguments | {"static_tables": static}
        octavo.append_kv(given[1], given[2], q=given[0], q_out=q, **to_append)
        octavo.paged_attention(q, **to_attend, **cache.arguments, out=out, static_past=static)

    def spoil() -> None:
        for x in (q, k, v):
            x.fill_(torch.nan)
        octavo.append_kv(k, v, **new, **cache.arguments)
        torch.cuda.synchronize()

    # The one with promises comes first: behind the other one, what it reads too early could be right.
    outs = [torch.empty_like(q) for _ in range(2)]
    graphs = []
    for out, static in zip(outs, (True, False), strict=True):
        attended(out, static)
        torch.cuda.synchronize()
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            attended(out, static)
    for _ in range(8):
        for x in given:
            x.normal_()
        turn()
        for graph, out in zip(graphs, outs, strict=True):
            out.fill_(torch.nan)
            spoil()
            graph.replay()
            torch.cuda.synchronize()
        assert not outs[1].isnan().any()
        assert torch.equal(*outs)
