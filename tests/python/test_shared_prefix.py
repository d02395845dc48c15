"""paged_attention with shared_prefix_len: the pages that all sequences begin with are read once."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import octavo
from support import calls, oracle, problems
from support.calls import GuardedArray, assert_same_bits
from support.case import Case
from support.libraries import get_library
from support.oracle import Reference
from support.problems import Cache, Inputs
from support.strategies import drawn_cases
from support.targets import Target, cpu_target, every_target, writable_target

# With the prefix in tokens. Sequences of length 0 are padding.
CASES = (
    (Case("decode", (1,) * 5, (65, 80, 81, 200, 64 + 577), num_q_heads=8, num_kv_heads=2, head_dim=128), 64),
    (Case("decode_mha", (1,) * 3, (513, 530, 601)), 512),
    (Case("decode_long_prefix", (1,) * 9, tuple(range(2051, 2060)), num_q_heads=8, num_kv_heads=2), 2048),
    (Case("decode_batch_90", (1,) * 90, tuple(range(321, 411)), num_q_heads=4, num_kv_heads=1), 320),
    (Case("decode_padding", (1,) * 4, (0, 49, 0, 177), num_kv_heads=2), 48),
    (
        Case("decode_sinks", (1,) * 4, (0, 1049, 1025, 1177), num_q_heads=8, num_kv_heads=1, sinks="normal"),
        1024,
    ),
    (
        Case(
            "decode_sinks_extreme", (1,) * 4, (0, 49, 0, 177), num_q_heads=5, sinks="extreme", num_kv_heads=1
        ),
        48,
    ),
    (Case("decode_all_padding", (1,) * 2, (0, 0)), 16),
    (Case("decode_not_causal", (1,) * 3, (33, 40, 300), causal=False), 32),
    (Case("decode_softcap", (1,) * 3, (129, 140, 300), softcap=8.0, q_gain=4.0, num_kv_heads=2), 128),
    (Case("decode_peaked", (1,) * 3, (129, 140, 1500), q_gain=12.0, num_kv_heads=2), 128),
    (Case("decode_prefix_lens", (1,) * 3, (33, 40, 300), prefix_lens=(5, 36, 500), num_kv_heads=2), 32),
    (Case("decode_scales", (1,) * 2, (290, 500), k_scale=0.125, v_scale=3.0, num_kv_heads=2), 272),
    (Case("decode_page_size_1", (1,) * 3, (20, 97, 311), page_size=1, num_kv_heads=2), 19),
    (Case("decode_page_size_17", (1,) * 3, (69, 97, 1003), page_size=17, num_kv_heads=2), 68),
    (Case("decode_page_size_256", (1,) * 3, (1025, 1500, 1030), page_size=256, num_kv_heads=2), 1024),
    (
        Case("decode_head_dim_256", (1,) * 3, (641, 700, 650), num_q_heads=8, num_kv_heads=1, head_dim=256),
        640,
    ),
    (
        Case("decode_head_dim_512", (1,) * 3, (641, 700, 650), num_q_heads=8, num_kv_heads=1, head_dim=512),
        640,
    ),
    (Case("decode_head_dim_40", (1,) * 3, (97, 100, 98), num_q_heads=6, num_kv_heads=2, head_dim=40), 96),
    (Case("decode_192_128", (1,) * 4, (641, 700, 0, 650), head_dim=192, value_dim=128), 640),
    (Case("decode_64_128", (1,) * 9, tuple(range(515, 551, 4)), value_dim=128, sinks="normal"), 512),
    (Case("chunks_128_64", (0, 33, 7, 1), (600, 640, 0, 300), head_dim=128, value_dim=64), 256),
    (Case("decode_group_64", (1,) * 2, (66, 311), num_q_heads=64, num_kv_heads=1), 64),
    (Case("chunks", (64, 1, 1, 37, 5), (640, 577, 600, 1009, 600), num_q_heads=8, num_kv_heads=2), 512),
    (Case("chunks_with_padding", (0, 33, 7, 1), (600, 640, 0, 300), num_kv_heads=2, head_dim=96), 256),
    (Case("chunks_sinks", (0, 33, 7, 1), (600, 640, 0, 300), num_kv_heads=2, sinks="normal"), 256),
    (Case("chunks_not_causal", (33, 0, 1, 70), (181, 65, 333, 134), num_kv_heads=1, causal=False), 64),
    (
        Case(
            "chunks_window_right",
            (33, 0, 1, 70),
            (181, 65, 333, 134),
            num_kv_heads=1,
            causal=False,
            window_right=5,
        ),
        64,
    ),
    (Case("speculative", (4, 4, 3, 1), (260, 77, 71, 700), num_q_heads=8, num_kv_heads=1, head_dim=128), 64),
    (Case("first_chunk", (50, 20), (82, 52), num_q_heads=6, num_kv_heads=2), 32),
    (Case("prefix_lm", (33, 8), (81, 100), prefix_lens=(60, 30), num_kv_heads=2), 48),
)
every_case = pytest.mark.parametrize(("case", "prefix"), CASES, ids=[case.name for case, _ in CASES])


def named(*names: str) -> Any:
    chosen = [(case, prefix) for case, prefix in CASES if case.name in names]
    return pytest.mark.parametrize(("case", "prefix"), chosen, ids=[case.name for case, _ in chosen])


def problem(case: Case, prefix: int, dtype: str) -> tuple[Inputs, Cache, Reference]:
    """Every sequence begins with the keys of one that has queries, in its pages; the others' own are NaN."""
    inputs = problems.make_inputs(case, dtype)
    starts = inputs.cu_seqlens_k[:-1]
    seen = [length * (queries > 0) for length, queries in zip(case.seqlens_k, case.seqlens_q, strict=True)]
    model = int(np.argmax(seen if any(seen) else case.seqlens_k))
    k, v = inputs.k.copy(), inputs.v.copy()
    for start, length in zip(starts, case.seqlens_k, strict=True):
        if length > 0:
            k[start : start + prefix] = inputs.k[starts[model] : starts[model] + prefix]
            v[start : start + prefix] = inputs.v[starts[model] : starts[model] + prefix]
    inputs = dataclasses.replace(inputs, k=k, v=v)

    cache = problems.make_cache(case, inputs)
    num_shared = prefix // case.page_size
    table, k_pages, v_pages = cache.page_table.copy(), cache.k_pages.copy(), cache.v_pages.copy()
    pages = table[model, :num_shared].copy() if case.seqlens_k[model] else np.arange(num_shared)
    for row, length in zip(table, case.seqlens_k, strict=True):
        if length > 0:
            others = np.setdiff1d(row[:num_shared], pages)
            k_pages[others] = np.nan
            v_pages[others] = np.nan
            row[:num_shared] = pages
    table[0, :num_shared] = pages
    cache = dataclasses.replace(cache, page_table=table, k_pages=k_pages, v_pages=v_pages)
    return inputs, cache, problems.make_reference(case, inputs, dtype, paged=True)


