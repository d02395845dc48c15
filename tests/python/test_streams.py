"""CUDA devices and streams: whose current stream a call runs on, and what waits for what."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import octavo
from support import oracle, problems
from support.array_calls import cache, expected, qkv
from support.case import Case
from support.generation import DTYPE, Generation
from support.libraries import ArrayLibrary, get_library
from support.producers import ExchangeTable

pytestmark = pytest.mark.gpu

SLEEP_CYCLES = 50_000_000  # tens of milliseconds: far longer than a launch


def cuda_qkv(library: ArrayLibrary) -> list[Any]:
    return [library.array(x, "float16") for x in qkv()]


@pytest.mark.parametrize("kind", ["address", "torch", "cupy", "protocol"])
def test_stream_argument_waits_for_the_current_stream(torch: Any, library: ArrayLibrary, kind: str) -> None:
    import cupy

    q, k, v = cuda_qkv(library)
    wanted = octavo.attention(q, k, v)
    torch.cuda.synchronize()
    theirs = torch.cuda.Stream()
    stream: Any = {
        "address": theirs.cuda_stream,
        "torch": theirs,
        "cupy": cupy.cuda.ExternalStream(theirs.cuda_stream),
        "protocol": SimpleNamespace(__cuda_stream__=lambda: (0, theirs.cuda_stream)),
    }[kind]
    late = torch.zeros_like(k)
    out = torch.zeros_like(q)
    torch.cuda.synchronize()
    torch.cuda._sleep(SLEEP_CYCLES)
    late.copy_(k)
    assert octavo.attention(q, late, v, out=out, stream=stream) is out
    theirs.synchronize()
    assert torch.equal(out, wanted)


def test_cupy_current_stream() -> None:
    import cupy
    import torch

    library = get_library("cupy", "cuda")
    q, k, v = cuda_qkv(library)
    wanted = library.to_numpy(octavo.attention(q, k, v))
    late = cupy.zeros_like(k)
    cupy.cuda.Device().synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        with torch.cuda.stream(torch.cuda.ExternalStream(stream.ptr)):
            torch.cuda._sleep(SLEEP_CYCLES)
        late[...] = k
        out = octavo.attention(q, late, v)
        stream.synchronize()
    np.testing.assert_array_equal(library.to_numpy(out), wanted)
    # An array of CuPy's current stream beside a call on torch's.
    torch_q = get_library("torch", "cuda").from_numpy(library.to_numpy(q))
    late[...] = 0
    cupy.cuda.Device().synchronize()
    with stream:
        with torch.cuda.stream(torch.cuda.ExternalStream(stream.ptr)):
            torch.cuda._sleep(SLEEP_CYCLES)
        late[...] = k
        result = octavo.attention(torch_q, late, v)
    torch.cuda.current_stream().synchronize()
    np.testing.assert_array_equal(result.cpu().numpy(), wanted)


def test_the_current_stream_of_a_cache_waits_for_what_is_written() -> None:
    import cupy
    import torch

    call = cache()
    torch_library, cupy_library = get_library("torch", "cuda"), get_library("cupy", "cuda")
    k, v = (torch_library.array(x, "float16") for x in (call.k, call.v))
    k_pages, v_pages = (cupy_library.array(x, "float16") for x in (call.k_pages, call.v_pages))
    table, lengths = torch_library.int32(call.page_table), torch_library.int32(call.seq_lens)
    torch.cuda.synchronize()
    cupy.cuda.Device().synchronize()
    with torch.cuda.stream(torch.cuda.Stream()), cupy.cuda.Stream(non_blocking=True):
        torch.cuda._sleep(SLEEP_CYCLES)
        octavo.append_kv(k, v, k_pages, v_pages, table, lengths)
        written = cupy.asnumpy(k_pages[0, 0].copy())
    np.testing.assert_array_equal(written, torch_library.to_numpy(k)[1])


def test_pages_in_host_memory_say_nothing_of_streams() -> None:
    """Those of PyTorch's, copied to pages of CuPy's as an array of PyTorch's on the GPU says."""
    import cupy
    import torch

    k, v = (torch.randn(2, 4, 2, 16).pin_memory() for _ in "kv")
    to = [cupy.zeros((1, 4, 2, 16), cupy.float32) for _ in "kv"]
    copies = torch.tensor([[1, 0]], dtype=torch.int32, device="cuda")
    late = torch.zeros_like(copies)
    octavo.copy_pages(k, v, late, to_k_pages=to[0], to_v_pages=to[1])  # loads the kernel
    torch.cuda.synchronize()
    cupy.cuda.Device().synchronize()
    with torch.cuda.stream(torch.cuda.Stream()), cupy.cuda.Stream(non_blocking=True) as stream:
        torch.cuda._sleep(SLEEP_CYCLES)
        late.copy_(copies)
        octavo.copy_pages(k, v, late, to_k_pages=to[0], to_v_pages=to[1])
        stream.synchronize()
    np.testing.assert_array_equal(cupy.asnumpy(to[0][0]), k[1].numpy())
    np.testing.assert_array_equal(cupy.asnumpy(to[1][0]), v[1].numpy())


