"""Pages copied between caches of the GPU and of pinned host memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import octavo
from support import oracle
from support.libraries import ArrayLibrary, get_library

pytestmark = pytest.mark.gpu

DTYPE = "bfloat16"
SLEEP_CYCLES = 50_000_000  # tens of milliseconds: far longer than a launch


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
            "copies must be on cpu, the device that makes them; it is on cuda:0",
            (copies, pageable, tuple(x.clone() for x in pageable)),
        ),
    ):
        with pytest.raises(RuntimeError, match=f"copy_pages: {message}"):
            move(*arguments)
    assert not any(array.any() for array in (*device, *pageable))
