"""Work of an array's own library on a CUDA stream of the caller."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from importlib import import_module
from typing import Any


def on_stream(library: str, x: Any, address: int | None) -> contextlib.AbstractContextManager[None]:
    """Make the stream at this address the current one of "torch" or "cupy", after the work on `x` so far.

    None leaves the current one.
    """
    if address is None:
        return contextlib.nullcontext()
    return _torch_stream(x, address) if library == "torch" else _cupy_stream(x, address)


@contextlib.contextmanager
def _torch_stream(x: Any, address: int) -> Iterator[None]:
    import torch

    stream = torch.cuda.ExternalStream(address, x.device)
    stream.wait_stream(torch.cuda.current_stream(x.device))
    with torch.cuda.stream(stream):
        yield


@contextlib.contextmanager
def _cupy_stream(x: Any, address: int) -> Iterator[None]:
    cupy = import_module("cupy")
    with x.device:
        stream = cupy.cuda.ExternalStream(address, x.device.id)
        stream.wait_event(cupy.cuda.get_current_stream().record())
        with stream:
            yield
