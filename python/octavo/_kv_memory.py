"""Where a KVCache keeps its arrays: in the memory of NumPy, PyTorch or CuPy, and in pinned host memory."""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from octavo._cache import PagedCache


class Staging:
    """int32 numbers that the host writes and the operators read, moved to the device in one transfer."""

    def __init__(self, host: NDArray[np.int32], device: Any, upload: Callable[[int], None] | None) -> None:
        self.host = host
        """[size]: what the host writes, between wait() and send()."""
        self.device = device
        """[size]: the same numbers, for the operators; where there is no device, the same memory."""
        self._upload = upload
        self.is_on_cpu = upload is None

    def send(self, size: int) -> None:
        """Queue the transfer of the first numbers on the current stream."""
        if self._upload is not None:
            self._upload(size)


class Memory(Protocol):
    """What a KVCache needs of an array library."""

    def staging(self, size: int) -> list[Staging]:
        """Sets of that many numbers, zeros at first, to be used in turn; they share one device array."""

    def wait(self, turn: int) -> None:
        """Until the last transfer from this set of numbers is done."""

    def to_device(self, numbers: NDArray[np.int32]) -> Any: ...

    def host_pages(self, cache: PagedCache, num_pages: int) -> PagedCache:
        """The arrays of a cache like that one in host memory, which the device can read and write."""

    def free_bytes(self) -> int: ...


class NumPyMemory:
    """Memory of the CPU alone."""

    def staging(self, size: int) -> list[Staging]:
        numbers = np.zeros(size, np.int32)
        return [Staging(numbers, self.to_device(numbers), None)]

    def wait(self, turn: int) -> None:
        pass  # there is no transfer

    def to_device(self, numbers: NDArray[np.int32]) -> Any:
        return numbers

    def host_pages(self, cache: PagedCache, num_pages: int) -> PagedCache:
        return _like(cache, num_pages, lambda shape, array: np.empty(shape, array.dtype))

    def free_bytes(self) -> int:
        return free_host_bytes()


class TorchMemory:
    """Memory of the CPU, or of a GPU with pinned memory beside it."""

    def __init__(self, device: Any) -> None:
        import torch

        if device.type not in ("cpu", "cuda"):
            raise RuntimeError(f"KVCache: like must be on the CPU or on a CUDA device; it is on {device}")
        self._torch = torch
        self._device = device
        self._is_cuda = device.type == "cuda"
        self._events: list[Any] = []

    def staging(self, size: int) -> list[Staging]:
        torch = self._torch
        if not self._is_cuda:
            numbers = torch.zeros(size, dtype=torch.int32, device=self._device)
            return [Staging(numbers.numpy(), numbers, None)]
        device = torch.zeros(size, dtype=torch.int32, device=self._device)

        def make() -> Staging:
            host = torch.zeros(size, dtype=torch.int32, pin_memory=True)
            event = torch.cuda.Event()
            self._events.append(event)

            def upload(used: int) -> None:
                device[:used].copy_(host[:used], non_blocking=True)
                event.record(torch.cuda.current_stream(self._device))

            return Staging(host.numpy(), device, upload)

        return [make(), make()]

    def wait(self, turn: int) -> None:
        if self._is_cuda:
            self._events[turn].synchronize()

    def to_device(self, numbers: NDArray[np.int32]) -> Any:
        return self._torch.from_numpy(numbers).to(self._device)

    def host_pages(self, cache: PagedCache, num_pages: int) -> PagedCache:
        def make(shape: tuple[int, ...], array: Any) -> Any:
            return self._torch.empty(shape, dtype=array.dtype, pin_memory=self._is_cuda)

        return _like(cache, num_pages, make)

    def free_bytes(self) -> int:
        if not self._is_cuda:
            return free_host_bytes()
        return int(self._torch.cuda.mem_get_info(self._device)[0])


class CuPyMemory:
    """Memory of a GPU, with pinned memory beside it."""

    def __init__(self, device: Any) -> None:
        self._cupy: Any = importlib.import_module("cupy")
        self._cupyx: Any = importlib.import_module("cupyx")
        self._device = device
        self._events: list[Any] = []

    def staging(self, size: int) -> list[Staging]:
        cupy = self._cupy
        with self._device:
            device = cupy.zeros(size, np.int32)

        def make() -> Staging:
            host = self._cupyx.zeros_pinned(size, np.int32)
            with self._device:
                event = cupy.cuda.Event(disable_timing=True)
            self._events.append(event)

            def upload(used: int) -> None:
                with self._device:
                    stream = cupy.cuda.get_current_stream()
                    device[:used].set(host[:used], stream=stream)
                    event.record(stream)

            return Staging(host, device, upload)

        return [make(), make()]

    def wait(self, turn: int) -> None:
        self._events[turn].synchronize()

    def to_device(self, numbers: NDArray[np.int32]) -> Any:
        with self._device:
            return self._cupy.asarray(numbers)

    def host_pages(self, cache: PagedCache, num_pages: int) -> PagedCache:
        return _like(cache, num_pages, lambda shape, array: self._cupyx.empty_pinned(shape, array.dtype))

    def free_bytes(self) -> int:
        with self._device:
            return int(self._cupy.cuda.runtime.memGetInfo()[0])


def memory_of(library: str, like: Any) -> Memory:
    """That of the library and device of the array, which ``empty_cache`` has looked at."""
    if library == "torch":
        return TorchMemory(like.device)
    if library == "cupy":
        return CuPyMemory(like.device)
    return NumPyMemory()


def _like(cache: PagedCache, num_pages: int, make: Callable[[tuple[int, ...], Any], Any]) -> PagedCache:
    arrays = {}
    for name, array in cache.arrays.items():
        _, page_size, num_kv_heads, *row = array.shape
        is_contiguous = array.is_contiguous() if hasattr(array, "is_contiguous") else array.flags.c_contiguous
        if is_contiguous:
            arrays[name] = make((num_pages, page_size, num_kv_heads, *row), array)
            continue
        # In memory the heads come first, as empty_cache has it.
        made = make((num_pages, num_kv_heads, page_size, *row), array)
        order = (0, 2, 1, *range(3, 3 + len(row)))
        arrays[name] = made.permute(order) if hasattr(made, "permute") else made.transpose(order)
    return cache._replace(**arrays)


def free_host_bytes(meminfo: Path = Path("/proc/meminfo")) -> int:
    """What programs may still take: on Linux with the page cache, which gives way to them."""
    with contextlib.suppress(OSError):
        for line in meminfo.read_text().splitlines():
            name, _, rest = line.partition(":")
            if name == "MemAvailable":
                return int(rest.split()[0]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
