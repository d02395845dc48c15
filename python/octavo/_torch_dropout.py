"""The seeds of dropout in the functions that stand in for other libraries', whose callers pass none."""

from __future__ import annotations

import torch


def draw_seed(function: str, device: torch.device) -> int:
    """Draw from torch's generator of the CPU, so that no GPU has to be waited for.

    torch.manual_seed makes a run repeatable, and a checkpointed layer drops the same weights when it runs
    again.

    Args:
        function: the caller's name, for the error.
        device: where the dropout is.
    """
    is_called = not torch.compiler.is_compiling()  # by Python, and not traced
    if is_called and device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise ValueError(
            f"{function}: dropout must be 0 while a CUDA graph is captured, which would drop the same "
            "weights at every replay"
        )
    return int(torch.randint(2**63 - 1, (), device="cpu"))
