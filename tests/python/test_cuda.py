"""What only CUDA has: graphs, and caches of more than 2^31 elements."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import numpy as np
import pytest

import octavo
from conftest import gpu_count
from support import oracle, problems
from support.case import Case
from support.generation import DTYPE, Generation
from support.libraries import ArrayLibrary, Torch

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _give_memory_back(torch: Any) -> Generator[None, None, None]:
    yield
    torch.cuda.empty_cache()


def counts_for(generation: Generation, seq_lens: Sequence[int]) -> list[int]:
    return [min(n, 1 + b % 3) if generation.packed else 1 for b, n in enumerate(seq_lens)]


@pytest.mark.parametrize("packed", [False, True], ids=["decode", "packed"])
def test_graph_replay_with_other_lengths(torch: Any, library: ArrayLibrary, packed: bool) -> None:
    generation = Generation(library, (64, 2048, 700, 33), packed)
    first = (1, 5, 700, 0) if not packed else (1, 5, 700, 3)
    generation.fill(first, counts_for(generation, first))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        generation.launch()
    torch.cuda.current_stream().wait_stream(side)
    generation.check()

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        generation.launch()
    for seq_lens in (
        first,
        (64, 2048, 700, 33),
        (17, 1999, 1, 16),
        (1, 1, 1, 1),
        (0, 0, 0, 0),
        (64, 1024, 0, 33),
    ):
        generation.fill(seq_lens, counts_for(generation, seq_lens))
        generation.out.fill_(float("nan"))
        generation.lse.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        generation.check()


@pytest.mark.parametrize("packed", [False, True], ids=["decode", "packed"])
def test_graphs_of_two_gpus_at_once(torch: Any, packed: bool) -> None:
    """Each has a workspace of its own, and the arrays' device counts, not the current one. Two GPUs where
    there are two; one still replays on two streams."""
    devices = [torch.device("cuda", rank % gpu_count()) for rank in range(2)]
    most = ((64, 2048, 700, 33), (1500, 16, 90, 2048))
    generations = [
        Generation(Torch("cuda", device.index), max_lens, packed)
        for device, max_lens in zip(devices, most, strict=True)
    ]
    streams = [torch.cuda.Stream(device) for device in devices]
    graphs = [torch.cuda.CUDAGraph() for _ in devices]

    def fill(*seq_lens: Sequence[int]) -> None:
        for generation, lengths in zip(generations, seq_lens, strict=True):
            generation.fill(lengths, counts_for(generation, lengths))

    def synchronize() -> None:
        for device in devices:
            torch.cuda.synchronize(device)

    fill(*most)
    for generation in generations:
        generation.launch()
        generation.check()
    synchronize()
    for generation, stream, graph in zip(generations, streams, graphs, strict=True):
        with torch.cuda.device(stream.device), torch.cuda.graph(graph, stream=stream):
            generation.launch()
    for seq_lens in (most, ((17, 1999, 3, 16), (3, 3, 3, 2048)), ((64, 3, 700, 33), (1024, 16, 5, 700))):
        fill(*seq_lens)
        for generation in generations:
            generation.out.fill_(float("nan"))
            generation.lse.fill_(float("nan"))
        synchronize()
        for stream, graph in zip(streams, graphs, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        synchronize()
        for generation in generations:
            generation.check()


def test_graph_of_packed_attention(torch: Any, library: ArrayLibrary) -> None:
    """cu_seqlens are read on the device as well."""
    total = 300
    shape = (total, 4, 64)
    random = np.random.default_rng(0)
    q, k, v = (oracle.round_to(random.standard_normal(shape), DTYPE) for _ in "qkv")
    arrays = [library.array(x, DTYPE) for x in (q, k, v)]
    cu_seqlens = library.int32([0, 100, 200, 300])

    def launch() -> Any:
        return octavo.attention(
            *arrays, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, causal=True, return_lse=True
        )

    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = launch()
    for lengths in ((100, 100, 100), (1, 298, 1), (0, 300, 0), (37, 0, 263)):
        cu_seqlens.copy_(library.int32(problems.cumulative(lengths)))
        out.fill_(float("nan"))
        lse.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        reference = oracle.attention(q, k, v, lengths, lengths, dtype=DTYPE, causal=True)
        reference.check(library.to_float64(out), library.to_float64(lse))


def test_queries_that_the_batch_shares(torch: Any, library: ArrayLibrary) -> None:
    """A batch stride of 0."""
    random = np.random.default_rng(0)
    q, k, v = (
        library.array(random.standard_normal((batch, 300, heads, 128)), DTYPE)
        for batch, heads in ((1, 8), (3, 2), (3, 2))
    )
    shared = q.expand(3, -1, -1, -1)
    assert shared.stride(0) == 0
    assert torch.equal(octavo.attention(shared, k, v), octavo.attention(shared.contiguous(), k, v))


@pytest.mark.parametrize("kind", ["", "int8"])
@pytest.mark.parametrize("rotates", [False, True])
def test_tokens_behind_the_page_table_are_not_stored(torch: Any, kind: str, rotates: bool) -> None:
    """They are no valid input, and spoil no other sequence, whose page is the next entry of the table."""
    pages = torch.zeros(2, 2, 16, 1, 64, dtype=torch.int8 if kind else torch.float16, device="cuda")
    options: dict[str, Any] = {"k_scale": 0.5, "v_scale": 0.5} if kind else {}
    if rotates:  # by nothing
        angles = torch.zeros(64, 32, device="cuda")
        options |= {"rotary_cos": angles + 1, "rotary_sin": angles}
    new = torch.ones(2, 1, 64, dtype=torch.float16, device="cuda")
    table, seq_lens = (torch.tensor(x, dtype=torch.int32, device="cuda") for x in ([[1], [0]], [17, 3]))
    octavo.append_kv(new, new, *pages, table, seq_lens, **options)
    expected = torch.zeros_like(pages)
    expected[:, 0, 2] = 2 if kind else 1
    assert torch.equal(pages, expected)


def test_graph_of_copies_and_merges(torch: Any, library: ArrayLibrary) -> None:
    shape = (6, 16, 2, 64)
    k_pages, v_pages = (library.array(np.full(shape, np.nan), DTYPE) for _ in "kv")
    copies = library.int32([[0, 5], [1, 4]])
    lse = library.float32(np.zeros((3, 2)))

    def launch() -> Any:
        octavo.copy_pages(k_pages, v_pages, copies)
        return octavo.merge_states(k_pages[4, :3], lse, v_pages[5, :3], lse)

    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, _ = launch()
    for seed, (a, b) in enumerate(((0, 1), (3, 2))):
        random = np.random.default_rng(seed)
        k, v = (oracle.round_to(random.standard_normal(shape), DTYPE) for _ in "kv")
        k_pages.copy_(library.array(k, DTYPE))
        v_pages.copy_(library.array(v, DTYPE))
        copies.copy_(library.int32([[a, 5], [b, 4]]))
        graph.replay()
        torch.cuda.synchronize()
        expected = oracle.round_to((k[b, :3] + v[a, :3]) / 2, DTYPE)
        np.testing.assert_allclose(library.to_float64(out), expected, rtol=oracle.SPACING[DTYPE])


def test_addresses_past_2_to_the_31(torch: Any, library: ArrayLibrary) -> None:
    """Pages that begin more than 2^31 elements into the cache, for every operator that touches one."""
    case = Case("far_pages", (1, 5), (77, 300), num_q_heads=8, num_kv_heads=8, head_dim=128)
    page_elements = case.page_size * case.num_kv_heads * case.head_dim
    num_pages = 2**31 // page_elements + 64
    shape = (num_pages, case.page_size, case.num_kv_heads, case.head_dim)
    needed_bytes = 2 * 2 * num_pages * page_elements
    free_bytes, _ = torch.cuda.mem_get_info()
    assert free_bytes > 1.1 * needed_bytes, f"needs {needed_bytes / 2**30:.0f} GiB of GPU memory"
    nan = float("nan")
    k_pages, v_pages = (torch.full(shape, nan, dtype=torch.bfloat16, device="cuda") for _ in "kv")

    inputs = problems.make_inputs(case, DTYPE)
    table, num_held = problems.make_page_table(case)
    held = -(-np.array(case.seqlens_k) // case.page_size)
    for row, count in zip(table, held, strict=True):
        row[:count] += num_pages - num_held
    on_device = library.int32(table), library.int32(case.seqlens_k)
    octavo.append_kv(
        library.array(inputs.k, DTYPE),
        library.array(inputs.v, DTYPE),
        k_pages,
        v_pages,
        *on_device,
        cu_seqlens=library.int32(inputs.cu_seqlens_k),
    )

    def check(page_table: Any) -> None:
        for num_splits in (None, 3):
            out, lse = octavo.paged_attention(
                library.array(inputs.q, DTYPE),
                k_pages,
                v_pages,
                page_table,
                on_device[1],
                cu_seqlens_q=library.int32(inputs.cu_seqlens_q),
                num_splits=num_splits,
                return_lse=True,
            )
            problems.make_reference(case, inputs, DTYPE).check(
                library.to_float64(out), library.to_float64(lse)
            )

    check(on_device[0])
    far, near = table[0, 0], 3
    octavo.copy_pages(k_pages, v_pages, library.int32([[far, near]]))
    moved = table.copy()
    moved[0, 0] = near
    check(library.int32(moved))


def test_long_dense_batch_past_2_to_the_31(torch: Any, library: ArrayLibrary) -> None:
    """q, k, v and out of more than 2^31 elements: the last sequence of a large batch."""
    heads, head_dim, seqlen = 8, 128, 64
    batch = 2**31 // (seqlen * heads * head_dim) + 1
    shape = (batch, seqlen, heads, head_dim)
    q = torch.zeros(shape, dtype=torch.bfloat16, device="cuda")
    values = oracle.round_to(np.random.default_rng(0).standard_normal(shape[1:]), DTYPE)
    q[-1] = library.array(values, DTYPE)
    out, lse = octavo.attention(q, q, q, causal=True, return_lse=True)
    reference = oracle.attention(values, values, values, (seqlen,), (seqlen,), dtype=DTYPE, causal=True)
    reference.check(library.to_float64(out[-1]), library.to_float64(lse[-1]))
    assert not out[:-1].any()
