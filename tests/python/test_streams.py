"""CUDA devices and streams: whose current stream a call runs on, and what waits for what."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import octavo
from array_calls import assert_equal_results, cache, expected, qkv
from libraries import ArrayLibrary, get_library


def cuda_qkv(library: ArrayLibrary) -> list[Any]:
    return [library.array(x, "float16") for x in qkv()]


@pytest.mark.gpu
def test_torch_current_stream() -> None:
    import torch

    library = get_library("torch", "cuda")
    q, k, v = cuda_qkv(library)
    wanted = octavo.attention(q, k, v)
    torch.cuda.synchronize()
    late = torch.zeros_like(k)
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(50_000_000)
        late.copy_(k)
        out = octavo.attention(q, late, v)
        torch.cuda.current_stream().synchronize()
    assert torch.equal(out, wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["address", "torch", "cupy", "protocol"])
def test_stream_argument_waits_for_the_current_stream(kind: str) -> None:
    import cupy
    import torch

    library = get_library("torch", "cuda")
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
    torch.cuda._sleep(50_000_000)
    late.copy_(k)
    assert octavo.attention(q, late, v, out=out, stream=stream) is out
    theirs.synchronize()
    assert torch.equal(out, wanted)


@pytest.mark.gpu
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
            torch.cuda._sleep(50_000_000)
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
            torch.cuda._sleep(50_000_000)
        late[...] = k
        result = octavo.attention(torch_q, late, v)
    torch.cuda.current_stream().synchronize()
    np.testing.assert_array_equal(result.cpu().numpy(), wanted)


@pytest.mark.gpu
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
        torch.cuda._sleep(50_000_000)
        octavo.append_kv(k, v, k_pages, v_pages, table, lengths)
        written = cupy.asnumpy(k_pages[0, 0].copy())
    np.testing.assert_array_equal(written, torch_library.to_numpy(k)[1])


@pytest.mark.gpu
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


@pytest.mark.gpu
@pytest.mark.parametrize("first", ["torch", "cupy", "jax"])
def test_mixed_frameworks_on_a_gpu(first: str) -> None:
    libraries = {name: get_library(name, "cuda") for name in ("torch", "cupy", "jax")}
    others = [name for name in libraries if name != first]
    q, k, v = qkv()
    for dtype in ("float16", "bfloat16"):
        out, lse = octavo.attention(
            libraries[first].array(q, dtype),
            libraries[others[0]].array(k, dtype),
            libraries[others[1]].array(v, dtype),
            prefix_lens=libraries[others[0]].int32([0, 0]),
            return_lse=True,
        )
        assert isinstance(out, libraries[first].array_type)
        assert isinstance(lse, libraries[first].array_type)
        assert_equal_results("cuda", libraries[first].to_float64(out), expected(dtype, q, k, v))


@pytest.mark.gpu
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


@pytest.mark.gpu
def test_cuda_graph_capture_with_new_results() -> None:
    import torch

    library = get_library("torch", "cuda")
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


@pytest.mark.gpu
def test_pinned_torch_tensors_are_the_cpus() -> None:
    import torch

    q, k, v = (torch.from_numpy(x).pin_memory() for x in qkv())
    out = octavo.attention(q, k, v)
    assert out.device.type == "cpu"
    np.testing.assert_array_equal(out.numpy().astype(np.float64), expected("float32", *qkv()))


@pytest.mark.gpu
def test_streams_given_to_producers() -> None:
    """A CUDA array of an unknown framework is asked for on our stream; 1 stands for the legacy default."""
    import torch

    data = get_library("torch", "cuda").array(qkv()[1], "float16")

    class Wrapper:
        streams: list[Any]

        def __init__(self) -> None:
            self.streams = []

        def __dlpack_device__(self) -> tuple[int, int]:
            return data.__dlpack_device__()

        def __dlpack__(self, *, stream: int | None = None, **keywords: Any) -> object:
            self.streams.append(stream)
            return data.__dlpack__(stream=stream, **keywords)

    q, _, v = cuda_qkv(get_library("torch", "cuda"))
    k = Wrapper()
    octavo.attention(q, k, v)
    side = torch.cuda.Stream()
    octavo.attention(q, k, v, stream=side)
    side.synchronize()
    assert k.streams == [1, side.cuda_stream]