@every_target
@every_case
def test_same_attention(target: Target, case: Case, prefix: int) -> None:
    inputs, cache, reference = problem(case, prefix, target.dtype)
    options = {"shared_prefix_len": prefix, "max_seqlen_q": max(case.seqlens_q)}
    reference.check(*calls.paged_attention(target, case, inputs, cache, shared_prefix_len=prefix))
    reference.check(*calls.paged_attention(target, case, inputs, cache, **options))
    reference.check(*calls.paged_attention(target, case, inputs, cache, **options, num_splits=3))
    if case.is_decode:
        reference.check(
            *calls.paged_attention(target, case, inputs, cache, packed=False, shared_prefix_len=prefix)
        )


@st.composite
def drawn_problems(draw: st.DrawFn) -> tuple[Case, int]:
    case = draw(drawn_cases(paged=True, value_dims=True, decode=draw(st.booleans())))
    prefix = case.page_size * draw(st.integers(1, max(1, 600 // case.page_size)))
    padded = draw(st.sets(st.integers(0, case.batch - 1), max_size=case.batch - 1))
    lengths = [
        0 if b in padded else prefix + max(case.seqlens_q[b], case.seqlens_k[b]) for b in range(case.batch)
    ]
    case = dataclasses.replace(case, seqlens_k=tuple(lengths), window_left=-1, attention_chunk=0)
    return dataclasses.replace(case, alibi="", alibi_symmetric=False), prefix


def check_drawn(target: Target, case: Case, prefix: int) -> None:
    """With an epsilon for rounding the parts to 16 bits, and one for rounding their sum."""
    inputs, cache, reference = problem(case, prefix, target.dtype)
    result = calls.paged_attention(target, case, inputs, cache, shared_prefix_len=prefix)
    reference.check(*result, epsilons=1.0 if target.dtype == "float32" else 2.0)


@every_target
@given(drawn=drawn_problems())
def test_any_shape(target: Target, drawn: tuple[Case, int]) -> None:
    check_drawn(target, *drawn)


@every_target
def test_rows_with_a_small_plain_error(target: Target) -> None:
    """The name gives the numbers."""
    options = {"num_q_heads": 1, "num_kv_heads": 1, "head_dim": 8, "page_size": 2, "causal": False}
    case = Case(
        "drawn 0", (50, 8, 22), (81, 72, 187), softmax_scale=0.01, v_scale=0.5, spare_pages=0, **options
    )
    check_drawn(target, case, 2)


@every_target
@named("decode", "chunks")
def test_length_0_is_the_plain_call(target: Target, case: Case, prefix: int) -> None:
    inputs, cache, _ = problem(case, prefix, target.dtype)
    plain = calls.paged_attention(target, case, inputs, cache)
    assert_same_bits(calls.paged_attention(target, case, inputs, cache, shared_prefix_len=0), plain)


@every_target
@named("decode", "decode_page_size_17", "chunks")
def test_permuting_pages_changes_no_bit(target: Target, case: Case, prefix: int) -> None:
    inputs, cache, _ = problem(case, prefix, target.dtype)
    new_ids = np.random.default_rng(0).permutation(len(cache.k_pages)).astype(np.int32)
    valid = (cache.page_table >= 0) & (cache.page_table < len(new_ids))
    moved = Cache(
        cache.k_pages[np.argsort(new_ids)],
        cache.v_pages[np.argsort(new_ids)],
        np.where(valid, new_ids[np.where(valid, cache.page_table, 0)], cache.page_table),
        cache.seq_lens,
    )
    assert_same_bits(
        calls.paged_attention(target, case, inputs, cache, shared_prefix_len=prefix),
        calls.paged_attention(target, case, inputs, moved, shared_prefix_len=prefix),
    )


@writable_target
@named("decode", "decode_padding", "chunks", "decode_head_dim_40", "decode_192_128", "decode_64_128")
def test_out_is_written_and_nothing_around_it(target: Target, case: Case, prefix: int) -> None:
    inputs, cache, reference = problem(case, prefix, target.dtype)
    guarded = GuardedArray(target, *inputs.q.shape[:-1], case.head_dim_v)
    result = calls.paged_attention(target, case, inputs, cache, out=guarded.array, shared_prefix_len=prefix)
    reference.check(*result)
    reference.check_out(target.library.to_float64(guarded.array))
    guarded.check_margins()


@writable_target
@named("decode", "decode_long_prefix", "chunks")
def test_out_may_be_q_itself(target: Target, case: Case, prefix: int) -> None:
    inputs, cache, _ = problem(case, prefix, target.dtype)
    q = target.array(inputs.q)
    arrays = [target.array(cache.k_pages), target.array(cache.v_pages)]
    arrays += [target.int32(cache.page_table), target.int32(cache.seq_lens)]
    options = {**case.masks, "cu_seqlens_q": target.int32(inputs.cu_seqlens_q), "return_lse": True}
    apart = octavo.paged_attention(q, *arrays, **options, shared_prefix_len=prefix)
    in_place = octavo.paged_attention(q, *arrays, **options, shared_prefix_len=prefix, out=q)
    assert in_place[0] is q
    assert_same_bits(calls.read(target, in_place), calls.read(target, apart))


@writable_target
def test_strided_arrays(target: Target) -> None:
    case, prefix = next((case, prefix) for case, prefix in CASES if case.name == "chunks")
    inputs, cache, reference = problem(case, prefix, target.dtype)
    wide = np.full((len(inputs.q), case.num_q_heads + 3, case.head_dim + 8), np.nan)
    wide[:, 1 : case.num_q_heads + 1, : case.head_dim] = inputs.q
    q = target.array(wide)[:, 1 : case.num_q_heads + 1, : case.head_dim]
    out = target.nan(*wide.shape)[:, 1 : case.num_q_heads + 1, : case.head_dim]
    head_major = [
        target.library.swap_axes(target.array(x.swapaxes(1, 2)), 1, 2) for x in (cache.k_pages, cache.v_pages)
    ]
    table = np.full((case.batch, cache.page_table.shape[1] + 5), -1)
    table[:, : cache.page_table.shape[1]] = cache.page_table
    result = octavo.paged_attention(
        q,
        *head_major,
        target.int32(table)[:, : cache.page_table.shape[1]],
        target.int32(cache.seq_lens),
        cu_seqlens_q=target.int32(inputs.cu_seqlens_q),
        shared_prefix_len=prefix,
        return_lse=True,
        out=out,
    )
    reference.check(*calls.read(target, result))


@cpu_target
@named("decode", "chunks")
def test_any_number_of_threads_gives_the_same_bits(target: Target, case: Case, prefix: int) -> None:
    inputs, cache, _ = problem(case, prefix, target.dtype)
    before = octavo.get_num_threads()
    try:
        results = []
        for num_threads in (1, 2, 5):
            octavo.set_num_threads(num_threads)
            results.append(calls.paged_attention(target, case, inputs, cache, shared_prefix_len=prefix))
    finally:
        octavo.set_num_threads(before)
    for result in results[1:]:
        assert_same_bits(result, results[0])


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [False, True], ids=["decode", "packed"])
def test_graph_replay_with_other_lengths(packed: bool) -> None:
    """Lengths behind the prefix, pages and numbers of queries change; rows past the last are left alone."""
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    library, dtype, prefix, total = get_library("torch", "cuda"), "bfloat16", 320, 64
    shape = Case("graph", (16,) * 4, (700,) * 4, num_q_heads=8, num_kv_heads=2, head_dim=128)
    spare_q = oracle.round_to(np.random.default_rng(0).standard_normal((total, 8, 128)), dtype)
    batch, max_pages, num_pages = 4, 46, 180
    q = library.array(spare_q, dtype)
    k_pages, v_pages = (library.array(np.full((num_pages, 16, 2, 128), np.nan), dtype) for _ in "kv")
    table, lengths = library.int32(np.zeros((batch, max_pages))), library.int32([0] * batch)
    starts = library.int32([0] * (batch + 1))
    out = library.array(np.full((total if packed else batch, 8, 128), np.nan), dtype)

    def launch() -> Any:
        options = {"cu_seqlens_q": starts, "max_seqlen_q": 32} if packed else {}
        return octavo.paged_attention(
            q[: len(out)],
            k_pages,
            v_pages,
            table,
            lengths,
            **options,
            out=out,
            return_lse=True,
            shared_prefix_len=prefix,
        )

    table[:, :20] = torch.arange(20)
    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _, lse = launch()
    for seed, (queries, seq_lens) in enumerate(
        [
            ((1, 1, 1, 1), (321, 400, 700, 336)),
            ((1, 1, 1, 1), (700, 0, 330, 650)),
            ((1, 32, 0, 3), (600, 360, 700, 323)),
            ((32, 1, 0, 1), (352, 0, 321, 700)),
        ]
    ):
        if not packed and set(queries) != {1}:
            continue
        case = dataclasses.replace(shape, name=f"graph {seed}", seqlens_q=queries, seqlens_k=seq_lens)
        inputs, cache, reference = problem(case, prefix, dtype)
        used = len(inputs.q)
        q[:used].copy_(library.array(inputs.q, dtype))
        k_pages[: len(cache.k_pages)].copy_(library.array(cache.k_pages, dtype))
        v_pages[: len(cache.v_pages)].copy_(library.array(cache.v_pages, dtype))
        table[:, : cache.page_table.shape[1]].copy_(library.int32(cache.page_table))
        lengths.copy_(library.int32(seq_lens))
        starts.copy_(library.int32(inputs.cu_seqlens_q))
        out.fill_(float("nan"))
        lse.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        reference.check(library.to_float64(out[:used]), library.to_float64(lse[:used]))
        assert out[used:].isnan().all()
        assert (lse[used:] == -math.inf).all()  # a new result, in which padding is cleared


def test_a_sequence_without_queries_may_be_shorter() -> None:
    rng = np.random.default_rng(5)
    k_pages, v_pages = rng.standard_normal((2, 6, 4, 2, 32), dtype=np.float32)
    q = rng.standard_normal((2, 4, 32), dtype=np.float32)
    rows = {
        "page_table": np.array([[3, 0, 1], [5, -1, -1], [3, 0, 2]], np.int32),
        "seq_lens": np.array([9, 3, 10], np.int32),
        "cu_seqlens_q": np.array([0, 1, 1, 2], np.int32),
    }
    once = octavo.paged_attention(q, k_pages, v_pages, **rows, shared_prefix_len=8)
    np.testing.assert_allclose(
        once, octavo.paged_attention(q, k_pages, v_pages, **rows), rtol=2e-5, atol=2e-6
    )