class Lender:
    """An array of a library that Octavo does not know, in the memory of a tensor."""

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._tensor.__dlpack_device__()  # type: ignore[no-any-return]

    def __dlpack__(self, **keywords: Any) -> object:
        return self._tensor.__dlpack__(**{**keywords, "stream": -1})


def test_two_unknown_libraries_have_two_streams(torch: Any, library: ArrayLibrary) -> None:
    streams = [torch.cuda.Stream() for _ in range(2)]
    tables = [ExchangeTable(x.cuda_stream) for x in streams]
    first, second = (type("Array", (Lender,), {"__dlpack_c_exchange_api__": x.capsule}) for x in tables)
    q, k, v = cuda_qkv(library)
    wanted = octavo.attention(q, k, v)
    late, out = torch.zeros_like(k), torch.zeros_like(q)
    torch.cuda.synchronize()
    with torch.cuda.stream(streams[1]):
        torch.cuda._sleep(SLEEP_CYCLES)
        late.copy_(k)
    octavo.attention(first(q), second(late), first(v), out=first(out))
    streams[0].synchronize()
    assert torch.equal(out, wanted)


def test_jax_results_are_ready() -> None:
    import jax

    library = get_library("jax", "cuda")
    q, k, v = cuda_qkv(library)
    wanted = library.to_numpy(octavo.attention(q, k, v))
    multiply = jax.jit(lambda x: x @ x)
    big = jax.device_put(np.eye(4096, dtype=np.float16), library.jax_device)
    for _ in range(20):
        big = multiply(big)
        late = k + big[0, 1]  # zero, once all that is done
        out = octavo.attention(q, late, v)
        assert next(iter(out.devices())).platform == "gpu"
        np.testing.assert_array_equal(library.to_numpy(out), wanted)
        del late


@pytest.mark.parametrize("name", ["torch", "cupy", "jax"])
def test_mixed_devices_are_refused(name: str) -> None:
    library = get_library(name, "cuda")
    q, k, v = cuda_qkv(library)
    host = qkv()[1].astype(np.float16)
    message = "attention: all arrays must be on one device; k is on cpu, the first array on cuda:0"
    with pytest.raises(RuntimeError) as error:
        octavo.attention(q, host, v)
    assert str(error.value) == message
    message = "attention: all arrays must be on one device; k is on cuda:0, the first array on cpu"
    with pytest.raises(RuntimeError) as error:
        octavo.attention(qkv()[0].astype(np.float16), k, v)
    assert str(error.value) == message


def test_cuda_graph_capture_with_new_results(torch: Any, library: ArrayLibrary) -> None:
    q, k, v = cuda_qkv(library)
    octavo.attention(q, k, v)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = octavo.attention(q, k, v, return_lse=True)
    q.mul_(0.5)
    graph.replay()
    wanted, wanted_lse = octavo.attention(q, k, v, return_lse=True)
    assert torch.equal(out, wanted)
    assert torch.equal(lse, wanted_lse)


def test_pinned_torch_tensors_are_the_cpus(torch: Any) -> None:
    q, k, v = (torch.from_numpy(x).pin_memory() for x in qkv())
    out = octavo.attention(q, k, v)
    assert out.device.type == "cpu"
    np.testing.assert_array_equal(out.numpy().astype(np.float64), expected("float32", *qkv()))


def test_streams_given_to_producers(torch: Any, library: ArrayLibrary) -> None:
    """A CUDA array of an unknown framework is asked for on our stream; 1 stands for the legacy default."""
    data = library.array(qkv()[1], "float16")

    class Wrapper:
        streams: list[Any]

        def __init__(self) -> None:
            self.streams = []

        def __dlpack_device__(self) -> tuple[int, int]:
            return data.__dlpack_device__()

        def __dlpack__(self, *, stream: int | None = None, **keywords: Any) -> object:
            self.streams.append(stream)
            return data.__dlpack__(stream=stream, **keywords)

    q, _, v = cuda_qkv(library)
    k = Wrapper()
    octavo.attention(q, k, v)
    side = torch.cuda.Stream()
    octavo.attention(q, k, v, stream=side)
    side.synchronize()
    assert k.streams == [1, side.cuda_stream]


# Work that starts late. An operator on the wrong stream would see the NaN that was there before.

STREAM_CASE = Case("streams", (65,), (65,), num_kv_heads=2)


def stream_problem() -> tuple[list[NDArray], oracle.Reference]:
    inputs = problems.make_inputs(STREAM_CASE, DTYPE)
    arrays = [x[None] for x in (inputs.q, inputs.k, inputs.v)]
    return arrays, problems.make_reference(STREAM_CASE, inputs, DTYPE)


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
