"""What only CUDA has: graphs, streams, and caches of more than 2^31 elements."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import cases
import octavo
import oracle
from cases import Case
from libraries import ArrayLibrary, get_library

pytestmark = pytest.mark.gpu

DTYPE = "bfloat16"
SLEEP_CYCLES = 50_000_000  # tens of milliseconds: far longer than a launch


@pytest.fixture(scope="module")
def torch() -> Any:
    return pytest.importorskip("torch", reason="PyTorch is not installed")


@pytest.fixture(autouse=True)
def _give_memory_back(torch: Any) -> Generator[None, None, None]:
    yield
    torch.cuda.empty_cache()


@pytest.fixture(scope="module")
def library() -> ArrayLibrary:
    pytest.importorskip("torch", reason="PyTorch is not installed")
    return get_library("torch", "cuda")


@dataclasses.dataclass
class Generation:
    """One step of generation over buffers whose addresses never change: append, then attend."""

    library: ArrayLibrary
    max_lens: tuple[int, ...]
    packed: bool
    num_q_heads: int = 8
    num_kv_heads: int = 2
    head_dim: int = 128
    page_size: int = 16

    def __post_init__(self) -> None:
        self.num_pages = sum(-(-n // self.page_size) for n in self.max_lens) + 2
        self.max_pages = max(-(-n // self.page_size) for n in self.max_lens)
        batch = len(self.max_lens)
        self.max_queries = 3 * batch if self.packed else batch
        self.step = 0
        pages = (self.num_pages, self.page_size, self.num_kv_heads, self.head_dim)
        self.k_pages, self.v_pages = (self._nan(*pages) for _ in "kv")
        self.q = self._nan(self.max_queries, self.num_q_heads, self.head_dim)
        self.k, self.v = (self._nan(self.max_queries, self.num_kv_heads, self.head_dim) for _ in "kv")
        self.page_table = self.library.int32(np.full((batch, self.max_pages), -1))
        self.seq_lens = self.library.int32(np.zeros(batch))
        self.cu_seqlens = self.library.int32(np.zeros(batch + 1)) if self.packed else None
        self.out: Any = None
        self.lse: Any = None

    def _nan(self, *shape: int) -> Any:
        return self.library.array(np.full(shape, np.nan), DTYPE)

    def launch(self) -> None:
        octavo.append_kv(
            self.k,
            self.v,
            self.k_pages,
            self.v_pages,
            self.page_table,
            self.seq_lens,
            cu_seqlens=self.cu_seqlens,
        )
        self.out, self.lse = octavo.paged_attention(
            self.q,
            self.k_pages,
            self.v_pages,
            self.page_table,
            self.seq_lens,
            cu_seqlens_q=self.cu_seqlens,
            return_lse=True,
        )

    def fill(self, seq_lens: Sequence[int], counts: Sequence[int]) -> None:
        """New lengths, pages and contents, in place. Slots past the lengths, and unused pages, are NaN."""
        self.step += 1
        random = np.random.default_rng(self.step)
        pages = random.permutation(self.num_pages).astype(np.int32)
        table = np.resize(cases.NO_SUCH_PAGE, (len(seq_lens), self.max_pages))
        begin = 0
        for row, length in zip(table, seq_lens, strict=True):
            held = -(-length // self.page_size)
            row[:held] = pages[begin : begin + held]
            begin += held

        def draw(n: int, heads: int) -> NDArray[np.float64]:
            return oracle.round_to(random.standard_normal((n, heads, self.head_dim)), DTYPE)

        total_k, total_q = sum(seq_lens), sum(counts)
        q, k, v = (
            draw(total_q, self.num_q_heads),
            draw(total_k, self.num_kv_heads),
            draw(total_k, self.num_kv_heads),
        )
        empty = np.full((self.num_pages, self.page_size, self.num_kv_heads, self.head_dim), np.nan)
        ends = np.cumsum(seq_lens)
        newest = np.concatenate(
            [
                np.arange(end - (n if length else 0), end)
                for end, n, length in zip(ends, counts, seq_lens, strict=True)
            ]
        ).astype(int)
        # A sequence of length 0 hands in tokens all the same, which nothing may write.
        is_padding = np.repeat(np.array(seq_lens) == 0, counts)
        for buffer, keys, cache in ((self.k, k, self.k_pages), (self.v, v, self.v_pages)):
            stored = keys.copy()
            stored[newest] = np.nan  # append_kv is to write these
            self._set(cache, oracle.append_kv(stored, empty, table, seq_lens, seq_lens))
            new = np.full((self.max_queries, *keys.shape[1:]), np.nan)
            new[:total_q][~is_padding] = keys[newest]
            self._set(buffer, new)
        all_q = np.zeros((self.max_queries, *q.shape[1:]))
        all_q[:total_q] = q
        self._set(self.q, all_q)
        self.page_table.copy_(self.library.int32(table))
        self.seq_lens.copy_(self.library.int32(seq_lens))
        if self.packed:
            self.cu_seqlens.copy_(self.library.int32(cases.cumulative(tuple(counts))))
        self.total_q = total_q
        self.reference = oracle.attention(q, k, v, counts, seq_lens, dtype=DTYPE, causal=True)

    def _set(self, buffer: Any, values: NDArray) -> None:
        buffer.copy_(self.library.array(values, DTYPE))

    def check(self) -> None:
        out, lse = (self.library.to_float64(x)[: self.total_q] for x in (self.out, self.lse))
        self.reference.check(out, lse)


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
        cu_seqlens.copy_(library.int32(cases.cumulative(lengths)))
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


def pinned(torch: Any, values: NDArray) -> Any:
    return get_library("torch", "cpu").array(values, DTYPE).pin_memory()


def move(copies: Any, source: tuple[Any, Any], to: tuple[Any, Any], **options: Any) -> None:
    octavo.copy_pages(*source, copies, to_k_pages=to[0], to_v_pages=to[1], **options)


def test_pages_move_between_gpu_and_host(torch: Any, library: ArrayLibrary) -> None:
    """To pinned memory and back, in one graph, whose copies then change."""
    random = np.random.default_rng(0)
    device_values = oracle.round_to(random.standard_normal((2, 6, 16, 2, 72)), DTYPE)
    host_values = oracle.round_to(random.standard_normal((2, 40, 16, 2, 72)), DTYPE)
    device, back = (tuple(library.array(x, DTYPE) for x in device_values) for _ in range(2))
    host = tuple(pinned(torch, x) for x in host_values)
    to_host, to_device = library.int32([[0, 33], [4, 2]]), library.int32([[33, 5], [7, 1]])

    def launch() -> None:
        move(to_host, device, host)
        move(to_device, host, back)

    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    to_host.copy_(library.int32([[5, 0], [1, 39]]))
    to_device.copy_(library.int32([[39, 0], [12, 2]]))
    graph.replay()
    torch.cuda.synchronize()
    host_values[:, [33, 2, 0, 39]] = device_values[:, [0, 4, 5, 1]]
    expected = device_values.copy()
    expected[:, [5, 1, 0, 2]] = host_values[:, [33, 7, 39, 12]]
    for arrays, values in ((device, device_values), (host, host_values), (back, expected)):
        for array, value in zip(arrays, values, strict=True):
            np.testing.assert_array_equal(library.to_float64(array), value)


def test_a_host_cache_may_be_cupys(torch: Any, library: ArrayLibrary) -> None:
    cupyx = pytest.importorskip("cupyx", reason="CuPy is not installed")
    host = tuple(cupyx.empty_pinned((3, 16, 2, 64), np.float16) for _ in "kv")
    device = tuple(torch.randn(2, 16, 2, 64, device="cuda").half() for _ in "kv")
    move(library.int32([[1, 2]]), device, host)
    torch.cuda.synchronize()
    for array, source in zip(host, device, strict=True):
        np.testing.assert_array_equal(array[2], source[1].cpu().numpy())


def test_copies_between_caches_work_on_the_streams_of_the_gpu(torch: Any, library: ArrayLibrary) -> None:
    """Whichever side is on the host, and whichever comes first."""
    shape = (2, 16, 2, 64)
    host = tuple(torch.zeros(shape, dtype=torch.bfloat16).pin_memory() for _ in "kv")
    device, back = (
        tuple(torch.zeros(shape, dtype=torch.bfloat16, device="cuda") for _ in "kv") for _ in "ab"
    )
    copies = library.int32([[0, 1], [1, 0]])
    torch.cuda.synchronize()
    for options, current in (({}, torch.cuda.Stream()), ({"stream": torch.cuda.Stream()}, None)):
        for array in (*device, *back, *host):
            array.zero_()
        torch.cuda.synchronize()
        with torch.cuda.stream(current or options["stream"]):
            torch.cuda._sleep(SLEEP_CYCLES)
            for number, array in enumerate(device):
                array[0], array[1] = 2 + number, 5 + number
        with torch.cuda.stream(current):
            move(copies, device, host, **options)
            move(copies, host, back, **options)
        torch.cuda.synchronize()
        for got, want in zip(back, device, strict=True):
            assert torch.equal(got, want)
            assert got[0, 0, 0, 0] > 0


def test_copies_between_caches_that_are_refused(torch: Any, library: ArrayLibrary) -> None:
    shape = (2, 16, 2, 64)
    pageable = tuple(torch.zeros(shape) for _ in "kv")
    device = tuple(torch.zeros(shape, device="cuda") for _ in "kv")
    copies = library.int32([[0, 1]])
    with pytest.raises(ValueError, match="copy_pages: to_k_pages must be in pinned host memory"):
        move(copies, device, pageable)
    with pytest.raises(ValueError, match="copy_pages: v_pages must be in pinned host memory"):
        move(copies, (pageable[0].pin_memory(), pageable[1]), device)
    # Pinned in its first part only.
    whole = torch.zeros(2 * pageable[0].numel())
    page_bytes = 4096
    begin = -(-whole.data_ptr() // page_bytes) * page_bytes
    part = whole[(begin - whole.data_ptr()) // 4 :][: pageable[0].numel()].view(shape)
    cudart = torch.cuda.cudart()
    torch.cuda.check_error(cudart.cudaHostRegister(begin, 2 * page_bytes, 0))
    try:
        with pytest.raises(ValueError, match="copy_pages: to_v_pages must be in pinned host memory"):
            move(copies, device, (pageable[0].pin_memory(), part))
    finally:
        torch.cuda.check_error(cudart.cudaHostUnregister(begin))
    for message, arguments in (
        ("all arrays must be on one device; copies is on cpu", (copies.cpu(), device, device)),
        ("all arrays must be on one device; v_pages is on cpu", (copies, (device[0], pageable[1]), device)),
        (
            "copies must be on the device that copies, cpu; it is on cuda:0",
            (copies, pageable, tuple(x.clone() for x in pageable)),
        ),
    ):
        with pytest.raises(RuntimeError, match=f"copy_pages: {message}"):
            move(*arguments)
    assert not any(array.any() for array in (*device, *pageable))


# Work that starts late. An operator on the wrong stream would see the NaN that was there before.

STREAM_CASE = Case("streams", (65,), (65,), num_kv_heads=2)


def stream_problem() -> tuple[list[NDArray], oracle.Reference]:
    inputs = cases.make_inputs(STREAM_CASE, DTYPE)
    arrays = [x[None] for x in (inputs.q, inputs.k, inputs.v)]
    return arrays, cases.make_reference(STREAM_CASE, inputs, DTYPE)


class LateArrays:
    """Torch arrays of NaN that get their numbers on `stream`, behind a long wait."""

    def __init__(self, torch: Any, library: ArrayLibrary) -> None:
        values, self.reference = stream_problem()
        self._torch = torch
        self._library = library
        self._ready = [library.array(x, DTYPE) for x in values]
        self.arrays = [torch.full_like(x, float("nan")) for x in self._ready]
        # The first call loads the kernel, for which CUDA may wait until the device is idle.
        octavo.attention(*self._ready, causal=True, return_lse=True)
        torch.cuda.synchronize()

    def fill(self, stream: Any) -> None:
        with self._torch.cuda.stream(stream):
            self._torch.cuda._sleep(SLEEP_CYCLES)
            for array, ready in zip(self.arrays, self._ready, strict=True):
                array.copy_(ready, non_blocking=True)

    def check(self, result: tuple[Any, Any]) -> None:
        self._torch.cuda.synchronize()
        out, lse = (self._library.to_float64(x)[0] for x in result)
        self.reference.check(out, lse)


def test_current_stream_of_torch(torch: Any, library: ArrayLibrary) -> None:
    late = LateArrays(torch, library)
    stream = torch.cuda.Stream()
    late.fill(stream)
    with torch.cuda.stream(stream):
        result = octavo.attention(*late.arrays, causal=True, return_lse=True)
        assert not stream.query(), "the operator must not wait"
    late.check(result)


class CudaStreamProtocol:
    def __init__(self, address: int) -> None:
        self.address = address

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.address


def as_cupy_stream(torch_stream: Any) -> Any:
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
    return cupy.cuda.ExternalStream(torch_stream.cuda_stream)


@pytest.mark.parametrize(
    "as_argument",
    [lambda s: s, lambda s: s.cuda_stream, as_cupy_stream, lambda s: CudaStreamProtocol(s.cuda_stream)],
    ids=["torch", "int", "cupy", "protocol"],
)
def test_stream_argument(torch: Any, library: ArrayLibrary, as_argument: Callable[[Any], Any]) -> None:
    late = LateArrays(torch, library)
    stream = torch.cuda.Stream()
    late.fill(stream)
    result = octavo.attention(*late.arrays, causal=True, return_lse=True, stream=as_argument(stream))
    late.check(result)


def test_stream_argument_of_every_operator(torch: Any, library: ArrayLibrary) -> None:
    generation = Generation(library, (40, 90), packed=False)
    generation.fill((40, 90), (1, 1))
    torch.cuda.synchronize()
    k, v = generation.k.clone(), generation.v.clone()
    generation.k.fill_(float("nan"))
    generation.v.fill_(float("nan"))
    spare_k, spare_v = (library.array(np.full((2, 16, 2, 128), np.nan), DTYPE) for _ in "kv")
    copies = library.int32([[0, 1]])
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SLEEP_CYCLES)
        generation.k.copy_(k)
        generation.v.copy_(v)
    octavo.append_kv(
        generation.k,
        generation.v,
        generation.k_pages,
        generation.v_pages,
        generation.page_table,
        generation.seq_lens,
        stream=stream,
    )
    out, lse = octavo.paged_attention(
        generation.q,
        generation.k_pages,
        generation.v_pages,
        generation.page_table,
        generation.seq_lens,
        return_lse=True,
        stream=stream,
    )
    merged = octavo.merge_states(out, lse, out, lse, stream=stream)
    with torch.cuda.stream(stream):
        spare_k[0].copy_(generation.k_pages[0])
    octavo.copy_pages(spare_k, spare_v, copies, stream=stream)
    torch.cuda.synchronize()
    generation.out, generation.lse = out, lse
    generation.check()
    np.testing.assert_array_equal(library.to_float64(merged[0]), library.to_float64(out))
    np.testing.assert_array_equal(library.to_float64(spare_k[1]), library.to_float64(generation.k_pages[0]))


def test_current_stream_of_cupy(torch: Any) -> None:
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
    library = get_library("cupy", "cuda")
    values, reference = stream_problem()
    ready = [library.array(x, DTYPE) for x in values]
    late = [library.array(np.full(x.shape, np.nan), DTYPE) for x in values]
    cupy.cuda.runtime.deviceSynchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        with torch.cuda.stream(torch.cuda.ExternalStream(stream.ptr)):
            torch.cuda._sleep(SLEEP_CYCLES)
        for array, source in zip(late, ready, strict=True):
            array[...] = source
        out, lse = octavo.attention(*late, causal=True, return_lse=True)
    cupy.cuda.runtime.deviceSynchronize()
    reference.check(library.to_float64(out)[0], library.to_float64(lse)[0])


def test_inputs_of_jax_are_waited_for() -> None:
    jax = pytest.importorskip("jax", reason="JAX is not installed")
    library = get_library("jax", "cuda")
    values, reference = stream_problem()

    @jax.jit
    def after_long_work(x: Any) -> Any:
        waste = jax.lax.fori_loop(0, 200, lambda _, m: m @ m / 2048.0, jax.numpy.ones((2048, 2048)))
        return x + (waste[0, 0] * 0).astype(x.dtype)

    arrays = [library.array(x, DTYPE) for x in values]
    after_long_work(arrays[0]).block_until_ready()
    out, lse = octavo.attention(*map(after_long_work, arrays), causal=True, return_lse=True)
    twice = out + out  # on JAX's own stream
    reference.check(library.to_float64(out)[0], library.to_float64(lse)[0])
    np.testing.assert_array_equal(library.to_float64(twice), 2 * library.to_float64(out))


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

    inputs = cases.make_inputs(case, DTYPE)
    table, num_held = cases.make_page_table(case)
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
            cases.make_reference(case, inputs, DTYPE).check(library.to_float64(out), library.to_float64(lse))

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
