"""The most memory that attention takes in training on the CPU, beside standard attention's.

    python benchmarks/training_memory.py --json benchmarks/results/training-memory-cpu.jsonl
    python docs/pictures/draw.py                              # draws the rows

Forward and backward of one causal sequence, one head of dim 64, float32, each length in a process of its
own, in which a short sequence came first. The memory is the peak of the resident set during the call, less
what was resident before it: the result, the gradients and all workspace, but neither the inputs nor the mask
that standard attention is given. "eager" is standard attention by PyTorch's products and softmax, which keep
all scores; it stops at 8192 tokens. Needs Linux, whose /proc has the peak.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from _command import Parser
from _report import write_rows

if TYPE_CHECKING:
    from torch import Tensor

HEAD_DIM = 64
LENGTHS = {
    "octavo": tuple(2**i for i in range(10, 17)),
    "eager": tuple(2**i for i in range(10, 14)),
}
MIB = 1 << 20


@dataclass(frozen=True)
class Row:
    attention: str
    length: int
    head_dim: int
    dtype: str
    peak_mib: float  # besides the inputs
    inputs_mib: float  # q, k, v and dout
    threads: int
    versions: dict[str, str]


def octavo_call(q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> Callable[[], tuple[Tensor, ...]]:
    import torch

    import octavo.torch

    def call() -> tuple[Tensor, ...]:
        out = octavo.torch.attention(q, k, v, causal=True)
        return torch.autograd.grad(out, (q, k, v), dout)

    return call


def eager_call(q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> Callable[[], tuple[Tensor, ...]]:
    import torch

    length = q.shape[1]
    unseen = torch.ones((length, length), dtype=torch.bool).triu_(1)

    def call() -> tuple[Tensor, ...]:
        scores = (q.transpose(1, 2) * q.shape[-1] ** -0.5) @ k.permute(0, 2, 3, 1)
        out = scores.masked_fill_(unseen, -math.inf).softmax(-1) @ v.transpose(1, 2)
        del scores
        return torch.autograd.grad(out.transpose(1, 2), (q, k, v), dout)

    return call


CALLS = {"octavo": octavo_call, "eager": eager_call}


def status_mib(field: str) -> float:
    """A size in /proc/self/status, such as VmRSS: the resident set, or VmHWM, its peak."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return int(dict(line.split(":", 1) for line in lines)[field].split()[0]) / 1024


def measure(attention: str, length: int, threads: int) -> Row:
    """In this process, which should have done nothing else."""
    import torch

    import octavo

    torch.set_num_threads(threads)
    octavo.set_num_threads(threads)
    torch.manual_seed(0)
    for n in (64, length):
        q, k, v = (torch.randn(1, n, 1, HEAD_DIM, requires_grad=True) for _ in range(3))
        call = CALLS[attention](q, k, v, torch.randn(1, n, 1, HEAD_DIM))
        if n != length:
            call()  # loads what runs
    before = status_mib("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # proc(5): resets the peak
    gradients = call()
    peak = status_mib("VmHWM") - before
    if not all(x.isfinite().all() for x in gradients):
        raise ArithmeticError(f"{attention}: the gradients of {length} tokens are not finite")
    return Row(
        attention,
        length,
        HEAD_DIM,
        "float32",
        round(peak, 1),
        4 * length * HEAD_DIM * 4 / MIB,
        threads,
        {"octavo": octavo.__version__, "torch": importlib.metadata.version("torch")},
    )


def measure_alone(attention: str, length: int, threads: int) -> dict[str, object]:
    """In a process of its own."""
    command = [sys.executable, __file__, "--threads", str(threads), "--one", attention, str(length)]
    row: dict[str, object] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    return row


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--longest", type=int, default=1 << 16, help="no longer sequences than this")
    parser.add_shared("--json")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)  # the row of this process
    args = parser.parse_args()
    if args.one:
        attention, length = args.one
        print(json.dumps(asdict(measure(attention, int(length), args.threads))))
        return
    rows = []
    print("| attention | tokens | MiB besides the inputs | MiB of the inputs |\n|---|--:|--:|--:|")
    for attention, lengths in LENGTHS.items():
        for length in (n for n in lengths if n <= args.longest):
            row = measure_alone(attention, length, args.threads)
            print(f"| {attention} | {length} | {row['peak_mib']} | {row['inputs_mib']} |", flush=True)
            rows.append(row)
    if args.json:
        write_rows(args.json, rows)


if __name__ == "__main__":
    main()
